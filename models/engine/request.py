"""Requests: prompt and sampling parameters from the caller, and the engine's state of their computation."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pallas_attn.models.engine.logprob_list import LogprobList
from pallas_attn.models.engine.token_filter import TokenFilter

FinishReason = Literal["stop", "length", "abort", "refused", "nonfinite", "filter_error"]

NONFINITE = -1
"""Value of a sampled token if the logits are NaN or infinite, or if the request's parameters exclude all tokens."""

_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-6, 1e6
"""Limits of a temperature other than 0. Temperatures beyond the limits would be useless: below the lower limit a draw
nearly always returns the likeliest token, and above the upper limit all tokens are almost equally likely. Temperatures
below 1e-34 or above 1e37 would also overflow float32, because logits are divided and multiplied by the temperature."""


MAX_EDITED_TOKENS = 1024
"""Maximum number of tokens of a request whose logits `logit_bias`, `allowed_token_ids` and `min_tokens` change. Each
request slot has room for this number of tokens on the device."""

_DISABLED: Mapping[str, Any] = {
    "n": 1,
    "stop": (),
    "include_stop_str_in_output": False,
    "bad_words": (),
    "structured_outputs": None,
}
"""Values of the parameters that need a tokenizer with which they have no effect."""


class RequestRefused(Exception):
    """The prompt is too long to run, even if no other request runs. The message gives length and limit."""


class RowFlags:
    """Bits of `Request.flags`, which steps get for each row that samples a token.

    Attributes:
      PENALTIES: the request has penalties.
      TOKENS: `logit_bias`, `allowed_token_ids` or `min_tokens` change the logits of some tokens.
      ONLY_TOKENS: `allowed_token_ids` excludes all other tokens.
      MASK: the request has a token filter.
      LOGPROBS: the request wants log probabilities of output tokens.
    """

    PENALTIES, TOKENS, ONLY_TOKENS, MASK, LOGPROBS = (1 << i for i in range(5))


@dataclass(frozen=True)
class StructuredOutputs:
    """Format of a generated text (guided decoding). Exactly one field is set.

    Attributes:
      json: JSON schema that the text must match: a str, or an object that `json.dumps` converts to a str. Stored as a
        str.
      regex: regular expression that the whole text must match.
      choice: texts of which one is generated. Stored as a tuple.
      grammar: context-free grammar of the text.

    Raises:
      ValueError: no field or several fields are set, or a value has the wrong type or is empty.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            wanted = "exactly one of json, regex, choice and grammar"
            raise ValueError(f"structured_outputs must set {wanted}, got {', '.join(given) or 'none'}")
        if self.json is not None and not isinstance(self.json, str):
            try:
                object.__setattr__(self, "json", json.dumps(self.json))
            except (TypeError, ValueError) as error:
                raise ValueError(f"json must be a JSON schema, got {reprlib.repr(self.json)}") from error
        if self.choice is not None:
            object.__setattr__(self, "choice", _as_texts("choice", self.choice))
        for name in given:
            value = getattr(self, name)
            if not value or not isinstance(value, str | tuple):
                raise ValueError(f"{name} must be a str that is not empty, got {reprlib.repr(value)}")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request, with the names and meanings of vLLM.

    Numbers may be Python or NumPy scalars; they are converted to Python numbers. `sampler` describes the order in which
    the parameters are applied to the logits.

    Attributes:
      max_tokens: Maximum number of generated tokens, at least 1.
      temperature: 0 to select the likeliest token, or a divisor of the logits from 1e-6 to 1e6.
      top_k: Number of likeliest tokens that can be drawn; 0 or -1 for all. Of equally likely tokens, tokens with lower
        ids come first. -1 is stored as 0.
      top_p: Total probability in (0, 1]. Tokens can be drawn from the smallest set of likeliest tokens whose
        probabilities add up to at least `top_p`. Of equally likely tokens, tokens with lower ids come first.
      seed: Seed in [0, 2**32). The random numbers of a draw depend only on the seed and the token's position.
      ignore_eos: Whether to continue after the model's end-of-sequence tokens.
      stop_token_ids: Tokens that end the output, also if `ignore_eos` is True. Stored as a tuple.
      min_p: Minimum probability of a token that can be drawn, as a share in [0, 1] of the probability of the likeliest
        token; 0 for all.
      repetition_penalty: Number in [1e-6, 1e6]. Logits of tokens that are in the prompt or in the output are divided
        by it if they are positive, and multiplied by it if they are negative; 1 for no effect.
      presence_penalty: Number in [-2, 2] that is subtracted from the logits of tokens that are in the output.
      frequency_penalty: Number in [-2, 2]. It is multiplied by the number of occurrences of a token in the output and
        subtracted from the logit of the token.
      logit_bias: Numbers in [-100, 100] that are added to the logits of tokens, by token id. Stored as a dict; None is
        stored as an empty dict.
      allowed_token_ids: Tokens that can be generated; None for all. Stored as a sorted tuple.
      min_tokens: Number of generated tokens before which no end-of-sequence token and none of `stop_token_ids` is
        generated, also if `ignore_eos` is True. At most `max_tokens`.
      logprobs: Number of likeliest tokens whose log probabilities are returned for each output token, in addition to
        the log probability of the output token itself; None for no log probabilities. They are computed from the
        model's logits before any other parameter is applied.
      prompt_logprobs: As `logprobs`, for the tokens of the prompt after the first. The request does not use the prefix
        cache, because all prompt tokens must be computed.
      extra_args: Numbers for `EngineConfig.logits_processor`, by name. Stored as a dict; None is stored as an empty
        dict.
      n: Number of outputs per prompt. At temperature 0 it must be 1, because all outputs would be equal.
      stop: Texts that end the output. A str is stored as a tuple of one text, None as an empty tuple.
      include_stop_str_in_output: Whether the text of the output includes the text of `stop` that ended it.
      bad_words: Texts that are not generated. Stored as a tuple; None is stored as an empty tuple.
      structured_outputs: Format of the generated text; None for any text.
      skip_special_tokens: Whether special tokens are left out of the text of the output.

    `LLM` implements the parameters from `n` on, because they need a tokenizer. `Engine` rejects values of `n`, `stop`,
    `include_stop_str_in_output`, `bad_words` and `structured_outputs` other than the defaults, and ignores
    `skip_special_tokens`.

    Raises:
      ValueError: a value has the wrong type or is out of range, or `logit_bias`, `allowed_token_ids` and, with
        `min_tokens`, `stop_token_ids` have more than `MAX_EDITED_TOKENS` different tokens.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    extra_args: Mapping[str, float] = field(default_factory=dict, hash=False)
    n: int = 1
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._convert()
        self._check_ranges()
        if (number := len(self.edited_tokens())) > MAX_EDITED_TOKENS:
            names = "logit_bias, allowed_token_ids and (with min_tokens) stop_token_ids"
            raise ValueError(f"{names} must have at most {MAX_EDITED_TOKENS} different tokens, got {number}")

    def _convert(self) -> None:
        """Convert all values to Python numbers and immutable containers."""
        allowed, numbers = self.allowed_token_ids, ("max_tokens", "top_k", "seed", "min_tokens", "n")
        optional = [name for name in ("logprobs", "prompt_logprobs") if getattr(self, name) is not None]
        floats = (
            *("temperature", "top_p", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
        bools = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
        coerced = {
            **{name: _as_integer(name, getattr(self, name)) for name in (*numbers, *optional)},
            **{name: _as_float(name, getattr(self, name)) for name in floats},
            **{name: _as_bool(name, getattr(self, name)) for name in bools},
            "stop_token_ids": as_integers("stop_token_ids", self.stop_token_ids),
            "allowed_token_ids": None
            if allowed is None
            else tuple(sorted({*as_integers("allowed_token_ids", allowed)})),
            "logit_bias": _as_numbers("logit_bias", self.logit_bias, _as_integer),
            "extra_args": _as_numbers("extra_args", self.extra_args, _as_name),
            "stop": _as_texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop),
            "bad_words": _as_texts("bad_words", self.bad_words),
        }
        if coerced["top_k"] == -1:
            coerced["top_k"] = 0
        for name, value in coerced.items():
            object.__setattr__(self, name, value)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise ValueError(f"structured_outputs must be StructuredOutputs or None, got {self.structured_outputs!r}")

    def _check_ranges(self) -> None:
        if not self.max_tokens >= 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature != 0 and not _LOWEST_TEMPERATURE <= self.temperature <= _HIGHEST_TEMPERATURE:
            limits = f"[{_LOWEST_TEMPERATURE:g}, {_HIGHEST_TEMPERATURE:g}]"
            raise ValueError(f"temperature must be 0 or in {limits}, got {self.temperature}")
        if not self.top_k >= 0:
            raise ValueError(f"top_k must not be negative, except -1 for all tokens, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")
        if not _LOWEST_TEMPERATURE <= self.repetition_penalty <= _HIGHEST_TEMPERATURE:
            limits = f"[{_LOWEST_TEMPERATURE:g}, {_HIGHEST_TEMPERATURE:g}]"
            raise ValueError(f"repetition_penalty must be in {limits}, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias must be in [-100, 100], got {bias} for token {token}")
        for name, value in self.extra_args.items():
            if not math.isfinite(value):
                raise ValueError(f"extra_args must be finite numbers, got {value} for {name}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must have at least one token, or be None for all tokens, got none")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be from 0 to max_tokens={self.max_tokens}, got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if (number := getattr(self, name)) is not None and number < 0:
                raise ValueError(f"{name} must not be negative, got {number}")
        if not self.n >= 1 or (self.n > 1 and self.temperature == 0):
            raise ValueError(f"n must be at least 1, and 1 at temperature 0, got {self.n}")

    def token_level(self) -> SamplingParams:
        """Return these parameters without the parameters that need a tokenizer, for `Engine.add_request`."""
        return dataclasses.replace(self, **_DISABLED)

    def text_level(self) -> list[str]:
        """Return the names of the parameters that need a tokenizer and are set."""
        return [name for name, value in _DISABLED.items() if getattr(self, name) != value]

    def edited_tokens(self, eos_token_ids: Sequence[int] = ()) -> list[int]:
        """Return the ids of the tokens that `logit_bias`, `allowed_token_ids` or `min_tokens` name, in ascending order.

        If `allowed_token_ids` is given, only these tokens are returned, because all others are never generated.

        Args:
          eos_token_ids: end-of-sequence tokens of the model.
        """
        if self.allowed_token_ids is not None:
            return list(self.allowed_token_ids)
        stops = (*self.stop_token_ids, *eos_token_ids) if self.min_tokens else ()
        return sorted({*self.logit_bias, *stops})

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty changes logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


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


def _as_name(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must have keys of type str, got {value!r}")
    return value


def _as_numbers[K](name: str, values: Any, as_key: Callable[[str, Any], K]) -> dict[K, float]:
    """Convert a mapping to numbers to a dict; None to an empty dict."""
    if values is not None and not isinstance(values, Mapping):
        raise ValueError(f"{name} must be a mapping to numbers, got {reprlib.repr(values)}")
    return {as_key(name, key): _as_float(name, value) for key, value in (values or {}).items()}


def _as_texts(name: str, values: Any) -> tuple[str, ...]:
    """Convert a sequence of texts, none of them empty, to a tuple; None to an empty tuple."""
    try:
        given = () if values is None else tuple(values)
    except TypeError as error:
        raise ValueError(f"{name} must be a sequence of str, got {values!r}") from error
    if isinstance(values, str | bytes) or not all(isinstance(text, str) and text for text in given):
        raise ValueError(f"{name} must be a sequence of str that are not empty, got {reprlib.repr(values)}")
    return given


@dataclass(eq=False)
class Request:
    """A prompt, its generated tokens, and the state of their computation.

    The caller sets the first five fields. The scheduler changes the other fields. A step is launched on the device
    before the host reads the tokens of earlier steps. A draft is a proposed token that a step verifies (speculation).

    Attributes:
      request_id: Id from the caller, unique among unfinished requests.
      prompt_ids: Token ids of the prompt, at least one.
      params: Sampling parameters.
      salt: Requests share cached prefixes only with requests of the same salt. A str that UTF-8 can encode.
      token_filter: Limits the next token; None to allow all tokens.
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
      has_old_keys: Whether some of its keys and values were computed with weights that have been replaced. Its pages
        are then not published.
      request_slot: Index of the running request in the page pools and in device arrays with one entry per running
        request; None if the request is not running.
      num_cached: Number of prompt tokens found in the prefix cache at the first admission; None before.
      drafted: Entry i is the number of steps that verified a draft i + 1 positions after the newest token.
      accepted: Entry i is the number of steps that accepted a draft i + 1 positions after the newest token.
      logprobs: Log probabilities of generated tokens that have been read, if requested. An exception may leave more
        entries than generated tokens.
      prompt_logprobs: Log probabilities of the prompt tokens after the first that have been read, if requested.
      flags: Bits of `RowFlags`.
      draft_trials: (hits, trials), from which `DraftControl.rate` estimates the acceptance rate of the request. Each
        step adds its accepted drafts to hits, and its accepted drafts and the first rejected draft to trials. Older
        steps have lower weights.
      finish_reason: None until the request ends. "stop": a stop or end-of-sequence token, which stays in the output.
        "length": `max_tokens`, or the maximum sequence length of the model or of the page pools. "abort": ended by the
        caller. "refused": the prompt is too long to run. "nonfinite": no token could be chosen, because the logits
        were NaN or infinite, or because the parameters, the token filter or the logits processor excluded all tokens.
        "filter_error": the token filter failed, see `error`.
      error: Exception of the token filter; None if it did not fail.

    Raises:
      ValueError: the prompt is empty, params has the wrong type, or salt is not a str that UTF-8 can encode.
    """

    request_id: int | str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    salt: str = ""
    token_filter: TokenFilter | None = None
    token_ids: list[int] = field(init=False)
    num_in_flight: int = field(init=False, default=0)
    num_drafts_in_flight: int = field(init=False, default=0)
    num_computed: int = field(init=False, default=0)
    prefill_end: int = field(init=False, default=0)
    num_published: int = field(init=False, default=0)
    has_old_keys: bool = field(init=False, default=False)
    request_slot: int | None = field(init=False, default=None)
    num_cached: int | None = field(init=False, default=None)
    drafted: tuple[int, ...] = field(init=False, default=())
    accepted: tuple[int, ...] = field(init=False, default=())
    logprobs: LogprobList = field(init=False)
    prompt_logprobs: LogprobList = field(init=False)
    flags: int = field(init=False, default=0)
    draft_trials: tuple[float, float] = field(init=False, default=(0.0, 0.0))
    finish_reason: FinishReason | None = field(init=False, default=None)
    error: Exception | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"prompt_ids of request {self.request_id} must hold at least one token, got none")
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params of request {self.request_id} must be SamplingParams, got {self.params!r}")
        if not isinstance(self.salt, str) or any("\ud800" <= char <= "\udfff" for char in self.salt):
            raise ValueError(f"salt of request {self.request_id} must be a str without surrogates, got {self.salt!r}")
        self.token_ids = list(self.prompt_ids)
        params = self.params
        self.logprobs = LogprobList(params.logprobs or 0)
        self.prompt_logprobs = LogprobList(params.prompt_logprobs or 0)
        flags = {
            RowFlags.PENALTIES: params.has_penalties,
            RowFlags.TOKENS: bool(params.logit_bias) or params.min_tokens > 0 or params.allowed_token_ids is not None,
            RowFlags.ONLY_TOKENS: params.allowed_token_ids is not None,
            RowFlags.MASK: self.token_filter is not None,
            RowFlags.LOGPROBS: params.logprobs is not None,
        }
        self.flags = sum(flag for flag, is_set in flags.items() if is_set)

    def requeue(self) -> None:
        """Reset the fields that describe the computation: the request waits, and no token is computed or in flight.
        Tokens that the host has read stay."""
        self.request_slot = None
        self.num_in_flight = self.num_computed = self.prefill_end = self.num_published = 0
        self.num_drafts_in_flight = 0
        self.has_old_keys = False
        self.logprobs.truncate(len(self.output_ids))

    def ends_with(self, token: int, eos_token_ids: Collection[int]) -> bool:
        """Whether the request ends after this token, because it is a stop token, or one of the model's end-of-sequence
        tokens `eos_token_ids`."""
        return token in self.params.stop_token_ids or (token in eos_token_ids and not self.params.ignore_eos)

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
