"""Gather rows of a pool into swizzled tiles in shared memory, with `cp.async` copies of a warpgroup's threads.

A pool row is the cached latent of one token, and a tile is 64 rows in shared memory. These functions use `cp.async`,
because TMA on Hopper cannot gather a list of rows. Each `cp.async` copies 16 bytes. The threads that share a row copy
one swizzle width at a time, so that eight threads access all shared-memory banks: eight threads copy 128 bytes of a
row, or four threads 64 bytes of each of two rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.dequantize import (
    ChunkPointers,
    i32,
    masked,
    plus,
    quantized_ref,
    shifted,
    times,
    warp_and_lane,
)
from pallas_attn.mosaic.primitives.register_tiles import operand_ref, swizzle_bytes
from pallas_attn.mosaic.primitives.row_io import RowLayout

WARPGROUP, WARP, WARPS = 128, 32, 4
"""Threads per warpgroup, threads per warp, warps per warpgroup."""

WARP_ROWS = 4
"""Adjacent rows of a tile that a warp copies. They are followed by the rows of the other warps."""

ROWS = WARPS * WARP_ROWS
"""Distance between the first rows of two groups of adjacent rows that a warp copies."""

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


def _of_rows(values: Any, threads: int) -> list[ir.Value]:
    """Return one value for each tile row that this thread copies. Shuffles read the values from other threads.

    Args:
      values: one value per thread, in the order of `tile_row`.
      threads: number of threads that copy a row together.
    """
    _, lane = warp_and_lane()
    (register,) = values.registers.flat
    number, first = vector.extract(register, [], [0]), shifted(lane, threads.bit_length() - 1)
    return [shuffled(number, plus(first, mgpu.c(i, i32()))) for i in range(0, TOKENS // WARPS, WARP // threads)]


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
    row_bytes = swizzle_bytes(columns * number_bytes)
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
    tile_ref = operand_ref() if number_bytes == 2 else quantized_ref(row_bytes)
    threads = row_bytes // 16

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, tile_ref, *second, *scalar))
    def copy(_: Any, ref: ir.Value, row: Any, to: ir.Value, *chosen: Any) -> None:
        warp, lane = warp_and_lane()
        first, in_row = plus(times(warp, WARP_ROWS), shifted(lane, threads.bit_length() - 1)), row_bytes // number_bytes
        if WARP // threads > WARP_ROWS:  # lanes 16 to 31 copy the next rows of the warp
            first = plus(first, times(shifted(lane, 4), ROWS - WARP_ROWS))
        (_, stride, *_), _ = ir.MemRefType(to.type).get_strides_and_offset()
        steps = [
            (number_bytes * stride * block, number_bytes * (column + in_row * block))
            for block in range(columns // in_row)
        ]
        pool_row_bytes = number_bytes * ir.MemRefType(ref.type).shape[1]
        chunk, begin = masked(lane, threads - 1), _chosen_begin(ref, chosen)
        pointers = ChunkPointers(to, number_bytes * columns, first, chunk)
        for i, number in enumerate(_of_rows(row, threads)):
            place = pointers.pointer(WARPGROUP // threads * i, 0)
            _copy_16_bytes(place, begin, number, pool_row_bytes, chunk, steps)

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


def load_exponents(
    ref: Ref, row: jax.Array, *, other: Ref | None = None, use_other: Any = None
) -> tuple[jax.Array, ...]:
    """Load the scales of pool rows, powers of two, one pool row per two threads. Return arrays for `store_ratios`.

    The loads are not complete when the function returns: threads wait where they use the results.

    Args:
      ref: uint8 [pool rows, groups] in global memory, biased exponents.
      row: int32 [WARPGROUP] in the order of `tile_row`. Nothing is read for negative rows.
      other, use_other: as in `gather_rows_async`.
    """
    groups = ref.shape[1]
    if interpreted():
        loaded = ref[...][jnp.clip(row, 0, ref.shape[0] - 1)]
        if other is not None:
            loaded = jnp.where(use_other == 1, other[...][jnp.clip(row, 0, other.shape[0] - 1)], loaded)
        loaded = jnp.where(row[:, None] >= 0, loaded.astype(jnp.int32), 0)
        return tuple(loaded[:, group] for group in range(groups))

    second, scalar = (() if other is None else kinds for kinds in ((plgpu.RefType(),), (plgpu.Layout.WG_SPLAT(()),)))
    share = -(-groups // 2)
    result = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, layout=PER_THREAD)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, *second, *scalar), return_type=[result] * share)
    def load(_: Any, ref: ir.Value, row: Any, *chosen: Any) -> Any:
        begin, (register,) = _chosen_begin(ref, chosen), row.registers.flat
        number = vector.extract(register, [], [0])
        given = arith.cmpi(arith.CmpIPredicate.sge, number, mgpu.c(0, i32()))
        address = _address(begin, number, groups)
        loaded = []
        for group in _own_groups(groups):
            place = arith.addi(address, arith.extui(ir.IntegerType.get_signless(64), group))
            word: Any = llvm.inline_asm(i32(), [place, given], LOAD_BYTE, "=r,l,b", has_side_effects=True)
            loaded.append(_per_thread(row, word))
        return loaded

    return tuple(load(ref, row, *(() if other is None else (other, use_other))))


def store_ratios(exponents: tuple[jax.Array, ...], scales_to: Ref, ratios_to: Ref) -> None:
    """Store the largest scale of each row of a tile, and the ratios of the scales to it, in shared memory.

    A largest scale below 2**-86 counts as 2**-86, because kernels divide by it. The function does not synchronise the
    threads.

    Args:
      exponents: from `load_exponents`; biased exponents, 255 for NaN.
      scales_to: float32 [TOKENS].
      ratios_to: float16 [groups, TOKENS].
    """
    groups = ratios_to.shape[0]
    if interpreted():
        of_rows = jnp.stack([_by_row(exponent) for exponent in exponents])  # [groups, TOKENS]
        largest = jnp.maximum(of_rows.max(axis=0), SMALLEST_EXPONENT)
        scale = lax.bitcast_convert_type(largest << 23, jnp.float32)
        scales_to[...] = jnp.where(largest == 255, jnp.nan, scale)
        ratio = lax.bitcast_convert_type(jnp.maximum(of_rows - largest[None] + 127, 0) << 23, jnp.float32)
        ratios_to[...] = ratio.astype(jnp.float16)
        return

    @plgpu.inline_mgpu(arg_types=(PER_THREAD, plgpu.RefType(), plgpu.RefType(), *[PER_THREAD] * len(exponents)))
    def store(_: Any, place: Any, scales_to: ir.Value, ratios_to: ir.Value, *exponents: Any) -> None:
        own = [vector.extract(x.registers.flat[0], [], [0]) for x in exponents]
        place = vector.extract(place.registers.flat[0], [], [0])
        largest = functools.reduce(arith.maxsi, own)
        largest = arith.maxsi(largest, mgpu.utils.shfl_bfly(largest, 16))
        largest = arith.maxsi(largest, mgpu.c(SMALLEST_EXPONENT, i32()))
        is_nan = arith.cmpi(arith.CmpIPredicate.eq, largest, mgpu.c(255, i32()))
        number = arith.select(is_nan, mgpu.c(0x7FC00000, i32()), arith.shli(largest, mgpu.c(23, i32())))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(scales_to), [place], ir.F32Type.get())
        llvm.store(mgpu.utils.bitcast(number, ir.F32Type.get()), base, alignment=4)
        half, none = ir.F16Type.get(), mgpu.c(0, i32())
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ratios_to), [place], half)
        for exponent, group in zip(own, _own_groups(groups), strict=True):
            biased = arith.maxsi(arith.addi(arith.subi(exponent, largest), mgpu.c(127, i32())), none)
            ratio = mgpu.utils.bitcast(arith.shli(biased, mgpu.c(23, i32())), ir.F32Type.get())
            pointer = mgpu.utils.getelementptr(base, [times(group, TOKENS)], half)
            llvm.store(arith.truncf(half, ratio), pointer, alignment=2)

    store(tile_row(), scales_to, ratios_to, *exponents)


SMALLEST_EXPONENT = 127 - 86
"""Smallest biased exponent of a row's largest scale; 2**-86 is just above `dequantize.SMALLEST_SCALE`."""

LOAD_BYTE = """
{
mov.b32 $0, 0;
@$2 ld.global.u8 $0, [$1];
}
"""


def _own_groups(groups: int) -> list[ir.Value]:
    """Return the channel groups whose scales a thread handles. The two threads of a pool row share its groups; the
    second thread has the last group twice if their number is odd.
    """
    _, lane = warp_and_lane()
    share = -(-groups // 2)
    first, last = times(shifted(lane, 4), share), mgpu.c(groups - 1, i32())
    own: list[Any] = [arith.minui(plus(first, mgpu.c(i, i32())), last) for i in range(share)]
    return own


def _per_thread(like: Any, number: ir.Value) -> Any:
    """Return the array with layout `PER_THREAD` that has this number in each thread."""
    registers = np.empty_like(like.registers)
    registers.reshape(-1)[0] = vector.broadcast(ir.VectorType.get((1,), i32()), number)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=True)


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


def _chosen_begin(ref: ir.Value, chosen: Sequence[Any]) -> ir.Value:
    """Return the address of `ref`, or of a second array.

    Args:
      chosen: empty, or the second array and a scalar, which is 1 if the second array is chosen.
    """
    begin = _begin(ref)
    if not chosen:
        return begin
    other, use_other = chosen
    is_other = arith.cmpi(arith.CmpIPredicate.eq, use_other.registers.item(), mgpu.c(1, i32()))
    chosen_begin: Any = arith.select(is_other, _begin(other), begin)
    return chosen_begin


def _address(begin: ir.Value, row: ir.Value, row_bytes: int, chunk: ir.Value | None = None) -> ir.Value:
    """Return the 64-bit address of a row of the array at `begin`, or of one of its 16-byte chunks."""
    i64 = ir.IntegerType.get_signless(64)
    if chunk is not None:
        begin = arith.addi(begin, arith.extui(i64, times(chunk, 16)))
    return arith.addi(begin, arith.muli(arith.extsi(i64, row), mgpu.c(row_bytes, i64)))
