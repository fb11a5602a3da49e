"""`mla_decode` on any device: an online softmax over the latents of each sequence, by tiles of pages."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.mla_decode import config
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.portable.latents import read_latents
from pallas_attn.portable.online_softmax import Tile, attend_rows
from pallas_attn.portable.page_tiles import HeadRows, PageTiles
from pallas_attn.portable.visibility import draft_visible, head_windows, real_queries


def mla_decode(call: MlaDecodeCall) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    call = call.with_bounded_lens()
    batch, num_queries, num_heads, latent_dim = call.q_latent.shape
    num_pages, page_size, _ = call.cache.pages.shape
    width = call.cache.width
    kv_lens, draft_mask = call.kv_lens, call.draft_mask
    q_lens = real_queries(call.q_lens, kv_lens, num_queries)
    settings = config.xla_config(batch, width)
    tiles = PageTiles(
        call.block_tables,
        head_windows(call.window, 1),
        head_rows=HeadRows(heads=1, rows_per_sequence=1),
        sequence=jnp.arange(batch, dtype=jnp.int32),
        first_query=jnp.maximum(kv_lens - q_lens, 0),
        end=jnp.where(q_lens > 0, kv_lens, 0),
        page_size=page_size,
        pool_rows=num_pages,
        tile_tokens=settings.tile_tokens,
    )
    index = jnp.arange(num_queries, dtype=jnp.int32)

    def load_tile(rows: Int32[Array, "W"], j: Int32[Array, ""]) -> Tile:
        page_ids, key, exists = tiles.locate(rows, j)
        latent = read_latents(call.cache, page_ids).reshape(rows.shape[0], 1, -1, width)
        mask = None if draft_mask is None else draft_mask[rows]
        visible = draft_visible(key, index, kv_lens[rows], q_lens[rows], mask)[:, None] & exists[:, :, None]
        if call.window is not None:
            position = jnp.maximum((kv_lens - q_lens)[rows][:, None] + index[None], 0)
            visible &= tiles.in_window(rows, key, position)
        return latent, latent[..., :latent_dim], jnp.repeat(visible, num_heads, axis=2)

    q = jnp.concatenate([call.q_latent, call.q_rope], axis=-1).reshape(batch, 1, call.query_rows, width)
    out, lse = attend_rows(
        q,
        tiles.num_tiles,
        load_tile,
        sources=call,
        value_dim=latent_dim,
        sm_scale=call.sm_scale,
        soft_cap=call.soft_cap,
        group_rows=settings.group_rows,
    )
    return out.reshape(call.q_latent.shape).astype(call.output_dtype), lse.reshape(call.q_latent.shape[:-1])
