"""Tool calls in the content of an output."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pallas_attn.models.server.output_text import JsonObject, OutputParser, Steps
from pallas_attn.models.server.reasoning import CHANNEL, MESSAGE, MESSAGE_ENDS, START

type Tool = Mapping[str, Any]
"""Tool of a request: {"type": "function", "function": {"name": ..., "parameters": JSON schema}}."""

CALL, END_CALL, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER = "<function=", "</function>", "<parameter=", "</parameter>"
DSML = "｜DSML｜"
ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

_MAX_NAME = 256  # characters
_SPACE = r"[ \t\n\r]*"
_JSON_CALL = re.compile(
    rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"([^"\\\x00-\x1f]{{1,{_MAX_NAME}}})"{_SPACE},'
    rf'{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_PARTIAL_RECIPIENT = re.compile(rf"\s*(?:t|to|to=[^\s<]{{0,{_MAX_NAME}}}\s*)?")
_HEADER_MARKERS = re.compile(r"<\|(?:start|channel|constrain)\|>")
_HEADER_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code")


class ContentDelta(NamedTuple):
    """A part of the content of a message."""

    text: str


class ToolCallDelta(NamedTuple):
    """A part of a tool call.

    Attributes:
      index: number of the call in the message.
      id: id of the call in its first delta; otherwise None.
      name: name of the function in the first delta of the call; otherwise None.
      arguments: a part of the JSON text of the arguments.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


class ToolCallParser(OutputParser[ContentDelta | ToolCallDelta]):
    """Divides the content of an output into text and tool calls. Created by `tool_call_parser`.

    `feed(text)` and `finish()` return lists of `ContentDelta` and `ToolCallDelta`. The parser removes all markers of
    the format, and white space before, between and after tool calls. Text that does not have the form of a call is
    content. If the arguments of a call become invalid JSON after a part of them was returned, the arguments end there
    and the rest of the text is content. Arguments are incomplete if the output ends within them.

    Attributes:
      ends: special tokens that end a message.
    """

    ends: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = {tool["function"]["name"]: properties_of(tool["function"].get("parameters")) for tool in tools}
        self._num_calls, self._is_after_call, self._space = 0, False, ""
        super().__init__()

    def _parse(self) -> Steps[None]:
        markers = self._markers() if self._tools else self.ends
        if markers:
            while (marker := (yield from self._read_until(markers, self._content))) is not None:
                yield from self._read_call(marker)
        else:
            yield from self._read_all(self._content)
        self._flush_space()

    def _markers(self) -> tuple[str, ...]:
        """Return the markers that `_read_call` processes."""
        return self.ends

    def _read_call(self, marker: str) -> Steps[None]:
        """Consume a call, if the marker starts one."""
        yield from ()

    def _content(self, text: str) -> None:
        text = self._space + text
        if self._is_after_call:
            text = text.lstrip()
        end = len(text.rstrip())
        self._space = text[end:]  # it is lost if a call follows
        if end:
            self._is_after_call = False
            self._items.append(ContentDelta(text[:end]))

    def _flush_space(self) -> None:
        if self._space:
            self._items.append(ContentDelta(self._space))

    def _start_call(self, name: str) -> None:
        self._space, self._is_after_call = "", True
        self._items.append(ToolCallDelta(self._num_calls, f"call_{secrets.token_hex(12)}", name, ""))
        self._num_calls += 1

    def _argument(self, text: str) -> None:
        self._items.append(ToolCallDelta(self._num_calls - 1, None, None, text))

    def _read_arguments(self, name: str) -> Steps[bool]:
        """Consume the JSON object of the arguments of a call.

        Returns:
          Whether the call has started. It starts with the first character of the object.
        """
        found, has_started = JsonObject(), False
        while True:
            end = found.accept(self._rest)
            text, self._rest = self._rest[:end], self._rest[end:]
            if not has_started and text.lstrip():
                has_started, text = True, text.lstrip()
                self._start_call(name)
            if has_started and self._is_complete and not (found.is_complete or found.is_invalid):
                text, self._rest = text + self._rest, ""  # the output ended in the middle of a number or an escape
            if has_started and text:
                self._argument(text)
            if found.is_complete or found.is_invalid or self._is_complete:
                return has_started
            yield

    def _read_json_call(self) -> Steps[str | None]:
        """Consume a call of the form {"name": ..., "arguments": {...}}. The arguments are returned as they arrive, if
        they come after the name.

        Returns:
          The text if it is not a call; otherwise None.
        """
        whole, length = JsonObject(), 0
        while (header := _JSON_CALL.match(self._rest)) is None:
            length += whole.accept(self._rest[length:])
            if whole.is_complete or whole.is_invalid or self._is_complete:
                text, self._rest = self._rest[:length], self._rest[length:]
                return None if whole.is_complete and self._add_json_call(text) else text
            yield
        text, name = header.group(), header.group(1)
        self._rest = self._rest[len(text) :]
        if not self._is_function(name):
            return text
        yield from self._read_arguments(name)
        whole = JsonObject()
        whole.accept(text + "{}")
        while True:  # skip other entries
            self._rest = self._rest[whole.accept(self._rest) :]
            if whole.is_complete or whole.is_invalid:
                return None
            if self._is_complete:
                self._rest = ""
                return None
            yield

    def _read_value(self, end: str, is_string: bool) -> Steps[str | None]:
        """Consume a value that is a text, or JSON without quotation marks for texts. Add it to the arguments.

        Returns:
          The marker `end` after the value; None at the end of the text.
        """
        parts: list[str] = []
        if is_string:
            self._argument('"')
        marker = yield from self._read_until((end,), self._string_part if is_string else parts.append)
        if marker is not None:
            self._argument('"' if is_string else _as_json("".join(parts)))
        return marker

    def _string_part(self, text: str) -> None:
        self._argument(json.dumps(text, ensure_ascii=False)[1:-1])

    def _is_function(self, name: str) -> bool:
        """Return whether a text can be the name of a called function. The client reports unknown functions to the
        model."""
        return 0 < len(name) <= _MAX_NAME and name.isprintable()

    def _add_json_call(self, text: str) -> bool:
        """Add a complete call, if a JSON text is one."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return False
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # JSON in a JSON string
            found = JsonObject()
            if found.accept(arguments.strip()) != len(arguments.strip()) or not found.is_complete:
                return False
        elif isinstance(arguments, Mapping):
            arguments = json.dumps(arguments)
        else:
            return False
        if not isinstance(name, str) or not self._is_function(name):
            return False
        self._start_call(name)
        self._argument(arguments)
        return True


class _Hermes(ToolCallParser):
    ends = ("<|im_end|>", "<|endoftext|>")

    def _markers(self) -> tuple[str, ...]:
        return CALL, END_CALL, *self.ends

    def _read_call(self, marker: str) -> Steps[None]:
        if marker == CALL:
            space = yield from self._read_space()
            if (text := (yield from self._read_json_call())) is not None:
                self._content(space + text)


class _Llama(ToolCallParser):
    """The content is text, or calls that are separated by ";". Text may have a call after <|python_tag|>."""

    ends = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def _parse(self) -> Steps[None]:
        if self._tools:
            self._content((yield from self._read_space()))
            if self._rest.startswith("{"):
                yield from self._read_call(PYTHON_TAG)
        yield from super()._parse()

    def _markers(self) -> tuple[str, ...]:
        return PYTHON_TAG, *self.ends

    def _read_call(self, marker: str) -> Steps[None]:
        while marker == PYTHON_TAG:
            space = yield from self._read_space()
            if (text := (yield from self._read_json_call())) is not None:
                self._content(space + text)
                return
            self._content((yield from self._read_space()))
            if (yield from self._read_prefix(";")):
                yield from self._read_space()
            if not self._rest.startswith("{"):
                return

    def _is_function(self, name: str) -> bool:
        return name in self._tools  # an answer may be a JSON object, too


class _DeepSeek(ToolCallParser):
    """Calls of V3: `function`, separator, name, line break, JSON in a fence. Calls of V3.1: name, separator, JSON."""

    ends = ("<｜end▁of▁sentence｜>",)

    def _markers(self) -> tuple[str, ...]:
        return CALLS_BEGIN, CALL_BEGIN, CALL_SEPARATOR, CALL_END, CALLS_END, *self.ends

    def _read_call(self, marker: str) -> Steps[None]:
        if marker != CALL_BEGIN:
            return
        parts: list[str] = []
        end = yield from self._read_until(self._markers(), parts.append)
        if end != CALL_SEPARATOR:
            self._content("".join(parts))
            self._rest = (end or "") + self._rest
            return
        name = "".join(parts).strip()
        first = len(parts)
        end = yield from self._read_until(("{", *self._markers()), parts.append)
        self._rest = (end or "") + self._rest
        fence = "".join(parts[first:]).strip()
        if fence and not fence.startswith("```"):
            name, _, fence = fence.partition("\n")
        if end != "{" or not self._is_function(name.strip()) or fence.strip() not in ("", "```", "```json"):
            self._content("".join(parts))
            return
        yield from self._read_arguments(name.strip())
        self._content((yield from self._read_space()))
        yield from self._read_prefix("```")


class _GLM(ToolCallParser):
    """Calls of the form <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>."""

    ends = ("<|endoftext|>", "<|user|>", "<|observation|>")

    def _markers(self) -> tuple[str, ...]:
        return CALL, END_CALL, ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE, *self.ends

    def _read_call(self, marker: str) -> Steps[None]:
        if marker != CALL:
            return
        parts: list[str] = []
        end = yield from self._read_until(self._markers(), parts.append)
        name = "".join(parts).strip()
        if end not in (ARG_KEY, END_CALL) or not self._is_function(name):
            self._content("".join(parts))
            self._rest = (end or "") + self._rest
            return
        self._start_call(name)
        properties = self._tools.get(name, {})
        separator = "{"
        while end == ARG_KEY:
            parts = []
            if (end := (yield from self._read_until(self._markers(), parts.append))) != END_ARG_KEY:
                self._content("".join(parts))
                break
            if (end := (yield from self._read_until(self._markers(), self._content))) != ARG_VALUE:
                break
            key = "".join(parts)
            self._argument(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            end = yield from self._read_value(END_ARG_VALUE, is_text(properties.get(key)))
            if end is not None:
                end = yield from self._read_until(self._markers(), self._content)
        if end == END_CALL:
            self._argument("{}" if separator == "{" else "}")
        else:
            self._rest = (end or "") + self._rest


class _Elements(ToolCallParser):
    """Base class for calls whose function and arguments are elements with tags:

    function NAME end_name
    parameter KEY end_name VALUE end_parameter      # for each argument
    end_function
    """

    function = parameter = end_name = end_parameter = end_function = ""

    def _read_elements(self) -> Steps[None]:
        """Consume the rest of a call after `function`."""
        name = yield from self._read_header()
        if name is None:
            return
        self._start_call(name)
        separator = "{"
        while True:
            yield from self._read_space()
            if (yield from self._read_prefix(self.end_function)):
                self._argument("{}" if separator == "{" else "}")
                return
            if not (yield from self._read_prefix(self.parameter)):
                return
            if (header := (yield from self._read_header())) is None:
                return
            key, is_string = self._key_of(name, header)
            self._argument(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if (yield from self._read_value(self.end_parameter, is_string)) is None:
                return

    def _read_header(self) -> Steps[str | None]:
        """Consume the text up to `end_name`. Return it; None if it cannot be a name, so that it is content."""
        parts: list[str] = []
        end = yield from self._read_until((self.end_name, "\n", *self.ends), parts.append)
        text = "".join(parts)
        if end == self.end_name and self._is_function(text):
            return text
        self._content(text + ("\n" if end == "\n" else ""))
        return None

    def _key_of(self, name: str, header: str) -> tuple[str, bool]:
        """Return the key of an argument of a function, and whether its value is a text."""
        raise NotImplementedError


class _QwenCoder(_Elements):
    """Calls in <tool_call>. A line break after the tag of a parameter and before its end does not belong to the value.
    The chat template writes constants as Python does."""

    ends = _Hermes.ends
    function, parameter, end_name, end_parameter, end_function = FUNCTION, PARAMETER, ">", END_PARAMETER, END_FUNCTION

    def _markers(self) -> tuple[str, ...]:
        return CALL, END_CALL, *self.ends

    def _read_call(self, marker: str) -> Steps[None]:
        if marker != CALL:
            return
        space = yield from self._read_space()
        if (yield from self._read_prefix(self.function)):
            yield from self._read_elements()
        else:
            self._content(space)

    def _key_of(self, name: str, header: str) -> tuple[str, bool]:
        properties = self._tools.get(name, {})
        return header, header not in properties or is_text(properties[header])

    def _read_value(self, end: str, is_string: bool) -> Steps[str | None]:
        yield from self._read_prefix("\n")
        if not is_string:
            parts: list[str] = []
            marker = yield from self._read_until((end,), parts.append)
            if marker is not None:
                text = "".join(parts).strip()
                self._argument(_as_json({"True": "true", "False": "false", "None": "null"}.get(text, text)))
            return marker
        self._held = ""
        return (yield from super()._read_value(end, is_string))

    def _string_part(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""  # it is lost if the value ends here
        if text := text.removesuffix("\n"):
            super()._string_part(text)


class _Dsml(_Elements):
    """Calls of DeepSeek V3.2 and V4. An attribute of each parameter says whether its value is a text."""

    ends = _DeepSeek.ends
    function, end_function = f'<{DSML}invoke name="', f"</{DSML}invoke>"
    parameter, end_parameter, end_name = f'<{DSML}parameter name="', f"</{DSML}parameter>", '">'

    def _markers(self) -> tuple[str, ...]:
        blocks = [f"{start}{DSML}{name}>" for start in ("<", "</") for name in ("function_calls", "tool_calls")]
        return (self.function, *blocks, *self.ends)

    def _read_call(self, marker: str) -> Steps[None]:
        if marker == self.function:
            yield from self._read_elements()

    def _key_of(self, name: str, header: str) -> tuple[str, bool]:
        key, _, is_string = header.partition('" string="')
        return key, is_string != "false"


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Return the properties of the JSON schema of an object; empty if the schema declares none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def is_text(schema: Any) -> bool:
    """Return whether GLM and others write the values of a JSON schema without quotation marks."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _as_json(text: str) -> str:
    """Return a text unchanged if it is JSON, otherwise as a JSON string."""
    try:
        json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _reject(constant: str) -> None:
    raise ValueError(f"not JSON: {constant}")


class _Harmony(ToolCallParser):
    """Messages of gpt-oss. A message to functions.NAME is a call, all other messages are content."""

    def _parse(self) -> Steps[None]:
        marker: str | None = ""
        while marker is not None:
            self._header, self._is_text = "", False
            marker = yield from self._read_until((START, CHANNEL, MESSAGE, *MESSAGE_ENDS), self._hold_recipient)
            if marker in (START, CHANNEL):
                header: list[str] = [self._header, " "]
                marker = yield from self._read_until((MESSAGE, *MESSAGE_ENDS), header.append)
                self._header = _HEADER_MARKERS.sub(" ", "".join(header))
            if marker == MESSAGE:
                recipient = _RECIPIENT.search(self._header)
                name = recipient.group(1) if recipient is not None and self._tools else ""
                if self._is_function(name.removeprefix("functions.")) and name.startswith("functions."):
                    marker = yield from self._read_message(name.removeprefix("functions."))
                else:
                    marker = yield from self._read_until(MESSAGE_ENDS, self._content)
            elif not all(_is_header_word(word) for word in self._header.split()):
                self._content(self._header.strip())
            if marker == START:
                self._rest = START + self._rest
        self._flush_space()

    def _hold_recipient(self, text: str) -> None:
        """Add text before the first marker of a message. It is the end of a header or content."""
        self._header += text
        if self._is_text or not _PARTIAL_RECIPIENT.fullmatch(self._header):
            self._content(self._header)
            self._header, self._is_text = "", True

    def _read_message(self, name: str) -> Steps[str | None]:
        """Consume the arguments of a call, and return the marker after the message."""
        yield from self._read_space()
        has_started = self._rest.startswith("{") and (yield from self._read_arguments(name))
        text: list[str] = []
        end = yield from self._read_until(MESSAGE_ENDS, self._content if has_started else text.append)
        if not has_started and not text and end is not None:
            self._start_call(name)
            self._argument("{}")
        self._content("".join(text))
        return end


def _is_header_word(word: str) -> bool:
    return word.startswith("to=") or any(known.startswith(word) for known in _HEADER_WORDS)


_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": _Hermes,
    "qwen3_coder": _QwenCoder,
    "llama3_json": _Llama,
    "deepseek_v3": _DeepSeek,
    "deepseek_v31": _DeepSeek,
    "deepseek_v32": _Dsml,
    "deepseek_v4": _Dsml,
    "glm": _GLM,
    "gpt_oss": _Harmony,
}


def tool_call_parser(family: str | None, tools: Sequence[Tool] | None = None) -> ToolCallParser:
    """Return a parser for the content of one output. Use the parser of the model also for requests without tools: it
    removes special tokens from the content.

    Args:
      family: `ParserNames.tool_calls`.
      tools: tools of the request. Without tools, calls are content.

    Raises:
      ValueError: unknown family.
    """
    if family is None:
        return ToolCallParser()
    if family not in _PARSERS:
        raise ValueError(f"family: expected one of {', '.join(_PARSERS)} or None, got {family!r}")
    return _PARSERS[family](tools or ())
