"""Separation of a model's reasoning from its answer."""

from __future__ import annotations

import re
from typing import Literal

from pallas_attn.models.server.formats import (
    CHANNEL,
    END_GEMMA_CHANNEL,
    END_THINK,
    GEMMA_CALL,
    GEMMA_CHANNEL,
    GEMMA_ENDS,
    MESSAGE,
    MESSAGE_ENDS,
    REASONING,
    START,
    TAGS,
    THINK,
    THINK_ENDS,
)
from pallas_attn.models.server.output_text import OutputParser, Steps

type Piece = tuple[Literal["reasoning", "content"], str]


def starts_in_reasoning(prompt: str) -> bool:
    """Return whether a rendered prompt ends with the tag that opens the reasoning."""
    return prompt.rstrip().endswith(tuple(start.rstrip() for start, _ in TAGS.values()))


class ReasoningParser(OutputParser[Piece]):
    """Divides an output into reasoning and content. Created by `reasoning_parser`.

    `feed(text)` and `finish()` return lists of parts ("reasoning", text) and ("content", text). The content is the
    input of `ToolCallParser`. It contains the markers of tool calls. In the harmony format, it contains the markers of
    all messages except reasoning.
    """

    def _reasoning(self, text: str) -> None:
        self._items.append(("reasoning", text))

    def _content(self, text: str) -> None:
        self._items.append(("content", text))

    def _parse(self) -> Steps[None]:
        yield from self._read_all(self._content)


class _Tags(ReasoningParser):
    """Base class of formats with an entry of `TAGS`."""

    def __init__(self, prompt: str):
        self._is_inside, self._space = starts_in_reasoning(prompt), ""
        super().__init__()

    def _stripped_reasoning(self, text: str) -> None:
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]  # dropped unless reasoning follows, also in a later channel
        if end:
            self._reasoning(text[:end])


class _Think(_Tags):
    """Reasoning in <think> tags at the start of the output. White space around the tags is removed."""

    def _parse(self) -> Steps[None]:
        space = yield from self._read_space()
        if (yield from self._read_prefix(THINK)) or self._is_inside:  # some models repeat the tag of the prompt
            yield from self._read_space()
            while (yield from self._read_until((END_THINK, *THINK_ENDS), self._stripped_reasoning)) in THINK_ENDS:
                pass
            yield from self._read_space()
        else:
            self._rest = space + self._rest
        yield from self._read_all(self._content)


class _Channels(_Tags):
    """Reasoning in channels of Gemma 4, which may follow content. A tool call also ends the reasoning, because the
    model sometimes omits the end of the channel."""

    def _parse(self) -> Steps[None]:
        marker: str | None = GEMMA_CHANNEL if self._is_inside else ""
        while marker is not None:
            if marker == GEMMA_CHANNEL:
                marker = yield from self._read_channel()
            else:
                if marker == GEMMA_CALL:
                    self._content(marker)
                marker = yield from self._read_until((GEMMA_CHANNEL, END_GEMMA_CHANNEL), self._content)

    def _read_channel(self) -> Steps[str | None]:
        """Consume the reasoning in a channel. Consume and return the marker that ends it."""
        yield from self._read_prefix("thought\n")
        yield from self._read_space()
        markers = (GEMMA_CHANNEL, END_GEMMA_CHANNEL, GEMMA_CALL, *GEMMA_ENDS)
        while (marker := (yield from self._read_until(markers, self._stripped_reasoning))) in GEMMA_ENDS:
            pass
        return marker


class _HarmonyReasoning(ReasoningParser):
    """Reasoning in messages of the channel "analysis" that have no recipient."""

    def _parse(self) -> Steps[None]:
        while (marker := (yield from self._read_until((CHANNEL, START), self._content))) is not None:
            header = [marker]
            end = yield from self._read_until((MESSAGE, *MESSAGE_ENDS[:-1]), header.append)
            text = "".join(header)
            if end == MESSAGE and re.search(rf"{re.escape(CHANNEL)}\s*analysis\b", text) and "to=" not in text:
                end = yield from self._read_until(MESSAGE_ENDS, self._reasoning)
                self._rest = (START if end == START else "") + self._rest
                continue
            self._content(text + (end or ""))
            if end == MESSAGE:
                end = yield from self._read_until(MESSAGE_ENDS, self._content)
                if end == START:
                    self._rest = START + self._rest
                elif end is not None:
                    self._content(end)


def reasoning_parser(family: str | None, prompt: str = "") -> ReasoningParser:
    """Return a parser for one output.

    Args:
      family: `ParserNames.reasoning`.
      prompt: the rendered prompt. The output starts inside the reasoning if the prompt ends with the tag that opens it.

    Raises:
      ValueError: unknown family.
    """
    match family:
        case None:
            return ReasoningParser()
        case "think":
            return _Think(prompt)
        case "gemma4":
            return _Channels(prompt)
        case "gpt_oss":
            return _HarmonyReasoning()
    raise ValueError(f"family: expected {', '.join(REASONING)} or None, got {family!r}")
