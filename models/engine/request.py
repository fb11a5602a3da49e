"""Requests: prompt and sampling parameters from the caller, and the engine's state of their computation."""

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
"""Limits of a temperature other than 0. Temperatures beyond the limits would be useless: below the lower limit a draw
nearly always returns the likeliest token, and above the upper limit all tokens are almost equally likely. Temperatures
below 1e-34 or above 1e37 would also overflow float32, because logits are divided and multiplied by the temperature."""


class RequestRefused(Exception):
    """The prompt is too long to run, even if no other request runs. The message gives length and limit."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request.

    Numbers may be Python or NumPy scalars; they are converted to Python numbers.

    Attributes:
      max_tokens: Maximum number of generated tokens, at least 1.
      temperature: 0 to select the likeliest token, or a divisor of the logits from 1e-6 to 1e6.
      top_k: Number of likeliest tokens that can be drawn; 0 for all.
      top_p: Total probability in (0, 1]. Tokens can be drawn from the smallest set of likeliest tokens whose
        probabilities add up to at least `top_p`.
      seed: Seed in [0, 2**32). The random numbers of a draw depend only on the seed and the token's position.
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
    """A prompt, its generated tokens, and the state of their computation.

    The caller sets the first four fields. The scheduler changes the other fields. A step is launched on the device
    before the host reads the tokens of earlier steps. A draft is a proposed token that a step verifies (speculation).

    Attributes:
      request_id: Id from the caller, unique among unfinished requests.
      prompt_ids: Token ids of the prompt, at least one.
      params: Sampling parameters.
      salt: Requests share cached prefixes only with requests of the same salt. A str that UTF-8 can encode.
      token_ids: The prompt, followed by the generated tokens that have been read from the device.
      num_in_flight: Number of tokens that launched steps sample and the host has not read. Accepted drafts of these
        steps are not counted, because the host does not know their number.
      num_drafts_in_flight: Number of drafts that launched steps verify and whose results the host has not read.
      num_computed: Number of leading tokens whose keys and values are in the request's pages, or will be written by
        launched steps. A draft counts after the host has read that it was accepted.
      prefill_end: Number of tokens that the host knew when the request was last admitted (when it became a running
        request): the prompt, and after a preemption also generated tokens. Prefill rows compute these tokens, decode
        rows compute all later tokens. 0 if the request is not running.
      num_published: Number of leading pages that the request published in the prefix cache or found there.
      request_slot: Index of the running request in the page pools and in device arrays with one entry per running
        request; None if the request is not running.
      num_cached: Number of prompt tokens found in the prefix cache at the first admission; None before.
      drafted: Entry i is the number of steps that verified a draft i + 1 positions after the newest token.
      accepted: Entry i is the number of steps that accepted a draft i + 1 positions after the newest token.
      draft_trials: (hits, trials), from which `DraftControl.rate` estimates the acceptance rate of the request. Each
        step adds its accepted drafts to hits, and its accepted drafts and the first rejected draft to trials. Older
        steps have lower weights.
      finish_reason: None until the request ends. "stop": a stop or end-of-sequence token, which stays in the output.
        "length": `max_tokens`, or the maximum sequence length of the model or of the page pools. "abort": ended by the
        caller. "refused": the prompt is too long to run. "nonfinite": the logits of the next token were NaN or
        infinite, for example because of a broken checkpoint.

    Raises:
      ValueError: the prompt is empty, params has the wrong type, or salt is not a str that UTF-8 can encode.
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
        """Reset the fields that describe the computation: the request waits, and no token is computed or in flight.
        Tokens that the host has read stay."""
        self.request_slot = None
        self.num_in_flight = self.num_computed = self.prefill_end = self.num_published = 0
        self.num_drafts_in_flight = 0

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens that have been read from the device."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: tokens that the host has read, plus `num_in_flight`."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def is_running(self) -> bool:
        return self.request_slot is not None

    @property
    def is_prefilling(self) -> bool:
        """Whether the request is running and prefill rows have not computed all tokens before `prefill_end` yet."""
        return self.num_computed < self.prefill_end

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
