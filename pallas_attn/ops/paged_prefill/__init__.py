"""Attention of the new tokens of each sequence to keys and values in pages."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import HeadWindow, Implementation, PagedKV


def paged_prefill(
    q: Float[Array, "T Hq D"],
    kv: PagedKV,
    block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    window: int | HeadWindow | None = None,
    sinks: Float[Array, "Hq"] | None = None,
    soft_cap: float | None = None,
    draft_mask: Bool[Array, "T M"] | None = None,
    q_scale: float | None = None,
    return_lse: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "T Hq Dv"] | tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    """Attention of the new tokens of each sequence to its keys and values in pages.

    Sequence s has kv_lens[s] tokens, and the last cu_q_lens[s + 1] - cu_q_lens[s] of them are new. A new token sees the
    keys up to its own position that are in the window of the head. With `causal=False` it sees all kv_lens[s] keys. The
    pages must already hold the keys and values of the new tokens.

    Args:
      q: packed queries in bfloat16, float16 or float32; with `q_scale` also in the float8 dtype of the cache. Tokens
        before cu_q_lens[0] and from the largest entry of cu_q_lens on are padding.
      kv: the cache; see `PagedKV`.
      block_tables: page ids [S, P], or head-wise tables [S, Hkv, P]. The entries of head-wise tables are page rows: the
        page of one KV head has the row id page·Hkv + head, and every head may use any row. Tokens of PAGE_NONE, and of
        ids outside the pool, are invisible. Entries without a visible token may have any value.
      cu_q_lens: prefix sums of the numbers of new tokens. An entry less than an earlier one, such as a 0 at the end,
        counts as the largest earlier entry.
      kv_lens: tokens of each sequence, including the new ones.
      causal: False for queries that see all keys of their sequence, as in encoders and cross attention. The sequence
        may then have more queries than keys.
      sm_scale: factor of the scores; None for D**-0.5.
      window: number of newest keys that every head sees, a `HeadWindow`, or None for all. A window needs `causal`.
      sinks: float32 logits, one per head, that are added to the softmax denominator, unscaled and uncapped.
      soft_cap: if given, scores become soft_cap · tanh(score / soft_cap).
      draft_mask: replaces causality among the new tokens, for trees of draft tokens or images. Entry [t, j] is True if
        token t sees new token j of its own sequence, which has position kv_len - number of new tokens + j. New tokens
        from the M-th on are invisible. Cached tokens are visible. Windows depend on positions as without a mask.
      q_scale: scale with which the queries are quantised for a float8 cache. q is divided by q_scale (IEEE division),
        clipped to the range of the dtype of the cache and rounded to it (half to even), unless q has this dtype
        already. Scores are multiplied by q_scale. None for unquantised queries.
      return_lse: also return the LSE.
      out_dtype: dtype of the output; None for the dtype of q, which then must not be float8.
      implementation: None, a name, or names to try in order.

    Returns:
      The output, exactly 0 for padding tokens and for queries that see no key. With `return_lse` also the float32
      natural-log LSE of the scaled, capped, masked scores without the sinks; -inf for the same tokens.

    Raises:
      ValueError: arguments do not match each other.
      NotImplementedError: `q_scale` with a cache that is not float8, or the named implementation does not support the
        call.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
      >>> kv = pallas_attn.PagedKV.allocate(spec)
      >>> block_tables = jnp.array([[5, 0, 2], [3, -1, -1]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 2, 5], jnp.int32), jnp.array([9, 3], jnp.int32)  # 2 and 3 new tokens
      >>> pallas_attn.paged_prefill(jnp.ones((5, 2, 8)), kv, block_tables, cu_q_lens, kv_lens).shape
      (5, 2, 8)
    """
    block_tables, cu_q_lens, kv_lens = checks.int32(block_tables=block_tables, cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    call = PagedPrefillCall(
        q,
        kv,
        block_tables,
        cu_q_lens,
        kv_lens,
        window=checks.window(window),
        sinks=sinks,
        causal=checks.flag("causal", causal),
        sm_scale=checks.number("sm_scale", sm_scale),
        soft_cap=checks.number("soft_cap", soft_cap),
        out_dtype=out_dtype,
        draft_mask=draft_mask,
        q_scale=checks.number("q_scale", q_scale),
        return_lse=bool(return_lse),
    )
    call.validate()
    has_tokens = call.num_tokens and call.num_sequences
    out, lse = dispatch.run(call, implementation) if has_tokens else call.without_tokens()
    return (out, lse) if return_lse else out
