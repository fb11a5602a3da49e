"""Tunable cost model of `plan_decode`. A row is one KV head of one sequence.

A cost is a time, expressed as the number of pages or tokens that a CTA processes in this time.
"""

from __future__ import annotations

import dataclasses

from pallas_attn.runtime import tuning

ROW_OVERHEAD_TOKENS = 256
"""Default cost of starting a row in a CTA: the time for this number of tokens.

A start loads queries, fills the pipeline and writes a result. Measured with pages of 64 tokens and costs from 1 to 8
pages: decode was fastest with 4 or 5 pages for MLA with 64 and 128 heads, 3 to 5 pages for MLA with 16 heads, and 4 or
6 pages for GQA.
"""

CUT_TOKENS = 512
"""Default cost of splitting rows, per CTA: the time for this number of tokens.

If a CTA starts and ends inside rows, it writes two partial states, and a merge kernel reads all states. The measured
cost is higher for MLA with 128 heads, which has the largest states: about 700 tokens with 128 sequences of 2k tokens,
1,200 tokens with 128 sequences of 8k tokens.
"""


TILE_TOKENS = 64
"""Tokens of a tile of the decode kernel. If several CTAs share one row, the planner aims at more than one tile per CTA:
the kernel loads a tile while it computes with the previous tile.
"""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Cost model of `balanced` mode. Measured values per page size are in `runtime/tuned`, under "plan_decode".

    Attributes:
      row_overhead_pages: cost of starting a row in a CTA, in pages.
      cut_pages: cost of splitting rows per CTA, in pages.
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
    """Return the default costs, for a device without measured costs."""
    return PlanConfig(max(1, ROW_OVERHEAD_TOKENS // page_size), CUT_TOKENS // page_size)
