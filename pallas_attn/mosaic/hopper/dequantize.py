"""Conversion of 8-bit caches (int8, e4m3) to float16 in registers, from which Hopper's wgmma reads its left operand.

In decode, converted tiles are not written back to shared memory. `ldmatrix` loads them, with 16 bytes of a row going to
four adjacent threads. It moves 16-bit elements, each of which holds two 8-bit values, so channels end up permuted:

- Keys [tokens, channels] are the left operand without a transpose. Out of 16 channels, a thread receives 4j to 4j + 3,
  where wgmma expects 2j, 2j + 1, 2j + 8, 2j + 9. A sum over channels may have any order, so queries get the same
  permutation before the kernel (`split_and_permute_queries`).
- Values [tokens, channels] are transposed by the load. Out of 16 rows of the product, r and r + 8 are channels 2r and
  2r + 1. The accumulator has this order until a split is finished (`restore_channel_order`).

In prefill, the left operands are queries and probabilities. Its tiles are converted from shared memory to shared memory
(`mosaic.primitives.dequantize`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper.tiles import TILE
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.dequantize import (
    QUANTIZED_REF,
    ChunkPointers,
    conversion,
    converted,
    i32,
    masked,
    plus,
    shifted,
    split_queries,
    times,
    warp_and_lane,
)
from pallas_attn.mosaic.primitives.register_tiles import ROW_BYTES
from pallas_attn.types import PagedKV


def split_and_permute_queries(q: Float[Array, "B Q Hq D"], kv: PagedKV) -> tuple[list[Array], float]:
    """Compute `split_queries`, and for an 8-bit cache permute the channels as `multiply_dequantized` expects."""
    parts, scale = split_queries(q, kv)
    return (parts if kv.k_scale is None else [as_keys(part) for part in parts]), scale


def multiply_dequantized(a: Ref, bs: Sequence[Ref]) -> jax.Array:
    """Compute a @ (bs[0] + bs[1] + ...)ᵀ in float32, with all operands in shared memory.

    The interpreter does not support wgmma with register operands.

    Args:
      a: 8-bit tile [M, K], or several tile rows per shared-memory row.
      bs: float16 [N, K] each, with columns in the order of `as_keys`.
    """
    channels = bs[0].shape[1]
    if interpreted():
        left = as_keys(a[...].reshape(-1, channels).astype(jnp.float16))
        products = [jnp.dot(left, b[...].T, preferred_element_type=jnp.float32) for b in bs]
        return sum(products[1:], start=products[0])
    in_row = min(channels, ROW_BYTES)
    step = max(64, in_row // len(bs))  # each product holds its left operand in separate registers

    def accumulate(total: Ref) -> jax.Array:
        for i in range(0, channels, step):
            row = pl.ds(i // in_row * in_row, ROW_BYTES)
            left = _load_rows(a.at[:, row], in_row, i % in_row, step)
            for b in bs:
                plgpu.wgmma(total, left, b.at[:, pl.ds(i, step)].transpose((1, 0)))
            if step < channels:
                plgpu.wgmma_wait(0)  # the next channels reuse the registers
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((math.prod(a.shape) // channels, bs[0].shape[0]), jnp.float32))


def load_transposed(tile: Ref, channels: int) -> jax.Array:
    """Load an 8-bit tile [tokens, channels] to registers as float16 [channels, tokens], rows in the order of
    `as_values`.
    """
    if interpreted():
        return as_values(tile[...].reshape(-1, channels).astype(jnp.float16).T)
    return _load_columns(tile, channels)


def restore_channel_order(product: jax.Array) -> jax.Array:
    """Reorder the rows of a product [channels, n] from the order of `as_values` to channel order."""
    rows, columns = product.shape
    if interpreted():
        return product.reshape(rows // 16, 2, 8, columns).swapaxes(1, 2).reshape(rows, columns)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=TILE))
    def exchange(_: Any, product: Any) -> Any:
        _, lane = warp_and_lane()
        odd = arith.trunci(ir.IntegerType.get_signless(1), masked(shifted(lane, 2), 1))
        # The threads of a warp form 8 thread rows of 4. Result row g of the first 8 is row g % 2 of the pair in thread
        # row g / 2. Result row g of the second 8 is the same row of the pair in thread row g / 2 + 4.
        sources = [plus(times(shifted(lane, 3), 4), masked(lane, 3))]
        sources.append(plus(sources[0], mgpu.c(16, i32())))
        registers = product.registers.reshape(rows // 64, columns // 8, 2)
        ordered = np.empty_like(registers)
        for (*place, half), _ in np.ndenumerate(registers):
            pair = registers[*place]
            numbers = [
                arith.select(odd, _shuffle(pair[1], i, sources[half]), _shuffle(pair[0], i, sources[half]))
                for i in range(2)
            ]
            ordered[*place, half] = vector.from_elements(pair[0].type, numbers)
        return mgpu.FragmentedArray(
            _registers=ordered.reshape(product.registers.shape), _layout=product.layout, _is_signed=None
        )

    return exchange(product)


# --- orders of channels


def as_keys(x: jax.Array) -> jax.Array:
    """Permute the last axis (channels) to the order in which `_load_rows` passes channels of keys to wgmma."""
    return x.reshape(*x.shape[:-1], -1, 4, 2, 2).swapaxes(-3, -2).reshape(x.shape)


def as_values(x: jax.Array) -> jax.Array:
    """Permute rows [channels, n] to the order in which `_load_columns` passes them to wgmma."""
    return x.reshape(-1, 8, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


# --- shared memory to registers


def _load_rows(tile: Ref, channels: int, first: int, count: int) -> jax.Array:
    """Load channels `first` to `first + count` of an 8-bit tile as wgmma's left operand: float16 [tokens, count],
    ordered `as_keys`.

    One `ldmatrix` loads four matrices of 8 tokens and one chunk each: 16 tokens of two adjacent chunks.
    """
    tokens, assembly = math.prod(tile.shape) // channels, conversion(tile.dtype, (0, 1, 2, 3))

    @plgpu.inline_mgpu(
        arg_types=(QUANTIZED_REF,), return_type=plgpu.ShapeDtypeStruct((tokens, count), jnp.float16, layout=TILE)
    )
    def load(_: Any, tile: ir.Value) -> Any:
        warp, lane = warp_and_lane()
        token = plus(times(warp, 16), masked(lane, 15))
        chunks = ChunkPointers(tile, channels, token, shifted(lane, 4))
        registers = np.empty((tokens // 64, count // 8, 2), dtype=object)
        for block, chunk in itertools.product(range(tokens // 64), range(0, count // 16, 2)):
            pointer = chunks.pointer(64 * block, first // 16 + chunk)
            for i, word in enumerate(load_matrices(pointer, rows=True)):
                column = 2 * (chunk + i // 2)
                registers[block, column : column + 2, i % 2] = _dequantized(word, assembly)
        return _fragments(registers)

    return load(tile)


def _load_columns(tile: Ref, channels: int) -> jax.Array:
    """Load an 8-bit tile transposed as wgmma's left operand: float16 [channels, tokens], rows in the order of
    `as_values`.

    One `ldmatrix` loads and transposes four matrices of 8 tokens and one chunk each: 32 tokens of one chunk.
    """
    tokens, assembly = math.prod(tile.shape) // channels, conversion(tile.dtype, (0, 2, 1, 3))

    @plgpu.inline_mgpu(
        arg_types=(QUANTIZED_REF,), return_type=plgpu.ShapeDtypeStruct((channels, tokens), jnp.float16, layout=TILE)
    )
    def load(_: Any, tile: ir.Value) -> Any:
        warp, lane = warp_and_lane()
        chunks = ChunkPointers(tile, channels, lane, warp)
        registers = np.empty((channels // 64, tokens // 8, 2), dtype=object)
        for block, rows in np.ndindex(channels // 64, tokens // 32):
            for i, word in enumerate(load_matrices(chunks.pointer(32 * rows, 4 * block), rows=False)):
                registers[block, 4 * rows + i] = _dequantized(word, assembly)
        return _fragments(registers)

    return load(tile)


def load_matrices(pointer: ir.Value, *, rows: bool) -> Iterator[ir.Value]:
    """Load four 8 x 8 matrices with one `ldmatrix`, transposed unless `rows`. Return the lane's four words.

    Args:
      pointer: pointer of each lane to one matrix row.
    """
    words = nvvm.ldmatrix(
        pointer,
        num=4,
        layout=nvvm.MMALayout.row if rows else nvvm.MMALayout.col,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    return (llvm.extractvalue(i32(), words, [i]) for i in range(4))


def _dequantized(word: ir.Value, assembly: str) -> list[ir.Value]:
    """Float16 pairs, as vectors, that a `conversion` computes from a word."""
    halves = ir.VectorType.get((2,), ir.F16Type.get())
    return [mgpu.utils.bitcast(pair, halves) for pair in converted(word, assembly)]


def _fragments(registers: np.ndarray) -> Any:
    """Array with layout TILE from registers [blocks of 64 rows, blocks of 8 columns, halves of a warp's 16 rows]."""
    blocks, columns, _ = registers.shape
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64 * blocks, 8 * columns))
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _shuffle(pair: ir.Value, i: int, lane: ir.Value) -> ir.Value:
    """Read element i of a pair of float32 from another lane of the warp."""
    number = vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
    all_lanes: Any = mgpu.c(0xFFFFFFFF, i32())
    clamp: Any = mgpu.c(31, i32())
    return nvvm.shfl_sync(all_lanes, number, lane, clamp, nvvm.ShflKind.idx)
