"""Number of programs that share a token's slots in `mla_sparse`."""

from __future__ import annotations

START_PAIRS = 2
"""Cost of beginning and ending a share of a token's slots, in pairs of tiles."""

MERGE_PAIRS = 3
"""Cost of writing and merging partial states, in pairs of tiles."""

FEW_PAIRS = 4
"""Pairs of tiles of a program, at most, for which latents in 8 bits become bfloat16 first. Where they stay in 8 bits, a
pair takes 5.5 us for 7.2, and a program longer to begin: 8 rows of 64 heads, a pair each, 23.1 us for 21.7 (H200).
"""

FEW_HEADS = 32
"""Heads of a token, at most, that begin soon enough to stay in 8 bits."""


def num_splits(items: int, pairs: int, programs: int) -> int:
    """Shares of a token's slots.

    Args:
      items: blocks of query rows of all tokens.
      pairs: of tiles that a token's slots make.
      programs: side by side.
    """

    def cost(splits: int) -> int:
        rounds = -(-items * splits // programs)
        return rounds * (START_PAIRS + -(-pairs // splits)) + (MERGE_PAIRS if splits > 1 else 0)

    return min(range(1, pairs + 1), key=cost)


def stays_in_8_bits(heads: int, items: int, pairs: int, programs: int) -> bool:
    """Whether latents in 8 bits stay so until they are multiplied; arguments as of `num_splits`."""
    if heads <= FEW_HEADS:
        return True
    splits = num_splits(items, pairs, programs)
    rounds = -(-items * splits // programs)
    return rounds * -(-pairs // splits) > FEW_PAIRS
