"""Records and totals of the engine's steps."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

from models.engine.group_sizes import GroupSizes
from models.engine.outputs import GroupStats, StepRecord, Totals
from models.engine.runner import StepResult
from models.engine.step.plan import RowTokens


@dataclasses.dataclass(frozen=True)
class LaunchedStep:
    """A step that runs on the device.

    Attributes:
      result: the step's results on the device.
      planned_s, launched_s: when planning began, and when the launch returned.
      cached_tokens: prompt tokens that the step's new requests found in the prefix cache.
      used_rows: page rows owned by requests in each cache group.
    """

    result: StepResult
    planned_s: float
    launched_s: float
    cached_tokens: int
    used_rows: tuple[int, ...]


class StepLog:
    """Records of the newest steps, totals of all steps, and peak memory use.

    Attributes:
      records: the newest steps.
      totals: sums over all steps.
      peak_rows: most page rows in use at once, for each cache group.
      peak_pages: most pages in use at once, of all cache groups together.
    """

    def __init__(self, history: int | None, groups: Sequence[GroupSizes], num_ranks: int, start_s: float):
        """Start an empty log.

        Args:
          history: number of step records; None for all.
          groups: cache groups of a data rank.
          num_ranks: number of data ranks.
          start_s: zero of `StepRecord.ended_s`.
        """
        self._groups, self._num_ranks, self._start_s = tuple(groups), num_ranks, start_s
        self.records: deque[StepRecord] = deque(maxlen=history)
        self.totals = Totals()
        self.peak_rows = (0,) * len(self._groups)
        self.peak_pages = 0

    def pages(self, rows: Sequence[int]) -> int:
        """Convert page rows of each cache group to pages of all layers, rounded up."""
        shares = (len(g.layers) * Fraction(n, g.num_heads) for g, n in zip(self._groups, rows, strict=True))
        return math.ceil(sum(shares, Fraction(0)) / sum(len(g.layers) for g in self._groups))

    def record_use(self, rows: tuple[int, ...]) -> None:
        """Update the peaks with the page rows in use."""
        self.peak_rows = tuple(map(max, self.peak_rows, rows))
        self.peak_pages = max(self.peak_pages, self.pages(rows))

    def group_stats(self, used_rows: Sequence[int]) -> tuple[GroupStats, ...]:
        return tuple(
            GroupStats(group.layers, group.num_heads, group.num_rows * self._num_ranks, used, peak)
            for group, used, peak in zip(self._groups, used_rows, self.peak_rows, strict=True)
        )

    def add(self, step: LaunchedStep, rows: Sequence[RowTokens], now: float) -> StepRecord:
        """Add a step that has ended.

        Args:
          step: the step.
          rows: tokens of its sampling rows.
          now: when they were read.
        """
        previous_end = self.records[-1].ended_s + self._start_s if self.records else 0.0
        launched = [plan for plan in step.result.plans if plan is not None]
        decodes = [i < len(plan.decode) for plan in launched for i in range(len(plan.sampling_rows))]
        record = StepRecord(
            ended_s=now - self._start_s,
            duration_s=now - max(previous_end, step.planned_s),
            prefill_tokens=sum(row.num_tokens for plan in launched for row in plan.prefill),
            decode_tokens=sum(len(row.tokens) for row, is_decode in zip(rows, decodes, strict=True) if is_decode),
            cached_tokens=step.cached_tokens,
            used_pages=self.pages(step.used_rows),
            used_rows=step.used_rows,
            drafted_tokens=sum(row.drafted for row in rows),
            accepted_tokens=sum(max(len(row.tokens) - 1, 0) for row in rows),
            launch_s=step.launched_s - step.planned_s,
        )
        self.records.append(record)
        self.totals = self.totals.plus(record)
        return record
