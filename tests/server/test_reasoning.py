"""`reasoning_parser`: reasoning and content of all formats, with the output divided at any position."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.models.server.formats import ParserNames, family_of
from pallas_attn.models.server.reasoning import reasoning_parser
from scripts.tools.chat_layouts import LLAMA, QWEN
from tests.server.parser_case import cuts_of, parts_of, reasoning_of

OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
CHANNEL = "<|turn>model\n<|channel>thought\n"

ANALYSIS = "<|channel|>analysis<|message|>2 + 2.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>4<|return|>"
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"

CASES = {
    "tags": ("think", "", "<think>\na b\n</think>\n\n c\n", [("reasoning", "a b"), ("content", "c\n")]),
    "tag in the prompt": ("think", OPEN, "a\n</think>\nb", [("reasoning", "a"), ("content", "b")]),
    "repeated tag": ("think", OPEN, "<think>\na</think>b", [("reasoning", "a"), ("content", "b")]),
    "closed in the prompt": ("think", CLOSED, " b <think>", [("content", " b <think>")]),
    "no reasoning": ("think", "", "\n<thin", [("content", "\n<thin")]),
    "empty reasoning": ("think", OPEN, "\n</think>\n\nb", [("content", "b")]),
    "unfinished": ("think", OPEN, "a </think", [("reasoning", "a </think")]),
    "ended": ("think", OPEN, "a\n<|im_end|>", [("reasoning", "a")]),
    "later tags": ("think", "", "<think>a</think>b</think>", [("reasoning", "a"), ("content", "b</think>")]),
    "calls": ("think", OPEN, "a</think>\n<tool_call>x", [("reasoning", "a"), ("content", "<tool_call>x")]),
    "none": (None, OPEN, "<think>a</think>", [("content", "<think>a</think>")]),
    "channel": (
        "gemma4",
        "",
        "<|channel>thought\na b\n<channel|>c\n<turn|>",
        [("reasoning", "a b"), ("content", "c\n<turn|>")],
    ),
    "channel: open in the prompt": ("gemma4", CHANNEL, "a\n<channel|>b", [("reasoning", "a"), ("content", "b")]),
    "channel: closed in the prompt": ("gemma4", CHANNEL + "<channel|>", "b", [("content", "b")]),
    "channel: empty": ("gemma4", "", "<|channel>thought\n<channel|>b", [("content", "b")]),
    "channel: no reasoning": ("gemma4", "", "b <|chan", [("content", "b <|chan")]),
    "channel: unfinished": ("gemma4", "", "<|channel>thought\na <chan", [("reasoning", "a <chan")]),
    "channel: ended": ("gemma4", "", "<|channel>thought\na<turn|>", [("reasoning", "a")]),
    "channel: repeated start": (
        "gemma4",
        "",
        "<|channel><|channel>thought\na<channel|>b",
        [("reasoning", "a"), ("content", "b")],
    ),
    "channel: no name": ("gemma4", "", "<|channel>thoughts<channel|>b", [("reasoning", "thoughts"), ("content", "b")]),
    "channel: after content": (
        "gemma4",
        "",
        "<|channel>thought\na\n<channel|>b<|channel>thought\nc\n<channel|><channel|>",
        [("reasoning", "a"), ("content", "b"), ("reasoning", "\nc")],
    ),
    "channel: call": (
        "gemma4",
        "",
        "<|channel>thought\na\n<channel|><|tool_call>call:f{}<tool_call|>",
        [("reasoning", "a"), ("content", "<|tool_call>call:f{}<tool_call|>")],
    ),
    "channel: call before the end": (
        "gemma4",
        "",
        "<|channel>thought\na <|tool_call>call:f{}<tool_call|>",
        [("reasoning", "a"), ("content", "<|tool_call>call:f{}<tool_call|>")],
    ),
    "harmony": ("gpt_oss", "", ANALYSIS + FINAL, [("reasoning", "2 + 2."), ("content", FINAL)]),
    "harmony call": ("gpt_oss", "", ANALYSIS + HARMONY_CALL, [("reasoning", "2 + 2."), ("content", HARMONY_CALL)]),
    "harmony without end": (
        "gpt_oss",
        "",
        ANALYSIS.removesuffix("<|end|>") + FINAL + ANALYSIS.removesuffix("<|end|>"),
        [("reasoning", "2 + 2."), ("content", FINAL), ("reasoning", "2 + 2.")],
    ),
    "harmony call in the analysis channel": (
        "gpt_oss",
        "",
        "<|channel|>analysis to=functions.f<|message|>{}<|call|>",
        [("content", "<|channel|>analysis to=functions.f<|message|>{}<|call|>")],
    ),
    "harmony without markers": ("gpt_oss", "", "hello <|end", [("content", "hello <|end")]),
}


@pytest.mark.parametrize("case", CASES)
def test_reasoning_and_content(case):
    family, prompt, text, expected = CASES[case]
    for parts in [text], [*text], [text[:7], text[7:]]:
        assert reasoning_of(reasoning_parser(family, prompt), parts) == expected


MARKERS = [
    *("<think>", "</think>", "<|im_end|>", "<", "\n", " ", "a", "to=functions.f", "analysis", "final"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "assistant"),
    *("<|channel>", "thought\n", "thought", "<channel|>", "<|tool_call>", "<turn|>"),
]


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_division_of_the_text_has_no_effect(data):
    text = "".join(data.draw(st.lists(st.sampled_from(MARKERS), max_size=12)))
    family = data.draw(st.sampled_from(["think", "gemma4", "gpt_oss", None]))
    prompt = data.draw(st.sampled_from([OPEN, CLOSED]))
    whole = reasoning_of(reasoning_parser(family, prompt), [text])
    assert reasoning_of(reasoning_parser(family, prompt), [*text]) == whole
    assert reasoning_of(reasoning_parser(family, prompt), parts_of(text, data.draw(cuts_of(text)))) == whole


def test_text_is_returned_as_soon_as_it_is_certain():
    parser = reasoning_parser("think", OPEN)
    assert parser.feed("ab <") == [("reasoning", "ab")]
    assert parser.feed("/th") == []
    assert parser.feed("e ") == [("reasoning", " </the")]
    assert parser.feed("</think>\n") == []
    assert parser.feed("c <") == [("content", "c <")]


DEEPSEEK = "{{'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' %s}}<think>"


@pytest.mark.parametrize(
    ("model_type", "template", "expected"),
    [
        ("qwen3", QWEN + "<tool_call>", ("hermes", "think")),
        ("qwen3", "<tool_call><function=f>", (None, None)),
        ("qwen3_moe", "<tool_call>\n<function=f>\n<parameter=p>\n", ("qwen3_coder", None)),
        ("deepseek_v32", "<｜DSML｜function_calls><｜DSML｜invoke></think>", ("deepseek_v32", "think")),
        ("deepseek_v4", "<｜DSML｜tool_calls><｜DSML｜invoke></think>", ("deepseek_v4", "think")),
        ("llama", LLAMA, ("llama3_json", None)),
        ("llama", "{{ messages }}", (None, None)),
        ("deepseek_v3", DEEPSEEK % "+ '```json'", ("deepseek_v3", "think")),
        ("deepseek_v3", DEEPSEEK % "", ("deepseek_v31", "think")),
        ("glm_moe_dsa", "<tool_call>{{ name }}<arg_key></think>", ("glm", "think")),
        ("gpt_oss", "<|channel|>analysis", ("gpt_oss", "gpt_oss")),
        ("gemma4", "<|channel>thought<channel|><|tool_call>call:{{ name }}", ("gemma4", "gemma4")),
        ("gemma4", "<|turn>{{ role }}", (None, None)),
        ("qwen3", None, (None, None)),
    ],
)
def test_family_of_a_model(model_type, template, expected):
    assert family_of(model_type, template) == ParserNames(*expected)


def test_unknown_family():
    with pytest.raises(ValueError, match="family: expected think, gemma4, gpt_oss or None, got 'x'"):
        reasoning_parser("x")
