"""What `mosaic.row_layout` does with the attention of its rows once it has all of it, or leaves to a second kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.sm90 import tiles
from pallas_attn.mosaic.sm90.split_states import (
    FRAGMENT_COLUMNS,
    AttentionState,
    PartialLoader,
    PartialStates,
    load_fragments,
    num_fragments,
)
from pallas_attn.mosaic.sm90.tiles import over_tokens
from pallas_attn.mosaic.tile_scheduler import for_each_merged, merge_programs
from pallas_attn.ops.mla_decode.mosaic_rows_memory import PER_ROW, ROWS
from pallas_attn.types import DecodePlan

MOST_COLUMNS = 64
"""Of the latent, for a program of the merge."""


def normalised(acc: Any, l: Any) -> Any:  # noqa: E741
    """[ROWS, columns] for sums l of weights; 0 where a row sees nothing, or is none, whatever `acc` holds there."""
    seen = l != 0
    inverse = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
    return jnp.where(over_tokens(seen, acc.shape), acc * over_tokens(inverse, acc.shape), 0.0)


def log_sum(m: Any, l: Any) -> Any:  # noqa: E741
    """LSE of rows whose weights, exp2(score · log2 e - m), sum up to l."""
    seen = l != 0
    return jnp.where(seen, (m + jnp.log2(jnp.where(seen, l, 1.0))) * (1 / LOG2E), -jnp.inf)


def merge_pieces(
    out: Float[Array, "B rows L"],
    lse: Float[Array, "blocks B ROWS"],
    partials: PartialStates,
    plan: DecodePlan,
) -> tuple[Float[Array, "B rows L"], Float[Array, "blocks B ROWS"]]:
    """Finishes the sequences that `out` and `lse` still lack, in place: those of several pieces and those of none.

    Pieces are merged in their order, whichever programs made them.
    """
    (blocks, batch, _), latent_dim = lse.shape, out.shape[2]
    columns = MOST_COLUMNS
    while columns > FRAGMENT_COLUMNS and 2 * blocks * batch * (latent_dim // columns) <= basics.multiprocessors():
        columns //= 2  # to keep them all busy
    refs = basics.alias_in_place(out), basics.alias_in_place(lse)
    plgpu.kernel(
        functools.partial(_kernel, columns),
        grid=(merge_programs(latent_dim // columns * blocks * batch),),
        grid_names=("program",),
        scratch_types=[
            PartialLoader.types(partials, blocks * batch, ROWS, num_fragments(ROWS * columns)),
            plgpu.SMEM((ROWS, columns), out.dtype),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_rows",
    )(*refs, *basics.materialize((partials, plan)))
    return basics.read_back(refs[0]), basics.read_back(refs[1])


def _kernel(
    columns: int, out: Ref, lse: Ref, partials: PartialStates, plan: DecodePlan, arrivals: PartialLoader, tile: Ref
) -> None:
    """Some columns of the latent of blocks of rows, one after the other."""
    blocks, parts, here = lse.shape[0], out.shape[2] // columns, num_fragments(ROWS * columns)

    def add(stats: Ref, acc: Ref, merged: AttentionState) -> AttentionState:
        m, l = (basics.load(stats.at[i], PER_ROW) for i in range(2))  # noqa: E741
        return merged.merge(AttentionState(m, l, load_fragments(acc, (ROWS, columns))), over_tokens)

    def merge(place: Any, number: Any) -> None:
        block, part = lax.div(number, parts), lax.rem(number, parts)
        row, first_piece = plan.row[place], plan.piece_offsets[place]
        first, count = partials.state_index(block, blocks, first_piece), plan.piece_offsets[place + 1] - first_piece
        empty = AttentionState(
            tiles.filled(-jnp.inf, (ROWS,), PER_ROW),
            tiles.filled(0.0, (ROWS,), PER_ROW),
            tiles.filled(0.0, (ROWS, columns), tiles.TILE),
        )
        merged = arrivals.for_each(partials, first, count, slice(None), pl.ds(part * here, here), add, empty)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile may still be on its way out, for another row
        tile[...] = normalised(merged.acc, merged.l).astype(tile.dtype)
        plgpu.commit_smem()
        to = out.at[row, pl.ds(block * ROWS, ROWS), pl.ds(part * columns, columns)]
        plgpu.copy_smem_to_gmem(tile, to)

        @pl.when(part == 0)
        def _store_lse() -> None:
            lse[block, row] = log_sum(merged.m * LOG2E, merged.l)

    for_each_merged(plan, parts * blocks, merge)
    plgpu.wait_smem_to_gmem(0)
