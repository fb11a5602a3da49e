"""Index keys in the form that caches store: unscaled, or in 8 bits with a scale per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.portable.pool_access import take
from pallas_attn.portable.quantise import amax_scale, dequantise, quantise
from pallas_attn.types import LATENT_8BIT, PagedIndexKeys


def stored_index_keys(keys: Float[Array, "*rows Di"], index: PagedIndexKeys) -> PagedIndexKeys:
    """Return keys [..., Di] in the form that a cache stores: the arrays of the cache with other leading axes.

    The scale of an 8-bit token is amax / 448, or 1 if all values are zero.
    """
    if index.scale is None:
        return PagedIndexKeys(keys.astype(index.keys.dtype))
    values = keys.astype(jnp.float32)
    scale = amax_scale(jnp.max(jnp.abs(values), axis=-1, keepdims=True), LATENT_8BIT)
    return PagedIndexKeys(quantise(values, scale, LATENT_8BIT), scale)


def meant_index_keys(stored: PagedIndexKeys) -> Float[Array, "*rows Di"]:
    """Return the keys [..., Di] that arrays of a cache represent; 8-bit keys are returned in float32."""
    return stored.keys if stored.scale is None else dequantise(stored.keys, stored.scale)


def read_index_keys(index: PagedIndexKeys, *at: Int32[Array, "*#rows"]) -> Float[Array, "..."]:
    """Return the keys at indices of the pool, as `meant_index_keys` does. `at` are the indices of `take`."""
    return meant_index_keys(jax.tree.map(lambda part: take(part, *at), index))
