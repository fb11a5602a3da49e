"""What a program of `mosaic.row_layout` is compiled for, holds in shared memory, and works off."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.sm90 import tiles
from pallas_attn.mosaic.sm90.tiles import PER_TOKEN
from pallas_attn.mosaic.tile_scheduler import WorkTile, for_each_work_tile
from pallas_attn.types import DecodePlan

ROWS = 64
"""Query rows of a block: wgmma's M."""

TOKENS = 64
"""Latents of a tile."""

NOWHERE = 2**30
"""Position of a token that does not exist: newer than every query."""

REAL, NO_DRAFT = 31, 30
"""Bits of what a query row sees, above those of the draft keys: whether there is such a query, and never."""

LOWEST = -1e30
"""What the largest score begins with: finite, so that no difference is NaN, and smaller than any score."""

BY_ALL, BY_SOME, BY_NONE = 2, 1, 0
"""Whether a tile's tokens are all seen by every row; or each by some row; or perhaps one by none, or is not there."""

PARTS = 3
"""Of a tile: the columns of the latent that either warpgroup accumulates, and the rotated ones."""

Q_FREE, SUMS = 0, 1
"""What takes both warpgroups."""

PER_ROW = PER_TOKEN
"""A value for each row of a tile, here a query row."""


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernel is compiled for, beside shapes and dtypes.

    Attributes:
      queries, heads: of which rows are made, query by query.
      pairs: of tiles in shared memory.
      cluster: blocks of rows that share what is read, on neighbouring multiprocessors.
      causal: a query sees all drafts up to itself; else those that `Inputs.seen` tells of.
      sm_scale: multiplies the scores.
    """

    latent_dim: int
    rope_dim: int
    queries: int
    heads: int
    page_size: int
    pairs: int
    cluster: int
    causal: bool
    sm_scale: float

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of the latent that each warpgroup accumulates."""
        left = -(-self.latent_dim // 128) * 64
        return left, self.latent_dim - left

    @property
    def row_bytes(self) -> int:
        """Of a row of a swizzled tile."""
        return 64 if (self.latent_dim + self.rope_dim) % 64 else 128

    @property
    def pages(self) -> int:
        """Pages, or parts of one, that make up a tile."""
        return max(1, TOKENS // self.page_size)

    @property
    def drafts(self) -> int:
        """A bit for each of them."""
        return (1 << self.queries) - 1

    @property
    def page_tokens(self) -> int:
        """Tokens of each of them."""
        return min(TOKENS, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // TOKENS)

    @property
    def has_own_p(self) -> bool:
        """Whether probabilities need memory of their own; else they lie where the rotated keys were."""
        return self.rope_dim != TOKENS

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes, and of one that copies: 504 for one in each warpgroup."""
        return (232, 40) if self.widths[0] > 128 else (192, 120)

    def columns(self, part: int) -> Any:
        """Of a part, in what the cache holds for a token."""
        return pl.ds((0, self.widths[0], self.latent_dim)[part], (*self.widths, self.rope_dim)[part])

    def page_and_part(self, tile: Any) -> tuple[Any, Any]:
        """The first page of a tile among those of a piece, and which part of it, if that takes several tiles."""
        if self.tiles_per_page == 1:
            return tile * self.pages, 0
        return lax.div(tile, self.tiles_per_page), lax.rem(tile, self.tiles_per_page)

    def slot(self, pair: Any, tile: int) -> Any:
        """Where in shared memory a tile of a pair goes."""
        return tile if self.pairs == 1 else 2 * lax.rem(pair, self.pairs) + tile

    def notes_slot(self, pair: Any) -> Any:
        """Where notes on a pair go: not over those that one warpgroup may still read, being a pair behind the other."""
        return lax.rem(pair, 2 * self.pairs)


class Inputs(NamedTuple):
    """Arrays, or in the kernel references to them.

    Attributes:
      q_latent, q_rope: [B, blocks·ROWS, L or R].
      pages: [N, ps, L + R].
      q_lens: int32 [B], or None where all queries are real.
      seen: int32 [B, blocks·ROWS], what each row sees: bit j for draft key j, bit REAL for all older ones. None where
        all queries are real, and each sees what is older than itself.
      seen_by_any: int32 [B], by some row of the sequence; None like `seen`.
    """

    q_latent: Any
    q_rope: Any
    pages: Any
    block_tables: Any
    kv_lens: Any
    q_lens: Any
    plan: DecodePlan
    seen: Any
    seen_by_any: Any


class Parts(NamedTuple):
    """The columns of a query or a latent: those of either warpgroup, and the rotated ones."""

    left: Any
    right: Any
    rope: Any


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      q: [ROWS, columns].
      k: [2 · pairs, TOKENS, columns].
      p: [2, ROWS, TOKENS], probabilities of either tile of a pair, or None.
      stats: [4, ROWS]: the largest scores after either tile of a pair, and the sums of either warpgroup.
      notes: int32 [2 · pairs, 2, 1 + pages]: of a tile, by whom its tokens are seen, and the position of each page's
        first token or NOWHERE.
      ids: int32 [pairs + 1, 2, pages]: of a pair, the pages of either tile, looked up before there is room for them;
        negative where there is none. Where nothing is copied, a warp can be `pairs` ahead of another.
      q_landed, landed [2 · pairs · PARTS]: a query, a part of a tile, is there.
      free: [2 · pairs · 2], half of a tile may be overwritten.
      ready: [2], the largest scores after either tile of a pair are in `stats`, and its probabilities in `p`.
      both: [SUMS], those of both warpgroups are in `stats`; [Q_FREE], the query may be overwritten.
    """

    q: Parts
    k: Parts
    p: Any
    stats: Any
    notes: Any
    ids: Any
    q_landed: Any
    landed: Any
    free: Any
    ready: Any
    both: Any

    @staticmethod
    def types(x: Inputs, static: Static) -> Memory:
        dtype, slots = x.pages.dtype, 2 * static.pairs
        operand = functools.partial(tiles.operand, dtype=dtype, row_bytes=static.row_bytes)
        columns = Parts(*static.widths, static.rope_dim)
        return Memory(
            q=Parts(*(operand((1, ROWS, n)) for n in columns)),
            k=Parts(*(operand((slots, TOKENS, n)) for n in columns)),
            p=operand((2, ROWS, TOKENS)) if static.has_own_p else None,
            stats=plgpu.SMEM((4, ROWS), jnp.float32),
            notes=plgpu.SMEM((slots, 2, 1 + static.pages), jnp.int32),
            ids=plgpu.SMEM((static.pairs + 1, 2, static.pages), jnp.int32),
            q_landed=plgpu.Barrier(num_arrivals=3),
            landed=plgpu.Barrier(num_barriers=PARTS * slots, num_arrivals=static.pages),
            free=plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=2 * slots),
            ready=plgpu.Barrier(num_barriers=2),
            both=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )


# --- pieces


class Piece(NamedTuple):
    """Pages `start` to `stop` of a row.

    Attributes:
      row: a sequence.
      number: of its state, where the row is in several pieces.
      is_all: whether it is all of the row.
      pair: how many pairs of tiles the program took before.
    """

    row: Any
    start: Any
    stop: Any
    number: Any
    is_all: Any
    pair: Any

    def queries(self, static: Static, x: Inputs) -> Any:
        """How many there are."""
        return static.queries if x.q_lens is None else x.q_lens[self.row]

    def oldest_query(self, static: Static, x: Inputs) -> Any:
        """Its position."""
        return x.kv_lens[self.row] - self.queries(static, x)

    def num_pairs(self, static: Static) -> Any:
        tiles = pl.cdiv(self.stop - self.start, static.pages) * static.tiles_per_page
        return pl.cdiv(tiles, 2)


def for_each_piece(static: Static, plan: DecodePlan, work: Callable[[Piece], None]) -> None:
    """Works off the pieces of this program."""

    def step(span: WorkTile, pair: Any) -> Any:
        piece = Piece(span.row, span.start, span.stop, span.split, span.is_whole_row, pair)
        work(piece)
        return pair + piece.num_pairs(static)

    for_each_work_tile(plan, step, jnp.int32(0))
