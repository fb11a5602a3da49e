"""Assignment of requests to data ranks. A data rank is an index along the mesh axis `data`.

Each data rank has its own scheduler and pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pallas_attn.models.engine import SamplingParams
from pallas_attn.models.engine.distributed.data_ranks import DataRanks
from pallas_attn.models.engine.request import Request, RequestRefused
from pallas_attn.models.engine.step.plan import RowTokens, StepPlan
from tests.models.scheduler_case import FakeEngine, Limits

PROMPT = [1, 2, 3, 4, 5]


def request(number: int, prompt: list[int] = PROMPT) -> Request:
    return Request(number, tuple(prompt), SamplingParams(max_tokens=4, ignore_eos=True))


def unfinished(ranks: DataRanks) -> list[list[int | str]]:
    """Return the ids of the unfinished requests of each data rank."""
    return [[r.request_id for r in (*scheduler.running, *scheduler.waiting)] for scheduler in ranks.schedulers]


def planned(plans: Sequence[StepPlan | None]) -> list[list[int | str] | None]:
    """Return the ids of the requests of a step on each data rank, or None for a rank without work."""
    return [None if plan is None else [row.request.request_id for row in plan.rows] for plan in plans]


def test_request_goes_to_the_rank_with_the_fewest_requests_then_the_longest_prefix():
    engines = [FakeEngine(Limits()) for _ in range(3)]
    engines[2].add(PROMPT, max_tokens=4, ignore_eos=True)
    engines[2].run()
    ranks = DataRanks([engine.scheduler for engine in engines])
    assert not ranks.has_unfinished
    ranks.add(request(0))
    ranks.add(request(1))
    ranks.add(request(2))
    ranks.add(request(3, [6] * 5))
    assert unfinished(ranks) == [[1, 3], [2], [0]]
    assert ranks.abort(2)
    assert not ranks.abort(2)
    ranks.add(request(4))
    assert unfinished(ranks) == [[1, 3], [4], [0]]


def test_idle_ranks_have_no_plan():
    ranks = DataRanks([FakeEngine(Limits()).scheduler for _ in range(2)])
    assert ranks.schedule() is None
    ranks.add(request(0))
    plans = ranks.schedule() or ()
    assert planned(plans) == [[0], None]
    ranks.add(request(1))
    assert ranks.retire(plans, [RowTokens([7])]) == [(ranks.schedulers[0].running[0], 7)]
    plans = ranks.schedule() or ()
    assert planned(plans) == [[0], [1]]
    assert [(r.request_id, token) for r, token in ranks.retire(plans, [RowTokens([3]), RowTokens([4])])] == [
        (0, 3),
        (1, 4),
    ]
    assert ranks.looked_up_tokens == 2 * len(PROMPT)


def test_requests_are_assigned_round_robin_after_a_fault():
    ranks = DataRanks([FakeEngine(Limits()).scheduler for _ in range(2)])
    requests = [request(number) for number in range(5)]
    for each in requests:
        ranks.add(each)
    ranks.schedule()
    ranks.requeue_all(requests[1:])
    assert unfinished(ranks) == [[1, 3], [2, 4]]


def test_request_that_fits_no_rank_is_refused():
    ranks = DataRanks([FakeEngine(Limits()).scheduler for _ in range(2)])
    with pytest.raises(RequestRefused, match="the prompt needs 9 pages, the pool has 8"):
        ranks.add(request(0, [1] * 17))
    assert not ranks.has_unfinished
