"""`mla_sparse` on any device: an online softmax over the selected latents of each token, by tiles of slots.

Attention to the slots of each cache is computed separately, and then merged.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.mla_sparse.call import MlaSparseCall
from pallas_attn.portable.latents import read_latents
from pallas_attn.portable.merge import merge_states
from pallas_attn.portable.online_softmax import Tile, XlaConfig, attend_rows, decode_heuristic
from pallas_attn.runtime import tuning
from pallas_attn.types import PagedLatent


def mla_sparse(call: MlaSparseCall) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    outs, lses = zip(*(_attend(call, *pool) for pool in call.pools), strict=True)
    out, lse = merge_states(jnp.stack(outs), jnp.stack(lses), call.sinks)
    return out.astype(call.output_dtype), lse


def _attend(
    call: MlaSparseCall, cache: PagedLatent, slots: Int32[Array, "T K"]
) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    """Return attention to the slots of one cache in float32, without the learned sinks."""
    num_tokens, num_heads, latent_dim = call.q_latent.shape
    width, page_size = cache.width, cache.page_size
    key = {"rows": num_tokens, "width": width}
    settings = tuning.lookup("mla_sparse/xla", key, XlaConfig, lambda: decode_heuristic(num_tokens, width))
    tile = min(settings.tile_tokens, slots.shape[1])
    slots = jnp.pad(slots, ((0, 0), (0, -slots.shape[1] % tile)), constant_values=-1)
    slots = slots.reshape(num_tokens, -1, tile)
    number = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)[None]
    num_tiles = jnp.max(jnp.where((slots >= 0).any(axis=2), number, 0), axis=1)

    def load_tile(rows: Int32[Array, "W"], j: Int32[Array, ""]) -> Tile:
        slot = slots[rows, jnp.minimum(j, slots.shape[1] - 1)]
        some = jnp.maximum(slot, 0)
        latent = read_latents(cache, some // page_size, some % page_size)[:, None]
        visible = jnp.broadcast_to((slot >= 0)[:, None, None], (rows.shape[0], 1, num_heads, tile))
        return latent, latent[..., :latent_dim], visible

    out, lse = attend_rows(
        call.queries[:, None],
        num_tiles,
        load_tile,
        sources=call,
        value_dim=latent_dim,
        sm_scale=call.sm_scale,
        soft_cap=None,
        group_rows=settings.group_rows,
    )
    return out[:, 0], lse[:, 0]
