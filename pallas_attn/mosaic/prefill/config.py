"""Settings of the prefill kernel, and the rows that copies begin at multiples of."""

from __future__ import annotations

import dataclasses

ALIGNMENT = 8
"""Rows that a swizzled tile repeats after: copies of rows begin at multiples of it."""


@dataclasses.dataclass(frozen=True)
class FlashConfig:
    """Sizes that a program works with.

    Attributes:
      tile_keys: keys of a tile.
      stages: tiles of keys, and as many of values, in shared memory.
      consumers: warpgroups that compute, each with the query rows of a product: 64 on Hopper, 128 on Blackwell.
    """

    tile_keys: int
    stages: int
    consumers: int

    def __post_init__(self) -> None:
        if self.tile_keys not in (64, 128, 192, 256):
            raise ValueError(f"{self.tile_keys=} must be a multiple of 64, which a swizzled row holds, up to 256")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2, one to read and one on its way")
        if self.consumers not in (1, 2, 3):
            raise ValueError(f"{self.consumers=} must be from 1 to 3, for which there are registers")
