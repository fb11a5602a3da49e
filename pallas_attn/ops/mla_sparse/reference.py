"""Definition of `mla_sparse`: gather the latents of every token, then attend with one KV head.

The keys are the latent and rotated columns, and the values are the latent columns.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.ops.mla_sparse.call import MlaSparseCall
from pallas_attn.portable import oracle
from pallas_attn.portable.latents import meant_latents


def mla_sparse(call: MlaSparseCall) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    latents = meant_latents(call.cache).reshape(-1, call.cache.width)
    k = latents[jnp.where(call.chosen, call.slots, 0)][:, None]  # [T, 1, K, L + R]
    q = jnp.concatenate([call.q_latent, call.q_rope], axis=-1)[:, None]
    out, lse = oracle.attention(
        q, k, k[..., : call.q_latent.shape[2]], call.chosen[:, None, None], sm_scale=call.sm_scale
    )
    return out[:, 0].astype(call.output_dtype), lse[:, 0]
