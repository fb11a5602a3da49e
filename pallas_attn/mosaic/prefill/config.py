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
    """

    tile_keys: int
    stages: int
    consumers: int

    def __post_init__(self) -> None:
        if self.tile_keys not in (64, 128, 192, 256):
            raise ValueError(f"{self.tile_keys=} must be 64, 128, 192 or 256")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2")
        if self.consumers not in (1, 2, 3):
            raise ValueError(f"{self.consumers=} must be from 1 to 3")
