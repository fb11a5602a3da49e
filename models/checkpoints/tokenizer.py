"""Conversion between text and token ids with the tokenizer.json and the chat template of a Hugging Face directory.

Both are untrusted input. They run in a separate process (`text_process`) with limited time and memory.
"""

from __future__ import annotations

import dataclasses
import functools
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

GRAMMAR_SECONDS = 10
"""Maximum processor time for the conversion and the compilation of a grammar."""

MEMORY = 2**32
"""Maximum address space of the process in bytes."""

# Threads and memory pools would reserve address space per core. Backtraces of panics would take time.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2", "RUST_BACKTRACE": "0"}


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The parts of a tokenizer that decoding needs.

    Attributes:
      texts: text of each token by id, as stored in tokenizer.json, for example "\u0120hello".
      special: ids of special tokens.
      decoder: entry `decoder` of tokenizer.json; None if texts are joined with spaces.
      clean_up: pairs (old, new) of texts that are replaced in the decoded text, one after the other: spaces before
        punctuation and English contractions.
    """

    texts: Mapping[int, str]
    special: frozenset[int]
    decoder: Mapping[str, Any] | None
    clean_up: Sequence[tuple[str, str]]


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
        if self._template.named is None and self.chat_template is None:
            return self.encode(text)
        return self.encode_chat([{"role": "user", "content": text}])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Render a chat with the chat template, and encode the result. Arguments as `render_chat`.

        Raises:
          ValueError, TokenizerError: as `render_chat` and `encode`; or the template renders nothing.
        """
        rendered = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            **variables,
        )
        if not rendered:
            raise TokenizerError(f"{self._template.path}: the chat template renders an empty prompt")
        return self.encode(rendered, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Render a chat with the chat template, as `apply_chat_template` of transformers.

        Args:
          messages: messages in order, each with the keys `role` and `content` and others that the template supports,
            such as `tool_calls`. A system prompt is a message with the role "system".
          tools: JSON schemas of the functions that the model may call.
          add_generation_prompt: whether the text ends with the tokens that start an answer.
          chat_template: source or name of another template. Without it, chats with tools use the template named
            tool_use if the directory has it, and others the default template.
          variables: other variables of the template, such as `enable_thinking`.

        Raises:
          ValueError: an argument has the wrong type, or is not JSON.
          TokenizerError: there is no template, or it raises an error.
        """
        messages, tools = _objects("messages", messages), None if tools is None else _objects("tools", tools)
        if not messages:
            raise ValueError("messages: expected at least one message, got none")
        if not isinstance(chat_template, str | None):
            raise ValueError(f"chat_template: expected a str or None, got {shown(chat_template)}")
        source = self._choose_template(chat_template, with_tools=tools is not None)
        given = {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        name = self._template.path if source == self.chat_template else "chat_template"
        what = f"{name}: the chat template cannot render the messages"
        try:
            return self._process.ask(what, "render", source, messages, given)
        except TypeError as error:
            raise ValueError(f"messages, tools, variables of the template: expected JSON values: {error}") from error

    def _choose_template(self, given: str | None, with_tools: bool) -> str:
        """Return the source of a chat template."""
        path, others = self._template.path, self._template.others
        if given is not None:
            return self.chat_template if given == "default" and self.chat_template else others.get(given, given)
        if with_tools and "tool_use" in others:
            return others["tool_use"]
        if self._template.named is not None:
            raise TokenizerError(f"{path}: expected a chat template named 'default', got {shown(self._template.named)}")
        if self.chat_template is None:
            raise TokenizerError(f"{path.parent}: the model has no chat template; give one as chat_template")
        return self.chat_template

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

    @functools.cached_property
    def pieces(self) -> Pieces:
        """The texts of all tokens and the rules of decoding, for `IncrementalDetokenizer`."""
        loaded = self._ask("pieces")
        texts = dict(zip(loaded["ids"], loaded["texts"], strict=True))
        return Pieces(texts, frozenset(loaded["special"]), loaded["decoder"], [*map(tuple, loaded["clean_up"])])

    def _ask(self, function: str, *arguments: Any) -> Any:
        return self._process.ask(str(self._path), function, *arguments)


class GrammarChecker:
    """Converts and compiles grammars in a separate process, before they are compiled in this process.

    The conversion or the compilation of some grammars takes minutes. The conversion runs in Python and would stop the
    other threads of this process. The compilation of some grammars overflows the stack, which would end this process.

    Args:
      tokens: bytes of each token of the model.
      special: ids of special tokens.
      ends: ids of end-of-sequence tokens, at least one.

    Raises:
      RuntimeError: the process cannot load the tokens.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]):
        self._process = _Process(GRAMMAR_SECONDS)
        weakref.finalize(self, self._process.end)
        texts = [token.decode("latin-1") for token in tokens]
        try:
            self._process.ask("the vocabulary for grammars", "load_vocabulary", texts, [*special], [*ends])
        except TokenizerError as error:
            raise RuntimeError(str(error)) from error

    def check(self, kind: str, value: str | Sequence[str]) -> str:
        """Check the time, the memory and the stack that a grammar needs.

        Args:
          kind, value: name and value of a field of `StructuredOutputs`.

        Returns:
          The result of `text_process.grammar_text`. A thread with a stack of `GRAMMAR_STACK` bytes and some more can
          compile it. The compilation may find errors in the grammar.

        Raises:
          TokenizerError: the conversion or the compilation exceeds a limit, or the conversion finds an error.
          RuntimeError: the process has ended earlier and cannot load the tokens again.
        """
        reply = self._process.ask("structured_outputs: the grammar is too complex", "check_grammar", kind, value)
        if "error" in reply:
            raise TokenizerError(reply["error"])
        return reply["text"]


class _Process:
    """The `text_process` of one model. If it has ended, for example at a limit, the next call starts it again.

    Args:
      seconds: maximum processor time of a request; None for `SECONDS`.
    """

    def __init__(self, seconds: int | None = None) -> None:
        self._seconds = SECONDS if seconds is None else seconds
        self._popen = self._start()
        self._lock = threading.Lock()
        self._loading: bytes | None = None  # first request: it loads the tokenizer

    def _start(self) -> subprocess.Popen[bytes]:
        # Run as a file, because "-m" would import the package and jax. Use a separate process group: Ctrl-C must
        # not end the process while texts remain to be decoded.
        script = str(Path(__file__).with_name("text_process.py"))
        command = [sys.executable, "-P", script, str(self._seconds), str(MEMORY)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,
        )

    def ask(self, what: str, function: str, *arguments: Any) -> Any:
        """Call a function of the process.

        Raises:
          TokenizerError: the function fails or ends the process. The message starts with `what`.
          RuntimeError: the process has ended earlier, and the first request, which had succeeded, fails in a new one.
        """
        request = json.dumps([function, *arguments]).encode() + b"\n"
        with self._lock:
            if self._loading is None:
                self._loading = request
            elif self._popen.poll() is not None:
                self._popen.communicate()
                self._popen = self._start()
                right, result = self._call(self._loading)
                if not right:
                    self._popen.kill()  # the next call starts it again
                    self._popen.wait()
                    raise RuntimeError(f"the process for texts and grammars cannot be started again: {result}")
            right, result = self._call(request)
        if not right:
            raise TokenizerError(f"{what}: {result}")
        return result

    def _call(self, request: bytes) -> tuple[bool, Any]:
        """Send a request. Return whether it has succeeded, and its result or the reason of the failure."""
        reply = self._exchange(request)
        if not reply.endswith(b"\n"):
            return False, _why_ended(self._popen.wait(), self._seconds)
        right, result = json.loads(reply)
        return right, result

    def _exchange(self, request: bytes) -> bytes:
        """Send a request and return the response, which does not end with a line break if the process has ended."""
        pipes = self._popen.stdin, self._popen.stdout
        try:
            pipes[0].write(request)  # pyrefly: ignore[missing-attribute]
            pipes[0].flush()  # pyrefly: ignore[missing-attribute]
            return pipes[1].readline()  # pyrefly: ignore[missing-attribute]
        except BrokenPipeError:
            return b""
        except BaseException:  # after an interrupt, a late response would be read by the next request
            self._popen.kill()
            raise

    def end(self) -> None:
        self._popen.kill()
        self._popen.communicate()


def _objects(name: str, given: Any) -> list[dict[str, Any]]:
    """Return a sequence of mappings as a list of dicts. Raise ValueError if it is something else."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise ValueError(f"{name}: expected a list of objects, got {shown(given)}")
    for i, entry in enumerate(given):
        if not isinstance(entry, Mapping):
            raise ValueError(f"{name}: expected a list of objects, got {shown(entry)} as entry {i}")
    return [dict(entry) for entry in given]


def check_unicode(text: str) -> None:
    """Raise ValueError if a text contains surrogates, which represent command-line bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"expected text in UTF-8, got {text[error.start]!r} at character {error.start}") from error


def _why_ended(status: int, seconds: int) -> str:
    if status == -signal.SIGXCPU:
        return f"this takes more than {seconds} s"
    ended = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"the process for it ended with {ended}, perhaps since its stack or {MEMORY >> 20:,} MiB do not suffice"


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
