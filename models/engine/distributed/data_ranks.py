"""Data-parallel ranks: requests shared out among groups of devices, each with slots and pages of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from models.engine.request import Request
from models.engine.scheduler import Scheduler
from models.engine.step.plan import RowTokens, StepPlan


class DataRanks:
    """Decides which rank runs a request; each rank has a scheduler. A single rank is an engine without such ranks.

    A new request goes to the rank with the fewest unfinished ones, of these to the one that has most of the prompt's
    prefix cached, and of these to the first. It stays there, where its pages are. Nothing is drawn or measured, so that
    the same calls give the same ranks.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = tuple(schedulers)

    @property
    def max_len(self) -> int:
        """Longest possible sequence in tokens, on any rank."""
        return self.schedulers[0].max_len

    @property
    def has_unfinished(self) -> bool:
        return any(scheduler.has_unfinished for scheduler in self.schedulers)

    @property
    def num_preemptions(self) -> int:
        """Number of times that a request lost its pages to an older one of its rank."""
        return sum(scheduler.num_preemptions for scheduler in self.schedulers)

    @property
    def looked_up_tokens(self) -> int:
        """Prompt tokens that were looked up in a prefix cache."""
        return sum(scheduler.looked_up_tokens for scheduler in self.schedulers)

    @property
    def found_tokens(self) -> int:
        """Tokens of `looked_up_tokens` that were found."""
        return sum(scheduler.found_tokens for scheduler in self.schedulers)

    def add(self, request: Request) -> None:
        """Queues a new request on a rank; raises as `Scheduler.add`."""
        fewest = min(scheduler.num_unfinished for scheduler in self.schedulers)
        idle = [scheduler for scheduler in self.schedulers if scheduler.num_unfinished == fewest]
        chosen = idle[0] if len(idle) == 1 else max(idle, key=lambda scheduler: scheduler.cached_pages(request))
        chosen.add(request)

    def schedule(self) -> tuple[StepPlan | None, ...] | None:
        """Plans the next step: one plan for each rank, None for those without anything to do; None if all are."""
        plans = tuple(scheduler.schedule() for scheduler in self.schedulers)
        return None if all(plan is None for plan in plans) else plans

    def retire(self, plans: Sequence[StepPlan | None], tokens: Sequence[RowTokens]) -> list[tuple[Request, int]]:
        """Takes the sampled tokens of a step, rank by rank; arguments, result and errors as of `Scheduler.retire`."""
        continued, begin = [], 0
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            if plan is not None:
                end = begin + len(plan.sampling_rows)
                continued += scheduler.retire(plan, tokens[begin:end])
                begin = end
        return continued

    def record_time(self, plans: Sequence[StepPlan | None], seconds: float) -> None:
        """Takes note of how long a step took, for the number of drafts of later ones. All ranks run one program: with
        prompts if one of them has some, and as many drafts as the most that one has."""
        some = [plan for plan in plans if plan is not None]
        has_prompts, num_drafts = any(plan.prefill for plan in some), max(plan.num_drafts for plan in some)
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            if plan is not None:
                scheduler.record_time(len(plan.decode), num_drafts, seconds, has_prompts=has_prompts)

    def abort(self, request_id: int | str) -> bool:
        """Ends a request wherever it is. Returns False if it is unknown or finished already."""
        return any(scheduler.abort(request_id) for scheduler in self.schedulers)

    def requeue_all(self, requests: Iterable[Request]) -> None:
        """Starts over as `Scheduler.requeue_all`. Requests are shared out in turn."""
        in_order = list(requests)
        for rank, scheduler in enumerate(self.schedulers):
            scheduler.requeue_all(in_order[rank :: len(self.schedulers)])
