"""Incremental conversion of token ids to text.

>>> detokenizer = IncrementalDetokenizer(tokenizer)
>>> for token in generated_ids:
...     print(detokenizer.add([token]), end="")
>>> print(detokenizer.finish())

The decoder of a tokenizer.json is a sequence of stages, for example: replace "▁" by a space, join byte tokens, strip
the first space. `Tokenizer.decode` runs each stage over all tokens. This module runs the same stages over a stream of
tokens: each stage passes on the parts of its output that no later token can change, and stores the others.
"""

from __future__ import annotations

import codecs
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pallas_attn.models.checkpoints.tokenizer import Pieces, Tokenizer


class IncrementalDetokenizer:
    """Converts the token ids of one sequence to text while they are generated.

    Emitted text never changes: the concatenation of all returned texts equals `tokenizer.decode(all ids)`. A character
    is emitted after its last byte. U+FFFD is emitted only for bytes that are not UTF-8. The time per token does not
    depend on the number of earlier tokens.

    Text that later tokens could change is stored until they arrive:

    - incomplete UTF-8 characters;
    - consecutive byte tokens such as <0xE2> of a SentencePiece tokenizer, because one invalid byte among them makes
      the library decode all of them as U+FFFD;
    - a space before punctuation, if the tokenizer removes it (clean_up_tokenization_spaces).

    Args:
      tokenizer: the tokenizer.
      skip_special_tokens: whether special tokens are left out of the text.

    Raises:
      NotImplementedError: the tokenizer has a decoder that is not supported, such as a replaced regular expression.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._pieces = tokenizer.pieces
        self._skipped = self._pieces.special if skip_special_tokens else frozenset[int]()
        self._stages = _stages(self._pieces)
        self._is_finished = False

    def add(self, token_ids: Iterable[int]) -> str:
        """Add tokens, and return the new text that no later token can change. Unknown ids are skipped.

        Raises:
          ValueError: `finish` has been called.
        """
        if self._is_finished:
            raise ValueError("token_ids: expected no call of add after finish")
        texts, skipped = self._pieces.texts, self._skipped
        parts = [texts[token] for token in token_ids if token in texts and token not in skipped]
        for stage in self._stages:
            parts = stage.add(parts)
        return "".join(parts)

    def finish(self) -> str:
        """End the sequence, and return the rest of its text. Later calls return an empty text."""
        if self._is_finished:
            return ""
        self._is_finished = True
        parts: list[str] = []
        for stage in self._stages:
            parts = [*stage.add(parts), *stage.finish()]
        return "".join(parts)


def token_bytes(pieces: Pieces) -> dict[int, bytes]:
    """Return the bytes that each token adds to a text, by id.

    A space that the decoder strips from the start of a text is included.

    Raises:
      NotImplementedError: the bytes of a token depend on other tokens.
    """
    specs: list[Mapping[str, Any]] = [{"type": "Join"}] if pieces.decoder is None else _flat(pieces.decoder)
    kinds = [spec["type"] for spec in specs]
    unsupported = [kind for kind in kinds if kind not in _CONTEXT_FREE]
    if unsupported or pieces.clean_up:
        why = f"its decoder {unsupported[0]}" if unsupported else "clean_up_tokenization_spaces"
        raise NotImplementedError(f"tokenizer: with {why}, the text of a token depends on other tokens")
    if "ByteLevel" in kinds:
        return {token: _bytes_of(text) for token, text in pieces.texts.items()}
    texts, values, is_fused = dict(pieces.texts), dict[int, bytes](), False
    for spec in specs:
        match spec["type"]:
            case "ByteFallback":
                values = {token: bytes([_BYTE_TOKENS[text]]) for token, text in texts.items() if text in _BYTE_TOKENS}
            case "Fuse":
                is_fused = True
            case "Metaspace":
                texts = {token: text.replace(spec["replacement"], " ") for token, text in texts.items()}
            case "Replace":
                old = spec["pattern"].get("String")
                if old is None or (is_fused and len(old) != 1):
                    why = "its decoder Replace of a regular expression, or of several characters after Fuse"
                    raise NotImplementedError(f"tokenizer: with {why}, the text of a token depends on other tokens")
                texts = {token: text.replace(old, spec["content"]) for token, text in texts.items()}
            case "Strip" if not is_fused:
                texts = {token: text[_leading(text, spec["content"], spec["start"]) :] for token, text in texts.items()}
    return {token: text.encode() for token, text in texts.items()} | values


class _Stage:
    """A stage of a decoder.

    After a stage that joins all tokens, later stages receive chunks of one text instead of tokens.
    """

    def add(self, tokens: list[str]) -> list[str]:
        """Return the tokens that replace the given ones, as far as no later token changes them."""
        raise NotImplementedError

    def finish(self) -> list[str]:
        """Return the tokens that `add` has stored."""
        return []


def _stages(pieces: Pieces) -> list[_Stage]:
    """Return the stages of a tokenizer in order.

    Raises:
      NotImplementedError: a stage is not supported.
    """
    decoder = pieces.decoder
    specs: list[Mapping[str, Any]] = [{"type": "Join"}] if decoder is None else _flat(decoder)
    stages: list[_Stage] = []
    joined = False
    for spec in specs:
        kind = spec["type"]
        options = _TEXT_STAGES if joined else _TOKEN_STAGES
        stage = None if kind not in options else options[kind](spec)
        if stage is None:
            after = " after a decoder that joins tokens" if joined else ""
            raise NotImplementedError(
                f"tokenizer: incremental decoding does not support the decoder {dict(spec)}{after}; supported are"
                f" {', '.join(options)}, Replace only of a text, and Strip only at the start"
            )
        stages.append(stage)
        joined = joined or kind in ("ByteLevel", "Fuse")
    return [*stages, *(_ReplaceInText(old, new) for old, new in pieces.clean_up)]


def _flat(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a decoder as a list without sequences."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [spec for part in decoder["decoders"] for spec in _flat(part)]


# --- stages that receive tokens


class _ByteLevel(_Stage):
    """Convert the symbols of byte-level BPE to bytes, and decode them. A token with another character is its own
    UTF-8 encoding."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: list[str]) -> list[str]:
        return [self._decoder.decode(_bytes_of(token)) for token in tokens]

    def finish(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]


class _ByteFallback(_Stage):
    """Decode runs of byte tokens such as <0xE2>. If a run is not UTF-8, each of its tokens is U+FFFD."""

    def __init__(self) -> None:
        self._run = bytearray()

    def add(self, tokens: list[str]) -> list[str]:
        added: list[str] = []
        for token in tokens:
            byte = _BYTE_TOKENS.get(token)
            if byte is None:
                added += [*self.finish(), token]
            else:
                self._run.append(byte)
        return added

    def finish(self) -> list[str]:
        run, self._run = self._run, bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _Metaspace(_Stage):
    """Replace "\u2581" by a space, and remove it from the first token if the tokenizer added it there."""

    def __init__(self, spec: Mapping[str, Any]):
        self._symbol = spec["replacement"]
        self._removes = spec.get("prepend_scheme", "always") != "never"

    def add(self, tokens: list[str]) -> list[str]:
        added = [token.replace(self._symbol, " ") for token in tokens]
        if self._removes and tokens:
            added[0] = tokens[0].replace(self._symbol, "")
            self._removes = False
        return added


class _Replace(_Stage):
    """Replace a text in each token."""

    def __init__(self, old: str, new: str):
        self._old, self._new = old, new

    def add(self, tokens: list[str]) -> list[str]:
        return [token.replace(self._old, self._new) for token in tokens]


class _Strip(_Stage):
    """Remove up to `count` characters from the start of each token."""

    def __init__(self, spec: Mapping[str, Any]):
        self._char, self._count = spec["content"], spec["start"]

    def add(self, tokens: list[str]) -> list[str]:
        return [token[_leading(token, self._char, self._count) :] for token in tokens]


class _Fuse(_Stage):
    """Join all tokens."""

    def add(self, tokens: list[str]) -> list[str]:
        return tokens


class _Join(_Stage):
    """Write a space before each token except the first."""

    def __init__(self) -> None:
        self._is_first = True

    def add(self, tokens: list[str]) -> list[str]:
        added = [f" {token}" for token in tokens]
        if self._is_first and tokens:
            added[0] = tokens[0]
            self._is_first = False
        return added


class _WordPiece(_Stage):
    """Write a space before each token except the first, unless the token starts with the prefix of word parts."""

    def __init__(self, spec: Mapping[str, Any]):
        self._prefix, self._cleans, self._is_first = spec["prefix"], spec["cleanup"], True

    def add(self, tokens: list[str]) -> list[str]:
        added = []
        for token in tokens:
            if not self._is_first:
                token = token.removeprefix(self._prefix) if token.startswith(self._prefix) else f" {token}"
            self._is_first = False
            for old, new in _WORD_PIECE_CLEAN_UP if self._cleans else ():
                token = token.replace(old, new)
            added.append(token)
        return added


class _WordEnds(_Stage):
    """Replace the suffix that ends words by a space; in the last token by nothing."""

    def __init__(self, spec: Mapping[str, Any]):
        self._suffix: str = spec["suffix"]
        self._last: list[str] = []

    def add(self, tokens: list[str]) -> list[str]:
        tokens = [*self._last, *tokens]
        self._last = tokens[-1:]
        return [token.replace(self._suffix, " ") for token in tokens[:-1]]

    def finish(self) -> list[str]:
        return [token.replace(self._suffix, "") for token in self._last]


# --- stages that receive chunks of one text


class _ReplaceInText(_Stage):
    """Replace a text that may cross chunks."""

    def __init__(self, old: str, new: str):
        self._old, self._new, self._end = old, new, ""

    def add(self, tokens: list[str]) -> list[str]:
        *complete, end = (self._end + "".join(tokens)).split(self._old)
        stored = next(n for n in range(min(len(end), len(self._old) - 1), -1, -1) if end.endswith(self._old[:n]))
        self._end = end[len(end) - stored :]
        return [self._new.join([*complete, end[: len(end) - stored]])]

    def finish(self) -> list[str]:
        end, self._end = self._end, ""
        return [end]


class _StripText(_Stage):
    """Remove up to `count` characters from the start of the text."""

    def __init__(self, spec: Mapping[str, Any]):
        self._char, self._count = spec["content"], spec["start"]

    def add(self, tokens: list[str]) -> list[str]:
        text = "".join(tokens)
        removed = _leading(text, self._char, self._count)
        self._count = 0 if removed < len(text) else self._count - removed
        return [text[removed:]]


def _leading(text: str, char: str, count: int) -> int:
    """Return how often a text starts with a character, at most `count`."""
    return next((i for i, c in enumerate(text[:count]) if c != char), min(count, len(text)))


def _replace(kind: type[_Replace] | type[_ReplaceInText], spec: Mapping[str, Any]) -> _Stage | None:
    old = spec["pattern"].get("String")
    return kind(old, spec["content"]) if old else None


_TOKEN_STAGES: dict[str, Callable[[Mapping[str, Any]], _Stage | None]] = {
    "BPEDecoder": _WordEnds,
    "ByteFallback": lambda spec: _ByteFallback(),
    "ByteLevel": lambda spec: _ByteLevel(),
    "Fuse": lambda spec: _Fuse(),
    "Join": lambda spec: _Join(),
    "Metaspace": _Metaspace,
    "Replace": lambda spec: _replace(_Replace, spec),
    "Strip": lambda spec: None if spec["stop"] else _Strip(spec),
    "WordPiece": _WordPiece,
}
_TEXT_STAGES: dict[str, Callable[[Mapping[str, Any]], _Stage | None]] = {
    "Fuse": lambda spec: _Fuse(),
    "Replace": lambda spec: _replace(_ReplaceInText, spec),
    "Strip": lambda spec: None if spec["stop"] else _StripText(spec),
}

_CONTEXT_FREE = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip")
"""Decoders that decode each token alone, except the first token of a text and incomplete characters."""

_WORD_PIECE_CLEAN_UP = (
    *((f" {end}", end) for end in ".?!,"),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((f" {end}", end) for end in ("'s", "'ve", "'re")),
)
"""Replacements of the tokenizers library, in order."""

_BYTE_TOKENS = {f"<0x{high}{low}>": int(high + low, 16) for high in f"{string.hexdigits}+" for low in string.hexdigits}
"""Values of byte tokens. The library also reads a sign as the first digit."""


def _byte_symbols() -> dict[str, int]:
    """Return the bytes that the characters of byte-level vocabularies represent."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTES_OF_SYMBOLS = _byte_symbols()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTES_OF_SYMBOLS.__getitem__, token))
    except KeyError:
        return token.encode()
