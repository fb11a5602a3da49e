"""8-bit caches in Mosaic GPU kernels: what the tensor cores work in, and bringing it to them.

The tensor cores multiply in float16 here: it holds what e4m3 and int8 do, and two numbers take one instruction (e4m3)
or less than three (int8). Both go through registers, which wgmma reads its left operand from, never back to shared
memory. `ldmatrix` brings them there, 16 bytes of a row to four neighbouring threads. It deals in 16-bit numbers, two of
ours, so channels end up in an order of their own:

- Keys [tokens, channels], the left operand as it lies: a thread gets channels 4j to 4j + 3 of 16 of a token, where
  wgmma expects 2j, 2j + 1, 2j + 8, 2j + 9. A sum over channels may go in any order; the queries are brought into the
  same one before the kernel (`query_terms`).
- Values [tokens, channels], transposed: rows r and r + 8 of 16 of the product are channels 2r and 2r + 1. The
  accumulator keeps that order until a piece is done (`restore_channel_order`).
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
"""bfloat16 queries are multiplied with this: float16 then holds those from 2**-13 to 2**20 exactly, and saturates."""

QUANTISED_REF = plgpu.RefType((plgpu.TilingTransform((8, ROW_BYTES)), plgpu.SwizzleTransform(ROW_BYTES)))
"""Type of a reference to an 8-bit `tiles.operand`: 16-byte chunk c of row r lies at chunk c ^ (r % 8) of that row."""

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
"""Four int8 to float16: byte b, with its sign flipped b + 128, is the mantissa of 0x6400 + b + 128, which is the
float16 1024 + b + 128.
"""


SMALLEST_SCALE = 1e-26
"""Smaller scales of values count as this one: the reciprocal enters a sum, which must not overflow."""


# --- before the kernel


def scale_layout(kv: PagedKV) -> ScaleLayout:
    """Which scales a cache has."""
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
    """`plain_query_terms`; over an 8-bit cache with channels in the order in which `multiply_dequantised` meets those
    of keys.
    """
    terms, scale = plain_query_terms(q, kv)
    return (terms if kv.k_scale is None else [as_keys(term) for term in terms]), scale


def plain_query_terms(q: Float[Array, "B Q Hq D"], kv: PagedKV) -> tuple[list[Array], float]:
    """Queries as a sum of terms the tensor cores can multiply with the cache, and what they were multiplied with.

    One term where it holds them exactly. Scales of keys by channel are multiplied in, and take two: the LSE would show
    their rounding.
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
    """Number of tokens that share one row of a tile in shared memory: several where 8-bit heads are narrower than a
    row, since copies of 64 bytes reach three quarters of the bandwidth only.
    """
    return max(1, ROW_BYTES // head_dim) if jnp.dtype(cache_dtype) in QMAX else 1


# --- in the kernel


def multiply_dequantised(a: Ref, bs: Sequence[Ref]) -> jax.Array:
    """a @ (bs[0] + bs[1] + ...)ᵀ in float32, for an 8-bit tile a of [M, K] and float16 bs [N, K], all in shared memory;
    the columns of bs are in the order of `as_keys`.

    The interpreter has no wgmma of registers.
    """
    channels = bs[0].shape[1]
    if interpreted():
        wide = as_keys(a[...].reshape(-1, channels).astype(jnp.float16))
        products = [jnp.dot(wide, b[...].T, preferred_element_type=jnp.float32) for b in bs]
        return sum(products[1:], start=products[0])
    in_row = min(channels, ROW_BYTES)
    some = max(64, in_row // len(bs))  # each of several products holds its left operand in registers of its own

    def accumulate(total: Ref) -> jax.Array:
        for i in range(0, channels, some):
            row = pl.ds(i // in_row * in_row, ROW_BYTES)
            wide = _load_rows(a.at[:, row], in_row, i % in_row, some)
            for b in bs:
                plgpu.wgmma(total, wide, b.at[:, pl.ds(i, some)].transpose((1, 0)))
            if some < channels:
                plgpu.wgmma_wait(0)  # or the next channels would need registers of their own
        return total[...]

    return pl.run_scoped(accumulate, plgpu.ACC((math.prod(a.shape) // channels, bs[0].shape[0]), jnp.float32))


def load_transposed(tile: Ref, channels: int) -> jax.Array:
    """An 8-bit tile of [tokens, channels] as float16 [channels, tokens] in registers, its rows ordered `as_values`."""
    if interpreted():
        return as_values(tile[...].reshape(-1, channels).astype(jnp.float16).T)
    return _load_columns(tile, channels)


def clear_tokens(tile: Ref, channels: int, live_mask: jax.Array) -> None:
    """Makes an 8-bit tile of [tokens, channels] 0 where live_mask [tokens], in layout PER_TOKEN, is not true."""
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


def dequantise_tile(tile: Ref, wide: Ref) -> None:
    """Writes an 8-bit tile of [tokens, channels] to a float16 one, which wgmma reads: a chunk of 16 at a time.

    Neighbouring threads take neighbouring tokens: so eight of them meet all banks of shared memory, in either tile.
    """
    tokens, channels = wide.shape
    if interpreted():
        wide[...] = tile[...].reshape(wide.shape).astype(wide.dtype)
        return
    assembly = conversion(tile.dtype, (0, 1, 2, 3))

    @plgpu.inline_mgpu(arg_types=(QUANTISED_REF, tiles.operand_ref()))
    def convert(_: Any, tile: ir.Value, wide: ir.Value) -> None:
        warp, lane = _warp_and_lane()
        token, chunk = _sum(_times(_masked(warp, 1), 32), lane), _shifted(warp, 1)
        source, target = _Chunks(tile, channels, token, chunk), _Chunks(wide, 2 * channels, token, _times(chunk, 2))
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

    convert(tile, wide)


def restore_channel_order(product: jax.Array) -> jax.Array:
    """Brings the rows of a product from the order of `as_values` to their own."""
    rows, columns = product.shape
    if interpreted():
        return product.reshape(rows // 16, 2, 8, columns).swapaxes(1, 2).reshape(rows, columns)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=TILE))
    def exchange(_: Any, product: Any) -> Any:
        _, lane = _warp_and_lane()
        odd = arith.trunci(ir.IntegerType.get_signless(1), _masked(_shifted(lane, 2), 1))
        # Row g of the first half is row g % 2 of thread row g / 2; row g of the second, of thread row g / 2 + 4.
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
    """Spreads values of groups of tokens over the tokens: ref [n, some] in shared memory holds those of n stretches of
    groups · group_tokens tokens, from int32 begin [n] on if given; returns [n · groups · group_tokens], in layout
    PER_TOKEN.

    Pallas has no loads by index.
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
        size, stretch = mgpu.c(group_tokens, index), mgpu.c(groups * group_tokens, index)
        layout = mgpu.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((tokens,)), dtype=object)
        for i, (token,) in zip(np.ndindex(registers.shape), layout.thread_idxs((tokens,)), strict=True):
            row, group = arith.divui(token, stretch), arith.divui(arith.remui(token, stretch), size)
            for first in begin:
                group = arith.addi(group, arith.index_cast(index, memref.load(first, [row])))
            value = memref.load(ref, [row, group])
            registers[i] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref) if begin is None else load(ref, begin)


# --- orders of channels


def as_keys(x: jax.Array) -> jax.Array:
    """The last axis in the order in which `_load_rows` gives wgmma the channels of keys."""
    return x.reshape(*x.shape[:-1], -1, 4, 2, 2).swapaxes(-3, -2).reshape(x.shape)


def as_values(x: jax.Array) -> jax.Array:
    """The rows [channels, n] in the order in which `_load_columns` gives them to wgmma."""
    return x.reshape(-1, 8, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


# --- shared memory to registers


class _Chunks:
    """Pointers to chunks of 16 bytes of a tile of tokens: those that a thread begins with, and from there on.

    Attributes:
      tile: a memref [rows / 8, columns of 128 bytes, 8, 128 bytes].
      token_bytes: of a token, which is the number of its channels if those have 8 bits.
      token, chunk: where a thread is, below 64 tokens and 4 chunks.
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
        """Of what is that many tokens, a multiple of 16, and that many chunks farther on; `chunks` adds no carry."""
        column, chunk = divmod(chunks, ROW_BYTES // 16)
        constant = tokens // self._tokens_in_row // 8 * self._row_tile + column * self._column
        offset = _sum(self._row, arith.xori(self._chunk, mgpu.c(16 * chunk, _i32())))
        pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(self._tile), [offset], _i8())
        return mgpu.utils.getelementptr(pointer, [constant], _i8())


def _load_rows(tile: Ref, channels: int, first: int, count: int) -> jax.Array:
    """Float16 [tokens, count], some columns of [tokens, channels] in the order of `as_keys`, as wgmma's left operand.

    Of the four matrices of 8 tokens and a chunk that one `ldmatrix` brings, two are below one another, two beside.
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
                registers[block, column : column + 2, i % 2] = _widened(word, assembly)
        return _fragments(registers)

    return load(tile)


def _load_columns(tile: Ref, channels: int) -> jax.Array:
    """Float16 [channels, tokens], rows in the order of `as_values`, as wgmma's left operand.

    The four matrices that one `ldmatrix` brings, transposed, are below one another.
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
                registers[block, 4 * rows + i] = _widened(word, assembly)
        return _fragments(registers)

    return load(tile)


def _load_matrices(pointer: ir.Value, layout: Any) -> Iterator[ir.Value]:
    """The four words that a thread gets of four matrices, whose rows begin at the `pointer` of a thread each."""
    words = nvvm.ldmatrix(
        pointer,
        num=4,
        layout=layout,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    return (llvm.extractvalue(_i32(), words, [i]) for i in range(4))


def conversion(narrow: jax.typing.DTypeLike, order: Sequence[int]) -> str:
    """PTX that makes two pairs of float16, $0 and $1, of the four 8-bit numbers of a word, $2, taken in an order."""
    return (INT8_TO_F16 if jnp.dtype(narrow) == jnp.int8 else E4M3_TO_F16).format(*order)


def _widened(word: ir.Value, assembly: str) -> list[ir.Value]:
    """The pairs that a `conversion` makes of a word."""
    halves = ir.VectorType.get((2,), ir.F16Type.get())
    return [mgpu.utils.bitcast(pair, halves) for pair in _converted(word, assembly)]


def _converted(word: ir.Value, assembly: str) -> list[ir.Value]:
    """The same, as a word each."""
    pairs: Any = llvm.inline_asm(llvm.StructType.get_literal([_i32()] * 2), [word], assembly, "=r,=r,r")
    return [llvm.extractvalue(_i32(), pairs, [i]) for i in range(2)]


def _fragments(registers: np.ndarray) -> Any:
    """Registers [blocks of 64 rows, 8 columns each, halves of 16 rows] as an array in layout TILE."""
    blocks, columns, _ = registers.shape
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64 * blocks, 8 * columns))
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Of a thread in its warpgroup."""
    thread = mgpu.utils.thread_idx()
    return _masked(_shifted(thread, 5), 3), _masked(thread, 31)


def _shuffle(pair: ir.Value, i: int, lane: ir.Value) -> ir.Value:
    """One of a pair of float32, from another thread of the warp."""
    number = vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
    everybody: Any = mgpu.c(0xFFFFFFFF, _i32())
    clamp: Any = mgpu.c(31, _i32())
    return nvvm.shfl_sync(everybody, number, lane, clamp, nvvm.ShflKind.idx)


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
