"""Products of groups of some dozens of rows with a matrix of weights each, on Hopper: a mixture's steps with a few
hundred tokens, where reading weights is still most of the time.

    Y[rows of group g] = X[rows of group g] @ W[g]        or silu(X @ gate columns of W[g]) · (X @ up columns)

Weights are the left operand (swap AB), as in `row_product.py`: columns fill the 64 rows of a product whatever the
number of rows, which is the product's width. A program takes a tile of up to `tile_rows` rows of one group and 256
columns, 128 gates and their up columns in the second form; so one group's weights are read once, and its rows, which
stay in L2, by half as many programs as with 128. One warpgroup copies, two compute, half of the columns each, in up to
two parts of 64:

    (W[:, part])ᵀ  [64, K]   @   Xᵀ  [K, tile_rows]   ->   [64, tile_rows], stored as its transpose

    producer    X0 W0  X1 W1  X2 W2  ···        into slots, as they become free
    consumers          X0 W0  X1 W1  ···        a product is started before the one before is waited for

    barrier         arrivals            who waits
    landed[slot]    the copies          consumers
    free[slot]      every consumer      the producer, from the second use of a slot on

No warpgroup waits for what comes later, as in `group_product.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from models.moe.kernels.grouped_gemm import (
    ALIGNMENT,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    PROGRAMS,
    RowTiles,
    Scratch,
    Slots,
    operand_type,
    silu,
    store_rows,
)

COLUMNS, DEPTH = 64, 64
OPERAND_BYTES = 224 * 1024
"""Shared memory that slots and results may take together."""

MOST_STAGES = 6
MOST_TILE_ROWS = 128
"""Rows of a tile at most: two parts' sums are 128 registers then."""


def tile_rows_of(num_rows: int, num_groups: int) -> int:
    """Rows of a tile for so many rows of so many groups: a half more than a group has on average, so that most groups
    are one tile, between 64 and `MOST_TILE_ROWS`."""
    return min(max(-(-3 * num_rows // (64 * num_groups)) * 32, 64), MOST_TILE_ROWS)


def column_split(columns: int, *, gated: bool) -> tuple[int, int]:
    """Number of consumers, and of parts of 64 columns that each takes; of gated columns one of gates and one of up.

    Raises:
      NotImplementedError: none divides the columns.
    """
    shapes = ((2, 2), (1, 2)) if gated else ((2, 2), (2, 1), (1, 1))
    for consumers, parts in shapes:
        if columns % (consumers * parts * COLUMNS) == 0:
            return consumers, parts
    raise NotImplementedError(f"takes columns that are a multiple of {128 if gated else 64}, got {columns}")


class SwappedProduct(NamedTuple):
    """A call of `swapped_product`.

    Attributes:
      x: rows, 16 bits, `padded_rows(...)` of them for tiles of `tile_rows`; groups begin at `first_rows(sizes)`.
      weights: of each group; K is a multiple of 64.
      tiles: `RowTiles.of(sizes, ..., tile_rows)`.
      tile_rows: rows of a tile, a multiple of 8.
      gated: silu(left half of the columns) · right half is wanted, N / 2 columns; else all N columns.
    """

    x: Float[Array, "M K"]
    weights: Float[Array, "groups K N"]
    tiles: RowTiles
    tile_rows: int
    gated: bool


def swapped_product(call: SwappedProduct) -> Float[Array, "M N_out"]:
    """Multiplies each group's rows with its weights, in float32.

    Returns:
      Products in the order of `call.x` and of its dtype. Rows of no group hold anything.

    Raises:
      NotImplementedError: columns that no split divides.
    """
    x, weights, tiles, tile_rows, gated = call
    depth, columns = weights.shape[1:]
    consumers, parts = column_split(columns, gated=gated)
    width = columns // 2 if gated else columns
    slot_bytes = (consumers * parts * COLUMNS + tile_rows) * DEPTH * x.dtype.itemsize
    out_bytes = consumers * tile_rows * COLUMNS * x.dtype.itemsize
    stages = min(MOST_STAGES, (OPERAND_BYTES - out_bytes) // slot_bytes)

    operand = functools.partial(operand_type, dtype=x.dtype)
    scratch = Scratch(
        x=operand((stages, tile_rows, DEPTH)),
        weights=operand((stages, consumers, parts, DEPTH, COLUMNS)),
        out=operand((consumers, tile_rows, COLUMNS)),
        landed=plgpu.Barrier(num_arrivals=1 + consumers * parts, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    )
    return plgpu.kernel(
        functools.partial(_kernel, gated, depth // DEPTH),
        out_type=jax.ShapeDtypeStruct((x.shape[0], width), x.dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=(scratch,),
        kernel_name="swapped_product",
    )(x, weights, tiles)


def _kernel(gated: bool, steps: int, x: Any, weights: Any, tiles: RowTiles, out: Any, scratch: Scratch) -> None:
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    stages, consumers, parts = scratch.weights.shape[:3]
    tile_rows = scratch.x.shape[1]
    own_width = COLUMNS if gated else parts * COLUMNS
    column_tiles = out.shape[1] // (consumers * own_width)
    items = tiles.count[0] * column_tiles
    own_items = lax.div(jnp.maximum(items - program + (PROGRAMS - 1), 0), PROGRAMS)

    def item(number: Any) -> tuple[Any, Any]:
        """Tile of rows, and first column of the results. Neighbouring programs take the columns of one tile of rows,
        and tiles of one group: both stay in L2."""
        index = program + number * PROGRAMS
        return lax.div(index, column_tiles), lax.rem(index, column_tiles) * (consumers * own_width)

    slots = Slots(scratch.landed, scratch.free, stages, steps)

    def produce() -> None:
        if consumers == 2:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def copy_item(number: Any, _: None) -> None:
            tile, column = item(number)
            group, start = tiles.group[tile], pl.multiple_of(tiles.start[tile], ALIGNMENT)

            def copy(slot: Any, step: Any) -> None:
                landed, depth = scratch.landed.at[slot], pl.ds(step * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(x.at[pl.ds(start, tile_rows), depth], scratch.x.at[slot], landed)
                for consumer in range(consumers):
                    for part in range(parts):
                        first = column + consumer * own_width + part * (out.shape[1] if gated else COLUMNS)
                        source = weights.at[group, depth, pl.ds(first, COLUMNS)]
                        plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, consumer, part], landed)

            slots.fill(number, copy)

        lax.fori_loop(0, own_items, copy_item, None)
        slots.await_last(own_items)

    def consume() -> None:
        if consumers == 2:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def multiply_item(number: Any, _: None) -> None:
            tile, column = item(number)

            def start_product(total: Any, slot: Any, part: int) -> None:
                own = scratch.weights.at[slot, warpgroup, part].transpose((1, 0))
                plgpu.wgmma(total, own, scratch.x.at[slot].transpose((1, 0)))

            results = slots.multiply(number, (COLUMNS, tile_rows), parts, start_product)
            slots.free_last(number)
            if gated:
                gate, up = results
                results = [silu(gate) * up]
            start = pl.multiple_of(tiles.start[tile], ALIGNMENT)
            own = scratch.out.at[warpgroup]
            for part, values in enumerate(results):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                own.transpose((1, 0))[...] = values.astype(x.dtype)
                plgpu.commit_smem()
                first = column + warpgroup * own_width + part * COLUMNS
                store_rows(own, out.at[:, pl.ds(first, COLUMNS)], start, tiles.rows[tile])

        lax.fori_loop(0, own_items, multiply_item, None)
        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup < consumers, consume, produce)
