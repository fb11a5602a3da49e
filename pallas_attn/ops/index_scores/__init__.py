"""Index scores: the scores by which sparse attention selects keys (DeepSeek-V3.2, arXiv:2512.02556, section 2.1)."""

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
    ratio: int = 1,
    implementation: Implementation = None,
) -> Float32[Array, "T K"]:
    """Compute the score of every index key of a sequence for each of the sequence's new tokens.

    The score of a key for a token is the sum over index heads h of weights[h] · relu(sm_scale · q[h]·key). New tokens
    are the last tokens of their sequence: a decode token, drafts or a prefill chunk. A token sees the keys up to its
    own position, which must already be in the pages. `index_top_k` computes the same scores and selects the highest
    without storing all of them.

    Args:
      q: packed index queries with Hi heads, bfloat16, float16 or float32. Tokens of no sequence are padding.
      weights: weights of each token's index heads, positive or negative.
      index: the index keys, in any dtype of `PagedIndexKeys`.
      block_tables: page ids. Keys are invisible if their entry is PAGE_NONE or outside the pool. Entries without a
        visible key may have any value.
      cu_q_lens: prefix sums of the numbers of new tokens: sequence s has the tokens from cu_q_lens[s] to
        cu_q_lens[s + 1]. An entry below the largest previous entry, such as a 0 at the end, counts as the largest
        previous entry.
      kv_lens: number of tokens of each sequence, including the new tokens.
      draft_mask: row t describes the last M positions up to token t's own position p: element j is True if the token
        sees the key at position p - M + 1 + j. It lets drafts of a tree ignore other branches. None: a token sees all
        keys up to its own.
      sm_scale: factor of the products q·key, positive; None for Di**-0.5.
      ratio: tokens per key. If it exceeds 1, the keys are compressed entries (`compress_and_write`), and a token at
        position p sees entry e if e < (p + 1) // ratio. `cu_q_lens` and `kv_lens` still count tokens, and `draft_mask`
        must be None.
      implementation: None, a name, or names to try in order.

    Returns:
      The scores at all K = P·ps positions of a sequence; -inf for invisible keys and in padding tokens.

    Raises:
      ValueError: the arguments do not fit each other.
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
        q,
        weights,
        index,
        block_tables,
        cu_q_lens,
        kv_lens,
        draft_mask,
        sm_scale=checks.number("sm_scale", sm_scale),
        ratio=checks.size("ratio", ratio),
    )
    call.validate()
    if not (q.shape[0] and kv_lens.shape[0]):
        return jnp.full((q.shape[0], block_tables.shape[1] * index.page_size), -jnp.inf, jnp.float32)
    return dispatch.run(call, implementation)
