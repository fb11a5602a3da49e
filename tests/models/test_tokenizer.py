"""Tokenizer directories made with the tokenizers library: loading, and errors of invalid files."""

import datetime
import gc
import json
import os

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors

from pallas_attn.models.checkpoints import load_tokenizer
from pallas_attn.models.checkpoints.tokenizer import TokenizerError

BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<user>", "<assistant>"
SPECIAL = [BOS, EOS, USER, ASSISTANT]
WORDS = ["[UNK]", *SPECIAL, "a", "page", "of", "the", "cache"]
USER_MESSAGE = {"role": "user", "content": "x"}
IDS = {word: i for i, word in enumerate(WORDS)}

CHAT = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<user>' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<assistant>' }}
{%- endif %}
"""


def words(ids):
    return [WORDS[i] for i in ids]


@pytest.fixture
def save(tmp_path):
    """Return a function that writes a directory with a word tokenizer and loads the tokenizer."""

    def save(config=None, *, starts_with_bos=True, template_file=None):
        core = Core(models.WordLevel(IDS, unk_token="[UNK]"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.decoder = decoders.Fuse()
        core.add_special_tokens(SPECIAL)
        if starts_with_bos:
            core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, IDS[BOS])])
        core.save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if template_file is not None:
            (tmp_path / "chat_template.jinja").write_text(template_file)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        return tokenizer

    return save


def test_directory_without_tokenizer_gives_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_post_processor_adds_first_tokens(save):
    tokenizer = save()
    assert tokenizer.chat_template is None
    assert words(tokenizer.encode_prompt("the cache")) == [BOS, "the", "cache"]


@pytest.mark.parametrize("changed", ["truncation", "padding"])
def test_prompts_are_not_truncated_or_padded(save, tmp_path, changed):
    save(starts_with_bos=False)
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    if changed == "truncation":
        core.enable_truncation(2)
    else:
        core.enable_padding(length=6)
    core.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert words(loaded.encode_prompt("the cache of page")) == ["the", "cache", "of", "page"]


def test_only_the_post_processor_adds_first_tokens(save):
    """First tokens are added only if the post-processor of tokenizer.json adds them.

    transformers 5 also ignores add_bos_token in a directory with tokenizer.json.
    """
    plain = save({"bos_token": BOS, "add_bos_token": True}, starts_with_bos=False)
    assert words(plain.encode_prompt("the cache")) == ["the", "cache"]
    added = save({"bos_token": BOS, "add_bos_token": False})
    assert words(added.encode_prompt("the cache")) == [BOS, "the", "cache"]


@pytest.mark.parametrize("as_object", [False, True])
def test_a_chat_template_wraps_the_prompt(save, as_object):
    def token(text):
        return {"__type": "AddedToken", "content": text, "special": True} if as_object else text

    tokenizer = save({"bos_token": token(BOS), "eos_token": token(EOS), "chat_template": CHAT})
    ids = tokenizer.encode_prompt("a page of the cache")
    assert words(ids) == [BOS, USER, "a", "page", "of", "the", "cache", EOS, ASSISTANT]


def test_default_template_of_several(save):
    several = [{"name": "tool_use", "template": "cache"}, {"name": "default", "template": "a {{ bos_token }}"}]
    assert words(save({"bos_token": BOS, "chat_template": several}).encode_prompt("x")) == ["a", BOS]


def test_template_file_overrides_tokenizer_config(save):
    tokenizer = save({"chat_template": "cache"}, template_file="page of")
    assert words(tokenizer.encode_prompt("x")) == ["page", "of"]


def test_template_helpers(save):
    template = "{% for w in ['a', 'b'] %}{{ w|tojson }}{{ {'<&é': 1}|tojson }}{% break %}{% endfor %}"
    tokenizer = save({"chat_template": template})
    assert tokenizer.render_chat([USER_MESSAGE]) == '"a"{"<&é": 1}'


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ tools is none }} {{ documents is none }} {{ messages|length }}", "True True 1"),
        ("{{ {'b': ['é'], 'a': 1}|tojson(true, none, (',', ':'), true) }}", '{"a":1,"b":["\\u00e9"]}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}the {{ x }}{% endgeneration %} {{ x }}", "the 2 1"),
        ("{% for w in ['a', 'b'] %}{% generation %}{{ w }}{{ loop.index }}{% endgeneration %}{% endfor %}", "a1b2"),
    ],
)
def test_templates_render_as_in_transformers(save, template, text):
    assert save({"chat_template": template}).render_chat([USER_MESSAGE]) == text


def test_template_may_use_date(save):
    """Chat templates may call `strftime_now`, as the template of gpt-oss does."""
    tokenizer = save({"chat_template": "{{ strftime_now('%Y-%m-%d') }}"})
    before, date, after = datetime.date.today(), tokenizer.render_chat([USER_MESSAGE]), datetime.date.today()
    assert before <= datetime.date.fromisoformat(date) <= after


def test_decode_skips_special_tokens_and_unknown_ids(save):
    assert save().decode([IDS[BOS], IDS["page"], IDS["of"], 10**6, IDS[EOS]]) == "pageof"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only system messages') }}", "only system messages"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "cannot render"),
    ],
)
def test_template_failures_raise(save, template, message):
    with pytest.raises(TokenizerError, match=message):
        save({"chat_template": template}).encode_prompt("x")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": "{% if %}"}, "malformed"),
        ({"chat_template": 3}, "expected chat_template to be a text, got int"),
        ({"bos_token": ["<s>"]}, "expected bos_token to be a text"),
    ],
)
def test_malformed_tokenizer_config_raises(save, config, message):
    with pytest.raises(TokenizerError, match=message):
        save(config)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "EOF while parsing"), ("[]", "tokenizer.json: "), ("{}", "tokenizer.json: ")]
)
def test_malformed_tokenizer_json_raises(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_text_process_ignores_ctrl_c_and_ends_with_tokenizer(save):
    tokenizer = save()
    process = tokenizer._process._popen
    assert os.getpgid(process.pid) != os.getpgid(0)
    assert process.poll() is None
    del tokenizer
    gc.collect()
    assert process.poll() is not None


def test_text_process_that_ended_is_started_again(save, monkeypatch):
    tokenizer = save()
    expected = tokenizer.encode("page")
    tokenizer._process._popen.kill()
    tokenizer._process._popen.wait()
    assert tokenizer.encode("page") == expected
    exchange = tokenizer._process._exchange

    def kill(request):
        tokenizer._process._popen.kill()
        return exchange(request)

    monkeypatch.setattr(tokenizer._process, "_exchange", kill)
    with pytest.raises(TokenizerError, match=r"tokenizer.json: the process for it ended with SIGKILL"):
        tokenizer.encode("page")
    with pytest.raises(RuntimeError, match=r"cannot be started again: the process for it ended with SIGKILL"):
        tokenizer.encode("page")
    monkeypatch.undo()
    assert tokenizer.encode("page") == expected


def test_text_process_that_cannot_load_again_is_no_error_of_the_request(save):
    tokenizer = save()
    expected, loading = tokenizer.encode("page"), tokenizer._process._loading
    tokenizer._process._popen.kill()
    tokenizer._process._popen.wait()
    tokenizer._process._loading = loading.replace(b"tokenizer.json", b"missing.json")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot be started again: No such file"):
            tokenizer.encode("page")
    tokenizer._process._loading = loading
    assert tokenizer.encode("page") == expected


def test_template_file_that_is_not_utf8_raises(save, tmp_path):
    save()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match="malformed"):
        load_tokenizer(tmp_path)
