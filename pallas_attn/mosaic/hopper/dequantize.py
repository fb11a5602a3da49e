"""Conversion of 8-bit caches (int8, e4m3) to float16 in registers, from which Hopper's wgmma reads its left operand.

In decode, K and V are left operands, S = K qᵀ and O += Vᵀ P. The instruction `ldmatrix` loads an 8-bit tile [tokens,
channels] from shared memory, threads convert it, and wgmma reads the registers. Converted tiles are not written back to
shared memory. `ldmatrix` distributes each chunk of 16 bytes to four adjacent threads. It moves elements of 16 bits, and
an element has two 8-bit values, so it permutes the channels:

- Keys are loaded without a transpose. Of 16 channels, thread j of four receives the channels 4j to 4j + 3, where wgmma
  expects the channels 2j, 2j + 1, 2j + 8 and 2j + 9. wgmma sums over channels, and a sum may have any order. So it is
  sufficient to permute the channels of the queries in the same way, which happens before the kernel
  (`split_and_permute_queries`).
- Values are transposed by the load. Of 16 rows of the accumulator [channels, query_rows], rows r and r + 8 are the
  channels 2r and 2r + 1. The accumulator has this order until a split is finished (`restore_channel_order`).

Prefill does not use this module: queries and probabilities are its left operands. Its 8-bit tiles are converted from
shared memory to shared memory (`mosaic.primitives.dequantize`).
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
    """Compute `split_queries` for an 8-bit cache, and permute the channels by `as_keys`."""
    parts, scale = split_queries(q, kv)
    return [as_keys(part) for part in parts], scale


def multiply_dequantized(a: Ref, bs: Sequence[Ref]) -> jax.Array:
    """Compute a @ sum(bs)ᵀ in float32, with all operands in shared memory. `a` is converted to float16 in registers.

    Interpreted kernels need other code, because the interpreter does not support wgmma with a left operand in
    registers.

    Args:
      a: 8-bit tile [M, K], or [M / t, t · K] with several tokens per row.
      bs: float16 [N, K] each, with columns in the order of `as_keys`.
    """
    channels = bs[0].shape[1]
    if interpreted():
        left = as_keys(a[...].reshape(-1, channels).astype(jnp.float16))
        products = [jnp.dot(left, b[...].T, preferred_element_type=jnp.float32) for b in bs]
        return sum(products[1:], start=products[0])
    in_row = min(channels, ROW_BYTES)
    step = max(64, in_row // len(bs))  # fewer channels per step with several `bs`: each product copies its left operand

    def accumulate(total: Ref) -> jax.Array:
        for i in range(0, channels, step):
            row = pl.ds(i // in_row * in_row, ROW_BYTES)
            left = _load_rows(a.at[:, row], in_row, i % in_row, step)
            for b in bs:
                plgpu.wgmma(total, left, b.at[:, pl.ds(i, step)].transpose((1, 0)))
            if step < channels:
                plgpu.wgmma_wait(0)  # the left operand of the next step takes the same registers
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((math.prod(a.shape) // channels, bs[0].shape[0]), jnp.float32))


def load_transposed(tile: Ref, channels: int) -> jax.Array:
    """Load an 8-bit tile [tokens, channels], transpose it and convert it to float16.

    Returns:
      Array [channels, tokens] in registers, rows in the order of `as_values`.
    """
    if interpreted():
        return as_values(tile[...].reshape(-1, channels).astype(jnp.float16).T)
    return _load_columns(tile, channels)


def restore_channel_order(product: jax.Array) -> jax.Array:
    """Reorder the rows of an accumulator [channels, n] from the order of `as_values` to channel order."""
    rows, columns = product.shape
    if interpreted():
        return product.reshape(rows // 16, 2, 8, columns).swapaxes(1, 2).reshape(rows, columns)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=TILE))
    def exchange(_: Any, product: Any) -> Any:
        _, lane = warp_and_lane()
        odd = arith.trunci(ir.IntegerType.get_signless(1), masked(shifted(lane, 2), 1))
        # A warp has 16 rows of each 64. The lanes form 8 groups of four; group g has the rows g (register half 0) and
        # g + 8 (register half 1), which are the channels 2g and 2g + 1. After the exchange, row r < 8 is channel r. It
        # comes from lane group r // 2, register half r % 2. Row r + 8 comes from group r // 2 + 4, the same half.
        sources = [plus(times(shifted(lane, 3), 4), masked(lane, 3))]
        sources.append(plus(sources[0], mgpu.c(16, i32())))
        registers = product.registers.reshape(rows // 64, columns // 8, 2)
        ordered = np.empty_like(registers)
        for (*place, half), _ in np.ndenumerate(registers):
            pair = registers[*place]
            numbers = [
                arith.select(odd, from_lane(pair[1], i, sources[half]), from_lane(pair[0], i, sources[half]))
                for i in range(2)
            ]
            ordered[*place, half] = vector.from_elements(pair[0].type, numbers)
        return mgpu.FragmentedArray(
            _registers=ordered.reshape(product.registers.shape), _layout=product.layout, _is_signed=None
        )

    return exchange(product)


# --- orders of channels


def as_keys(x: jax.Array) -> jax.Array:
    """Permute the last axis (channels) to the order of the channels of keys that `_load_rows` loads."""
    return x.reshape(*x.shape[:-1], -1, 4, 2, 2).swapaxes(-3, -2).reshape(x.shape)


def as_values(x: jax.Array) -> jax.Array:
    """Permute the rows of x [channels, n] to the order of the channels of values that `_load_columns` loads."""
    return x.reshape(-1, 8, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


# --- shared memory to registers


def _load_rows(tile: Ref, channels: int, first: int, count: int) -> jax.Array:
    """Load channels `first` to `first` + `count` - 1 of an 8-bit tile and convert them to float16.

    One `ldmatrix` loads four matrices of 8 tokens by one 16-byte chunk of channels. For each warp these are 16 tokens
    of two adjacent chunks.

    Args:
      tile: [tokens, channels], or several tokens per row.

    Returns:
      Array [tokens, count] in registers, columns in the order of `as_keys`: a left operand of wgmma.
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
    """Load an 8-bit tile, transpose it and convert it to float16.

    One `ldmatrix` loads and transposes four matrices of 8 tokens by one 16-byte chunk of channels. For each warp these
    are 32 tokens of one chunk.

    Args:
      tile: [tokens, channels], or several tokens per row.

    Returns:
      Array [channels, tokens] in registers, rows in the order of `as_values`: a left operand of wgmma.
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
    """Load four 8 x 8 matrices of 16-bit elements with one `ldmatrix`. Return this lane's 32-bit word of each matrix.

    Args:
      pointer: pointer to a row of a matrix. Lanes 0 to 7 point to the rows of the first matrix, and so on.
      rows: whether to load the matrices as they are; False transposes each.
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
    """Convert a word with four 8-bit values. Return two vectors of two float16 each."""
    halves = ir.VectorType.get((2,), ir.F16Type.get())
    return [mgpu.utils.bitcast(pair, halves) for pair in converted(word, assembly)]


def _fragments(registers: np.ndarray) -> Any:
    """Return an array with layout `TILE`, given its registers [blocks of 64 rows, blocks of 8 columns, 2].

    The last index selects one of the thread's two rows, which are 8 rows apart.
    """
    blocks, columns, _ = registers.shape
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64 * blocks, 8 * columns))
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def from_lane(pair: ir.Value, i: int, lane: ir.Value) -> ir.Value:
    """Read element i of a pair of float32 from another lane of the warp."""
    number = vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
    all_lanes: Any = mgpu.c(0xFFFFFFFF, i32())
    clamp: Any = mgpu.c(31, i32())
    return nvvm.shfl_sync(all_lanes, number, lane, clamp, nvvm.ShflKind.idx)
