"""Partition the visible pages of a decode step among the programs (CTAs) of a kernel, on the device."""

from __future__ import annotations

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

FIXED_PIECE_TOKENS = 2048
"""Visible tokens between the cuts of a row in `fixed` mode."""

MAX_PROGRAMS = 32 * 512
"""More programs than any card runs at the same time: 32 thread blocks per multiprocessor, and fewer than 512
multiprocessors.
"""

type Mode = Literal["balanced", "fixed"]


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
    """Plan the decode calls of a step that have these arguments, once for all layers. The function is jittable and does
    not synchronize with the host.

    The plan serves every call with the same sizes, lengths and windows. Scales, learned sinks, soft caps and the values
    of q, cache and tables may differ from layer to layer. The plan records its sizes, and a call with other sizes
    raises an error. A call without a plan makes a plan itself, in every layer.

    A row (one KV head of one sequence) costs its visible pages plus a constant. In `balanced` mode every program gets
    an equal share of the total cost, and a row is cut where a share ends. If it is nearly as even, the shares are
    instead made of whole rows or of equal parts of one row, so that fewer rows are cut. In `fixed` mode a row is cut at
    fixed token counts, independent of its position and of the batch, so that its result never depends on other rows.
    Programs then share whole splits.

    Args:
      q: as `paged_decode` takes it, with or without `q_scale`; or, for `mla_decode`, the pair (q_latent, q_rope).
      cache: the `PagedKV` or `PagedLatent` of any of the layers.
      block_tables: as the calls take them. Only shapes and dtypes of q, cache and block_tables matter, so
        `jax.ShapeDtypeStruct`s are allowed.
      kv_lens: tokens of each sequence, including the new tokens; 0 for an idle row.
      q_lens, window, soft_cap, out_dtype: as the calls take them.
      mode: "balanced" or "fixed".
      num_programs: programs that share the pages, at most 16,384; None for the number that runs at the same time on
        this device. Fewer programs leave multiprocessors for other work.
      implementation: implementation of the decode calls.

    Raises:
      ValueError: inconsistent arguments, or an unknown mode.
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
    jax.eval_shape(
        find_follower, q, cache, block_tables, kv_lens, q_lens, head_window
    )  # eval_shape turns shapes into traced arrays
    ((made_for, name, module, wanted),) = followers
    if not (made_for.batch and made_for.num_queries):
        return _idle_plan(made_for, module, num_programs or 1, sharing_of(mode, made_for.page_size))
    kv_lens = checks.bound_lens(kv_lens, made_for.table_pages * made_for.page_size)
    q_lens = None if q_lens is None else checks.bound_lens(q_lens, made_for.num_queries)
    call = PlanDecodeCall(
        kv_lens,
        _planned_queries(q_lens, kv_lens, made_for.num_queries),
        checks.bound_window(window),
        sharing=sharing_of(mode, made_for.page_size),
        num_programs=num_programs or wanted or 1,
        made_for=made_for,
        implementation=module,
    )
    names = dispatch.candidates(made_for.op, implementation)
    planners = [name for name in names[names.index(name) :] if name in dispatch.implementations("plan_decode")]
    return dispatch.run(call, ["xla"] if wanted is None else planners or ["xla"])


def plan_of(call: PagedDecodeCall | MlaDecodeCall, implementation: str, num_programs: int) -> DecodePlan:
    """Return the plan of a decode call, or make a plan if the call has none.

    Args:
      call: the call that is being run.
      implementation: module that runs it, such as "mosaic_sm90".
      num_programs: programs that share the pages in a plan made here.

    Raises:
      ValueError: the call's plan was made for another implementation.
    """
    if call.plan is not None:
        if call.plan.implementation != implementation:
            raise ValueError(
                f"plan: was made for implementation {call.plan.implementation!r}, this call runs {implementation!r}; "
                "plan_decode takes the implementation of the calls"
            )
        return call.plan
    own = PlanDecodeCall(
        call.kv_lens,
        _planned_queries(call.q_lens, call.kv_lens, call.num_queries),
        call.window,
        sharing=sharing_of("balanced", call.page_size),
        num_programs=num_programs,
        made_for=call.plan_key,
        implementation=implementation,
    )
    return dispatch.run(own, ("mosaic", "xla") if implementation.startswith("mosaic") else "xla")


def _idle_plan(made_for: PlanKey, implementation: str, num_programs: int, sharing: Sharing) -> DecodePlan:
    """Plan of a step in which no row sees any key."""
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
    """A decode call with these arguments."""
    if isinstance(cache, PagedKV):
        if hasattr(q, "dtype") and q.dtype == jnp.float8_e4m3fn:  # kernels receive e4m3 queries as float16
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


def _planned_queries(
    q_lens: Int32[Array, "B"] | None, kv_lens: Int32[Array, "B"], num_queries: int
) -> Int32[Array, "B"] | None:
    """Real queries of each sequence, or None if every sequence has one query."""
    if q_lens is None and num_queries > 1:
        return jnp.full_like(kv_lens, num_queries)
    return q_lens


def sharing_of(mode: Mode, page_size: int) -> Sharing:
    """Costs of rows and cuts in a mode."""
    if mode == "fixed":
        return Sharing(overhead=0, cut=0, least=1, split_pages=max(1, FIXED_PIECE_TOKENS // page_size))
    costs = plan_config(page_size)
    return Sharing(
        overhead=costs.row_overhead_pages, cut=costs.cut_pages, least=TILE_TOKENS // page_size + 1, split_pages=0
    )
