"""Sharing the visible pages of a decode step among the programs of a kernel, on the device."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_attn import checks, tuning
from pallas_attn.ops.common.visibility import head_windows, page_walk
from pallas_attn.types import DecodePlan, HeadWindow

ROW_OVERHEAD_TOKENS = 64
"""What starting a row costs a program (loading queries, filling its stages, writing a state), in tokens, unless it was
measured.
"""

FIXED_PIECE_TOKENS = 2048
"""Where `fixed` mode cuts: every row at multiples of this many of its visible tokens."""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The cost model of `balanced` mode, tuned as "plan_decode" by page size.

    Attributes:
      row_overhead_pages: what starting a row costs a program, in pages.
    """

    row_overhead_pages: int

    def __post_init__(self) -> None:
        if self.row_overhead_pages < 0:
            raise ValueError(f"{self.row_overhead_pages=} must be at least 0")


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
) -> DecodePlan:
    """Plans a decode step once for all layers of equal windows; jittable, without a look at the host.

    A row (one KV head of one sequence) costs its visible pages and a constant. In `balanced` mode every program gets an
    equal share of the total cost, and rows are cut where a share ends. In `fixed` mode a row is cut at fixed token
    counts, wherever it stands in whatever batch, so that its result never depends on its neighbours; programs then
    share whole pieces.

    Args:
      kv_lens: tokens each sequence holds, the new ones included; 0 for an idle row.
      q_lens: real queries of each row; None for one each.
      window: None, an int or a `HeadWindow`: what the decode calls are given.
      page_size: ps.
      num_q_heads, num_kv_heads: Hq and Hkv; 1 KV head for latent attention.
      num_programs: programs the kernel runs, such as the number of multiprocessors.
      mode: "balanced" or "fixed".

    Raises:
      ValueError: sizes below 1, heads that do not divide, an unknown mode.
    """
    dims = checks.Dims()
    dims.check("kv_lens", kv_lens, "B", checks.INT)
    q_lens = jnp.ones_like(kv_lens) if q_lens is None else q_lens
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
    windows = head_windows(window, num_kv_heads)
    first_query = jnp.maximum(kv_lens - q_lens, 0)[:, None]
    end = jnp.where(q_lens > 0, kv_lens, 0)[:, None]
    walk = page_walk(first_query, end, windows.window[None], windows.sink_tokens[None], page_size=page_size)
    sink_pages, first_page, num_pages = (x.reshape(-1) for x in walk)
    piece_pages = max(1, FIXED_PIECE_TOKENS // page_size) if mode == "fixed" else 0
    if mode == "fixed":
        shares = _fixed_shares(num_pages, num_programs, piece_pages=piece_pages)
    else:
        costs = tuning.lookup("plan_decode", {"page_size": page_size}, PlanConfig, lambda: heuristic_costs(page_size))
        shares = _balanced_shares(num_pages, num_programs, overhead=costs.row_overhead_pages)
    return DecodePlan(
        sink_pages=sink_pages,
        first_page=first_page,
        num_pages=num_pages,
        next_row=_next_busy(num_pages),
        piece_offsets=_prefix_sums(shares.pieces),
        program_row=shares.row,
        program_page=shares.page,
        program_piece=shares.piece,
        page_size=page_size,
        piece_pages=piece_pages,
    )


def heuristic_costs(page_size: int) -> PlanConfig:
    """Where nothing was measured."""
    return PlanConfig(max(1, ROW_OVERHEAD_TOKENS // page_size))


class _Shares(NamedTuple):
    """Row, page and piece that each program starts with, and how many pieces each row is in."""

    row: Int32[Array, "programs_plus_1"]
    page: Int32[Array, "programs_plus_1"]
    piece: Int32[Array, "programs_plus_1"]
    pieces: Int32[Array, "rows"]


def _balanced_shares(num_pages: Int32[Array, "rows"], num_programs: int, *, overhead: int) -> _Shares:
    """Programs start at equal distances along the rows laid end to end, each as long as it costs."""
    busy = num_pages > 0
    offsets = _prefix_sums(jnp.where(busy, num_pages + overhead, 0))
    share = jnp.maximum(-(-offsets[-1] // num_programs), overhead + 1)
    start = jnp.minimum(jnp.arange(num_programs + 1, dtype=jnp.int32), -(-offsets[-1] // share)) * share
    row, into = _locate(offsets, start)
    # A share that starts in a row's overhead starts the row; a row's first page follows its overhead.
    page = jnp.clip(into - overhead, 0, None)
    cuts = jnp.zeros_like(num_pages).at[jnp.where(page > 0, row, num_pages.shape[0])].add(1, mode="drop")
    # A piece begins with each busy row and with each cut.
    piece = _prefix_sums(busy)[row] + jnp.cumsum(page > 0, dtype=jnp.int32)
    return _Shares(row, page, piece, jnp.where(busy, 1 + cuts, 0))


def _fixed_shares(num_pages: Int32[Array, "rows"], num_programs: int, *, piece_pages: int) -> _Shares:
    """Programs start at equal numbers of pieces; the cuts are the rows' own."""
    pieces = -(-num_pages // piece_pages)
    offsets = _prefix_sums(pieces)
    share = jnp.maximum(-(-offsets[-1] // num_programs), 1)
    start = jnp.minimum(jnp.arange(num_programs + 1, dtype=jnp.int32) * share, offsets[-1])
    row, into = _locate(offsets, start)
    return _Shares(row, into * piece_pages, start, pieces)


def _next_busy(num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
    """After each row, the next that has pages; the number of rows where there is none."""
    rows = num_pages.shape[0]
    busy = jnp.where(num_pages > 0, jnp.arange(rows, dtype=jnp.int32), rows)
    return jnp.append(lax.cummin(busy, reverse=True)[1:], jnp.int32(rows))


def _locate(
    offsets: Int32[Array, "rows_plus_1"], place: Int32[Array, "n"]
) -> tuple[Int32[Array, "n"], Int32[Array, "n"]]:
    """The row that covers each place, and how far into it the place is; (rows, 0) at and past the end."""
    row = jnp.searchsorted(offsets[1:], place, side="right", method="compare_all").astype(jnp.int32)  # one kernel
    return row, jnp.where(row < offsets.shape[0] - 1, place - offsets[row], 0)


def _prefix_sums(x: Int32[Array, "rows"] | Bool[Array, "rows"]) -> Int32[Array, "rows_plus_1"]:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
