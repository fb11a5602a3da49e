"""Sizes and splits of `mla_sparse`, which can be tuned."""

from __future__ import annotations

import dataclasses

from pallas_attn import tuning
from pallas_attn.mosaic.sm90.pieces import PieceSizes


@dataclasses.dataclass(frozen=True)
class SparseConfig(PieceSizes):
    """Sizes of a program of the Mosaic kernel.

    Attributes:
      columns: of a tile that are gathered at a time, a piece.
    """

    columns: int

    def __post_init__(self) -> None:
        if self.columns not in (64, 128):
            raise ValueError(f"{self.columns=} must be 64 or 128")
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class SparseKey:
    """Facts of a call that the best sizes of the kernel depend on.

    Attributes:
      latent_dim: L.
      quantised: whether latents have 8 bits.
      shared: whether two programs share what they gather; addresses of the other one take registers.
    """

    latent_dim: int
    quantised: bool
    shared: bool


def sparse_config(key: SparseKey) -> SparseConfig:
    """Sizes of the Mosaic kernel."""
    registers = 72 if key.latent_dim > 256 else 120
    pieces = 2 if key.shared else 4 if key.quantised else 3
    heuristic = SparseConfig(columns=64, pieces=pieces, registers=registers)
    return tuning.lookup("mla_sparse/mosaic", dataclasses.asdict(key), SparseConfig, lambda: heuristic)


START_PAIRS = 2
"""Cost of beginning and ending a share of a token's slots, in pairs of tiles."""

MERGE_PAIRS = 3
"""Cost of writing and merging partial states, in pairs of tiles."""


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
