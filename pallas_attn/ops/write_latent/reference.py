"""Definition of `write_latent`: token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.portable.arguments import varying_like
from pallas_attn.portable.latents import stored_latents
from pallas_attn.types import PagedLatent


def write_latent(call: WriteLatentCall) -> PagedLatent:
    num_pages, page_size, _ = call.cache.pages.shape

    def write(cache: PagedLatent, token: tuple[Float[Array, "LR"], Int32[Array, ""]]):
        latent, slot = token
        page, offset = slot // page_size, slot % page_size

        def put(pool: Array, values: Array) -> Array:
            written = lax.dynamic_update_slice(pool, values[None, None], (page, offset, jnp.zeros_like(page)))
            return jnp.where((page >= 0) & (page < num_pages), written, pool)

        return jax.tree.map(put, cache, stored_latents(latent, cache)), None

    return lax.scan(write, varying_like(call.cache, call), (call.latent, call.slots))[0]
