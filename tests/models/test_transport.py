"""Messages through a socket: they arrive unchanged, and invalid data raises an error."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.engine import SocketTransport, TransportError

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


@pytest.mark.parametrize(("changes", "match"), [({"timeout_s": 0}, "timeout_s"), ({"max_bytes": 0}, "max_bytes")])
def test_invalid_arguments_are_rejected(changes: dict[str, Any], match: str) -> None:
    left, right = socket.socketpair()
    with left, right, pytest.raises(ValueError, match=f"^{match}: expected"):
        SocketTransport(left, **changes)
