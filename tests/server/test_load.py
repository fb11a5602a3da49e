"""Many concurrent requests: each gets one answer with the tokens of the offline `LLM`, and nothing leaks.

Clients disconnect at random times, and in one test steps of the engine fail.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from pallas_attn.models.llm import LLM, SamplingParams
from tests.server.server_case import Running, load, serving

LARGE: dict[str, Any] = {"num_pages": 768, "max_num_seqs": 32, "decode_buckets": (32,), "max_batched_tokens": 64}
LARGE["prefill_buckets"] = (64,)


class Case(NamedTuple):
    """A request, and the tokens and the finish reason of its answer."""

    body: dict[str, Any]
    tokens: list[int]
    reason: str


class Answer(NamedTuple):
    """A response that a client has received.

    Attributes:
      status: HTTP status; 0 if the client disconnected before it.
      id: id of the response.
      tokens: generated tokens.
      reasons: finish reasons.
      error: code of the error; None without error.
      is_aborted: whether the client has disconnected.
    """

    status: int
    id: str = ""
    tokens: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    error: str | None = None
    is_aborted: bool = False


def make_cases(folder: Path, number: int) -> list[Case]:
    """Return requests, half of them with a common prefix, and the answers of an `LLM` without server."""
    rng = random.Random(number)
    prefix = [rng.randrange(32, 127) for _ in range(24)]
    prompts, params = [], []
    for i in range(number):
        own = [rng.randrange(32, 127) for _ in range(rng.randint(1, 24))]
        prompts.append(prefix + own if i % 2 else own)
        params.append(SamplingParams(max_tokens=rng.randint(1, 16), temperature=i % 3 / 2, seed=i))
    with load(folder, **LARGE) as llm:
        outputs = [generation.outputs[0] for generation in llm.generate(prompts, params)]
    cases = []
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        body = {"prompt": prompt, "max_tokens": one.max_tokens, "temperature": one.temperature, "seed": one.seed}
        cases.append(Case({**body, "return_token_ids": True}, output.token_ids, str(output.finish_reason)))
    return cases


async def ask(port: int, body: dict[str, Any], abort_after: int | None = None) -> Answer:
    """Send a request, and read its answer to the end of the connection.

    Args:
      port: port of the server.
      body: the request.
      abort_after: number of lines of the response after which the client disconnects; None to read everything.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        lines: list[bytes] = []
        while abort_after is None or len(lines) < abort_after:
            line = await reader.readline()
            if not line:
                return read_answer(lines)
            lines.append(line)
        writer.transport.abort()
        return Answer(0, is_aborted=True)
    finally:
        writer.close()


def read_answer(lines: Sequence[bytes]) -> Answer:
    """Read a whole response. It must have one head and one end."""
    statuses = [line for line in lines if line.startswith(b"HTTP/1.1 ")]
    assert len(statuses) == 1, lines
    status = int(statuses[0].split()[1])
    objects = [line.removeprefix(b"data: ") for line in lines if line.startswith((b"data: ", b"{"))]
    if any(line.startswith(b"data: ") for line in lines):
        assert [i for i, one in enumerate(objects) if one.startswith(b"[DONE]")] == [len(objects) - 1], lines
        objects.pop()
    parsed = [json.loads(one) for one in objects]
    errors = [one["error"]["code"] for one in parsed if "error" in one]
    assert len(errors) <= 1
    choices = [choice for one in parsed for choice in one.get("choices", ())]
    ids = {one["id"] for one in parsed if "id" in one}
    assert len(ids) <= 1
    tokens = tuple(token for choice in choices for token in choice["token_ids"])
    reasons = tuple(choice["finish_reason"] for choice in choices if choice["finish_reason"])
    return Answer(status, "".join(ids), tokens, reasons, errors[0] if errors else None)


async def send_all(
    running: Running, cases: Sequence[Case], number: int, concurrent: int, aborted: float, check: Callable[[int], None]
) -> collections.Counter[str]:
    """Send requests, and check the answers.

    Args:
      running: the server.
      cases: requests that are sent in a random order.
      number: number of requests.
      concurrent: number of requests at the same time.
      aborted: share of the requests whose clients disconnect.
      check: function that is called with the number of answers after each answer.

    Returns:
      Number of answers by kind: right, aborted, or the code of an error.
    """
    rng, kinds, ids = random.Random(number), collections.Counter[str](), set[str]()
    gate = asyncio.Semaphore(concurrent)

    async def one(i: int) -> None:
        case = cases[rng.randrange(len(cases))]
        streams = rng.random() < 0.8
        abort_after = rng.randrange(30) if rng.random() < aborted else None
        async with gate:
            answer = await asyncio.wait_for(ask(running.port, {**case.body, "stream": streams}, abort_after), 300)
        if answer.is_aborted:
            kinds["aborted"] += 1
        elif answer.error is not None:
            assert answer.tokens == tuple(case.tokens[: len(answer.tokens)])
            kinds[answer.error] += 1
        else:
            assert answer.status == 200
            assert answer.id not in ids
            assert (answer.tokens, answer.reasons) == (tuple(case.tokens), (case.reason,)), case
            ids.add(answer.id)
            kinds["right"] += 1
        check(kinds.total())

    async with asyncio.TaskGroup() as group:
        for i in range(number):
            group.create_task(one(i))
    assert kinds.total() == number
    return kinds


def assert_nothing_leaked(running: Running) -> None:
    """Check that no request owns pages or a request slot, and that no object waits for a client."""
    running.wait_until_idle()
    llm, thread, engine = running.llm, running.thread, running.server.engine
    (scheduler,) = llm.engine._ranks.schedulers
    assert sorted(scheduler._free_slots) == [*range(llm.engine.config.max_num_seqs)]
    assert not any((llm._open, llm._waiting, llm._ended))
    assert not any((thread._open, thread._closing, thread._preparing, engine._requests))
    with running.client() as client:
        text = client.get("/metrics").text
    for name in ("running", "waiting"):
        assert f'pallas_attn_num_requests_{name}{{model_name="tiny"}} 0.0' in text


@pytest.fixture(scope="module")
def cases(folder) -> list[Case]:
    return make_cases(folder, 40)


@pytest.fixture
def running(folder) -> Iterator[Running]:
    limits = {"max_requests": 2000, "max_waiting": 2000}
    with serving(folder, limits, llm=load(folder, **LARGE)) as running:
        yield running


def fail_steps(llm: LLM, seed: int, share: float) -> collections.Counter[str]:
    """Let steps of an engine fail, before or after the work. Return the number of failures."""
    rng, step, failures = random.Random(seed), llm.engine.step, collections.Counter[str]()
    has_failed = False

    def failing_step() -> Any:
        nonlocal has_failed
        has_failed = not has_failed and rng.random() < share
        if has_failed and rng.random() < 0.5:
            failures["before"] += 1
            raise RuntimeError("a fault of the test")
        result = step()
        if has_failed:
            failures["after"] += 1
            raise RuntimeError("a fault of the test")
        return result

    llm.engine.step = failing_step
    return failures


def test_60_concurrent_requests(running, cases):
    kinds = asyncio.run(send_all(running, cases, 60, 60, 0.2, lambda _: None))
    assert set(kinds) == {"right", "aborted"}
    assert kinds["right"] > 40
    assert_nothing_leaked(running)


@pytest.mark.slow
def test_500_concurrent_streams(running, cases):
    kinds = asyncio.run(send_all(running, cases, 500, 500, 0.1, lambda _: None))
    assert set(kinds) == {"right", "aborted"}
    assert kinds["right"] > 400
    assert_nothing_leaked(running)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_20000_requests_with_aborts_and_faults(running, cases, capsys):
    number, process, sizes = 20_000, psutil.Process(), list[int]()
    failures = fail_steps(running.llm, 1, 0.005)

    def measure(answered: int) -> None:
        if answered % (number // 10) == 0:
            gc.collect()
            sizes.append(process.memory_info().rss >> 20)

    kinds = asyncio.run(send_all(running, cases, number, 64, 0.1, measure))
    assert_nothing_leaked(running)
    with capsys.disabled():
        print(f"\nanswers: {dict(kinds)}; failed steps: {dict(failures)}; resident memory in MiB: {sizes}")
    assert set(kinds) == {"right", "aborted", "engine_error"}
    assert kinds["right"] > number // 2
    assert min(failures["before"], failures["after"]) > 3
    assert sizes[-1] - sizes[2] < 32
