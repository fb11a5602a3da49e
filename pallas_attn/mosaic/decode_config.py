"""Tunable sizes of the kernel of `mosaic.decode`, in a file that loads without a kernel language."""

from __future__ import annotations

import dataclasses

MAX_STAGES = 4
"""Heuristics choose no more stages; more have to be measured to help."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Sizes of a program of the decode kernel.

    Attributes:
      tile_tokens: keys of a tile.
      stages: tiles in shared memory. All but one are in flight; of one, the programs beside it hide the latency.
      programs_per_multiprocessor: programs that plans made for this configuration let run side by side.
    """

    tile_tokens: int
    stages: int
    programs_per_multiprocessor: int

    def __post_init__(self) -> None:
        if self.tile_tokens < 64 or self.tile_tokens % 64:
            raise ValueError(f"{self.tile_tokens=} must be a multiple of 64, M of the tensor cores")
        if not 1 <= self.stages <= 32:
            raise ValueError(f"{self.stages=} must be from 1 to 32")
        if not 1 <= self.programs_per_multiprocessor <= 16:
            raise ValueError(f"{self.programs_per_multiprocessor=} must be from 1 to 16")
