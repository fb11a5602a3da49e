"""The HTTP server: sockets, time limits of connections, and its life cycle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pallas_attn.models.checkpoints import Tokenizer
from pallas_attn.models.server.app import Api
from pallas_attn.models.server.engine_client import EngineClient
from pallas_attn.models.server.limits import ApiError, ServerLimits
from pallas_attn.models.server.metrics import Metrics
from pallas_attn.models.server.prepare import Preparer
from pallas_attn.models.server.reasoning import ParserNames

LOGGER = logging.getLogger("pallas_attn.server")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
      names: names of the model in requests and responses, at least one.
      max_len: maximum number of tokens of a sequence.
      families: names of the parsers of reasoning and tool calls.
      api_keys: accepted API keys; empty if requests need no key.
      allowed_origins: origins of web pages that may read responses.
      allowed_hosts: accepted names of the header Host, besides localhost and IP addresses; None for any.
      grace_s: seconds after `Server.stop` in which running requests may end.
      defaults: sampling parameters of the model, by name, which replace OpenAI's defaults.
      access_log: whether a line is logged for each request.
    """

    names: Sequence[str]
    max_len: int
    families: ParserNames
    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] | None = None
    grace_s: float = 30.0
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    access_log: bool = False


class Server:
    """An HTTP server of an engine. `run` serves until `stop` is called.

    Attributes:
      engine: the engine; None before `run`.

    Args:
      end: end of a pair of sockets. An `EngineThread` has the other end.
      tokenizers: tokenizers of the model, one for each worker thread; empty for a model without tokenizer.
      options: options of the server.
      limits: limits of the server.
    """

    def __init__(
        self, end: socket.socket, tokenizers: Sequence[Tokenizer], options: ServerOptions, limits: ServerLimits
    ):
        self.engine: EngineClient | None = None
        self._end, self._tokenizers, self._options, self._limits = end, tokenizers, options, limits
        self._stops = 0
        self._stopping: asyncio.Event | None = None

    async def run(self, listener: socket.socket) -> str | None:
        """Serve on a bound socket until `stop`, or until the engine has failed.

        After `stop`, new requests get the status 503, and running requests may end within the grace time. Then they are
        aborted. A second call of `stop` ends the grace time.

        Args:
          listener: the socket.

        Returns:
          Reason of the failure of the engine; None after `stop`.
        """
        options, limits = self._options, self._limits
        self._stopping, self._loop = asyncio.Event(), asyncio.get_running_loop()
        metrics = Metrics(options.names[0])
        self.engine = engine = EngineClient(limits, metrics, self._stop)
        receiving = asyncio.create_task(engine.run(self._end))
        families, defaults = options.families, options.defaults
        preparer = Preparer(options.max_len, self._tokenizers, options.names, limits, defaults, families)
        with concurrent.futures.ThreadPoolExecutor(max(len(self._tokenizers), 1), "prepare") as workers:
            keys, hosts = options.api_keys, options.allowed_hosts
            api = Api(engine, preparer, workers, options.names, limits, metrics, keys, hosts)
            config = uvicorn.Config(
                api.app(options.allowed_origins),
                http=_protocol(limits),
                ws="none",
                lifespan="off",
                access_log=options.access_log,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=limits.keep_alive_s,  # pyrefly: ignore[bad-argument-type]
                timeout_graceful_shutdown=5,
            )
            http = _Http(config)
            serving = asyncio.create_task(http.serve([listener]))
            stopping, failed = (asyncio.create_task(e.wait()) for e in (self._stopping, engine.ended))
            await asyncio.wait((stopping, failed, serving), return_when=asyncio.FIRST_COMPLETED)
            api.is_stopping = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.grace_s):
                    while engine.num_unfinished and self._stops < 2:
                        await asyncio.sleep(0.02)
            engine.abort_all(ApiError("the server stops", 503, code="stopping"))
            http.should_exit = True
            await serving
            await engine.stop()
            for task in (stopping, failed, receiving):
                task.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
        return engine.failure

    def stop(self) -> None:
        """Let `run` end. Any thread and signal handlers may call this method while `run` is running."""
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._stops += 1
        if self._stopping is not None:
            self._stopping.set()


class _Http(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _protocol(limits: ServerLimits) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with limits of the time until the header of a request has arrived, and of the number of
    connections. uvicorn limits only the time between two requests."""

    class TimedProtocol(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore[bad-override]
            self.app_state = {"transport": transport}
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                transport.abort()
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:  # the header has not arrived
                if self._timer is None and not self.transport.is_closing():
                    self._start_timer()
            elif self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            if self.transport.get_write_buffer_size():  # the client does not read the response
                self.transport.abort()

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(limits.read_s, self.transport.abort)

    return TimedProtocol


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
      OSError: the address cannot be used.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
