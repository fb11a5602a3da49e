"""What `mla_decode` computes: one KV head; its key is the latent and the rotated columns, its value the latent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.portable import oracle
from pallas_attn.portable.visibility import draft_visible, real_queries
from pallas_attn.types import DecodePlan, PagedKV, PagedLatent


def mla_decode(
    q_latent: Float[Array, "B Q Hq L"],
    q_rope: Float[Array, "B Q Hq R"],
    cache: PagedLatent,
    block_tables: Int32[Array, "B P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None,
    sm_scale: float,
    draft_mask: Bool[Array, "B Q Q"] | None,
    plan: DecodePlan | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    del plan  # nothing here is split
    q_lens = real_queries(q_lens, kv_lens, q_latent.shape[1])
    pages = cache.pages[:, None]  # one KV head
    k, _, exists = oracle.gather_kv(PagedKV(pages, pages), block_tables)
    key = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32)[None], (k.shape[0], k.shape[2]))
    index = jnp.arange(q_latent.shape[1], dtype=jnp.int32)
    visible = draft_visible(key, index, kv_lens, q_lens, draft_mask)[:, None] & exists[:, :, None, :]
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    out, lse = oracle.attention(q, k, k[..., : q_latent.shape[-1]], visible, sm_scale=sm_scale)
    return out.astype(out_dtype), lse
