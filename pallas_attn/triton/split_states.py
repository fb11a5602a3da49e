"""Store attention states as output or as partial states, and merge the partial states of a row's splits.

A split is a part of a row's keys that one program attends to. `pallas_attn.triton.softmax` describes the state (top,
total, acc) of a query row. Partial states are not normalised. An LSE instead of top and total would be rounded once
more, by up to 1/64 near 5e5.

`_merge` combines partial states in the order of their splits:

    for split in splits of the row, LOADED at a time:
        load the states of LOADED splits
        for each of them:
            top, total, factors = merge_step(split's top and total, top, total)
            acc = acc * keep + split's acc * others          # [query_rows, columns]
    out, lse = acc / (total + sink), top + log2(total)

It runs as a second kernel, so it needs no barrier. A program merges some query rows of a row of the plan and a slice of
their columns (`MergeTile`). No two programs write the same value. The query rows of a KV head are query-major: the
heads of its group for one query are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float, Int32

from pallas_attn.portable.schedule import most_splits
from pallas_attn.runtime import device
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.page_access import column_offsets
from pallas_attn.triton.softmax import merge_step, softmax_result
from pallas_attn.triton.tiles import power_of_two
from pallas_attn.types import DecodePlan

MERGE_ELEMENTS = 4096
"""Maximum number of accumulator values of a program of the merge, and of values that it loads before it merges them: 32
for each of its 128 threads."""

LEAST_MERGE_ELEMENTS = 128
"""Minimum number of accumulator values of a program of the merge: one for each of its 128 threads."""

MOST_LOADED_SPLITS = 8
"""Maximum number of splits whose states a program of the merge loads before it merges them."""


class MergeTile(NamedTuple):
    """Part of the output that one program of the merge computes.

    Attributes:
      rows: number of query rows.
      columns: number of columns.
      loaded_splits: number of splits whose states are loaded before they are merged.
    """

    rows: int
    columns: int
    loaded_splits: int

    @staticmethod
    def of(plan_rows: int, query_rows: int, width: int, multiprocessors: int) -> MergeTile:
        """Return the largest tile with which each multiprocessor has a program, or else the smallest tile.

        A small tile has its loads of several splits in flight at the same time, because its time is mostly latency.

        Args:
          plan_rows: number of rows of the plan.
          query_rows: query rows of a row of the plan.
          width: columns of a value.
        """
        padded, elements = power_of_two(width), MERGE_ELEMENTS
        while elements > LEAST_MERGE_ELEMENTS and plan_rows * -(-query_rows * padded // elements) < multiprocessors:
            elements //= 2
        columns = min(padded, elements)
        return MergeTile(elements // columns, columns, min(MOST_LOADED_SPLITS, MERGE_ELEMENTS // elements))


def partial_states(plan: DecodePlan, table_pages: int, rows: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of acc, top and total for the maximum number of splits of a plan.

    Args:
      rows: query rows per KV head.
      width: columns of a value.
    """
    return state_shapes(most_splits(plan, table_pages), rows, width)


def state_shapes(splits: int, rows: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of acc [splits, rows, width], top and total [splits, rows]."""
    states = splits, rows
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*states, width), states, states)]


class Splits(Protocol):
    """Fields of a `DecodePlan` that say which splits belong to each row."""

    @property
    def row_order(self) -> Int32[Array, "rows"]: ...
    @property
    def merged_rows(self) -> Int32[Array, "rows_plus_1"]: ...
    @property
    def split_indptr(self) -> Int32[Array, "rows_plus_1"]: ...


class EvenSplits(NamedTuple):
    """Plan fields for rows that all have the same number of splits and all need the merge."""

    row_order: Int32[Array, "rows"]
    merged_rows: Int32[Array, "rows_plus_1"]
    split_indptr: Int32[Array, "rows_plus_1"]

    @staticmethod
    def of(rows: int, splits: int) -> EvenSplits:
        number = jnp.arange(rows + 1, dtype=jnp.int32)
        return EvenSplits(number[:rows], number, number * splits)


def merge_splits(
    out: Float[Array, "B Q Hq D"] | Float[Array, "T Hq D"],
    lse: Float[Array, "B Q Hq"],
    partial: Sequence[Array],
    plan: Splits,
    sinks: Float[Array, "Hq"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B Q Hq D"] | Float[Array, "T Hq D"], Float[Array, "B Q Hq"]]:
    """Write the output rows that have several splits or no visible keys, in place.

    Args:
      out: output. May have more tokens than the B·Q tokens of this call.
      partial: acc, top and total of all splits.
      sinks: learned sink logits, or None.
      scale: factor that makes `top` a natural-log score: the softmax scale, or 1 for soft-capped scores.
    """
    (batch, num_queries, q_heads), width = lse.shape, out.shape[-1]
    num_rows, card = plan.row_order.shape[0], device.triton_card()
    kv_heads = num_rows // batch
    query_rows = num_queries * q_heads // kv_heads
    tile = MergeTile.of(num_rows, query_rows, width, card.multiprocessors or 1)
    out, lse = launch(
        _merge,
        *(out, lse, *partial, sinks, plan.row_order, plan.merged_rows, plan.split_indptr, num_rows),
        outputs=[out, lse],
        grid=(num_rows, -(-query_rows // tile.rows), -(-width // tile.columns)),
        constants={
            "QUERIES": num_queries,
            "Q_HEADS": q_heads,
            "KV_HEADS": kv_heads,
            "D": width,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "LOADED": tile.loaded_splits,
            "SCALE": scale,
        },
        # On Hopper the assembler may spill a few registers so that one more program fits, which was faster.
        max_registers=None if card.capability == (9, 0) else 255,
        aliases={0: 0, 1: 1},
    )
    return out, lse


@kernel
def _merge(
    _aliased_out_ptr,
    _aliased_lse_ptr,
    part_ptr,  # [splits, group * QUERIES, D]
    part_top_ptr,  # [splits, group * QUERIES] each
    part_total_ptr,
    sinks_ptr,  # [Q_HEADS] or None
    row_order_ptr,  # [rows]
    merged_rows_ptr,  # [rows + 1]
    split_indptr_ptr,  # [rows + 1]
    rows,
    out_ptr,  # [B, QUERIES, Q_HEADS, D]
    lse_ptr,  # [B, QUERIES, Q_HEADS]
    QUERIES: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOADED: tl.constexpr,
    SCALE: tl.constexpr,
):
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    place = tl.load(merged_rows_ptr + tl.program_id(0))
    if place < rows:
        row_in_group = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        real_row = row_in_group < QUERIES * GROUP
        d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        held = real_row[:, None] & (d < D)[None, :]
        sequence, head = sequence_and_head(row_order_ptr, place, KV_HEADS)
        q_head = head * GROUP + row_in_group % GROUP
        out_row = (sequence.to(tl.int64) * QUERIES + row_in_group // GROUP) * Q_HEADS + q_head
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        end = tl.load(split_indptr_ptr + place + 1)
        for first in range(tl.load(split_indptr_ptr + place), end, LOADED):
            tops, totals, parts = (), (), ()
            for i in tl.static_range(LOADED):
                exists = first + i < end
                state = tl.cast(first + i, tl.int64) * (QUERIES * GROUP) + row_in_group
                loaded = real_row & exists
                tops += (tl.load(part_top_ptr + state, mask=loaded, other=float("-inf")),)
                totals += (tl.load(part_total_ptr + state, mask=loaded, other=0.0),)
                parts += (tl.load(part_ptr + state[:, None] * D + d[None, :], mask=held & exists, other=0.0),)
            for i in tl.static_range(LOADED):  # a split past the end changes nothing: its weight is 0
                top, total, keep, others = merge_step(tops[i], totals[i], top, total, SCALE)
                # A split without visible keys may contain 0 · inf.
                part = tl.where((totals[i] != 0)[:, None], parts[i], 0.0)
                acc = acc * keep[:, None] + part * others[:, None]
        stores_lse = real_row & (tl.program_id(2) == 0)
        store_result(
            acc, top, total, out_row, q_head, held, real_row, stores_lse, sinks_ptr, out_ptr, lse_ptr, d, D, SCALE
        )


@kernel
def sequence_and_head(row_order_ptr, place, KV_HEADS: tl.constexpr):
    """Sequence and KV head of the row at a position of the plan's order."""
    row = tl.load(row_order_ptr + place)
    return row // KV_HEADS, row % KV_HEADS


@kernel
def store_values(at, acc, inverse, total, held):
    """Store normalised values. Rows without visible keys are 0; their accumulator may be NaN from 0 · inf."""
    out = tl.where((total != 0)[:, None], acc * inverse[:, None], 0.0)
    tl.store(at, out.to(at.dtype.element_ty), mask=held)


@kernel
def store_result(
    acc,
    top,
    total,
    out_row,
    q_head,
    held,
    real_row,
    stores_lse,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    d,
    D: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Normalise a state over all keys of its rows, and store output and LSE.

    Args:
      acc: [rows, columns].
      out_row: [rows], rows of the output [..., D] and of the LSE.
      q_head: [rows], query heads, which index the sink logits.
      held: [rows, columns], mask of the values that exist.
      real_row: [rows], mask of the rows that exist.
      stores_lse: [rows], mask of the rows whose LSE is stored.
      d: [columns], column numbers.
      SCALE: as in `softmax_step`.
    """
    sink = tl.full(top.shape, float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + q_head, mask=real_row, other=float("-inf"))
    inverse, lse = softmax_result(top, total, sink, SCALE)
    store_values(out_ptr + out_row[:, None] * D + d[None, :], acc, inverse, total, held)
    tl.store(lse_ptr + out_row, lse, mask=stores_lse)


@kernel
def store_chunked_state(
    acc,
    top,
    total,
    row,
    real_row,
    is_whole,
    first_row,
    out_ptr,
    lse_ptr,
    first_state,
    part_ptr,
    part_top_ptr,
    part_total_ptr,
    L: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALE: tl.constexpr,
    sinks_ptr=None,
):
    """Store the state of query rows: as normalised output and LSE if it covers all their keys, else as a partial state.

    Args:
      acc: tuple of CHUNKS accumulators [rows, CHUNK], which together hold the L columns of a value.
      top, total: [rows].
      row: [rows], numbers of the query rows. Row r is stored at row `first_row` + r of the output [..., L] and of the
        LSE, or at row `first_state` + r of the partial states.
      real_row: [rows], mask of the rows that exist.
      is_whole: scalar, whether the state covers all keys.
      SCALE: as in `softmax_step`.
      sinks_ptr: learned sink logits by number of the query row, or None. Partial states have no sinks.
    """
    sink = tl.full(top.shape, float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row, mask=real_row, other=float("-inf"))
    inverse, lse = softmax_result(top, total, sink, SCALE)
    for chunk in tl.static_range(CHUNKS):
        at, held = column_offsets(row * L, real_row, chunk * CHUNK, L, CHUNK)
        if is_whole:
            store_values(out_ptr + first_row * L + at, acc[chunk], inverse, total, held)
        else:
            tl.store(part_ptr + first_state * L + at, acc[chunk], mask=held)
    if is_whole:
        tl.store(lse_ptr + first_row + row, lse, mask=real_row)
    else:
        tl.store(part_top_ptr + first_state + row, top, mask=real_row)
        tl.store(part_total_ptr + first_state + row, total, mask=real_row)
