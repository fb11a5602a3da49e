"""Prefill attention: a ragged chunk of new tokens over pages that already hold it and its cached prefix."""

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
    """Attention of each sequence's new tokens over its pages.

    Sequence s has cu_q_lens[s + 1] - cu_q_lens[s] new tokens, the last of the kv_lens[s] it holds. Each sees keys up to
    its own position that its head's window shows or, with `causal=False`, all kv_lens[s]. The new tokens' keys must
    already be in the pages.

    Args:
      q: packed queries in bfloat16, float16 or float32, with `q_scale` also in the cache's float8; rows before
        cu_q_lens[0] and after its largest are padding.
      kv: the cache; see `PagedKV`.
      block_tables: page ids, or row ids page·Hkv + head of any head's pages for head-wise tables; PAGE_NONE's tokens
        are invisible, like those of ids outside the pool; entries without a visible token may hold anything.
      cu_q_lens: prefix sums of the new tokens. One that falls, such as a 0 at the end, counts as the largest before it.
      kv_lens: tokens each sequence holds, the new ones included.
      causal: False for queries that see every key of their sequence, whatever their number, as in encoders and cross
        attention.
      sm_scale: multiplies the scores; None for D**-0.5.
      window: None, the number of newest keys every head sees, or a `HeadWindow`; either needs `causal`.
      sinks: float32 learned logits that enter each head's softmax denominator, unscaled and uncapped.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      draft_mask: True where a token sees new token j of its own sequence, at position kv_len - new tokens + j; replaces
        causality among the new tokens, as for trees of drafts or images. Those from M on, more than the mask has
        columns for, are invisible. Older keys are visible, and windows count positions.
      q_scale: attends with 8-bit queries over a float8 cache: q is divided by it (IEEE), clipped to what the cache's
        dtype holds and rounded to that (half to even), unless it comes so, and scores are multiplied by it. None for
        queries as they are.
      return_lse: also return the LSE.
      out_dtype: of the output; None for q's, unless that is a float8.
      implementation: None, a name, or names to try in order.

    Returns:
      The output, exactly 0 for padding rows; with `return_lse` also the float32 natural-log LSE of the scaled, capped,
      masked scores without the learned sinks, -inf for those.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: a `q_scale` over another cache; or the implementation named does not support the call.

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
