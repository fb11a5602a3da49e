"""`write_latent` on any device: one scatter per array of the cache, in place if the cache is donated."""

from __future__ import annotations

import jax

from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.portable.latents import stored_latents
from pallas_attn.portable.pool_access import page_or_none, put
from pallas_attn.types import PagedLatent


def write_latent(call: WriteLatentCall) -> PagedLatent:
    num_pages, page_size, _ = call.cache.pages.shape
    page, offset = call.slots // page_size, call.slots % page_size
    page = page_or_none(page, (page >= 0) & (page < num_pages), num_pages)  # index -1 would wrap around
    stored = stored_latents(call.latent, call.cache)
    return jax.tree.map(lambda pool, values: put(pool, (page, offset), values), call.cache, stored)
