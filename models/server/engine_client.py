"""The event loop's side of the engine: requests, and the results that arrive from the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence

from pallas_attn.models.server.messages import (
    HEADER,
    Abort,
    Add,
    EngineEnded,
    EngineState,
    Message,
    Part,
    Prompt,
    Ready,
    StepResults,
    Stop,
    decode_to_http,
    frame,
)
from pallas_attn.models.server.metrics import Metrics
from pallas_attn.models.server.options import ApiError, ServerLimits

_MAX_READ = 2**20  # bytes that asyncio reads before they are processed


class ServedRequest:
    """Outputs of the prompts of one request, which are read with `batches`.

    Attributes:
      prompts: the prompts.
      salt: salt of the prefix cache.
      is_streamed: whether `batches` yields parts as soon as they arrive; otherwise when an output ends.
      send_now: function that sends parts to the client without waiting. If this is not possible, it does nothing and
        returns False. It is called only while the reader of `batches` waits, with parts that end no output. None to
        send all parts with `batches`.
      num_unread: number of tokens of a stream that have arrived, but not been sent or taken from `batches`.
      request_id: id in messages; -1 before `EngineClient.add`.
      arrived_s: time of arrival of the request (`time.perf_counter`).
    """

    def __init__(self, prompts: Sequence[Prompt], salt: str, arrived_s: float, *, is_streamed: bool):
        self.prompts, self.salt, self.arrived_s, self.is_streamed = prompts, salt, arrived_s, is_streamed
        self.send_now: Callable[[Sequence[Part]], bool] | None = None
        self.num_unread = 0
        self.request_id = -1
        self.has_started = self.has_ended = False
        self._parts: list[Part] = []
        self._changed = asyncio.Event()
        self._reader_waits = False
        self._error: Exception | None = None
        self._newest: dict[tuple[int, int], float] = {}  # time of the newest token of each output

    async def batches(self) -> AsyncIterator[list[Part]]:
        """Yield the parts that have arrived and were not sent by `send_now`, until all outputs have ended.

        Raises:
          ApiError: the request has failed. Earlier parts are yielded first.
          Exception: `send_now` has failed.
        """
        while True:
            if self._parts:
                parts, self._parts = self._parts, []
                self.num_unread = 0
                yield parts
            elif self._error is not None:
                raise self._error
            elif self.has_ended:
                return
            else:
                self._changed.clear()
                self._reader_waits = True
                try:
                    await self._changed.wait()
                finally:
                    self._reader_waits = False

    def receive(self, parts: Sequence[Part], now: float, metrics: Metrics) -> int:
        """Send parts, or store them for `batches`. Return the number of tokens. `now` is the time of arrival."""
        tokens, ends_output = 0, False
        for part in parts:
            key, count = (part.prompt, part.delta.index), len(part.delta.token_ids)
            if count:
                tokens += count
                if not self.has_started:
                    self.has_started = True
                    metrics.waiting.dec()
                    metrics.running.inc()
                    metrics.first_token.observe(now - self.arrived_s)
                if (earlier := self._newest.get(key)) is not None:
                    metrics.between_tokens.observe((now - earlier) / count)
                self._newest[key] = now
            if (reason := part.delta.finish_reason) is not None:
                ends_output = True
                metrics.finished(reason if reason in ("stop", "length", "abort") else "error")
                metrics.cached_tokens.inc(part.cached_tokens)
        if not ends_output and self._is_sent(parts):
            return tokens
        self._parts.extend(parts)
        if self.is_streamed:
            self.num_unread += tokens
        if self.is_streamed or ends_output:
            self._changed.set()
        return tokens

    def _is_sent(self, parts: Sequence[Part]) -> bool:
        """Send parts with `send_now`. Return False if they have to wait for the reader of `batches`."""
        if self.send_now is None or not self._reader_waits or self._changed.is_set():
            return False
        try:
            return self.send_now(parts)
        except Exception as error:  # noqa: BLE001  raised by `batches`
            self._error = error
            self._changed.set()
            return True

    def end(self, error: ApiError | None) -> None:
        """Mark the request as ended. `batches` raises the error, if it is not None."""
        self.has_ended, self._error = True, self._error or error
        self._changed.set()


class EngineClient:
    """Sends requests to the engine's process, and delivers its results. All methods are called on the event loop.

    Attributes:
      state: the newest state of the engine.
      is_ready: whether no later step waits for a compilation.
      failure: reason why the engine has ended; None while it runs, and after `stop`.
      ended: set when the engine has ended.

    Args:
      limits: limits of the server.
      metrics: metrics of the server.
      on_stop: function that is called when the engine's process has received a signal to stop.
    """

    def __init__(self, limits: ServerLimits, metrics: Metrics, on_stop: Callable[[], object] = lambda: None):
        self.is_ready, self.ended = False, asyncio.Event()
        self.state: EngineState = {}
        self.failure: str | None = None
        self._limits, self._metrics, self._on_stop = limits, metrics, on_stop
        self._ids = itertools.count()
        self._requests: dict[int, ServedRequest] = {}  # unfinished, by id
        self._refusal: ApiError | None = None  # error of all further requests
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, end: socket.socket) -> None:
        """Process the messages that arrive on a socket, until the engine has ended."""
        failure: str | None = "the process of the engine has ended"
        try:
            reader, self._writer = await asyncio.open_connection(sock=end, limit=_MAX_READ)
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                match decode_to_http(await reader.readexactly(size)):
                    case StepResults() as results:
                        self._deliver(results)
                    case Ready(state):
                        self.state, self.is_ready = state, True
                    case Stop():
                        self._on_stop()
                    case EngineEnded(failure):
                        return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:  # `stop` has waited long enough
            failure = None
            raise
        except Exception as error:  # noqa: BLE001  returned by `Server.run`
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._end_all(failure)
            if self._writer is not None:
                self._writer.close()
                with contextlib.suppress(OSError):
                    await self._writer.wait_closed()

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return not self.ended.is_set()

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Number of unfinished requests without a token."""
        return sum(not request.has_started for request in self._requests.values())

    def add(self, request: ServedRequest) -> None:
        """Start a request.

        Raises:
          ApiError: messages cannot represent the request, or `abort_all` was called, or the engine has ended.
        """
        if self._refusal is not None:
            raise ApiError(*self._refusal.fields)
        request_id = next(self._ids)
        try:
            self._send(Add(request_id, [*request.prompts], request.salt))
        except (OverflowError, ValueError) as error:
            raise ApiError(f"request: expected integers of at most 64 bits and valid Unicode: {error}") from error
        request.request_id = request_id
        self._requests[request_id] = request
        self._metrics.waiting.inc()

    def abort(self, request: ServedRequest, error: ApiError | None = None) -> None:
        """End a request. Its pages are free before the next step. Nothing happens if it has ended."""
        if request.request_id in self._requests:
            self._send(Abort(request.request_id))
            self._metrics.finished("abort")
            self._end(request, error)

    def abort_all(self, error: ApiError) -> None:
        """End all requests with an error, and refuse further requests with it."""
        self._refusal = self._refusal or error
        for request in [*self._requests.values()]:
            self.abort(request, error)

    async def stop(self, timeout_s: float = 20.0) -> None:
        """End the engine after the current step. If it has not ended after the time, return nevertheless."""
        self._send(Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()

    def _send(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    def _end(self, request: ServedRequest, error: ApiError | None = None) -> None:
        """Remove a request that has ended."""
        if self._requests.pop(request.request_id, None) is not None:
            (self._metrics.running if request.has_started else self._metrics.waiting).dec()
            self._metrics.queried_tokens.inc(sum(len(prompt.ids) for prompt in request.prompts))
            self._metrics.latency.observe(time.perf_counter() - request.arrived_s)
            request.end(error)

    def _deliver(self, results: StepResults) -> None:
        """Give the results of a step to the requests. Results of requests that were aborted are ignored."""
        if results.state is not None:
            self.state = results.state
        if results.has_failed:
            self._metrics.engine_errors.inc()
        now, tokens = time.perf_counter(), 0
        for request_id, new in results.parts.items():
            if (request := self._requests.get(request_id)) is not None:
                tokens += request.receive(new, now, self._metrics)
                if request.num_unread > self._limits.max_unread_tokens:
                    self.abort(request, ApiError("the client reads too slowly", 408, code="slow_reader"))
        self._metrics.generation_tokens.inc(tokens)
        for request_id, given in results.ended.items():
            if (request := self._requests.get(request_id)) is not None:
                if given is not None:
                    self._metrics.finished("error")
                self._end(request, None if given is None else ApiError(*given))

    def _end_all(self, failure: str | None) -> None:
        """End all requests, because the engine has ended."""
        self.failure = failure
        self._refusal = error = ApiError(failure or "the server stops", 500 if failure else 503)
        for request in [*self._requests.values()]:
            self._end(request, error)
        self.ended.set()
