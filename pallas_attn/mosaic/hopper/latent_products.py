"""Matrix products of the decode kernel (`mosaic.decode`) with fp8 latents, for few query rows.

The products are S = K qᵀ [TOKENS, N] and O += Vᵀ P [L, N], where N is the number of query rows and K = V are the
latents of a tile of 64 tokens. Threads convert latents to float16 in registers, from which wgmma reads its left
operand.

A token has one scale for each channel group, which is `LATENT_GROUP` consecutive channels. In K qᵀ, the scale
multiplies the sum over the channels of the group. In Vᵀ P, the scale is multiplied into the probabilities, so there is
one array of probabilities per channel group. The conversion of a latent to float16 is therefore exact.

`add_groups` also multiplies wide 8-bit values that have no scale per channel group, with a single array of
probabilities.

The products are computed in blocks of 64 channels. Threads convert the next block while tensor cores multiply the
current block. Loads with `ldmatrix` permute channels; `as_keys` and `as_values` of `hopper.dequantize` define the
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_attn.mosaic.hopper import wgmma
from pallas_attn.mosaic.hopper.dequantize import as_keys, as_values, load_matrices
from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.dequantize import (
    QUANTIZED_REF,
    ChunkPointers,
    conversion,
    converted,
    masked,
    plus,
    shifted,
    times,
    warp_and_lane,
)
from pallas_attn.mosaic.primitives.register_tiles import operand_ref, over_tokens
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP

TOKENS = 64
"""Tokens of a tile (M of the product K qᵀ)."""

BLOCK = 64
"""Channels of a block (M of the product Vᵀ P)."""

MOST_AHEAD = 512 * 16
"""Maximum of L · N for which threads convert a block while the product of the previous block is in flight.

For larger L · N, there are not enough registers for two converted blocks. A block is then converted after the product
of the previous block has finished.
"""


def add_group_scores(total: jax.Array, latent: Ref, q: Ref, scales: Sequence[jax.Array]) -> jax.Array:
    """Return total + sum over groups g of scale_g · latent_g @ q_gᵀ, float32 [TOKENS, N].

    Args:
      total: float32 [TOKENS, N] with layout `wgmma.UNPAIRED`; may be the result of a product in flight.
      latent: e4m3 tile [TOKENS, L] in shared memory.
      q: float16 [N, L] in shared memory, columns in the order of `as_keys`.
      scales: for each channel group, float32 [TOKENS].
    """
    channels = latent.shape[1]
    if interpreted():
        left, right = as_keys(latent[...].astype(jnp.float16)), q[...].T
        groups = [slice(first, first + LATENT_GROUP) for first in range(0, channels, LATENT_GROUP)]
        products = [jnp.dot(left[:, group], right[group], preferred_element_type=jnp.float32) for group in groups]
        scaled = [over_tokens(scale, x.shape) * x for scale, x in zip(scales, products, strict=True)]
        return sum(scaled, start=total)
    result = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(
        arg_types=(wgmma.UNPAIRED, QUANTIZED_REF, operand_ref(), *[PER_TOKEN] * len(scales)), return_type=result
    )
    def add(_: Any, total: Any, latent: ir.Value, q: ir.Value, *scales: Any) -> Any:
        warp, lane = warp_and_lane()
        token = plus(times(warp, 16), masked(lane, 15))
        chunks = ChunkPointers(latent, channels, token, shifted(lane, 4))
        right, ahead = wgmma.RightOperand(q), channels * total.shape[1] <= MOST_AHEAD
        product: list[ir.Value] = []
        left = _keys(chunks, 0)
        for first in range(0, channels, BLOCK):
            group, begun = divmod(first, LATENT_GROUP)
            nvvm.wgmma_fence_aligned()
            product = right.add(product if begun else [], left)
            wgmma.commit()
            if ahead and first + BLOCK < channels:
                left = _keys(chunks, first + BLOCK)
            wgmma.assembly("wgmma.wait_group.sync.aligned 0;")
            if not ahead and first + BLOCK < channels:
                left = _keys(chunks, first + BLOCK)
            if first == 0:
                total = fragmented_array.optimization_barrier(total)
            if begun:
                scale = scales[group].to_layout(wgmma.ACCUMULATOR.reduce((1,)))
                done = fragmented_array.optimization_barrier(wgmma.fragments(product, result.shape))
                total += done * scale.broadcast_in_dim(result.shape, (0,), wgmma.ACCUMULATOR)
        return total.to_layout(fragmented_array.WGMMA_LAYOUT)

    return add(total, latent, q, *scales)


def add_groups(total: jax.Array, latent: Ref, ps: Sequence[Ref]) -> jax.Array:
    """Return total + latentᵀ @ p, float32 [L, N]. Each channel group uses a separate p.

    All threads of the warpgroup synchronise at the end, so the latents may be overwritten afterwards.

    Args:
      total: [L, N], rows in the order of `as_values`.
      latent: 8-bit tile [TOKENS, L] in shared memory.
      ps: for each of one or several channel groups of equal width, float16 [TOKENS, N], a transposed view of shared
        memory [N, TOKENS].
    """
    channels, columns = total.shape
    group = channels // len(ps)
    if interpreted():
        left = as_values(latent[...].astype(jnp.float16).T).reshape(len(ps), group, TOKENS)
        products = [jnp.dot(left[i], p[...], preferred_element_type=jnp.float32) for i, p in enumerate(ps)]
        plgpu.commit_smem()
        return total + jnp.concatenate(products)
    result = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=TILE)
    assembly = conversion(latent.dtype, (0, 2, 1, 3))

    @plgpu.inline_mgpu(arg_types=(QUANTIZED_REF, TILE, *[operand_ref()] * len(ps)), return_type=result)
    def add(_: Any, latent: ir.Value, total: Any, *ps: ir.Value) -> Any:
        warp, lane = warp_and_lane()
        chunks = ChunkPointers(latent, channels, lane, warp)
        total = fragmented_array.optimization_barrier(total.to_layout(wgmma.ACCUMULATOR))
        blocks = total.registers.reshape(channels // BLOCK, -1)
        sums, ahead = [], channels * columns <= MOST_AHEAD
        left = _values(chunks, 0, assembly)
        for block, registers in enumerate(blocks):
            nvvm.wgmma_fence_aligned()
            right = wgmma.RightOperand(ps[block * BLOCK // group])
            sums += right.add(list(registers), left)
            wgmma.commit()
            if ahead and block + 1 < len(blocks):
                left = _values(chunks, (block + 1) * BLOCK, assembly)
            wgmma.assembly("wgmma.wait_group.sync.aligned 0;")
            if not ahead and block + 1 < len(blocks):
                left = _values(chunks, (block + 1) * BLOCK, assembly)
        mgpu.commit_shared()
        done = fragmented_array.optimization_barrier(wgmma.fragments(sums, (channels, columns)))
        return done.to_layout(fragmented_array.WGMMA_LAYOUT)

    return add(latent, total, *(p.transpose((1, 0)) for p in ps))


def store_probs(ps: Sequence[jax.Array], to: Sequence[Ref]) -> None:
    """Store probabilities [TOKENS, N] to shared memory and make them visible to tensor cores.

    The caller guarantees that nothing reads the previous contents any more. One synchronization after all stores then
    suffices. Pallas's own stores would synchronise the threads before and after each array.

    Args:
      ps, to: for each channel group, the array, and its place in shared memory.
    """
    if interpreted():
        for p, ref in zip(ps, to, strict=True):
            ref[...] = p
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu(arg_types=(*[TILE] * len(ps), *[operand_ref()] * len(ps)))
    def write(_: Any, *given: Any) -> None:
        for p, ref in zip(given[: len(ps)], given[len(ps) :], strict=True):
            p.store_tiled(mgpu.memref_transpose(ref, (1, 0, 3, 2)), swizzle=128)
        mgpu.commit_shared()

    write(*ps, *(ref.transpose((1, 0)) for ref in to))


def _keys(chunks: ChunkPointers, first: int) -> list[list[ir.Value]]:
    """Load and convert a block of keys. Return the left-operand registers of its wgmma instructions.

    Each instruction multiplies 64 tokens by 16 channels. One `ldmatrix` loads four matrices of 8 tokens by one 16-byte
    chunk of channels. For each warp these are 16 tokens of two adjacent chunks.

    Args:
      chunks: pointers to the chunks of the latents.
      first: first channel of the block.
    """
    assembly = conversion(LATENT_8BIT, (0, 1, 2, 3))
    steps = []
    for chunk in range(0, BLOCK // 16, 2):
        words = [converted(word, assembly) for word in load_matrices(chunks.pointer(0, first // 16 + chunk), rows=True)]
        steps += [[top[0], bottom[0], top[1], bottom[1]] for top, bottom in (words[:2], words[2:])]
    return steps


def _values(chunks: ChunkPointers, first: int, assembly: str) -> list[list[ir.Value]]:
    """Load, transpose and convert a block of values. Return the left-operand registers of its wgmma instructions.

    Each instruction multiplies 64 channels by 16 tokens. One transposed `ldmatrix` loads four matrices of 8 tokens by
    one 16-byte chunk of channels. For each warp these are 32 tokens of one chunk.

    Args:
      chunks: pointers to the chunks of the latents.
      first: first channel of the block.
      assembly: PTX that converts four values, from `conversion`.
    """
    steps = []
    for tokens in range(0, TOKENS, 32):
        pointer = chunks.pointer(tokens, first // 16)
        eights = [converted(word, assembly) for word in load_matrices(pointer, rows=False)]
        steps += [[*eights[i], *eights[i + 1]] for i in (0, 2)]
    return steps
