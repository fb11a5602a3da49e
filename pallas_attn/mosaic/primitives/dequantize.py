"""8-bit caches (int8, e4m3) on tensor cores that multiply float16: scales, queries, and conversion of tiles.

Float16 represents every value of e4m3 and int8 exactly. Converting four values takes at most three instructions (e4m3)
or five instructions (int8). The scales of the cache are not applied to the converted tiles; the kernels apply them to
queries, scores or probabilities.

This module does not depend on the architecture. `dequantize_tile` converts a tile in shared memory to another tile in
shared memory. Hopper's decode kernel instead converts while it loads registers, because wgmma can read its left operand
from registers (`hopper.dequantize`).

A tile has tokens as rows and channels as columns. If a head is narrower than 128 bytes, a row of the tile in shared
memory has several tokens (`tokens_per_smem_row`). A chunk is 16 consecutive bytes of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import Array, Float

from pallas_attn.mosaic.primitives import register_tiles
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.register_tiles import ROW_BYTES, RegisterLayout
from pallas_attn.portable.quantise import float16_queries
from pallas_attn.types import QMAX, PagedKV, ScaleLayout


def quantized_ref(row_bytes: int = ROW_BYTES) -> Any:
    """Type of a reference to an 8-bit `register_tiles.operand`, for `arg_types` of `plgpu.inline_mgpu`.

    With a swizzle width of 128 bytes, chunk c of each 128 bytes of row r is stored at position c ^ (r % 8). With 64
    bytes, chunk c of each 64 bytes is stored at position c ^ (r // 2 % 4).
    """
    return plgpu.RefType((plgpu.TilingTransform((8, row_bytes)), plgpu.SwizzleTransform(row_bytes)))


QUANTIZED_REF = quantized_ref()

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
"""PTX that converts four int8 to float16.

Flipping the sign bit of an int8 b gives the byte b + 128. The float16 number with high byte 0x64 and this low byte is
1024 + 128 + b. Subtracting 1152 gives b.
"""

PIECE_TOKENS = 16
"""Tokens of a piece: a part of a tile that is copied and converted separately. Pages have at least as many tokens."""

SMALLEST_SCALE = 1e-26
"""Smallest value scale. Kernels raise smaller scales to it, because they divide probabilities by the scale, and the sum
of the quotients must not overflow.
"""


# --- before the kernel


def scale_layout(kv: PagedKV) -> ScaleLayout:
    """Return the scale layout of a cache, from the rank of `k_scale`: None, "head" for [Hkv], "channel" for [Hkv, D],
    or the number of scales per page, which is the last dimension.
    """
    if kv.k_scale is None:
        return None
    match kv.k_scale.ndim:
        case 1:
            return "head"
        case 2:
            return "channel"
        case _:
            return kv.k_scale.shape[-1]


def latent_queries(q_latent: Float[Array, "*rows L"], q_rope: Float[Array, "*rows R"]) -> tuple[Array, Array, float]:
    """Scale queries so that float16 represents them.

    Returns:
      float16 queries for the 8-bit latents; queries for the rotated columns, in the dtype of `q_rope`; and the power of
      two by which both were multiplied.
    """
    narrowed, factor = float16_queries(q_latent)
    return narrowed, q_rope * jnp.asarray(factor, q_rope.dtype), factor


def split_queries(q: Float[Array, "B Q Hq D"], kv: PagedKV) -> tuple[list[Array], float]:
    """Convert queries to one or two 16-bit arrays that the tensor cores multiply with the cache.

    The sum of the arrays is the query times a factor. Without channel scales there is one array. Channel scales of keys
    are multiplied into the queries, and the product is split into two float16 arrays. With a single array, the rounding
    error would be visible in the LSE.

    Returns:
      The arrays, and the factor.
    """
    if kv.k_scale is None:
        return [q], 1.0
    if scale_layout(kv) != "channel":
        narrowed, factor = float16_queries(q)
        return [narrowed], factor
    exact, limit = q.astype(jnp.float32), float(jnp.finfo(jnp.float16).max)
    exact *= jnp.repeat(kv.k_scale, q.shape[2] // kv.k.shape[1], axis=0)[None, None]
    exact = jnp.clip(exact, -limit, limit)
    # Round with `reduce_precision`, not by converting to float16 and back: XLA removes such a pair of conversions on
    # GPUs, and the second array would be 0.
    high = lax.reduce_precision(exact, exponent_bits=5, mantissa_bits=10)
    return [high.astype(jnp.float16), (exact - high).astype(jnp.float16)], 1.0


def tokens_per_smem_row(cache_dtype: jax.typing.DTypeLike, head_dim: int) -> int:
    """Number of tokens in one 128-byte row of a tile in shared memory.

    It exceeds 1 for 8-bit heads narrower than 128. With one token per row, TMA would copy rows of 64 bytes, at three
    quarters of the bandwidth.
    """
    return max(1, ROW_BYTES // head_dim) if jnp.dtype(cache_dtype) in QMAX else 1


# --- in the kernel


def clear_tokens(tile: Ref, channels: int, live_mask: jax.Array, layout: RegisterLayout) -> None:
    """Zero the tokens of an 8-bit tile in shared memory that no query sees.

    Args:
      tile: [tokens, channels], or several tokens per row.
      live_mask: bool [tokens] with layout `layout.per_row`; tokens where it is false become 0.
    """
    if interpreted():
        numbers = jnp.where(live_mask[:, None], tile[...].reshape(-1, channels), jnp.zeros((), tile.dtype))
        tile[...] = numbers.reshape(tile.shape)
        return

    @plgpu.inline_mgpu(arg_types=(QUANTIZED_REF, layout.per_row))
    def write_zeros(_: Any, tile: ir.Value, live_mask: Any) -> None:
        warp, lane = warp_and_lane()

        def chunks(register: int) -> Iterator[ir.Value]:
            first = layout.first_row(register)
            token = plus(plus(times(warp, layout.rows // 4), shifted(lane, 2)), mgpu.c(first, i32()))
            at = ChunkPointers(tile, channels, token, masked(lane, 3))
            return (at.pointer(0, chunk) for chunk in range(0, channels // 16, 4))

        register_tiles.store_zeros_unless(live_mask, chunks)

    write_zeros(tile, jnp.where(live_mask, 1, 0))


def dequantize_tile(tile: Ref, to: Ref) -> None:
    """Convert an 8-bit tile [tokens, channels] to a float16 tile for tensor cores, both in shared memory.

    A thread converts chunks of 16 channels. Adjacent threads process adjacent tokens. Because of the swizzle, the
    chunks of eight adjacent threads are then in different banks, in both tiles. In a tile of `PIECE_TOKENS` tokens, 16
    lanes of a warp process the first half of the channels, and 16 lanes the second half.
    """
    tokens, channels = to.shape
    if interpreted():
        to[...] = tile[...].reshape(to.shape).astype(to.dtype)
        return
    assembly = conversion(tile.dtype, (0, 1, 2, 3))

    @plgpu.inline_mgpu(arg_types=(QUANTIZED_REF, register_tiles.operand_ref()))
    def convert(_: Any, tile: ir.Value, to: ir.Value) -> None:
        warp, lane = warp_and_lane()
        if tokens == PIECE_TOKENS:
            token, side, chunk = masked(lane, tokens - 1), shifted(lane, 4), warp
            columns = channels // ROW_BYTES // 2  # blocks of 128 bytes of half of the channels, in the 8-bit tile
            source = ChunkPointers(tile, channels, token, chunk, times(side, columns))
            target = ChunkPointers(to, 2 * channels, token, times(chunk, 2), times(side, 2 * columns))
            steps = itertools.product((0,), range(0, channels // 32, 4))
        else:
            token, chunk = plus(times(masked(warp, 1), 32), lane), shifted(warp, 1)
            source = ChunkPointers(tile, channels, token, chunk)
            target = ChunkPointers(to, 2 * channels, token, times(chunk, 2))
            steps = itertools.product(range(0, tokens, 64), range(0, channels // 16, 2))
        four = ir.VectorType.get((4,), i32())
        for block, chunks in steps:
            words = llvm.load(four, source.pointer(block, chunks), alignment=16)
            for half in range(2):
                pairs = [
                    pair
                    for i in (2 * half, 2 * half + 1)
                    for pair in converted(vector.extract(words, [], [i]), assembly)
                ]
                llvm.store(vector.from_elements(four, pairs), target.pointer(block, 2 * chunks + half), alignment=16)

    convert(tile, to)


def load_per_token(ref: Ref, begin: Ref | None, groups: int, group_tokens: int, layout: RegisterLayout) -> jax.Array:
    """Load for each token the value of its token group, such as the scale: float32 [tokens], layout `layout.per_row`.

    This is an indexed load, which Pallas does not have.

    Args:
      ref: float32 [n, at least groups] in shared memory; row i has the values of the i-th page of the tile.
      begin: int32 [n], index of the first value in each row of `ref`; None for 0. The entry of an absent page may be
        uninitialised; the result for its tokens is then arbitrary.
      groups: token groups per page.
      group_tokens: tokens of a token group.
    """
    tokens, limit = ref.shape[0] * groups * group_tokens, ref.shape[1] - groups
    if interpreted():
        first = jnp.zeros((ref.shape[0], 1), jnp.int32) if begin is None else begin[...][:, None]
        values = jnp.take_along_axis(ref[...], first + jnp.arange(groups, dtype=jnp.int32)[None], axis=1)
        return jnp.repeat(values, group_tokens, axis=1).reshape(tokens)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * (1 if begin is None else 2),
        return_type=plgpu.ShapeDtypeStruct((tokens,), jnp.float32, layout=layout.per_row),
    )
    def load(_: Any, ref: ir.Value, *begin: ir.Value) -> Any:
        index = ir.IndexType.get()
        size, segment = mgpu.c(group_tokens, index), mgpu.c(groups * group_tokens, index)
        rows = layout.per_row.to_mgpu()
        registers = np.empty(rows.registers_shape((tokens,)), dtype=object)
        for i, (token,) in zip(np.ndindex(registers.shape), rows.thread_idxs((tokens,)), strict=True):
            row, group = arith.divui(token, segment), arith.divui(arith.remui(token, segment), size)
            for first in begin:
                # The entry of an absent page was never written. The limit keeps the address in `ref`.
                start = arith.index_cast(index, memref.load(first, [row]))
                group = arith.addi(group, arith.minui(start, mgpu.c(limit, index)))
            value = memref.load(ref, [row, group])
            registers[i] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=rows, _is_signed=None)

    return load(ref) if begin is None else load(ref, begin)


def load_group_scales(
    ref: Ref, page_tokens: int, groups: int, tokens: int, layout: RegisterLayout
) -> tuple[jax.Array, ...]:
    """Load the scales of a tile of 8-bit latents: for each channel group float32 [tokens], layout `layout.per_row`.

    Args:
      ref: float32 [pages, at least page_tokens · groups] in shared memory; the scales of a token are adjacent.
      page_tokens: tokens of a page.
      groups: channel groups of a latent.
      tokens: tokens of the tile.
    """
    if interpreted():
        scales = ref[...][:, : page_tokens * groups].reshape(tokens, groups)
        return tuple(scales[:, i] for i in range(groups))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=[plgpu.ShapeDtypeStruct((tokens,), jnp.float32, layout=layout.per_row)] * groups,
    )
    def load(_: Any, ref: ir.Value) -> Any:
        index, rows = ir.IndexType.get(), layout.per_row.to_mgpu()
        each = [np.empty(rows.registers_shape((tokens,)), dtype=object) for _ in range(groups)]
        for i, (token,) in zip(np.ndindex(each[0].shape), rows.thread_idxs((tokens,)), strict=True):
            page = arith.divui(token, mgpu.c(page_tokens, index))
            first = arith.muli(arith.remui(token, mgpu.c(page_tokens, index)), mgpu.c(groups, index))
            for group, registers in enumerate(each):
                value = memref.load(ref, [page, arith.addi(first, mgpu.c(group, index))])
                registers[i] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        return [mgpu.FragmentedArray(_registers=registers, _layout=rows, _is_signed=None) for registers in each]

    return tuple(load(ref))


def conversion(narrow: jax.typing.DTypeLike, order: Sequence[int]) -> str:
    """Return PTX that converts the four 8-bit numbers of the 32-bit operand $2 to float16: two in $0 and two in $1.

    Args:
      narrow: int8 or float8_e4m3fn.
      order: index of the byte of $2 for each of the four results.
    """
    return (INT8_TO_F16 if jnp.dtype(narrow) == jnp.int8 else E4M3_TO_F16).format(*order)


def converted(word: ir.Value, assembly: str) -> list[ir.Value]:
    """Emit the PTX of `conversion` for a 32-bit word. Return two 32-bit words with two float16 numbers each."""
    pairs: Any = llvm.inline_asm(llvm.StructType.get_literal([i32()] * 2), [word], assembly, "=r,=r,r")
    return [llvm.extractvalue(i32(), pairs, [i]) for i in range(2)]


# --- shared memory as threads read it


class ChunkPointers:
    """Pointers to chunks of a swizzled tile, at compile-time distances from a thread's first chunk.

    Args:
      tile: memref [rows / 8, row bytes / w, 8, w bytes] with swizzle width w, 128 or 64 bytes.
      token_bytes: bytes of a token.
      token, chunk: token of the thread's first chunk, and index of this chunk in the token, less than 8.
      column: if given, number of blocks of 128 bytes before the block in which `chunk` is counted.
    """

    def __init__(
        self, tile: ir.Value, token_bytes: int, token: ir.Value, chunk: ir.Value, column: ir.Value | None = None
    ) -> None:
        memref_type = ir.MemRefType(tile.type)
        strides, _ = memref_type.get_strides_and_offset()
        self._tile = tile
        self._row_tile, self._column = (
            stride * mgpu.utils.bitwidth(memref_type.element_type) // 8 for stride in strides[:2]
        )
        self._row_bytes = row_bytes = memref_type.shape[3] * mgpu.utils.bitwidth(memref_type.element_type) // 8
        self._tokens_in_row = tokens_in_row = max(1, row_bytes // token_bytes)
        row = token
        if tokens_in_row > 1:
            row = arith.divui(token, mgpu.c(tokens_in_row, i32()))
            beside = arith.remui(token, mgpu.c(tokens_in_row, i32()))
            chunk = plus(chunk, times(beside, token_bytes // 16))
        self._row = plus(times(shifted(row, 3), self._row_tile), times(masked(row, 7), row_bytes))
        if column is not None:
            self._row = plus(self._row, times(column, self._column))
        moved = masked(row, 7) if row_bytes == ROW_BYTES else masked(shifted(row, 1), 3)
        self._chunk = times(arith.xori(chunk, moved), 16)

    def pointer(self, tokens: int, chunks: int) -> ir.Value:
        """Pointer to the chunk that is `tokens` tokens and `chunks` chunks after the first chunk.

        Args:
          tokens: a multiple of 16.
          chunks: a number that has no bit in common with the index of the first chunk, so that their sum is their XOR.
        """
        column, chunk = divmod(chunks, self._row_bytes // 16)
        constant = tokens // self._tokens_in_row // 8 * self._row_tile + column * self._column
        offset = plus(self._row, arith.xori(self._chunk, mgpu.c(16 * chunk, i32())))
        pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(self._tile), [offset], i8())
        return mgpu.utils.getelementptr(pointer, [constant], i8())


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Index of a thread's warp in its warpgroup, and of its lane in the warp."""
    thread = mgpu.utils.thread_idx()
    return masked(shifted(thread, 5), 3), masked(thread, 31)


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i8() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def plus(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.addi(a, b)


def times(a: ir.Value, factor: int) -> ir.Value:
    return arith.muli(a, mgpu.c(factor, i32()))


def shifted(a: ir.Value, bits: int) -> ir.Value:
    return arith.shrui(a, mgpu.c(bits, i32()))


def masked(a: ir.Value, mask: int) -> ir.Value:
    return arith.andi(a, mgpu.c(mask, i32()))
