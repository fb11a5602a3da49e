"""Answers on standard output.

Generated text is untrusted: a control character such as ESC could change the terminal's state, hide text or send input
to the shell. Control characters other than line breaks and tabs are therefore printed as escapes such as \\x1b, also if
standard output is not a terminal. The file of --json has the unchanged text.
"""

from __future__ import annotations

import io
import os
import sys
import unicodedata
from collections.abc import Callable, Sequence

from pallas_attn.models.checkpoints import IncrementalDetokenizer, Tokenizer, TokenizerError
from pallas_attn.models.cli.command_line import Failure

HEADING = 76
"""Maximum number of characters of a prompt that a heading shows."""


def printable(text: str) -> str:
    """Return a text with escapes for control characters other than line breaks and tabs, and for characters that are
    not Unicode (surrogates)."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)


class Output:
    """Standard output for generated text. Characters that its encoding cannot represent are escaped."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        self._failed = False

    def write(self, text: str) -> None:
        """Print a text immediately, with escapes for control characters. After a failure, nothing is printed.

        Raises:
          Failure: the text cannot be printed, for example because the reader of a pipe has ended.
        """
        if self._failed or not text:
            return
        try:
            sys.stdout.write(printable(text))
            sys.stdout.flush()
        except OSError as error:
            self._failed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python's flush at exit fails
            if isinstance(error, BrokenPipeError):
                raise Failure("standard output was closed before everything was printed") from error
            raise Failure(f"cannot write to standard output: {error.strerror}") from error


class Streamed:
    """One answer, printed while it is generated: as text, or as token ids without a tokenizer.

    Args:
      output: standard output.
      tokenizer: tokenizer of the model; None to print token ids.

    Attributes:
      text: everything that was printed, without escapes.
    """

    def __init__(self, output: Output, tokenizer: Tokenizer | None):
        self.text = ""
        self._output, self._count = output, 0
        self._add, self._finish = _converter(tokenizer)

    def update(self, output_ids: Sequence[int]) -> None:
        """Print the text of new tokens.

        Args:
          output_ids: all tokens that were generated for the answer.

        Raises:
          Failure: as `Output.write`.
        """
        new, self._count = output_ids[self._count :], len(output_ids)
        self._print(self._add(new))

    def finish(self, output_ids: Sequence[int]) -> None:
        """Print the rest of the answer and a line break. Raise Failure as `Output.write`."""
        self.update(output_ids)
        self._print(self._finish())
        self._output.write("" if self.text.endswith("\n") else "\n")

    def _print(self, text: str) -> None:
        self.text += text
        self._output.write(text)


def _converter(tokenizer: Tokenizer | None) -> tuple[Callable[[Sequence[int]], str], Callable[[], str]]:
    """Return the functions that convert new tokens to text, and that return the rest of the text at the end."""
    if tokenizer is None:
        before = iter([""])
        return lambda ids: "".join(f"{next(before, ' ')}{token}" for token in ids), lambda: ""
    try:
        incremental = IncrementalDetokenizer(tokenizer)
    except (NotImplementedError, TokenizerError):  # the whole answer is printed at the end
        ids: list[int] = []

        def store(new: Sequence[int]) -> str:
            ids.extend(new)
            return ""

        return store, lambda: _decoded(tokenizer, ids)
    return incremental.add, incremental.finish


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of token ids; the ids if the tokenizer fails, which the caller reports."""
    try:
        return tokenizer.decode(ids)
    except TokenizerError:
        return " ".join(map(str, ids))


def print_answers(output: Output, headings: Sequence[str], answers: Sequence[str]) -> None:
    """Print several answers in full, each after a heading with its number and the beginning of its prompt.

    Raises:
      Failure: as `Output.write`.
    """
    for number, (heading, answer) in enumerate(zip(headings, answers, strict=True)):
        line = " ".join(heading.split())
        line = line if len(line) <= HEADING else f"{line[: HEADING - 1]}…"
        output.write(f"{'' if number == 0 else chr(10)}[{number}] {line}\n{answer}\n")
