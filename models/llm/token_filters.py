"""Filters of the next token: `SamplingParams.bad_words` and `SamplingParams.structured_outputs`.

The engine calls `TokenFilter.allowed`, or `allowed_batch` for many requests together, before each token of a request,
and with drafts also for tokens that it rejects later. A mask has one bit per token of the model's vocabulary, in 32-bit
words.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import llguidance
import numpy as np

from pallas_attn.models.checkpoints import Tokenizer
from pallas_attn.models.checkpoints.detokenizer import token_bytes
from pallas_attn.models.checkpoints.text_process import grammar_text
from pallas_attn.models.engine import FilterCall, StructuredOutputs, TokenFilter
from pallas_attn.models.engine.token_filter import MaskResult, compute_masks


def token_mask(vocab_size: int, tokens: Collection[int]) -> np.ndarray:
    """Return the mask of tokens, uint32 [ceil(vocab_size / 32)]. Ids outside the vocabulary are ignored."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in tokens:
        if 0 <= token < vocab_size:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def full_mask(vocab_size: int) -> np.ndarray:
    """Return the mask of all tokens. Bits after the last token are 0."""
    mask = np.full(-(-vocab_size // 32), 2**32 - 1, np.uint32)
    if vocab_size % 32:
        mask[-1] = (1 << vocab_size % 32) - 1
    return mask


class BadWords:
    """Excludes texts, as vLLM does: the last token of a text is excluded after its other tokens.

    Each text is tokenized with and without a space before it. Another tokenization of the same text is not excluded.

    Args:
      words: the texts.
      tokenizer: the tokenizer.
      vocab_size: number of tokens of the model.

    Raises:
      ValueError: a text has no token or a token outside the vocabulary.
    """

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer, vocab_size: int):
        self._full = full_mask(vocab_size)
        sequences: list[list[int]] = []
        for word in words:
            stripped = word.lstrip()
            plain, spaced = (tokenizer.encode(start + stripped, add_special_tokens=False) for start in ("", " "))
            if not plain or not all(0 <= token < vocab_size for token in (*plain, *spaced)):
                raise ValueError(f"bad_words: expected texts that have tokens of the model's vocabulary, got {word!r}")
            sequences.append(plain)
            # vLLM's rule for a token that starts a new word: the first token differs, the number of tokens does not.
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(spaced)
        self._by_length: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in sequences:
            self._by_length.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        excluded = [
            token
            for length, sequences in self._by_length.items()
            if length <= len(output_ids)
            for token in sequences.get(tuple(output_ids[len(output_ids) - length :]), ())
        ]
        if not excluded:
            return None
        return self._full & ~token_mask(len(self._full) * 32, excluded)


def _slices() -> list[str]:
    """Return regular expressions of token classes. If a grammar allows all texts of a class, llguidance allows its
    tokens without checking each.

    The classes of llguidance are for JSON strings. The added ones are for letters, digits and spaces, repeated up to 16
    times.
    """
    return [*llguidance.LLTokenizer.general_slices(), *(f"[{chars}]{{1,16}}" for chars in _CLASSES)]


_CLASSES = ("a-z", "a-z ", "a-zA-Z0-9", "a-zA-Z0-9 ")
"""Classes of characters of `_slices`."""


class GrammarTokenizer:
    """The vocabulary of a model, prepared for grammars. One object serves all requests.

    Args:
      tokenizer: the tokenizer.
      vocab_size: number of tokens of the model. It may differ from the number of tokens of the tokenizer.
      eos_token_ids: end-of-sequence tokens of the model.

    Raises:
      ValueError: the model has no end-of-sequence token.
      NotImplementedError: the text of a token depends on other tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]):
        self.eos_token_ids = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        if not self.eos_token_ids:
            raise ValueError("structured_outputs: expected a model with an end-of-sequence token, it has none")
        self.vocab_size = vocab_size
        pieces = tokenizer.pieces
        special = {*pieces.special, *self.eos_token_ids}
        tokens = [b""] * vocab_size  # tokens without text are never allowed
        for token, text in token_bytes(pieces).items():
            if token < vocab_size:
                tokens[token] = text
        for token in self.eos_token_ids:
            tokens[token] = tokens[token] or f"<eos {token}>".encode()
        self._tokenizer = tokenizer
        self.tokens, self.special_token_ids = tokens, sorted(token for token in special if token < vocab_size)
        self._by_bytes = {
            value: token for token, value in reversed([*enumerate(tokens)]) if value and token not in special
        }
        self._longest = max(map(len, self._by_bytes), default=0)
        self.eos_token_id, self.bos_token_id = self.eos_token_ids[0], None
        self.core = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=vocab_size, eos_token=self.eos_token_ids, slices=_slices()
        )

    def __call__(self, text: bytes) -> list[int]:
        """Encode a part of a text, as UTF-8.

        llguidance calls this method for bytes that a grammar forces, and then allows only the first token of the
        result. Therefore the tokens must have exactly these bytes. A tokenizer may add a space to the start of a text,
        so it gets a character before the text, whose tokens are removed.
        """
        start = "\x02"
        ids = self._tokenizer.encode(start + text.decode(errors="replace"), add_special_tokens=False)
        values = [self.tokens[token] if token < self.vocab_size else b"" for token in ids]
        for first in range(1, len(ids)):
            if b"".join(values[:first]).endswith(start.encode()) and b"".join(values[first:]) == text:
                return ids[first:]
        return self._longest_tokens(text)

    def _longest_tokens(self, text: bytes) -> list[int]:
        """Encode bytes with the longest token at each position. Stop at bytes that no token starts with."""
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            token, at = next(
                ((self._by_bytes[text[at:end]], end) for end in ends if text[at:end] in self._by_bytes),
                (None, len(text)),
            )
            if token is not None:
                ids.append(token)
        return ids

    def matcher(self, outputs: StructuredOutputs, text: str | None = None) -> llguidance.LLMatcher:
        """Compile a grammar.

        Args:
          outputs: the grammar.
          text: the result of `GrammarChecker.check` for the grammar; None to convert the grammar here.

        Raises:
          ValueError: the grammar is not valid. The message is llguidance's.
        """
        text = grammar_text(*given_field(outputs)) if text is None else text
        matcher = llguidance.LLMatcher(self.core, text, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().partition("\n<backtrace>")[0]  # of a panic
            raise ValueError(f"structured_outputs: {given_field(outputs)[0]}: {reason}")
        return matcher


def given_field(outputs: StructuredOutputs) -> tuple[str, Any]:
    """Return the name and the value of the field that is set."""
    fields = ((name, getattr(outputs, name)) for name in ("json", "regex", "choice", "grammar"))
    return next((name, value) for name, value in fields if value is not None)


class GrammarFilter:
    """Allows tokens that continue a text of a grammar; an end-of-sequence token where the text may end; and only
    end-of-sequence tokens where it must end.

    The state of the grammar after the tokens of the last call is stored. A call with other tokens rolls it back to the
    last common token. The masks of many filters are computed on several CPU cores, and each consumes its newest token
    there.

    Args:
      tokenizer: the vocabulary.
      outputs: the grammar.
      min_tokens: number of tokens before which no token of `ends` is allowed, unless no other token is allowed.
      ends: end-of-sequence tokens and stop tokens.
      matcher: result of `tokenizer.matcher` for the grammar, which is copied; None to compile the grammar.

    Attributes:
      error: message of llguidance if it failed, for example because the grammar is too complex; otherwise None. After a
        failure only end-of-sequence tokens are allowed.

    Raises:
      ValueError: the grammar is not valid.
    """

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        outputs: StructuredOutputs,
        min_tokens: int = 0,
        ends: Collection[int] = (),
        matcher: llguidance.LLMatcher | None = None,
    ):
        self.error: str | None = None
        self._matcher = tokenizer.matcher(outputs) if matcher is None else matcher.deep_copy()
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._only_eos = token_mask(tokenizer.vocab_size, self._eos)
        self._last_word = full_mask(tokenizer.vocab_size)[-1]
        self._min_tokens, self._ends = min_tokens, token_mask(tokenizer.vocab_size, [*ends, *self._eos])
        self._consumed: list[int] | None = []
        self._mask: np.ndarray | None = None

    def copy(self) -> GrammarFilter:
        """Return a filter with the same grammar for another output. No token may have been consumed."""
        other = copy.copy(self)
        other._matcher, other._consumed, other._mask = self._matcher.deep_copy(), [], None
        return other

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        return _single_result(FilterCall(self, output_ids))

    @classmethod
    def allowed_batch(cls, calls: Sequence[FilterCall]) -> list[MaskResult]:
        """Compute masks on several CPU cores. Calls with the same filter are done one after the other."""
        rounds: dict[int, list[int]] = {}
        num_calls: Counter[GrammarFilter] = Counter()
        for i, call in enumerate(calls):
            rounds.setdefault(num_calls[call.token_filter], []).append(i)
            num_calls[call.token_filter] += 1
        results: list[MaskResult] = [None] * len(calls)
        for indices in rounds.values():
            for i, mask in zip(indices, cls._compute([calls[i] for i in indices]), strict=True):
                results[i] = mask
        return results

    @staticmethod
    def _compute(calls: Sequence[FilterCall]) -> list[MaskResult]:
        """Return the result of each call. Each call has another filter, all with the same vocabulary.

        The calls of the executor release the GIL and use several cores.
        """
        results, due, moves = list[MaskResult](), list[int](), list[tuple[int, int]]()
        for i, (of_call, output_ids) in enumerate(calls):
            results.append(of_call._only_eos)
            try:
                new = of_call._new_tokens(output_ids)
                if new is not None and len(new) == 1 and of_call._allows(new[0]):
                    moves.append((i, new[0]))
                elif new is not None and of_call._consume(new):
                    due.append(i)
            except Exception as error:  # noqa: BLE001  it ends only the request of this call
                results[i] = error
        filters = [of_call for of_call, _ in calls]
        if moves:
            known = [filters[i]._take_consumed() for i, _ in moves]
            accepted = _executor().consume_token_par([(filters[i]._matcher, token) for i, token in moves])
            for (i, token), consumed, is_accepted in zip(moves, known, accepted, strict=True):
                if filters[i]._set_consumed(consumed, [token] if is_accepted else []) and is_accepted:
                    due.append(i)
        if due:
            masks = np.empty((len(calls), len(filters[0]._only_eos)), np.uint32)
            rows = [(filters[i]._matcher, i) for i in due]
            _executor().unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(calls))
            for i in due:
                results[i] = filters[i]._checked(masks[i], len(calls[i].output_ids))
        return results

    def _new_tokens(self, output_ids: Sequence[int]) -> list[int] | None:
        """Roll the matcher back to the last common token. Return the tokens to consume; None if only end-of-sequence
        tokens are allowed, after an end-of-sequence token (with `ignore_eos`) or a failure."""
        if self.error is not None:
            return None
        if self._consumed is None:  # an exception has interrupted a call
            self._matcher.reset()
            self._consumed = []
        ids, common = output_ids if isinstance(output_ids, list) else list(output_ids), len(self._consumed)
        if ids[:common] != self._consumed:
            consumed = self._take_consumed()
            common = next(i for i, token in enumerate(consumed) if ids[i : i + 1] != [token])
            self._matcher.rollback(len(consumed) - common)
            self._set_consumed(consumed[:common], [])
        new = ids[common:]
        return new if self._eos.isdisjoint(new) else None

    def _allows(self, token: int) -> bool:
        """Whether the last mask has this token, so that the matcher consumes it. Other tokens need
        `try_consume_tokens`: after any other call, a matcher that rejects a token cannot be rolled back."""
        mask = self._mask
        return mask is not None and 0 <= token < 32 * len(mask) and bool(mask[token // 32] >> (token % 32) & 1)

    def _consume(self, new: list[int]) -> bool:
        """Consume tokens. Return whether the mask of the next token must be computed: False after tokens that are not a
        start of a text of the grammar, and after a complete text."""
        if not new:
            return not self._matcher.is_stopped()
        consumed = self._take_consumed()
        accepted = self._matcher.try_consume_tokens(new)
        return self._set_consumed(consumed, new[:accepted]) and accepted == len(new)

    def _take_consumed(self) -> list[int]:
        """Return the consumed tokens. Until `_set_consumed` is called they are unknown, so that the next call after an
        exception resets the matcher."""
        consumed, self._consumed, self._mask = self._consumed or [], None, None
        return consumed

    def _set_consumed(self, consumed: list[int], new: Sequence[int]) -> bool:
        """Record the consumed tokens and an error of the matcher. Return whether the text may continue."""
        consumed.extend(new)
        self._consumed = consumed
        self._record_error()
        return not self._matcher.is_stopped()

    def _checked(self, mask: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return the mask after `num_tokens` output tokens, with changes, for a mask from llguidance."""
        self._record_error()
        mask[-1] &= self._last_word
        self._mask = mask.copy()  # `mask` is a row of the array of all filters, and the caller may change it
        if num_tokens < self._min_tokens and (later := mask & ~self._ends).any():
            return later
        return mask if mask.any() else self._only_eos

    def _record_error(self) -> None:
        if self._matcher.is_error() and self.error is None:
            self.error = self._matcher.get_error()


@functools.cache
def _executor() -> llguidance.LLExecutor:
    """Return the threads that compute masks: one for each of 80% of the CPU cores, at most 32."""
    return llguidance.LLExecutor()


def _single_result(call: FilterCall) -> np.ndarray | None:
    """Return the result of a call of `TokenFilter.allowed`, or raise its exception."""
    (result,) = type(call.token_filter).allowed_batch([call])
    if isinstance(result, Exception):
        raise result
    return result


class AllOf:
    """Allows the tokens that all filters allow. If no token remains, end-of-sequence tokens are allowed.

    Args:
      filters: the filters.
      only_eos: mask of the model's end-of-sequence tokens.
    """

    def __init__(self, filters: Sequence[TokenFilter], only_eos: np.ndarray):
        self._filters, self._only_eos = filters, only_eos

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        return _single_result(FilterCall(self, output_ids))

    @classmethod
    def allowed_batch(cls, calls: Sequence[FilterCall]) -> list[MaskResult]:
        """Call the filters of all calls together."""
        parts = [FilterCall(part, output_ids) for of_call, output_ids in calls for part in of_call._filters]
        found = iter(compute_masks(parts))
        return [of_call._combined([next(found) for _ in of_call._filters]) for of_call, _ in calls]

    def _combined(self, results: Sequence[MaskResult]) -> MaskResult:
        """Return the tokens that all results allow, or the first exception."""
        if error := next((result for result in results if isinstance(result, Exception)), None):
            return error
        masks = [result for result in results if result is not None and not isinstance(result, Exception)]
        if not masks:
            return None
        mask = np.bitwise_and.reduce(masks)
        return mask if mask.any() else self._only_eos
