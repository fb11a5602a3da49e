"""Select the keys with the highest index scores, without storing all scores (DeepSeek-V3.2, arXiv:2512.02556)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn import checks
from pallas_attn.ops.index_top_k.call import IndexTopKCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedIndexKeys


def index_top_k(
    q: Float[Array, "T Hi Di"],
    weights: Float32[Array, "T Hi"],
    index: PagedIndexKeys,
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    top_k: int,
    draft_mask: Bool[Array, "T M"] | None = None,
    sm_scale: float | None = None,
    ratio: int = 1,
    implementation: Implementation = None,
) -> Int32[Array, "T top_k"]:
    """Return the positions of the `top_k` keys with the highest index scores for each token.

    The result equals `select_top_k` of `index_scores`. The memory for scores is bounded, because scores are computed
    for a limited number of keys and tokens at a time.

    Args:
      q, weights, index, block_tables, cu_q_lens, kv_lens, draft_mask, sm_scale, ratio: arguments of `index_scores`.
      top_k: number of positions per token. May exceed the number of visible keys.
      implementation: None, a name, or names to try in order.

    Returns:
      Positions in ascending order, then -1 if fewer than `top_k` keys are visible. They are indices of entries if
      `ratio` exceeds 1. Tokens of no sequence see no keys.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.index_cache_spec(num_pages=8, page_size=4, index_dim=6, dtype=jnp.float32)
      >>> index = pallas_attn.PagedIndexKeys.allocate(spec)
      >>> block_tables = jnp.array([[5, 0], [3, -1]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 2, 3], jnp.int32), jnp.array([6, 2], jnp.int32)
      >>> q, weights = jnp.ones((3, 2, 6)), jnp.ones((3, 2))
      >>> pallas_attn.index_top_k(q, weights, index, block_tables, cu_q_lens, kv_lens, top_k=3).tolist()
      [[0, 1, 2], [0, 1, 2], [0, 1, -1]]
    """
    block_tables, cu_q_lens, kv_lens = checks.int32(block_tables=block_tables, cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    call = IndexTopKCall(
        q,
        weights,
        index,
        block_tables,
        cu_q_lens,
        kv_lens,
        draft_mask,
        sm_scale=checks.number("sm_scale", sm_scale),
        ratio=checks.size("ratio", ratio),
        top_k=checks.size("top_k", top_k),
    )
    call.validate()
    if not (q.shape[0] and kv_lens.shape[0]):
        return jnp.full((q.shape[0], call.top_k), -1, jnp.int32)
    return dispatch.run(call, implementation)
