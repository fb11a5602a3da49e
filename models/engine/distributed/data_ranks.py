"""Data-parallel ranks: groups of devices among which requests are divided.

Each rank has its own request slots and cache pages. The row of a request in a step plan consists of the tokens of the
request that the step computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pallas_attn.models.engine.request import FinishReason, Request
from pallas_attn.models.engine.scheduler import RunningRequests, Scheduler
from pallas_attn.models.engine.step.plan import RowTokens, StepPlan


class DataRanks:
    """Assigns requests to ranks; each rank has a scheduler. An engine without data parallelism has one rank.

    A new request goes to the rank with the fewest unfinished requests; among equals, to the rank with the longest
    cached prefix of the prompt; among equals, to the first rank. The caller of `add` can also specify the rank. A
    request stays on its rank, which has its pages; `requeue_all` assigns it again after the pages were lost. The
    assignment uses no random numbers and no measured times, so that equal calls give equal assignments in all
    processes.
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
        """Number of prompt tokens of all requests that have been looked up in the prefix caches at first admission."""
        return sum(scheduler.looked_up_tokens for scheduler in self.schedulers)

    @property
    def found_tokens(self) -> int:
        """Number of the `looked_up_tokens` that the prefix caches contained."""
        return sum(scheduler.found_tokens for scheduler in self.schedulers)

    @property
    def hit_tokens(self) -> int:
        """Sum of `Scheduler.hit_tokens` over all ranks."""
        return sum(scheduler.hit_tokens for scheduler in self.schedulers)

    @property
    def used_rows(self) -> tuple[int, ...]:
        """Sums of `Scheduler.used_rows` over all ranks."""
        return tuple(map(sum, zip(*(scheduler.used_rows for scheduler in self.schedulers), strict=True)))

    def add(self, request: Request, rank: int | None = None) -> None:
        """Queue a new request on a rank, None to choose the rank; raises as `Scheduler.add`."""
        if rank is not None:
            self.schedulers[rank].add(request)
            return
        fewest = min(scheduler.num_unfinished for scheduler in self.schedulers)
        idle = [scheduler for scheduler in self.schedulers if scheduler.num_unfinished == fewest]
        chosen = idle[0] if len(idle) == 1 else max(idle, key=lambda scheduler: scheduler.cached_pages(request))
        chosen.add(request)

    def set_padded_sizes(self, padded_sizes: Sequence[int]) -> None:
        """Replace the numbers of prompt tokens to which the runner pads a step. With several ranks there is no effect,
        because the scheduler of one rank does not know the number of prompt tokens of the step."""
        if len(self.schedulers) == 1:
            self.schedulers[0].set_padded_sizes(padded_sizes)

    def schedule(self) -> tuple[StepPlan | None, ...] | None:
        """Plan the next step.

        Returns:
          One plan per rank; the entry of a rank that computes no tokens is None. None if no rank computes tokens.
        """
        plans = tuple(scheduler.schedule() for scheduler in self.schedulers)
        return None if all(plan is None for plan in plans) else plans

    def retire(self, plans: Sequence[StepPlan | None], tokens: Sequence[RowTokens]) -> list[tuple[Request, int]]:
        """Add the sampled tokens of a step to the requests.

        Args:
          plans: the plan of each rank.
          tokens: sampled tokens of the rows that sample, of all ranks one after the other.

        Returns and raises as `Scheduler.retire`.
        """
        continued, begin = [], 0
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            if plan is not None:
                end = begin + len(plan.sampling_rows)
                continued += scheduler.retire(plan, tokens[begin:end])
                begin = end
        return continued

    def record_time(self, plans: Sequence[StepPlan | None], seconds: float) -> None:
        """Record the duration of a step. Schedulers choose the number of drafts of later steps from such durations.

        All ranks run the same program. The program computes prompts if any rank has prompts, and as many drafts per
        request as the rank with the most drafts.
        """
        some = [plan for plan in plans if plan is not None]
        has_prompts, num_drafts = any(plan.prefill for plan in some), max(plan.num_drafts for plan in some)
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            if plan is not None:
                scheduler.record_time(len(plan.decode), num_drafts, seconds, has_prompts=has_prompts)

    def abort(self, request_id: int | str, reason: FinishReason = "abort") -> bool:
        """End a waiting or running request. Return False if the request is unknown or has finished."""
        return any(scheduler.abort(request_id, reason) for scheduler in self.schedulers)

    def replace_weights(self, running: RunningRequests) -> list[Request]:
        """Call `Scheduler.replace_weights` on all ranks. Return the requests that were ended."""
        return [request for scheduler in self.schedulers for request in scheduler.replace_weights(running)]

    def requeue_all(self, requests: Iterable[Request]) -> None:
        """Reset all ranks and queue unfinished requests again, as `Scheduler.requeue_all`; assign them round-robin."""
        in_order = list(requests)
        for rank, scheduler in enumerate(self.schedulers):
            scheduler.requeue_all(in_order[rank :: len(self.schedulers)])
