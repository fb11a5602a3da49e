"""Servers whose prompts are computed by prefill workers, over the loopback interface."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from pallas_attn.models.cli import serve
from pallas_attn.models.engine import Engine, SocketTransport, TransferError, TransportError, serve_prefill
from pallas_attn.models.server import prefill_workers
from pallas_attn.models.server.prefill_workers import PrefillWorkers
from pallas_attn.models.server.server import listen
from tests.models.transfer_peer import greet
from tests.server.server_case import Running, events, load, serving
from tests.server.test_life_cycle import metric, wait_for
from tests.server.test_serve import ROOT, SIZES, post, serve_and

SECRET = b"a secret of 16 b"

BODIES: list[dict[str, Any]] = [
    {"prompt": "a prompt of several pages of the cache", "max_tokens": 8},
    {"prompt": "a prompt that is longer than a step of 32 tokens, and " * 2, "max_tokens": 8, "temperature": 0},
    {"prompt": ["a list of prompts with", "short", "and long entries of several pages"], "max_tokens": 4, "seed": 5},
    {"prompt": "several outputs of one prompt, which share pages", "max_tokens": 6, "n": 2, "seed": 3, "logprobs": 2},
]
"""Requests. Prompts without "short" have at least `MIN_TOKENS` tokens."""

MIN_TOKENS = 16


class Worker:
    """A prefill worker in a thread.

    Attributes:
      port: its port on 127.0.0.1.
    """

    def __init__(self, engine: Engine, *, port: int = 0, layers: int | None = None):
        """Start it.

        Args:
          engine: the engine. Only the worker uses it until `stop`.
          layers: number of messages with layers after which the connection breaks; None for a working connection.
          port: its port; 0 for any.
        """
        self._listener = listen("127.0.0.1", port)
        self._listener.listen()
        self.port = self._listener.getsockname()[1]
        self._engine, self._layers = engine, layers
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, TransferError, ValueError):
            self._connection, _ = self._listener.accept()
            self._listener.close()
            transport = Breaking(self._connection)
            transport.left = self._layers
            serve_prefill(self._engine, transport, timeout_s=10, secret=SECRET)

    def stop(self) -> None:
        """Close the connection, as the operating system does if the process ends."""
        for end in (self._listener, self._connection):
            with contextlib.suppress(OSError):
                if end is not None:
                    end.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        assert not self._thread.is_alive()


class Breaking(SocketTransport):
    """Transport that closes itself instead of sending a layer after `left` layers."""

    left: int | None = None

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> None:
        if header["kind"] == "layer" and self.left is not None:
            if self.left == 0:
                self.close()
            self.left -= 1
        super().send(header, arrays)


@contextlib.contextmanager
def remote_serving(
    folder: Path, *ports: int, secret: bytes | None = SECRET, timeout_s: float = 20.0
) -> Iterator[Running]:
    """Context manager that runs a server with prefill workers at these ports."""
    llm = load(folder)
    workers = PrefillWorkers(
        llm.engine,
        [("127.0.0.1", port) for port in ports],
        secret=secret,
        timeout_s=timeout_s,
        min_tokens=MIN_TOKENS,
    )
    with serving(folder, llm=llm, workers=workers) as running:
        yield running
        running.wait_until_idle()


def answer(server: Running, body: dict[str, Any], *, stream: bool = False) -> dict[int, Any]:
    """Return texts and log probabilities of the outputs of a request."""
    with server.client() as client:
        response = client.post("/v1/completions", json={"seed": 1, "ignore_eos": True, **body, "stream": stream})
    assert response.status_code == 200, response.text
    choices = [c for e in events(response.text) for c in e["choices"]] if stream else response.json()["choices"]
    texts: dict[int, Any] = {}
    for choice in choices:
        before, rest = texts.get(choice["index"], ("", []))
        logprobs = choice["logprobs"]
        texts[choice["index"]] = (before + choice["text"], rest + (logprobs["tokens"] if logprobs else []))
    return texts


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[dict[int, Any]]:
    """Answers to `BODIES` of a server without prefill workers."""
    with serving(folder) as server:
        return [answer(server, body) for body in BODIES]


@pytest.fixture(scope="module")
def of_worker(folder: Path) -> Engine:
    """Engine of all workers, one after the other."""
    return load(folder).engine


def test_tokens_equal_a_server_without_workers(folder: Path, of_worker: Engine, expected: list[dict[int, Any]]) -> None:
    worker = Worker(of_worker)
    with remote_serving(folder, worker.port) as server:
        assert metric(server, "pallas_attn_prefill_workers") == 1
        with ThreadPoolExecutor(4) as threads:
            assert [*threads.map(lambda body: answer(server, body), BODIES)] == expected
        wait_for(lambda: metric(server, "pallas_attn_prefill_prompts_sent") == 5)
        assert [answer(server, body | {"cache_salt": "x"}, stream=True) for body in BODIES] == expected
        wait_for(lambda: metric(server, "pallas_attn_prefill_prompts_sent") == 10)
        assert answer(server, BODIES[3] | {"cache_salt": "x"}) == expected[3]  # in the prefix cache
        assert metric(server, "pallas_attn_prefill_prompts_sent") == 10
        assert metric(server, "pallas_attn_prefill_failures") == 0
        with server.client() as client:
            usage = client.post("/v1/completions", json=BODIES[1] | {"cache_salt": "z"}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 4 * 4
    worker.stop()


def test_loss_of_a_worker_loses_no_request(
    folder: Path, of_worker: Engine, expected: list[dict[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_workers, "_RETRY_S", 0.05)
    worker = Worker(of_worker, layers=5)
    with remote_serving(folder, worker.port) as server:
        with ThreadPoolExecutor(4) as threads:
            assert [*threads.map(lambda body: answer(server, body), BODIES)] == expected
        wait_for(lambda: metric(server, "pallas_attn_prefill_failures") == 1)
        assert metric(server, "pallas_attn_prefill_workers") == 0
        assert answer(server, BODIES[1] | {"cache_salt": "x"}, stream=True) == expected[1]
        with server.client() as client:
            assert client.get("/health").status_code == 200
        sent = metric(server, "pallas_attn_prefill_prompts_sent")
        worker.stop()
        worker = Worker(of_worker, port=worker.port)
        wait_for(lambda: metric(server, "pallas_attn_prefill_workers") == 1)
        assert answer(server, BODIES[1] | {"cache_salt": "y"}) == expected[1]
        assert metric(server, "pallas_attn_prefill_prompts_sent") == sent + 1
    worker.stop()


@contextlib.contextmanager
def peer(*, changed: Mapping[str, Any] | None = None) -> Iterator[int]:
    """Context manager of a process without secret that greets a server and then computes nothing. The value is its
    port. `changed` has other values of its cache format."""
    with listen("127.0.0.1", 0) as listener:
        listener.listen()

        def run() -> None:
            connection, _ = listener.accept()
            transport = SocketTransport(connection)
            with contextlib.suppress(TransportError):
                greet(transport, "prefill", changed)
                while True:
                    transport.receive()
            transport.close()

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.slow
def test_silent_worker_and_unreachable_worker(
    folder: Path, expected: list[dict[int, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefill_workers, "_RETRY_S", 1000.0)
    with listen("127.0.0.1", 0) as closed, peer() as port:
        unreachable = closed.getsockname()[1]
        with remote_serving(folder, unreachable, port, secret=None, timeout_s=2) as server:
            assert metric(server, "pallas_attn_prefill_workers") == 1
            with ThreadPoolExecutor(1) as threads:
                with server.client(timeout=0.3) as client, pytest.raises(httpx2.ReadTimeout):
                    client.post("/v1/completions", json=BODIES[0])  # the client disconnects
                wait_for(lambda: metric(server, "pallas_attn_prefill_prompts_pending") == 0)
                waiting = threads.submit(answer, server, BODIES[1])
                wait_for(lambda: metric(server, "pallas_attn_prefill_prompts_pending") == 1)
                assert answer(server, {"prompt": "short", "max_tokens": 4})  # computed while the long prompt waits
                assert not waiting.done()
                assert waiting.result() == expected[1]
            wait_for(lambda: metric(server, "pallas_attn_prefill_workers") == 0)
            assert metric(server, "pallas_attn_prefill_failures") == 2
    first, second = caplog.messages[:2]
    assert first.startswith(f"prefill worker 127.0.0.1:{unreachable}: ")
    assert second.endswith("no page was completed for 2 s; 1 of its prompts are computed here")


def test_prompts_wait_while_others_hold_half_of_the_pages(folder: Path) -> None:
    engine = load(folder).engine
    with peer() as port:
        address = [("127.0.0.1", port)]
        workers = PrefillWorkers(engine, address, secret=None, timeout_s=20, min_tokens=1)
        llm = load(folder)
        started = list[Any]()
        for i in range(4):
            assert workers.send(str(i), llm.prepare([i] * 90), "", started.append)
        workers.poll()
        assert workers.state()["prefill_prompts_sent"] == 2  # of 96 * 4 tokens
        workers.abort("3")
        workers.abort("0")
        workers.poll()
        state = workers.state()
        assert (state["prefill_prompts_sent"], state["prefill_prompts_pending"]) == (3, 2)
        assert not started
        workers.close()


def test_worker_of_another_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with peer(changed={"page_size": 8}) as port:
        assert serve.main([str(folder), "--port", "0", *SIZES, "--prefill-from", f"127.0.0.1:{port}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    start = f"pallas-attn serve: error: --prefill-from: prefill worker 127.0.0.1:{port}: engine: expected the cache"
    assert line.startswith(start)


@pytest.mark.slow
def test_processes(folder: Path, tmp_path: Path, expected: list[dict[int, Any]]) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    secret = ("--prefill-secret-file", str(tmp_path / "secret"))
    command = [sys.executable, "-m", "pallas_attn", "serve", str(folder), *SIZES, *secret, "--prefill-listen", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        address = next(line for line in worker.stderr if "listening on" in line).split()[-1]

        def use(url: str) -> None:
            def texts(body: dict[str, Any]) -> list[str]:
                response = post(url, "/v1/completions", {"seed": 1, "ignore_eos": True, **body})
                return [choice["text"] for choice in response.json()["choices"]]

            before = [texts(body) for body in BODIES]
            assert before == [[text for text, _ in choices.values()] for choices in expected]
            (sent,) = re.findall(r"^pallas_attn_prefill_prompts_sent.* (\d+\.\d)", metrics(url), re.MULTILINE)
            assert sent == "4.0"  # --max-batched-tokens is 32
            with ThreadPoolExecutor(4) as threads:
                running = [threads.submit(texts, body | {"cache_salt": "x"}) for body in BODIES]
                worker.send_signal(signal.SIGKILL)
                assert [one.result() for one in running] == before

        try:
            assert serve_and(use, folder, *secret, "--prefill-from", address) == 0
        finally:
            worker.kill()


@pytest.mark.slow
def test_worker_ends_by_signal(folder: Path) -> None:
    command = [sys.executable, "-m", "pallas_attn", "serve", str(folder), *SIZES, "--prefill-listen", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        assert any("prefill worker listening on 127.0.0.1:" in line for line in worker.stderr)
        worker.send_signal(signal.SIGTERM)
        assert (worker.wait(20), worker.stderr.read()) == (0, "")


def metrics(url: str) -> str:
    return httpx2.get(f"{url}/metrics", verify=False).text
