"""Tunable sizes of the kernel in `mosaic.decode`. This module does not import a kernel language."""

from __future__ import annotations

import dataclasses

MAX_STAGES = 4
"""Largest number of stages that heuristics choose. Measurements showed no benefit of more stages."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Sizes of the decode kernel.

    Attributes:
      tile_tokens: cached tokens that a CTA processes per iteration.
      stages: number of shared-memory buffers per CTA, each for one tile of keys and values. While a CTA computes with
        one tile, copies into the other stages are in flight. With a single stage, only other CTAs on the multiprocessor
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
