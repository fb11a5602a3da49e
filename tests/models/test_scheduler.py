"""The scheduler with a fake engine: plans of single requests and small groups of requests, step by step."""

from dataclasses import fields, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.cache import OutOfPages
from pallas_attn.models.engine import SamplingParams, StructuredOutputs, scheduler
from pallas_attn.models.engine.request import Request, RequestRefused
from pallas_attn.models.engine.scheduler import Scheduler
from pallas_attn.models.engine.step.plan import RowTokens
from tests.models.scheduler_case import EOS, LASTING, VOCAB, FakeEngine, Limits, plain_output, summary


def test_decode_rows_come_first_and_prompts_share_the_remaining_budget():
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


def test_budget_below_the_number_of_requests_serves_the_oldest():
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


def test_without_chunks_a_prompt_waits_until_it_fits_a_step():
    engine = FakeEngine(Limits(num_pages=20, max_batched_tokens=4, chunked_prefill=False, prefix_caching=False))
    engine.add([1] * 3, max_tokens=3, ignore_eos=True)
    engine.add([2] * 4, max_tokens=1)
    plans = [engine.planned_step() for _ in range(4)]
    assert [len(plan.decode) for plan in plans] == [0, 1, 1, 0]
    assert [summary(plan.prefill) for plan in plans] == [[(0, 0, 3, True)], [], [], [(1, 0, 4, True)]]
    engine.run()


@pytest.mark.parametrize(
    ("lengths", "changed", "expected"),
    [
        # Steps are padded to 4 or 16 tokens, and a step costs as much as 2 tokens. Two padded steps (4 + 4 + 2) cost
        # less than one step of 16 tokens for 5 tokens, but 4 + 16 + 2 costs more than 16 for 10 tokens.
        ([5], {}, [4, 1]),
        ([10], {}, [10]),
        ([17], {}, [16, 1]),
        ([2, 3, 2], {}, [4, 3]),
        ([3, 3, 3], {"max_prefill_seqs": 1}, [3, 3, 3]),  # one prompt per step
        ([3, 3, 3], {"max_num_seqs": 2}, [4, 2, 3]),
        ([5], {"padded_sizes": ()}, [5]),
        ([5], {"padded_sizes": (16,)}, [5]),
        ([4], {}, [4]),
        ([7], {"padded_sizes": (4, 10, 16)}, [4, 3]),
        ([5], {"padded_sizes": (4, 9, 16)}, [5]),
        ([5], {"chunked_prefill": False}, [5]),
    ],
)
def test_step_takes_fewer_tokens_if_padding_costs_more_than_another_step(monkeypatch, lengths, changed, expected):
    monkeypatch.setattr(scheduler, "STEP_TOKENS", 2)
    limits = Limits(num_pages=40, max_batched_tokens=16, padded_sizes=(4, 16), prefix_caching=False)
    engine = FakeEngine(replace(limits, **changed))
    for length in lengths:
        engine.add([1] * length, max_tokens=1)
    plans = iter(engine.step, None)
    assert [sum(row.num_tokens for row in plan.prefill) for plan in plans] == expected


def test_step_cost_in_prompt_tokens():
    for sizes, expected in (((1024, 8192), [1024, 47]), ((1024, 4095), [1071]), ((32, 128, 512, 2048), [1071])):
        engine = FakeEngine(Limits(600, max_batched_tokens=sizes[-1], max_model_len=1200, padded_sizes=sizes))
        engine.add([1] * 1071, max_tokens=1)
        assert [plan.prefill[0].num_tokens for plan in iter(engine.step, None)] == expected


def test_tokens_in_flight_count_towards_max_tokens():
    engine = FakeEngine(Limits(lag=2))
    request = engine.add(LASTING[0], max_tokens=2)
    assert engine.planned_step().num_tokens == 4
    assert engine.planned_step().num_tokens == 1
    assert (request.output_ids, request.num_in_flight) == ([], 2)
    assert engine.step() is None
    assert (len(request.output_ids), request.finish_reason) == (2, "length")
    assert engine.num_dropped == 0


def test_token_sampled_after_the_end_is_dropped():
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
    assert request.request_slot is not None
    return engine.pools.tables([request.request_slot])[0][0, 0, 0]


def test_pages_are_shared_after_the_step_that_writes_them():
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
def test_pages_of_generated_tokens_are_shared_once_they_are_read(page_size, lag):
    engine = FakeEngine(Limits(num_pages=20, page_size=page_size, lag=lag))
    first = engine.add(LASTING[0], max_tokens=5)
    engine.run()
    second = engine.add([*first.token_ids, 1], max_tokens=1)
    engine.run()
    assert len(first.token_ids) == 9
    assert second.num_cached == 8


def test_exhaustion_preempts_the_youngest_and_delivers_its_tokens_in_flight():
    engine = FakeEngine(Limits(num_pages=4, max_batched_tokens=20))
    engine.add(LASTING[0], max_tokens=2)
    young = engine.add(LASTING[1], max_tokens=4)
    third = engine.add([1, 2], max_tokens=1)
    assert summary(engine.planned_step().rows) == [(0, 0, 4, True), (1, 0, 4, True)]
    assert summary(engine.planned_step().rows) == [(0, 4, 1, True)], "its next page was the youngest's"
    assert engine.scheduler.waiting == (young, third)
    assert engine.scheduler.num_preemptions == 1
    assert (young.request_slot, young.num_computed) == (None, 0)
    assert len(young.output_ids) == 1, "sampled before it lost its pages"
    engine.run()
    assert engine.cache.hit_tokens == 2, "it lost its last page first, and found the other one again"
    assert young.num_cached == 0, "which does not count as cached before it came"


def test_request_waits_for_room_for_all_known_tokens():
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


def test_preempted_request_may_end_with_its_token_in_flight():
    engine = FakeEngine(Limits(num_pages=4, max_batched_tokens=20))
    engine.add(LASTING[0], max_tokens=6)
    young = engine.add(LASTING[1], max_tokens=1)
    engine.step()
    engine.step()
    assert young.finish_reason == "length"
    assert engine.scheduler.waiting == ()
    engine.run()


def test_request_that_fills_the_pool_ends_with_length():
    engine = FakeEngine(Limits(num_pages=3))
    request = engine.add(LASTING[0], max_tokens=50, ignore_eos=True)
    engine.run()
    assert request.finish_reason == "length"
    assert len(request.token_ids) == 3 * 2 + 1
    assert engine.scheduler.num_preemptions == 0


def test_request_at_max_model_len_ends_with_length():
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
def test_request_that_can_never_fit_is_refused(limits, length, message):
    engine = FakeEngine(limits)
    with pytest.raises(RequestRefused, match=message):
        engine.scheduler.add(Request("too long", (1,) * length))
    assert not engine.scheduler.has_unfinished
    fitting = engine.add([1] * (length - 1))
    engine.run()
    assert fitting.finish_reason in ("stop", "length")


def test_abort_ends_waiting_and_running_requests():
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


def test_lost_caches_change_no_token():
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
        engine.scheduler.retire(second, [RowTokens([1])])
    with pytest.raises(ValueError, match="one for each of 1 sampling rows, got 2"):
        engine.scheduler.retire(first, [RowTokens([1]), RowTokens([2])])
    engine.check()
    engine.run()
    with pytest.raises(ValueError, match="plan must be the oldest launched plan"):
        engine.scheduler.retire(first, [RowTokens([1])])


@pytest.mark.usefixtures("unchecked_shapes")
def test_invalid_tokens_change_no_state():
    engine = FakeEngine(Limits(lag=5))
    requests = [engine.add(prompt, max_tokens=2) for prompt in LASTING[:2]]
    plan = engine.planned_step()
    tokens: list[Any] = [RowTokens([1]), RowTokens([[1]])]  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(TypeError, match="unhashable"):
        engine.scheduler.retire(plan, tokens)
    assert [request.output_ids for request in requests] == [[], []]
    engine.run()


def test_failed_allocations_change_no_token(monkeypatch):
    """Tokens are right if one page allocation fails although pages are free.

    In run n, allocation n fails.
    """
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


def test_invalid_arguments_are_rejected():
    pools = Limits().pools()

    sizes: dict[str, Any] = {"max_batched_tokens": 8, "max_model_len": 64, "chunked_prefill": True}

    def make(**changed: Any) -> Scheduler:
        return Scheduler(pools, None, **(sizes | changed))

    for name in ("max_batched_tokens", "max_prefill_seqs"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            make(**{name: 0})
    with pytest.raises(ValueError, match="max_model_len=1"):
        make(max_model_len=1)
    with pytest.raises(ValueError, match=r"padded_sizes must reach max_batched_tokens=8, got \(2, 4\)"):
        make(padded_sizes=(2, 4))
    scheduler = make()
    scheduler.add(Request("a", (1,)))
    with pytest.raises(ValueError, match="request_id must be new, got 'a' again"):
        scheduler.add(Request("a", (2,)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, r"temperature must be 0 or in \[1e-06, 1e\+06\], got -0.1"),
        ({"temperature": float("nan")}, r"temperature must be 0 or in \[1e-06, 1e\+06\], got nan"),
        ({"temperature": float("inf")}, r"temperature must be 0 or in \[1e-06, 1e\+06\], got inf"),
        ({"temperature": 1e39}, r"temperature must be 0 or in \[1e-06, 1e\+06\], got 1e\+39"),
        ({"temperature": 1e-40}, r"temperature must be 0 or in \[1e-06, 1e\+06\], got 1e-40"),
        ({"top_k": -2}, "top_k must not be negative, .*got -2"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 2**32}, r"seed must be in \[0, 2\*\*32\), got 4294967296"),
        ({"max_tokens": float("nan")}, "max_tokens must be an integer, got nan"),
        ({"max_tokens": 3.0}, "max_tokens must be an integer, got 3.0"),
        ({"max_tokens": "3"}, "max_tokens must be an integer, got '3'"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"top_k": True}, "top_k must be an integer, got True"),
        ({"seed": np.array([3])}, r"seed must be an integer, got array\(\[3\]\)"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"temperature": np.array([0.5])}, r"temperature must be a number, got array\(\[0.5\]\)"),
        ({"temperature": "0.5"}, "temperature must be a number, got '0.5'"),
        ({"temperature": 10**400}, "temperature must be a number, got 1000"),
        ({"top_p": True}, "top_p must be a number, got True"),
        ({"ignore_eos": np.array([True, False])}, "ignore_eos must be True or False, got array"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"stop_token_ids": b"5"}, "stop_token_ids must be a sequence of integers, got b'5'"),
        ({"stop_token_ids": [1.0]}, r"stop_token_ids must be a sequence of integers, got \[1.0\]"),
        ({"stop_token_ids": None}, "stop_token_ids must be a sequence of integers, got None"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a sequence of integers, got 5"),
        ({"stop_token_ids": ["5"]}, r"stop_token_ids must be a sequence of integers, got \['5'\]"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in .*, got 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be in .*, got nan"),
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\], got 2.5"),
        ({"frequency_penalty": -3}, r"frequency_penalty must be in \[-2, 2\], got -3.0"),
        ({"logit_bias": [3]}, r"logit_bias must be a mapping to numbers, got \[3\]"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must be an integer, got '3'"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias must be in \[-100, 100\], got nan for token 3"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "must have at most 1024 different tokens, got 1025"),
        ({"allowed_token_ids": []}, "allowed_token_ids must have at least one token"),
        ({"allowed_token_ids": range(1025)}, "must have at most 1024 different tokens, got 1025"),
        ({"min_tokens": 17}, "min_tokens must be from 0 to max_tokens=16, got 17"),
        ({"logprobs": -1}, "logprobs must not be negative, got -1"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be an integer, got True"),
        ({"extra_args": {"x": "y"}}, "extra_args must be a number, got 'y'"),
        ({"extra_args": {"x": float("inf")}}, "extra_args must be finite numbers, got inf for x"),
        ({"n": 2}, "n must be at least 1, and 1 at temperature 0, got 2"),
        ({"stop": ["a", ""]}, r"stop must be a sequence of str that are not empty, got \['a', ''\]"),
        ({"bad_words": "word"}, "bad_words must be a sequence of str that are not empty, got 'word'"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs must be StructuredOutputs or None, got"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False, got 1"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_sampling_params_are_validated(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must set exactly one of json, regex, choice and grammar, got none"),
        ({"regex": "a", "json": "{}"}, "must set exactly one of json, regex, choice and grammar, got json, regex"),
        ({"regex": ""}, "regex must be a str that is not empty, got ''"),
        ({"grammar": 5}, "grammar must be a str that is not empty, got 5"),
        ({"choice": "ab"}, "choice must be a sequence of str that are not empty, got 'ab'"),
        ({"choice": []}, r"choice must be a str that is not empty, got \(\)"),
        ({"json": {"type": {1}}}, "json must be a JSON schema, got"),
    ],
)
def test_structured_outputs_are_validated(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**given)


def test_text_level_parameters_are_hashable_and_removable():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    of_tokens: dict[str, Any] = {"temperature": 1.0, "top_k": -1, "logit_bias": {3: 1}, "allowed_token_ids": [5, 3]}
    params = SamplingParams(
        **of_tokens, n=2, stop="end", bad_words=["no"], structured_outputs=StructuredOutputs(json=schema)
    )
    assert (params.top_k, params.allowed_token_ids, params.stop) == (0, (3, 5), ("end",))
    assert isinstance(hash(params), int)
    assert params.text_level() == ["n", "stop", "bad_words", "structured_outputs"]
    assert params.token_level() == SamplingParams(**of_tokens)


def test_empty_prompt_is_rejected():
    with pytest.raises(ValueError, match="prompt_ids of request a must hold at least one token"):
        Request("a", ())


@pytest.mark.usefixtures("unchecked_shapes")
def test_stop_tokens_accept_any_sequence_of_integers():
    kept = SamplingParams(stop_token_ids=(3, 4))
    for ids in ([3, 4], range(3, 5), [*np.array([3, 4])]):
        assert SamplingParams(stop_token_ids=ids) == kept
        assert hash(SamplingParams(stop_token_ids=ids)) == hash(kept)


@pytest.mark.usefixtures("unchecked_shapes")
def test_sampling_params_are_converted_to_python_numbers():
    """`SamplingParams` converts NumPy scalars to Python numbers, so that no step has to convert them."""
    given: dict[str, Any] = {
        "max_tokens": np.int64(4),
        "temperature": np.float32(0.5),
        "top_k": np.array(3),
        "top_p": jnp.float32(0.5),
        "seed": np.uint32(2**32 - 1),
        "ignore_eos": np.True_,
    }
    params = SamplingParams(**given)
    assert params == SamplingParams(4, 0.5, 3, 0.5, 2**32 - 1, True)
    kinds = {field.name: type(getattr(params, field.name)) for field in fields(params)}
    assert [kinds[name] for name in (*given, "stop_token_ids")] == [int, float, int, float, int, bool, tuple]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("salt", [None, b"x", "\ud800"])
def test_salt_that_cannot_be_encoded_is_rejected(salt):
    with pytest.raises(ValueError, match="salt of request a must be a str without surrogates, got "):
        Request("a", (1,), salt=salt)


@pytest.mark.usefixtures("unchecked_shapes")
def test_params_of_the_wrong_type_are_rejected():
    params: Any = {"max_tokens": 3}
    with pytest.raises(ValueError, match="params of request a must be SamplingParams, got {'max_tokens': 3}"):
        Request("a", (1,), params)


def test_preempted_requests_are_admitted_again():
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
