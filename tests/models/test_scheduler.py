"""The scheduler under a fake engine whose model is a hash of everything seen in the pages a request is given."""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from models.request import Request, RequestRefused, SamplingParams
from models.scheduler import Scheduler
from models.step_plan import StepPlan
from pallas_attn import FULL, PAGE_NONE
from pallas_attn.cache import GroupPools, OutOfPages, PrefixCache
from tests.cache.prefix_case import Heads, make_pools

VOCAB = 7
EOS = 0
SALTS = ("", "other")
PLAIN: list[Heads] = [[(FULL, 0)]]
"""One cache group, whose heads all see everything."""


@dataclass(frozen=True)
class Limits:
    num_pages: int = 8
    page_size: int = 2
    max_batched_tokens: int = 8
    max_num_seqs: int = 3
    max_prefill_seqs: int | None = None
    max_model_len: int = 64
    chunked_prefill: bool = True
    prefix_caching: bool = True
    lag: int = 1  # steps launched before the oldest is read back
    groups: list[Heads] = field(default_factory=lambda: PLAIN)

    @property
    def max_len(self) -> int:
        if self.groups == PLAIN:
            return min(self.max_model_len, self.num_pages * self.page_size + 1)
        return min(self.max_model_len, self.pools().max_tokens + 1)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Of all groups."""
        return [head for group in self.groups for head in group]

    def pools(self) -> GroupPools:
        sizes = {"page_size": self.page_size, "max_num_seqs": self.max_num_seqs, "max_pages": self.max_model_len}
        return make_pools([(self.num_pages * len(heads), heads) for heads in self.groups], **sizes)


def visible(head: tuple[int, int], query: int) -> list[int]:
    """Positions that a head sees: the definition of windows and sink tokens."""
    window, sink_tokens = head
    return [key for key in range(query + 1) if key < sink_tokens or key > query - window]


def next_token(views: list[list]) -> int:
    """From what each head sees."""
    return hash(tuple(views[0]) if len(views) == 1 else tuple(map(tuple, views))) % VOCAB


def kv_of(salt: str, token: int) -> tuple[int, int]:
    """What the fake model caches. The salt is part of it, so that sharing across salts changes the output."""
    return SALTS.index(salt), token


def plain_output(request: Request, limits: Limits) -> tuple[list[int], str]:
    """What the request has to generate: one token after the other, with nothing around it."""
    tokens = list(request.prompt_ids)
    end = min(limits.max_len, len(tokens) + request.params.max_tokens)
    while True:
        kv = [kv_of(request.salt, token) for token in tokens]
        token = next_token([[kv[key] for key in visible(head, len(kv) - 1)] for head in limits.heads])
        tokens.append(token)
        stops = token in request.params.stop_token_ids or (token == EOS and not request.params.ignore_eos)
        if stops or len(tokens) == end:
            return tokens[len(request.prompt_ids) :], "stop" if stops else "length"


@dataclass
class FakeEngine:
    limits: Limits
    pools: GroupPools = field(init=False)
    cache: PrefixCache = field(init=False)
    scheduler: Scheduler = field(init=False)
    requests: list[Request] = field(default_factory=list)
    unfinished: list[Request] = field(default_factory=list)  # in order of arrival
    streamed: dict[int | str, list[int]] = field(default_factory=dict)
    memory: dict[tuple[int, int, int], object] = field(default_factory=dict)  # what is cached, by group, row and offset
    last_tokens: dict[int, int] = field(default_factory=dict)  # by slot, on the device
    in_flight: deque[tuple[StepPlan, list[int]]] = field(default_factory=deque)
    num_dropped: int = 0
    sees_progress: bool = True

    def __post_init__(self) -> None:
        limits = self.limits
        self.pools = limits.pools()
        self.cache = PrefixCache(self.pools)
        self.scheduler = Scheduler(
            self.pools,
            self.cache if limits.prefix_caching else None,
            max_batched_tokens=limits.max_batched_tokens,
            max_prefill_seqs=limits.max_prefill_seqs,
            max_model_len=limits.max_model_len,
            chunked_prefill=limits.chunked_prefill,
            eos_token_ids=(EOS,),
        )

    def add(self, prompt: list[int], salt: str = "", **params) -> Request:
        request = Request(len(self.requests), tuple(prompt), SamplingParams(**params), salt)
        self.requests.append(request)
        self.streamed[request.request_id] = []
        try:
            self.scheduler.add(request)
            self.unfinished.append(request)
        except RequestRefused:
            request.finish_reason = "refused"
        return request

    def step(self) -> StepPlan | None:
        """Launches a step, then reads back the one `lag` before it, so that the device never waits."""
        oldest = self.unfinished[0] if self.unfinished else None
        oldest_waits_for_a_token = oldest is not None and oldest.num_in_flight > 0
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            self.in_flight.append((plan, self.launch(plan)))
        scheduled = () if plan is None else [row.request for row in plan.rows]
        if self.sees_progress and oldest is not None:
            assert oldest in scheduled or oldest_waits_for_a_token, "the oldest request moves"
        self.check()
        while self.in_flight and (len(self.in_flight) > self.limits.lag or plan is None):
            self.read_back()
        return plan

    def planned_step(self) -> StepPlan:
        plan = self.step()
        assert plan is not None
        return plan

    def launch(self, plan: StepPlan) -> list[int]:
        """What the device does, at once: programs run in the order they are launched.

        All that precedes the new tokens is read before any of them is written: a step shares nothing within itself.
        """
        cached = [self.read(plan, i, row.start) for i, row in enumerate(plan.rows)]
        samples = []
        for i, (row, views) in enumerate(zip(plan.rows, cached, strict=True)):
            request, end = row.request, row.start + row.num_tokens
            tokens = [self.last_tokens[row.slot]] if row in plan.decode else request.token_ids[row.start : end]
            assert len(tokens) == row.num_tokens
            for position, token in enumerate(tokens, start=row.start):
                for (lane, place), view in zip(self.places(plan, i, position), views, strict=True):
                    view[position] = self.memory[place] = kv_of(request.salt, token)
                    assert all(key in view for key in visible(lane, position))
            if row.samples:
                heads = zip(self.limits.heads, views, strict=True)
                samples.append(next_token([[view[key] for key in visible(head, end - 1)] for head, view in heads]))
                self.last_tokens[row.slot] = samples[-1]
        return samples

    def places(self, plan: StepPlan, row: int, position: int) -> list[tuple[tuple[int, int], tuple[int, int, int]]]:
        """Each head, and where the K/V of a token is for it: group, row and offset."""
        page, offset = divmod(position, self.limits.page_size)
        return [
            (head, (group, int(plan.tables[group][row, i, page]), offset))
            for group, heads in enumerate(self.limits.groups)
            for i, head in enumerate(heads)
        ]

    def read(self, plan: StepPlan, row: int, start: int) -> list[dict[int, object]]:
        """What is cached before `start`, by position for each head: all that a token at `start` or after it sees."""
        views: list[dict[int, object]] = [{} for _ in self.limits.heads]
        for position in range(start):
            for (head, place), view in zip(self.places(plan, row, position), views, strict=True):
                if position in visible(head, start):
                    view[position] = self.memory[place]  # KeyError: never written
        return views

    def read_back(self) -> None:
        plan, samples = self.in_flight.popleft()
        before = {row.request: row.request.output_ids for row in plan.rows}
        continued = self.scheduler.retire(plan, samples)
        self.num_dropped += len(samples) - len(continued)
        for request, token in continued:
            assert request.output_ids == [*before[request], token]
            self.streamed[request.request_id].append(token)
        self.check()

    def fail(self) -> None:
        """A step raises after its caches were donated: what they held is gone, and so is what was not read back."""
        self.scheduler.schedule()
        self.memory = dict.fromkeys(self.memory, "garbage")
        self.last_tokens.clear()
        self.in_flight.clear()
        self.scheduler.requeue_all()
        assert not any(self.pools.num_owned)
        self.check()

    def run(self) -> None:
        steps = 0
        while self.scheduler.has_unfinished or self.in_flight:
            self.step()
            steps += 1
            assert steps < 2000, "no end in sight"
        assert not any(self.pools.num_owned)
        for request in self.requests:
            assert request.output_ids == self.streamed[request.request_id]
            if request.finish_reason == "refused":
                assert not request.output_ids
                continue
            output, reason = plain_output(request, self.limits)
            if request.finish_reason == "abort":
                assert request.output_ids == output[: len(request.output_ids)]
            else:
                assert (request.output_ids, request.finish_reason) == (output, reason)

    def check_plan(self, plan: StepPlan) -> None:
        limits, rows = self.limits, plan.rows
        assert 0 < plan.num_tokens <= limits.max_batched_tokens
        assert len({row.slot for row in rows}) == len({row.request for row in rows}) == len(rows)
        assert all(row.num_tokens == 1 and row.samples for row in plan.decode)
        assert sum(not row.samples for row in plan.prefill) <= 1
        assert limits.max_prefill_seqs is None or len(plan.prefill) <= limits.max_prefill_seqs
        for row in rows:
            request, end = row.request, row.start + row.num_tokens
            assert row.slot == request.slot
            assert row.slot in range(limits.max_num_seqs)
            assert end <= self.pools.pools[0].allocated_tokens(row.slot)
            assert row.samples == (end >= request.prefill_end)
            assert request.num_tokens <= min(limits.max_len, len(request.prompt_ids) + request.params.max_tokens)
            if not limits.chunked_prefill and not row.samples:
                too_large = limits.groups != PLAIN and request is self.scheduler.running[0]
                assert too_large or len(request.token_ids) > limits.max_batched_tokens
        for i, row in enumerate(rows):
            for position in range(row.start, row.start + row.num_tokens):
                for _, (group, place, _) in self.places(plan, i, position):
                    assert place != PAGE_NONE
                    assert self.pools.pools[group]._rows.refcount(place) == 1, (
                        "what a step writes to, nobody else holds"
                    )

    def check(self) -> None:
        self.pools.check()
        self.cache.check()
        self.unfinished = [request for request in self.unfinished if request.finish_reason is None]
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert [*running, *waiting] == self.unfinished
        slots = [request.slot for request in running if request.slot is not None]
        assert len(slots) == len(running)
        for request in self.unfinished:
            assert (request.slot is not None) == (request in running)
        ends = {request.slot: request.num_computed for request in running}
        for slot, pool in itertools.product(range(self.limits.max_num_seqs), self.pools.pools):
            pages = -(-ends.get(slot, 0) // self.limits.page_size)
            assert pool.allocated_tokens(slot) == pages * self.limits.page_size


# Prompts whose first eight tokens of output are not EOS.
LASTING = [
    prompt
    for prompt in ([first, second, 3, 4] for first in range(1, VOCAB) for second in range(1, VOCAB))
    if EOS not in plain_output(Request("", tuple(prompt), SamplingParams(max_tokens=8, ignore_eos=True)), Limits())[0]
]


def summary(rows) -> list[tuple[int, int, int, bool]]:
    return [(row.request.request_id, row.start, row.num_tokens, row.samples) for row in rows]


def test_decode_comes_first_and_prompts_share_what_is_left_of_the_budget():
    engine = FakeEngine(Limits(num_pages=20, max_batched_tokens=6))
    engine.add(LASTING[0])
    engine.add([1] * 9)
    engine.add([2] * 3)
    plans = [engine.planned_step() for _ in range(4)]
    assert [summary(plan.decode) for plan in plans] == [
        [],
        [(0, 4, 1, True)],
        [(0, 5, 1, True)],
        [(0, 6, 1, True), (1, 9, 1, True), (2, 3, 1, True)],
    ]
    assert [summary(plan.prefill) for plan in plans] == [
        [(0, 0, 4, True), (1, 0, 2, False)],
        [(1, 2, 5, False)],
        [(1, 7, 2, True), (2, 0, 3, True)],
        [],
    ]
    engine.run()


def test_a_budget_below_the_running_requests_serves_the_oldest():
    engine = FakeEngine(Limits(num_pages=20, max_batched_tokens=2, lag=0))
    for _ in range(3):
        engine.add([1, 2], max_tokens=4, ignore_eos=True)
    assert [summary(engine.planned_step().rows) for _ in range(3)] == [
        [(0, 0, 2, True)],
        [(0, 2, 1, True), (1, 0, 1, False)],
        [(0, 3, 1, True), (1, 1, 1, True)],
    ]
    engine.run()


def test_prefill_rows_are_bounded():
    engine = FakeEngine(Limits(num_pages=20, max_batched_tokens=20, max_prefill_seqs=2))
    for _ in range(3):
        engine.add([1, 2], max_tokens=4, ignore_eos=True)
    assert [[row.request.request_id for row in engine.planned_step().prefill] for _ in range(2)] == [[0, 1], [2]]
    engine.run()


def test_without_chunking_a_prompt_waits_until_a_step_holds_it():
    engine = FakeEngine(Limits(num_pages=20, max_batched_tokens=4, chunked_prefill=False, prefix_caching=False))
    engine.add([1] * 3, max_tokens=3, ignore_eos=True)
    engine.add([2] * 4, max_tokens=1)
    plans = [engine.planned_step() for _ in range(4)]
    assert [len(plan.decode) for plan in plans] == [0, 1, 1, 0]
    assert [summary(plan.prefill) for plan in plans] == [[(0, 0, 3, True)], [], [], [(1, 0, 4, True)]]
    engine.run()


def test_tokens_in_flight_count_towards_max_tokens():
    engine = FakeEngine(Limits(lag=2))
    request = engine.add(LASTING[0], max_tokens=2)
    assert engine.planned_step().num_tokens == 4
    assert engine.planned_step().num_tokens == 1
    assert (request.output_ids, request.num_in_flight) == ([], 2)
    assert engine.step() is None
    assert (len(request.output_ids), request.finish_reason) == (2, "length")
    assert engine.num_dropped == 0


def test_a_token_sampled_after_the_end_is_dropped():
    engine = FakeEngine(Limits())
    stop = plain_output(Request("", tuple(LASTING[0])), engine.limits)[0][0]
    request = engine.add(LASTING[0], stop_token_ids=(stop,))
    engine.step()
    engine.step()
    assert (request.output_ids, request.finish_reason) == ([stop], "stop")
    assert (engine.pools.num_owned, len(engine.in_flight)) == ((0,), 1)
    assert engine.step() is None
    assert (request.output_ids, engine.num_dropped) == ([stop], 1)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_a_sequence_unless_ignored(ignore_eos):
    engine = FakeEngine(Limits(num_pages=40))
    prompts = [[a, b] for a in range(VOCAB) for b in range(VOCAB)]
    requests = [engine.add(prompt, max_tokens=6, ignore_eos=ignore_eos) for prompt in prompts]
    engine.run()
    assert {"length"} < {request.finish_reason for request in requests} or ignore_eos
    for request in requests:
        assert (request.output_ids[-1] == EOS) or len(request.output_ids) == 6
        assert ignore_eos or EOS not in request.output_ids[:-1]


def first_page(engine: FakeEngine, request: Request) -> int:
    assert request.slot is not None
    return engine.pools.tables([request.slot])[0][0, 0, 0]


def test_pages_are_shared_from_the_step_after_they_were_written():
    engine = FakeEngine(Limits(num_pages=20, max_num_seqs=4, max_batched_tokens=20))
    prompt = LASTING[0]
    same_step = [engine.add(prompt, max_tokens=4), engine.add(prompt, max_tokens=4)]
    engine.step()
    later = engine.add(prompt, max_tokens=4)
    other_salt = engine.add(prompt, salt="other", max_tokens=4)
    engine.step()
    assert [request.num_cached for request in (*same_step, later, other_salt)] == [0, 0, 2, 0]
    assert first_page(engine, later) == first_page(engine, same_step[0]) != first_page(engine, same_step[1])
    engine.run()


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_generated_tokens_are_shared_once_they_are_known(page_size, lag):
    engine = FakeEngine(Limits(num_pages=20, page_size=page_size, lag=lag))
    first = engine.add(LASTING[0], max_tokens=5)
    engine.run()
    second = engine.add([*first.token_ids, 1], max_tokens=1)
    engine.run()
    assert len(first.token_ids) == 9
    assert second.num_cached == 8


def test_exhaustion_preempts_the_youngest_and_delivers_what_it_had_in_flight():
    engine = FakeEngine(Limits(num_pages=4, max_batched_tokens=20))
    engine.add(LASTING[0], max_tokens=2)
    young = engine.add(LASTING[1], max_tokens=4)
    third = engine.add([1, 2], max_tokens=1)
    assert summary(engine.planned_step().rows) == [(0, 0, 4, True), (1, 0, 4, True)]
    assert summary(engine.planned_step().rows) == [(0, 4, 1, True)], "its next page was the youngest's"
    assert engine.scheduler.waiting == (young, third)
    assert engine.scheduler.num_preemptions == 1
    assert (young.slot, young.num_computed) == (None, 0)
    assert len(young.output_ids) == 1, "sampled before it lost its pages"
    engine.run()
    assert engine.cache.hit_tokens == 2, "it lost its last page first, and found the other one again"
    assert young.num_cached == 0, "which does not count as cached before it came"


def test_a_request_waits_for_room_for_all_it_knows():
    engine = FakeEngine(Limits(num_pages=6, max_batched_tokens=20, lag=0))
    prompt = [*LASTING[0], *LASTING[1]]
    engine.add(prompt, max_tokens=1)
    engine.run()
    running = engine.add(LASTING[2], max_tokens=2)
    engine.step()
    waiting = engine.add([*prompt, 1, 2, 3], max_tokens=1)
    [hits] = engine.cache.lookup(waiting.token_ids)
    assert hits.size == engine.pools.pools[0].num_free == 4, "all that is free are its hits"
    assert engine.planned_step().prefill == ()
    assert not waiting.is_running
    assert running.finish_reason == "length"
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_a_preempted_request_may_end_with_the_token_it_had_in_flight():
    engine = FakeEngine(Limits(num_pages=4, max_batched_tokens=20))
    engine.add(LASTING[0], max_tokens=6)
    young = engine.add(LASTING[1], max_tokens=1)
    engine.step()
    engine.step()
    assert young.finish_reason == "length"
    assert engine.scheduler.waiting == ()
    engine.run()


def test_a_request_that_outgrows_the_pool_ends_with_length():
    engine = FakeEngine(Limits(num_pages=3))
    request = engine.add(LASTING[0], max_tokens=50, ignore_eos=True)
    engine.run()
    assert request.finish_reason == "length"
    assert len(request.token_ids) == 3 * 2 + 1
    assert engine.scheduler.num_preemptions == 0


def test_a_request_that_fills_the_model_ends_with_length():
    engine = FakeEngine(Limits(max_model_len=6))
    request = engine.add(LASTING[0], max_tokens=50, ignore_eos=True)
    engine.run()
    assert (request.finish_reason, len(request.token_ids)) == ("length", 6)


@pytest.mark.parametrize(
    ("limits", "length", "message"),
    [
        (Limits(max_model_len=9), 9, "the prompt has 9 tokens, the model takes at most 8"),
        (Limits(num_pages=4), 9, "the prompt needs 5 pages, the pool has 4"),
        (Limits(chunked_prefill=False), 9, "the prompt has 9 tokens, a step takes 8 unless prefill is chunked"),
    ],
)
def test_what_can_never_fit_is_refused(limits, length, message):
    engine = FakeEngine(limits)
    with pytest.raises(RequestRefused, match=message):
        engine.scheduler.add(Request("too long", (1,) * length))
    assert not engine.scheduler.has_unfinished
    fitting = engine.add([1] * (length - 1))
    engine.run()
    assert fitting.finish_reason in ("stop", "length")


def test_abort_ends_a_request_wherever_it_is():
    engine = FakeEngine(Limits(num_pages=4, max_num_seqs=2, max_batched_tokens=20))
    prompts = (LASTING[0], LASTING[1], LASTING[2])
    decoding, preempted, waiting = (engine.add(prompt, max_tokens=6) for prompt in prompts)
    engine.step()
    engine.step()
    assert preempted in engine.scheduler.waiting
    for request in (waiting, decoding, preempted):
        assert engine.scheduler.abort(request.request_id)
        assert not engine.scheduler.abort(request.request_id)
        assert request.finish_reason == "abort"
        engine.check()
    assert not any(engine.pools.num_owned)
    assert not engine.scheduler.abort("never heard of")
    engine.run()


def test_lost_caches_cost_time_and_nothing_else():
    engine = FakeEngine(Limits(num_pages=20))
    for prompt in LASTING[:3]:
        engine.add(prompt, max_tokens=2)
    plan = engine.planned_step()
    engine.step()
    engine.fail()
    assert engine.cache.num_published == 0
    with pytest.raises(ValueError, match="plan must be the oldest launched plan"):
        engine.scheduler.retire(plan, [])
    engine.run()
    again = engine.add([*LASTING[0], 1], max_tokens=1)
    engine.run()
    assert again.num_cached == 4, "what was computed again is shared again"


def test_plans_are_retired_once_and_in_order():
    engine = FakeEngine(Limits(lag=5))
    engine.add(LASTING[0])
    first, second = engine.planned_step(), engine.planned_step()
    with pytest.raises(ValueError, match="plan must be the oldest launched plan"):
        engine.scheduler.retire(second, [1])
    with pytest.raises(ValueError, match="one for each of 1 sampling rows, got 2"):
        engine.scheduler.retire(first, [1, 2])
    engine.check()
    engine.run()
    with pytest.raises(ValueError, match="plan must be the oldest launched plan"):
        engine.scheduler.retire(first, [1])


def test_failed_allocations_change_nothing_but_the_time(monkeypatch):
    """Each allocation in turn fails, whether or not there are pages."""
    for failing in range(12):
        engine = FakeEngine(Limits(num_pages=6), sees_progress=False)
        allocate, calls = engine.pools.allocate, iter(range(10**6))

        def fail_once(slot: int, n: int, allocate=allocate, calls=calls, failing=failing) -> None:
            if next(calls) == failing:
                raise OutOfPages(n, 0)
            allocate(slot, n)

        monkeypatch.setattr(engine.pools, "allocate", fail_once)
        for prompt in LASTING[:3]:
            engine.add([*prompt, 1, 2], max_tokens=5)
        engine.run()
        assert next(calls) > failing


def test_bad_arguments_are_refused():
    pools = Limits().pools()

    sizes: dict[str, Any] = {"max_batched_tokens": 8, "max_model_len": 64, "chunked_prefill": True}

    def make(**changed: Any) -> Scheduler:
        return Scheduler(pools, None, **(sizes | changed))

    for name in ("max_batched_tokens", "max_prefill_seqs"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            make(**{name: 0})
    with pytest.raises(ValueError, match="max_model_len=1"):
        make(max_model_len=1)
    scheduler = make()
    scheduler.add(Request("a", (1,)))
    with pytest.raises(ValueError, match="request_id must be new, got 'a' again"):
        scheduler.add(Request("a", (2,)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be finite and not negative, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite and not negative, got nan"),
        ({"temperature": float("inf")}, "temperature must be finite and not negative, got inf"),
        ({"top_k": -1}, "top_k must not be negative, got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 2**32}, r"seed must be in \[0, 2\*\*32\), got 4294967296"),
    ],
)
def test_sampling_params_are_validated(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt_ids of request a must hold at least one token"):
        Request("a", ())


WINDOWED: list[Heads] = [[(FULL, 0)], [(FULL, 0), (4, 2)]]
"""Pages of two tokens: the windowed head keeps one page of sink tokens, and two or three of its window."""


def test_pages_behind_a_window_come_back_while_a_request_runs():
    engine = FakeEngine(Limits(num_pages=40, max_batched_tokens=6, groups=WINDOWED))
    request = engine.add([1, 2, 3, 4, 5], max_tokens=50, ignore_eos=True)
    most = 0
    while not request.is_finished:
        engine.step()
        full, rows = engine.pools.num_owned
        most = max(most, rows - full)
        assert rows - full <= 1 + 3
    assert (len(request.output_ids), most) == (50, 4)
    engine.run()


def test_a_window_holds_more_requests_than_full_heads():
    """Each has 24 tokens: 12 pages, or 4 where a window of 4 with its page of sink tokens is all that is kept."""
    running = []
    for heads in ([(FULL, 0)], [(4, 2)]):
        engine = FakeEngine(Limits(num_pages=16, max_num_seqs=4, max_batched_tokens=4, groups=[heads]))
        requests = [engine.add([1 + n] * 4, max_tokens=20, ignore_eos=True) for n in range(4)]
        while not requests[0].is_finished:
            engine.step()
        running.append((len(engine.scheduler.running) + 1, engine.scheduler.num_preemptions > 0))
        engine.run()
    assert running == [(1, True), (4, False)]


def test_any_group_that_runs_out_preempts_and_the_others_lose_nothing():
    groups: list[Heads] = [[(FULL, 0)], [(4, 0)]]
    engine = FakeEngine(Limits(num_pages=6, max_batched_tokens=20, groups=groups))
    engine.add([1] * 6, max_tokens=6, ignore_eos=True)
    young = engine.add([2] * 6, max_tokens=6, ignore_eos=True)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert engine.scheduler.waiting == (young,)
    engine.run()


def test_alone_a_prompt_is_computed_in_what_the_pools_have_room_for():
    """A step takes 16 tokens, but 5 pages of a window of 4 hold 8 beside it."""
    for chunked in (True, False):
        limits = Limits(num_pages=5, max_batched_tokens=16, chunked_prefill=chunked, groups=[[(4, 0)]])
        engine = FakeEngine(limits)
        request = engine.add([1, 2, 3, 4, 5, 6] * 2, max_tokens=30, ignore_eos=True)
        assert summary(engine.planned_step().prefill) == [(0, 0, 10, False)]
        assert summary(engine.planned_step().prefill) == [(0, 10, 2, True)]
        engine.run()
        assert len(request.output_ids) == 30


def test_a_prompt_waits_for_room_for_a_whole_chunk_of_it():
    engine = FakeEngine(Limits(num_pages=7, max_batched_tokens=8, max_num_seqs=2, lag=0, groups=[[(4, 0)]]))
    running = engine.add([1, 2], max_tokens=9, ignore_eos=True)
    engine.step()
    waiting = engine.add([2] * 20, max_tokens=1)
    engine.step()
    assert not waiting.is_running, "a chunk of 8 and the window before it can be 7 pages"
    engine.run()
    assert running.finish_reason == waiting.finish_reason == "length"


def test_a_hit_takes_only_what_is_seen_and_computes_the_rest():
    engine = FakeEngine(Limits(num_pages=40, max_batched_tokens=8, groups=WINDOWED))
    first = engine.add([1, 2, 3, 4, 5, 6, 1, 2, 3], max_tokens=6, ignore_eos=True)
    engine.run()
    second = engine.add([*first.token_ids[:-1], 6], max_tokens=1)
    engine.step()
    assert second.num_cached == 14
    full, mixed = engine.pools.num_owned
    assert (full, mixed) == (8, 8 + 1 + 2 + 1), "sink tokens, tokens 11 to 13 and the new ones"
    engine.run()


def test_a_prompt_that_no_group_can_hold_is_refused():
    limits = Limits(num_pages=3, groups=[[(4, 0)], [(FULL, 0), (2, 0), (2, 0)]])
    assert limits.pools().max_tokens == 2 * 5
    engine = FakeEngine(limits)
    with pytest.raises(RequestRefused, match="the prompt needs 10 rows, the pool has 9"):
        engine.scheduler.add(Request("too long", (1,) * 11))
    longest = engine.add([1] * 10, max_tokens=5)
    engine.run()
    assert (longest.finish_reason, len(longest.output_ids)) in [("length", 1), ("stop", 1)]


prompts = st.builds(
    lambda shared, tail: [1, 2, 3, 4, 5, 6, 1, 2, 3, 4][:shared] + tail,
    st.integers(0, 10),
    st.lists(st.integers(1, 2), min_size=1, max_size=6),
)
params = st.fixed_dictionaries({"max_tokens": st.integers(1, 12), "ignore_eos": st.booleans()})
additions = st.tuples(st.just("add"), prompts, st.sampled_from(["", *SALTS]), params)
actions = st.one_of(
    additions,
    additions,
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("fail")),
)
limits = st.builds(
    Limits,
    num_pages=st.integers(5, 14),
    page_size=st.integers(1, 3),
    max_batched_tokens=st.integers(2, 16),
    max_num_seqs=st.integers(1, 4),
    max_prefill_seqs=st.none() | st.integers(1, 2),
    max_model_len=st.integers(12, 30),
    chunked_prefill=st.booleans(),
    prefix_caching=st.booleans(),
    lag=st.integers(0, 2),
    groups=st.sampled_from(
        [PLAIN, PLAIN, [[(3, 0)]], [[(FULL, 0), (3, 2)]], [[(FULL, 0)], [(4, 0)], [(2, 3), (1, 0)]]]
    ),
)


traffic = given(limits=limits, actions=st.lists(actions, min_size=8, max_size=30))


def run_traffic(limits: Limits, actions: list[tuple]) -> None:
    """Every request must get its own tokens: `FakeEngine` checks that, and everything else, as it goes."""
    engine = FakeEngine(limits)
    for name, *arguments in actions:
        match name:
            case "add":
                prompt, salt, params = arguments
                engine.add(prompt, salt, **params)
            case "step":
                for _ in range(*arguments):
                    engine.step()
            case "abort":
                engine.scheduler.abort(*arguments)
                engine.check()
            case "fail":
                engine.fail()
    engine.run()


@traffic
@settings(max_examples=150, deadline=None)
def test_any_traffic(limits, actions):
    run_traffic(limits, actions)


@pytest.mark.slow
@traffic
@settings(max_examples=3000, deadline=None)
def test_any_traffic_for_long(limits, actions):
    run_traffic(limits, actions)


@pytest.mark.parametrize("lag", [0, 1])
def test_long_traffic_meets_everything_at_once(lag, monkeypatch):
    """Also shows that such traffic meets what it is meant to meet."""
    draw = random.Random(lag)
    engine = FakeEngine(Limits(num_pages=10, max_num_seqs=4, lag=lag), sees_progress=False)
    allocate = engine.pools.allocate

    def fail_sometimes(slot: int, n: int) -> None:
        if draw.random() < 0.02:
            raise OutOfPages(n, 0)
        allocate(slot, n)

    monkeypatch.setattr(engine.pools, "allocate", fail_sometimes)
    for _ in range(1000):
        if draw.random() < 0.3 and len(engine.scheduler.waiting) < 5:
            prompt = [1, 2, 3, 4, 5, 6, 1, 2][: draw.randint(0, 8)] + draw.choices((1, 2), k=draw.randint(1, 6))
            engine.add(prompt, draw.choice(SALTS), max_tokens=draw.randint(1, 12), ignore_eos=draw.random() < 0.7)
        if draw.random() < 0.02 and engine.requests:
            engine.scheduler.abort(draw.choice(engine.requests).request_id)
        if draw.random() < 0.01:
            engine.fail()
        engine.step()
    engine.run()
    assert engine.scheduler.num_preemptions > 20
    assert engine.cache.hit_tokens > 100
    assert (engine.num_dropped > 0) == (lag > 0)
    assert {request.finish_reason for request in engine.requests} == {"stop", "length", "abort"}


def test_preempted_requests_come_back_whatever_the_chunking():
    base = Limits(num_pages=6, max_batched_tokens=5, max_num_seqs=4)
    for limits in (
        base,
        replace(base, chunked_prefill=False),
        replace(base, prefix_caching=False),
        replace(base, lag=0),
    ):
        engine = FakeEngine(limits)
        for prompt in LASTING[:4]:
            engine.add(prompt, max_tokens=8, ignore_eos=True)
        engine.run()
        assert engine.scheduler.num_preemptions > 0
