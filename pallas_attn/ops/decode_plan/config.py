"""What can be turned in `plan_decode`."""

from __future__ import annotations

import dataclasses

from pallas_attn import tuning

ROW_OVERHEAD_TOKENS = 64
"""What starting a row costs a program (loading queries, filling its stages, writing a state), in tokens, unless it was
measured.
"""


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The cost model of `balanced` mode, tuned as "plan_decode" by page size.

    Attributes:
      row_overhead_pages: what starting a row costs a program, in pages.
    """

    row_overhead_pages: int

    def __post_init__(self) -> None:
        if self.row_overhead_pages < 0:
            raise ValueError(f"{self.row_overhead_pages=} must be at least 0")


def plan_config(page_size: int) -> PlanConfig:
    return tuning.lookup("plan_decode", {"page_size": page_size}, PlanConfig, lambda: heuristic_costs(page_size))


def heuristic_costs(page_size: int) -> PlanConfig:
    """Where nothing was measured."""
    return PlanConfig(max(1, ROW_OVERHEAD_TOKENS // page_size))
