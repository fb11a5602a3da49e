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
    END_THINK,
    MESSAGE,
    START,
    THINK,
    ParserNames,
    Tool,
    is_text,
    properties_of,
)
from pallas_attn.models.server.reasoning import starts_in_reasoning
from pallas_attn.models.server.tool_calls import PARSERS, ToolCallParser

# Spaces as `json.dumps` writes them. With free white space, a model may generate white space without end.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_ANY_TEXT = "(?s:.*)"


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

    def rule(self, expression: str, options: str = "") -> str:
        """Add a rule, and return its name."""
        name = next(self._names)
        self.rules.append(f"{name}{options}: {expression}")
        return name

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
    have the order of the schema.

    Args:
      names: parsers of the model.
      tools: tools of the request.
      tokenizer: tokenizer of the model.
      name: the only function that may be called, once; None for any function.
      parallel: whether several calls are allowed. Llama 3 and gpt-oss make one call per message.
      prompt: the rendered prompt. It may end inside the reasoning.

    Raises:
      ValueError: there is no tool with this name, or its parameters are not the schema of an object.
      NotImplementedError: the format of the model's tool calls is not known.
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
    if names.reasoning is None or prompt.rstrip().endswith(END_THINK):
        return answer
    space = '("\\n")* '
    if starts_in_reasoning(prompt):
        return f"{lark.up_to(END_THINK)} {space}{answer}"
    return f"({lark.text(THINK)} {lark.up_to(END_THINK)} {space})? {answer}"


def _call(lark: _Lark, form: type[ToolCallParser], function: Mapping[str, Any]) -> str:
    """Return an expression for a call of a function."""
    name, schema = function["name"], function.get("parameters")
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"tools: expected parameters of {name} to be the schema of an object")
    schema = {**schema, "type": "object"}
    arguments = (
        _json(lark, schema) if form.parameter is None else _values(lark, schema, form.parameter, form.after_value)
    )
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
