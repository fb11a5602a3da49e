"""Tiles in shared memory and in the registers of a warpgroup: layouts, broadcasts, and zeroing of masked rows.

A tile of decode scores is [tokens, query_rows]: tokens are M of the tensor cores, and the query rows of one KV head are
N. A value per token varies along the rows of a tile and is broadcast over its columns. A value per query row varies
along the columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.mosaic.primitives.basics import Ref, interpreted


@dataclasses.dataclass(frozen=True)
class RegisterLayout:
    """Layout of tiles in the registers of a warpgroup. Its four warps share each block of `rows` rows evenly.

    In each 8 x 8 block of a tile, a thread has two adjacent columns of a row.

    Attributes:
      rows: 64 (accumulators of wgmma, and of tcgen05 with M = 64) or 128 (accumulators of tcgen05 with M = 128).
      tile: layout of the tile.
      transposed: layout from which the transpose of a 32-bit tile is stored to shared memory.
    """

    rows: int
    tile: Any
    transposed: Any

    @property
    def per_row(self) -> Any:
        """Layout of a value for each row of a tile."""
        return self.tile.reduce(1)

    def first_row(self, register: int) -> int:
        """Row of the first thread's value in a register of an array with layout `per_row`."""
        block, part = divmod(register, self.rows // 32)
        return self.rows * block + 8 * part


BY_64 = RegisterLayout(64, plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED)

BY_128 = RegisterLayout(128, plgpu.Layout.TCGEN05, plgpu.Layout.TCGEN05_TRANSPOSED)

PER_COLUMN = BY_64.tile.reduce(0)
"""Layout of a value for each column of a tile. It is the same for 64 and 128 rows."""

ROW_BYTES = 128
"""Default number of bytes of a swizzled row of a tile in shared memory."""

CHUNK = 16
"""Bytes that a thread stores at once. Four threads share a row, as in layout `RegisterLayout.per_row`."""


def operand(shape: tuple[int, ...], dtype: Any, *, row_bytes: int = ROW_BYTES) -> Any:
    """Scratch type of tiles [..., rows, columns], swizzled for tensor cores (16-bit operands) and for conflict-free
    access by threads (8-bit values).

    Args:
      row_bytes: 128, or less if rows of the tile, or of the array that it is copied from, are not a multiple of 128
        bytes.
    """
    transforms = (
        plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(row_bytes),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operand_ref(row_bytes: int = ROW_BYTES) -> Any:
    """Type of a reference to a 16-bit `operand`, for `plgpu.inline_mgpu`."""
    return plgpu.RefType((plgpu.TilingTransform((8, row_bytes // 2)), plgpu.SwizzleTransform(row_bytes)))


def store_tile(tile: Ref, values: jax.Array, layout: Any, row_bytes: int = ROW_BYTES) -> None:
    """Write values [rows, columns] with layout `layout` to a 16-bit `operand`. Threads of a warpgroup synchronize
    before and after.

    An assignment has the same effect but emits twice as much code, because it also loads the old values.
    """
    if interpreted():
        tile[...] = values
        return

    @plgpu.inline_mgpu(arg_types=(operand_ref(row_bytes), layout))
    def store(_: Any, tile: ir.Value, values: Any) -> None:
        mgpu.warpgroup_barrier()
        values.store_tiled(tile, swizzle=row_bytes)
        mgpu.warpgroup_barrier()

    store(tile, values)


def over_tokens(per_token: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a value per token over the columns of a tile."""
    return lax.broadcast_in_dim(per_token, shape, [0])


def over_columns(per_column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a value per column over the rows of a tile."""
    return lax.broadcast_in_dim(per_column, shape, [1])


def row_iota(rows: int, layout: RegisterLayout) -> jax.Array:
    """Index of each row of a tile, int32."""
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.per_row)


def column_iota(columns: int) -> jax.Array:
    """Index of each column of a tile, int32."""
    return plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=PER_COLUMN)


def filled(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Array filled with one float32 value, in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def clear_rows(tile: Ref, live_mask: jax.Array, layout: RegisterLayout, row_bytes: int = ROW_BYTES) -> None:
    """Zero masked rows of V in shared memory, because the product of a probability of 0 and NaN is NaN.

    Threads do not synchronize: call `plgpu.commit_smem` before the tile is multiplied.

    Args:
      tile: 16-bit `operand` [rows, columns], swizzled in rows of `row_bytes`.
      live_mask: bool [rows] with layout `layout.per_row`; rows where it is false become 0.
    """
    if interpreted():
        tile[...] = jnp.where(over_tokens(live_mask, tile.shape), tile[...], jnp.zeros((), tile.dtype))
        return

    @plgpu.inline_mgpu(arg_types=(operand_ref(row_bytes), layout.per_row))
    def write_zeros(_: Any, tile: ir.Value, live_mask: Any) -> None:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        memref_type = ir.MemRefType(tile.type)  # [rows / 8, columns of row_bytes, 8, row_bytes]
        eight_rows, column = (2 * stride for stride in memref_type.get_strides_and_offset()[0][:2])
        thread = mgpu.utils.thread_idx()

        def bits(first: int, count: int, times: int) -> ir.Value:
            """Multiply a bit field of the thread index, `count` bits from bit `first` on."""
            shifted = arith.shrui(thread, mgpu.c(first, i32))
            return arith.muli(arith.andi(shifted, mgpu.c(2**count - 1, i32)), mgpu.c(times, i32))

        # The swizzle permutes the chunks within a row, never across rows.
        own = arith.addi(
            arith.addi(bits(5, 2, layout.rows // 32 * eight_rows), bits(2, 3, row_bytes)), bits(0, 2, CHUNK)
        )
        begin = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tile), [own], i8)

        def chunks(register: int) -> Iterator[ir.Value]:
            first = layout.first_row(register) // 8 * eight_rows
            for at in range(0, memref_type.shape[1] * column, column):
                for part in range(0, row_bytes, 4 * CHUNK):
                    yield mgpu.utils.getelementptr(begin, [first + at + part], i8)

        store_zeros_unless(live_mask, chunks)

    write_zeros(tile, jnp.where(live_mask, 1, 0))


def store_zeros_unless(live_mask: Any, chunks: Callable[[int], Iterable[ir.Value]]) -> None:
    """Emit MLIR that stores zeros to a thread's chunks of each row that is not live.

    Args:
      live_mask: int32 [rows] with a layout `RegisterLayout.per_row`, 0 where a row becomes 0.
      chunks: chunks(i) yields pointers to the thread's chunks of the row of its i-th register.
    """
    i32 = ir.IntegerType.get_signless(32)
    zeros = vector.broadcast(ir.VectorType.get((CHUNK // 4,), i32), mgpu.c(0, i32))
    for i, register in enumerate(live_mask.registers.flat):
        pointers = chunks(i)
        number = vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, number, mgpu.c(0, i32))):
            for pointer in pointers:
                llvm.store(zeros, pointer)
