"""Settings of the Triton kernel of `compress_and_write`."""

from __future__ import annotations

import dataclasses

from pallas_attn.runtime import tuning

TILE_ELEMENTS = 8192
"""Maximum number of contents, and of gates, in a tile of rows: 32 for each of 256 threads."""


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """Division of the work among programs and threads.

    Attributes:
      tokens: new tokens of a program; a power of two. A program copies their rows at once, and pools the blocks that
        they complete one after another.
      rows: rows that are pooled at a time; a power of two.
      warps: warps of a program.
    """

    tokens: int
    rows: int
    warps: int

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, got {value}")

    @classmethod
    def of(cls, *, num_tokens: int, width: int, pooled: int) -> CompressConfig:
        """Return the settings of a call: measured for the GPU, otherwise the heuristic.

        Args:
          num_tokens: T.
          width: D, columns of an entry, rounded up to a power of two.
          pooled: rows of an entry.
        """

        def heuristic() -> CompressConfig:
            rows = min(_power_of_two(pooled), max(1, TILE_ELEMENTS // width))
            return cls(tokens=1, rows=rows, warps=8 if 2 * max(rows, 8) * width > TILE_ELEMENTS // 2 else 4)

        key = {"tokens": _power_of_two(num_tokens), "width": width, "pooled": pooled}
        return tuning.lookup("compress_and_write/triton", key, cls, heuristic)


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
