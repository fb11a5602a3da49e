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
    """Attention of each sequence's newest Q tokens (the last one, or the last and its draft) over its pages.

    Query i of row b sits at position kv_lens[b] - q_lens[b] + i and sees keys up to its own position that its head's
    window shows. The new tokens' keys must already be in the pages.

    Args:
      q: queries in bfloat16, float16 or float32; with `q_scale` also in the cache's float8, divided by it already.
      kv: the cache; see `PagedKV`.
      block_tables: page ids, or row ids page·Hkv + head of any head's pages for head-wise tables. Entry j holds
        tokens [j·ps, (j + 1)·ps); those of PAGE_NONE, and of ids outside the pool, are invisible; entries without a
        visible token may hold anything.
      kv_lens: tokens each sequence holds, the new ones included; 0 for an idle row.
      q_lens: real queries of each row, at most Q; None for Q each.
      sm_scale: multiplies the scores; None for D**-0.5.
      window: None, the number of newest keys every head sees, or a `HeadWindow`.
      sinks: float32 learned logits that enter each head's softmax denominator, unscaled and uncapped.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      draft_mask: True where query i sees draft key j, at position kv_len - q_len + j; replaces causality among those.
      q_scale: a number, or float32 for each query head or each head of each token: attends with 8-bit queries over a
        float8 cache. q is divided by it (IEEE), clipped to what the cache's dtype holds and rounded to that (half to
        even), unless it comes so. Scores are of these values, times `q_scale`, times the scales of the keys, whatever
        their layout. None for queries as they are. It must be positive.
      plan: from `plan_decode`, made for these lengths and windows; changes speed and rounding only.
      out: packed output of a step that mixes decodes with others, in the output's dtype: its first B·Q tokens become
        this call's output, in place where the array may be given up; the others stay as they are. None for an array of
        its own.
      return_lse: also return the LSE.
      out_dtype: of the output; None for q's, unless that is a float8.
      implementation: None, a name, or names to try in order.

    Returns:
      The output, or `out` with it; exactly 0 for queries that see nothing (idle rows, past q_len, before position 0).
      With `return_lse` also the float32 natural-log LSE of the scaled, capped, masked scores without the learned sinks,
      -inf for those.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: a `q_scale` over another cache, or of blocks of columns; or the implementation named does not
        support the call.

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
