"""Conversion between text and token ids with the tokenizer.json and the chat template of a Hugging Face directory.

Both are untrusted input. They run in a separate process (`text_process`) with limited time and memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_attn.models.checkpoints.files import read_json_object
from pallas_attn.models.checkpoints.tokenizer_files import (
    ChatTemplate,
    TokenizerError,
    TokenizerSettings,
    is_file,
    read_settings,
    read_template,
)
from pallas_attn.models.config.json_files import shown

SECONDS = 30
"""Maximum processor time of a request. Loading the largest tokenizer or encoding a book takes far less."""

MEMORY = 2**32
"""Maximum address space of the process in bytes."""

# Threads and memory pools would reserve address space per core. Backtraces of panics would take time.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2", "RUST_BACKTRACE": "0"}


class Tokenizer:
    """Tokenizer, special tokens and chat template of a model.

    Attributes:
      special_tokens: text of each named special token: bos_token, eos_token, ... Chat templates use them as variables.
      chat_template: source of the template; None for a model that takes plain text.

    Args:
      path: path of tokenizer.json.
      settings: contents of the other files of the directory.
      template: the chat template.

    Raises:
      TokenizerError: a file is malformed, or declares a token with another id than the tokenizer.
    """

    def __init__(self, path: Path, settings: TokenizerSettings, template: ChatTemplate):
        self.chat_template = template.source
        self._path, self._template = path, template
        self._process = _Process()
        weakref.finalize(self, self._process.end)
        loaded = self._process.ask(str(path), "load_core", str(path), dataclasses.asdict(settings))
        for file, token, declared, actual, other in loaded["contradictions"]:
            has = f"the token has id {actual}" if actual is not None else f"id {declared} belongs to {shown(other)}"
            raise TokenizerError(f"{file}: declares {shown(token)} with id {declared}, but in the tokenizer {has}")
        self.special_tokens: Mapping[str, str] = loaded["special_tokens"]
        if template.source is not None:
            self._process.ask(f"{template.path}: the chat template is malformed", "load_template", template.source)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a user's text as a prompt.

        With a chat template, the text is the only message of a chat. Otherwise the prompt is the text with the tokens
        that the post-processor of tokenizer.json adds.

        Raises:
          TokenizerError: as `encode`; or the template raises an error or renders nothing; or the directory has several
            templates, but no default.
        """
        if self._template.named is not None:
            names = shown(self._template.named)
            raise TokenizerError(f"{self._template.path}: expected a chat template named 'default', got {names}")
        if self.chat_template is None:
            return self.encode(text)
        rendered = self._render([{"role": "user", "content": text}])
        if not rendered:
            raise TokenizerError(f"{self._template.path}: the chat template renders an empty prompt")
        return self.encode(rendered, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text. Special tokens in the text are recognised.

        Raises:
          TokenizerError: the text contains surrogates (bytes that are not UTF-8), or the tokenizer fails, for example
            at an unknown word.
        """
        try:
            check_unicode(text)
        except ValueError as error:
            raise TokenizerError(f"{self._path}: {error}") from error
        return self._ask("encode", text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids to text. Unknown ids are skipped.

        Raises:
          TokenizerError: the tokenizer fails.
        """
        return self._ask("decode", list(token_ids), skip_special_tokens)

    def _render(self, messages: list[dict[str, str]]) -> str:
        what = f"{self._template.path}: the chat template cannot render a user's message"
        return self._process.ask(what, "render", messages)

    def _ask(self, function: str, *arguments: Any) -> Any:
        return self._process.ask(str(self._path), function, *arguments)


class _Process:
    """The `text_process` of one model."""

    def __init__(self) -> None:
        # Run as a file, because "-m" would import the package and jax. Use a separate process group: Ctrl-C must
        # not end the process while texts remain to be decoded.
        command = [sys.executable, "-P", str(Path(__file__).with_name("text_process.py")), str(SECONDS), str(MEMORY)]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,
        )
        self._lock = threading.Lock()

    def ask(self, what: str, function: str, *arguments: Any) -> Any:
        """Call a function of the process. On failure, raise a TokenizerError whose message starts with `what`."""
        request = json.dumps([function, *arguments]).encode() + b"\n"
        pipes = self._popen.stdin, self._popen.stdout
        with self._lock:
            try:
                pipes[0].write(request)  # pyrefly: ignore[missing-attribute]
                pipes[0].flush()  # pyrefly: ignore[missing-attribute]
                reply = pipes[1].readline()  # pyrefly: ignore[missing-attribute]
            except BrokenPipeError:
                reply = b""
            except BaseException:  # after an interrupt, a late response would be read by the next request
                self._popen.kill()
                raise
        if not reply.endswith(b"\n"):
            raise TokenizerError(f"{what}: {_why_ended(self._popen.wait())}")
        right, result = json.loads(reply)
        if not right:
            raise TokenizerError(f"{what}: {result}")
        return result

    def end(self) -> None:
        self._popen.kill()
        self._popen.communicate()


def check_unicode(text: str) -> None:
    """Raise ValueError if a text contains surrogates, which represent command-line bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"expected text in UTF-8, got {text[error.start]!r} at character {error.start}") from error


def _why_ended(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"this takes more than {SECONDS} s"
    ended = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"the process for it ended with {ended}, perhaps since {MEMORY >> 20:,} MiB do not suffice"


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """Load the tokenizer of a Hugging Face directory as transformers 5 does; None if it has no tokenizer.json.

    Raises:
      TokenizerError: a file is malformed, an entry is not supported, or files contradict each other.
    """
    directory = Path(directory)
    path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not is_file(path):
        return None
    config = read_json_object(config_path, TokenizerError) if is_file(config_path) else {}
    return Tokenizer(path, read_settings(directory, config), read_template(directory, config))
