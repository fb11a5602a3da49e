"""The engine gives the tokens of a plain run: uncached forward passes over a single request.

The engine's traffic has batching, chunked prefill, prefix hits, preemptions and aborts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.decoder.caches import allocate_caches
from pallas_attn.models.engine import Decoded, Difference, Engine, EngineConfig, SamplingParams, scheduler
from pallas_attn.models.engine.runner import Runner, StepResult
from pallas_attn.models.engine.verify import verify
from tests.kit.slow_cases import slow_cases
from tests.models.engine_case import (
    CONFIG,
    DRAWN,
    ENGINES,
    GREEDY,
    MAX_TOKENS,
    PROMPTS,
    QUICK,
    VOCAB_SIZE,
    compile_events,
    engine,
    model,
    padded,
    plain,
)

pytestmark = pytest.mark.usefixtures("shared_steps")


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of the traffic.

    The request arrives after `after_steps` steps of the engine, and is aborted after `abort_after` tokens.
    """

    after_steps: int
    prompt: int
    drawn: bool
    max_tokens: int
    abort_after: int | None
    salt: str

    @property
    def params(self) -> SamplingParams:
        return dataclasses.replace(DRAWN if self.drawn else GREEDY, max_tokens=self.max_tokens)

    @property
    def wanted(self) -> tuple[int, ...]:
        return plain(self.prompt, DRAWN if self.drawn else GREEDY)[: self.max_tokens]


arrivals = st.lists(
    st.builds(
        Arrival,
        after_steps=st.integers(0, 6),
        prompt=st.integers(0, len(PROMPTS) - 1),
        drawn=st.booleans(),
        max_tokens=st.integers(1, MAX_TOKENS),
        abort_after=st.none() | st.integers(0, MAX_TOKENS),
        salt=st.sampled_from(["", "", "pepper"]),
    ),
    min_size=1,
    max_size=9,
)


class Traffic:
    """Add requests to an engine at the steps of their arrival, run the steps, and record the streamed tokens."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.streamed: dict[int | str, list[tuple[int, str | None]]] = {}
        self.arrived: dict[int | str, Arrival] = {}
        self.order: list[int | str] = []

    def add(self, arrival: Arrival) -> None:
        request_id = self.engine.add_request(
            PROMPTS[arrival.prompt],
            arrival.params,
            salt=arrival.salt,
            on_token=self.take,
        )
        self.streamed[request_id] = []
        self.arrived[request_id] = arrival

    def take(self, request_id: int | str, token: int, reason: str | None) -> None:
        self.streamed[request_id].append((token, reason))
        self.order.append(request_id)

    def run(self, traffic: list[Arrival]) -> None:
        coming = list(traffic)
        for _ in range(5000):
            while coming and coming[0].after_steps <= 0:
                self.add(coming.pop(0))
            if coming:
                coming[0] = dataclasses.replace(coming[0], after_steps=coming[0].after_steps - 1)
            if not coming and not self.engine.has_unfinished:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def step(self) -> None:
        self.engine.step()
        for request_id, arrival in self.arrived.items():
            if arrival.abort_after is not None and len(self.streamed[request_id]) >= arrival.abort_after:
                self.engine.abort(request_id)

    def check(self) -> None:
        for request_id, arrival in self.arrived.items():
            output = self.engine.output(request_id)
            assert tuple(output.output_ids) == arrival.wanted[: len(output.output_ids)]
            assert [token for token, _ in self.streamed[request_id]] == output.output_ids
            reasons = [reason for _, reason in self.streamed[request_id]]
            if output.finish_reason == "abort":
                assert arrival.abort_after is not None
                assert all(reason is None for reason in reasons)
            else:
                assert output.finish_reason == "length"
                assert len(output.output_ids) == arrival.max_tokens
                assert reasons == [None] * (arrival.max_tokens - 1) + ["length"]
                assert len(output.itl_s) == arrival.max_tokens - 1
                assert output.ttft_s is not None
                assert output.ttft_s > 0
        assert self.engine.stats().used_pages == 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "short of pages" else pytest.mark.slow) for name in ENGINES]
)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traffic=arrivals)
def test_random_traffic_gives_the_tokens_of_a_plain_run(name, traffic):
    played = Traffic(engine(name))
    played.run(traffic)
    played.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traffic=arrivals)
def test_long_random_traffic_gives_the_tokens_of_a_plain_run(name, traffic):
    played = Traffic(engine(name))
    played.run(traffic)
    played.check()


def everything(max_tokens: int = MAX_TOKENS) -> list[Arrival]:
    """Return two requests for each prompt, one greedy and one sampled, that all arrive before the first step."""
    return [Arrival(0, i, drawn, max_tokens, None, "") for drawn in (False, True) for i in range(len(PROMPTS))]


def test_preemption_changes_no_token():
    short = engine("short of pages")
    before = short.stats().preemptions
    played = Traffic(short)
    played.run(everything())
    played.check()
    assert short.stats().preemptions > before
    assert short.stats().peak_pages <= short.stats().num_pages


@pytest.mark.slow  # slow, because tests/models/test_scheduler.py tests the order under preemption
def test_requests_get_tokens_in_order_of_arrival_when_pages_are_short():
    short = engine("short, uncached")
    played = Traffic(short)
    played.run(everything())
    played.check()
    assert list(dict.fromkeys(played.order)) == list(played.arrived)


@pytest.mark.slow
def test_equal_prefixes_are_computed_once():
    ample = engine("ample")
    played = Traffic(ample)
    played.run([Arrival(0, 5, False, 2, None, "hits"), Arrival(40, 5, False, 2, None, "hits")])
    played.check()
    first, second = (ample.output(i) for i in played.arrived)
    # The prompt has 40 tokens in pages of 4. Its last token is always computed, so only 9 pages are reused.
    assert (first.cached_tokens, second.cached_tokens) == (0, 36)


@pytest.mark.slow
def test_requests_of_different_salts_share_no_pages():
    ample = engine("ample")
    for salt, cached in (("a", 0), ("b", 0), ("a", 36)):
        played = Traffic(ample)
        played.run([Arrival(0, 5, False, 1, None, salt)])
        played.check()
        assert [ample.output(i).cached_tokens for i in played.arrived] == [cached]


def test_pages_of_generated_tokens_are_shared():
    ample = engine("ample")
    output = ample.generate([PROMPTS[3]], GREEDY)[0]
    longer = [*PROMPTS[3], *output.output_ids, 1]
    assert len(longer) == 22
    assert ample.generate([longer], GREEDY)[0].cached_tokens == 20  # the K/V of the last output is not cached


def test_stop_token_ends_the_output_and_stays_in_it():
    ample = engine("ample")
    wanted = plain(1, GREEDY)
    stop = wanted[6]
    output = ample.generate([PROMPTS[1]], dataclasses.replace(GREEDY, stop_token_ids=(stop,)))[0]
    assert output.finish_reason == "stop"
    assert tuple(output.output_ids) == wanted[: wanted.index(stop) + 1]
    assert ample.stats().used_pages == 0


@pytest.mark.slow
def test_eos_token_ends_the_output_unless_ignored():
    wanted = plain(1, GREEDY)
    ending = random_model_with_eos(wanted[6])
    small = Engine(ending, padded(ENGINES["ample"]))
    stopped, ignored = small.generate([PROMPTS[1]] * 2, [GREEDY, dataclasses.replace(GREEDY, ignore_eos=True)])
    assert stopped.finish_reason == "stop"
    assert tuple(stopped.output_ids) == wanted[: wanted.index(wanted[6]) + 1]
    assert tuple(ignored.output_ids) == wanted


def random_model_with_eos(token: int):
    return random_model(dataclasses.replace(CONFIG, eos_token_ids=(token,)), seed=3, settings=QUICK)


@pytest.mark.parametrize(
    ("name", "length", "why"),
    [("ample", 96, "takes at most 95"), ("short of pages", 95, None), ("unchunked", 65, "unless prefill is chunked")],
)
def test_prompt_that_can_never_run_is_refused(name, length, why):
    output = engine(name).generate([[1] * length], SamplingParams(max_tokens=1))[0]
    if why is None:
        assert output.finish_reason == "length"
    else:
        assert output.finish_reason == "refused"
        assert why in str(output.refusal)
        assert output.output_ids == []


def test_prompt_larger_than_the_pool_is_refused():
    config = dataclasses.replace(padded(ENGINES["short of pages"]), num_pages=3)
    output = Engine(model(), config).generate([[1] * 25])[0]
    assert output.finish_reason == "refused"
    assert "needs 4 pages, the pool has 3" in str(output.refusal)


def test_request_at_the_length_limit_of_the_model_ends():
    output = engine("ample").generate([[1] * 90], SamplingParams(max_tokens=50))[0]
    assert output.finish_reason == "length"
    assert len(output.output_ids) == 6


def test_abort_is_idempotent_and_keeps_tokens():
    ample = engine("ample")
    request_id = ample.add_request(PROMPTS[0], GREEDY)
    while len(ample.output(request_id).output_ids) < 3:
        ample.step()
    assert ample.abort(request_id)
    assert not ample.abort(request_id)
    while ample.has_unfinished:
        ample.step()
    output = ample.output(request_id)
    assert output.finish_reason == "abort"
    assert tuple(output.output_ids) == plain(0, GREEDY)[:3]
    assert ample.stats().used_pages == 0


class Injected(Exception):
    """An error raised by a test."""


@slow_cases("0-launch")
@pytest.mark.parametrize("where", ["launch", "launched", "read"])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_failed_step_loses_and_repeats_no_token(monkeypatch, where, at):
    ample = engine("ample")
    calls = itertools.count()

    def failing(function, after):
        def call(*args, **kwargs):
            fail = next(calls) == at
            if fail and not after:
                raise Injected
            result = function(*args, **kwargs)
            if fail:
                raise Injected
            return result

        return call

    if where == "read":
        monkeypatch.setattr(StepResult, "sampled", failing(StepResult.sampled, after=False))
    else:
        monkeypatch.setattr(Runner, "launch", failing(Runner.launch, after=where == "launched"))
    played = Traffic(ample)
    for arrival in everything(max_tokens=8):
        played.add(arrival)
    failures = 0
    while ample.has_unfinished:
        try:
            ample.step()
        except Injected:
            failures += 1
    assert failures == 1
    played.check()


def test_exception_in_a_callback_loses_no_token():
    ample = engine("ample")
    seen: list[int] = []

    def callback(request_id, token, reason):
        seen.append(token)
        if len(seen) in (1, 4):
            raise Injected

    ids = [ample.add_request(PROMPTS[0], GREEDY, on_token=callback) for _ in range(2)]
    while ample.has_unfinished:
        with contextlib.suppress(Injected):
            ample.step()
    assert [tuple(ample.output(i).output_ids) for i in ids] == [plain(0, GREEDY)] * 2
    assert sorted(seen) == sorted(plain(0, GREEDY) * 2)


@slow_cases("inf")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_logits_end_only_their_request(value):
    """A request whose logits are NaN or infinite ends, and the other requests continue.

    The embedding of one token has NaN or infinity. All logits of a prompt that contains this token become non-finite.
    """
    broken, token = random_model(CONFIG, seed=3, settings=QUICK), VOCAB_SIZE - 1
    broken.embed_tokens[...] = broken.embed_tokens[...].at[token].set(value)
    under_test = Engine(broken, padded(ENGINES["ample"]))
    told: list[tuple[Any, ...]] = []
    prompts = [PROMPTS[0], [*PROMPTS[1][:5], token, 1], PROMPTS[1]]
    ids = [under_test.add_request(prompt, GREEDY, on_token=lambda *args: told.append(args)) for prompt in prompts]
    while under_test.has_unfinished:
        under_test.step()
    first, ended, last = (under_test.output(i) for i in ids)
    assert (ended.finish_reason, ended.output_ids) == ("nonfinite", [])
    assert [call for call in told if call[0] == ids[1]] == [(ids[1], -1, "nonfinite")]
    for output, index in ((first, 0), (last, 1)):
        assert (output.finish_reason, tuple(output.output_ids)) == ("length", plain(index, GREEDY))
    assert under_test.stats().used_pages == 0
    decoded = [Decoded(prompt, under_test.output(i).output_ids, GREEDY) for prompt, i in zip(prompts, ids, strict=True)]
    verification = verify(broken, decoded, max_len=96)
    assert not verification.passed
    assert [check.difference for check in verification.requests] == [
        None,
        Difference(0, None, None, 0.0, finite=False),
        None,
    ]


def test_failed_device_loses_no_token(monkeypatch):
    """After an error of the device, the engine continues without losing tokens.

    Reading the tokens of a step raises an error, the caches are deleted, and the first attempts to allocate new caches
    fail. Meanwhile, requests can be inspected and aborted.
    """
    ample = engine("ample")
    ids = [ample.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    while not ample.output(ids[0]).output_ids:
        ample.step()
    before = ample.output(ids[0]).output_ids
    jax.tree.map(lambda pages: pages.delete(), ample._runner._caches)
    monkeypatch.setattr("pallas_attn.models.decoder.model.allocate_caches", failing_once(allocate_caches))
    for error in (RuntimeError, jax.errors.JaxRuntimeError):
        with pytest.raises(error, match=r"deleted|donated|RESOURCE_EXHAUSTED"):
            ample.step()
        assert ample.has_unfinished
        assert ample.output(ids[0]).output_ids == before
    assert ample.abort(ids[1])
    while ample.has_unfinished:
        ample.step()
    assert [tuple(ample.output(i).output_ids) for i in (ids[0], ids[2])] == [plain(0, GREEDY), plain(2, GREEDY)]


def failing_once(function):
    calls = itertools.count()

    def call(*args, **kwargs):
        if next(calls) == 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return function(*args, **kwargs)

    return call


def test_next_step_is_launched_before_the_previous_one_is_read(monkeypatch):
    ample = engine("ample")
    order: list[str] = []
    launch, sampled = Runner.launch, StepResult.sampled
    monkeypatch.setattr(Runner, "launch", lambda *args: (order.append("launch"), launch(*args))[1])
    monkeypatch.setattr(StepResult, "sampled", lambda result: (order.append("read"), sampled(result))[1])
    ample.generate([PROMPTS[3]], SamplingParams(max_tokens=5))
    assert order == ["launch", *["launch", "read"] * 4, "read"]


def test_queue_time_ends_with_the_first_step():
    ample = engine("ample")
    ids = [ample.add_request(prompt, SamplingParams(max_tokens=4)) for prompt in PROMPTS]
    assert [ample.output(i).queue_s for i in ids] == [None] * len(PROMPTS)
    ample.step()
    assert ample.output(ids[0]).queue_s is not None
    assert ample.output(ids[-1]).queue_s is None
    assert not ample.has_ended(ids[0])
    while ample.has_unfinished:
        ample.step()
    assert ample.has_ended(ids[0])
    outputs = [ample.output(i) for i in ids]
    queued = [output.queue_s or 0.0 for output in outputs]
    assert 0 < queued[0] < queued[-1]  # the last request waits for a request slot
    assert all(0 < time < (output.ttft_s or 0.0) for time, output in zip(queued, outputs, strict=True))


@pytest.mark.slow  # slow, because test_engine_windows.py and test_mesh.py have this test for other models
def test_no_compilation_after_warmup():
    config = EngineConfig(num_pages=40, page_size=4, max_batched_tokens=24, max_num_seqs=3, max_model_len=96)
    warm = Engine(model(), dataclasses.replace(config, decode_buckets=(1, 3), prefill_buckets=(8, 24)))
    assert warm.warmup() > 0
    compiled = warm.stats().compilations
    assert compiled == 2 + 2 + 2
    Traffic(warm).run(everything(max_tokens=2))  # NumPy and JAX initialise some parts at the first call
    rng = np.random.default_rng(5)
    traffic = [
        Arrival(int(rng.integers(5)), int(rng.integers(6)), bool(rng.integers(2)), int(rng.integers(1, 9)), None, "")
        for _ in range(30)
    ]
    played = Traffic(warm)
    with compile_events() as events:
        played.run(traffic)
    played.check()
    assert events == []
    assert warm.stats().compilations == compiled


@pytest.mark.slow
def test_step_takes_fewer_prompt_tokens_to_avoid_padding(monkeypatch):
    config = EngineConfig(num_pages=40, page_size=4, max_batched_tokens=24, max_num_seqs=3, max_model_len=96)
    config = dataclasses.replace(config, decode_buckets=(1, 3), prefill_buckets=(8, 24))
    prompt, results = [1 + i % 5 for i in range(10)], []
    for cost in (scheduler.STEP_TOKENS, 0):
        monkeypatch.setattr(scheduler, "STEP_TOKENS", cost)
        cutting = Engine(model(), config)
        (output,) = cutting.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
        results.append((output.output_ids, [step.prefill_tokens for step in cutting.stats().steps]))
    (whole, whole_steps), (cut, cut_steps) = results
    assert (whole_steps, cut_steps) == ([10, 0, 0, 0], [8, 2, 0, 0, 0])
    assert cut == whole


def test_step_sends_one_array_to_the_device_and_reads_one_back(monkeypatch):
    """The transfer guard rejects all other transfers to the device. On a CPU it does not detect reads, so the test
    counts calls of the reading functions."""
    ample = engine("ample")
    ample.warmup()
    sent: list[tuple[int, ...]] = []
    read: list[tuple[int, ...]] = []
    put = jax.device_put

    def send(array, *args, **kwargs):
        sent.append(array.shape)
        with jax.transfer_guard_host_to_device("allow"):
            return put(array, *args, **kwargs)

    def reading(function):
        def call(value, *args, **kwargs):
            read.extend(leaf.shape for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array))
            return function(value, *args, **kwargs)

        return call

    before = len(ample.stats().steps)
    monkeypatch.setattr(jax, "device_put", send)
    for module, name in ((np, "asarray"), (np, "array"), (jax, "device_get"), (jax, "block_until_ready")):
        monkeypatch.setattr(module, name, reading(getattr(module, name)))
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        outputs = ample.generate([PROMPTS[0]], GREEDY)
    monkeypatch.undo()
    steps = len(ample.stats().steps) - before
    assert steps >= MAX_TOKENS
    assert (len(sent), len(read)) == (steps, steps)
    assert tuple(outputs[0].output_ids) == plain(0, GREEDY)


@pytest.mark.slow
def test_prompt_logits_of_computed_tokens():
    config = padded(ENGINES["ample"])
    capturing = Engine(model(), config, capture_logits=True)
    ids = [capturing.add_request(PROMPTS[5], dataclasses.replace(GREEDY, max_tokens=1))]
    while capturing.has_unfinished:
        capturing.step()
    ids.append(capturing.add_request(PROMPTS[5], dataclasses.replace(GREEDY, max_tokens=1)))
    while capturing.has_unfinished:
        capturing.step()
    whole, hit = (capturing.prompt_logits(i) for i in ids)
    assert whole.shape == (len(PROMPTS[5]), VOCAB_SIZE)
    assert np.all(np.isfinite(whole))
    assert np.all(np.isnan(hit[:36]))
    np.testing.assert_allclose(hit[36:], whole[36:], atol=1e-4)
    assert np.argmax(whole[-1]) == plain(5, GREEDY)[0]
    with pytest.raises(ValueError, match="capture_logits"):
        engine("ample").prompt_logits(engine("ample").generate([[1]])[0].request_id)


@pytest.mark.slow
def test_prompt_logits_of_a_forgotten_request_are_dropped():
    """Logits of a step in flight are dropped if their request was forgotten before the step was collected."""
    capturing = Engine(
        model(), dataclasses.replace(padded(ENGINES["ample"]), prefix_caching=False), capture_logits=True
    )
    one = SamplingParams(max_tokens=1)
    capturing.add_request(PROMPTS[0][:12], one, request_id="mine")
    capturing.step()
    capturing.abort("mine")
    capturing.forget("mine")
    capturing.add_request(PROMPTS[3], one, request_id="mine")
    capturing.add_request(PROMPTS[3], one, request_id="theirs")
    capturing.step()
    assert np.all(np.isnan(capturing.prompt_logits("mine")))
    while capturing.has_unfinished:
        capturing.step()
    np.testing.assert_array_equal(capturing.prompt_logits("mine"), capturing.prompt_logits("theirs"))


def test_stats_add_up():
    config = padded(ENGINES["ample"])
    fresh = Engine(model(), config)
    outputs = fresh.generate(PROMPTS, SamplingParams(max_tokens=6))
    stats = fresh.stats()
    cached = sum(output.cached_tokens for output in outputs)
    assert stats.preemptions == 0
    assert stats.prefill_tokens == sum(map(len, PROMPTS)) - cached
    assert stats.decode_tokens == 5 * len(PROMPTS)
    assert sum(r.cached_tokens for r in stats.steps) == cached
    assert stats.prefix_hit_rate == pytest.approx(cached / sum(map(len, PROMPTS)))
    assert all(r.prefill_tokens + r.decode_tokens <= config.max_batched_tokens for r in stats.steps)
    assert max(r.used_pages for r in stats.steps) == stats.peak_pages <= stats.num_pages
    assert sum(r.duration_s for r in stats.steps) <= stats.steps[-1].ended_s
