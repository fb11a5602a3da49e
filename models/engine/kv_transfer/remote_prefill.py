"""Disaggregated prefill: one engine computes prompts, another decodes, and pages are sent layer by layer.

prefill process                                    decode process
serve_prefill(engine, transport)                   RemotePrefill(engine, transport)
                             <- prompt                 add_request
  step: layer 0 written      -> layer                  poll: written to held page rows
        layer 1 written      -> layer                  poll: written; published after the last layer
  prompt computed            -> done                   poll: request added to the engine, finds its pages
                                                       step: tokens after the last full page, then decoding
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from models.engine.engine import Engine, OnToken
from models.engine.kv_transfer.cached_pages import difference
from models.engine.kv_transfer.incoming_pages import IncomingPages
from models.engine.kv_transfer.transport import Transport, TransportError
from models.engine.kv_transfer.written_pages import ConsumerError, WrittenLayer
from models.engine.outputs import RequestId, RequestOutput
from models.engine.request import Request, SamplingParams, as_integers

VERSION = 1
"""Version of the message format."""

_INBOX = 256
"""Maximum number of received messages that wait for the engine. When the queue is full, the sender blocks."""

_PREFILL = SamplingParams(max_tokens=1)


class TransferError(RuntimeError):
    """The other engine's process ended, does not answer, or sent an invalid message."""


HandOverError = TransferError
"""Former name of `TransferError`."""


class _Inbox:
    """Messages of a transport, received on a separate thread, so that the sender does not wait for a step to end."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._messages: queue.Queue[tuple[dict[str, Any], dict[str, np.ndarray]] | TransportError] = queue.Queue(_INBOX)
        threading.Thread(target=self._run, name="pages arriving", daemon=True).start()

    def next(self, timeout_s: float) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """Return the next message; None if none arrives within `timeout_s`.

        Raises:
          TransferError: the connection is closed and all messages have been read.
        """
        try:
            message = self._messages.get(timeout=timeout_s) if timeout_s > 0 else self._messages.get_nowait()
        except queue.Empty:
            return None
        if isinstance(message, TransportError):
            raise TransferError(f"transport: {message}") from message
        return message

    def _run(self) -> None:
        try:
            while True:
                self._messages.put(self._transport.receive())
        except TransportError as error:
            self._messages.put(error)


def _greet(engine: Engine, transport: Transport, inbox: _Inbox, timeout_s: float) -> None:
    """Exchange cache formats with the other process, and check that they are equal."""
    _send(transport, {"kind": "hello", "version": VERSION, "made_for": engine.cache_format})
    message = inbox.next(timeout_s)
    if message is None:
        raise TransferError(f"transport: no message within {timeout_s:g} s")
    header, _ = message
    if (header.get("kind"), header.get("version")) != ("hello", VERSION):
        raise TransferError(f"transport: expected a greeting of version {VERSION}, got {str(header)[:100]}")
    if (unlike := difference(header.get("made_for") or {}, engine.cache_format)) is not None:
        raise ValueError(f"engine: expected the cache format of the other process, which has {unlike}")


_NO_ARRAYS: Mapping[str, np.ndarray] = MappingProxyType({})


def _send(transport: Transport, header: dict[str, Any], arrays: Mapping[str, np.ndarray] = _NO_ARRAYS) -> None:
    try:
        transport.send(header, arrays)
    except TransportError as error:
        raise TransferError(f"transport: {error}") from error


# --- prefill process


def serve_prefill(engine: Engine, transport: Transport, *, timeout_s: float = 60.0, max_bytes: int = 2**30) -> int:
    """Compute the prompts of a `RemotePrefill` and send their pages layer by layer, until the other process closes.

    Args:
      engine: engine with a prefix cache. Other threads must not use it during this call.
      transport: connection to the other process; closed at the end.
      timeout_s: maximum time in seconds that pages may wait to be sent.
      max_bytes: backlog of unsent pages in bytes above which no step is launched.

    Returns:
      Number of computed prompts.

    Raises:
      TransferError: the other process ended or does not receive. All its prompts have been aborted, so no page is held.
        Computed pages stay in the prefix cache.
      ValueError: the engines have different cache formats; or as `Engine.watch_written`.
      NotImplementedError: as `Engine.watch_written`.
    """
    return _PrefillServer(engine, transport, timeout_s, max_bytes).serve()


class _PrefillServer:
    """Loop of `serve_prefill`."""

    def __init__(self, engine: Engine, transport: Transport, timeout_s: float, max_bytes: int):
        self._engine, self._transport = engine, transport
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        self._numbers: dict[RequestId, int] = {}  # the other process's number of each unfinished prompt
        self._names: dict[RequestId, int] = {}  # and of prompts with layers left to send; read by the feed's thread
        self._ended = False
        self._served = 0

    def serve(self) -> int:
        engine, inbox = self._engine, _Inbox(self._transport)
        try:
            _greet(engine, self._transport, inbox, self._timeout_s)
            feed = engine.watch_written(self._send_layer, max_bytes=2 * self._max_bytes)
            try:
                while not self._ended:
                    if not feed.wait_below(self._max_bytes, self._timeout_s):
                        raise TransferError(f"transport: no page was received for {self._timeout_s:g} s")
                    if feed.error is not None:
                        raise feed.error
                    engine.step()
                    for request_id in [r for r in self._numbers if engine.output(r).finish_reason is not None]:
                        self._finish(request_id, feed)
                    self._take(inbox)
            except ConsumerError as error:
                while not self._ended and (message := inbox.next(0)) is not None:
                    self._ended = message[0].get("kind") == "bye"
                if not self._ended:  # otherwise the other process closed regularly
                    raise TransferError(f"transport: {error}") from error
            finally:
                feed.close()
                for request_id in self._numbers:
                    engine.abort(request_id)
        finally:
            self._transport.close()
        return self._served

    def _take(self, inbox: _Inbox) -> None:
        """Handle messages of the other process. Wait for messages while no prompt is unfinished."""
        while not self._ended:
            message = inbox.next(0 if self._numbers else 1.0)
            if message is None:
                if self._numbers:
                    return
                continue
            header, _ = message
            match header:
                case {"kind": "prompt", "number": int(number), "tokens": list(tokens), "salt": str(salt)}:
                    self._add(number, tokens, salt)
                case {"kind": "bye"}:
                    self._ended = True
                case _:
                    raise TransferError(f"transport: expected a prompt, got {str(header)[:100]}")

    def _add(self, number: int, tokens: list[int], salt: str) -> None:
        try:
            request_id = self._engine.add_request(tokens, _PREFILL, salt=salt)
        except ValueError as error:
            _send(self._transport, {"kind": "refused", "number": number, "reason": str(error)})
            return
        refusal = self._engine.output(request_id).refusal
        if refusal is not None:
            _send(self._transport, {"kind": "refused", "number": number, "reason": refusal})
            return
        self._numbers[request_id] = self._names[request_id] = number

    def _finish(self, request_id: RequestId, feed: Any) -> None:
        number = self._numbers.pop(request_id)
        self._engine.forget(request_id)
        self._served += 1

        def done() -> None:
            _send(self._transport, {"kind": "done", "number": number})
            del self._names[request_id]

        feed.afterwards(done)

    def _send_layer(self, written: WrittenLayer) -> None:
        """Send a layer. Runs on the feed's thread."""
        chunks = [[self._names[chunk.request_id], chunk.first_page] for chunk in written.chunks]
        arrays = {f"rows.{i}": chunk.rows for i, chunk in enumerate(written.chunks)}
        arrays |= {f"pages.{name}": array for name, array in written.contents.items()}
        header = {"kind": "layer", "step": written.step, "layer": written.layer, "chunks": chunks}
        _send(self._transport, header, arrays)


# --- decode process


@dataclasses.dataclass(eq=False)
class _Prompt:
    """A prompt that the prefill process computes."""

    tokens: tuple[int, ...]
    params: SamplingParams
    request_id: RequestId
    salt: str
    on_token: OnToken | None
    incoming: IncomingPages


class RemotePrefill:
    """Sends prompts to a prefill process and writes their pages into an engine's cache as they arrive.

    This object and the engine must be used from one thread. A prompt becomes a request of the engine once all its pages
    have arrived. The engine itself computes pages that did not fit or that it released for other requests.

    Example:
      remote = RemotePrefill(engine, SocketTransport(connection))
      remote.add_request(prompt, SamplingParams(max_tokens=64), request_id="first")
      while remote.pending or engine.has_unfinished:
          remote.poll(0.0 if engine.has_unfinished else 0.05)
          engine.step()
      remote.close()
    """

    def __init__(self, engine: Engine, transport: Transport, *, timeout_s: float = 60.0):
        """Wait until the prefill process answers.

        Args:
          engine: engine with a prefix cache, which continues the prompts.
          transport: connection to a process in `serve_prefill`.
          timeout_s: time in seconds without a message after which the process counts as failed, if prompts are pending.

        Raises:
          TransferError: the prefill process ended or does not answer.
          ValueError: the engines have different cache formats.
        """
        self._engine, self._transport, self._timeout_s = engine, transport, timeout_s
        self._inbox = _Inbox(transport)
        self._prompts: dict[int, _Prompt] = {}
        self._next = 0
        self._error: TransferError | None = None
        try:
            _greet(engine, transport, self._inbox, timeout_s)
        except BaseException:
            transport.close()
            raise
        self._last_message_s = time.monotonic()

    @property
    def pending(self) -> tuple[RequestId, ...]:
        """Ids of prompts that the prefill process has not finished."""
        return tuple(prompt.request_id for prompt in self._prompts.values())

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        request_id: RequestId,
        salt: str = "",
        on_token: OnToken | None = None,
    ) -> None:
        """Send a prompt to the prefill process; arguments as in `Engine.add_request`.

        Raises:
          TransferError: the prefill process ended.
          ValueError: ids outside the vocabulary, a prompt longer than the cache, or a request_id in use.
        """
        self._check()
        if request_id in self.pending or self._engine.knows(request_id):
            raise ValueError(f"request_id: expected a new one, got {request_id!r} again")
        ids = Request(request_id, as_integers("prompt_ids", prompt_ids), params, salt).prompt_ids  # checks all of it
        incoming = self._engine.receive_pages(ids, self._engine.cache_format, salt=salt)
        number, self._next = self._next, self._next + 1
        if not self._prompts:
            self._last_message_s = time.monotonic()
        self._prompts[number] = _Prompt(ids, params, request_id, salt, on_token, incoming)
        message = {"kind": "prompt", "number": number, "tokens": list(ids), "salt": salt}
        try:
            _send(self._transport, message)
        except TransferError as error:
            self._fail(error)
            raise

    def poll(self, timeout_s: float = 0.0) -> list[RequestId]:
        """Process messages that have arrived.

        Args:
          timeout_s: maximum time to wait for the first message.

        Returns:
          Ids of requests that were added to the engine, in order.

        Raises:
          TransferError: the prefill process ended, does not answer, or sent an invalid message. Complete pages stay in
            the prefix cache. `compute_here` adds the pending prompts to the engine; it and `close` release incomplete
            pages.
        """
        self._check()
        given: list[RequestId] = []
        try:
            message = self._inbox.next(timeout_s)
            while message is not None:
                self._last_message_s = time.monotonic()
                self._take(*message, given)
                message = self._inbox.next(0)
            if self._prompts and time.monotonic() - self._last_message_s > self._timeout_s:
                raise TransferError(f"transport: no message for {self._timeout_s:g} s")
        except TransferError as error:
            self._fail(error)
            if given:
                return given  # the next call raises
            raise
        return given

    def compute_here(self) -> list[RequestId]:
        """Add all pending prompts to the engine, with the pages that have arrived. Return their ids."""
        return [self._add_to_engine(number) for number in [*self._prompts]]

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams = SamplingParams()
    ) -> list[RequestOutput]:
        """Run prompts to their ends, as `Engine.generate`.

        Raises:
          TransferError: as `poll`. The requests remain in the engine.
        """
        names = [f"remote {self._next + i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.add_request(prompt, params, request_id=name)
        while self.pending or self._engine.has_unfinished:
            self.poll(0.0 if self._engine.has_unfinished else 0.05)
            self._engine.step()
        outputs = [self._engine.output(name) for name in names]
        for name in names:
            self._engine.forget(name)
        return outputs

    def close(self) -> None:
        """Notify the prefill process, close the connection, and release the pages of pending prompts."""
        if self._error is None:
            self._error = TransferError("transport: closed")
            with contextlib.suppress(TransportError):  # the prefill process has ended already
                self._transport.send({"kind": "bye"})
        for prompt in self._prompts.values():
            prompt.incoming.close()
        self._prompts.clear()
        self._transport.close()

    def _check(self) -> None:
        if self._error is not None:
            raise TransferError(str(self._error)) from self._error

    def _fail(self, error: TransferError) -> None:
        """Record that the prefill process has failed. Pages are held until `compute_here` or `close`."""
        self._error = error
        self._transport.close()

    def _take(self, header: dict[str, Any], arrays: dict[str, np.ndarray], given: list[RequestId]) -> None:
        try:
            match header:
                case {"kind": "layer", "step": int(step), "layer": int(layer), "chunks": list(chunks)}:
                    contents = {n.removeprefix("pages."): a for n, a in arrays.items() if n.startswith("pages.")}
                    for i, (number, first_page) in enumerate(chunks):
                        incoming = self._prompts[number].incoming
                        incoming.write(step, layer, first_page, arrays[f"rows.{i}"], contents)
                case {"kind": "done", "number": int(number)}:
                    given.append(self._add_to_engine(number))
                case {"kind": "refused", "number": int(number), "reason": str()}:
                    given.append(self._add_to_engine(number))  # this engine accepts the prompt or reports a refusal
                case _:
                    raise ValueError(f"a message of another kind: {str(header)[:100]}")
        except (ValueError, LookupError, TypeError) as error:
            raise TransferError(f"transport: {type(error).__name__}: {error}") from error

    def _add_to_engine(self, number: int) -> RequestId:
        """Add a prompt to the engine, with its pages."""
        prompt = self._prompts[number]
        self._engine.add_request(
            prompt.tokens,
            prompt.params,
            request_id=prompt.request_id,
            salt=prompt.salt,
            on_token=prompt.on_token,
            incoming=prompt.incoming,
        )
        del self._prompts[number]
        return prompt.request_id
