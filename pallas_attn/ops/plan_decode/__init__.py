"""Assign the visible pages of a decode step to the CTAs of the decode kernel, on the device.

A CTA of the plan is a CTA of a Mosaic kernel, or one or several programs of a Triton kernel. The argument
`num_programs` is the number of CTAs of the plan.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.paged_decode.call import PagedDecodeCall
from pallas_attn.ops.plan_decode.call import PlanDecodeCall
from pallas_attn.ops.plan_decode.config import TILE_TOKENS, plan_config
from pallas_attn.portable.schedule import Sharing
from pallas_attn.runtime import dispatch
from pallas_attn.types import DecodePlan, HeadWindow, Implementation, PagedKV, PagedLatent, PlanKey

FIXED_SPLIT_TOKENS = 2048
"""Visible tokens per split in `fixed` mode, rounded down to whole pages; at least one page."""

MAX_PROGRAMS = 32 * 512
"""Maximum of `num_programs`. No GPU runs more CTAs at the same time: a multiprocessor runs at most 32 CTAs, and a GPU
has fewer than 512 multiprocessors.
"""

type Mode = Literal["balanced", "fixed"]
"""How a plan splits rows: "balanced" gives every CTA an equal share of the cost, "fixed" splits rows at multiples of a
number of tokens that does not depend on the batch.
"""


def plan_decode(
    q: Float[Array, "B Q Hq D"] | jax.ShapeDtypeStruct | tuple[Any, Any],
    cache: PagedKV | PagedLatent,
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"] | jax.ShapeDtypeStruct,
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None = None,
    window: int | HeadWindow | None = None,
    soft_cap: float | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    mode: Mode = "balanced",
    num_programs: int | None = None,
    implementation: Implementation = None,
) -> DecodePlan:
    """Assign the visible pages of a decode step to the CTAs of the decode kernel, so that all CTAs finish at about the
    same time.

    Pass the plan to `paged_decode` or `mla_decode`. One plan serves all layers of a step whose calls have the same
    sizes, lengths and windows. Scales, sink logits, soft caps, and the values of q, cache and block tables may differ
    between the layers. A call whose sizes or window differ from the plan's raises ValueError. A call without a plan
    makes its own plan. The plan is computed on the device: the function works inside `jax.jit` and does not
    synchronize with the host.

    A row of the plan is one KV head of one sequence. The cost of a row is the number of its visible pages plus a
    constant for its start.

    - `balanced` mode gives every CTA an equal share of the total cost, and splits a row where a share ends. Split rows
      need a merge. The plan therefore prefers a schedule with fewer splits (whole rows per CTA, or several CTAs for one
      row) if its largest share is only slightly larger.
    - `fixed` mode splits every row at multiples of 2,048 of its visible tokens, and distributes the splits evenly over
      the CTAs. The result of a row is then bit-identical in every batch.

    Args:
      q: the queries of `paged_decode`, [B, Q, Hq, D]; for `mla_decode`, the pair (q_latent, q_rope).
      cache: the `PagedKV` or `PagedLatent` of one of the layers.
      block_tables: page ids [B, P], or row ids [B, Hkv, P]. Only shapes and dtypes of q, cache and block_tables
        matter, so `jax.ShapeDtypeStruct`s are allowed.
      kv_lens: int32 [B], tokens of each sequence, including the new tokens; 0 for an idle sequence.
      q_lens, window, soft_cap, out_dtype: the arguments of the decode calls.
      mode: "balanced" or "fixed".
      num_programs: number of CTAs in the plan, at most 16,384; None for the number that the device runs at the same
        time. A smaller number leaves multiprocessors for other kernels.
      implementation: implementation of the decode calls.

    Returns:
      The plan, int32 arrays on the device.

    Raises:
      ValueError: the arguments do not fit each other, or the mode is unknown.
      NotImplementedError: the named implementation does not support the decode calls.

    Example:
      >>> kv = pallas_attn.PagedKV.allocate(
      ...     pallas_attn.kv_cache_spec(num_pages=8, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
      ... )
      >>> q, kv_lens = jnp.ones((2, 1, 2, 8)), jnp.array([9, 3], jnp.int32)
      >>> block_tables = jnp.array([[0, 1, 2], [3, -1, -1]], jnp.int32)
      >>> plan = pallas_attn.plan_decode(q, kv, block_tables, kv_lens, window=4)
      >>> pallas_attn.paged_decode(q, kv, block_tables, kv_lens, window=4, plan=plan).shape
      (2, 1, 2, 8)
      >>> pallas_attn.paged_decode(q, kv, block_tables, kv_lens, window=5, plan=plan)
      Traceback (most recent call last):
      ValueError: plan: was made for window = 4, this call has window = 5; ...
    """
    if mode not in ("balanced", "fixed"):
        raise ValueError(f"mode: expected 'balanced' or 'fixed', got {mode!r}")
    if num_programs is not None:
        num_programs = checks.size("num_programs", num_programs, MAX_PROGRAMS)
    block_tables, kv_lens, q_lens = checks.int32(block_tables=block_tables, kv_lens=kv_lens, q_lens=q_lens)
    window, soft_cap = checks.window(window), checks.number("soft_cap", soft_cap)
    followers: list[tuple[PlanKey, str, str, int | None]] = []

    def find_follower(q: Any, cache: Any, block_tables: Any, kv_lens: Any, q_lens: Any, head_window: Any) -> None:
        shown = window if head_window is None else head_window
        call = _decode_call(q, cache, block_tables, kv_lens, q_lens, shown, soft_cap, out_dtype)
        call.validate()

        def follow(name: str, found: Any) -> tuple[str, str, int | None]:
            module = found.load()
            wanted = module.num_programs(call) if hasattr(module, "num_programs") else None
            return name, module.__name__.rpartition(".")[2], wanted

        key = call.plan_key
        nothing = not (key.batch and key.num_queries)
        name, module, wanted = ("xla", "xla", None) if nothing else dispatch.choose(call.op, implementation, follow)
        followers.append((key, name, module, wanted))

    head_window = window if isinstance(window, HeadWindow) else None
    # An implementation reports an unsupported call when it is traced. eval_shape traces, also with ShapeDtypeStructs.
    jax.eval_shape(find_follower, q, cache, block_tables, kv_lens, q_lens, head_window)
    ((made_for, name, module, wanted),) = followers
    if not (made_for.batch and made_for.num_queries):
        return _idle_plan(made_for, module, num_programs or 1, sharing_of(mode, made_for.page_size))
    call = PlanDecodeCall(
        kv_lens,
        q_lens,
        checks.bound_window(window),
        sharing=sharing_of(mode, made_for.page_size),
        num_programs=num_programs or wanted or 1,
        made_for=made_for,
        implementation=module,
    )
    names = dispatch.candidates(made_for.op, implementation)
    planners = [name for name in names[names.index(name) :] if name in dispatch.implementations("plan_decode")]
    plan, *_ = dispatch.run(call, ["xla"] if wanted is None else planners or ["xla"])
    return plan


def planned[Call: (PagedDecodeCall, MlaDecodeCall)](
    call: Call, implementation: str, num_programs: int
) -> tuple[Call, DecodePlan]:
    """Return a decode call with clipped lengths, and its plan; if the call has none, make a plan in `balanced` mode.

    Args:
      call: decode call whose lengths are not clipped.
      implementation: module that runs the call, such as "mosaic_sm90".
      num_programs: number of CTAs, if a plan is made.

    Raises:
      ValueError: the plan in the call was made for another implementation.
    """
    if call.plan is not None:
        if call.plan.implementation != implementation:
            raise ValueError(
                f"plan: was made for implementation {call.plan.implementation!r}, this call runs {implementation!r}; "
                "plan_decode takes the implementation of the calls"
            )
        return call.with_bounded_lens(), call.plan
    own = PlanDecodeCall(
        call.kv_lens,
        call.q_lens,
        call.window,
        sharing=sharing_of("balanced", call.plan_page_size),
        num_programs=num_programs,
        made_for=call.plan_key,
        implementation=implementation,
    )
    name = implementation.partition("_")[0]
    names = (name, "xla") if name in dispatch.implementations("plan_decode") else "xla"
    plan, kv_lens, q_lens = dispatch.run(own, names)
    return dataclasses.replace(call, kv_lens=kv_lens, q_lens=q_lens), plan


def _idle_plan(made_for: PlanKey, implementation: str, num_programs: int, sharing: Sharing) -> DecodePlan:
    """Return the plan of a step without sequences or without queries: no CTA has work."""
    rows = made_for.batch * made_for.num_kv_heads
    order, none, programs = (
        jnp.arange(rows + 1, dtype=jnp.int32),
        *(jnp.zeros((n,), jnp.int32) for n in (rows, num_programs + 1)),
    )
    return DecodePlan(
        row_order=order[:-1],
        sink_pages=none,
        first_page=none,
        num_pages=none,
        next_row=jnp.full_like(none, rows),
        merged_rows=order,
        split_indptr=jnp.zeros_like(order),
        cta_row=programs,
        cta_page=programs,
        cta_split=programs,
        made_for=made_for,
        implementation=implementation,
        split_pages=sharing.split_pages,
    )


def _decode_call(
    q: Any,
    cache: Any,
    block_tables: Any,
    kv_lens: Any,
    q_lens: Any,
    window: int | HeadWindow | None,
    soft_cap: float | None,
    out_dtype: Any,
) -> PagedDecodeCall | MlaDecodeCall:
    """Return a decode call with these arguments, and defaults for all arguments that do not influence the plan."""
    if isinstance(cache, PagedKV):
        # paged_decode passes float8_e4m3fn queries to kernels as float16.
        if hasattr(q, "dtype") and q.dtype == jnp.float8_e4m3fn:
            q = q.astype(jnp.float16)
        return PagedDecodeCall(
            q,
            cache,
            block_tables,
            kv_lens,
            q_lens=q_lens,
            window=window,
            sinks=None,
            draft_mask=None,
            q_scale=None,
            plan=None,
            out=None,
            sm_scale=None,
            soft_cap=soft_cap,
            out_dtype=out_dtype,
        )
    checks.check_class("cache", cache, PagedLatent)
    if not isinstance(q, tuple) or len(q) != 2:
        raise ValueError("q: expected the pair (q_latent, q_rope) with a PagedLatent, got one array")
    checks.check_int_window(window)  # pyrefly: ignore[bad-argument-type]
    return MlaDecodeCall(
        *q,
        cache,
        block_tables,
        kv_lens,
        q_lens=q_lens,
        draft_mask=None,
        plan=None,
        sm_scale=1.0,
        out_dtype=out_dtype,
        window=window,  # pyrefly: ignore[bad-argument-type]
        soft_cap=soft_cap,
    )


def sharing_of(mode: Mode, page_size: int) -> Sharing:
    """Return the cost model of a mode: in pages for `balanced`, in splits for `fixed`."""
    if mode == "fixed":
        return Sharing(overhead=0, cut=0, least=1, split_pages=max(1, FIXED_SPLIT_TOKENS // page_size))
    costs = plan_config(page_size)
    return Sharing(
        overhead=costs.row_overhead_pages, cut=costs.cut_pages, least=TILE_TOKENS // page_size + 1, split_pages=0
    )
