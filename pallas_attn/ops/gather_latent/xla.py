"""`gather_latent` on any device: every output row finds its own source."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.portable.segments import stretch_of
from pallas_attn.types import PagedLatent


def gather_latent(
    cache: PagedLatent,
    latent_new: Float[Array, "T LR"],
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    length: int,
) -> Float[Array, "length LR"]:
    num_pages, page_size, _ = cache.pages.shape
    ends = jnp.cumsum(kv_lens, dtype=jnp.int32)
    row = jnp.arange(length, dtype=jnp.int32)
    sequence = jnp.minimum(stretch_of(ends, row), kv_lens.shape[0] - 1)
    position = row - (ends - kv_lens)[sequence]
    num_cached = (kv_lens - jnp.diff(cu_q_lens))[sequence]
    is_cached = position < num_cached
    entry = jnp.clip(position // page_size, 0, block_tables.shape[1] - 1)
    page = jnp.where(is_cached, block_tables[sequence, entry], 0)
    gathered = cache.pages[jnp.clip(page, 0, num_pages - 1), position % page_size]
    gathered = jnp.where((page < 0)[:, None], jnp.zeros((), gathered.dtype), gathered)
    if latent_new.shape[0]:
        source = jnp.clip(cu_q_lens[sequence] + position - num_cached, 0, latent_new.shape[0] - 1)
        gathered = jnp.where(is_cached[:, None], gathered, latent_new[source])
    return jnp.where((row < ends[-1])[:, None], gathered, jnp.zeros((), gathered.dtype))
