"""Log probabilities of the tokens of a request, in one array."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
from jaxtyping import Int32


class TokenLogprobs(NamedTuple):
    """Log probability of a token of a request, and the likeliest tokens at its position.

    Log probabilities are the logarithm of the softmax of the model's logits, before any sampling parameter is applied.

    Attributes:
      token_id: the token.
      logprob: log probability of the token.
      rank: number of tokens whose log probability is at least as high, including the token itself; 1 for the likeliest
        token.
      top: (token id, log probability) of the likeliest tokens, likeliest first. Their number is
        `SamplingParams.logprobs`, or `SamplingParams.prompt_logprobs` for a token of the prompt.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class LogprobList(Sequence[TokenLogprobs]):
    """Log probabilities of consecutive tokens.

    The list stores numbers in a single array, and makes a `TokenLogprobs` whenever an entry is read. A list of
    `TokenLogprobs` would add 2 + count tuples per token that Python's garbage collector examines.

    Args:
      count: number of likeliest tokens per token.
      words: int32 [n, 3 + 2 * count]. For each of n tokens: its id; bits of its float32 log probability; its rank; ids
        of the likeliest tokens; bits of their log probabilities.
    """

    def __init__(self, count: int, words: Int32[np.ndarray, "n words"] | None = None):
        self._count, self._width = count, 3 + 2 * count
        self._words = array("i", b"" if words is None else words.tobytes())

    def __len__(self) -> int:
        return len(self._words) // self._width

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> LogprobList: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobList:
        """Return an entry, or a copy of consecutive entries."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"index: expected a slice with the step 1, got {step}")
            part = LogprobList(self._count)
            part._words = self._words[start * self._width : stop * self._width]
            return part
        at = range(len(self))[index]
        (entry,) = self[at : at + 1]
        return entry

    def __iter__(self) -> Iterator[TokenLogprobs]:
        words = np.frombuffer(self._words.tobytes(), np.int32).reshape(-1, self._width)
        first = 3 + self._count
        for row, values in zip(words.tolist(), words.view(np.float32).tolist(), strict=True):
            yield TokenLogprobs(row[0], values[1], row[2], tuple(zip(row[3:first], values[first:], strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr([*self])

    def extend(self, other: LogprobList) -> None:
        """Append the entries of a list with the same `count`: all or none, even if an exception interrupts."""
        self._words.extend(other._words)

    def write(self, start: int, other: LogprobList) -> None:
        """Replace the entries from `start` on, as many as `other` has. Entries after the end are appended."""
        self._words[start * self._width : (start + len(other)) * self._width] = other._words

    def truncate(self, length: int) -> None:
        """Delete the entries from `length` on."""
        del self._words[length * self._width :]
