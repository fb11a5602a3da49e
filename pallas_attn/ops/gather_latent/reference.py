"""What `gather_latent` computes, one token after the other."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.types import PagedLatent


def gather_latent(
    cache: PagedLatent,
    latent_new: Float[Array, "T LR"],
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    length: int,
) -> Float[Array, "length LR"]:
    page_size, width = cache.pages.shape[1:]
    new = jnp.concatenate([latent_new, jnp.zeros((1, width), latent_new.dtype)])  # so that there is one to look at

    def token(s: Int32[Array, ""], position: Int32[Array, ""]) -> Float[Array, "LR"]:
        num_cached = kv_lens[s] - (cu_q_lens[s + 1] - cu_q_lens[s])
        page = block_tables[s, position // page_size]
        cached = jnp.where(page < 0, 0, cache.pages[page, position % page_size])
        return jnp.where(position < num_cached, cached, new[cu_q_lens[s] + position - num_cached])

    def sequence(s: Int32[Array, ""], state):
        def append(position, state):
            out, end = state
            return out.at[end].set(token(s, position), mode="drop"), end + 1

        return lax.fori_loop(0, kv_lens[s], append, state)

    empty = (jnp.zeros((length, width), cache.pages.dtype), jnp.zeros((), jnp.int32))
    return lax.fori_loop(0, kv_lens.shape[0], sequence, empty)[0]
