"""Values that nobody sees become 0 where they lie: no probability of 0 keeps them out of sums, 0 · NaN being NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.sm90 import wgmma
from pallas_attn.mosaic.sm90.tiles import PER_TOKEN, over_tokens

CHUNK = 16
"""Bytes that a thread writes at once. Four threads share a row, as in layout PER_TOKEN."""


def clear_rows(tile: Ref, alive: jax.Array, row_bytes: int = wgmma.ROW_BYTES) -> None:
    """Makes rows of a 16-bit tile [rows, columns] in shared memory 0 where alive [rows], in layout PER_TOKEN, is false.

    The other rows are left alone. Nothing is waited for: who multiplies the tile needs a `plgpu.commit_smem` before.

    Args:
      tile: as `mosaic.operand` lays it out, in rows of `row_bytes`.
    """
    if interpreted():
        tile[...] = jnp.where(over_tokens(alive, tile.shape), tile[...], jnp.zeros((), tile.dtype))
        return

    @plgpu.inline_mgpu(arg_types=(wgmma.operand(row_bytes), PER_TOKEN))
    def write_zeros(_: Any, tile: ir.Value, alive: Any) -> None:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        memref_type = ir.MemRefType(tile.type)  # [rows / 8, columns of row_bytes, 8, row_bytes]
        eight_rows, column = (2 * stride for stride in memref_type.get_strides_and_offset()[0][:2])
        thread = mgpu.utils.thread_idx()

        def bits(first: int, count: int, times: int) -> ir.Value:
            """Some bits of the thread's number, as a number, times another."""
            shifted = arith.shrui(thread, mgpu.c(first, i32))
            return arith.muli(arith.andi(shifted, mgpu.c(2**count - 1, i32)), mgpu.c(times, i32))

        # Chunks of a row lie in another order in each of eight rows, but all of them in that row.
        own = arith.addi(arith.addi(bits(5, 2, 2 * eight_rows), bits(2, 3, row_bytes)), bits(0, 2, CHUNK))
        begin = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tile), [own], i8)

        def chunks(block: int, half: int) -> Iterator[ir.Value]:
            first = (8 * block + half) * eight_rows
            for at in range(0, memref_type.shape[1] * column, column):
                for part in range(0, row_bytes, 4 * CHUNK):
                    yield mgpu.utils.getelementptr(begin, [first + at + part], i8)

        write_zeros_unless(alive, chunks)

    write_zeros(tile, jnp.where(alive, 1, 0))


def write_zeros_unless(alive: Any, chunks: Callable[[int, int], Iterable[ir.Value]]) -> None:
    """In the language of the compiler: zeros for a thread's share of each row whose number in alive [rows], in layout
    PER_TOKEN, is 0.

    Args:
      chunks: chunks(i, j) are pointers to the thread's own in the one of its rows that is in the i-th 64 and the upper
        or lower 8 of a warp's 16.
    """
    i32 = ir.IntegerType.get_signless(32)
    zeros = vector.broadcast(ir.VectorType.get((CHUNK // 4,), i32), mgpu.c(0, i32))
    for i, register in enumerate(alive.registers.flat):
        pointers = chunks(*divmod(i, 2))
        number = vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, number, mgpu.c(0, i32))):
            for pointer in pointers:
                llvm.store(zeros, pointer)
