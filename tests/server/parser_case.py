"""Parsers of outputs in tests: feeding a text in parts, and joined results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from pallas_attn.models.server.reasoning import ReasoningParser
from pallas_attn.models.server.tool_calls import ContentDelta, ToolCallDelta, ToolCallParser

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}

TOOLS = [WEATHER, CLOCK]


def parts_of(text: str, cuts: Sequence[int]) -> list[str]:
    """Divide a text at positions."""
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(at)]


def cuts_of(text: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, max(len(text) - 1, 0)), max_size=12)


def reasoning_of(parser: ReasoningParser, parts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the results of a parser; neighbouring parts of one kind are joined."""
    joined: list[tuple[str, str]] = []
    for kind, text in [*(item for part in parts for item in parser.feed(part)), *parser.finish()]:
        assert text
        if joined and joined[-1][0] == kind:
            joined[-1] = kind, joined[-1][1] + text
        else:
            joined.append((kind, text))
    return joined


def calls_of(parser: ToolCallParser, parts: Sequence[str]) -> list[str | tuple[str, str]]:
    """Return the results of a parser in order: content, and pairs (name, arguments) of calls."""
    joined: list[str | tuple[str, str]] = []
    ids: list[str] = []
    for item in [*(item for part in parts for item in parser.feed(part)), *parser.finish()]:
        last = joined[-1] if joined else None
        match item:
            case ContentDelta(text):
                assert text
                if isinstance(last, str):
                    joined[-1] = last + text
                else:
                    joined.append(text)
            case ToolCallDelta(index, str(call_id), str(name), arguments):
                ids.append(call_id)
                assert index == len(ids) - 1
                joined.append((name, arguments))
            case ToolCallDelta(index, None, None, arguments):
                assert index == len(ids) - 1
                at = max(i for i, other in enumerate(joined) if isinstance(other, tuple))
                joined[at] = joined[at][0], joined[at][1] + arguments
    assert len(set(ids)) == len(ids)
    return joined
