"""Which keys a query attends to: sliding windows, sink tokens, causality and draft masks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_window(token, position, window, sink_tokens):
    """Whether `token` is a sink token or within the window of the query at `position`."""
    return (token < sink_tokens) | (token > position - window)  # window <= 2**31 - 1 and position >= 0: no overflow


@triton.jit
def draft_visible(token, first, query, q_len, tree_ptr, QUERIES: tl.constexpr):
    """Whether query i, at position first + i, sees a token [rows, tokens]: causally, or by the draft mask.

    The draft mask applies to the sequence's new tokens. All earlier tokens are visible.

    Args:
      token: [tokens] positions, below kv_len.
      first: kv_len - q_len.
      query: [rows] index of each row's query.
      q_len: number of queries of the sequence; rows of later queries see nothing.
      tree_ptr: draft mask [QUERIES, QUERIES] of the sequence, or None for causal attention.
    """
    column = token - first
    if tree_ptr is None:
        shown = column[None, :] <= query[:, None]
    else:
        drafted = (column >= 0) & (column < QUERIES)
        at = tree_ptr + query[:, None] * QUERIES + column[None, :]
        in_tree = tl.load(at, mask=drafted[None, :] & (query < QUERIES)[:, None], other=0) != 0
        shown = (column < 0)[None, :] | in_tree
    return shown & (query < q_len)[:, None]
