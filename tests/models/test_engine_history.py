"""Records of finished requests: `EngineConfig.history` limits their number, and `generate` removes its own records."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pallas_attn.models.engine import Engine, SamplingParams
from tests.models.test_engine_faults import SMALL, FakeRunner, fake_engine

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

PROMPTS = [[1, 2, 3, 4, i] for i in range(4)]


class StepFailed(Exception):
    """An error raised by a test."""


def finish(engine: Engine, prompt: list[int]) -> int | str:
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=2))
    while engine.has_unfinished:
        engine.step()
    return request_id


def test_generate_forgets_its_requests(monkeypatch):
    engine = fake_engine(monkeypatch, dataclasses.replace(SMALL, history=None))
    mine = finish(engine, [5])
    for _ in range(20):
        assert [len(output.output_ids) for output in engine.generate(PROMPTS)] == [16, 16, 16, 16]
    assert list(engine._requests.tracked) == [mine]


def test_generate_returns_more_than_the_history_holds(monkeypatch):
    engine = fake_engine(monkeypatch, dataclasses.replace(SMALL, history=2))
    mine = finish(engine, [5])
    outputs = engine.generate(PROMPTS * 3, SamplingParams(max_tokens=2))
    assert [output.finish_reason for output in outputs] == ["length"] * 12
    assert engine.output(mine).finish_reason == "length"


def test_failed_generate_leaves_no_request(monkeypatch):
    engine = fake_engine(monkeypatch)
    mine = engine.add_request([5], SamplingParams(max_tokens=9))
    launch, calls = FakeRunner.launch, iter(range(100))

    def failing(*args):
        if next(calls) == 3:
            raise StepFailed
        return launch(*args)

    monkeypatch.setattr(FakeRunner, "launch", failing)
    with pytest.raises(StepFailed):
        engine.generate(PROMPTS)
    assert list(engine._requests.tracked) == [mine]
    while engine.has_unfinished:
        engine.step()
    assert len(engine.output(mine).output_ids) == 9


def test_records_of_the_newest_requests_and_steps_are_stored(monkeypatch):
    engine = fake_engine(monkeypatch, dataclasses.replace(SMALL, history=5))
    ids = [finish(engine, [i]) for i in range(12)]
    waiting = engine.add_request([1], SamplingParams(max_tokens=30))
    refused = [engine.add_request([1] * 50) for _ in range(2)]
    assert list(engine._requests.tracked) == [*ids[-3:], waiting, *refused]
    with pytest.raises(ValueError, match="no request 0; the engine remembers the newest 5 finished requests"):
        engine.output(ids[0])
    stats = engine.stats()
    assert len(stats.steps) == 5
    assert stats.num_steps == 12 * 2 + 0
    assert (stats.prefill_tokens, stats.decode_tokens) == (12, 12)


def test_all_records_are_stored_without_a_bound(monkeypatch):
    engine = fake_engine(monkeypatch, dataclasses.replace(SMALL, history=None))
    ids = [finish(engine, [i % 50]) for i in range(300)]
    assert list(engine._requests.tracked) == ids
    assert len(engine.stats().steps) == engine.stats().num_steps == 600


def test_preempted_request_that_finds_its_own_pages_is_not_a_hit(monkeypatch):
    engine = fake_engine(monkeypatch, dataclasses.replace(SMALL, num_pages=10, history=None))
    draw = random.Random(1)
    ids = [
        engine.add_request([1, 2] * draw.randint(0, 2) + draw.choices(range(3, 9), k=5), SamplingParams(max_tokens=9))
        for _ in range(12)
    ]
    while engine.has_unfinished:
        engine.step()
    outputs = [engine.output(i) for i in ids]
    found, cache = sum(output.cached_tokens for output in outputs), engine._prefix_caches[0]
    assert engine.stats().preemptions > 0
    assert cache.hit_tokens > found > 0, "they found pages again that were computed for themselves"
    assert engine.stats().prefix_hit_rate == found / sum(output.prompt_tokens for output in outputs)


@pytest.mark.parametrize("history", [0, -1])
def test_history_below_one_is_rejected(history):
    with pytest.raises(ValueError, match="history: expected at least 1 or None"):
        dataclasses.replace(SMALL, history=history)
