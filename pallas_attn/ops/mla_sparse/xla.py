"""`mla_sparse` on any device: an online softmax over the selected latents of each token, by tiles of slots.

Attention to the slots of each cache is computed separately, and then merged.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.mla_sparse.call import MlaSparseCall, inside_pool
from pallas_attn.portable.latents import read_latents
from pallas_attn.portable.merge import merge_states
from pallas_attn.portable.metadata import range_slots_at
from pallas_attn.portable.online_softmax import Tile, XlaConfig, attend_rows, decode_heuristic
from pallas_attn.runtime import tuning
from pallas_attn.types import PagedLatent, SlotRange


def mla_sparse(call: MlaSparseCall) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    outs, lses = zip(*(_attend(call, *pool) for pool in call.pools), strict=True)
    out, lse = merge_states(jnp.stack(outs), jnp.stack(lses), call.sinks)
    return out.astype(call.output_dtype), lse


def _attend(
    call: MlaSparseCall, cache: PagedLatent, slots: Int32[Array, "T K"] | SlotRange
) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    """Return attention to the slots of one cache in float32, without the learned sinks."""
    num_tokens, num_heads, latent_dim = call.q_latent.shape
    width, page_size = cache.width, cache.page_size
    key = {"rows": num_tokens, "width": width}
    settings = tuning.lookup("mla_sparse/xla", key, XlaConfig, lambda: decode_heuristic(num_tokens, width))
    if isinstance(slots, SlotRange):
        tile = min(settings.tile_tokens, slots.size)
        num_tiles, tile_slots = _tiles_of_range(cache, slots, tile)
    else:
        tile = min(settings.tile_tokens, slots.shape[1])
        num_tiles, tile_slots = _tiles_of_list(inside_pool(cache, slots), tile)

    def load_tile(rows: Int32[Array, "W"], j: Int32[Array, ""]) -> Tile:
        slot = tile_slots(rows, j)
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


type TileSlots = Callable[[Int32[Array, "W"], Int32[Array, ""]], Int32[Array, "W tile"]]
"""(tokens, j) -> slots of the j-th tile of each token; -1 for no slot in the pool."""


def _tiles_of_list(slots: Int32[Array, "T K"], tile: int) -> tuple[Int32[Array, "T"], TileSlots]:
    """Return the number of tiles of each token, and the slots of a tile."""
    slots = jnp.pad(slots, ((0, 0), (0, -slots.shape[1] % tile)), constant_values=-1)
    slots = slots.reshape(slots.shape[0], -1, tile)
    number = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)[None]
    num_tiles = jnp.max(jnp.where((slots >= 0).any(axis=2), number, 0), axis=1)
    return num_tiles, lambda tokens, j: slots[tokens, jnp.minimum(j, slots.shape[1] - 1)]


def _tiles_of_range(cache: PagedLatent, keys: SlotRange, tile: int) -> tuple[Int32[Array, "T"], TileSlots]:
    """Return the number of tiles of each token, and the slots of a tile, computed from the block table."""

    def tile_slots(tokens: Int32[Array, "W"], j: Int32[Array, ""]) -> Int32[Array, "W tile"]:
        places = j * tile + jnp.arange(tile, dtype=jnp.int32)
        return inside_pool(cache, range_slots_at(keys, tokens, places, cache.page_size))

    return -(-keys.count // tile), tile_slots
