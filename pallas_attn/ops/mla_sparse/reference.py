"""Definition of `mla_sparse`: gather the latents of every token, then attend with one KV head.

The keys are the latent and rotated columns, and the values are the latent columns.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.ops.mla_sparse.call import MlaSparseCall, inside_pool
from pallas_attn.portable import oracle
from pallas_attn.portable.latents import meant_latents
from pallas_attn.portable.metadata import range_slots
from pallas_attn.types import SlotRange


def mla_sparse(call: MlaSparseCall) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    keys, chosen = [], []
    for cache, given in call.pools:
        slots = inside_pool(cache, range_slots(given, cache.page_size) if isinstance(given, SlotRange) else given)
        latents = meant_latents(cache).reshape(-1, cache.width)
        keys.append(latents[jnp.maximum(slots, 0)])
        chosen.append(slots >= 0)
    k = jnp.concatenate(keys, axis=1)[:, None]  # [T, 1, keys, L + R]
    out, lse = oracle.attention(
        call.queries[:, None],
        k,
        k[..., : call.q_latent.shape[2]],
        jnp.concatenate(chosen, axis=1)[:, None, None],
        sm_scale=call.sm_scale,
        sinks=call.sinks,
    )
    return out[:, 0].astype(call.output_dtype), lse[:, 0]
