"""Invalid prompts, requests, ids and settings are rejected and do not affect earlier requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pallas_attn.models.engine import Engine, EngineConfig, SamplingParams, StructuredOutputs
from tests.models.engine_case import GREEDY, PROMPTS, VOCAB_SIZE, engine, model, plain


@pytest.mark.parametrize(
    ("prompt", "match"), [([], "at least one token"), ([VOCAB_SIZE], "from 0 to 63, got 64"), ([-1], "got -1")]
)
def test_invalid_prompt_is_rejected_with_a_message(prompt, match):
    with pytest.raises(ValueError, match=match):
        engine("ample").add_request(prompt)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("prompt", [[1.7], "12", [b"1"], ["1"], b"12", [True], None, 5, [[1]], np.array([1.0])])
def test_prompt_is_not_converted(prompt):
    with pytest.raises(ValueError, match="prompt_ids must be a sequence of integers, got "):
        engine("ample").add_request(prompt)


@pytest.mark.usefixtures("unchecked_shapes")
def test_numpy_integers_are_accepted_as_a_prompt():
    ample = engine("ample")
    prompt: Any = np.array(PROMPTS[0], np.uint16)
    request = ample.add_request(prompt)
    assert list(ample._requests.tracked[request].request.prompt_ids) == list(PROMPTS[0])
    ample.abort(request)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"request_id": [1]}, "request_id: expected an int or a str"),
        ({"on_token": 5}, "on_token"),
        ({"token_filter": 5}, "token_filter"),
    ],
)
def test_invalid_id_or_callback_is_rejected(wrong, match):
    with pytest.raises(ValueError, match=match):
        engine("ample").add_request(PROMPTS[0], **wrong)
    assert not engine("ample").has_unfinished


def test_invalid_prompt_in_generate_leaves_no_request():
    ample = engine("ample")
    known = set(ample._requests.tracked)
    with pytest.raises(ValueError, match="from 0 to 63, got 64"):
        ample.generate([PROMPTS[0], [1] * 96, [VOCAB_SIZE]])
    assert not ample.has_unfinished
    assert set(ample._requests.tracked) == known


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("wrong", "match"), [({"salt": None}, "salt"), ({"salt": "\ud800"}, "salt"), ({"params": None}, "params")]
)
def test_invalid_request_does_not_affect_other_requests(wrong, match):
    ample = engine("ample")
    request_id = ample.add_request(PROMPTS[0], GREEDY)
    with pytest.raises(ValueError, match=f"{match} of request"):
        ample.add_request(PROMPTS[1], **wrong)
    while ample.has_unfinished:
        ample.step()
    assert tuple(ample.output(request_id).output_ids) == plain(0, GREEDY)


def test_unknown_and_repeated_ids_are_rejected():
    ample = engine("ample")
    ample.add_request([1], SamplingParams(max_tokens=1), request_id="mine")
    with pytest.raises(ValueError, match="'mine' again"):
        ample.add_request([1], request_id="mine")
    for call in (ample.abort, ample.output, ample.forget):
        with pytest.raises(ValueError, match="'theirs'"):
            call("theirs")
    with pytest.raises(ValueError, match="is not"):
        ample.forget("mine")
    while ample.has_unfinished:
        ample.step()
    ample.forget("mine")
    with pytest.raises(ValueError, match="'mine'"):
        ample.output("mine")


def test_ids_given_by_callers_are_not_reused():
    ample, one = engine("ample"), SamplingParams(max_tokens=1)
    number = int(ample.add_request([1], one))
    ample.add_request([1], one, request_id=number + 1)
    assert ample.add_request([1], one) == number + 2
    while ample.has_unfinished:
        ample.step()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"num_pages": 0}, "num_pages"),
        ({"max_num_seqs": 600}, "max_num_seqs"),
        ({"decode_buckets": (4, 2)}, "decode_buckets"),
        ({"prefill_buckets": (16, 32)}, "prefill_buckets"),
        ({"max_prefill_seqs": 0}, "max_prefill_seqs: expected at least 1 or None, got 0"),
        ({"max_prefill_seqs": -1}, "max_prefill_seqs"),
        ({"decode_buckets": (0, 16)}, "decode_buckets: expected ascending sizes from 1 or more up to 16"),
        ({"prefill_buckets": (0, 512)}, "prefill_buckets: expected ascending sizes from 1 or more up to 512"),
    ],
)
def test_invalid_settings_are_rejected(wrong, match):
    with pytest.raises(ValueError, match=match):
        EngineConfig(**wrong)


@pytest.mark.parametrize(
    ("max_num_seqs", "rows"), [(1, (1,)), (3, (1, 3)), (10, (1, 4, 10)), (16, (1, 4, 16)), (50, (1, 4, 16, 32, 50))]
)
def test_default_numbers_of_decode_rows(max_num_seqs: int, rows: tuple[int, ...]):
    assert EngineConfig(max_num_seqs=max_num_seqs).runner_config(64).decode_buckets == rows


def test_max_model_len_above_the_model_is_rejected():
    with pytest.raises(ValueError, match="max_model_len"):
        Engine(model(), EngineConfig(max_model_len=129))


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (SamplingParams(stop="end"), "stop: needs a tokenizer, which an engine does not have; use LLM"),
        (SamplingParams(temperature=1.0, n=2, bad_words=["no"]), "n, bad_words: needs a tokenizer"),
        (SamplingParams(structured_outputs=StructuredOutputs(regex="a")), "structured_outputs: needs a tokenizer"),
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids: expected ids from 0 to 63, got 64"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias: expected ids from 0 to 63, got -1"),
        (SamplingParams(allowed_token_ids=[3, VOCAB_SIZE]), "allowed_token_ids: expected ids from 0 to 63, got 64"),
    ],
)
def test_parameters_that_the_engine_cannot_apply_are_rejected(params: SamplingParams, match: str):
    with pytest.raises(ValueError, match=match):
        engine("ample").add_request(PROMPTS[0], params)
    assert not engine("ample").has_unfinished
