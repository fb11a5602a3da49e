"""Settings of the prefill kernel."""

from __future__ import annotations

import dataclasses

ALIGNMENT = 8
"""Rows after which the swizzle pattern of shared memory repeats. TMA copies of rows start at multiples of it."""


@dataclasses.dataclass(frozen=True)
class FlashConfig:
    """Sizes of a CTA of the prefill kernel.

    Attributes:
      tile_keys: keys that a CTA multiplies per iteration.
      stages: pipeline stages. A stage holds one tile of keys and one of values in shared memory.
      consumers: consumer warpgroups. Each has 64 query rows on Hopper, 128 on Blackwell.
      column_parts: number of consumers that share query rows. Each of them has a part of the columns of the output,
        because all columns do not fit the registers of one consumer.
    """

    tile_keys: int
    stages: int
    consumers: int
    column_parts: int = 1

    def __post_init__(self) -> None:
        if self.tile_keys not in (64, 128, 192, 256):
            raise ValueError(f"{self.tile_keys=} must be 64, 128, 192 or 256")
        least = 1 if self.column_parts > 1 else 2
        if self.stages < least:
            raise ValueError(f"{self.stages=} must be at least {least}")
        if self.consumers not in (1, 2, 3):
            raise ValueError(f"{self.consumers=} must be from 1 to 3")
        if self.column_parts not in (1, 2) or self.consumers % self.column_parts:
            raise ValueError(f"{self.column_parts=} must be 1, or 2 with 2 consumers")
