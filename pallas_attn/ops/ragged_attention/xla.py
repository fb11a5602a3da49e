"""`ragged_attention` on any device: tiles of queries walk the keys of their sequence with an online softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.ragged_attention import config
from pallas_attn.portable.online_softmax import QueryTiles, Tile, attend_rows
from pallas_attn.portable.page_tiles import Lanes


def ragged_attention(
    q: Float[Array, "T Hq Dk"],
    k: Float[Array, "U Hkv Dk"],
    v: Float[Array, "U Hkv Dv"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    cu_kv_lens: Int32[Array, "S_plus_1"],
    *,
    causal: bool,
    sm_scale: float,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    num_tokens, num_heads, _ = q.shape
    num_keys, num_kv_heads, value_dim = v.shape
    if not num_tokens or not num_keys:
        out = jnp.zeros((num_tokens, num_heads, value_dim), out_dtype)
        return out, jnp.full(out.shape[:2], -jnp.inf, jnp.float32)
    settings = config.xla_config(num_tokens, cu_q_lens.shape[0] - 1)
    tiles = QueryTiles(cu_q_lens, num_tokens, settings.tile_queries)
    tile_tokens = min(settings.tile_tokens, num_keys)
    num_kv = jnp.diff(cu_kv_lens)
    # How many keys each query sees: all of its sequence's, or all but those of the queries after it.
    hidden = jnp.diff(cu_q_lens)[tiles.sequence][:, None] - 1 - tiles.index if causal else jnp.zeros_like(tiles.index)
    num_visible = jnp.where(tiles.real, jnp.maximum(num_kv[tiles.sequence][:, None] - hidden, 0), 0)

    def load_tile(rows: Int32[Array, "W"], j: Int32[Array, ""]) -> Tile:
        place = (j * tile_tokens + jnp.arange(tile_tokens, dtype=jnp.int32))[None]
        token = jnp.clip(cu_kv_lens[tiles.sequence[rows]][:, None] + place, 0, num_keys - 1)
        visible = (place[:, None, :] < num_visible[rows][:, :, None])[:, None]  # [W, 1, M, K]
        visible = jnp.repeat(visible, num_heads // num_kv_heads, axis=2)
        return k[token].swapaxes(1, 2), v[token].swapaxes(1, 2), visible

    lanes = Lanes(heads=num_kv_heads, rows_per_sequence=1)
    out, lse = attend_rows(
        lanes.split(q[tiles.token], num_kv_heads),
        -(-jnp.max(num_visible, axis=1) // tile_tokens),
        load_tile,
        value_dim=value_dim,
        sm_scale=sm_scale,
        soft_cap=None,
        group_rows=settings.group_rows,
    )
    out, lse = (lanes.join(x, settings.tile_queries) for x in (out, lse))
    return tiles.unpack(out, num_tokens, 0.0).astype(out_dtype), tiles.unpack(lse, num_tokens, -jnp.inf)
