"""Gather and scatter of rows in Mosaic GPU kernels, between global memory and the registers of a warpgroup.

A row is one row of an array [rows, columns] in global memory, for example the cached latent of one token. Tokens may be
in any row, but Pallas copies blocks of consecutive rows. In these functions, every thread therefore computes its own
addresses and moves up to 32 bytes at a time, without shared memory. Adjacent threads hold adjacent columns of a row, so
that the accesses of a warp fill whole sectors (32 bytes).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_attn.mosaic.primitives.basics import Ref, interpreted

THREADS = 128
"""Threads of a warpgroup."""

ACCESS_BYTES = 16
"""Maximum bytes that a thread of `copy_indexed_rows` moves with one instruction."""

HELD_BYTES = 320
"""Maximum number of bytes that a thread of `copy_indexed_rows` holds at a time. It is large enough to load a whole row
of DeepSeek's latents (576 columns), also in float32, before the row is stored.
"""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Layout of 2D tiles in the registers of a warpgroup.

    The shape of a tile is [a multiple of `self.rows`, a multiple of `self.columns`].

    Attributes:
      threads: number of threads that share a row; a power of two, at most 32.
      vector: number of adjacent columns that a thread holds in one vector register.
    """

    threads: int
    vector: int

    @staticmethod
    def for_copies(width: int, dtype: Any) -> RowLayout:
        """Return the layout with which `copy_indexed_rows` copies rows of `width` elements.

        It has the widest accesses of up to `ACCESS_BYTES` that divide a row evenly, then the most threads per row.
        """
        even = width & -width
        vector = min(ACCESS_BYTES // jnp.dtype(dtype).itemsize, even)
        return RowLayout(min(32, even // vector), vector)

    @property
    def rows(self) -> int:
        return THREADS // self.threads

    @property
    def columns(self) -> int:
        return self.threads * self.vector

    @functools.cached_property
    def tile(self) -> Any:
        """Layout of a tile."""
        rows, columns = self.rows, self.columns
        tiling = plgpu.Tiling(((rows, columns), (rows // 4, columns), (self.vector,)))
        layout = mgpu.TiledLayout(tiling, (-5,), (-3, -2), -1, _check_canonical=False).canonicalize()
        return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)

    @functools.cached_property
    def per_row(self) -> Any:
        """Layout of an array with one value per row. All threads that share a row hold its value."""
        return self.tile.reduce(1)

    def iota(self, rows: int) -> jax.Array:
        """Return the index of each row, int32 [rows], with layout `per_row`."""
        return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=self.per_row)

    def spread(self, per_row: jax.Array, columns: int) -> jax.Array:
        """Broadcast a value of each row over its columns."""
        shape = (per_row.shape[0], columns)
        return plgpu.layout_cast(lax.broadcast_in_dim(per_row, shape, [0]), self.tile)

    def filled(self, value: Any, rows: int) -> jax.Array:
        """Array [rows] filled with one value, with layout `per_row`."""
        return plgpu.layout_cast(lax.broadcast(jnp.asarray(value), (rows,)), self.per_row)

    # Rows of global memory

    def load(self, ref: Ref, row: jax.Array, column: int, columns: int) -> jax.Array:
        """Load ref[row[i], column : column + columns] for each i. For a negative row[i], return zeros without a memory
        access.
        """
        dtype, shape = ref.dtype, (row.shape[0], columns)
        if interpreted():
            return _interpreted_load(ref, row, pl.ds(column, columns), shape)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), self.tile),
            return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=self.tile),
        )
        def load(_: Any, ref: ir.Value, row: Any) -> Any:
            element = mgpu.utils.dtype_to_ir_type(dtype)
            loaded = ir.VectorType.get((self.vector,), element)
            registers = np.empty_like(row.registers)
            for index, is_given, pointer in _accesses(ref, row, column):
                registers[index] = _load_if(is_given, pointer, loaded)
            return mgpu.FragmentedArray(
                _registers=registers, _layout=row.layout, _is_signed=mgpu.utils.is_signed(dtype)
            )

        return load(ref, self.spread(row, columns))

    def store(self, ref: Ref, row: jax.Array, column: int, values: jax.Array) -> None:
        """Store values[i] to ref[row[i], column : column + columns] for each i with row[i] >= 0."""
        if interpreted():
            _interpreted_store(ref, row, (pl.ds(column, values.shape[1]),), values)
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self.tile, self.tile))
        def store(_: Any, ref: ir.Value, row: Any, values: Any) -> None:
            for index, is_given, pointer in _accesses(ref, row, column):
                _store_if(is_given, values.registers[index], pointer)

        store(ref, self.spread(row, values.shape[1]), values)

    # Single values of global memory

    def take(self, ref: Ref, index: jax.Array, layout: Any = None) -> jax.Array:
        """Load elements of a reference by their flat index, which must be in range.

        No running kernel may write the elements at the same time.

        Args:
          layout: layout of the indices and of the result; None for `per_row`.
        """
        if interpreted():
            return ref[...].reshape(-1)[index]
        layout, dtype = layout or self.per_row, ref.dtype

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), layout),
            return_type=plgpu.ShapeDtypeStruct(index.shape, dtype, layout=layout),
        )
        def take(_: Any, ref: ir.Value, index: Any) -> Any:
            element = mgpu.utils.dtype_to_ir_type(dtype)
            registers = np.empty_like(index.registers)
            for i, register in np.ndenumerate(index.registers):
                places = [vector.extract(register, [], [j]) for j in range(register.type.shape[0])]
                loaded = [load_element(ref, place) for place in places]
                registers[i] = vector.from_elements(ir.VectorType.get((len(loaded),), element), loaded)
            return mgpu.FragmentedArray(
                _registers=registers, _layout=index.layout, _is_signed=mgpu.utils.is_signed(dtype)
            )

        return take(ref, index)

    def put(self, ref: Ref, index: jax.Array, values: jax.Array) -> None:
        """Store values[i] to ref[index[i]] for each i with index[i] >= 0. Both arrays have layout `per_row`."""
        if interpreted():
            _interpreted_store(ref, index, (), values)
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), self.per_row, self.per_row))
        def put(_: Any, ref: ir.Value, index: Any, values: Any) -> None:
            for i, register in np.ndenumerate(index.registers):
                place = vector.extract(register, [], [0])
                pointer = _pointer(ref, _offset(place), values.mlir_dtype)
                _store_if(_is_given(place), values.registers[i], pointer)

        put(ref, index, values)

    # Columns in pairs

    def unzip(self, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Split a tile into its even and odd columns, with layout `halved`."""
        if interpreted():
            return pairs[:, 0::2], pairs[:, 1::2]
        half = self.halved
        result = plgpu.ShapeDtypeStruct((pairs.shape[0], pairs.shape[1] // 2), pairs.dtype, layout=half.tile)

        @plgpu.inline_mgpu(arg_types=(self.tile,), return_type=(result, result))
        def unzip(_: Any, pairs: Any) -> Any:
            return tuple(
                _each(pairs, half.tile, lambda r, odd=odd: _shuffle(r, r, range(odd, self.vector, 2))) for odd in (0, 1)
            )

        return unzip(pairs)

    def zip(self, even: jax.Array, odd: jax.Array) -> jax.Array:
        """Interleave columns: the inverse of `unzip`, from layout `halved`."""
        if interpreted():
            return jnp.stack([even, odd], axis=-1).reshape(even.shape[0], -1)
        half = self.halved
        result = plgpu.ShapeDtypeStruct((even.shape[0], 2 * even.shape[1]), even.dtype, layout=self.tile)
        order = [i // 2 + i % 2 * half.vector for i in range(self.vector)]

        @plgpu.inline_mgpu(arg_types=(half.tile, half.tile), return_type=result)
        def interleave(_: Any, even: Any, odd: Any) -> Any:
            return _each(even, self.tile, lambda e, o: _shuffle(e, o, order), odd)

        return interleave(even, odd)

    @property
    def halved(self) -> RowLayout:
        """Layout with half the vector."""
        return dataclasses.replace(self, vector=self.vector // 2)


# --- copies


def copy_indexed_rows(
    layout: RowLayout, source: Ref, source_row: jax.Array, target: Ref, target_row: jax.Array
) -> None:
    """Copy source[source_row[i]] to target[target_row[i]] for each i, bit for bit.

    If target_row[i] is negative, nothing is written. Otherwise, if source_row[i] is negative, zeros are written. Source
    and target may have more than 2**32 elements.
    """
    width = source.shape[1]
    held = layout.columns * max(1, HELD_BYTES // (layout.vector * jnp.dtype(source.dtype).itemsize))
    for column in range(0, width, held):
        values = layout.load(source, source_row, column, min(held, width - column))
        layout.store(target, target_row, column, values)


# --- results of products


def store_results(tile: Any, ref: Ref, row: jax.Array, column: int, values: jax.Array) -> None:
    """Store values[i] to ref[row[i], column : column + columns] for each i with row[i] >= 0, 64 bytes of a row at a
    time.

    In the result of a wgmma, four threads share a row, and each thread holds two of every 8 columns. Direct stores
    would write 16 bytes of a row at a time, half a sector. The four threads therefore exchange columns first, so that
    each thread has 8 adjacent columns.

    Args:
      tile: register layout of the results of a wgmma.
      row: [64 · n], with layout `tile.reduce(1)`.
      values: 16-bit [64 · n, a multiple of 32], with layout `tile`.
    """
    if interpreted():
        _interpreted_store(ref, row, (pl.ds(column, values.shape[1]),), values)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tile.reduce(1), tile))
    def store(_: Any, ref: ir.Value, row: Any, values: Any) -> None:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        width, element = ir.MemRefType(ref.type).shape[1], ir.MemRefType(ref.type).element_type
        thread = arith.andi(mgpu.utils.thread_idx(), mgpu.c(3, i32))
        own_column = arith.addi(arith.muli(arith.extui(i64, thread), mgpu.c(8, i64)), mgpu.c(column, i64))
        for block, half in np.ndindex(row.registers.shape[0], 2):
            number = vector.extract(row.registers[block, 0, half, 0, 0], [], [0])
            start = arith.addi(arith.muli(_offset(number), mgpu.c(width, i64)), own_column)
            words = [mgpu.utils.bitcast(pair, i32) for pair in values.registers[block, :, 0, 0, half].flat]
            for first in range(0, len(words), 4):
                pointer = _pointer(ref, arith.addi(start, mgpu.c(8 * first, i64)), element)
                _store_words(_is_given(number), _exchanged(words[first : first + 4], thread), pointer)

    store(ref, row, values)


def store_first_rows(tile: Any, to: Ref, values: jax.Array) -> None:
    """Store the first n rows of a result of a wgmma to global memory, in its own layout.

    Args:
      tile: register layout of the results of a wgmma.
      to: [n, columns] in global memory.
      values: [64, columns], with layout `tile`.
    """
    rows = to.shape[0]
    if rows == values.shape[0]:
        to[...] = values
        return
    if interpreted():
        to[...] = values[:rows]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tile))
    def store(_: Any, to: ir.Value, values: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        kind, thread = ir.MemRefType(to.type), mgpu.utils.thread_idx()
        stride = mgpu.c(kind.get_strides_and_offset()[0][0], i32)

        def bits(first: int, count: int) -> ir.Value:
            return arith.andi(arith.shrui(thread, mgpu.c(first, i32)), mgpu.c(2**count - 1, i32))

        column = arith.muli(bits(0, 2), mgpu.c(2, i32))
        for half in range(2):
            own = arith.addi(arith.muli(bits(5, 2), mgpu.c(16, i32)), bits(2, 3))
            row = arith.addi(own, mgpu.c(8 * half, i32))
            first = _pointer(to, _offset(arith.addi(arith.muli(row, stride), column)), kind.element_type)
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(rows, i32))):
                for i, pair in enumerate(values.registers[0, :, 0, 0, half].flat):
                    place = mgpu.utils.getelementptr(first, [8 * i], kind.element_type)
                    llvm.store(pair, place, alignment=mgpu.utils.bitwidth(pair.type) // 8)

    store(to, values)


def _exchanged(words: list[ir.Value], thread: ir.Value) -> list[ir.Value]:
    """Transpose 4 words of each of 4 adjacent threads: thread t receives word t of each thread, in thread order.

    Args:
      thread: index of the thread among the four.
    """
    for bit in (1, 2):
        mask = mgpu.c(bit, thread.type)
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, mask), mgpu.c(0, thread.type))
        for i in (i for i in range(4) if not i & bit):
            low, high = words[i], words[i | bit]
            own = arith.select(upper, high, low)
            received = mgpu.utils.shfl_bfly(arith.select(upper, low, high), bit)
            words[i], words[i | bit] = arith.select(upper, received, own), arith.select(upper, own, received)
    return words


# --- interpreted on the CPU


def _interpreted_load(ref: Ref, row: jax.Array, columns: Any, shape: tuple[int, int]) -> jax.Array:
    """Load the requested rows one by one. Other rows are not read, because other CTAs may be writing them."""

    def load(i: jax.Array, loaded: jax.Array) -> jax.Array:
        return lax.cond(row[i] >= 0, lambda: loaded.at[i].set(ref[row[i], columns]), lambda: loaded)

    return lax.fori_loop(0, shape[0], load, jnp.zeros(shape, ref.dtype))


def _interpreted_store(ref: Ref, row: jax.Array, columns: tuple[Any, ...], values: jax.Array) -> None:
    def store(i: jax.Array, _: None) -> None:
        @pl.when(row[i] >= 0)
        def _store() -> None:
            ref[(row[i], *columns)] = values[i]

    lax.fori_loop(0, values.shape[0], store, None)


# --- as MLIR


def load_element(ref: ir.Value, index: ir.Value) -> ir.Value:
    """Load one element of a reference by its flat index."""
    element = ir.MemRefType(ref.type).element_type
    return llvm.load(element, _pointer(ref, _offset(index), element))


def _accesses(ref: ir.Value, row: Any, column: int) -> Any:
    """For each register of a tile, yield its index, whether its row is not negative, and a pointer to its first column.

    Offsets have 64 bits, because a cache may have more than 2**32 elements.
    """
    width = ir.MemRefType(ref.type).shape[1]
    element = ir.MemRefType(ref.type).element_type
    i64 = ir.IntegerType.get_signless(64)
    for (index, register), (_, own_column) in zip(
        np.ndenumerate(row.registers), row.layout.thread_idxs(row.shape), strict=True
    ):
        number = vector.extract(register, [], [0])
        start = arith.muli(_offset(number), mgpu.c(width, i64))
        within = arith.addi(arith.index_castui(i64, own_column), mgpu.c(column, i64))
        yield index, _is_given(number), _pointer(ref, arith.addi(start, within), element)


def _is_given(number: ir.Value) -> ir.Value:
    """Whether a row or index is not negative."""
    return arith.cmpi(arith.CmpIPredicate.sge, number, mgpu.c(0, number.type))


def _offset(number: ir.Value) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), number)


def _pointer(ref: ir.Value, offset: ir.Value, element: ir.Type) -> ir.Value:
    storage = ir.IntegerType.get_signless(mgpu.utils.bitwidth(element))
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], storage)


def _words(loaded: ir.VectorType) -> ir.VectorType:
    """Return the vector type with which a vector is loaded or stored: words of 32 bits, or one smaller word."""
    bits = mgpu.utils.bitwidth(loaded)
    word = min(bits, 32)
    return ir.VectorType.get((bits // word,), ir.IntegerType.get_signless(word))


def _load_if(is_given: ir.Value, pointer: ir.Value, loaded: ir.VectorType) -> ir.Value:
    """Load a vector of this type if a condition holds. Otherwise return zeros without a memory access."""
    words = _words(loaded)
    branch = scf.IfOp(is_given, [words], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        alignment = min(16, mgpu.utils.bitwidth(words) // 8)
        scf.yield_([llvm.load(words, pointer, alignment=alignment)])
    with ir.InsertionPoint(branch.elseRegion.blocks[0]):
        scf.yield_([vector.broadcast(words, mgpu.c(0, words.element_type))])
    return mgpu.utils.bitcast(branch.results[0], loaded)


def _store_if(is_given: ir.Value, values: ir.Value, pointer: ir.Value) -> None:
    words = mgpu.utils.bitcast(values, _words(ir.VectorType(values.type)))
    with mgpu.utils.when(is_given):
        llvm.store(words, pointer, alignment=min(16, mgpu.utils.bitwidth(words.type) // 8))


def _store_words(is_given: ir.Value, words: list[ir.Value], pointer: ir.Value) -> None:
    """Store 4 words to global memory if a condition holds.

    The store is a predicated instruction instead of a branch, because the assembler moves no instruction past a branch.
    """
    address = llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)
    text = "@$0 st.global.v4.b32 [$1], {$2, $3, $4, $5};"
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [is_given, address, *words], text, "b,l,r,r,r,r,~{memory}", has_side_effects=True)


def _each(x: Any, layout: Any, function: Callable[..., ir.Value], *more: Any) -> Any:
    """Apply a function to corresponding registers of arrays, and return an array with another layout."""
    registers = np.empty_like(x.registers)
    for i in np.ndindex(registers.shape):
        registers[i] = function(x.registers[i], *(other.registers[i] for other in more))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=x.is_signed)


def _shuffle(a: ir.Value, b: ir.Value, order: Any) -> ir.Value:
    return vector.shuffle(a, b, mask=ir.DenseI64ArrayAttr.get(list(order)))
