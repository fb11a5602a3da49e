"""Number of splits of a token's slots in `mla_sparse`."""

from __future__ import annotations

START_PAIRS = 2
"""Fixed cost of a split, in units of the time of a pair of tiles."""

MERGE_PAIRS = 3
"""Cost of writing and merging partial states, in units of the time of a pair of tiles."""


def num_splits(items: int, pairs: int, programs: int) -> int:
    """Return the number of splits of a token's slots that minimises the estimated time.

    Args:
      items: number of blocks of query rows of all tokens.
      pairs: number of pairs of tiles of a token.
      programs: number of CTAs that run concurrently.
    """

    def cost(splits: int) -> int:
        rounds = -(-items * splits // programs)
        return rounds * (START_PAIRS + -(-pairs // splits)) + (MERGE_PAIRS if splits > 1 else 0)

    return min(range(1, pairs + 1), key=cost)
