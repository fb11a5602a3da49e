"""Masks of score tiles in prefill: a row is a query row, a column is a key."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp


class Limits(NamedTuple):
    """Visible columns of a score tile [rows, N] for each row.

    A row sees a column if all of the following hold:

    - The column is less than `high`.
    - The column is at least `low` (start of the window) or less than `sink` (end of the sink tokens).
    - The bit of its page in `pages` is 1.

    Attributes:
      low, high: int32 [rows], columns.
      sink: int32 [rows], columns; None if the call has no sink tokens.
      pages: int32 [rows], bit j for columns j·page_tokens to (j + 1)·page_tokens - 1; None if the block table has all
        pages of the tile.
      page_tokens: columns of a page; unused if `pages` is None.
    """

    low: Any
    high: Any
    sink: Any = None
    pages: Any = None
    page_tokens: int = 0

    def sees(self, column: Any) -> Any:
        """Return bool [rows, N]: whether each row sees each of the columns [1, N]."""
        seen = column >= self.low[:, None]
        if self.sink is not None:
            seen |= column < self.sink[:, None]
        seen &= column < self.high[:, None]
        if self.pages is not None:
            seen &= (jnp.right_shift(self.pages[:, None], column // self.page_tokens) & 1) == 1
        return seen
