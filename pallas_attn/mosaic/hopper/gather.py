"""Gather rows of a pool into swizzled tiles in shared memory, with `cp.async` copies of a warpgroup's threads.

A pool row is the cached latent of one token, and a tile is 64 rows in shared memory. These functions use `cp.async`,
because TMA on Hopper cannot gather a list of rows. Each `cp.async` copies 16 bytes. Eight threads copy 128 bytes of a
row at a time, so that they access all shared-memory banks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.dequantize import (
    QUANTIZED_REF,
    ChunkPointers,
    i32,
    masked,
    plus,
    shifted,
    times,
    warp_and_lane,
)
from pallas_attn.mosaic.primitives.register_tiles import ROW_BYTES, operand_ref
from pallas_attn.mosaic.primitives.row_io import RowLayout

WARPGROUP, WARP, WARPS = 128, 32, 4
"""Threads per warpgroup, threads per warp, warps per warpgroup."""

THREADS = 8
"""Threads that copy one row together."""

ROWS, WARP_ROWS = WARPGROUP // THREADS, WARP // THREADS
"""Number of rows that a warpgroup copies at the same time, and number of rows that a warp copies at the same time."""

TOKENS = 64
"""Rows of a tile."""

PER_THREAD = RowLayout(1, 1).per_row
"""Register layout of one value per thread of a warpgroup."""


def tile_row() -> jax.Array:
    """Return the row of a tile for which each thread looks up the pool row, int32 [WARPGROUP] in layout `PER_THREAD`.

    A warp copies 16 rows of a tile. Its 32 lanes hold the indices of the 16 pool rows, each index in two lanes.
    """
    thread = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=PER_THREAD)
    warp, which = lax.shift_right_logical(thread, 5), thread & 15
    first, within = which & -WARP_ROWS, which & WARP_ROWS - 1
    return first * WARPS + warp * WARP_ROWS + within


def _by_row(per_thread: jax.Array) -> jax.Array:
    """Reorder values for the interpreter.

    Args:
      per_thread: one value per thread [WARPGROUP], in the order of `tile_row`.

    Returns:
      One value per tile row [TOKENS].
    """
    row = jnp.arange(TOKENS, dtype=jnp.int32)
    warp, within = row % ROWS // WARP_ROWS, row // ROWS * WARP_ROWS + row % WARP_ROWS
    return per_thread[warp * WARP + within]


def _of_rows(values: Any) -> list[ir.Value]:
    """Return one value for each tile row that this thread copies. Shuffles read the values from other threads.

    Args:
      values: one value per thread, in the order of `tile_row`.
    """
    _, lane = warp_and_lane()
    (register,) = values.registers.flat
    number, first = vector.extract(register, [], [0]), shifted(lane, THREADS.bit_length() - 1)
    return [shuffled(number, plus(first, mgpu.c(i, i32()))) for i in range(0, TOKENS // WARPS, WARP_ROWS)]


def gather_rows_async(
    ref: Ref, row: jax.Array, column: int, to: Ref, *, other: Ref | None = None, use_other: Any = None
) -> None:
    """Start asynchronous copies of ref[row[i], column : column + to.shape[1]] to row i of a swizzled tile.

    If row[i] is negative, the tile row is filled with zeros, and nothing is read from global memory. A call of
    `CopyBarriers.arrive` after this function completes the barrier's phase when the copies are done. Tensor cores see
    the data after `see_copies`.

    Args:
      ref: [pool rows, columns] in global memory, 16-bit or 8-bit elements.
      row: int32 [WARPGROUP] in the order of `tile_row`.
      column: first column, at a multiple of 16 bytes.
      to: `register_tiles.operand` [TOKENS, columns].
      other: a second array with as many columns, from which the rows are copied if the scalar `use_other` is 1.
    """
    columns, number_bytes = to.shape[1], jnp.dtype(to.dtype).itemsize
    if interpreted():
        row = _by_row(row)
        source = lax.slice_in_dim(ref[...], column, column + columns, axis=1)
        rows = source[jnp.clip(row, 0, source.shape[0] - 1)]
        if other is not None:
            source = lax.slice_in_dim(other[...], column, column + columns, axis=1)
            rows = jnp.where(use_other == 1, source[jnp.clip(row, 0, source.shape[0] - 1)], rows)
        to[...] = jnp.where(row[:, None] >= 0, rows, jnp.zeros((), to.dtype))
        return

    second, scalar = (() if other is None else kinds for kinds in ((plgpu.RefType(),), (plgpu.Layout.WG_SPLAT(()),)))
    tile_ref = operand_ref() if number_bytes == 2 else QUANTIZED_REF

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, tile_ref, *second, *scalar))
    def copy(_: Any, ref: ir.Value, row: Any, to: ir.Value, *chosen: Any) -> None:
        warp, lane = warp_and_lane()
        first, in_row = plus(times(warp, WARP_ROWS), shifted(lane, THREADS.bit_length() - 1)), ROW_BYTES // number_bytes
        (_, stride, *_), _ = ir.MemRefType(to.type).get_strides_and_offset()
        steps = [
            (number_bytes * stride * block, number_bytes * (column + in_row * block))
            for block in range(columns // in_row)
        ]
        row_bytes = number_bytes * ir.MemRefType(ref.type).shape[1]
        chunk, begin = masked(lane, THREADS - 1), _begin(ref)
        if chosen:
            is_other = arith.cmpi(arith.CmpIPredicate.eq, chosen[1].registers.item(), mgpu.c(1, i32()))
            begin = arith.select(is_other, _begin(chosen[0]), begin)
        pointers = ChunkPointers(to, number_bytes * columns, first, chunk)
        for i, number in enumerate(_of_rows(row)):
            _copy_16_bytes(pointers.pointer(ROWS * i, 0), begin, number, row_bytes, chunk, steps)

    copy(ref, row, to, *(() if other is None else (other, use_other)))


def gather_scales_async(ref: Ref, row: jax.Array, to: Ref) -> None:
    """Start asynchronous copies of the scale factors ref[row[i]] to consecutive places in shared memory.

    As in `gather_rows_async`, negative rows give zeros, and `CopyBarriers.arrive` reports the completion.

    Args:
      ref: float32 [pool rows, groups] in global memory.
      row: int32 [WARPGROUP] in the order of `tile_row`.
      to: float32 [TOKENS · groups].
    """
    groups = ref.shape[1]
    if interpreted():
        row = _by_row(row)
        to[...] = jnp.where(row[:, None] >= 0, ref[...][jnp.maximum(row, 0)], 0.0).reshape(-1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, PER_THREAD, plgpu.RefType()))
    def copy(_: Any, ref: ir.Value, row: Any, place: Any, to: ir.Value) -> None:
        number, place = (vector.extract(x.registers.flat[0], [], [0]) for x in (row, place))
        none: Any = mgpu.c(0, i32())
        address = _address(_begin(ref), arith.maxsi(number, none), 4 * groups)
        pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(to), [times(place, groups)], ir.F32Type.get())
        given = arith.cmpi(arith.CmpIPredicate.sge, number, none)
        of_copy = 4 * groups if groups in (1, 2, 4) else 4
        num_bytes = arith.select(given, mgpu.c(of_copy, i32()), none)
        for offset in range(0, 4 * groups, of_copy):
            kind = "cg" if of_copy == 16 else "ca"
            text = f"cp.async.{kind}.shared.global [$0 + {offset}], [$1 + {offset}], {of_copy}, $2;"
            operands = [llvm.ptrtoint(i32(), pointer), address, num_bytes]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r", has_side_effects=True)

    copy(ref, row, tile_row(), to)


def _copy_16_bytes(
    place: ir.Value, begin: ir.Value, row: ir.Value, row_bytes: int, chunk: ir.Value, steps: list[tuple[int, int]]
) -> None:
    """Start copies of 16-byte chunks of a row; store zeros if the row is negative.

    Args:
      place: pointer to the destination of the first chunk in shared memory.
      begin: 64-bit address of an array in global memory.
      row: index of the row in the array.
      row_bytes: size of a row in bytes.
      chunk: index of the first chunk in the row.
      steps: for each copy, the offset of the destination from `place`, and the offset of the source from the first
        chunk, in bytes.
    """
    none: Any = mgpu.c(0, i32())
    address, place = _address(begin, arith.maxsi(row, none), row_bytes, chunk), llvm.ptrtoint(i32(), place)
    given = arith.cmpi(arith.CmpIPredicate.sge, row, none)
    num_bytes = arith.select(given, mgpu.c(16, i32()), none)
    for to, offset in steps:
        text = COPY_16_BYTES.format(to=to, offset=offset)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [place, address, num_bytes], text, "r,l,r", has_side_effects=True)


def store_none(row: jax.Array, is_none: Ref, all_given: Ref) -> None:
    """Store to shared memory which pool rows are negative. The function does not synchronise the threads.

    Args:
      row: int32 [WARPGROUP] in the order of `tile_row`.
      is_none: int32 [TOKENS], receives 1 where a row is negative, else 0.
      all_given: int32 [4], receives 1 for each warp whose rows are all non-negative, else 0.
    """
    if interpreted():
        is_none[...] = jnp.where(_by_row(row) < 0, 1, 0)
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

    store(row, tile_row(), is_none, all_given)


ALL_GIVEN = """
{
.reg .pred given;
setp.ge.s32 given, $1, 0;
vote.sync.all.pred given, given, 0xffffffff;
selp.b32 $0, 1, 0, given;
}
"""

COPY_16_BYTES = "cp.async.cg.shared.global.L2::128B [$0 + {to}], [$1 + {offset}], 16, $2;"


def shuffled(number: ir.Value, lane: ir.Value) -> ir.Value:
    """Return the number that another lane of the warp holds."""
    all_lanes: Any = mgpu.c(0xFFFFFFFF, i32())
    clamp: Any = mgpu.c(31, i32())
    return nvvm.shfl_sync(all_lanes, number, lane, clamp, nvvm.ShflKind.idx)


def _begin(ref: ir.Value) -> ir.Value:
    """Return the 64-bit address of an array in global memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))


def _address(begin: ir.Value, row: ir.Value, row_bytes: int, chunk: ir.Value | None = None) -> ir.Value:
    """Return the 64-bit address of a row of the array at `begin`, or of one of its 16-byte chunks."""
    i64 = ir.IntegerType.get_signless(64)
    if chunk is not None:
        begin = arith.addi(begin, arith.extui(i64, times(chunk, 16)))
    return arith.addi(begin, arith.muli(arith.extsi(i64, row), mgpu.c(row_bytes, i64)))
