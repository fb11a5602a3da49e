"""The `openai` client over loopback: each parameter and each status of docs/server.md, and streams that are closed."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from pallas_attn.models.server.formats import ParserNames
from tests.server.server_case import NAME, Running, load, serving
from tests.server.test_chat import CITY, LARGE, MESSAGES, TOOLS, deltas
from tests.server.test_life_cycle import Steps, metric

DOCUMENT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
DRAW: dict[str, Any] = {"max_tokens": 3, "temperature": 1.0, "seed": 5}

BOTH: dict[str, dict[str, Any]] = {
    "model, max_tokens, temperature, seed": {},
    "top_p": {"top_p": 0.5},
    "n": {"n": 2},
    "stop": {"stop": ["b"]},
    "logit_bias": {"logit_bias": {"104": 100}},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -1.0, "repetition_penalty": 1.3},
    "response_format": {"response_format": {"type": "json_object"}},
    "ignored": {"user": "a", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "a"},
    "cache": {"prompt_cache_key": "a", "cache_salt": "b"},
    "sampling": {"top_k": 3, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [98]},
    "tokens": {"allowed_token_ids": [98, 99], "bad_words": ["b"]},
    "end": {"ignore_eos": True, "skip_special_tokens": False},
    "stop text": {"stop": "b", "include_stop_str_in_output": True},
    "prompt_logprobs": {"prompt_logprobs": 1, "return_token_ids": True},
    "structured_outputs": {"structured_outputs": {"regex": "[ab]{3}"}},
    "guided_json": {"guided_json": {"enum": ["a", "b"]}},
    "guided_regex": {"guided_regex": "[ab]{3}"},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "guided_grammar": {"guided_grammar": 'start: "a" | "bc"'},
}
COMPLETIONS: dict[str, dict[str, Any]] = BOTH | {
    "prompt": {"prompt": [[104, 101], [104]]},
    "echo, logprobs": {"echo": True, "logprobs": 2},
}
CHATS: dict[str, dict[str, Any]] = BOTH | {
    "messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": TOOLS, "tool_choice": "auto"},
    "tool_choice": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 20},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
        "max_tokens": 20,
    },
    "reasoning": {"reasoning_effort": "low", "include_reasoning": True},
    "template": {"chat_template_kwargs": {"suffix": "!"}, "documents": [], "add_generation_prompt": False},
}
OF_STREAMS = {"stream", "stream_options"}
"""Parameters that all streams have."""


def documented(section: str) -> set[str]:
    """Return the parameters that a section of the document names before the table of parameters without support."""
    rows, _, others = section.partition("Further parameters")
    cells = " ".join(row.split("|")[1] for row in rows.splitlines() if row.startswith("| `"))
    return {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", cells + others.partition("\n\n")[0])}


PATHS, _, REST = DOCUMENT.partition("## Parameters")
PARAMETERS = documented(REST)
STATUSES = [int(status) for status in re.findall(r"^\| (\d{3}) \|", PATHS, re.MULTILINE)]


def test_every_documented_parameter_has_a_case() -> None:
    fields = {name for case in [*COMPLETIONS.values(), *CHATS.values()] for name in case}
    assert len(PARAMETERS) > 40
    assert len(STATUSES) >= 11  # `test_error_of_each_status` has a case of each
    assert {"model", *DRAW, *OF_STREAMS, *fields} == PARAMETERS


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Running]:
    with serving(folder, llm=load(folder, **LARGE), families=ParserNames("hermes", "think")) as running:
        yield running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai()


def arguments(create: Any, **fields: Any) -> dict[str, Any]:
    """Return arguments of a method of the client. Parameters that OpenAI does not have are in `extra_body`."""
    known = inspect.signature(create).parameters
    extra = {name: value for name, value in fields.items() if name not in known}
    return {name: value for name, value in fields.items() if name in known} | {"extra_body": extra}


@pytest.mark.slow  # test_completions.py sends the same parameters with httpx
@pytest.mark.parametrize("name", COMPLETIONS)
def test_parameters_of_completions(client: openai.OpenAI, name: str) -> None:
    create = client.completions.create
    given = arguments(create, **{"model": NAME, "prompt": "hello", **DRAW, **COMPLETIONS[name]})
    whole = create(**given)
    texts, reasons, usage = [""] * len(whole.choices), [""] * len(whole.choices), None
    for chunk in create(**given, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens > 0


@pytest.mark.parametrize("name", CHATS)
def test_parameters_of_chats(client: openai.OpenAI, name: str) -> None:
    create = client.chat.completions.create
    fields = {"model": NAME, "messages": MESSAGES, **DRAW, **CHATS[name]}
    whole = create(**arguments(create, **fields))
    given = arguments(create, **fields, stream_options={"include_usage": True})
    del given["model"]  # `deltas` sets it
    streamed = deltas(client, **given)
    for choice in whole.choices:
        message, merged = choice.message, streamed[choice.index]
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
        assert [call[1:] for call in merged["calls"]] == calls
        assert merged["content"] == (message.content or "")
        assert merged["reasoning"] == (getattr(message, "reasoning_content", None) or "")
        assert merged["reasons"][-1] == choice.finish_reason
    assert len(streamed) == len(whole.choices)


@pytest.mark.parametrize("is_chat", [False, True])
def test_closing_a_stream_aborts_the_request(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    steps = Steps(server.llm, monkeypatch)
    steps.delay_s = 0.02
    aborted = 'pallas_attn_request_success_total{finished_reason="abort"'
    before = metric(server, aborted)
    fields: dict[str, Any] = {"model": NAME, "max_tokens": 500, "seed": 5, "extra_body": {"ignore_eos": True}}
    if is_chat:
        stream: Any = client.chat.completions.create(messages=MESSAGES, stream=True, **fields)
    else:
        stream = client.completions.create(prompt="hello", stream=True, **fields)
    assert next(stream).choices
    stream.close()
    server.wait_until_idle()
    assert metric(server, aborted) == before + 1
    assert steps.count < 200


class SlowBody(httpx2.HTTPTransport):
    """Sends the body of a request after a pause."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body = request.read()

        def parts() -> Iterator[bytes]:
            yield body[:5]
            time.sleep(1.0)
            yield body[5:]

        slow = httpx2.Request(request.method, request.url, headers=request.headers, content=parts())
        return super().handle_request(slow)


LIMITS: dict[int, dict[str, Any]] = {
    408: {"read_s": 0.3},
    413: {"max_body_bytes": 1000},
    429: {"max_requests": 1},
    504: {"request_s": 0.3},
}


@pytest.mark.parametrize("status", STATUSES)
def test_error_of_each_status(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    llm = load(folder, **LARGE)
    steps = Steps(llm, monkeypatch)
    options: dict[str, Any] = {"api_key": "key"}
    fields: dict[str, Any] = {"model": NAME, "prompt": "hello", "max_tokens": 100, "seed": 1}
    server_options = {"api_keys": ["key"], "allowed_hosts": []}
    stream: Any = None
    with serving(folder, LIMITS.get(status, {}), llm=llm, **server_options) as server:
        match status:
            case 400:
                fields["temperature"] = -1
            case 401:
                options["api_key"] = "other"
            case 403:
                options["default_headers"] = {"Host": "example.com"}
            case 404:
                fields["model"] = "other"
            case 408:
                options["http_client"] = httpx2.Client(transport=SlowBody())
            case 413:
                fields["prompt"] = "a" * 2000
            case 415:
                options["default_headers"] = {"Content-Type": "text/plain"}
            case 429:
                steps.delay_s = 0.05
                stream = server.openai(**options).completions.create(**fields, stream=True)
            case 500:
                steps.errors.append(RuntimeError("device lost"))
            case 503:
                server.server.engine.is_ready = False
            case 504:
                steps.delay_s = 0.1
        with pytest.raises(openai.APIStatusError) as error:
            server.openai(**options).completions.create(**fields)
        assert error.value.status_code == status
        assert isinstance(error.value.body, dict)
        assert {"message", "type", "param", "code"} == error.value.body.keys()
        steps.delay_s = 0.0
        if stream is not None:
            stream.close()
        server.wait_until_idle()
