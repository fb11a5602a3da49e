"""Conversion between text and token ids with the tokenizer.json and the chat template of a Hugging Face directory.

Both are untrusted input. They run in a separate process (`text_process`) with limited time and memory.
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
"""Maximum processor time of a request. Loading the largest tokenizer or encoding a book takes far less."""

MEMORY = 2**32
"""Maximum address space of the process in bytes."""

# Threads and memory pools would reserve address space per core. Backtraces of panics would take time.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2", "RUST_BACKTRACE": "0"}


class TokenizerError(ValueError):
    """Error of a tokenizer or chat template. The message is one line."""


class Tokenizer:
    """Tokenizer, special tokens and chat template of a model.

    Attributes:
      special_tokens: text of the special tokens that chat templates may use, by name: bos_token, eos_token, ...
      add_bos: whether plain text starts with the bos_token even if tokenizer.json does not add it.
      chat_template: source of the template; None for a model that takes plain text.

    Args:
      path: path of tokenizer.json.
      template_path: path of the file that contains the chat template.

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
        """Encode a user's text as a prompt.

        With a chat template, the text is the only message of a chat. Otherwise the prompt is the text, after special
        tokens that start a sequence.

        Raises:
          TokenizerError: as `encode`, or the template raises an error.
        """
        if self.chat_template is not None:
            return self.encode(self._render([{"role": "user", "content": text}]), add_special_tokens=False)
        ids = self.encode(text)
        bos = self._ask("token_to_id", self.special_tokens.get("bos_token", "")) if self.add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

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

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids to text. Special tokens and unknown ids are skipped.

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
    """Load the tokenizer of a Hugging Face directory; None if it has no tokenizer.json.

    The chat template is chat_template.jinja if present, else the template in tokenizer_config.json. Of several
    templates, the template named "default" is used.

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
    """Read special tokens. Each is a string, or an object with the string as its `content`."""
    given = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in given.items()}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str | None)]:
        raise TokenizerError(f"{path}: expected {wrong[0]} to be a text, got {shown(given[wrong[0]])}")
    return {name: text for name, text in texts.items() if text is not None}


def _read_template(path: Path, config_path: Path, config: Mapping[str, Any]) -> tuple[str | None, Path]:
    """Return the chat template, or None, and the path of its file."""
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
