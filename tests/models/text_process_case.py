"""A replacement of the tokenizer's separate process, for tests with many tokenizers."""

import json

import pytest

from pallas_attn.models.checkpoints import load_tokenizer, text_process, tokenizer
from pallas_attn.models.checkpoints.tokenizer import TokenizerError
from scripts.tools.tokenizer_layouts import write


class OwnProcess:
    """Runs requests in the test's process, which is faster. The requests and responses pass through JSON."""

    def __init__(self):
        self.text = text_process.Text()

    def ask(self, what, function, *arguments):
        function, *arguments = json.loads(json.dumps([function, *arguments]))
        right, result = json.loads(json.dumps(text_process.answer(self.text, function, arguments)))
        if not right:
            raise TokenizerError(f"{what}: {result}")
        return result

    def end(self):
        pass


@pytest.fixture
def load_layout(tmp_path, monkeypatch):
    """Return a function that writes the files of a layout and loads the tokenizer, which runs in the test's process."""
    monkeypatch.setattr(tokenizer, "_Process", OwnProcess)

    def load(layout):
        write(layout, tmp_path)
        loaded = load_tokenizer(tmp_path)
        assert loaded is not None
        return loaded

    return load
