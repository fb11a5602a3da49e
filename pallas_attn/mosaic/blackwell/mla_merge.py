"""Experimental: has never run on a card. Merge of the partial states of `mosaic.blackwell.mla_decode`.

A query row is one head of one query token. A split is a range of pages of a sequence that one CTA processes. If a
sequence has several splits, the attention kernel stores a partial state for each split: unnormalised output O, maximum
m and sum l of the query rows. The kernel uses no barriers: each thread loads its values of a partial state from global
memory.

    for each (sequence, block of query rows, slice of O) of this CTA that needs a merge:
        merge the partial states of the splits in order          # merge_in_order; acc [128, slice columns]
        normalise and write the slice; the first slice also writes the LSE
"""

from __future__ import annotations

import functools
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic.blackwell.mla_decode import (
    SLICE,
    TcgenPartials,
    TcgenResults,
    TcgenStatic,
    masked,
    state_index,
    write_slice,
)
from pallas_attn.mosaic.blackwell.native_tiles import PER_COLUMN, PER_ROW, load_fragments, num_fragments
from pallas_attn.mosaic.blackwell.tmem import ROW_A_THREAD, ROWS
from pallas_attn.mosaic.merge import AttentionState, merge_in_order
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.tile_scheduler import MergeItem, for_each_merged, merge_programs
from pallas_attn.types import DecodePlan


def merge_splits(
    results: TcgenResults, static: TcgenStatic, plan: DecodePlan
) -> tuple[Float[Array, "B rows L"], Float[Array, "blocks B ROWS"]]:
    """Write output and LSE of the sequences that have several splits or see no key, in place.

    The attention kernel has written all other sequences.
    """
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
    """Return the number of slices of O of a block of query rows."""
    return static.halves * (static.state_columns // static.slice_columns)


def _kernel(static: TcgenStatic, out: Ref, lse: Ref, partials: TcgenPartials, plan: DecodePlan) -> None:
    """Merge slices of O of blocks of query rows, one after the other."""
    blocks, columns = lse.shape[0], static.slice_columns
    a_half = _slices(static) // static.halves
    form = static.form
    per_query_row = PER_COLUMN if static.columns else PER_ROW

    def merge(item: MergeItem) -> None:
        block, slice_of_block = lax.div(item.slice, _slices(static)), lax.rem(item.slice, _slices(static))
        half, number = lax.div(slice_of_block, a_half), lax.rem(slice_of_block, a_half)
        row, fragments = item.row, pl.ds(number * num_fragments(columns), num_fragments(columns))
        first_row = lax.rem(number * columns, static.columns) if static.columns else 0
        query_rows = pl.ds(first_row, columns if static.columns else ROWS)

        def load(split: Any) -> AttentionState:
            state = state_index(partials, static, blocks, block, split, half)
            stats = partials.stats.at[state, :, query_rows]
            m, l = (basics.load(stats.at[i], per_query_row) for i in range(2))  # noqa: E741
            return AttentionState(m, l, load_fragments(partials.acc.at[state, fragments]))  # acc [128, slice columns]

        empty = form.empty((ROWS, columns), per_query_row, ROW_A_THREAD)
        merged = merge_in_order(form, load, item.first_split, item.first_split + item.splits, empty)
        inverse = form.inverse(merged.m, merged.l)
        tile = masked(merged.acc, form.spread(inverse, merged.acc.shape))  # fewer instructions than `form.normalise`
        write = functools.partial(write_slice, out, static, row, block, half)
        if static.columns:
            for query_row in range(0, static.columns, SLICE):
                place = lax.div(number * SLICE, static.columns), query_row
                pl.when(first_row == query_row)(functools.partial(write, place, tile))
        else:
            write(number * columns, tile)

        @pl.when((half == 0) & (number * columns < (static.columns or 1)))
        def _store_lse() -> None:
            lse[block, row, query_rows] = form.lse(merged.m, merged.l)

    for_each_merged(plan, _slices(static) * blocks, merge)
