"""Rows of a pool, gathered by a warpgroup into tiles that tensor cores read.

Hopper's copy engine takes no list of rows. So threads load rows into registers, before there is room for them in shared
memory, and store them swizzled once there is: 16 bytes an access, such that the eight threads whose stores go to shared
memory together touch all banks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.dequantise import ChunkPointers, i32, masked, plus, shifted, times, warp_and_lane
from pallas_attn.mosaic.row_layout import RowLayout
from pallas_attn.mosaic.tiles import operand_ref

WARPGROUP = 128
"""Threads of a warpgroup."""

BLOCK = 64
"""Columns of a swizzled row of a tile."""


def threads_of_row(dtype: Any) -> int:
    """Threads that share a row of latents: eight, which have 64 columns of 16 bits at a time, or four for 8 bits."""
    return 8 * jnp.dtype(dtype).itemsize // 2


def rows_layout(threads: int) -> Any:
    """Layout of a value for each row where so many threads share one."""
    return RowLayout(threads, 1).per_row


def _words(threads: int) -> RowLayout:
    """Layout of rows of words of 32 bits, of which a thread has four neighbouring ones at a time."""
    return RowLayout(threads, 4)


def row_iota(threads: int, rows: int) -> jax.Array:
    """Index of each row, int32 [rows] in layout `rows_layout(threads)`."""
    return RowLayout(threads, 1).iota(rows)


def load_rows(threads: int, ref: Ref, row: jax.Array, column: int, columns: int) -> jax.Array:
    """Load ref[row[i], column : column + columns] for each i; zeros, without an access, where row[i] is negative.

    Nothing may write to `ref` while the kernel runs. The result, words in an order of its own, is for `store_rows`.

    Args:
      threads: that share a row.
      ref: in global memory, numbers of 16 bits or, if four threads share a row, of 8.
      row: int32 in layout `rows_layout(threads)`.
      column, columns: multiples of 64.
    """
    shape, dtype = (row.shape[0], columns), ref.dtype
    if interpreted():
        rows = ref[...][jnp.maximum(row, 0), column : column + columns]
        return jnp.where(row[:, None] >= 0, rows, jnp.zeros((), dtype))
    number_bytes = jnp.dtype(dtype).itemsize
    shape = row.shape[0], columns * number_bytes // 4
    held = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=_words(threads).tile)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), rows_layout(threads)), return_type=held)
    def load(_: Any, ref: ir.Value, row: Any) -> Any:
        places, row_bytes = _Places.of(threads, number_bytes), ir.MemRefType(ref.type).shape[1] * number_bytes
        registers = np.empty(_words(threads).tile.to_mgpu().registers_shape(shape), dtype=object)
        by_row = registers.reshape(row.registers.size, -1)
        for i, register in enumerate(row.registers.flat):
            number = vector.extract(register, [], [0])
            addresses = [_address(ref, number, row_bytes, chunk) for chunk in places.chunks]
            for j in range(by_row.shape[1]):
                block, which = divmod(j, len(addresses))
                by_row[i, j] = _load_16_bytes(addresses[which], (column + BLOCK * block) * number_bytes, number)
        return mgpu.FragmentedArray(_registers=registers, _layout=_words(threads).tile.to_mgpu(), _is_signed=True)

    return load(ref, row)


def store_rows(threads: int, values: jax.Array, to: Ref, scale: jax.Array | None = None) -> None:
    """Store rows to columns of a 16-bit tile in shared memory, as tensor cores read it.

    Threads do not wait for each other: a `plgpu.commit_smem` has to follow.

    Args:
      threads: that share a row.
      values: of `load_rows`.
      to: `tiles.operand` [rows, columns]; bfloat16 if there is a scale.
      scale: float32 [rows] in layout `rows_layout(threads)`, which multiplies e4m3.
    """
    if interpreted():
        to[...] = values if scale is None else (values.astype(jnp.float32) * scale[:, None]).astype(to.dtype)
        return
    to_bytes = to.shape[1] * 2
    layout, given = _words(threads), () if scale is None else (scale,)

    @plgpu.inline_mgpu(arg_types=(layout.tile, operand_ref(), *[rows_layout(threads)] * len(given)))
    def store(_: Any, values: Any, to: ir.Value, *scale: Any) -> None:
        warp, lane = warp_and_lane()
        row = plus(times(warp, layout.rows // 4), shifted(lane, threads.bit_length() - 1))
        chunks = _Places.of(threads, 1 if scale else 2).tile_chunks
        pointers = [ChunkPointers(to, to_bytes, row, chunk) for chunk in chunks]
        for i, registers in enumerate(values.registers.reshape(values.shape[0] // layout.rows, -1)):
            words = list(registers)
            if scale:
                factor = vector.extract(scale[0].registers.flat[i], [], [0])
                words = [half for each in words for half in _scaled(each, factor)]
            for j, word in enumerate(words):
                block, which = divmod(j, len(pointers))
                llvm.store(word, pointers[which].pointer(layout.rows * i, 8 * block), alignment=16)

    store(values, to, *given)


class _Places(NamedTuple):
    """Which of the chunks of a row's block of 64 columns a thread has.

    Attributes:
      chunks: in global memory.
      tile_chunks: in a tile of 16 bits.
    """

    chunks: list[ir.Value]
    tile_chunks: list[ir.Value]

    @staticmethod
    def of(threads: int, number_bytes: int) -> _Places:
        """Places where so many threads share a row of numbers of so many bytes, such that eight threads store to all
        banks at once: four of them to one row, the others to the next, whose chunks are permuted by the last bits of
        its index.
        """
        thread = mgpu.utils.thread_idx()
        chunk = masked(thread, threads - 1)
        if threads == 8:
            return _Places([chunk], [chunk])
        if number_bytes == 1:
            wide = times(chunk, 2)
            return _Places([chunk], [wide, plus(wide, mgpu.c(1, i32()))])
        chunk = plus(chunk, masked(thread, 4))  # in odd rows the second half comes first
        both = [chunk, arith.xori(chunk, mgpu.c(4, i32()))]
        return _Places(both, both)


def load_per_row(threads: int, ref: Ref, row: jax.Array, column: int) -> jax.Array:
    """Load ref[row[i], column] for each i; 0, without an access, where row[i] is negative. As `load_rows` else."""
    if interpreted():
        return jnp.where(row >= 0, ref[...][jnp.maximum(row, 0), column], 0.0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), rows_layout(threads)),
        return_type=plgpu.ShapeDtypeStruct(row.shape, jnp.float32, layout=rows_layout(threads)),
    )
    def load(_: Any, ref: ir.Value, row: Any) -> Any:
        registers = np.empty_like(row.registers)
        for i, register in np.ndenumerate(row.registers):
            number = vector.extract(register, [], [0])
            address = _address(ref, number, 4 * ir.MemRefType(ref.type).shape[1])
            text = LOAD_4_BYTES.format(offset=4 * column)
            value = llvm.inline_asm(ir.F32Type.get(), [address, number], text, "=&f,l,r", has_side_effects=True)
            registers[i] = vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=row.layout, _is_signed=None)

    return load(ref, row)


def store_none(threads: int, row: jax.Array, is_none: Ref, all_given: Ref) -> None:
    """Store to shared memory which rows are negative. Threads do not wait for each other, as in `store_rows`.

    Args:
      threads: that share a row.
      row: int32 [rows] in layout `rows_layout(threads)`.
      is_none: int32 [rows], 1 where a row is negative, else 0.
      all_given: int32 [4], for each warp 1 if none of its rows is, else 0.
    """
    if interpreted():
        is_none[...] = jnp.where(row < 0, 1, 0)
        all_given[...] = jnp.full((4,), jnp.where((row >= 0).all(), 1, 0))
        return

    @plgpu.inline_mgpu(arg_types=(rows_layout(threads), plgpu.RefType(), plgpu.RefType()))
    def store(_: Any, row: Any, is_none: ir.Value, all_given: ir.Value) -> None:
        warp, lane = warp_and_lane()
        zero = mgpu.c(0, i32())
        signs = [vector.extract(register, [], [0]) for register in row.registers.flat]
        rows = WARPGROUP // threads
        first = plus(times(warp, rows // 4), shifted(lane, threads.bit_length() - 1))
        index = ir.IndexType.get()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, masked(lane, threads - 1), zero)):
            for i, sign in enumerate(signs):
                place = arith.index_cast(index, plus(first, mgpu.c(rows * i, i32())))
                memref.store(shifted(sign, 31), is_none, [place])
        lowest = functools.reduce(arith.minsi, signs)
        votes = llvm.inline_asm(i32(), [lowest], ALL_GIVEN, "=r,r", has_side_effects=True)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, zero)):
            memref.store(votes, all_given, [arith.index_cast(index, warp)])

    store(row, is_none, all_given)


ALL_GIVEN = """
{
.reg .pred given;
setp.ge.s32 given, $1, 0;
vote.sync.all.pred given, given, 0xffffffff;
selp.b32 $0, 1, 0, given;
}
"""

LOAD_4_BYTES = """
{{
.reg .pred given;
setp.ge.s32 given, $2, 0;
mov.b32 $0, 0f00000000;
@given ld.global.nc.f32 $0, [$1 + {offset}];
}}
"""

LOAD_16_BYTES = """
{{
.reg .pred given;
setp.ge.s32 given, $5, 0;
mov.b32 $0, 0;
mov.b32 $1, 0;
mov.b32 $2, 0;
mov.b32 $3, 0;
@given ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];
}}
"""

E4M3_TO_BF16 = """
{
.reg .b16 low, high, h<4>;
.reg .b32 pair<2>;
.reg .f32 f<4>;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 pair0, low;
cvt.rn.f16x2.e4m3x2 pair1, high;
mov.b32 {h0, h1}, pair0;
mov.b32 {h2, h3}, pair1;
cvt.f32.f16 f0, h0;
cvt.f32.f16 f1, h1;
cvt.f32.f16 f2, h2;
cvt.f32.f16 f3, h3;
mul.f32 f0, f0, $3;
mul.f32 f1, f1, $3;
mul.f32 f2, f2, $3;
mul.f32 f3, f3, $3;
cvt.rn.bf16x2.f32 $0, f1, f0;
cvt.rn.bf16x2.f32 $1, f3, f2;
}
"""


def _load_16_bytes(place: ir.Value, offset: int, number: ir.Value) -> ir.Value:
    """Load four words from an address in global memory, zeros if a number is negative."""
    words: Any = llvm.inline_asm(
        llvm.StructType.get_literal([i32()] * 4),
        [place, number],
        LOAD_16_BYTES.format(offset=offset),
        "=&r,=&r,=&r,=&r,l,r",
        has_side_effects=True,
    )
    four = [llvm.extractvalue(i32(), words, [i]) for i in range(4)]
    return vector.from_elements(ir.VectorType.get((4,), i32()), four)


def _scaled(words: ir.Value, factor: ir.Value) -> list[ir.Value]:
    """Sixteen e4m3 times a factor, as two vectors of words with pairs of bfloat16."""
    pairs = []
    for i in range(4):
        word = vector.extract(words, [], [i])
        both: Any = llvm.inline_asm(llvm.StructType.get_literal([i32()] * 2), [word, factor], E4M3_TO_BF16, "=r,=r,r,f")
        pairs += [llvm.extractvalue(i32(), both, [j]) for j in range(2)]
    four = ir.VectorType.get((4,), i32())
    return [vector.from_elements(four, pairs[half : half + 4]) for half in (0, 4)]


def _address(ref: ir.Value, row: ir.Value, row_bytes: int, chunk: ir.Value | None = None) -> ir.Value:
    """Address of a row of an array in global memory, or of a chunk of it. It has 64 bits, and may be anywhere if the
    row is negative.
    """
    i64 = ir.IntegerType.get_signless(64)
    begin = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    if chunk is not None:
        begin = arith.addi(begin, arith.extui(i64, times(chunk, 16)))
    return arith.addi(begin, arith.muli(arith.extsi(i64, row), mgpu.c(row_bytes, i64)))
