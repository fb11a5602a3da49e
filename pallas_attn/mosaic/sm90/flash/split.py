"""Keys of blocks cut into parts, where `sm90.flash.kernel` has fewer blocks of queries than there are multiprocessors.

All blocks are cut into as many parts, and each part of a block is a piece of work. It leaves a partial output and its
LSE, which XLA merges. How many parts there are is decided on the device, by the kernel that lists the blocks
(`sm90.flash.schedule`), from how many there are and how many tiles of keys they see; what parts leave has room for the
most that a call of these shapes can have.

Float32 rounds an LSE of 5e5 by so much that outputs err by 1.3 to 2.6 times the contract's tolerance, where those of
keys that are not cut keep within 4% of it; with one of 6e4 they keep within it (interpreted, float16).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from pallas_attn.mosaic import basics
from pallas_attn.portable.merge import merge_states

PIECE_TILES = 2
"""What a piece takes beside its tiles, in tiles: its first scores, with nothing to do meanwhile, and its end."""

MERGE_TILES = 6
"""What parts take to be merged. Both are reckoned from what a launch and a tile take, and not measured."""


@dataclasses.dataclass(frozen=True)
class Cuts:
    """How keys may be cut.

    Attributes:
      most: parts that there is room for; where it is 1, nothing is cut.
      heads: that blocks are done for.
      limit: of the tiles that a block sees.
      programs: that work at a time.
    """

    most: int
    heads: int
    limit: int
    programs: int

    @staticmethod
    def of(*, heads: int, blocks: tuple[int, int], limit: int) -> Cuts:
        """Room for those that may take the least time.

        Args:
          heads: that blocks are done for.
          blocks: of a head, the least and the most that there can be.
          limit: of the tiles that a block sees.
        """
        programs = basics.multiprocessors()
        fewest, largest = (n * heads for n in blocks)
        room = max(1, min(2 * programs // fewest, limit))  # partial outputs are then no more than two of every program
        most = max(
            min(range(1, room + 1), key=lambda parts: _time(pieces, parts, limit, programs) + MERGE_TILES * (parts > 1))
            for pieces in range(fewest, max(min(largest, programs), fewest) + 1)
        )
        return Cuts(most, heads, limit, programs)

    def time(self, blocks: Any, parts: Any, tiles: Any) -> Any:
        """In a kernel: of so many blocks, each of so many tiles at most that are cut into parts; in tiles."""
        merging = jnp.where(parts > 1, MERGE_TILES, 0)
        return _time(blocks * self.heads, parts, jnp.minimum(tiles, self.limit), self.programs) + merging

    def merged(
        self,
        outs: Float[Array, "most_rows D"],
        lses: Float[Array, "most_rows"],
        count: Int32[Array, "numbers"],
        shape: tuple[int, int],
        sinks: Float[Array, "Hq"] | None,
        out_dtype: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
        """What all parts together leave, for what each has left in rows [T, Hq], and `count` as it is listed."""
        if self.most == 1:
            return outs.reshape(*shape, -1), lses.reshape(shape)
        there = jnp.arange(self.most, dtype=jnp.int32)[:, None, None] < count[1]
        lses = jnp.where(there, lses.reshape(self.most, *shape), -jnp.inf)
        out, lse = merge_states(outs.reshape(self.most, *shape, -1), lses, sinks)
        return out.astype(out_dtype), lse


def _time(pieces: Any, parts: Any, tiles: Any, programs: int) -> Any:
    """Of so many pieces that are cut into parts, in tiles, before these are merged."""
    return pl.cdiv(pieces * parts, programs) * (pl.cdiv(tiles, parts) + PIECE_TILES)
