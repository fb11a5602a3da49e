"""Keys that a query sees, by token and by page (windows, sink tokens, draft masks)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_attn.types import FULL, HeadWindow


def head_windows(window: int | HeadWindow | None, num_kv_heads: int) -> HeadWindow:
    """Return the window as a `HeadWindow` with one entry per KV head."""
    if isinstance(window, HeadWindow):
        return window
    width = jnp.full((num_kv_heads,), FULL if window is None else window, jnp.int32)
    return HeadWindow(width, jnp.zeros_like(width))


def real_queries(q_lens: Int32[Array, "B"] | None, kv_lens: Int32[Array, "B"], num_queries: int) -> Int32[Array, "B"]:
    """Return `q_lens`, or `num_queries` for every sequence if `q_lens` is None."""
    return jnp.full_like(kv_lens, num_queries) if q_lens is None else q_lens


def in_window(
    key: Int32[Array, "*#shape"],
    query: Int32[Array, "*#shape"],
    window: Int32[Array, "*#shape"],
    sink_tokens: Int32[Array, "*#shape"],
) -> Bool[Array, "..."]:
    """Return whether the key is a sink token or within the window that ends at the query's position."""
    return (key < sink_tokens) | (key > query - window)  # query >= 0 and window <= FULL, so this cannot overflow


def draft_visible(
    key: Int32[Array, "B K"],
    query_index: Int32[Array, "Q"],
    kv_lens: Int32[Array, "B"],
    q_lens: Int32[Array, "B"],
    draft_mask: Bool[Array, "B Q Q"] | None,
) -> Bool[Array, "B Q K"]:
    """Return which keys the newest queries of each sequence see, without windows.

    Query i of a sequence has position kv_len - q_len + i. It sees keys up to its own position. With `draft_mask`, it
    sees all keys before the draft, and those keys of the draft that the mask shows.
    """
    first = (kv_lens - q_lens)[:, None]
    column = key - first
    real_query = query_index[None, :, None] < q_lens[:, None, None]
    real_key = ((key >= 0) & (key < kv_lens[:, None]))[:, None, :]
    if draft_mask is None:
        shown = column[:, None, :] <= query_index[None, :, None]
    else:
        width = draft_mask.shape[-1]
        in_draft = jnp.take_along_axis(draft_mask, jnp.clip(column, 0, width - 1)[:, None, :], axis=2)
        shown = (column < 0)[:, None, :] | in_draft
    return shown & real_query & real_key


class PageWalk(NamedTuple):
    """Table entries with a visible token: the first `sink_pages` entries, then entries from `first_page` on.

    Attributes:
      sink_pages, first_page, num_pages: int32 of the same shape; num_pages counts both parts.
    """

    sink_pages: Int32[Array, "..."]
    first_page: Int32[Array, "..."]
    num_pages: Int32[Array, "..."]

    def entry(self, i: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """Return the table entry of the i-th page."""
        return jnp.where(i < self.sink_pages, i, i - self.sink_pages + self.first_page)


def _page(position: Int32[Array, "*shape"], page_size: int) -> Int32[Array, "*shape"]:
    """Return the page of a position, position // page_size. It is a shift if the page size is a power of two, because
    JAX's integer division takes a dozen operations.
    """
    bits = page_size.bit_length() - 1
    return position >> bits if page_size == 1 << bits else position // page_size


def page_walk(
    first_query: Int32[Array, "*#shape"],
    end: Int32[Array, "*#shape"],
    window: Int32[Array, "*#shape"],
    sink_tokens: Int32[Array, "*#shape"],
    *,
    page_size: int,
) -> PageWalk:
    """Return the pages with a key that a query from position `first_query` to position `end` - 1 sees.

    Args:
      first_query: position of the first query.
      end: position of the last query plus 1; equal to `first_query` if there are no queries.
      window, sink_tokens: window of the row's head.
      page_size: tokens per page.
    """
    oldest = jnp.maximum(first_query - window + 1, 0)  # the oldest key in the first query's window
    idle = end <= first_query
    first_page = jnp.where(idle, 0, _page(oldest, page_size))
    end_page = jnp.where(idle, 0, -_page(-end, page_size))
    sink_pages = jnp.minimum(-_page(-jnp.minimum(sink_tokens, jnp.maximum(end, 0)), page_size), first_page)
    return PageWalk(*jnp.broadcast_arrays(sink_pages, first_page, sink_pages + end_page - first_page))
