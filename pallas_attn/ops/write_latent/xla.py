"""`write_latent` on any device: one scatter, in place where the cache is donated."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.types import PagedLatent


def write_latent(cache: PagedLatent, latent: Float[Array, "T LR"], slots: Int32[Array, "T"]) -> PagedLatent:
    num_pages, page_size, _ = cache.pages.shape
    page = jnp.where(slots < 0, num_pages, slots // page_size)  # .at[-1] would wrap; one past the end is dropped
    return PagedLatent(cache.pages.at[page, slots % page_size].set(latent, mode="drop"))
