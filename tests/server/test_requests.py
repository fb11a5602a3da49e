"""Wrong, malformed, slow and too large requests."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_case import Running, request, serving

CHAT = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
LIMITS = {
    "max_body_bytes": 20_000,
    "max_json_depth": 12,
    "max_prompt_tokens": 100,
    "max_output_tokens": 90,
    "max_outputs": 4,
    "max_stops": 3,
    "max_token_entries": 5,
    "max_grammar_bytes": 300,
    "max_connections": 20,
    "read_s": 1.0,
    "keep_alive_s": 1.0,
}


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Running]:
    with serving(folder, LIMITS) as running:
        yield running


def nested(depth: int) -> Any:
    return [] if depth == 1 else [nested(depth - 1)]


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "audio": ({"audio": {}}, "audio", "text only"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    "prediction": ({"prediction": {}}, "prediction", "not supported"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options", "not supported"),
    "store": ({"store": True}, "store", "stores nothing"),
    "functions": ({"functions": [{}]}, "functions", "use tools"),
    "function_call": ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
    "chat_template": ({"chat_template": "x"}, "chat_template", "not accepted"),
    "beams": ({"use_beam_search": True}, "use_beam_search", "beam search"),
    "unknown": ({"foo": 1}, "foo", "unrecognized"),
    "model": ({"model": "gpt-5"}, "model", "does not exist"),
    "type": ({"max_tokens": "x"}, "max_tokens", "int"),
    "boolean": ({"n": True}, "n", "int"),
    "temperature": ({"temperature": -1}, "temperature", "temperature must be"),
    "top_p": ({"top_p": 2}, "top_p", "top_p must be"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens", "at least 1"),
    "many tokens": ({"max_tokens": 91}, "max_tokens", "at most 90"),
    "penalty": ({"presence_penalty": 3}, "presence_penalty", "must be in"),
    "min_tokens": ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "min_tokens must be"),
    "outputs": ({"n": 5}, "n", "1 to 4 outputs"),
    "no outputs": ({"n": 0}, "n", "1 to 4 outputs"),
    "greedy n": ({"n": 2, "temperature": 0}, "n", "temperature 0"),
    "stops": ({"stop": ["a"] * 4}, "stop", "at most 3"),
    "empty stop": ({"stop": [""]}, "stop", "not empty"),
    "logit_bias": ({"logit_bias": {str(i): 1 for i in range(6)}}, "logit_bias", "at most 5"),
    "logit_bias key": ({"logit_bias": {"a": 1}}, "logit_bias", "token ids as keys"),
    "logit_bias id": ({"logit_bias": {"9999": 1}}, "logit_bias", "expected ids from 0"),
    "no allowed tokens": ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    "logprobs": ({"logprobs": True, "top_logprobs": 21}, "logprobs", "max_logprobs"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    "unknown stream option": (
        {"stream_options": {"include_usag": True}, "stream": True},
        "stream_options.include_usag",
        "unrecognized",
    ),
    "stream option": (
        {"stream_options": {"continuous_usage_stats": True}, "stream": True},
        "stream_options.continuous_usage_stats",
        "not supported: the last event",
    ),
    "stream_options": ({"stream_options": {}}, "stream_options", "stream"),
    "response_format": ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    "format field": (
        {"response_format": {"type": "json_object", "schema": {}}},
        "response_format.schema",
        "unrecognized",
    ),
    "text field": ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "unrecog"),
    "schema format field": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}},
        "response_format.strict",
        "unrecognized",
    ),
    "schema field": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "stict": True}}},
        "response_format.json_schema.stict",
        "unrecognized",
    ),
    "schema": ({"guided_json": {"type": "nope"}}, "structured_outputs", "json"),
    "regex": ({"guided_regex": "("}, "structured_outputs", "regex"),
    "large schema": ({"guided_json": {"enum": ["a" * 400]}}, "guided_json", "at most 300 bytes"),
    "two formats": ({"guided_regex": "a", "guided_json": {}}, "guided_json", "one format"),
    "structured": ({"structured_outputs": {"xml": 1}}, "structured_outputs", "expected json"),
    "tools": ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools", "entry 0"),
    "tool field": (
        {"tools": [{"type": "function", "function": {"name": "f"}, "strict": True}]},
        "tools[0].strict",
        "unrecognized",
    ),
    "function field": (
        {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
        "tools[0].function.paramters",
        "unrecognized",
    ),
    "tool_choice field": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}, "name": "f"}},
        "tool_choice.name",
        "unrecognized",
    ),
    "chosen function field": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "strict": True}}},
        "tool_choice.function.strict",
        "unrecognized",
    ),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice", "required with tools"),
    "template variables": ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "not tools"),
    "no messages": ({"messages": []}, "messages", "at least one"),
    "role": ({"messages": [{"content": "a"}]}, "messages", "role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "text only",
    ),
    "long prompt": ({"messages": [{"role": "user", "content": "ab" * 60}]}, "messages", "at most 100 tokens"),
    "deep": ({"chat_template_kwargs": {"a": nested(12)}}, None, "at most 12"),
    "very deep": ({"messages": nested(500)}, None, "nested"),
}
"""For each case: fields of a chat, the wrong parameter, and a part of the message."""


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_parameters(server: Running, name: str) -> None:
    fields, param, message = REFUSED[name]
    for stream in (False, True)[: 1 if "stream_options" in fields else 2]:
        with server.client() as client:
            response = client.post("/v1/chat/completions", json={**CHAT, "stream": stream, **fields})
        error = response.json()["error"]
        assert response.status_code == (404 if name == "model" else 400)
        assert message in error["message"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "expected a text"),
        ({"prompt": ""}, "at least one token"),
        ({"prompt": ["a", 1]}, "expected a text"),
        ({"prompt": [True]}, "expected a text"),
        ({"prompt": [5000]}, "ids from 0"),
        ({"prompt": [-1]}, "ids from 0"),
        ({"prompt": [10**30]}, "64 bits"),
        ({"prompt": ["a"] * 5}, "1 to 4 outputs"),
        ({"prompt": "a", "suffix": "b"}, "not supported"),
        ({"prompt": "a", "best_of": 2}, "not supported"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "logprobs": 100}, "max_logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "at least 1"),
    ],
)
def test_wrong_completions(server: Running, fields: dict[str, Any], message: str) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", json=fields)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_default_number_of_tokens_of_a_chat(server: Running) -> None:
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={**CHAT, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == LIMITS["max_output_tokens"]


def test_accepted_fields_without_effect(server: Running) -> None:
    fields = {"user": "u", "metadata": {}, "store": False, "service_tier": "auto", "best_of": 1, "stop": None}
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields}).status_code == 200


def test_accepted_fields_of_nested_objects(server: Running) -> None:
    schema = {"name": "a", "description": "b", "schema": {"const": 1}, "strict": True}
    function = {"name": "f", "return": "b", "strict": False}
    bodies: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"response_format": {"type": "text", "json_schema": None}},
        {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False, "x": None}},
    ]
    with server.client() as client:
        for fields in bodies:
            response = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2, **fields})
            assert response.status_code == 200, response.text
        tools = [{"type": "function", "function": {"name": "f"}, "x": 1}]
        response = client.post("/tokenize", json={**CHAT, "tools": tools})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].x")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 10_000,
        b'{"prompt":' + b"[" * 5_000,
        b'{"prompt": 1e999}',
    ],
)
def test_malformed_bodies(server: Running, body: bytes) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_media_type_path_and_method(server: Running) -> None:
    with server.client() as client:
        content = json.dumps({"prompt": "a"})
        for headers in ({}, {"Content-Type": "text/plain"}):
            assert client.post("/v1/completions", content=content, headers=headers).status_code == 415
        for response, status in ((client.get("/v1/nope"), 404), (client.get("/v1/completions"), 405)):
            assert response.status_code == status
            assert response.json()["error"]["type"] == "invalid_request_error"


def test_large_bodies(server: Running) -> None:
    text = "a" * 30_000
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": text}).status_code == 413
        chunked = (part.encode() for part in ('{"prompt": "', text, '"}'))
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=chunked, headers=headers).status_code == 413
    head = request(b"").replace(b"Content-Length: 0", b"Content-Length: 99999999999")
    with server.connect() as raw:
        raw.sendall(head + b"a" * 100_000)
        assert b" 413 " in received(raw)


def received(raw: socket.socket) -> bytes:
    """Return the bytes until the server closes the connection."""
    result = b""
    while part := raw.recv(2**16):
        result += part
    return result


def test_slow_header_and_body(server: Running) -> None:
    with server.connect() as silent, server.connect() as slow_header, server.connect() as slow_body:
        began = time.monotonic()
        slow_header.sendall(b"POST /v1/completions HTTP/1.1\r\nHost")
        slow_body.sendall(request(b'{"prompt": "a"}')[:-4])
        assert b" 408 " in received(slow_body)
        for raw in (silent, slow_header):
            with contextlib.suppress(ConnectionResetError):
                assert received(raw) == b""
        assert 0.5 < time.monotonic() - began < 10
    with server.connect() as later:  # the second request of a connection has the same limit
        later.sendall(request(b'{"prompt": "a", "max_tokens": 1}'))
        assert b" 200 " in later.recv(2**16)
        later.sendall(b"POST /v1")
        with contextlib.suppress(ConnectionResetError):
            received(later)


def test_malformed_http(server: Running) -> None:
    for data in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000, bytes(range(256)) + b"\r\n\r\n"):
        with server.connect() as raw:
            try:
                raw.sendall(data)
                answer = received(raw)
            except (ConnectionResetError, BrokenPipeError):
                answer = b""
            assert answer == b"" or b" 400 " in answer
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    bodies = [json.dumps({"prompt": "a", "max_tokens": n, "ignore_eos": True}).encode() for n in (3, 1, 2)]
    with server.connect() as raw:
        raw.sendall(b"".join([request(body) for body in bodies[:-1]] + [request(bodies[-1], "Connection: close")]))
        answer = received(raw)
    counts = re.findall(rb'"completion_tokens":(\d+)', answer)
    assert [int(count) for count in counts] == [3, 1, 2]


def test_half_closed_connection_aborts_the_request(server: Running) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 90, "ignore_eos": True, "stream": True}).encode()
    with server.connect() as raw:
        raw.sendall(request(body))
        raw.shutdown(socket.SHUT_WR)
        received(raw)
    server.wait_until_idle(5)


def test_number_of_connections(server: Running) -> None:
    raws = [server.connect() for _ in range(25)]
    time.sleep(0.3)
    try:
        closed = 0
        for raw in raws:
            raw.settimeout(0.05)
            try:
                closed += raw.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionResetError:
                closed += 1
        assert closed >= 5
    finally:
        for raw in raws:
            raw.close()
