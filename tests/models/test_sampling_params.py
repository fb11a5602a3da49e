"""Engines with sampling parameters give the tokens of a plain loop: one forward pass per token, and a NumPy oracle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.decoder import make_mesh
from pallas_attn.models.engine import (
    Engine,
    EngineConfig,
    LogitsProcessor,
    NGramProposer,
    RequestOutput,
    SamplingParams,
    Speculation,
    TokenLogprobs,
)
from pallas_attn.models.engine.runner import Runner, StepResult
from tests.models.engine_case import CONFIG, ENGINES, PROMPTS, VOCAB_SIZE, compile_events, engine, model, padded
from tests.models.filter_case import Third
from tests.models.sampling_oracle import PlainLoop

pytestmark = pytest.mark.usefixtures("shared_steps")


GREEDY = SamplingParams(max_tokens=14)
DRAWN = dataclasses.replace(GREEDY, temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=7)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.02, "frequency_penalty": 0.03}
EDITS = {"logit_bias": {3: 0.3, 9: -100.0}, "min_tokens": 9, "stop_token_ids": tuple(range(16))}

CASES = {
    "penalties": dataclasses.replace(GREEDY, **PENALTIES),
    "rewards": dataclasses.replace(GREEDY, repetition_penalty=0.8, presence_penalty=-0.1, frequency_penalty=-0.02),
    "biases": dataclasses.replace(GREEDY, logit_bias={3: 0.3, 9: -100.0}),
    "allowed tokens": dataclasses.replace(GREEDY, allowed_token_ids=range(20, 33), logit_bias={25: 0.1, 60: 100.0}),
    "minimum length": dataclasses.replace(GREEDY, min_tokens=9, stop_token_ids=tuple(range(16))),
    "drawn": DRAWN,
    "all": dataclasses.replace(DRAWN, **PENALTIES, **EDITS),
}


@functools.cache
def loop() -> PlainLoop:
    return PlainLoop(model())


def finish(under_test: Engine) -> None:
    while under_test.has_unfinished:
        under_test.step()


def run(
    under_test: Engine,
    params: Sequence[SamplingParams],
    filters: Sequence[Third | None],
    plain: PlainLoop | None = None,
) -> list[RequestOutput]:
    """Generate for one prompt per entry of `params`, all at the same time, and compare with the plain loop."""
    plain = plain or loop()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    ids = [
        under_test.add_request(prompt, each, token_filter=token_filter)
        for prompt, each, token_filter in zip(prompts, params, filters, strict=True)
    ]
    finish(under_test)
    outputs = [under_test.output(i) for i in ids]
    for prompt, each, token_filter, output in zip(prompts, params, filters, outputs, strict=True):
        expected = plain.generate(prompt, each, token_filter and Third(), expected=output.output_ids)
        assert output.output_ids == expected
    return outputs


def test_parameters_and_preemptions():
    """Requests with all parameters run next to requests without. Preempted requests continue with the same state."""
    short = engine("short of pages")
    before = short.stats().preemptions
    params = [*CASES.values(), GREEDY, CASES["all"]]
    outputs = run(short, params, [None if i % 4 else Third() for i in range(len(params))])
    assert short.stats().preemptions > before
    plain = short.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(params))], GREEDY)
    changed = [output.output_ids != without.output_ids for output, without in zip(outputs, plain, strict=True)]
    assert sum(changed) >= len(params) - 2


def test_prompts_in_the_prefix_cache_count_for_penalties():
    small = engine("short of pages")
    for _ in range(2):
        run(small, [CASES["all"]] * 3, [None] * 3)
    last = small.add_request(PROMPTS[1], CASES["penalties"])
    finish(small)
    output = small.output(last)
    assert output.cached_tokens == 24
    assert output.output_ids == loop().generate(PROMPTS[1], CASES["penalties"], expected=output.output_ids)


def test_filtered_request_runs_in_every_step(monkeypatch: pytest.MonkeyPatch):
    """The filter gets all output tokens before each of its tokens, once. The device computes the logits of step n + 1
    while the host reads step n and computes the masks of step n + 1."""
    small, token_filter, order = engine("short of pages"), Third(), [""][:0]
    launch, sampled, sample = Runner.launch, StepResult.sampled, Runner.sample
    monkeypatch.setattr(Runner, "sample", lambda *given: (order.append("sample"), sample(*given))[1])
    monkeypatch.setattr(
        Runner,
        "launch",
        lambda runner, plans, *rest: (
            order.append("".join("ab"[row.request.token_filter is None] for row in plans[0].rows)),
            launch(runner, plans, *rest),
        )[1],
    )
    monkeypatch.setattr(StepResult, "sampled", lambda result: (order.append("read"), sampled(result))[1])
    filtered, other = (output.output_ids for output in run(small, [GREEDY, GREEDY], [token_filter, None]))
    assert token_filter.seen == [filtered[:n] for n in range(len(filtered))]
    launched = [rows for rows in order if rows not in ("read", "sample")]
    assert len(launched) <= len(PROMPTS[1]) + len(other) + 2
    both = [i for i, rows in enumerate(order) if rows == "ab"]
    assert len(both) >= min(len(filtered), len(other)) - 2
    assert all(order[i : i + 3] == ["ab", "read", "sample"] for i in both if i)


def test_filtered_request_alone_gets_a_token_per_step():
    small = engine("short of pages")
    before = small.stats().num_steps
    (output,) = run(small, [GREEDY], [Third()])
    assert len(output.output_ids) == GREEDY.max_tokens
    prefill = -(-(len(PROMPTS[0]) - output.cached_tokens) // small.config.max_batched_tokens)
    assert small.stats().num_steps - before == prefill + GREEDY.max_tokens - 1


def test_filtered_requests_use_the_prefix_cache():
    small = engine("short of pages")
    run(small, [GREEDY], [Third()])
    (output,) = run(small, [DRAWN], [Third()])
    assert output.cached_tokens == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("penalties", marks=pytest.mark.slow), "all"])
def test_drafts_change_no_token(name: str):
    """N-gram drafts for a prompt that repeats itself. Some drafts are accepted, some are rejected."""
    drafting = speculating()
    params = [CASES[name], CASES["rewards"], GREEDY, CASES[name]]
    outputs = run(drafting, params, [None, None, None, Third()])
    drafted, accepted = (sum(sum(getattr(o, name)) for o in outputs) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted
    prompt = PROMPTS[4]
    output = drafting.generate([prompt], dataclasses.replace(CASES["rewards"], logprobs=2))[0]
    assert output.output_ids == loop().generate(prompt, CASES["rewards"], expected=output.output_ids)
    assert any(output.accepted)
    check_logprobs(output, prompt, 2)
    filtered = drafting.add_request(prompt, CASES["minimum length"], token_filter=Third())
    finish(drafting)
    assert drafting.output(filtered).output_ids == loop().generate(
        prompt, CASES["minimum length"], Third(), expected=drafting.output(filtered).output_ids
    )
    assert any(drafting.output(filtered).drafted)


@functools.cache
def speculating() -> Engine:
    return Engine(
        model(),
        dataclasses.replace(padded(ENGINES["ample"]), speculate=Speculation(NGramProposer(), 3, adaptive=False)),
    )


def check_logprobs(output: RequestOutput, prompt: Sequence[int], number: int) -> None:
    expect_logprobs(output.logprobs or (), prompt, output.output_ids, number)


def expect_logprobs(
    logprobs: Sequence[TokenLogprobs | None],
    before: Sequence[int],
    tokens: Sequence[int],
    number: int,
    plain: PlainLoop | None = None,
) -> None:
    """Check the log probabilities of `tokens`, which follow the tokens `before`."""
    logits = (plain or loop()).logits([*before, *tokens])[len(before) - 1 : -1].astype(np.float64)
    wanted = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    for got, token, row in zip(logprobs, tokens, wanted, strict=True):
        order = np.argsort(-row, kind="stable")
        assert got is not None
        assert (got.token_id, got.rank) == (token, order.tolist().index(token) + 1)
        assert [token for token, _ in got.top] == order[:number].tolist()
        np.testing.assert_allclose([got.logprob, *(v for _, v in got.top)], row[[token, *order[:number]]], atol=1e-4)


def test_logprobs_are_those_of_the_model():
    """Log probabilities do not depend on other parameters. They are read only in steps that need them."""
    small = engine("short of pages")
    params = [dataclasses.replace(CASES["all"], logprobs=n) for n in (0, 5, 20)]
    for output, n, prompt in zip(small.generate(PROMPTS[:3], params), (0, 5, 20), PROMPTS, strict=False):
        check_logprobs(output, prompt, n)
    assert small.generate(PROMPTS[:1], GREEDY)[0].logprobs is None
    with pytest.raises(ValueError, match="logprobs: expected at most EngineConfig.max_logprobs=20 .*got 21"):
        small.add_request(PROMPTS[0], SamplingParams(logprobs=21))


def test_slices_of_log_probabilities():
    small = engine("short of pages")
    ids = [small.add_request(PROMPTS[0], SamplingParams(max_tokens=6, logprobs=number)) for number in (1, None)]
    finish(small)
    whole = small.output(ids[0]).logprobs
    assert whole is not None
    assert [*small.output_logprobs(ids[0], 2, 4)] == [*whole[2:4]]
    assert [*small.output_logprobs(ids[1], 0, 4)] == []
    with pytest.raises(ValueError, match="request_id: no request"):
        small.output_logprobs("x", 0, 1)


def test_request_without_allowed_tokens_ends():
    """Filter and allowed tokens exclude each other."""

    class Nothing:
        def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
            return np.zeros(2, np.uint32) if len(output_ids) == 3 else None

    small = engine("short of pages")
    ids = [small.add_request(PROMPTS[0], CASES["all"], token_filter=token_filter) for token_filter in (Nothing(), None)]
    finish(small)
    ended, other = (small.output(i) for i in ids)
    assert (len(ended.output_ids), ended.finish_reason) == (3, "nonfinite")
    assert other.output_ids == loop().generate(PROMPTS[0], CASES["all"], expected=other.output_ids)


class Failing:
    """Token filter that raises an error, or returns an array of a wrong shape, for the token after two tokens."""

    def __init__(self, error: Exception | None):
        self.error = error

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        if len(output_ids) < 2:
            return None
        if self.error is not None:
            raise self.error
        return np.zeros(3, np.uint32)


@pytest.mark.parametrize("error", [KeyError("no state"), None], ids=["exception", "shape"])
def test_failure_of_a_token_filter_ends_only_its_request(error: Exception | None):
    small = engine("short of pages")
    told: list[tuple[Any, ...]] = []
    add = functools.partial(small.add_request, on_token=lambda *got: told.append(got))
    failing = add(PROMPTS[0], GREEDY, token_filter=Failing(error))
    other, filtered = add(PROMPTS[1], GREEDY), add(PROMPTS[0], GREEDY, token_filter=Third())
    finish(small)
    output = small.output(failing)
    tokens = loop().generate(PROMPTS[0], GREEDY)[:2]
    assert (output.output_ids, output.finish_reason) == (tokens, "filter_error")
    assert [got for got in told if got[0] == failing] == [
        *((failing, token, None) for token in tokens),
        (failing, -1, "filter_error"),
    ]
    if error is None:
        assert str(output.error) == "token_filter: expected masks uint32 [2], got uint32 [3]"
    else:
        assert output.error is error
    assert small.output(other).output_ids == loop().generate(
        PROMPTS[1], GREEDY, expected=small.output(other).output_ids
    )
    assert small.output(filtered).output_ids == loop().generate(
        PROMPTS[0], GREEDY, Third(), expected=small.output(filtered).output_ids
    )
    assert small.output(other).error is None
    assert not small.stats().used_pages


@pytest.mark.parametrize("name", ["launch", "sample"])
def test_failed_step_loses_and_repeats_no_token(name: str, monkeypatch: pytest.MonkeyPatch):
    """The failure of `sample` is between the two programs of a step."""
    small, calls = engine("short of pages"), 0
    function = getattr(Runner, name)

    def failing(runner, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls in (3, 9):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return function(runner, *args, **kwargs)

    monkeypatch.setattr(Runner, name, failing)
    params = [dataclasses.replace(CASES["all"], logprobs=1), CASES["penalties"], GREEDY]
    filters = [None, Third(), None]
    ids = [
        small.add_request(*given[:2], token_filter=given[2]) for given in zip(PROMPTS, params, filters, strict=False)
    ]
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError):
            finish(small)
    finish(small)
    for i, prompt, each, token_filter in zip(ids, PROMPTS, params, filters, strict=False):
        assert small.output(i).output_ids == loop().generate(
            prompt, each, token_filter and Third(), expected=small.output(i).output_ids
        )
    check_logprobs(small.output(ids[0]), PROMPTS[0], 1)


def test_no_request_causes_a_compilation():
    small = engine("short of pages")
    small.warmup()
    params = [
        dataclasses.replace(each, logprobs=i, prompt_logprobs=i if i % 2 else None)
        for i, each in enumerate(CASES.values())
    ]
    small.generate(PROMPTS[:1], params[:1])  # NumPy and JAX initialise some parts at the first call
    ids = []
    with compile_events() as events:
        for i, each in enumerate(params):
            ids.append(small.add_request(PROMPTS[i % 6], each, token_filter=Third() if i % 2 else None))
        finish(small)
    assert events == []
    assert all(small.output(i).output_ids for i in ids)


@pytest.mark.slow
def test_logits_processor_of_an_engine():
    """The processor lowers the logits of even tokens by a number that requests set."""
    even = np.arange(VOCAB_SIZE) % 2 == 0

    def lower(logits, extra):
        return logits - even.astype(np.float32)[None] * extra["lower"][:, None]

    config = dataclasses.replace(padded(ENGINES["ample"]), logits_processor=LogitsProcessor(lower, {"lower": 0.1}))
    processing = Engine(model(), config)
    given = [dataclasses.replace(CASES["penalties"], extra_args=extra) for extra in ({}, {"lower": 100.0})]
    outputs = processing.generate([PROMPTS[2]] * 2, given)
    for output, number in zip(outputs, (0.1, 100.0), strict=True):
        wanted = loop().generate(PROMPTS[2], CASES["penalties"], processor=lambda x, number=number: x - even * number)
        assert output.output_ids == wanted
    assert all(token % 2 for token in outputs[1].output_ids)
    with pytest.raises(ValueError, match=r"extra_args: expected names in the defaults .* \['lower'\], got 'raise'"):
        processing.add_request(PROMPTS[0], SamplingParams(extra_args={"raise": 1.0}))
    with pytest.raises(ValueError, match="logits_processor: expected a LogitsProcessor or None"):
        EngineConfig(logits_processor=lower)  # pyrefly: ignore[bad-argument-type]


def test_prompt_logprobs_are_computed_in_chunks():
    """Prompts of 50 and 26 tokens in steps of 16. Cached pages are not used, but stay in the cache for others."""
    scoring, params = speculating(), dataclasses.replace(CASES["penalties"], prompt_logprobs=2, max_tokens=1)
    each = [params, dataclasses.replace(params, prompt_logprobs=0)]
    for _ in range(2):
        long, short = scoring.generate([PROMPTS[4], PROMPTS[1]], each)
        check_prompt_logprobs(long, PROMPTS[4], 2)
        check_prompt_logprobs(short, PROMPTS[1], 0)
        assert (long.cached_tokens, len(long.output_ids)) == (0, 1)
    assert scoring.generate(PROMPTS[4:5], GREEDY)[0].cached_tokens == 48
    assert scoring.generate(PROMPTS[4:5], GREEDY)[0].prompt_logprobs is None


@pytest.mark.slow
def test_prompt_logprobs_of_preempted_and_drafting_requests():
    """Preempted requests compute their prompts again."""
    params = [dataclasses.replace(each, prompt_logprobs=1, logprobs=1) for each in (CASES["all"], GREEDY) * 3]
    short = engine("short of pages")
    before = short.stats().preemptions
    outputs = short.generate(PROMPTS, params)
    assert short.stats().preemptions > before
    for output, again, prompt in zip(outputs, speculating().generate(PROMPTS, params), PROMPTS, strict=True):
        check_prompt_logprobs(output, prompt, 1)
        check_prompt_logprobs(again, prompt, 1)
        assert again.output_ids == output.output_ids


def check_prompt_logprobs(output: RequestOutput, prompt: Sequence[int], number: int) -> None:
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    expect_logprobs(output.prompt_logprobs[1:], prompt[:1], prompt[1:], number)


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [None, Speculation(NGramProposer(), 3, adaptive=False)], ids=["plain", "drafts"])
def test_parameters_on_a_mesh(speculate: Speculation | None):
    """Two data ranks with two devices each. Only some ranks have rows that use a parameter."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    config, devices = dataclasses.replace(CONFIG, num_attention_heads=4), make_mesh({"data": 2, "tensor": 2})
    sizes = dataclasses.replace(padded(ENGINES["ample"]), mesh=devices, speculate=speculate)
    split = Engine(random_model(config, seed=3, mesh=devices), sizes)
    split.warmup()
    params = [CASES["all"], GREEDY, CASES["penalties"], CASES["allowed tokens"], GREEDY]
    params = [dataclasses.replace(each, logprobs=2, prompt_logprobs=1) for each in params]
    whole = PlainLoop(random_model(config, seed=3))
    outputs = run(split, params, [None, None, None, Third(), None], whole)
    for output, prompt in zip(outputs, PROMPTS, strict=False):
        expect_logprobs(output.logprobs or (), prompt, output.output_ids, 2, whole)
        expect_logprobs((output.prompt_logprobs or ())[1:], prompt[:1], prompt[1:], 1, whole)
    with compile_events() as events:
        run(split, params[:2], [None, Third()], whole)
    assert events == []


@pytest.mark.slow
def test_parameters_in_steps_of_several_programs():
    """Steps with prompts run as several programs while pages are copied to a consumer."""
    layered = Engine(model(), padded(ENGINES["ample"]))
    written: list[Any] = []
    feed = layered.watch_written(written.append, pieces=2)
    params = [dataclasses.replace(each, logprobs=1, prompt_logprobs=2) for each in (CASES["all"], CASES["penalties"])]
    for output, prompt in zip(run(layered, params, [None, Third()]), PROMPTS, strict=False):
        check_logprobs(output, prompt, 1)
        check_prompt_logprobs(output, prompt, 2)
    feed.close()
    assert written
