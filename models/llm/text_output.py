"""The text of one output while its tokens are generated: decoding, and stop texts."""

from __future__ import annotations

from collections.abc import Collection

from pallas_attn.models.checkpoints import IncrementalDetokenizer, Tokenizer
from pallas_attn.models.engine import SamplingParams
from pallas_attn.models.engine.request import FinishReason


class TextOutput:
    """Decodes the tokens of one output and ends it at the first text of `SamplingParams.stop`.

    The result depends on the generated text only, not on its division into tokens. The output ends at the stop text
    whose last character comes first; if several stop texts end there, at the longest. As in vLLM, a stop text has no
    effect if it ends within the first `min_tokens` tokens. The stop token or end-of-sequence token that ends an output
    is not decoded, unless `include_stop_str_in_output` is set.

    Attributes:
      token_ids: tokens that have been added.
      text: their text, without the text of `stop` that ended it unless it is included.
      finish_reason: None until the output has ended.
      stop_reason: text or token that ended the output.

    Args:
      tokenizer: the tokenizer; None for an output without text.
      params: sampling parameters.
      eos_token_ids: end-of-sequence tokens of the model.

    Raises:
      ValueError: a parameter needs a tokenizer, and there is none.
      NotImplementedError: as `IncrementalDetokenizer`.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, eos_token_ids: Collection[int]):
        if tokenizer is None and params.stop:
            raise ValueError("stop: the model has no tokenizer, which stop texts need")
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer, self._params = tokenizer, params
        self._stops = tuple(params.stop)
        self._eos_token_ids = () if params.ignore_eos else eos_token_ids
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._searched = 0  # stop texts that end here or earlier in the text have no effect
        self._taken_text = self._taken_tokens = 0

    def add(self, token: int, reason: FinishReason | None) -> None:
        """Add a generated token.

        Args:
          token: the token.
          reason: reason of the engine to end the output with this token; None to continue.
        """
        self.token_ids.append(token)
        ends = reason == "stop" and not self._params.include_stop_str_in_output
        if self._detokenizer is not None and not ends:
            self._append(self._detokenizer.add([token]))
        if reason is not None and self.finish_reason is None:
            self.end(reason)
            if self.finish_reason == "stop" and self.stop_reason is None and token not in self._eos_token_ids:
                self.stop_reason = token

    def end(self, reason: FinishReason) -> None:
        """End the output, unless its rest has a stop text, which then is the reason."""
        if self._detokenizer is not None and self.finish_reason is None:
            self._append(self._detokenizer.finish())
        if self.finish_reason is None:
            self.finish_reason = reason

    def take(self) -> tuple[str, list[int]]:
        """Return the text and the tokens that are new since the last call. A text that may be the start of a stop text
        is returned later."""
        end = len(self.text)
        if self.finish_reason is None and not self._params.include_stop_str_in_output:
            end -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        text, tokens = self.text[self._taken_text : end], self.token_ids[self._taken_tokens :]
        self._taken_text, self._taken_tokens = max(self._taken_text, end), len(self.token_ids)
        return text, tokens

    @property
    def num_taken(self) -> int:
        """Number of tokens that `take` has returned."""
        return self._taken_tokens

    def restarted(self) -> TextOutput:
        """Return an output without tokens whose `take` starts after the text and tokens that were taken from this
        one."""
        new = TextOutput(self._tokenizer, self._params, self._eos_token_ids)
        new._taken_text, new._taken_tokens = self._taken_text, self._taken_tokens
        return new

    def _append(self, text: str) -> None:
        """Append a text, and end the output if it has a stop text."""
        self.text += text
        if len(self.token_ids) <= self._params.min_tokens:
            self._searched = len(self.text)
        if self._searched == len(self.text):
            return
        found = []
        for stop in self._stops:
            start = self.text.find(stop, max(self._searched - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        self._searched = len(self.text)
        if found:
            end, start, stop = min(found)
            self.text = self.text[: end if self._params.include_stop_str_in_output else start]
            self.finish_reason, self.stop_reason = "stop", stop


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is the start of a stop text, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
