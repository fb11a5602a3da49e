"""Pool the key rows of blocks of tokens into compressed entries, and write the entries (DeepSeek-V4's compressor)."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int32

from pallas_attn import checks
from pallas_attn.ops.compress_and_write.call import CompressAndWriteCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedIndexKeys, PagedLatent


def compress_and_write(
    state: PagedLatent,
    entries: PagedLatent | PagedIndexKeys,
    rows: Float32[Array, "T columns"],
    norm: Float[Array, "D"],
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    state_tables: Int32[Array, "S P"],
    entry_tables: Int32[Array, "S Pe"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    ratio: int,
    norm_eps: float = 1e-6,
    implementation: Implementation = None,
) -> tuple[PagedLatent, PagedLatent | PagedIndexKeys]:
    """Write the compressor rows of new tokens, and the compressed entries of the blocks that these tokens complete.

    Block e of a sequence has the tokens ratio·e to ratio·e + ratio - 1. Its last token completes it, and the call
    that contains this token writes entry e. A compressor row has c·D contents and c·D gates; c is explained below.
    An entry is the sum of the contents of its rows, weighted by a softmax over the gates, separately for each
    column:

      c = 1 (HCA): entry e pools the `ratio` rows of block e.
      c = 2 (CSA): entry e pools 2·ratio rows: columns [:D] of the rows of block e - 1, and columns [D:] of the rows of
      block e. Entry 0 pools block 0 only.

    The sum is normalized (RMSNorm), its last R = 2·half columns are rotated in interleaved pairs, and it is cast to the
    dtype of `entries`, or quantised.

    The rows of a block may come from several calls. Rows of earlier calls are read from `state`. An entry needs at
    most the c·ratio - 1 tokens before its last token, so `state` can be a cache with a window of c·ratio tokens.
    Rows and entries are addressed by position. Rejected drafts need no rollback, because the tokens that replace
    them overwrite their rows and entries. A call of T tokens writes at most T // ratio + S entries.

    Args:
      state: compressor rows of each token, 2·c·D columns in float32, from `latent_cache_spec` with rope_dim=0.
      entries: cache of the entries, with D columns: a `PagedLatent` (rope_dim 0 without scales; with scales,
        latent_dim + rope_dim = D) or a `PagedIndexKeys`, in any dtype. A page has page_size entries: entry e of a
        sequence is in the page that `entry_tables` lists at index e // page_size.
      rows: compressor rows of the new tokens: columns [:c·D] are the contents, columns [c·D:] are the gates with the
        position bias. c is 1 or 2.
      norm: weight of the RMSNorm, in bfloat16, float16 or float32.
      cos, sin: cosines and sines for the first position of each token's block, p - p % ratio for a token at position p.
        Only the angles of tokens that complete a block are used.
      state_tables: page ids of `state`. Rows on absent pages are not written, and count as missing.
      entry_tables: page ids of `entries`. Entries on absent pages or past the table are not written.
      cu_q_lens: prefix sums of the new tokens.
      kv_lens: tokens per sequence, including the new tokens.
      ratio: tokens per block.
      norm_eps: epsilon of the RMSNorm.
      implementation: None, a name, or names to try in order.

    Returns:
      `state` and `entries` with the rows and entries written, in place if they are donated. All other elements are
      unchanged. The softmax leaves out missing rows and rows before position 0.

    Raises:
      ValueError: the arguments do not fit each other.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(num_pages=4, page_size=4, latent_dim=8, rope_dim=0, dtype=jnp.float32)
      >>> state = pallas_attn.PagedLatent.allocate(spec)
      >>> spec = pallas_attn.latent_cache_spec(num_pages=4, page_size=2, latent_dim=4, rope_dim=0, dtype=jnp.float32)
      >>> entries = pallas_attn.PagedLatent.allocate(spec)
      >>> contents = jnp.broadcast_to(jnp.array([3.0, 1.0, -3.0, 1.0]), (5, 4))
      >>> rows = jnp.concatenate([contents, jnp.zeros((5, 4))], axis=1)  # equal gates: the mean of a block's rows
      >>> state, entries = pallas_attn.compress_and_write(  # 5 tokens complete 2 blocks of 2 tokens
      ...     state, entries, rows, jnp.ones(4), jnp.ones((5, 1)), jnp.zeros((5, 1)), jnp.array([[2, 0]], jnp.int32),
      ...     jnp.array([[3]], jnp.int32), jnp.array([0, 5], jnp.int32), jnp.array([5], jnp.int32), ratio=2
      ... )
      >>> [round(x, 2) for x in entries.pages[3, 1].tolist()]
      [1.34, 0.45, -1.34, 0.45]
    """
    state_tables, entry_tables, cu_q_lens, kv_lens = checks.int32(
        state_tables=state_tables, entry_tables=entry_tables, cu_q_lens=cu_q_lens, kv_lens=kv_lens
    )
    call = CompressAndWriteCall(
        state,
        entries,
        rows,
        norm,
        cos,
        sin,
        state_tables,
        entry_tables,
        cu_q_lens,
        kv_lens,
        ratio=checks.size("ratio", ratio),
        norm_eps=checks.required_number("norm_eps", norm_eps),
    )
    call.validate()
    if not (rows.shape[0] and kv_lens.shape[0]):
        return state, entries
    return dispatch.run(call, implementation)
