"""Requests: the caller's prompt and sampling parameters, and the engine's progress with them."""

import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort", "refused", "nonfinite"]

NONFINITE = -1
"""In place of a sampled token, where the logits are NaN or infinite."""

_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-6, 1e6
"""Limits beyond which a draw is the likeliest token, or all tokens are equally likely; from 1e-34 and 1e37 on, logits
divided or multiplied by the temperature are infinite in float32."""


class RequestRefused(Exception):
    """The request cannot be completed even with the engine to itself; the message says why."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for choosing a request's tokens, and for ending it.

    Numbers may be of any kind that means one number, such as numpy's, and are kept as Python's.

    Attributes:
      max_tokens: Most tokens to generate, at least 1.
      temperature: 0 takes the likeliest token; otherwise logits are divided by it, from 1e-6 to 1e6.
      top_k: Only the k likeliest tokens can be drawn; 0 means all.
      top_p: Only the smallest set of likeliest tokens with at least this probability can be drawn, in (0, 1].
      seed: In [0, 2**32). A draw depends on it and the token's position alone.
      ignore_eos: Continue past the model's end-of-sequence tokens.
      stop_token_ids: Tokens that end the output whatever `ignore_eos` says; kept as a tuple.

    Raises:
      ValueError: a value is of another kind or out of range, or stop_token_ids are no sequence of integers.
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
    """Converts a sequence of integers of any kind to a tuple of Python's.

    Raises:
      ValueError: anything else, such as a text, bytes, or truth values; naming the argument.
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
    """A prompt and its continuation so far. The scheduler owns all fields but the first four.

    Attributes:
      request_id: The caller's name for it, unique among unfinished requests.
      prompt_ids: Token ids of the prompt, at least one.
      params: How to sample.
      salt: Only requests of the same salt share cached prefixes. A text that UTF-8 can encode.
      token_ids: The prompt and the tokens generated since, as far as they have been read back from the device.
      num_in_flight: Tokens sampled by launched steps and not read back yet, without those that accepted drafts add.
      num_drafts_in_flight: Drafts that launched steps verify: as many tokens more may turn out to be there.
      num_computed: Tokens whose K/V is in its pages for certain, including those that launched steps will write: drafts
        count when they were read back and accepted.
      prefill_end: Tokens that were known at (re)admission: they come from the host, later ones from the device.
      num_published: Leading pages that have been published to the prefix cache or came from it.
      slot: While running, the request's batch slot in the pools, and its place in device arrays with one entry per
        running request.
      num_cached: Prompt tokens found in the prefix cache at first admission; None before.
      drafted, accepted: By position after the newest token: steps that verified a draft there, and that accepted it.
      draft_trials: Accepted drafts, and drafts that could have been, of the newest steps; older ones fade.
      finish_reason: "stop" (a stop or end-of-sequence token, which stays in the output), "length" (of the output, the
        model or the pool), "abort", "refused" (could never have run), or "nonfinite" (the logits of its next token were
        NaN or infinite, as of a broken checkpoint).

    Raises:
      ValueError: the prompt is empty, or params or salt are of another kind.
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
    slot: int | None = field(init=False, default=None)
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
        """Drops its progress in the cache and on the device; what was read back stays."""
        self.slot = None
        self.num_in_flight = self.num_computed = self.prefill_end = self.num_published = 0
        self.num_drafts_in_flight = 0

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens, as far as they have been read back."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, including tokens in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def is_running(self) -> bool:
        return self.slot is not None

    @property
    def is_prefilling(self) -> bool:
        """Whether running, with tokens known at admission still to be computed."""
        return self.num_computed < self.prefill_end

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
