"""Query heads of a group that share a block of the prefill kernel.

A block holds neighbouring queries of a few heads: 8 queries of one head, then the same 8 of the next, and after the
last head the next 8 queries. Each group of 8 rows is brought by a copy of its own from where the queries lie. So blocks
are nearly full where queries are few, and keys are read once for all heads in a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.bulk_copies import copy_row_groups, copy_rows
from pallas_attn.mosaic.flash.config import ALIGNMENT
from pallas_attn.mosaic.flash.schedule import FlashWorkTile
from pallas_attn.mosaic.row_layout import RowLayout


class HeadPacking(NamedTuple):
    """Heads of a group that share a block.

    Attributes:
      heads: number of heads in a block.
      queries: queries of each that a block has, a multiple of 8.
    """

    heads: int
    queries: int

    @staticmethod
    def of(heads: int, block_rows: int) -> HeadPacking:
        """Take as many queries of so many heads as a block has room for."""
        return HeadPacking(heads, block_rows // ALIGNMENT // heads * ALIGNMENT)

    @staticmethod
    def choose(group: int, queries: int, block_rows: int, most_heads: int) -> HeadPacking:
        """The packing with the fewest rows of blocks; among equals that with the most heads. The more heads share a
        block, the fewer queries of each it has, and the less of a sequence's last block is empty.

        Args:
          group: query heads of a KV head.
          queries: queries of a sequence, on average.
          block_rows: rows of a block.
          most_heads: heads of a block at most, for each of which it has room for 8 queries.
        """

        def rows(packing: HeadPacking) -> float:
            """Estimate rows that a head takes: its queries begin anywhere, so some rows before them and some after, in
            the last block, are empty.
            """
            empty = (ALIGNMENT - 1) / 2 + packing.queries - 1
            return block_rows / packing.heads / packing.queries * (queries + empty)

        divisors = [heads for heads in range(min(group, most_heads), 0, -1) if group % heads == 0]
        return min((HeadPacking.of(heads, block_rows) for heads in divisors), key=rows)

    def copies(self, tile_rows: int) -> int:
        """Number of copies that bring the rows of a consumer."""
        return 1 if self.heads == 1 else tile_rows // ALIGNMENT


class BlockRows(NamedTuple):
    """Rows of a work tile's block.

    Attributes:
      work: the work tile, whose `head` counts sets of heads that share blocks.
      tile_rows, layout: rows of a consumer, and their layout in registers (`FlashStatic`).
      num_tokens, num_q_heads: T and Hq.
    """

    work: FlashWorkTile
    packing: HeadPacking
    tile_rows: int
    layout: RowLayout
    num_tokens: int
    num_q_heads: int

    @property
    def first_head(self) -> Any:
        """The first of the heads that share the block."""
        return self.work.head * self.packing.heads

    def filled(self, value: Any) -> jax.Array:
        """[tile_rows]: one value for each row of a consumer."""
        return self.layout.filled(value, self.tile_rows)

    def iota(self, number: Any) -> jax.Array:
        """[tile_rows]: index in the block of each row of consumer `number`."""
        return number * self.tile_rows + self.layout.iota(self.tile_rows)

    def queries(self, number: Any) -> jax.Array:
        """[tile_rows]: the query that each row of a consumer is of."""
        row, start, heads = self.iota(number), self.work.block.start, self.packing.heads
        if heads == 1:
            return start + row
        return start + lax.div(row, jnp.int32(heads * ALIGNMENT)) * ALIGNMENT + (row & (ALIGNMENT - 1))

    def first_query(self, number: Any) -> Any:
        """The first query that a consumer has rows of; no other is `tile_rows` after it or more."""
        first = number * self.tile_rows
        if (heads := self.packing.heads) > 1:
            first = lax.div(first, jnp.int32(heads * ALIGNMENT)) * ALIGNMENT
        return self.work.block.start + first

    def output_row(self, query: jax.Array, number: Any) -> jax.Array:
        """[tile_rows]: row of the output [T · Hq, Dv] for each row of a consumer, given its query; -1 for none."""
        block, heads = self.work.block, self.packing.heads
        # A sequence's end is behind every block's in one that is full.
        end = block.end_row if heads == 1 else jnp.minimum(block.start + self.packing.queries, block.end_row)
        ours = (query >= block.first_row) & (query < end)
        head = self.filled(self.first_head)
        if heads > 1:
            head += lax.rem(lax.div(self.iota(number), jnp.int32(ALIGNMENT)), jnp.int32(heads))
        return jnp.where(ours, self.work.output_row(query, self.num_tokens) * self.num_q_heads + head, -1)

    def sinks(self, sinks: Ref | None, output_row: jax.Array) -> jax.Array | None:
        """[tile_rows]: learned logits [Hq] of the heads of such rows of the output."""
        if sinks is None:
            return None
        if self.packing.heads == 1:
            return self.filled(sinks[self.first_head])
        head = lax.rem(jnp.maximum(output_row, 0), jnp.int32(self.num_q_heads))
        return self.layout.take(sinks, head)

    def copy(self, q: Ref, number: int, tile: Ref, landed: Ref) -> None:
        """Start the copies of the queries of consumer `number`.

        Args:
          q: [T, Hq, Dk] in global memory, of `zero_rows_past_end`.
          tile: `tiles.operand` [tile_rows, Dk].
          landed: barrier, with `arrivals(packing.copies(tile_rows))` for these copies.
        """
        start, heads = self.work.block.start, self.packing.heads
        if heads == 1:
            copy_rows(q, start + number * self.tile_rows, self.first_head, tile, landed)
            return
        copy_row_groups(q, start, self.first_head, heads, number * self.packing.copies(self.tile_rows), tile, landed)
