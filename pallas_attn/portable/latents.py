"""Latents in the form that caches store: unscaled, or in 8 bits with a scale per group of 128 or 64 columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.portable.pool_access import take
from pallas_attn.portable.quantise import amax_scale, dequantise, divide, quantise
from pallas_attn.types import LATENT_8BIT, PLAIN_DTYPES, POWER_OF_TWO, QMAX, PagedLatent, latent_group


def stored_latents(latent: Float[Array, "*rows LR"], cache: PagedLatent) -> PagedLatent:
    """Return latents [..., L + R] as a `PagedLatent` in the form of `cache`, with the leading axes of `latent`.

    For a quantised cache, the scale of a group of a token is amax / 448, or 1 if this is below the smallest normal
    float32. A scale that is a power of two is the smallest one that is at least max(amax, 1e-4) / 448. Rotated keys are
    cast to the dtype of `cache.rope`.
    """
    if cache.rope is None or cache.scale is None:
        return PagedLatent(latent.astype(cache.pages.dtype))
    latent_dim = cache.pages.shape[-1]
    group = latent_group(cache.scale.dtype)
    values = latent[..., :latent_dim].astype(jnp.float32).reshape(*latent.shape[:-1], latent_dim // group, group)
    amax = jnp.max(jnp.abs(values), axis=-1)
    if cache.scale.dtype == POWER_OF_TWO:
        stored_scale = _power_of_two(divide(jnp.maximum(amax, 1e-4), jnp.full_like(amax, QMAX[LATENT_8BIT])))
        scale = _as_float32(stored_scale)
    else:
        stored_scale = scale = amax_scale(amax, LATENT_8BIT)
    quantised = quantise(values, scale[..., None], LATENT_8BIT).reshape(*latent.shape[:-1], latent_dim)
    return PagedLatent(quantised, stored_scale, latent[..., latent_dim:].astype(cache.rope.dtype))


def _power_of_two(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the smallest power of two that is at least x, for normal positive x; NaN for infinity and NaN."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent = jnp.minimum((bits + jnp.uint32(2**23 - 1)) >> jnp.uint32(23), jnp.uint32(255))
    return lax.bitcast_convert_type(exponent.astype(jnp.uint8), POWER_OF_TWO)


def _as_float32(scale: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return scales that are powers of two in float32, by their bits: not every backend can convert the dtype."""
    exponent = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    bits = jnp.where(exponent == 0, jnp.uint32(1 << 22), exponent << jnp.uint32(23))  # 2**-127 is subnormal
    return jnp.where(exponent == 255, jnp.nan, lax.bitcast_convert_type(bits, jnp.float32))


def meant_latents(stored: PagedLatent, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "*rows LR"]:
    """Return the latents [..., L + R] that arrays of a cache represent.

    Quantised latents are computed in float32 and then cast to `dtype`. 8-bit latents without a scale are only cast.
    """
    if stored.scale is None or stored.rope is None:
        return stored.pages if stored.pages.dtype in PLAIN_DTYPES else stored.pages.astype(dtype)
    group = latent_group(stored.scale.dtype)
    scale = _as_float32(stored.scale) if stored.scale.dtype == POWER_OF_TWO else stored.scale
    latent = dequantise(stored.pages.reshape(*stored.scale.shape, group), scale[..., None]).reshape(stored.pages.shape)
    return jnp.concatenate([latent.astype(dtype), stored.rope.astype(dtype)], axis=-1)


def read_latents(
    cache: PagedLatent, *index: Int32[Array, "*#rows"], dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Return the latents at indices of the pool, as `meant_latents` does. `index` are the indices of `take`."""
    return meant_latents(jax.tree.map(lambda part: take(part, *index), cache), dtype)


def as_read_back(latent: Float[Array, "*rows LR"], cache: PagedLatent) -> Float[Array, "*rows LR"]:
    """Return new latents with the values that a read from the cache will return, in their own dtype.

    With these values, attention does not depend on which tokens of a sequence are new and which are cached.
    """
    if not cache.is_quantised:
        return latent
    # Without the barrier, XLA removes a conversion to 8 bits and back on GPUs.
    return meant_latents(lax.optimization_barrier(stored_latents(latent, cache)), latent.dtype)
