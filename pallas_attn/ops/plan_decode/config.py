"""Tunable costs of `plan_decode`."""

from __future__ import annotations

import dataclasses

from pallas_attn.runtime import tuning

ROW_OVERHEAD_TOKENS = 256
"""Default cost of starting a piece (loading queries, filling the pipeline, writing a state), in tokens. With 1 to 8
pages of 64 tokens tried, the fastest were 4 or 5 pages for 64 and 128 heads of latents, 3 to 5 for 16 heads, and 4 or 6
for KV heads.
"""

CUT_TOKENS = 512
"""Default cost per CTA of cutting rows, in tokens: one state is written where the CTA's share starts and one where it
ends, and a merge kernel reads all states. It is higher for 128 heads of latents, which have the largest states: with
128 sequences of 2k and 8k tokens, cuts cost about 700 and 1,200 tokens.
"""


TILE_TOKENS = 64
"""Minimum tokens of a part of a row with separate CTAs. A piece of one tile could not overlap loading and computing."""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Cost model of `balanced` mode, tuned as "plan_decode" by page size.

    Attributes:
      row_overhead_pages: cost of starting a row for a CTA, in pages.
      cut_pages: cost of cutting rows for a CTA, in pages.
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
    """Return the costs for a device without measured costs."""
    return PlanConfig(max(1, ROW_OVERHEAD_TOKENS // page_size), CUT_TOKENS // page_size)
