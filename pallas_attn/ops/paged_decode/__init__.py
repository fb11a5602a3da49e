"""Decode attention: the newest query tokens of each sequence over its paged K/V cache."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.paged_decode.call import DecodeOutput, PagedDecodeCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import DecodePlan, HeadWindow, Implementation, PagedKV


def paged_decode(
    q: Float[Array, "B Q Hq D"],
    kv: PagedKV,
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None = None,
    sm_scale: float | None = None,
    window: int | HeadWindow | None = None,
    sinks: Float[Array, "Hq"] | None = None,
    soft_cap: float | None = None,
    draft_mask: Bool[Array, "B Q Q"] | None = None,
    q_scale: Float[Array, "Hq"] | Float[Array, "B Q Hq"] | float | None = None,
    plan: DecodePlan | None = None,
    out: Float[Array, "T Hq Dv"] | None = None,
    return_lse: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> DecodeOutput | tuple[DecodeOutput, Float[Array, "B Q Hq"]]:
    """Attention of each sequence's newest Q tokens (the last token, or the last token and its drafts) over its paged
    K/V cache.

    Query i of sequence b has position kv_lens[b] - q_lens[b] + i. It sees the keys up to its own position that are in
    its head's window. The keys and values of the new tokens must already be in the pages.

    Args:
      q: queries in bfloat16, float16 or float32; with `q_scale` also in the cache's float8 dtype, already divided by
        `q_scale`.
      kv: the cache; see `PagedKV`. Keys and values may have different dtypes, such as int8 keys and bfloat16 values. An
        8-bit array has scales, another array has none. Mosaic kernels require one dtype.
      block_tables: page ids [B, P], or head-wise tables [B, Hkv, P]. The entries of head-wise tables are page rows: the
        page of one KV head has the row id page·Hkv + head, and every head may use any row. Entry j is the page of the
        tokens at positions j·ps to (j + 1)·ps - 1. The tokens of PAGE_NONE, and of ids outside the pool, are invisible.
        Entries without a visible token may hold any value.
      kv_lens: tokens of each sequence, including the new tokens; 0 for an idle sequence.
      q_lens: number of real queries of each sequence, at most Q; None if every sequence has Q queries.
      sm_scale: factor of the scores; None for D**-0.5.
      window: None, the number of newest keys that every head sees, or a `HeadWindow`.
      sinks: one learned logit per head (float32) that enters the head's softmax denominator, unscaled and uncapped.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      draft_mask: entry [b, i, j] is True if query i sees draft key j, the key at position kv_len - q_len + j. The mask
        replaces causality among the draft keys.
      q_scale: a number, or float32 per query head or per head of each token, for 8-bit queries over a float8 cache.
        Unless q is float8, q is divided by `q_scale` (IEEE division), clipped to the range of the cache's dtype, and
        rounded to it (half to even). Scores of these values are multiplied by `q_scale` and by the scales of the keys.
        `q_scale` must be positive. None for unquantised queries.
      plan: from `plan_decode`, made for these lengths and windows. It affects only speed and rounding.
      out: packed output array in the output's dtype, for a step that mixes decodes with other tokens. Its first B·Q
        tokens become this call's output, in place if the array may be donated; its other tokens do not change. None to
        allocate the output.
      return_lse: also return the LSE.
      out_dtype: dtype of the output; None for q's dtype. Required if q is float8.
      implementation: None, a name, or names in order of preference.

    Returns:
      The output, or the updated `out`. The output is exactly 0 for queries that see no key: queries of idle sequences,
        queries from q_len on, and queries with a negative position. With `return_lse` also the float32 natural-log LSE
        of the scaled, capped, masked scores without the learned sinks; -inf for queries that see no key.

    Raises:
      ValueError: inconsistent arguments.
      NotImplementedError: `q_scale` with a cache that is not float8, or with scales per block of columns; or the
        named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(num_pages=8, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
      >>> kv = pallas_attn.PagedKV.allocate(spec)
      >>> block_tables = jnp.array([[5, 0, 2], [3, -1, -1]], jnp.int32)
      >>> q, kv_lens = jnp.ones((2, 1, 2, 8)), jnp.array([9, 3], jnp.int32)
      >>> out, lse = pallas_attn.paged_decode(q, kv, block_tables, kv_lens, window=4, return_lse=True)
      >>> out.shape, lse.shape
      ((2, 1, 2, 8), (2, 1, 2))
      >>> packed = pallas_attn.paged_decode(q, kv, block_tables, kv_lens, out=jnp.full((5, 2, 8), 7.0))
      >>> packed[:, 0, 0].tolist()  # the cache holds zeros
      [0.0, 0.0, 7.0, 7.0, 7.0]
    """
    block_tables, kv_lens, q_lens = checks.int32(block_tables=block_tables, kv_lens=kv_lens, q_lens=q_lens)
    call = PagedDecodeCall(
        q,
        kv,
        block_tables,
        kv_lens,
        q_lens=q_lens,
        window=checks.window(window),
        sinks=sinks,
        draft_mask=draft_mask,
        q_scale=checks.query_scale(q_scale, q),
        plan=plan,
        out=out,
        sm_scale=checks.number("sm_scale", sm_scale),
        soft_cap=checks.number("soft_cap", soft_cap),
        out_dtype=out_dtype,
    )
    call.validate()
    result, lse = dispatch.run(call, implementation) if q.size else call.without_queries()
    return (result, lse) if return_lse else result
