"""Settings of the Mosaic kernel of `write_kv`.

An entry is one token of one KV head: D columns of k and of v. A scale group is a group of tokens of one KV head that
share a dynamic scale. Its leader is its first token that the call writes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from pallas_attn.runtime import tuning

type Rotation = Literal["none", "neox", "interleaved"]


@dataclasses.dataclass(frozen=True)
class WriteKVConfig:
    """Division of the work among threads and CTAs.

    Attributes:
      row_threads: maximum number of threads that share an entry; a power of two.
      scan_tokens: number of new tokens that a CTA checks for leaders of scale groups, 1 to 16.
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
      head_dim: D, columns of a head.
      rotary_half: number of pairs of columns that RoPE rotates.
      rotation: "neox" if column i and column rotary_half + i are a pair, "interleaved" if columns 2i and 2i + 1 are.
      entries: T·Hkv, rounded up to a power of two.
      group_tokens: tokens of a scale group; 0 without dynamic scales.
    """

    head_dim: int
    rotary_half: int
    rotation: Rotation
    entries: int
    group_tokens: int

    @property
    def unit(self) -> int:
        """Largest power of two that divides the number of columns of every segment of a head.

        Segments are the rotated columns (in neox style, each half of them) and the columns without rotation. The
        threads of an entry share each segment equally.
        """
        rotated = self.rotary_half if self.rotation == "neox" else 2 * self.rotary_half
        common = math.gcd(rotated, self.head_dim - 2 * self.rotary_half) if rotated else self.head_dim
        return common & -common

    def threads_and_vector(self, config: WriteKVConfig) -> tuple[int, int]:
        """Return the number of threads that share an entry, and the number of adjacent columns per access of a
        thread.
        """
        threads = min(config.row_threads, self.unit // (2 if self.rotation == "interleaved" else 1), 32)
        return threads, min(8, self.unit // threads)


def mosaic_config(key: WriteKVKey) -> WriteKVConfig:
    """Return the measured configuration for this device, or the heuristic one if none is measured."""
    return tuning.lookup("kv_write/mosaic", dataclasses.asdict(key), WriteKVConfig, lambda: _mosaic_heuristic(key))


MIN_CTAS = 264
"""Two CTAs for each of the 132 multiprocessors of an H100. With fewer CTAs, multiprocessors idle during memory
accesses.
"""


def _mosaic_heuristic(key: WriteKVKey) -> WriteKVConfig:
    """Return a configuration with 16 columns per thread, or with fewer columns if the call is small.

    A CTA of 128 threads processes 128 / row_threads entries at a time.
    """
    row_threads = 1
    while row_threads < 32 and (key.head_dim > 16 * row_threads or _has_spare_rows(key, 128 // row_threads)):
        row_threads *= 2
    return WriteKVConfig(row_threads, scan_tokens=min(16, max(1, key.entries // 4096)))


def _has_spare_rows(key: WriteKVKey, rows: int) -> bool:
    """Return whether `rows` entries per CTA are more than a scale group has, or leave fewer than `MIN_CTAS` CTAs."""
    return rows > key.group_tokens if key.group_tokens > 1 else key.entries < MIN_CTAS * rows
