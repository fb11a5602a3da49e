"""`tool_grammar` and `answer_grammar`: generated texts are calls with arguments that match the schema of the tool."""

import contextlib
import json
import random

import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_tokenizer
from pallas_attn.models.checkpoints import tokenizer as checkpoints_tokenizer
from pallas_attn.models.engine import StructuredOutputs
from pallas_attn.models.llm.token_filters import GrammarFilter, GrammarTokenizer
from pallas_attn.models.server.formats import ParserNames
from pallas_attn.models.server.reasoning import reasoning_parser
from pallas_attn.models.server.tool_calls import tool_call_parser
from pallas_attn.models.server.tool_grammar import answer_grammar, tool_grammar
from scripts.tools.tokenizer_layouts import BYTES, added, byte_level, files, write
from tests.models.text_process_case import OwnProcess
from tests.server.parser_case import CLOCK, calls_of, reasoning_of
from tests.server.test_tool_calls import dsml, gemma, glm, harmony, hermes, llama, qwen_coder, v3, v31

BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "class": {"type": "string", "enum": ["first", "second"]},
                "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
                "note": {"type": "string", "maxLength": 3},
                "seats": {"type": "array", "items": {"$ref": "#/$defs/seat"}, "minItems": 1, "maxItems": 2},
            },
            "required": ["class", "code", "seats"],
            "additionalProperties": False,
            "$defs": {"seat": {"type": "integer", "minimum": 1, "maximum": 99}},
        },
    },
}
ARGUMENTS = '{"class": "second", "code": "AB1", "note": "x", "seats": [3, 14]}'
TOOLS = [BOOK, CLOCK]

MARKERS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "｜DSML｜",
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
]
EOS = BYTES
NAMES = {
    "hermes": ParserNames("hermes", "think"),
    "llama3_json": ParserNames("llama3_json", None),
    "deepseek_v3": ParserNames("deepseek_v3", "think"),
    "deepseek_v31": ParserNames("deepseek_v31", "think"),
    "glm": ParserNames("glm", "think"),
    "qwen3_coder": ParserNames("qwen3_coder", None),
    "deepseek_v32": ParserNames("deepseek_v32", "think"),
    "deepseek_v4": ParserNames("deepseek_v4", "think"),
    "gemma4": ParserNames("gemma4", "gemma4"),
    "gpt_oss": ParserNames("gpt_oss", "gpt_oss"),
}
VALUES = [("class", "second"), ("code", "AB1"), ("note", "x"), ("seats", "[3, 14]")]
GLM_BOOK = glm("book", *VALUES)
DSML_CALLS = [("book", [(key, "false" if key == "seats" else "true", value) for key, value in VALUES]), ("clock", [])]
TEXTS = {
    "hermes": hermes("book", ARGUMENTS) + "\n" + hermes("clock", "{}"),
    "llama3_json": llama("book", ARGUMENTS),
    "deepseek_v3": v3(("book", ARGUMENTS), ("clock", "{}")).removesuffix("<｜end▁of▁sentence｜>"),
    "deepseek_v31": v31(("book", ARGUMENTS), ("clock", "{}")),
    "glm": GLM_BOOK + glm("clock"),
    "qwen3_coder": qwen_coder("book", *VALUES) + "\n" + qwen_coder("clock"),
    "deepseek_v32": dsml(*DSML_CALLS),
    "deepseek_v4": dsml(*DSML_CALLS, block="tool_calls"),
    "gemma4": gemma("book", json.loads(ARGUMENTS)) + gemma("clock", {}),
    "gpt_oss": harmony("book", ARGUMENTS).removesuffix("<|call|>"),
}
"""Texts that models of each format generate."""


@pytest.fixture(scope="module", params=[True, False], ids=["special", "ordinary"])
def vocabulary(request, tmp_path_factory):
    """A tokenizer whose markers are special tokens or ordinary tokens, and its vocabulary."""
    folder = tmp_path_factory.mktemp("tokenizer")
    markers = [added(text, EOS + 1 + i, special=request.param) for i, text in enumerate(MARKERS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints_tokenizer, "_Process", OwnProcess)
        write(files(byte_level(added("</s>", EOS), *markers)), folder)
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        yield tokenizer, GrammarTokenizer(tokenizer, EOS + 1 + len(MARKERS), [EOS])


def accepts(vocabulary, outputs, text):
    """Return whether a grammar allows each token of a text, and then its end."""
    tokenizer, grammars = vocabulary
    grammar, ids = GrammarFilter(grammars, outputs), [*tokenizer.encode(text, add_special_tokens=False), EOS]
    return all(_allowed(grammar, ids[:i])[token] for i, token in enumerate(ids))


def _allowed(grammar, ids):
    return np.unpackbits(grammar.allowed(ids).view(np.uint8), bitorder="little")


def walk(vocabulary, outputs, rng, limit=400):
    """Return a random text of a grammar; None if it is too long."""
    tokenizer, grammars = vocabulary
    grammar, ids = GrammarFilter(grammars, outputs), []
    while len(ids) < limit:
        allowed = set(np.flatnonzero(_allowed(grammar, ids)).tolist())
        assert grammar.error is None
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return tokenizer.decode(ids, skip_special_tokens=False)
        allowed -= {EOS}
        markers = [token for token in allowed if token > EOS]
        if markers and rng.random() < 0.3:  # otherwise reasoning and strings would be long
            allowed = markers
        ids.append(rng.choice(sorted(allowed)))
    return None


def call_texts(names, text, prompt=""):
    """Return the calls of a text, and check that it has no content."""
    parts = reasoning_of(reasoning_parser(names.reasoning, prompt), [text])
    content = "".join(part for kind, part in parts if kind == "content")
    calls = calls_of(tool_call_parser(names.tool_calls, TOOLS), [content])
    assert all(isinstance(call, tuple) for call in calls), text
    return calls


@pytest.mark.parametrize("family", NAMES)
def test_texts_of_the_format_are_allowed(vocabulary, family):
    names, text = NAMES[family], TEXTS[family]
    required = tool_grammar(names, TOOLS, vocabulary[0])
    assert accepts(vocabulary, required, text)
    assert call_texts(names, text)[0] == ("book", ARGUMENTS)
    assert not accepts(vocabulary, required, "hello")
    assert not accepts(vocabulary, required, text.replace("second", "third"))
    assert not accepts(vocabulary, required, text.replace("AB1", "AB"))
    assert not accepts(vocabulary, required, text.replace("14", "140"))
    one = tool_grammar(names, TOOLS, vocabulary[0], name="book")
    single = tool_grammar(names, TOOLS, vocabulary[0], parallel=False)
    has_two = "clock" in text
    assert accepts(vocabulary, one, text) == accepts(vocabulary, single, text) == (not has_two)
    assert not accepts(vocabulary, tool_grammar(names, TOOLS, vocabulary[0], name="clock"), text)


@pytest.mark.parametrize("family", NAMES)
def test_generated_texts_are_calls_of_the_tools(vocabulary, family):
    rng, names, found = random.Random(1), NAMES[family], set()
    if family in ("gemma4", "gpt_oss"):  # random reasoning would contain the markers that are not special
        names = names._replace(reasoning=None)
    for _ in range(12):
        text = walk(vocabulary, tool_grammar(names, TOOLS, vocabulary[0], parallel=False), rng)
        if text is None:
            continue
        ((name, arguments),) = call_texts(names, text)
        given = json.loads(arguments)
        found.add(name)
        if name == "book":
            assert given["class"] in ("first", "second")
            assert len(given["code"]) == 3
            assert len(given.get("note", "")) <= 3
            assert all(1 <= seat <= 99 for seat in given["seats"])
        else:
            assert given == {}
    assert found == {"book", "clock"}


@pytest.mark.parametrize("family", ["hermes", "glm", "deepseek_v31"])
def test_reasoning_precedes_calls(vocabulary, family):
    names, text = NAMES[family], TEXTS[family]
    for prompt, start in [("<think>\n", "hello {}\n</think>\n\n"), ("", "<think>hello</think>"), ("", "")]:
        grammar = tool_grammar(names, TOOLS, vocabulary[0], prompt=prompt)
        assert accepts(vocabulary, grammar, start + text)
        assert call_texts(names, start + text, prompt)
    assert not accepts(vocabulary, tool_grammar(names, TOOLS, vocabulary[0], prompt="<think>\n"), text)
    closed = tool_grammar(names, TOOLS, vocabulary[0], prompt="<think>\n\n</think>\n\n")
    assert not accepts(vocabulary, closed, f"<think>hello</think>{text}")


def test_channel_precedes_calls_of_gemma(vocabulary):
    names, text = NAMES["gemma4"], TEXTS["gemma4"]
    start = "<|turn>model\n"
    opened, closed = f"{start}<|channel>thought\n", f"{start}<|channel>thought\n<channel|>"
    for prompt, before in [
        (opened, "hello {}\n<channel|>"),
        (start, "<|channel>thought\nhello<channel|>"),
        (start, ""),
    ]:
        grammar = tool_grammar(names, TOOLS, vocabulary[0], prompt=prompt)
        assert accepts(vocabulary, grammar, before + text)
        assert not accepts(vocabulary, grammar, before + "hello")
        assert call_texts(names, before + text, prompt)
    assert not accepts(vocabulary, tool_grammar(names, TOOLS, vocabulary[0], prompt=opened), text)
    grammar = tool_grammar(names, TOOLS, vocabulary[0], prompt=closed)
    assert accepts(vocabulary, grammar, text)
    assert not accepts(vocabulary, grammar, f"<|channel>thought\nhello<channel|>{text}")


def test_large_schemas_of_gemma(vocabulary):
    """Neither long chains of references nor lists of types take more than linear time and space."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)} | {"d2000": {"type": "integer"}}
    nested = {"type": "string"}
    for _ in range(30):
        nested = {"type": ["array"] * 10, "items": nested}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}, "b": nested}, "$defs": chain}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert len(str(tool_grammar(NAMES["gemma4"], [tool], vocabulary[0]).grammar)) < 100_000


TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    "properties": {"a": {"$ref": "#/$defs/node"}},
}
GEMMA_SCHEMAS = [
    ({"properties": {}}, [{}], [{"a": 1}]),
    ({}, [{}, {"a": 1, "b_c": {"d": [None, "e", {}]}}], [{"a": float("nan")}]),
    (
        {"additionalProperties": {"type": "integer"}},
        [{}, {"a": 1, "b": 2}, {"a" * 256: 1}],
        [{"a": "b"}, {"a" * 257: 1}],
    ),
    ({"properties": {"a" * 256: True}}, [{"a" * 256: 1}], [{"a": 1}]),
    (
        {"properties": {key: {"type": "integer"} for key in "bca"}},
        [{}, {"b": 1}, {"a": 1, "c": 2}],
        [{"d": 1}, {"a": ""}],
    ),
    (
        {"properties": dict.fromkeys("abc", True), "required": ["b"]},
        [{"b": ""}, {"a": 1, "b": []}],
        [{}, {"a": 1, "c": 2}],
    ),
    (
        {"properties": {"a": {"type": "array", "items": {"type": "string"}}}},
        [{"a": []}, {"a": ["b", "", "}]"]}],
        [{"a": [1]}],
    ),
    (
        {"properties": {"a": {"type": "array", "minItems": 2, "maxItems": 3}}},
        [{"a": [1, 2]}, {"a": [1, "", []]}],
        [{"a": [1]}, {"a": [1] * 4}],
    ),
    ({"properties": {"a": {"type": "array", "maxItems": 0}}}, [{"a": []}], [{"a": [1]}]),
    ({"properties": {"a": {"type": "array", "maxItems": 1}}}, [{"a": []}, {"a": [1]}], [{"a": [1, 1]}]),
    ({"properties": {"a": {"type": "array", "minItems": 1}}}, [{"a": [1]}, {"a": [1] * 5}], [{"a": []}]),
    (
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}}},
        [{"a": "b"}, {"a": None}],
        [{"a": 1}],
    ),
    ({"properties": {"a": {"type": ["number", "boolean"]}}}, [{"a": -1.5}, {"a": True}], [{"a": "b"}]),
    (
        {"properties": {"a": {"enum": ["b", 1, None, [2, {"c": ""}]]}}},
        [{"a": "b"}, {"a": None}, {"a": [2, {"c": ""}]}],
        [{"a": "c"}],
    ),
    ({"properties": {"a": {"const": {"B": 1, "a": 2}}, "B": True}}, [{"a": {"B": 1, "a": 2}, "B": 1}], [{"a": 1}]),
    ({"properties": {"a": {"allOf": [{"const": True}]}}}, [{"a": True}], [{"a": False}]),
    (
        {"properties": {"a": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}}},
        [{"a": {"b": 1}}],
        [{"a": {}}, {"a": 1}],
    ),
    (TREE, [{"a": {"next": {"next": {}}}}], [{"a": {"next": 1}}]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), GEMMA_SCHEMAS)
def test_arguments_of_gemma_match_the_schema(vocabulary, schema, right, wrong):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar = tool_grammar(NAMES["gemma4"], [tool], vocabulary[0])
    for arguments in right:
        assert accepts(vocabulary, grammar, gemma("f", arguments)), arguments
    for arguments in wrong:
        assert not accepts(vocabulary, grammar, gemma("f", arguments)), arguments


@pytest.mark.parametrize(
    ("schema", "error", "message"),
    [
        ({"uniqueItems": True, "type": "array"}, NotImplementedError, "the keyword uniqueItems of a JSON schema"),
        ({"not": {}}, NotImplementedError, "the keyword not of a JSON schema"),
        ({"$ref": ""}, NotImplementedError, "the reference '' of a JSON schema"),
        ({"$ref": "#/a"}, NotImplementedError, "the reference '#/a' of a JSON schema"),
        ({"$ref": "#/$defs/a"}, NotImplementedError, "the reference '#/\\$defs/a' of a JSON schema"),
        ({"anyOf": [{}], "type": "string"}, NotImplementedError, "a JSON schema with anyOf and other keywords"),
        ({"allOf": [{}, {}]}, NotImplementedError, "a JSON schema with several entries of allOf"),
        ({"minimum": 1}, NotImplementedError, "a JSON schema with the type None"),
        (
            {"properties": {"a:b": {}}},
            NotImplementedError,
            "the name 'a:b', which is not written between quotation marks",
        ),
        ({"const": {"}": 1}}, NotImplementedError, "the name '}', which is"),
        (
            {"properties": {"b": True}, "required": ["b", "c"]},
            NotImplementedError,
            "the required name 'c', which is not in properties",
        ),
        (
            {"type": "object", "required": ["c"]},
            NotImplementedError,
            "the required name 'c', which is not in properties",
        ),
        ({"properties": {"b" * 257: True}}, NotImplementedError, "a name of more than 256 characters"),
        ({"const": {"b" * 257: 1}}, NotImplementedError, "a name of more than 256 characters"),
        (False, NotImplementedError, "the JSON schema false"),
        (3, ValueError, "expected a JSON schema, got 3"),
        ({"anyOf": []}, ValueError, r"anyOf: expected a list with an entry, got \[\]"),
        ({"type": "array", "minItems": "1"}, ValueError, "minItems, maxItems: expected integers"),
        (
            {"type": "array", "minItems": 2, "maxItems": 1},
            ValueError,
            "maxItems: expected at least minItems = 2, got 1",
        ),
    ],
)
def test_schemas_without_a_grammar_in_the_format_of_gemma(vocabulary, schema, error, message):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}, "$defs": 3}}}
    with pytest.raises(error, match=f"^tools: .*{message}"):
        tool_grammar(NAMES["gemma4"], [tool], vocabulary[0])


ANALYSIS = "<|channel|>analysis<|message|>hello<|end|><|start|>assistant"


def test_analysis_precedes_a_call(vocabulary):
    grammar = tool_grammar(NAMES["gpt_oss"], TOOLS, vocabulary[0])
    assert accepts(vocabulary, grammar, ANALYSIS + TEXTS["gpt_oss"])
    assert not accepts(vocabulary, grammar, ANALYSIS + "<|channel|>final<|message|>hello")


@pytest.mark.parametrize(
    ("outputs", "right", "wrong"),
    [
        (StructuredOutputs(json={"type": "array", "items": {"type": "integer"}}), "[1, 2]", "[a]"),
        (StructuredOutputs(regex="[a-z]/[0-9]"), "a/1", "a/b"),
        (StructuredOutputs(choice=["yes", 'n"o']), 'n"o', "maybe"),
    ],
)
def test_answer_in_a_format_after_reasoning(vocabulary, outputs, right, wrong):
    think = answer_grammar(outputs, NAMES["hermes"], vocabulary[0], "<think>\n")
    harmony = answer_grammar(outputs, NAMES["gpt_oss"], vocabulary[0])
    for text, expected in [(right, True), (wrong, False)]:
        assert accepts(vocabulary, think, f"hello\n</think>\n\n{text}") == expected
        assert accepts(vocabulary, harmony, f"{ANALYSIS}<|channel|>final<|message|>{text}") == expected
    assert answer_grammar(outputs, NAMES["llama3_json"], vocabulary[0]) is outputs


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [1], "required": 3},
        {"properties": {"a": {"type": "string", "enum": 3}}},
        {"properties": {"a": {"type": "string", "pattern": 3}, "b": 3}, "required": ["a", 4]},
        {"properties": {"a": {"type": "string", "pattern": "(/\n"}}},
        {"properties": {"a": {"type": "string", "maxLength": "3}/ x: /"}}},
        {"properties": {"a": {"$ref": "#/x"}}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": {"type": [["string"], 3]}}},
        {"properties": {"a": {"anyOf": 3}}},
        {"properties": {"a": {"type": "array", "maxItems": 10**30}}},
    ],
)
def test_malformed_schemas_raise_no_other_error(vocabulary, family, parameters):
    """The server reports ValueError and NotImplementedError to the client."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with contextlib.suppress(ValueError, NotImplementedError):
        GrammarFilter(vocabulary[1], tool_grammar(NAMES[family], [tool], vocabulary[0]))
    assert calls_of(tool_call_parser("glm", [tool]), [glm("f", ("a", "1"))]) in (
        [("f", '{"a": 1}')],
        [("f", '{"a": "1"}')],
    )


def test_refused_arguments(vocabulary):
    tokenizer, _ = vocabulary
    with pytest.raises(ValueError, match=r"tool_choice: expected the name of a tool \(book, clock\), got 'x'"):
        tool_grammar(NAMES["hermes"], TOOLS, tokenizer, name="x")
    with pytest.raises(NotImplementedError, match="tool_choice: the chat template of the model has no known format"):
        tool_grammar(ParserNames(None, None), TOOLS, tokenizer)
    array = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    with pytest.raises(ValueError, match="tools: expected parameters of f to be the schema of an object"):
        tool_grammar(NAMES["hermes"], [array], tokenizer)
