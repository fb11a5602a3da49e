"""Messages through a socket: messages arrive unchanged, and invalid data raises an error."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.models.engine import SocketTransport, TransportError
from pallas_attn.models.engine.kv_transfer import transport as transport_module

ARRAYS = {
    "pages": np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::2],
    "narrow": np.arange(6).astype(jnp.bfloat16).reshape(3, 2),
    "none": np.zeros((0, 5), np.int8),
}


@pytest.fixture
def ends() -> Iterator[tuple[SocketTransport, SocketTransport]]:
    first, second = (SocketTransport(end, timeout_s=0.5) for end in socket.socketpair())
    yield first, second
    first.close()
    second.close()


def test_messages_arrive_unchanged(ends: tuple[SocketTransport, SocketTransport]) -> None:
    first, second = ends
    for number in range(3):
        first.send({"kind": "layer", "number": number}, ARRAYS)
    second.send({"kind": "bye"})
    assert first.receive() == ({"kind": "bye"}, {})
    for number in range(3):
        header, arrays = second.receive()
        assert header == {"kind": "layer", "number": number}
        assert arrays.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(arrays[name], array)


def test_silence_between_messages_is_no_error(ends: tuple[SocketTransport, SocketTransport]) -> None:
    first, second = ends
    timer = threading.Timer(1.2, first.send, [{"kind": "late"}])
    timer.start()
    assert second.receive()[0] == {"kind": "late"}


def frame_of(arrays: dict[str, np.ndarray]) -> bytes:
    left, right = socket.socketpair()
    with left, right:
        SocketTransport(left).send({"kind": "layer"}, arrays)
        return right.recv(1 << 16)


FRAME = frame_of(ARRAYS)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "the other process closed the connection between messages"),
        (FRAME[:30], "the other process closed the connection in the middle of a message"),
        (FRAME[:-1], "the other process closed the connection in the middle of a message"),
        (b"GET / HTTP/1.1\r\n\r\n\r\n", "not a message, or too large"),
        (struct.pack(">4sIQI", b"pgs1", 2**31, 0, 0), "not a message, or too large"),
        (struct.pack(">4sIQI", b"pgs1", 2, 2**40, 0), "not a message, or too large"),
        (struct.pack(">4sIQI", b"pgs1", 2, 0, 0) + b"{}", "its checksum differs"),
    ],
    ids=["nothing", "half a header", "all but a byte", "another protocol", "a large header", "large arrays", "damage"],
)
def test_invalid_data_is_rejected(data: bytes, match: str) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match=match):
            SocketTransport(right).receive()


def frame(header: Any, body: bytes = b"") -> bytes:
    """Return a frame with a correct checksum. A header of type bytes is used as it is, others are encoded as JSON."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">4sIQI", b"pgs1", len(head), len(body), zlib.crc32(body, zlib.crc32(head))) + head + body


def received(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    left, right = socket.socketpair()
    with left, right:
        threading.Thread(target=left.sendall, args=(data,), daemon=True).start()
        return SocketTransport(right, timeout_s=10).receive()


@pytest.mark.parametrize("dtype", ["(,)i4", "(2,)i4", "i4,i4", "O", "object", "V8", "U2", "M8[s]", "float128", "", 3])
def test_dtype_outside_the_list_is_rejected(dtype: Any) -> None:
    """An unknown dtype raises a TransportError, also if NumPy's parser of dtype names raises a SyntaxError."""
    with pytest.raises(TransportError, match=r"header\.arrays\[0\]\[1\]: expected one of int8, "):
        received(frame({"arrays": [["a", dtype, [2]]]}, bytes(8)))


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ([], "header: expected an object, got"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON|within each other"),
        ({}, r"header\.arrays: expected a list of 0 to 4096 items, got None"),
        ({"arrays": [["a", "int8", [-8]]]}, r"header\.arrays\[0\]\[2\]\[0\]: expected an integer from 0 to"),
        ({"arrays": [["a", "int8", [8.0]]]}, r"header\.arrays\[0\]\[2\]\[0\]: expected an integer from 0 to"),
        ({"arrays": [["a", "int8", [2**40] * 8]]}, "expected arrays of 8 bytes, 'a' ends at"),
        ({"arrays": [["a", "int8", [0] + [2**40] * 7], ["b", "int8", [8]]]}, "cannot be read"),
        ({"arrays": [["a", "int8", [4]], ["a", "int8", [4]]]}, "expected each name once, got 'a' again"),
        ({"arrays": [["a", "int8", [4]]]}, "expected arrays of 8 bytes, got 4"),
        ({"arrays": [["a", "int8"]]}, r"header\.arrays\[0\]: expected a list of 3 items"),
        ({"arrays": [[["a"], "int8", [8]]]}, r"header\.arrays\[0\]\[0\]: expected a str"),
    ],
    ids=str,
)
def test_malformed_header_is_rejected(header: Any, match: str) -> None:
    with pytest.raises(TransportError, match=match):
        received(frame(header, bytes(8)))


def test_message_that_could_not_be_received_is_not_sent(ends: tuple[SocketTransport, SocketTransport]) -> None:
    first, second = ends
    with pytest.raises(ValueError, match=r"arrays\[0\]\[1\]: expected one of int8, .* got 'bool'"):
        first.send({}, {"a": np.zeros(3, bool)})
    with pytest.raises(ValueError, match=r"header: expected at most 1048576 bytes of JSON, got 1\d{6}"):
        first.send({"salt": "x" * 2**20})
    first._max_bytes = 10
    with pytest.raises(ValueError, match=r"arrays: expected at most 10 bytes, got 12"):
        first.send({}, {"a": np.zeros(3, np.int32)})
    first.send({"kind": "bye"})
    assert second.receive() == ({"kind": "bye"}, {})


def test_message_sent_byte_by_byte_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout applies to the whole message, also if each single byte arrives in time."""
    monkeypatch.setattr(transport_module, "LEAST_RATE", 2**30)
    left, right = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        for byte in FRAME:
            if stop.wait(0.05):
                return
            left.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    with left, right:
        with pytest.raises(TransportError, match="sends a message too slowly"):
            SocketTransport(right, timeout_s=0.2).receive()
        stop.set()
        thread.join()


def test_message_read_byte_by_byte_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "LEAST_RATE", 2**40)
    left, right = socket.socketpair()
    stop = threading.Event()

    def sip() -> None:
        while not stop.is_set():
            right.recv(2**14)
            time.sleep(0.02)

    thread = threading.Thread(target=sip)
    thread.start()
    with left, right:
        with pytest.raises(TransportError, match="receives too slowly"):
            SocketTransport(left, timeout_s=0.2).send({}, {"pages": np.zeros(2**26, np.int8)})
        stop.set()
        left.shutdown(socket.SHUT_WR)
        thread.join()


def test_announced_bytes_are_not_allocated_before_they_arrive() -> None:
    """The memory for a message grows with the received bytes. The size announced in the frame is not allocated."""
    left, right = socket.socketpair()

    def receive() -> None:
        with pytest.raises(TransportError, match="in the middle of a message"):
            SocketTransport(right).receive()

    with left, right:
        left.sendall(struct.pack(">4sIQI", b"pgs1", 2, 2**30, 0) + b"{}")
        before = resident_bytes()
        receiver = threading.Thread(target=receive)
        receiver.start()
        time.sleep(0.5)
        assert resident_bytes() - before < 2**28
        left.shutdown(socket.SHUT_WR)
        receiver.join()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@given(position=st.integers(0, len(FRAME) - 1), value=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_damaged_message_is_rejected(position: int, value: int) -> None:
    data = bytearray(FRAME)
    data[position] ^= value
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError):
            SocketTransport(right).receive()


def test_incomplete_message_times_out() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(FRAME[:-1])
        with pytest.raises(TransportError, match=r"the rest of a message did not arrive within 0\.2 s"):
            SocketTransport(right, timeout_s=0.2).receive()


def test_send_without_a_receiver_times_out(ends: tuple[SocketTransport, SocketTransport]) -> None:
    first, _ = ends
    large = {"pages": np.zeros((1 << 24,), np.int8)}
    with pytest.raises(TransportError, match=r"the other process received nothing for 0\.5 s"):
        first.send({"kind": "layer"}, large)
    with pytest.raises(TransportError, match="an earlier message was sent incompletely"):
        first.send({"kind": "bye"})


def test_close_ends_a_waiting_receive(ends: tuple[SocketTransport, SocketTransport]) -> None:
    first, second = ends
    threading.Timer(0.2, second.close).start()
    with pytest.raises(TransportError):
        second.receive()
    with pytest.raises(TransportError, match="the other process closed the connection"):
        first.receive()
    with pytest.raises(TransportError, match="the other process closed the connection"):
        first.send({"kind": "bye"})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 1e-7}, "timeout_s"),  # the operating system rounds it to 0: no limit
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"max_bytes": 0}, "max_bytes"),
    ],
)
def test_invalid_arguments_are_rejected(changes: dict[str, Any], match: str) -> None:
    left, right = socket.socketpair()
    with left, right, pytest.raises(ValueError, match=f"^{match}: expected"):
        SocketTransport(left, **changes)
