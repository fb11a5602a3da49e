"""Compilation in the background: steps use the programs that are compiled, and no step waits for a compilation."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine import Engine, EngineConfig, NGramProposer, SamplingParams, Speculation
from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.step.background import BackgroundCompiler
from pallas_attn.models.engine.step.compiler import RunnerState, StepCompiler
from tests.models import llm_case
from tests.models.engine_case import PROMPTS, VOCAB_SIZE, compile_events

CONFIG = EngineConfig(
    num_pages=40,
    page_size=4,
    max_batched_tokens=24,
    max_num_seqs=2,
    max_model_len=96,
    decode_buckets=(1, 2),
    prefill_buckets=(8, 24),
)
PARAMS = SamplingParams(max_tokens=6)
COVERING = [Bucket(2, 0), Bucket(2, 24)]
OTHERS = [Bucket(1, 0), Bucket(0, 8), Bucket(0, 24), Bucket(2, 8)]


@functools.cache
def model() -> Decoder:
    """Return a model with one layer, because the tests compile all of its programs."""
    config = dataclasses.replace(llm_case.CONFIG, num_hidden_layers=1, vocab_size=VOCAB_SIZE, eos_token_ids=())
    return random_model(config, seed=3, settings=llm_case.QUICK)


class Gate:
    """Replacement of the compilation in threads: it waits for `allowed`, and reuses programs that the tests compiled.

    Attributes:
      allowed: number of buckets that threads may compile.
      failing: buckets whose compilation fails.
      only_covering: whether the main thread may compile only `COVERING`.
    """

    def __init__(self, forward: Mapping[Bucket, Any], shared: Mapping[Any, Any]):
        self.allowed, self.failing = threading.Semaphore(0), set[Bucket]()
        self.only_covering = True
        self._forward, self._shared = forward, shared

    def compile(self, programs: StepCompiler, new: Mapping[Bucket, Any], *rest: Any) -> dict[Bucket, Any]:
        if threading.current_thread() is not threading.main_thread():
            assert self.allowed.acquire(timeout=60)
        elif self.only_covering:
            assert {*new} <= {*COVERING}, "a step compiles"
        if failing := self.failing & {*new}:
            raise RuntimeError(f"no program for {failing}")
        programs.shared |= self._shared
        return {bucket: self._forward[bucket] for bucket in new}

    def let(self, engine: Engine, count: int) -> None:
        """Let the thread compile buckets, and let the engine take them."""
        before = engine.stats().compilations
        if count:
            self.allowed.release(count)
        end = time.monotonic() + 30
        while engine.stats().compilations < before + count:
            assert time.monotonic() < end
            engine.take_compiled()


@pytest.fixture(scope="module")
def compiled() -> Engine:
    """An engine that has compiled its programs in the background."""
    engine = Engine(model(), CONFIG)
    assert engine.warmup(wait=False) > 0
    assert [*engine._runner._programs.forward][:2] == COVERING
    engine.warmup(wait=True)
    return engine


@pytest.fixture
def gate(compiled: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    programs = compiled._runner._programs
    gate = Gate(programs.forward, programs.shared)
    monkeypatch.setattr(StepCompiler, "compile", lambda self, new, *rest: gate.compile(self, new, *rest))
    yield gate
    gate.allowed.release(100)
    for thread in threading.enumerate():
        if thread.name == "compile steps":
            thread.join(60)  # before other tests replace the compilation


def tokens(engine: Engine, prompts: Any = PROMPTS[:4]) -> list[list[int]]:
    return [list(output.output_ids) for output in engine.generate(prompts, PARAMS)]


def test_all_buckets_are_compiled_once(compiled: Engine) -> None:
    stats = compiled.stats()
    assert {*compiled._runner._programs.forward} == {*COVERING, *OTHERS}
    assert (stats.compilations, stats.pending_compilations, stats.failed_compilations) == (6, 0, 0)
    assert not compiled.is_compiling


def test_requests_cause_no_compilation_before_and_after_the_end(compiled: Engine, gate: Gate) -> None:
    wanted = tokens(compiled)
    engine = Engine(model(), CONFIG)
    engine.warmup(wait=False)
    tokens(engine)  # NumPy and JAX initialise some parts at the first call
    with compile_events() as events:
        assert tokens(engine) == wanted
        assert engine.stats().pending_compilations == len(OTHERS)
        gate.let(engine, 2)
        assert tokens(engine) == wanted
        gate.let(engine, 2)
        assert tokens(engine) == wanted
    assert events == []
    assert not engine.is_compiling


def test_step_uses_the_smallest_compiled_bucket(gate: Gate) -> None:
    engine = Engine(model(), CONFIG)
    engine.warmup(wait=False)
    used: list[Bucket] = []
    launch = engine._runner.launch

    def recorded(*arguments: Any, **options: Any) -> Any:
        result = launch(*arguments, **options)
        used.append(result.bucket)
        return result

    engine._runner.launch = recorded  # pyrefly: ignore[bad-assignment]
    (scheduler,) = engine._ranks.schedulers
    for count, prompt, decode, sizes in (
        (0, *COVERING[::-1], (24,)),
        (2, *OTHERS[1::-1], (24,)),
        (2, *OTHERS[1::-1], (8, 24)),
    ):
        gate.let(engine, count)
        used.clear()
        tokens(engine, [[1, 2, 3]])
        assert used == [prompt, *[decode] * (len(used) - 1)]
        assert scheduler._padded_sizes == sizes


def test_bucket_that_most_steps_would_use_is_compiled_next(gate: Gate) -> None:
    engine = Engine(model(), CONFIG)
    engine.warmup(wait=False)  # the thread has begun to compile the first of `OTHERS`
    tokens(engine, [[*range(1, 21)]])
    gate.let(engine, 4)
    assert [*engine._runner._programs.forward] == [*COVERING, *(OTHERS[i] for i in (0, 2, 1, 3))]


def test_step_takes_what_is_compiled(gate: Gate) -> None:
    engine = Engine(model(), CONFIG)
    engine.warmup(wait=False)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=40))
    gate.allowed.release(4)
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().compilations == 6
    engine.take_compiled()
    assert not engine.is_compiling


def test_failed_compilation_is_reported_and_steps_continue(
    compiled: Engine, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tokens(compiled)
    engine = Engine(model(), CONFIG)
    engine.warmup(wait=False)
    gate.failing = {OTHERS[0]}
    gate.allowed.release(1)
    gate.let(engine, 3)
    assert engine.stats().failed_compilations == 1
    assert f"compilation of {OTHERS[0]} failed: no program for" in caplog.text
    assert tokens(engine) == wanted
    assert not engine.is_compiling
    gate.only_covering = False
    with pytest.raises(RuntimeError, match="no program for"):
        engine.warmup(wait=True)
    gate.failing = set()
    engine.warmup(wait=True)
    assert engine.stats().compilations == 6


def test_close_ends_the_thread(compiled: Engine, gate: Gate) -> None:
    engine = Engine(model(), CONFIG)
    engine.warmup(wait=False)
    background = engine._warmup._thread
    assert background is not None
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()  # XLA cannot be interrupted
    gate.allowed.release(1)
    closing.join(60)
    assert not background._thread.is_alive()
    with compile_events() as events:
        assert tokens(engine) == tokens(compiled)
    assert events == []
    assert engine.stats().compilations == 3
    engine.close()
    gate.allowed.release(3)
    engine.warmup(wait=False)  # starts again
    gate.let(engine, 3)


def test_deletion_of_the_engine_ends_the_thread(gate: Gate) -> None:
    engine = Engine(model(), CONFIG)
    engine.warmup(wait=False)
    background = engine._warmup._thread
    assert background is not None
    del engine
    gc.collect()
    gate.allowed.release(100)
    background.join()
    assert len(background._compiled) <= 1


def test_thread_uses_the_default_device_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    programs: Any = type(
        "Programs", (), {"compile": lambda self, new, state: seen.append(jax.config.jax_default_device) or new}
    )()
    with jax.default_device(jax.devices("cpu")[0]):
        background = BackgroundCompiler(programs, {Bucket(1, 0): None}, RunnerState((), (), (), {}))  # pyrefly: ignore[bad-argument-type]
    background.join()
    assert seen == [jax.devices("cpu")[0]]


@pytest.mark.slow
def test_shapes_give_the_programs_of_arrays(compiled: Engine) -> None:
    """The text of a program is the key of jax's compilation cache."""
    runner = compiled._runner
    state = runner._state()
    for name, bucket in (("forward", Bucket(2, 8)), ("sample", Bucket(2, 0))):
        of_arrays = runner._programs.lower(name, bucket, state)  # pyrefly: ignore[bad-argument-type]
        of_shapes = runner._programs.lower(name, bucket, runner._programs.shapes(state))  # pyrefly: ignore[bad-argument-type]
        assert of_shapes.as_text() == of_arrays.as_text()


def test_option(gate: Gate) -> None:
    engine = Engine(model(), dataclasses.replace(CONFIG, background_compilation=True))
    engine.warmup()
    assert engine.stats().pending_compilations == len(OTHERS)
    with pytest.raises(NotImplementedError, match="background_compilation: not supported with several processes"):
        Engine(model(), engine.config, processes=object())  # pyrefly: ignore[bad-argument-type]
    several = Engine(model(), CONFIG)
    several._is_one_process = False
    with pytest.raises(NotImplementedError, match="wait: expected None or True with several processes, got False"):
        several.warmup(wait=False)


def test_batch_invariant_steps_have_one_program() -> None:
    invariant = dataclasses.replace(CONFIG, decode_buckets=None, prefill_buckets=None, batch_invariant=True)
    sizes = invariant.runner_config(96)
    assert sizes.covering_buckets() == sizes.buckets() == [Bucket(2, 24)]


@pytest.mark.parametrize("all_logits", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 1, "decode_buckets": None},
        {"separate_prefill": False},
        {"speculate": Speculation(NGramProposer(), 5)},
        {"speculate": Speculation(NGramProposer(), 5), "separate_prefill": False},
    ],
    ids=["plain", "one request", "not separate", "drafts", "drafts, not separate"],
)
def test_covering_buckets_hold_every_step(changes: dict[str, Any], all_logits: bool) -> None:
    sizes = dataclasses.replace(CONFIG, **changes).runner_config(96)
    buckets, covering = sizes.buckets(all_logits), sizes.covering_buckets(all_logits)
    assert len(covering) == 2
    assert {*covering} <= {*buckets}
    for bucket in buckets:
        assert any(
            bucket.decode_rows <= c.decode_rows
            and bucket.prefill_tokens <= c.prefill_tokens
            and bucket.num_drafts <= c.num_drafts
            and bool(bucket.prefill_tokens) == bool(c.prefill_tokens)
            for c in covering
        )


@pytest.mark.slow
def test_drafts_change_no_token(compiled: Engine) -> None:
    """While only the largest programs are compiled, steps without drafts run programs with drafts."""
    engine = Engine(model(), dataclasses.replace(CONFIG, speculate=Speculation(NGramProposer(), 2)))
    engine._runner.compile(engine._runner.covering_buckets())
    engine.warmup(wait=False)
    assert tokens(engine) == tokens(compiled)
    engine.warmup(wait=True)
    assert tokens(engine) == tokens(compiled)
