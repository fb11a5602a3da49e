"""Files of a Hugging Face directory next to tokenizer.json: special tokens, settings and chat templates.

The rules of transformers 5 apply: which file overrides which, and which class processes tokenizer.json. Files are
untrusted input. Every error is a TokenizerError that names the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pallas_attn.models.checkpoints.files import read_json_object
from pallas_attn.models.config.entries import is_integer
from pallas_attn.models.config.json_files import is_present, read_bounded, shown

type Token = str | dict[str, Any]
"""A token in a file: its text, or an object with its text as `content` and flags."""

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Standard names of special tokens. New tokens get their ids in this order."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_TEMPLATE_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates that are not tokens."""

TOKENIZERS_BACKEND = "TokenizersBackend"
"""Class of transformers that uses tokenizer.json unchanged."""

_SAME_AS_BACKEND = (TOKENIZERS_BACKEND, "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer")

_DEFAULT_TOKENS: dict[str, dict[str, str | None]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"), "pad_token": None},
    "GemmaTokenizer": {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
}
"""Supported classes that use only vocabulary, merges and post-processor of tokenizer.json, and the tokens that they
name by default. `text_process` builds the other parts."""

_CLASS_OF_FAMILY = {"qwen3": "Qwen2Tokenizer"}
"""Class of a directory that names no class, by model_type. Other families use tokenizer.json unchanged."""

_UNSUPPORTED = frozenset(
    f"{name}Tokenizer"
    for name in (  # noqa: SIM905
        "Albert Bart Barthez Bartpho BertGeneration BertJapanese Bert Bertweet BigBird BioGpt BlenderbotSmall"
        " Blenderbot ByT5 CLIP CTRL Camembert Canine Clvp CodeGen CodeLlama Cohere ConvBert CpmAnt Cpm"
        " DPRContextEncoder DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia DistilBert Electra Esm Esmc FNet FSMT"
        " FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTNeoX GPTSw3 Herbert LED Lasr LayoutLM"
        " LayoutLMv2 LayoutLMv3 LayoutXLM Longformer Luke Lxmert M2M100 MBart50 MBart MLuke MPNet Marian MarkupLM"
        " Mgpstr MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Parakeet Pegasus Perceiver Phobert Pop2Piano"
        " ProphetNet Qwen3_5 Rag Reformer RemBert RoCBert RoFormer Roberta SeamlessM4T Siglip Siglip2 Speech2Text"
        " SpeechT5 Splinter SqueezeBert T5 Tapas Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper"
        " XGLM XLM XLMRoberta XLNet"
    ).split()
)
"""Other classes of transformers that do not use tokenizer.json unchanged."""


class TokenizerError(ValueError):
    """Error of a tokenizer or chat template. The message is one line."""


@dataclasses.dataclass(frozen=True)
class Declared:
    """A token that a file declares with its id. `token` is an object with the text as `content`, and flags."""

    file: str
    token_id: int
    token: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a tokenizer that are not in tokenizer.json. `text_process` receives them as JSON.

    Attributes:
      kind: class of transformers that processes tokenizer.json.
      named: special tokens by name, or None, in the order in which new tokens get their ids.
      takes_pad_token: whether the padding of tokenizer.json names the pad_token, because neither another
        file nor the class has an entry pad_token.
      extra: special tokens without a name.
      declared: tokens with ids, of added_tokens.json or of added_tokens_decoder.
      declares_stored: whether added_tokens of tokenizer.json are declared too, and override `declared` with equal ids.
      split_special_tokens: whether special tokens in a text are encoded like other text.
      clean_up: whether decoding removes spaces before punctuation; None: only if the model is not BPE.
      add_prefix_space: whether texts start with a space, for the classes of _DEFAULT_TOKENS; None for their default.
      legacy: whether LlamaTokenizer adds a space after each special token.
    """

    kind: str
    named: dict[str, Token | None]
    takes_pad_token: bool
    extra: list[Token]
    declared: list[Declared]
    declares_stored: bool
    split_special_tokens: bool
    clean_up: bool | None
    add_prefix_space: bool | None
    legacy: bool


def read_settings(directory: Path, config: Mapping[str, Any]) -> TokenizerSettings:
    """Read the settings of a directory with a tokenizer.json.

    Args:
      config: contents of tokenizer_config.json; empty if the file does not exist.

    Raises:
      TokenizerError: a file is malformed, or an entry is not supported.
    """
    config_path = directory / "tokenizer_config.json"
    versions = config.get("fast_tokenizer_files")
    if versions not in (None, [], ["tokenizer.json"]):
        raise TokenizerError(
            f"{config_path}: fast_tokenizer_files: expected only tokenizer.json, got {shown(versions)}"
        )
    kind = _kind(directory, config)
    defaults = _DEFAULT_TOKENS.get(kind, {})
    has_decoder = "added_tokens_decoder" in config
    map_path = directory / "special_tokens_map.json"
    special_map = {} if has_decoder else _read_object(map_path)  # transformers ignores the older files in this case
    tokens = _special_tokens(config, special_map, config_path, map_path)
    if has_decoder:
        declared = _declared_by_decoder(config["added_tokens_decoder"], config_path)
    else:
        declared = _declared_by_file(directory / "added_tokens.json", tokens.special)
    clean_up = _flag(config, "clean_up_tokenization_spaces", config_path)
    forced = _flag(config, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", config_path)
    return TokenizerSettings(
        kind=kind,
        named={**dict.fromkeys(NAMES), **defaults, **tokens.named},
        takes_pad_token="pad_token" not in {**defaults, **tokens.named},
        extra=tokens.extra,
        declared=declared,
        declares_stored=not has_decoder,
        split_special_tokens=_flag(config, "split_special_tokens", config_path) or False,
        clean_up=(True if forced else None) if clean_up else False,
        add_prefix_space=_flag(config, "add_prefix_space", config_path),
        legacy=_flag(config, "legacy", config_path) or False,
    )


class ChatTemplate(NamedTuple):
    """The chat template of a directory.

    Attributes:
      source: source of the template; None without a template.
      path: the file that contains it.
      named: names of all templates if none of them is the default; else None.
      others: sources of the templates that are not the default, by name.
    """

    source: str | None
    path: Path
    named: list[str] | None = None
    others: Mapping[str, str] = MappingProxyType({})


def _read(path: Path) -> bytes:
    """Return the contents of a file. Raise TokenizerError if it is too large."""
    try:
        return read_bounded(path)
    except ValueError as error:
        raise TokenizerError(str(error)) from error


def read_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate:
    """Read the chat template of a directory.

    In order of precedence, the default template is additional_chat_templates/default.jinja, chat_template.jinja, or
    chat_template of tokenizer_config.json, which may contain several templates by name. If one of the first two places
    has any template, tokenizer_config.json is not used. An empty template means
    that there is no template: later places are not searched.

    Raises:
      TokenizerError: a template is not a text, or its file cannot be read.
    """
    folder, file = directory / "additional_chat_templates", directory / "chat_template.jinja"
    files = {path.name.removesuffix(".jinja"): path for path in sorted(folder.glob("*.jinja"))}
    file = files.pop("default", file)
    others = {name: _read_source(path) for name, path in files.items()}
    if is_file(file):
        return ChatTemplate(_read_source(file) or None, file, others=others)
    if others:
        return ChatTemplate(None, folder, [*others], others)
    path, source = directory / "tokenizer_config.json", config.get("chat_template")
    if isinstance(source, list | dict):
        templates = _templates_by_name(source, path)
        others = {name: text for name, text in templates.items() if name != "default" and isinstance(text, str)}
        if "default" not in templates:
            return ChatTemplate(None, path, sorted(templates), others)
        source = templates["default"]
    if not isinstance(source, str | None):
        raise TokenizerError(f"{path}: expected chat_template to be a text, got {type(source).__name__}")
    return ChatTemplate(source or None, path, others=others)


def _read_source(path: Path) -> str:
    try:
        return read_bounded(path).decode("utf-8")
    except ValueError as error:
        raise TokenizerError(f"{path}: the chat template is malformed: {error}") from error


def _templates_by_name(source: list[Any] | dict[str, Any], path: Path) -> dict[str, Any]:
    """Return named templates, of an object or of a list of objects with a name and a template each."""
    if isinstance(source, dict):
        return source
    if wrong := [entry for entry in source if not isinstance(entry, dict) or not isinstance(entry.get("name"), str)]:
        raise TokenizerError(f"{path}: expected each chat_template to have a name, got {shown(wrong[0])}")
    return {entry["name"]: entry.get("template") for entry in source}


def _kind(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the name of the class with which transformers loads a directory."""
    model = _read_object(directory / "config.json")
    name, path = config.get("tokenizer_class"), directory / "tokenizer_config.json"
    if name is None:
        name, path = model.get("tokenizer_class"), directory / "config.json"
    if not isinstance(name, str | None):
        raise TokenizerError(f"{path}: expected tokenizer_class to be a text, got {shown(name)}")
    family = model.get("model_type")
    default = _CLASS_OF_FAMILY.get(family) if isinstance(family, str) else None
    kind = name.removesuffix("Fast") if name else default or TOKENIZERS_BACKEND
    if kind in _UNSUPPORTED:
        raise TokenizerError(
            f"{path}: tokenizer_class {name} is not supported; expected {', '.join(_DEFAULT_TOKENS)} or"
            f" {TOKENIZERS_BACKEND}, which uses tokenizer.json unchanged"
        )
    if kind == "LlamaTokenizer" and b'"ByteLevel"' in _read(directory / "tokenizer.json"):
        return TOKENIZERS_BACKEND  # DeepSeek and Llama 3 name this class, but their tokenizers are byte-level
    if kind in _DEFAULT_TOKENS:
        return kind
    code = config.get("auto_map")
    has_code = code.get("AutoTokenizer") is not None if isinstance(code, dict) else bool(code)
    if has_code and (not name or kind not in _SAME_AS_BACKEND):
        raise TokenizerError(
            f"{directory / 'tokenizer_config.json'}: auto_map: the tokenizer is Python code, which is not executed"
        )
    return TOKENIZERS_BACKEND


class _SpecialTokens(NamedTuple):
    """Special tokens of tokenizer_config.json and special_tokens_map.json.

    Attributes:
      named: tokens by name, in the order in which new tokens get their ids.
      extra: tokens without names.
      special: texts that are special tokens if added_tokens.json declares them.
    """

    named: dict[str, Token | None]
    extra: list[Token]
    special: set[str]


def _special_tokens(
    config: Mapping[str, Any], special_map: Mapping[str, Any], config_path: Path, map_path: Path
) -> _SpecialTokens:
    """Merge the special tokens of two files. special_tokens_map.json overrides tokenizer_config.json, except that
    tokens with names of a model, such as image_token, that are text in tokenizer_config.json take precedence."""
    entries = {key: (value, config_path) for key, value in config.items()}
    if "additional_special_tokens" in entries and not config.get("extra_special_tokens"):
        entries["extra_special_tokens"] = entries.pop("additional_special_tokens")  # the old name of the entry
    of_model = {key: entries.pop(key) for key in config if _is_other_name(key) and isinstance(config[key], str)}
    _move_named_extras(entries, of_model)
    for key, value in special_map.items():
        if isinstance(value, dict) and key != "extra_special_tokens":
            value = {**value, "special": True}
        elif isinstance(value, list) and key == "extra_special_tokens":
            value = _union(entries.get(key, (None, config_path))[0], value)
        entries[key] = value, map_path
    _move_named_extras(entries, of_model)

    standard = {name: entries[name] for name in NAMES if name in entries}
    special = {_text(value) for value, _ in standard.values()}
    special |= {_text(value) for value in _as_list(*entries.get("extra_special_tokens", (None, config_path)))}
    if "extra_special_tokens" not in entries and "additional_special_tokens" in entries:
        entries["extra_special_tokens"] = entries.pop("additional_special_tokens")
    first: dict[str, tuple[Any, Path]] = {}
    _move_named_extras(entries, first)

    others = {
        key: (value, path)
        for key, (value, path) in entries.items()
        if _is_other_name(key)
        and (isinstance(value, str) or (isinstance(value, dict) and ("__type" in value or path == map_path)))
    }
    named = {**standard, **first, **others, **of_model}
    if wrong := [name for name in named if name in _TEMPLATE_VARIABLES]:
        raise TokenizerError(f"{named[wrong[0]][1]}: expected another name of a token than {wrong[0]}")
    extra, path = entries.get("extra_special_tokens", (None, config_path))
    return _SpecialTokens(
        {name: _read_token(name, *entry) for name, entry in named.items()},
        [token for value in _as_list(extra, path) if (token := _read_token("extra_special_tokens", value, path))],
        {text for text in special if text is not None},
    )


def _text(value: Any) -> str | None:
    """Return the text of a token; None for a typed object, which transformers does not compare with added tokens."""
    if isinstance(value, dict):
        return None if "__type" in value or not isinstance(value.get("content"), str) else value["content"]
    return value if isinstance(value, str) else None


def _union(first: Any, second: list[Any]) -> list[Any]:
    given = first if isinstance(first, list) else []
    new = [{**token, "special": True} if isinstance(token, dict) else token for token in second]
    return [*given, *(token for token in new if token not in given)]


def _as_list(extra: Any, path: Path) -> list[Any]:
    if not isinstance(extra, list | None):
        raise TokenizerError(f"{path}: expected extra_special_tokens to be a list or an object, got {shown(extra)}")
    return extra or []


def _is_other_name(key: str) -> bool:
    """Return whether an entry may name a token of one model, such as image_token."""
    return key.endswith("_token") and key not in NAMES


def _move_named_extras(entries: dict[str, tuple[Any, Path]], named: dict[str, tuple[Any, Path]]) -> None:
    """Move extra tokens with names, which are an object instead of a list, to the named tokens."""
    extra, path = entries.get("extra_special_tokens", (None, None))
    if isinstance(extra, dict) and path is not None:
        del entries["extra_special_tokens"]
        named |= {name: (token, path) for name, token in extra.items()}


def _declared_by_decoder(decoder: Any, path: Path) -> list[Declared]:
    """Read added_tokens_decoder, which has objects by id."""
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{path}: expected added_tokens_decoder to be an object, got {shown(decoder)}")
    for key in decoder:
        if not (key.isascii() and key.isdecimal() and len(key) <= 9):
            raise TokenizerError(f"{path}: added_tokens_decoder: expected ids, got {shown(key)}")
    return [
        Declared(str(path), int(key), _token_object(f"added_tokens_decoder of {key}", value, path))
        for key, value in decoder.items()
    ]


def _declared_by_file(path: Path, special: set[str]) -> list[Declared]:
    """Read added_tokens.json, which has ids by text."""
    declared = []
    for text, token_id in _read_object(path).items():
        if not is_integer(token_id) or not 0 <= token_id < 10**9:
            raise TokenizerError(f"{path}: expected ids by token, got {shown({text: token_id})}")
        flags = {"special": text in special, "normalized": text not in special}
        declared.append(Declared(str(path), token_id, {"content": text, **flags}))
    return declared


def _read_token(name: str, value: Any, path: Path) -> Token | None:
    """Return a token of a file: None, a text, or an object reduced to its text and flags."""
    return value if isinstance(value, str | None) else _token_object(name, value, path)


def _token_object(name: str, value: Any, path: Path) -> dict[str, Any]:
    token = {key: flag for key, flag in value.items() if key != "__type"} if isinstance(value, dict) else {}
    flags = {key: flag for key, flag in token.items() if key != "content"}
    known = all(key in _FLAGS and isinstance(flag, bool) for key, flag in flags.items())
    if not isinstance(token.get("content"), str) or not known:
        raise TokenizerError(f"{path}: expected {name} to be a text or a token, got {shown(value)}")
    return token


def _read_object(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; empty if it does not exist."""
    return read_json_object(path, TokenizerError) if is_file(path) else {}


def _flag(config: Mapping[str, Any], name: str, path: Path) -> bool | None:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise TokenizerError(f"{path}: expected {name} to be true or false, got {shown(value)}")
    return value


def is_file(path: Path) -> bool:
    """Return whether a file exists. Raises TokenizerError if the path is a folder, pipe or device."""
    try:
        return is_present(path)
    except ValueError as error:
        raise TokenizerError(str(error)) from error
