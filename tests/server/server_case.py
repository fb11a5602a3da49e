"""A server with a tiny random model, for tests. Engine and HTTP server run in two threads instead of two processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import openai

from pallas_attn.models.checkpoints import Tokenizer, load_model, load_tokenizer
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine import EngineConfig
from pallas_attn.models.llm import LLM
from pallas_attn.models.server.engine_thread import EngineThread
from pallas_attn.models.server.formats import ParserNames
from pallas_attn.models.server.options import ServerLimits, ServerOptions
from pallas_attn.models.server.prefill_workers import PrefillWorkers
from pallas_attn.models.server.server import Server, listen
from tests.models import llm_case

NAME = "tiny"


@functools.cache
def _loaded(folder: Path) -> tuple[Decoder, Tokenizer, Tokenizer]:
    """Load the model of a folder, and tokenizers for the `LLM` and for the server, once for all servers."""
    own, of_server = load_tokenizer(folder), load_tokenizer(folder)
    assert own is not None
    assert of_server is not None
    return load_model(folder, None, llm_case.QUICK), own, of_server


def load(folder: Path, **options: Any) -> LLM:
    """Return an `LLM` of the model in a folder of `llm_case.write_model`. Only one of them may be used at a time."""
    model, tokenizer, _ = _loaded(folder)
    return LLM.of_model(model, EngineConfig(**{**llm_case.SIZES, **options}), tokenizer=tokenizer)


class ClosedAtTheEnd(openai.DefaultHttpxClient):
    """Connections of a client of `openai`, which closes only connections that it has made itself."""

    def __del__(self) -> None:
        self.close()


@dataclasses.dataclass
class Running:
    """A running server. Its clients load no TLS certificates, which would take 27 ms per client.

    Attributes:
      llm: its LLM. Only the engine's thread may use it while the server runs.
      thread: the engine's thread.
      server: the HTTP server, in another thread.
      port: its port on 127.0.0.1.
      result: result of `Server.run`, after its end.
    """

    llm: LLM
    thread: EngineThread
    server: Server
    port: int
    result: list[str | None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx2.Client:
        given: dict[str, Any] = {"base_url": self.url, "timeout": 60.0, "verify": False, **options}
        return httpx2.Client(**given)

    def openai(self, **options: Any) -> openai.OpenAI:
        given: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options}
        given.setdefault("http_client", ClosedAtTheEnd(verify=False))
        return openai.OpenAI(**given)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def wait_until_idle(self, timeout_s: float = 20.0) -> None:
        """Wait until no request is unfinished and all pages are free. Raise TimeoutError if this does not happen."""
        end = time.monotonic() + timeout_s
        engine = self.server.engine
        while time.monotonic() < end:
            is_idle = not (engine.num_unfinished or self.llm.has_unfinished or self.llm.engine.has_unfinished)
            if is_idle and self.llm.engine.stats().used_pages == 0:
                return
            time.sleep(0.01)
        raise TimeoutError(f"{engine.num_unfinished} unfinished, {self.llm.engine.stats().used_pages} pages")


DEFAULTS: dict[str, Any] = {"names": [NAME], "max_len": 1024, "families": ParserNames(None, None), "grace_s": 0.0}


@contextlib.contextmanager
def serving(
    folder: Path,
    limits: Mapping[str, Any] = MappingProxyType({}),
    *,
    llm: LLM | None = None,
    workers: PrefillWorkers | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Context manager that runs a server of the model in a folder until the end of the block.

    Args:
      folder: folder of `llm_case.write_model`.
      limits: fields of `ServerLimits`.
      llm: the LLM; None to load it.
      workers: prefill workers of the LLM's engine; None to compute all prompts in the engine.
      send_buffer: bytes of the send buffer of connections; None for the default of the system.
      options: fields of `ServerOptions`.
    """
    llm = load(folder) if llm is None else llm
    given, own = ServerLimits(**limits), DEFAULTS | {"max_len": llm.engine.max_sequence_len} | options
    of_engine, of_server = socket.socketpair()
    engine = EngineThread(llm, of_engine, given, workers=workers)
    server = Server(of_server, [_loaded(folder)[2]], ServerOptions(**own, limits=given))
    result: list[str | None] = []
    listener = listen("127.0.0.1", 0)
    listener.listen()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # accepted sockets inherit it
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: result.append(asyncio.run(server.run(listener))))
    thread.start()
    try:
        running = Running(llm, engine, server, port, result)
        with running.client() as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.02)
        yield running
    finally:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            server.stop()
        thread.join(60)
        assert not thread.is_alive()


def events(text: str) -> list[dict[str, Any]]:
    """Return the objects of a stream of server-sent events, whose end is checked."""
    *parts, last, empty = text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def request(body: bytes, *headers: str) -> bytes:
    """Return the bytes of a request to /v1/completions."""
    lines = ("POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body
