"""The thread that owns the `LLM`. It serves the requests of the HTTP server, which is another process.

The thread repeats:

    take commands: add or abort a request    # blocks while nothing is unfinished
    take pages of prompts that prefill workers compute, and add complete prompts
    take programs that were compiled in the background
    llm.step()
    deltas = stream.take() for each stream
    send(StepResults(deltas))                # one message per step

Threads share Python's global lock, so no other thread of the process works per token. Other threads work per request:
one reads the socket, two prepare prompts without grammars, and two prepare prompts with grammars, whose compilation can
take seconds. Before a grammar is compiled, a process with limited time and memory converts and compiles it
(`GrammarChecker`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import llguidance

from pallas_attn.models.checkpoints.tokenizer import GrammarChecker
from pallas_attn.models.engine import IncomingPages
from pallas_attn.models.llm import LLM, PreparedPrompt, Stream, StructuredOutputs
from pallas_attn.models.llm.token_filters import given_field
from pallas_attn.models.server.messages import (
    Abort,
    Add,
    EngineEnded,
    EngineSocket,
    EngineState,
    Part,
    Ready,
    StepResults,
    Stop,
)
from pallas_attn.models.server.metrics import ENGINE_GAUGES
from pallas_attn.models.server.options import ApiError, ErrorFields, ServerLimits
from pallas_attn.models.server.prefill_workers import PrefillWorkers
from pallas_attn.models.server.protocol import of_engine

LOGGER = logging.getLogger("pallas_attn.server")

_WORKERS = 2  # threads that prepare prompts without grammars, and threads that prepare prompts with grammars

_STACK = 2**25
"""Stack of threads that compile grammars, in bytes. It must be larger than the stack of `GrammarChecker`."""

COMPILED_S = 0.1
"""Seconds after which an engine without requests takes the next program that was compiled in the background."""


@dataclasses.dataclass
class OpenRequest:
    """An unfinished request: its id in messages, its prompts, the salt of the prefix cache, and the streams of the
    prompts, which the engine's thread starts. A stream is None while a prefill worker computes the prompt."""

    request_id: int
    prompts: list[PreparedPrompt]
    salt: str
    streams: list[Stream | None] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.streams = [None] * len(self.prompts)
        requested = [prompt.params.prompt_logprobs is not None for prompt in self.prompts]
        self._without_prompt_logprobs = {i for i, is_requested in enumerate(requested) if is_requested}

    def take_parts(self) -> tuple[list[Part], bool]:
        """Return the new tokens of all outputs, and whether all outputs have ended."""
        parts: list[Part] = []
        ends_output = False
        for i, stream in enumerate(self.streams):
            for delta in () if stream is None else stream.take():
                cached_tokens, prompt_logprobs, is_last = 0, None, delta.finish_reason is not None
                ends_output |= is_last
                if stream is not None and is_last and delta.index == 0:
                    cached_tokens = stream.cached_tokens
                if stream is not None and i in self._without_prompt_logprobs and delta.index == 0:
                    self._without_prompt_logprobs.remove(i)
                    prompt_logprobs = stream.prompt_logprobs
                parts.append(Part(i, delta, cached_tokens, prompt_logprobs))
        return parts, ends_output and all(stream is not None and stream.is_finished for stream in self.streams)


class EngineThread:
    """Runs an LLM in a thread until the HTTP server sends `Stop` or ends.

    Args:
      llm: the LLM. Only the thread uses it afterwards.
      end: end of a pair of sockets. The HTTP server has the other end.
      limits: limits of the server.
      at_end: function that the thread calls at its end, unless it has failed.
      workers: prefill workers; None to compute all prompts here. Only the thread uses them afterwards.
      starts_checkers: whether the processes that check grammars start at once. Otherwise the first requests with
        grammars start them, and wait for about half a second if the vocabulary has 100,000 tokens.
    """

    def __init__(
        self,
        llm: LLM,
        end: socket.socket,
        limits: ServerLimits,
        at_end: Callable[[], object] = lambda: None,
        workers: PrefillWorkers | None = None,
        starts_checkers: bool = False,
    ):
        self._llm, self._socket, self._limits, self._at_end = llm, EngineSocket(end), limits, at_end
        self._workers, self._starts_checkers = workers, starts_checkers
        self._has_grammars = threading.Event()  # set when `LLM.grammars` was made or has failed
        self._commands: queue.SimpleQueue[OpenRequest | Abort | EngineEnded] = queue.SimpleQueue()
        self._with_grammars: queue.SimpleQueue[Add | None] = queue.SimpleQueue()  # None to end a thread
        self._lock = threading.Lock()  # of `_preparing`, together with `_commands.put`
        self._preparing: set[int] = set()  # ids
        self._open: dict[int, OpenRequest] = {}  # unfinished, by id
        self._closing: list[Stream] = []
        self._ended: dict[int, ErrorFields | None] = {}  # requests whose end was not sent yet, by id
        self._errors, self._sent_s = 0, 0.0  # consecutive failed steps; time at which the state was sent
        self._step_began_s: float | None = None  # start of the current step
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._read, name="engine commands", daemon=True).start()
        if limits.step_s is not None:
            threading.Thread(target=self._watch, args=(limits.step_s,), name="engine watch", daemon=True).start()

    def request_stop(self) -> None:
        """Let the HTTP server stop, which then stops the engine. A second call ends the grace time."""
        self._socket.send(Stop())

    def thread_runs(self) -> bool:
        """Wait up to one second for the end of the thread. Return whether the thread still runs, for example because
        the device does not end a step."""
        self._thread.join(1.0)
        return self._thread.is_alive()

    # --- other threads

    def _read(self) -> None:
        """Read messages, and let workers prepare the prompts."""
        failure: str | None = "the HTTP server has ended"
        earlier = threading.stack_size(_STACK)
        for _ in range(_WORKERS):
            threading.Thread(target=self._compile, name="engine grammars", daemon=True).start()
        threading.stack_size(earlier)
        with concurrent.futures.ThreadPoolExecutor(_WORKERS, "engine prompts") as workers:
            try:
                while (message := self._socket.receive()) is not None:
                    match message:
                        case Add():
                            with self._lock:
                                self._preparing.add(message.request_id)
                            if any(prompt.params.structured_outputs for prompt in message.prompts):
                                self._with_grammars.put(message)
                            else:
                                workers.submit(self._prepare, message)
                        case Abort():
                            with self._lock:
                                self._preparing.discard(message.request_id)
                                self._commands.put(message)
                        case Stop():
                            self._commands.put(EngineEnded(None))
                self._socket.close()
            except Exception as error:  # noqa: BLE001  the engine's thread sends the reason
                failure = f"{type(error).__name__}: {error}"
            with self._lock:
                self._preparing.clear()  # queued requests are not prepared
                self._commands.put(EngineEnded(failure))
            for _ in range(_WORKERS):
                self._with_grammars.put(None)

    def _compile(self) -> None:
        """Prepare requests with grammars."""

        @functools.cache
        def checker() -> GrammarChecker:
            grammars = self._llm.grammars
            return GrammarChecker(grammars.tokens, grammars.special_token_ids, grammars.eos_token_ids)

        def check(outputs: StructuredOutputs) -> str:
            return checker().check(*given_field(outputs))

        if self._starts_checkers and self._has_grammars.wait():
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # raised again by a request
                checker()
        while (message := self._with_grammars.get()) is not None:
            try:
                self._prepare(message, check)
            except Exception:  # later requests need the thread
                LOGGER.exception("request with a grammar")

    def _prepare(self, message: Add, check: Callable[[StructuredOutputs], str] | None = None) -> None:
        """Prepare the prompts of a request, and give the request to the engine's thread unless it was aborted.
        `check` returns the text of a grammar to compile, or raises ValueError for a grammar that needs too much time or
        memory. Requests without grammars do not need it. Prompts share the compilation of equal grammars."""
        if not self._is_wanted(message):  # aborted while earlier requests were prepared
            return
        try:
            matchers: dict[StructuredOutputs | None, llguidance.LLMatcher | None] = {None: None}
            for outputs in (prompt.params.structured_outputs for prompt in message.prompts):
                if outputs is not None and outputs not in matchers and check is not None:
                    text = check(outputs)
                    if not self._is_wanted(message):  # aborted during the check
                        return
                    matchers[outputs] = self._llm.grammars.matcher(outputs, text)
            prompts = [
                self._llm.prepare(prompt.ids, prompt.params, matcher=matchers[prompt.params.structured_outputs])
                for prompt in message.prompts
            ]
        except BaseException as error:  # a panic in Rust code is a BaseException, but no Exception
            refusal = of_engine(error)
            if refusal.status == 500:
                LOGGER.exception("preparation of a prompt")
            with self._lock:
                self._preparing.discard(message.request_id)
            self._socket.send(StepResults({}, {message.request_id: refusal.fields}))
            return
        with self._lock:
            if message.request_id in self._preparing:
                self._preparing.remove(message.request_id)
                self._commands.put(OpenRequest(message.request_id, prompts, message.salt))

    def _is_wanted(self, message: Add) -> bool:
        """Whether a request that is being prepared was not aborted."""
        with self._lock:
            return message.request_id in self._preparing

    def _watch(self, limit_s: float) -> None:
        """Report the end of the engine if a step takes too long. A step that waits for a hung device cannot be
        interrupted."""
        while self._thread.is_alive():
            began_s = self._step_began_s
            if began_s is not None and time.perf_counter() - began_s > limit_s:
                self._socket.send(EngineEnded(f"a step of the engine has not ended after {limit_s:g} s"))
                return
            time.sleep(min(limit_s / 4, 1.0))

    # --- engine thread

    def _run(self) -> None:
        failure: str | None = "the engine's thread ended"
        try:
            if self._llm.tokenizer is not None:
                with contextlib.suppress(ValueError, NotImplementedError):  # models without grammars
                    _ = self._llm.grammars
            self._has_grammars.set()
            seconds = self._llm.engine.warmup()
            stats = self._llm.engine.stats()
            LOGGER.info("ready; %d shapes of steps were compiled in %.0f s", stats.compilations, seconds)
            if stats.pending_compilations:
                LOGGER.info("compiling %d more shapes in the background", stats.pending_compilations)
            self._socket.send(Ready(self._state()))
            failure = self._serve()
            if failure is None:
                self._at_end()
        except Exception as error:  # noqa: BLE001  reported by the HTTP server
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._has_grammars.set()
            self._socket.send(EngineEnded(failure))
            if self._workers is not None:
                self._workers.close()
            self._llm.engine.close()  # may wait for a compilation

    def _serve(self) -> str | None:
        """Serve requests until `Stop`. Return the reason of a failure."""
        while True:
            failure: ApiError | None = None
            parts: dict[int, list[Part]] = {}
            try:
                if (end := self._take_commands()) is not None:
                    return end.failure
                if self._workers is not None:
                    self._workers.poll()
                self._llm.engine.take_compiled()
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
            for request in [*self._open.values()]:
                new, is_last = request.take_parts()
                if new:
                    parts[request.request_id] = new
                if is_last:
                    del self._open[request.request_id]
                    self._ended[request.request_id] = None
            if failure is not None:  # every request of the engine may be a part of the failed step
                for request_id in [*self._open]:
                    self._close(request_id, failure)
            state = self._state() if not self._open or time.perf_counter() - self._sent_s > 0.25 else None
            if parts or self._ended or state is not None or failure is not None:
                self._socket.send(StepResults(parts, self._ended, state, failure is not None))
                self._ended = {}

    def _take_commands(self) -> EngineEnded | None:
        """Process all commands. Wait for a command if there is no other work. Return the command to end, if any."""
        block = not (self._llm.has_unfinished or self._llm.engine.has_unfinished or self._closing)
        timeout_s = COMPILED_S if self._llm.engine.is_compiling else None
        if self._workers is not None:
            timeout_s = min(self._workers.poll_s, timeout_s or self._workers.poll_s)
        while True:
            try:
                command = self._commands.get(block=block, timeout=timeout_s)
            except queue.Empty:
                return None
            block = False
            if isinstance(command, EngineEnded):
                return command
            if isinstance(command, Abort):
                self._close(command.request_id)
                continue
            self._open[command.request_id] = command
            for i, prompt in enumerate(command.prompts):
                start = functools.partial(self._start, command, i)
                if self._workers is None or not self._workers.send(_name(command, i), prompt, command.salt, start):
                    start()
                if command.request_id not in self._open:
                    break

    def _start(self, request: OpenRequest, i: int, incoming: IncomingPages | None = None) -> None:
        """Add prompt `i` of a request to the LLM, with the pages that have arrived. If it cannot be added, the request
        ends with an error."""
        try:
            request.streams[i] = self._llm.add(request.prompts[i], salt=request.salt, incoming=incoming)
        except (ValueError, NotImplementedError) as error:
            if incoming is not None:
                incoming.close()
            self._close(request.request_id, of_engine(error))

    def _close(self, request_id: int, error: ApiError | None = None) -> None:
        """Let the next iteration abort the streams of a request, and send the error. Do nothing if the request has
        ended."""
        if (request := self._open.pop(request_id, None)) is not None:
            self._closing.extend(stream for stream in request.streams if stream is not None)
            for i, stream in enumerate(request.streams):
                if stream is None and self._workers is not None:
                    self._workers.abort(_name(request, i))
            if error is not None:
                self._ended[request_id] = error.fields

    def _state(self) -> EngineState:
        """Return the state of the engine, which is sent now."""
        self._sent_s = time.perf_counter()
        stats = self._llm.engine.stats()
        state = {name: float(read(stats)) for name, (_, read) in ENGINE_GAUGES.items()}
        return state if self._workers is None else state | self._workers.state()


def _name(request: OpenRequest, i: int) -> str:
    """Return the name of prompt `i` of a request for `PrefillWorkers`."""
    return f"{request.request_id}.{i}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:500]
