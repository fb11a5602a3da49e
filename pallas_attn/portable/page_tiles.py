"""Rows of heads and tiles of K/V pages for the portable implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num

from pallas_attn.portable.merge import apply_sinks
from pallas_attn.portable.online_softmax import QueryTiles, Tile, attend_rows
from pallas_attn.portable.pool_access import take
from pallas_attn.portable.visibility import PageWalk, in_window, page_walk
from pallas_attn.types import PAGE_NONE, HeadWindow, PagedKV


class HeadRows(NamedTuple):
    """Grouping of (sequence, head) pairs into rows of heads that read the same pages.

    If all heads have one window, a row is a sequence with H = Hkv heads. With head-wise windows or tables, every head
    is a separate row (H = 1), so that it reads only its own pages.

    Attributes:
      heads: H, heads per row.
      rows_per_sequence: Hkv / H.
    """

    heads: int
    rows_per_sequence: int

    @staticmethod
    def of(num_kv_heads: int, window: int | HeadWindow | None, table_rank: int) -> HeadRows:
        if isinstance(window, HeadWindow) or table_rank == 3:
            return HeadRows(1, num_kv_heads)
        return HeadRows(num_kv_heads, 1)

    def split(self, x: Float[Array, "S M Hq D"], num_kv_heads: int) -> Float[Array, "rows H MG D"]:
        """Return queries [S, M, Hq, D] as rows [S·Hkv/H, H, M·G, D]."""
        sequences, queries, num_heads, width = x.shape
        group = num_heads // num_kv_heads
        x = x.reshape(sequences, queries, num_kv_heads, group, width).swapaxes(1, 2)
        return x.reshape(sequences * self.rows_per_sequence, self.heads, queries * group, width)

    def join(self, x: Float[Array, "rows H MG *D"], queries: int) -> Float[Array, "S M Hq *D"]:
        """Return the inverse of `split`, for outputs [..., D] and for LSEs."""
        sequences = x.shape[0] // self.rows_per_sequence
        num_kv_heads = self.heads * self.rows_per_sequence
        x = x.reshape(sequences, num_kv_heads, queries, -1, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(sequences, queries, -1, *x.shape[4:])


def attend_queries(
    call: Any,
    q: Float[Array, "S M Hq D"],
    head_rows: HeadRows,
    num_tiles: Int32[Array, "R"],
    load_tile: Callable[[Int32[Array, "W"], Int32[Array, ""]], Tile],
    group_rows: int,
) -> tuple[Float[Array, "S M Hq Dv"], Float[Array, "S M Hq"]]:
    """Return float32 outputs, without sinks, and LSEs of queries of an attention call.

    Args:
      call: call with the fields `value_dim`, `scale` and `soft_cap`.
      q: queries of S blocks of M queries. The queries of a block read the same tiles.
      num_tiles, load_tile, group_rows: arguments of `attend_rows`.
    """
    results = attend_rows(
        head_rows.split(q, head_rows.heads * head_rows.rows_per_sequence),
        num_tiles,
        load_tile,
        sources=call,
        value_dim=call.value_dim,
        sm_scale=call.scale,
        soft_cap=call.soft_cap,
        group_rows=group_rows,
    )
    out, lse = (head_rows.join(x, q.shape[1]) for x in results)
    return out, lse


def attend_packed(
    call: Any,
    tiles: QueryTiles,
    head_rows: HeadRows,
    num_tiles: Int32[Array, "R"],
    load_tile: Callable[[Int32[Array, "W"], Int32[Array, ""]], Tile],
    group_rows: int,
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    """Return output and LSE of a call with packed queries. Arguments as in `attend_queries`."""
    out, lse = attend_queries(call, call.q[tiles.token], head_rows, num_tiles, load_tile, group_rows)
    out, lse = tiles.unpack(out, call.num_tokens, 0.0), tiles.unpack(lse, call.num_tokens, -jnp.inf)
    return apply_sinks(out, lse, call.sinks).astype(call.output_dtype), lse


class PageTiles:
    """The visible pages of rows, in tiles of pages.

    Attributes:
      num_tiles: int32 [rows].
    """

    def __init__(
        self,
        block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"],
        window: HeadWindow,
        *,
        head_rows: HeadRows,
        sequence: Int32[Array, "n"],
        first_query: Int32[Array, "n"],
        end: Int32[Array, "n"],
        page_size: int,
        pool_rows: int,
        tile_tokens: int,
    ):
        """Make `head_rows.rows_per_sequence` rows for each entry of `sequence`, whose queries have positions
        [first_query, end).

        The pool has pool_rows = N·Hkv rows.
        """
        self._tables, self._windows, self._head_rows, self._sequence = block_tables, window, head_rows, sequence
        self._page_size, self._pool_rows = page_size, pool_rows
        self._pages = max(1, min(tile_tokens // page_size, block_tables.shape[-1]))
        # All heads of a row have the same window.
        of_row = [x.reshape(head_rows.rows_per_sequence, head_rows.heads)[None, :, 0] for x in _fields(window)]
        walk = page_walk(first_query[:, None], end[:, None], *of_row, page_size=page_size)
        self._walk = PageWalk(*(x.reshape(-1) for x in walk))
        self.num_tiles = -(-self._walk.num_pages // self._pages)

    def locate(
        self, rows: Int32[Array, "W"], j: Int32[Array, ""]
    ) -> tuple[Int32[Array, "W H pages"], Int32[Array, "W K"], Bool[Array, "W H K"]]:
        """Return for tile j of each row: pool rows, positions of its K = pages·ps tokens, and which of them exist."""
        walk = PageWalk(*(x[rows][:, None] for x in self._walk))
        i = (j * self._pages + jnp.arange(self._pages, dtype=jnp.int32))[None]
        walked = i < walk.num_pages
        row_ids = self._row_ids(rows, jnp.where(walked, walk.entry(i), 0))
        exists = walked[:, None] & (row_ids >= 0)
        position = walk.entry(i)[..., None] * self._page_size + jnp.arange(self._page_size, dtype=jnp.int32)[None, None]
        # Table entries without a visible token may have any value: row 0 is read and masked.
        row_ids = jnp.where(exists, row_ids, 0)
        return row_ids, position.reshape(rows.shape[0], -1), jnp.repeat(exists, self._page_size, axis=-1)

    def _row_ids(self, rows: Int32[Array, "W"], entry: Int32[Array, "W pages"]) -> Int32[Array, "W H pages"]:
        """Return the pool rows of table entries; PAGE_NONE for ids outside the pool."""
        sequence = self._sequence[rows // self._head_rows.rows_per_sequence]
        heads = self.heads(rows)
        if self._tables.ndim == 3:
            row = self._tables[sequence[:, None, None], heads[:, :, None], entry[:, None, :]]
            return jnp.where((row >= 0) & (row < self._pool_rows), row, PAGE_NONE)
        page = self._tables[sequence[:, None], entry][:, None, :]
        num_kv_heads = self._head_rows.heads * self._head_rows.rows_per_sequence
        exists = (page >= 0) & (page < self._pool_rows // num_kv_heads)
        return jnp.where(exists, page * num_kv_heads + heads[:, :, None], PAGE_NONE)

    def heads(self, rows: Int32[Array, "W"]) -> Int32[Array, "W H"]:
        """Return the KV heads of each row."""
        first = rows % self._head_rows.rows_per_sequence * self._head_rows.heads
        return first[:, None] + jnp.arange(self._head_rows.heads, dtype=jnp.int32)[None]

    def in_window(
        self, rows: Int32[Array, "W"], key: Int32[Array, "W K"], query: Int32[Array, "W M"]
    ) -> Bool[Array, "W H M K"]:
        """Return whether the windows of each row's heads show a key to a query."""
        heads = self.heads(rows)
        window, sink_tokens = (x[heads][:, :, None, None] for x in _fields(self._windows))
        return in_window(key[:, None, None, :], query[:, None, :, None], window, sink_tokens)


def load_kv(
    kv: PagedKV, row_ids: Int32[Array, "W H pages"], heads: Int32[Array, "W H"], head_dim: int
) -> tuple[Num[Array, "W H K D"], Num[Array, "W H K Dv"]]:
    """Return keys and values of pool rows, K = pages·ps, dequantised to float32 if the cache is quantised."""
    keys = _rows(kv.k, row_ids)
    pages, first = kv.values
    values = keys if kv.is_fused else _rows(pages, row_ids)
    return (
        _dequantised(keys[..., :head_dim], kv.k_scale, row_ids, heads),
        _dequantised(values[..., first : first + kv.value_dim(head_dim)], kv.v_scale, row_ids, heads),
    )


def _rows(
    pages: Num[Array, "N Hkv ps columns"], row_ids: Int32[Array, "W H pages"]
) -> Num[Array, "W H pages ps columns"]:
    return take(pages.reshape(-1, *pages.shape[2:]), row_ids)


def _dequantised(
    values: Num[Array, "W H pages ps D"],
    scale: Float[Array, "..."] | None,
    row_ids: Int32[Array, "W H pages"],
    heads: Int32[Array, "W H"],
) -> Num[Array, "W H K D"]:
    page_size, width = values.shape[3:]
    if scale is not None and scale.ndim == 3:  # dynamic: follows the row of the pool
        groups = scale.shape[-1]
        per_token = jnp.repeat(scale.reshape(-1, groups)[row_ids], page_size // groups, axis=-1)
        values = values.astype(jnp.float32) * per_token[..., None]
    elif scale is not None:  # static: follows the head
        per_head = scale.reshape(scale.shape[0], -1)[heads]  # [W, H, 1 or D]
        values = values.astype(jnp.float32) * per_head[:, :, None, None, :]
    return values.reshape(*row_ids.shape[:2], -1, width)


def _fields(window: HeadWindow) -> tuple[Int32[Array, "Hkv"], Int32[Array, "Hkv"]]:
    return window.window, window.sink_tokens
