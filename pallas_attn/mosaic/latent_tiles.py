"""Sizes and operands of the MLA decode kernels on Hopper and Blackwell.

A query row is one query head of one query token; all query rows of a sequence read the same latents. A tile is the
latents of 64 cached tokens. A draft key is the key of one of the sequence's query tokens in this call.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from pallas_attn.types import DecodePlan

TOKENS = 64
"""Number of cached tokens in a tile."""

OLDER_BIT, NEVER_BIT = 31, 30
"""Bits of a query row's visibility mask above the bits of the draft keys (`RowInputs.seen`).

OLDER_BIT is set if the query row sees all keys older than the draft keys. NEVER_BIT is never set. A kernel tests one
bit per key; for keys that no query row sees, it tests NEVER_BIT.
"""

INITIAL_MAX = float(np.finfo(np.float32).min)
"""Initial running maximum of the scores. No finite score is smaller. It is finite, so that the difference of two maxima
is never NaN.
"""

FULL, PARTIAL, DEAD = 2, 1, 0
"""Visibility of a tile. FULL: every query row sees all tokens, so no mask is needed. PARTIAL: each token is seen by at
least one query row, so only scores are masked. DEAD: some token may be invisible to all query rows, so its values are
also zeroed.
"""


@dataclasses.dataclass(frozen=True)
class LatentTiles:
    """Compile-time parameters of an MLA decode call and its tiles, except shapes and dtypes of arrays.

    Attributes:
      latent_dim, rope_dim: latent width L and rotated width R of a token's key. The value is the latent.
      queries: query tokens of a sequence.
      heads: query heads. Query row i is head i % heads of query token i // heads.
      page_size: tokens of a page.
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
        """Swizzle width [bytes] of a tile in shared memory. It must divide a token's L + R 16-bit numbers in the pool,
        because Mosaic GPU tiles this whole dimension for the TMA copy.
        """
        return 64 if (self.latent_dim + self.rope_dim) % 64 else 128

    @property
    def pages(self) -> int:
        """Pages of a tile; 1 if a page holds several tiles."""
        return max(1, TOKENS // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Number of tokens of one page that are in the same tile."""
        return min(TOKENS, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // TOKENS)

    @property
    def draft_bits(self) -> int:
        """Integer with the bits of all draft keys set."""
        return (1 << self.queries) - 1

    def first_page(self, tile: Any) -> tuple[Any, Any]:
        """Return where a tile starts: its first page, counted from the start of the KV split, and the index of the tile
        in this page (0 if a page is not larger than a tile).
        """
        if self.tiles_per_page == 1:
            return tile * self.pages, 0
        return lax.div(tile, self.tiles_per_page), lax.rem(tile, self.tiles_per_page)


class RowInputs(NamedTuple):
    """Operands of an MLA decode kernel.

    The query rows of a sequence are padded to a multiple of `rows`, the number of query rows that one CTA or cluster
    processes; `blocks` is the number of such groups. `tile_rows` is the number of query rows of a kernel's tile. If it
    is larger than `rows`, rows of the tile after the rows of the block are computed, but not stored.

    Attributes:
      q_latent, q_rope: [B, blocks·rows, L] and [B, blocks·rows, R].
      pages: 16-bit [N, ps, L + R], or 8-bit [N, ps, L].
      scale: float32 [N, ps, L / LATENT_GROUP], scales of 8-bit latents; None for 16-bit latents.
      rope: [N, ps, R], rotated columns of an 8-bit cache; None for 16-bit latents.
      block_tables: int32 [B, P], page ids.
      kv_lens: int32 [B], tokens of each sequence, including its queries.
      q_lens: int32 [B], queries of each sequence; None if every sequence has `LatentTiles.queries` queries.
      plan: assignment of KV splits to CTAs.
      seen: int32 [B, (blocks - 1)·rows + tile_rows], visibility mask of each query row: bit j for draft key j, bit
        OLDER_BIT for all older keys. None if every sequence has all queries and visibility is causal.
      seen_by_any: int32 [B], bitwise OR of the masks of a sequence's query rows; None if `seen` is None.
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
