"""`tool_call_parser`: calls and content of all formats, with the output divided at any position."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.models.server.output_text import JsonObject
from pallas_attn.models.server.tool_calls import ContentDelta, ToolCallDelta, tool_call_parser
from tests.server.parser_case import TOOLS, calls_of, cuts_of, parts_of

CITY = '{"city": "Gen\u00e8ve \\" } \\u00e9", "days": [1, -2.5e3]}'
"""Arguments with braces and quotation marks in strings."""


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def v3(*calls: tuple[str, str]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def v31(*calls: tuple[str, str]) -> str:
    texts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def glm(name: str, *values: tuple[str, str], space: str = "") -> str:
    texts = [f"<arg_key>{key}</arg_key>{space}<arg_value>{value}</arg_value>{space}" for key, value in values]
    return f"<tool_call>{name}{space}{''.join(texts)}</tool_call>"


def qwen_coder(name: str, *values: tuple[str, str]) -> str:
    texts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values]
    return f"<tool_call>\n<function={name}>\n{''.join(texts)}</function>\n</tool_call>"


def dsml(*calls: tuple[str, list[tuple[str, str, str]]], block: str = "function_calls") -> str:
    texts = []
    for name, values in calls:
        lines = [f'<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>\n' for k, s, v in values]
        texts.append(f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n')
    return f"<｜DSML｜{block}>\n{''.join(texts)}</｜DSML｜{block}>"


def harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def gemma(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>"


def gemma_value(value: Any) -> str:
    """Return a value as the chat template of Gemma 4 writes it."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma_value(value[key])}" for key in sorted(value, key=str.lower)) + "}"
        case list():
            return f"[{','.join(map(gemma_value, value))}]"
    return json.dumps(value)


TWO = [("weather", CITY), ("clock", "{}")]

CASES = {
    "hermes": ("hermes", f"Hm.\n{hermes('weather', CITY)}\n{hermes('clock', '{}')}<|im_end|>", ["Hm.", *TWO]),
    "hermes: text after a call": ("hermes", hermes("clock", "{}") + "\n\nDone. \n", [("clock", "{}"), "Done. \n"]),
    "hermes: marker in a string": (
        "hermes",
        hermes("clock", '{"a": "</tool_call>"}'),
        [("clock", '{"a": "</tool_call>"}')],
    ),
    "hermes: arguments before the name": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "clock"}</tool_call>',
        [("clock", '{"a": 1}')],
    ),
    "hermes: arguments in a string": (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [("clock", '{"a": 1}')],
    ),
    "hermes: no arguments": ("hermes", '<tool_call>{"name": "clock"}</tool_call>', [("clock", "{}")]),
    "hermes: other entries": (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {}, "id": {"a": "}"}}</tool_call>b',
        [("clock", "{}"), "b"],
    ),
    "hermes: unfinished other entry": (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {}, "id": 12',
        [("clock", "{}")],
    ),
    "hermes: surrogate in arguments in a string": (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        ['{"name": "clock", "arguments": "{\\"a\\": \\"\\ud800\\"}"}'],
    ),
    "hermes: not JSON": ("hermes", "a <tool_call>\nb\n</tool_call> c", ["a \nb\n c"]),
    "hermes: no name": ("hermes", '<tool_call>{"a": 1}</tool_call>', ['{"a": 1}']),
    "hermes: arguments are a list": ("hermes", hermes("clock", "[1]"), ['\n{"name": "clock", "arguments": [1]}\n']),
    "hermes: unfinished name": ("hermes", '<tool_call>{"name": "clo', ['{"name": "clo']),
    "hermes: unfinished arguments": (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {"a": 1',
        [("clock", '{"a": 1')],
    ),
    "hermes: invalid arguments": (
        "hermes",
        f"{hermes('clock', '{"a": NaN}')}{hermes('clock', '{}')}",
        [("clock", '{"a": '), "NaN}}", ("clock", "{}")],
    ),
    "hermes: NaN before the name": (
        "hermes",
        '<tool_call>{"arguments": {"a": NaN}, "name": "clock"}</tool_call>',
        ['{"arguments": {"a": NaN}, "name": "clock"}'],
    ),
    "hermes: surrogate": ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', ['{"name": "\\ud800"}']),
    "llama": ("llama3_json", llama("weather", CITY) + "<|eom_id|>", [("weather", CITY)]),
    "llama: tag": ("llama3_json", "Hm. <|python_tag|>" + llama("weather", CITY), ["Hm.", ("weather", CITY)]),
    "llama: several": ("llama3_json", f"{llama('weather', CITY)}; {llama('clock', '{}')}", TWO),
    "llama: JSON answer": ("llama3_json", llama("other", "{}"), [llama("other", "{}")]),
    "llama: JSON in text": ("llama3_json", "a " + llama("clock", "{}"), ["a " + llama("clock", "{}")]),
    "llama: code": ("llama3_json", '<|python_tag|>search.call(query="a")<|eot_id|>', ['search.call(query="a")']),
    "v3": ("deepseek_v3", "Hm." + v3(*TWO), ["Hm.", *TWO]),
    "v3: text in the place of arguments": ("deepseek_v3", v3(("clock", "now")), ["functionclock\n```json\nnow\n```"]),
    "v3: no separator": ("deepseek_v3", "<｜tool▁call▁begin｜>clock<｜tool▁call▁end｜>!", ["clock!"]),
    "v3: two separators": ("deepseek_v3", v3(("<｜tool▁sep｜>clock", "{}")), ["functionclock\n```json\n{}\n```"]),
    "v31": ("deepseek_v31", "Hm. " + v31(*TWO), ["Hm.", *TWO]),
    "v31: fence": ("deepseek_v31", v31(("clock", "```json\n{}\n```")), [("clock", "{}")]),
    "glm": (
        "glm",
        "Hm.\n" + glm("weather", ("city", 'a "b"\n<c'), ("days", " 3 "), ("other", "[1]")) + glm("clock"),
        ["Hm.", ("weather", '{"city": "a \\"b\\"\\n<c", "days": 3, "other": [1]}'), ("clock", "{}")],
    ),
    "glm: lines": (
        "glm",
        glm("weather", ("city", "1"), ("days", "two"), ("x", "None"), space="\n") + "<|observation|>",
        [("weather", '{"city": "1", "days": "two", "x": "None"}')],
    ),
    "glm: unfinished": (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Par",
        [("weather", '{"city": "Par')],
    ),
    "glm: no name": ("glm", "a<tool_call>\n</tool_call>b", ["a\nb"]),
    "glm: key without value": (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key></tool_call>b",
        [("weather", "{}"), "b"],
    ),
    "glm: text between tags": (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key>a<arg_value>b</arg_value>c</tool_call>",
        [("weather", '{"city": "b"}'), "ac"],
    ),
    "glm: broken key": ("glm", "<tool_call>weather<arg_key>a<arg_key>b", [("weather", ""), "ab"]),
    "qwen coder": (
        "qwen3_coder",
        "Hm.\n"
        + qwen_coder("weather", ("city", 'a "b"\n\n<c></d>'), ("days", "3"), ("other", "[1]"))
        + "\n"
        + qwen_coder("clock")
        + "<|im_end|>",
        ["Hm.", ("weather", '{"city": "a \\"b\\"\\n\\n<c></d>", "days": 3, "other": "[1]"}'), ("clock", "{}")],
    ),
    "qwen coder: line breaks in texts": (
        "qwen3_coder",
        "".join(qwen_coder("weather", ("city", text)) for text in ("", "\n", "a\n\n"))
        + "<tool_call><function=weather><parameter=city>a</parameter></function></tool_call>",
        [("weather", f'{{"city": "{text}"}}') for text in ("", "\\n", "a\\n\\n", "a")],
    ),
    "qwen coder: values that are not texts": (
        "qwen3_coder",
        "".join(qwen_coder("weather", ("days", text)) for text in (" True ", "None", "two", "{\n}")),
        [("weather", f'{{"days": {text}}}') for text in ("true", "null", '"two"', "{\n}")],
    ),
    "qwen coder: unfinished": (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nPar\n",
        [("weather", '{"city": "Par\\n')],
    ),
    "qwen coder: text before a parameter": (
        "qwen3_coder",
        "<tool_call><function=weather>\na\n<parameter=city>\nb\n</parameter></function></tool_call>",
        [("weather", '{"city": "b"}'), "a"],
    ),
    "qwen coder: no function": ("qwen3_coder", "a<tool_call>\nb</tool_call>", ["a\nb"]),
    "qwen coder: no name": ("qwen3_coder", "a<tool_call><function=>b</tool_call>", ["ab"]),
    "qwen coder: tags without a call": ("qwen3_coder", "<function=f>\n</parameter>", ["<function=f>\n</parameter>"]),
    "qwen coder: broken key": ("qwen3_coder", "<tool_call><function=f><parameter=a\n>b", [("f", ""), "a\n>b"]),
    "qwen coder: text in the place of a parameter": ("qwen3_coder", "<tool_call><function=f>b>c", [("f", ""), "b>c"]),
    "v32": (
        "deepseek_v32",
        "Hm.\n\n"
        + dsml(("weather", [("city", "true", 'a "b"\n'), ("days", "false", " 3 "), ("x", "false", "a")]), ("clock", []))
        + "<｜end▁of▁sentence｜>",
        ["Hm.", ("weather", '{"city": "a \\"b\\"\\n", "days": 3, "x": "a"}'), ("clock", "{}")],
    ),
    "v32: without attribute": (
        "deepseek_v32",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜parameter></｜DSML｜invoke>',
        [("f", '{"a": "1"}')],
    ),
    "v32: unfinished": (
        "deepseek_v32",
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">b</d',
        [("f", '{"a": "b</d')],
    ),
    "v32: no name": ("deepseek_v32", 'a<｜DSML｜invoke name="">b', ["ab"]),
    "v4": ("deepseek_v4", "Hm." + dsml(("clock", []), block="tool_calls") + "a", ["Hm.", ("clock", "{}"), "a"]),
    "gemma": (
        "gemma4",
        "Hm.\n" + gemma("weather", json.loads(CITY)) + gemma("clock", {}) + "<|tool_response>",
        ["Hm.", ("weather", json.dumps(json.loads(CITY), ensure_ascii=False)), ("clock", "{}")],
    ),
    "gemma: nested": (
        "gemma4",
        gemma("clock", {"a": {"b": [[], {}, [True, None]], "c": "}]"}, "d": -1.5e3}),
        [("clock", '{"a": {"b": [[], {}, [true, null]], "c": "}]"}, "d": -1500.0}')],
    ),
    "gemma: strings have no escapes": (
        "gemma4",
        '<|tool_call>call:clock{a:<|"|>C:\\n "x" <tool_call|>\n<|"|>}<tool_call|>',
        [("clock", '{"a": "C:\\\\n \\"x\\" <tool_call|>\\n"}')],
    ),
    "gemma: white space": (
        "gemma4",
        '<|tool_call> call:clock{ a : 1 ,\n b: [ <|"|> c<|"|> , true ] }\n<tool_call|> d<turn|>',
        [("clock", '{"a": 1, "b": [" c", true]}'), "d"],
    ),
    "gemma: keys in quotation marks": (
        "gemma4",
        '<|tool_call>call:clock{<|"|>a:b<|"|>:1}<tool_call|>',
        [("clock", '{"a:b": 1}')],
    ),
    "gemma: unfinished string": (
        "gemma4",
        '<|tool_call>call:clock{a:<|"|>b<|',
        [("clock", '{"a": "b<|')],
    ),
    "gemma: unfinished number": ("gemma4", "<|tool_call>call:clock{a:12", [("clock", '{"a": ')]),
    "gemma: unfinished key": ("gemma4", "<|tool_call>call:clock{a:1,b", [("clock", '{"a": 1, ')]),
    "gemma: unfinished, then a marker": (
        "gemma4",
        "<|tool_call>call:clock{a:1<tool_call|>b",
        [("clock", '{"a": 1'), "b"],
    ),
    "gemma: unfinished name": ("gemma4", "<|tool_call>call:clo", ["call:clo"]),
    "gemma: word in the place of a value": (
        "gemma4",
        "<|tool_call>call:clock{a:None}<tool_call|>" + gemma("clock", {}),
        [("clock", '{"a": '), "None}", ("clock", "{}")],
    ),
    "gemma: JSON in the place of arguments": (
        "gemma4",
        '<|tool_call>call:clock{"a": 1}<tool_call|>',
        [("clock", "{"), '"a": 1}'],
    ),
    "gemma: invalid key": ("gemma4", "<|tool_call>call:clock{a\nb:1}<tool_call|>", [("clock", "{"), "a\nb:1}"]),
    "gemma: invalid bracket": ("gemma4", "<|tool_call>call:clock{a:[}]<tool_call|>", [("clock", '{"a": ['), "}]"]),
    "gemma: no call": ("gemma4", "a<|tool_call>b<tool_call|>c", ["abc"]),
    "gemma: no arguments": ("gemma4", "<|tool_call>call:clock<tool_call|>c", ["call:clockc"]),
    "gemma: no name": ("gemma4", "<|tool_call>call:{}<tool_call|>c", ["call:{}c"]),
    "harmony": (
        "gpt_oss",
        f"<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant{harmony('weather', CITY)}",
        ["Hm.", ("weather", CITY)],
    ),
    "harmony: recipient in the header of the role": (
        "gpt_oss",
        f" to=functions.weather<|channel|>commentary json<|message|>{CITY}<|call|>",
        [("weather", CITY)],
    ),
    "harmony: answer": ("gpt_oss", "<|channel|>final<|message|>Hi \n<|return|>", ["Hi \n"]),
    "harmony: other recipient": ("gpt_oss", "<|channel|>commentary to=python<|message|>a<|call|>", ["a"]),
    "harmony: empty arguments": ("gpt_oss", harmony("clock", "\n"), [("clock", "{}")]),
    "harmony: text in the place of arguments": ("gpt_oss", harmony("clock", "now"), ["now"]),
    "harmony: text after arguments": ("gpt_oss", harmony("clock", "{} x") + "<|start|>", [("clock", "{}"), "x"]),
    "harmony: unfinished header": ("gpt_oss", "<|channel|>ana", []),
    "harmony: text in the place of a header": ("gpt_oss", "<|channel|>Hello you<|end|>", ["Hello you"]),
    "harmony: no markers": ("gpt_oss", "go to the", ["go to the"]),
    "none": (None, hermes("clock", "{}"), [hermes("clock", "{}")]),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_and_content(case):
    family, text, expected = CASES[case]
    for parts in [text], [*text], [text[:7], text[7:]]:
        assert calls_of(tool_call_parser(family, TOOLS), parts) == expected
    for item in expected:
        if isinstance(item, tuple) and not any(word in case for word in ("unfinished", "invalid", "broken", "place")):
            assert isinstance(json.loads(item[1]), dict)


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "clock", "arguments": ', '{"arguments": {}, "name": "clock"}'],
    "llama3_json": ["<|python_tag|>", '{"name": "clock", "parameters": ', '{"name": "other", "parameters": ', "; "],
    "deepseek_v3": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "clock\n```json\n", "```"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "clock<｜tool▁sep｜>"),
    ],
    "qwen3_coder": [
        *("<tool_call>", "<function=", "clock>", "weather>\n", "<parameter=", "city>", "days>\n", "\n</parameter>"),
        *("</function>", "</tool_call>", "\n\n", "True"),
    ],
    "deepseek_v32": [
        *(
            "<｜DSML｜function_calls>",
            '<｜DSML｜invoke name="',
            'clock">',
            '<｜DSML｜parameter name="',
            'a" string="true">',
        ),
        *('a" string="false">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
    ],
    "glm": ["<tool_call>clock", "<arg_key>city", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    "gemma4": [
        *("<|tool_call>", "call:", "clock{", "a:", "key", ":", '<|"|>', "<tool_call|>", "<turn|>", "[", "]", ",", " "),
        '<|tool_call>call:clock{a:[<|"|>',
    ],
    "gpt_oss": [
        *("<|channel|>", "commentary", "final", " to=functions.clock", "<|constrain|>json", "<|message|>", "<|call|>"),
        *("<|end|>", "<|start|>assistant"),
    ],
}
COMMON = ["<|im_end|>", "<", "\n", "a", "{", "}", '{"a": "b', '"}', "{}", "1", "\\u00", "tr", "ue", ", ", "go to"]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_division_of_the_text_has_no_effect(data):
    family = data.draw(st.sampled_from([*FRAGMENTS]))
    pieces = st.one_of(st.sampled_from(FRAGMENTS[family]), st.sampled_from(COMMON))
    text = "".join(data.draw(st.lists(pieces, max_size=14)))
    tools = data.draw(st.sampled_from([TOOLS, None]))
    whole = calls_of(tool_call_parser(family, tools), [text])
    assert calls_of(tool_call_parser(family, tools), [*text]) == whole
    assert calls_of(tool_call_parser(family, tools), parts_of(text, data.draw(cuts_of(text)))) == whole


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([*FRAGMENTS, None]), st.text(alphabet='<>|/_ {}"\\:,[]anolcm\n\u00e9\U0001f600', max_size=40))
def test_text_without_markers_is_not_changed(family, text):
    if family == "gpt_oss" and (text.isspace() or "<|call|>" in text):
        return  # white space between messages is removed
    assert calls_of(tool_call_parser(family, TOOLS), [*text]) == ([text] if text else [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.booleans(), st.sampled_from([None, 1]), st.data())
def test_json_arguments_are_unchanged(arguments, ascii_only, indent, data):
    text = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    calls = {
        "hermes": hermes("clock", text),
        "llama3_json": llama("clock", text),
        "deepseek_v3": v3(("clock", text)),
        "deepseek_v31": v31(("clock", text)),
        "gpt_oss": harmony("clock", text),
    }
    family = data.draw(st.sampled_from([*calls]))
    parts = parts_of(calls[family], data.draw(cuts_of(calls[family])))
    assert calls_of(tool_call_parser(family, TOOLS), parts) == [("clock", text)]


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=30), st.integers(), st.sampled_from(["qwen3_coder", "deepseek_v32", "glm"]), st.data())
def test_values_without_quotation_marks_are_unchanged(city, days, family, data):
    calls = {
        "qwen3_coder": qwen_coder("weather", ("city", city), ("days", str(days))),
        "deepseek_v32": dsml(("weather", [("city", "true", city), ("days", "false", str(days))])),
        "glm": glm("weather", ("city", city), ("days", str(days))),
    }
    parts = parts_of(calls[family], data.draw(cuts_of(calls[family])))
    ((name, arguments),) = calls_of(tool_call_parser(family, TOOLS), parts)
    assert (name, json.loads(arguments)) == ("weather", {"city": city, "days": days})


KEYS = st.text("abC_-.$ \u00e9", min_size=1, max_size=6).filter(lambda key: key == key.strip())
GEMMA_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(KEYS, GEMMA_VALUES, max_size=4), st.data())
def test_values_of_gemma_are_unchanged(arguments, data):
    text = gemma("clock", arguments)
    parts = parts_of(text, data.draw(cuts_of(text)))
    ((name, found),) = calls_of(tool_call_parser("gemma4", TOOLS), parts)
    assert (name, json.loads(found)) == ("clock", arguments)
    assert calls_of(tool_call_parser("gemma4", TOOLS), [*text]) == [(name, found)]


@settings(deadline=None, max_examples=80)
@given(st.text(alphabet='{}[]:,"\\u0129-+.eEtruefalsn \n\x01', max_size=25))
def test_json_object_accepts_what_the_json_module_accepts(text):
    text = "{" + text
    found = JsonObject()
    end = found.accept(text)
    prefixes = [text[:i] for i in range(1, len(text) + 1) if _is_json(text[:i])]
    assert found.is_complete == bool(prefixes)
    if prefixes:
        assert text[:end] == prefixes[0]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_deltas_arrive_early():
    parser = tool_call_parser("hermes", TOOLS)
    assert parser.feed("Hi <") == [ContentDelta("Hi")]
    assert parser.feed("b> ") == [ContentDelta(" <b>")]
    assert parser.feed('<tool_call>{"name": "clock", "arguments": ') == []
    first, rest = parser.feed('{"a": "b')
    assert isinstance(first, ToolCallDelta)
    assert first == ToolCallDelta(0, first.id, "clock", "")
    assert rest == ToolCallDelta(0, None, None, '{"a": "b')
    assert parser.feed("c") == [ToolCallDelta(0, None, None, "c")]
    assert parser.feed('"}}') == [ToolCallDelta(0, None, None, '"}')]

    parser = tool_call_parser("gemma4", TOOLS)
    parser.feed('<|tool_call>call:clock{a:<|"|>')
    assert parser.feed('b"<') == [ToolCallDelta(0, None, None, 'b\\"')]

    parser = tool_call_parser("glm", TOOLS)
    parser.feed("<tool_call>weather<arg_key>city</arg_key><arg_value>")
    assert parser.feed('a"<') == [ToolCallDelta(0, None, None, 'a\\"')]


def test_long_outputs_take_linear_time():
    parser = tool_call_parser("hermes", TOOLS)
    text = '<tool_call>{"name": "clock", "arguments": {"a": "' + "b" * 100_000
    assert calls_of(parser, [*text]) == [("clock", text[text.index('{"a"') :])]
    brackets = "[" * 100_000
    assert calls_of(tool_call_parser("gemma4", TOOLS), ["<|tool_call>call:clock{a:", *brackets]) == [
        ("clock", '{"a": ' + brackets)
    ]


def test_unknown_family():
    with pytest.raises(ValueError, match="family: expected one of hermes.* or None, got 'x'"):
        tool_call_parser("x")
