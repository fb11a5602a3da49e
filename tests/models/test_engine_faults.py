"""Exceptions inside calls of the engine: at whatever line, no token is lost and the engine continues."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import inspect
import itertools
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

import pallas_attn.cache
import pallas_attn.models.engine
from pallas_attn.models.engine import Engine, EngineConfig, Proposer, RequestOutput, SamplingParams, Speculation
from pallas_attn.models.engine import engine as engine_module
from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.logprob_list import LogprobList
from pallas_attn.models.engine.request import NONFINITE, Request
from pallas_attn.models.engine.step.plan import RowTokens, ScheduledRow, StepPlan
from tests.models import engine_case
from tests.models.engine_case import MAX_TOKENS, VOCAB_SIZE, model

HOST_CODE = tuple(str(Path(package.__file__).parent) for package in (pallas_attn.models.engine, pallas_attn.cache))
ERRORS = (KeyboardInterrupt, MemoryError, RuntimeError)
BROKEN = VOCAB_SIZE - 1
"""Token after which the logits of the fake model are not finite."""

SMALL = EngineConfig(
    num_pages=12, page_size=2, max_batched_tokens=6, max_num_seqs=3, max_model_len=40, history=50, max_prefill_seqs=2
)


class Fault:
    """Context manager that raises an error at the n-th executed line (or instruction) of the engine or the pools."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt, instructions: bool = False):
        self.at, self.error, self.instructions = at, error, instructions
        self.count = 0

    def __enter__(self) -> Fault:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    @property
    def happened(self) -> bool:
        return self.count >= self.at

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(HOST_CODE):
            return None
        if code.co_flags & inspect.CO_GENERATOR and code.co_name != "_changing":
            return None  # no fault here: Python discards exceptions in a generator that is deleted before its end
        frame.f_trace_opcodes = self.instructions
        self.count += 1
        if self.count == self.at:
            raise self.error("a fault of the test")
        return self._trace


def next_token(seen: Sequence[object]) -> int:
    """Return the next token of the fake model: a hash of all tokens in `seen`, which the model attends to."""
    if seen[-1] == ("", BROKEN):
        return NONFINITE
    return hashlib.sha256(repr(seen).encode()).digest()[0] % BROKEN


@dataclasses.dataclass(frozen=True)
class FakeResult:
    plans: tuple[StepPlan, ...]
    rows: list[RowTokens]
    logits: None = None
    is_sampled: bool = True
    bucket: ClassVar[Bucket] = Bucket(1, 0)

    def sampled(self) -> list[RowTokens]:
        return self.rows

    def prompt_logprobs(self) -> list[tuple[Request, int, LogprobList]]:
        each = []
        for row in self.plans[0].prefill:
            ids = row.request.prompt_ids[row.start + 1 : row.start + 1 + row.num_scored]
            each += [(row.request, row.start, logprobs_of(ids))] if ids else []
        return each


def logprobs_of(tokens: Sequence[int]) -> LogprobList:
    minus_one = np.float32(-1).view(np.int32)
    return LogprobList(0, np.array([[token, minus_one, 1] for token in tokens], np.int32))


class FakeRunner:
    """Replacement of the engine's runner that has no device and computes tokens from the contents of the pages.

    Reading a page that was never written raises KeyError. The runner also proposes the drafts; most drafts are right.
    """

    compile_s, num_compilations, cache_bytes = 0.0, 0, 0
    now = staticmethod(time.perf_counter)

    def __init__(self, model: object, config: Any, processes: object = None):
        self.page_size = config.page_size
        self.luck = random.Random(0)
        self.reset()

    def reset(self) -> None:
        self.memory: dict[tuple[int, int], object] = {}
        self.last_tokens: dict[int, int] = {}
        self.lens: dict[int, int] = {}

    def launch(self, plans: tuple[StepPlan], all_logits: bool) -> FakeResult:
        (plan,), steps = plans, list[Any]()
        for i, row in enumerate(plan.rows):  # all rows are read before any row is written
            decodes, salt = i < len(plan.decode), row.request.salt
            if decodes and self.lens[row.request_slot] >= row.limit:
                steps.append((row, [], [], 0))
                continue
            start = self.lens[row.request_slot] - 1 if decodes else row.start
            drafts = min(row.num_drafts, row.limit - start - 2) if decodes else 0
            end, table = start + row.num_tokens + drafts, plan.tables[0][i, 0]
            places = [(int(table[at // self.page_size]), at % self.page_size) for at in range(end)]
            seen = [self.memory[place] for place in places[:start]]
            known = [self.last_tokens[row.request_slot]] if decodes else row.request.token_ids[start:end]
            steps.append((row, places, seen + [(salt, token) for token in known], drafts))
        return FakeResult(plans, [self.compute(*step) for step in steps if step[0].samples or self.store(*step[1:3])])

    def compute(self, row: ScheduledRow, places: list[Any], seen: list[Any], drafts: int) -> RowTokens:
        got = [next_token(seen)] if seen else []
        right = True
        for _ in range(drafts):
            right = right and got[-1] != NONFINITE and self.luck.random() < 0.7
            seen = [*seen, (row.request.salt, got[-1] if right else BROKEN + 1)]
            if right:
                got.append(next_token(seen))
        self.store(places, seen)
        if got:
            self.last_tokens[row.request_slot], self.lens[row.request_slot] = (
                max(got[-1], 0),
                len(seen) - drafts + len(got),
            )
        return RowTokens(got, drafts, logprobs_of(got) if row.request.params.logprobs is not None else None)

    def store(self, places: list[Any], seen: list[Any]) -> None:
        self.memory |= zip(places, seen, strict=True)


@functools.lru_cache(maxsize=100)
def continued(prompt: tuple[int, ...], salt: str) -> tuple[tuple[int, ...], str]:
    """Return all tokens that the fake model generates after a prompt, and the finish reason."""
    tokens = list(prompt)
    while len(tokens) < SMALL.num_pages * SMALL.page_size + 1:
        token = next_token([(salt, token) for token in tokens])
        if token == NONFINITE:
            return tuple(tokens[len(prompt) :]), "nonfinite"
        tokens.append(token)
    return tuple(tokens[len(prompt) :]), "length"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request of the traffic, and its expected output if it is not aborted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str

    @property
    def wanted(self) -> tuple[tuple[int, ...], str]:
        tokens, reason = continued(self.prompt, self.salt)
        for i, token in enumerate(tokens[: self.params.max_tokens]):
            if token in self.params.stop_token_ids:
                return tokens[: i + 1], "stop"
        cut = len(tokens) >= self.params.max_tokens
        return tokens[: self.params.max_tokens], "length" if cut else reason


class FaultyTraffic:
    """Random traffic on an engine whose calls are interrupted. All results are checked during the run."""

    def __init__(self, engine: Engine, draw: random.Random, ask: Callable[[random.Random], Asked]):
        self.engine, self.draw, self.ask = engine, draw, ask
        self.asked: dict[int | str, Asked] = {}
        self.arrived: dict[int | str, list[int]] = {}  # output tokens of each request at the last check
        self.told: dict[int | str, list[tuple[int, str | None]]] = {}
        self.numbers = itertools.count()
        self.faults = self.untold = 0
        self.reasons: set[str | None] = set()

    def call(self, function: Callable[..., Any], *args: Any, fault: Fault | None = None, **kwargs: Any) -> Any:
        """Call a function with or without a fault. Return None if the call was interrupted."""
        if fault is None:
            return function(*args, **kwargs)
        try:
            with fault:
                return function(*args, **kwargs)
        except fault.error:
            assert fault.happened, "the engine raised another error"
            self.faults += 1
            return None
        finally:
            self.check()

    def add(self, fault: Fault | None = None) -> None:
        """Add a request. If the call is interrupted, the request is added completely or not at all."""
        asked, request_id = self.ask(self.draw), f"r{next(self.numbers)}"
        self.told[request_id] = []
        self.asked[request_id] = asked
        self.arrived[request_id] = []
        arguments = {"request_id": request_id, "salt": asked.salt, "on_token": self.tell}
        self.call(self.engine.add_request, asked.prompt, asked.params, fault=fault, **arguments)
        if request_id not in self.engine._requests.tracked:
            assert fault is not None
            del self.asked[request_id], self.arrived[request_id], self.told[request_id]

    def tell(self, request_id: int | str, token: int, reason: str | None) -> None:
        self.told[request_id].append((token, reason))

    def abort(self, fault: Fault | None = None) -> None:
        if self.asked:
            self.call(self.engine.abort, self.draw.choice([*self.asked]), fault=fault)

    def generate(self, fault: Fault | None = None) -> None:
        """Call `Engine.generate`. Check that no request of the call remains in the engine, even after a fault."""
        asked = [self.ask(self.draw) for _ in range(2)]
        asked = [one for one in asked if not one.salt]
        prompts, params = [one.prompt for one in asked], [one.params for one in asked]
        outputs = self.call(self.engine.generate, prompts, params, fault=fault)
        assert outputs is None or [self.result(output) for output in outputs] == [one.wanted for one in asked]
        left = [tracked for key, tracked in self.engine._requests.tracked.items() if key not in self.asked]
        assert all(tracked.finish_reason is not None and not tracked.is_owned for tracked in left) or fault is None

    def step(self, fault: Fault | None = None) -> None:
        self.call(self.engine.step, fault=fault)

    @staticmethod
    def result(output: RequestOutput) -> tuple[tuple[int, ...], str | None]:
        return tuple(output.output_ids), output.finish_reason

    def check(self) -> None:
        """Check that every request has an output, and that tokens were only appended since the last check."""
        for request_id, before in self.arrived.items():
            if request_id not in self.engine._requests.tracked:
                continue
            output = self.engine.output(request_id)
            assert output.output_ids[: len(before)] == before
            if output.logprobs is not None:
                assert [logprob.token_id for logprob in output.logprobs] == output.output_ids
            if output.prompt_logprobs is not None and output.output_ids:
                prompt = self.engine._requests.tracked[request_id].request.prompt_ids
                assert list(output.prompt_logprobs) == [None, *logprobs_of(prompt[1:])]
            assert tuple(output.output_ids) == self.asked[request_id].wanted[0][: len(output.output_ids)]
            self.arrived[request_id] = output.output_ids
        self.engine.stats()

    def drain(self) -> None:
        """Run to the end without faults, check all requests, and forget them."""
        for _ in range(5000):
            if not self.engine.has_unfinished:
                break
            self.engine.step()
        assert not self.engine.has_unfinished, "no end in sight"
        self.check()
        for request_id, asked in self.asked.items():
            if request_id not in self.engine._requests.tracked:
                continue
            output = self.engine.output(request_id)
            self.reasons.add(output.finish_reason)
            if output.finish_reason != "abort":
                assert self.result(output) == asked.wanted
            self.check_told(output)
        self.asked.clear(), self.arrived.clear(), self.told.clear()
        self.check_pools()

    def check_told(self, output: RequestOutput) -> None:
        """Check that the `on_token` callbacks received every token once and in order.

        A callback call that a fault interrupted may be missing.
        """
        told = self.told[output.request_id]
        tokens = iter([*output.output_ids, NONFINITE] if output.finish_reason == "nonfinite" else output.output_ids)
        assert all(any(token == one for token in tokens) for one, _ in told)
        whole = len(told) == len(output.output_ids) + (output.finish_reason == "nonfinite")
        self.untold += not whole
        if whole and output.finish_reason != "abort":
            assert [reason for _, reason in told] == [None] * (len(told) - 1) + [output.finish_reason]

    def check_pools(self) -> None:
        for pools in self.engine._pools:
            pools.check()
        for cache in self.engine._prefix_caches:
            cache.check()
        assert self.engine.stats().used_pages == 0


def asks_fake(draw: random.Random) -> Asked:
    prompt = [1, 2, 3, 4, 5, 6, 1, 2][: draw.randint(0, 8)] + draw.choices((1, 2, 3), k=draw.randint(1, 6))
    if draw.random() < 0.2:
        prompt.append(BROKEN)
    params = SamplingParams(
        max_tokens=draw.randint(1, 12),
        stop_token_ids=tuple(range(0, BROKEN, draw.choice((5, 100)))),
        logprobs=draw.choice([None, None, 0]),
        prompt_logprobs=draw.choice([None, None, None, 0]),
    )
    return Asked(tuple(prompt), params, draw.choice(["", "", "other"]))


def asks_real(draw: random.Random) -> Asked:
    prompt = draw.randrange(len(engine_case.PROMPTS))
    params = dataclasses.replace(draw.choice([engine_case.GREEDY, engine_case.DRAWN]), max_tokens=draw.randint(1, 20))
    return Asked(tuple(engine_case.PROMPTS[prompt]), params, "")


DRAFTING = dataclasses.replace(SMALL, speculate=Speculation(Proposer(), 3, adaptive=False))


def fake_engine(monkeypatch: pytest.MonkeyPatch, config: EngineConfig = SMALL) -> Engine:
    monkeypatch.setattr(engine_module, "Runner", FakeRunner)
    return Engine(model(), config)


def play(
    traffic: FaultyTraffic, steps: int, fault_share: float, watch: Callable[[int], None] = lambda step: None
) -> None:
    """Run steps of random traffic: requests arrive, finish and are aborted, and calls of the engine are interrupted."""
    draw = traffic.draw
    for step in range(steps):

        def fault() -> Fault | None:
            if draw.random() >= fault_share:
                return None
            return Fault(int(10 ** draw.uniform(0, 3.7)), draw.choice(ERRORS), instructions=draw.random() < 0.5)

        unfinished = sum(t.finish_reason is None for t in traffic.engine._requests.tracked.values())
        if unfinished < 8 and draw.random() < 0.4:
            traffic.add(fault())
        if draw.random() < 0.05:
            traffic.abort(fault())
        if draw.random() < 0.005:
            traffic.generate(fault())
        traffic.step(fault())
        if step % 50 == 49:
            traffic.drain()
            watch(step)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("config", [SMALL, DRAFTING], ids=["plain", "with drafts"])
def test_interrupted_traffic_loses_and_repeats_no_token(monkeypatch, config):
    """Raise exceptions at random lines and instructions of engine calls, also during the recovery from an exception.

    The exceptions are RuntimeError, MemoryError and KeyboardInterrupt. No token is lost or repeated.
    """
    traffic = FaultyTraffic(fake_engine(monkeypatch, config), random.Random(0), asks_fake)
    play(traffic, 300, fault_share=0.3)
    assert traffic.faults > 50
    assert traffic.reasons == {"stop", "length", "abort", "nonfinite"}
    assert traffic.engine.stats().preemptions > 0


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("stride", [499, pytest.param(11, marks=pytest.mark.slow)])
def test_run_interrupted_at_any_line_can_continue(monkeypatch, stride):
    """Interrupt a run at one line, then abort one request. The other requests continue and give the right tokens.

    The run has chunked prefill, preemptions and several finish reasons.
    """
    params = SamplingParams(max_tokens=9)
    asked = [
        Asked(tuple(prompt), params, "") for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8, 9], [5, BROKEN], [6])
    ]
    for at in itertools.count(1, stride):
        engine, fault = fake_engine(monkeypatch), Fault(at, ERRORS[at % len(ERRORS)])
        ids = [engine.add_request(one.prompt, one.params) for one in asked]
        with contextlib.suppress(fault.error), fault:
            while engine.has_unfinished:
                engine.step()
        if not fault.happened:
            break
        before = [engine.output(i).output_ids for i in ids]
        ended = [engine.output(i).finish_reason for i in ids]
        assert engine.abort(ids[0]) or engine.output(ids[0]).finish_reason == "length"
        while engine.has_unfinished:
            engine.step()
        for i, one in list(zip(ids, asked, strict=True))[1:]:
            assert FaultyTraffic.result(engine.output(i)) == one.wanted
        assert [engine.output(i).output_ids[: len(had)] for i, had in zip(ids, before, strict=True)] == before
        assert all(was in (None, engine.output(i).finish_reason) for i, was in zip(ids, ended, strict=True))
        engine._pools[0].check()
        assert engine.stats().used_pages == 0
    assert at > 5000


def memory_growth(traffic: FaultyTraffic, steps: int, fault_share: float) -> tuple[int, int]:
    """Return the growth of Python memory (bytes) and of the number of jax arrays.

    The growth is measured from a quarter of the steps to the end.
    """
    held: dict[int, tuple[int, int]] = {}

    def watch(step: int) -> None:
        if step + 1 in (steps // 4, steps):
            gc.collect()
            held[step + 1] = tracemalloc.get_traced_memory()[0], len(jax.live_arrays())

    tracemalloc.start()
    try:
        play(traffic, steps, fault_share, watch)
    finally:
        tracemalloc.stop()
    (before, arrays_before), (after, arrays) = held[steps // 4], held[steps]
    return after - before, arrays - arrays_before


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("config", [SMALL, DRAFTING], ids=["plain", "with drafts"])
@pytest.mark.parametrize("seed", range(2))
def test_long_interrupted_traffic(monkeypatch, config, seed):
    traffic = FaultyTraffic(fake_engine(monkeypatch, config), random.Random(seed), asks_fake)
    held, _ = memory_growth(traffic, 20_000, fault_share=0.1)
    assert held < 100_000
    assert traffic.faults > 1000


@pytest.mark.slow
def test_long_interrupted_traffic_on_a_model(monkeypatch):
    """Interrupted traffic on a real model gives the tokens of a plain uncached run, and memory does not grow."""
    monkeypatch.setattr(Asked, "wanted", property(_plain))
    config = dataclasses.replace(engine_case.padded(engine_case.ENGINES["short of pages"]), history=20)
    traffic = FaultyTraffic(Engine(model(), config), random.Random(0), asks_real)
    held, arrays = memory_growth(traffic, 5000, fault_share=0.01)
    assert (held < 200_000, arrays) == (True, 0)
    assert traffic.faults > 30


def _plain(asked: Asked) -> tuple[tuple[int, ...], str]:
    params = dataclasses.replace(asked.params, max_tokens=MAX_TOKENS)
    tokens = engine_case.plain(engine_case.PROMPTS.index([*asked.prompt]), params)
    return tokens[: asked.params.max_tokens], "length"
