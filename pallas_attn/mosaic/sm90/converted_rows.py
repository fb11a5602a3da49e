"""Rows of 8-bit numbers, loaded into registers by a warpgroup, and stored to tiles as bfloat16, scales multiplied in.

Threads load rows before there is room for them in shared memory, and store them once there is: swizzled, 16 bytes an
access, such that the eight threads whose stores go to shared memory together touch all banks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.dequantise import ChunkPointers, i32, masked, plus, shifted, times, warp_and_lane
from pallas_attn.mosaic.row_layout import RowLayout
from pallas_attn.mosaic.sm90 import sharing
from pallas_attn.mosaic.sm90.gather import PER_THREAD, TOKENS, WARP, WARPGROUP, row_address, shuffled
from pallas_attn.mosaic.tiles import operand_ref

THREADS = 4
"""Threads that share a row."""

ROWS = WARPGROUP // THREADS
"""Rows that threads have a chunk of at a time."""

BLOCK = 64
"""Columns of a swizzled row of a tile of 16 bits."""

WORDS = RowLayout(THREADS, 4)
"""Layout of rows of words of 32 bits, of which a thread has four neighbouring ones at a time."""


def tile_row() -> jax.Array:
    """Row of a tile whose place in the pool each thread looks up, int32 [WARPGROUP] in layout `PER_THREAD`.

    A warp has 16 rows of a tile, and a register holds all of their places: two threads know the same.
    """
    thread = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=PER_THREAD)
    warp, which = lax.shift_right_logical(thread, 5), thread & 15
    rows = WARP // THREADS  # of a warp at a time
    return (which & -rows) * 4 + warp * rows + (which & rows - 1)


def _by_row(per_thread: jax.Array) -> jax.Array:
    """Values [TOKENS] of the rows of a tile, of values in the order of `tile_row`, in the interpreter."""
    rows, row = WARP // THREADS, jnp.arange(TOKENS, dtype=jnp.int32)
    return per_thread[row % (4 * rows) // rows * WARP + row // (4 * rows) * rows + row % rows]


def _of_rows(values: Any) -> list[ir.Value]:
    """Values of the rows that a thread has a share of, of values in the order of `tile_row`."""
    _, lane = warp_and_lane()
    (register,) = values.registers.flat
    number, first = vector.extract(register, [], [0]), shifted(lane, THREADS.bit_length() - 1)
    return [shuffled(number, plus(first, mgpu.c(i, i32()))) for i in range(0, TOKENS // 4, WARP // THREADS)]


def load_rows(ref: Ref, row: jax.Array, column: int, columns: int) -> jax.Array:
    """Load ref[row[i], column : column + columns], of 8 bits, for each i; zeros, without an access, where row[i] is
    negative.

    Nothing may write to `ref` while the kernel runs. The result, words in an order of its own, is for `store_rows`.

    Args:
      ref: in global memory.
      row: int32 [WARPGROUP] in the order of `tile_row`.
      column, columns: multiples of 64.
    """
    if interpreted():
        row = _by_row(row)
        rows = ref[...][jnp.maximum(row, 0), column : column + columns]
        return jnp.where(row[:, None] >= 0, rows, jnp.zeros((), rows.dtype))
    shape = TOKENS, columns // 4
    held = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=WORDS.tile)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD), return_type=held)
    def load(_: Any, ref: ir.Value, row: Any) -> Any:
        chunk, row_bytes = masked(mgpu.utils.thread_idx(), THREADS - 1), ir.MemRefType(ref.type).shape[1]
        layout = WORDS.tile.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        by_row = registers.reshape(TOKENS // ROWS, -1)
        for i, number in enumerate(_of_rows(row)):
            address = row_address(ref, number, row_bytes, chunk)
            for block in range(by_row.shape[1]):
                by_row[i, block] = _load_16_bytes(address, column + BLOCK * block, number)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return load(ref, row)


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
        to[...] = (values.astype(jnp.float32) * _by_row(scale)[:, None]).astype(to.dtype)
        return
    to_columns, barriers = to.shape[1], () if other is None else (other,)
    types = [PER_THREAD, *(plgpu.RefType() for _ in barriers)]

    @plgpu.inline_mgpu(arg_types=(WORDS.tile, operand_ref(), *types))
    def store(_: Any, values: Any, to: ir.Value, scale: Any, *barrier: Any) -> None:
        warp, lane = warp_and_lane()
        row = plus(times(warp, ROWS // 4), shifted(lane, THREADS.bit_length() - 1))
        wide = times(masked(lane, THREADS - 1), 2)
        pointers = [ChunkPointers(to, 2 * to_columns, row, c) for c in (wide, plus(wide, mgpu.c(1, i32())))]
        by_row = values.registers.reshape(TOKENS // ROWS, -1)
        for i, (registers, factor) in enumerate(zip(by_row, _of_rows(scale), strict=True)):
            for block, words in enumerate(registers):
                for pointer, word in zip(pointers, _scaled(words, factor), strict=True):
                    place = pointer.pointer(ROWS * i, 8 * block)
                    llvm.store(word, place, alignment=16)
                    if barrier:
                        address, told = llvm.ptrtoint(i32(), place), sharing.shared_address(barrier[0])
                        sharing.store_to_other(word, address, told, sharing.other_program())

    store(values, to, scale, *barriers)


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
        address = row_address(ref, number, 4 * ir.MemRefType(ref.type).shape[1])
        text = LOAD_4_BYTES.format(offset=4 * column)
        value: Any = llvm.inline_asm(number_type, [address, number], text, "=&f,l,r", has_side_effects=True)
        registers.reshape(-1)[0] = vector.broadcast(ir.VectorType.get((1,), number_type), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=row.layout, _is_signed=None)

    return load(ref, row)


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
