"""Grouped GEMM on Hopper with swapped operands (swap AB), for up to 64 rows per expert on average.

A row is the hidden vector of one token, and a group consists of the rows of one expert.

    Y[rows of group g] = X[rows of group g] @ W[g]                                      plain
    Y[rows of group g] = silu(X @ gate columns of W[g]) · (X @ up columns of W[g])      gated

With few rows per group, most of the time is spent on reading weights. The kernel therefore computes the transpose of
the output: weight columns fill the 64 rows of a wgmma, and the rows of the group are its width, which may be small.

    (W[:, 64 columns])ᵀ  [64, K]   @   Xᵀ  [K, tile_rows]   ->   [64, tile_rows], stored as its transpose

A work item is a tile of up to `tile_rows` rows of one group and 256 weight columns, or 128 or 64 if 256 does not divide
the number of columns (`column_split`). In the gated form, half of them are gate columns, and half are the corresponding
up columns. The weights of a group are read once per row tile; its rows stay in L2. One or two consumer warpgroups
multiply an equal share of the columns each, in one or two blocks of 64 columns:

    for (row tile, columns) in the work items of this CTA:
        for k in range(K / DEPTH):
            producer:   x[row tile, k], W[group, k, block of 64 columns] for each consumer and block  ->  stage
            consumer c: accumulator[block] += W[group, k, block of c]ᵀ @ x[row tile, k]ᵀ
        consumer c:     activate; store each block by TMA

    barrier         arrives                        waits                                       arrivals per phase
    full[stage]     the TMA copies of the stage    consumers                                   1 + consumers · blocks
    empty[stage]    each consumer                  producer, from the second use of a stage    number of consumers

Deadlock freedom: as for every kernel of `pipeline.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.models.moe.kernels.pipeline import (
    DEPTH,
    ROW_ALIGNMENT,
    Items,
    Ring,
    Scratch,
    activate,
    first_dividing,
    persistent_kernel,
    run_warpgroups,
    store_rows,
    wgmma_swap_ab,
    write_out_tile,
)
from pallas_attn.models.moe.kernels.row_tiles import RowTiles

COLUMNS = 64
"""Weight columns of a block: the rows of a wgmma."""

OPERAND_BYTES = 224 * 1024
"""Maximum shared memory of all pipeline stages and output tiles."""

MAX_STAGES = 6
MAX_TILE_ROWS = 128
"""Maximum rows of a tile: the accumulators of two blocks then take 128 registers per thread."""


def tile_rows_of(num_rows: int, num_groups: int) -> int:
    """Return the number of rows of a tile, 64 to `MAX_TILE_ROWS`: 1.5 times the average group, rounded up to a multiple
    of 32, so that most groups fit in one tile."""
    return min(max(-(-3 * num_rows // (64 * num_groups)) * 32, 64), MAX_TILE_ROWS)


def column_split(columns: int, *, gated: bool) -> tuple[int, int]:
    """Return the number of consumers, and of column blocks per consumer. If gated, these are a gate and an up block.

    Raises:
      NotImplementedError: no supported split divides the columns.
    """
    return first_dividing(((2, 2), (1, 2)) if gated else ((2, 2), (2, 1), (1, 1)), columns, COLUMNS, gated=gated)


class SwapAbGemm(NamedTuple):
    """Arguments of `swap_ab_gemm`.

    Attributes:
      x: rows in a 16-bit dtype, `padded_rows(..., tile_rows)` rows. Group g starts at row `first_rows(sizes)[g]`.
      weights: weights of each group. K is a multiple of 64.
      tiles: `RowTiles.of(sizes, ..., tile_rows)`.
      tile_rows: rows of a tile, a multiple of 8.
      gated: compute silu(left half of the columns) · right half, N / 2 columns. Otherwise compute all N columns.
    """

    x: Float[Array, "M K"]
    weights: Float[Array, "groups K N"]
    tiles: RowTiles
    tile_rows: int
    gated: bool


def swap_ab_gemm(call: SwapAbGemm) -> Float[Array, "M N_out"]:
    """Multiply the rows of each group with the weights of the group, accumulating in float32.

    Returns:
      One row per row of `call.x`, in the dtype of `call.x`. Rows that belong to no group are undefined.

    Raises:
      NotImplementedError: no supported split divides the columns.
    """
    x, weights, tiles, tile_rows, gated = call
    depth, columns = weights.shape[1:]
    consumers, blocks = column_split(columns, gated=gated)
    stage_bytes = (consumers * blocks * COLUMNS + tile_rows) * DEPTH * x.dtype.itemsize
    out_bytes = consumers * tile_rows * COLUMNS * x.dtype.itemsize
    scratch = Scratch.types(
        x.dtype,
        num_stages=min(MAX_STAGES, (OPERAND_BYTES - out_bytes) // stage_bytes),
        num_consumers=consumers,
        rows=tile_rows,
        weight_tiles=(consumers, blocks),
        columns=COLUMNS,
        out=(consumers, tile_rows, COLUMNS),
    )
    return persistent_kernel(
        functools.partial(_kernel, gated, depth // DEPTH),
        jax.ShapeDtypeStruct((x.shape[0], columns // 2 if gated else columns), x.dtype),
        scratch,
        num_consumers=consumers,
        name="swap_ab_gemm",
    )(x, weights, tiles)


def _kernel(gated: bool, steps: int, x: Any, weights: Any, tiles: RowTiles, out: Any, scratch: Scratch) -> None:
    warpgroup = lax.axis_index("warpgroup")
    num_stages, consumers, blocks = scratch.weights.shape[:3]
    tile_rows = scratch.x.shape[1]
    own_width = COLUMNS if gated else blocks * COLUMNS  # output columns of a consumer
    column_tiles = out.shape[1] // (consumers * own_width)
    items = Items.of_cta(tiles.count[0] * column_tiles)
    ring = Ring(scratch.full, scratch.empty, num_stages, steps)

    def tile_of(number: Any) -> tuple[Any, Any]:
        """Row tile and first output column of a work item.

        Consecutive work items, which run concurrently, are the columns of one row tile, then of the next row tile of
        the group. The rows of X and the weights of the group are therefore read from L2.
        """
        index = items.global_index(number)
        return lax.div(index, column_tiles), lax.rem(index, column_tiles) * (consumers * own_width)

    def copies(number: Any) -> Any:
        tile, column = tile_of(number)
        group, start = tiles.group[tile], pl.multiple_of(tiles.start[tile], ROW_ALIGNMENT)

        def copy(stage: Any, step: Any) -> None:
            full, depth = scratch.full.at[stage], pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x.at[pl.ds(start, tile_rows), depth], scratch.x.at[stage], full)
            for consumer in range(consumers):
                for block in range(blocks):
                    first = column + consumer * own_width + block * (out.shape[1] if gated else COLUMNS)
                    source = weights.at[group, depth, pl.ds(first, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, scratch.weights.at[stage, consumer, block], full)

        return copy

    def compute(number: Any) -> None:
        tile, column = tile_of(number)

        def start_wgmma(accumulator: Any, stage: Any, block: int) -> None:
            wgmma_swap_ab(accumulator, scratch.weights.at[stage, warpgroup, block], scratch.x.at[stage])

        accumulators = ring.multiply(number, (COLUMNS, tile_rows), blocks, start_wgmma)
        ring.release_last(number)
        results = activate(accumulators, gated=gated)  # each [COLUMNS, tile_rows]
        start = pl.multiple_of(tiles.start[tile], ROW_ALIGNMENT)
        out_tile = scratch.out.at[warpgroup]  # [tile_rows, COLUMNS]
        for block, values in enumerate(results):
            write_out_tile(out_tile.transpose((1, 0)), values.astype(x.dtype))
            first = column + warpgroup * own_width + block * COLUMNS
            store_rows(out_tile, out.at[:, pl.ds(first, COLUMNS)], start, tiles.rows[tile])

    is_consumer = warpgroup < consumers
    run_warpgroups(ring, items, copies, compute, is_consumer=is_consumer, num_consumers=consumers, stores_by_tma=True)
