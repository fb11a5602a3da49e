"""Conversion of 8-bit caches (int8, e4m3) to float16, in which Hopper's tensor cores multiply them.

Float16 holds every value of e4m3 and int8, and two of them take one instruction (e4m3) or less than three (int8).

In decode, 8-bit tiles are converted in registers, from which wgmma reads its left operand; they do not go back to
shared memory. `ldmatrix` loads them, 16 bytes of a row to four neighbouring threads. It moves elements of 16 bits, each
of which is two of ours, so channels end up permuted:

- Keys [tokens, channels] are the left operand as they lie. Of 16 channels a thread gets 4j to 4j + 3, where wgmma
  expects 2j, 2j + 1, 2j + 8, 2j + 9. A sum over channels may go in any order, so queries are permuted alike before the
  kernel (`query_terms`).
- Values [tokens, channels] are transposed while they are loaded. Of 16 rows of the product, r and r + 8 are channels
  2r and 2r + 1. The accumulator keeps that order until a split is done (`restore_channel_order`).

In prefill, whose left operands are queries and probabilities, tiles are converted from shared memory to shared memory
(`dequantise_tile`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector
from jaxtyping import Array, Float

from pallas_attn.mosaic.basics import Ref, interpreted
from pallas_attn.mosaic.sm90 import tiles
from pallas_attn.mosaic.sm90.tiles import PER_TOKEN, ROW_BYTES, TILE
from pallas_attn.types import QMAX, PagedKV, ScaleLayout

QUERY_SCALE = 2.0**-4
"""Factor of bfloat16 queries: float16 then holds those from 2**-13 to 2**20 exactly, and larger ones saturate."""

QUANTISED_REF = plgpu.RefType((plgpu.TilingTransform((8, ROW_BYTES)), plgpu.SwizzleTransform(ROW_BYTES)))
"""Type of a reference to an 8-bit `tiles.operand`: 16-byte chunk c of row r is stored as chunk c ^ (r % 8) of that
row.
"""

E4M3_TO_F16 = """
{{
.reg .b32 ordered;
.reg .b16 low, high;
prmt.b32 ordered, $2, 0, 0x{3}{2}{1}{0};
mov.b32 {{low, high}}, ordered;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}}
"""

INT8_TO_F16 = """
{{
.reg .b32 biased, exponents, bias, low, high;
xor.b32 biased, $2, 0x80808080;
mov.b32 exponents, 0x64646464;
mov.b32 bias, 0x64806480;
prmt.b32 low, biased, exponents, 0x4{1}4{0};
prmt.b32 high, biased, exponents, 0x4{3}4{2};
sub.f16x2 $0, low, bias;
sub.f16x2 $1, high, bias;
}}
"""
"""Converts four int8 to float16. A byte b with its sign bit flipped is b + 128, which as the low bits of 0x6400 makes
the float16 1024 + 128 + b; 1152 is subtracted from it.
"""

SMALLEST_SCALE = 1e-26
"""Smallest scale of values: smaller ones are raised to it, since their reciprocals enter a sum that must not overflow.
"""


# --- before the kernel


def scale_layout(kv: PagedKV) -> ScaleLayout:
    """Kind of scales that a cache has, from the rank of `k_scale`."""
    if kv.k_scale is None:
        return None
    match kv.k_scale.ndim:
        case 1:
            return "head"
        case 2:
            return "channel"
        case _:
            return kv.k_scale.shape[-1]


def query_terms(q: Float[Array, "B Q Hq D"], kv: PagedKV) -> tuple[list[Array], float]:
    """Compute `plain_query_terms`; for an 8-bit cache with channels in the order that `multiply_dequantised` takes."""
    terms, scale = plain_query_terms(q, kv)
    return (terms if kv.k_scale is None else [as_keys(term) for term in terms]), scale


def plain_query_terms(q: Float[Array, "B Q Hq D"], kv: PagedKV) -> tuple[list[Array], float]:
    """Split queries into a sum of terms that tensor cores can multiply with the cache; return terms and their factor.

    There is one term where 16 bits hold the queries exactly. Scales of keys by channel are multiplied into the queries,
    which takes two terms: the LSE would show the rounding of one.
    """
    if kv.k_scale is None:
        return [q], 1.0
    if scale_layout(kv) != "channel" and q.dtype == jnp.float16:
        return [q], 1.0
    exact, limit = q.astype(jnp.float32), float(jnp.finfo(jnp.float16).max)
    if scale_layout(kv) != "channel":
        return [jnp.clip(exact * QUERY_SCALE, -limit, limit).astype(jnp.float16)], QUERY_SCALE
    exact *= jnp.repeat(kv.k_scale, q.shape[2] // kv.k.shape[1], axis=0)[None, None]
    exact = jnp.clip(exact, -limit, limit)
    # Not a conversion there and back: on GPUs the compiler would drop both, and `low` with them.
    high = lax.reduce_precision(exact, exponent_bits=5, mantissa_bits=10)
    return [high.astype(jnp.float16), (exact - high).astype(jnp.float16)], 1.0


def tokens_per_smem_row(cache_dtype: jax.typing.DTypeLike, head_dim: int) -> int:
    """Number of tokens that share a row of a tile in shared memory: several where 8-bit heads are narrower than a row,
    since copies of rows of 64 bytes reach only three quarters of the bandwidth.
    """
    return max(1, ROW_BYTES // head_dim) if jnp.dtype(cache_dtype) in QMAX else 1


# --- in the kernel


def multiply_dequantised(a: Ref, bs: Sequence[Ref]) -> jax.Array:
    """Compute a @ (bs[0] + bs[1] + ...)ᵀ in float32, all operands in shared memory.

    The interpreter has no wgmma of registers.

    Args:
      a: 8-bit tile [M, K], or with several rows of it in a row.
      bs: float16 [N, K] each, columns in the order of `as_keys`.
    """
    channels = bs[0].shape[1]
    if interpreted():
        left = as_keys(a[...].reshape(-1, channels).astype(jnp.float16))
        products = [jnp.dot(left, b[...].T, preferred_element_type=jnp.float32) for b in bs]
        return sum(products[1:], start=products[0])
    in_row = min(channels, ROW_BYTES)
    step = max(64, in_row // len(bs))  # each of several products holds its left operand in registers of its own

    def accumulate(total: Ref) -> jax.Array:
        for i in range(0, channels, step):
            row = pl.ds(i // in_row * in_row, ROW_BYTES)
            left = _load_rows(a.at[:, row], in_row, i % in_row, step)
            for b in bs:
                plgpu.wgmma(total, left, b.at[:, pl.ds(i, step)].transpose((1, 0)))
            if step < channels:
                plgpu.wgmma_wait(0)  # so that the next channels take the same registers
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((math.prod(a.shape) // channels, bs[0].shape[0]), jnp.float32))


def load_transposed(tile: Ref, channels: int) -> jax.Array:
    """Load an 8-bit tile [tokens, channels] to registers as float16 [channels, tokens], rows ordered `as_values`."""
    if interpreted():
        return as_values(tile[...].reshape(-1, channels).astype(jnp.float16).T)
    return _load_columns(tile, channels)


def clear_tokens(tile: Ref, channels: int, live_mask: jax.Array) -> None:
    """Zero the tokens of an 8-bit tile [tokens, channels] where live_mask [tokens], in layout PER_TOKEN, is false."""
    if interpreted():
        numbers = jnp.where(live_mask[:, None], tile[...].reshape(-1, channels), jnp.zeros((), tile.dtype))
        tile[...] = numbers.reshape(tile.shape)
        return

    @plgpu.inline_mgpu(arg_types=(QUANTISED_REF, PER_TOKEN))
    def write_zeros(_: Any, tile: ir.Value, live_mask: Any) -> None:
        warp, lane = _warp_and_lane()

        def chunks(block: int, half: int) -> Iterator[ir.Value]:
            token = _sum(_sum(_times(warp, 16), _shifted(lane, 2)), mgpu.c(64 * block + 8 * half, _i32()))
            at = _Chunks(tile, channels, token, _masked(lane, 3))
            return (at.pointer(0, chunk) for chunk in range(0, channels // 16, 4))

        tiles.store_zeros_unless(live_mask, chunks)

    write_zeros(tile, jnp.where(live_mask, 1, 0))


def dequantise_tile(tile: Ref, to: Ref) -> None:
    """Convert an 8-bit tile [tokens, channels] to a float16 tile that wgmma reads, both in shared memory.

    A thread converts chunks of 16 channels. Neighbouring threads take neighbouring tokens, so that eight of them access
    all banks, in either tile.
    """
    tokens, channels = to.shape
    if interpreted():
        to[...] = tile[...].reshape(to.shape).astype(to.dtype)
        return
    assembly = conversion(tile.dtype, (0, 1, 2, 3))

    @plgpu.inline_mgpu(arg_types=(QUANTISED_REF, tiles.operand_ref()))
    def convert(_: Any, tile: ir.Value, to: ir.Value) -> None:
        warp, lane = _warp_and_lane()
        token, chunk = _sum(_times(_masked(warp, 1), 32), lane), _shifted(warp, 1)
        source, target = _Chunks(tile, channels, token, chunk), _Chunks(to, 2 * channels, token, _times(chunk, 2))
        four = ir.VectorType.get((4,), _i32())
        for block, chunks in itertools.product(range(0, tokens, 64), range(0, channels // 16, 2)):
            words = llvm.load(four, source.pointer(block, chunks), alignment=16)
            for half in range(2):
                pairs = [
                    pair
                    for i in (2 * half, 2 * half + 1)
                    for pair in _converted(vector.extract(words, [], [i]), assembly)
                ]
                llvm.store(vector.from_elements(four, pairs), target.pointer(block, 2 * chunks + half), alignment=16)

    convert(tile, to)


def restore_channel_order(product: jax.Array) -> jax.Array:
    """Reorder the rows of a product [channels, n] from the order of `as_values` to that of the channels."""
    rows, columns = product.shape
    if interpreted():
        return product.reshape(rows // 16, 2, 8, columns).swapaxes(1, 2).reshape(rows, columns)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=TILE))
    def exchange(_: Any, product: Any) -> Any:
        _, lane = _warp_and_lane()
        odd = arith.trunci(ir.IntegerType.get_signless(1), _masked(_shifted(lane, 2), 1))
        # Threads of a warp are 8 rows of 4. Row g of the first 8 results is the pair's row g % 2 of thread row g / 2;
        # of the second 8, of thread row g / 2 + 4.
        sources = [_sum(_times(_shifted(lane, 3), 4), _masked(lane, 3))]
        sources.append(_sum(sources[0], mgpu.c(16, _i32())))
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


def load_per_token(ref: Ref, begin: Ref | None, groups: int, group_tokens: int) -> jax.Array:
    """Load a value of each group of tokens, such as its scale, for each token: float32 [tokens] in layout PER_TOKEN.

    Pallas has no loads by index.

    Args:
      ref: float32 [n, at least groups] in shared memory, a row for each of n segments of groups · group_tokens tokens.
      begin: int32 [n], index of the first value of each row; 0 unless given.
    """
    tokens = ref.shape[0] * groups * group_tokens
    if interpreted():
        first = jnp.zeros((ref.shape[0], 1), jnp.int32) if begin is None else begin[...][:, None]
        values = jnp.take_along_axis(ref[...], first + jnp.arange(groups, dtype=jnp.int32)[None], axis=1)
        return jnp.repeat(values, group_tokens, axis=1).reshape(tokens)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * (1 if begin is None else 2),
        return_type=plgpu.ShapeDtypeStruct((tokens,), jnp.float32, layout=PER_TOKEN),
    )
    def load(_: Any, ref: ir.Value, *begin: ir.Value) -> Any:
        index = ir.IndexType.get()
        size, segment = mgpu.c(group_tokens, index), mgpu.c(groups * group_tokens, index)
        layout = mgpu.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((tokens,)), dtype=object)
        for i, (token,) in zip(np.ndindex(registers.shape), layout.thread_idxs((tokens,)), strict=True):
            row, group = arith.divui(token, segment), arith.divui(arith.remui(token, segment), size)
            for first in begin:
                group = arith.addi(group, arith.index_cast(index, memref.load(first, [row])))
            value = memref.load(ref, [row, group])
            registers[i] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref) if begin is None else load(ref, begin)


# --- orders of channels


def as_keys(x: jax.Array) -> jax.Array:
    """Permute the last axis, channels, to the order in which `_load_rows` gives wgmma those of keys."""
    return x.reshape(*x.shape[:-1], -1, 4, 2, 2).swapaxes(-3, -2).reshape(x.shape)


def as_values(x: jax.Array) -> jax.Array:
    """Permute rows [channels, n] to the order in which `_load_columns` gives them to wgmma."""
    return x.reshape(-1, 8, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


# --- shared memory to registers


class _Chunks:
    """Pointers to chunks of 16 bytes of a tile of tokens, at constant distances from a thread's first chunk.

    Args:
      tile: memref [rows / 8, columns of 128 bytes, 8, 128 bytes], swizzled.
      token_bytes: bytes of a token; the number of its channels if those have 8 bits.
      token, chunk: position of the thread's first chunk, token < 64 and chunk < 4.
    """

    def __init__(self, tile: ir.Value, token_bytes: int, token: ir.Value, chunk: ir.Value) -> None:
        memref_type = ir.MemRefType(tile.type)
        strides, _ = memref_type.get_strides_and_offset()
        self._tile = tile
        self._row_tile, self._column = (
            stride * mgpu.utils.bitwidth(memref_type.element_type) // 8 for stride in strides[:2]
        )
        self._tokens_in_row = tokens_in_row = max(1, ROW_BYTES // token_bytes)
        row = token
        if tokens_in_row > 1:
            row = arith.divui(token, mgpu.c(tokens_in_row, _i32()))
            beside = arith.remui(token, mgpu.c(tokens_in_row, _i32()))
            chunk = _sum(chunk, _times(beside, token_bytes // 16))
        self._row = _sum(_times(_shifted(row, 3), self._row_tile), _times(_masked(row, 7), ROW_BYTES))
        self._chunk = _times(arith.xori(chunk, _masked(row, 7)), 16)

    def pointer(self, tokens: int, chunks: int) -> ir.Value:
        """Pointer to the chunk so many tokens and chunks after the first one.

        Args:
          tokens: a multiple of 16.
          chunks: a number with no bit in common with that of the first chunk.
        """
        column, chunk = divmod(chunks, ROW_BYTES // 16)
        constant = tokens // self._tokens_in_row // 8 * self._row_tile + column * self._column
        offset = _sum(self._row, arith.xori(self._chunk, mgpu.c(16 * chunk, _i32())))
        pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(self._tile), [offset], _i8())
        return mgpu.utils.getelementptr(pointer, [constant], _i8())


def _load_rows(tile: Ref, channels: int, first: int, count: int) -> jax.Array:
    """Load `count` channels of an 8-bit tile [tokens, channels], from `first` on, as wgmma's left operand: float16
    [tokens, count] in the order of `as_keys`.

    One `ldmatrix` loads four matrices of 8 tokens and a chunk each: 16 tokens of two neighbouring chunks.
    """
    tokens, assembly = math.prod(tile.shape) // channels, conversion(tile.dtype, (0, 1, 2, 3))

    @plgpu.inline_mgpu(
        arg_types=(QUANTISED_REF,), return_type=plgpu.ShapeDtypeStruct((tokens, count), jnp.float16, layout=TILE)
    )
    def load(_: Any, tile: ir.Value) -> Any:
        warp, lane = _warp_and_lane()
        token = _sum(_times(warp, 16), _masked(lane, 15))
        chunks = _Chunks(tile, channels, token, _shifted(lane, 4))
        registers = np.empty((tokens // 64, count // 8, 2), dtype=object)
        for block, chunk in itertools.product(range(tokens // 64), range(0, count // 16, 2)):
            pointer = chunks.pointer(64 * block, first // 16 + chunk)
            for i, word in enumerate(_load_matrices(pointer, nvvm.MMALayout.row)):
                column = 2 * (chunk + i // 2)
                registers[block, column : column + 2, i % 2] = _dequantised(word, assembly)
        return _fragments(registers)

    return load(tile)


def _load_columns(tile: Ref, channels: int) -> jax.Array:
    """Load an 8-bit tile transposed as wgmma's left operand: float16 [channels, tokens], rows in the order `as_values`.

    One `ldmatrix` loads four matrices of 8 tokens and a chunk each, transposed: 32 tokens of one chunk.
    """
    tokens, assembly = math.prod(tile.shape) // channels, conversion(tile.dtype, (0, 2, 1, 3))

    @plgpu.inline_mgpu(
        arg_types=(QUANTISED_REF,), return_type=plgpu.ShapeDtypeStruct((channels, tokens), jnp.float16, layout=TILE)
    )
    def load(_: Any, tile: ir.Value) -> Any:
        warp, lane = _warp_and_lane()
        chunks = _Chunks(tile, channels, lane, warp)
        registers = np.empty((channels // 64, tokens // 8, 2), dtype=object)
        for block, rows in np.ndindex(channels // 64, tokens // 32):
            for i, word in enumerate(_load_matrices(chunks.pointer(32 * rows, 4 * block), nvvm.MMALayout.col)):
                registers[block, 4 * rows + i] = _dequantised(word, assembly)
        return _fragments(registers)

    return load(tile)


def _load_matrices(pointer: ir.Value, layout: Any) -> Iterator[ir.Value]:
    """Load four 8 x 8 matrices with one `ldmatrix`; each lane's pointer is to a row. Return the lane's four words."""
    words = nvvm.ldmatrix(
        pointer,
        num=4,
        layout=layout,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    return (llvm.extractvalue(_i32(), words, [i]) for i in range(4))


def conversion(narrow: jax.typing.DTypeLike, order: Sequence[int]) -> str:
    """PTX that converts the four 8-bit numbers of a word, $2, in some order to two pairs of float16, $0 and $1."""
    return (INT8_TO_F16 if jnp.dtype(narrow) == jnp.int8 else E4M3_TO_F16).format(*order)


def _dequantised(word: ir.Value, assembly: str) -> list[ir.Value]:
    """Pairs of float16, as vectors, that a `conversion` makes of a word."""
    halves = ir.VectorType.get((2,), ir.F16Type.get())
    return [mgpu.utils.bitcast(pair, halves) for pair in _converted(word, assembly)]


def _converted(word: ir.Value, assembly: str) -> list[ir.Value]:
    """Pairs of float16, as words, that a `conversion` makes of a word."""
    pairs: Any = llvm.inline_asm(llvm.StructType.get_literal([_i32()] * 2), [word], assembly, "=r,=r,r")
    return [llvm.extractvalue(_i32(), pairs, [i]) for i in range(2)]


def _fragments(registers: np.ndarray) -> Any:
    """Array in layout TILE from registers [blocks of 64 rows, blocks of 8 columns, halves of a warp's 16 rows]."""
    blocks, columns, _ = registers.shape
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64 * blocks, 8 * columns))
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Warp of a thread in its warpgroup, and lane in its warp."""
    thread = mgpu.utils.thread_idx()
    return _masked(_shifted(thread, 5), 3), _masked(thread, 31)


def _shuffle(pair: ir.Value, i: int, lane: ir.Value) -> ir.Value:
    """Read element i of a pair of float32 from another lane of the warp."""
    number = vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
    all_lanes: Any = mgpu.c(0xFFFFFFFF, _i32())
    clamp: Any = mgpu.c(31, _i32())
    return nvvm.shfl_sync(all_lanes, number, lane, clamp, nvvm.ShflKind.idx)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i8() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def _sum(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.addi(a, b)


def _times(a: ir.Value, factor: int) -> ir.Value:
    return arith.muli(a, mgpu.c(factor, _i32()))


def _shifted(a: ir.Value, bits: int) -> ir.Value:
    return arith.shrui(a, mgpu.c(bits, _i32()))


def _masked(a: ir.Value, mask: int) -> ir.Value:
    return arith.andi(a, mgpu.c(mask, _i32()))
