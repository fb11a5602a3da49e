"""Grammars that make a model call tools, or answer in a format after its reasoning."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from pallas_attn.models.checkpoints import Tokenizer
from pallas_attn.models.engine import StructuredOutputs
from pallas_attn.models.server.formats import (
    CHANNEL,
    END,
    MESSAGE,
    START,
    TAGS,
    ParserNames,
    Tool,
    is_text,
    properties_of,
)
from pallas_attn.models.server.reasoning import starts_in_reasoning
from pallas_attn.models.server.tool_calls import MAX_NAME, PARSERS, ToolCallParser

# Spaces as `json.dumps` writes them. With free white space, a model may generate white space without end.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_ANY_TEXT = "(?s:.*)"

_KEY = re.compile(r"[\w$@./-]+(?: [\w$@./-]+)*")
_FREE_KEY = f"/[A-Za-z_][A-Za-z0-9_-]{{0,{MAX_NAME - 1}}}/"
_ANY_VALUE = object()  # key of a rule for any value, which no reference of a schema equals
_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
}
_WITHOUT_GRAMMAR = {
    None: {"not", "if", "dependencies"},
    "object": {
        *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
        *("dependentSchemas", "unevaluatedProperties"),
    },
    "array": {"prefixItems", "additionalItems", "contains", "uniqueItems", "unevaluatedItems"},
}
"""Keywords of JSON schemas that `_QuotedValues` does not support, by type; None for all types."""


class _Lark:
    """Parts of a grammar in llguidance's variant of Lark.

    Args:
      tokenizer: tokenizer of the model. Special tokens match by id, because no text of a grammar matches them. Other
        markers are text.
    """

    def __init__(self, tokenizer: Tokenizer):
        pieces = tokenizer.pieces
        self._special = {pieces.texts[token]: token for token in pieces.special if token in pieces.texts}
        self._names = (f"rule_{i}" for i in itertools.count())
        self.rules: list[str] = []

    def text(self, *texts: str) -> str:
        """Return an expression for texts with special tokens."""
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in self._parts("".join(texts))
        )

    def _parts(self, text: str) -> list[str]:
        """Divide a text into special tokens and the texts between them."""
        special = sorted((re.escape(token) for token in self._special if token in text), key=len, reverse=True)
        return [part for part in (re.split(f"({'|'.join(special)})", text) if special else [text]) if part]

    def up_to(self, marker: str, pattern: str = _ANY_TEXT) -> str:
        """Return an expression for a text that matches a regular expression, and the first marker after it."""
        parts = self._parts(marker)
        if any(part in self._special for part in parts):
            before = "" if parts[0] in self._special else parts[0]
            ending = re.escape(before).replace("/", r"\/")
            return f"/{pattern}{ending}/ {self.text(marker.removeprefix(before))}"
        return self.rule(f"/{pattern}/", f"[suffix={json.dumps(marker, ensure_ascii=False)}]")

    def rule(self, expression: str, options: str = "", name: str | None = None) -> str:
        """Add a rule, and return its name. A rule that uses itself has a name from `new_name`."""
        name = name or self.new_name()
        self.rules.append(f"{name}{options}: {expression}")
        return name

    def new_name(self) -> str:
        return next(self._names)

    def grammar(self, start: str) -> StructuredOutputs:
        # Without `no_forcing`, a common start of two markers would have to be generated as its own tokens.
        options = '%llguidance {"no_forcing": true}'
        return StructuredOutputs(grammar="\n".join([options, f"start: {start}", *self.rules]))


def tool_grammar(
    names: ParserNames,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    parallel: bool = True,
    prompt: str = "",
) -> StructuredOutputs:
    """Return the grammar of an output that calls tools. Reasoning may precede the calls.

    The arguments match the JSON schema of the tool. For GLM, Qwen3-Coder and DeepSeek V3.2 and V4, which write strings
    without quotation marks, `enum`, `const`, `pattern`, `minLength` and `maxLength` of strings apply, and properties
    have the order of the schema. The same keywords apply to strings of Gemma 4, whose properties are sorted.

    Args:
      names: parsers of the model.
      tools: tools of the request.
      tokenizer: tokenizer of the model.
      name: the only function that may be called, once; None for any function.
      parallel: whether several calls are allowed. Llama 3 and gpt-oss make one call per message.
      prompt: the rendered prompt. It may end inside the reasoning.

    Raises:
      ValueError: there is no tool with this name, or its parameters are not the schema of an object.
      NotImplementedError: the format of the model's tool calls is not known, or it is that of Gemma 4 and a schema has
        a keyword, a reference or a name without a grammar, or requires a name that is not in its properties.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not functions:
        known = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        raise ValueError(f"tool_choice: expected the name of a tool ({known}), got {name!r}")
    if names.tool_calls is None:
        raise NotImplementedError("tool_choice: the chat template of the model has no known format of tool calls")
    lark, form = _Lark(tokenizer), PARSERS[names.tool_calls]
    one = lark.rule(" | ".join([_call(lark, form, function) for function in functions]))
    is_one = name is not None or not parallel or form.between is None
    many = one if is_one else f"{one} ({lark.text(form.between or '')} {one})*"
    return lark.grammar(_after_reasoning(lark, names, prompt, f"{lark.text(form.first)} {many} {lark.text(form.last)}"))


def answer_grammar(
    outputs: StructuredOutputs, names: ParserNames, tokenizer: Tokenizer, prompt: str = ""
) -> StructuredOutputs:
    """Return the grammar of an output that has a format after the reasoning of the model.

    A model without reasoning has the format from the start. A context-free grammar has no effect on reasoning, so it is
    returned unchanged.

    Args:
      outputs: format of the answer.
      names, tokenizer, prompt: as in `tool_grammar`.
    """
    if names.reasoning is None or outputs.grammar is not None:
        return outputs
    lark = _Lark(tokenizer)
    if outputs.json is not None:
        answer = f"%json {outputs.json}"
    elif outputs.regex is not None:
        answer = f"/{llguidance.regex_to_lark(outputs.regex)}/"
    else:
        answer = " | ".join(json.dumps(text, ensure_ascii=False) for text in outputs.choice or ())
    if names.reasoning == "gpt_oss":
        header = lark.text(CHANNEL, "final", MESSAGE)
        return lark.grammar(_after_reasoning(lark, names, prompt, f"{header} {lark.rule(answer)}"))
    return lark.grammar(_after_reasoning(lark, names, prompt, lark.rule(answer)))


def _after_reasoning(lark: _Lark, names: ParserNames, prompt: str, answer: str) -> str:
    """Return an expression for an answer after optional reasoning."""
    if names.reasoning == "gpt_oss":
        analysis = f"{lark.text(CHANNEL, 'analysis', MESSAGE)} {lark.up_to(END)} {lark.text(START, 'assistant')}"
        return f"({analysis})? {answer}"
    if names.reasoning is None:
        return answer
    start, end = TAGS[names.reasoning]
    if prompt.rstrip().endswith(end):
        return answer
    reasoning = lark.up_to(end) + (' ("\\n")*' if names.reasoning == "think" else "")
    if starts_in_reasoning(prompt):
        return f"{reasoning} {answer}"
    return f"({lark.text(start)} {reasoning})? {answer}"


def _call(lark: _Lark, form: type[ToolCallParser], function: Mapping[str, Any]) -> str:
    """Return an expression for a call of a function."""
    name, schema = function["name"], function.get("parameters")
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"tools: expected parameters of {name} to be the schema of an object")
    schema = {**schema, "type": "object"}
    if form.quote is not None:
        arguments = _QuotedValues(lark, schema, form.quote).expression(schema)
    elif form.parameter is not None:
        arguments = _values(lark, schema, form.parameter, form.after_value)
    else:
        arguments = _json(lark, schema)
    return lark.rule(f"{lark.text(form.head.replace('{name}', name))} {arguments} {lark.text(form.tail)}")


def _json(lark: _Lark, schema: Mapping[str, Any] | bool) -> str:
    """Return an expression for JSON that matches a schema."""
    given = {"x-guidance": _COMPACT, **schema} if isinstance(schema, Mapping) else schema
    return lark.rule(f"%json {json.dumps(given)}")


def _values(lark: _Lark, schema: Mapping[str, Any], parameter: str, end: str) -> str:
    """Return an expression for arguments whose texts have no quotation marks.

    Args:
      lark: the grammar.
      schema: JSON schema of the arguments.
      parameter, end: `ToolCallParser.parameter` and `ToolCallParser.after_value`.
    """
    names = schema.get("required")
    required = names if isinstance(names, list) else []
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    entries = []
    for key, value in properties_of(schema).items():
        start = lark.text(parameter.replace("{name}", key).replace("{is_text}", json.dumps(is_text(value))))
        if is_text(value):
            entry = f"{start} {_text(lark, value, end)}"
        else:
            whole = {**definitions, **value} if isinstance(value, Mapping) else value
            entry = f"{start} {_json(lark, whole)} {lark.text(end)}"
        entries.append(lark.rule(entry) + ("" if key in required else "?"))
    return " ".join(entries)


class _QuotedValues:
    """Expressions for JSON values with a marker instead of quotation marks, and without quotation marks around keys.

    Args:
      lark: the grammar.
      root: the schema that references refer to.
      quote: `ToolCallParser.quote`.
    """

    def __init__(self, lark: _Lark, root: Mapping[str, Any], quote: str):
        self._lark, self._root, self._quote = lark, root, quote
        self._definitions: dict[object, str] = {}  # names of rules
        self._pending: list[tuple[str, Any]] = []  # rules of definitions that are not in the grammar yet

    def expression(self, schema: Any) -> str:
        """Return an expression for a value that matches a schema.

        Raises:
          NotImplementedError: the schema has no grammar.
        """
        result = self._value(schema)
        while self._pending:  # chains of references may be longer than Python's limit of recursion
            name, definition = self._pending.pop()
            self._lark.rule(self._value(definition), name=name)
        return result

    def _value(self, schema: Any) -> str:
        schema = {} if schema is True else schema
        if schema is False:
            raise _without_grammar("the JSON schema false")
        if not isinstance(schema, Mapping):
            raise ValueError(f"tools: expected a JSON schema, got {schema!r:.100}")
        kind = schema.get("type", "object" if "properties" in schema else None)
        without_grammar = _WITHOUT_GRAMMAR[None] | _WITHOUT_GRAMMAR.get(kind if isinstance(kind, str) else None, set())
        if unsupported := without_grammar.intersection(schema):
            raise _without_grammar(f"the keyword {min(unsupported)} of a JSON schema")
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in schema:
                if not _ANNOTATIONS.issuperset(schema.keys() - {name}):
                    raise _without_grammar(f"a JSON schema with {name} and other keywords")
                if name == "$ref":
                    return self._definition(schema[name])
                schemas = _entries(schema, name)
                if name == "allOf" and len(schemas) > 1:
                    raise _without_grammar("a JSON schema with several entries of allOf")
                return f"({' | '.join([self._value(one) for one in schemas])})"
        if "const" in schema or "enum" in schema:
            choices = [schema["const"]] if "const" in schema else _entries(schema, "enum")
            return f"({' | '.join([self._lark.text(self._written(choice)) for choice in choices])})"
        match kind:
            case "string":
                return f"{self._lark.text(self._quote)} {_text(self._lark, schema, self._quote)}"
            case "integer" | "number" | "boolean" | "null":
                return _json(self._lark, schema)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
            case list() if all(isinstance(one, str) for one in kind):
                kinds = dict.fromkeys(_entries(schema, "type"))
                return f"({' | '.join([self._value({**schema, 'type': one}) for one in kinds])})"
            case None if _ANNOTATIONS.issuperset(schema):
                return self._shared(_ANY_VALUE, {"type": ["string", "number", "boolean", "null", "array", "object"]})
        raise _without_grammar(f"a JSON schema with the type {kind!r:.100}")

    def _definition(self, pointer: Any) -> str:
        """Return the name of the rule of a definition."""
        match pointer.split("/") if isinstance(pointer, str) else []:
            case ["#", "$defs" | "definitions" as place, name] if name in _mapping(self._root.get(place)):
                return self._shared(pointer, self._root[place][name])
        raise _without_grammar(f"the reference {pointer!r:.100} of a JSON schema")

    def _shared(self, key: object, schema: Any) -> str:
        """Return the name of the only rule for a schema, which `key` identifies."""
        if key not in self._definitions:
            self._definitions[key] = self._lark.new_name()
            self._pending.append((self._definitions[key], schema))
        return self._definitions[key]

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise ValueError("tools: minItems, maxItems: expected integers")
        if most is not None and most < least:
            raise ValueError(f"tools: maxItems: expected at least minItems = {least}, got {most}")
        if most is not None and most <= 0:
            return '"[]"'
        item = self._lark.rule(self._value(schema.get("items", True)))
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}' if most != 1 else ""
        return f'"[" ({item} {more}){"" if least > 0 else "?"} "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        names, properties = schema.get("required"), properties_of(schema)
        required = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        if unknown := required - properties.keys():
            raise _without_grammar(f"the required name {min(unknown)!r:.100}, which is not in properties")
        if "properties" not in schema:
            others = schema.get("additionalProperties", True)
            if others is False:
                return '"{}"'
            entry = self._lark.rule(f'{_FREE_KEY} ":" {self._value(others)}')
            return f'"{{" ({entry} ("," {entry})*)? "}}"'
        firsts, rest = ['""'], '""'  # what may follow the brace, and what may follow an earlier property
        for key in reversed(_sorted_keys(properties)):
            entry = self._lark.rule(f"{self._lark.text(f'{_checked_key(key)}:')} {self._value(properties[key])}")
            firsts = [*([] if key in required else firsts), f"{entry} {rest}"]
            rest = self._lark.rule(f'("," {entry}){"" if key in required else "?"} {rest}')
        return f'"{{" ({" | ".join(firsts)}) "}}"'

    def _written(self, value: Any) -> str:
        """Return a value as the model writes it."""
        match value:
            case str():
                return f"{self._quote}{value}{self._quote}"
            case list():
                return f"[{','.join([self._written(one) for one in value])}]"
            case Mapping():
                entries = [f"{_checked_key(key)}:{self._written(value[key])}" for key in _sorted_keys(value)]
                return f"{{{','.join(entries)}}}"
        return json.dumps(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _entries(schema: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(schema[name], list) or not schema[name]:
        raise ValueError(f"tools: {name}: expected a list with an entry, got {schema[name]!r:.100}")
    return schema[name]


def _sorted_keys(value: Mapping[str, Any]) -> list[str]:
    """Return the names of an object in the order in which the model writes them: that of Jinja's `dictsort`."""
    return sorted(value, key=str.lower)


def _checked_key(key: str) -> str:
    if len(key) > MAX_NAME:
        raise _without_grammar(f"a name of more than {MAX_NAME} characters")
    if not _KEY.fullmatch(key):
        raise _without_grammar(f"the name {key!r:.100}, which is not written between quotation marks")
    return key


def _without_grammar(what: str) -> NotImplementedError:
    return NotImplementedError(f"tools: the format of the model's tool calls has no grammar for {what}")


def _text(lark: _Lark, schema: Mapping[str, Any], end: str) -> str:
    """Return an expression for a string without quotation marks, and the marker after it."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices:
        return f"({' | '.join(lark.text(str(c)) or '""' for c in choices)}) {lark.text(end)}"
    if isinstance(pattern := schema.get("pattern"), str):
        before, after = ("" if s else _ANY_TEXT for s in (pattern.startswith("^"), pattern.endswith("$")))
        body = llguidance.regex_to_lark(pattern.removeprefix("^").removesuffix("$"), "dw")
        return lark.up_to(end, f"{before}(?:{body}){after}")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return lark.up_to(end, f"(?s:.{{{least},{most}}})" if least or most != "" else _ANY_TEXT)
