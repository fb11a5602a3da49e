"""Results of `LLM`: generated texts, their tokens, log probabilities and times."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from pallas_attn.models.engine.request import FinishReason


class Logprob(NamedTuple):
    """Log probability of a token at one position of a text.

    Attributes:
      logprob: log probability.
      rank: position of the token in the order of probability; 1 for the likeliest token.
      decoded_token: text of the token alone.
    """

    logprob: float
    rank: int
    decoded_token: str


type TokenLogprobTable = dict[int, Logprob]
"""Log probabilities at one position, by token id: the token of the text and the likeliest tokens."""


@dataclasses.dataclass(frozen=True)
class OutputTimes:
    """Times of an output in seconds, without compilation.

    Attributes:
      first_token_s: from the start of the request to the first token; None without tokens.
      total_s: from the start of the request to the last token; None without tokens.
      queue_s: from the start of the request to the planning of its first step; None before.
    """

    first_token_s: float | None
    total_s: float | None
    queue_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated text.

    Attributes:
      index: number of the text among the `SamplingParams.n` texts of the prompt.
      text: the text, without the text of `SamplingParams.stop` that ended it, unless it is included.
      token_ids: generated tokens, including the token that ended the text.
      finish_reason: "stop": an end-of-sequence token, a stop token, or a text of `SamplingParams.stop`. "length": the
        limit on tokens. "nonfinite": the logits were NaN or infinite. "filter_error": a token filter raised an
        exception. "abort": aborted, or the grammar became too complex. None: not finished.
      stop_reason: the text of `SamplingParams.stop` or the token of `SamplingParams.stop_token_ids` that ended the
        text; message of the exception of a token filter; llguidance's message if the grammar became too complex; None
        for an end-of-sequence token and other reasons.
      cumulative_logprob: sum of the log probabilities of the tokens; None without `SamplingParams.logprobs`.
      logprobs: log probabilities for each token; None without `SamplingParams.logprobs`.
      cached_tokens: number of prompt tokens whose keys and values were found in the prefix cache.
      timing: times of this text.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobTable] | None
    cached_tokens: int
    timing: OutputTimes


@dataclasses.dataclass(frozen=True)
class Generation:
    """The generated texts of one prompt.

    Attributes:
      prompt: text of the prompt: the given text, or the rendered chat. None for a prompt of token ids.
      prompt_token_ids: tokens of the prompt.
      prompt_logprobs: log probabilities for each token of the prompt, None for the first; None without
        `SamplingParams.prompt_logprobs`.
      outputs: the generated texts, `SamplingParams.n` of them.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobTable | None] | None
    outputs: list[Completion]

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first output."""
        return self.outputs[0].finish_reason

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that the first output found in the prefix cache."""
        return self.outputs[0].cached_tokens

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finish_reason is not None for output in self.outputs)


class Delta(NamedTuple):
    """A part of a generated text, as soon as no later token changes it.

    Attributes:
      index: number of the text among the `SamplingParams.n` texts of the prompt.
      text: new text. It may be empty, for example if a token is a part of a character.
      token_ids: new tokens. A text may follow later than its tokens.
      finish_reason: reason for the end of the text, in its last delta; otherwise None.
      stop_reason: as in `Completion`.
      logprobs: log probabilities for each new token; None without `SamplingParams.logprobs`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobTable] | None = None
