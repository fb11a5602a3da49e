"""Functions for latent attention in blocks of 64 query rows: roles of warpgroups, query copies, and merge of splits.

The Hopper kernels of `mla_decode` and `mla_sparse` with query rows in blocks share these functions. A query row is one
head of one query token. A split is a range of the keys of a query row that one CTA attends to. If a query row has
several splits, the CTAs store partial states in global memory (`mosaic.partial_states`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.merge import StateForm
from pallas_attn.mosaic.partial_states import FRAGMENT_COLUMNS, PartialLoader, PartialStates, num_fragments
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64

ROWS = 64
"""Maximum number of query rows of a block."""

EIGHT_ROWS = 8
"""Rows of a swizzled tile in shared memory. A block has a multiple of these query rows."""

TOKENS = 64
"""Latents of a tile."""

PER_ROW = PER_TOKEN
"""Register layout of one value per query row, where query rows are the rows of a tile."""

LOG2_ROW_STATES = StateForm(query_axis=0, log2=True)
"""Form of states in the registers of the bf16 attention kernels: acc [ROWS, latent columns], m in units of log2."""

LOG2_COLUMN_STATES = StateForm(query_axis=1, log2=True)
"""Form of states in the registers of the fp8 attention kernels: acc [latent columns, ROWS], m in units of log2."""

ROW_STATES = StateForm(query_axis=0, log2=False)
"""Form of partial states in global memory: acc [ROWS, latent columns], m in units of the scaled scores (not log2)."""

MERGE_COLUMNS = 64
"""Maximum number of latent columns that one work item of the merge kernel covers."""


def halves(latent_dim: int) -> tuple[int, int]:
    """Return the numbers of latent columns that consumer warpgroups 0 (left half) and 1 (right half) accumulate.

    Both are multiples of 64. If 64 divides L an odd number of times, the left half has 64 more columns.
    """
    left = -(-latent_dim // 128) * 64
    return left, latent_dim - left


# --- roles of the warpgroups of an attention kernel


def run_roles(registers: tuple[int, int], consume: Callable[[int], None], produce: Callable[[], None]) -> None:
    """Run the three warpgroups of a CTA: consume(half) in warpgroups 0 and 1, and produce() in warpgroup 2.

    Args:
      registers: registers per thread of a consumer, and of the producer.
    """

    def consumer(half: int) -> None:
        plgpu.set_max_registers(registers[0], action="increase")
        consume(half)

    def producer() -> None:
        plgpu.set_max_registers(registers[1], action="decrease")
        produce()

    branches = [functools.partial(consumer, 0), functools.partial(consumer, 1), producer]
    lax.switch(lax.axis_index("warpgroup"), branches)


def copy_query(q_latent: Ref, q_rope: Ref | None, halves: tuple[Ref, Ref], rope: Ref | None, full: Ref) -> None:
    """Start TMA copies of the query rows of a block to shared memory.

    Args:
      q_latent, q_rope: [rows, L] and [rows, R] in global memory; q_rope is None if R = 0.
      halves, rope: destinations of the two halves of the latent columns, and of the rotated columns.
      full: barrier with an arrival for each of these copies.
    """
    first = 0
    for half in halves:
        width = half.shape[1]
        plgpu.copy_gmem_to_smem(q_latent.at[:, pl.ds(first, width)], half, full)
        first += width
    if q_rope is not None and rope is not None:
        plgpu.copy_gmem_to_smem(q_rope, rope, full)


# --- the merge of partial states


def merge_columns(blocks: int, latent_dim: int) -> int:
    """Return the number of latent columns of a work item of the merge kernel.

    It is `MERGE_COLUMNS`, or less if there would be fewer work items than half of the SMs.

    Args:
      blocks: number of blocks of query rows to merge.
    """
    columns = MERGE_COLUMNS
    while columns > FRAGMENT_COLUMNS and 2 * blocks * (latent_dim // columns) <= basics.multiprocessors():
        columns //= 2
    return columns


def merge_scratch_types(partials: PartialStates, blocks: int, columns: int, tile: Any) -> list[Any]:
    """Return the scratch types of a kernel that calls `merge_slice`.

    Args:
      blocks: upper bound of the number of blocks of query rows with partial states.
      columns: latent columns of a slice.
      tile: scratch type of the output slice, [ROWS, columns].
    """
    return [PartialLoader.types(partials, blocks, ROWS, num_fragments(ROWS * columns)), tile]


def merge_slice(
    loader: PartialLoader,
    partials: PartialStates,
    first: Any,
    count: Any,
    column_slice: Any,
    tile: Ref,
    out: Ref,
    lse: Ref,
    sinks: Ref | None = None,
) -> None:
    """Merge one slice of latent columns of a block of query rows, and write its output; slice 0 also writes the LSE.

    The copy of the output is not complete when this function returns.

    Args:
      first, count: index of the block's first partial state, and number of states. States are merged in ascending order
        of their index.
      column_slice: index of the slice.
      tile: [ROWS, columns of a slice] in shared memory.
      out: [rows, L] in global memory, the output of the block, which has at most ROWS rows.
      lse: [ROWS] in global memory, the LSE of the block.
      sinks: [ROWS] in global memory, the learned sink logits of the block's rows, or None.
    """
    columns = tile.shape[1]
    slice_fragments = num_fragments(ROWS * columns)
    fragments = pl.ds(column_slice * slice_fragments, slice_fragments)
    empty = ROW_STATES.empty((ROWS, columns), PER_ROW, TILE)
    merged = loader.merge(ROW_STATES, BY_64, partials, first, count, slice(None), fragments, empty)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy of the previous slice may still read the tile
    sink = None if sinks is None else basics.load(sinks, PER_ROW)
    tile[...] = ROW_STATES.output(merged, sink).astype(tile.dtype)
    plgpu.commit_smem()
    rows = out.shape[0]
    from_tile = tile if rows == ROWS else tile.at[pl.ds(0, rows)]
    plgpu.copy_smem_to_gmem(from_tile, out.at[:, pl.ds(column_slice * columns, columns)])

    @pl.when(column_slice == 0)
    def _store_lse() -> None:
        lse[...] = ROW_STATES.lse(merged.m, merged.l)
