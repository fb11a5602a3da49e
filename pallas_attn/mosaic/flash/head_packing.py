"""Query heads of a group that share the blocks of the prefill kernel.

The rows of a sequence that heads share are those of 8 neighbouring queries of the first head, the same 8 queries of the
next, and after the last head the next 8 queries. Blocks are cut from these rows wherever they are full, so a sequence
has one block at most that is not, and keys are read once for all heads in a block. Each group of 8 rows is brought by a
copy of its own from where the queries lie.
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


def shared_heads(group: int, tile_rows: int) -> int:
    """Number of heads, of the `group` of a KV head, that share blocks: as many as divide the group and leave room for 8
    queries of each in a consumer's `tile_rows` rows.
    """
    return max(heads for heads in range(1, tile_rows // ALIGNMENT + 1) if group % heads == 0)


def query_copies(heads: int, tile_rows: int) -> int:
    """Number of copies that bring the rows of a consumer, of blocks that so many heads share."""
    return 1 if heads == 1 else tile_rows // ALIGNMENT


class BlockRows(NamedTuple):
    """Rows of a work tile's block.

    Attributes:
      work: the work tile, whose `head` counts sets of heads that share blocks.
      heads: number of heads that share blocks.
      tile_rows, layout: rows of a consumer, and their layout in registers (`FlashStatic`).
      block_rows: rows of the block.
      num_tokens, num_q_heads: T and Hq.
    """

    work: FlashWorkTile
    heads: int
    tile_rows: int
    layout: RowLayout
    block_rows: int
    num_tokens: int
    num_q_heads: int

    @property
    def first_head(self) -> Any:
        """The first of the heads that share blocks."""
        return self.work.head * self.heads

    @property
    def end_query(self) -> Any:
        """One past the last query that the block has rows of, which may be of the next sequence."""
        last_group = self.work.block.skipped_heads + self.block_rows // ALIGNMENT - 1
        return self.work.block.start + (lax.div(last_group, jnp.int32(self.heads)) + 1) * ALIGNMENT

    def filled(self, value: Any) -> jax.Array:
        """[tile_rows]: one value for each row of a consumer."""
        return self.layout.filled(value, self.tile_rows)

    def queries(self, number: Any) -> jax.Array:
        """[tile_rows]: the query that each row of consumer `number` is of."""
        row, start = self.layout.iota(self.tile_rows), self.work.block.start
        if self.heads == 1:
            return start + (number * self.tile_rows + row)
        eight = lax.div(self._groups(number, row), jnp.int32(self.heads))
        return start + eight * ALIGNMENT + (row & (ALIGNMENT - 1))

    def _groups(self, number: Any, row: jax.Array) -> jax.Array:
        """[tile_rows]: the group of 8 rows of each row of a consumer, counted from that of the first head at the
        block's first query.
        """
        return self._first_group(number) + lax.div(row, jnp.int32(ALIGNMENT))

    def _first_group(self, number: Any) -> Any:
        return self.work.block.skipped_heads + number * (self.tile_rows // ALIGNMENT)

    def first_query(self, number: Any) -> Any:
        """The first query that a consumer has rows of; no other is `tile_rows` after it or more."""
        if self.heads == 1:
            return self.work.block.start + number * self.tile_rows
        return self.work.block.start + lax.div(self._first_group(number), jnp.int32(self.heads)) * ALIGNMENT

    def output_row(self, query: jax.Array, number: Any) -> jax.Array:
        """[tile_rows]: row of the output [T · Hq, Dv] for each row of a consumer, given its query; -1 for none."""
        block = self.work.block
        ours = (query >= block.first_row) & (query < block.end_row)
        head = self.filled(self.first_head)
        if self.heads > 1:
            head += lax.rem(self._groups(number, self.layout.iota(self.tile_rows)), jnp.int32(self.heads))
        return jnp.where(ours, self.work.output_row(query, self.num_tokens) * self.num_q_heads + head, -1)

    def sinks(self, sinks: Ref | None, output_row: jax.Array) -> jax.Array | None:
        """[tile_rows]: learned logits [Hq] of the heads of such rows of the output."""
        if sinks is None:
            return None
        if self.heads == 1:
            return self.filled(sinks[self.first_head])
        head = lax.rem(jnp.maximum(output_row, 0), jnp.int32(self.num_q_heads))
        return self.layout.take(sinks, head)

    def copy(self, q: Ref, number: int, tile: Ref, landed: Ref) -> None:
        """Start the copies of the queries of consumer `number`.

        Args:
          q: [T, Hq, Dk] in global memory, of `zero_rows_past_end`.
          tile: `tiles.operand` [tile_rows, Dk].
          landed: barrier, with `arrivals(query_copies(heads, tile_rows))` for these copies.
        """
        start = self.work.block.start
        if self.heads == 1:
            copy_rows(q, start + number * self.tile_rows, self.first_head, tile, landed)
        else:
            copy_row_groups(q, start, self.first_head, self.heads, self._first_group(number), tile, landed)
