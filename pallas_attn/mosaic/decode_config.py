"""Tunable sizes of the kernel in `mosaic.decode`. This module does not import a kernel language."""

from __future__ import annotations

import dataclasses

MAX_STAGES = 4
"""Largest number of stages that heuristics choose. No measurement has shown a benefit of more."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Sizes of the decode kernel.

    Attributes:
      tile_tokens: keys of a tile.
      stages: tiles in shared memory. All but one are in flight; with a single stage, other CTAs on the multiprocessor
        hide the latency.
      programs_per_multiprocessor: CTAs per multiprocessor in plans made for this configuration.
    """

    tile_tokens: int
    stages: int
    programs_per_multiprocessor: int

    def __post_init__(self) -> None:
        if self.tile_tokens < 64 or self.tile_tokens % 64:
            raise ValueError(f"{self.tile_tokens=} must be a multiple of 64 (M of a tensor-core instruction)")
        if not 1 <= self.stages <= 32:
            raise ValueError(f"{self.stages=} must be from 1 to 32")
        if not 1 <= self.programs_per_multiprocessor <= 16:
            raise ValueError(f"{self.programs_per_multiprocessor=} must be from 1 to 16")
