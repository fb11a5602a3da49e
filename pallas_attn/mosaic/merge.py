"""Attention states: written as output, or stored as partial states of a split plan row and merged by a second kernel.

States are not normalised. `m` is the largest score of a query row, `l` the sum of exp(score - m), and `acc` the sum of
values times exp(score - m), all float32. Storing one LSE instead of m and l would round it: at 5e5 by up to 1/64, and
the weights would be off by the same factor.

A partial state in global memory has the register order of the threads, in blocks of 64 x 8 values with four values per
thread. A thread moves 16 bytes and a warp 512 consecutive bytes. In row-major order, a warp would access 8 bytes in
each of 8 rows; a state of 128 KB then took 9,000 clocks with 16 active CTAs.

Merge loop (`_merge_kernel`; a CTA is one warpgroup):

    for each (plan row, query block, value slice) of this CTA that needs a merge:
        start TMA of the first two batches of partial states
        for each batch i:
            wait full[i % 2]
            for each state of the batch: merged = merged.merge(state)   # acc [values, query_rows]
            start TMA of batch i + 2 into the same buffer
        normalise and write output and LSE

Barriers:

    barrier     one phase per   arrivals            arrivals per phase   who waits
    full[2]     batch           TMA (stats, acc)    2                    all warps

Deadlock freedom: a CTA waits only for copies that it has started. `commit_smem` synchronizes its warps before a buffer
is overwritten, so the buffers need no "empty" barrier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref, interpreted
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.mosaic.primitives.register_tiles import PER_COLUMN, RegisterLayout, over_columns
from pallas_attn.mosaic.primitives.tile_scheduler import for_each_merged, merge_programs
from pallas_attn.types import DecodePlan

FRAGMENT = (4, 128)
"""Shape in global memory of a fragment, 64 x 8 values: 128 per warp, four per thread. In tiles of 128 rows, a fragment
has 16 of each 32 rows.
"""

FRAGMENT_ROWS, FRAGMENT_COLUMNS = 64, 8

LOADER_BYTES = 32 * 1024
"""Maximum bytes of partial states that a CTA merges at a time. The next batch, in flight, takes the same space again.
"""

OUTPUT_BYTES = 32 * 1024
"""Maximum bytes of output that a CTA holds in shared memory while they are copied out."""


class AttentionState(NamedTuple):
    """Attention of a block's query rows, which are columns, over some of the keys.

    Attributes:
      m, l: [width], running maximum and sum of each query row.
      acc: [values, width], weighted sum of values.
    """

    m: Any
    l: Any  # noqa: E741
    acc: Any

    @staticmethod
    def empty(values: int, width: int, layout: RegisterLayout) -> AttentionState:
        """State over no keys."""
        return AttentionState(
            register_tiles.filled(-jnp.inf, (width,), PER_COLUMN),
            register_tiles.filled(0.0, (width,), PER_COLUMN),
            register_tiles.filled(0.0, (values, width), layout.tile),
        )

    def merge(
        self, other: AttentionState, spread: Callable[[Any, tuple[int, ...]], Any] = over_columns
    ) -> AttentionState:
        """Merge with a state over other keys of the same query rows.

        Args:
          spread: broadcasts a value of each query row over `acc`. The default assumes that query rows are columns.
        """
        m = jnp.maximum(self.m, other.m)
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        weights = [jnp.exp2((state.m - shift) * LOG2E) for state in (self, other)]
        mine, others = (spread(weight, self.acc.shape) for weight in weights)
        return AttentionState(m, self.l * weights[0] + other.l * weights[1], self.acc * mine + other.acc * others)


# --- output of a finished plan row


class OutputWriter(NamedTuple):
    """Destination of a finished plan row: out [tokens, Hq, D] through a shared-memory tile, and lse [width].

    Token b·Q + i of `out` is query i of sequence b. Tokens after the last of these are not written.

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

        A slice has at most 256 values, because a copy takes a separate array of at most 256 values per row. A row with
        more values than the tile holds is written in several rounds.

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
        seen = state.l != 0
        shift = jnp.where(state.m == -jnp.inf, 0.0, state.m)
        denominator = state.l if sink is None else state.l + jnp.exp2((sink - shift) * LOG2E)
        inverse = jnp.where(seen, 1 / jnp.where(seen, denominator, 1.0), 0.0)
        tile_values = self.tile.shape[0] * self.tile.shape[2]
        for i in range(0, state.acc.shape[0], tile_values):
            out = state.acc[i : i + tile_values]
            # In a query row that sees no key, the sum may contain 0 times an infinite value.
            out = jnp.where(over_columns(seen, out.shape), out * over_columns(inverse, out.shape), 0.0)
            self._copy_out(packing, block, row, out, first_value + i)
        lse = jnp.where(seen, shift + jnp.log2(jnp.where(seen, state.l, 1.0)) * (1 / LOG2E), -jnp.inf)

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


# --- partial states of a split plan row


class PartialStates(NamedTuple):
    """Partial states in global memory: stats [states, 2, width] (m and l), acc [states, fragments, *FRAGMENT]."""

    stats: Any
    acc: Any

    @staticmethod
    def types(states: int, width: int, values: int) -> PartialStates:
        """Shapes of `states` partial states with `width` query rows and `values` values per query row."""
        return PartialStates(
            jax.ShapeDtypeStruct((states, 2, width), jnp.float32),
            jax.ShapeDtypeStruct((states, num_fragments(width * values), *FRAGMENT), jnp.float32),
        )

    def state_index(self, block: Any, blocks: int, split: Any) -> Any:
        """Index of a split's state for one of `blocks` blocks of query rows."""
        return block * (self.acc.shape[0] // blocks) + split

    def store(self, index: Any, state: AttentionState, layout: RegisterLayout) -> None:
        """Write a state whose accumulator has register layout `layout`."""
        self.stats[index, 0] = state.m
        self.stats[index, 1] = state.l
        store_fragments(state.acc, self.acc.at[index], layout)


class PartialLoader(NamedTuple):
    """Two buffers of partial states in shared memory: one batch of n states is read while the next is in flight.

    Attributes:
      stats: [2, n, 2, width].
      acc: [2, n, fragments, *FRAGMENT].
      full: barrier of each buffer.
    """

    stats: Any
    acc: Any
    full: Any

    @staticmethod
    def types(partials: PartialStates, rows: int, width: int, fragments: int) -> PartialLoader:
        """Scratch types.

        Args:
          rows: number of plan rows times query blocks, from which the average number of splits follows.
          width: query rows of a slice.
          fragments: fragments of a slice.
        """
        splits_of_a_row = -(-partials.acc.shape[0] // rows)  # upper bound of the average
        state_bytes = fragments * 4 * FRAGMENT_ROWS * FRAGMENT_COLUMNS
        batch = max(1, min(LOADER_BYTES // state_bytes, splits_of_a_row))
        if batch * width // 8 % 2:  # copies start at multiples of 128 bytes, so the stats of a batch must be one
            batch = batch - 1 or 2
        return PartialLoader(
            plgpu.SMEM((2, batch, 2, width), jnp.float32),
            plgpu.SMEM((2, batch, fragments, *FRAGMENT), jnp.float32),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )

    def for_each(
        self,
        partials: PartialStates,
        first: Any,
        count: Any,
        columns: Any,
        fragments: Any,
        add: Callable[[Ref, Ref, Any], Any],
        carry: Any,
    ) -> Any:
        """Call carry = add(stats [2, width], acc [fragments, *FRAGMENT], carry) for `count` states in order.

        Args:
          first: index of the first state.
          columns: slice of the query rows.
          fragments: slice of the fragments.
        """
        batch = self.acc.shape[1]
        rounds = pl.cdiv(count, batch)

        def fetch(i: Any) -> None:
            buffer, states = lax.rem(i, 2), pl.ds(first + i * batch, batch)
            plgpu.copy_gmem_to_smem(partials.stats.at[states, :, columns], self.stats.at[buffer], self.full.at[buffer])
            plgpu.copy_gmem_to_smem(partials.acc.at[states, fragments], self.acc.at[buffer], self.full.at[buffer])

        def merge_batch(i: Any, carry: Any) -> Any:
            buffer = lax.rem(i, 2)
            plgpu.barrier_wait(self.full.at[buffer])

            def step(j: Any, carry: Any) -> Any:
                return add(self.stats.at[buffer, j], self.acc.at[buffer, j], carry)

            carry = lax.fori_loop(0, jnp.minimum(batch, count - i * batch), step, carry)
            plgpu.commit_smem()  # all threads have read the buffer, which the next copy overwrites
            pl.when(i + 2 < rounds)(lambda: fetch(i + 2))
            return carry

        for i in range(2):
            pl.when(i < rounds)(functools.partial(fetch, jnp.int32(i)))
        return lax.fori_loop(0, rounds, merge_batch, carry)


def num_fragments(values: int) -> int:
    """Number of fragments that hold `values` values."""
    return values // (FRAGMENT_ROWS * FRAGMENT_COLUMNS)


def store_fragments(tile: jax.Array, to: Ref, layout: RegisterLayout) -> None:
    """Write a tile [M, N] from registers of a warpgroup to fragments [M / 64 · N / 8, *FRAGMENT]."""
    if interpreted():
        m, n = tile.shape
        split = tile.reshape(m // layout.rows, layout.rows, n // FRAGMENT_COLUMNS, FRAGMENT_COLUMNS)
        to[...] = split.swapaxes(1, 2).reshape(-1, *FRAGMENT)
        return

    @plgpu.inline_mgpu(arg_types=(layout.tile, plgpu.RefType()))
    def write(_: Any, tile: Any, to: ir.Value) -> None:
        four = ir.VectorType.get((4,), tile.mlir_dtype)
        registers = tile.registers.reshape(-1, 2)
        for pair, pointer in zip(registers, _pointers(to, len(registers), tile.mlir_dtype), strict=True):
            numbers = [vector.extract(register, [], [i]) for register in pair for i in range(2)]
            llvm.store(vector.from_elements(four, numbers), pointer, alignment=16)

    write(tile, to)


def load_fragments(fragments: Ref, shape: tuple[int, int], layout: RegisterLayout) -> jax.Array:
    """Read the tile [M, N] that `store_fragments` wrote."""
    m, n = shape
    if interpreted():
        split = fragments[...].reshape(m // layout.rows, n // FRAGMENT_COLUMNS, layout.rows, FRAGMENT_COLUMNS)
        return split.swapaxes(1, 2).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout.tile)
    )
    def read(_: Any, fragments: ir.Value) -> Any:
        held, number = layout.tile.to_mgpu(), ir.F32Type.get()
        two, four = (ir.VectorType.get((n,), number) for n in (2, 4))
        registers = np.empty(held.registers_shape(shape), dtype=object)
        pairs = registers.reshape(-1, 2)
        for pair, pointer in zip(pairs, _pointers(fragments, len(pairs), number), strict=True):
            numbers = llvm.load(four, pointer, alignment=16)
            for i in range(2):
                halves = [vector.extract(numbers, [], [2 * i + j]) for j in range(2)]
                pair[i] = vector.from_elements(two, halves)
        return mgpu.FragmentedArray(_registers=registers, _layout=held, _is_signed=None)

    return read(fragments)


def _pointers(fragments: ir.Value, count: int, element: ir.Type) -> list[ir.Value]:
    """Pointers to a thread's four values in each of `count` fragments."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, ir.IntegerType.get_signless(32)))
    own = arith.muli(arith.extui(i64, thread), mgpu.c(4, i64))
    first = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(fragments), [own], element)
    return [mgpu.utils.getelementptr(first, [i * FRAGMENT_ROWS * FRAGMENT_COLUMNS], element) for i in range(count)]


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
    """Merge plan rows with several splits. An item of the loop is `layout.rows` values of a plan row for the columns of
    a narrow block.

    Args:
      packing, narrow: blocks of columns of the partial states, and the narrower blocks that the merge cuts them into.
    """
    values, width, narrow_per_block = layout.rows, narrow.width, packing.width // narrow.width
    slices, slice_fragments = out.shape[2] // values, num_fragments(values * width)

    def add(stats: Ref, acc: Ref, merged: AttentionState) -> AttentionState:
        m, l = (basics.load(stats.at[i], PER_COLUMN) for i in range(2))  # noqa: E741
        return merged.merge(AttentionState(m, l, load_fragments(acc, (values, width), layout)))

    def merge(index: Any, item: Any) -> None:
        narrow_block, value_slice = lax.div(item, slices), lax.rem(item, slices)
        block, narrow_of_block = lax.div(narrow_block, narrow_per_block), lax.rem(narrow_block, narrow_per_block)
        row, first_split = plan.row_order[index], plan.split_indptr[index]
        columns = pl.ds(narrow_of_block * width, width)
        fragments = pl.ds((value_slice * narrow_per_block + narrow_of_block) * slice_fragments, slice_fragments)
        first, count = (
            partials.state_index(block, packing.blocks, first_split),
            plan.split_indptr[index + 1] - first_split,
        )
        empty = AttentionState.empty(values, width, layout)
        merged = loader.for_each(partials, first, count, columns, fragments, add, empty)
        sink = packing.load_sinks(sinks, block, lax.rem(row, out.shape[1] // packing.group), columns)
        writer = OutputWriter(out, lse.at[block, row, columns], tile, layout)
        writer.write(narrow, narrow_block, row, merged, sink, value_slice * values)

    for_each_merged(plan, slices * narrow.blocks, merge)
    plgpu.wait_smem_to_gmem(0)
