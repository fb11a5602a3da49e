"""`write_latent` on any device: one scatter, in place where the cache is donated."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.types import PagedLatent


def write_latent(call: WriteLatentCall) -> PagedLatent:
    num_pages, page_size, _ = call.cache.pages.shape
    # .at[-1] would wrap; a page past the end is dropped.
    page = jnp.where(call.slots < 0, num_pages, call.slots // page_size)
    return PagedLatent(call.cache.pages.at[page, call.slots % page_size].set(call.latent, mode="drop"))
