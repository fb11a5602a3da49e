"""`Engine.watch_written`, which reports written pages of prompts to a consumer, layer by layer.

Each page is reported once, in order, before the next layer runs, and with the contents that the step wrote.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from pallas_attn.models.engine import (
    ConsumerError,
    Engine,
    EngineConfig,
    NGramProposer,
    SamplingParams,
    Speculation,
    WrittenLayer,
)
from pallas_attn.models.engine.step.layered import LayeredStep, StepPrograms
from tests.kit.shared_steps import COMPILED, description
from tests.models import engine_case
from tests.models.engine_case import PROMPTS
from tests.models.test_cached_pages import HEADWISE, KINDS, LATENT_KIND, PARAMS, check, computed, make

pytestmark = pytest.mark.usefixtures("shared_steps")

NUM_LAYERS = 2


@pytest.fixture(autouse=True)
def shared_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with the same model and configuration share the compiled programs of their layers."""
    make_layered = LayeredStep.__init__

    def sharing(self: LayeredStep, model: Any, config: Any, num_programs: int) -> None:
        make_layered(self, model, config, num_programs)
        self.compiled = COMPILED.setdefault(f"{len(self.layer_ranges)} pieces {description(model, config)}", {})

    monkeypatch.setattr(LayeredStep, "__init__", sharing)


def tokens_of(engine: Engine, params: SamplingParams = PARAMS) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(output.output_ids) for output in engine.generate(PROMPTS, params))


def whole_steps(told: list[WrittenLayer]) -> list[list[WrittenLayer]]:
    """Return the reported layers of each step, without steps that failed. Check the order of the layers."""
    steps: dict[int, list[WrittenLayer]] = {}
    for written in told:
        assert written.num_layers == NUM_LAYERS
        assert not steps or written.step >= max(steps)
        steps.setdefault(written.step, []).append(written)
        assert written.layer == len(steps[written.step]) - 1
    return [layers for layers in steps.values() if len(layers) == NUM_LAYERS]


def by_request(told: list[WrittenLayer]) -> dict[Any, dict[tuple[int, int, int], dict[str, np.ndarray]]]:
    """Return the reported contents of pages, by request id, then by layer, head and page."""
    found: dict[Any, dict[tuple[int, int, int], dict[str, np.ndarray]]] = {}
    for written in (written for layers in whole_steps(told) for written in layers):
        for chunk in written.chunks:
            of_request = found.setdefault(chunk.request_id, {})
            assert len(chunk.tokens) == chunk.rows.shape[1] * 4
            for (head, page), row in np.ndenumerate(chunk.rows):
                if row >= 0:
                    key = written.layer, head, chunk.first_page + page
                    assert key not in of_request, "told twice"
                    of_request[key] = {name: array[row] for name, array in written.contents.items()}
    return found


def exported(engine: Engine, request_id: Any) -> dict[tuple[int, int, int], dict[str, np.ndarray]]:
    pages = engine.export_pages(request_id)
    found: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}
    for sequence in pages.sequences:
        for group, contents in enumerate(pages.groups):
            for name, array in contents.items():
                layer, _, name = name.partition(".")
                for (head, page), row in np.ndenumerate(sequence.rows[group]):
                    if row >= 0:
                        found.setdefault((int(layer), head, page), {})[name] = array[row]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [HEADWISE, *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != HEADWISE)])
def test_all_pages_of_prompts_are_reported_once(kind: str) -> None:
    """Every page of a prompt is reported once, and its contents equal the page that the engine exports.

    The traffic has chunked prefill, prefix hits and windows. If two requests compute the same page, both pages are
    reported, and the prefix cache keeps one of them. The two pages may differ by rounding.
    """
    rounding = 1e-5
    engine, told = make(kind), list[WrittenLayer]()
    feed = engine.watch_written(told.append)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    while engine.has_unfinished:
        engine.step()
    feed.wait(60)
    assert tuple(tuple(engine.output(i).output_ids) for i in ids) == computed(kind)[1]
    found = by_request(told)
    assert feed.backlog_bytes == 0
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        of_request, pages = found.get(request_id, {}), len(prompt) // 4
        wanted = {key: contents for key, contents in exported(engine, request_id).items() if key[2] < pages}
        assert {page for _, _, page in of_request} == set(range(pages))
        assert len({layer for layer, _, _ in of_request}) == (NUM_LAYERS if pages else 0)
        for key in wanted.keys() & of_request.keys():
            assert wanted[key].keys() == of_request[key].keys()
            for name, array in wanted[key].items():
                np.testing.assert_allclose(of_request[key][name], array, rtol=rounding, atol=rounding)
        assert of_request.keys() >= {key for key in wanted if key[2] == pages - 1}  # the last page is in all windows
    check(engine)


@pytest.mark.slow
def test_layer_is_reported_before_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer receives the pages of layer 0 before layer 1 runs.

    In this test, layer 1 of every step waits until the consumer has received layer 0.
    """
    engine, came = make(LATENT_KIND), threading.Semaphore(0)
    in_time, run = [], StepPrograms.__call__

    def running(self: StepPrograms, *arguments: Any, **named: Any) -> Any:
        first, second = self.programs_of_layers

        def waiting(*arguments: Any) -> Any:
            in_time.append(came.acquire(timeout=60))
            return second(*arguments)

        return run(dataclasses.replace(self, programs_of_layers=[first, waiting]), *arguments, **named)

    monkeypatch.setattr(StepPrograms, "__call__", running)
    feed = engine.watch_written(lambda written: came.release() if written.layer == 0 else None)
    engine.generate([PROMPTS[4]], SamplingParams(max_tokens=2))
    feed.wait(60)
    # The prompt of 50 tokens has three chunks of 16 tokens. The step of the last two tokens completes no page.
    assert in_time == [True] * 3
    check(engine)


@pytest.mark.slow
def test_pages_of_a_step_of_one_program() -> None:
    """A step of a single program reports all layers in order.

    Afterwards an engine can be watched with another number of programs per step.
    """
    engine, told = make(LATENT_KIND), list[WrittenLayer]()
    feed = engine.watch_written(told.append, pieces=1)
    wanted = engine.generate([PROMPTS[4]], PARAMS)[0].output_ids
    feed.wait(60)
    feed.close()
    steps = whole_steps(told)
    assert [[written.layer for written in layers] for layers in steps] == [[0, 1]] * len(steps) != []
    again = list[WrittenLayer]()
    other = make(LATENT_KIND)
    other.watch_written(lambda written: None, pieces=1).close()
    feed = other.watch_written(again.append, pieces=9)
    assert other.generate([PROMPTS[4]], PARAMS)[0].output_ids == wanted
    feed.wait(60)
    assert len(again) == len(told)
    for one, two in zip(told, again, strict=True):
        for name, array in one.contents.items():
            np.testing.assert_allclose(two.contents[name], array, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_without_a_consumer_the_step_is_one_program() -> None:
    plain, watched = make(LATENT_KIND), make(LATENT_KIND)
    watched.watch_written(lambda written: None)
    texts = [
        [
            engine._runner._programs.lower("forward", bucket, engine._runner._state()).as_text()
            for bucket in engine._runner.buckets()
        ]
        for engine in (plain, watched)
    ]
    assert texts[0] == texts[1]
    assert all("callback" not in text for text in texts[0])
    tokens_of(plain)
    assert plain._runner._layered is None


@pytest.mark.slow  # slow, because test_all_pages_of_prompts_are_reported_once compares contents
def test_copies_are_not_affected_by_later_steps() -> None:
    """A slow consumer receives every page as it was written, although the engine has reused all pages since."""
    engine, go_on, told = make(LATENT_KIND, num_pages=16), threading.Event(), list[WrittenLayer]()

    def held_up(written: WrittenLayer) -> None:
        assert go_on.wait(60)
        told.append(written)

    feed = engine.watch_written(held_up)
    engine.warmup()  # compile before the consumer blocks, because it waits for at most 60 s
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    while engine.has_unfinished:
        engine.step()
    assert feed.backlog_bytes > 0
    assert not told
    assert tuple(tuple(engine.output(i).output_ids) for i in ids) == computed(LATENT_KIND)[1]
    go_on.set()
    feed.wait(60)
    assert sum(len(prompt) // 4 for prompt in PROMPTS) > 16
    ample = make(LATENT_KIND)
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        alone = ample.add_request(prompt, SamplingParams(max_tokens=1))
        while ample.has_unfinished:
            ample.step()
        wanted = exported(ample, alone)
        found = {key: page for key, page in by_request(told).get(request_id, {}).items() if key[2] < len(prompt) // 4}
        assert found.keys() == wanted.keys()
        for key, contents in found.items():
            for name, array in contents.items():
                np.testing.assert_allclose(array, wanted[key][name], rtol=1e-3, atol=1e-4)
    check(engine)


def test_exception_in_the_consumer_ends_the_feed() -> None:
    engine, told = make(LATENT_KIND), list[WrittenLayer]()

    def raising(written: WrittenLayer) -> None:
        told.append(written)
        if len(told) == 3:
            raise OSError("its disk is full")

    feed = engine.watch_written(raising)
    assert tokens_of(engine) == computed(LATENT_KIND)[1]
    with pytest.raises(ConsumerError, match="consumer: raised OSError: its disk is full"):
        feed.wait(60)
    assert len(told) == 3
    assert (feed.is_open, feed.backlog_bytes) == (False, 0)
    again = engine.watch_written(told.append)  # after the failure, another feed can be opened
    engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=1))
    again.wait(60)
    assert len(told) == 3 + NUM_LAYERS
    check(engine)


def test_backlog_limit_ends_the_feed() -> None:
    engine, end = make(LATENT_KIND), threading.Event()
    feed = engine.watch_written(lambda written: end.wait(60), max_bytes=5000)
    assert tokens_of(engine) == computed(LATENT_KIND)[1]
    with pytest.raises(ConsumerError, match=r"max_bytes: \d+ bytes would be waiting, 5000 may"):
        feed.wait(60)
    end.set()
    check(engine)


def test_close_ends_the_feed() -> None:
    engine, told = make(LATENT_KIND), list[WrittenLayer]()
    feed = engine.watch_written(told.append)
    with pytest.raises(ValueError, match="consumer: the engine already has an open feed"):
        engine.watch_written(told.append)
    feed.close()
    feed.wait(60)
    assert tokens_of(engine) == computed(LATENT_KIND)[1]
    assert not told
    assert feed.error is None


def test_failed_step_is_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told, fails = make(LATENT_KIND), list[WrittenLayer](), [False, True]
    feed = engine.watch_written(told.append)
    add = feed.add

    def failing(step: Any, layer: int, parts: Any) -> None:
        if layer == 1 and fails and fails.pop(0):
            raise MemoryError("no memory")
        add(step, layer, parts)

    monkeypatch.setattr(feed, "add", failing)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    failures = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except MemoryError:
            failures += 1
    feed.wait(60)
    assert failures == 1
    assert tuple(tuple(engine.output(i).output_ids) for i in ids) == computed(LATENT_KIND)[1]
    assert len(told) == 2 * len(whole_steps(told)) + 1
    void = next(i for i, written in enumerate(told) if written.layer == 0 and told[i + 1].layer == 0)
    found = by_request(told[void + 1 :])  # after the failed step, its pages are reported again
    assert told[void].step == 1
    assert {page for _, _, page in found[ids[0]]} == set(range(len(PROMPTS[0]) // 4))
    check(engine)


@pytest.mark.parametrize(
    ("changes", "arguments", "error", "match"),
    [
        ({}, {"consumer": 3}, ValueError, "consumer: expected a function, got 3"),
        ({}, {"max_bytes": 0}, ValueError, "max_bytes: expected an integer of at least 1, got 0"),
        ({}, {"max_bytes": 1e9}, ValueError, "max_bytes: expected an integer of at least 1, got 1000000000.0"),
        ({}, {"pieces": "4"}, ValueError, "pieces: expected an integer of at least 1, got '4'"),
        ({}, {"pieces": 0}, ValueError, "pieces: expected an integer of at least 1, got 0"),
        ({"batch_invariant": True}, {}, NotImplementedError, "batch_invariant: steps launched layer by layer"),
        (
            {"speculate": Speculation(NGramProposer(), 2)},
            {},
            NotImplementedError,
            "speculate: proposers need whole steps",
        ),
    ],
    ids=["no function", "no bytes", "bytes as float", "pieces as str", "no pieces", "batch-invariant", "drafts"],
)
def test_invalid_arguments_are_rejected(
    changes: dict[str, Any], arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    config = EngineConfig(num_pages=16, page_size=4, max_batched_tokens=16, max_num_seqs=4, **changes)
    given: dict[str, Any] = {"consumer": print, **arguments}
    with pytest.raises(error, match=match):
        Engine(engine_case.model(), config).watch_written(**given)
