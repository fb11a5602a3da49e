"""Several processes that run one engine, each with devices of one mesh: how they meet, agree, and end together.

Every process has all requests, plans every step by itself and reads every token, so all make the same plans: a plan
follows from requests and tokens alone. So nothing is sent before a step, and no step waits for process 0. Processes
tell each other a digest of each plan, and tokens count only once all digests are equal.

Each process has an entry in the key-value store of jax's coordination service, which a thread writes and reads:

 main thread    publish(n)  launch(n)  read(n - 1)  confirm(n - 1)  publish(n + 1)  ...
 watch thread        ▼ entry: beat, newest points and their digests, reason to have ended
                     ▲ entries of all processes  ->  agreed points, or a verdict

The first verdict is that of all processes: a process that shows no sign of life, does not get on, plans something else
or has ended for a reason of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed  # jax.distributed has no way to the key-value store, nor to a service of one's own
from jaxlib import _jax

from models.engine.distributed.coordination_service import NEVER_S

BEAT_S = 0.5
"""Seconds between two signs of life."""

POLL_S = 0.002
"""Seconds between two looks at what others published, while they are waited for."""

GRACE_S = 5.0
"""Seconds that the main thread has to end by itself after a verdict."""

KEPT = 8
"""Newest points of an entry. No process is more than two ahead of another, since each confirms them."""

_ENTRIES = "pallas_attn/process"


class ProcessError(RuntimeError):
    """A process has failed, and with it the run of all; the message names it."""


class _Point(NamedTuple):
    """Something that all processes come to, in the same order.

    Attributes:
      name: for people.
      digest: of this and all before it.
      patient: whether a process may take as long as it wants until it is there.
    """

    name: str
    digest: str
    patient: bool


class _Entry(NamedTuple):
    """Entry of a process in the key-value store.

    Attributes:
      beat: sign of life: changes with every entry.
      busy: whether it does something that takes long on it alone.
      number: number of its newest point; -1 before the first.
      digests: of its newest points, by number.
      ended: reason why it ended by itself.
      verdict: reason why all have to end.
    """

    beat: int = 0
    busy: bool = False
    number: int = -1
    digests: Mapping[str, str] = {}
    ended: str | None = None
    verdict: str | None = None


class Processes:
    """This process among those that run one engine.

    Attributes:
      index, count: the number of this process, and of all.
    """

    def __init__(
        self,
        coordinator: str,
        count: int,
        index: int,
        *,
        timeout_s: float = 10.0,
        join_timeout_s: float = 300.0,
        give_up: Callable[[str], None],
    ):
        """Waits until all processes are there. Comes before anything else that jax does.

        Args:
          coordinator: host:port, at which process 0 starts the coordination service.
          count: number of processes.
          index: number of this one, from 0.
          timeout_s: seconds without a sign of life, or behind the others, after which a process counts as failed.
          join_timeout_s: seconds to wait for the others to start.
          give_up: ends this process, given the reason, where its main thread cannot: called on another thread.

        Raises:
          ProcessError: the service cannot be started.
        """
        self.index, self.count = index, count
        self._timeout_s, self._give_up = timeout_s, give_up
        self._service = None
        if index == 0:
            self._service = _start_service(coordinator, count, linger_s=timeout_s + GRACE_S)
        self._client = _connect(coordinator, count, index, join_timeout_s, give_up)
        self._changed = threading.Condition()
        self._number = self._agreed = -1  # of the newest point, here and on all processes
        self._points: dict[int, _Point] = {}  # by number
        self._digest = b""
        self._busy = self._leaving = self._closed = False
        self._ended: str | None = None
        self._verdict: str | None = None
        self._contact = now = time.monotonic()
        self._seen = [(0, now)] * count  # newest beat of each process, and when it came
        self._behind: list[tuple[int | None, float]] = [(None, now)] * count  # point it is late with, and since when
        self._thread = threading.Thread(target=self._watch, name="processes", daemon=True)
        self._thread.start()

    # --- main thread

    def publish(self, name: str, *contents: bytes, patient: bool = False) -> int:
        """Tells the others what comes next, by a digest of this and of all that came before it.

        Args:
          name: for people.
          contents: what has to be equal.
          patient: whether others may take as long as they want until they are there.

        Returns:
          Its number, for `confirm`.
        """
        digest = hashlib.blake2b(self._digest, digest_size=16)
        for part in (name.encode(), *contents):
            digest.update(len(part).to_bytes(8, "little") + part)
        with self._changed:
            self._digest, self._number = digest.digest(), self._number + 1
            self._points[self._number] = _Point(name, digest.hexdigest(), patient)
            self._points.pop(self._number - KEPT, None)
            self._changed.notify_all()
            return self._number

    def confirm(self, number: int) -> None:
        """Waits until all processes have published the same.

        Raises:
          ProcessError: one has published something else, or any has failed.
        """
        with self._changed:
            while self._agreed < number:
                self._check()
                self._changed.wait(BEAT_S)

    def agree(self, name: str, *contents: bytes) -> None:
        """Waits for all processes, however long they take, and compares; raises as `confirm`."""
        self.confirm(self.publish(name, *contents, patient=True))

    def announce(self, name: str, *contents: bytes) -> Callable[[jax.Array], np.ndarray]:
        """Publishes a step; returns a function that reads its results, once all processes have announced the same."""
        number = self.publish(name, *contents)

        def read(array: jax.Array) -> np.ndarray:
            values = self.read(array)
            self.confirm(number)
            return values

        return read

    def read(self, array: jax.Array) -> np.ndarray:
        """Waits for a replicated array, and copies it to the host.

        Raises:
          ProcessError: a process has failed, so that it may never come.
          jax.errors.JaxRuntimeError: it could not be computed, and no process is to blame.
        """
        with self.blamed():
            while not array.is_ready():  # pyrefly: ignore[missing-attribute]
                with self._changed:
                    self._check()
                time.sleep(POLL_S / 10)
            return np.asarray(array)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Surrounds what fails if another process does: waits for the verdict, and raises that if there is one."""
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
        """Surrounds what may take long on this process alone, such as compiling."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def leave(self, reason: str | None = None) -> None:
        """Ends together with the others, for which all wait; or alone for a reason, which ends them, too.

        Raises:
          ProcessError: another process has failed.
        """
        if reason is not None:
            deadline = time.monotonic() + self._timeout_s
            with self._changed:
                self._ended = self._ended or reason
                self._changed.notify_all()
                while self._verdict is None and time.monotonic() < deadline:  # it is read back, so all can read it
                    self._changed.wait(BEAT_S)
            self._close()
            return
        with self._changed:
            self._leaving = True
        self.agree("the end")
        self._close()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # all was agreed on
            self._client.shutdown()
        distributed.global_state.client = None
        if self._service is not None and self._service.stdin is not None:
            self._service.stdin.write("end\n")
            self._service.stdin.close()

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
                time.sleep(BEAT_S)  # `_check` has a bound for it
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
        """Notes what all processes agree on; returns the verdict if one has failed."""
        for entry in entries:
            if entry.verdict is not None:
                return entry.verdict
        for process, entry in enumerate(entries):
            if entry.ended is not None:
                return f"process {process} ended: {entry.ended}"
            for number, digest in entries[0].digests.items():
                if entry.digests.get(number, digest) != digest:
                    of = self._points.get(int(number), _Point("what comes next", "", False)).name
                    return f"process {process} disagrees with process 0 on {of}"
        self._agreed = max(self._agreed, min(entry.number for entry in entries))
        if self._leaving and self._agreed == self._number:
            return None  # others may have left, and show no more signs of life
        for process, entry in enumerate(entries):
            if self._seen[process][0] != entry.beat:
                self._seen[process] = entry.beat, now
            if now - self._seen[process][1] > self._timeout_s:
                return f"process {process} shows no sign of life for {self._timeout_s:g} s"
        for process, entry in enumerate(entries):
            awaited = self._points.get(entry.number + 1)
            behind_at = None if awaited is None or awaited.patient or entry.busy else entry.number
            if behind_at is None or self._behind[process][0] != behind_at:
                self._behind[process] = behind_at, now
            elif awaited is not None and now - self._behind[process][1] > self._timeout_s:
                return f"process {process} did not get to {awaited.name} within {self._timeout_s:g} s"
        return None

    def _end(self, verdict: str) -> None:
        """Ends this process if its main thread does not."""
        deadline = time.monotonic() + GRACE_S
        while not self._closed and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if not self._closed:
            self._give_up(verdict)


def _start_service(coordinator: str, count: int, linger_s: float) -> subprocess.Popen[str]:
    """Starts the coordination service as a process of its own, in a session that no Ctrl-C reaches."""
    program = Path(__file__).with_name("coordination_service.py")
    address = f"[::]:{coordinator.rpartition(':')[2]}"
    service = subprocess.Popen(
        [sys.executable, "-P", str(program), address, str(count), str(linger_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    if service.stdout is None or service.stdout.readline() != "ready\n":
        said = service.communicate()[1].strip().splitlines() or ["no reason given"]
        raise ProcessError(f"process 0 cannot serve at {coordinator}: {said[-1]}")
    return service


def _connect(coordinator: str, count: int, index: int, join_timeout_s: float, give_up: Callable[[str], None]) -> Any:
    """Connects jax to the service, which waits for all processes. As `jax.distributed.initialize`, but that one starts
    the service in process 0, and its clients end a program when they miss one another."""
    client = _jax.get_distributed_runtime_client(
        coordinator,
        index,
        init_timeout=NEVER_S,  # it would end the program, too
        heartbeat_timeout=NEVER_S,
        shutdown_timeout=30,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    came = f"not all of {count} processes came to {coordinator} within {join_timeout_s:g} s"
    timer = threading.Timer(join_timeout_s, give_up, [came])
    timer.daemon = True
    timer.start()
    client.connect()
    timer.cancel()
    state = distributed.global_state
    state.process_id, state.num_processes = index, count
    state.coordinator_address, state.client = coordinator, client
    return client
