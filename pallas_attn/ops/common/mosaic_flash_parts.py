"""Keys of blocks cut into parts, where `mosaic_flash` has fewer blocks of queries than there are multiprocessors.

All blocks are cut into as many parts, and each part of a block is a piece of work. It leaves a partial output and its
LSE, which XLA merges. How many parts there are is decided on the device, from how many blocks there are and how many
tiles of keys they see; what parts leave has room for the most that a call of these shapes can have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.common import mosaic
from pallas_attn.ops.common.merge import merge_states

PIECE_TILES = 2
"""What a piece takes beside its tiles, in tiles: its first scores, with nothing to do meanwhile, and its end."""

MERGE_TILES = 6
"""What parts take to be merged. Both are reckoned from what a launch and a tile take, and not measured."""


class Parts(NamedTuple):
    """How keys are cut.

    Attributes:
      most: parts that there is room for; where it is 1, nothing is cut.
      number: int32 [], of the parts of each block.
    """

    most: int
    number: Any

    @staticmethod
    def of(
        count: Int32[Array, ""], tiles: Int32[Array, ""], *, heads: int, blocks: tuple[int, int], limit: int
    ) -> Parts:
        """Those that take the least time.

        Args:
          count: blocks of a head.
          tiles: that a block sees at most.
          blocks: of a head, the least and the most that there can be.
          limit: of the tiles.
        """
        programs = mosaic.multiprocessors()
        fewest, largest = (n * heads for n in blocks)
        room = max(1, min(2 * programs // fewest, limit))  # partial outputs are then no more than two of every program
        choices = range(1, room + 1)
        most = max(
            min(choices, key=lambda parts: _time(pieces, parts, limit, programs))
            for pieces in range(fewest, max(min(largest, programs), fewest) + 1)
        )
        times = jnp.stack([_time(count * heads, parts, tiles, programs) for parts in range(1, most + 1)])
        return Parts(most, 1 + jnp.argmin(times).astype(jnp.int32))

    def pieces(
        self, blocks: Int32[Array, "n fields"], count: Int32[Array, ""]
    ) -> tuple[Int32[Array, "m more_fields"], Int32[Array, "numbers"]]:
        """Parts of blocks after one another, the part being another field; how many there are, and how many of a block.
        Just the blocks, and how many there are, where nothing is cut.
        """
        if self.most == 1:
            return blocks, count[None]
        piece = jnp.arange(blocks.shape[0] * self.most, dtype=jnp.int32)
        cut = blocks[jnp.minimum(piece // self.number, blocks.shape[0] - 1)]
        return jnp.column_stack([cut, piece % self.number]), jnp.stack([count * self.number, self.number])

    def merged(
        self,
        outs: Float[Array, "most_rows D"],
        lses: Float[Array, "most_rows"],
        shape: tuple[int, int],
        sinks: Float[Array, "Hq"] | None,
        out_dtype: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
        """What all parts together leave, for what each has left in rows [T, Hq]."""
        if self.most == 1:
            return outs.reshape(*shape, -1), lses.reshape(shape)
        there = jnp.arange(self.most, dtype=jnp.int32)[:, None, None] < self.number
        lses = jnp.where(there, lses.reshape(self.most, *shape), -jnp.inf)
        out, lse = merge_states(outs.reshape(self.most, *shape, -1), lses, sinks)
        return out.astype(out_dtype), lse


def _time(pieces: Any, parts: int, tiles: Any, programs: int) -> Any:
    """Of so many pieces that are cut into parts, in tiles."""
    rounds = -(-pieces * parts // programs)
    return rounds * (-(-tiles // parts) + PIECE_TILES) + MERGE_TILES * (parts > 1)


def share(tiles: Any, part: Any, parts: Any) -> tuple[Any, Any]:
    """In a kernel: the first of a part's tiles, and how many it has, at least 1: that after the last, of which nothing
    is seen, where there are too few.
    """
    first, end = lax.div(tiles * part, parts), lax.div(tiles * (part + 1), parts)
    return jnp.where(first < end, first, tiles), jnp.maximum(end - first, 1)
