"""The work of `mosaic_flash`: queries in blocks, and which of them a program does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.common.mosaic import Ref
from pallas_attn.ops.common.stretches import stretch_of

ALIGNMENT = 8
"""Copies of rows begin at multiples of it, which is how many rows a swizzled tile repeats after."""


class QueryBlocks(NamedTuple):
    """Packed queries, cut into blocks of neighbours of one sequence; padding rows are a sequence more.

    Attributes:
      sequence: int32 [n].
      start: int32 [n], the row a block begins at; of a sequence's first, it is rounded down to a multiple of 8.
      first_row, end_row: int32 [n], rows of the sequence.
      exists: bool [n]; blocks that do not come last.
    """

    sequence: Any
    start: Any
    first_row: Any
    end_row: Any
    exists: Any

    @staticmethod
    def of(cu_q_lens: Int32[Array, "S_plus_1"], num_tokens: int, rows: int) -> QueryBlocks:
        sequences = cu_q_lens.shape[0]
        ends = jnp.append(cu_q_lens[1:], jnp.int32(num_tokens))
        starts = cu_q_lens // ALIGNMENT * ALIGNMENT
        last = jnp.cumsum(jnp.where(ends > cu_q_lens, -(-(ends - starts) // rows), 0), dtype=jnp.int32)
        most = min(num_tokens, (num_tokens + (ALIGNMENT - 1) * sequences) // rows + sequences)
        block = jnp.arange(most, dtype=jnp.int32)
        sequence = jnp.minimum(stretch_of(last, block), sequences - 1)
        number = block - jnp.where(sequence > 0, last[sequence - 1], 0)
        start = starts[sequence] + number * rows
        return QueryBlocks(sequence, start, cu_q_lens[sequence], ends[sequence], block < last[-1])


class Items(NamedTuple):
    """Which pieces of work a program does, of pieces in falling order of size: `count` of them.

    Programs take one each in turn, back and forth, so that none has the larger one every time.
    """

    program: Any
    programs: int
    count: Any

    @staticmethod
    def of(program: Any, programs: int, pieces: Any) -> Items:
        rounds = lax.div(pieces, programs)
        items = Items(program, programs, rounds)
        return items._replace(count=rounds + (items.number(rounds) < pieces).astype(jnp.int32))

    def number(self, i: Any) -> Any:
        """Of the program's i-th piece."""
        back = self.programs - 1 - self.program
        return i * self.programs + jnp.where(lax.rem(i, 2) == 0, self.program, back)


class Work(NamedTuple):
    """What a program does: blocks of queries of a head, one after the other. Blocks of `together` heads alternate.

    Attributes:
      blocks: [n, fields] int32 in global memory.
      count: how many of them there are.
    """

    blocks: Ref
    count: Any
    items: Items
    together: int

    @staticmethod
    def of(blocks: Ref, count: Ref, num_heads: int, together: int, programs: int) -> Work:
        items = Items.of(lax.axis_index("program"), programs, count[0] * num_heads)
        return Work(blocks, count[0], items, together)

    def each(self, work: Callable[[Any, Any, list[Any], Any], Any]) -> Any:
        """Calls work(whether it is not the first, number of the first tile, fields of the block, head), which returns
        how many tiles it took, for each; returns how many there were.
        """

        def step(i: Any, tile: Any) -> Any:
            some_heads, rest = divided(self.items.number(i), self.count * self.together)
            block, head = divided(rest, self.together)
            fields = [self.blocks[block, field] for field in range(self.blocks.shape[1])]
            return tile + work(i > 0, tile, fields, some_heads * self.together + head)

        return lax.fori_loop(0, self.items.count, step, jnp.int32(0))


def divided(x: Any, y: Any) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are not negative."""
    return lax.div(x, y), lax.rem(x, y)


def aligned(row: Any) -> Any:
    """The row at or before this one that copies may begin at."""
    return pl.multiple_of(lax.div(row, ALIGNMENT) * ALIGNMENT, ALIGNMENT)


def padded(x: Float[Array, "n H D"], least: int) -> Float[Array, "m H D"]:
    """Rows that copies of so many fit in."""
    more = max(-(-x.shape[0] // ALIGNMENT) * ALIGNMENT, least) - x.shape[0]
    return jnp.pad(x, ((0, more), (0, 0), (0, 0))) if more else x
