"""Rows of a pool, gathered by a warpgroup into tiles that tensor cores read.

Hopper's copy engine takes no list of rows. So threads copy rows asynchronously, or load them into registers before
there is room for them in shared memory and store them once there is: swizzled, 16 bytes an access, such that the eight
threads whose stores go to shared memory together touch all banks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.dequantise import QUANTISED_REF, ChunkPointers, i32, masked, plus, shifted, times, warp_and_lane
from pallas_attn.mosaic.row_layout import RowLayout
from pallas_attn.mosaic.sm90 import sharing
from pallas_attn.mosaic.tiles import ROW_BYTES, operand_ref

WARPGROUP, WARP = 128, 32
"""Threads."""

TOKENS = 64
"""Rows of a tile."""

PER_THREAD = RowLayout(1, 1).per_row
"""Layout of a value for each thread of a warpgroup."""

BLOCK = 64
"""Columns of a swizzled row of a tile."""


def tile_row(threads: int) -> jax.Array:
    """Row of a tile whose place in the pool each thread looks up, int32 [WARPGROUP] in layout `PER_THREAD`.

    A warp has 16 rows of a tile, and a register holds all of their places: two threads know the same.
    """
    thread = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=PER_THREAD)
    warp, which = lax.shift_right_logical(thread, 5), thread & 15
    rows = WARP // threads  # of a warp at a time
    first, within = which & -rows, which & rows - 1
    return first * 4 + warp * rows + within


def _by_row(per_thread: jax.Array, threads: int) -> jax.Array:
    """Values [TOKENS] of the rows of a tile, of values in the order of `tile_row`, in the interpreter."""
    rows = WARP // threads
    row = jnp.arange(TOKENS, dtype=jnp.int32)
    return per_thread[row % (4 * rows) // rows * WARP + row // (4 * rows) * rows + row % rows]


def _of_rows(values: Any, threads: int) -> list[ir.Value]:
    """Values of the rows that a thread has a share of, of values in the order of `tile_row`."""
    _, lane = warp_and_lane()
    (register,) = values.registers.flat
    number, first, rows = vector.extract(register, [], [0]), shifted(lane, threads.bit_length() - 1), WARP // threads
    return [shuffled(number, plus(first, mgpu.c(i, i32()))) for i in range(0, TOKENS // 4, rows)]


def load_rows(ref: Ref, row: jax.Array, column: int, columns: int) -> jax.Array:
    """Load ref[row[i], column : column + columns], of 8 bits, for each i; zeros, without an access, where row[i] is
    negative.

    Nothing may write to `ref` while the kernel runs. The result, words in an order of its own, is for `store_rows`.

    Args:
      ref: in global memory.
      row: int32 [WARPGROUP] in the order of `tile_row` for four threads.
      column, columns: multiples of 64.
    """
    if interpreted():
        row = _by_row(row, EIGHT_BIT_THREADS)
        rows = ref[...][jnp.maximum(row, 0), column : column + columns]
        return jnp.where(row[:, None] >= 0, rows, jnp.zeros((), rows.dtype))
    shape = TOKENS, columns // 4
    held = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=EIGHT_BIT_WORDS.tile)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD), return_type=held)
    def load(_: Any, ref: ir.Value, row: Any) -> Any:
        (chunk,), row_bytes = _Places.of(EIGHT_BIT_THREADS, 1).chunks, ir.MemRefType(ref.type).shape[1]
        layout = EIGHT_BIT_WORDS.tile.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        by_row = registers.reshape(TOKENS // EIGHT_BIT_ROWS, -1)
        for i, number in enumerate(_of_rows(row, EIGHT_BIT_THREADS)):
            address = _address(ref, number, row_bytes, chunk)
            for block in range(by_row.shape[1]):
                by_row[i, block] = _load_16_bytes(address, column + BLOCK * block, number)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return load(ref, row)


def copy_rows(threads: int, ref: Ref, row: jax.Array, column: int, to: Ref) -> None:
    """Start copies of ref[row[i], column : column + columns of `to`] to a tile in shared memory, as tensor cores read
    it; of zeros, without an access, where row[i] is negative.

    They are done once `PartBarriers.arrive_copies` says so, and seen by tensor cores after `sharing.see_copies`.

    Args:
      threads: that share a row; eight for numbers of 8 bits.
      ref: in global memory, numbers of 16 or 8 bits.
      row: int32 [WARPGROUP] in the order of `tile_row`.
      column: at a multiple of 16 bytes.
      to: `tiles.operand` [rows, columns].
    """
    columns, number_bytes = to.shape[1], jnp.dtype(to.dtype).itemsize
    if interpreted():
        row = _by_row(row, threads)
        rows = ref[...][jnp.maximum(row, 0), column : column + columns]
        to[...] = jnp.where(row[:, None] >= 0, rows, jnp.zeros((), to.dtype))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, operand_ref() if number_bytes == 2 else QUANTISED_REF))
    def copy(_: Any, ref: ir.Value, row: Any, to: ir.Value) -> None:
        warp, lane = warp_and_lane()
        rows, in_row = WARPGROUP // threads, ROW_BYTES // number_bytes
        first = plus(times(warp, rows // 4), shifted(lane, threads.bit_length() - 1))
        (_, stride, *_), _ = ir.MemRefType(to.type).get_strides_and_offset()
        steps = [
            (number_bytes * stride * block, number_bytes * (column + in_row * block))
            for block in range(columns // in_row)
        ]
        row_bytes = number_bytes * ir.MemRefType(ref.type).shape[1]
        chunks = _Places.of(threads, 2).chunks
        pointers = [ChunkPointers(to, number_bytes * columns, first, chunk) for chunk in chunks]
        for i, number in enumerate(_of_rows(row, threads)):
            for chunk, pointer in zip(chunks, pointers, strict=True):
                _copy_16_bytes(pointer.pointer(rows * i, 0), ref, number, row_bytes, chunk, steps)

    copy(ref, row, to)


def copy_scales(threads: int, ref: Ref, row: jax.Array, to: Ref) -> None:
    """Start copies of the scales of rows, ref[row[i]], to a row of shared memory; of zeros, without an access, where
    row[i] is negative. As `copy_rows` otherwise.

    Args:
      threads, row: as in `copy_rows`.
      ref: float32 [rows of the pool, groups] in global memory.
      to: float32 [TOKENS · groups].
    """
    groups = ref.shape[1]
    if interpreted():
        row = _by_row(row, threads)
        to[...] = jnp.where(row[:, None] >= 0, ref[...][jnp.maximum(row, 0)], 0.0).reshape(-1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, PER_THREAD, plgpu.RefType()))
    def copy(_: Any, ref: ir.Value, row: Any, place: Any, to: ir.Value) -> None:
        number, place = (vector.extract(x.registers.flat[0], [], [0]) for x in (row, place))
        none: Any = mgpu.c(0, i32())
        address = _address(ref, arith.maxsi(number, none), 4 * groups)
        pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(to), [times(place, groups)], ir.F32Type.get())
        given = arith.cmpi(arith.CmpIPredicate.sge, number, none)
        of_copy = 4 * groups if groups in (1, 2, 4) else 4
        num_bytes = arith.select(given, mgpu.c(of_copy, i32()), none)
        for offset in range(0, 4 * groups, of_copy):
            kind = "cg" if of_copy == 16 else "ca"
            text = f"cp.async.{kind}.shared.global [$0 + {offset}], [$1 + {offset}], {of_copy}, $2;"
            operands = [llvm.ptrtoint(i32(), pointer), address, num_bytes]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r", has_side_effects=True)

    copy(ref, row, tile_row(threads), to)


def _copy_16_bytes(
    place: ir.Value, ref: ir.Value, row: ir.Value, row_bytes: int, chunk: ir.Value, steps: list[tuple[int, int]]
) -> None:
    """Start copies of chunks of a row, or of zeros if it is negative.

    Args:
      place: pointer to shared memory.
      chunk: of the row, the first.
      steps: distances in bytes of each copy from the place, and from the chunk.
    """
    none: Any = mgpu.c(0, i32())
    address, place = _address(ref, arith.maxsi(row, none), row_bytes, chunk), llvm.ptrtoint(i32(), place)
    given = arith.cmpi(arith.CmpIPredicate.sge, row, none)
    num_bytes = arith.select(given, mgpu.c(16, i32()), none)
    for to, offset in steps:
        text = COPY_16_BYTES.format(to=to, offset=offset)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [place, address, num_bytes], text, "r,l,r", has_side_effects=True)


def store_rows(values: jax.Array, to: Ref, scale: jax.Array, other: Ref | None = None) -> None:
    """Store rows to columns of a bfloat16 tile in shared memory, as tensor cores read it.

    Threads do not wait for each other: a `plgpu.commit_smem` has to follow.

    Args:
      values: of `load_rows`.
      to: `tiles.operand` [rows, columns].
      scale: float32 [WARPGROUP] in the order of `tile_row`, which multiplies e4m3.
      other: barrier of `sharing.PartBarriers`; rows are stored for the other program of the cluster, too.
    """
    if interpreted():
        to[...] = (values.astype(jnp.float32) * _by_row(scale, EIGHT_BIT_THREADS)[:, None]).astype(to.dtype)
        return
    to_columns, barriers = to.shape[1], () if other is None else (other,)
    types = [PER_THREAD, *(plgpu.RefType() for _ in barriers)]

    @plgpu.inline_mgpu(arg_types=(EIGHT_BIT_WORDS.tile, operand_ref(), *types))
    def store(_: Any, values: Any, to: ir.Value, scale: Any, *barrier: Any) -> None:
        warp, lane = warp_and_lane()
        row = plus(times(warp, EIGHT_BIT_ROWS // 4), shifted(lane, EIGHT_BIT_THREADS.bit_length() - 1))
        pointers = [ChunkPointers(to, 2 * to_columns, row, c) for c in _Places.of(EIGHT_BIT_THREADS, 1).tile_chunks]
        by_row = values.registers.reshape(TOKENS // EIGHT_BIT_ROWS, -1)
        for i, (registers, factor) in enumerate(zip(by_row, _of_rows(scale, EIGHT_BIT_THREADS), strict=True)):
            for block, words in enumerate(registers):
                for pointer, word in zip(pointers, _scaled(words, factor), strict=True):
                    place = pointer.pointer(EIGHT_BIT_ROWS * i, 8 * block)
                    llvm.store(word, place, alignment=16)
                    if barrier:
                        address, told = llvm.ptrtoint(i32(), place), sharing.shared_address(barrier[0])
                        sharing.store_to_other(word, address, told, sharing.other_program())

    store(values, to, scale, *barriers)


EIGHT_BIT_THREADS = 4
"""Threads that share a row of numbers of 8 bits."""

EIGHT_BIT_ROWS = WARPGROUP // EIGHT_BIT_THREADS
"""Rows of numbers of 8 bits that threads have a chunk of at a time."""

EIGHT_BIT_WORDS = RowLayout(EIGHT_BIT_THREADS, 4)
"""Layout of rows of words of 32 bits, of which a thread has four neighbouring ones at a time."""


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


def load_values(ref: Ref, row: jax.Array, column: int) -> jax.Array:
    """Load ref[row[i], column], float32, for each i; 0, without an access, where row[i] is negative. Rows and values
    are in the order of `tile_row`. Nothing may write to `ref` while the kernel runs.
    """
    if interpreted():
        return jnp.where(row >= 0, ref[...][jnp.maximum(row, 0), column], 0.0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), PER_THREAD),
        return_type=plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.float32, layout=PER_THREAD),
    )
    def load(_: Any, ref: ir.Value, row: Any) -> Any:
        registers, number_type = np.empty_like(row.registers), ir.F32Type.get()
        number = vector.extract(row.registers.flat[0], [], [0])
        address = _address(ref, number, 4 * ir.MemRefType(ref.type).shape[1])
        text = LOAD_4_BYTES.format(offset=4 * column)
        value: Any = llvm.inline_asm(number_type, [address, number], text, "=&f,l,r", has_side_effects=True)
        registers.reshape(-1)[0] = vector.broadcast(ir.VectorType.get((1,), number_type), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=row.layout, _is_signed=None)

    return load(ref, row)


def store_none(threads: int, row: jax.Array, is_none: Ref, all_given: Ref) -> None:
    """Store to shared memory which rows are negative. Threads do not wait for each other, as in `store_rows`.

    Args:
      threads, row: as in `load_rows`.
      is_none: int32 [TOKENS], 1 where a row is negative, else 0.
      all_given: int32 [4], for each warp 1 if none of its rows is, else 0.
    """
    if interpreted():
        is_none[...] = jnp.where(_by_row(row, threads) < 0, 1, 0)
        all_given[...] = jnp.full((4,), jnp.where((row >= 0).all(), 1, 0))
        return

    @plgpu.inline_mgpu(arg_types=(PER_THREAD, PER_THREAD, plgpu.RefType(), plgpu.RefType()))
    def store(_: Any, row: Any, place: Any, is_none: ir.Value, all_given: ir.Value) -> None:
        warp, lane = warp_and_lane()
        index = ir.IndexType.get()
        number, place = (vector.extract(x.registers.flat[0], [], [0]) for x in (row, place))
        memref.store(shifted(number, 31), is_none, [arith.index_cast(index, place)])
        votes: Any = llvm.inline_asm(i32(), [number], ALL_GIVEN, "=r,r", has_side_effects=True)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.c(0, i32()))):
            memref.store(votes, all_given, [arith.index_cast(index, warp)])

    store(row, tile_row(threads), is_none, all_given)


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

COPY_16_BYTES = "cp.async.cg.shared.global.L2::128B [$0 + {to}], [$1 + {offset}], 16, $2;"

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


def shuffled(number: ir.Value, lane: ir.Value) -> ir.Value:
    """Read a number of another lane of the warp."""
    all_lanes: Any = mgpu.c(0xFFFFFFFF, i32())
    clamp: Any = mgpu.c(31, i32())
    return nvvm.shfl_sync(all_lanes, number, lane, clamp, nvvm.ShflKind.idx)


def _address(ref: ir.Value, row: ir.Value, row_bytes: int, chunk: ir.Value | None = None) -> ir.Value:
    """Address of a row of an array in global memory, or of a chunk of it. It has 64 bits, and may be anywhere if the
    row is negative.
    """
    i64 = ir.IntegerType.get_signless(64)
    begin = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    if chunk is not None:
        begin = arith.addi(begin, arith.extui(i64, times(chunk, 16)))
    return arith.addi(begin, arith.muli(arith.extsi(i64, row), mgpu.c(row_bytes, i64)))
