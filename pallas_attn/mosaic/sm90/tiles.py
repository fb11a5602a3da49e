"""Tiles of wgmma: their layouts in registers, and products of operands in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic import tiles
from pallas_attn.mosaic.basics import Ref, interpreted

TILE = tiles.BY_64.tile
"""Layout of a tile in the registers of a warpgroup."""

PER_TOKEN = tiles.BY_64.per_row
"""Layout of a value for each row of a tile."""


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


def token_iota(tokens: int) -> jax.Array:
    """Index of each row of a tile, int32."""
    return tiles.row_iota(tokens, tiles.BY_64)
