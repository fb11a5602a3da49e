"""Decode attention: the newest query tokens of each sequence over its paged K/V cache."""

from __future__ import annotations

import math
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks, dispatch
from pallas_attn.types import DecodePlan, HeadWindow, Implementation, PagedKV


def _mosaic() -> Any:
    import pallas_attn.ops.paged_decode.mosaic_sm90 as implementation

    return implementation.paged_decode


def _xla() -> Any:
    import pallas_attn.ops.paged_decode.xla as implementation

    return implementation.paged_decode


def _reference() -> Any:
    import pallas_attn.ops.paged_decode.reference as implementation

    return implementation.paged_decode


def _mosaic_programs() -> Any:
    import pallas_attn.ops.paged_decode.mosaic_sm90 as implementation

    return implementation.decode_programs


IMPLEMENTATIONS = {"mosaic": _mosaic, "xla": _xla, "reference": _reference}


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
    plan: DecodePlan | None = None,
    return_lse: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B Q Hq D"] | tuple[Float[Array, "B Q Hq D"], Float[Array, "B Q Hq"]]:
    """Attention of each sequence's newest Q tokens (the last one, or the last and its draft) over its pages.

    Query i of row b sits at position kv_lens[b] - q_lens[b] + i and sees keys up to its own position that its head's
    window shows. The new tokens' keys must already be in the pages.

    Args:
      q: queries in bfloat16, float16 or float32.
      kv: the cache; see `PagedKV`.
      block_tables: page ids, or row ids page·Hkv + head of any head's pages for head-wise tables. Entry j holds
        tokens [j·ps, (j + 1)·ps); PAGE_NONE's are invisible; entries without a visible token may hold anything.
      kv_lens: tokens each sequence holds, the new ones included; 0 for an idle row.
      q_lens: real queries of each row, at most Q; None for Q each.
      sm_scale: multiplies the scores; None for D**-0.5.
      window: None, the number of newest keys every head sees, or a `HeadWindow`.
      sinks: float32 learned logits that enter each head's softmax denominator, unscaled and uncapped.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      draft_mask: True where query i sees draft key j, at position kv_len - q_len + j; replaces causality among those.
      plan: from `plan_decode`, made for these lengths and windows; changes speed and rounding only.
      return_lse: also return the LSE.
      out_dtype: of the output; None for q's.
      implementation: None, a name, or names to try in order.

    Returns:
      The output, exactly 0 for queries that see nothing (idle rows, past q_len, before position 0); with `return_lse`
      also the float32 natural-log LSE of the scaled, capped, masked scores without the learned sinks, -inf for those.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.
    """
    call = _validated(q, kv, block_tables, kv_lens, q_lens, sm_scale, window, sinks, soft_cap, draft_mask, plan)
    out_dtype = checks.output_dtype(out_dtype, q.dtype)
    out, lse = dispatch.run("paged_decode", IMPLEMENTATIONS, implementation, **call, out_dtype=out_dtype)
    return (out, lse) if return_lse else out


def decode_programs(
    q: Float[Array, "B Q Hq D"] | jax.ShapeDtypeStruct,
    kv: PagedKV,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> int:
    """How many programs `plan_decode` should share a step among, for calls of `paged_decode` with such arguments.

    A plan for another number works as well, but not as fast. An operation that is not given a plan makes one for this
    number, in every layer.

    Args:
      q, kv, out_dtype, implementation: as `paged_decode` gets them; only shapes and dtypes matter, so
        `jax.ShapeDtypeStruct`s will do.

    Returns:
      The programs that run side by side on the default device; 1 where the implementation follows no plan.

    Raises:
      ValueError: shapes or dtypes that do not fit each other.
      NotImplementedError: the implementation named does not support the call.
    """
    dims = checks.Dims()
    dims.check("q", q, "B Q Hq D", checks.PLAIN)
    checks.check_kv(kv, dims)
    checks.check_heads(dims["Hq"], dims["Hkv"])
    loaders = {"mosaic": _mosaic_programs, "xla": lambda: _one_program, "reference": lambda: _one_program}
    out_dtype = checks.output_dtype(out_dtype, q.dtype)
    return dispatch.run("decode_programs", loaders, implementation, q=q, kv=kv, out_dtype=out_dtype)


def _one_program(**_: Any) -> int:
    return 1


def _validated(
    q, kv, block_tables, kv_lens, q_lens, sm_scale, window, sinks, soft_cap, draft_mask, plan
) -> dict[str, Any]:
    """The call with every default filled in."""
    dims = checks.Dims()
    dims.check("q", q, "B Q Hq D", checks.PLAIN)
    checks.check_kv(kv, dims)
    checks.check_heads(dims["Hq"], dims["Hkv"])
    dims.check("block_tables", block_tables, "B P" if block_tables.ndim == 2 else "B Hkv P", checks.INT)
    dims.check("kv_lens", kv_lens, "B", checks.INT)
    if q_lens is not None:
        dims.check("q_lens", q_lens, "B", checks.INT)
    checks.check_window(window, dims["Hkv"])
    if sinks is not None:
        dims.check("sinks", sinks, "Hq", checks.F32)
    if draft_mask is not None:
        dims.check("draft_mask", draft_mask, "B Q Q", checks.BOOL)
    checks.check_positive("sm_scale", sm_scale)
    checks.check_positive("soft_cap", soft_cap)
    if plan is not None:
        checks.check_plan(plan, rows=dims["B"] * dims["Hkv"], page_size=dims["ps"])
    return {
        "q": q,
        "kv": kv,
        "block_tables": block_tables,
        "kv_lens": kv_lens,
        "q_lens": q_lens,
        "sm_scale": 1.0 / math.sqrt(dims["D"]) if sm_scale is None else sm_scale,
        "window": window,
        "sinks": sinks,
        "soft_cap": soft_cap,
        "draft_mask": draft_mask,
        "plan": plan,
    }
