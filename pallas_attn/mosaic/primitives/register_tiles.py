"""Tiles in shared memory and in the registers of a warpgroup: layouts, broadcasts, and zeroing of masked rows.

A tile of decode scores is [tokens, query_rows]: tokens are dimension M and query rows dimension N of the tensor cores.
A query row is one query head of one query token. An array [tokens] has a value for each row of the tile, and an array
[query_rows] has a value for each column.
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
    """Layout of tiles in the registers of a warpgroup.

    Of each `rows` consecutive rows, each of the four warps holds a quarter, consecutive rows in the order of the warps.
    In each 8 x 8 block of a tile, a thread holds two adjacent columns of a row.

    Attributes:
      rows: 64 (accumulators of wgmma, and of tcgen05 with M = 64) or 128 (accumulators of tcgen05 with M = 128).
      tile: Pallas layout of a tile.
      transposed: Pallas layout to which a 32-bit tile is cast before its transpose is stored to shared memory.
    """

    rows: int
    tile: Any
    transposed: Any

    @property
    def per_row(self) -> Any:
        """Layout of an array with a value for each row of a tile."""
        return self.tile.reduce(1)

    def first_row(self, register: int) -> int:
        """Row that thread 0 holds in register number `register` of an array with layout `per_row`."""
        block, part = divmod(register, self.rows // 32)
        return self.rows * block + 8 * part


BY_64 = RegisterLayout(64, plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED)

BY_128 = RegisterLayout(128, plgpu.Layout.TCGEN05, plgpu.Layout.TCGEN05_TRANSPOSED)

PER_COLUMN = BY_64.tile.reduce(0)
"""Layout of an array with a value for each column of a tile. It is the same for `BY_64` and `BY_128`."""

ROW_BYTES = 128
"""Default swizzle width [bytes] of a tile in shared memory. A tile is stored as blocks of 8 rows and this many
bytes.
"""


def swizzle_bytes(row_bytes: int) -> int:
    """Return the swizzle width [bytes] of a tile whose rows have this number of bytes: 128, or 64 if it is no multiple
    of 128.
    """
    return ROW_BYTES if row_bytes % ROW_BYTES == 0 else ROW_BYTES // 2


CHUNK = 16
"""Bytes that a thread stores with one instruction when it zeroes a row. Four threads share a row, because four threads
hold the same value of an array with layout `RegisterLayout.per_row`.
"""


def operand(shape: tuple[int, ...], dtype: Any, *, row_bytes: int = ROW_BYTES) -> Any:
    """Scratch type of swizzled tiles [..., rows, columns] in shared memory.

    Tensor cores require the swizzled layout for 16-bit operands. For 8-bit tiles, it avoids bank conflicts when threads
    read them.

    Args:
      row_bytes: swizzle width [bytes]. It must divide a row of the tile and a row of the array that TMA copies it from.
    """
    transforms = (
        plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(row_bytes),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operand_ref(row_bytes: int = ROW_BYTES) -> Any:
    """Type of a reference to a 16-bit `operand`, for `arg_types` of `plgpu.inline_mgpu`."""
    return plgpu.RefType((plgpu.TilingTransform((8, row_bytes // 2)), plgpu.SwizzleTransform(row_bytes)))


def store_tile(tile: Ref, values: jax.Array, layout: Any, row_bytes: int = ROW_BYTES) -> None:
    """Write values [rows, columns] with layout `layout` to a 16-bit `operand`.

    All threads of the warpgroup synchronize before and after. An assignment to `tile` has the same effect, but Pallas
    emits twice as much code for it, because it also loads the old values.
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
    """Broadcast a value per token [tokens] over the columns of a tile of shape `shape`."""
    return lax.broadcast_in_dim(per_token, shape, [0])


def over_columns(per_column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a value per column [query_rows] over the rows of a tile of shape `shape`."""
    return lax.broadcast_in_dim(per_column, shape, [1])


def row_iota(rows: int, layout: RegisterLayout) -> jax.Array:
    """Index of each row of a tile, int32 [rows]."""
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.per_row)


def column_iota(columns: int) -> jax.Array:
    """Index of each column of a tile, int32 [columns]."""
    return plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=PER_COLUMN)


def filled(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Array with shape `shape` and layout `layout`, all elements of which are `value` in float32."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def clear_rows(tile: Ref, live_mask: jax.Array, layout: RegisterLayout, row_bytes: int = ROW_BYTES) -> None:
    """Zero the rows of a V tile in shared memory that no query sees. They may be NaN, and 0 · NaN is NaN.

    Threads do not synchronize: call `plgpu.commit_smem` before the tile is multiplied.

    Args:
      tile: 16-bit `operand` [rows, columns].
      live_mask: bool [rows] with layout `layout.per_row`; rows where it is false become 0.
      row_bytes: swizzle width of the tile.
    """
    if interpreted():
        tile[...] = jnp.where(over_tokens(live_mask, tile.shape), tile[...], jnp.zeros((), tile.dtype))
        return

    @plgpu.inline_mgpu(arg_types=(operand_ref(row_bytes), layout.per_row))
    def write_zeros(_: Any, tile: ir.Value, live_mask: Any) -> None:
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        memref_type = ir.MemRefType(tile.type)  # [rows / 8, blocks of row_bytes, 8, row_bytes / 2] 16-bit elements
        eight_rows, column = (2 * stride for stride in memref_type.get_strides_and_offset()[0][:2])
        thread = mgpu.utils.thread_idx()

        def bits(first: int, count: int, times: int) -> ir.Value:
            """Extract `count` bits of the thread index, from bit `first` on, and multiply them by `times`."""
            shifted = arith.shrui(thread, mgpu.c(first, i32))
            return arith.muli(arith.andi(shifted, mgpu.c(2**count - 1, i32)), mgpu.c(times, i32))

        # Byte offset of this thread's first chunk in the tile: warp, row in a block of 8 rows, and chunk. The swizzle
        # permutes chunks within a row only, and all chunks of a row are zeroed, so it can be ignored.
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
    """Emit MLIR that zeroes rows of a tile in shared memory; each thread zeroes its chunks of its rows.

    Args:
      live_mask: int32 [rows] with layout `RegisterLayout.per_row`, 0 for rows that become 0.
      chunks: chunks(i) yields pointers to this thread's chunks of the row that register i of `live_mask` belongs to. A
        chunk has `CHUNK` bytes.
    """
    i32 = ir.IntegerType.get_signless(32)
    zeros = vector.broadcast(ir.VectorType.get((CHUNK // 4,), i32), mgpu.c(0, i32))
    for i, register in enumerate(live_mask.registers.flat):
        pointers = chunks(i)
        number = vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, number, mgpu.c(0, i32))):
            for pointer in pointers:
                llvm.store(zeros, pointer)
