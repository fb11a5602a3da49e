"""Experimental: has never run on a card. Loads and stores of tiles [128, n] between registers and global memory.

Each of the 128 threads of a warpgroup holds one row of the tile, which is the layout of loads from TMEM. A fragment is
four columns of a tile, stored in the order [row, column]. Partial states in global memory are sequences of fragments: a
thread moves 16 bytes and a warp 512 consecutive bytes at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.mosaic.blackwell.tmem import ROW_A_THREAD, ROWS
from pallas_attn.mosaic.primitives.basics import Ref, interpreted

PER_ROW, PER_COLUMN = ROW_A_THREAD.reduce(1), ROW_A_THREAD.reduce(0)
"""Layouts of arrays with a value for each row and for each column of a tile."""

FRAGMENT = (ROWS, 4)
"""Shape of a fragment in global memory."""

ACCESS_BYTES = 16


def num_fragments(columns: int) -> int:
    """Number of fragments that hold `columns` columns."""
    return columns // FRAGMENT[1]


def store_fragments(tile: jax.Array, to: Ref) -> None:
    """Write a float32 tile [128, n] to fragments [n / 4, *FRAGMENT]."""
    if interpreted():
        to[...] = tile.reshape(ROWS, -1, FRAGMENT[1]).swapaxes(0, 1)
        return

    @plgpu.inline_mgpu(arg_types=(ROW_A_THREAD, plgpu.RefType()))
    def write(_: Any, tile: Any, to: ir.Value) -> None:
        numbers = _columns(tile)
        four = ir.VectorType.get((FRAGMENT[1],), tile.mlir_dtype)
        for i in range(0, len(numbers), FRAGMENT[1]):
            pointer = _own(to, FRAGMENT[1], i * ROWS, tile.mlir_dtype)
            llvm.store(vector.from_elements(four, numbers[i : i + FRAGMENT[1]]), pointer, alignment=ACCESS_BYTES)

    write(tile, to)


def load_fragments(fragments: Ref) -> jax.Array:
    """Read the tile [128, n] that `store_fragments` wrote."""
    shape = ROWS, fragments.shape[0] * FRAGMENT[1]
    if interpreted():
        return fragments[...].swapaxes(0, 1).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=ROW_A_THREAD)
    )
    def read(_: Any, fragments: ir.Value) -> Any:
        number = ir.F32Type.get()
        two, four = (ir.VectorType.get((n,), number) for n in (2, FRAGMENT[1]))
        pairs = []
        for i in range(0, shape[1], FRAGMENT[1]):
            pointer = _own(fragments, FRAGMENT[1], i * ROWS, number)
            loaded = llvm.load(four, pointer, alignment=ACCESS_BYTES)
            numbers = [vector.extract(loaded, [], [j]) for j in range(FRAGMENT[1])]
            pairs += [vector.from_elements(two, numbers[j : j + 2]) for j in range(0, FRAGMENT[1], 2)]
        layout = ROW_A_THREAD.to_mgpu()
        registers = np.empty(len(pairs), dtype=object)
        registers[:] = pairs
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
        )

    return read(fragments)


def store_rows(tile: jax.Array, to: Ref) -> None:
    """Write a tile [128, n] to `to` [128, n] in global memory. Its rows are contiguous, at multiples of 16 bytes."""
    if interpreted():
        to[...] = tile
        return

    @plgpu.inline_mgpu(arg_types=(ROW_A_THREAD, plgpu.RefType()))
    def write(_: Any, tile: Any, to: ir.Value) -> None:
        numbers, element = _columns(tile), tile.mlir_dtype
        count = ACCESS_BYTES * 8 // mgpu.utils.bitwidth(element)
        row_stride, _ = ir.MemRefType(to.type).get_strides_and_offset()[0]
        several = ir.VectorType.get((count,), element)
        for i in range(0, len(numbers), count):
            pointer = _own(to, row_stride, i, element)
            llvm.store(vector.from_elements(several, numbers[i : i + count]), pointer, alignment=ACCESS_BYTES)

    write(tile, to)


def store_columns(tile: jax.Array, to: Ref, first: int) -> None:
    """Write the first m columns of a tile [128, n] to the rows of `to` [m, 128] in global memory.

    Rows of the tile before `first` are not written, so the first `first` columns of `to` stay unchanged.
    """
    if interpreted():
        to.at[:, first:][...] = tile[first:, : to.shape[0]].T
        return

    @plgpu.inline_mgpu(arg_types=(ROW_A_THREAD, plgpu.RefType()))
    def write(_: Any, tile: Any, to: ir.Value) -> None:
        numbers, element = _columns(tile), tile.mlir_dtype
        column_stride, _ = ir.MemRefType(to.type).get_strides_and_offset()[0]
        i32 = ir.IntegerType.get_signless(32)
        is_given = arith.cmpi(arith.CmpIPredicate.uge, _thread(), mgpu.c(first, i32))
        with mgpu.when(is_given):
            for i, number in enumerate(numbers[: ir.MemRefType(to.type).shape[0]]):
                llvm.store(number, _own(to, 1, i * column_stride, element))

    write(tile, to)


def _columns(tile: Any) -> list[ir.Value]:
    """Return this thread's row of the tile, one MLIR value per column."""
    return [vector.extract(register, [], [i]) for register in tile.registers.flat for i in range(2)]


def _thread() -> ir.Value:
    """Index of the thread in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(mgpu.utils.thread_idx(), mgpu.c(ROWS, i32))


def _own(ref: ir.Value, stride: int, offset: int, element: ir.Type) -> ir.Value:
    """Return a pointer to element stride · thread + offset of `ref`, where `thread` is the index of this thread."""
    i64 = ir.IntegerType.get_signless(64)
    own = arith.addi(arith.muli(arith.extui(i64, _thread()), mgpu.c(stride, i64)), mgpu.c(offset, i64))
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [own], element)
