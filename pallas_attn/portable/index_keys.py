"""Index keys as caches hold them: as they are, or in 8 bits with a scale for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.portable.pool_access import take
from pallas_attn.portable.quantise import amax_scale, dequantise, quantise
from pallas_attn.types import LATENT_8BIT, PagedIndexKeys


def stored_index_keys(keys: Float[Array, "*rows Di"], index: PagedIndexKeys) -> PagedIndexKeys:
    """Keys [..., Di] as a cache stores them: its arrays with other leading axes. In 8 bits a token's scale is
    amax / 448, or 1 for zeros.
    """
    if index.scale is None:
        return PagedIndexKeys(keys.astype(index.keys.dtype))
    values = keys.astype(jnp.float32)
    scale = amax_scale(jnp.max(jnp.abs(values), axis=-1, keepdims=True), LATENT_8BIT)
    return PagedIndexKeys(quantise(values, scale, LATENT_8BIT), scale)


def meant_index_keys(stored: PagedIndexKeys) -> Float[Array, "*rows Di"]:
    """Keys [..., Di] that arrays of a cache stand for; those of 8 bits in float32."""
    return stored.keys if stored.scale is None else dequantise(stored.keys, stored.scale)


def read_index_keys(index: PagedIndexKeys, *at: Int32[Array, "*#rows"]) -> Float[Array, "..."]:
    """Keys at places of the pool, as `meant_index_keys` gives them; `at` as for `take`."""
    return meant_index_keys(jax.tree.map(lambda part: take(part, *at), index))
