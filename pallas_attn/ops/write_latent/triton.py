"""`write_latent` in Triton, for cards from Ampere (sm80) on.

Latents of caches without scales are copied. For caches with scales, latents are quantised in groups of 128 columns, and
a second launch copies the rotated keys.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.triton import row_writes
from pallas_attn.types import PagedLatent


def write_latent(call: WriteLatentCall) -> PagedLatent:
    cache, latent, slots = call.cache, call.latent, call.slots
    if cache.pages.dtype == jnp.float8_e5m2:
        raise NotImplementedError(f"takes latents of 8 bits in float8_e4m3fn, got {cache.pages.dtype.name}")
    if cache.scale is None or cache.rope is None:
        return PagedLatent(row_writes.scatter_rows(latent, slots, cache.pages))
    pages, scale = row_writes.quantise_rows(latent, slots, cache.pages, cache.scale)
    rope = row_writes.scatter_rows(latent, slots, cache.rope, first_column=cache.pages.shape[-1])
    return dataclasses.replace(cache, pages=pages, scale=scale, rope=rope)
