"""Visibility of the keys of a score tile for each of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp


class Limits(NamedTuple):
    """Visible columns of a score tile [rows, N] for each row.

    A row sees a column that is below `high`, is at least `low` or below `sink`, and belongs to a present page.

    Attributes:
      low, high: int32 [rows].
      sink: int32 [rows]; None if the call has no sink tokens.
      pages: int32 [rows], one bit per `page_tokens` columns; None if all pages are present.
    """

    low: Any
    high: Any
    sink: Any = None
    pages: Any = None
    page_tokens: int = 0

    def sees(self, column: Any) -> Any:
        """Mask [rows, N] of columns [1, N]."""
        seen = column >= self.low[:, None]
        if self.sink is not None:
            seen |= column < self.sink[:, None]
        seen &= column < self.high[:, None]
        if self.pages is not None:
            seen &= (jnp.right_shift(self.pages[:, None], column // self.page_tokens) & 1) == 1
        return seen
