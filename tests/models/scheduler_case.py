"""A fake engine for tests of the scheduler.

The engine runs the real scheduler, pools and prefix cache. Its model computes the next token as a hash of all cached
values that the request attends to. If the scheduler shares, frees or reuses a page wrongly, the output differs from
`plain_output`, which uses no cache.
"""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

from pallas_attn import FULL, PAGE_NONE
from pallas_attn.cache import GroupPools, PrefixCache
from pallas_attn.models.engine import SamplingParams
from pallas_attn.models.engine.request import Request, RequestRefused
from pallas_attn.models.engine.scheduler import Scheduler
from pallas_attn.models.engine.speculation.draft_control import DraftControl
from pallas_attn.models.engine.step.plan import RowTokens, StepPlan
from tests.cache.prefix_case import Heads, make_pools

VOCAB = 7
EOS = 0
SALTS = ("", "other")
PLAIN: list[Heads] = [[(FULL, 0)]]
"""One cache group of heads without windows."""


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
    lag: int = 1  # number of steps that are launched before the results of the oldest step are read
    groups: list[Heads] = field(default_factory=lambda: PLAIN)
    padded_sizes: tuple[int, ...] = ()
    num_drafts: int = 0  # drafts per decode row, of which a random number is right

    @property
    def max_len(self) -> int:
        if self.groups == PLAIN:
            return min(self.max_model_len, self.num_pages * self.page_size + 1)
        return min(self.max_model_len, self.pools().max_tokens + 1)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(window, sink tokens) of the heads of all cache groups."""
        return [head for group in self.groups for head in group]

    def pools(self) -> GroupPools:
        sizes = {"page_size": self.page_size, "max_num_seqs": self.max_num_seqs, "max_pages": self.max_model_len}
        return make_pools([(self.num_pages * len(heads), heads) for heads in self.groups], **sizes)


def visible(head: tuple[int, int], query: int) -> list[int]:
    """Return the positions that a query at position `query` attends to, for a head with (window, sink tokens)."""
    window, sink_tokens = head
    return [key for key in range(query + 1) if key < sink_tokens or key > query - window]


def next_token(views: list[list]) -> int:
    """Compute the next token from the cached values that each head attends to."""
    return hash(tuple(views[0]) if len(views) == 1 else tuple(map(tuple, views))) % VOCAB


def kv_of(salt: str, token: int) -> tuple[int, int]:
    """Return the cached value of a token. It includes the request's salt: if requests of different salts shared pages,
    the output would change.
    """
    return SALTS.index(salt), token


def plain_output(request: Request, limits: Limits) -> tuple[list[int], str]:
    """Return the expected output tokens and finish reason of a request, computed one token at a time without a
    cache.
    """
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
    unfinished: list[Request] = field(default_factory=list)  # in the order of arrival
    streamed: dict[int | str, list[int]] = field(default_factory=dict)
    memory: dict[tuple[int, int, int], object] = field(default_factory=dict)  # values by (group, row, offset in page)
    last_tokens: dict[int, int] = field(default_factory=dict)  # device memory: newest token by request slot
    lens: dict[int, int] = field(default_factory=dict)  # device memory: number of tokens by request slot
    luck: random.Random = field(default_factory=lambda: random.Random(0))
    in_flight: deque[tuple[StepPlan, list[RowTokens]]] = field(default_factory=deque)
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
            padded_sizes=limits.padded_sizes,
            eos_token_ids=(EOS,),
            draft_control=DraftControl((limits.num_drafts,), float) if limits.num_drafts else None,
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
        """Schedule and launch a step, then read the results of steps that were launched at least `lag` steps before."""
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

    def launch(self, plan: StepPlan) -> list[RowTokens]:
        """Compute a step immediately, like a device that runs programs in the order of their launches.

        All cached values are read before any new value is written. A request that reads a page which another request
        writes in the same step then raises KeyError or gets an old value. A decode row begins at the length in device
        memory, which exceeds the planned length if drafts of unread steps were accepted.
        """
        begins = [row.start for row in plan.rows]
        for i, row in enumerate(plan.decode):
            assert row.start < self.lens[row.request_slot] <= row.start + 1 + self.limits.lag * self.limits.num_drafts
            begins[i] = self.lens[row.request_slot] - 1
        cached = [self.read(plan, i, begin) for i, begin in enumerate(begins)]
        samples = []
        for i, (row, views, begin) in enumerate(zip(plan.rows, cached, begins, strict=True)):
            if i < len(plan.decode):
                samples.append(self.verify(plan, i, views))
                continue
            for position in range(begin, end := begin + row.num_tokens):
                self.write(plan, i, views, position, row.request.token_ids[position])
            if row.samples:
                samples.append(RowTokens([self.next(views, end)]))
                self.last_tokens[row.request_slot], self.lens[row.request_slot] = samples[-1].tokens[0], end + 1
        return samples

    def verify(self, plan: StepPlan, row: int, views: list[dict[int, object]]) -> RowTokens:
        """Compute a decode row with its drafts. Return the accepted drafts and the token after them."""
        planned = plan.decode[row]
        slot, length = planned.request_slot, self.lens[planned.request_slot]
        if length >= planned.limit:
            return RowTokens([])  # the request ended in a step whose results were not read when this step was planned
        drafts = min(planned.num_drafts, planned.limit - length - 1)
        token, got, right = self.last_tokens[slot], [], True
        for position in range(length - 1, length + drafts):
            self.write(plan, row, views, position, token)
            if right:
                got.append(self.next(views, position + 1))
            right = right and self.luck.random() < 0.7
            token = got[-1] if right else self.luck.randrange(100, 200)
        self.last_tokens[slot], self.lens[slot] = got[-1], length + len(got)
        return RowTokens(got, drafts)

    def write(self, plan: StepPlan, row: int, views: list[dict[int, object]], position: int, token: int) -> None:
        """Write the value of a token to its rows, and check that all values that the token attends to are present."""
        for (lane, place), view in zip(self.places(plan, row, position), views, strict=True):
            assert place[1] != PAGE_NONE
            view[position] = self.memory[place] = kv_of(plan.rows[row].request.salt, token)
            assert all(key in view for key in visible(lane, position))

    def next(self, views: list[dict[int, object]], end: int) -> int:
        """Compute the token after the first `end` tokens."""
        heads = zip(self.limits.heads, views, strict=True)
        return next_token([[view[key] for key in visible(head, end - 1)] for head, view in heads])

    def places(self, plan: StepPlan, row: int, position: int) -> list[tuple[tuple[int, int], tuple[int, int, int]]]:
        """Return, for each head, the head and the (group, row, offset in page) of a token's value."""
        page, offset = divmod(position, self.limits.page_size)
        return [
            (head, (group, int(plan.tables[group][row, i, page]), offset))
            for group, heads in enumerate(self.limits.groups)
            for i, head in enumerate(heads)
        ]

    def read(self, plan: StepPlan, row: int, start: int) -> list[dict[int, object]]:
        """Return the cached values, by position for each head, that a token at position `start` attends to."""
        views: list[dict[int, object]] = [{} for _ in self.limits.heads]
        for position in range(start):
            for (head, place), view in zip(self.places(plan, row, position), views, strict=True):
                if position in visible(head, start):
                    view[position] = self.memory[place]  # raises KeyError if the value was never written
        return views

    def read_back(self) -> None:
        plan, samples = self.in_flight.popleft()
        before = {row.request: row.request.output_ids for row in plan.rows}
        continued = self.scheduler.retire(plan, samples)
        self.num_dropped += sum(len(row.tokens) for row in samples) - len(continued)
        for request in {request for request, _ in continued}:
            new = [token for other, token in continued if other is request]
            assert request.output_ids == [*before[request], *new]
            self.streamed[request.request_id] += new
        self.check()

    def fail(self) -> None:
        """Simulate a step that fails on the device after its caches were donated: cache contents and unread tokens are
        lost, and all requests are queued again.
        """
        self.scheduler.schedule()
        self.memory = dict.fromkeys(self.memory, "garbage")
        self.last_tokens.clear()
        self.lens.clear()
        self.in_flight.clear()
        self.scheduler.requeue_all(self.unfinished)
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
        assert len({row.request_slot for row in rows}) == len({row.request for row in rows}) == len(rows)
        assert all(row.num_tokens == 1 and row.samples for row in plan.decode)
        assert sum(not row.samples for row in plan.prefill) <= 1
        assert limits.max_prefill_seqs is None or len(plan.prefill) <= limits.max_prefill_seqs
        for row in rows:
            request, end = row.request, row.start + row.num_tokens
            assert row.request_slot == request.request_slot
            assert row.request_slot in range(limits.max_num_seqs)
            assert end <= self.pools.pools[0].allocated_tokens(row.request_slot)
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
        slots = [request.request_slot for request in running if request.request_slot is not None]
        assert len(slots) == len(running)
        for request in self.unfinished:
            assert (request.request_slot is not None) == (request in running)
        ends = {request.request_slot: request.num_computed for request in running}
        for slot, pool in itertools.product(range(self.limits.max_num_seqs), self.pools.pools):
            pages = -(-ends.get(slot, 0) // self.limits.page_size)
            for_drafts = (self.limits.lag + 2) * (1 + self.limits.num_drafts)
            ahead = for_drafts if slot in ends and self.limits.num_drafts else 0
            surplus = pool.allocated_tokens(slot) - pages * self.limits.page_size
            assert 0 <= surplus <= -(-ahead // self.limits.page_size) * self.limits.page_size


# Prompts whose first eight output tokens do not include EOS.
LASTING = [
    prompt
    for prompt in ([first, second, 3, 4] for first in range(1, VOCAB) for second in range(1, VOCAB))
    if EOS not in plain_output(Request("", tuple(prompt), SamplingParams(max_tokens=8, ignore_eos=True)), Limits())[0]
]


def summary(rows) -> list[tuple[int, int, int, bool]]:
    """Return (request id, start, number of tokens, whether a token is sampled) for each row."""
    return [(row.request.request_id, row.start, row.num_tokens, row.samples) for row in rows]
