"""/v1/chat/completions with the `openai` client: messages, tools, log probabilities and reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pallas_attn.models.checkpoints.detokenizer import token_bytes
from pallas_attn.models.llm import LLM, Generation, SamplingParams
from pallas_attn.models.server.formats import ParserNames
from tests.kit.slow_cases import slow_cases
from tests.models import llm_case
from tests.server.server_case import NAME, Running, events, load, serving

MESSAGES: list[Any] = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
LARGE = {"max_model_len": 640, "num_pages": 320, "max_num_seqs": 2, "decode_buckets": (2,)}
DRAW: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
    },
]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder, **LARGE)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Generation]:
    """Answers of the LLM, which it computes before the server uses it."""
    params = SamplingParams(**DRAW, n=2, logprobs=3)
    suffix = llm.chat(MESSAGES, SamplingParams(**DRAW), suffix="!", reasoning_effort="low")
    return [*llm.chat([MESSAGES, MESSAGES[1:]], params), *suffix]


@pytest.fixture(scope="module")
def shared(folder: Path, llm: LLM, expected: list[Generation]) -> Iterator[Running]:
    with serving(folder, llm=llm) as running:
        yield running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai()


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=messages, **{**DRAW, **fields})


def deltas(client: openai.OpenAI, **fields: Any) -> dict[int, dict[str, Any]]:
    """Return the merged deltas of a stream for each output."""
    merged: dict[int, dict[str, Any]] = {}
    for chunk in chat(client, stream=True, **fields):
        for choice in chunk.choices:
            new = {"content": "", "calls": [], "reasoning": "", "logprobs": [], "reasons": []}
            output = merged.setdefault(choice.index, new)
            if not output["reasons"]:
                assert choice.delta.role == "assistant"
            output["content"] += choice.delta.content or ""
            output["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            output["logprobs"] += [] if choice.logprobs is None else choice.logprobs.content
            output["reasons"].append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    output["calls"].append([call.id, call.function.name, ""])
                output["calls"][call.index][2] += call.function.arguments
    return merged


def test_answers_are_those_of_the_llm(client: openai.OpenAI, expected: list[Generation]) -> None:
    result = chat(client, n=2)
    for choice, output in zip(result.choices, expected[0].outputs, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", output.text)
        assert (choice.index, choice.finish_reason) == (output.index, output.finish_reason)
    assert result.usage.prompt_tokens == len(expected[0].prompt_token_ids)
    assert result.usage.completion_tokens == sum(len(output.token_ids) for output in expected[0].outputs)
    merged = deltas(client, n=2)
    assert [merged[i]["content"] for i in range(2)] == [output.text for output in expected[0].outputs]
    reasons = [merged[i]["reasons"] for i in range(2)]
    assert [r[-1] for r in reasons] == [output.finish_reason for output in expected[0].outputs]
    assert all(reason is None for r in reasons for reason in r[:-1])


def test_forms_of_messages(client: openai.OpenAI, expected: list[Generation]) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert chat(client, parts).choices[0].message.content == expected[1].text
    assert chat(client, MESSAGES[1:], max_tokens=None, max_completion_tokens=12).choices[0].message.content == (
        expected[1].text
    )
    extra = {"chat_template_kwargs": {"suffix": "!"}}
    assert chat(client, reasoning_effort="low", extra_body=extra).choices[0].message.content == expected[2].text


def test_logprobs(client: openai.OpenAI, llm: LLM, expected: list[Generation]) -> None:
    output = expected[0].outputs[0]
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert output.logprobs is not None
    assert llm.tokenizer is not None
    contents = token_bytes(llm.tokenizer.pieces)
    for entry, token, table in zip(content, output.token_ids, output.logprobs, strict=True):
        assert (entry.token, entry.logprob) == (table[token].decoded_token, pytest.approx(table[token].logprob))
        assert entry.bytes == [*contents.get(token, b"")]  # the model has more tokens than the tokenizer
        likeliest = [other.decoded_token for other in table.values() if other.rank <= 2]
        assert sorted(top.token for top in entry.top_logprobs) == sorted(likeliest)
    streamed = deltas(client, logprobs=True, top_logprobs=2)[0]["logprobs"]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    (forced,) = chat(client, logprobs=True, logit_bias={"259": 100}, max_tokens=1).choices[0].logprobs.content
    assert (forced.token, forced.bytes) == ("hello", [*b"hello"])


def test_bytes_of_tokens_that_are_parts_of_a_character(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "extra_body": {"guided_regex": "\u00e9"}}
    (choice,) = chat(client, **fields).choices
    assert choice.message.content == "\u00e9"
    first, second = choice.logprobs.content[:2]
    assert (first.token, first.bytes, second.token, second.bytes) == ("\ufffd", [0xC3], "\ufffd", [0xA9])
    fragments = [top.bytes for top in (*first.top_logprobs, *second.top_logprobs) if top.token == "\ufffd"]
    assert fragments
    assert all(len(content) == 1 and content[0] >= 0x80 for content in fragments)


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    (choice,) = chat(client, response_format=schema, max_tokens=None).choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["city"] in ("Bonn", "Rome")


@slow_cases("choice1")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tools_of_a_model_without_a_format(client: openai.OpenAI, choice: Any) -> None:
    """Without a format of tool calls in the chat template, the output is JSON."""
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": None}
    (answer,) = chat(client, **fields).choices
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert answer.message.content is None
    for call in answer.message.tool_calls:
        assert call.function.name in ("weather", "clock")
        arguments = json.loads(call.function.arguments)
        assert arguments == {} if call.function.name == "clock" else arguments["city"] in ("Bonn", "Rome")
    merged = deltas(client, **fields)[0]
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert [(name, arguments) for _, name, arguments in merged["calls"]] == calls
    assert merged["reasons"][-1] == answer.finish_reason
    assert merged["content"] == ""


def test_one_call_without_parallel_calls(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": None,
        "parallel_tool_calls": False,
    }
    assert len(chat(client, **fields).choices[0].message.tool_calls) == 1


def test_tools_in_the_template(server: Running) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "return_token_ids": True, "max_tokens": 1}
    with server.client() as client:
        forced = client.post("/v1/chat/completions", json={**body, "tool_choice": "required"}).json()
        none = client.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).json()
    assert forced["usage"]["prompt_tokens"] > none["usage"]["prompt_tokens"] + 50


def test_tools_without_a_known_format_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        chat(client, tools=TOOLS)


def test_earlier_tool_calls(server: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "9"},
    ]
    with server.client() as client:
        body: dict[str, Any] = {"messages": messages, "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        body["messages"][2]["tool_calls"] = [1]
        assert client.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize(
    ("families", "thought", "call"),
    [
        (("hermes", "think"), "<think>a b</think>\n", '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'),
        pytest.param(
            *(("gemma4", "gemma4"), "<|channel>thought\na b\n<channel|>", "<|tool_call>call:clock{}<tool_call|>"),
            marks=pytest.mark.slow,  # test_tool_calls.py and test_reasoning.py test the parsers without a model
        ),
    ],
)
def test_reasoning_and_tool_calls_of_a_model_with_formats(
    folder: Path, families: tuple[str, str], thought: str, call: str
) -> None:
    """Grammars make the random model write in the formats."""
    grammar = f"start: {json.dumps(f'{thought}c')} {json.dumps(call)}?"
    reasoning = f"start: {json.dumps(f'{thought}c d')}"
    with serving(folder, llm=load(folder, **LARGE), families=ParserNames(*families)) as own:
        client = own.openai()
        (choice,) = chat(client, max_tokens=100, extra_body={"guided_grammar": reasoning}).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("a b", "c d")
        merged = deltas(client, max_tokens=100, extra_body={"guided_grammar": reasoning})[0]
        assert (merged["reasoning"], merged["content"]) == ("a b", "c d")
        hidden = {"guided_grammar": reasoning, "include_reasoning": False}
        assert not hasattr(chat(client, max_tokens=100, extra_body=hidden).choices[0].message, "reasoning_content")
        bias = {str(llm_case.EOS): -100}  # the optional call is generated
        fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 150, "logit_bias": bias}
        (choice,) = chat(client, **fields, extra_body={"guided_grammar": grammar}).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("a b", "c")
        (found,) = choice.message.tool_calls
        assert (found.function.name, found.function.arguments) == ("clock", "{}")
        for forced in ("required", {"type": "function", "function": {"name": "weather"}}):
            text = deltas(client, tools=TOOLS[:1], tool_choice=forced, max_tokens=100, parallel_tool_calls=False)[0]
            if text["reasons"][-1] != "length":  # a random model may reason without end
                ((_, name, arguments),) = text["calls"]
                assert name == "weather"
                assert json.loads(arguments)["city"] in ("Bonn", "Rome")
        own.wait_until_idle()


def test_stream_events_have_one_id(server: Running) -> None:
    with server.client() as client:
        body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        parts = events(client.post("/v1/chat/completions", json=body).text)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    assert parts[-1]["usage"]["completion_tokens"] <= 3
