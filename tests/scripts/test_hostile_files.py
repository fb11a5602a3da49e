"""Tests of malicious input files, which try to crash, hang or fill the machine: each causes a one-line error that names
the file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pallas_attn.models.checkpoints import tokenizer as checkpoints_tokenizer
from pallas_attn.models.cli.command_line import StandardOutput, exit_status
from pallas_attn.models.config import json_files
from tests.kit.slow_cases import slow_cases
from tests.scripts.command_lines import GOLDEN, VOCAB_SIZE

type Spoil = Callable[[Path], object]
"""A function of a model's folder that makes one of its files malicious."""

DEEP = 100_000


def config(**entries: Any) -> Spoil:
    return edited("config.json", **entries)


def theta(value: float) -> Spoil:
    return config(rope_parameters={"rope_theta": value})


def edited(name: str, **entries: Any) -> Spoil:
    """Return a `Spoil` that replaces entries of a JSON file."""

    def spoil(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return spoil


def tokenizer(**parts: Any) -> Spoil:
    return edited("tokenizer.json", **parts)


def written(name: str, content: str | bytes) -> Spoil:
    content = content if isinstance(content, bytes) else content.encode()
    return lambda directory: (directory / name).write_bytes(content)


def template(source: str) -> Spoil:
    return written("chat_template.jinja", source)


def pipe(name: str) -> Spoil:
    """Return a `Spoil` that replaces a file by a named pipe without a writer, so that reading it would block."""

    def spoil(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return spoil


SHARD = "model-00001-of-00005.safetensors"


def header(content: Any) -> Spoil:
    """Return a `Spoil` that writes a safetensors file with this header and no tensors."""
    text = (content if isinstance(content, str) else json.dumps(content)).encode()
    return written(SHARD, len(text).to_bytes(8, "little") + text)


def tensor(**entry: Any) -> Spoil:
    return header({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **entry}})


ENTRY = "not a safetensors file: 'a': expected a dtype, a shape and two data_offsets"
FOLDER_TEMPLATE = "additional_chat_templates/default.jinja"
RENDER = "chat_template.jinja: the chat template cannot render the messages: "
MALFORMED = "chat_template.jinja: the chat template is malformed: "
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
EXPLODING = {"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 10_000}

OF_DEEPSEEK: list[tuple[str, Spoil, str]] = [
    # config.json
    ("deep config", written("config.json", '{"a":' * DEEP), "config.json: not JSON: maximum recursion depth"),
    (
        "deeper than messages can show",
        config(rope_scaling=json.loads("[" * 400 + "]" * 400)),
        "config.json: expected JSON of at most 50",
    ),
    ("config in Latin-1", written("config.json", b'{"model_type": "\xe9"}'), "config.json: not JSON: 'utf-8' codec"),
    (
        "config of too many digits",
        written("config.json", '{"a": ' + "9" * 5000 + "}"),
        "config.json: not JSON: Exceeds",
    ),
    ("config that is a pipe", pipe("config.json"), "config.json: not a regular file"),
    ("vast theta", theta(10**400), "config.json: rope_theta: expected at most 1e+30, got 1000"),
    ("infinite theta", theta(float("inf")), "config.json: rope_theta: expected a finite number, got inf"),
    ("no theta", theta(0), "config.json: rope_theta: expected more than 1, got 0"),
    ("theta without a logarithm", theta(1), "config.json: rope_theta: expected more than 1, got 1"),
    ("negative theta", theta(-1e4), "config.json: rope_theta: expected more than 1, got -10000"),
    ("negative eps", config(rms_norm_eps=-1e-6), "config.json: rms_norm_eps: expected at least 0, got -1e-06"),
    ("no scaling", config(routed_scaling_factor=0), "config.json: routed_scaling_factor: expected more than 0, got 0"),
    (
        "vast length",
        config(max_position_embeddings=10**30),
        "config.json: max_position_embeddings: expected at most 100000000, got 1",
    ),
    ("vast width", config(hidden_size=10**30), "config.json: hidden_size: expected at most 1000000, got 10000000"),
    ("vast end", config(eos_token_id=10**30), "config.json: eos_token_id: expected an id or a list of ids, got 1000"),
    ("so many layers", config(num_hidden_layers=300_000_000), "num_hidden_layers: expected at most 10000, got 30"),
    ("so many experts", config(n_routed_experts=10**9), "n_routed_experts: expected at most 100000, got 1000000000"),
    (
        "so many predictions",
        config(num_nextn_predict_layers=10**12),
        "config.json: num_nextn_predict_layers: expected at most 10000, got 1000000000000",
    ),
    (
        "so many experts together",
        config(num_hidden_layers=10_000, n_routed_experts=100_000),
        "config.json: n_routed_experts: expected at most 500000 in all layers, got 100000 in each of 9999",
    ),
    (
        "blocks of true",
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [True, True]}),
        "config.json: weight_block_size: expected rows and columns, got [True, True]",
    ),
    (
        "vast blocks",
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [10**30, 1]}),
        "config.json: weight_block_size: expected rows and columns, got [1000000",
    ),
    # generation_config.json
    ("deep generation", written("generation_config.json", "[" * DEEP), "generation_config.json: not JSON: maximum rec"),
    ("generation list", written("generation_config.json", "[]"), "generation_config.json: expected a JSON object"),
    (
        "end",
        written("generation_config.json", '{"eos_token_id": [[1]]}'),
        "generation_config.json: eos_token_id: expected an id or a list of ids, got [[1]]",
    ),
    ("generation that is a pipe", pipe("generation_config.json"), "generation_config.json: not a regular file"),
    # the index and headers of safetensors
    ("deep index", written("model.safetensors.index.json", "[" * DEEP), "index.json: not JSON: maximum recursion dep"),
    ("index that is a pipe", pipe("model.safetensors.index.json"), "index.json: not a regular file"),
    ("shard that is a pipe", pipe(SHARD), f"{SHARD}: not a regular file"),
    ("deep header", header("[" * DEEP), f"{SHARD}: not a safetensors file: in its header: not JSON: maximum recursion"),
    ("deep entry", tensor(shape=json.loads("[" * 400 + "]" * 400)), f"{SHARD}: not a safetensors file: in its header"),
    ("header list", header([]), f"{SHARD}: not a safetensors file: expected its header to be a JSON object"),
    ("no entry", header({"a": 1}), f"{SHARD}: {ENTRY}, got 1"),
    ("float shape", tensor(shape=[0.0]), f"{SHARD}: {ENTRY}, got "),
    ("shape of true", tensor(shape=[True]), f"{SHARD}: {ENTRY}, got "),
    ("negative shape", tensor(shape=[-1, 0]), f"{SHARD}: {ENTRY}, got "),
    ("shape of infinite size", tensor(shape=[2**62] * 33), f"{SHARD}: {ENTRY}, got "),
    ("float offsets", tensor(data_offsets=[0.0, 0.0]), f"{SHARD}: {ENTRY}, got "),
    ("three offsets", tensor(data_offsets=[0, 0, 0]), f"{SHARD}: {ENTRY}, got "),
    ("dtype of a list", tensor(dtype=["F32"]), f"{SHARD}: {ENTRY}, got "),
    ("far offsets", tensor(data_offsets=[0, 2**62]), f"{SHARD}: not a safetensors file: 'a' lies outside the file"),
    ("vast shape", tensor(shape=[2**62, 2**62]), f"{SHARD}: not a safetensors file: 'a' of shape [4611686018427387904"),
    # tokenizer.json
    (
        "panic at loading",
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "tokenizer.json: Precompiled: Error",
    ),
    (
        "panic at encoding",
        tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}),
        "tokenizer.json: chunk size must be non-zero",
    ),
    ("deep tokenizer", written("tokenizer.json", '{"model":' + "[" * DEEP), "tokenizer.json: recursion limit exceeded"),
    ("no expression", tokenizer(pre_tokenizer={**SPLIT, "pattern": {"Regex": "("}}), "tokenizer.json: Oniguruma error"),
    ("endless expression", tokenizer(pre_tokenizer={**SPLIT, "pattern": {"Regex": "(a+)+$"}}), "tokenizer.json: "),
    (
        "unknown word",
        tokenizer(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}),
        "tokenizer.json: WordLevel error: Missing [UNK] token from the vocabulary",
    ),
    (
        "text that explodes",
        tokenizer(normalizer={"type": "Sequence", "normalizers": [EXPLODING] * 4}),
        "tokenizer.json: the process for it ended with SIGABRT | tokenizer.json: this takes more than",
    ),
    ("tokenizer that is a pipe", pipe("tokenizer.json"), "tokenizer.json: not a regular file"),
    # tokenizer_config.json
    ("deep tokens", written("tokenizer_config.json", "[" * DEEP), "tokenizer_config.json: not JSON: maximum recursion"),
    (
        "token of lists",
        written("tokenizer_config.json", '{"bos_token": [1]}'),
        "tokenizer_config.json: expected bos_token to be a text or a token, got [1]",
    ),
    (
        "template with a list for a name",
        written("tokenizer_config.json", '{"chat_template": [{"name": [1]}, {"name": "default", "template": 1}]}'),
        "tokenizer_config.json: expected each chat_template to have a name, got {'name': [1]}",
    ),
    ("special tokens that are a pipe", pipe("special_tokens_map.json"), "special_tokens_map.json: not a regular file"),
    ("deep added tokens", written("added_tokens.json", "[" * DEEP), "added_tokens.json: not JSON: maximum recursion"),
    ("vast id", written("added_tokens.json", '{"w": ' + "9" * 4000 + "}"), "added_tokens.json: expected ids by token"),
    (
        "template folder with a pipe",
        lambda directory: ((directory / "additional_chat_templates").mkdir(), pipe(FOLDER_TEMPLATE)(directory)),
        "additional_chat_templates/default.jinja: not a regular file",
    ),
    # chat templates
    ("break outside a loop", template("{% break %}"), MALFORMED + "'break' outside loop"),
    ("deep parentheses", template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"), MALFORMED),
    ("parentheses that compile badly", template("{{ " + "(" * 150 + "1" + ",)" * 150 + " }}"), MALFORMED),
    ("template in Latin-1", written("chat_template.jinja", b"\xe9"), MALFORMED + "'utf-8' codec"),
    ("template that is a pipe", pipe("chat_template.jinja"), "chat_template.jinja: not a regular file"),
    ("vast text", template("{{ 'x' * 10**11 }}"), RENDER + "MemoryError"),
    ("vast number", template("{{ 10**(10**9) }}"), MALFORMED + "this takes more than 1 s"),
    ("vast padding", template("{{ '%100000000000d' % 1 }}"), RENDER + "MemoryError"),
    (
        "long text",
        template("{{ 'x' * (messages|length * 10**8) }}"),
        RENDER + "it makes 100,000,000 characters, more than 67,108,864",
    ),
    (
        "loops",
        template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        RENDER + "this takes more than 1 s",
    ),
    (
        "doubling",
        template("{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"),
        RENDER + "MemoryError",
    ),
    (
        "endless recursion",
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        RENDER + "maximum recursion depth exceeded",
    ),
    ("half a character", template("{{ '\\ud800' }}"), "tokenizer.json: expected text in UTF-8, got '\\ud800'"),
]

OF_QWEN3: list[tuple[str, Spoil, str]] = [
    ("so many layers", config(num_hidden_layers=300_000_000), "num_hidden_layers: expected at most 10000, got 30"),
    ("no theta", theta(0), "config.json: rope_theta: expected more than 1, got 0"),
    ("negative eps", config(rms_norm_eps=-1), "config.json: rms_norm_eps: expected at least 0, got -1"),
    (
        "deep windows",
        config(head_windows=json.loads("[" * 400 + "]" * 400)),
        "config.json: expected JSON of at most 50",
    ),
    (
        "vast window",
        config(head_windows=[{"window": [10**4000, 1]}] * 3),
        "config.json: head_windows of layer 0: window",
    ),
    (
        "vast rope",
        config(rope_parameters={"rope_type": "yarn", "factor": 10**400}),
        "config.json: factor: expected at most 1e+30, got 1000",
    ),
]


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_tokenizer, "MEMORY", 2**30)


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies the folder of a golden model and adds a tokenizer with one word per token id."""

    def make(golden: str) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(GOLDEN.with_name(golden), directory, ignore=shutil.ignore_patterns("golden*"))
        core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.save(str(directory / "tokenizer.json"))
        return directory

    return make


@slow_cases("v3: doubling", "v3: loops", "v3: vast number")
@pytest.mark.parametrize(
    ("golden", "spoil", "words"),
    [
        pytest.param(golden, spoil, words, id=f"{golden}: {name}")
        for golden, table in (("v3", OF_DEEPSEEK), ("qwen3", OF_QWEN3))
        for name, spoil, words in table
    ],
)
def test_hostile_model_is_a_one_line_error(
    make_model, usage_error, monkeypatch: pytest.MonkeyPatch, golden: str, spoil: Spoil, words: str
) -> None:
    if "more than 1 s" in words:  # the time limit stays long for other cases, which may be slow on a busy machine
        monkeypatch.setattr(checkpoints_tokenizer, "SECONDS", 1)
    directory = make_model(golden)
    spoil(directory)
    line = usage_error("--model", directory, "--prompt", f"w1 {'a' * 40}b")
    assert any(each in line for each in words.split(" | "))
    assert len(line) < 2500


SCALES = ["--random", "qwen3-tiny", "--kv-dtype", "int8", "--kv-scales"]


@slow_cases("args3-<lambda>-prompt_ids: expected ids from 0 to 511")
@pytest.mark.parametrize(
    ("args", "spoil", "words"),
    [
        (["--prompt-ids"], written("file", "[" * DEEP), "--prompt-ids: {}: not JSON: maximum recursion depth"),
        (["--prompt-ids"], written("file", "[" * 60 + "]" * 60), "--prompt-ids: {}: expected JSON of at most 50 lists"),
        (["--prompt-ids"], written("file", b"\xff"), "--prompt-ids: {}: not JSON: 'utf-8' codec"),
        (["--prompt-ids"], written("file", f"[[{10**4000}]]"), "prompt_ids: expected ids from 0 to 511"),
        (["--random", "qwen3-tiny", "--head-windows"], written("file", "[" * DEEP), "{}: not JSON: maximum recursion"),
        (["--random", "qwen3-tiny", "--head-windows"], written("file", f"[{10**4000}]"), "{}: head_windows of layer 0"),
        (SCALES, pipe("file"), "--kv-scales: {}: not a regular file"),
        (SCALES, written("file", b"\xff" * 100), "--kv-scales: {}: not a safetensors file"),
        (SCALES, written("file", DEEP.to_bytes(8, "little") + b"[" * DEEP), "--kv-scales: {}: not a safetensors file"),
    ],
)
def test_hostile_input_file_is_a_one_line_error(
    usage_error, tmp_path: Path, args: list[str], spoil: Spoil, words: str
) -> None:
    spoil(tmp_path)
    line = usage_error(*args, tmp_path / "file")
    assert words.format(tmp_path / "file") in line
    assert len(line) < 2500


def test_files_are_read_up_to_a_size_limit(usage_error, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "SIZE_LIMIT", 2**20)
    assert usage_error("--prompt-ids", "/dev/zero").endswith("--prompt-ids: /dev/zero: expected at most 1 MiB")


def test_prompt_that_is_not_utf8_is_an_error(make_model, usage_error) -> None:
    line = usage_error("--model", make_model("v3"), "--prompt", "w1", os.fsdecode(b"w2 \xff"))
    assert "--prompt: text 1: expected text in UTF-8, got '\\udcff' at character 3" in line


def test_names_that_are_not_utf8_are_escaped(capsys) -> None:
    StandardOutput().print(f"written to {os.fsdecode(b'a\xff')}")
    assert capsys.readouterr().out == "written to a\\udcff\n"


def test_no_exception_has_the_exit_status_of_a_difference(capsys) -> None:
    class Panic(BaseException):
        """Panic of a library written in Rust."""

    def fail() -> int:
        raise Panic("at the disco")

    assert exit_status("run_decode", fail) == 3
    assert capsys.readouterr().err.endswith("Panic: at the disco\n")


def test_control_characters_of_a_file_are_not_printed(make_model, usage_error) -> None:
    directory = make_model("v3")
    config(model_type="\x1b[2J\n" + "x" * 5000)(directory)
    line = usage_error("--model", directory)
    assert "\x1b" not in line
    assert len(line) < 2500
