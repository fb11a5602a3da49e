"""Messages between two processes, on one host or two: a JSON header, arrays, and a checksum of both."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

MAX_HEADER = 2**26
"""Maximum size of a header in bytes."""

_FRAME = struct.Struct(">4sIQI")
"""Frame: magic number, header bytes, array bytes, CRC-32. A cryptographic digest would be slower than the socket."""

_MARK = b"pgs1"


class TransportError(RuntimeError):
    """The other process closed the connection, does not respond, or sent invalid data."""


class Transport(Protocol):
    """Sends and receives messages completely and in order. One thread may send while another receives."""

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> None:
        """Send a message. Several threads may send.

        Raises:
          TransportError: the connection is closed, or the other process does not receive within the timeout.
        """

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Wait for the next message.

        Raises:
          TransportError: the connection is closed, or the data is not a message.
        """

    def close(self) -> None:
        """Close both directions. Threads that wait in `receive`, in either process, get a TransportError."""


class SocketTransport:
    """Messages through a stream socket, for example a Unix socket or a TCP connection."""

    def __init__(self, connection: socket.socket, *, timeout_s: float = 60.0, max_bytes: int = 2**30):
        """Take ownership of a connected socket.

        Args:
          connection: the socket.
          timeout_s: time in seconds after which a send that does not progress, or a message received in part, fails.
          max_bytes: maximum size of a message's arrays in bytes.

        Raises:
          ValueError: timeout_s or max_bytes is not positive.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: expected more than 0, got {timeout_s}")
        if max_bytes < 1:
            raise ValueError(f"max_bytes: expected at least 1, got {max_bytes}")
        self._socket, self._timeout_s, self._max_bytes = connection, timeout_s, max_bytes
        self._sending, self._broken = threading.Lock(), False
        connection.setblocking(True)
        interval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # Python's settimeout would affect both directions
            connection.setsockopt(socket.SOL_SOCKET, option, interval)

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> None:
        parts = [np.ascontiguousarray(array) for array in arrays.values()]
        listed = [
            [name, part.dtype.name, list(array.shape)]
            for (name, array), part in zip(arrays.items(), parts, strict=True)
        ]
        head = json.dumps({**header, "arrays": listed}).encode()
        body = [part.reshape(-1).view(np.uint8).data for part in parts if part.nbytes]
        frame = _FRAME.pack(_MARK, len(head), sum(map(len, body)), _checksum(head, *body))
        with self._sending:
            if self._broken:
                raise TransportError("an earlier message was sent incompletely")
            self._broken = True
            try:
                for part in (frame + head, *body):
                    self._socket.sendall(part)
            except BlockingIOError as error:
                raise TransportError(f"the other process received nothing for {self._timeout_s:g} s") from error
            except OSError as error:
                raise TransportError(f"the other process closed the connection: {error}") from error
            self._broken = False

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        frame = self._read(_FRAME.size, begun=False)
        mark, head_bytes, body_bytes, checksum = _FRAME.unpack(frame)
        if mark != _MARK or head_bytes > MAX_HEADER or body_bytes > self._max_bytes:
            sizes = f"{head_bytes} bytes with arrays of {body_bytes}"
            raise TransportError(f"not a message, or too large: {sizes}, magic number {mark!r}")
        head, body = self._read(head_bytes), self._read(body_bytes)
        if checksum != _checksum(head, body):
            raise TransportError("a message is damaged: its checksum differs")
        try:
            header = json.loads(head)
            return header, _arrays(header.pop("arrays"), body)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise TransportError(f"a message cannot be read: {str(error)[:200]}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # already closed by either process
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int, *, begun: bool = True) -> bytearray:
        """Read `count` bytes. The timeout applies only within a message: after its first byte, or if `begun`."""
        data = bytearray(count)
        view, read = memoryview(data), 0
        while read < count:
            try:
                got = self._socket.recv_into(view[read:])
            except BlockingIOError as error:
                if not begun and not read:
                    continue
                raise TransportError(f"the rest of a message did not arrive within {self._timeout_s:g} s") from error
            except OSError as error:
                raise TransportError(f"the connection is lost: {error}") from error
            if not got:
                where = "in the middle of a message" if begun or read else "between messages"
                raise TransportError(f"the other process closed the connection {where}")
            read += got
        return data


def _checksum(*parts: Any) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _arrays(listed: Any, body: bytearray) -> dict[str, np.ndarray]:
    arrays, start = {}, 0
    for name, dtype_name, shape in listed:
        dtype = jnp.dtype(dtype_name)
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"array {name!r} of {dtype_name} {shape}")
        end = start + math.prod(shape) * dtype.itemsize
        arrays[str(name)] = np.frombuffer(memoryview(body)[start:end], dtype).reshape(shape)
        start = end
    if start != len(body):
        raise ValueError(f"arrays of {start} bytes, but the message has {len(body)}")
    return arrays
