"""/v1/completions: parameters, streams, log probabilities, and equality with the offline `LLM`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pallas_attn.models.llm import LLM, Generation, SamplingParams, StructuredOutputs
from tests.kit.slow_cases import slow_cases
from tests.models.llm_case import EOS
from tests.server.server_case import NAME, Running, events, load, serving

PROMPT = "hello world, hello."
DRAW = {"max_tokens": 12, "temperature": 1.0, "seed": 5}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0, "max_tokens": 8}, {"max_tokens": 8}),
    "defaults": ({"seed": 3}, {"temperature": 1.0, "seed": 3, "max_tokens": 16}),
    "seed": (DRAW, DRAW),
    "negative seed": (DRAW | {"seed": -1}, DRAW | {"seed": 2**32 - 1}),
    "top_p": (DRAW | {"top_p": 0.5}, DRAW | {"top_p": 0.5}),
    "top_k": (DRAW | {"top_k": 3}, DRAW | {"top_k": 3}),
    "min_p": (DRAW | {"min_p": 0.4}, DRAW | {"min_p": 0.4}),
    "penalties": (
        DRAW | {"presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.3},
        DRAW | {"presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.3},
    ),
    "logit_bias": (DRAW | {"logit_bias": {"104": 100}}, DRAW | {"logit_bias": {104: 100}}),
    "stop text": (DRAW | {"logit_bias": {"104": 50}, "stop": "hhh"}, DRAW | {"logit_bias": {104: 50}, "stop": "hhh"}),
    "stop texts": (DRAW | {"stop": ["b", "c"]}, DRAW | {"stop": ["b", "c"]}),
    "stop in output": (
        DRAW | {"logit_bias": {"104": 50}, "stop": ["hh"], "include_stop_str_in_output": True},
        DRAW | {"logit_bias": {104: 50}, "stop": ["hh"], "include_stop_str_in_output": True},
    ),
    "stop_token_ids": (
        DRAW | {"logit_bias": {"104": 50}, "stop_token_ids": [104], "min_tokens": 3},
        DRAW | {"logit_bias": {104: 50}, "stop_token_ids": [104], "min_tokens": 3},
    ),
    "eos": (DRAW | {"logit_bias": {str(EOS): 100}}, DRAW | {"logit_bias": {EOS: 100}}),
    "ignore_eos": (
        DRAW | {"logit_bias": {str(EOS): 5}, "ignore_eos": True, "skip_special_tokens": False},
        DRAW | {"logit_bias": {EOS: 5}, "ignore_eos": True, "skip_special_tokens": False},
    ),
    "allowed_token_ids": (DRAW | {"allowed_token_ids": [98, 99]}, DRAW | {"allowed_token_ids": [98, 99]}),
    "bad_words": (
        DRAW | {"allowed_token_ids": [98, 99], "bad_words": ["b"]},
        DRAW | {"allowed_token_ids": [98, 99], "bad_words": ["b"]},
    ),
    "logprobs": (DRAW | {"logprobs": 2}, DRAW | {"logprobs": 2}),
    "prompt_logprobs": (DRAW | {"prompt_logprobs": 1}, DRAW | {"prompt_logprobs": 1}),
    "n": (DRAW | {"n": 3}, DRAW | {"n": 3}),
    "json_object": (
        DRAW | {"response_format": {"type": "json_object"}, "max_tokens": 30},
        DRAW | {"structured_outputs": StructuredOutputs(json={"type": "object"}), "max_tokens": 30},
    ),
    "json_schema": (
        DRAW | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab"]}}}},
        DRAW | {"structured_outputs": StructuredOutputs(json={"enum": ["ab"]})},
    ),
    "text": (DRAW | {"response_format": {"type": "text"}}, DRAW),
    "guided_regex": (
        DRAW | {"guided_regex": "[ab]{3}"},
        DRAW | {"structured_outputs": StructuredOutputs(regex="[ab]{3}")},
    ),
    "guided_choice": (
        DRAW | {"guided_choice": ["yes", "no"]},
        DRAW | {"structured_outputs": StructuredOutputs(choice=["yes", "no"])},
    ),
    "guided_json": (
        DRAW | {"guided_json": {"enum": [1, 2]}},
        DRAW | {"structured_outputs": StructuredOutputs(json={"enum": [1, 2]})},
    ),
    "guided_grammar": (
        DRAW | {"guided_grammar": 'start: "a" | "bc"'},
        DRAW | {"structured_outputs": StructuredOutputs(grammar='start: "a" | "bc"')},
    ),
    "structured_outputs": (
        DRAW | {"structured_outputs": {"regex": "[ab]{3}"}, "n": 2},
        DRAW | {"structured_outputs": StructuredOutputs(regex="[ab]{3}"), "n": 2},
    ),
}
"""For each case: fields of the request, and fields of the same `SamplingParams`."""


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, Generation]:
    """Results of all cases, which the LLM computes before the server uses it."""
    params = [SamplingParams(**fields) for _, fields in CASES.values()]
    return dict(zip(CASES, llm.generate([PROMPT] * len(CASES), params), strict=True))


@pytest.fixture(scope="module")
def shared(folder: Path, llm: LLM, expected: dict[str, Generation]) -> Iterator[Running]:
    with serving(folder, llm=llm) as running:
        yield running


def complete(server: Running, **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/v1/completions", json={"model": NAME, "prompt": PROMPT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Running, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    with server.client() as client:
        response = client.post(path, json={"stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(response.text)


# Slow: fields that the server passes on like other fields.
@slow_cases(
    *("negative seed", "top_k", "min_p", "stop texts", "eos", "ignore_eos", "allowed_token_ids", "json_object"),
    *("text", "guided_choice"),
)
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_texts_are_those_of_the_llm(server: Running, expected: dict[str, Generation], name: str) -> None:
    fields = CASES[name][0] | {"return_token_ids": True}
    result, generation = complete(server, **fields), expected[name]
    outputs = generation.outputs
    assert [choice["index"] for choice in result["choices"]] == [*range(len(outputs))]
    assert [choice["token_ids"] for choice in result["choices"]] == [output.token_ids for output in outputs]
    assert [choice["text"] for choice in result["choices"]] == [output.text for output in outputs]
    assert [choice["finish_reason"] for choice in result["choices"]] == [output.finish_reason for output in outputs]
    assert [choice["stop_reason"] for choice in result["choices"]] == [output.stop_reason for output in outputs]
    assert result["choices"][0]["prompt_token_ids"] == generation.prompt_token_ids
    counts = len(generation.prompt_token_ids), sum(len(output.token_ids) for output in outputs)
    usage = result["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (*counts, sum(counts))
    parts = [e["choices"][0] for e in stream(server, prompt=PROMPT, **fields)]
    for i, output in enumerate(outputs):
        own = [part for part in parts if part["index"] == i]
        assert "".join(part["text"] for part in own) == output.text
        assert [token for part in own for token in part["token_ids"]] == output.token_ids
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [output.finish_reason]


def test_logprobs(server: Running, expected: dict[str, Generation]) -> None:
    (choice,) = complete(server, **CASES["logprobs"][0])["choices"]
    (output,) = expected["logprobs"].outputs
    tables = output.logprobs
    assert tables is not None
    logprobs = choice["logprobs"]
    own = [table[token] for table, token in zip(tables, output.token_ids, strict=True)]
    assert logprobs["tokens"] == [entry.decoded_token for entry in own]
    assert logprobs["token_logprobs"] == [entry.logprob for entry in own]
    assert logprobs["top_logprobs"] == [{e.decoded_token: e.logprob for e in table.values()} for table in tables]
    lengths = [*map(len, logprobs["tokens"])]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    parts = [e["choices"][0]["logprobs"] for e in stream(server, prompt=PROMPT, **CASES["logprobs"][0])]
    for name in logprobs:
        assert [entry for part in parts for entry in part[name]] == logprobs[name]


def test_prompt_logprobs(server: Running, expected: dict[str, Generation]) -> None:
    (choice,) = complete(server, **CASES["prompt_logprobs"][0])["choices"]
    first, *others = choice["prompt_logprobs"]
    tables = expected["prompt_logprobs"].prompt_logprobs
    assert tables is not None
    assert first is None
    assert others == [{str(t): entry._asdict() for t, entry in table.items()} for table in tables[1:] if table]


def test_echo(server: Running, expected: dict[str, Generation]) -> None:
    (output,) = expected["seed"].outputs
    assert complete(server, **DRAW, echo=True)["choices"][0]["text"] == PROMPT + output.text
    ids = expected["seed"].prompt_token_ids
    assert complete(server, **DRAW, echo=True, prompt=ids)["choices"][0]["text"] == PROMPT + output.text
    parts = stream(server, prompt=PROMPT, **DRAW, echo=True, n=2)
    for i in range(2):
        text = "".join(e["choices"][0]["text"] for e in parts if e["choices"][0]["index"] == i)
        assert text.startswith(PROMPT)
        assert text.count("world") == 1


def test_echo_with_logprobs_has_the_prompt(server: Running, expected: dict[str, Generation]) -> None:
    (choice,) = complete(server, **DRAW, echo=True, logprobs=1)["choices"]
    ids, output = expected["seed"].prompt_token_ids, expected["seed"].outputs[0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + len(output.token_ids)
    assert "".join(logprobs["tokens"][: len(ids)]) == PROMPT
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    tables = expected["prompt_logprobs"].prompt_logprobs
    assert tables is not None
    wanted = [table[token].logprob for table, token in zip(tables[1:], ids[1:], strict=True) if table is not None]
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(wanted, abs=1e-5)
    only = complete(server, echo=True, logprobs=1, max_tokens=0)
    assert only["choices"][0]["text"] == PROMPT
    assert only["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx([None, *wanted], abs=1e-5)
    assert only["usage"]["completion_tokens"] == 0
    assert complete(server, echo=True, max_tokens=0)["choices"][0]["text"] == PROMPT


def test_requests_of_lm_eval(server: Running, expected: dict[str, Generation]) -> None:
    """Send the requests of `local-completions` of lm-eval 0.4.13, and read the responses as it does."""
    ids = expected["prompt_logprobs"].prompt_token_ids
    tables = expected["prompt_logprobs"].prompt_logprobs
    assert tables is not None
    context, score = 3, {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = complete(server, prompt=[ids[:-1], ids], model=NAME, **score)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, end in zip(choices, (len(ids) - 1, len(ids)), strict=True):
        found, tops = (choice["logprobs"][name][context:-1] for name in ("token_logprobs", "top_logprobs"))
        scored = [(table, ids[i]) for i, table in enumerate(tables) if table is not None and context <= i < end]
        assert found == pytest.approx([table[token].logprob for table, token in scored], abs=1e-5)
        is_best = [logprob == max(top.values()) for logprob, top in zip(found, tops, strict=True)]
        assert is_best == [table[token].rank == 1 for table, token in scored]
    generate = {"max_tokens": 8, "temperature": 0, "stop": ["\n\n", "</s>"], "seed": 1234}
    texts = [choice["text"] for choice in complete(server, prompt=[PROMPT], model=NAME, **generate)["choices"]]
    assert texts == [expected["greedy"].text]


def test_several_prompts(server: Running, expected: dict[str, Generation]) -> None:
    ids = expected["n"].prompt_token_ids
    for prompts in (["abc", PROMPT], [[1, 2, 3], ids]):
        result = complete(server, prompt=prompts, **DRAW, n=3)
        assert [choice["index"] for choice in result["choices"]] == [*range(6)]
        assert [c["text"] for c in result["choices"][3:]] == [output.text for output in expected["n"].outputs]
        parts = stream(server, prompt=prompts, **DRAW, n=3)
        for choice in result["choices"]:
            own = [e["choices"][0] for e in parts if e["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in own) == choice["text"]


def test_usage_of_streams_and_cached_tokens(server: Running) -> None:
    prompt = "a prompt of several pages, which the second request finds in the cache"
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "seed": 1}
    assert all("usage" not in event for event in stream(server, **fields))
    *others, last = stream(server, **fields, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) // 2
    assert complete(server, **fields)["usage"] == last["usage"]


def test_max_tokens_ends_at_the_limit_of_the_model(server: Running) -> None:
    result = complete(server, prompt=[1] * 120, max_tokens=100, ignore_eos=True)
    assert result["usage"]["total_tokens"] == 128
    assert result["choices"][0]["finish_reason"] == "length"


def test_requests_without_seed_differ(server: Running) -> None:
    assert len({complete(server, max_tokens=12)["choices"][0]["text"] for _ in range(3)}) > 1


def test_openai_client(server: Running, expected: dict[str, Generation]) -> None:
    client = server.openai()
    result = client.completions.create(model=NAME, prompt=PROMPT, **DRAW)
    assert result.choices[0].text == expected["seed"].text
    text = "".join(c.choices[0].text for c in client.completions.create(model=NAME, prompt=PROMPT, stream=True, **DRAW))
    assert text == expected["seed"].text


def test_tokenize_and_detokenize(server: Running) -> None:
    with server.client() as client:
        result = client.post("/tokenize", json={"prompt": "hello<user>", "return_token_strs": True}).json()
        assert result["count"] == len(result["tokens"]) == 2
        assert result["token_strs"] == ["hello", "<user>"]
        assert result["max_model_len"] == 128
        assert client.post("/detokenize", json={"tokens": result["tokens"]}).json() == {"prompt": "hello<user>"}
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        result = client.post("/tokenize", json=chat).json()
        text = client.post("/detokenize", json={"tokens": result["tokens"]}).json()
        assert text == {"prompt": "<user>hello<assistant>"}
        assert client.post("/detokenize", json={"tokens": [10**30]}).status_code == 400
        assert client.post("/tokenize", json={}).status_code == 400


def test_information(server: Running) -> None:
    with server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == (NAME, "model", 128)
        assert client.get(f"/v1/models/{NAME}").json() == model
        assert client.get("/v1/models/other").status_code == 404
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        assert set(client.get("/version").json()) == {"version"}


def test_metrics(server: Running) -> None:
    def values() -> dict[str, float]:
        with server.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    complete(server, max_tokens=1)  # its pages are found later
    label = f'{{model_name="{NAME}"}}'
    before = values()
    complete(server, max_tokens=5, ignore_eos=True, seed=1)
    with server.client() as client:
        assert client.post("/v1/completions", json={}).status_code == 400
    after = values()
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change[f"pallas_attn_generation_tokens_total{label}"] == 5
    assert change[f"pallas_attn_prompt_tokens_total{label}"] > 5
    assert change[f"pallas_attn_e2e_request_latency_seconds_count{label}"] == 1
    assert change[f"pallas_attn_time_to_first_token_seconds_count{label}"] == 1
    assert change[f"pallas_attn_inter_token_latency_seconds_count{label}"] == 4
    assert change[f'pallas_attn_request_success_total{{finished_reason="length",model_name="{NAME}"}}'] == 1
    assert change['pallas_attn_http_requests_total{path="/v1/completions",status="200"}'] == 1
    assert change['pallas_attn_http_requests_total{path="/v1/completions",status="400"}'] == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"pallas_attn_{name}{label}"] == 0
    assert 0 < after[f"pallas_attn_prefix_cache_hit_rate{label}"] < 1


def test_events_are_json_lines(server: Running) -> None:
    with server.client() as client:
        text = client.post("/v1/completions", json={"prompt": "abc", "stream": True, "max_tokens": 2}).text
    *parts, last, empty = text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    assert len({json.loads(part.removeprefix("data: "))["id"] for part in parts}) == 1
