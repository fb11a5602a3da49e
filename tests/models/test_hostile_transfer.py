"""KV-cache transfer with another process that sends invalid, reordered, endless or too large messages.

A page row is one page of one KV head or, without windows per head, one page. A rejected message must not change the
prefix cache, leave a page row allocated, end a thread silently, or raise an undocumented exception.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pallas_attn.models.engine import (
    Engine,
    IncomingPages,
    RemotePrefill,
    SamplingParams,
    SocketTransport,
    TransferError,
    Transport,
    TransportError,
    WrittenLayer,
    serve_prefill,
)
from pallas_attn.models.engine.kv_transfer import remote_prefill
from tests.models.engine_case import PROMPTS
from tests.models.test_cached_pages import LATENT_KIND, PARAMS, check, computed, make
from tests.models.test_hand_over import layers_of
from tests.models.transfer_peer import hello, proof

pytestmark = pytest.mark.usefixtures("shared_steps")

type Message = tuple[Any, dict[str, np.ndarray]]

PROMPT = PROMPTS[4]
ONE = SamplingParams(max_tokens=1)
SECRET, OTHER_SECRET = b"a secret of both processes", b"another secret of 26 bytes"


class Scripted:
    """Transport that receives the given messages, and then blocks until it is closed.

    If an item of `messages` is an exception, `receive` raises this exception.
    """

    def __init__(self, messages: Iterable[Message | BaseException]):
        self._messages, self._closed = iter(messages), threading.Event()
        self.num_received = 0
        self.sent: list[Message] = []

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> None:
        if self._closed.is_set():
            raise TransportError("closed")
        self.sent.append((dict(header), dict(arrays)))

    def receive(self) -> Message:
        for message in self._messages:
            if self._closed.is_set():
                break
            if isinstance(message, BaseException):
                raise message
            self.num_received += 1
            return message
        self._closed.wait()
        raise TransportError("closed")

    def close(self) -> None:
        self._closed.set()


def greeting(role: str, engine: Engine) -> list[Message]:
    """Return the greeting messages of another process with this role and without a secret."""
    made_for = {"kind": "format", "made_for": engine.cache_format}
    return [(header, {}) for header in (hello(role), {"kind": "proof", "code": ""}, made_for)]


def prompt_message(number: Any, tokens: Sequence[int] = PROMPT, salt: Any = "") -> Message:
    return {"kind": "prompt", "number": number, "salt": salt}, {"tokens": np.array(tokens, np.int32)}


def layer_message(written: WrittenLayer, number: int = 0, **changes: Any) -> Message:
    """Return the message with which the prefill process sends a layer of the prompt `number`."""
    [chunk] = written.chunks
    header = {"kind": "layer", "step": written.step, "layer": written.layer, "chunks": [[number, chunk.first_page]]}
    pages = {f"pages.{name}": np.array(array) for name, array in written.contents.items()}
    return header | changes, {"rows.0": chunk.rows} | pages


@functools.cache
def layers(index: int = 4) -> tuple[WrittenLayer, ...]:
    """Return the written layers of `PROMPTS[index]`. The last prompts are computed in three steps of two layers."""
    return tuple(layers_of(LATENT_KIND, PROMPTS[index]))


def published(engine: Engine) -> frozenset[bytes]:
    """Return the digests of all pages in the prefix cache."""
    return frozenset(engine._prefix_caches[0]._by_digest)


def check_rows(engine: Engine, num_held: int | None = None) -> None:
    """Check that every page row is free or owned and, if `num_held` is given, the number of owned rows."""
    engine._pools[0].check()
    engine._prefix_caches[0].check()
    for pool in engine._pools[0].pools:
        assert pool.num_free + pool.num_owned == pool.num_rows
        assert num_held is None or pool.num_owned == num_held


def started(engine: Engine, messages: Iterable[Message | BaseException] = (), **arguments: Any) -> RemotePrefill:
    """Return a `RemotePrefill` that is connected to a scripted prefill process, which sends these messages."""
    return RemotePrefill(engine, Scripted(itertools.chain(greeting("prefill", engine), messages)), **arguments)


def transport_of(remote: RemotePrefill) -> Scripted:
    assert isinstance(remote._transport, Scripted)
    return remote._transport


def poll_until_error(remote: RemotePrefill, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        remote.poll(0.05)


def finish(engine: Engine, ids: Sequence[int | str]) -> list[tuple[int, ...]]:
    while engine.has_unfinished:
        engine.step()
    return [tuple(engine.output(i).output_ids) for i in ids]


@contextlib.contextmanager
def serving(
    engine: Engine, transport: Transport, **arguments: Any
) -> Iterator[tuple[threading.Thread, list[BaseException]]]:
    """Run `serve_prefill` on a thread. Yield the thread and a list to which the thread's exception is appended."""
    errors: list[BaseException] = []
    arguments.setdefault("timeout_s", 30)

    def run() -> None:
        try:
            serve_prefill(engine, transport, **arguments)
        except BaseException as error:  # noqa: BLE001 - the test compares it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread, errors
    finally:
        transport.close()
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def pair(engine: Engine, **arguments: Any) -> Iterator[RemotePrefill]:
    """Connect an engine to a second engine that computes prompts on a thread."""
    here, there = socket.socketpair()
    with serving(make(LATENT_KIND, **arguments), SocketTransport(there)):
        remote = RemotePrefill(engine, SocketTransport(here))
        try:
            yield remote
        finally:
            remote.close()


def check_honest_transfer(engine: Engine, salt: str = "honest") -> None:
    """Check that a later transfer with a well-behaved process gives the right tokens."""
    with pair(engine) as remote:
        for i, prompt in enumerate(PROMPTS):
            remote.add_request(prompt, PARAMS, request_id=f"honest {i}", salt=salt)
        while remote.pending or engine.has_unfinished:
            remote.poll(0.0 if engine.has_unfinished else 0.05)
            engine.step()
    assert finish(engine, [f"honest {i}" for i in range(len(PROMPTS))]) == list(computed(LATENT_KIND)[1])
    for i in range(len(PROMPTS)):
        engine.forget(f"honest {i}")
    check(engine)


# --- the receiving thread


@pytest.mark.parametrize("error", [MemoryError("no memory"), SyntaxError("invalid"), SystemExit("end")], ids=repr)
def test_exception_of_the_receiving_thread_reaches_the_caller(error: BaseException) -> None:
    engine = make(LATENT_KIND)
    remote = started(engine, [error])
    remote.add_request(PROMPT, PARAMS, request_id=0)
    with pytest.raises(TransferError, match=f"^transport: {type(error).__name__}: {error}$"):
        poll_until_error(remote)
    remote.close()
    messages = [*greeting("decode", engine), prompt_message(0), error]
    with pytest.raises(TransferError, match=f"^transport: {type(error).__name__}: {error}$"):
        serve_prefill(engine, Scripted(messages), timeout_s=5)
    check(engine)


def test_threads_end_with_the_connection() -> None:
    """Closing a connection ends its threads, including a receiving thread that waits for room in a full inbox."""
    engine, message = make(LATENT_KIND), layer_message(layers()[0])  # the threads of the first engine live longer
    before = set(threading.enumerate())
    remote = started(engine, itertools.repeat(message))
    remote.close()
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(10)
    assert not any(thread.is_alive() for thread in new)


# --- bounds


def settled(transport: Scripted) -> int:
    """Wait until the transport receives nothing for 0.3 s. Return the number of received messages."""
    before = -1
    while before != transport.num_received:
        before = transport.num_received
        time.sleep(0.3)
    return before


def first_layers(most: int) -> Iterator[Message | BaseException]:
    """Yield `most` first layers of new steps. No step gets its second layer, so no page becomes complete."""
    for step in range(most):
        yield layer_message(layers()[0], step=step)
    yield TransportError("the test has no more messages")


def test_poll_processes_a_limited_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls, write = make(LATENT_KIND), [], IncomingPages.write

    def counted(*arguments: Any) -> None:
        calls.append(1)
        write(*arguments)

    monkeypatch.setattr(IncomingPages, "write", counted)
    remote = started(engine, first_layers(1000))
    remote.add_request(PROMPT, PARAMS, request_id=0)
    settled(transport_of(remote))
    remote.poll(5)
    assert 0 < len(calls) <= remote_prefill._MESSAGES_PER_CALL
    remote.close()
    check(engine)


def test_endless_messages_without_a_complete_page_time_out() -> None:
    def endless() -> Iterator[Message]:
        for step in itertools.count():
            time.sleep(0.01)
            yield layer_message(layers()[0], step=step)

    engine = make(LATENT_KIND)
    remote = RemotePrefill(engine, Scripted(itertools.chain(greeting("prefill", engine), endless())), timeout_s=0.2)
    remote.add_request(PROMPT, PARAMS, request_id=0)
    with pytest.raises(TransferError, match=r"^transport: no page was completed for 0\.2 s"):
        poll_until_error(remote, 20)
    remote.compute_here()
    assert finish(engine, [0]) == [computed(LATENT_KIND)[1][4]]
    remote.close()
    check(engine)


def test_waiting_messages_are_limited_in_bytes() -> None:
    """Received messages that wait for `poll` have a limit in bytes. At the limit, the connection is not read.

    A single message that is larger than the limit is accepted.
    """
    engine, size = make(LATENT_KIND), 2**20
    header, arrays = layer_message(layers()[0])
    large = header, arrays | {"pages.a": np.zeros(size, np.uint8)}
    for max_bytes, most in ((4 * size, 5), (100, 2)):
        transport = Scripted(itertools.chain(greeting("prefill", engine), itertools.repeat(large, 1000)))
        remote = RemotePrefill(engine, transport, max_bytes=max_bytes)
        assert settled(transport) - 3 <= most
        remote.close()


def test_memory_of_headers_is_counted() -> None:
    """The limit of waiting messages counts the memory of header objects, which is larger than their JSON."""
    header, arrays = layer_message(layers()[0])
    many = (
        header | {"chunks": [[i, 0] for i in range(200)]},
        arrays | {f"rows.{i}": arrays["rows.0"] for i in range(200)},
    )
    assert sum(map(remote_prefill._num_bytes, many)) > 200 * 100 + len(json.dumps(many[0]))
    engine = make(LATENT_KIND)
    transport = Scripted(itertools.chain(greeting("prefill", engine), itertools.repeat(many, 1000)))
    remote = RemotePrefill(engine, transport, max_bytes=2**20)
    assert settled(transport) - 3 < 40
    remote.close()


def test_prefill_process_refuses_prompts_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefill, "MAX_PROMPTS", 4)
    engine, numbers = make(LATENT_KIND), range(40)
    most, step = 0, engine.step

    def watched() -> Any:
        nonlocal most
        most = max(most, len(engine._requests.tracked))
        return step()

    monkeypatch.setattr(engine, "step", watched)
    transport = Scripted([*greeting("decode", engine), *(prompt_message(n, [n + 1] * 5) for n in numbers)])
    with serving(engine, transport) as (_, errors):
        end = time.monotonic() + 60
        while sum(header["kind"] in ("done", "refused") for header, _ in transport.sent) < 40:
            assert time.monotonic() < end
            assert not errors
            time.sleep(0.05)
    answers = {h["number"]: h for h, _ in transport.sent if h["kind"] in ("done", "refused")}
    assert answers.keys() == set(numbers)
    refused = [header["reason"] for header in answers.values() if header["kind"] == "refused"]
    assert set(refused) == {"expected at most 4 unfinished prompts"}
    assert 1 <= most <= 4
    check(engine)


def test_prompts_above_the_limit_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefill, "MAX_PROMPTS", 2)
    engine = make(LATENT_KIND)
    remote = started(engine)
    for i in range(5):
        remote.add_request(PROMPTS[i], PARAMS, request_id=i)
    assert [header["kind"] for header, _ in transport_of(remote).sent[3:]] == ["prompt"] * 2
    assert remote.pending == (0, 1, 2, 3, 4)
    remote.close()
    with pair(engine) as honest:
        outputs = honest.generate(PROMPTS, PARAMS)
    assert [tuple(output.output_ids) for output in outputs] == list(computed(LATENT_KIND)[1])
    assert [output.cached_tokens for output in outputs] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    check(engine)


# --- values of wrong types


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        *(
            ({"chunks": [[0, value]]}, r"layer\.chunks\[0\]\[1\]: expected an integer from 0 to 2147483647, got")
            for value in (0.0, True, "0", None, -1, 2**31, [])
        ),
        ({"chunks": [[0, 13]]}, "first_page: expected an integer from 0 to 12, got 13"),
        ({"chunks": [[0.0, 0]]}, r"layer\.chunks\[0\]\[0\]: expected an integer of at least 0, got 0\.0"),
        ({"chunks": [[7, 0]]}, r"chunks\[0\]: expected the number of an unfinished prompt, got 7"),
        ({"chunks": []}, r"layer\.chunks: expected a list of 1 to 256 items, got \[\]"),
        ({"chunks": [[0, 0]] * 2}, r"layer\.arrays\.rows\.1: expected an array int32 \[n, n\], got nothing"),
        ({"chunks": {"0": 0}}, r"layer\.chunks: expected a list"),
        ({"step": 0.0}, r"layer\.step: expected an integer of at least 0, got 0\.0"),
        ({"layer": "0"}, r"layer\.layer: expected an integer from 0 to 65536, got '0'"),
        ({"layer": 2}, "layer: expected layer 0 of step 0 or later, got layer 2 of step 0"),
        ({"kind": "done"}, r"done\.number: expected an integer of at least 0, got nothing"),
        ({"kind": ["layer"]}, r"kind: expected one of hello, .*, got \['layer'\]"),
        ({"more": 1}, r"layer: expected the fields step, layer, chunks, got also \['more'\]"),
    ],
    ids=str,
)
def test_field_of_another_type_changes_nothing(changes: dict[str, Any], match: str) -> None:
    """A header field of a wrong type raises an error. The prefix cache and a running request keep their pages."""
    engine = make(LATENT_KIND)
    engine.generate([PROMPTS[0]], ONE)
    running = engine.add_request(PROMPTS[1], PARAMS)
    for _ in range(4):
        engine.step()
    before, steps = published(engine), engine.stats().prefill_tokens
    assert before
    remote = started(engine, [layer_message(layers()[0], **changes)])
    remote.add_request(PROMPT, PARAMS, request_id="remote", salt="other")
    with pytest.raises(TransferError, match=f"^transport: ({match})"):
        poll_until_error(remote)
    assert published(engine) == before
    remote.close()
    assert published(engine) == before
    assert finish(engine, [running]) == [computed(LATENT_KIND)[1][1]]
    assert engine.stats().prefill_tokens == steps  # the engine did not prefill again
    check(engine)


def _rows(change: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda arrays: arrays | {"rows.0": change(arrays["rows.0"])}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            _rows(lambda rows: rows.astype(np.float32)),
            r"layer\.arrays\.rows\.0: expected an array int32 \[n, n\], got an",
        ),
        (_rows(lambda rows: rows[0]), r"layer\.arrays\.rows\.0: expected an array int32 \[n, n\], got an"),
        (_rows(lambda rows: rows[:, :0]), r"rows: expected 1 to 12 pages from 0, got 0"),
        (_rows(lambda rows: np.repeat(rows, 4, axis=1)), r"rows: expected 1 to 12 pages from 0, got 16"),
        (_rows(lambda rows: np.repeat(rows, 2, axis=0)), r"rows: expected an array int32 \[1, n\], got an"),
        (_rows(lambda rows: rows - 2), r"rows: expected numbers from -1 to 3, got -2 to"),
        (_rows(lambda rows: np.full_like(rows, -1)), r"rows: expected a row for page 0 of head 0, got -1"),
        (lambda arrays: {"rows.0": arrays["rows.0"]}, "contents: layer 0 has other shapes"),
        (lambda arrays: arrays | {"pages.pages": np.zeros((), np.float32)}, "contents: layer 0 has other shapes"),
        (lambda arrays: arrays | {"other": arrays["rows.0"]}, r"layer\.arrays: expected the fields rows\.0, got also"),
        (
            lambda arrays: {n: a[:-1] if n == "pages.pages" else a for n, a in arrays.items()},
            "contents: expected the same",
        ),
    ],
)
def test_array_of_another_format_changes_nothing(change: Callable[[Any], Any], match: str) -> None:
    engine = make(LATENT_KIND)
    engine.generate([PROMPTS[0]], ONE)
    before = published(engine)
    header, arrays = layer_message(layers()[0])
    remote = started(engine, [(header, change(arrays))])
    remote.add_request(PROMPT, PARAMS, request_id="remote", salt="other")
    with pytest.raises(TransferError, match=f"^transport: {match}"):
        poll_until_error(remote)
    assert published(engine) == before
    remote.close()
    check(engine)


def test_arguments_of_incoming_pages_are_checked() -> None:
    engine, written = make(LATENT_KIND), layers()[0]
    engine.generate([PROMPTS[0]], ONE)
    before, rows = published(engine), written.chunks[0].rows
    incoming = engine.receive_pages(PROMPT, engine.cache_format)
    invalid: list[tuple[Any, str]] = [
        ((0, 0, 0.0, rows, written.contents), "first_page: expected an integer from 0 to 12, got 0.0"),
        ((0.0, 0, 0, rows, written.contents), "step: expected an integer of at least 0, got 0.0"),
        ((0, None, 0, rows, written.contents), "layer: expected an integer from 0 to 1, got None"),
        ((0, 0, 0, rows.tolist(), written.contents), r"rows: expected an array int32 \[1, n\], got"),
        ((0, 0, 0, rows, None), "contents: expected arrays by name, got a NoneType"),
        ((0, 0, 0, rows, {n: a.tolist() for n, a in written.contents.items()}), "contents: expected arrays by name"),
    ]
    for arguments, match in invalid:
        with pytest.raises(ValueError, match=f"^{match}"):
            incoming.write(*arguments)
        with pytest.raises(ValueError, match=f"^{match}"):
            incoming.check(*arguments)
        assert published(engine) == before
    incoming.close()
    no_format: Any = []
    no_pages: Any = 3
    salts: list[Any] = [3, None, "\ud800"]
    for salt in salts:
        with pytest.raises(ValueError, match="^salt: expected a str"):
            engine.receive_pages(PROMPT, engine.cache_format, salt=salt)
    with pytest.raises(ValueError, match="^made_for: expected an object, got"):
        engine.receive_pages(PROMPT, no_format)
    with pytest.raises(ValueError, match="^incoming: expected the result of receive_pages or None, got 3"):
        engine.add_request(PROMPT, ONE, incoming=no_pages)
    assert (published(engine), engine.has_unfinished) == (before, False)
    check(engine)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (prompt_message(0.0), r"prompt\.number: expected an integer of at least 0, got 0\.0"),
        (prompt_message(-1), r"prompt\.number: expected an integer of at least 0, got -1"),
        (prompt_message(0, salt=3), r"prompt\.salt: expected a str"),
        (prompt_message(0, salt="\ud800"), r"prompt\.salt: expected a str"),
        (({"kind": "prompt", "number": 0, "salt": ""}, {}), r"prompt\.arrays\.tokens: expected an array int32 \[n\]"),
        (
            ({"kind": "prompt", "number": 0, "salt": ""}, {"tokens": np.zeros(3, np.float32)}),
            r"prompt\.arrays\.tokens: expected an array int32 \[n\], got an array float32 \[3\]",
        ),
        (({"kind": "layer"}, {}), "kind: expected one of hello, proof, format, prompt, abort, bye, got 'layer'"),
        (({"kind": "abort", "number": 0}, {}), r"abort\.number: expected the number of a prompt, less than 0, got 0"),
        ((hello("decode"), {}), "kind: expected prompt, abort or bye, got hello"),
        (([], {}), "message: expected an object"),
    ],
    ids=str,
)
def test_invalid_message_ends_the_prefill_process(message: Message, match: str) -> None:
    engine = make(LATENT_KIND)
    engine.generate([PROMPTS[0]], ONE)
    before = published(engine)
    with pytest.raises(TransferError, match=f"^transport: {match}"):
        serve_prefill(engine, Scripted([*greeting("decode", engine), message]), timeout_s=5)
    assert published(engine) == before
    assert not engine.has_unfinished
    check(engine)


@pytest.mark.parametrize("tokens", [[], [64], [-1], [1] * 97], ids=["none", "64", "-1", "97 tokens"])
def test_unsupported_prompt_is_refused_by_the_prefill_process(tokens: list[int]) -> None:
    engine = make(LATENT_KIND)
    transport = Scripted([*greeting("decode", engine), prompt_message(0, tokens), ({"kind": "bye"}, {})])
    assert serve_prefill(engine, transport, timeout_s=5) == 0
    assert [header["kind"] for header, _ in transport.sent[3:]] == ["refused"]
    check(engine)


def test_aborted_prompt_is_not_computed() -> None:
    engine = make(LATENT_KIND)
    before = published(engine)
    abort = {"kind": "abort", "number": 0}, {}
    transport = Scripted([*greeting("decode", engine), prompt_message(0), abort, abort, ({"kind": "bye"}, {})])
    assert serve_prefill(engine, transport, timeout_s=5) == 0
    assert [header for header, _ in transport.sent[3:]] == []  # `bye` ends the process before the answer
    assert (published(engine), engine.has_unfinished) == (before, False)
    check(engine)


def test_abort_ends_a_prompt_in_the_prefill_process() -> None:
    """The second prompt is sent only if there is an answer to the abort of the first."""
    here, there = socket.socketpair()
    engine, computing = make(LATENT_KIND), make(LATENT_KIND)
    with mock.patch.object(remote_prefill, "MAX_PROMPTS", 1), serving(computing, SocketTransport(there)):
        remote = RemotePrefill(engine, SocketTransport(here))
        with mock.patch.object(computing, "step", side_effect=lambda: time.sleep(0.01)):  # computes nothing
            remote.add_request(PROMPTS[4], PARAMS, request_id="aborted")
            remote.add_request(PROMPTS[0], PARAMS, request_id="other")
            assert remote.abort("aborted")
            assert not remote.abort("aborted")
            while remote._sent.keys() != {1}:
                remote.poll(0.05)
        while remote.pending or engine.has_unfinished:
            remote.poll(0.0)
            engine.step()
        assert tuple(engine.output("other").output_ids) == computed(LATENT_KIND)[1][0]
        remote.close()
    check(engine)
    assert len(published(computing)) == len(PROMPTS[0]) // 4  # no page of the other prompt


# --- greeting


FORMAT = {"kind": "format", "made_for": {}}


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([{"kind": "hello", "version": 1, "made_for": {}}], "hello.version: expected 3, got 1"),
        ([{"kind": "hello"}], "hello.version: expected 3, got nothing"),
        ([hello("decode") | {"nonce": 3}], "hello.nonce: expected a str"),
        ([hello("decode") | {"role": "other"}], "hello.role: expected one of prefill, decode, got 'other'"),
        ([hello("prefill")], "expected a process of the other role"),
        ([{"kind": "proof", "code": ""}], "kind: expected hello, got proof"),
        ([hello("decode"), hello("decode")], "kind: expected proof, got hello"),
        ([hello("decode"), {"kind": "proof", "code": None}], "proof.code: expected a str"),
        (
            [hello("decode"), {"kind": "proof", "code": ""}, FORMAT | {"made_for": []}],
            "format.made_for: expected an obj",
        ),
        ([hello("decode"), {"kind": "proof", "code": ""}, FORMAT | {"made_for": None}], "format.made_for: expected an"),
        ([hello("decode"), {"kind": "proof", "code": ""}], "no greeting within"),
        ([], "no greeting within"),
    ],
    ids=str,
)
def test_invalid_greeting_is_rejected(messages: list[dict[str, Any]], match: str) -> None:
    engine, other = make(LATENT_KIND), {"decode": "prefill", "prefill": "decode"}
    with pytest.raises(TransferError, match=match):
        serve_prefill(engine, Scripted([(header, {}) for header in messages]), timeout_s=0.5)
    for_decode = [h | {"role": other.get(h["role"], h["role"])} if "role" in h else h for h in messages]
    with pytest.raises(TransferError, match=match):
        RemotePrefill(engine, Scripted([(header, {}) for header in for_decode]), timeout_s=0.5)
    check(engine)


@pytest.mark.parametrize(
    ("mine", "other", "match"),
    [
        (SECRET, SECRET, None),
        (SECRET, OTHER_SECRET, "the other process has another one|closed"),
        (SECRET, None, "and this process has (one|none)|closed"),
        (None, SECRET, "and this process has (one|none)|closed"),
    ],
    ids=["equal", "another", "none there", "none here"],
)
def test_both_processes_must_have_the_same_secret(mine: bytes | None, other: bytes | None, match: str | None) -> None:
    engine = make(LATENT_KIND)
    here, there = socket.socketpair()
    with serving(make(LATENT_KIND), SocketTransport(there), secret=other) as (thread, errors):
        if match is None:
            remote = RemotePrefill(engine, SocketTransport(here), secret=mine)
            [output] = remote.generate([PROMPTS[0]], PARAMS)
            assert tuple(output.output_ids) == computed(LATENT_KIND)[1][0]
            remote.close()
            thread.join(60)
            assert not errors
        else:
            with pytest.raises(TransferError, match=match):
                RemotePrefill(engine, SocketTransport(here), secret=mine)
            thread.join(60)
            [error] = errors
            assert isinstance(error, TransferError)
    check(engine)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_recorded_or_reflected_proof_is_rejected(role: str) -> None:
    """A peer that returns the process's own proof, or a proof of an earlier connection, is rejected.

    The process does not send its cache format to this peer.
    """
    engine, other = make(LATENT_KIND), "decode" if role == "prefill" else "prefill"

    def connect(transport: Transport) -> None:
        if role == "prefill":
            serve_prefill(engine, transport, timeout_s=5, secret=SECRET)
        else:
            RemotePrefill(engine, transport, timeout_s=5, secret=SECRET)

    class Answering(Scripted):
        """Transport that answers the proof of the process with the proof that `code` computes from it."""

        def __init__(self, code: Callable[[str], str]):
            super().__init__([])
            self._code, self._answers = code, [hello(other)]

        def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> None:
            super().send(header, arrays)
            if header["kind"] == "proof":
                self._answers.append({"kind": "proof", "code": self._code(header["code"])})

        def receive(self) -> Message:
            while not self._answers:
                time.sleep(0.01)
                if self._closed.is_set():
                    raise TransportError("closed")
            return self._answers.pop(0), {}

    earlier = proof(SECRET, other, {"prefill": "22" * 32, "decode": "33" * 32})
    for code in (lambda own: own, lambda own: earlier, lambda own: "", lambda own: own[:-1], lambda own: "é" * 64):
        transport = Answering(code)
        with pytest.raises(TransferError, match="^transport: secret: the other process has"):
            connect(transport)
        assert "format" not in [header["kind"] for header, _ in transport.sent]
    check(engine)


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes !", "a str of some length", 3])
def test_invalid_secret_is_rejected_without_repeating_it(secret: Any) -> None:
    engine = make(LATENT_KIND)
    for connect in (serve_prefill, RemotePrefill):
        with pytest.raises(ValueError, match="^secret: expected") as raised:
            connect(engine, Scripted([]), secret=secret)
        assert not secret or str(secret) not in str(raised.value)


# --- reordered, repeated and late messages


def _messages(*changes: Callable[[list[Message]], list[Message]]) -> list[Message]:
    messages = [layer_message(written) for written in layers()] + [({"kind": "done", "number": 0}, {})]
    for change in changes:
        messages = change(messages)
    return messages


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda m: [m[0], m[0]],
            "layer: expected layer 1 of step 0 or layer 0 of step 1 or later, got layer 0 of step 0",
        ),
        (lambda m: [m[1], m[0]], "layer: expected layer 0 of step 0 or later, got layer 1 of step 0"),
        (lambda m: [m[0], m[1], m[1]], "layer: expected layer 2 of step 0"),
        (lambda m: [m[0], m[1], m[0]], "layer: expected layer 2 of step 0"),
        (lambda m: [m[0], m[1], m[2], m[1]], "layer: expected layer 1 of step 1"),
        (lambda m: [m[0], m[2]], "first_page: expected at most 0, got 4"),
        (
            lambda m: [m[0], m[3]],
            "layer: expected layer 1 of step 0 or layer 0 of step 1 or later, got layer 1 of step 1",
        ),
        (lambda m: [*m, m[0]], r"chunks\[0\]: expected the number of an unfinished|layer: expected layer 2 of step"),
        (lambda m: [*m, ({"kind": "done", "number": 0}, {})], "number: expected the number of an unfinished prompt"),
        (lambda m: [m[-1], m[0]], r"chunks\[0\]: expected the number of an unfinished prompt, got 0"),
        (lambda m: [*m[:2], hello("prefill"), *m[2:]], "message: expected an object|kind: expected layer"),
    ],
    ids=[
        "second first layer",
        "layers swapped",
        "last layer twice",
        "complete step replayed",
        "earlier step replayed",
        "step left out",
        "layer left out",
        "layer after done",
        "done twice",
        "layer after an early done",
        "second greeting",
    ],
)
def test_messages_out_of_order_are_rejected(change: Callable[[list[Message]], list[Message]], match: str) -> None:
    """A changed order of messages raises an error. Afterwards all tokens are right, and all page rows are free."""
    engine = make(LATENT_KIND)
    remote = started(engine, [m if isinstance(m, tuple) else (m, {}) for m in _messages(change)])
    remote.add_request(PROMPT, PARAMS, request_id=0)
    with pytest.raises(TransferError, match=f"^transport: ({match})"):
        poll_until_error(remote)
    remote.compute_here()
    assert finish(engine, [0]) == [computed(LATENT_KIND)[1][4]]
    remote.close()
    check(engine)


def test_messages_of_an_earlier_request_are_rejected() -> None:
    """Layers of a finished prompt do not become pages of a later prompt with the same tokens."""
    engine, go_on = make(LATENT_KIND), threading.Event()

    def messages() -> Iterator[Message]:
        yield from _messages()
        go_on.wait(60)
        yield layer_message(layers()[0], step=99)

    remote = started(engine, messages())
    remote.add_request(PROMPT, PARAMS, request_id=0)
    while remote.pending:
        remote.poll(0.05)
    remote.add_request(PROMPT, PARAMS, request_id=1, salt="later")
    go_on.set()
    with pytest.raises(TransferError, match=r"chunks\[0\]: expected the number of an unfinished prompt, got 0$"):
        poll_until_error(remote)
    remote.compute_here()
    assert finish(engine, [0, 1]) == [computed(LATENT_KIND)[1][4]] * 2
    remote.close()
    check(engine)


def test_prompts_with_numbers_out_of_order_are_rejected() -> None:
    engine = make(LATENT_KIND)
    for numbers in ((0, 0), (3, 2)):
        messages = [*greeting("decode", engine), *(prompt_message(number, [1, 2, 3]) for number in numbers)]
        with pytest.raises(TransferError, match=r"^transport: prompt\.number: expected an integer of at least"):
            serve_prefill(engine, Scripted(messages), timeout_s=5)
        assert not engine.has_unfinished
    check(engine)


def test_messages_after_bye_are_ignored() -> None:
    engine = make(LATENT_KIND)
    messages = [*greeting("decode", engine), ({"kind": "bye"}, {}), prompt_message(0), TransportError("closed")]
    assert serve_prefill(engine, Scripted(messages), timeout_s=5) == 0
    check(engine)


def test_pages_of_prompts_computed_here_are_accepted() -> None:
    """Messages for prompts that `compute_here` took back are accepted.

    On an intact connection, the prefill process still sends layers and `done` of these prompts.
    """
    engine = make(LATENT_KIND)
    with pair(engine) as remote:
        for i, prompt in enumerate(PROMPTS):
            remote.add_request(prompt, PARAMS, request_id=i)
        assert remote.compute_here() == list(range(len(PROMPTS)))
        end = time.monotonic() + 60
        while engine.has_unfinished or (remote._sent and time.monotonic() < end):
            remote.poll(0.05)
            engine.step()
        assert not remote._sent
        outputs = remote.generate(PROMPTS, PARAMS)
    assert finish(engine, range(len(PROMPTS))) == list(computed(LATENT_KIND)[1])
    assert [tuple(output.output_ids) for output in outputs] == list(computed(LATENT_KIND)[1])
    check(engine)


def test_pages_of_other_requests_are_not_sent() -> None:
    """The prefill process does not send pages of its own request, which it computes at the same time."""
    engine, other = make(LATENT_KIND), make(LATENT_KIND)
    own = other.add_request(PROMPTS[5], PARAMS)
    here, there = socket.socketpair()
    with serving(other, SocketTransport(there)) as (thread, errors):
        remote = RemotePrefill(engine, SocketTransport(here))
        outputs = remote.generate(PROMPTS[:5], PARAMS)
        remote.close()
        thread.join(60)
        assert not errors
    assert [tuple(output.output_ids) for output in outputs] == list(computed(LATENT_KIND)[1][:5])
    assert finish(other, [own]) == [computed(LATENT_KIND)[1][5]]
    check(engine)


# --- names of requests


def test_generate_computes_more_prompts_than_the_history() -> None:
    engine = make(LATENT_KIND, history=1)
    with pair(engine, history=1) as remote:
        outputs = remote.generate(PROMPTS, PARAMS)
    assert [tuple(output.output_ids) for output in outputs] == list(computed(LATENT_KIND)[1])
    assert not engine._requests.tracked
    check(engine)


def test_generate_after_a_failed_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed `generate` leaves no request and no pending prompt. Later messages for its prompts are ignored."""
    engine = make(LATENT_KIND)
    step = engine.step
    with pair(engine) as remote:
        with pytest.raises(ValueError, match="expected ids from 0 to 63, got 64"):
            remote.generate([PROMPTS[0], [64]], PARAMS)
        assert (remote.pending, engine._requests.tracked) == ((), {})

        def failing() -> Any:
            raise MemoryError("no memory")

        monkeypatch.setattr(engine, "step", failing)
        with pytest.raises(MemoryError):
            remote.generate(PROMPTS, PARAMS)
        monkeypatch.setattr(engine, "step", step)
        assert (remote.pending, engine._requests.tracked) == ((), {})
        engine.add_request(PROMPTS[0], PARAMS, request_id="remote 5")
        outputs = remote.generate(PROMPTS, PARAMS)
    assert [tuple(output.output_ids) for output in outputs] == list(computed(LATENT_KIND)[1])
    check(engine)


@pytest.mark.parametrize("arrives", [False, True], ids=["compute_here", "done"])
def test_name_in_use_does_not_affect_other_prompts(arrives: bool) -> None:
    engine = make(LATENT_KIND)
    remote = started(engine, [({"kind": "done", "number": n}, {}) for n in range(3)] if arrives else [])
    for i in range(3):
        remote.add_request(PROMPTS[i], PARAMS, request_id=i)
    engine.add_request(PROMPTS[3], PARAMS, request_id=1)  # also the id of a pending prompt
    match = "^request_id: expected ids that the engine does not know, got 1"
    if arrives:
        settled(transport_of(remote))
        assert remote.poll(5) == [0, 2]
        with pytest.raises(ValueError, match=match):
            remote.poll()
    else:
        with pytest.raises(ValueError, match=rf"{match}; added: \[0, 2\]$"):
            remote.compute_here()
    assert remote.pending == (1,)
    tokens = computed(LATENT_KIND)[1]
    assert finish(engine, [0, 1, 2]) == [tokens[0], tokens[3], tokens[2]]
    engine.forget(1)
    assert (remote.poll() if arrives else remote.compute_here()) == [1]
    assert finish(engine, [1]) == [tokens[1]]
    remote.close()
    check(engine)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"on_token": 3}, "on_token: expected a function or None, got 3"),
        ({"request_id": None}, "request_id: expected an int or a str, got None"),
        ({"request_id": []}, r"request_id: expected an int or a str, got \[\]"),
        ({"salt": "\ud800"}, "salt: expected a str of at most 65536 characters without surrogates"),
        ({"salt": "x" * 65537}, "salt: expected a str of at most 65536 characters without surrogates"),
    ],
)
def test_invalid_arguments_send_nothing(arguments: dict[str, Any], match: str) -> None:
    engine = make(LATENT_KIND)
    remote = started(engine)
    given: dict[str, Any] = {"request_id": 0, **arguments}
    with pytest.raises(ValueError, match=f"^{match}"):
        remote.add_request(PROMPT, PARAMS, **given)
    assert len(transport_of(remote).sent) == 3
    assert remote.pending == ()
    remote.close()
    check(engine)


# --- fuzz


def frame(header: Any, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the frame of a valid or invalid message, with a correct checksum."""
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    if isinstance(header, dict):
        listed = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
        header = {"arrays": listed} | header
    head = json.dumps(header).encode()
    return struct.pack(">4sIQI", b"pgs1", len(head), len(body), zlib.crc32(body, zlib.crc32(head))) + head + body


ODD = (
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    10**40,
    0.0,
    1.5,
    "",
    "x",
    "(,)i4",
    "\ud800",
    "é" * 300,
    [],
    {},
    [[]],
)
"""Invalid values that replace a value of a header."""


def spoiled(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value in which one value is replaced, removed or added."""
    if rng.random() < 0.3 or not value or not isinstance(value, dict | list):
        return rng.choice(ODD)
    places: Any = list(value) if isinstance(value, dict) else range(len(value))
    place: Any = rng.choice(places)
    copy: Any = value.copy()
    match rng.randrange(4):
        case 0:
            del copy[place]
        case 1 if isinstance(copy, list):
            copy.insert(place, rng.choice(ODD))
        case 1:
            copy[rng.choice(("more", "arrays", "kind"))] = rng.choice(ODD)
        case _:
            copy[place] = spoiled(rng, copy[place])
    return copy


def spoiled_arrays(rng: random.Random, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a copy of the arrays with one array removed, added, or changed in dtype, shape or values."""
    name = rng.choice([*arrays, "rows.1", "pages.other", "tokens"])
    array = arrays.get(name, np.zeros(3, np.int32))
    changed: list[np.ndarray | None] = [
        None,
        array.astype(rng.choice(["int64", "float32", "int8", "float16"])),
        array[..., :-1],
        array.reshape(-1),
        array[None],
        np.full_like(array, rng.choice([-1, -2, 0, 3, 99])),
        np.zeros((0, 5), np.int32),
    ]
    new = rng.choice(changed)
    return {n: a for n, a in arrays.items() if n != name} | ({} if new is None else {name: new})


def hostile(rng: random.Random, message: Message) -> tuple[bytes, bool]:
    """Return the frame of a spoiled message, and whether to close the connection after it.

    The connection must be closed if the frame may be incomplete, because the receiver would wait for more bytes.
    """
    header, arrays = message
    match rng.randrange(6):
        case 0:
            data = bytearray(frame(header, arrays))
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= rng.randint(1, 255)
            return bytes(data), True
        case 1:
            data = frame(header, arrays)
            return data[: rng.randrange(len(data))], True
        case 2:
            return frame(header, spoiled_arrays(rng, arrays)), False
        case 3:
            listed = [[name, a.dtype.name, list(a.shape)] for name, a in arrays.items()]
            return frame({**header, "arrays": spoiled(rng, listed)}, arrays), False
        case _:
            return frame(spoiled(rng, header), arrays), False


def reader(end: socket.socket) -> threading.Thread:
    """Start a thread that reads and drops everything that arrives at a socket."""

    def run() -> None:
        with contextlib.suppress(OSError):
            while end.recv(2**16):
                pass

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def send(end: socket.socket, data: bytes, *, last: bool = False) -> None:
    with contextlib.suppress(OSError):  # raised if the process has closed the connection
        end.sendall(data)
        if last:
            end.shutdown(socket.SHUT_WR)


def attack_decode(rng: random.Random, engine: Engine, num_messages: int) -> dict[str, int]:
    """Send hostile messages to `RemotePrefill` on many connections. Return the number of each outcome."""
    counts = dict.fromkeys(("messages", "refused", "accepted", "finished"), 0)
    indices = (1, 4, 5)
    while counts["messages"] < num_messages:
        here, there = socket.socketpair()
        drain, salt = reader(there), f"salt {counts['messages']}"
        ordered = rng.random() < 0.3  # send only valid messages, in a random order
        greet_bytes = [frame(*message) for message in greeting("prefill", engine)]
        if spoil_greeting := rng.random() < 0.1:
            data, last = hostile(rng, rng.choice(greeting("prefill", engine)))
            greet_bytes[rng.randrange(3)] = data
            greet_bytes = [b"".join(greet_bytes)]
        for data in greet_bytes:
            send(there, data, last=spoil_greeting)
        try:
            remote = RemotePrefill(engine, SocketTransport(here, timeout_s=20), timeout_s=20)
        except (TransferError, ValueError):
            assert spoil_greeting
            counts["messages"] += 1
            counts["refused"] += 1
            remote = None
        if remote is not None:
            names = [f"{salt} {i}" for i in range(len(indices))]
            for name, index in zip(names, indices, strict=True):
                remote.add_request(PROMPTS[index], PARAMS, request_id=name, salt=salt)
            honest = [layer_message(w, number) for number, i in enumerate(indices) for w in layers(i)]
            for step, (header, _) in enumerate(honest):  # number the steps across all prompts
                header["step"] = step - header["layer"]
            honest += [({"kind": "done", "number": number}, {}) for number in range(len(indices))]
            place = 0
            for _ in range(rng.randint(1, 24)):
                before, last = published(engine), False
                if rng.random() < 0.7:
                    data = frame(*honest[min(place, len(honest) - 1)])
                    place += 1
                elif ordered:
                    data = frame(*rng.choice(honest))
                else:
                    data, last = hostile(rng, rng.choice(honest))
                send(there, data, last=last)
                counts["messages"] += 1
                try:
                    remote.poll(20)
                except TransferError:
                    counts["refused"] += 1
                    assert published(engine) == before
                    break
                counts["accepted"] += 1
                if rng.random() < 0.1:
                    engine.step()
            check_rows(engine)
            if ordered:
                remote.compute_here()
                tokens = computed(LATENT_KIND)[1]
                assert finish(engine, names) == [tokens[i] for i in indices]
                counts["finished"] += len(names)
            remote.close()
            for name in names:
                if engine.knows(name):
                    engine.abort(name)
                    engine.forget(name)
            engine.step()
        there.close()
        here.close()
        drain.join(20)
        assert not drain.is_alive()
        check_rows(engine, 0)
    return counts


def attack_prefill(rng: random.Random, engine: Engine, num_messages: int) -> dict[str, int]:
    """Send hostile messages to `serve_prefill` on many connections. Return the number of each outcome."""
    counts = dict.fromkeys(("messages", "refused", "regular"), 0)
    while counts["messages"] < num_messages:
        here, there = socket.socketpair()
        messages = [*greeting("decode", engine)]
        for number in range(rng.randint(1, 16)):
            tokens = [rng.randrange(64) for _ in range(rng.randint(1, 12))]
            messages.append(prompt_message(rng.choice([number] * 9 + [0]), tokens, salt=str(number % 3)))
        messages.append(({"kind": "bye"}, {}))
        before = published(engine)
        with serving(engine, SocketTransport(there, timeout_s=20), timeout_s=20) as (thread, errors):
            drain = reader(here)
            for i, message in enumerate(messages):
                data, last = frame(*message), False
                if rng.random() < (0.02 if i < 3 else 0.15):
                    data, last = hostile(rng, message)
                send(here, data, last=last)
                counts["messages"] += 1
                if last or errors:
                    break
            send(here, b"", last=True)
            thread.join(60)
            assert not thread.is_alive()
        here.close()
        drain.join(20)
        assert not drain.is_alive()
        counts["refused" if errors else "regular"] += 1
        assert all(isinstance(error, TransferError | ValueError) for error in errors), errors
        assert published(engine) >= before or len(published(engine)) > 40  # a full pool reuses page rows
        assert not engine._requests.tracked
        finish(engine, [])  # a step may still be on the device
        check_rows(engine, 0)
    return counts


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    ("seed", "num_messages"), [(0, 60), pytest.param(1, 10_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("attack", [attack_decode, attack_prefill], ids=["decode process", "prefill process"])
def test_fuzz(attack: Callable[[random.Random, Engine, int], dict[str, int]], seed: int, num_messages: int) -> None:
    """Random hostile messages raise only documented errors, and the engine works afterwards.

    Each kind of outcome that `attack` counts occurs at least once.
    """
    threads, engine = set(threading.enumerate()), make(LATENT_KIND)
    check_honest_transfer(engine, "before")  # compiles all steps
    before = resident_bytes()
    counts = attack(random.Random(seed), engine, num_messages)
    assert resident_bytes() - before < 2**28
    assert all(counts.values()), counts
    check_honest_transfer(engine)
    for thread in [thread for thread in threading.enumerate() if thread not in threads]:
        thread.join(10)
        assert not thread.is_alive(), thread
