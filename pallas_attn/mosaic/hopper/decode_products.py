"""Tensor-core products of the decode kernel (`mosaic.decode`) with wgmma.

The products are S = K qᵀ [tokens, query_rows] and O += Vᵀ P [channels, query_rows]. For 16-bit caches, wgmma reads K
and V from the shared memory that TMA wrote. For 8-bit caches, threads convert K and V to float16 in registers, from
which wgmma reads its left operand.

The products need no scratch memory and no barriers. Each function returns after its wgmma instructions have finished.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.decode import DecodeTile
from pallas_attn.mosaic.hopper import dequantize, latent_products, wgmma
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.register_tiles import BY_64, RegisterLayout


@dataclasses.dataclass(frozen=True)
class WgmmaProducts:
    """`DecodeProducts` on Hopper. The methods are explained there. Results are in registers."""

    max_lookahead: ClassVar[int] = 2**15

    def scores_layout(self, tile: DecodeTile) -> RegisterLayout:
        return BY_64

    def values_layout(self, tile: DecodeTile) -> RegisterLayout:
        return BY_64

    def query_row_bytes(self, tile: DecodeTile, key_row_bytes: int) -> int:
        return key_row_bytes

    def probs_type(self, tile: DecodeTile) -> Any:
        groups = (tile.latent_groups,) if tile.latent_groups else ()
        shape = *groups, tile.packing.width, tile.tokens
        return register_tiles.operand(shape, tile.q_dtype, row_bytes=tile.row_bytes)

    def probs(self, tile: DecodeTile, p: Ref) -> list[Ref]:
        if not tile.latent_groups:
            return [p.transpose((1, 0))]
        zero = basics.opaque_zero()
        return [p.at[zero + i].transpose((1, 0)) for i in range(tile.latent_groups)]

    def scratch_types(self, tile: DecodeTile) -> Any:
        return ()

    def scores(
        self, tile: DecodeTile, own: Any, keys: list[Ref], queries: list[list[Ref]], scales: tuple[jax.Array, ...]
    ) -> jax.Array:
        if scales:
            (latent, rope), ((q_latent,), (q_rope,)) = keys, queries
            rotated = wgmma.start_scores([(rope, q_rope)], None, tile.key_row_bytes[1])
            return latent_products.add_group_scores(rotated, latent, q_latent, scales)
        if tile.scales is None:
            return multiply([(k, q) for k, parts in zip(keys, queries, strict=True) for q in parts])
        return dequantize.multiply_dequantized(keys[0], queries[0])

    def load_values(self, tile: DecodeTile, own: Any, v: Ref) -> Any:
        if _loads_in_blocks(tile):  # `add_groups` loads the values, because all of them would not fit in registers
            return v
        return v.transpose((1, 0)) if tile.scales is None else dequantize.load_transposed(v, tile.value_dim)

    def add_values(self, tile: DecodeTile, own: Any, acc: jax.Array, values: Any, ps: list[Ref]) -> jax.Array:
        return (
            latent_products.add_groups(acc, values, ps) if _loads_in_blocks(tile) else add_product(acc, values, ps[0])
        )

    def in_channel_order(self, tile: DecodeTile, acc: jax.Array) -> jax.Array:
        return dequantize.restore_channel_order(acc)

    def store_probs(self, tile: DecodeTile, ps: list[jax.Array], to: list[Ref]) -> None:
        if tile.latent_groups:
            latent_products.store_probs(ps, to)
            return
        to[0][...] = ps[0]
        plgpu.commit_smem()

    def capped(self, s: jax.Array, soft_cap: float) -> jax.Array:
        return wgmma.capped(s, 1.0, soft_cap)


def _loads_in_blocks(tile: DecodeTile) -> bool:
    """Return whether 8-bit values are converted in blocks of channels. A tile of wide values would take more than 64
    registers per thread.
    """
    return bool(tile.latent_groups) or (tile.scales is not None and tile.value_dim > 256)


def multiply(pairs: Sequence[tuple[Ref, Ref]]) -> jax.Array:
    """Compute the sum of a @ bᵀ over pairs of a [M, K] and b [N, K] in shared memory, in float32."""

    def accumulate(total: Ref) -> jax.Array:
        for a, b in pairs:
            plgpu.wgmma(total, a, b.transpose((1, 0)))
        return total[...]

    (a, b), *_ = pairs
    return pl.run_scoped(accumulate, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def add_product(total: jax.Array, a: Ref | jax.Array, b: Ref) -> jax.Array:
    """Compute total + a @ b.

    Interpreted kernels need other code, because the interpreter supports neither accumulators with an initial value nor
    left operands in registers.

    Args:
      total: float32 [M, N] in registers.
      a: [M, K] in shared memory or registers.
      b: [K, N] in shared memory.
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
