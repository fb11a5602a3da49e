"""Messages between the process of the engine and the process of the HTTP server, on a pair of Unix sockets.

    HTTP server -> engine    Add, Abort, Stop
    engine -> HTTP server    Ready, StepResults (one per step), Stop, EngineEnded

A message is msgpack after its number of bytes. Both processes run the same code, so messages have no version.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pallas_attn.models.llm import Delta, SamplingParams
from pallas_attn.models.llm.results import TokenLogprobTable
from pallas_attn.models.server.options import ErrorFields

HEADER = struct.Struct("!I")
"""Number of bytes of a message."""


type EngineState = dict[str, float]
"""Values of `metrics.ENGINE_GAUGES` and `metrics.PREFILL_GAUGES` by name."""


class Prompt(NamedTuple):
    """A prompt of a request.

    Attributes:
      ids: token ids, at least one.
      params: sampling parameters.
    """

    ids: Sequence[int]
    params: SamplingParams


class Part(NamedTuple):
    """New tokens of one output.

    Attributes:
      prompt: number of the prompt in its request.
      delta: tokens and text.
      cached_tokens: number of prompt tokens found in the prefix cache; 0 except in the last part of the first output.
      prompt_logprobs: log probabilities of the prompt in the first part of the first output, if requested.
    """

    prompt: int
    delta: Delta
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobTable | None] | None = None


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base class of messages."""


class Add(Message):
    """Start a request. `request_id` is a new number."""

    request_id: int
    prompts: list[Prompt]
    salt: str


class Abort(Message):
    """End a request before the next step."""

    request_id: int


class Stop(Message):
    """To the engine: end after the current step. To the HTTP server: stop, because a signal has arrived."""


class Ready(Message):
    """No later step waits for a compilation."""

    state: EngineState


class StepResults(Message):
    """Results of a step.

    Attributes:
      parts: new tokens of each request, by its id.
      ended: requests that have ended, and their errors; None for no error.
      state: state of the engine; None if it was sent less than 0.25 s ago.
      has_failed: whether the step raised an exception.
    """

    parts: dict[int, list[Part]]
    ended: dict[int, ErrorFields | None]
    state: EngineState | None = None
    has_failed: bool = False


class EngineEnded(Message):
    """The engine has ended. `failure` is the reason; None after `Stop`."""

    failure: str | None


type ToEngine = Add | Abort | Stop
type ToHttp = Ready | StepResults | Stop | EngineEnded

_encode = msgspec.msgpack.Encoder().encode
_decode_to_engine = msgspec.msgpack.Decoder(ToEngine.__value__).decode
decode_to_http = msgspec.msgpack.Decoder(ToHttp.__value__).decode


def frame(message: Message) -> bytes:
    """Return the bytes of a message with its header."""
    content = _encode(message)
    return HEADER.pack(len(content)) + content


class EngineSocket:
    """The engine's end of the pair of sockets. Any thread may call `send`, and one thread `receive`."""

    def __init__(self, end: socket.socket):
        self._socket, self._file, self._lock = end, end.makefile("rb"), threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. Drop it if the HTTP server has ended; `receive` reports the end."""
        content = frame(message)
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(content)

    def receive(self) -> ToEngine | None:
        """Wait for a message. Return None if the HTTP server has ended."""
        with contextlib.suppress(OSError):
            header = self._file.read(HEADER.size)
            if len(header) == HEADER.size:
                (size,) = HEADER.unpack(header)
                if len(content := self._file.read(size)) == size:
                    return _decode_to_engine(content)
        return None

    def close(self) -> None:
        """Close the socket. Later calls of `send` do nothing."""
        with self._lock:
            self._file.close()
            self._socket.close()
