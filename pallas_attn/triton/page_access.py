"""Addresses of keys and values in a paged pool, and masked loads of their columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nth_visible_token(n, sink_pages, first_page, PAGE: tl.constexpr):
    """Table entry and position of the n-th token of a row's visible pages.

    The visible pages are the first `sink_pages` pages, followed by the pages from `first_page` on.
    """
    page = n // PAGE
    entry = tl.where(page < sink_pages, page, page - sink_pages + first_page)
    return entry, entry * PAGE + n % PAGE


@triton.jit
def pool_rows(page_id, head, NUM_HEADS: tl.constexpr, HEAD_WISE: tl.constexpr):
    """Pool rows (int64; a pool row is one head's part of a page) of table entries.

    A table entry is a page id, or with head-wise tables the pool row itself.
    """
    row = page_id.to(tl.int64)
    return row if HEAD_WISE else row * NUM_HEADS + head


@triton.jit
def column_offsets(row_start, held, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Element offsets and mask, both [rows, COLUMNS], of columns FIRST to FIRST + COLUMNS.

    Args:
      row_start: [rows], offset of each row's column 0.
      held: [rows], whether the row exists.
      WIDTH: number of columns that exist.
    """
    column = FIRST + tl.arange(0, COLUMNS)
    is_held = tl.broadcast_to(held[:, None], [held.shape[0], COLUMNS])
    if FIRST + COLUMNS > WIDTH:
        is_held = is_held & (column < WIDTH)[None, :]
    return row_start[:, None] + column[None, :], is_held


@triton.jit
def load_columns(ptr, row_start, FIRST: tl.constexpr, held, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the columns at `column_offsets`, with 0 where the mask is false."""
    at, is_held = column_offsets(row_start, held, FIRST, WIDTH, COLUMNS)
    return tl.load(ptr + at, mask=is_held, other=0)


@triton.jit
def token_scales(scale_ptr, row, token, seen, GROUPS: tl.constexpr, PAGE: tl.constexpr):
    """Scale factors [tokens] from pages with GROUPS scale factors per pool row.

    Args:
      row: [tokens], or one pool row for all tokens.
      token: [tokens], positions; only the position modulo PAGE matters.
      seen: [tokens], load mask; other scale factors are 0.
    """
    return tl.load(scale_ptr + row * GROUPS + token % PAGE // (PAGE // GROUPS), mask=seen, other=0.0)
