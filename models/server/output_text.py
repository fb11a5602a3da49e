"""Generated text that arrives in parts: markers in it, and JSON objects in it.

The result of a parser does not depend on the division of the text into parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator

type Steps[Result] = Generator[None, None, Result]
"""A generator that yields when it needs more text."""


class OutputParser[Item]:
    """Base class of parsers of an output.

    A subclass implements `_parse` as a generator that reads `_rest` and appends results to `_items`.
    """

    def __init__(self) -> None:
        self._rest = ""  # text that `_parse` has not consumed
        self._is_complete = False  # whether no text follows after `_rest`
        self._items: list[Item] = []
        self._steps = self._parse()

    def feed(self, text: str) -> list[Item]:
        """Return the results that are certain after a further part of the text."""
        self._rest += text
        next(self._steps, None)
        items, self._items = self._items, []
        return items

    def finish(self) -> list[Item]:
        """Return the remaining results at the end of the text."""
        self._is_complete = True
        return self.feed("")

    def _parse(self) -> Iterator[None]:
        raise NotImplementedError

    def _read_all(self, emit: Callable[[str], None]) -> Steps[None]:
        """Consume the text up to its end."""
        while True:
            if self._rest:
                emit(self._rest)
                self._rest = ""
            if self._is_complete:
                return
            yield

    def _read_until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str | None]:
        """Consume text up to a marker, and the marker. Call `emit` for text that cannot be the start of a marker.

        Returns:
          The marker; None at the end of the text.
        """
        while True:
            found = min(((at, m) for m in markers if (at := self._rest.find(m)) >= 0), default=None)
            if found is not None:
                at, marker = found
                text, self._rest = self._rest[:at], self._rest[at + len(marker) :]
            else:
                marker, end = None, len(self._rest)
                if not self._is_complete:
                    end -= max(_overlap(self._rest, m) for m in markers)
                text, self._rest = self._rest[:end], self._rest[end:]
            if text:
                emit(text)
            if marker is not None or self._is_complete:
                return marker
            yield

    def _read_space(self) -> Steps[str]:
        """Consume and return white space."""
        space = ""
        while True:
            rest = self._rest.lstrip()
            space += self._rest[: len(self._rest) - len(rest)]
            self._rest = rest
            if rest or self._is_complete:
                return space
            yield

    def _read_prefix(self, prefix: str) -> Steps[bool]:
        """Return whether the text starts with a prefix, and consume the prefix."""
        while len(self._rest) < len(prefix) and prefix.startswith(self._rest) and not self._is_complete:
            yield
        if not self._rest.startswith(prefix):
            return False
        self._rest = self._rest[len(prefix) :]
        return True


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text that is the start of a marker, but not all of it."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)


_VALUE = '{["-0123456789tfn'
_STRING = re.compile(r'(?:[^"\\\x00-\x1f\ud800-\udfff]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_MAX_SCALAR = 1000  # characters


class JsonObject:
    """Finds the end of a JSON object in text that arrives in parts.

    Attributes:
      is_complete: whether the object has ended.
      is_invalid: whether the text cannot be a JSON object.
    """

    def __init__(self) -> None:
        self.is_complete = self.is_invalid = False
        self._open: list[str] = []
        self._allowed = "{"
        self._in_string = self._is_key = False

    @property
    def expects_key(self) -> bool:
        """Whether the next character, except white space, starts a key or ends an object without entries."""
        return '"' in self._allowed and "{" not in self._allowed

    def accept(self, text: str) -> int:
        """Return the number of characters of a further part that belong to the object. Numbers, words and escapes count
        when they are complete. The next part starts with the characters that were not accepted."""
        at = 0
        while at < len(text) and not (self.is_complete or self.is_invalid):
            char = text[at]
            if self._in_string:
                if (end := _STRING.match(text, at).end()) > at:  # pyrefly: ignore[missing-attribute]
                    at = end
                elif char == '"':
                    self._in_string, at = False, at + 1
                    self._end_value(":" if self._is_key else None)
                elif _PARTIAL_ESCAPE.fullmatch(text, at):
                    break
                else:
                    self.is_invalid = True
            elif char in " \t\n\r":
                at += 1
            elif char not in self._allowed:
                self.is_invalid = True
            elif char in _VALUE and char not in '{["':
                end = _WORD.match(text, at).end()  # pyrefly: ignore[missing-attribute]
                if end == len(text) and end - at <= _MAX_SCALAR:
                    break
                self.is_invalid = _SCALAR.fullmatch(text, at, end) is None or end - at > _MAX_SCALAR
                if not self.is_invalid:
                    at = end
                    self._end_value()
            else:
                at += 1
                self._take(char)
        return at

    def _take(self, char: str) -> None:
        """Consume one of the characters {}[]:," outside a string."""
        if char in "{[":
            self._open.append(char)
            self._allowed = '"}' if char == "{" else _VALUE + "]"
        elif char in "}]":
            self._open.pop()
            self._end_value()
        elif char == '"':
            self._in_string, self._is_key = True, self.expects_key
        else:
            self._allowed = '"' if char == "," and self._open[-1] == "{" else _VALUE

    def _end_value(self, allowed: str | None = None) -> None:
        """Set the characters that may follow a value."""
        self.is_complete = not self._open
        if self._open:
            self._allowed = allowed or (",}" if self._open[-1] == "{" else ",]")
