"""Disaggregated prefill: one engine computes prompts and sends their KV-cache pages layer by layer to another engine,
which decodes.

prefill process                                    decode process
serve_prefill(engine, transport)                   RemotePrefill(engine, transport)
                            <-> hello, proof, format   both must have the same secret and cache format
                             <- prompt                 add_request
  step: layer 0 written      -> layer                  poll: written to held page rows
        layer 1 written      -> layer                  poll: written; after the last layer, pages enter the prefix cache
  prompt computed            -> done                   poll: request added to the engine, finds its pages
                                                       step: tokens after the last full page, then decoding
                             <- bye                    close
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import itertools
import json
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pallas_attn.models.engine.engine import Engine, OnToken
from pallas_attn.models.engine.kv_transfer.cached_pages import difference
from pallas_attn.models.engine.kv_transfer.fields import (
    Array,
    Integer,
    Kind,
    ListOf,
    ObjectOf,
    OneOf,
    TextUpTo,
    check_field,
)
from pallas_attn.models.engine.kv_transfer.incoming_pages import IncomingPages
from pallas_attn.models.engine.kv_transfer.transport import Transport, TransportError
from pallas_attn.models.engine.kv_transfer.written_pages import ConsumerError, WrittenFeed, WrittenLayer
from pallas_attn.models.engine.outputs import RequestId, RequestOutput
from pallas_attn.models.engine.request import Request, SamplingParams, as_integers
from pallas_attn.models.engine.token_filter import TokenFilter
from pallas_attn.models.engine.tracked_request import TrackedRequest

VERSION = 3
"""Version of the message format."""

MAX_PROMPTS = 256
"""Maximum number of unfinished prompts in the prefill process. `RemotePrefill` sends further prompts later, and
`serve_prefill` refuses them."""

_MAX_MESSAGES = 256
"""Maximum number of received messages that wait for the engine. With more, the receiving thread pauses, and the sender
blocks once the socket's buffers are full."""

_INBOX_BYTES = 2**28
"""Default maximum for the total size of received messages that wait for the engine, in bytes."""

_MESSAGES_PER_CALL = 64
"""Maximum number of messages handled between two steps of an engine."""

LEAST_SECRET = 16
"""Minimum length of a shared secret in bytes."""

_PREFILL = SamplingParams(max_tokens=1)

_NUMBER = Integer()
_SALT = TextUpTo(2**16)  # a character may need 12 bytes of JSON, and a header has at most 1 MiB
_GREETING: dict[str, dict[str, Kind]] = {
    "hello": {"version": Integer(VERSION, VERSION), "role": OneOf(("prefill", "decode")), "nonce": TextUpTo(64)},
    "proof": {"code": TextUpTo(64)},
    "format": {"made_for": ObjectOf()},
}
"""Fields of the first three messages, in this order, which both processes send."""

_TO_PREFILL: dict[str, dict[str, Kind]] = _GREETING | {
    "prompt": {"number": _NUMBER, "salt": _SALT},
    "abort": {"number": _NUMBER},
    "bye": {},
}
"""Fields of messages to the prefill process, by kind. A prompt has the array `tokens` (int32 [n])."""

_TO_DECODE: dict[str, dict[str, Kind]] = _GREETING | {
    "layer": {
        "step": Integer(),
        "layer": Integer(0, 2**16),
        "chunks": ListOf((_NUMBER, Integer(0, 2**31 - 1)), most=MAX_PROMPTS, least=1),
    },
    "done": {"number": _NUMBER},
    "refused": {"number": _NUMBER, "reason": TextUpTo(2**12)},
}
"""Fields of messages to the decode process, by kind.

A chunk of a `layer` message is a pair (number of the prompt, index of the first page). The message has an array
`rows.<index of the chunk>` (int32 [heads, pages]) for each chunk, and arrays `pages.<name>` with the contents of the
page rows; see `WrittenLayer`.
"""

type _Message = tuple[dict[str, Any], dict[str, np.ndarray]]


class TransferError(RuntimeError):
    """The other engine's process ended, does not answer, or sent an invalid message."""


HandOverError = TransferError
"""Former name of `TransferError`."""


def _check_message(header: Any, arrays: Mapping[str, np.ndarray], kinds: Mapping[str, Mapping[str, Kind]]) -> None:
    """Check that `kinds` contains the kind of a message, and that the message has exactly the fields and arrays of its
    kind.

    Args:
      header: header of the message.
      arrays: arrays of the message.
      kinds: expected fields by kind, for example `_TO_PREFILL`.

    Raises:
      ValueError: the message is of another kind, or has other fields or arrays. The text of the error contains the name
        of the field, the expectation and the value.
    """
    check_field("message", header, ObjectOf())
    check_field("kind", header.get("kind"), OneOf(tuple(kinds)))
    kind = header["kind"]
    check_field(kind, {name: value for name, value in header.items() if name != "kind"}, kinds[kind])
    expected: dict[str, Kind] = {}
    if kind == "prompt":
        expected = {"tokens": Array("int32", (None,))}
    elif kind == "layer":
        expected = {f"rows.{i}": Array("int32", (None, None)) for i in range(len(header["chunks"]))}
        arrays = {name: array for name, array in arrays.items() if not name.startswith("pages.")}
    check_field(f"{kind}.arrays", dict(arrays), expected)


def _num_bytes(value: Any) -> int:
    """Return the memory that a message's header, or its arrays, take in bytes."""
    match value:
        case dict():
            return sys.getsizeof(value) + sum(_num_bytes(k) + _num_bytes(v) for k, v in value.items())
        case list():
            return sys.getsizeof(value) + sum(map(_num_bytes, value))
        case np.ndarray():
            return sys.getsizeof(value) + value.nbytes
        case _:
            return sys.getsizeof(value)


class _Inbox:
    """Messages of a transport. A separate thread receives them, so that the sender need not wait for a step to end.

    The thread checks each message with `_check_message`. It pauses while `_MAX_MESSAGES` messages or more than
    `max_bytes` bytes wait in the inbox; an inbox without messages takes a message of any size.
    """

    def __init__(self, transport: Transport, kinds: Mapping[str, Mapping[str, Kind]], max_bytes: int):
        self._transport, self._kinds, self._max_bytes = transport, kinds, max_bytes
        self._changed = threading.Condition()
        self._messages: deque[tuple[_Message, int]] = deque()  # messages and their sizes in bytes
        self._num_bytes = 0
        self._error: BaseException | None = None
        self._closed = False
        threading.Thread(target=self._run, name="pages arriving", daemon=True).start()

    def next(self, timeout_s: float) -> _Message | None:
        """Return the next message; None if none arrives within `timeout_s`.

        Raises:
          TransferError: the receiving thread ended, for any reason, and all earlier messages have been returned.
        """
        with self._changed:
            if timeout_s > 0:
                self._changed.wait_for(lambda: self._messages or self._error is not None, timeout_s)
            if self._messages:
                message, num_bytes = self._messages.popleft()
                self._num_bytes -= num_bytes
                self._changed.notify_all()
                return message
            if self._error is None:
                return None
            kind = "" if isinstance(self._error, TransportError | ValueError) else f"{type(self._error).__name__}: "
            raise TransferError(f"transport: {kind}{self._error}") from self._error

    def close(self) -> None:
        """Drop all messages. The thread ends once the transport is closed, too."""
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._num_bytes = 0
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._add(self._transport.receive()):
                pass
        except BaseException as error:  # noqa: BLE001 - `next` raises it; otherwise the engine's thread would wait forever
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _add(self, message: _Message) -> bool:
        """Add a message as soon as there is room. Return False if the inbox was closed."""
        _check_message(*message, self._kinds)
        num_bytes = sum(map(_num_bytes, message))
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(num_bytes))
            if self._closed:
                return False
            self._messages.append((message, num_bytes))
            self._num_bytes += num_bytes
            self._changed.notify_all()
        return True

    def _has_room(self, num_bytes: int) -> bool:
        fits = len(self._messages) < _MAX_MESSAGES and self._num_bytes + num_bytes <= self._max_bytes
        return fits or not self._messages


# --- greeting


def _check_secret(secret: bytes | None) -> None:
    if secret is None:
        return
    if not isinstance(secret, bytes):
        raise ValueError(f"secret: expected bytes or None, got a {type(secret).__name__}")
    if len(secret) < LEAST_SECRET:
        raise ValueError(f"secret: expected at least {LEAST_SECRET} bytes, got {len(secret)}")


def _greet(
    engine: Engine, transport: Transport, inbox: _Inbox, timeout_s: float, secret: bytes | None, role: str
) -> None:
    """Check that the other process has the other role, the same secret and the same cache format.

    Each process sends a random nonce, and proves with an HMAC of both nonces and its role that it has the secret. The
    HMAC includes the role, so that an attacker cannot authenticate by sending a process its own proof. A process sends
    its cache format only after it has checked the proof of the other process.

    Args:
      timeout_s: time limit of the greeting in seconds.
      secret: shared secret; None if neither process has one.
      role: role of this process, "prefill" or "decode".

    Raises:
      TransferError: the other process ended, does not answer in time, or has the same role or another secret.
      ValueError: the cache formats differ.
    """
    deadline_s = time.monotonic() + timeout_s
    nonces = {role: secrets.token_hex(32)}
    _send(transport, {"kind": "hello", "version": VERSION, "role": role, "nonce": nonces[role]})
    hello = _greeting(inbox, "hello", deadline_s, timeout_s)
    other: str = hello["role"]
    if other == role:
        raise TransferError(f"transport: expected a process of the other role, got another {role} process")
    nonces[other] = hello["nonce"]
    _send(transport, {"kind": "proof", "code": _proof(secret, role, nonces)})
    code: str = _greeting(inbox, "proof", deadline_s, timeout_s)["code"]
    if (secret is None) != (code == ""):
        has = "has none, and this process has one" if code == "" else "has one, and this process has none"
        raise TransferError(f"transport: secret: the other process {has}")
    if not hmac.compare_digest(code.encode(), _proof(secret, other, nonces).encode()):
        raise TransferError("transport: secret: the other process has another one")
    _send(transport, {"kind": "format", "made_for": engine.cache_format})
    made_for = _greeting(inbox, "format", deadline_s, timeout_s)["made_for"]
    if (unlike := difference(made_for, engine.cache_format)) is not None:
        raise ValueError(f"engine: expected the cache format of the other process, which has {unlike}")


def _greeting(inbox: _Inbox, kind: str, deadline_s: float, timeout_s: float) -> dict[str, Any]:
    """Return the header of the next message, which must be of this kind.

    Raises:
      TransferError: no message arrives before `deadline_s`, or the message is of another kind.
    """
    message = inbox.next(max(deadline_s - time.monotonic(), 1e-3))
    if message is None:
        raise TransferError(f"transport: no greeting within {timeout_s:g} s")
    header, _ = message
    if header["kind"] != kind:
        raise TransferError(f"transport: kind: expected {kind}, got {header['kind']}")
    return header


def _proof(secret: bytes | None, role: str, nonces: Mapping[str, str]) -> str:
    """Return the HMAC with which a process of this role proves that it has the secret; "" without a secret."""
    if secret is None:
        return ""
    text = json.dumps(["pallas_attn KV-cache transfer", VERSION, role, nonces["prefill"], nonces["decode"]])
    return hmac.digest(secret, text.encode(), "sha256").hex()


_NO_ARRAYS: Mapping[str, np.ndarray] = MappingProxyType({})


def _send(transport: Transport, header: dict[str, Any], arrays: Mapping[str, np.ndarray] = _NO_ARRAYS) -> None:
    try:
        transport.send(header, arrays)
    except (TransportError, ValueError) as error:  # ValueError: the message exceeds a limit of the transport
        raise TransferError(f"transport: {error}") from error


def _remove(engine: Engine, requests: Sequence[TrackedRequest]) -> None:
    """Abort the unfinished requests among `requests`, and delete the engine's records of all of them."""
    for tracked in requests:
        request_id = tracked.request.request_id
        if engine.knows(request_id):
            engine.abort(request_id)
        if engine.knows(request_id):  # an abort may delete the oldest records
            engine.forget(request_id)


# --- prefill process


def serve_prefill(
    engine: Engine,
    transport: Transport,
    *,
    timeout_s: float = 60.0,
    max_bytes: int = 2**30,
    secret: bytes | None = None,
) -> int:
    """Compute the prompts of a `RemotePrefill` and send their pages layer by layer, until the other process closes.

    Args:
      engine: engine with a prefix cache. Other threads must not use it during this call.
      transport: connection to the other process; closed at the end.
      timeout_s: time limit in seconds: of the greeting, and of each wait for the backlog of unsent pages to shrink to
        `max_bytes`.
      max_bytes: no step is launched while the backlog of unsent pages is larger than this number of bytes.
      secret: at least 16 bytes. Only a process with the same secret is served. None serves every process that has no
        secret.

    Returns:
      Number of computed prompts.

    Raises:
      TransferError: the other process ended, does not receive, sent an invalid message, or has another secret. The
        prompts of the other process have been aborted, so that they hold no pages. Computed pages stay in the prefix
        cache.
      ValueError: the engines have different cache formats; the secret is too short; or as
        `EngineTransfers.watch_written`.
      NotImplementedError: as `EngineTransfers.watch_written`.
    """
    _check_secret(secret)
    return _PrefillServer(engine, transport, timeout_s, max_bytes).serve(secret)


class _PrefillServer:
    """Loop of `serve_prefill`."""

    def __init__(self, engine: Engine, transport: Transport, timeout_s: float, max_bytes: int):
        self._engine, self._transport = engine, transport
        self._timeout_s, self._max_bytes = timeout_s, max_bytes
        self._prompts: list[TrackedRequest] = []  # unfinished prompts
        # The other process's number of each prompt with layers left to send. The feed's thread reads it.
        self._numbers: dict[RequestId, int] = {}
        self._next = 0  # the least number that a new prompt may have
        self._ended = False
        self._served = 0

    def serve(self, secret: bytes | None) -> int:
        engine, inbox = self._engine, _Inbox(self._transport, _TO_PREFILL, _INBOX_BYTES)
        try:
            _greet(engine, self._transport, inbox, self._timeout_s, secret, "prefill")
            feed = engine.watch_written(self._send_layer, max_bytes=2 * self._max_bytes)
            try:
                while not self._ended:
                    if not feed.wait_below(self._max_bytes, self._timeout_s):
                        raise TransferError(f"transport: no page was received for {self._timeout_s:g} s")
                    if feed.error is not None:
                        raise feed.error
                    engine.step()
                    self._finish_prompts(feed)
                    self._take(inbox)
            except ConsumerError as error:
                if not self._said_bye(inbox):  # after `bye`, a lost connection is no error
                    raise TransferError(f"transport: {error}") from error
            finally:
                feed.close()
                _remove(engine, self._prompts)
        finally:
            self._transport.close()
            inbox.close()
        return self._served

    def _take(self, inbox: _Inbox) -> None:
        """Handle messages of the other process. Wait up to 1 s for a message if the engine has nothing to compute."""
        timeout_s = 0.0 if self._engine.has_unfinished else 1.0
        for _ in range(_MESSAGES_PER_CALL):
            message = inbox.next(timeout_s)
            if message is None:
                return
            timeout_s = 0.0
            header, arrays = message
            match header["kind"]:
                case "prompt":
                    if header["number"] < self._next:
                        wanted = f"an integer of at least {self._next}"
                        raise TransferError(f"transport: prompt.number: expected {wanted}, got {header['number']}")
                    self._next = header["number"] + 1
                    self._add(header["number"], arrays["tokens"].tolist(), header["salt"])
                case "abort":
                    self._abort(header["number"])
                case "bye":
                    self._ended = True
                    return
                case kind:
                    raise TransferError(f"transport: kind: expected prompt, abort or bye, got {kind}")

    def _said_bye(self, inbox: _Inbox) -> bool:
        """Read the remaining messages after the connection was lost, for up to 1 s. Return whether one is `bye`."""
        deadline_s = time.monotonic() + 1.0
        with contextlib.suppress(TransferError):  # raised after the last message
            while (message := inbox.next(max(deadline_s - time.monotonic(), 0))) is not None:
                if message[0]["kind"] == "bye":
                    return True
                if time.monotonic() > deadline_s:
                    break
        return False

    def _add(self, number: int, tokens: list[int], salt: str) -> None:
        """Add a prompt to the engine. If there are too many prompts or the engine rejects it, send `refused`."""
        if len(self._numbers) >= MAX_PROMPTS:
            self._refuse(number, f"expected at most {MAX_PROMPTS} unfinished prompts")
            return
        try:
            tracked = self._engine._add(tokens, _PREFILL, salt=salt, own=self._prompts)
        except ValueError as error:
            self._refuse(number, str(error))
            return
        if tracked.refusal is not None:
            self._prompts.remove(tracked)
            self._engine.forget(tracked.request.request_id)
            self._refuse(number, tracked.refusal)
            return
        self._numbers[tracked.request.request_id] = number

    def _abort(self, number: int) -> None:
        """End a prompt, unless it has ended. `_finish_prompts` then sends `done` for it.

        Raises:
          TransferError: the other process has sent no prompt with this number.
        """
        if number >= self._next:
            wanted = f"the number of a prompt, less than {self._next}"
            raise TransferError(f"transport: abort.number: expected {wanted}, got {number}")
        for tracked in self._prompts:
            if self._numbers.get(tracked.request.request_id) == number:
                self._engine.abort(tracked.request.request_id)

    def _refuse(self, number: int, reason: str) -> None:
        _send(self._transport, {"kind": "refused", "number": number, "reason": reason[:1000]})

    def _finish_prompts(self, feed: WrittenFeed) -> None:
        """For each computed or aborted prompt, queue a `done` message that is sent after the prompt's last layer."""
        for tracked in [t for t in self._prompts if t.finish_reason is not None]:
            self._prompts.remove(tracked)
            self._engine.forget(tracked.request.request_id)
            self._served += tracked.finish_reason != "abort"
            feed.afterwards(functools.partial(self._done, tracked.request.request_id))

    def _done(self, request_id: RequestId) -> None:
        """Send `done` for a prompt whose layers were all sent. Runs on the feed's thread."""
        number = self._numbers.pop(request_id)
        _send(self._transport, {"kind": "done", "number": number})

    def _send_layer(self, written: WrittenLayer) -> None:
        """Send a layer of the prompts of the other process. Called on the feed's thread.

        The layer may also have pages of other requests of the engine. The header does not list them.
        """
        of_prompts = [chunk for chunk in written.chunks if chunk.request_id in self._numbers]
        if not of_prompts:
            return
        chunks = [[self._numbers[chunk.request_id], chunk.first_page] for chunk in of_prompts]
        arrays = {f"rows.{i}": chunk.rows for i, chunk in enumerate(of_prompts)}
        arrays |= {f"pages.{name}": array for name, array in written.contents.items()}
        header = {"kind": "layer", "step": written.step, "layer": written.layer, "chunks": chunks}
        _send(self._transport, header, arrays)


# --- decode process


@dataclasses.dataclass(eq=False)
class _Prompt:
    """A prompt that the prefill process computes.

    Attributes:
      tokens, request_id, salt: arguments of `Engine.add_request`.
      incoming: receiver of the pages.
      add: function that adds the request to the engine, with the receiver.
      progress: the newest pages that arrived: index after the last page, and index of their newest layer.
    """

    tokens: tuple[int, ...]
    request_id: RequestId
    salt: str
    incoming: IncomingPages
    add: Callable[[IncomingPages], object]
    progress: tuple[int, int] = (0, 0)


class RemotePrefill:
    """Sends prompts to a prefill process and writes their pages into an engine's cache as they arrive.

    This object and the engine must be used from one thread. A prompt becomes a request of the engine once all its pages
    have arrived. If pages did not fit the cache, or the engine released them for other requests, the engine computes
    these pages itself.

    Example:
      remote = RemotePrefill(engine, SocketTransport(connection))
      remote.add_request(prompt, SamplingParams(max_tokens=64), request_id="first")
      while remote.pending or engine.has_unfinished:
          remote.poll(0.0 if engine.has_unfinished else 0.05)
          engine.step()
      remote.close()
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        *,
        timeout_s: float = 60.0,
        max_bytes: int = _INBOX_BYTES,
        secret: bytes | None = None,
    ):
        """Wait until the prefill process answers.

        Args:
          engine: engine with a prefix cache, which continues the prompts.
          transport: connection to a process in `serve_prefill`.
          timeout_s: time limit in seconds. The prefill process counts as failed if it has unfinished prompts, and for
            this time neither finishes a prompt nor sends a layer of new pages. It is also the time limit of the
            greeting.
          max_bytes: maximum size in bytes of received messages that wait for `poll`. With more, the prefill process
            has to wait.
          secret: the shared secret of both processes, at least 16 bytes; None if neither process has one.

        Raises:
          TransferError: the prefill process ended, does not answer, or has another secret.
          ValueError: the engines have different cache formats, max_bytes is not positive, or the secret is too short.
        """
        _check_secret(secret)
        check_field("max_bytes", max_bytes, Integer(1))
        self._engine, self._transport, self._timeout_s = engine, transport, timeout_s
        self._prompts: dict[int, _Prompt] = {}  # all pending prompts by number
        self._unsent: deque[int] = deque()  # numbers of prompts that were not sent yet
        self._sent: dict[int, _Prompt] = {}  # prompts by number until the prefill process sends `done` or `refused`
        self._ready: list[int] = []  # numbers of prompts whose pages have arrived
        self._next = 0
        self._names = itertools.count()  # for requests of `generate`
        self._last_layer = (-1, 0)  # step and layer of the last message with a layer
        self._error: TransferError | None = None
        self._inbox = _Inbox(transport, _TO_DECODE, max_bytes)
        try:
            _greet(engine, transport, self._inbox, timeout_s, secret, "decode")
        except BaseException:
            transport.close()
            self._inbox.close()
            raise
        # Pages of these weights do not fit after the weights of this engine are replaced.
        self._made_for = engine.cache_format
        self._last_progress_s = time.monotonic()

    @property
    def pending(self) -> tuple[RequestId, ...]:
        """Ids of prompts that are not requests of the engine yet."""
        return tuple(prompt.request_id for prompt in self._prompts.values())

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        request_id: RequestId,
        salt: str = "",
        on_token: OnToken | None = None,
        token_filter: TokenFilter | None = None,
    ) -> None:
        """Send a prompt to the prefill process; arguments as in `Engine.add_request`.

        Raises:
          TransferError: the prefill process ended.
          ValueError: ids outside the vocabulary, a prompt longer than the cache, a request_id in use, a salt of more
            than 65536 characters, or an argument of the wrong type. Nothing is sent.
          NotImplementedError: as `EngineTransfers.receive_pages`.
        """
        self._check()
        self._send([self._checked(prompt_ids, params, request_id, salt, on_token, token_filter)])

    def request_pages(
        self,
        prompt_ids: Sequence[int],
        add: Callable[[IncomingPages], object],
        *,
        request_id: RequestId,
        salt: str = "",
    ) -> IncomingPages:
        """Send a prompt to the prefill process, for a caller that adds the request to the engine itself.

        Args:
          prompt_ids, salt: as in `Engine.add_request`.
          add: function that `poll` or `compute_here` calls instead of adding a request to the engine. Its argument is
            the receiver of the pages, which it passes to `Engine.add_request` or closes.
          request_id: a name of the prompt for `pending` and `abort`.

        Returns:
          The receiver of the pages.

        Raises:
          TransferError, ValueError, NotImplementedError: as `add_request`.
        """
        self._check()
        prompt = self._checked(prompt_ids, SamplingParams(), request_id, salt)
        prompt.add = add
        self._send([prompt])
        return prompt.incoming

    def abort(self, request_id: RequestId) -> bool:
        """Drop a pending prompt, and release its pages. The prefill process ends the prompt before its next step.

        Returns:
          False if no pending prompt has this id.
        """
        for number, prompt in self._prompts.items():
            if prompt.request_id == request_id:
                del self._prompts[number]
                prompt.incoming.close()
                self._end_in_prefill(number)
                return True
        return False

    def _end_in_prefill(self, number: int) -> None:
        """Let the prefill process end a prompt that it may still compute. The next `poll` raises if this fails."""
        if self._error is None and number in self._sent:
            try:
                _send(self._transport, {"kind": "abort", "number": number})
            except TransferError as error:
                self._fail(error)

    def _checked(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: RequestId,
        salt: str = "",
        on_token: OnToken | None = None,
        token_filter: TokenFilter | None = None,
        own: list[TrackedRequest] | None = None,
    ) -> _Prompt:
        """Check the arguments of `add_request`, and prepare to receive the pages."""
        if request_id is None or not isinstance(request_id, Hashable):
            raise ValueError(f"request_id: expected an int or a str, got {request_id!r}")
        if request_id in self.pending or self._engine.knows(request_id):
            raise ValueError(f"request_id: expected a new one, got {request_id!r} again")
        if on_token is not None and not callable(on_token):
            raise ValueError(f"on_token: expected a function or None, got {on_token!r}")
        if token_filter is not None and not isinstance(token_filter, TokenFilter):
            raise ValueError(f"token_filter: expected an object with a method allowed, or None, got {token_filter!r}")
        check_field("salt", salt, _SALT)
        ids = Request(request_id, as_integers("prompt_ids", prompt_ids), params, salt).prompt_ids  # checks all of it
        incoming = self._engine.receive_pages(ids, self._made_for, salt=salt)

        def add(incoming: IncomingPages) -> None:
            self._engine._add(
                ids, params, request_id, salt, on_token, incoming=incoming, token_filter=token_filter, own=own
            )

        return _Prompt(ids, request_id, salt, incoming, add)

    def _send(self, prompts: Sequence[_Prompt]) -> None:
        """Add prompts to the pending prompts, and send them until `MAX_PROMPTS` are unfinished in the prefill process.

        Raises:
          TransferError: the prefill process ended. The prompts stay pending.
        """
        for prompt in prompts:
            self._prompts[self._next] = prompt
            self._unsent.append(self._next)
            self._next += 1
        try:
            self._send_waiting()
        except TransferError as error:
            self._fail(error)
            raise

    def _send_waiting(self) -> None:
        """Send prompts until `MAX_PROMPTS` are unfinished in the prefill process."""
        while self._unsent and len(self._sent) < MAX_PROMPTS:
            number = self._unsent.popleft()
            if (prompt := self._prompts.get(number)) is None:
                continue  # `compute_here` or `generate` has removed the prompt
            if not self._sent:
                self._last_progress_s = time.monotonic()
            self._sent[number] = prompt
            header = {"kind": "prompt", "number": number, "salt": prompt.salt}
            _send(self._transport, header, {"tokens": np.array(prompt.tokens, np.int32)})

    def poll(self, timeout_s: float = 0.0) -> list[RequestId]:
        """Process messages that have arrived, and add prompts whose pages are complete to the engine.

        One call processes a limited number of messages.

        Args:
          timeout_s: maximum time to wait for the first message, in seconds.

        Returns:
          Ids of requests that were added to the engine, in order.

        Raises:
          TransferError: the prefill process ended, does not answer, or sent an invalid message. Complete pages stay in
            the prefix cache. Call `compute_here` to add the pending prompts to the engine, or `close` to drop them.
            Both release incomplete pages.
          ValueError: the engine has another request with the id of a prompt whose pages have arrived. The prompt stays
            pending until the engine forgets that request.
        """
        self._check()
        failure: TransferError | None = None
        try:
            for _ in range(_MESSAGES_PER_CALL):
                if (message := self._inbox.next(timeout_s)) is None:
                    break
                timeout_s = 0.0
                self._take(*message)
            self._send_waiting()
            if self._sent and time.monotonic() - self._last_progress_s > self._timeout_s:
                raise TransferError(f"transport: no page was completed for {self._timeout_s:g} s")
        except TransferError as error:
            self._fail(error)
            failure = error
        added, in_use = self._add_to_engine(self._ready)
        self._ready = [number for number in self._ready if number in self._prompts]
        if added:
            return added  # the next call raises
        if failure is not None:
            raise failure
        if in_use:
            raise ValueError(_in_use(in_use))
        return added

    def compute_here(self) -> list[RequestId]:
        """Add all pending prompts to the engine, with the pages that have arrived. Return their ids.

        Raises:
          ValueError: the engine has another request with the id of a pending prompt. Such prompts stay pending. All
            other prompts have been added.
        """
        added, in_use = self._add_to_engine([*self._prompts])
        if in_use:
            raise ValueError(f"{_in_use(in_use)}; added: {added}")
        return added

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams = SamplingParams()
    ) -> list[RequestOutput]:
        """Generate the outputs of prompts, as `Engine.generate`. The engine keeps no records of the requests.

        After an exception of any kind, none of the prompts stays queued. Pages that arrived completely stay in the
        prefix cache.

        Raises:
          TransferError: as `poll`.
          ValueError: as `add_request`.
        """
        self._check()
        own: list[TrackedRequest] = []
        added: list[_Prompt] = []
        try:
            for prompt in prompts:
                used = self.pending
                names = (f"remote {i}" for i in self._names)
                name = next(name for name in names if name not in used and not self._engine.knows(name))
                added.append(self._checked(prompt, params, name, own=own))
            self._send(added)
            while self.pending or self._engine.has_unfinished:
                self.poll(0.0 if self._engine.has_unfinished else 0.05)
                self._engine.step()
            outputs = {tracked.request.request_id: tracked.output() for tracked in own}
            return [outputs[prompt.request_id] for prompt in added]
        finally:
            for number in [number for number, prompt in self._prompts.items() if prompt in added]:
                del self._prompts[number]
                self._end_in_prefill(number)
            for prompt in added:
                prompt.incoming.close()
            _remove(self._engine, own)

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
        self._inbox.close()

    def _check(self) -> None:
        if self._error is not None:
            raise TransferError(str(self._error)) from self._error

    def _fail(self, error: TransferError) -> None:
        """Record that the prefill process has failed. Page rows stay held until `compute_here` or `close`."""
        self._error = error
        self._transport.close()
        self._inbox.close()

    def _take(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Process a message of the prefill process.

        Raises:
          TransferError: the message is invalid in the current state. Nothing was written.
        """
        try:
            match header["kind"]:
                case "layer":
                    self._take_layer(header, arrays)
                case "done" | "refused":
                    number = header["number"]
                    self._unfinished("number", number)
                    del self._sent[number]
                    self._last_progress_s = time.monotonic()
                    if number in self._prompts:
                        # This engine computes a refused prompt itself, or rejects it for the same reason.
                        self._ready.append(number)
                case kind:
                    raise ValueError(f"kind: expected layer, done or refused, got {kind}")
        except ValueError as error:
            raise TransferError(f"transport: {error}") from error

    def _take_layer(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Write a layer of pages. Pages of prompts whose `IncomingPages` are closed are ignored.

        Raises:
          ValueError: the layer is out of order, or invalid for one of its prompts. Nothing was written.
        """
        step, layer, chunks = header["step"], header["layer"], header["chunks"]
        last_step, last_layer = self._last_layer
        if (step, layer) != (last_step, last_layer + 1) and not (step > last_step and layer == 0):
            later = f"layer 0 of step {last_step + 1} or later"
            expected = later if last_step < 0 else f"layer {last_layer + 1} of step {last_step} or {later}"
            raise ValueError(f"layer: expected {expected}, got layer {layer} of step {step}")
        if len({number for number, _ in chunks}) != len(chunks):
            raise ValueError(f"chunks: expected each prompt once, got {chunks}")
        contents = {name.removeprefix("pages."): a for name, a in arrays.items() if name.startswith("pages.")}
        written = []
        for i, (number, first_page) in enumerate(chunks):
            prompt, rows = self._unfinished(f"chunks[{i}]", number), arrays[f"rows.{i}"]
            prompt.incoming.check(step, layer, first_page, rows, contents)
            written.append((prompt, first_page, rows))
        self._last_layer = step, layer
        for prompt, first_page, rows in written:
            prompt.incoming.write(step, layer, first_page, rows, contents)
            # Only layers of new pages count as progress. A prompt has a limited number of them, so that a prefill
            # process that sends the same pages again and again runs into the timeout.
            if (progress := (first_page + rows.shape[1], layer)) > prompt.progress:
                prompt.progress = progress
                self._last_progress_s = time.monotonic()

    def _unfinished(self, name: str, number: int) -> _Prompt:
        if number not in self._sent:
            raise ValueError(f"{name}: expected the number of an unfinished prompt, got {number}")
        return self._sent[number]

    def _add_to_engine(self, numbers: Sequence[int]) -> tuple[list[RequestId], list[RequestId]]:
        """Add prompts to the engine, with the receivers of their pages.

        Returns:
          Ids of the added prompts; and ids of prompts that were not added, because the engine already has a request
          with this id.
        """
        added, in_use = [], []
        for number in numbers:
            prompt = self._prompts.get(number)
            if prompt is None:
                continue
            if self._engine.knows(prompt.request_id):
                in_use.append(prompt.request_id)
                continue
            prompt.add(prompt.incoming)
            self._prompts.pop(number, None)  # `add` may have called `abort`
            self._end_in_prefill(number)  # only `compute_here` adds prompts that are not done
            added.append(prompt.request_id)
        return added, in_use


def _in_use(ids: Sequence[RequestId]) -> str:
    return f"request_id: expected ids that the engine does not know, got {', '.join(map(repr, ids))}"
