"""Tiles of wgmma: how operands lie in shared memory and results in registers, products, and vectors beside a tile.

A tile of scores is [tokens, columns]: wgmma's M are tokens, its N the query rows of one KV head. A value per token
therefore varies along the rows of a tile and is spread over its columns, a value per query the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.basics import Ref, interpreted

TILE = plgpu.Layout.WGMMA

PER_TOKEN = plgpu.Layout.WGMMA.reduce(1)

PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)

"""How a tile, a value for each of its rows and a value for each of its columns lie in the registers of a warpgroup."""


def operand(shape: tuple[int, ...], dtype: Any, *, row_bytes: int = 128) -> Any:
    """Shared memory for tiles [..., rows, columns], swizzled as wgmma wants operands of 16 bits and as threads read
    values of 8 without conflicts.

    Args:
      row_bytes: 128, or 64 where rows of the tile, or those it is copied from, are not made of as many.
    """
    transforms = (
        plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(row_bytes),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def multiply(pairs: Sequence[tuple[Ref, Ref]]) -> jax.Array:
    """The sum of a @ bᵀ over pairs of a [M, K] and b [N, K] in shared memory, in float32."""

    def accumulate(total: Ref) -> jax.Array:
        for a, b in pairs:
            plgpu.wgmma(total, a, b.transpose((1, 0)))
        return total[...]

    (a, b), *_ = pairs
    return pl.run_scoped(accumulate, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def add_product(total: jax.Array, a: Ref | jax.Array, b: Ref) -> jax.Array:
    """total + a @ b in float32, in the registers of `total`, for a [M, K] in shared memory or registers and b [K, N] in
    shared memory.

    The interpreter has no accumulators that begin with a value, and no wgmma of registers.
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
    """A value per token, for each element of a tile."""
    return lax.broadcast_in_dim(per_token, shape, [0])


def over_columns(per_column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per column, for each element of a tile."""
    return lax.broadcast_in_dim(per_column, shape, [1])


def token_iota(tokens: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (tokens,), 0, layout=PER_TOKEN)


def column_iota(columns: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=PER_COLUMN)


def filled(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
