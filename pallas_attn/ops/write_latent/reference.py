"""What `write_latent` computes, one token after the other."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.portable.varying import varying_like
from pallas_attn.types import PagedLatent


def write_latent(call: WriteLatentCall) -> PagedLatent:
    num_pages, page_size, _ = call.cache.pages.shape

    def write(pages: Float[Array, "N ps LR"], token: tuple[Float[Array, "LR"], Int32[Array, ""]]):
        latent, slot = token
        page, offset = slot // page_size, slot % page_size
        written = lax.dynamic_update_slice(pages, latent[None, None], (page, offset, jnp.zeros_like(page)))
        return jnp.where((page >= 0) & (page < num_pages), written, pages), None

    return PagedLatent(lax.scan(write, varying_like(call.cache.pages, call), (call.latent, call.slots))[0])
