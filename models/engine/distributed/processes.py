"""Several processes that run one engine: start, agreement and termination. Each process has some devices of one mesh.

Every process has all requests, plans every step itself and reads every token. A plan depends only on requests and
tokens, so all processes make equal plans. Therefore no data is sent before a step, and no step waits for process 0.
Processes exchange a digest of each plan. Tokens are accepted once all digests are equal.

A point is a place in the program that all processes reach in the same order, such as the launch of step n. Each process
publishes a point when it reaches it, and confirms it: it waits until all processes have published an equal point.

Each process has an entry in the key-value store of jax's coordination service. A watch thread writes its own entry and
reads all entries:

 main thread    publish(n)  launch(n)  read(n - 1)  confirm(n - 1)  publish(n + 1)  ...
 watch thread        ▼ own entry: heartbeat, newest points and their digests, reason for which the process ended
                     ▲ entries of all processes  ->  newest point that all have published, or a verdict

A verdict names a process that has failed: it sends no heartbeat, does not progress, published a different plan, or
reported its end. The first verdict ends all processes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed  # jax.distributed gives no access to the key-value store or to the service
from jaxlib import _jax

from pallas_attn.models.engine.distributed import coordination_service
from pallas_attn.models.engine.distributed.coordination_service import NEVER_S
from pallas_attn.models.engine.distributed.secret import MIN_BYTES, shared_secret

BEAT_S = 0.5
"""Interval of heartbeats in seconds."""

POLL_S = 0.002
"""Interval in seconds at which the entries of other processes are read while this process waits for them."""

GRACE_S = 5.0
"""Time in seconds that the main thread has to end after a verdict."""

NUM_POINTS = 8
"""Number of newest points in an entry. Eight suffice: no process is more than two points ahead of another, because it
confirms point n - 1 before it publishes point n + 1."""

_ENTRIES = "pallas_attn/process"


class ProcessError(RuntimeError):
    """A process has failed, which ends all processes. The message names the failed process."""


class _Point(NamedTuple):
    """A point of the program that all processes reach in the same order.

    Attributes:
      name: name for error messages.
      digest: digest of the contents of this point and all earlier points.
      patient: whether there is no time limit for a process to reach the point.
    """

    name: str
    digest: str
    patient: bool


class _Entry(NamedTuple):
    """Entry of a process in the key-value store.

    Attributes:
      beat: heartbeat: a number that increases with every entry that the process writes.
      busy: whether the process runs a long operation without the other processes, such as compilation.
      number: number of the newest point that the process has published; -1 before the first.
      digests: digests of the newest points that the process has published, by number of the point.
      ended: reason for which the process ended on its own.
      verdict: reason for which all processes must end.
    """

    beat: int = 0
    busy: bool = False
    number: int = -1
    digests: Mapping[str, str] = {}
    ended: str | None = None
    verdict: str | None = None


class Processes:
    """This process and its connection to the other processes of an engine.

    Attributes:
      index: number of this process.
      count: number of processes.
    """

    def __init__(
        self,
        coordinator: str,
        count: int,
        index: int,
        *,
        timeout_s: float = 10.0,
        join_timeout_s: float = 300.0,
        secret: bytes | None = None,
        give_up: Callable[[str], None],
    ):
        """Connect and wait until all processes have connected. Call this before any other use of jax.

        Args:
          coordinator: host:port where process 0 listens for the other processes. It listens at the addresses of this
            host name only.
          count: number of processes.
          index: number of this process, from 0.
          timeout_s: time in seconds without a heartbeat or without progress after which a process counts as failed.
          join_timeout_s: time in seconds to wait for other processes to start.
          secret: at least 16 bytes, equal in all processes of the engine. None for the result of `shared_secret`.
          give_up: function (reason) that ends this process if its main thread does not; called on another thread.

        Raises:
          ValueError: the secret is too short, or there is none.
          ProcessError: process 0 cannot listen at the address, or cannot be reached there, or does not have the secret,
            or refuses this process because it was started for another number of processes or has connected before.
        """
        if secret is not None and len(secret) < MIN_BYTES:
            raise ValueError(f"secret: expected at least {MIN_BYTES} bytes, got {len(secret)}")
        self.index, self.count = index, count
        self._timeout_s, self._give_up = timeout_s, give_up
        secret = shared_secret() if secret is None else secret
        start = functools.partial(_start_program, secret=secret)
        if index == 0:
            self._program, path = start("serve", coordinator, count, timeout_s + GRACE_S)
        else:
            self._program, path = start("forward", coordinator, count, index, join_timeout_s)
        self._client = _connect(path, coordinator, count, index, join_timeout_s, give_up)
        self._changed = threading.Condition()
        self._number = self._agreed = -1  # number of the newest point of this process, and of all processes
        self._points: dict[int, _Point] = {}  # by number
        self._digest = b""
        self._busy = self._leaving = self._closed = False
        self._ended: str | None = None
        self._verdict: str | None = None
        self._contact = now = time.monotonic()
        self._seen = [(0, now)] * count  # newest heartbeat of each process, and its time
        # For each process, the newest point that it has published if this process is ahead of it, else None; and the
        # time at which this value was seen first.
        self._behind: list[tuple[int | None, float]] = [(None, now)] * count
        self._thread = threading.Thread(target=self._watch, name="processes", daemon=True)
        self._thread.start()

    # --- main thread

    def publish(self, name: str, *contents: bytes, patient: bool = False) -> int:
        """Publish the next point, with a digest of its name and contents and of all earlier points.

        Args:
          name: name for error messages.
          contents: data that must be equal in all processes.
          patient: whether there is no time limit for other processes to reach the point.

        Returns:
          Number of the point, for `confirm`.
        """
        digest = hashlib.blake2b(self._digest, digest_size=16)
        for part in (name.encode(), *contents):
            digest.update(len(part).to_bytes(8, "little") + part)
        with self._changed:
            self._digest, self._number = digest.digest(), self._number + 1
            self._points[self._number] = _Point(name, digest.hexdigest(), patient)
            self._points.pop(self._number - NUM_POINTS, None)
            self._changed.notify_all()
            return self._number

    def confirm(self, number: int) -> None:
        """Wait until all processes have published this point with equal contents.

        Args:
          number: result of `publish`.

        Raises:
          ProcessError: a process has published other contents or has failed.
        """
        with self._changed:
            while self._agreed < number:
                self._check()
                self._changed.wait(BEAT_S)

    def agree(self, name: str, *contents: bytes) -> None:
        """Publish a point, and wait without a time limit until all processes have published it. Raises as `confirm`."""
        self.confirm(self.publish(name, *contents, patient=True))

    def announce(self, name: str, *contents: bytes) -> Callable[[jax.Array], np.ndarray]:
        """Publish a step. Return a function that reads an array, and returns it after all processes have published the
        same step."""
        number = self.publish(name, *contents)

        def read(array: jax.Array) -> np.ndarray:
            values = self.read(array)
            self.confirm(number)
            return values

        return read

    def read(self, array: jax.Array) -> np.ndarray:
        """Wait for a replicated array and copy it to the host.

        Raises:
          ProcessError: a process has failed, so the array may never be computed.
          jax.errors.JaxRuntimeError: the computation failed although no process has failed.
        """
        with self.blamed():
            while not array.is_ready():  # pyrefly: ignore[missing-attribute]
                with self._changed:
                    self._check()
                time.sleep(POLL_S / 10)
            return np.asarray(array)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Context for operations that fail if another process fails.

        After a JAX error, wait for a verdict, and raise it as a ProcessError. Without a verdict, raise the JAX error.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError:
            until = time.monotonic() + self._timeout_s + 2 * BEAT_S
            with self._changed:
                while time.monotonic() < until:
                    self._check()
                    self._changed.wait(BEAT_S)
            raise

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Context for long operations of this process alone, such as compilation. It suspends the time limit for the
        next point of this process."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def leave(self, reason: str | None = None) -> None:
        """Disconnect. Without a reason, wait until all processes leave. With a reason, report it, which ends the other
        processes, too.

        Raises:
          ProcessError: another process has failed.
        """
        if reason is not None:
            deadline = time.monotonic() + self._timeout_s
            with self._changed:
                self._ended = self._ended or reason
                self._changed.notify_all()
                while self._verdict is None and time.monotonic() < deadline:  # until this process reads its own entry
                    self._changed.wait(BEAT_S)
            self._close()
            return
        with self._changed:
            self._leaving = True
        self.agree("the end")
        self._close()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # all processes have agreed on the end
            self._client.shutdown()
        distributed.global_state.client = None
        _write_line(self._program, "end")

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._timeout_s)

    def _check(self) -> None:
        if self._verdict is None and time.monotonic() - self._contact > self._timeout_s:
            self._verdict = f"process 0 cannot be reached: no answer at its address for {self._timeout_s:g} s"
        if self._verdict is not None:
            raise ProcessError(self._verdict)

    # --- watch thread

    def _watch(self) -> None:
        beat, wait = 0, BEAT_S
        while not self._closed:
            with self._changed:
                if self._agreed == self._number and self._ended is None:
                    self._changed.wait_for(self._has_news, BEAT_S)
                    wait = POLL_S
                else:
                    self._changed.wait(wait)
                    wait = min(2 * wait, BEAT_S / 10)
                beat += 1
                entry = self._entry(beat)
            try:
                self._write(entry)
                found = self._client.key_value_dir_get(_ENTRIES)
            except jax.errors.JaxRuntimeError:
                time.sleep(BEAT_S)  # `_check` limits how long the service may be unreachable
                continue
            entries = {int(key.rpartition("/")[2]): _Entry(*json.loads(value)) for key, value in found}
            with self._changed:
                self._contact = time.monotonic()
                self._verdict = self._judge([entries.get(i, _Entry()) for i in range(self.count)], self._contact)
                verdict, entry = self._verdict, self._entry(beat + 1)
                self._changed.notify_all()
            if verdict is not None:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._write(entry)
                self._end(verdict)
                return

    def _has_news(self) -> bool:
        return self._agreed < self._number or self._ended is not None or self._closed

    def _write(self, entry: _Entry) -> None:
        self._client.key_value_set(f"{_ENTRIES}/{self.index}", json.dumps(entry), allow_overwrite=True)

    def _entry(self, beat: int) -> _Entry:
        digests = {str(number): point.digest for number, point in self._points.items()}
        return _Entry(beat, self._busy, self._number, digests, self._ended, self._verdict)

    def _judge(self, entries: Sequence[_Entry], now: float) -> str | None:
        """Update the newest point that all processes have published. Return a verdict if a process has failed."""
        for entry in entries:
            if entry.verdict is not None:
                return entry.verdict
        for process, entry in enumerate(entries):
            if entry.ended is not None:
                return f"process {process} ended: {entry.ended}"
            for number, digest in entries[0].digests.items():
                if entry.digests.get(number, digest) != digest:
                    of = self._points.get(int(number), _Point("the next step", "", False)).name
                    return f"process {process} disagrees with process 0 on {of}"
        self._agreed = max(self._agreed, min(entry.number for entry in entries))
        if self._leaving and self._agreed == self._number:
            return None  # other processes may have left already and send no heartbeats
        for process, entry in enumerate(entries):
            if self._seen[process][0] != entry.beat:
                self._seen[process] = entry.beat, now
            if now - self._seen[process][1] > self._timeout_s:
                return f"process {process} sent no heartbeat for {self._timeout_s:g} s"
        for process, entry in enumerate(entries):
            awaited = self._points.get(entry.number + 1)
            behind_at = None if awaited is None or awaited.patient or entry.busy else entry.number
            if behind_at is None or self._behind[process][0] != behind_at:
                self._behind[process] = behind_at, now
            elif awaited is not None and now - self._behind[process][1] > self._timeout_s:
                return f"process {process} did not get to {awaited.name} within {self._timeout_s:g} s"
        return None

    def _end(self, verdict: str) -> None:
        """End this process if its main thread does not end it within GRACE_S."""
        deadline = time.monotonic() + GRACE_S
        while not self._closed and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if not self._closed:
            self._give_up(verdict)


def _start_program(
    command: str, coordinator: str, *arguments: object, secret: bytes
) -> tuple[subprocess.Popen[str], str]:
    """Start `serve` or `forward` of `coordination_service` as a separate process.

    The process is in a new session, so that Ctrl-C does not reach it.

    Returns:
      The process, and the path of the Unix socket to which jax's client connects.

    Raises:
      ProcessError: the program cannot serve or connect.
    """
    program = subprocess.Popen(
        [sys.executable, "-P", coordination_service.__file__, command, coordinator, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a pipe without a reader would fill with jaxlib's messages
        text=True,
        start_new_session=True,
    )
    _write_line(program, secret.hex())
    said = "" if program.stdout is None else program.stdout.readline()
    kind, _, rest = said.rstrip("\n").partition(" ")
    if kind == "ready":
        return program, rest
    program.communicate()  # ends the program and closes the pipes
    if kind != "error":
        rest = f"its program ended with status {program.returncode}"
    does = (
        f"process 0 cannot serve at {coordinator}" if command == "serve" else f"cannot join process 0 at {coordinator}"
    )
    raise ProcessError(f"{does}: {rest}")


def _write_line(program: subprocess.Popen[str], line: str) -> None:
    if program.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # the program has ended, and its output says why
            program.stdin.write(line + "\n")
            program.stdin.flush()


def _connect(
    path: str, coordinator: str, count: int, index: int, join_timeout_s: float, give_up: Callable[[str], None]
) -> Any:
    """Connect jax to the service at the Unix socket `path`. The service waits for all processes.

    `jax.distributed.initialize` is not suitable: it runs the service in process 0, and its clients abort the program if
    another client disappears.
    """
    client = _jax.get_distributed_runtime_client(
        f"unix:{path}",
        index,
        init_timeout=NEVER_S,  # a timeout in the client would abort the program
        heartbeat_timeout=NEVER_S,
        shutdown_timeout=30,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    reason = f"not all of {count} processes connected to {coordinator} within {join_timeout_s:g} s"
    timer = threading.Timer(join_timeout_s, give_up, [reason])
    timer.daemon = True
    timer.start()
    client.connect()
    timer.cancel()
    state = distributed.global_state
    state.process_id, state.num_processes = index, count
    state.coordinator_address, state.client = coordinator, client
    return client
