"""Output of decode kernels, and the merge kernel for plan rows with several splits.

A plan row is one KV head of one sequence. A query row is one of its query heads of one query token. A split is a range
of the keys of a plan row that one CTA attends to. If a CTA attends to all keys of a plan row, it writes the output with
`OutputWriter`. Otherwise it stores a partial state (`mosaic.partial_states`), and the merge kernel merges the partial
states of the plan row and writes the output.

In the merge kernel (`_merge_kernel`), a CTA is one warpgroup. A slice has `layout.rows` output values of each row of a
block of query rows:

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
    """Writes the output of a plan row through a tile in shared memory, and its LSE.

    Attributes:
      out: [tokens, Hq, D] in global memory. Token b·Q + i is query i of sequence b. Tokens after the queries of the
        last sequence are not written.
      lse: float32 [width] in global memory, LSE of the query rows of a block.
      tile: scratch of `tile_type`.
      layout: register layout of the accumulator.
    """

    out: Ref
    lse: Ref
    tile: Ref
    layout: RegisterLayout

    @staticmethod
    def tile_type(width: int, values: int, dtype: jax.typing.DTypeLike, num_bytes: int) -> Any:
        """Return the scratch type of the tile, [slices, width, values of a slice].

        A slice has at most 256 values, because a TMA copy takes at most 256 values per row. An output with more values
        than the tile holds is written in several rounds.

        Args:
          width: number of query rows of a block.
          values: number of output values per query row.
          dtype: dtype of the output.
          num_bytes: maximum size of the tile in bytes. The tile is larger if 64 values per query row need more.
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
        """Normalise an attention state, and write output and LSE. The LSE is written only if `first_value` is 0.

        Args:
          packing: arrangement of query rows in blocks.
          block: index of the block of query rows.
          row: index of the plan row.
          state: attention state with `acc` [values, width].
          sink: learned logits [width], or None.
          first_value: index of the state's first value among the output values of a query row.
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
        """Store output values to the tile, which has room for them, and start their copies to global memory."""
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
    """Write output and LSE of plan rows with several splits, and of plan rows that see no key, in place.

    The attention kernel has written all other plan rows. The splits of a row are merged in order, so the result does
    not depend on the CTAs that computed them.

    Args:
      out: see `OutputWriter`.
      lse: LSE of each query row of each plan row.
      partials: partial states of plan rows with several splits.
      plan: the plan of the attention kernel.
      sinks: learned logits, or None.
      packing: arrangement of query rows in blocks by the attention kernel.
      layout: register layout of the stored accumulators. `layout.rows` is the number of output values of a slice.

    Returns:
      The updated LSE.
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
            OutputWriter.tile_type(width, layout.rows, out.dtype, OUTPUT_BYTES),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_splits",
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
