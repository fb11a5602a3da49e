"""Latents as caches hold them: as they are, or in 8 bits with a scale for each group of 128 columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.portable.pool_access import take
from pallas_attn.portable.quantise import amax_scale, dequantise, quantise
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP, PLAIN_DTYPES, PagedLatent


def stored_latents(latent: Float[Array, "*rows LR"], cache: PagedLatent) -> PagedLatent:
    """Latents [..., L + R] as a cache stores them: its arrays with other leading axes.

    A quantised cache gets scales amax / 448 of each group of a token, 1 for a group of zeros, and rotated keys cast to
    its dtype.
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
    """Latents [..., L + R] that arrays of a cache stand for; of a quantised one computed in float32, then cast to
    `dtype`. Those of 8 bits without a scale are cast alone.
    """
    if stored.scale is None or stored.rope is None:
        return stored.pages if stored.pages.dtype in PLAIN_DTYPES else stored.pages.astype(dtype)
    values = stored.pages.reshape(*stored.scale.shape, LATENT_GROUP)
    latent = dequantise(values, stored.scale[..., None]).reshape(stored.pages.shape)
    return jnp.concatenate([latent.astype(dtype), stored.rope.astype(dtype)], axis=-1)


def read_latents(
    cache: PagedLatent, *index: Int32[Array, "*#rows"], dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Latents at places of the pool, as `meant_latents` gives them; `index` as for `take`."""
    return meant_latents(jax.tree.map(lambda part: take(part, *index), cache), dtype)


def as_read_back(latent: Float[Array, "*rows LR"], cache: PagedLatent) -> Float[Array, "*rows LR"]:
    """New latents as they will be read from the cache, in their own dtype: rounded if it is quantised.

    So attention does not depend on which tokens of a sequence are new and which are cached.
    """
    if not cache.is_quantised:
        return latent
    # On GPUs, XLA takes a conversion to 8 bits and back for none.
    return meant_latents(lax.optimization_barrier(stored_latents(latent, cache)), latent.dtype)
