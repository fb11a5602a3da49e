"""What can be turned in kernels that attend over pages on Hopper, and the shared memory of a multiprocessor."""

from __future__ import annotations

import dataclasses

SHARED_BYTES = 227 * 1024
"""Shared memory of a Hopper multiprocessor that programs can have."""

MAX_STAGES = 4
"""More than these are not used unless they were measured to help."""


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How a program of the Mosaic kernel works.

    Attributes:
      tile_tokens: keys it takes at once.
      stages: tiles it holds in shared memory; all but one are on their way, and if it is the only one, those of the
        programs beside it.
      programs_per_multiprocessor: programs side by side on one, in plans made for this configuration.
    """

    tile_tokens: int
    stages: int
    programs_per_multiprocessor: int

    def __post_init__(self) -> None:
        if self.tile_tokens < 64 or self.tile_tokens % 64:
            raise ValueError(f"{self.tile_tokens=} must be a multiple of 64, wgmma's M")
        if not 1 <= self.stages <= 32:
            raise ValueError(f"{self.stages=} must be from 1 to 32")
        if not 1 <= self.programs_per_multiprocessor <= 16:
            raise ValueError(f"{self.programs_per_multiprocessor=} must be from 1 to 16")


def reduction_bytes(columns: int) -> int:
    """Shared memory for maxima and sums over the tokens of a tile; with 128 bytes a column one round is enough."""
    return min(128 * columns, 4096)
