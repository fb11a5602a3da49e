"""Partial states in global memory: how kernels store them, and how a merge kernel loads them through shared memory.

A query row is one query head of one query token. A split is a range of its keys that one CTA attends to. A partial
state is the attention of a block of query rows to one split (`mosaic.merge.AttentionState`).

The accumulator of a state is stored in the register order of the threads: in fragments of 64 x 8 values with four
values per thread. (The interpreter stores a fragment in row-major order.) A thread moves 16 bytes and a warp 512
consecutive bytes. In row-major order, a warp would access 8 bytes in each of 8 rows; a state of 128 KB then took 9,000
clocks with 16 active CTAs.

`PartialLoader.merge` merges the partial states of one block of query rows, or a slice of them. A CTA is one warpgroup.
A batch is a number of states that fit one of two buffers:

    start TMA of the first two batches
    for each batch i:
        wait full[i % 2]
        merge the states of the batch into the running state    # merge_in_order
        start TMA of batch i + 2 into the same buffer

Barriers:

    barrier     one phase per   arrivals            arrivals per phase   who waits
    full[2]     batch           TMA (stats, acc)    2                    all warps

Deadlock freedom: a CTA waits only for copies that it has started. `commit_smem` synchronizes its warps before a buffer
is overwritten, so the buffers need no "empty" barrier.
"""

from __future__ import annotations

import functools
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

from pallas_attn.mosaic.merge import AttentionState, StateForm, merge_in_order
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.register_tiles import RegisterLayout

FRAGMENT = (4, 128)
"""Shape of a fragment in global memory: four warps with 128 values each, four values per thread.

A fragment holds 64 x 8 values of an accumulator: 64 consecutive rows, or, if tiles have 128 rows (`BY_128`), 16 rows of
each 32 rows.
"""

FRAGMENT_ROWS, FRAGMENT_COLUMNS = 64, 8

LOADER_BYTES = 32 * 1024
"""Target size of the accumulators in a batch of partial states, in bytes. A batch has at least one state, or two where
alignment needs it. There are two buffers: a batch is copied while another is merged."""


class PartialStates(NamedTuple):
    """Partial states in global memory.

    Attributes:
      stats: float32 [states, 2, width], m and l of the query rows of each state.
      acc: float32 [states, fragments, *FRAGMENT], accumulator of each state.
    """

    stats: Any
    acc: Any

    @staticmethod
    def types(states: int, width: int, values: int) -> PartialStates:
        """Return the types of `states` partial states with `width` query rows and `values` values per query row."""
        return PartialStates(
            jax.ShapeDtypeStruct((states, 2, width), jnp.float32),
            jax.ShapeDtypeStruct((states, num_fragments(width * values), *FRAGMENT), jnp.float32),
        )

    def state_index(self, block: Any, blocks: int, split: Any) -> Any:
        """Return the index of the partial state of a split and a block of query rows.

        Args:
          block: index of the block.
          blocks: number of blocks.
          split: index of the split in the plan.
        """
        return block * (self.acc.shape[0] // blocks) + split

    def store(self, index: Any, state: AttentionState, layout: RegisterLayout) -> None:
        """Write a state whose accumulator has register layout `layout`."""
        self.stats[index, 0] = state.m
        self.stats[index, 1] = state.l
        store_fragments(state.acc, self.acc.at[index], layout)


class PartialLoader(NamedTuple):
    """Two buffers of partial states in shared memory: one batch of n states is read while the next batch is copied.

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
        """Return the scratch types of two buffers, each for a batch of states.

        A batch has about as many states as an average block of query rows, or fewer if `LOADER_BYTES` is smaller.

        Args:
          rows: number of blocks of query rows with partial states.
          width: query rows that are merged at a time.
          fragments: fragments of the accumulator that are merged at a time.
        """
        splits_of_a_row = -(-partials.acc.shape[0] // rows)  # upper bound of the average
        state_bytes = fragments * 4 * FRAGMENT_ROWS * FRAGMENT_COLUMNS
        batch = max(1, min(LOADER_BYTES // state_bytes, splits_of_a_row))
        # Copies start at multiples of 128 bytes, so the size of a batch's stats must be a multiple of 128 bytes.
        if batch * width // 8 % 2:
            batch = batch - 1 or 2
        return PartialLoader(
            plgpu.SMEM((2, batch, 2, width), jnp.float32),
            plgpu.SMEM((2, batch, fragments, *FRAGMENT), jnp.float32),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )

    def merge(
        self,
        form: StateForm,
        layout: RegisterLayout,
        partials: PartialStates,
        first: Any,
        count: Any,
        columns: Any,
        fragments: Any,
        merged: AttentionState,
    ) -> AttentionState:
        """Merge `count` partial states in order into the state `merged`, and return the result.

        Args:
          form: form of the states.
          layout: register layout of their accumulators.
          partials: the partial states.
          first: index of the first partial state.
          count: number of partial states.
          columns: slice of the query rows.
          fragments: slice of the fragments that hold the accumulator of `merged`.
        """
        batch = self.acc.shape[1]
        rounds = pl.cdiv(count, batch)
        per_query_row = layout.tile.reduce(1 - form.query_axis)

        def fetch(i: Any) -> None:
            buffer, states = lax.rem(i, 2), pl.ds(first + i * batch, batch)
            plgpu.copy_gmem_to_smem(partials.stats.at[states, :, columns], self.stats.at[buffer], self.full.at[buffer])
            plgpu.copy_gmem_to_smem(partials.acc.at[states, fragments], self.acc.at[buffer], self.full.at[buffer])

        def merge_batch(i: Any, merged: AttentionState) -> AttentionState:
            buffer = lax.rem(i, 2)
            plgpu.barrier_wait(self.full.at[buffer])

            def load(j: Any) -> AttentionState:
                stats, acc = self.stats.at[buffer, j], self.acc.at[buffer, j]
                m, l = (basics.load(stats.at[k], per_query_row) for k in range(2))  # noqa: E741
                return AttentionState(m, l, load_fragments(acc, merged.acc.shape, layout))

            merged = merge_in_order(form, load, 0, jnp.minimum(batch, count - i * batch), merged)
            plgpu.commit_smem()  # all threads have read the buffer, which the next copy overwrites
            pl.when(i + 2 < rounds)(lambda: fetch(i + 2))
            return merged

        for i in range(2):
            pl.when(i < rounds)(functools.partial(fetch, jnp.int32(i)))
        return lax.fori_loop(0, rounds, merge_batch, merged)


def num_fragments(values: int) -> int:
    """Return the number of fragments that hold `values` values."""
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
    """Return pointers to the four values of this thread in each of `count` fragments."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, ir.IntegerType.get_signless(32)))
    own = arith.muli(arith.extui(i64, thread), mgpu.c(4, i64))
    first = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(fragments), [own], element)
    return [mgpu.utils.getelementptr(first, [i * FRAGMENT_ROWS * FRAGMENT_COLUMNS], element) for i in range(count)]
