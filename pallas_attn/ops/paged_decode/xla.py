"""`paged_decode` on any device: an online softmax over the visible pages of each sequence, a few at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.ops.paged_decode import config
from pallas_attn.portable.merge import apply_sinks
from pallas_attn.portable.online_softmax import Tile, attend_rows
from pallas_attn.portable.page_tiles import Lanes, PageTiles, load_kv
from pallas_attn.portable.visibility import draft_visible, head_windows, real_queries
from pallas_attn.types import DecodePlan, HeadWindow, PagedKV


def paged_decode(
    q: Float[Array, "B Q Hq D"],
    kv: PagedKV,
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None,
    sm_scale: float,
    window: int | HeadWindow | None,
    sinks: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    draft_mask: Bool[Array, "B Q Q"] | None,
    plan: DecodePlan | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "B Q Hq D"], Float[Array, "B Q Hq"]]:
    del plan  # every row's walk is its own
    batch, num_queries, _, head_dim = q.shape
    num_pages, num_kv_heads, page_size, _ = kv.k.shape
    q_lens = real_queries(q_lens, kv_lens, num_queries)
    lanes = Lanes.of(num_kv_heads, window, block_tables.ndim)
    settings = config.xla_config(batch * lanes.rows_per_sequence, lanes.heads, head_dim)
    tiles = PageTiles(
        block_tables,
        head_windows(window, num_kv_heads),
        lanes=lanes,
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
        k, v = load_kv(kv, row_ids, tiles.heads(rows))
        sequence = rows // lanes.rows_per_sequence
        lens, real = kv_lens[sequence], q_lens[sequence]
        mask = None if draft_mask is None else draft_mask[sequence]
        visible = draft_visible(key, index, lens, real, mask)[:, None] & exists[:, :, None]
        if window is not None:
            position = jnp.maximum((lens - real)[:, None] + index[None], 0)
            visible &= tiles.in_window(rows, key, position)
        return k, v, jnp.repeat(visible, q.shape[2] // num_kv_heads, axis=2)

    out, lse = attend_rows(
        lanes.split(q, num_kv_heads),
        tiles.num_tiles,
        load_tile,
        value_dim=head_dim,
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        group_rows=settings.group_rows,
    )
    out, lse = lanes.join(out, num_queries), lanes.join(lse, num_queries)
    return apply_sinks(out, lse, sinks).astype(out_dtype), lse
