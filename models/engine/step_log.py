"""Statistics of the engine's steps: records of the newest steps, and totals."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

from pallas_attn.models.engine.distributed.data_ranks import DataRanks
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.outputs import EngineStats, GroupStats, StepRecord, Totals
from pallas_attn.models.engine.runner import Runner, StepResult
from pallas_attn.models.engine.step.plan import RowTokens
from pallas_attn.models.engine.warmup import Warmup


@dataclasses.dataclass(frozen=True)
class LaunchedStep:
    """A step that has been launched and whose tokens the host has not read yet.

    Attributes:
      result: tokens and logits on the device.
      planned_s: time at which planning began, in seconds of the engine's clock, which stops during compilation.
      launched_s: time at which the call that launched the step returned, in seconds of the same clock.
      cached_tokens: number of tokens that the requests admitted by this step found in the prefix cache. If a request is
        admitted again after a preemption, they include generated tokens.
      used_rows: number of page rows that requests own in each cache group, after planning. A cache group is a set of
        layers with equal attention windows. A page row is one page of one KV head if the heads of a layer have
        different windows, otherwise one page of all heads.
    """

    result: StepResult
    planned_s: float
    launched_s: float
    cached_tokens: int
    used_rows: tuple[int, ...]


class StepLog:
    """Records of the newest steps, totals of all steps, and maximum use of the cache.

    Attributes:
      records: records of the newest steps.
      totals: sums over all steps.
      peak_rows: maximum number of page rows in use, for each cache group.
      peak_pages: maximum number of pages in use, all cache groups together (see `pages`).
    """

    def __init__(self, history: int | None, groups: Sequence[GroupSizes], num_ranks: int, start_s: float):
        """Start an empty log.

        Args:
          history: maximum number of step records; None to store all.
          groups: cache groups, with the sizes of one data rank (a group of devices with its own page pools).
          num_ranks: number of data ranks.
          start_s: time of the engine's clock at which `StepRecord.ended_s` is 0.
        """
        self._groups, self._num_ranks, self._start_s = tuple(groups), num_ranks, start_s
        self.records: deque[StepRecord] = deque(maxlen=history)
        self.totals = Totals()
        self.peak_rows = (0,) * len(self._groups)
        self.peak_pages = 0

    def pages(self, rows: Sequence[int]) -> int:
        """Convert numbers of page rows of each cache group to the number of pages of equal memory, rounded up. Here one
        page counts as one page of every layer and head."""
        shares = (len(g.layers) * Fraction(n, g.num_heads) for g, n in zip(self._groups, rows, strict=True))
        return math.ceil(sum(shares, Fraction(0)) / sum(len(g.layers) for g in self._groups))

    def record_use(self, rows: tuple[int, ...]) -> None:
        """Update the maxima, given the number of page rows in use in each cache group."""
        self.peak_rows = tuple(map(max, self.peak_rows, rows))
        self.peak_pages = max(self.peak_pages, self.pages(rows))

    def group_stats(self, used_rows: Sequence[int]) -> tuple[GroupStats, ...]:
        return tuple(
            GroupStats(group.layers, group.num_heads, group.num_rows * self._num_ranks, used, peak)
            for group, used, peak in zip(self._groups, used_rows, self.peak_rows, strict=True)
        )

    def stats(self, ranks: DataRanks, runner: Runner, warmup: Warmup, num_pages: int) -> EngineStats:
        """Return the statistics of an engine.

        Args:
          ranks, runner, warmup: parts of the engine.
          num_pages: as `EngineStats.num_pages`.
        """
        totals, used = self.totals, ranks.used_rows
        return EngineStats(
            steps=tuple(self.records),
            num_steps=totals.steps,
            drafted_tokens=totals.drafted_tokens,
            accepted_tokens=totals.accepted_tokens,
            prefill_tokens=totals.prefill_tokens,
            decode_tokens=totals.decode_tokens,
            prefill_tokens_per_s=totals.prefill_tokens / totals.prefill_s if totals.prefill_s else 0.0,
            decode_tokens_per_s=totals.decode_tokens / totals.decode_s if totals.decode_s else 0.0,
            prefix_hit_rate=ranks.found_tokens / (ranks.looked_up_tokens or 1),
            used_pages=self.pages(used),
            peak_pages=self.peak_pages,
            num_pages=num_pages,
            groups=self.group_stats(used),
            preemptions=ranks.num_preemptions,
            compilations=runner.num_compilations,
            pending_compilations=warmup.num_pending,
            failed_compilations=warmup.num_errors,
            compile_s=runner.compile_s,
            cache_bytes=runner.cache_bytes,
        )

    def add(self, step: LaunchedStep, rows: Sequence[RowTokens], now: float) -> StepRecord:
        """Add a step whose tokens have been read.

        Args:
          step: the step.
          rows: tokens of the rows of the step after which tokens are sampled (`StepPlan.sampling_rows`), rank by rank.
          now: time at which the tokens were read, in seconds of the engine's clock.
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
            cascade=step.result.bucket.cascade,
        )
        self.records.append(record)
        self.totals = self.totals.plus(record)
        return record
