"""The thread that owns the `LLM`, and the requests that it serves.

The thread repeats:

    take commands from the event loop: add or abort a request    # blocks while nothing is unfinished
    llm.step()
    deltas = stream.take() for each stream
    loop.call_soon_threadsafe(deliver, deltas)                       # one call per step

The event loop never calls the LLM. A `ServedRequest` belongs to the event loop, except its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from pallas_attn.models.llm import LLM, Delta, PreparedPrompt, Stream
from pallas_attn.models.llm.results import TokenLogprobTable
from pallas_attn.models.server.limits import ApiError, ServerLimits
from pallas_attn.models.server.metrics import EngineState, Metrics
from pallas_attn.models.server.protocol import of_engine

LOGGER = logging.getLogger("pallas_attn.server")


class Part(NamedTuple):
    """New tokens of one output.

    Attributes:
      prompt: number of the prompt in its request.
      delta: tokens and text.
      cached_tokens: number of prompt tokens found in the prefix cache, in the last part of the first output.
      prompt_logprobs: log probabilities of the prompt in the first part of the first output, if requested.
    """

    prompt: int
    delta: Delta
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobTable | None] | None = None


class ServedRequest:
    """Outputs of the prompts of one request. The event loop reads them with `batches`.

    Attributes:
      prompts: the prompts.
      salt: salt of the prefix cache.
      is_streamed: whether `batches` yields parts as soon as they arrive; otherwise when an output ends.
      send_now: function that sends parts to the client without waiting, or returns False and does nothing if this is
        not possible; None to send all parts with `batches`. It is called while the reader of `batches` waits, with
        parts that end no output.
      num_unread: number of tokens of a stream that have arrived, but not been sent or taken from `batches`.
      streams: streams of the prompts. Only the engine's thread uses them.
      without_prompt_logprobs: prompts whose log probabilities are requested and not delivered yet, of the same thread.
      arrived_s: time of arrival of the request (`time.perf_counter`).
    """

    def __init__(self, prompts: Sequence[PreparedPrompt], salt: str, arrived_s: float, *, is_streamed: bool):
        self.prompts, self.salt, self.arrived_s, self.is_streamed = prompts, salt, arrived_s, is_streamed
        self.send_now: Callable[[Sequence[Part]], bool] | None = None
        self.num_unread = 0
        self.streams: list[Stream] = []
        self.has_started = self.has_ended = False
        self.without_prompt_logprobs = {
            i for i, prompt in enumerate(prompts) if prompt.params.prompt_logprobs is not None
        }
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


class EngineThread:
    """Runs an LLM in a thread. All methods are called on the event loop.

    Attributes:
      state: state of the engine after the newest step.
      is_ready: whether all steps are compiled.
      failure: reason why the thread has ended; None while it runs, and after `stop`.
      ended: set when the thread has ended.

    Args:
      llm: the LLM. Only the thread uses it afterwards.
      limits: limits of the server.
      metrics: metrics of the server.
      at_end: function that the thread calls at its end, unless it has failed.
    """

    def __init__(self, llm: LLM, limits: ServerLimits, metrics: Metrics, at_end: Callable[[], object] = lambda: None):
        self.state, self.is_ready, self.ended = EngineState(), False, asyncio.Event()
        self.failure: str | None = None
        self._llm, self._limits, self._metrics, self._at_end = llm, limits, metrics, at_end
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[tuple[str, ServedRequest | None]] = queue.SimpleQueue()
        self._requests: set[ServedRequest] = set()  # unfinished, of the event loop
        self._open: dict[ServedRequest, None] = {}  # unfinished, of the thread
        self._closing: list[Stream] = []
        self._errors, self._updated_s = 0, 0.0  # consecutive failed steps; time of `state`
        self._step_began_s: float | None = None  # start of the current step
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if limits.step_s is not None:
            self._watch(limits.step_s)

    # --- event loop

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self.ended.is_set()

    def thread_runs(self) -> bool:
        """Return whether the thread has not ended, for example because the device does not end a step. Wait a second
        for the last instructions of the thread."""
        self._thread.join(1.0)
        return self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Number of unfinished requests without a token."""
        return sum(not request.has_started for request in self._requests)

    def add(self, request: ServedRequest) -> None:
        """Start a request."""
        self._requests.add(request)
        self._metrics.waiting.inc()
        self._commands.put(("add", request))

    def abort(self, request: ServedRequest, error: ApiError | None = None) -> None:
        """End a request. Its pages are free before the next step. Nothing happens if it has ended."""
        if request in self._requests:
            self._commands.put(("abort", request))
            self._metrics.finished("abort")
            self._end(request, error)

    def abort_all(self, error: ApiError) -> None:
        """End all requests with an error."""
        for request in [*self._requests]:
            self.abort(request, error)

    async def stop(self, timeout_s: float = 20.0) -> None:
        """End the thread after the current step. If it has not ended after the time, return nevertheless."""
        self._commands.put(("stop", None))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()

    def _end(self, request: ServedRequest, error: ApiError | None = None) -> None:
        """Remove a request that has ended."""
        if request in self._requests:
            self._requests.remove(request)
            (self._metrics.running if request.has_started else self._metrics.waiting).dec()
            self._metrics.queried_tokens.inc(sum(len(prompt.ids) for prompt in request.prompts))
            self._metrics.latency.observe(time.perf_counter() - request.arrived_s)
            request.end(error)

    def _deliver(
        self,
        parts: Mapping[ServedRequest, Sequence[Part]],
        ended: Sequence[tuple[ServedRequest, ApiError | None]],
        failed: bool,
    ) -> None:
        """Give the results of a step to the requests."""
        if failed:
            self._metrics.engine_errors.inc()
        now, tokens = time.perf_counter(), 0
        for request, new in parts.items():
            if request in self._requests:
                tokens += request.receive(new, now, self._metrics)
                if request.num_unread > self._limits.max_unread_tokens:
                    self.abort(request, ApiError("the client reads too slowly", 408, code="slow_reader"))
        self._metrics.generation_tokens.inc(tokens)
        for request, error in ended:
            if error is not None and request in self._requests:
                self._metrics.finished("error")
            self._end(request, error)

    def _watch(self, limit_s: float) -> None:
        """Let the engine fail if a step takes too long. A step that waits for a hung device cannot be interrupted."""
        began_s = self._step_began_s
        if began_s is not None and time.perf_counter() - began_s > limit_s:
            self._deliver_end(f"a step of the engine has not ended after {limit_s:g} s")
        else:
            self._loop.call_later(min(limit_s / 4, 1.0), self._watch, limit_s)

    def _deliver_end(self, failure: str | None) -> None:
        if self.ended.is_set():  # `_watch` has reported the step
            return
        self.failure = failure
        for request in [*self._requests]:
            self._end(request, ApiError(failure or "the server stops", 500 if failure else 503))
        self.ended.set()

    def _set_ready(self) -> None:
        self.is_ready = True

    # --- engine thread

    def _run(self) -> None:
        failure: str | None = "the engine's thread ended"
        try:
            if self._llm.tokenizer is not None:
                with contextlib.suppress(ValueError, NotImplementedError):  # models without grammars
                    _ = self._llm.grammars
            seconds = self._llm.engine.warmup()
            LOGGER.info("ready; all steps were compiled in %.0f s", seconds)
            self._update_state(now=True)
            self._call(self._set_ready)
            failure = self._serve()
            if failure is None:
                self._at_end()
        except Exception as error:  # noqa: BLE001  reported by the main thread
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._call(self._deliver_end, failure)

    def _serve(self) -> str | None:
        """Serve requests until `stop`. Return the reason of a failure."""
        while True:
            failure: ApiError | None = None
            ended: list[tuple[ServedRequest, ApiError | None]] = []
            try:
                if not self._take_commands(ended):
                    return None
                while self._closing:
                    self._closing[-1].close()
                    self._closing.pop()
                if self._llm.has_unfinished or self._llm.engine.has_unfinished:  # the last step may be in flight
                    self._step_began_s = time.perf_counter()
                    try:
                        self._llm.step()
                    finally:
                        self._step_began_s = None
                    self._errors = 0
            except Exception as error:  # noqa: BLE001  the engine continues after errors
                self._errors += 1
                LOGGER.error("engine: %s: %s", type(error).__name__, _first_line(error))
                failure = ApiError(f"the engine failed: {type(error).__name__}", 500, code="engine_error")
                if self._errors >= self._limits.max_engine_errors:
                    return f"the engine failed {self._errors} times in succession: {_first_line(error)}"
            parts = self._take_parts(ended)
            if failure is not None:  # every request of the engine may be a part of the failed step
                for request in [*self._open]:
                    self._close(request)
                    ended.append((request, failure))
            self._update_state(now=not self._open)
            if parts or ended or failure is not None:
                self._call(self._deliver, parts, ended, failure is not None)

    def _take_commands(self, ended: list[tuple[ServedRequest, ApiError | None]]) -> bool:
        """Process all commands. Wait for a command if there is no other work. Return False after `stop`."""
        block = not (self._llm.has_unfinished or self._llm.engine.has_unfinished or self._closing)
        while True:
            try:
                kind, request = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if request is None:
                return False
            if kind == "abort":
                self._close(request)
            else:
                self._open[request] = None
                try:
                    for prompt in request.prompts:
                        request.streams.append(self._llm.add(prompt, salt=request.salt))
                except (ValueError, NotImplementedError) as error:
                    self._close(request)
                    ended.append((request, of_engine(error)))

    def _take_parts(self, ended: list[tuple[ServedRequest, ApiError | None]]) -> dict[ServedRequest, list[Part]]:
        """Return the new tokens of all requests, and append the requests that have ended."""
        result: dict[ServedRequest, list[Part]] = {}
        for request in [*self._open]:
            parts: list[Part] = []
            ends_output = False
            for i, stream in enumerate(request.streams):
                for delta in stream.take():
                    cached_tokens, prompt_logprobs = 0, None
                    if delta.finish_reason is not None:
                        ends_output = True
                        cached_tokens = stream.cached_tokens if delta.index == 0 else 0
                    if i in request.without_prompt_logprobs and delta.index == 0:
                        request.without_prompt_logprobs.remove(i)
                        prompt_logprobs = stream.prompt_logprobs
                    parts.append(Part(i, delta, cached_tokens, prompt_logprobs))
            if parts:
                result[request] = parts
            if ends_output and all(stream.is_finished for stream in request.streams):
                del self._open[request]
                ended.append((request, None))
        return result

    def _close(self, request: ServedRequest) -> None:
        """Let the next iteration abort the streams of a request."""
        if request in self._open:
            del self._open[request]
            self._closing.extend(request.streams)

    def _update_state(self, *, now: bool) -> None:
        """Store the state of the engine, at most four times per second."""
        if now or time.perf_counter() - self._updated_s > 0.25:
            self._updated_s = time.perf_counter()
            stats = self._llm.engine.stats()
            self.state = EngineState(
                kv_cache_usage=stats.used_pages / stats.num_pages,
                prefix_hit_rate=stats.prefix_hit_rate,
                num_pages=stats.num_pages,
                preemptions=stats.preemptions,
                steps=stats.num_steps,
            )

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, unless the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:500]
