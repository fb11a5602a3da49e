"""Definition of `gather_latent`: token by token."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.gather_latent.call import GatherLatentCall
from pallas_attn.portable.arguments import varying_like
from pallas_attn.portable.latents import meant_latents


def gather_latent(call: GatherLatentCall) -> Float[Array, "length LR"]:
    num_pages, page_size, _ = call.cache.pages.shape
    width, dtype = call.latent_new.shape[1], call.latent_new.dtype
    latents = meant_latents(call.cache, dtype)
    new = jnp.concatenate([call.latent_new, jnp.zeros((1, width), dtype)])  # at least one row to index

    def token(s: Int32[Array, ""], position: Int32[Array, ""]) -> Float[Array, "LR"]:
        num_cached = call.kv_lens[s] - (call.cu_q_lens[s + 1] - call.cu_q_lens[s])
        page = call.block_tables[s, position // page_size]
        cached = jnp.where((page < 0) | (page >= num_pages), 0, latents[page, position % page_size])
        return jnp.where(position < num_cached, cached, new[call.cu_q_lens[s] + position - num_cached])

    def sequence(s: Int32[Array, ""], state):
        def append(position, state):
            out, end = state
            return out.at[end].set(token(s, position), mode="drop"), end + 1

        return lax.fori_loop(0, call.kv_lens[s], append, state)

    empty = (jnp.zeros((call.length, width), dtype), jnp.zeros((), jnp.int32))
    return lax.fori_loop(0, call.num_sequences, sequence, varying_like(empty, call))[0]
