"""Addresses of keys and values in a paged pool, and masked loads of their columns.

A pool row is one page of one KV head: row page·NUM_HEADS + head of a pool [pages, NUM_HEADS, PAGE, columns].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nth_visible_token(n, sink_pages, first_page, PAGE: tl.constexpr):
    """Return the block-table entry and the position of the n-th token in the visible pages of a sequence and KV head.

    The visible pages are table entries 0 to sink_pages - 1 (sink tokens), then the entries from `first_page` on (the
    window). PAGE is the number of tokens per page.
    """
    page = n // PAGE
    entry = tl.where(page < sink_pages, page, page - sink_pages + first_page)
    return entry, entry * PAGE + n % PAGE


@triton.jit
def pool_rows(page_id, head, NUM_HEADS: tl.constexpr, HEAD_WISE: tl.constexpr):
    """Return the pool rows (int64) of block-table entries.

    Args:
      page_id: entries of a block table. With HEAD_WISE they are already pool rows.
      head: KV head.
    """
    row = page_id.to(tl.int64)
    return row if HEAD_WISE else row * NUM_HEADS + head


@triton.jit
def column_offsets(row_start, held, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the element offsets and the mask, both [rows, COLUMNS], of columns FIRST to FIRST + COLUMNS - 1 of rows.

    Args:
      row_start: [rows], element offset of column 0 of each row.
      held: [rows], whether the row is loaded.
      WIDTH: number of columns of a row; the mask is false for later columns.
    """
    column = FIRST + tl.arange(0, COLUMNS)
    is_held = tl.broadcast_to(held[:, None], [held.shape[0], COLUMNS])
    if FIRST + COLUMNS > WIDTH:
        is_held = is_held & (column < WIDTH)[None, :]
    return row_start[:, None] + column[None, :], is_held


@triton.jit
def load_columns(ptr, row_start, FIRST: tl.constexpr, held, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load columns FIRST to FIRST + COLUMNS - 1 of rows, [rows, COLUMNS]. For the arguments see `column_offsets`.

    Elements with a false mask are 0.
    """
    at, is_held = column_offsets(row_start, held, FIRST, WIDTH, COLUMNS)
    return tl.load(ptr + at, mask=is_held, other=0)


@triton.jit
def token_scales(scale_ptr, row, token, seen, GROUPS: tl.constexpr, PAGE: tl.constexpr):
    """Load the scale of each token, [tokens], from scales [pool rows, GROUPS], one per group of PAGE / GROUPS tokens.

    Args:
      row: [tokens], pool row of each token; or a scalar for all tokens.
      token: [tokens], positions, or offsets in the page.
      seen: [tokens], load mask; the scale is 0 where the mask is false.
    """
    return tl.load(scale_ptr + row * GROUPS + token % PAGE // (PAGE // GROUPS), mask=seen, other=0.0)
