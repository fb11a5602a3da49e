"""`paged_decode` on any device: an online softmax over the visible pages of each sequence, by tiles of pages."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.paged_decode import config
from pallas_attn.ops.paged_decode.call import DecodeOutput, PagedDecodeCall
from pallas_attn.portable.merge import apply_sinks
from pallas_attn.portable.online_softmax import Tile
from pallas_attn.portable.page_tiles import HeadRows, PageTiles, attend_queries, load_kv
from pallas_attn.portable.visibility import draft_visible, head_windows, real_queries


def paged_decode(call: PagedDecodeCall) -> tuple[DecodeOutput, Float[Array, "B Q Hq"]]:
    call = call.with_bounded_lens()
    batch, num_queries, _, head_dim = call.q.shape
    num_pages, num_kv_heads, page_size, _ = call.kv.k.shape
    kv_lens, draft_mask = call.kv_lens, call.draft_mask
    q_lens = real_queries(call.q_lens, kv_lens, num_queries)
    head_rows = HeadRows.of(num_kv_heads, call.window, call.block_tables.ndim)
    settings = config.xla_config(batch * head_rows.rows_per_sequence, head_rows.heads, head_dim)
    tiles = PageTiles(
        call.block_tables,
        head_windows(call.window, num_kv_heads),
        head_rows=head_rows,
        sequence=jnp.arange(batch, dtype=jnp.int32),
        first_query=jnp.maximum(kv_lens - q_lens, 0),
        end=jnp.where(q_lens > 0, kv_lens, 0),
        page_size=page_size,
        pool_rows=num_pages * num_kv_heads,
        tile_tokens=settings.tile_tokens,
    )
    index = jnp.arange(num_queries, dtype=jnp.int32)

    def load_tile(rows: Int32[Array, "W"], j: Int32[Array, ""]) -> Tile:
        row_ids, key, exists = tiles.locate(rows, j)
        k, v = load_kv(call.kv, row_ids, tiles.heads(rows), call.head_dim)
        sequence = rows // head_rows.rows_per_sequence
        lens, real = kv_lens[sequence], q_lens[sequence]
        mask = None if draft_mask is None else draft_mask[sequence]
        visible = draft_visible(key, index, lens, real, mask)[:, None] & exists[:, :, None]
        if call.window is not None:
            position = jnp.maximum((lens - real)[:, None] + index[None], 0)
            visible &= tiles.in_window(rows, key, position)
        return k, v, jnp.repeat(visible, call.group, axis=2)

    out, lse = attend_queries(call, call.queries, head_rows, tiles.num_tiles, load_tile, settings.group_rows)
    return call.place(apply_sinks(out, lse, call.sinks).astype(call.output_dtype)), lse
