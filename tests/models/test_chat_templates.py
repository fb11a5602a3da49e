"""Rendered chats equal the texts of transformers 5.23: system prompts, turns, tools and variables of templates.

scripts/tools/make_tokenizer_goldens.py writes the results of transformers to chat_templates.json.
"""

import json
from pathlib import Path

import pytest

from pallas_attn.models.checkpoints import load_tokenizer
from pallas_attn.models.checkpoints import tokenizer as checkpoints_tokenizer
from pallas_attn.models.checkpoints.tokenizer import TokenizerError
from scripts.tools.chat_layouts import ANSWER, CHATS, HELLO, SYSTEM, TEMPLATES, WEATHER
from scripts.tools.tokenizer_layouts import write
from tests.models.text_process_case import OwnProcess

EXPECTED = json.loads(Path(__file__).with_name("chat_templates.json").read_text(encoding="utf-8"))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that writes a directory of `TEMPLATES` and loads the tokenizer."""
    monkeypatch.setattr(checkpoints_tokenizer, "_Process", OwnProcess)

    def load(name):
        write(TEMPLATES[name], tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        return tokenizer

    return load


def test_every_chat_has_an_expected_text():
    assert {name: set(chats) for name, chats in EXPECTED.items()} == {name: {*CHATS} for name in TEMPLATES}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_chats_equal_transformers(load, name):
    tokenizer = load(name)
    for chat, arguments in CHATS.items():
        expected = EXPECTED[name][chat]
        if expected is False:
            with pytest.raises(TokenizerError):
                tokenizer.render_chat(**arguments)
            continue
        assert tokenizer.render_chat(**arguments) == expected, chat
        assert tokenizer.encode_chat(**arguments) == tokenizer.encode(expected, add_special_tokens=False)


def test_named_template(load):
    tokenizer = load("template of tools")
    chat = {"messages": [SYSTEM, HELLO]}
    expected = EXPECTED["template of tools"]
    assert tokenizer.render_chat([HELLO], chat_template="default") == expected["one message"]
    assert tokenizer.render_chat(**chat, chat_template="tool_use", tools=[WEATHER]) == expected["tools"]


def test_error_of_the_template_is_reported(load):
    with pytest.raises(TokenizerError, match="cannot render the messages: Conversation roles must alternate"):
        load("alternating roles").render_chat([SYSTEM, HELLO])
    with pytest.raises(TokenizerError, match="^chat_template: the chat template cannot render the messages: "):
        load("Qwen").render_chat([HELLO], chat_template="{{ raise_exception('no') }}")
    with pytest.raises(TokenizerError, match="^chat_template: "):
        load("Qwen").render_chat([HELLO], chat_template="{% if %}")


def test_directory_without_template(load):
    with pytest.raises(TokenizerError, match="the model has no chat template; give one as chat_template"):
        load("no template").render_chat([HELLO])


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": "hello"}, "messages: expected a list of objects, got 'hello'"),
        ({"messages": ANSWER}, "messages: expected a list of objects, got {'content'"),
        ({"messages": []}, "messages: expected at least one message, got none"),
        ({"messages": [HELLO, "hi"]}, "messages: expected a list of objects, got 'hi' as entry 1"),
        ({"messages": [HELLO], "tools": [len]}, "tools: expected a list of objects, got <built-in function len> as"),
        ({"messages": [HELLO], "tools": WEATHER}, "tools: expected a list of objects, got {'function'"),
        ({"messages": [HELLO], "day": {1, 2}}, "expected JSON values: Object of type set is not JSON serializable"),
        ({"messages": [HELLO], "chat_template": 3}, "chat_template: expected a str or None, got 3"),
    ],
)
def test_invalid_argument_raises(load, arguments, message):
    with pytest.raises(ValueError) as error:
        load("Qwen").render_chat(**arguments)
    assert message in str(error.value)
