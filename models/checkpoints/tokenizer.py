"""Text to token ids and back, by the tokenizer.json and the chat template of a Hugging Face directory.

Templates are untrusted input. They are rendered in jinja2's immutable sandbox, with the settings and helpers that
Hugging Face transformers gives them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from models.checkpoints.files import read_json_object

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerError(ValueError):
    """A directory's tokenizer or chat template is unusable; the message says why in one line."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with the special tokens and the chat template of its model.

    Attributes:
      core: the tokenizers library's part.
      special_tokens: name to text of those that chat templates may ask for: bos_token, eos_token, ...
      add_bos: whether plain text starts with the bos_token even where tokenizer.json does not say so.
      chat_template: None for a model that takes plain text.
    """

    core: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    add_bos: bool
    chat_template: jinja2.Template | None

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a user's text as a prompt: the only message of a chat if the model has a template, else the text
        itself after any special tokens that start a sequence.

        Raises:
          TokenizerError: the template refuses the chat.
        """
        if self.chat_template is not None:
            return self.encode(self._render([{"role": "user", "content": text}]), add_special_tokens=False)
        ids = self.encode(text)
        bos = self.core.token_to_id(self.special_tokens.get("bos_token", "")) if self.add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text. Special tokens spelled out in it are recognised."""
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes ids to text, leaving out special tokens and unknown ids."""
        return self.core.decode(list(token_ids), skip_special_tokens=True)

    def _render(self, messages: list[dict[str, str]]) -> str:
        # Templates may test tools and documents with `is none`, which is false for undefined names.
        assumed = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self.chat_template.render(assumed, **self.special_tokens)  # pyrefly: ignore[missing-attribute]
        except Exception as error:  # a template may raise anything
            raise TokenizerError(f"the chat template cannot render a user's message: {error}") from error


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """Loads the tokenizer of a Hugging Face directory; None if it has no tokenizer.json.

    The chat template is that of chat_template.jinja, else of tokenizer_config.json (of several, the one named
    "default").

    Raises:
      TokenizerError: a file is malformed.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    config_path = directory / "tokenizer_config.json"
    config = read_json_object(config_path, TokenizerError) if config_path.is_file() else {}
    return Tokenizer(
        core=_load_core(path),
        special_tokens=_special_tokens(config),
        add_bos=config.get("add_bos_token") is True,
        chat_template=_load_template(directory / "chat_template.jinja", config),
    )


def _load_core(path: Path) -> tokenizers.Tokenizer:
    read_json_object(path, TokenizerError)
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{path}: {error}") from error
    core.no_truncation()  # settings left from training, which would change prompts
    core.no_padding()
    return core


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Reads special tokens, each given as its text or as an object with the text as its content."""
    given = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in given.items()}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str | None)]:
        raise TokenizerError(f"tokenizer_config.json: expected {wrong[0]} to be a text, got {given[wrong[0]]!r}")
    return {name: text for name, text in texts.items() if text is not None}


def _load_template(path: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str | None):
        raise TokenizerError(f"tokenizer_config.json: expected chat_template to be a text, got {type(source).__name__}")
    try:
        source = path.read_text(encoding="utf-8") if path.is_file() else source
        return None if source is None else _environment().from_string(source)
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise TokenizerError(f"the chat template is malformed: {error}") from error


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    helpers: dict[str, Any] = environment.globals
    helpers["raise_exception"] = _raise_exception
    helpers["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


class _Generation(jinja2.ext.Extension):
    """Renders the contents of {% generation %}, the tag around an assistant's text that training masks by."""

    tags = {"generation"}  # noqa: RUF012 (typed so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's own filter, which escapes HTML's special characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
