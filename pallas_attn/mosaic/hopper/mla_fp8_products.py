"""Matrix products with fp8 latents for the two-warpgroup MLA kernel (`mla_fp8`).

The products are S = C Qᵀ [TOKENS, N] and O += Cᵀ P [channels, N] for a tile C of 64 cached latents and N query rows (a
query row is one head of one query token). Latents are e4m3 in shared memory. Threads convert them to float16 in
registers, from which wgmma reads its left operand. `ldmatrix` permutes channels; `as_keys` and `as_values` of
`hopper.dequantize` define the order.

A token has one scale s_g for each channel group g, which is `LATENT_GROUP` consecutive channels. C_g and q_g are the
columns of group g, without scale. R and q_rope are the rotated columns:

    S = (... ((R q_ropeᵀ / s_0 + C_0 q_0ᵀ) s_0 / s_1 + C_1 q_1ᵀ) s_1 / s_2 + ... + C_n q_nᵀ) s_n
    O_g += (C_g s_g / s)ᵀ (P s)

Scores: one accumulator is multiplied by a ratio of scales before each group is added, so latents are multiplied
  exactly.
Values: s is the token's largest scale. The product C_g s_g / s is rounded to float16 and cannot overflow, because s_g /
  s
is at most 1. Products that round to 0 are negligible compared with the group that has scale s. The calling kernel
multiplies P by s, through the exponent.

With scales that are powers of two for groups of 64 channels (DeepSeek-V4), the calling kernel stores the ratios s_g / s
in the tile. Latents are multiplied by the ratios for both products. This is exact unless the result has bits below
2^-24. The scores then need no steps between groups. The rotated columns are values, too:

    S = (R q_ropeᵀ / s + sum over groups of (C_g s_g / s) q_gᵀ) s
    O_R += Rᵀ P                                  R and P in bfloat16

A product is computed in pieces of two wgmma instructions: 64 tokens by 32 channels for scores, 64 channels by 32 tokens
for values. Threads convert the next piece while tensor cores multiply the current piece. In interpret mode, products
are not split into pieces.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_attn.mosaic.hopper import wgmma
from pallas_attn.mosaic.hopper.dequantize import as_keys, as_values, from_lane, load_matrices
from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.dequantize import (
    SMALLEST_SCALE,
    ChunkPointers,
    conversion,
    converted,
    i8,
    i32,
    masked,
    plus,
    quantized_ref,
    shifted,
    times,
)
from pallas_attn.mosaic.primitives.register_tiles import ROW_BYTES, operand_ref, over_tokens, swizzle_bytes
from pallas_attn.portable.quantise import QUERY_SCALE, float16_queries
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP

TOKENS = 64
"""Number of tokens in a tile."""

PIECE = 32
"""Number of channels (scores) or tokens (values) in a piece: the sum of K of its two wgmma instructions."""

BLOCK = 64
"""Number of channels in a block of O: M of a wgmma instruction."""

FEW_COLUMNS = 32
"""Maximum N for which there are enough registers to have the products of four pieces in flight; two above it."""


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Return the index of the thread's warp in the warpgroup, and of its lane in the warp.

    The index is read by inline assembly with side effects. The compiler must then compute the addresses that depend on
    it anew for each tile, which saves registers.
    """
    thread: Any = llvm.inline_asm(i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)
    return masked(shifted(thread, 5), 3), masked(thread, 31)


# --- products


def convert_queries(q: Ref) -> None:
    """Convert bfloat16 queries [N, columns] in shared memory to float16, in place.

    Queries are multiplied by QUERY_SCALE, and columns are permuted by `as_keys`. The threads do not synchronise: call
    `plgpu.commit_smem` before the queries are multiplied.
    """
    rows, columns = q.shape
    if interpreted():
        converted_q = as_keys(float16_queries(q[...])[0])
        q[...] = lax.bitcast_convert_type(converted_q, q.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(operand_ref(),))
    def convert(_: Any, q: ir.Value) -> None:
        warp, lane = warp_and_lane()
        thread, in_row = plus(times(warp, 32), lane), columns // 16
        (row_tile, column_tile, *_), _ = ir.MemRefType(q.type).get_strides_and_offset()
        four = ir.VectorType.get((4,), i32())
        base = mgpu.utils.memref_ptr(q)
        for first in range(0, rows * in_row, 128):
            index = plus(thread, mgpu.c(first, i32()))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, index, mgpu.c(rows * in_row, i32()))):
                row, group = (f(index, mgpu.c(in_row, i32())) for f in (arith.divui, arith.remui))
                begin = plus(times(shifted(row, 3), 2 * row_tile), times(shifted(group, 2), 2 * column_tile))
                begin = plus(begin, times(masked(row, 7), ROW_BYTES))
                chunk, pointers = times(masked(group, 3), 2), []
                for i in range(2):
                    at = times(arith.xori(plus(chunk, mgpu.c(i, i32())), masked(row, 7)), 16)
                    pointers.append(mgpu.utils.getelementptr(base, [plus(begin, at)], i8()))
                words = [llvm.load(four, pointer, alignment=16) for pointer in pointers]
                pairs = [_float16_query(vector.extract(word, [], [i])) for word in words for i in range(4)]
                for pointer, ordered in zip(pointers, (pairs[::2], pairs[1::2]), strict=True):
                    llvm.store(vector.from_elements(four, ordered), pointer, alignment=16)

    convert(q)


def _float16_query(pair: ir.Value) -> ir.Value:
    """Convert a 32-bit word with two bfloat16 queries to a word with two float16 queries times QUERY_SCALE."""
    converted_pair: Any = llvm.inline_asm(i32(), [pair], BF16_TO_F16_QUERIES, "=r,r")
    return converted_pair


BF16_TO_F16_QUERIES = """
{
.reg .b32 low, high;
.reg .f32 a, b, scale, most, least;
shl.b32 low, $1, 16;
and.b32 high, $1, 0xffff0000;
mov.b32 a, low;
mov.b32 b, high;
mov.f32 scale, 0f3D800000;
mov.f32 most, 0f477FE000;
mov.f32 least, 0fC77FE000;
mul.f32 a, a, scale;
mul.f32 b, b, scale;
min.NaN.f32 a, a, most;
min.NaN.f32 b, b, most;
max.NaN.f32 a, a, least;
max.NaN.f32 b, b, least;
cvt.rn.f16x2.f32 $0, b, a;
}
"""
"""PTX that converts the two bfloat16 numbers in $1: multiply by QUERY_SCALE = 2**-4, clamp to [-65504, 65504], the
range of float16, and convert. NaN stays NaN.
"""


def add_scores(
    rotated: jax.Array, latent: Ref, qs: Sequence[Ref], scales: Ref, page_tokens: int, ratios: Ref | None = None
) -> jax.Array:
    """Return the scores S, divided by the scale of each token's last channel group, or with `ratios` by the token's
    largest scale: float32 [TOKENS, N].

    The scores contain the factor QUERY_SCALE.

    Args:
      rotated: float32 [TOKENS, N] with layout `wgmma.UNPAIRED`, the product R q_ropeᵀ without QUERY_SCALE. It may be
        the result of a product in flight.
      latent: e4m3 tile [TOKENS, L] in shared memory.
      qs: queries [N, columns] after `convert_queries`; the arrays are consecutive ranges of the L columns.
      scales: float32 [TOKENS / page_tokens, at least page_tokens · groups] in shared memory; the scales of a token are
        adjacent. With `ratios`, there is one scale per token, the largest. Scales below SMALLEST_SCALE count as
        SMALLEST_SCALE.
      page_tokens: number of tokens whose scales are in one row of `scales`.
      ratios: float16 [channel groups, TOKENS] in shared memory, each scale divided by the token's largest scale; None
        if `scales` has all scales.
    """
    channels, shape = latent.shape[1], rotated.shape
    begins = list(itertools.accumulate((q.shape[1] for q in qs), initial=0))
    width = LATENT_GROUP if ratios is None else channels  # columns per scale of `scales`
    group_width = width if ratios is None else channels // ratios.shape[0]
    groups, more = channels // width, () if ratios is None else (ratios,)
    if interpreted():
        loaded = scales[...][:, : page_tokens * groups].reshape(TOKENS, groups)
        each = jnp.maximum(loaded.T, SMALLEST_SCALE)
        factors = [QUERY_SCALE / each[0], *(before / after for before, after in itertools.pairwise(each))]
        left = latent[...].astype(jnp.float16) if ratios is None else _times_ratios(latent, ratios)
        left, total = as_keys(left), rotated
        right = jnp.concatenate([lax.bitcast_convert_type(q[...], jnp.float16) for q in qs], axis=1).T
        for i, factor in enumerate(factors):
            group = slice(i * width, (i + 1) * width)
            product = jnp.dot(left[:, group], right[group], preferred_element_type=jnp.float32)
            total = total * over_tokens(factor, shape) + product
        plgpu.commit_smem()  # for the race detector: the reads of the tile precede later copies to its memory
        return total

    @plgpu.inline_mgpu(
        arg_types=(
            *(wgmma.UNPAIRED, quantized_ref(swizzle_bytes(channels)), plgpu.RefType()),
            *[operand_ref()] * len(qs),
            *[plgpu.RefType()] * len(more),
        ),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE),
    )
    def add(_: Any, total: Any, latent: ir.Value, scales: ir.Value, *given: ir.Value) -> Any:
        qs, ratios = given[: len(begins) - 1], given[len(begins) - 1 :]
        warp, lane = warp_and_lane()
        token = plus(times(warp, 16), masked(lane, 15))
        chunks = ChunkPointers(latent, channels, token, shifted(lane, 4))
        rights = iter(qs)
        row = plus(times(warp, 16), shifted(lane, 2))
        own = _scales_of(scales, row, page_tokens, groups)
        under_way = _pieces_under_way(shape[1])
        before: list[ir.Value] = [mgpu.c(QUERY_SCALE, ir.F32Type.get())] * 2
        factors_of = functools.cache(lambda group: _ratio_pairs(ratios[0], group, row) if ratios else None)

        def load(first: int) -> tuple[list[ir.Value], list[ir.Value] | None]:
            return _load(chunks.pointer(0, first // 16), rows=True), factors_of(first // group_width)

        words = [load(first) for first in (0, PIECE)]
        left = _keys(*words.pop(0))
        right, sums = wgmma.RightOperand(next(rights), dtype="f16"), list[ir.Value]()
        for first in range(0, channels, PIECE):
            if first in begins[1:]:
                right = wgmma.RightOperand(next(rights), dtype="f16")
            _await(under_way - 1 if first % width else 0)
            if first % width == 0:
                total = fragmented_array.optimization_barrier(total)
                after = [_scale(own, 8 * i * groups + first // width) for i in range(2)]
                factors = [_quotient(a, b) for a, b in zip(before, after, strict=True)]
                before = after
                sums = [
                    arith.mulf(register, vector.broadcast(register.type, factors[i // 2 % 2]))
                    for i, register in enumerate(total.registers.flat)
                ]
            nvvm.wgmma_fence_aligned()
            sums = right.add(sums, left)
            wgmma.commit()
            if first + 2 * PIECE < channels:
                words.append(load(first + 2 * PIECE))
            if first + PIECE < channels:
                left = _keys(*words.pop(0))
            total = wgmma.fragments(sums, shape)
        _await(0)
        return fragmented_array.optimization_barrier(total).to_layout(fragmented_array.WGMMA_LAYOUT)

    return add(rotated, latent, scales, *qs, *more)


def _times_ratios(latent: Ref, ratios: Ref) -> jax.Array:
    """Multiply the latents of a tile by the ratios of their channel groups, in interpret mode: float16 [TOKENS, L]."""
    each = jnp.repeat(ratios[...].T.astype(jnp.float32), latent.shape[1] // ratios.shape[0], axis=1)
    return (latent[...].astype(jnp.float32) * each).astype(jnp.float16)


def add_values(
    total: jax.Array, latent: Ref, first: int, p: Ref, ratios: Ref, rotated: tuple[Ref, Ref] | None = None
) -> jax.Array:
    """Return total + Cᵀ P for K channels from `first` on, float32 [K, N].

    With `rotated`, `total` and the result have K + BLOCK rows: the last BLOCK rows are for the rotated columns.

    Args:
      total: float32 [K, N], rows in the order of `as_values`; rows of rotated columns in the order of the columns.
      latent: e4m3 tile [TOKENS, L] in shared memory.
      first: first channel, a multiple of 64.
      p: float16 [N, TOKENS] in shared memory, probabilities times the largest scale of each token.
      ratios: float16 [channel groups, TOKENS] in shared memory, each scale divided by the token's largest scale.
      rotated: bfloat16 rotated columns [TOKENS, BLOCK] and probabilities [N, TOKENS] without scale, in shared memory;
        None if the rotated columns are not values of this warpgroup.
    """
    (channels, columns), all_channels = total.shape, latent.shape[1]
    channels -= BLOCK if rotated else 0
    if interpreted():
        left = as_values(_times_ratios(latent, ratios)[:, first : first + channels].T)
        added = jnp.dot(left, p[...].T, preferred_element_type=jnp.float32)
        if rotated:
            of_rotated = jnp.dot(rotated[0][...].T, rotated[1][...].T, preferred_element_type=jnp.float32)
            added = jnp.concatenate([added, of_rotated])
        plgpu.commit_smem()  # for the race detector: the reads of the tile precede later copies to its memory
        return total + added

    group_width = all_channels // ratios.shape[0]
    more = rotated or ()

    @plgpu.inline_mgpu(
        arg_types=(
            *(quantized_ref(swizzle_bytes(all_channels)), TILE, operand_ref(), plgpu.RefType()),
            *[operand_ref()] * len(more),
        ),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=TILE),
    )
    def add(_: Any, latent: ir.Value, total: Any, p: ir.Value, ratios: ir.Value, *rotated: ir.Value) -> Any:
        warp, lane = warp_and_lane()
        chunks = ChunkPointers(latent, all_channels, lane, warp)
        own = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ratios), [times(masked(lane, 3), 4)], i8())
        total = fragmented_array.optimization_barrier(total.to_layout(wgmma.ACCUMULATOR))
        pieces = list(itertools.product(range(channels // BLOCK), range(0, TOKENS, PIECE)))
        blocks = [list(registers) for registers in total.registers.reshape(total.shape[0] // BLOCK, -1)]
        factors: dict[int, list[ir.Value]] = {}

        def load(i: int) -> list[ir.Value]:
            block, tokens = pieces[i]
            return _load(chunks.pointer(tokens, (first + block * BLOCK) // 16), rows=False)

        def piece(i: int, words: list[ir.Value]) -> list[list[ir.Value]]:
            block, tokens = pieces[i]
            group = (first + block * BLOCK) // group_width
            if group not in factors:
                factors.clear()
                factors[group] = [_load_word(own, 2 * (group * TOKENS + 8 * k)) for k in range(TOKENS // 8)]
            eights = factors[group][tokens // 8 : (tokens + PIECE) // 8]
            return _values(words, eights)

        under_way = _pieces_under_way(columns)
        if rotated:
            nvvm.wgmma_fence_aligned()
            blocks[-1] = wgmma.RightOperand(rotated[1]).add(blocks[-1], wgmma.transposed_left_steps(rotated[0]))
            wgmma.commit()
        words = [load(0), load(1)]
        left, right = piece(0, words.pop(0)), wgmma.RightOperand(p)
        for i, (block, tokens) in enumerate(pieces):
            if i and tokens == 0:
                right = wgmma.RightOperand(p)
            if i >= under_way:
                _await(under_way - 1)
            nvvm.wgmma_fence_aligned()
            blocks[block] = right.add(blocks[block], left)
            wgmma.commit()
            if i + 2 < len(pieces):
                words.append(load(i + 2))
            if i + 1 < len(pieces):
                left = piece(i + 1, words.pop(0))
        _await(0)
        done = wgmma.fragments([register for block in blocks for register in block], total.shape)
        return fragmented_array.optimization_barrier(done).to_layout(fragmented_array.WGMMA_LAYOUT)

    return add(latent, total, p, ratios, *more)


def _pieces_under_way(columns: int) -> int:
    """Maximum number of pieces whose products are in flight while threads convert the next piece.

    A piece takes 8 registers per thread until its product has finished.

    Args:
      columns: N.
    """
    return 2 if columns > FEW_COLUMNS else 4


def _await(under_way: int) -> None:
    wgmma.assembly(f"wgmma.wait_group.sync.aligned {under_way};")


def _load(pointer: ir.Value, *, rows: bool) -> list[ir.Value]:
    """Load a piece from shared memory as four 32-bit words per thread. `rows` is as in `load_matrices`.

    Callers load a piece two pieces before its product, because a load takes longer than a conversion.
    """
    return list(load_matrices(pointer, rows=rows))


def _keys(words: Sequence[ir.Value], factors: Sequence[ir.Value] | None = None) -> list[list[ir.Value]]:
    """Convert a piece of keys. Return the left-operand registers of two wgmma instructions, each 64 tokens by 16
    channels.

    Args:
      words: from `_load`.
      factors: from `_ratio_pairs`, factors of the latents; None for 1.
    """
    assembly = conversion(LATENT_8BIT, (0, 1, 2, 3))
    pairs = [converted(word, assembly) for word in words]
    if factors is not None:
        pairs = [[_multiplied(pair, factors[i % 2]) for pair in both] for i, both in enumerate(pairs)]
    return [[top[0], bottom[0], top[1], bottom[1]] for top, bottom in (pairs[:2], pairs[2:])]


def _values(words: Sequence[ir.Value], factors: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """Convert a piece of values and multiply it by ratios of scales. Return the left-operand registers of two wgmma
    instructions, each 64 channels by 16 tokens.

    Args:
      words: from `_load`.
      factors: one word for each eight tokens, with the float16 ratios of this thread's two tokens.
    """
    assembly = conversion(LATENT_8BIT, (0, 2, 1, 3))
    eights = [
        [_multiplied(pair, factor) for pair in converted(word, assembly)]
        for word, factor in zip(words, factors, strict=True)
    ]
    return [[*eights[i], *eights[i + 1]] for i in (0, 2)]


def _multiplied(pair: ir.Value, factor: ir.Value) -> ir.Value:
    product: Any = llvm.inline_asm(i32(), [pair, factor], "mul.rn.f16x2 $0, $1, $2;", "=r,r,r")
    return product


def _ratio_pairs(ratios: ir.Value, group: int, row: ir.Value) -> list[ir.Value]:
    """Load the ratio of a channel group for the tokens `row` and `row` + 8. Return words with the ratio twice each.

    Args:
      ratios: float16 [channel groups, TOKENS] in shared memory.
    """
    number = ir.F16Type.get()
    own = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ratios), [row], number)
    pointers = [mgpu.utils.getelementptr(own, [group * TOKENS + 8 * i], number) for i in range(2)]
    loaded = [llvm.load(number, pointer, alignment=2) for pointer in pointers]
    return [mgpu.utils.bitcast(vector.broadcast(ir.VectorType.get((2,), number), x), i32()) for x in loaded]


def _scale(own: ir.Value, offset: int) -> ir.Value:
    """Load the scale at `own` + `offset` floats; at least SMALLEST_SCALE."""
    number = ir.F32Type.get()
    loaded = llvm.load(number, mgpu.utils.getelementptr(own, [offset], number), alignment=4)
    scale: Any = arith.maximumf(loaded, mgpu.c(SMALLEST_SCALE, number))
    return scale


def _quotient(a: ir.Value, b: ir.Value) -> ir.Value:
    quotient: Any = llvm.inline_asm(ir.F32Type.get(), [a, b], "div.approx.f32 $0, $1, $2;", "=f,f,f")
    return quotient


def _load_word(base: ir.Value, offset: int) -> ir.Value:
    pointer = mgpu.utils.getelementptr(base, [offset], i8())
    word: Any = llvm.load(i32(), pointer, alignment=4)
    return word


def clear_scales(scales: Ref, live_mask: jax.Array, page_tokens: int, latent_dim: int) -> None:
    """Set all scales of a token to 1 in shared memory where `live_mask` is false, because no query row sees the token.

    Args:
      scales, page_tokens: as in `add_scores`.
      live_mask: bool [TOKENS] with layout `PER_TOKEN`.
    """
    groups = latent_dim // LATENT_GROUP
    if interpreted():
        count = page_tokens * groups
        kept = jnp.where(live_mask[:, None], scales[...][:, :count].reshape(TOKENS, groups), 1.0)
        scales[:, pl.ds(0, count)] = kept.reshape(-1, count)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_TOKEN))
    def write_ones(_: Any, scales: ir.Value, live_mask: Any) -> None:
        warp, lane = warp_and_lane()
        row = plus(times(warp, 16), shifted(lane, 2))
        number, one = ir.F32Type.get(), mgpu.c(1.0, ir.F32Type.get())
        own = _scales_of(scales, row, page_tokens, groups)
        none: Any = mgpu.c(0, i32())
        for i, register in enumerate(live_mask.registers.flat):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, vector.extract(register, [], [0]), none)):
                for group in range(groups):
                    place = mgpu.utils.getelementptr(own, [8 * i * groups + group], number)
                    llvm.store(one, place, alignment=4)

    write_ones(scales, jnp.where(live_mask, 1, 0))


def _scales_of(scales: ir.Value, row: ir.Value, page_tokens: int, groups: int) -> ir.Value:
    """Return a pointer to the scales of token `row`. The scales of token `row` + 8 follow 8 · groups floats later.

    Args:
      scales, page_tokens: as in `add_scores`.
      groups: channel groups of a token.
    """
    in_page, page = masked(row, page_tokens - 1), shifted(row, page_tokens.bit_length() - 1)
    place = plus(times(in_page, groups), times(page, ir.MemRefType(scales.type).shape[1]))
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(scales), [place], ir.F32Type.get())


def token_index() -> jax.Array:
    """Return the index of each token of a tile, int32 [TOKENS] with layout `PER_TOKEN`.

    The compiler computes the index anew for each tile (`warp_and_lane`), which saves registers.
    """
    if interpreted():
        return jnp.arange(TOKENS, dtype=jnp.int32)

    @plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct((TOKENS,), jnp.int32, layout=PER_TOKEN))
    def index(_: Any) -> Any:
        warp, lane = warp_and_lane()
        first, layout = plus(times(warp, 16), shifted(lane, 2)), PER_TOKEN.to_mgpu()
        registers = np.empty(layout.registers_shape((TOKENS,)), dtype=object)
        for i in range(2):
            row = plus(first, mgpu.c(8 * i, i32()))
            registers.reshape(-1)[i] = vector.broadcast(ir.VectorType.get((1,), i32()), row)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return index()


# --- results


def ordered_as_values(total: jax.Array) -> jax.Array:
    """Reorder the last BLOCK rows of O [K, N] from the order of channels to the order of `as_values`."""
    first = total.shape[0] - BLOCK
    if interpreted():
        return jnp.concatenate([total[:first], as_values(total[first:])])

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=TILE))
    def exchange(_: Any, total: Any) -> Any:
        # A warp has 16 rows of each 64: lane group g of four lanes has the rows g (register half 0) and g + 8 (register
        # half 1). After the exchange, they are the channels 2g and 2g + 1. Channel c is in half c // 8 of group c % 8.
        _, lane = warp_and_lane()
        none: Any = mgpu.c(0, i32())
        is_upper = arith.cmpi(arith.CmpIPredicate.ne, masked(lane, 16), none)
        place = plus(times(masked(shifted(lane, 2), 3), 8), masked(lane, 3))
        registers = total.registers.reshape(total.shape[0] // BLOCK, total.shape[1] // 8, 2).copy()
        for j in range(total.shape[1] // 8):
            low, high = registers[-1, j]
            for half in range(2):
                source = plus(place, mgpu.c(4 * half, i32()))
                numbers = [
                    arith.select(is_upper, from_lane(high, i, source), from_lane(low, i, source)) for i in range(2)
                ]
                registers[-1, j, half] = vector.from_elements(low.type, numbers)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(total.registers.shape), _layout=total.layout, _is_signed=None
        )

    return exchange(total)


def store_heads(total: jax.Array, to: Ref) -> None:
    """Write O transposed to global memory.

    A thread holds two adjacent channels of a query row. Eight threads hold 16 adjacent channels and write 32 bytes of a
    16-bit output.

    Args:
      total: O [K, N], rows in the order of `as_values`.
      to: [N, K] in global memory, with channels in their usual order.
    """
    if interpreted():
        rows, columns = total.shape
        to[...] = total.reshape(rows // 16, 2, 8, columns).swapaxes(1, 2).reshape(rows, columns).T.astype(to.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def write(_: Any, total: Any, to: ir.Value) -> None:
        warp, lane = warp_and_lane()
        strides, _ = ir.MemRefType(to.type).get_strides_and_offset()
        own = plus(times(masked(lane, 3), 2 * strides[0]), plus(times(warp, 16), times(shifted(lane, 2), 2)))
        number = ir.MemRefType(to.type).element_type
        first = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(to), [own], number)
        for (block, j, c), pair in _channel_pairs(total):
            value = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), pair)
            if not isinstance(number, ir.F32Type):
                value = arith.truncf(ir.VectorType.get((2,), number), value)
            place = mgpu.utils.getelementptr(first, [(8 * j + c) * strides[0] + BLOCK * block], number)
            llvm.store(value, place, alignment=4)

    write(total, to)


def store_fragments(total: jax.Array, to: Ref) -> None:
    """Write O to a partial state in global memory, in the format in which `merge.store_fragments` writes an array [64,
    K] of query rows and channels. Query rows N to 63 are not written.

    Args:
      total: O [K, N], rows in the order of `as_values`.
      to: fragments of the partial state.
    """
    if interpreted():
        rows, columns = total.shape
        heads = total.reshape(rows // 16, 2, 8, columns).swapaxes(1, 2).reshape(rows, columns).T
        heads = jnp.pad(heads, ((0, 64 - columns), (0, 0)))
        to[...] = heads.reshape(64, rows // 8, 8).swapaxes(0, 1).reshape(to.shape)
        return

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def write(_: Any, total: Any, to: ir.Value) -> None:
        warp, lane = warp_and_lane()
        number = ir.F32Type.get()
        group = shifted(lane, 2)  # index of the thread's pair of channels among the 8 pairs of its warp
        fragment = plus(times(warp, 2), shifted(group, 2))
        thread = plus(times(masked(lane, 3), 8), masked(group, 3))
        own = plus(times(fragment, 512), times(thread, 4))
        first = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(to), [own], number)
        for (block, j, c), pair in _channel_pairs(total):
            offset = 8 * block * 512 + (32 * (j // 2) + 4 * c) * 4 + 2 * (j % 2)
            value = vector.from_elements(ir.VectorType.get((2,), number), pair)
            llvm.store(value, mgpu.utils.getelementptr(first, [offset], number), alignment=8)

    write(total, to)


def _channel_pairs(total: Any) -> list[tuple[tuple[int, int, int], list[ir.Value]]]:
    """Return the pairs of adjacent channels of O that a thread holds.

    Each pair comes with an index (block of 64 channels, block of 8 query rows, query row). The last is 0 or 1: of each
    block of 8 query rows, a thread holds two.
    """
    channels, columns = total.shape
    registers = total.registers.reshape(channels // BLOCK, columns // 8, 2)
    return [
        ((block, j, c), [vector.extract(registers[block, j, half], [], [c]) for half in range(2)])
        for block, j, c in np.ndindex(channels // BLOCK, columns // 8, 2)
    ]
