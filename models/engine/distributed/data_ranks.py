"""Data-parallel ranks: groups of devices that divide the requests, each with its own request slots and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from models.engine.request import Request
from models.engine.scheduler import Scheduler
from models.engine.step.plan import RowTokens, StepPlan


class DataRanks:
    """Assigns requests to ranks; each rank has a scheduler. An engine without data parallelism has one rank.

    A new request goes to the rank with the fewest unfinished requests; among equals, to the rank with the longest
    cached prefix of the prompt; among equals, to the first rank. It stays on this rank, where its pages are. The
    assignment uses no random numbers and no measurements, so equal calls give equal assignments in all processes.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = tuple(schedulers)

    @property
    def max_len(self) -> int:
        """Maximum sequence length in tokens, equal on all ranks."""
        return self.schedulers[0].max_len

    @property
    def has_unfinished(self) -> bool:
        return any(scheduler.has_unfinished for scheduler in self.schedulers)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions on all ranks."""
        return sum(scheduler.num_preemptions for scheduler in self.schedulers)

    @property
    def looked_up_tokens(self) -> int:
        """Prompt tokens looked up in the prefix caches at first admission."""
        return sum(scheduler.looked_up_tokens for scheduler in self.schedulers)

    @property
    def found_tokens(self) -> int:
        """Number of `looked_up_tokens` that the prefix caches had."""
        return sum(scheduler.found_tokens for scheduler in self.schedulers)

    def add(self, request: Request) -> None:
        """Queue a new request on a rank; raises as `Scheduler.add`."""
        fewest = min(scheduler.num_unfinished for scheduler in self.schedulers)
        idle = [scheduler for scheduler in self.schedulers if scheduler.num_unfinished == fewest]
        chosen = idle[0] if len(idle) == 1 else max(idle, key=lambda scheduler: scheduler.cached_pages(request))
        chosen.add(request)

    def schedule(self) -> tuple[StepPlan | None, ...] | None:
        """Plan the next step. Return one plan per rank, None for ranks without rows; None if no rank has rows."""
        plans = tuple(scheduler.schedule() for scheduler in self.schedulers)
        return None if all(plan is None for plan in plans) else plans

    def retire(self, plans: Sequence[StepPlan | None], tokens: Sequence[RowTokens]) -> list[tuple[Request, int]]:
        """Add the sampled tokens of a step, rank by rank; arguments, result and errors as in `Scheduler.retire`."""
        continued, begin = [], 0
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            if plan is not None:
                end = begin + len(plan.sampling_rows)
                continued += scheduler.retire(plan, tokens[begin:end])
                begin = end
        return continued

    def record_time(self, plans: Sequence[StepPlan | None], seconds: float) -> None:
        """Record the duration of a step, from which the number of drafts of later steps is chosen. All ranks run the
        same program: it has prompts if any rank has prompts, and the largest number of drafts of any rank."""
        some = [plan for plan in plans if plan is not None]
        has_prompts, num_drafts = any(plan.prefill for plan in some), max(plan.num_drafts for plan in some)
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            if plan is not None:
                scheduler.record_time(len(plan.decode), num_drafts, seconds, has_prompts=has_prompts)

    def abort(self, request_id: int | str) -> bool:
        """End a waiting or running request. Return False if the request is unknown or has finished."""
        return any(scheduler.abort(request_id) for scheduler in self.schedulers)

    def requeue_all(self, requests: Iterable[Request]) -> None:
        """Start over as `Scheduler.requeue_all`. Requests are assigned to ranks round-robin."""
        in_order = list(requests)
        for rank, scheduler in enumerate(self.schedulers):
            scheduler.requeue_all(in_order[rank :: len(self.schedulers)])
