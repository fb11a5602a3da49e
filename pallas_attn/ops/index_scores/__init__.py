"""Scores that sparse attention selects keys by (DeepSeek-V3.2, arXiv:2512.02556, section 2.1)."""

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
    """Score the index keys of each sequence for its new tokens, causally.

    The score of a key is the sum over heads h of weights[h] · relu(sm_scale · q[h]·key).

    New tokens are the last tokens of their sequence: a decode token, drafts or a prefill chunk. Their keys must already
    be in the pages. `index_top_k` selects by these scores without storing all of them.

    Args:
      q: packed index queries with Hi heads. Rows that belong to no sequence are padding.
      weights: weights of each token's heads, positive or negative.
      index: of any dtype.
      block_tables: page ids. Tokens in PAGE_NONE, and in pages outside the pool, are invisible. Entries without a
        visible token are ignored.
      cu_q_lens: prefix sums of the numbers of new tokens. An entry below the largest previous entry, such as a 0 at the
        end, counts as the largest previous entry.
      kv_lens: number of tokens of each sequence, including new tokens.
      draft_mask: element j is True if the token sees the key at its position - M + 1 + j. Replaces causality for these
        M positions, so that drafts of a tree do not see other branches. None: a token sees all keys up to its own.
      sm_scale: positive; None for Di**-0.5.
      implementation: None, a name, or names to try in order.

    Returns:
      The scores at all K = P·ps positions, -inf for invisible keys.

    Raises:
      ValueError: the arguments are inconsistent.
      NotImplementedError: the named implementation does not support the call.

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
