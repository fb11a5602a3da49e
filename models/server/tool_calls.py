"""Tool calls in the content of an output."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pallas_attn.models.server.formats import (
    CALL,
    CALL_BEGIN,
    CALL_END,
    CALL_SEPARATOR,
    CALLS_BEGIN,
    CALLS_END,
    CHANNEL,
    DEEPSEEK_ENDS,
    DSML,
    END_CALL,
    END_GEMMA_CALL,
    GEMMA_CALL,
    GEMMA_ENDS,
    GLM_ENDS,
    MESSAGE,
    MESSAGE_ENDS,
    QUOTE,
    QWEN_ENDS,
    START,
    Tool,
    is_text,
    properties_of,
)
from pallas_attn.models.server.output_text import JsonObject, OutputParser, Steps

MAX_NAME = 256
"""Most characters of the name of a function or of an argument that the parsers accept."""

_SPACE = r"[ \t\n\r]*"
_JSON_CALL = re.compile(
    rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"([^"\\\x00-\x1f]{{1,{MAX_NAME}}})"{_SPACE},'
    rf'{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)
_GEMMA_TOKEN = re.compile(rf'[{{}}\[\],:]|{re.escape(QUOTE)}|[^{{}}\[\],:<"]{{1,{MAX_NAME}}}(?=[{{}}\[\],:<])')
_PARTIAL_GEMMA_WORD = re.compile(rf'[^{{}}\[\],:<"]{{0,{MAX_NAME}}}')
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_PARTIAL_RECIPIENT = re.compile(rf"\s*(?:t|to|to=[^\s<]{{0,{MAX_NAME}}}\s*)?")
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

    Attributes describe a format. The parser uses `markers` and `ends`. The other attributes are templates of the output
    of a model, with the placeholder {name}. A message consists of `first`, calls separated by `between`, and `last`. A
    call consists of `head`, the arguments and `tail`. The parser also accepts other white space.

    Attributes:
      ends: special tokens that end a message.
      markers: markers that `_read_call` processes.
      between: None if a message has at most one call.
      parameter, after_value: None if the arguments are a JSON object; otherwise texts before and after the value of
        each argument. {is_text} stands for true or false.
      quote: None, or the marker before and after strings, if the arguments are a JSON object with this marker instead
        of quotation marks, and without quotation marks around keys.

    Args:
      tools: tools of the request. Without tools, calls are content.
    """

    ends: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    first = head = tail = last = after_value = ""
    between: str | None = None
    parameter: str | None = None
    quote: str | None = None

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = {tool["function"]["name"]: properties_of(tool["function"].get("parameters")) for tool in tools}
        self._markers = (*(self.markers if tools else ()), *self.ends)
        self._num_calls, self._is_after_call, self._space = 0, False, ""
        super().__init__()

    def _parse(self) -> Steps[None]:
        if not self._markers:
            yield from self._read_all(self._content)
        else:
            while (marker := (yield from self._read_until(self._markers, self._content))) is not None:
                yield from self._read_call(marker)
        self._flush_space()

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

    def _is_function(self, name: str) -> bool:
        """Return whether a text can be the name of a called function. The client reports unknown functions to the
        model."""
        return 0 < len(name) <= MAX_NAME and name.isprintable()

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

    def _string_part(self, text: str) -> None:
        self._argument(json.dumps(text, ensure_ascii=False)[1:-1])

    def _read_json_call(self) -> Steps[bool]:
        """Consume a call of the form {"name": ..., "arguments": {...}}. The arguments are returned as they arrive, if
        they come after the name.

        Returns:
          Whether the text is a call. Otherwise it is content.
        """
        space = yield from self._read_space()
        whole, length = JsonObject(), 0
        while (header := _JSON_CALL.match(self._rest)) is None:
            length += whole.accept(self._rest[length:])
            if whole.is_complete or whole.is_invalid or self._is_complete:
                text, self._rest = self._rest[:length], self._rest[length:]
                is_call = whole.is_complete and self._add_json_call(text)
                if not is_call:
                    self._content(space + text)
                return is_call
            yield
        text, name = header.group(), header.group(1)
        self._rest = self._rest[len(text) :]
        if not self._is_function(name):
            self._content(space + text)
            return False
        yield from self._read_arguments(name)
        whole = JsonObject()
        whole.accept(text + "{}")
        while True:  # skip other entries
            self._rest = self._rest[whole.accept(self._rest) :]
            if whole.is_complete or whole.is_invalid:
                return True
            if self._is_complete:
                self._rest = ""
                return True
            yield

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
    ends, markers = QWEN_ENDS, (CALL, END_CALL)
    head, tail, between = f'{CALL}\n{{"name": "{{name}}", "arguments": ', f"}}\n{END_CALL}", "\n"

    def _read_call(self, marker: str) -> Steps[None]:
        if marker == CALL:
            yield from self._read_json_call()


class _Llama(ToolCallParser):
    """The content is text, or calls that are separated by ";". Text may have a call after <|python_tag|>."""

    ends, markers = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), ("<|python_tag|>",)
    head, tail = '{"name": "{name}", "parameters": ', "}"

    def _parse(self) -> Steps[None]:
        if self._tools:
            self._content((yield from self._read_space()))
            if self._rest.startswith("{"):
                yield from self._read_call(self.markers[0])
        yield from super()._parse()

    def _read_call(self, marker: str) -> Steps[None]:
        while marker in self.markers and (yield from self._read_json_call()):
            self._content((yield from self._read_space()))
            if (yield from self._read_prefix(";")):
                yield from self._read_space()
            if not self._rest.startswith("{"):
                return

    def _is_function(self, name: str) -> bool:
        return name in self._tools  # an answer may be a JSON object, too


class _DeepSeek(ToolCallParser):
    """Calls of V3: `function`, separator, name, line break, JSON in a fence. Calls of V3.1: name, separator, JSON."""

    ends, markers = DEEPSEEK_ENDS, (CALLS_BEGIN, CALL_BEGIN, CALL_SEPARATOR, CALL_END, CALLS_END)
    head, tail = f"{CALL_BEGIN}function{CALL_SEPARATOR}{{name}}\n```json\n", f"\n```{CALL_END}"
    first, between, last = CALLS_BEGIN, "\n", CALLS_END

    def _read_call(self, marker: str) -> Steps[None]:
        if marker != CALL_BEGIN:
            return
        parts: list[str] = []
        ends = ("{", *(other for other in self._markers if other != CALL_SEPARATOR))
        end = yield from self._read_until(ends, parts.append)
        self._rest = (end or "") + self._rest
        text = "".join(parts)
        name, separator, fence = text.partition(CALL_SEPARATOR)
        if fence.strip() and not fence.lstrip().startswith("```"):  # of V3
            name, _, fence = fence.strip().partition("\n")
        name, is_fence = name.strip(), fence.strip() in ("", "```", "```json")
        if end != "{" or text.count(separator) != 1 or not is_fence or not self._is_function(name):
            self._content(text.replace(CALL_SEPARATOR, ""))
            return
        yield from self._read_arguments(name)
        self._content((yield from self._read_space()))
        yield from self._read_prefix("```")


class _DeepSeekV31(_DeepSeek):
    head, tail, between = f"{CALL_BEGIN}{{name}}{CALL_SEPARATOR}", CALL_END, ""


class _Tagged(ToolCallParser):
    """Base class of formats with `parameter`. A call has these tags, with white space between them:

    outer  function NAME end_name  (key KEY end_key  value VALUE end_value)...  end

    Attributes:
      outer, value: "" if the format has no such tag.
      end_name: "" if the name ends before the next tag.
      default_is_text: whether values of parameters that the schema does not declare are texts.
      is_in_lines: whether a line break after `end_key` and before `end_value` does not belong to the value.
      has_constants: whether True, False and None are values that are not texts.
    """

    outer = function = end_name = end = key = end_key = value = end_value = ""
    default_is_text, is_in_lines, has_constants = True, False, False

    def _read_call(self, marker: str) -> Steps[None]:
        if marker != (self.outer or self.function):
            return
        if self.outer:
            space = yield from self._read_space()
            if not (yield from self._read_prefix(self.function)):
                self._content(space)
                return
        if (name := (yield from self._read_header(self.end_name))) is None:
            return
        self._start_call(name)
        separator = "{"
        while (tag := (yield from self._read_tag(self.key, self.end))) == self.key:
            header = yield from self._read_header(self.end_key)
            if header is None or (self.value and (yield from self._read_tag(self.value)) is None):
                continue
            key, _, attribute = header.partition('" string="')  # of DSML
            properties = self._tools.get(name, {})
            is_string = is_text(properties[key]) if key in properties else self.default_is_text
            self._argument(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._read_value(attribute != "false" if attribute else is_string)):
                return
        if tag is not None:
            self._argument("{}" if separator == "{" else "}")

    def _read_tag(self, *tags: str) -> Steps[str | None]:
        """Consume and return one of the tags; None before another marker. Text before the tag is content, except white
        space around it."""
        found = yield from self._read_until((*tags, *self._markers), self._content)
        if found in tags:
            self._space, self._is_after_call = "", True
            return found
        self._rest = (found or "") + self._rest
        return None

    def _read_header(self, end: str) -> Steps[str | None]:
        """Consume a name and then `end` in the same line. If `end` is "", the name ends before the next tag, which is
        not consumed. Return the name; None if the text cannot be a name, so that it is content."""
        parts: list[str] = []
        ends = (end,) if end else (self.key, self.end)
        others = ("\n", *self._markers) if end else self._markers
        found = yield from self._read_until((*ends, *others), parts.append)
        if found != end:
            self._rest = (found or "") + self._rest
        text = "".join(parts)
        name = text if end else text.strip()
        if found in ends and self._is_function(name):
            return name
        self._content(text)
        return None

    def _read_value(self, is_string: bool) -> Steps[bool]:
        """Consume a value that is a text, or JSON without quotation marks for texts. Add it to the arguments.

        Returns:
          Whether the value has an end.
        """
        ends: tuple[str, ...] = (self.end_value,)
        if self.is_in_lines:
            yield from self._read_prefix("\n")
            ends = (f"\n{self.end_value}", *ends)
        parts: list[str] = []
        if is_string:
            self._argument('"')
        end = yield from self._read_until(ends, self._string_part if is_string else parts.append)
        if end is not None:
            text = "".join(parts)
            if self.has_constants:
                text = _CONSTANTS.get(text.strip(), text.strip())
            self._argument('"' if is_string else _as_json(text))
        return end is not None


class _QwenCoder(_Tagged):
    ends, markers = QWEN_ENDS, (CALL, END_CALL)
    head, tail, between = f"{CALL}\n<function={{name}}>\n", f"</function>\n{END_CALL}", "\n"
    parameter, after_value = "<parameter={name}>\n", "\n</parameter>\n"
    outer, function, end_name, end = CALL, "<function=", ">", "</function>"
    key, end_key, end_value = "<parameter=", ">", "</parameter>"
    is_in_lines = has_constants = True


class _Glm(_Tagged):
    head, tail, between = f"{CALL}{{name}}", END_CALL, ""
    parameter, after_value = "<arg_key>{name}</arg_key><arg_value>", "</arg_value>"
    function, end = CALL, END_CALL
    key, end_key, value, end_value = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    ends, markers = GLM_ENDS, (function, end, key, end_key, value, end_value)
    default_is_text = False


class _Dsml(_Tagged):
    first, between, last = f"<{DSML}function_calls>\n", "", f"</{DSML}function_calls>"
    head, tail = f'<{DSML}invoke name="{{name}}">\n', f"</{DSML}invoke>\n"
    parameter = f'<{DSML}parameter name="{{name}}" string="{{is_text}}">'
    after_value = f"</{DSML}parameter>\n"
    function, end_name, end = f'<{DSML}invoke name="', '">', f"</{DSML}invoke>"
    key, end_key, end_value = f'<{DSML}parameter name="', '">', f"</{DSML}parameter>"
    blocks = tuple(f"{start}{DSML}{name}>" for name in ("function_calls", "tool_calls") for start in ("<", "</"))
    ends, markers = DEEPSEEK_ENDS, (function, *blocks)


class _DsmlV4(_Dsml):
    first, last = f"<{DSML}tool_calls>\n", f"</{DSML}tool_calls>"


_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""JSON of constants of Python, which the chat template of Qwen3-Coder writes."""


def _as_json(text: str) -> str:
    """Return JSON for a text: JSON without outer white space, other text as a JSON string."""
    try:
        json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _reject(constant: str) -> None:
    raise ValueError(f"not JSON: {constant}")


class _Gemma(ToolCallParser):
    """Calls of Gemma 4: call:NAME{key:value,...}. Strings have no escapes."""

    ends, markers, quote = GEMMA_ENDS, (GEMMA_CALL, END_GEMMA_CALL), QUOTE
    head, tail, between = f"{GEMMA_CALL}call:{{name}}", END_GEMMA_CALL, ""

    def _read_call(self, marker: str) -> Steps[None]:
        if marker != GEMMA_CALL:
            return
        space = yield from self._read_space()
        if not (yield from self._read_prefix("call:")):
            self._content(space)
            return
        parts: list[str] = []
        end = yield from self._read_until(("{", "\n", *self._markers), parts.append)
        name = "".join(parts)
        if end == "{" and self._is_function(name):
            self._start_call(name)
            yield from self._read_quoted_object()
        else:
            self._content(f"call:{name}")
            self._rest = (end or "") + self._rest

    def _read_quoted_object(self) -> Steps[None]:
        """Consume the arguments after their first brace, and add them as JSON."""
        found, token = JsonObject(), "{"
        while True:
            text = _JSON_TOKENS.get(token, token)
            if token not in _JSON_TOKENS and found.expects_key:
                text = json.dumps(token, ensure_ascii=False) if self._is_function(token) else ""
            found.accept(text + " ")
            if found.is_invalid or not text:
                self._rest = token + self._rest
                return
            self._argument(text)
            if token == QUOTE:
                if (yield from self._read_until((QUOTE,), self._string_part)) is None:
                    return
                found.accept(text)
                self._argument(text)
            if found.is_complete:
                return
            token = yield from self._read_token()

    def _read_token(self) -> Steps[str]:
        """Consume and return a bracket, a comma, a colon, a quotation mark, or the key, number or word before one of
        them, without white space around it. Return "" before other text and at the end."""
        while True:
            self._rest = self._rest.lstrip()
            if (found := _GEMMA_TOKEN.match(self._rest)) is not None:
                self._rest = self._rest[found.end() :]
                return found.group().rstrip()
            if not (QUOTE.startswith(self._rest) or _PARTIAL_GEMMA_WORD.fullmatch(self._rest)):
                return ""
            if self._is_complete:
                self._rest = ""  # an unfinished key, number or word
                return ""
            yield


_JSON_TOKENS = {QUOTE: '"', ",": ", ", ":": ": ", **{bracket: bracket for bracket in "{}[]"}}
"""JSON of the tokens of Gemma 4's arguments that are not keys, numbers or words."""


class _Harmony(ToolCallParser):
    """Messages of gpt-oss. A message to functions.NAME is a call, all other messages are content. The token <|call|>,
    which is an end-of-sequence token, follows a call."""

    head = f"{CHANNEL}commentary to=functions.{{name}} <|constrain|>json{MESSAGE}"

    def _parse(self) -> Steps[None]:
        marker: str | None = ""
        while marker is not None:
            self._header, self._is_text = "", False
            marker = yield from self._read_until((CHANNEL, MESSAGE, *MESSAGE_ENDS), self._hold_recipient)
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


PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": _Hermes,
    "qwen3_coder": _QwenCoder,
    "llama3_json": _Llama,
    "deepseek_v3": _DeepSeek,
    "deepseek_v31": _DeepSeekV31,
    "deepseek_v32": _Dsml,
    "deepseek_v4": _DsmlV4,
    "glm": _Glm,
    "gemma4": _Gemma,
    "gpt_oss": _Harmony,
}
"""Formats of tool calls by name."""


class ForcedCallParser(ToolCallParser):
    """Parser of an output of a model without a format, which a grammar forces to be the arguments of the function
    `name` or, if `name` is None, a JSON array of objects with name and parameters."""

    def __init__(self, name: str | None):
        self._name = name
        super().__init__()

    def _parse(self) -> Steps[None]:
        if self._name is not None:
            self._start_call(self._name)
            yield from self._read_all(self._argument)
        while (yield from self._read_until(("{",), self._content)) is not None:
            self._rest = "{" + self._rest
            yield from self._read_json_call()

    def _content(self, text: str) -> None:
        """Ignore the brackets and commas of the array."""


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
    if family not in PARSERS:
        raise ValueError(f"family: expected one of {', '.join(PARSERS)} or None, got {family!r}")
    return PARSERS[family](tools or ())
