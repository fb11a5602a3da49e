"""Requests: prompt and sampling parameters from the caller, and the engine's progress."""

import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort", "refused", "nonfinite"]

NONFINITE = -1
"""Value of a sampled token if the logits are NaN or infinite."""

_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-6, 1e6
"""Below the lower limit a draw always returns the likeliest token; above the upper limit all tokens are equally likely.
Below 1e-34 and above 1e37, logits divided or multiplied by the temperature overflow in float32."""


class RequestRefused(Exception):
    """The request could not be completed even if it were the only one; the message says why."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request.

    Numbers may be Python or NumPy scalars; they are converted to Python numbers.

    Attributes:
      max_tokens: Maximum number of generated tokens, at least 1.
      temperature: 0 selects the likeliest token. Otherwise logits are divided by it; from 1e-6 to 1e6.
      top_k: Number of likeliest tokens that can be drawn; 0 for all.
      top_p: Probability in (0, 1]. Only the smallest set of likeliest tokens with at least this probability can be
        drawn.
      seed: Seed in [0, 2**32). A draw depends only on the seed and the token's position.
      ignore_eos: Whether to continue after the model's end-of-sequence tokens.
      stop_token_ids: Tokens that end the output, also if `ignore_eos` is True. Stored as a tuple.

    Raises:
      ValueError: a value has the wrong type or is out of range, or stop_token_ids is not a sequence of integers.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        coerced = {
            **{name: _as_integer(name, getattr(self, name)) for name in ("max_tokens", "top_k", "seed")},
            **{name: _as_float(name, getattr(self, name)) for name in ("temperature", "top_p")},
            "ignore_eos": _as_bool("ignore_eos", self.ignore_eos),
            "stop_token_ids": as_integers("stop_token_ids", self.stop_token_ids),
        }
        for name, value in coerced.items():
            object.__setattr__(self, name, value)
        if not self.max_tokens >= 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature != 0 and not _LOWEST_TEMPERATURE <= self.temperature <= _HIGHEST_TEMPERATURE:
            limits = f"[{_LOWEST_TEMPERATURE:g}, {_HIGHEST_TEMPERATURE:g}]"
            raise ValueError(f"temperature must be 0 or in {limits}, got {self.temperature}")
        if not self.top_k >= 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")


def _as_integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be an integer, got {value!r}") from error


def as_integers(name: str, values: Any) -> tuple[int, ...]:
    """Convert a sequence of Python or NumPy integers to a tuple of Python integers.

    Raises:
      ValueError: `values` is anything else, such as a str, bytes or booleans. The message names the argument.
    """
    try:
        given = tuple(values)
        if isinstance(values, str | bytes | bytearray) or any(isinstance(value, bool) for value in given):
            raise TypeError
        return tuple(map(operator.index, given))
    except TypeError as error:
        raise ValueError(f"{name} must be a sequence of integers, got {reprlib.repr(values)}") from error


def _as_float(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool | str | bytes) or np.ndim(value):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a number, got {value!r}") from error


def _as_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


@dataclass(eq=False)
class Request:
    """A prompt and its continuation so far. The scheduler owns all fields except the first four.

    Attributes:
      request_id: Id from the caller, unique among unfinished requests.
      prompt_ids: Token ids of the prompt, at least one.
      params: Sampling parameters.
      salt: Requests share cached prefixes only with requests of the same salt. A str that UTF-8 can encode.
      token_ids: The prompt, followed by the generated tokens that have been read from the device.
      num_in_flight: Tokens sampled by launched steps and not read yet, without accepted drafts.
      num_drafts_in_flight: Drafts that launched steps verify. Up to this number of additional tokens may be accepted.
      num_computed: Tokens whose K/V is in the request's pages for certain, including tokens that launched steps will
        write. Drafts are included once they have been read and accepted.
      prefill_end: Number of tokens known at (re)admission. The host provides these; later tokens stay on the device.
      num_published: Leading pages that were published to the prefix cache or came from it.
      request_slot: Index of the running request in the pools and in device arrays with one entry per running request;
        None if it is not running.
      num_cached: Prompt tokens found in the prefix cache at first admission; None before.
      drafted, accepted: Numbers of steps that verified and that accepted a draft; entry i is for the draft i + 1
        positions after the newest token.
      draft_trials: Accepted drafts, and drafts that could have been accepted; older steps have smaller weights.
      finish_reason: "stop" (a stop or end-of-sequence token, which stays in the output), "length" (limit of the output,
        the model or the pool), "abort", "refused" (the request could never run), or "nonfinite" (the logits of its next
        token were NaN or infinite, for example because of a broken checkpoint).

    Raises:
      ValueError: the prompt is empty, or params or salt has the wrong type.
    """

    request_id: int | str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    salt: str = ""
    token_ids: list[int] = field(init=False)
    num_in_flight: int = field(init=False, default=0)
    num_drafts_in_flight: int = field(init=False, default=0)
    num_computed: int = field(init=False, default=0)
    prefill_end: int = field(init=False, default=0)
    num_published: int = field(init=False, default=0)
    request_slot: int | None = field(init=False, default=None)
    num_cached: int | None = field(init=False, default=None)
    drafted: tuple[int, ...] = field(init=False, default=())
    accepted: tuple[int, ...] = field(init=False, default=())
    draft_trials: tuple[float, float] = field(init=False, default=(0.0, 0.0))
    finish_reason: FinishReason | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"prompt_ids of request {self.request_id} must hold at least one token, got none")
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params of request {self.request_id} must be SamplingParams, got {self.params!r}")
        if not isinstance(self.salt, str) or any("\ud800" <= char <= "\udfff" for char in self.salt):
            raise ValueError(f"salt of request {self.request_id} must be a str without surrogates, got {self.salt!r}")
        self.token_ids = list(self.prompt_ids)

    def requeue(self) -> None:
        """Discard the request's progress in the cache and on the device. Tokens that have been read stay."""
        self.request_slot = None
        self.num_in_flight = self.num_computed = self.prefill_end = self.num_published = 0
        self.num_drafts_in_flight = 0

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens that have been read from the device."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, including tokens in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def is_running(self) -> bool:
        return self.request_slot is not None

    @property
    def is_prefilling(self) -> bool:
        """Whether the request is running and tokens known at admission remain to be computed."""
        return self.num_computed < self.prefill_end

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
