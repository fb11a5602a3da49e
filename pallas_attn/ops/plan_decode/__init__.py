"""Sharing the visible pages of a decode step among the programs of a kernel, on the device."""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Array, Int32

from pallas_attn import checks, dispatch
from pallas_attn.ops.plan_decode.config import TILE_TOKENS, plan_config
from pallas_attn.portable.schedule import Sharing
from pallas_attn.types import DecodePlan, HeadWindow, Implementation

FIXED_PIECE_TOKENS = 2048
"""Where `fixed` mode cuts: every row at multiples of this many of its visible tokens."""


def _mosaic() -> Any:
    import pallas_attn.ops.plan_decode.mosaic_sm90 as implementation

    return implementation.plan_decode


def _xla() -> Any:
    import pallas_attn.ops.plan_decode.xla as implementation

    return implementation.plan_decode


IMPLEMENTATIONS = {"mosaic": _mosaic, "xla": _xla}


def plan_decode(
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None = None,
    window: int | HeadWindow | None = None,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    num_programs: int,
    mode: Literal["balanced", "fixed"] = "balanced",
    implementation: Implementation = None,
) -> DecodePlan:
    """Plans a decode step once for all layers of equal windows; jittable, without a look at the host.

    A row (one KV head of one sequence) costs its visible pages and a constant. In `balanced` mode every program gets an
    equal share of the total cost, and rows are cut where a share ends; or, where that is nearly as even, some rows
    together or parts of one make the shares, so that fewer rows are cut, or none. In `fixed` mode a row is cut at fixed
    token counts, wherever it stands in whatever batch, so that its result never depends on its neighbours; programs
    then share whole pieces.

    Args:
      kv_lens: tokens each sequence holds, the new ones included; 0 for an idle row.
      q_lens: real queries of each row; None for one each.
      window: None, an int or a `HeadWindow`: what the decode calls are given.
      page_size: ps.
      num_q_heads, num_kv_heads: Hq and Hkv; 1 KV head for latent attention.
      num_programs: programs the kernel runs, such as the number of multiprocessors.
      mode: "balanced" or "fixed".
      implementation: None, a name, or names to try in order; all give the same plan.

    Raises:
      ValueError: sizes below 1, heads that do not divide, an unknown mode.
      NotImplementedError: the implementation named does not support the call.
    """
    dims = checks.Dims()
    dims.check("kv_lens", kv_lens, "B", checks.INT)
    if q_lens is not None:
        dims.check("q_lens", q_lens, "B", checks.INT)
    sizes = {"page_size": page_size, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
    for name, value in (sizes | {"num_programs": num_programs}).items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_q_heads}")
    checks.check_window(window, num_kv_heads)
    if mode not in ("balanced", "fixed"):
        raise ValueError(f"mode: expected 'balanced' or 'fixed', got {mode!r}")
    if mode == "fixed":
        sharing = Sharing(overhead=0, cut=0, least=1, piece_pages=max(1, FIXED_PIECE_TOKENS // page_size))
    else:
        costs = plan_config(page_size)
        sharing = Sharing(
            overhead=costs.row_overhead_pages, cut=costs.cut_pages, least=TILE_TOKENS // page_size + 1, piece_pages=0
        )
    return dispatch.run(
        "plan_decode",
        IMPLEMENTATIONS,
        implementation,
        kv_lens,
        q_lens,
        window,
        sharing,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        num_programs=num_programs,
    )
