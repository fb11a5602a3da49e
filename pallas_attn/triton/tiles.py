"""Sizes of Triton kernels by card: the one table, by how much shared memory a thread block may have.

Nothing here was timed on a card but the tile of 64 tokens by 128 columns, 4 warps and 2 stages, on an H100.
"""

from __future__ import annotations

import dataclasses

from pallas_attn.device import Device

SMALL_SHARED_BYTES = 100 * 1024
"""A100, H100 and B200 have more for a thread block; sm86, sm89 and sm120 have 99 KiB."""

MOST_PROGRAMS = 3
"""Programs of 4 warps on a multiprocessor, at most: more take registers that are not there."""


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """Sizes of an attention kernel.

    Attributes:
      rows: query rows of a program, a power of two from 16 on.
      tokens: tokens of a step, a power of two from 16 on.
      width: columns, padded to a power of two.
      warps, stages: as Triton has them.
    """

    rows: int
    tokens: int
    width: int
    warps: int
    stages: int

    def programs_per_multiprocessor(self, card: Device, token_bytes: int) -> int:
        """Programs that run side by side, by the shared memory of their tokens.

        Args:
          token_bytes: bytes of a token's keys and values, padded.
        """
        shared = card.shared_bytes_per_multiprocessor or SMALL_SHARED_BYTES
        most = MOST_PROGRAMS * 4 // self.warps
        return max(1, min(most, shared // (self.stages * self.tokens * token_bytes)))


def power_of_two(n: int, at_least: int = 16) -> int:
    """The next power of two, `at_least` so much: what tiles of tensor cores are made of."""
    return max(at_least, 1 << (n - 1).bit_length())


def has_small_shared_memory(card: Device) -> bool:
    """Whether a thread block has no more than 99 KiB, or nobody knows."""
    return (card.shared_bytes_per_block or 0) <= SMALL_SHARED_BYTES


def has_e4m3(card: Device) -> bool:
    """Whether the card has instructions for float8_e4m3fn."""
    return card.capability is not None and card.capability >= (8, 9)


def decode_tile(card: Device, rows: int, head_dim: int) -> TritonTile:
    """Tile of decode attention.

    Args:
      rows: query rows that share keys.
      head_dim: columns of keys, and of values.
    """
    width = power_of_two(head_dim)
    most_rows = 32 if width > 128 else 64
    small = has_small_shared_memory(card)
    tokens = 64 if width <= (64 if small else 128) else 32
    rows = min(power_of_two(rows), most_rows)
    return TritonTile(rows, tokens, width, warps=8 if rows * width > 4096 else 4, stages=2)


@dataclasses.dataclass(frozen=True)
class FlashTile:
    """Sizes of a kernel for attention of many queries.

    Attributes:
      rows: query rows of a program, a power of two from 16 on.
      tokens: tokens of a step, a power of two from 16 on.
      warps, stages: as Triton has them.
    """

    rows: int
    tokens: int
    warps: int
    stages: int

    def heads(self, group: int) -> int:
        """Heads of a group that a program takes: as many as have a row, in blocks of about one size."""
        return -(-group // -(-group // self.rows))


MOST_ROWS = 128
"""Query rows of a program, at most."""


def flash_tile(card: Device, rows: int, head_dim: int, *, demanding: bool) -> FlashTile:
    """Tile of attention of many queries: the largest one that the registers hold.

    Args:
      rows: query rows that share keys, on average.
      head_dim: columns of keys or of values, whichever are more.
      demanding: whether keys are scaled or scores capped, which takes registers.
    """
    width = power_of_two(head_dim)
    by_warpgroup = card.capability is not None and card.capability[0] in (9, 10)  # whose operands need no registers
    if width > 128 and demanding:
        return FlashTile(rows=32, tokens=32, warps=4, stages=2)
    if width > 128:
        return FlashTile(MOST_ROWS if by_warpgroup else 64, tokens=32, warps=8, stages=2)
    if rows <= 64 or (demanding and not by_warpgroup):
        spacious = not demanding and (width <= 64 or by_warpgroup)
        return FlashTile(rows=64, tokens=64 if spacious else 32, warps=4, stages=2)
    return FlashTile(MOST_ROWS, tokens=64 if width <= 64 or by_warpgroup else 32, warps=8, stages=2)
