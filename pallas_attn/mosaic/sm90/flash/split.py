"""KV splits: the keys of query blocks cut into parts, where there are fewer blocks than multiprocessors (split-KV).

The keys of all blocks are cut into equally many splits, and each split of a block is a work tile of its own, with a
partial output and an LSE that XLA merges. The number of splits is chosen on the device, by the kernel that lists the
blocks (`sm90.flash.schedule`), from the number of blocks and of the tiles of keys that they see; the partial outputs
have room for the most that a call of these shapes can have.

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
from pallas_attn.mosaic.block_scan import Lanes
from pallas_attn.portable.merge import merge_states

WORK_TILE_OVERHEAD = 2
"""Cost of a work tile beside its tiles of keys, in tiles: its first scores, which overlap nothing, and its end."""

MERGE_OVERHEAD = 6
"""Cost of merging splits, in tiles. Both costs are reckoned from what a launch and a tile take, and not measured."""


@dataclasses.dataclass(frozen=True)
class KvSplits:
    """Limits within which keys of blocks may be cut.

    Attributes:
      most: splits that there is room for; 1 if keys are not cut.
      heads: heads, or groups of heads that share a block, that blocks are done for.
      most_tiles: tiles of keys that a block can see.
      programs: programs that run at a time.
    """

    most: int
    heads: int
    most_tiles: int
    programs: int

    @staticmethod
    def of(*, heads: int, num_blocks: tuple[int, int], most_tiles: int) -> KvSplits:
        """Room for as many splits as can be the best choice.

        Args:
          heads, most_tiles: see the class.
          num_blocks: the least and the largest number of blocks of a head.
        """
        programs = basics.multiprocessors()
        fewest, largest = (n * heads for n in num_blocks)
        room = max(1, min(2 * programs // fewest, most_tiles))  # at most two partial outputs a program

        def best(work_tiles: int) -> int:
            return min(
                range(1, room + 1),
                key=lambda splits: _time(work_tiles, splits, most_tiles, programs) + MERGE_OVERHEAD * (splits > 1),
            )

        most = max(best(n) for n in range(fewest, max(min(largest, programs), fewest) + 1))
        return KvSplits(most, heads, most_tiles, programs)

    def choose(self, lanes: Lanes, num_blocks: Any, kv_tiles: Any) -> Any:
        """In the listing kernel: the number of splits that takes the least time, for so many blocks of a head that see
        so many tiles of keys at most. Every thread works out the time of one number.
        """
        # The least time and the thread that found it are one number: the time above, the thread below.
        power = 1 << self.most.bit_length()
        longest = (1 << 31) // power - 1
        splits = lanes.number() + 1
        merging = jnp.where(splits > 1, MERGE_OVERHEAD, 0)
        time = _time(num_blocks * self.heads, splits, jnp.minimum(kv_tiles, self.most_tiles), self.programs) + merging
        time = jnp.minimum(time, longest)
        time = jnp.where(splits <= self.most, time, longest)
        least = -lanes.max(-(time * power + lanes.number() % power))
        return least % power + 1

    def merge(
        self,
        outs: Float[Array, "most_rows D"],
        lses: Float[Array, "most_rows"],
        counts: Int32[Array, "numbers"],
        shape: tuple[int, int],
        sinks: Float[Array, "Hq"] | None,
        out_dtype: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
        """Output and LSE over all splits.

        Args:
          outs, lses: of each split, for rows of `shape` [T, Hq].
          counts: of the `WorkList`.
          sinks: learned logits; None if they are in the outputs, as they are where nothing is cut.
        """
        if self.most == 1:
            return outs.reshape(*shape, -1), lses.reshape(shape)
        exists = jnp.arange(self.most, dtype=jnp.int32)[:, None, None] < counts[1]
        lses = jnp.where(exists, lses.reshape(self.most, *shape), -jnp.inf)
        out, lse = merge_states(outs.reshape(self.most, *shape, -1), lses, sinks)
        return out.astype(out_dtype), lse


def _time(work_tiles: Any, splits: Any, kv_tiles: Any, programs: int) -> Any:
    """Time of so many work tiles before they are cut into splits, in tiles of keys, without merging."""
    return pl.cdiv(work_tiles * splits, programs) * (pl.cdiv(kv_tiles, splits) + WORK_TILE_OVERHEAD)
