"""Scores by which sparse attention chooses keys (DeepSeek-V3.2, arXiv:2512.02556, section 2.1)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn import checks
from pallas_attn.ops.index_scores.call import IndexScoresCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedIndexKeys


def index_scores(
    q: Float[Array, "T Hi Di"],
    weights: Float32[Array, "T Hi"],
    index: PagedIndexKeys,
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    draft_mask: Bool[Array, "T M"] | None = None,
    sm_scale: float | None = None,
    implementation: Implementation = None,
) -> Float32[Array, "T K"]:
    """Scores of each sequence's new tokens over its index keys, up to each token's own: the sum over heads h of
    weights[h] · relu(sm_scale · q[h]·key).

    Decode rows, drafts and chunks are all alike: the new tokens are the last a sequence holds, and their keys must
    already be in the pages. `index_top_k` chooses by these scores without holding all of them.

    Args:
      q: packed index queries of Hi heads; rows of no sequence are padding.
      weights: of each token's heads, of either sign.
      index: of any dtype.
      block_tables: page ids; tokens of PAGE_NONE, and of ids outside the pool, are invisible; entries without a visible
        token may hold anything.
      cu_q_lens: prefix sums of the new tokens. One that falls, such as a 0 at the end, counts as the largest before it.
      kv_lens: tokens each sequence holds, the new ones included.
      draft_mask: True where a token sees the key at its own position - M + 1 + j, which replaces causality among these
        M: drafts of a tree do not see those of other branches. None where all up to its own are seen.
      sm_scale: positive; None for Di**-0.5.
      implementation: None, a name, or names to try in order.

    Returns:
      The scores of all K = P·ps positions, -inf where a key is invisible.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.

    Example:
      >>> spec = pallas_attn.index_cache_spec(num_pages=8, page_size=4, index_dim=6, dtype=jnp.float32)
      >>> index = pallas_attn.PagedIndexKeys.allocate(spec)
      >>> block_tables = jnp.array([[5, 0], [3, -1]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 2, 3], jnp.int32), jnp.array([6, 2], jnp.int32)
      >>> q, weights = jnp.ones((3, 2, 6)), jnp.ones((3, 2))
      >>> pallas_attn.index_scores(q, weights, index, block_tables, cu_q_lens, kv_lens)[:, :5].tolist()
      [[0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -inf, -inf, -inf]]
    """
    block_tables, cu_q_lens, kv_lens = checks.int32(block_tables=block_tables, cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    call = IndexScoresCall(
        q, weights, index, block_tables, cu_q_lens, kv_lens, draft_mask, sm_scale=checks.number("sm_scale", sm_scale)
    )
    call.validate()
    if not (q.shape[0] and kv_lens.shape[0]):
        return jnp.full((q.shape[0], block_tables.shape[1] * index.page_size), -jnp.inf, jnp.float32)
    return dispatch.run(call, implementation)
