"""Latents in the form that caches store: unscaled, or in 8 bits with a scale per group of 128 columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.portable.pool_access import take
from pallas_attn.portable.quantise import amax_scale, dequantise, quantise
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP, PLAIN_DTYPES, PagedLatent


def stored_latents(latent: Float[Array, "*rows LR"], cache: PagedLatent) -> PagedLatent:
    """Return latents [..., L + R] as a `PagedLatent` in the form of `cache`, with the leading axes of `latent`.

    For a quantised cache, the scale of a group of a token is amax / 448, or 1 if this is below the smallest normal
    float32. Rotated keys are cast to the dtype of `cache.rope`.
    """
    if cache.rope is None:
        return PagedLatent(latent.astype(cache.pages.dtype))
    latent_dim = cache.pages.shape[-1]
    groups = (*latent.shape[:-1], latent_dim // LATENT_GROUP, LATENT_GROUP)
    values = latent[..., :latent_dim].astype(jnp.float32).reshape(groups)
    scale = amax_scale(jnp.max(jnp.abs(values), axis=-1), LATENT_8BIT)
    quantised = quantise(values, scale[..., None], LATENT_8BIT).reshape(*latent.shape[:-1], latent_dim)
    return PagedLatent(quantised, scale, latent[..., latent_dim:].astype(cache.rope.dtype))


def meant_latents(stored: PagedLatent, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "*rows LR"]:
    """Return the latents [..., L + R] that arrays of a cache represent.

    Quantised latents are computed in float32 and then cast to `dtype`. 8-bit latents without a scale are only cast.
    """
    if stored.scale is None or stored.rope is None:
        return stored.pages if stored.pages.dtype in PLAIN_DTYPES else stored.pages.astype(dtype)
    values = stored.pages.reshape(*stored.scale.shape, LATENT_GROUP)
    latent = dequantise(values, stored.scale[..., None]).reshape(stored.pages.shape)
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
