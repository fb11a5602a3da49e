"""KV splits: the keys of query blocks cut into parts, where there are fewer blocks than multiprocessors (split-KV).

The keys of all blocks are cut into equally many splits, and each split of a block is a work tile of its own, which
leaves partial states (`RowState`) that XLA merges. The number of splits is chosen on the device, by the kernel that
lists the blocks (`flash.schedule`), from the number of blocks and of the tiles of keys that they see; there is
room for the partial states of as many splits as a call of these shapes can have.

As in decode (`sm90.split_states`), partial states keep maximum and sum apart, and are merged by their maxima: an LSE of
5e5, rounded to float32, would change the weight of a split by up to 1.6%.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import LOG2E
from pallas_attn.mosaic.block_scan import Lanes
from pallas_attn.mosaic.tiles import over_tokens

WORK_TILE_OVERHEAD = 2
"""Cost of a work tile beside its tiles of keys, in tiles: its first scores, which overlap nothing, and its output."""

MERGE_OVERHEAD = 6
"""Cost of merging splits, in tiles. Both costs are estimates from the times of a launch and of a tile."""


@dataclasses.dataclass(frozen=True)
class KvSplits:
    """Limits within which keys of blocks may be cut.

    Attributes:
      most: number of splits that there is room for; 1 if keys are not cut.
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
        """Limits with room for as many splits as can be the best choice.

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
        """Choose the number of splits that takes the least time: in the listing kernel, where each thread computes the
        time of one number.

        Args:
          num_blocks: blocks of a head.
          kv_tiles: tiles of keys that a block sees at most.
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


def _time(work_tiles: Any, splits: Any, kv_tiles: Any, programs: int) -> Any:
    """Time of so many work tiles before they are cut into splits, in tiles of keys, without merging."""
    return pl.cdiv(work_tiles * splits, programs) * (pl.cdiv(kv_tiles, splits) + WORK_TILE_OVERHEAD)


# --- partial states


class RowState(NamedTuple):
    """Attention of query rows over some of the keys, not normalised: arrays, or references to them.

    Attributes:
      o: [n, Dv] float32, values weighted with 2**(score - m).
      m: [n] float32, the largest score times log2 e, or less than that by at most the threshold below which nothing is
        rescaled; -inf where no key is seen.
      l: [n] float32, sums of 2**(score - m).
    """

    o: Any
    m: Any
    l: Any  # noqa: E741

    @staticmethod
    def types(rows: int, value_dim: int) -> RowState:
        """Shapes of the states of so many rows."""
        each = jax.ShapeDtypeStruct((rows,), jnp.float32)
        return RowState(jax.ShapeDtypeStruct((rows, value_dim), jnp.float32), each, each)

    @property
    def seen(self) -> Any:
        """bool [n], whether a row sees a key; true of a row that saw NaN."""
        return self.l != 0

    def output(self, sink: Any = None) -> Any:
        """Normalised output [n, Dv], 0 where no key is seen.

        Args:
          sink: [n] learned logits of the rows.
        """
        seen, shift = self.seen, jnp.where(self.seen, self.m, 0.0)
        denominator = self.l if sink is None else self.l + jnp.exp2(sink * LOG2E - shift)
        inverse = jnp.where(seen, 1 / jnp.where(seen, denominator, 1.0), 0.0)
        # Rows that see nothing may hold 0 times an infinite value.
        return jnp.where(over_tokens(seen, self.o.shape), self.o * over_tokens(inverse, self.o.shape), 0.0)

    def lse(self) -> Any:
        """Natural logarithm of the denominator without sinks, [n]; -inf where no key is seen."""
        log2 = jnp.where(self.seen, self.m, 0.0) + jnp.log2(jnp.where(self.seen, self.l, 1.0))
        return jnp.where(self.seen, log2 * (1 / LOG2E), -jnp.inf)


def merge_splits(partials: RowState, room: int, num_splits: Int32[Array, ""]) -> RowState:
    """Merge the partial states of the splits of n rows.

    Args:
      partials: [room · n, ...], split after split. Those from `num_splits` on were not written.
    """
    o, m, l = (x.reshape(room, -1, *x.shape[1:]) for x in partials)  # noqa: E741
    seen = (jnp.arange(room, dtype=jnp.int32)[:, None] < num_splits) & (l != 0)
    m = jnp.where(seen, m, -jnp.inf)
    highest = m.max(axis=0)
    weights = jnp.exp2(m - jnp.where(highest == -jnp.inf, 0.0, highest)[None])
    o = jnp.where(seen[..., None], o * weights[..., None], 0.0).sum(axis=0)
    return RowState(o, highest, jnp.where(seen, l * weights, 0.0).sum(axis=0))
