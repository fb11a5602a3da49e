"""Which keys of a tile of scores each row sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp


class Limits(NamedTuple):
    """Columns of a tile of scores [rows, N] that each row sees: below `high`, at `low` or later or below `sink`, and on
    a present page.

    Attributes:
      low, high: int32 [rows].
      sink: int32 [rows]; None where there are no sink tokens.
      pages: int32 [rows], a bit for each `page_tokens` columns; None where all pages are present.
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
