"""Fixtures for the tests of scripts/run_decode.py."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pallas_attn.models.cli.decode import command as run_decode
from pallas_attn.models.engine import Engine
from tests.kit.shared_steps import shared_steps
from tests.scripts.command_lines import GOLDEN, VOCAB_SIZE

__all__ = ["shared_steps", "text_model", "usage_error", "write_ids"]


@pytest.fixture
def write_ids(tmp_path):
    """Return a function that writes a file of prompts and returns the arguments `--prompt-ids FILE`."""

    def write(content):
        path = tmp_path / "ids.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return ["--prompt-ids", str(path)]

    return write


@pytest.fixture
def text_model(tmp_path):
    """Return a copy of the golden model's folder with a tokenizer that has one word per token id."""
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN, directory)
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def usage_error(capsys, monkeypatch):
    """Return a function that runs a command line and returns its error message. The command must end with exit status 2
    and one line on stderr, before the engine runs a step.
    """
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("a step was run"))

    def usage_error(*args):
        assert run_decode.main([str(arg) for arg in args]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("run_decode: error: ")
        return line

    return usage_error
