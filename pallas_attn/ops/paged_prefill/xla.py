"""`paged_prefill` on any device: tiles of queries iterate over the visible pages of their sequence (online softmax)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.paged_prefill import config
from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.portable.online_softmax import QueryTiles, Tile
from pallas_attn.portable.page_tiles import HeadRows, PageTiles, attend_packed, load_kv
from pallas_attn.portable.visibility import head_windows


def paged_prefill(call: PagedPrefillCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    num_tokens, num_kv_heads = call.num_tokens, call.num_kv_heads
    head_rows = HeadRows.of(num_kv_heads, call.window, call.block_tables.ndim)
    settings = config.xla_config(num_tokens, call.num_sequences, head_rows.rows_per_sequence)
    queries = QueryTiles(call.cu_q_lens, num_tokens, settings.tile_queries)
    num_cached = (call.kv_lens - jnp.diff(call.cu_q_lens))[queries.sequence][:, None]
    position = num_cached + queries.index
    if not call.causal:  # all queries see the same keys as the query at the last position
        position = jnp.broadcast_to(call.kv_lens[queries.sequence][:, None] - 1, queries.index.shape)
    mask = call.draft_mask
    real = queries.real & (position >= 0) if mask is None else queries.real
    # The queries of a tile are consecutive tokens, so the first and the last position bound the visible keys.
    position = jnp.where(real, jnp.maximum(position, 0), 0)
    pages = PageTiles(
        call.block_tables,
        head_windows(call.window, num_kv_heads),
        head_rows=head_rows,
        sequence=queries.sequence,
        first_query=jnp.min(jnp.where(real, position, jnp.max(position, axis=1, keepdims=True)), axis=1),
        end=jnp.max(
            jnp.where(real, position + 1 if mask is None else call.kv_lens[queries.sequence][:, None], 0), axis=1
        ),
        page_size=call.page_size,
        pool_rows=call.kv.k.shape[0] * num_kv_heads,
        tile_tokens=settings.tile_tokens,
    )

    def load_tile(rows: Int32[Array, "W"], j: Int32[Array, ""]) -> Tile:
        row_ids, key, exists = pages.locate(rows, j)
        tile = rows // head_rows.rows_per_sequence
        if mask is None:
            visible = key[:, None, :] <= position[tile][:, :, None]
        else:
            column = (key - num_cached[tile])[:, None, :]
            shown = jnp.take_along_axis(mask[queries.token[tile]], jnp.clip(column, 0, mask.shape[1] - 1), axis=2)
            visible = (column < 0) | (shown & (column < mask.shape[1]))
            visible &= (key < call.kv_lens[queries.sequence[tile]][:, None])[:, None]
        visible &= real[tile][:, :, None]
        visible = visible[:, None] & exists[:, :, None]  # [W, H, M, K]
        if call.window is not None:
            visible &= pages.in_window(rows, key, position[tile])
        k, v = load_kv(call.kv, row_ids, pages.heads(rows), call.head_dim)
        return k, v, jnp.repeat(visible, call.group, axis=2)

    return attend_packed(call, queries, head_rows, pages.num_tiles, load_tile, settings.group_rows)
