"""JAX's coordination service, protected so that only processes with a shared secret can connect to it.

JAX's coordination service connects the processes of one engine. The service has no authentication, and one wrong
message ends all processes. Therefore the service listens on a Unix socket in a folder that only this user can open.
Two programs in this file forward connections from other hosts to the service:

 process 0:  JAX client ───────────────────────────────────────────────────────────────► service (Unix socket)
 process i:  JAX client ─► forwarder (Unix socket) ══ TCP, handshake ══► listener ─► service

The program `serve` runs the service and the listener; the program `forward` runs the forwarder. `Processes` starts
them. `serve` runs for some seconds after process 0 has ended, so that the other processes can learn why: JAX's clients
abort if the service disappears. A forwarder ends with its process.

Handshake of every TCP connection, one JSON object per line:

 listener  ─► {"nonce"}
 forwarder ─► {"nonce", "process", "count", "start", "proof"}
 listener  ─► {"error", "proof"}              error: null, or the reason of a refusal, after which the connection ends

After the handshake, both programs copy bytes in both directions. A nonce is a random number that is used once. A proof
is an HMAC, with the secret as its key, of the sender's role and of all fields so far except proofs, including the
fields of its own message. `start` is a random number that a process chooses when it starts. The listener accepts
several connections with the same `start`. It refuses a connection whose process number has connected before with a
different `start`. The handshake authenticates the
connection. It does not encrypt the bytes that follow, and it does not detect changes of these bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NEVER_S = 10**6
"""Value in seconds for timeouts of JAX that must not expire, because `Processes` has its own timeouts."""

HANDSHAKE_S = 5.0
"""Maximum duration of a handshake in seconds."""

MAX_HANDSHAKES = 64
"""Maximum number of simultaneous handshakes; the listener closes further connections. This bounds the memory that
connections without the secret can use."""

LINE_BYTES = 1024
"""Maximum length of a handshake line in bytes."""

RETRY_S = 0.1
"""Interval in seconds between two attempts of a forwarder to reach the listener."""

MAX_SOCKET_PATH = 100
"""Maximum length of a Unix socket's path in bytes; Linux accepts 107."""


NO_ANSWER = (OSError, EOFError, ValueError, RecursionError, asyncio.LimitOverrunError)
"""Exceptions that a handshake raises if the other program is absent, is too slow (TimeoutError is an OSError), or sends
something else than JSON objects, one per line."""


class Refused(Exception):
    """The listener refused the connection, or gave no valid proof, which usually means another secret. The forwarder
    does not try again."""


# --- handshake


def _proof(secret: bytes, role: str, *statement: Any) -> str:
    return hmac.new(secret, json.dumps([role, *statement]).encode(), hashlib.sha256).hexdigest()


def _is_proof(value: Any, expected: str) -> bool:
    return isinstance(value, str) and hmac.compare_digest(value.encode(), expected.encode())


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the JSON object of the next line. Raises one of NO_ANSWER if the line is not a JSON object."""
    message = json.loads(await reader.readuntil(b"\n"))
    if not isinstance(message, dict):
        raise ValueError("expected an object")
    return message


class Listener:
    """Accepts connections of the processes 1 to `count` - 1 and forwards them to the service.

    Attributes:
      starts: the field `start` of each process that has connected, by process number.
    """

    def __init__(self, secret: bytes, count: int, service_path: str) -> None:
        self.starts: dict[int, str] = {}
        self._secret, self._count, self._service_path = secret, count, service_path
        self._handshakes = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one TCP connection until it ends.

        If the proof of the other program is wrong, the connection is closed without an answer to the proof.
        """
        try:
            with contextlib.suppress(*NO_ANSWER):  # invalid input ends this connection only
                if self._handshakes < MAX_HANDSHAKES and await self._greet(reader, writer):
                    await _copy_both_ways((reader, writer), await asyncio.open_unix_connection(self._service_path))
        finally:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Carry out the listener's side of the handshake. Return whether the process is accepted."""
        self._handshakes += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                nonce = secrets.token_hex(32)
                _send(writer, {"nonce": nonce})
                said = await _receive(reader)
                process, count, start = said.get("process"), said.get("count"), said.get("start")
                statement = [nonce, said.get("nonce"), process, count, start]
                if not _is_proof(said.get("proof"), _proof(self._secret, "forwarder", *statement)):
                    return False
                if not (isinstance(process, int) and isinstance(count, int) and isinstance(start, str)):
                    return False
                error = self._refusal(process, count, start)
                _send(writer, {"error": error, "proof": _proof(self._secret, "listener", *statement, error)})
                await writer.drain()
                return error is None
        finally:
            self._handshakes -= 1

    def _refusal(self, process: int, count: int, start: str) -> str | None:
        """Return the reason to refuse a process that has proved the secret. If it is accepted, record `start`."""
        if count != self._count:
            return f"process {process} was started for {count} processes, process 0 for {self._count}"
        if process not in range(1, self._count):
            return f"expected process 1 to {self._count - 1}, got process {process}"
        if self.starts.setdefault(process, start) != start:
            return f"process {process} has connected already; a process cannot be replaced while the others run"
        return None


async def _open(
    host: str, port: int, secret: bytes, statement: tuple[int, int, str]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a listener and carry out the forwarder's side of the handshake.

    Args:
      statement: number of this process, number of processes, and `start`.

    Raises:
      Refused: the listener refused this process, or has another secret.
      NO_ANSWER: no listener answered in time.
    """
    began = time.monotonic()
    async with asyncio.timeout(HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
        try:
            nonces = [(await _receive(reader)).get("nonce"), secrets.token_hex(32)]
            process, count, start = statement
            _send(
                writer,
                {
                    "nonce": nonces[1],
                    "process": process,
                    "count": count,
                    "start": start,
                    "proof": _proof(secret, "forwarder", *nonces, *statement),
                },
            )
            try:
                answer = await _receive(reader)
            except EOFError:
                if time.monotonic() - began >= HANDSHAKE_S:  # the listener's time limit, not a wrong proof
                    raise
                raise Refused("it does not have the secret of this process") from None
            error = answer.get("error")
            if not _is_proof(answer.get("proof"), _proof(secret, "listener", *nonces, *statement, error)):
                raise Refused("it does not have the secret of this process")
            if error is not None:
                raise Refused(error)
        except BaseException:
            writer.close()
            raise
        return reader, writer


# --- copying bytes

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(2**16):
        target.write(data)
        await target.drain()


async def _copy_both_ways(one: Connection, other: Connection) -> None:
    """Copy bytes between two connections until one ends, then close both."""
    tasks = [asyncio.ensure_future(_copy(one[0], other[1])), asyncio.ensure_future(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        one[1].close()
        other[1].close()


# --- programs


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[IPv6 address]:port"."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


@contextlib.contextmanager
def _socket_path(name: str) -> Iterator[str]:
    """Context with the path for a Unix socket in a new folder with mode 0700. The folder is removed at the end."""
    folder = tempfile.mkdtemp(prefix="pallas_attn-")
    if len(os.fsencode(folder)) + len(name) >= MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="pallas_attn-", dir="/tmp")
    try:
        yield os.path.join(folder, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def serve(address: str, count: str, linger_s: str) -> None:
    """Run the service and the listener. End one second after a line arrives on standard input (other processes may
    still be disconnecting), or `linger_s` seconds after the end of standard input.

    The first line of standard input is the secret in hexadecimal digits. Prints "ready PATH" with the path of the
    service's socket.
    """
    commands = await _standard_input()
    secret = bytes.fromhex((await commands.readline()).decode())
    host, port = split_address(address)
    with _socket_path("service") as path:
        listener = Listener(secret, int(count), path)
        server = await asyncio.start_server(listener.accept, host, port, limit=LINE_BYTES)
        from jaxlib import _jax  # slow to import; forwarders, and a port in use, do not need it

        service = _jax.get_distributed_runtime_service(
            f"unix:{path}", int(count), heartbeat_timeout=NEVER_S, shutdown_timeout=NEVER_S
        )
        print("ready", path, flush=True)
        await asyncio.sleep(1.0 if await commands.readline() else float(linger_s))
        server.close()
        service.shutdown()


async def forward(address: str, count: str, process: str, timeout_s: str) -> None:
    """Connect to the listener at `address`, then forward connections to it until standard input ends.

    The first line of standard input is the secret in hexadecimal digits. Prints "ready PATH" with the path of the
    socket to which the process connects, as soon as the listener has accepted the process.

    Raises:
      Refused: as `_open`.
      TimeoutError: no listener answered within `timeout_s` seconds.
    """
    commands = await _standard_input()
    secret = bytes.fromhex((await commands.readline()).decode())
    host, port = split_address(address)
    statement = (int(process), int(count), secrets.token_hex(16))
    ended = asyncio.ensure_future(commands.read())
    deadline = time.monotonic() + float(timeout_s)
    while True:
        try:
            _, writer = await _open(host, port, secret, statement)
            writer.close()
            break
        except NO_ANSWER:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {float(timeout_s):g} s") from None
        await asyncio.wait([ended], timeout=RETRY_S)
        if ended.done():
            return

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            remote = await _open(host, port, secret, statement)
        except (*NO_ANSWER, Refused):
            writer.close()  # the client tries again; `Processes` limits how long the service may be unreachable
            return
        await _copy_both_ways((reader, writer), remote)

    with _socket_path("forwarder") as path:
        await asyncio.start_unix_server(accept, path)
        print("ready", path, flush=True)
        await ended


def main(command: str, *arguments: str) -> None:
    """Run `serve` or `forward`. If an address cannot be used, or a connection is refused or times out, print
    "error REASON" and exit with status 1. Other exceptions are bugs."""
    try:
        asyncio.run({"serve": serve, "forward": forward}[command](*arguments))
        return
    except (Refused, TimeoutError) as error:
        reason = str(error)
    except OSError as error:  # the text of asyncio's exceptions also has the address, which the caller knows
        errno = None if isinstance(error, socket.gaierror) else error.errno
        reason = str(error.strerror or error) if errno is None else os.strerror(errno)
    print("error", reason)
    sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
