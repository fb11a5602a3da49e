"""Grouped GEMM on Hopper, for many rows per expert: each group of rows is multiplied with its own weight matrix.

A row is the hidden vector of one token, and a group consists of the rows of one expert.

    Y[rows of group g] = X[rows of group g] @ W[g]                                      plain
    Y[rows of group g] = silu(X @ gate columns of W[g]) · (X @ up columns of W[g])      gated

A work item is a tile of 128 rows of one group and one to three blocks of columns. If the number of columns is a
multiple of 256, there are two blocks of 128 columns; otherwise blocks have 64 columns. In the gated form, the two
blocks are gate columns and the corresponding up columns, so that the activation is computed in the epilogue. Two
consumer warpgroups multiply 64 rows each:

    for (row tile, column blocks) in the work items of this CTA:
        for k in range(K / DEPTH):
            producer:   x[row tile, k], W[group, k, column block] for each block  ->  stage
            consumer c: accumulator[block] += x[64 rows of c, k] @ W[group, k, column block]
        consumer c:     activate; store 64 rows of each column block by TMA

    barrier         arrives                        waits                                       arrivals per phase
    full[stage]     the TMA copies of the stage    both consumers                              1 + number of blocks
    empty[stage]    each consumer                  producer, from the second use of a stage    2

Deadlock freedom: as for every kernel of `pipeline.py`. A consumer without rows in a tile waits for the stages of the
tile and releases them without multiplying.

This kernel is used instead of the ragged dot of jax's Mosaic GPU kernels, which uses one warpgroup per CTA, multiplies
a tile once for every group with rows in the tile, and computes no activation.
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
    write_out_tile,
)
from pallas_attn.models.moe.kernels.row_tiles import RowTiles

TILE_ROWS, STAGES = 128, 4
CONSUMERS, CONSUMER_ROWS = 2, 64


def column_blocks(columns: int, *, gated: bool) -> tuple[int, int]:
    """Return the number of column blocks of a work item, and the number of columns of a block.

    Raises:
      NotImplementedError: no supported block size divides the columns.
    """
    splits = ((2, 128), (2, 64)) if gated else ((2, 128), (3, 64), (2, 64), (1, 64))
    return first_dividing(splits, columns, gated=gated)


class GroupedGemm(NamedTuple):
    """Arguments of `grouped_gemm`.

    Attributes:
      x: rows in a 16-bit dtype, `padded_rows(..., TILE_ROWS)` rows. Group g starts at row `first_rows(sizes)[g]`.
      weights: weights of each group. K is a multiple of 64.
      tiles: `RowTiles.of(sizes, ..., TILE_ROWS)`.
      gated: compute silu(left half of the columns) · right half, N / 2 columns. Otherwise compute all N columns.
    """

    x: Float[Array, "M K"]
    weights: Float[Array, "groups K N"]
    tiles: RowTiles
    gated: bool


def grouped_gemm(call: GroupedGemm) -> Float[Array, "M N_out"]:
    """Multiply the rows of each group with the weights of the group, accumulating in float32.

    Returns:
      One row per row of `call.x`, in the dtype of `call.x`. Rows that belong to no group are undefined.

    Raises:
      NotImplementedError: no supported block size divides the columns.
    """
    x, weights, tiles, gated = call
    depth, columns = weights.shape[1:]
    blocks, width = column_blocks(columns, gated=gated)
    scratch = Scratch.types(
        x.dtype,
        num_stages=STAGES,
        num_consumers=CONSUMERS,
        rows=TILE_ROWS,
        weight_tiles=(blocks,),
        columns=width,
        out=(CONSUMERS, CONSUMER_ROWS, width),
    )
    return persistent_kernel(
        functools.partial(_kernel, gated, depth // DEPTH),
        jax.ShapeDtypeStruct((x.shape[0], columns // 2 if gated else columns), x.dtype),
        scratch,
        num_consumers=CONSUMERS,
        name="grouped_gemm",
    )(x, weights, tiles)


class _Tile(NamedTuple):
    """A work item.

    Attributes:
      rows: index of the row tile.
      columns: for each column block, its first column in the weights.
      out_columns: for each block that is stored, its first column in the output; one block if gated.
    """

    rows: Any
    columns: list[Any]
    out_columns: list[Any]


def _kernel(gated: bool, steps: int, x: Any, weights: Any, tiles: RowTiles, out: Any, scratch: Scratch) -> None:
    warpgroup = lax.axis_index("warpgroup")
    blocks, width = scratch.weights.shape[1], scratch.weights.shape[3]
    column_tiles = weights.shape[2] // (blocks * width)
    items = Items.of_cta(tiles.count[0] * column_tiles)
    ring = Ring(scratch.full, scratch.empty, STAGES, steps)

    def tile_of(number: Any) -> _Tile:
        """Return the tile of a work item.

        Consecutive work items, which run concurrently, are the column blocks of one row tile, then of the next row tile
        of the group. The rows of X and the weights of the group are therefore read from L2.
        """
        index = items.global_index(number)
        rows, first = lax.div(index, column_tiles), lax.rem(index, column_tiles) * width
        if gated:
            return _Tile(rows, [first, out.shape[1] + first], [first])
        columns = [first * blocks + block * width for block in range(blocks)]
        return _Tile(rows, columns, columns)

    def copies(number: Any) -> Any:
        tile = tile_of(number)
        group = tiles.group[tile.rows]
        start = pl.multiple_of(tiles.start[tile.rows], ROW_ALIGNMENT)

        def copy(stage: Any, step: Any) -> None:
            full, depth = scratch.full.at[stage], pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x.at[pl.ds(start, TILE_ROWS), depth], scratch.x.at[stage], full)
            for block, column in enumerate(tile.columns):
                source = weights.at[group, depth, pl.ds(column, width)]
                plgpu.copy_gmem_to_smem(source, scratch.weights.at[stage, block], full)

        return copy

    def compute(number: Any) -> None:
        tile = tile_of(number)
        start = pl.multiple_of(tiles.start[tile.rows], ROW_ALIGNMENT) + warpgroup * CONSUMER_ROWS
        rows = tiles.rows[tile.rows] - warpgroup * CONSUMER_ROWS

        def start_wgmma(accumulator: Any, stage: Any, block: int) -> None:
            own = scratch.x.at[stage, pl.ds(warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)]  # [CONSUMER_ROWS, DEPTH]
            plgpu.wgmma(accumulator, own, scratch.weights.at[stage, block])

        def compute_rows() -> None:
            accumulators = ring.multiply(number, (CONSUMER_ROWS, width), blocks, start_wgmma)
            results = activate(accumulators, gated=gated)  # each [CONSUMER_ROWS, width]
            for values, column in zip(results, tile.out_columns, strict=True):
                write_out_tile(scratch.out.at[warpgroup], values.astype(x.dtype))
                store_rows(scratch.out.at[warpgroup], out.at[:, pl.ds(column, width)], start, rows)

        # A tile of at most 64 rows has no rows for the second consumer.
        lax.cond(rows > 0, compute_rows, lambda: ring.read(number, lambda _: None))
        ring.release_last(number)

    is_consumer = warpgroup < CONSUMERS
    run_warpgroups(ring, items, copies, compute, is_consumer=is_consumer, num_consumers=CONSUMERS, stores_by_tma=True)
