"""Tiles of wgmma: layouts in shared memory and in registers, products, broadcasts, and zeroing of masked rows.

A tile of decode scores is [tokens, columns]: wgmma's M are tokens, its N the query rows of one KV head. A value per
token therefore varies along the rows of a tile and is broadcast over its columns, a value per query the other way
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.row_layout import RowLayout

TILE = plgpu.Layout.WGMMA
"""Layout of a tile in the registers of a warpgroup."""

PER_TOKEN = plgpu.Layout.WGMMA.reduce(1)
"""Layout of a value for each row of a tile."""

PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""Layout of a value for each column of a tile."""

ROW_BYTES = 128
"""Bytes of a swizzled row of a tile in shared memory, unless a caller asks for 64."""



class TokenRows(RowLayout):
    """Tiles whose rows are tokens; four threads share one."""

    @property
    def tile(self) -> Any:
        return TILE


TOKENS = TokenRows(threads=4, vector=2)

CHUNK = 16
"""Bytes that a thread stores at once. Four threads share a row, as in layout PER_TOKEN."""


def operand(shape: tuple[int, ...], dtype: Any, *, row_bytes: int = ROW_BYTES) -> Any:
    """Scratch type of tiles [..., rows, columns], swizzled as wgmma reads operands of 16 bits, and as threads read
    values of 8 bits without bank conflicts.

    Args:
      row_bytes: 128, or 64 where the rows of the tile, or of the array that it is copied from, are no multiple of 128.
    """
    transforms = (
        plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(row_bytes),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operand_ref(row_bytes: int = ROW_BYTES) -> Any:
    """Type of a reference to a 16-bit `operand`, for `plgpu.inline_mgpu`."""
    return plgpu.RefType((plgpu.TilingTransform((8, row_bytes // 2)), plgpu.SwizzleTransform(row_bytes)))


def multiply(pairs: Sequence[tuple[Ref, Ref]]) -> jax.Array:
    """Add up a @ bᵀ over pairs of a [M, K] and b [N, K] in shared memory, in float32."""

    def accumulate(total: Ref) -> jax.Array:
        for a, b in pairs:
            plgpu.wgmma(total, a, b.transpose((1, 0)))
        return total[...]

    (a, b), *_ = pairs
    return pl.run_scoped(accumulate, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def add_product(total: jax.Array, a: Ref | jax.Array, b: Ref) -> jax.Array:
    """Add a @ b to `total`, float32 in registers, for a [M, K] in shared memory or registers and b [K, N] in shared
    memory.

    The interpreter has no accumulators with an initial value, and no wgmma with a left operand in registers.
    """
    if not interpreted():
        added: Any = pl.run_state(lambda result: plgpu.wgmma(result, a, b))(plgpu.ACC.init(total))
        return added
    if isinstance(a, jax.Array):
        return total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    def product(result: Ref) -> jax.Array:
        plgpu.wgmma(result, a, b)
        return result[...]

    return total + pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def over_tokens(per_token: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a value per token over the columns of a tile."""
    return lax.broadcast_in_dim(per_token, shape, [0])


def over_columns(per_column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a value per column over the rows of a tile."""
    return lax.broadcast_in_dim(per_column, shape, [1])


def token_iota(tokens: int) -> jax.Array:
    """Index of each row of a tile, int32."""
    return plgpu.broadcasted_iota(jnp.int32, (tokens,), 0, layout=PER_TOKEN)


def column_iota(columns: int) -> jax.Array:
    """Index of each column of a tile, int32."""
    return plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=PER_COLUMN)


def filled(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Array of one float32 value in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def clear_rows(tile: Ref, live_mask: jax.Array, row_bytes: int = ROW_BYTES) -> None:
    """Zero masked rows of V in shared memory, since the product of a probability of 0 and NaN is NaN.

    Threads do not wait for each other: a `plgpu.commit_smem` has to follow before the tile is multiplied.

    Args:
      tile: 16-bit `operand` [rows, columns], swizzled in rows of `row_bytes`.
      live_mask: bool [rows] in layout PER_TOKEN, false where a row becomes 0. Other rows stay as they are.
    """
    if interpreted():
        tile[...] = jnp.where(over_tokens(live_mask, tile.shape), tile[...], jnp.zeros((), tile.dtype))
        return

    @plgpu.inline_mgpu(arg_types=(operand_ref(row_bytes), PER_TOKEN))
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
        own = arith.addi(arith.addi(bits(5, 2, 2 * eight_rows), bits(2, 3, row_bytes)), bits(0, 2, CHUNK))
        begin = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tile), [own], i8)

        def chunks(block: int, half: int) -> Iterator[ir.Value]:
            first = (8 * block + half) * eight_rows
            for at in range(0, memref_type.shape[1] * column, column):
                for part in range(0, row_bytes, 4 * CHUNK):
                    yield mgpu.utils.getelementptr(begin, [first + at + part], i8)

        store_zeros_unless(live_mask, chunks)

    write_zeros(tile, jnp.where(live_mask, 1, 0))


def store_zeros_unless(live_mask: Any, chunks: Callable[[int, int], Iterable[ir.Value]]) -> None:
    """Emit MLIR that stores zeros to a thread's chunks of each row that is not live.

    Args:
      live_mask: int32 [rows] in layout PER_TOKEN, 0 where a row becomes 0.
      chunks: chunks(i, j) yields pointers to the thread's chunks of one of its rows: in the i-th 64 rows, and the upper
        or lower 8 of a warp's 16.
    """
    i32 = ir.IntegerType.get_signless(32)
    zeros = vector.broadcast(ir.VectorType.get((CHUNK // 4,), i32), mgpu.c(0, i32))
    for i, register in enumerate(live_mask.registers.flat):
        pointers = chunks(*divmod(i, 2))
        number = vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, number, mgpu.c(0, i32))):
            for pointer in pointers:
                llvm.store(zeros, pointer)
