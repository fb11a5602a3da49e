"""Tokenizer directories give the ids and texts of transformers 5.23, or an error that names the file.

scripts/tools/make_tokenizer_goldens.py writes the results of transformers to tokenizer_layouts.json. A layout is the
set of files in a tokenizer directory.
"""

import json
from pathlib import Path

import pytest

from pallas_attn.models.checkpoints.tokenizer import TokenizerError
from scripts.tools.tokenizer_layouts import (
    BYTES,
    LAYOUTS,
    QUESTION,
    SENTENCEPIECE,
    TEXTS,
    added,
    byte_level,
    decoder,
    files,
    gemma,
    sentencepiece,
    typed,
    words,
)

EXPECTED = json.loads(Path(__file__).with_name("tokenizer_layouts.json").read_text(encoding="utf-8"))

EMPTY = ("empty template", "empty template file")
"""Layouts with an empty chat template. Here the text is the prompt, but transformers renders an empty prompt."""


def test_every_layout_has_expected_values():
    assert LAYOUTS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_and_texts_equal_transformers(load_layout, name):
    tokenizer, expected = load_layout(LAYOUTS[name]), EXPECTED[name]
    assert tokenizer.special_tokens == expected["special_tokens"]
    assert [tokenizer.encode(text) for text in TEXTS] == expected["ids"]
    texts = [[tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)] for ids in expected["ids"]]
    assert texts == expected["texts"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_chat_template_equals_transformers(load_layout, name):
    tokenizer, rendered = load_layout(LAYOUTS[name]), EXPECTED[name]["rendered"]
    if rendered is False:
        with pytest.raises(TokenizerError, match="expected a chat template named 'default', got "):
            tokenizer.encode_prompt(QUESTION)
    elif rendered is None or name in EMPTY:
        assert tokenizer.chat_template is None
        assert tokenizer.encode_prompt(QUESTION) == tokenizer.encode(QUESTION)
    else:
        assert tokenizer.render_chat([{"role": "user", "content": QUESTION}]) == rendered
        assert tokenizer.encode_prompt(QUESTION) == tokenizer.encode(rendered, add_special_tokens=False)


HELLO = byte_level()["model"]["vocab"]["hello"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        pytest.param(
            files(byte_level(), {}, added_tokens={"<x>": BYTES + 1}),
            f"added_tokens.json: declares '<x>' with id {BYTES + 1}, but in the tokenizer the token has id {BYTES}",
            id="added_tokens.json leaves a gap",
        ),
        pytest.param(
            files(byte_level(), {}, added_tokens={"hello": 5}),
            f"added_tokens.json: declares 'hello' with id 5, but in the tokenizer the token has id {HELLO}",
            id="added_tokens.json contradicts the vocabulary",
        ),
        pytest.param(
            files(byte_level(added("<x>", BYTES)), {}, added_tokens={"<s>": BYTES}),
            f"added_tokens.json: declares '<s>' with id {BYTES}, but in the tokenizer id {BYTES} belongs to '<x>'",
            id="added_tokens.json contradicts tokenizer.json",
        ),
        pytest.param(
            files(byte_level(), {}, added_tokens={"<s>": BYTES, "<x>": BYTES}),
            f"added_tokens.json: declares '<s>' with id {BYTES}, but in the tokenizer id {BYTES} belongs to '<x>'",
            id="added_tokens.json has an id twice",
        ),
        pytest.param(
            files(byte_level(), {"added_tokens_decoder": decoder(added("hello", BYTES))}),
            f"tokenizer_config.json: declares 'hello' with id {BYTES}, but in the tokenizer the token has id {HELLO}",
            id="added_tokens_decoder contradicts the vocabulary",
        ),
        pytest.param(
            files(byte_level(added("<x>", BYTES)), {"added_tokens_decoder": decoder(added("<x>", BYTES + 4))}),
            f"declares '<x>' with id {BYTES + 4}, but in the tokenizer the token has id {BYTES}",
            id="added_tokens_decoder contradicts tokenizer.json",
        ),
        pytest.param(
            files(byte_level(added("<x>", BYTES + 9)), {}),
            f"tokenizer.json: declares '<x>' with id {BYTES + 9}, but in the tokenizer the token has id {BYTES}",
            id="tokenizer.json contradicts itself",
        ),
        pytest.param(
            files(byte_level(added("<x>", BYTES + 9)), {"added_tokens_decoder": {}}),
            f"tokenizer.json: declares '<x>' with id {BYTES + 9}, but in the tokenizer the token has id {BYTES}",
            id="tokenizer.json contradicts itself, with added_tokens_decoder",
        ),
        pytest.param(
            files(
                sentencepiece(),
                {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": decoder(*SENTENCEPIECE, added("h", 7))},
            ),
            "declares 'h' with id 7, but in the tokenizer the token has id",
            id="LlamaTokenizer",
        ),
    ],
)
def test_contradictory_id_raises(load_layout, layout, message):
    with pytest.raises(TokenizerError) as error:
        load_layout(layout)
    assert message in str(error.value)


def test_ignored_file_may_contradict(load_layout):
    """If the configuration has an added_tokens_decoder, added_tokens.json is ignored, as in transformers."""
    config = {"added_tokens_decoder": decoder(added("<x>", BYTES))}
    assert load_layout(files(byte_level(), config, added_tokens={"<x>": 3})).encode("<x>") == [BYTES]


@pytest.mark.parametrize(
    ("config", "others", "message"),
    [
        ({"bos_token": 3}, {}, "tokenizer_config.json: expected bos_token to be a text or a token, got 3"),
        ({"bos_token": {"content": 3}}, {}, "tokenizer_config.json: expected bos_token to be a text or a token, got"),
        ({"bos_token": {**typed("<s>"), "lstrip": 1}}, {}, "expected bos_token to be a text or a token, got"),
        ({"bos_token": {**typed("<s>"), "strip": True}}, {}, "expected bos_token to be a text or a token, got"),
        ({"additional_special_tokens": "<x>"}, {}, "tokenizer_config.json: expected extra_special_tokens to be a list"),
        ({"extra_special_tokens": [3]}, {}, "expected extra_special_tokens to be a text or a token, got 3"),
        ({"extra_special_tokens": {"a": 3}}, {}, "tokenizer_config.json: expected a to be a text or a token, got 3"),
        ({"extra_special_tokens": {"messages": "<x>"}}, {}, "expected another name of a token than messages"),
        ({"added_tokens_decoder": []}, {}, "expected added_tokens_decoder to be an object, got []"),
        ({"added_tokens_decoder": {"x": added("<x>")}}, {}, "added_tokens_decoder: expected ids, got 'x'"),
        ({"added_tokens_decoder": {"9" * 5000: added("<x>")}}, {}, "added_tokens_decoder: expected ids, got '999"),
        (
            {"added_tokens_decoder": {"5": "<x>"}},
            {},
            "expected added_tokens_decoder of 5 to be a text or a token, got '<x>'",
        ),
        ({"added_tokens_decoder": {"5": {}}}, {}, "expected added_tokens_decoder of 5 to be a text or a token, got {}"),
        ({"split_special_tokens": 1}, {}, "expected split_special_tokens to be true or false, got 1"),
        ({"tokenizer_class": 3}, {}, "tokenizer_config.json: expected tokenizer_class to be a text, got 3"),
        ({"tokenizer_class": "CohereTokenizerFast"}, {}, "tokenizer_class CohereTokenizerFast is not supported"),
        ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, {}, "auto_map: the tokenizer is Python code"),
        ({"auto_map": {"AutoTokenizer": [None, "a.B"]}, "tokenizer_class": "Acme"}, {}, "auto_map: the tokenizer is"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, {}, "fast_tokenizer_files: expected only tokenizer.json"),
        ({"chat_template": [{"template": "x"}]}, {}, "expected each chat_template to have a name, got {'template'"),
        ({"chat_template": {"default": 3}}, {}, "expected chat_template to be a text, got int"),
        ({}, {"special_tokens_map": {"bos_token": []}}, "special_tokens_map.json: expected bos_token to be a text or"),
        ({}, {"special_tokens_map": []}, "special_tokens_map.json: expected a JSON object"),
        ({}, {"added_tokens": []}, "added_tokens.json: expected a JSON object"),
        ({}, {"added_tokens": {"<x>": "5"}}, "added_tokens.json: expected ids by token, got {'<x>': '5'}"),
        ({}, {"added_tokens": {"<x>": -1}}, "added_tokens.json: expected ids by token, got {'<x>': -1}"),
        ({}, {"added_tokens": {"<x>": True}}, "added_tokens.json: expected ids by token, got {'<x>': True}"),
    ],
)
def test_malformed_file_raises(load_layout, config, others, message):
    with pytest.raises(TokenizerError) as error:
        load_layout(files(byte_level(), config, **others))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_class_for_bpe_with_another_model_raises(load_layout):
    with pytest.raises(TokenizerError, match="expected a BPE model for LlamaTokenizer, got WordLevel"):
        load_layout(files(words(), {"tokenizer_class": "LlamaTokenizer"}))


def test_gemma_without_unknown_token_raises(load_layout):
    """Without this token, characters outside the vocabulary would be left out of the prompt."""
    with pytest.raises(TokenizerError, match="unk_token: expected a token for GemmaTokenizer, got null"):
        load_layout(files(gemma(), {"tokenizer_class": "GemmaTokenizer", "unk_token": None}))


@pytest.mark.parametrize(
    "config", [{"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "Qwen2Tokenizer"}]
)
def test_known_class_needs_no_code(load_layout, config):
    """A directory with a known tokenizer class is loaded without its code (auto_map), as in transformers."""
    load_layout(files(byte_level(), {**config, "auto_map": {"AutoTokenizer": ["a.B", None]}}))


def test_object_without_type_is_a_token(load_layout):
    """An object without "__type" is read as a token, because some directories have such objects.

    transformers 5 rejects these directories.
    """
    tokenizer = load_layout(files(byte_level(), {"bos_token": {"content": "<s>", "rstrip": True}}))
    assert tokenizer.special_tokens == {"bos_token": "<s>"}
    assert tokenizer.encode("<s> hello") == [BYTES, HELLO]


def test_template_that_renders_nothing_raises(load_layout):
    tokenizer = load_layout(files(byte_level(), {"chat_template": "{{ '' }}"}))
    with pytest.raises(TokenizerError, match="tokenizer_config.json: the chat template renders an empty prompt"):
        tokenizer.encode_prompt("hello")


def test_template_folder_without_default_still_decodes(load_layout):
    tokenizer = load_layout({**files(byte_level()), "additional_chat_templates/rag.jinja": "x"})
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
