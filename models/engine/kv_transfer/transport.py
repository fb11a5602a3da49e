"""Messages between two processes on one or two hosts. A message has a JSON header, arrays, and a checksum of both."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from pallas_attn.models.config.json_files import parse_json
from pallas_attn.models.engine.kv_transfer.fields import DTYPES, Integer, ListOf, ObjectOf, OneOf, TextUpTo, check_field

MAX_HEADER = 2**20
"""Maximum size of a header in bytes. Parsed JSON may need about 40 times the memory of its text."""

LEAST_RATE = 2**20
"""Lowest accepted transfer rate in bytes per second. The time limit of a message is the transport's timeout plus its
size divided by this rate."""

_FRAME = struct.Struct(">4sIQI")
"""First bytes of a message: magic number, size of the header in bytes, size of all arrays in bytes, CRC-32 of header
and arrays. The checksum is a CRC-32, because a cryptographic digest would be slower than the socket."""

_BYTES_PER_CALL = 2**17
"""Maximum number of bytes per call of `socket.send`. The operating system restarts the timeout of a socket whenever it
has sent some of the bytes, so that a call with more bytes could last many times the timeout."""

_MARK = b"pgs1"

_ARRAYS = ListOf((TextUpTo(200), OneOf(tuple(DTYPES)), ListOf(Integer(0, 2**40), most=8)), most=4096)
"""Field `arrays` of a header: name, dtype and shape of each array. The bytes of the arrays follow the header in the
order of this list."""


class TransportError(RuntimeError):
    """The other process closed the connection, does not respond, or sent invalid data."""


class Transport(Protocol):
    """Sends and receives messages completely and in order. Threads may send while another thread receives."""

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> None:
        """Send a message. Several threads may call this method at the same time.

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
          timeout_s: time limit in seconds. Sending fails if no byte is sent for this time. Receiving fails if no byte
            arrives for this time after the first byte of a message. A whole message fails after this time plus 1 s per
            `LEAST_RATE` bytes.
          max_bytes: maximum size of a message's arrays in bytes.

        Raises:
          ValueError: timeout_s is not from 0.001 to 1e8, or max_bytes is not positive.
        """
        if not 1e-3 <= timeout_s <= 1e8:
            raise ValueError(f"timeout_s: expected 0.001 to 1e8, got {timeout_s}")
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
        check_field("arrays", listed, _ARRAYS)
        head = json.dumps({**header, "arrays": listed}).encode()
        if len(head) > MAX_HEADER:
            raise ValueError(f"header: expected at most {MAX_HEADER} bytes of JSON, got {len(head)}")
        body = [part.reshape(-1).view(np.uint8).data for part in parts if part.nbytes]
        num_bytes = sum(map(len, body))
        if num_bytes > self._max_bytes:
            raise ValueError(f"arrays: expected at most {self._max_bytes} bytes, got {num_bytes}")
        frame = _FRAME.pack(_MARK, len(head), num_bytes, _checksum(head, *body))
        with self._sending:
            if self._broken:
                raise TransportError("an earlier message was sent incompletely")
            self._broken = True
            deadline_s = self._deadline_s(len(frame) + len(head) + num_bytes)
            for part in (frame + head, *body):
                self._write(memoryview(part), deadline_s)
            self._broken = False

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        frame = self._read(1, math.inf).tobytes()  # no time limit before the first byte
        frame += self._read(_FRAME.size - 1, self._deadline_s(0)).tobytes()
        mark, head_bytes, body_bytes, checksum = _FRAME.unpack(frame)
        if mark != _MARK or head_bytes > MAX_HEADER or body_bytes > self._max_bytes:
            sizes = f"{head_bytes} bytes with arrays of {body_bytes}"
            raise TransportError(f"not a message, or too large: {sizes}, magic number {mark!r}")
        deadline_s = self._deadline_s(head_bytes + body_bytes)
        head, body = self._read(head_bytes, deadline_s), self._read(body_bytes, deadline_s)
        if checksum != _checksum(head, body):
            raise TransportError("a message is damaged: its checksum differs")
        try:
            header = parse_json(head.tobytes())
            check_field("header", header, ObjectOf())
            return header, _arrays(header.pop("arrays", None), body)
        except ValueError as error:
            raise TransportError(f"a message cannot be read: {str(error)[:200]}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # already closed by either process
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _deadline_s(self, num_bytes: int) -> float:
        """Return the time of the monotonic clock by which `num_bytes` must have been transferred."""
        return time.monotonic() + self._timeout_s + num_bytes / LEAST_RATE

    def _write(self, data: memoryview, deadline_s: float) -> None:
        """Send bytes with several calls of `socket.send`. Each call waits up to the socket's timeout.

        Raises:
          TransportError: a call timed out or failed, or the deadline has passed.
        """
        while data:
            if time.monotonic() > deadline_s:
                raise TransportError("the other process receives too slowly")
            try:
                data = data[self._socket.send(data[:_BYTES_PER_CALL]) :]
            except BlockingIOError as error:
                raise TransportError(f"the other process received nothing for {self._timeout_s:g} s") from error
            except OSError as error:
                raise TransportError(f"the other process closed the connection: {error}") from error

    def _read(self, count: int, deadline_s: float) -> np.ndarray:
        """Receive `count` bytes of a message, uint8 [count].

        Raises:
          TransportError: the bytes did not arrive in time, or the connection is closed.
        """
        # `empty` does not touch the memory. The operating system allocates it only as bytes arrive, so the size in a
        # frame alone cannot exhaust the memory.
        data = np.empty(count, np.uint8)
        view, read = memoryview(data), 0
        while read < count:
            if time.monotonic() > deadline_s:
                raise TransportError("the other process sends a message too slowly")
            try:
                got = self._socket.recv_into(view[read:])
            except BlockingIOError as error:
                if deadline_s == math.inf:
                    continue
                raise TransportError(f"the rest of a message did not arrive within {self._timeout_s:g} s") from error
            except OSError as error:
                raise TransportError(f"the connection is lost: {error}") from error
            if not got:
                where = "between messages" if deadline_s == math.inf else "in the middle of a message"
                raise TransportError(f"the other process closed the connection {where}")
            read += got
        return data


def _checksum(*parts: Any) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _arrays(listed: Any, body: np.ndarray) -> dict[str, np.ndarray]:
    """Split the bytes after a header into its arrays.

    Raises:
      ValueError: the list of arrays is malformed, or needs another number of bytes.
    """
    check_field("header.arrays", listed, _ARRAYS)
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for name, dtype_name, shape in listed:
        dtype = DTYPES[dtype_name]
        end = start + math.prod(shape) * dtype.itemsize
        if name in arrays:
            raise ValueError(f"header.arrays: expected each name once, got {name!r} again")
        if end > len(body):
            raise ValueError(f"header.arrays: expected arrays of {len(body)} bytes, {name!r} ends at {end}")
        arrays[name] = np.frombuffer(body.data[start:end], dtype).reshape(shape)
        start = end
    if start != len(body):
        raise ValueError(f"header.arrays: expected arrays of {len(body)} bytes, got {start}")
    return arrays
