"""Tunable costs of `plan_decode`."""

from __future__ import annotations

import dataclasses

from pallas_attn.runtime import tuning

ROW_OVERHEAD_TOKENS = 256
"""Default cost [tokens] for a program of starting a split: loading queries, filling its stages, writing a state. Out of
1 to 8 pages of 64, the lowest times were measured with 4 or 5 pages for latents with 64 and 128 heads, 3 to 5 for
latents with 16 heads, and 4 or 6 for KV heads.
"""

CUT_TOKENS = 512
"""Default cost [tokens] for each program of cutting rows: a state written at the start and at the end of its share, and
a kernel that reads the states. Latents with 128 heads have the largest states, and a higher cost: about 700 and 1,200
tokens for 128 sequences of 2k and 8k.
"""


TILE_TOKENS = 64
"""Programs of a row with separate programs take more tokens than this. A split of one tile would be idle while the tile
is loaded.
"""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Cost model of `balanced` mode, tuned as "plan_decode" by page size.

    Attributes:
      row_overhead_pages: cost [pages] for a program of starting a row.
      cut_pages: cost [pages] for a program of cutting rows.
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
    """Costs for devices without measured costs."""
    return PlanConfig(max(1, ROW_OVERHEAD_TOKENS // page_size), CUT_TOKENS // page_size)
