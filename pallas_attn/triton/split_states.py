"""Attention states in Triton: written as output, or left as partial states of split rows, which a second kernel merges.

States are not normalised: of a query row, `top` is the largest score times log2(e), `total` the sum of all
2**(score * log2(e) - top), `acc` the sum of values times the same, all float32. An LSE in place of the first two would
be rounded once more: at 5e5 by up to 1/64.
Query rows of a KV head are query-major: all heads of its group for one query are neighbours.
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
from pallas_attn.triton.pieces import merge_step, softmax_result
from pallas_attn.triton.tiles import power_of_two
from pallas_attn.types import DecodePlan

MERGE_ELEMENTS = 4096
"""Values that a program merges at a time, 32 of each thread."""


def partial_states(plan: DecodePlan, table_pages: int, rows: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of acc, top and total of all splits that a plan can make, of so many query rows a KV head."""
    return state_shapes(most_splits(plan, table_pages), rows, width)


def state_shapes(splits: int, rows: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of acc, top and total of so many splits, of so many query rows a KV head."""
    states = splits, rows
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*states, width), states, states)]


class Splits(Protocol):
    """Which splits make up each row, as a `DecodePlan` has it."""

    @property
    def row_order(self) -> Int32[Array, "rows"]: ...
    @property
    def merged_rows(self) -> Int32[Array, "rows_plus_1"]: ...
    @property
    def split_indptr(self) -> Int32[Array, "rows_plus_1"]: ...


class EvenSplits(NamedTuple):
    """Splits of rows that all have as many, and are all merged."""

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
) -> tuple[Float[Array, "B Q Hq D"] | Float[Array, "T Hq D"], Float[Array, "B Q Hq"]]:
    """Finishes, in place, the rows that `out` and `lse` lack: those of several splits, and those that see nothing.

    Args:
      out: may hold tokens of others behind the B·Q of this call.
    """
    (batch, num_queries, q_heads), width = lse.shape, out.shape[-1]
    num_rows = plan.row_order.shape[0]
    kv_heads, columns = num_rows // batch, power_of_two(width)
    rows = max(1, MERGE_ELEMENTS // columns)
    out, lse = launch(
        _merge,
        *(out, lse, *partial, sinks, plan.row_order, plan.merged_rows, plan.split_indptr, num_rows),
        outputs=[out, lse],
        grid=(num_rows, -(-(num_queries * q_heads // kv_heads) // rows)),
        constants={
            "QUERIES": num_queries,
            "Q_HEADS": q_heads,
            "KV_HEADS": kv_heads,
            "D": width,
            "ROWS": rows,
            "WIDTH": columns,
        },
        # As on Hopper, where it was timed, the assembler may spill a few registers so that another program fits beside.
        max_registers=None if device.triton_card().capability == (9, 0) else 255,
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
    WIDTH: tl.constexpr,
):
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    place = tl.load(merged_rows_ptr + tl.program_id(0))
    if place < rows:
        row_in_group = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        real_row = row_in_group < QUERIES * GROUP
        d = tl.arange(0, WIDTH)
        held = real_row[:, None] & (d < D)[None, :]
        sequence, head = sequence_and_head(row_order_ptr, place, KV_HEADS)
        q_head = head * GROUP + row_in_group % GROUP
        out_row = (sequence.to(tl.int64) * QUERIES + row_in_group // GROUP) * Q_HEADS + q_head
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for split in range(tl.load(split_indptr_ptr + place), tl.load(split_indptr_ptr + place + 1)):
            state = tl.cast(split, tl.int64) * (QUERIES * GROUP) + row_in_group
            other_top = tl.load(part_top_ptr + state, mask=real_row, other=float("-inf"))
            other_total = tl.load(part_total_ptr + state, mask=real_row, other=0.0)
            part = tl.load(part_ptr + state[:, None] * D + d[None, :], mask=held, other=0.0)
            top, total, keep, others = merge_step(other_top, other_total, top, total)
            part = tl.where((other_total != 0)[:, None], part, 0.0)  # one that saw nothing may hold 0 times infinity
            acc = acc * keep[:, None] + part * others[:, None]
        store_result(acc, top, total, out_row, q_head, held, real_row, sinks_ptr, out_ptr, lse_ptr, d, D)


@kernel
def sequence_and_head(row_order_ptr, place, KV_HEADS: tl.constexpr):
    """Sequence and KV head of the row at a place of the plan's order."""
    row = tl.load(row_order_ptr + place)
    return row // KV_HEADS, row % KV_HEADS


@kernel
def store_values(at, acc, inverse, total, held):
    """Writes output values, normalised; 0 for rows that see nothing, which may have added 0 times an infinite value."""
    out = tl.where((total != 0)[:, None], acc * inverse[:, None], 0.0)
    tl.store(at, out.to(at.dtype.element_ty), mask=held)


@kernel
def store_result(acc, top, total, out_row, q_head, held, real_row, sinks_ptr, out_ptr, lse_ptr, d, D: tl.constexpr):
    """Normalises a state over all keys of its rows, and writes it.

    Args:
      out_row: [rows], those of the output [..., D] and of the LSE.
      q_head: [rows], which of the learned logits a row has, if there are any.
      held: [rows, columns], the values that exist.
      d: [columns].
    """
    sink = tl.full(top.shape, float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + q_head, mask=real_row, other=float("-inf"))
    inverse, lse = softmax_result(top, total, sink)
    store_values(out_ptr + out_row[:, None] * D + d[None, :], acc, inverse, total, held)
    tl.store(lse_ptr + out_row, lse, mask=real_row)
