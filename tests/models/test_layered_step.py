"""Steps that consist of several compiled programs, each with some of the layers.

Tokens and caches equal steps of one program, and programs of equal layers are compiled once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import GQA_PRESETS, ModelConfig
from pallas_attn.models.engine import (
    Engine,
    EngineConfig,
    NGramProposer,
    SamplingParams,
    Speculation,
    WrittenLayer,
    runner,
)
from pallas_attn.models.engine.step.layered import StepPrograms, split_layers
from tests.kit.slow_cases import slow_cases
from tests.models import engine_case
from tests.models.engine_case import PROMPTS

PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=11)
DEEP = dataclasses.replace(engine_case.CONFIG, num_hidden_layers=5)
CHOOSING = dataclasses.replace(
    engine_case.SPARSE, num_hidden_layers=5, indexer_types=("full", "full", "shared", "full", "shared")
)
WINDOWS = dataclasses.replace(GQA_PRESETS["gpt-oss-tiny"], num_hidden_layers=4, vocab_size=64, windows=(6, None) * 2)
FAMILIES = {
    "a dense layer and four of experts": (DEEP, [1, 2, 2], 2),
    "choices that are shared": (CHOOSING, [1, 2, 2], 2),
    "windows in turns": (WINDOWS, [2, 2], 1),
}
"""By name: a model, the number of layers of each program of a step, and the number of distinct compiled programs."""
SIZES = EngineConfig(
    num_pages=96,
    page_size=4,
    max_batched_tokens=16,
    max_num_seqs=4,
    max_model_len=96,
    decode_buckets=(4,),
    prefill_buckets=(16,),
    separate_prefill=False,
)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split every step with prompts into programs of two layers."""
    monkeypatch.setattr(runner, "CONCURRENT_TOKENS", 0)
    monkeypatch.setattr(runner, "MAX_LAYERS_PER_PROGRAM", 2)


def make(config: ModelConfig, **changes: Any) -> Engine:
    return Engine(random_model(config, seed=3, settings=engine_case.QUICK), dataclasses.replace(SIZES, **changes))


@functools.cache
def deep() -> Engine:
    """Return the engine that all tests with the fixture `cut` share.

    Each test leaves the engine without requests, and uses its own salt, so no test reuses cached prefixes of another.
    """
    return make(DEEP)


def tokens_of(engine: Engine, salt: str = "") -> list[list[int]]:
    ids = [engine.add_request(prompt, PARAMS, salt=salt) for prompt in PROMPTS]
    while engine.has_unfinished:
        engine.step()
    return [engine.output(i).output_ids for i in ids]


def split_steps(engine: Engine) -> list[StepPrograms]:
    return [step for step in engine._runner._programs.forward.values() if isinstance(step, StepPrograms)]


@pytest.mark.slow  # slow, because a test of test_gemma runs several programs and compares with transformers
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_several_programs_equal_whole_steps(name: str, request: pytest.FixtureRequest) -> None:
    config, lengths, num_programs = FAMILIES[name]
    whole = make(config)
    wanted = tokens_of(whole)
    assert split_steps(whole) == []
    request.getfixturevalue("cut")
    engine = make(config)
    assert tokens_of(engine) == wanted
    steps = split_steps(engine)
    assert {bucket.prefill_tokens for bucket in engine._runner._programs.forward} == {0, 16}
    assert len(steps) == sum(bucket.prefill_tokens > 0 for bucket in engine._runner._programs.forward) > 0
    for step in steps:
        assert [len(piece) for piece in step.layer_ranges] == lengths
        assert len({id(program) for program in step.programs_of_layers}) == num_programs
    for one, other in zip(*(jax.tree.leaves(e._runner._caches) for e in (whole, engine)), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_programs_copy_no_cache(cut: None) -> None:
    """The caches that a program returns use the memory of the caches in its arguments."""
    engine = deep()
    before = jax.tree.leaves(engine._runner._caches)
    tokens_of(engine, "copies")
    assert all(array.is_deleted() for array in before)
    for step in split_steps(engine):
        for piece, program in zip(step.layer_ranges, step.programs_of_layers, strict=True):
            assert isinstance(program, jax.stages.Compiled)
            memory = program.memory_analysis()
            assert memory is not None
            assert memory.alias_size_in_bytes >= sum(engine._runner._specs[layer].num_bytes for layer in piece)


@pytest.mark.slow
def test_engine_continues_after_a_failed_program(cut: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run, fails = deep(), StepPrograms.__call__, [False, True]
    wanted = tokens_of(engine, "whole")

    def failing(self: StepPrograms, *arguments: Any, **named: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise MemoryError("no memory")

        first, _, *rest = self.programs_of_layers
        step = dataclasses.replace(self, programs_of_layers=[first, fail, *rest]) if fails and fails.pop(0) else self
        return run(step, *arguments, **named)

    monkeypatch.setattr(StepPrograms, "__call__", failing)
    ids = [engine.add_request(prompt, PARAMS, salt="failing") for prompt in PROMPTS]
    failures = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except MemoryError:
            failures += 1
    assert failures == 1
    assert [engine.output(i).output_ids for i in ids] == wanted


@pytest.mark.slow
def test_page_export_uses_the_programs_of_long_steps(cut: None) -> None:
    engine, told = deep(), list[WrittenLayer]()
    wanted, steps = tokens_of(engine, "before"), split_steps(engine)
    feed = engine.watch_written(told.append, pieces=3)
    engine.warmup()
    with engine_case.compile_events() as events:
        assert tokens_of(engine, "watched") == wanted
    assert events == []  # warmup also compiles the functions that copy written page rows
    feed.wait(60)
    feed.close()
    assert {written.layer for written in told} == {*range(5)}
    layered = engine._runner._layered
    assert layered is not None
    assert [*layered.compiled.values()] == split_steps(engine) == steps != []


@slow_cases("drafts")
@pytest.mark.parametrize(
    "changes", [{"batch_invariant": True}, {"speculate": Speculation(NGramProposer(), 2)}], ids=["invariant", "drafts"]
)
def test_steps_of_one_program(cut: None, changes: dict[str, Any]) -> None:
    assert make(DEEP, **changes)._runner._long is None


@pytest.mark.parametrize(
    ("layers", "num_programs", "period", "wanted"),
    [
        (27, 4, 1, [6, 7, 7, 7]),
        (2, 4, 1, [1, 1]),
        (5, 1, 1, [5]),
        (61, 61, 1, [1] * 61),
        (61, 8, 1, [5, *[8] * 7]),
        (36, 4, 2, [6, 10, 10, 10]),
        (3, 3, 4, [3]),
    ],
)
def test_layer_ranges_except_the_first_are_equal(
    layers: int, num_programs: int, period: int, wanted: list[int]
) -> None:
    cut = split_layers(layers, num_programs, period)
    assert [len(layer_range) for layer_range in cut] == wanted
    assert [layer for layer_range in cut for layer in layer_range] == [*range(layers)]
