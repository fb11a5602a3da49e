"""Tiles of latents and blocks of query rows, as MLA kernels on Hopper and Blackwell take them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax import lax

from pallas_attn.types import DecodePlan

TOKENS = 64
"""Cached tokens of a tile."""

OLDER_BIT, NEVER_BIT = 31, 30
"""Bits of a query row's visibility mask above the draft keys' bits.

OLDER_BIT is set if the row sees all keys older than the drafts. NEVER_BIT is never set: keys that no row may see map to
it.
"""

INITIAL_MAX = -1e30
"""Initial running maximum: smaller than any score, and finite, so that differences of maxima are never NaN."""

FULL, PARTIAL, DEAD = 2, 1, 0
"""Visibility of a tile. FULL: every query row sees all tokens. PARTIAL: at least one query row sees each token.
DEAD: some token may be invisible to all query rows.
"""


@dataclasses.dataclass(frozen=True)
class LatentTiles:
    """Compile-time parameters of an MLA decode call and its tiles, except shapes and dtypes of arrays.

    Attributes:
      queries, heads: query tokens of a sequence, and query heads. Query rows are ordered query by query.
      causal: whether a query sees all draft keys up to its own position; otherwise `RowInputs.seen` has its mask.
      sm_scale: factor of the scores.
    """

    latent_dim: int
    rope_dim: int
    queries: int
    heads: int
    page_size: int
    causal: bool
    sm_scale: float

    @property
    def row_bytes(self) -> int:
        """Bytes of a swizzled row in shared memory, the same for all parts of a tile: TMA swizzles whole pool rows."""
        return 64 if (self.latent_dim + self.rope_dim) % 64 else 128

    @property
    def pages(self) -> int:
        """Pages of a tile; 1 if a page holds several tiles."""
        return max(1, TOKENS // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Tokens of one page in a tile."""
        return min(TOKENS, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // TOKENS)

    @property
    def draft_bits(self) -> int:
        """Mask with a bit for each draft key."""
        return (1 << self.queries) - 1

    def first_page(self, tile: Any) -> tuple[Any, Any]:
        """Return a tile's first page, counted from the start of the split, and the tile's index in that page."""
        if self.tiles_per_page == 1:
            return tile * self.pages, 0
        return lax.div(tile, self.tiles_per_page), lax.rem(tile, self.tiles_per_page)


class RowInputs(NamedTuple):
    """Operands of an MLA decode kernel. Query rows are padded to whole blocks.

    Attributes:
      q_latent, q_rope: [B, blocks·rows, L or R].
      pages: [N, ps, L + R], or 8-bit [N, ps, L].
      scale: float32 [N, ps, L / LATENT_GROUP], or None.
      rope: [N, ps, R], or None.
      q_lens: int32 [B], or None if every sequence has all queries.
      seen: int32 [B, blocks·rows], visibility mask of each query row: bit j for draft key j, bit OLDER_BIT for all
        older keys. None if every sequence has all queries and the mask is causal.
      seen_by_any: int32 [B], bitwise OR of the masks of a sequence's rows; None if `seen` is None.
    """

    q_latent: Any
    q_rope: Any
    pages: Any
    scale: Any
    rope: Any
    block_tables: Any
    kv_lens: Any
    q_lens: Any
    plan: DecodePlan
    seen: Any
    seen_by_any: Any
