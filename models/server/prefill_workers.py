"""Prefill workers of a server: other processes that compute prompts and send the pages to the server's engine."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_attn.models.engine import (
    Engine,
    IncomingPages,
    RemotePrefill,
    SocketTransport,
    TransferError,
    Transport,
    TransportError,
)
from pallas_attn.models.llm import PreparedPrompt
from pallas_attn.models.server.messages import EngineState

LOGGER = logging.getLogger("pallas_attn.server")

_RETRY_S = 2.0
"""Seconds between two attempts to connect to a lost worker."""

type Address = tuple[str, int]
"""Host and port."""

type Start = Callable[[IncomingPages | None], object]
"""Function that adds a prompt to the engine, with the receiver of its pages; None if no worker computes the prompt."""


class PrefillWorkers:
    """Sends prompts to prefill workers, and adds each prompt to the engine when its pages have arrived.

    If a worker is lost, the engine computes its prompts, and finds the pages that have arrived. A thread connects
    again. The public methods are called on the engine's thread. Only the constructor waits for workers: it connects to
    one after another.

    Args:
      engine: the engine, with a prefix cache, before `Engine.warmup`.
      addresses: addresses of the workers.
      secret: shared secret of all workers; None if they have none.
      timeout_s: time limit of a connection, of a greeting, and of the wait for new pages, in seconds.
      min_tokens: minimum number of tokens of a sent prompt. Tokens in the engine's prefix cache do not count.

    Raises:
      ValueError: a worker has another model or another cache format; or as `Engine.receive_pages`. Workers that cannot
        be reached are no error.
      NotImplementedError: as `Engine.receive_pages`.
    """

    def __init__(
        self, engine: Engine, addresses: Sequence[Address], *, secret: bytes | None, timeout_s: float, min_tokens: int
    ):
        engine.receive_pages([0], engine.cache_format).close()  # raises for engines that cannot receive pages
        engine.compile_page_writes()
        self._engine, self._secret, self._timeout_s, self._min_tokens = engine, secret, timeout_s, min_tokens
        # Arriving pages must not take all pages from running requests.
        self._max_held = engine.config.num_pages * engine.config.page_size // 2
        self._workers: dict[Address, RemotePrefill] = {}
        self._connected: queue.SimpleQueue[tuple[Address, RemotePrefill]] = queue.SimpleQueue()  # again
        self._waiting: dict[str, tuple[PreparedPrompt, str, Start]] = {}  # prompts that were not sent, by name
        self._held: list[tuple[IncomingPages, int]] = []  # receivers of prompts that do not run, and prompt lengths
        self._num_sent = self._num_failures = 0
        self._closed = threading.Event()
        try:
            for address in dict.fromkeys(addresses):
                try:
                    self._workers[address] = self._connect(address)
                except (OSError, TransferError) as error:
                    self._lose(address, error, 0)
                except ValueError as error:
                    raise ValueError("prefill worker {}:{}: {}".format(*address, error)) from error
        except BaseException:
            self.close()
            raise

    @property
    def poll_s(self) -> float:
        """Maximum time between two calls of `poll`, in seconds."""
        return 0.002 if self._num_pending else 1.0

    def state(self) -> EngineState:
        """Return the values of `metrics.PREFILL_GAUGES`."""
        return {
            "prefill_workers": len(self._workers),
            "prefill_prompts_pending": self._num_pending,
            "prefill_prompts_sent": self._num_sent,
            "prefill_failures": self._num_failures,
        }

    def send(self, name: str, prompt: PreparedPrompt, salt: str, start: Start) -> bool:
        """Let a worker compute a prompt. The next calls of `poll` send it, and call `start` when its pages have
        arrived, or when no worker computes it.

        Returns:
          False if the engine has to compute the prompt: no worker is connected, fewer than `min_tokens` tokens are not
          in the prefix cache, or log probabilities of its tokens are requested. `start` is not called.
        """
        if not self._workers or prompt.params.prompt_logprobs is not None:
            return False
        if len(prompt.ids) - self._engine.num_cached_tokens(prompt.ids, salt=salt) < self._min_tokens:
            return False
        self._waiting[name] = prompt, salt, start
        return True

    def abort(self, name: str) -> None:
        """Drop a prompt. Nothing happens if its pages have arrived."""
        if self._waiting.pop(name, None) is None:
            any(worker.abort(name) for worker in self._workers.values())

    def poll(self) -> None:
        """Write pages that have arrived, start prompts whose pages are complete, and send waiting prompts."""
        with contextlib.suppress(queue.Empty):
            while True:
                address, worker = self._connected.get_nowait()
                self._workers[address] = worker
                LOGGER.info("prefill worker %s:%d: connected", *address)
        for address, worker in [*self._workers.items()]:
            try:
                worker.poll()
            except TransferError as error:
                del self._workers[address]
                self._lose(address, error, len(worker.pending))
                worker.compute_here()
                worker.close()
        self._held = [(incoming, length) for incoming, length in self._held if incoming.is_open]
        while self._waiting and (not self._workers or self._has_room(next(iter(self._waiting.values()))[0])):
            name = next(iter(self._waiting))
            self._send(name, *self._waiting.pop(name))

    def close(self) -> None:
        """Notify the workers, and drop all prompts."""
        self._closed.set()
        for worker in self._workers.values():
            worker.close()

    @property
    def _num_pending(self) -> int:
        return len(self._waiting) + sum(len(worker.pending) for worker in self._workers.values())

    def _has_room(self, prompt: PreparedPrompt) -> bool:
        return not self._held or sum(n for _, n in self._held) + len(prompt.ids) <= self._max_held

    def _send(self, name: str, prompt: PreparedPrompt, salt: str, start: Start) -> None:
        """Send a prompt to the worker with the fewest prompts. Start it here if this is not possible."""
        worker = min(self._workers.values(), key=lambda worker: len(worker.pending), default=None)
        incoming = None
        if worker is not None:
            # After a ValueError, `start` reports that the prompt is wrong. `poll` handles a lost worker.
            with contextlib.suppress(ValueError, TransferError):
                incoming = worker.request_pages(prompt.ids, start, request_id=name, salt=salt)
        if incoming is None:
            start(None)
        else:
            self._held.append((incoming, len(prompt.ids)))
            self._num_sent += 1

    def _connect(self, address: Address) -> RemotePrefill:
        connection = socket.create_connection(address, self._timeout_s)
        keep_alive(connection)
        transport = _NonBlockingSend(SocketTransport(connection, timeout_s=self._timeout_s))
        return RemotePrefill(self._engine, transport, timeout_s=self._timeout_s, secret=self._secret)

    def _lose(self, address: Address, error: Exception, num_prompts: int) -> None:
        """Report that a worker is lost with a number of prompts, and connect again in a thread."""
        self._num_failures += 1
        rest = f"; {num_prompts} of its prompts are computed here" if num_prompts else ""
        LOGGER.warning("prefill worker %s:%d: %s%s", *address, error, rest)
        thread = functools.partial(self._reconnect, address, str(error))
        threading.Thread(target=thread, name="prefill worker", daemon=True).start()

    def _reconnect(self, address: Address, reported: str) -> None:
        """Connect to a worker. Log each new reason of a failure once. Runs in a thread."""
        while not self._closed.wait(_RETRY_S):
            try:
                self._connected.put((address, self._connect(address)))
            except (OSError, TransferError, ValueError) as error:
                if str(error) != reported:
                    LOGGER.warning("prefill worker %s:%d: %s", *address, reported := str(error))
            else:
                return


class _NonBlockingSend(Transport):
    """Transport whose `send` returns immediately. A thread sends the messages.

    If the thread cannot send a message, it closes the transport, so that `receive` fails.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._messages: queue.SimpleQueue[tuple[Mapping[str, Any], Mapping[str, np.ndarray]] | None]
        self._messages = queue.SimpleQueue()
        threading.Thread(target=self._run, name="prompts to a prefill worker", daemon=True).start()

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> None:
        self._messages.put((header, arrays))

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return self._transport.receive()

    def close(self) -> None:
        """Close the transport when all messages are sent."""
        self._messages.put(None)

    def _run(self) -> None:
        with contextlib.suppress(TransportError, ValueError):  # ValueError: the message exceeds a limit
            while (message := self._messages.get()) is not None:
                self._transport.send(*message)
        self._transport.close()


def keep_alive(connection: socket.socket) -> None:
    """Let a connection fail if the other host does not answer for two minutes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
