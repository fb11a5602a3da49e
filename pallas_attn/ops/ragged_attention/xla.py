"""`ragged_attention` on any device: tiles of queries iterate over the keys of their sequence (online softmax)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.ragged_attention import config
from pallas_attn.ops.ragged_attention.call import RaggedAttentionCall
from pallas_attn.portable.online_softmax import QueryTiles, Tile
from pallas_attn.portable.page_tiles import HeadRows, attend_packed


def ragged_attention(call: RaggedAttentionCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    num_tokens, num_keys, num_kv_heads, cu_kv_lens = call.num_tokens, call.num_keys, call.num_kv_heads, call.cu_kv_lens
    settings = config.xla_config(num_tokens, call.num_sequences)
    tiles = QueryTiles(call.cu_q_lens, num_tokens, settings.tile_queries)
    tile_tokens = min(settings.tile_tokens, num_keys)
    num_kv = jnp.diff(cu_kv_lens)
    # Number of keys that each query sees: all keys of its sequence, or all except the keys of later queries.
    newer = jnp.diff(call.cu_q_lens)[tiles.sequence][:, None] - 1 - tiles.index
    hidden = newer if call.causal else jnp.zeros_like(newer)
    num_visible = jnp.where(tiles.real, jnp.maximum(num_kv[tiles.sequence][:, None] - hidden, 0), 0)
    # The queries of a tile are consecutive tokens, so the first query sees the oldest key of all queries of the tile.
    oldest = jnp.zeros_like(num_visible[:, 0])
    if call.window is not None:
        oldest = jnp.maximum(num_visible[:, 0] - call.window, 0)

    def load_tile(rows: Int32[Array, "W"], j: Int32[Array, ""]) -> Tile:
        place = (j * tile_tokens + jnp.arange(tile_tokens, dtype=jnp.int32))[None]
        if call.window is not None:
            place += oldest[rows][:, None]
        token = jnp.clip(cu_kv_lens[tiles.sequence[rows]][:, None] + place, 0, num_keys - 1)
        end = num_visible[rows][:, :, None]
        visible = place[:, None, :] < end
        if call.window is not None:
            visible &= place[:, None, :] >= end - call.window
        visible = visible[:, None]  # [W, 1, M, K]
        visible = jnp.repeat(visible, call.num_q_heads // num_kv_heads, axis=2)
        return call.k[token].swapaxes(1, 2), call.v[token].swapaxes(1, 2), visible

    head_rows = HeadRows(heads=num_kv_heads, rows_per_sequence=1)
    num_tiles = -(-(jnp.max(num_visible, axis=1) - oldest) // tile_tokens)
    return attend_packed(call, tiles, head_rows, num_tiles, load_tile, settings.group_rows)
