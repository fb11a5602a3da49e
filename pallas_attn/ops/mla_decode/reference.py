"""Definition of `mla_decode`: one KV head, whose key is latent and rotated columns, and whose value is the latent."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.portable import oracle
from pallas_attn.portable.latents import meant_latents
from pallas_attn.portable.visibility import draft_visible, head_windows, in_window, real_queries
from pallas_attn.types import PagedKV


def mla_decode(call: MlaDecodeCall) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    call = call.with_bounded_lens()
    kv_lens = call.kv_lens
    q_lens = real_queries(call.q_lens, kv_lens, call.num_queries)
    pages = meant_latents(call.cache)[:, None]  # one KV head
    k, _, exists = oracle.gather_kv(PagedKV(pages, pages), call.block_tables, pages.shape[-1])
    key = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32)[None], (k.shape[0], k.shape[2]))
    index = jnp.arange(call.num_queries, dtype=jnp.int32)
    visible = draft_visible(key, index, kv_lens, q_lens, call.draft_mask)[:, None] & exists[:, :, None, :]
    if call.window is not None:
        position = jnp.maximum((kv_lens - q_lens)[:, None] + index[None], 0)
        shown = head_windows(call.window, 1)
        visible &= in_window(
            key[:, None, None, :],
            position[:, None, :, None],
            shown.window[None, :, None, None],
            shown.sink_tokens[None, :, None, None],
        )
    q = jnp.concatenate([call.q_latent, call.q_rope], axis=-1)
    out, lse = oracle.attention(
        q, k, k[..., : call.latent_dim], visible, sm_scale=call.sm_scale, soft_cap=call.soft_cap
    )
    return out.astype(call.output_dtype), lse
