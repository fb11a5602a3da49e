"""Merge of the partial states of `mosaic_tcgen05`, in the order of their splits, whichever programs they came from."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.sm90 import tiles
from pallas_attn.mosaic.sm100 import native_tiles
from pallas_attn.mosaic.sm100.native_tiles import ROWS, load_fragments, num_fragments
from pallas_attn.mosaic.tile_scheduler import for_each_merged, merge_programs
from pallas_attn.ops.mla_decode.mosaic_tcgen05 import (
    COLUMNS,
    TcgenPartials,
    TcgenResults,
    TcgenStatic,
    log_sum_exp,
    over_columns,
    over_rows,
    state_index,
    write_tile,
)
from pallas_attn.types import DecodePlan


def merge_splits(
    results: TcgenResults, static: TcgenStatic, plan: DecodePlan
) -> tuple[Float[Array, "B rows L"], Float[Array, "blocks B ROWS"]]:
    """Finish, in place, the sequences that output and LSE lack: those of several splits, and those that see nothing."""
    out, lse, partials = results
    blocks, batch, _ = lse.shape
    refs = basics.alias_in_place(out), basics.alias_in_place(lse)
    plgpu.kernel(
        functools.partial(_kernel, static),
        grid=(merge_programs(_slices(static) * blocks * batch),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_latents",
    )(*refs, *basics.materialize((partials, plan)))
    return basics.read_back(refs[0]), basics.read_back(refs[1])


def _slices(static: TcgenStatic) -> int:
    """Tiles of O of a block of query rows."""
    return static.halves * (static.state_columns // _slice_columns(static))


def _slice_columns(static: TcgenStatic) -> int:
    """Columns of such a tile."""
    return static.columns or COLUMNS


def _kernel(static: TcgenStatic, out: Ref, lse: Ref, partials: TcgenPartials, plan: DecodePlan) -> None:
    """Merge tiles of O of blocks of query rows, one after the other."""
    blocks, columns = lse.shape[0], _slice_columns(static)
    a_half = _slices(static) // static.halves
    if static.columns:
        shape, layout, spread = (columns,), native_tiles.PER_COLUMN, over_columns
    else:
        shape, layout, spread = (ROWS,), native_tiles.PER_ROW, over_rows

    def merge(index: Any, item: Any) -> None:
        block, slice_of_block = lax.div(item, _slices(static)), lax.rem(item, _slices(static))
        half, number = lax.div(slice_of_block, a_half), lax.rem(slice_of_block, a_half)
        row, first_split = plan.row_order[index], plan.split_indptr[index]
        fragments = pl.ds(number * num_fragments(columns), num_fragments(columns))

        def load(split: Any) -> tuple[Any, Any, Any]:
            state = state_index(partials, static, blocks, block, split, half)
            stats = partials.stats.at[state, :, pl.ds(0, shape[0])]
            m, l = (basics.load(stats.at[i], layout) for i in range(2))  # noqa: E741
            return m, l, load_fragments(partials.acc.at[state, fragments])

        def add(split: Any, merged: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            more = load(split)
            m = jnp.maximum(merged[0], more[0])
            shift = jnp.where(m == -jnp.inf, 0.0, m)
            (_, l, acc), (_, other_l, other_acc) = merged, more  # noqa: E741
            weight, other = jnp.exp2(merged[0] - shift), jnp.exp2(more[0] - shift)
            acc = acc * spread(weight, acc.shape) + other_acc * spread(other, acc.shape)
            return m, l * weight + other_l * other, acc

        empty = (
            tiles.filled(-jnp.inf, shape, layout),
            tiles.filled(0.0, shape, layout),
            tiles.filled(0.0, (ROWS, columns), native_tiles.NATIVE),
        )
        m, l, acc = lax.fori_loop(first_split, plan.split_indptr[index + 1], add, empty)  # noqa: E741
        seen = l != 0
        inverse = spread(jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0), acc.shape)
        tile = jnp.where(inverse != 0, acc * inverse, 0.0)

        for i in range(a_half):

            @pl.when(number == i)
            def _write(i: int = i) -> None:
                write_tile(out, static, row, block, half, i * columns, tile)

        @pl.when(slice_of_block == 0)
        def _store_lse() -> None:
            lse[block, row, pl.ds(0, shape[0])] = log_sum_exp(m, l)

    for_each_merged(plan, _slices(static) * blocks, merge)
