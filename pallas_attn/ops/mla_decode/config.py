"""What can be turned in `mla_decode`."""

from __future__ import annotations

import dataclasses

from pallas_attn import tuning
from pallas_attn.portable.online_softmax import XlaConfig, decode_heuristic


def xla_config(rows: int, width: int) -> XlaConfig:
    """Tile and group sizes of the portable implementation, for this many sequences and L + R = `width` columns."""
    key = {"rows": rows, "width": width}
    return tuning.lookup("mla_decode/xla", key, XlaConfig, lambda: decode_heuristic(rows, width))


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How programs of the Mosaic kernel for many query rows work.

    Attributes:
      pairs: of tiles of 64 latents that one holds in shared memory.
      cluster: programs on neighbouring multiprocessors that share what they read: 1, or 2 where their number is even.
    """

    pairs: int
    cluster: int

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= 5:
            raise ValueError(f"{self.pairs=} must be from 1 to 5")
        if self.cluster not in (1, 2):
            raise ValueError(f"{self.cluster=} must be 1 or 2")


def mosaic_config(latent_dim: int, rope_dim: int, page_size: int) -> MosaicConfig:
    """Sizes of the Mosaic kernel for many query rows."""
    key = {"latent_dim": latent_dim, "rope_dim": rope_dim, "page_size": page_size}
    heuristic = MosaicConfig(pairs=1 if latent_dim + rope_dim > 320 else 2, cluster=2)
    return tuning.lookup("mla_decode/mosaic", key, MosaicConfig, lambda: heuristic)
