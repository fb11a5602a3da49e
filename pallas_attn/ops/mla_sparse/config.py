"""Number of splits of a token's slots in the Hopper kernels of `mla_sparse`.

A split is a part of the slots that one CTA processes, in pairs of tiles of 64 slots. Costs are in units of the time
that a CTA needs for a pair of tiles.
"""

from __future__ import annotations

START_PAIRS = 2
"""Fixed cost of a split, in pairs of tiles."""

MERGE_PAIRS = 3
"""Cost of writing and merging partial states, in pairs of tiles."""


def num_splits(items: int, pairs: int, programs: int) -> int:
    """Return the number of splits of a token's slots that minimises the estimated time.

    Args:
      items: number of blocks of up to 64 heads, over all tokens.
      pairs: number of pairs of tiles of a token.
      programs: number of CTAs that run concurrently.
    """

    def cost(splits: int) -> int:
        rounds = -(-items * splits // programs)
        return rounds * (START_PAIRS + -(-pairs // splits)) + (MERGE_PAIRS if splits > 1 else 0)

    return min(range(1, pairs + 1), key=cost)
