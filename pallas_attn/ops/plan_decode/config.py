"""Tunable sizes of `plan_decode`."""

from __future__ import annotations

import dataclasses

from pallas_attn.runtime import tuning

ROW_OVERHEAD_TOKENS = 256
"""Cost for a program of starting a piece (loading queries, filling its stages, writing a state), in tokens, unless
measured. Of 1 to 8 pages of 64, the least time was that of 4 or 5 with 64 and 128 heads of latents, of 3 to 5 with 16,
of 4 or 6 with KV heads (benchmarks/log/020-rows-dealt-to-groups.md).
"""

CUT_TOKENS = 512
"""Cost for each program of cutting rows, likewise: a state written where its share begins and one where it ends, and a
kernel that reads them all again. With 128 heads of latents, whose states are the largest, that is more: 128 sequences
of 2k and 8k lose as much by it as some 700 and 1,200 tokens take (benchmarks/log/018-no-needless-splits.md).
"""


TILE_TOKENS = 64
"""Parts of rows that have programs to themselves are of more: a piece of one tile has nothing to do while it comes."""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The cost model of `balanced` mode, tuned as "plan_decode" by page size.

    Attributes:
      row_overhead_pages: what starting a row costs a program, in pages.
      cut_pages: what it costs it that rows are cut.
    """

    row_overhead_pages: int
    cut_pages: int

    def __post_init__(self) -> None:
        for name, pages in dataclasses.asdict(self).items():
            if pages < 0:
                raise ValueError(f"{name}: expected at least 0, got {pages}")


def plan_config(page_size: int) -> PlanConfig:
    return tuning.lookup("plan_decode", {"page_size": page_size}, PlanConfig, lambda: heuristic_costs(page_size))


def heuristic_costs(page_size: int) -> PlanConfig:
    """Costs that were not measured for the device."""
    return PlanConfig(max(1, ROW_OVERHEAD_TOKENS // page_size), CUT_TOKENS // page_size)
