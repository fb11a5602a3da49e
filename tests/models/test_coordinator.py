"""The port of the coordination service accepts only processes that know the secret."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pallas_attn.models.engine import ProcessError, Processes
from pallas_attn.models.engine.distributed import coordination_service
from pallas_attn.models.engine.distributed.coordination_service import Listener, Refused
from pallas_attn.models.engine.distributed.secret import VARIABLE, SecretError, shared_secret
from tests.models.process_case import WORKER, Group, fixture_group, free_port  # noqa: F401

SECRET = b"a secret of 24 bytes ..."
OTHER_SECRET = b"another secret of 32 bytes ....."


# --- the listener, without a service


class Echo:
    """The listener under test, for three processes, in front of a service that returns every received byte."""

    def __init__(self, folder: Path) -> None:
        self.path, self.port = str(folder / "echo"), free_port()
        self.listener = Listener(SECRET, 3, self.path)

    async def __aenter__(self) -> Echo:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionResetError):
                while data := await reader.read(100):
                    writer.write(data)
            writer.close()

        self._servers = [
            await asyncio.start_unix_server(echo, self.path),
            await asyncio.start_server(self.listener.accept, "127.0.0.1", self.port, limit=1024),
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=10)
        await asyncio.sleep(0.01)  # asyncio closes transports in its next iterations

    async def join(self, process: int, count: int = 3, start: str = "a", secret: bytes = SECRET) -> bytes:
        """Connect with the number and secret of a process, send "hello", and return the answer of the service."""
        statement = (process, count, start)
        reader, writer = await coordination_service._open("127.0.0.1", self.port, secret, statement)
        writer.write(b"hello")
        try:
            return await asyncio.wait_for(reader.readexactly(5), 5)
        finally:
            writer.close()

    async def stranger(self, data: bytes) -> bytes:
        """Send bytes without a handshake. Return everything that the listener sends until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(-1), 10)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


def test_processes_with_the_secret_reach_the_service(tmp_path: Path):
    async def run() -> None:
        async with Echo(tmp_path) as echo:
            for process in (1, 2, 1):  # process 1 connects twice
                assert await echo.join(process) == b"hello"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process": 1, "secret": OTHER_SECRET}, "it does not have the secret of this process"),
        ({"process": 1, "count": 2}, "process 1 was started for 2 processes, process 0 for 3"),
        ({"process": 0}, "expected process 1 to 2, got process 0"),
        ({"process": 3}, "expected process 1 to 2, got process 3"),
        ({"process": 2, "start": "b"}, "process 2 has connected already"),
    ],
)
def test_listener_refuses_a_process_and_serves_the_others(tmp_path: Path, options: dict, message: str):
    async def run() -> None:
        async with Echo(tmp_path) as echo:
            assert await echo.join(2) == b"hello"
            with pytest.raises(Refused, match=message):
                await echo.join(**options)
            assert await echo.join(2) == b"hello"
            assert await echo.join(1) == b"hello"

    asyncio.run(run())


HELLO = {"nonce": "00", "process": 1, "count": 3, "start": "b", "proof": "00"}
STRANGERS = {
    "an HTTP request": b"GET / HTTP/1.1\r\n\r\n",
    "the first bytes of gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "a long line": b"a" * 100_000,
    "no object": b"[1]\n",
    "nested lists": b"[" * 1000 + b"\n",
    "no UTF-8": b"\xff\xfe\n",
    "no fields": b"{}\n",
    "a wrong proof": json.dumps(HELLO).encode() + b"\n",
    "a proof of another type": json.dumps(HELLO | {"proof": [1], "process": {}}).encode() + b"\n",
    "a proof that is not ASCII": json.dumps(HELLO | {"proof": "\u00e9\ud800"}).encode() + b"\n",
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_strangers_get_only_a_nonce(tmp_path: Path, data: bytes):
    async def run() -> None:
        async with Echo(tmp_path) as echo:
            answer = await echo.stranger(data)
            assert not answer or set(json.loads(answer)) == {"nonce"}
            assert echo.listener.starts == {}
            assert await echo.join(1) == b"hello"

    asyncio.run(run())


def test_a_recorded_handshake_is_worth_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent: list[bytes] = []
    right = coordination_service._send
    monkeypatch.setattr(
        coordination_service,
        "_send",
        lambda writer, message: (sent.append(json.dumps(message).encode() + b"\n"), right(writer, message))[1],
    )

    async def run() -> None:
        async with Echo(tmp_path) as echo:
            await echo.join(1)
            (recorded,) = [line for line in sent if b"start" in line]
            answer = await echo.stranger(recorded + b"hello")
            assert set(json.loads(answer)) == {"nonce"}

    asyncio.run(run())


def test_idle_strangers_do_not_keep_processes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coordination_service, "HANDSHAKE_S", 0.5)

    async def run() -> None:
        async with Echo(tmp_path) as echo:
            idle = [await asyncio.open_connection("127.0.0.1", echo.port) for _ in range(100)]
            until = time.monotonic() + 10
            while True:
                try:
                    assert await echo.join(1) == b"hello"
                    break
                except coordination_service.NO_ANSWER:
                    assert time.monotonic() < until
                    await asyncio.sleep(0.1)
            for _, writer in idle:
                writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [0.0, coordination_service.HANDSHAKE_S])
def test_listener_that_closes_after_its_time_limit_is_tried_again(monkeypatch: pytest.MonkeyPatch, seconds: float):
    """A listener closes connections with a wrong proof at once, and slow connections after a time limit."""
    clock = iter([0.0, seconds])
    monkeypatch.setattr(coordination_service, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"nonce": "00"}\n')
        await reader.readline()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(EOFError if seconds else Refused):
                await coordination_service._open("127.0.0.1", port, SECRET, (1, 3, "a"))

    asyncio.run(run())


# --- the programs


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield a function that starts a program of `coordination_service` and sends the secret to this program."""
    programs: list[subprocess.Popen[str]] = []

    def start(*arguments: object, secret: bytes = SECRET) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", coordination_service.__file__, *map(str, arguments)]
        program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        programs.append(program)
        assert program.stdin is not None
        program.stdin.write(secret.hex() + "\n")
        program.stdin.flush()
        return program

    yield start
    for program in programs:
        program.kill()
        with program:  # leaving the context closes the pipes
            pass


def said(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().rstrip("\n")


def test_service_listens_at_the_given_address_only(started: Callable[..., subprocess.Popen[str]]):
    port = free_port()
    path = said(started("serve", f"127.0.0.2:{port}", 2, 0)).removeprefix("ready ")
    assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert said(started("forward", f"127.0.0.2:{port}", 2, 1, 5)).startswith("ready ")


def test_port_in_use_is_reported_before_jax_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The program that serves cannot import jaxlib here. gRPC needs 7 to 9 seconds to report a port in use."""
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "__init__.py").write_text("raise ImportError('jaxlib was imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    in_use = pytest.raises(ProcessError, match=r"^process 0 cannot serve at 127.0.0.1:\d+: Address already in use$")
    with socket.create_server(("127.0.0.1", 0)) as used, in_use:
        Processes(f"127.0.0.1:{used.getsockname()[1]}", 2, 0, secret=SECRET, give_up=print)


@pytest.mark.parametrize(
    ("host", "message"),
    [("192.0.2.1", "Cannot assign requested address"), ("no-such-host.invalid", "")],
)
def test_host_of_another_machine_is_reported(host: str, message: str):
    with pytest.raises(ProcessError, match=f"^process 0 cannot serve at {host}:1234: {message}"):
        Processes(f"{host}:1234", 2, 0, secret=SECRET, give_up=print)


def test_process_without_an_answer_is_reported():
    port = free_port()
    with pytest.raises(ProcessError, match=f"^cannot join process 0 at 127.0.0.1:{port}: no answer within 0.5 s$"):
        Processes(f"127.0.0.1:{port}", 2, 1, secret=SECRET, join_timeout_s=0.5, give_up=print)


def test_second_start_of_a_process_is_reported(started: Callable[..., subprocess.Popen[str]]):
    port = free_port()
    assert said(started("serve", f"127.0.0.1:{port}", 2, 0)).startswith("ready ")
    first = started("forward", f"127.0.0.1:{port}", 2, 1, 5)
    assert said(first).startswith("ready ")
    with pytest.raises(ProcessError, match=r"process 1 has connected already"):
        Processes(f"127.0.0.1:{port}", 2, 1, secret=SECRET, join_timeout_s=5, give_up=print)
    with pytest.raises(ProcessError, match=r"it does not have the secret of this process"):
        Processes(f"127.0.0.1:{port}", 2, 1, secret=OTHER_SECRET, join_timeout_s=5, give_up=print)
    assert first.poll() is None


def test_programs_end_with_their_process(started: Callable[..., subprocess.Popen[str]]):
    port = free_port()
    service = started("serve", f"127.0.0.1:{port}", 2, 0.1)
    forwarder = started("forward", f"127.0.0.1:{port}", 2, 1, 60)
    lonely = started("forward", f"127.0.0.1:{free_port()}", 2, 1, 60)
    paths = [Path(said(program).removeprefix("ready ")) for program in (service, forwarder)]
    for program in (forwarder, service, lonely):
        assert program.stdin is not None
        program.stdin.close()
        program.wait(20)
    assert not any(path.parent.exists() for path in paths)


# --- the secret


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "pallas_attn"


def test_first_call_creates_a_secret_for_this_user_only(home: Path):
    secret = shared_secret()
    assert len(secret) == 64
    assert shared_secret() == secret
    assert [file.name for file in home.iterdir()] == ["secret"]
    assert stat.S_IMODE((home / "secret").stat().st_mode) == 0o600


def test_variable_wins(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "0123456789abcdef")
    assert shared_secret() == b"0123456789abcdef"
    monkeypatch.setenv(VARIABLE, "0123456789abcde")
    with pytest.raises(SecretError, match=r"^PALLAS_ATTN_SECRET: expected at least 16 bytes, got 15$"):
        shared_secret()
    assert not home.exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.chmod(0o640), "expected a file that only its owner"),
        (lambda file: file.write_text("short"), "expected at least 16 bytes, got 5"),
        (lambda file: (file.unlink(), os.mkfifo(file, 0o600)), "expected a file that only its owner"),
        (lambda file: (file.rename(file.with_name("other")), file.symlink_to("other")), "Too many levels"),
    ],
    ids=["readable by others", "short", "a pipe", "a link"],
)
def test_unsafe_secret_file_is_refused(home: Path, spoil: Callable[[Path], object], message: str):
    shared_secret()
    spoil(home / "secret")
    with pytest.raises(SecretError, match=message):
        shared_secret()


def test_secret_of_few_bytes_is_refused():
    with pytest.raises(ValueError, match=r"^secret: expected at least 16 bytes, got 3$"):
        Processes("127.0.0.1:1", 2, 0, secret=b"abc", give_up=print)


# --- strangers next to real processes

RAW_CLIENT = """
import sys
from jaxlib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=3, heartbeat_timeout=10, use_compression=True)
client.connect()
print("connected")
"""


AT_STEP_5 = """for number in range(10):
        while number == 5 and not os.path.exists(sys.argv[4]):
            open(sys.argv[4] + ".reached", "w").close()
            time.sleep(0.05)"""


def raw_client_fails(group: Group, port: int, index: int) -> None:
    """Start a jax.distributed client with process number 1 and without the secret, and check that the client fails."""
    group.start([["-c", RAW_CLIENT, f"127.0.0.1:{port}"]])
    status, lines, _ = group.wait(index)
    assert status != 0
    assert "connected" not in lines


@pytest.mark.slow
def test_raw_client_does_not_take_the_place_of_a_process(group: Group):
    port = free_port()
    group.start([["-c", WORKER, "0", str(port), "none"]])
    raw_client_fails(group, port, 1)
    group.start([["-c", WORKER, "1", str(port), "none"]])
    for index in (0, 2):
        status, lines, err = group.wait(index)
        assert (status, lines) == (0, ["left"]), err


@pytest.mark.slow
def test_raw_clients_and_restarts_do_not_end_the_processes(group: Group, tmp_path: Path):
    """Two processes wait at a step while two others try to join, and continue after the attempts fail.

    One client has no secret. The other one has the secret, but the number of the running process 1.
    """
    port, release, worker = free_port(), tmp_path / "go on", WORKER.replace("for number in range(10):", AT_STEP_5)
    group.start([["-c", worker, index, str(port), "none", str(release)] for index in "01"])
    until = time.monotonic() + 120
    while not release.with_name("go on.reached").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    raw_client_fails(group, port, 2)
    group.start([["-c", worker, "1", str(port), "none", str(release)]])
    status, _, err = group.wait(3)
    assert status == 1
    assert "process 1 has connected already" in err
    release.touch()
    for index in (0, 1):
        status, lines, err = group.wait(index)
        assert (status, lines) == (0, ["left"]), err


START_FAULT = """
import os, signal, sys, time
from pallas_attn.models.engine import Processes

def give_up(verdict):
    print("given up:", verdict, flush=True)
    os._exit(4)

index, port, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3] if sys.argv[1] == "1" else ""
if fault == "slow to start":
    time.sleep(4)
if fault == "killed before it connects":
    sys.exit(9)
processes = Processes(f"127.0.0.1:{port}", 2, index, timeout_s=2, join_timeout_s=8, give_up=give_up)
if fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
import jax
jax.devices()  # processes exchange their devices here
processes.agree("the model", b"odd" if fault == "disagreeing" else b"")
processes.leave()
print("left", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("slow to start", "left"),
        ("killed before it connects", "given up: not all of 2 processes connected to .* within 8 s"),
        ("killed", "given up: process 1 sent no heartbeat for 2 s"),
        ("stopped", "given up: process 1 sent no heartbeat for 2 s"),
        ("disagreeing", ".*ProcessError: process 1 disagrees with process 0 on the model"),
    ],
)
def test_faults_at_the_start_end_all_processes(group: Group, fault: str, message: str):
    port = str(free_port())
    group.start([["-c", START_FAULT, index, port, fault] for index in "01"])
    _, out, err = group.wait(0)
    lines = [*out, *err.splitlines()]
    assert [line for line in lines if re.fullmatch(message, line)], err
