"""Products of few rows with their experts' weights, on Hopper: a mixture's decode steps, where reading weights is all.

    Y[pair] = X[row of pair] @ W[expert of pair]        or silu(· @ gate columns) · (· @ up columns)

An expert that several pairs have is read once, and one that none has is not read. A program takes the columns of one
expert, 64 or two times 64, and multiplies them with all rows, since on the tensor cores eight rows cost what one does,
and 64 rows less than reading the weights; each pair then takes its own row of the result. The first product's rows are
those of the step. The second's are the first's results: all pairs where they are few, else the part that every expert
has for all rows of the step, most of which nobody wrote, and nobody looks at. Weights are the left operand, so that
rows may be few:

    (W[:, columns])ᵀ  [64, K]   @   Xᵀ  [K, rows]   ->   [64, rows], of which pair p takes column `row of p`

    warpgroup 0, computes        W0·X0  W1·X1  W2·X2  ···        64 of K each
    warpgroup 1, copies      W0 X0  W1 X1  W2 X2  ···            into slots, as they become free

    barrier         arrivals                    who waits
    landed[slot]    the copies                  warpgroup 0
    free[slot]      warpgroup 0                 warpgroup 1, from the second use of a slot on

Neither waits for what comes later: both go through the same tiles in the same order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from models.moe.kernels.grouped_gemm import PROGRAMS, Slots, operand_type, silu

COLUMNS, DEPTH = 64, 64
ROWS = 8
"""Rows are multiplied in multiples of this many."""

MOST_ROWS = 128
"""Rows up to which the kernel is meant: their products are as many registers as a thread has for sums."""

MOST_STAGES, OPERAND_BYTES = 8, 200 * 1024
"""Slots of shared memory, and what all of them may take."""


class Pairs(NamedTuple):
    """Pairs of a row and an expert, and what they share. Pairs with an expert one past the last have none.

    Attributes:
      expert: of each pair.
      next: for each pair the next one with its expert; the number of pairs for the last.
      first: the first pair of each expert that has any, in the order of the pairs.
      count: number of experts that have any, in an array of one.

    All but `expert` are None where every pair has an expert of its own.
    """

    expert: Int32[Array, "P"]
    next: Int32[Array, "P"] | None = None
    first: Int32[Array, "P"] | None = None
    count: Int32[Array, "1"] | None = None

    @staticmethod
    def of(expert: Int32[Array, "P"], num_experts: int) -> Pairs:
        """Finds pairs that share an expert by comparing all with all: there are few."""
        pair = jnp.arange(expert.shape[0], dtype=jnp.int32)
        same = expert[:, None] == expert[None]
        following = jnp.min(jnp.where(same & (pair[None] > pair[:, None]), pair[None], len(pair)), axis=1)
        is_first = ~jnp.any(same & (pair[None] < pair[:, None]), axis=1) & (expert < num_experts)
        place = jnp.sum(is_first[None] & (pair[None] < pair[:, None]), axis=1, dtype=jnp.int32)
        first = jnp.sum(jnp.where(is_first[None] & (place[None] == pair[:, None]), pair[None], 0), axis=1)
        return Pairs(expert, following, first, jnp.sum(is_first, dtype=jnp.int32)[None])


class RowProduct(NamedTuple):
    """A call of `row_product`, the first product of pairs of rows and experts or, of its results, the second one.

    Attributes:
      x: 16 bits. Of the first product the rows, padded to `padded_rows(num_rows)` of them, of which pair p takes row
        p // copies; of the second what the first returned. Rows of no pair may hold anything.
      weights: of each expert; K and the columns that a program takes divide it, see `column_parts`.
      pairs: `Pairs.of(...)`.
      num_rows: number of rows. No expert has one of them twice.
      copies: pairs of each row.
      second: whether it is the second product.
      spread: whether the first product's results lie as rows of each expert, though most have few of them, so that the
        second has no more rows at a time than the first. Otherwise they lie in the order of the pairs.
      gated: silu(left half of the columns) · right half is wanted, N / 2 columns; else all N columns.
      halved: a program takes 64 columns and half of K, for a better balance where all pairs are few. Both halves'
        products are returned, to be added up.
    """

    x: Float[Array, "M K"]
    weights: Float[Array, "E K N"]
    pairs: Pairs
    num_rows: int
    copies: int
    second: bool = False
    spread: bool = False
    gated: bool = False
    halved: bool = False

    @property
    def num_results(self) -> int:
        """Rows of the results."""
        if self.spread and not self.second:
            return self.weights.shape[0] * padded_rows(self.num_rows)
        return padded_rows(self.pairs.expert.shape[0])


def padded_rows(num_rows: int) -> int:
    """Rows that operands and results have for so many."""
    return -(-num_rows // ROWS) * ROWS


def column_parts(columns: int, *, gated: bool) -> int:
    """Number of parts of 64 columns that a program takes.

    Raises:
      NotImplementedError: they do not divide the columns.
    """
    if columns % (2 * COLUMNS) == 0:
        return 2
    if not gated and columns % COLUMNS == 0:
        return 1
    raise NotImplementedError(f"takes columns that are a multiple of {128 if gated else 64}, got {columns}")


def row_product(call: RowProduct) -> Float[Array, "*halves P_padded N_out"]:
    """Multiplies each pair's row with its expert's weights, in float32.

    Returns:
      Products, of `call.x`'s dtype: the first ones for the second call, the second ones in the order of the pairs; if
      halved, [2, P_padded, N_out] of float32. Those of pairs without an expert, and of padding, hold anything.

    Raises:
      NotImplementedError: columns that a program's do not divide, or more than `MOST_ROWS` rows.
    """
    x, weights, columns = call.x, call.weights, call.weights.shape[2]
    num_rows = padded_rows(call.num_rows) if call.spread else x.shape[0]
    if num_rows > MOST_ROWS:
        raise NotImplementedError(f"takes {MOST_ROWS} rows at most, got {num_rows}")
    if call.halved and (call.gated or weights.shape[1] % (2 * DEPTH)):
        raise NotImplementedError(f"halved: takes no gates and a K that is a multiple of 128, got {weights.shape[1]}")
    parts = 1 if call.halved else column_parts(columns, gated=call.gated)
    stages = min(MOST_STAGES, OPERAND_BYTES // ((parts * COLUMNS + num_rows) * DEPTH * x.dtype.itemsize))

    operand = functools.partial(operand_type, dtype=x.dtype)
    scratch = RowScratch(
        x=operand((stages, num_rows, DEPTH)),
        weights=operand((stages, parts, DEPTH, COLUMNS)),
        landed=plgpu.Barrier(num_arrivals=1 + parts, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    )
    shape = call.num_results, columns // 2 if call.gated else columns
    out_type = jax.ShapeDtypeStruct((2, *shape), jnp.float32) if call.halved else jax.ShapeDtypeStruct(shape, x.dtype)
    return plgpu.kernel(
        functools.partial(_kernel, padded_rows(call.num_rows), call.copies, call.second, call.spread, call.gated),
        out_type=out_type,
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(scratch,),
        kernel_name="row_product",
    )(x, weights, call.pairs)


class RowScratch(NamedTuple):
    """Shared memory and barriers of a program."""

    x: Any
    weights: Any
    landed: Any
    free: Any


def _kernel(
    stride: int,
    copies: int,
    second: bool,
    spread: bool,
    gated: bool,
    x: Any,
    weights: Any,
    pairs: Pairs,
    out: Any,
    scratch: RowScratch,
) -> None:
    program, (stages, parts) = lax.axis_index("program"), scratch.weights.shape[:2]
    halves, tile_rows, num_pairs = len(out.shape) - 1, scratch.x.shape[1], pairs.expert.shape[0]
    steps = weights.shape[1] // DEPTH // halves
    tiles = out.shape[-1] // (COLUMNS if gated else parts * COLUMNS)
    count = num_pairs if pairs.count is None else pairs.count[0]
    own_items = lax.div(jnp.maximum(count * tiles * halves - program + (PROGRAMS - 1), 0), PROGRAMS)

    def half_of(number: Any) -> Any:
        """Which part of K an item is of."""
        return lax.rem(program + number * PROGRAMS, halves)

    def item(number: Any) -> tuple[Any, Any, Any]:
        """Its expert, the first pair of that, and the first column of the result."""
        index = lax.div(program + number * PROGRAMS, halves)
        place, width = lax.div(index, tiles), COLUMNS if gated else parts * COLUMNS
        first = place if pairs.first is None else pairs.first[place]
        return pairs.expert[first], first, lax.rem(index, tiles) * width

    def begin_of(expert: Any) -> Any:
        """First row of the first product's results that an expert has."""
        return pl.multiple_of(expert * stride, ROWS) if spread else 0

    slots = Slots(scratch.landed, scratch.free, stages, steps)

    def copy_all() -> None:
        def copy_item(number: Any, _: None) -> None:
            expert, _, column = item(number)
            rows = pl.ds(begin_of(expert) if second else 0, tile_rows)
            firsts = [column + part * (out.shape[-1] if gated else COLUMNS) for part in range(parts)]

            def copy(slot: Any, step: Any) -> None:
                landed, depth = scratch.landed.at[slot], pl.ds((half_of(number) * steps + step) * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(x.at[rows, depth], scratch.x.at[slot], landed)

                for part, first in enumerate(firsts):
                    source = weights.at[expert, depth, pl.ds(first, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, part], landed)

            slots.fill(number, copy)

        lax.fori_loop(0, own_items, copy_item, None)
        slots.await_last(own_items)

    def start_product(total: Any, slot: Any, part: int) -> None:
        own = scratch.weights.at[slot, part].transpose((1, 0))
        plgpu.wgmma(total, own, scratch.x.at[slot].transpose((1, 0)))

    def compute_all() -> None:
        def multiply_item(number: Any, _: None) -> None:
            expert, first, column = item(number)
            target = out.at[half_of(number)] if halves == 2 else out
            results = slots.multiply(number, (COLUMNS, tile_rows), parts, start_product)
            slots.free_last(number)
            if gated:
                gate, up = results
                results = [silu(gate) * up]
            row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (COLUMNS, tile_rows), 1), plgpu.Layout.WGMMA)
            begin = begin_of(expert)

            def store(pair: Any) -> Any:
                own = row == (lax.div(pair, copies) if spread or not second else pair)
                to = begin + lax.div(pair, copies) if spread and not second else pair
                for part, result in enumerate(results):
                    values = jnp.sum(jnp.where(own, result, jnp.zeros_like(result)), axis=1)
                    target[to, pl.ds(column + part * COLUMNS, COLUMNS)] = values.astype(out.dtype)
                return None if pairs.next is None else pairs.next[pair]

            if pairs.next is None:
                store(first)
            else:
                lax.while_loop(lambda pair: pair < num_pairs, store, first)

        lax.fori_loop(0, own_items, multiply_item, None)

    lax.cond(lax.axis_index("warpgroup") == 0, compute_all, copy_all)
