"""`gather_latent` on any device: a gather with one computed source index per output row."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.ops.gather_latent.call import GatherLatentCall
from pallas_attn.portable.latents import read_latents
from pallas_attn.portable.segments import segment_of


def gather_latent(call: GatherLatentCall) -> Float[Array, "length LR"]:
    num_pages, page_size, _ = call.cache.pages.shape
    ends = jnp.cumsum(call.kv_lens, dtype=jnp.int32)
    row = jnp.arange(call.length, dtype=jnp.int32)
    sequence = jnp.minimum(segment_of(ends, row), call.num_sequences - 1)
    position = row - (ends - call.kv_lens)[sequence]
    num_cached = (call.kv_lens - jnp.diff(call.cu_q_lens))[sequence]
    is_cached = position < num_cached
    entry = jnp.clip(position // page_size, 0, call.block_tables.shape[1] - 1)
    page = jnp.where(is_cached, call.block_tables[sequence, entry], 0)
    inside = jnp.clip(page, 0, num_pages - 1)
    gathered = read_latents(call.cache, inside, position % page_size, dtype=call.latent_new.dtype)
    gathered = jnp.where(((page < 0) | (page >= num_pages))[:, None], jnp.zeros((), gathered.dtype), gathered)
    if call.latent_new.shape[0]:
        source = jnp.clip(call.cu_q_lens[sequence] + position - num_cached, 0, call.latent_new.shape[0] - 1)
        gathered = jnp.where(is_cached[:, None], gathered, call.latent_new[source])
    return jnp.where((row < ends[-1])[:, None], gathered, jnp.zeros((), gathered.dtype))
