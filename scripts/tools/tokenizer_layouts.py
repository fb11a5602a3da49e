"""Tokenizer directories as dictionaries, for make_tokenizer_goldens.py and tests/models/test_tokenizer_directories.py.

This module needs only the standard library, because the script runs in an environment without jax.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Files = dict[str, Any]  # Python 3.11, which the script runs on, has no `type` statement
"""Contents of a directory by file name. Texts are written as they are, other values as JSON."""

TEXTS = (
    "hello world",
    "<s>hello</s>",
    "a <|im_start|> hello<|im_end|>world",
    "hello<x> hello <x>hello",
    "HELLO Cafe\u0301 12345's",
    "hi .\n\n  <mask> hi",
    "<bos><|turn>user\n  hello \u2581 <turn|> \n\u4f60<eos>",
)
"""Texts that each layout encodes and decodes."""

QUESTION = "hello <x>"
"""Content of the user's message that chat templates render."""

SHOW_TOKENS = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ sep_token }}|{{ pad_token }}|{{ cls_token }}|{{ mask_token }}"
    "|{{ image_token }}|{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
)
"""Template that shows each named token."""


def write(files: Files, directory: Path) -> None:
    """Write a layout to a directory. config.json names a Llama model, unless the layout has its own."""
    for name, content in {"config.json": {"model_type": "llama"}, **files}.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def added(content: str, token_id: int | None = None, **flags: bool) -> dict[str, Any]:
    """Return an entry of added_tokens with all flags false, except `special` and the given flags."""
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}
    return ({} if token_id is None else {"id": token_id}) | {"content": content, **token}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    """Return a token as transformers writes it in tokenizer_config.json."""
    return {"__type": "AddedToken", **added(content, **flags)}


def decoder(*tokens: dict[str, Any]) -> dict[str, Any]:
    """Return an added_tokens_decoder of tokens with ids."""
    return {str(token["id"]): {key: token[key] for key in token.keys() - {"id"}} for token in tokens}


def byte_level(*tokens: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json with byte-level BPE. Ids from BYTES on are free for added tokens."""
    vocab = {symbol: i for i, symbol in enumerate(_byte_symbols())}
    merges = []
    for word in ("hello", "\u0120world", "\u0120hello"):
        for end in range(2, len(word) + 1):
            if (pair := (word[: end - 1], word[end - 1])) not in merges:
                merges.append(pair)
                vocab.setdefault(word[:end], len(vocab))
    model = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": [list(m) for m in merges]}
    ordinary = {"pre_tokenizer": _BYTE_LEVEL, "post_processor": None, "decoder": _BYTE_LEVEL}
    return _tokenizer(model, tokens, {**ordinary, **parts})


def sentencepiece(*tokens: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the tokenizer.json of a SentencePiece model as BPE with byte fallback, like that of Llama 2."""
    vocab = {token: i for i, token in enumerate(("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))))}
    merges = []
    for character in "\u2581helowrdai":
        vocab[character] = len(vocab)
    for word in ("\u2581hello", "\u2581world", "hello"):
        for end in range(2, len(word) + 1):
            if (pair := (word[: end - 1], word[end - 1])) not in merges:
                merges.append(pair)
                vocab.setdefault(word[:end], len(vocab))
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": vocab,
        "merges": [" ".join(m) for m in merges],
    }
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    ordinary = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace]},
        "pre_tokenizer": None,
        "post_processor": starts_with("<s>", 1),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    }
    return _tokenizer(model, tokens or SENTENCEPIECE, {**ordinary, **parts})


def gemma(*tokens: dict[str, Any], with_bytes: bool = True, **parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json of the form of Gemma 4: BPE with byte fallback that adds no space to the start of a text.

    Spaces in a row and line breaks in a row have tokens. All special tokens are in the vocabulary. The post-processor
    adds no token.
    """
    vocab = {token: i for i, token in enumerate((*_GEMMA_NAMES, *_GEMMA_CONTROLS))}
    for token in (f"<0x{i:02X}>" for i in range(256 if with_bytes else 0)):
        vocab[token] = len(vocab)
    for character in "\u2581\nhelowrdausi<|>.":
        vocab[character] = len(vocab)
    merges = []
    for word in ("\u2581\u2581", "\n\n", "hello", "\u2581hello", "\u2581world", "user"):
        for end in range(2, len(word) + 1):
            if (pair := (word[: end - 1], word[end - 1])) not in merges:
                merges.append(pair)
                vocab.setdefault(word[:end], len(vocab))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [list(m) for m in merges],
    }
    space, replaced = {"String": " "}, {"String": "\u2581"}
    sequence = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    ordinary = {
        "normalizer": {"type": "Replace", "pattern": space, "content": "\u2581"},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": sequence[:1],
            "pair": sequence,
            "special_tokens": {},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": replaced, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    }
    return _tokenizer(model, tokens or GEMMA, {**ordinary, **parts})


def words(*tokens: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json whose tokens are words."""
    names = ("[UNK]", "<s>", "</s>", "hello", "world", "hi", ".", "a", "n't")
    model = {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "[UNK]"}
    return _tokenizer(model, tokens, {"pre_tokenizer": {"type": "WhitespaceSplit"}, **parts})


def unigram(*tokens: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json with a unigram model."""
    scores = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "\u2581hello": -1.0, "\u2581world": -1.0, "\u2581": -2.0}
    scores |= dict.fromkeys("helowrdai.", -3.0)
    model = {"type": "Unigram", "unk_id": 0, "vocab": [list(item) for item in scores.items()]}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return _tokenizer(model, tokens, {"pre_tokenizer": metaspace, "decoder": metaspace, **parts})


def starts_with(token: str, token_id: int, end: tuple[str, int] | None = None) -> dict[str, Any]:
    """Return a post-processor that adds a token at the start of the text, and optionally one at the end."""
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    names = {token: token_id}
    if end is not None:
        single.append({"SpecialToken": {"id": end[0], "type_id": 0}})
        names[end[0]] = end[1]
    specials = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in names.items()}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}


def _byte_symbols() -> list[str]:
    """Return the characters that represent the bytes 0 to 255 in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(i) if i in printable else chr(next(others)) for i in range(256)]


def _tokenizer(model: dict[str, Any], tokens: tuple[dict[str, Any], ...], parts: dict[str, Any]) -> dict[str, Any]:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, "added_tokens": list(tokens), **parts, "model": model}


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_GEMMA_NAMES = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_GEMMA_CONTROLS = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|image|>", '<|"|>')
GEMMA = tuple(added(token, i) for i, token in enumerate((*_GEMMA_NAMES, *_GEMMA_CONTROLS)))
SENTENCEPIECE = (added("<unk>", 0), added("<s>", 1), added("</s>", 2))
BYTES = len(byte_level()["model"]["vocab"])
"""First id after the vocabulary of `byte_level`."""

_S, _E, _X, _START, _END = (BYTES + i for i in range(5))
_CHAT = (added("<s>", _S), added("</s>", _E))
_PLAIN_CHAT = (added("<s>", _S, special=False), added("</s>", _E, special=False))
_HEL = byte_level()["model"]["vocab"]["hel"]
_PIECES = len(sentencepiece()["model"]["vocab"])
_IM = ["<|im_start|>", "<|im_end|>"]
_NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
_GEMMA_CONFIG = {
    "tokenizer_class": "GemmaTokenizer",
    "backend": "tokenizers",
    "processor_class": "Gemma4Processor",
    "padding_side": "left",
    **{f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")},
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "think_token": "<|think|>",
    "image_token": "<|image|>",
    "extra_special_tokens": ["<|video|>"],
}
"""tokenizer_config.json of the form of Gemma 4."""


def files(tokenizer: dict[str, Any], config: dict[str, Any] | None = None, **others: Any) -> Files:
    """Return a directory. The keys of `others` are special_tokens_map and added_tokens, without the file extension."""
    given = {} if config is None else {"tokenizer_config.json": {"chat_template": SHOW_TOKENS, **config}}
    return {"tokenizer.json": tokenizer, **given, **{f"{name}.json": content for name, content in others.items()}}


def _of_llama(name: str, config: dict[str, Any], tokenizer: dict[str, Any] | None = None, **others: Any) -> Files:
    return files(tokenizer or sentencepiece(), {"tokenizer_class": name, **config}, **others)


def _of_qwen(config: dict[str, Any] | None, tokenizer: dict[str, Any], **others: Any) -> Files:
    return {**files(tokenizer, config, **others), "config.json": {"model_type": "qwen3"}}


def _of_gemma(config: dict[str, Any] | None, tokenizer: dict[str, Any] | None = None, **others: Any) -> Files:
    return {**files(tokenizer or gemma(), config, **others), "config.json": {"model_type": "gemma4"}}


def _with_templates(config: Any, **templates: str) -> Files:
    """Return a directory with templates: `file` is chat_template.jinja, others are in additional_chat_templates."""
    given = {} if config is None else {"chat_template": config}
    names = {name: f"additional_chat_templates/{name}.jinja" for name in templates} | {"file": "chat_template.jinja"}
    return {
        "tokenizer.json": byte_level(*_CHAT),
        "tokenizer_config.json": {**_NAMED, **given},
        **{names[name]: source for name, source in templates.items()},
    }


_USES = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
_LOWER = {"type": "Lowercase"}
_PADDING = {
    "strategy": {"Fixed": 40},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": _X,
    "pad_type_id": 0,
    "pad_token": "<x>",
}
_TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
_OTHER_REGEX = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}|\s+|\S+"}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ],
}

LAYOUTS: dict[str, Files] = {
    # --- tokenizer_config.json and special_tokens_map.json
    "tokenizer.json only": files(byte_level()),
    "no named tokens": files(byte_level(*_CHAT), {}),
    "named tokens of the config": files(byte_level(*_CHAT), _NAMED),
    "named tokens missing from tokenizer.json": files(byte_level(), _NAMED),
    "named tokens of the map": files(byte_level(), {}, special_tokens_map=_NAMED),
    "map without a config": files(byte_level(), None, special_tokens_map=_NAMED) | {"chat_template.jinja": SHOW_TOKENS},
    "map of objects": files(
        byte_level(),
        {},
        special_tokens_map={"bos_token": added("<s>", rstrip=True), "eos_token": added("</s>", lstrip=True)},
    ),
    "map of objects without flags": files(
        byte_level(normalizer=_LOWER), {}, special_tokens_map={"bos_token": {"content": "HELLO"}, "eos_token": "Cafe"}
    ),
    "map overrides the config": files(
        byte_level(*_CHAT), _NAMED, special_tokens_map={"bos_token": "</s>", "mask_token": "<mask>"}
    ),
    "null in the config, token in the map": files(byte_level(*_CHAT), {"bos_token": None}, special_tokens_map=_NAMED),
    "token in the config, null in the map": files(byte_level(*_CHAT), _NAMED, special_tokens_map={"bos_token": None}),
    "map is ignored with added_tokens_decoder": files(
        byte_level(*_CHAT),
        {"eos_token": "</s>", "added_tokens_decoder": decoder(*_CHAT)},
        special_tokens_map={"bos_token": "<s>", "mask_token": "<mask>"},
    ),
    "map is ignored with an empty added_tokens_decoder": files(
        byte_level(*_CHAT), {"added_tokens_decoder": {}}, special_tokens_map=_NAMED
    ),
    "all named tokens": files(
        byte_level(*_CHAT),
        {
            **_NAMED,
            "unk_token": "<unk>",
            "sep_token": "<sep>",
            "pad_token": "<x>",
            "cls_token": "<cls>",
            "mask_token": typed("<mask>", lstrip=True),
        },
    ),
    "two names for one token": files(byte_level(), {"bos_token": "<x>", "eos_token": "<x>", "pad_token": "</s>"}),
    "typed tokens": files(
        byte_level(*_CHAT), {"bos_token": typed("<s>", lstrip=True), "eos_token": typed("<x>", rstrip=True)}
    ),
    "typed tokens that are not special": files(
        byte_level(normalizer=_LOWER), {"eos_token": typed("<X>", special=False, normalized=True)}
    ),
    "token of the vocabulary": files(byte_level(), {"bos_token": "hello", "eos_token": "</s>"}),
    # --- flags
    "not special in tokenizer.json": files(byte_level(*_PLAIN_CHAT), {}),
    "not special in tokenizer.json, but named": files(byte_level(*_PLAIN_CHAT), _NAMED),
    "not special in tokenizer.json, but named in the map": files(
        byte_level(*_PLAIN_CHAT), {}, special_tokens_map=_NAMED
    ),
    "not special in tokenizer.json, but additional": files(
        byte_level(*_PLAIN_CHAT), {"additional_special_tokens": ["<s>", "</s>"]}
    ),
    "not special in added_tokens_decoder, but named": files(
        byte_level(*_PLAIN_CHAT), {**_NAMED, "added_tokens_decoder": decoder(*_PLAIN_CHAT)}
    ),
    "added_tokens_decoder changes flags": files(
        byte_level(*_PLAIN_CHAT),
        {"added_tokens_decoder": decoder(added("<s>", _S, rstrip=True), added("</s>", _E, lstrip=True))},
    ),
    "added_tokens_decoder removes special": files(byte_level(*_CHAT), {"added_tokens_decoder": decoder(*_PLAIN_CHAT)}),
    "single word": files(byte_level(added("<x>", BYTES, single_word=True))),
    "single word of added_tokens_decoder": files(
        byte_level(), {"added_tokens_decoder": decoder(added("hel", _HEL, single_word=True, special=False))}
    ),
    "stripping flags": files(byte_level(added("<x>", BYTES, lstrip=True, rstrip=True))),
    "normalized token": files(
        byte_level(added("<X>", BYTES, normalized=True, special=False), normalizer=_LOWER),
        {"additional_special_tokens": ["</S>"]},
    ),
    "split_special_tokens": files(
        byte_level(*_CHAT, added("<x>", _X, special=False)), {**_NAMED, "split_special_tokens": True}
    ),
    # --- added_tokens.json and added_tokens_decoder
    "added_tokens.json": files(byte_level(*_CHAT), {}, added_tokens={"<x>": _X, "<|im_start|>": _START}),
    "added_tokens.json in another order": files(byte_level(), None, added_tokens={"<x>": _E, "<s>": _S}),
    "added_tokens.json with a named token": files(
        byte_level(*_CHAT), {**_NAMED, "pad_token": "<x>"}, added_tokens={"<x>": _X, "<|im_start|>": _START}
    ),
    "added_tokens.json with an extra token": files(
        byte_level(*_CHAT), {"additional_special_tokens": _IM}, added_tokens={"<|im_start|>": _X, "<x>": _START}
    ),
    "added_tokens.json with an extra token of the map": files(
        byte_level(*_CHAT),
        {},
        added_tokens={"<|im_start|>": _X, "<x>": _START},
        special_tokens_map={"additional_special_tokens": _IM},
    ),
    "added_tokens.json is ignored with added_tokens_decoder": files(
        byte_level(*_CHAT), {"added_tokens_decoder": decoder(*_CHAT)}, added_tokens={"<x>": _X}
    ),
    "added_tokens_decoder adds": files(
        byte_level(*_CHAT),
        {"added_tokens_decoder": decoder(*_CHAT, added("<x>", _X, special=False), added("<|im_start|>", _START))},
    ),
    "added_tokens_decoder in another order": files(
        byte_level(), {"added_tokens_decoder": decoder(added("<x>", _E), added("<s>", _S))}
    ),
    "added_tokens_decoder lacks tokens of tokenizer.json": files(
        byte_level(*_CHAT, added("<x>", _X)), {"added_tokens_decoder": decoder(added("<|im_start|>", _START))}
    ),
    "all four files": files(
        byte_level(*_CHAT),
        {"bos_token": "<s>", "additional_special_tokens": _IM},
        special_tokens_map={"eos_token": "</s>", "pad_token": "<pad>"},
        added_tokens={"<x>": _X},
    ),
    # --- additional and extra tokens
    "additional tokens": files(byte_level(*_CHAT), {**_NAMED, "additional_special_tokens": _IM}),
    "additional typed tokens": files(
        byte_level(*_CHAT), {"additional_special_tokens": [typed("<|im_start|>", lstrip=True), typed("<x>")]}
    ),
    "additional tokens of the map": files(
        byte_level(*_CHAT), {}, special_tokens_map={"additional_special_tokens": _IM}
    ),
    "additional tokens in config and map": files(
        byte_level(*_CHAT),
        {"additional_special_tokens": ["<x>"]},
        special_tokens_map={"additional_special_tokens": _IM},
    ),
    "no additional tokens in the config, some in the map": files(
        byte_level(*_CHAT), {"additional_special_tokens": []}, special_tokens_map={"additional_special_tokens": _IM}
    ),
    "extra tokens": files(byte_level(*_CHAT), {"extra_special_tokens": [*_IM, typed("<x>", rstrip=True)]}),
    "extra and additional tokens": files(
        byte_level(*_CHAT), {"extra_special_tokens": ["<x>"], "additional_special_tokens": _IM}
    ),
    "extra tokens in config and map": files(
        byte_level(*_CHAT),
        {"extra_special_tokens": ["<x>"]},
        special_tokens_map={"extra_special_tokens": ["<|im_start|>", "<x>"]},
    ),
    "extra tokens with names": files(byte_level(), {"extra_special_tokens": {"image_token": "<x>", "a": "<mask>"}}),
    "extra tokens with names in the map": files(
        byte_level(), {}, special_tokens_map={"extra_special_tokens": {"image_token": "<x>"}}
    ),
    "extra and additional tokens with names": files(
        byte_level(),
        {
            "extra_special_tokens": {"image_token": "<x>"},
            "additional_special_tokens": {"a": "<mask>", "b": typed("<img>", rstrip=True)},
            "audio_token": typed("<audio>"),
        },
    ),
    "additional tokens with names": files(byte_level(), {"additional_special_tokens": {"image_token": "<x>"}}),
    "other named tokens": files(
        byte_level(), {"image_token": "<x>", "audio_token": typed("<mask>", lstrip=True), "add_bos_token": True}
    ),
    "other named tokens of the map": files(byte_level(), {}, special_tokens_map={"image_token": "<x>"}),
    "order of new tokens": files(
        byte_level(),
        {
            "image_token": "<img>",
            "mask_token": "<mask>",
            "additional_special_tokens": ["<x>"],
            "audio_token": typed("<audio>"),
            "bos_token": "<s>",
        },
        special_tokens_map={"eos_token": "</s>"},
        added_tokens={"<|im_end|>": BYTES},
    ),
    # --- post-processors, truncation and padding
    "add_bos_token without a post-processor": files(byte_level(*_CHAT), {**_NAMED, "add_bos_token": True}),
    "add_bos_token with a byte-level post-processor": files(
        byte_level(*_CHAT, post_processor=_BYTE_LEVEL), {**_NAMED, "add_bos_token": True, "add_eos_token": True}
    ),
    "post-processor with both ends": files(
        byte_level(*_CHAT, post_processor=starts_with("<s>", _S, ("</s>", _E))),
        {**_NAMED, "add_bos_token": False, "add_eos_token": False},
    ),
    "post-processor with a token that is not special": files(
        byte_level(*_PLAIN_CHAT, post_processor=starts_with("<s>", _S)), _NAMED
    ),
    "padding names the pad_token": files(byte_level(*_CHAT, added("<x>", _X), padding=_PADDING), {}),
    "padding and a named pad_token": files(byte_level(padding=_PADDING), {"pad_token": None}),
    "truncation": files(
        byte_level(*_CHAT, truncation=_TRUNCATION), {"model_max_length": 2, "truncation_side": "left", **_NAMED}
    ),
    # --- decoding
    "clean_up_tokenization_spaces of BPE": files(byte_level(), {"clean_up_tokenization_spaces": True}),
    "clean_up_tokenization_spaces of BPE by force": files(
        byte_level(),
        {
            "clean_up_tokenization_spaces": True,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
        },
    ),
    "clean_up_tokenization_spaces of words": files(words(), {"clean_up_tokenization_spaces": True}),
    "words": files(words(added("<s>", 1), added("</s>", 2)), _NAMED),
    "words with missing tokens": files(words(), {**_NAMED, "pad_token": "<x>"}),
    "unigram": files(unigram(), {**_NAMED, "unk_token": "<unk>", "additional_special_tokens": ["<x>"]}),
    # --- SentencePiece as BPE
    "sentencepiece": files(sentencepiece()),
    "sentencepiece with added tokens": files(
        sentencepiece(), {**_NAMED, "additional_special_tokens": ["<x>"]}, added_tokens={"<|im_start|>": _PIECES}
    ),
    "sentencepiece with Metaspace": files(
        sentencepiece(
            normalizer=None,
            pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        ),
        {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<x>"]},
    ),
    # --- tokenizer_class
    "LlamaTokenizer": _of_llama("LlamaTokenizer", {}),
    "LlamaTokenizerFast": _of_llama("LlamaTokenizerFast", {"additional_special_tokens": ["<x>"], "legacy": False}),
    "LlamaTokenizer, legacy": _of_llama("LlamaTokenizer", {"legacy": True, "additional_special_tokens": ["<x>"]}),
    "LlamaTokenizer, legacy is null": _of_llama("LlamaTokenizer", {"legacy": None, "add_prefix_space": None}),
    "LlamaTokenizer without a prefix": _of_llama("LlamaTokenizer", {"add_prefix_space": False, "pad_token": "<x>"}),
    "LlamaTokenizer with added_tokens_decoder": _of_llama(
        "LlamaTokenizer",
        {
            "add_bos_token": True,
            "bos_token": typed("<s>", normalized=True, special=False),
            "added_tokens_decoder": decoder(*SENTENCEPIECE, added("<x>", _PIECES, special=False)),
        },
    ),
    "LlamaTokenizer without named tokens": _of_llama(
        "LlamaTokenizer", {"bos_token": None, "eos_token": None, "unk_token": None, "added_tokens_decoder": {}}
    ),
    "LlamaTokenizer, not special": _of_llama(
        "LlamaTokenizer", {}, sentencepiece(added("<s>", 1, special=False), added("</s>", 2, special=False))
    ),
    "LlamaTokenizer without a post-processor": _of_llama(
        "LlamaTokenizer", {"add_bos_token": True}, sentencepiece(post_processor=None)
    ),
    "LlamaTokenizer of config.json": {
        **files(sentencepiece(), {}),
        "config.json": {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"},
    },
    "LlamaTokenizer with byte-level BPE": _of_llama("LlamaTokenizer", _NAMED, byte_level(*_CHAT)),
    "LlamaTokenizerFast with byte-level BPE": {
        **_of_llama("LlamaTokenizerFast", {**_NAMED, "add_bos_token": True}, byte_level(*_CHAT)),
        "config.json": {"model_type": "deepseek_v3"},
    },
    "unknown class": files(byte_level(*_CHAT), {**_NAMED, "tokenizer_class": "AcmeTokenizer"}),
    "TokenizersBackend": files(byte_level(*_CHAT), {**_NAMED, "tokenizer_class": "TokenizersBackend"}),
    "PreTrainedTokenizer": files(byte_level(*_CHAT), {**_NAMED, "tokenizer_class": "PreTrainedTokenizer"}),
    "Qwen3 without a config": _of_qwen(None, byte_level(*_CHAT, pre_tokenizer=_OTHER_REGEX)),
    "Qwen3 without a class": _of_qwen({"eos_token": "<|im_end|>"}, byte_level(pre_tokenizer=_OTHER_REGEX)),
    "Qwen2Tokenizer": _of_qwen(
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_bos_token": False,
            "additional_special_tokens": _IM,
            "added_tokens_decoder": decoder(
                added("<|endoftext|>", BYTES),
                added("<|im_start|>", BYTES + 1, lstrip=True),
                added("<|im_end|>", BYTES + 2),
                added("<x>", BYTES + 3, special=False),
            ),
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "split_special_tokens": False,
            "clean_up_tokenization_spaces": False,
        },
        byte_level(
            added("<|endoftext|>", BYTES),
            added("<|im_start|>", BYTES + 1),
            added("<|im_end|>", BYTES + 2),
            added("<x>", BYTES + 3, special=False),
            post_processor=_BYTE_LEVEL,
        ),
    ),
    "Qwen2TokenizerFast with a prefix": _of_qwen(
        {"tokenizer_class": "Qwen2TokenizerFast", "add_prefix_space": True, "additional_special_tokens": ["</s>"]},
        byte_level(*_PLAIN_CHAT),
    ),
    "Qwen2Tokenizer of a Llama model": files(
        byte_level(*_CHAT, pre_tokenizer=_OTHER_REGEX), {"tokenizer_class": "Qwen2Tokenizer"}
    ),
    "Qwen3 with tokenizer.json": _of_qwen(
        {**_NAMED, "tokenizer_class": "PreTrainedTokenizerFast"}, byte_level(*_CHAT, pre_tokenizer=_OTHER_REGEX)
    ),
    "Qwen3 with the class of DeepSeek": _of_qwen(
        {**_NAMED, "tokenizer_class": "LlamaTokenizerFast"}, byte_level(*_CHAT, pre_tokenizer=_OTHER_REGEX)
    ),
    "Qwen3 with an unknown class": _of_qwen(
        {**_NAMED, "tokenizer_class": "AcmeTokenizer"}, byte_level(*_CHAT, pre_tokenizer=_OTHER_REGEX)
    ),
    "GPT2Tokenizer": files(
        byte_level(*_CHAT, pre_tokenizer=_OTHER_REGEX), {**_NAMED, "tokenizer_class": "GPT2Tokenizer"}
    ),
    "GPT2TokenizerFast with a prefix": files(
        byte_level(*_CHAT, normalizer=_LOWER), {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}
    ),
    "GPT2Tokenizer with padding": files(
        byte_level(added("<x>", BYTES), padding=_PADDING), {"tokenizer_class": "GPT2Tokenizer"}
    ),
    "Gemma 4": _of_gemma(_GEMMA_CONFIG),
    "Gemma 4 without a class": _of_gemma({**_GEMMA_CONFIG, "tokenizer_class": None}),
    "Gemma 4 without a config": _of_gemma(None),
    "Gemma 4 with TokenizersBackend": _of_gemma(
        {**_GEMMA_CONFIG, "tokenizer_class": "TokenizersBackend"}, gemma(pre_tokenizer=None)
    ),
    "GemmaTokenizer adds the first token": _of_gemma(
        {**_GEMMA_CONFIG, "add_bos_token": True, "added_tokens_decoder": decoder(*GEMMA)},
        gemma(post_processor=starts_with("<bos>", 2)),
    ),
    "GemmaTokenizer without a post-processor": _of_gemma(
        {**_GEMMA_CONFIG, "add_bos_token": True}, gemma(post_processor=None)
    ),
    "GemmaTokenizerFast with only a class": _of_gemma({"tokenizer_class": "GemmaTokenizerFast"}),
    "GemmaTokenizer ignores other parts": _of_gemma(
        _GEMMA_CONFIG, gemma(normalizer=_LOWER, pre_tokenizer=_OTHER_REGEX, decoder=None)
    ),
    "GemmaTokenizer of a Llama vocabulary": _of_gemma({"tokenizer_class": "GemmaTokenizer"}, sentencepiece()),
    "GemmaTokenizer without byte tokens": _of_gemma(_GEMMA_CONFIG, gemma(with_bytes=False)),
    "GemmaTokenizer with another unknown token": _of_gemma(
        {**_GEMMA_CONFIG, "unk_token": typed("<pad>")}, gemma(with_bytes=False)
    ),
    "GemmaTokenizer without some tokens": _of_gemma({**_GEMMA_CONFIG, "mask_token": None, "bos_token": None}),
    # --- chat templates
    "template list": _with_templates([{"name": "tool_use", "template": "x"}, {"name": "default", "template": _USES}]),
    "template list without default": _with_templates([{"name": "tool_use", "template": _USES}]),
    "template list with default twice": _with_templates(
        [{"name": "default", "template": "x"}, {"name": "default", "template": _USES}]
    ),
    "template object": _with_templates({"default": _USES, "tool_use": "x"}),
    "template object without default": _with_templates({"rag": _USES}),
    "empty template list": _with_templates([]),
    "empty template": _with_templates(""),
    "null template": _with_templates(None) | {"chat_template.json": {"chat_template": "x"}},
    "template file": _with_templates("x", file=_USES),
    "template file and list": _with_templates([{"name": "rag", "template": "x"}], file=_USES),
    "empty template file": _with_templates(_USES, file=""),
    "template folder without default": _with_templates(_USES, rag="x"),
    "template folder and file": _with_templates("x", file=_USES, rag="x"),
    "template folder with default": _with_templates("x", default=_USES, rag="x"),
    "template folder overrides the file": _with_templates("x", file="x", default=_USES),
    "template file with carriage returns": _with_templates(
        "x", file="a\r\n{% if true %}\r\n  b{{ 'c\r\nd' }}\r\n{% endif %}\r\n"
    ),
    "template settings": _with_templates(
        "  {% for i in range(9) %}\n  {% if i == 2 %}{% break %}{% endif %}\n"
        "  {% generation %}{{ i }}{% endgeneration %}\n  {% endfor %}\n{{ {'a': '<\u00e9>'} | tojson(indent=1) }}"
        "{{ dict(a=1).a }}{% set n = namespace(b=2) %}{{ n.b }}\n"
    ),
}
"""Directories that transformers and the project load. The names are the keys of tokenizer_layouts.json."""
