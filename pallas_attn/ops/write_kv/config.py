"""Settings of `write_kv`."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from pallas_attn.runtime import tuning

type Rotation = Literal["none", "neox", "interleaved"]


@dataclasses.dataclass(frozen=True)
class WriteKVConfig:
    """Division of the Mosaic kernel's work among threads and CTAs.

    Attributes:
      row_threads: threads that share an entry (a token of a head), at most.
      scan_tokens: number of tokens that a CTA checks for leaders of scale groups.
    """

    row_threads: int
    scan_tokens: int

    def __post_init__(self) -> None:
        if self.row_threads not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"{self.row_threads=} must be a power of two, at most a warp's 32")
        if not 1 <= self.scan_tokens <= 16:
            raise ValueError(f"{self.scan_tokens=} must be from 1 to 16")


@dataclasses.dataclass(frozen=True)
class WriteKVKey:
    """Properties of a call that determine its configuration.

    Attributes:
      head_dim: D.
      rotary_half: number of pairs of columns that are rotated.
      rotation: which columns are pairs.
      entries: T·Hkv, rounded up to a power of two.
      group_tokens: tokens that share a dynamic scale; 0 without dynamic scales.
    """

    head_dim: int
    rotary_half: int
    rotation: Rotation
    entries: int
    group_tokens: int

    @property
    def unit(self) -> int:
        """Largest power of two that divides the lengths of the rotated and the other columns."""
        rotated = self.rotary_half if self.rotation == "neox" else 2 * self.rotary_half
        common = math.gcd(rotated, self.head_dim - 2 * self.rotary_half) if rotated else self.head_dim
        return common & -common

    def threads_and_vector(self, config: WriteKVConfig) -> tuple[int, int]:
        """Number of threads that share a row, and number of neighbouring columns per access of a thread."""
        threads = min(config.row_threads, self.unit // (2 if self.rotation == "interleaved" else 1), 32)
        return threads, min(8, self.unit // threads)


def mosaic_config(key: WriteKVKey) -> WriteKVConfig:
    """Return the configuration of the Mosaic kernel."""
    return tuning.lookup("kv_write/mosaic", dataclasses.asdict(key), WriteKVConfig, lambda: _mosaic_heuristic(key))


MIN_CTAS = 264
"""Two CTAs per multiprocessor of an H100. With fewer, multiprocessors are idle while they wait for memory."""


def _mosaic_heuristic(key: WriteKVKey) -> WriteKVConfig:
    """16 columns per thread, or fewer if a CTA would otherwise have more rows than needed."""
    row_threads = 1
    while row_threads < 32 and (key.head_dim > 16 * row_threads or _has_spare_rows(key, 128 // row_threads)):
        row_threads *= 2
    return WriteKVConfig(row_threads, scan_tokens=min(16, max(1, key.entries // 4096)))


def _has_spare_rows(key: WriteKVKey, rows: int) -> bool:
    return rows > key.group_tokens if key.group_tokens > 1 else key.entries < MIN_CTAS * rows
