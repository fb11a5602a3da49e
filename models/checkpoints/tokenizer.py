"""Text to token ids and back, by the tokenizer.json and the chat template of a Hugging Face directory.

Both are untrusted input, and are run by a process of their own (`text_process`), whose time and memory are limited.
"""

from __future__ import annotations

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

from models.checkpoints.files import read_json_object
from models.config.json_files import is_present, read_bounded, shown

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

SECONDS = 30
"""Processor time of an answer, at most: far more than reading the largest tokenizer or encoding a book takes."""

MEMORY = 2**32
"""Bytes of addresses that the process may have."""

# Threads and pools of memory would take addresses by the core; reports of panics would take time.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2", "RUST_BACKTRACE": "0"}


class TokenizerError(ValueError):
    """A directory's tokenizer or chat template is unusable; the message says why in one line."""


class Tokenizer:
    """A tokenizer with the special tokens and the chat template of its model.

    Attributes:
      special_tokens: name to text of those that chat templates may ask for: bos_token, eos_token, ...
      add_bos: whether plain text starts with the bos_token even where tokenizer.json does not say so.
      chat_template: its source; None for a model that takes plain text.

    Args:
      path: its tokenizer.json.
      template_path: the file that the chat template is from.

    Raises:
      TokenizerError: the file or the template is malformed.
    """

    def __init__(
        self,
        path: Path,
        special_tokens: Mapping[str, str],
        *,
        add_bos: bool,
        chat_template: str | None,
        template_path: Path,
    ):
        self.special_tokens = special_tokens
        self.add_bos = add_bos
        self.chat_template = chat_template
        self._path, self._template_path = path, template_path
        self._process = _Process()
        weakref.finalize(self, self._process.end)
        self._process.ask(str(path), "load_core", str(path))
        if chat_template is not None:
            self._process.ask(f"{template_path}: the chat template is malformed", "load_template", chat_template)

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a user's text as a prompt: the only message of a chat if the model has a template, else the text
        itself after any special tokens that start a sequence.

        Raises:
          TokenizerError: as `encode`; or the template refuses the chat.
        """
        if self.chat_template is not None:
            return self.encode(self._render([{"role": "user", "content": text}]), add_special_tokens=False)
        ids = self.encode(text)
        bos = self._ask("token_to_id", self.special_tokens.get("bos_token", "")) if self.add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text. Special tokens spelled out in it are recognised.

        Raises:
          TokenizerError: a text with bytes that are no UTF-8 (surrogates); or the tokenizer fails, such as at a word it
            does not know.
        """
        try:
            check_unicode(text)
        except ValueError as error:
            raise TokenizerError(f"{self._path}: {error}") from error
        return self._ask("encode", text, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes ids to text, leaving out special tokens and unknown ids.

        Raises:
          TokenizerError: the tokenizer fails.
        """
        return self._ask("decode", list(token_ids))

    def _render(self, messages: list[dict[str, str]]) -> str:
        what = f"{self._template_path}: the chat template cannot render a user's message"
        return self._process.ask(what, "render", messages, dict(self.special_tokens))

    def _ask(self, function: str, *arguments: Any) -> Any:
        return self._process.ask(str(self._path), function, *arguments)


class _Process:
    """A process that answers for one model."""

    def __init__(self) -> None:
        # Not "-m": the package imports jax. Not this process's group: Ctrl-C is for us, who may have texts to decode.
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
        """Calls a function of the process; raises TokenizerError, beginning with `what`, if that fails."""
        request = json.dumps([function, *arguments]).encode() + b"\n"
        pipes = self._popen.stdin, self._popen.stdout
        with self._lock:
            try:
                pipes[0].write(request)  # pyrefly: ignore[missing-attribute]
                pipes[0].flush()  # pyrefly: ignore[missing-attribute]
                reply = pipes[1].readline()  # pyrefly: ignore[missing-attribute]
            except BrokenPipeError:
                reply = b""
            except BaseException:  # an interrupt: the answer may come later, and would be taken for the next one
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
    """Raises ValueError for a text with surrogates, which stand for bytes of a command line that are no UTF-8."""
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
    """Loads the tokenizer of a Hugging Face directory; None if it has no tokenizer.json.

    The chat template is that of chat_template.jinja, else of tokenizer_config.json (of several, the one named
    "default").

    Raises:
      TokenizerError: a file is malformed.
    """
    directory = Path(directory)
    path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not _is_present(path):
        return None
    config = read_json_object(config_path, TokenizerError) if _is_present(config_path) else {}
    template, template_path = _read_template(directory / "chat_template.jinja", config_path, config)
    return Tokenizer(
        path,
        _special_tokens(config, config_path),
        add_bos=config.get("add_bos_token") is True,
        chat_template=template,
        template_path=template_path,
    )


def _is_present(path: Path) -> bool:
    try:
        return is_present(path)
    except ValueError as error:
        raise TokenizerError(str(error)) from error


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Reads special tokens, each given as its text or as an object with the text as its content."""
    given = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in given.items()}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str | None)]:
        raise TokenizerError(f"{path}: expected {wrong[0]} to be a text, got {shown(given[wrong[0]])}")
    return {name: text for name, text in texts.items() if text is not None}


def _read_template(path: Path, config_path: Path, config: Mapping[str, Any]) -> tuple[str | None, Path]:
    """Reads the chat template, if there is one, and returns the file it is from, too."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[-1].get("template") if named else None
    if not isinstance(source, str | None):
        raise TokenizerError(f"{config_path}: expected chat_template to be a text, got {type(source).__name__}")
    if not _is_present(path):
        return source, config_path
    try:
        return read_bounded(path).decode("utf-8"), path
    except ValueError as error:
        raise TokenizerError(f"{path}: the chat template is malformed: {error}") from error
