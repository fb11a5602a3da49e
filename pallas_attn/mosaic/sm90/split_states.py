"""Partial states of rows that were cut into pieces, on their way through global memory to those who merge them.

States are not normalised: `m` is the largest score of a query row, `l` the sum of exp(score - m), `acc` the values
weighted with exp(score - m), all float32. An LSE in place of m and l would be rounded by more than exp can take where
scores are large.

Values lie as threads hold them, not row by row: of 64 x 8 of them, a block, each thread holds four. It moves them as 16
bytes, and a warp as 512 that follow one another. Row by row, it would be 8 bytes in 8 rows at a time: 128 KB took a
multiprocessor 9,000 clocks, with 15 others at work (benchmarks/NOTES.md).
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

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.sm90.tiles import TILE

BLOCK = (4, 128)
"""How the 64 x 8 values of a block lie: those of each warp, four of each thread."""

BLOCK_ROWS, BLOCK_COLUMNS = 64, 8

AT_ONCE_BYTES = 32 * 1024
"""Of states, at most, that a program reads while it waits for as many."""


class Partials(NamedTuple):
    """States in global memory: stats [states, 2, width] (m and l), acc [states, blocks, *BLOCK]."""

    stats: Any
    acc: Any

    @staticmethod
    def types(states: int, width: int, values: int) -> Partials:
        """Of so many states of `width` query rows, each with so many values."""
        return Partials(
            jax.ShapeDtypeStruct((states, 2, width), jnp.float32),
            jax.ShapeDtypeStruct((states, blocks_of(width * values), *BLOCK), jnp.float32),
        )

    def number(self, block: Any, blocks: int, piece: Any) -> Any:
        """Of the state of a piece of a block of query rows, of so many blocks."""
        return block * (self.acc.shape[0] // blocks) + piece


class Arrivals(NamedTuple):
    """Parts of states in shared memory: n to read and n on their way.

    Attributes:
      stats: [2, n, 2, width].
      acc: [2, n, blocks, *BLOCK].
      landed: a barrier for each n.
    """

    stats: Any
    acc: Any
    landed: Any

    @staticmethod
    def types(partials: Partials, rows: int, width: int, blocks: int) -> Arrivals:
        """For so many blocks, with `width` query rows, of the states that so many rows are cut into."""
        pieces_of_a_row = -(-partials.acc.shape[0] // rows)  # on average, at most
        at_once = max(1, min(AT_ONCE_BYTES // (blocks * 4 * BLOCK_ROWS * BLOCK_COLUMNS), pieces_of_a_row))
        if at_once * width // 8 % 2:  # the stats of as many are a multiple of 128 bytes, where copies may begin
            at_once = at_once - 1 or 2
        return Arrivals(
            plgpu.SMEM((2, at_once, 2, width), jnp.float32),
            plgpu.SMEM((2, at_once, blocks, *BLOCK), jnp.float32),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )

    def for_each(
        self,
        partials: Partials,
        first: Any,
        count: Any,
        some: Any,
        blocks: Any,
        add: Callable[[Ref, Ref, Any], Any],
        carry: Any,
    ) -> Any:
        """carry = add(stats [2, width], acc [blocks, *BLOCK], carry) for so many states from the first on, in order.

        Args:
          some: which of the query rows.
          blocks: which of the blocks.
        """
        at_once = self.acc.shape[1]
        rounds = pl.cdiv(count, at_once)

        def fetch(i: Any) -> None:
            slot, states = lax.rem(i, 2), pl.ds(first + i * at_once, at_once)
            plgpu.copy_gmem_to_smem(partials.stats.at[states, :, some], self.stats.at[slot], self.landed.at[slot])
            plgpu.copy_gmem_to_smem(partials.acc.at[states, blocks], self.acc.at[slot], self.landed.at[slot])

        def take(i: Any, carry: Any) -> Any:
            slot = lax.rem(i, 2)
            plgpu.barrier_wait(self.landed.at[slot])

            def step(j: Any, carry: Any) -> Any:
                return add(self.stats.at[slot, j], self.acc.at[slot, j], carry)

            carry = lax.fori_loop(0, jnp.minimum(at_once, count - i * at_once), step, carry)
            plgpu.commit_smem()  # they were read; only then may a copy overwrite them
            pl.when(i + 2 < rounds)(lambda: fetch(i + 2))
            return carry

        for i in range(2):
            pl.when(i < rounds)(functools.partial(fetch, jnp.int32(i)))
        return lax.fori_loop(0, rounds, take, carry)


def blocks_of(values: int) -> int:
    """Blocks that so many values make up."""
    return values // (BLOCK_ROWS * BLOCK_COLUMNS)


def keep(tile: jax.Array, to: Ref) -> None:
    """Writes a tile [M, N] in the registers of a warpgroup to blocks [M / 64 · N / 8, *BLOCK]."""
    if interpreted():
        m, n = tile.shape
        split = tile.reshape(m // BLOCK_ROWS, BLOCK_ROWS, n // BLOCK_COLUMNS, BLOCK_COLUMNS)
        to[...] = split.swapaxes(1, 2).reshape(-1, *BLOCK)
        return

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def write(_: Any, tile: Any, to: ir.Value) -> None:
        four = ir.VectorType.get((4,), tile.mlir_dtype)
        registers = tile.registers.reshape(-1, 2)
        for pair, pointer in zip(registers, _pointers(to, len(registers), tile.mlir_dtype), strict=True):
            numbers = [vector.extract(register, [], [i]) for register in pair for i in range(2)]
            llvm.store(vector.from_elements(four, numbers), pointer, alignment=16)

    write(tile, to)


def kept(blocks: Ref, shape: tuple[int, int]) -> jax.Array:
    """The tile [M, N] that `keep` wrote."""
    m, n = shape
    if interpreted():
        split = blocks[...].reshape(m // BLOCK_ROWS, n // BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
        return split.swapaxes(1, 2).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE)
    )
    def read(_: Any, blocks: ir.Value) -> Any:
        layout, number = TILE.to_mgpu(), ir.F32Type.get()
        two, four = (ir.VectorType.get((n,), number) for n in (2, 4))
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        pairs = registers.reshape(-1, 2)
        for pair, pointer in zip(pairs, _pointers(blocks, len(pairs), number), strict=True):
            numbers = llvm.load(four, pointer, alignment=16)
            for i in range(2):
                some = [vector.extract(numbers, [], [2 * i + j]) for j in range(2)]
                pair[i] = vector.from_elements(two, some)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(blocks)


def _pointers(blocks: ir.Value, count: int, element: ir.Type) -> list[ir.Value]:
    """To the four values of a thread in each of so many blocks."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, ir.IntegerType.get_signless(32)))
    own = arith.muli(arith.extui(i64, thread), mgpu.c(4, i64))
    first = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(blocks), [own], element)
    return [mgpu.utils.getelementptr(first, [i * BLOCK_ROWS * BLOCK_COLUMNS], element) for i in range(count)]
