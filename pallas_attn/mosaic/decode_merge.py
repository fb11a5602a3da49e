"""Output of decode kernels, and the merge kernel for plan rows with several splits.

A plan row is one KV head of one sequence. A split is a part of its keys that one CTA attends to. A CTA that attends to
all keys of a plan row writes the output with `OutputWriter`. Otherwise it stores a partial state
(`mosaic.partial_states`), and the merge kernel merges the partial states of the plan row and writes the output.

Merge kernel (`_merge_kernel`; a CTA is one warpgroup, a slice is `layout.rows` output values):

    for each (plan row, query block, value slice) of this CTA that needs a merge:
        merge the partial states of its splits in order          # PartialLoader.merge; acc [values, query_rows]
        normalise and write output and LSE                       # OutputWriter
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

from pallas_attn.mosaic.merge import AttentionState, StateForm
from pallas_attn.mosaic.partial_states import PartialLoader, PartialStates, num_fragments
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.mosaic.primitives.register_tiles import PER_COLUMN, RegisterLayout
from pallas_attn.mosaic.primitives.tile_scheduler import MergeItem, for_each_merged, merge_programs
from pallas_attn.types import DecodePlan

COLUMN_STATES = StateForm(query_axis=1, log2=False)
"""Form of decode's attention states: query rows are columns of the accumulator [values, width]."""

OUTPUT_BYTES = 32 * 1024
"""Maximum bytes of output that a CTA holds in shared memory while they are copied out."""


# --- output of a finished plan row


class OutputWriter(NamedTuple):
    """Writes the output of a plan row to out [tokens, Hq, D] through a shared-memory tile, and the LSE to lse [width].

    Token b·Q + i of `out` is query i of sequence b. Tokens after the queries of the last sequence are not written.

    Attributes:
      layout: register layout of the accumulator.
    """

    out: Ref
    lse: Ref
    tile: Ref
    layout: RegisterLayout

    @staticmethod
    def tile_type(width: int, values: int, dtype: jax.typing.DTypeLike, num_bytes: int = OUTPUT_BYTES) -> Any:
        """Scratch type of the tile, [slices, width, values of a slice].

        A slice has at most 256 values, because a TMA copy takes at most 256 values per row. An output with more values
        than the tile holds is written in several rounds.

        Args:
          num_bytes: maximum size of the tile, unless 64 values per column take more.
        """
        fitting = max(64, num_bytes // (width * jnp.dtype(dtype).itemsize))
        slice_values = max(n for n in range(64, min(fitting, 256) + 1, 64) if values % n == 0)
        return plgpu.SMEM((min(values, fitting) // slice_values, width, slice_values), dtype)

    def write(
        self,
        packing: QueryPacking,
        block: Any,
        row: Any,
        state: AttentionState,
        sink: Any = None,
        first_value: Any = 0,
    ) -> None:
        """Normalise a state and write it.

        Args:
          sink: learned logits [width], or None.
          first_value: index of the state's first value in the output.
        """
        inverse = COLUMN_STATES.inverse(state.m, state.l, sink)
        tile_values = self.tile.shape[0] * self.tile.shape[2]
        for i in range(0, state.acc.shape[0], tile_values):
            out = COLUMN_STATES.normalise(state.acc[i : i + tile_values], state.l, inverse)
            self._copy_out(packing, block, row, out, first_value + i)
        lse = COLUMN_STATES.lse(state.m, state.l)

        @pl.when(first_value == 0)
        def _store_lse() -> None:
            self.lse[...] = lse

    def _copy_out(self, packing: QueryPacking, block: Any, row: Any, out: Any, first_value: Any) -> None:
        """Write values that fit the tile to the tile, and start their copies to global memory."""
        out = out.astype(self.tile.dtype)
        if out.dtype == jnp.float32:  # stores can transpose 16-bit tiles only
            out = plgpu.layout_cast(out, self.layout.transposed)
        kv_heads, slice_values = self.out.shape[1] // packing.group, self.tile.shape[2]
        batch, kv_head = lax.div(row, kv_heads), lax.rem(row, kv_heads)
        heads = pl.ds(packing.first_head(block, kv_head), packing.block_heads)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # an earlier copy may still read the tile
        for j in range(out.shape[0] // slice_values):
            self.tile.at[j].transpose((1, 0))[...] = out[j * slice_values : (j + 1) * slice_values]
        plgpu.commit_smem()
        for i in range(packing.block_queries):
            query = packing.query_block(block) * packing.block_queries + i

            @pl.when(query < packing.queries)
            def _store(i: int = i, query: Any = query) -> None:
                rows = pl.ds(i * packing.block_heads, packing.block_heads)
                for j in range(out.shape[0] // slice_values):
                    values = pl.ds(first_value + j * slice_values, slice_values)
                    to = self.out.at[batch * packing.queries + query, heads, values]
                    plgpu.copy_smem_to_gmem(self.tile.at[j, rows], to)


# --- the merge


def merge_splits(
    out: Ref,
    lse: Float[Array, "blocks rows width"],
    partials: PartialStates,
    plan: DecodePlan,
    sinks: Float[Array, "head_blocks Hkv width"] | None,
    packing: QueryPacking,
    layout: RegisterLayout,
) -> Float[Array, "blocks rows width"]:
    """Finish, in place, the plan rows that `out` and `lse` lack: rows with several splits, and rows that see no key.

    Splits are merged in their order, independent of the CTAs that computed them.

    Args:
      out: as in `OutputWriter`.
      layout: register layout of the stored accumulators. `layout.rows` is the number of output values per item of the
        merge.
    """
    rows, head_dim = lse.shape[1], out.shape[2]
    slices = head_dim // layout.rows
    narrow = packing.split_width(slices * packing.blocks * rows)
    width = narrow.width
    finished = basics.alias_in_place(lse)
    plgpu.kernel(
        functools.partial(_merge_kernel, packing, narrow, layout),
        grid=(merge_programs(slices * narrow.blocks * rows),),
        grid_names=("program",),
        scratch_types=[
            PartialLoader.types(partials, packing.blocks * rows, width, num_fragments(layout.rows * width)),
            OutputWriter.tile_type(width, layout.rows, out.dtype),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_pieces",
    )(out, finished, *basics.materialize((partials, plan, sinks)))
    return basics.read_back(finished)


def _merge_kernel(
    packing: QueryPacking,
    narrow: QueryPacking,
    layout: RegisterLayout,
    out: Ref,
    lse: Ref,
    partials: PartialStates,
    plan: DecodePlan,
    sinks: Ref | None,
    loader: PartialLoader,
    tile: Ref,
) -> None:
    """Merge plan rows with several splits.

    A CTA merges `layout.rows` output values of a block of query rows at a time. Blocks of the merge may be narrower
    than blocks of the attention kernel, so that more CTAs have work.

    Args:
      packing, narrow: query rows of a block of the attention kernel, and of a block of the merge.
    """
    values, width, narrow_per_block = layout.rows, narrow.width, packing.width // narrow.width
    slices, slice_fragments = out.shape[2] // values, num_fragments(values * width)

    def merge(item: MergeItem) -> None:
        narrow_block, value_slice = lax.div(item.slice, slices), lax.rem(item.slice, slices)
        block, narrow_of_block = lax.div(narrow_block, narrow_per_block), lax.rem(narrow_block, narrow_per_block)
        columns = pl.ds(narrow_of_block * width, width)
        fragments = pl.ds((value_slice * narrow_per_block + narrow_of_block) * slice_fragments, slice_fragments)
        first = partials.state_index(block, packing.blocks, item.first_split)
        empty = COLUMN_STATES.empty((values, width), PER_COLUMN, layout.tile)
        merged = loader.merge(COLUMN_STATES, layout, partials, first, item.splits, columns, fragments, empty)
        sink = packing.load_sinks(sinks, block, lax.rem(item.row, out.shape[1] // packing.group), columns)
        writer = OutputWriter(out, lse.at[block, item.row, columns], tile, layout)
        writer.write(narrow, narrow_block, item.row, merged, sink, value_slice * values)

    for_each_merged(plan, slices * narrow.blocks, merge)
    plgpu.wait_smem_to_gmem(0)
