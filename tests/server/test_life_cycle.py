"""Aborts, overload, API keys, faults of the engine, and the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import llguidance
import pytest

from pallas_attn.models.checkpoints import Tokenizer, TokenizerError
from pallas_attn.models.checkpoints.tokenizer import GrammarChecker
from pallas_attn.models.engine.step.compiler import StepCompiler
from pallas_attn.models.llm import LLM, SamplingParams, StructuredOutputs, token_filters
from pallas_attn.models.llm.token_filters import GrammarFilter, GrammarTokenizer
from pallas_attn.models.server import server as server_module
from pallas_attn.models.server.app import Api
from pallas_attn.models.server.engine_thread import EngineThread
from pallas_attn.models.server.messages import Abort, Add, Prompt, StepResults, frame
from pallas_attn.models.server.options import ApiError, ServerLimits, ServerOptions
from pallas_attn.models.server.server import Server, listen
from tests.server.server_case import DEFAULTS, Running, events, load, request, serving

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 120, "ignore_eos": True, "seed": 1}


@pytest.fixture
def llm(folder: Path) -> LLM:
    return load(folder)


@pytest.fixture
def server(folder: Path, llm: LLM) -> Iterator[Running]:
    with serving(folder, llm=llm) as running:
        yield running


class Steps:
    """Replaces `LLM.step` of a server, so that a test can delay steps and let them fail.

    Attributes:
      count: number of steps.
      delay_s: seconds before each step.
      errors: errors that the next steps raise.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.count, self.delay_s, self.errors = 0, 0.0, list[Exception]()
        step = llm.step

        def replaced() -> None:
            self.count += 1
            time.sleep(self.delay_s)
            if self.errors:
                raise self.errors.pop(0)
            step()

        monkeypatch.setattr(llm, "step", replaced)


@pytest.fixture
def steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(llm, monkeypatch)


def complete(server: Running, **fields: Any) -> httpx2.Response:
    with server.client() as client:
        return client.post("/v1/completions", json={**LONG, **fields})


class Background:
    """Requests in threads.

    Attributes:
      responses: responses that have arrived.
    """

    def __init__(self, server: Running, number: int, **fields: Any):
        self.responses: list[httpx2.Response] = []
        self._threads = [
            threading.Thread(target=lambda: self.responses.append(complete(server, **fields))) for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> list[int]:
        """Wait for all responses, and return their statuses."""
        for thread in self._threads:
            thread.join(60)
        return sorted(response.status_code for response in self.responses)


def wait_for(condition: Any, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def metric(server: Running, name: str) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


# --- disconnects and slow clients


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_pages_before_the_next_step(server: Running, steps: Steps, stream: bool) -> None:
    steps.delay_s = 0.1
    body = json.dumps({**LONG, "stream": stream}).encode()
    with server.connect() as raw:
        raw.sendall(request(body))
        wait_for(lambda: steps.count >= 4)
        assert server.llm.engine.stats().used_pages > 0
        engine = server.server.engine
    wait_for(lambda: engine.num_unfinished == 0)
    count = steps.count
    server.wait_until_idle()
    assert steps.count <= count + 2  # the current step, and the step that reads its results
    assert metric(server, 'pallas_attn_request_success_total{finished_reason="abort"') == 1


@pytest.mark.parametrize(
    ("target", "name"), [(lambda server: server.llm, "prepare"), (lambda server: Tokenizer, "encode")]
)
def test_disconnect_during_preparation(
    server: Running, monkeypatch: pytest.MonkeyPatch, target: Any, name: str
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    prepare = getattr(target(server), name)

    def slow(*arguments: Any, **options: Any) -> Any:
        entered.set()
        go_on.wait(20)
        return prepare(*arguments, **options)

    monkeypatch.setattr(target(server), name, slow)
    with pytest.raises(httpx2.TimeoutException), server.client(timeout=0.5) as client:
        client.post("/v1/completions", json=LONG)
    assert entered.is_set()
    go_on.set()
    server.wait_until_idle()
    monkeypatch.undo()
    assert complete(server, max_tokens=1).status_code == 200


@pytest.mark.parametrize("write_s", [pytest.param(60.0, marks=pytest.mark.slow), 0.5])
def test_reader_that_does_not_read_is_aborted(folder: Path, llm: LLM, steps: Steps, write_s: float) -> None:
    steps.delay_s = 0.02
    limits = {"max_unread_tokens": 20, "write_s": write_s}
    body = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 4, "temperature": 1.0}).encode()
    with serving(folder, limits, llm=llm, send_buffer=4096) as server, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(request(body))
        wait_for(lambda: metric(server, 'pallas_attn_request_success_total{finished_reason="abort"') == 1)
        server.wait_until_idle()
        if write_s < 1:
            wait_for(lambda: metric(server, 'pallas_attn_http_requests_total{path="/v1/completions"') == 1)
        text = b""
        with contextlib.suppress(ConnectionResetError):
            while b"[DONE]" not in text and (part := raw.recv(2**16)):
                text += part
        assert (b"slow_reader" in text) == (b"[DONE]" in text) == (write_s > 1)
        assert complete(server, max_tokens=1).status_code == 200


# --- limits


def test_overload(folder: Path, llm: LLM, steps: Steps) -> None:
    with serving(folder, {"max_requests": 6, "max_waiting": 3}, llm=llm) as server:
        steps.delay_s = 0.2
        engine = server.server.engine
        first = Background(server, 3, max_tokens=30)
        wait_for(lambda: engine.num_unfinished == 3 and engine.num_waiting == 0)
        second = Background(server, 3, max_tokens=30)
        wait_for(lambda: engine.num_unfinished == 6)
        response = complete(server)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        steps.delay_s = 0.0
        assert first.join() + second.join() == [200] * 6
        steps.delay_s = 1.0
        waiting = Background(server, 3, max_tokens=2)
        wait_for(lambda: engine.num_waiting == 3)
        assert complete(server).status_code == 429
        steps.delay_s = 0.0
        assert waiting.join() == [200] * 3
        server.wait_until_idle()


def test_time_of_a_request(folder: Path, llm: LLM, steps: Steps) -> None:
    with serving(folder, {"request_s": 1.0}, llm=llm) as server:
        steps.delay_s = 0.1
        response = complete(server)
        assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")
        *parts, last = events(complete(server, stream=True).text)
        assert parts
        assert last["error"]["code"] == "timeout"
        steps.delay_s = 0.0
        server.wait_until_idle()


@pytest.mark.slow
def test_time_of_a_request_includes_the_time_of_its_body(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, slow_s = Tokenizer.encode, 1.0

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(slow_s)
        return encode(*arguments, **options)

    data = request(b'{"prompt": "hello"}', "Connection: close")
    data = data.replace(b"/v1/completions", b"/tokenize")  # after the preparation, a completion has a deadline anyway
    with serving(folder, {"request_s": 1.5}, llm=llm) as server, server.connect() as raw, server.connect() as silent:
        monkeypatch.setattr(Tokenizer, "encode", slow)
        for one in (raw, silent):
            one.sendall(data[:-4])
        time.sleep(1.0)
        raw.sendall(data[-4:])  # body and preparation take less than the limit alone, but not together
        for one in (raw, silent):
            answer = b""
            while part := one.recv(2**16):
                answer += part
            assert b" 504 " in answer
        slow_s = 0.0
        assert complete(server, max_tokens=1).status_code == 200


# --- API keys


def test_api_keys(folder: Path, llm: LLM) -> None:
    with serving(folder, llm=llm, api_keys=["key-a", "key-b"]) as server:
        body = {"prompt": "hello", "max_tokens": 1}
        with server.client() as client:
            for value in (None, "key-a", "Bearer", "Bearer key-", "Bearer key-c", "Basic key-a", "Bearer k\xe9y"):
                headers = {} if value is None else {b"Authorization": value.encode("latin-1")}
                response = client.post("/v1/completions", json=body, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/v1/nope"):
                assert client.get(path).status_code == 401
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 401
            for path in ("/health", "/ready", "/metrics", "/version", "/"):
                assert client.get(path).status_code == 200
            for key in ("key-a", "key-b"):
                headers = {"Authorization": f"Bearer {key}"}
                assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
                assert server.openai(api_key=key).completions.create(model="tiny", **body).choices


@pytest.mark.parametrize("allowed", [None, ["Model.Example"]])
def test_host_header(folder: Path, llm: LLM, allowed: list[str] | None) -> None:
    local = ("localhost:80", "a.localhost", "127.0.0.1", "[::1]:8000", "192.168.0.7:1", "LOCALHOST", "localhost.")
    others = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "evillocalhost")
    with serving(folder, llm=llm, allowed_hosts=allowed) as server, server.client() as client:
        for path in ("/v1/models", "/", "/metrics"):
            for host in (*local, "model.example", "model.example:443"):
                assert client.get(path, headers={"Host": host}).status_code == 200
            for host in others:
                response = client.get(path, headers={"Host": host})
                assert response.status_code == (200 if allowed is None else 403)
                assert allowed is None or response.json()["error"]["code"] == "host_not_allowed"
        with server.connect() as raw:
            raw.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            assert b" 200 " in raw.recv(2**16)


def test_prefixes_are_shared_only_with_the_same_key_and_salt(folder: Path, llm: LLM) -> None:
    prompt = "a prompt of several pages that both keys use"

    def cached(server: Running, key: str, **fields: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        with server.client(headers={"Authorization": f"Bearer {key}"}) as client:
            usage = client.post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    with serving(folder, llm=llm, api_keys=["a", "b"]) as server:
        assert [cached(server, key) > 0 for key in ("a", "a", "b", "b")] == [False, True, False, True]
        assert [cached(server, "a", cache_salt=salt) > 0 for salt in ("x", "x", "y", "")] == [False, True, False, True]


def test_cors(folder: Path, llm: LLM) -> None:
    with serving(folder, llm=llm, allowed_origins=["https://a.example"], api_keys=["k"]) as server:
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        with server.client() as client:
            good = client.options("/v1/completions", headers={"Origin": "https://a.example", **ask})
            assert good.headers["access-control-allow-origin"] == "https://a.example"
            bad = client.options("/v1/completions", headers={"Origin": "https://b.example", **ask})
            assert bad.status_code == 400
            response = client.get("/v1/models", headers={"Origin": "https://a.example"})
            assert response.status_code == 401
            assert response.headers["access-control-allow-origin"] == "https://a.example"


def test_no_cors_by_default(server: Running) -> None:
    with server.client() as client:
        response = client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers
        assert client.options("/v1/completions", headers={"Origin": "https://a.example"}).status_code == 405


# --- faults


def test_failed_step_fails_its_requests_and_the_next_request_succeeds(server: Running, steps: Steps) -> None:
    expected = complete(server).json()["choices"]
    steps.delay_s = 0.05
    normal, streamed = Background(server, 2), Background(server, 1, stream=True)
    engine = server.server.engine
    wait_for(lambda: engine.num_unfinished == 3 and engine.num_waiting == 0)
    steps.errors.append(RuntimeError("device lost\nsecond line"))
    assert normal.join() == [500, 500]
    assert normal.responses[0].json()["error"]["code"] == "engine_error"
    assert streamed.join() == [200]
    *parts, last = events(streamed.responses[0].text)
    assert parts
    assert last["error"]["code"] == "engine_error"
    steps.delay_s = 0.0
    assert complete(server).json()["choices"] == expected
    assert metric(server, "pallas_attn_engine_errors_total") == 1
    server.wait_until_idle()


def test_repeated_failures_end_the_server(folder: Path, llm: LLM, steps: Steps) -> None:
    with serving(folder, {"max_engine_errors": 2}, llm=llm) as server:
        steps.errors += [RuntimeError("first"), RuntimeError("device lost\nsecond line")]
        assert complete(server).status_code == 500
        assert complete(server).status_code == 500
        wait_for(lambda: server.result)
        assert server.result == ["the engine failed 2 times in succession: device lost"]


def test_step_that_hangs_ends_the_server(folder: Path, llm: LLM, steps: Steps) -> None:
    with serving(folder, {"step_s": 0.4}, llm=llm) as server:
        steps.delay_s = 0.03
        assert complete(server, max_tokens=20).status_code == 200  # many steps that together take longer
        time.sleep(0.6)  # a wait for requests is no step
        engine = server.server.engine
        assert engine.is_alive
        steps.delay_s = 2.0
        response = complete(server)
        assert (response.status_code, "has not ended after 0.4 s" in response.text) == (500, True)
        assert not engine.is_alive
        wait_for(lambda: server.result)
        assert server.result == ["a step of the engine has not ended after 0.4 s"]
        assert server.thread.thread_runs()
        wait_for(lambda: not server.thread.thread_runs())
        assert engine.failure == server.result[0]


def test_filter_that_raises_fails_and_does_not_block_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: GrammarFilter, output_ids: Any) -> Any:
        raise RuntimeError("broken filter")

    monkeypatch.setattr(GrammarFilter, "_new_tokens", broken)
    assert complete(server, guided_regex="a*").status_code == 500
    assert complete(server, max_tokens=2).status_code == 200
    server.wait_until_idle()


def test_panic_of_a_grammar_fails_its_request_at_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """pyo3's exception for a panic in Rust."""

    def panic(self: GrammarTokenizer, *arguments: Any) -> Any:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(GrammarTokenizer, "matcher", panic)
    response = complete(server, guided_regex="a*")
    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error")
    assert complete(server, max_tokens=2).status_code == 200


def test_grammar_that_overflows_the_stack_fails_its_request(server: Running) -> None:
    rules = "\n".join(["start: r0", *(f'r{i}: r{i + 1} | "x"' for i in range(5_000)), 'r5000: "a"'])
    response = complete(server, guided_grammar=rules)
    message = "structured_outputs: the grammar is too complex: the process for it ended with SIGSEGV"
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert complete(server, guided_regex="a*", max_tokens=2).status_code == 200


def test_engine_does_not_convert_grammars(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion may take minutes and hold Python's lock."""
    monkeypatch.setattr(token_filters, "grammar_text", lambda *arguments: 1 / 0)
    monkeypatch.setattr(llguidance, "grammar_from", lambda *arguments: 1 / 0)
    response = complete(server, guided_grammar='root ::= "hello"', max_tokens=20)
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "hello")
    response = complete(server, guided_grammar="root ::= (")
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("structured_outputs: grammar: Failed to convert the grammar")


def test_slow_grammars_delay_no_requests_without_grammars(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, go_on, matcher = list[str | None](), threading.Event(), GrammarTokenizer.matcher

    def slow(self: GrammarTokenizer, outputs: Any, *arguments: Any) -> Any:
        compiled.append(outputs.regex)
        assert go_on.wait(60)
        return matcher(self, outputs, *arguments)

    monkeypatch.setattr(GrammarTokenizer, "matcher", slow)
    try:
        slow_ones = Background(server, 2, guided_regex="a*", max_tokens=2)
        wait_for(lambda: len(compiled) == 2)
        with server.client(timeout=0.5) as client, pytest.raises(httpx2.TimeoutException):
            client.post("/v1/completions", json={**LONG, "guided_regex": "b*"})  # waits for a thread
        for fields in ({}, {"bad_words": ["x"]}):
            with server.client(timeout=20.0) as client:
                body = {**LONG, "max_tokens": 2, **fields}
                assert client.post("/v1/completions", json=body).status_code == 200
        assert not slow_ones.responses
    finally:
        go_on.set()
    assert slow_ones.join() == [200, 200]
    assert complete(server, guided_regex="c*", max_tokens=2).status_code == 200
    assert compiled == ["a*", "a*", "c*"]  # the grammar of the aborted request is not compiled


def add_grammar(request_id: int, regex: str, num_prompts: int = 1) -> bytes:
    """Return the message of a request to the engine."""
    prompt = Prompt([1], SamplingParams(max_tokens=2, structured_outputs=StructuredOutputs(regex=regex)))
    return frame(Add(request_id, [prompt] * num_prompts, ""))


def test_queued_grammars_are_not_compiled_after_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, ended, go_on, prepare = list[str](), list[int](), threading.Event(), EngineThread._prepare

    def prepared(self: EngineThread, message: Add, *arguments: Any) -> None:
        prepare(self, message, *arguments)
        ended.append(message.request_id)

    def slow(self: GrammarChecker, kind: str, value: str) -> str:
        checked.append(value)
        assert go_on.wait(60)
        raise ValueError("structured_outputs: refused")

    monkeypatch.setattr(EngineThread, "_prepare", prepared)
    monkeypatch.setattr(GrammarChecker, "check", slow)
    of_engine, of_server = socket.socketpair()
    with of_server:
        engine = EngineThread(llm, of_engine, ServerLimits())
        try:
            of_server.sendall(b"".join(add_grammar(i, f"{i}") for i in range(4)))
            wait_for(lambda: len(checked) == 2)
            of_server.shutdown(socket.SHUT_WR)
            wait_for(lambda: not engine.thread_runs())
        finally:
            go_on.set()
        wait_for(lambda: len(ended) == 4)
    assert sorted(checked) == ["0", "1"]


def test_grammar_is_compiled_once_and_not_after_an_abort(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, prepare = list[str | None](), EngineThread._prepare
    check, matcher, ended = GrammarChecker.check, GrammarTokenizer.matcher, list[int]()

    def aborted(self: GrammarChecker, kind: str, value: str) -> str:
        if value == "a*":
            of_server.sendall(frame(Abort(1)))
            wait_for(lambda: 1 not in engine._preparing)
        return check(self, kind, value)

    def recorded(self: GrammarTokenizer, outputs: StructuredOutputs, *arguments: Any) -> Any:
        compiled.append(outputs.regex)
        return matcher(self, outputs, *arguments)

    def prepare_and_record(self: EngineThread, message: Add, *arguments: Any) -> None:
        prepare(self, message, *arguments)
        ended.append(message.request_id)

    monkeypatch.setattr(GrammarChecker, "check", aborted)
    monkeypatch.setattr(GrammarTokenizer, "matcher", recorded)
    monkeypatch.setattr(EngineThread, "_prepare", prepare_and_record)
    of_engine, of_server = socket.socketpair()
    with of_server:
        engine = EngineThread(llm, of_engine, ServerLimits())
        of_server.sendall(add_grammar(1, "a*") + add_grammar(2, "b*", num_prompts=3))
        wait_for(lambda: len(ended) == 2)
        of_server.shutdown(socket.SHUT_WR)
        wait_for(lambda: not engine.thread_runs())
    assert compiled == ["b*"]


def test_checkers_start_before_the_first_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[int](), GrammarChecker.__init__

    def record(self: GrammarChecker, tokens: Any, *arguments: Any) -> None:
        make(self, tokens, *arguments)
        made.append(len(tokens))

    monkeypatch.setattr(GrammarChecker, "__init__", record)
    of_engine, of_server = socket.socketpair()
    with of_server:
        engine = EngineThread(llm, of_engine, ServerLimits(), starts_checkers=True)
        wait_for(lambda: len(made) == 2)  # one for each thread
        of_server.shutdown(socket.SHUT_WR)
        wait_for(lambda: not engine.thread_runs())


def test_prompts_with_a_shared_grammar_have_own_states(server: Running) -> None:
    response = complete(server, prompt=["hello", "a", "b"], guided_choice=["hello"], max_tokens=20)
    assert [choice["text"] for choice in response.json()["choices"]] == ["hello"] * 3


def test_unexpected_error_does_not_end_the_threads_of_grammars(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, failed = EngineThread._prepare, list[int]()

    def fail(self: EngineThread, message: Add, *arguments: Any) -> None:
        if len(failed) < 4:  # more than there are threads
            failed.append(message.request_id)
            self._socket.send(StepResults({}, {message.request_id: ApiError("failed", 500).fields}))
            raise RuntimeError("unexpected")
        prepare(self, message, *arguments)

    monkeypatch.setattr(EngineThread, "_prepare", fail)
    for _ in range(4):
        assert complete(server, guided_regex="a*").status_code == 500
    assert complete(server, guided_regex="a*", max_tokens=2).status_code == 200


def test_failed_warmup_ends_the_server(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> float:
        raise MemoryError("no memory")

    monkeypatch.setattr(llm.engine, "warmup", fail)
    of_engine, of_server = socket.socketpair()
    EngineThread(llm, of_engine, ServerLimits())
    server = Server(of_server, [], ServerOptions(**DEFAULTS))
    assert asyncio.run(server.run(listen("127.0.0.1", 0))) == "MemoryError: no memory"


def test_text_process_that_ends_fails_one_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Tokenizer, *arguments: Any, **options: Any) -> Any:
        raise TokenizerError("this takes more than 30 s")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", fail)
        response = complete(server)
        assert (response.status_code, response.json()["error"]["message"]) == (400, "this takes more than 30 s")
    assert complete(server, max_tokens=1).status_code == 200


def test_bug_in_a_handler_is_an_internal_error(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "_check_capacity", lambda self: 1 / 0)
    response = complete(server)
    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error")


# --- start and end


def test_requests_before_the_engine_is_ready(server: Running) -> None:
    engine = server.server.engine
    engine.is_ready = False
    with server.client() as client:
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
    response = complete(server)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    engine.is_ready = True


def test_server_is_ready_while_programs_are_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, compile_programs = threading.Event(), StepCompiler.compile

    def in_thread(self: StepCompiler, *arguments: Any) -> Any:
        if threading.current_thread().name != "compile steps":
            return compile_programs(self, *arguments)
        assert go_on.wait(60)
        raise RuntimeError("no program")

    monkeypatch.setattr(StepCompiler, "compile", in_thread)
    llm = load(folder, decode_buckets=(2, 4), background_compilation=True)
    names = [f"pallas_attn_{kind}_step_shapes" for kind in ("compiled", "pending", "failed")]
    with serving(folder, llm=llm) as server:
        assert complete(server, max_tokens=2).status_code == 200
        compiled, pending, failed = (metric(server, name) for name in names)
        assert (compiled, failed) == (2, 0)
        assert pending > 0
        go_on.set()
        wait_for(lambda: not llm.engine.is_compiling)
        wait_for(lambda: [metric(server, name) for name in names] == [2, 0, pending])
        assert complete(server, max_tokens=2).status_code == 200


@pytest.mark.parametrize("grace_s", [0.3, 60.0])
def test_stop_ends_requests_within_the_grace_time(folder: Path, llm: LLM, steps: Steps, grace_s: float) -> None:
    with serving(folder, llm=llm, grace_s=grace_s) as server:
        steps.delay_s = 0.02
        tokens = {"max_tokens": 120 if grace_s < 1 else 50}
        running, streamed = Background(server, 1, **tokens), Background(server, 1, stream=True, **tokens)
        wait_for(lambda: steps.count >= 5)
        began = time.monotonic()
        server.server.stop()
        with contextlib.suppress(httpx2.TransportError):
            refused = complete(server)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        if grace_s < 1:
            assert running.join() == [503]
            assert streamed.join() == [200]
            assert events(streamed.responses[0].text)[-1]["error"]["code"] == "stopping"
        else:
            assert running.join() == [200]
            assert streamed.join() == [200]
            assert events(streamed.responses[0].text)[-1]["choices"][0]["finish_reason"] == "length"
        wait_for(lambda: server.result)
        assert time.monotonic() - began < 20
        assert server.result == [None]


class PausedEncoding:
    """Replacement of `Tokenizer.encode` that waits.

    Attributes:
      entered: event that is set when a call begins.
      go_on: event that calls wait for.
    """

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace `Tokenizer.encode`."""
        encode = Tokenizer.encode

        def paused(*arguments: Any, **options: Any) -> Any:
            self.entered.set()
            assert self.go_on.wait(60)
            return encode(*arguments, **options)

        monkeypatch.setattr(Tokenizer, "encode", paused)


@pytest.mark.slow
def test_stop_gives_the_grace_time_to_requests_that_are_prepared(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = PausedEncoding()
    monkeypatch.setattr(server_module, "_CLOSE_S", 1)
    with serving(folder, llm=llm, grace_s=60.0) as server:
        encoding.begin(monkeypatch)
        prepared = Background(server, 1, max_tokens=2)
        assert encoding.entered.wait(20)
        server.server.stop()
        time.sleep(2.0)  # longer than the server waits for responses after the grace time
        assert not server.result
        encoding.go_on.set()
        assert prepared.join() == [200]
        wait_for(lambda: server.result)


def test_request_that_is_prepared_after_the_grace_time_is_refused(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = PausedEncoding()
    with serving(folder, llm=llm, grace_s=0.1) as server:
        encoding.begin(monkeypatch)
        prepared = Background(server, 1, max_tokens=2)
        assert encoding.entered.wait(20)
        server.server.stop()
        time.sleep(0.5)
        encoding.go_on.set()
        assert prepared.join() == [503]
        assert prepared.responses[0].json()["error"]["code"] == "stopping"


def test_second_stop_ends_the_grace_time(folder: Path, llm: LLM, steps: Steps) -> None:
    with serving(folder, llm=llm, grace_s=60.0) as server:
        steps.delay_s = 0.2
        running = Background(server, 1)
        wait_for(lambda: steps.count >= 2)
        server.server.stop()
        server.server.stop()
        assert running.join() == [503]
