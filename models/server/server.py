"""The HTTP server: sockets, time limits of connections, and its life cycle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pallas_attn.models.checkpoints import Tokenizer
from pallas_attn.models.server.app import Api
from pallas_attn.models.server.engine_client import EngineClient
from pallas_attn.models.server.metrics import Metrics
from pallas_attn.models.server.options import ApiError, ServerLimits, ServerOptions
from pallas_attn.models.server.prepare import Preparer

LOGGER = logging.getLogger("pallas_attn.server")

_CLOSE_S = 5  # seconds in which responses must be sent after the grace time


class Server:
    """An HTTP server of an engine. `run` serves until `stop` is called.

    Attributes:
      engine: the engine.

    Args:
      end: end of a pair of sockets. An `EngineThread` has the other end.
      tokenizers: tokenizers of the model, one for each worker thread; empty for a model without tokenizer.
      options: options of the server.
    """

    def __init__(self, end: socket.socket, tokenizers: Sequence[Tokenizer], options: ServerOptions):
        self._end, self._options, self._metrics = end, options, Metrics(options.names[0])
        self._preparer, self._num_workers = Preparer(tokenizers, options), max(len(tokenizers), 1)
        self.engine = EngineClient(options.limits, self._metrics, self._stop)
        self._stops, self._stopping = 0, asyncio.Event()

    async def run(self, listener: socket.socket) -> str | None:
        """Serve on a bound socket until `stop`, or until the engine has failed.

        After `stop`, new requests get the status 503. Earlier requests, which are running or being prepared, may end
        within the grace time. Then they are aborted. A second call of `stop` ends the grace time.

        Args:
          listener: the socket.

        Returns:
          Reason of the failure of the engine; None after `stop`.
        """
        self._loop, engine, limits = asyncio.get_running_loop(), self.engine, self._options.limits
        receiving = asyncio.create_task(engine.run(self._end))
        with concurrent.futures.ThreadPoolExecutor(self._num_workers, "prepare") as workers:
            api = Api(engine, self._preparer, workers, self._options, self._metrics)
            config = uvicorn.Config(
                api.app(),
                http=_protocol(limits),
                ws="none",
                lifespan="off",
                access_log=self._options.access_log,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=limits.keep_alive_s,  # pyrefly: ignore[bad-argument-type]
                timeout_graceful_shutdown=_CLOSE_S,
            )
            http = _Http(config)
            serving = asyncio.create_task(http.serve([listener]))
            stopping, failed = (asyncio.create_task(e.wait()) for e in (self._stopping, engine.ended))
            await asyncio.wait((stopping, failed, serving), return_when=asyncio.FIRST_COMPLETED)
            api.is_stopping = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.grace_s):
                    while engine.is_alive and (api.num_preparing or engine.num_unfinished) and self._stops < 2:
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
