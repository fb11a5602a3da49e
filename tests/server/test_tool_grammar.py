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
from tests.server.test_tool_calls import dsml, glm, harmony, hermes, llama, qwen_coder, v3, v31

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
    if family == "gpt_oss":  # random reasoning would contain the markers that are not special
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
    ],
)
def test_malformed_schemas_raise_no_other_error(vocabulary, family, parameters):
    """The server reports a ValueError to the client."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with contextlib.suppress(ValueError):
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
