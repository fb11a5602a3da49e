"""Which keys a query attends to: sliding windows, sink tokens, causality and draft masks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_window(token, position, window, sink_tokens):
    """Return whether the key at position `token` is in the window of the query at `position`, or a sink token.

    Sink tokens are the first `sink_tokens` tokens of a sequence. Causality is not checked.
    """
    return (token < sink_tokens) | (token > position - window)  # window <= 2**31 - 1 and position >= 0: no overflow


@triton.jit
def draft_visible(token, first, query, q_len, tree_ptr, QUERIES: tl.constexpr):
    """Return which tokens the queries of a sequence see, bool [rows, tokens], without regard to windows.

    The queries are the newest q_len tokens of the sequence: query i has position first + i. All tokens before `first`
    are visible. Without a draft mask, query i sees the new tokens up to its own. With a draft mask, it sees new token j
    if mask[i, j].

    Args:
      token: [tokens], positions of keys, below kv_len.
      first: position of the first query, kv_len - q_len.
      query: [rows], index i of the query of each row of the tile.
      q_len: number of queries of the sequence. Rows with i >= q_len see nothing.
      tree_ptr: draft mask [QUERIES, QUERIES] of the sequence, or None.
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
