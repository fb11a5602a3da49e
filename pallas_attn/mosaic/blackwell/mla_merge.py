"""Experimental: has never run on a card. Merge of the partial states of `mosaic.blackwell.mla_decode`.

Splits are merged in their order, independent of the CTAs that computed them. The loop uses no barriers: each thread
loads its values of a state from global memory, and adds them to the running state.

    for each (sequence, query block, slice of O) of this CTA that needs a merge:
        m, l, acc = -inf, 0, 0                                   # acc [128, slice columns]
        for each split: rescale both states to the larger m and add them
        normalise and write the slice; the first slice also writes LSE
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic.blackwell.mla_decode import (
    SLICE,
    TcgenPartials,
    TcgenResults,
    TcgenStatic,
    log_sum_exp,
    masked,
    spread,
    state_index,
    write_slice,
)
from pallas_attn.mosaic.blackwell.native_tiles import PER_COLUMN, PER_ROW, load_fragments, num_fragments
from pallas_attn.mosaic.blackwell.tmem import ROW_A_THREAD, ROWS
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.tile_scheduler import for_each_merged, merge_programs
from pallas_attn.types import DecodePlan


def merge_splits(
    results: TcgenResults, static: TcgenStatic, plan: DecodePlan
) -> tuple[Float[Array, "B rows L"], Float[Array, "blocks B ROWS"]]:
    """Finish, in place, output and LSE of the sequences that have several splits or see no key."""
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
    """Slices of O of a block of query rows."""
    return static.halves * (static.state_columns // static.slice_columns)


def _kernel(static: TcgenStatic, out: Ref, lse: Ref, partials: TcgenPartials, plan: DecodePlan) -> None:
    """Merge slices of O of blocks of query rows, one after the other."""
    blocks, columns = lse.shape[0], static.slice_columns
    a_half = _slices(static) // static.halves
    shape, layout = (columns,) if static.columns else (ROWS,), PER_COLUMN if static.columns else PER_ROW

    def merge(index: Any, item: Any) -> None:
        block, slice_of_block = lax.div(item, _slices(static)), lax.rem(item, _slices(static))
        half, number = lax.div(slice_of_block, a_half), lax.rem(slice_of_block, a_half)
        row, first_split = plan.row_order[index], plan.split_indptr[index]
        fragments = pl.ds(number * num_fragments(columns), num_fragments(columns))
        first_row = lax.rem(number * columns, static.columns) if static.columns else 0

        def add(split: Any, merged: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            state = state_index(partials, static, blocks, block, split, half)
            stats = partials.stats.at[state, :, pl.ds(first_row, shape[0])]
            (m, l, acc), other_m, other_l = merged, *(basics.load(stats.at[i], layout) for i in range(2))  # noqa: E741
            other_acc = load_fragments(partials.acc.at[state, fragments])  # [128, slice columns]
            m_new = jnp.maximum(m, other_m)
            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            weight, other_weight = jnp.exp2(m - shift), jnp.exp2(other_m - shift)
            acc = acc * spread(static, weight, acc.shape) + other_acc * spread(static, other_weight, acc.shape)
            return m_new, l * weight + other_l * other_weight, acc

        empty = (
            register_tiles.filled(-jnp.inf, shape, layout),
            register_tiles.filled(0.0, shape, layout),
            register_tiles.filled(0.0, (ROWS, columns), ROW_A_THREAD),
        )
        m, l, acc = lax.fori_loop(first_split, plan.split_indptr[index + 1], add, empty)  # noqa: E741
        seen = l != 0
        inverse = spread(static, jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0), acc.shape)
        tile = masked(acc, inverse)
        write = functools.partial(write_slice, out, static, row, block, half)
        if static.columns:
            for query_row in range(0, static.columns, SLICE):
                place = lax.div(number * SLICE, static.columns), query_row
                pl.when(first_row == query_row)(functools.partial(write, place, tile))
        else:
            write(number * columns, tile)

        @pl.when((half == 0) & (number * columns < (static.columns or 1)))
        def _store_lse() -> None:
            lse[block, row, pl.ds(first_row, shape[0])] = log_sum_exp(m, l)

    for_each_merged(plan, _slices(static) * blocks, merge)
