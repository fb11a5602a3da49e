"""Paths of generated tokens from the engine to a client, and the objects of responses."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Sequence
from typing import Any

import prometheus_client
import pytest

from pallas_attn.models.llm import Delta
from pallas_attn.models.server.engine_client import ServedRequest
from pallas_attn.models.server.messages import Part
from pallas_attn.models.server.metrics import Histogram, Metrics
from pallas_attn.models.server.options import ApiError
from pallas_attn.models.server.protocol import CompletionRequest
from pallas_attn.models.server.responses import CompletionReply


def part(token: int, reason: Any = None) -> Part:
    return Part(0, Delta(0, f"{token} ", [token], reason))


def read(steps: Sequence[Any], *, is_streamed: bool = True, sends: bool = True) -> tuple[list[int], list[list[int]]]:
    """Deliver the parts of steps, and let the reader run after each step.

    Args:
      steps: lists of parts, or None to block `send_now` from now on.
      is_streamed: as in `ServedRequest`.
      sends: whether the reader sets `send_now`.

    Returns:
      Tokens that `send_now` has sent, and the batches of tokens that the reader got.
    """
    sent, got = list[int](), list[list[int]]()

    async def run() -> None:
        request, metrics, blocked = ServedRequest([], "", 0.0, is_streamed=is_streamed), Metrics("m"), False

        def send_now(parts: Sequence[Part]) -> bool:
            if any(part.delta.token_ids == [99] for part in parts):
                raise RuntimeError("a fault of the test")
            if not blocked:
                sent.extend(token for part in parts for token in part.delta.token_ids)
            return not blocked

        async def reader() -> None:
            async for parts in request.batches():
                got.append([token for part in parts for token in part.delta.token_ids])
                if sends:
                    request.send_now = send_now

        task = asyncio.create_task(reader())
        await asyncio.sleep(0)
        for parts in steps:
            if parts is None:
                blocked = True
                continue
            request.receive(parts, 1.0, metrics)
            if len(parts) != 2:  # the reader does not run after steps with two parts
                await asyncio.sleep(0)
        request.end(None)
        await task

    asyncio.run(run())
    return sent, got


def test_parts_are_sent_without_the_reader_until_an_output_ends():
    assert read([[part(1)], [part(2)], [part(3)], [part(4, "length")]]) == ([2, 3], [[1], [4]])
    assert read([[part(1)], [part(2)], [part(3, "stop")]], sends=False) == ([], [[1], [2], [3]])


def test_parts_wait_for_the_reader_if_earlier_parts_wait():
    # The reader has not run after the first step, and send_now must not overtake its parts.
    assert read([[part(0)], [part(1), part(2, "stop")], [part(3)], [part(4)]]) == ([4], [[0], [1, 2, 3]])
    assert read([[part(1)], [part(2)], None, [part(3)], [part(4)]]) == ([2], [[1], [3], [4]])


def test_parts_wait_for_a_reader_that_writes_earlier_parts():
    async def run() -> None:
        request, metrics = ServedRequest([], "", 0.0, is_streamed=True), Metrics("m")
        request.send_now = lambda parts: pytest.fail("the reader has not written the first part")
        batches = request.batches()
        request.receive([part(1)], 1.0, metrics)
        assert [one.delta.text for one in await anext(batches)] == ["1 "]
        request._changed.clear()  # as after a wait whose parts the reader has taken
        request.receive([part(2)], 1.0, metrics)
        assert [one.delta.text for one in await anext(batches)] == ["2 "]

    asyncio.run(run())


def test_parts_of_a_response_without_stream_wait_for_the_end_of_an_output():
    steps = [[part(1)], [part(2)], [part(3, "stop")], [part(4)], [part(5, "stop")]]
    assert read(steps, is_streamed=False, sends=False) == ([], [[1, 2, 3], [4, 5]])


def test_exception_of_a_direct_send_ends_the_reader():
    with pytest.raises(RuntimeError, match="a fault of the test"):
        read([[part(1)], [part(99)], [part(2)]])


def test_unread_tokens_are_those_of_streams_that_nobody_has_taken():
    async def unread(is_streamed: bool) -> list[int]:
        request, result = ServedRequest([], "", 0.0, is_streamed=is_streamed), []
        for token in range(3):
            request.receive([part(token)], 1.0, Metrics("m"))
            result.append(request.num_unread)
        return result

    assert asyncio.run(unread(True)) == [1, 2, 3]
    assert asyncio.run(unread(False)) == [0, 0, 0]


def reply(**fields: Any) -> CompletionReply:
    request = CompletionRequest(prompt="a", **fields)
    prompts: Any = [types.SimpleNamespace(ids=[1])]
    return CompletionReply(request, prompts, "100%b {model}")


def test_events_and_the_whole_response_have_the_same_content():
    parts = [part(1), part(2), part(3, "stop")]
    streamed = reply(stream=True, return_token_ids=True, stream_options={"include_usage": True})
    *texts, empty = streamed.events(parts).decode().split("\n\n")
    objects = [json.loads(text.removeprefix("data: ")) for text in texts]
    whole = reply(return_token_ids=True).result(parts)
    assert empty == ""
    assert {one["model"] for one in objects} == {whole["model"]} == {"100%b {model}"}
    assert len({one["id"] for one in objects}) == 1
    assert [one["usage"] for one in objects] == [None] * 3
    (choice,), streams = whole["choices"], [one["choices"][0] for one in objects]
    assert choice["text"] == "".join(one["text"] for one in streams) == "1 2 3 "
    assert choice["token_ids"] == [token for one in streams for token in one["token_ids"]] == [1, 2, 3]
    assert [one["finish_reason"] for one in streams] == [None, None, "stop"]
    assert (choice["finish_reason"], whole["usage"]["completion_tokens"]) == ("stop", 3)
    with pytest.raises(ApiError, match="NaN"):
        reply().result([part(1), part(2, "nonfinite")])


def test_choices_of_several_outputs_are_in_order():
    parts = [Part(prompt, Delta(0, f"{prompt}", [prompt], "stop")) for prompt in (1, 0)]
    assert [choice["text"] for choice in reply(n=1).result(parts)["choices"]] == ["0", "1"]


def test_histogram_equals_the_histogram_of_prometheus_client():
    bounds, values = (0.005, 0.1, 1.0, 2.5), (0.0, 0.005, 0.006, 0.1, 0.5, 2.5, 2.6, 1e9)
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    own = Histogram("name_seconds", "A text.", "m", bounds)
    ours.register(own)
    other = prometheus_client.Histogram("name_seconds", "A text.", ["model_name"], buckets=bounds, registry=theirs)
    for value in values:
        own.observe(value)
        other.labels("m").observe(value)
    expected = prometheus_client.generate_latest(theirs).decode().splitlines()
    assert prometheus_client.generate_latest(ours).decode().splitlines() == [x for x in expected if "_created" not in x]
