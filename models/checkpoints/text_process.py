"""Tokenizer, chat template and grammars of one model, run in a separate process with limited time and memory.

They are untrusted input. A template may loop or allocate terabytes in ways that jinja2's sandbox does not prevent, and
the tokenizers library panics or aborts on some files. llguidance needs minutes for some grammars, and overflows the
stack for others. In a separate process these failures only end the process.
`checkpoints.tokenizer` is the client. A request is one line of JSON, [function, arguments...]; the response is [true,
result] or [false, reason]. This module must not import jax or the project, because these imports take seconds.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import resource
import sys
import threading
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, pre_tokenizers

LARGEST_TEXT = 2**26
"""Maximum number of characters that a template may render."""

GRAMMAR_STACK = 2**23
"""Stack of the thread that compiles a grammar, in bytes."""

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words that Qwen2Tokenizer encodes separately."""

CLEAN_UP = (
    *((f" {end}", end) for end in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
"""Replacements that remove spaces before punctuation and English contractions, in order."""


class Text:
    """Tokenizer and chat template of a model. Each public method handles one kind of request."""

    core: tokenizers.Tokenizer
    templates: dict[str, jinja2.Template]
    special_tokens: dict[str, str]
    clean_up: bool
    vocabulary: Any

    def __init__(self) -> None:
        self.templates = {}

    def load_core(self, path: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Load tokenizer.json and add the special tokens of other files, in the order of transformers.

        Args:
          path: path of tokenizer.json.
          settings: `TokenizerSettings` as JSON.

        Returns:
          `special_tokens`: texts of the special tokens by name. `contradictions`: [file, token, id in the file, id in
          the tokenizer, token with the id in the file] for declared ids that the tokens do not have, at most one.
        """
        core = tokenizers.Tokenizer.from_file(path)
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        named, extra, kind = settings["named"], settings["extra"], settings["kind"]
        if core.padding is not None and settings["takes_pad_token"]:
            named["pad_token"] = core.padding["pad_token"]
        texts = {name: text_of(token) for name, token in named.items() if token is not None}
        if kind != "TokenizersBackend":
            core = rebuilt(core, kind, content["model"], settings)

        stored = [(path, token.pop("id"), token) for token in content.get("added_tokens") or []]
        declared = [(entry["file"], entry["token_id"], entry["token"]) for entry in settings["declared"]]
        loaded = [*declared, *stored] if kind == "TokenizersBackend" else declared  # others do not load `stored`
        if settings["declares_stored"]:
            declared = loaded = [*declared, *stored]
        tokens = new_tokens(core, declared, [*named.values(), *extra])
        core.add_tokens([as_special(token, texts.values()) for token in tokens])
        if kind == "Qwen2Tokenizer":
            every = dict.fromkeys([*texts.values(), *map(text_of, extra)])
            core.add_tokens([tokenizers.AddedToken(text, special=True) for text in every])

        core.no_truncation()  # settings from training would change prompts
        core.no_padding()
        core.encode_special_tokens = settings["split_special_tokens"]
        is_bpe = type(core.model).__name__ == "BPE"
        self.clean_up = not is_bpe if settings["clean_up"] is None else settings["clean_up"]
        self.core, self.special_tokens = core, texts
        contradictions = (
            [file, token["content"], token_id, core.token_to_id(token["content"]), core.id_to_token(token_id)]
            for file, token_id, token in loaded
            if core.token_to_id(token["content"]) != token_id
        )
        return {"special_tokens": texts, "contradictions": list(itertools.islice(contradictions, 1))}

    def load_template(self, source: str) -> None:
        """Compile a chat template. It is stored for `render`."""
        self.templates = {source: environment().from_string(source)}

    def render(self, source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render a chat.

        Args:
          source: source of the template. The newest template is stored, so that it is compiled once.
          messages: messages of the chat, with the keys that the template expects.
          variables: other variables of the template. They override special tokens.
        """
        if source not in self.templates:
            self.load_template(source)
        # Templates may test tools and documents with `is none`, which is false for undefined variables.
        assumed = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        text = self.templates[source].render({**assumed, **self.special_tokens, **variables})
        if len(text) > LARGEST_TEXT:
            raise ValueError(f"it makes {len(text):,} characters, more than {LARGEST_TEXT:,}")
        return text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text = self.core.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return cleaned_up(text) if self.clean_up else text

    def pieces(self) -> dict[str, Any]:
        """Return the ids and texts of all tokens, the ids of special tokens, the decoder and replacements."""
        ids = sorted(set(self.core.get_vocab(with_added_tokens=True).values()))
        texts = [self.core.id_to_token(token_id) for token_id in ids]
        # The library's set of special tokens may differ from the flags: a token stays special if it is added again
        # without the flag.
        decoder, self.core.decoder = self.core.decoder, None
        added = self.core.get_added_tokens_decoder()
        special = [token_id for token_id in added if not self.core.decode([token_id], skip_special_tokens=True)]
        self.core.decoder = decoder
        return {
            "ids": ids,
            "texts": texts,
            "special": special,
            "decoder": None if decoder is None else json.loads(decoder.__getstate__()),
            "clean_up": CLEAN_UP if self.clean_up else (),
        }

    def load_vocabulary(self, tokens: list[str], special: list[int], ends: list[int]) -> None:
        """Prepare the vocabulary of a model for `check_grammar`.

        Args:
          tokens: bytes of each token, decoded as latin-1.
          special: ids of special tokens.
          ends: ids of end-of-sequence tokens.
        """
        import llguidance  # imported here, because most processes check no grammars

        values = [token.encode("latin-1") for token in tokens]
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(values, special, ends[0]))
        self.vocabulary = llguidance.LLTokenizer(wrapped, n_vocab=len(values), eos_token=ends, slices=[])

    def check_grammar(self, kind: str, value: str | list[str]) -> dict[str, str]:
        """Convert and compile a grammar, whose compiled form is dropped. Errors of the compilation are ignored.

        Args:
          kind, value: name and value of a field of `StructuredOutputs`.

        Returns:
          `text`: the result of `grammar_text`; or `error`: the message of its ValueError.
        """
        import llguidance

        try:
            text = grammar_text(kind, value)
        except ValueError as error:
            return {"error": str(error)}
        threading.stack_size(GRAMMAR_STACK)
        thread = threading.Thread(target=llguidance.LLMatcher, args=(self.vocabulary, text), kwargs={"log_level": 0})
        thread.start()
        thread.join()
        return {"text": text}


class _Vocabulary:
    """Tokens for llguidance, which calls the object to encode texts that a grammar forces. No text has tokens here."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end

    def __call__(self, text: bytes) -> list[int]:
        return []


def grammar_text(kind: str, value: str | Sequence[str]) -> str:
    """Return a grammar in a form that llguidance compiles.

    The conversion of a context-free grammar runs in Python. Its time grows with the square of the size.

    Args:
      kind, value: name and value of a field of `StructuredOutputs`.

    Raises:
      ValueError: the grammar is not valid. The message is llguidance's.
    """
    import llguidance

    try:
        match kind:
            case "json":
                return llguidance.LLMatcher.grammar_from_json_schema(str(value))
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(str(value))
            case "choice":
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
                return llguidance.LLMatcher.grammar_from_lark(f"start: {texts}")
            case _:
                return llguidance.grammar_from("grammar", str(value))
    except ValueError as error:
        raise ValueError(f"structured_outputs: {kind}: {error}") from error


def new_tokens(
    core: tokenizers.Tokenizer,
    declared: list[tuple[str, int, dict[str, Any]]],
    special: list[str | dict[str, Any] | None],
) -> list[str | tokenizers.AddedToken]:
    """Return the tokens that transformers adds: declared tokens by id, then special tokens that are not yet added.

    Declared tokens that the tokenizer has are included, because their flags override the flags in the tokenizer.
    """
    by_id = {token_id: tokenizers.AddedToken(**token) for _, token_id, token in declared}
    tokens: list[str | tokenizers.AddedToken] = [by_id[token_id] for token_id in sorted(by_id)]
    present = {token.content for token in [*core.get_added_tokens_decoder().values(), *by_id.values()]}
    for token in special:
        if token is not None and text_of(token) not in present:
            added = tokenizers.AddedToken(**token) if isinstance(token, dict) else token
            if added not in tokens:
                tokens.append(added)
    return tokens


def rebuilt(
    stored: tokenizers.Tokenizer, kind: str, model: dict[str, Any], settings: dict[str, Any]
) -> tokenizers.Tokenizer:
    """Return the tokenizer that a class of transformers builds from vocabulary, merges and post-processor.

    These classes ignore normalizer, pre-tokenizer, decoder and added tokens of tokenizer.json.
    """
    found = type(stored.model).__name__  # the file may leave out the type
    if found != "BPE":
        raise ValueError(
            f"expected a BPE model for {kind}, got {found}; the tokenizer_class TokenizersBackend uses the file"
            " unchanged"
        )
    merges: Any = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    with_bytes, with_prefix = kind in ("LlamaTokenizer", "GemmaTokenizer"), settings["add_prefix_space"]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=model["vocab"], merges=merges, fuse_unk=with_bytes, byte_fallback=with_bytes)
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()] if with_bytes else []
    core.decoder = decoders.Sequence(parts) if with_bytes else decoders.ByteLevel()
    if kind == "LlamaTokenizer":
        with_prefix = with_prefix is not False
        scheme = "never" if not with_prefix else "always" if settings["legacy"] else "first"
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        if with_prefix:
            core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", left=1)])
    elif kind == "GemmaTokenizer":
        if settings["named"]["unk_token"] is None:
            raise ValueError("unk_token: expected a token for GemmaTokenizer, got null")
        core.model.unk_token = text_of(settings["named"]["unk_token"])
        core.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        core.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif kind == "Qwen2Tokenizer":
        split = pre_tokenizers.Split(tokenizers.Regex(QWEN2_WORDS), behavior="isolated")
        symbols = pre_tokenizers.ByteLevel(add_prefix_space=bool(with_prefix), use_regex=False)
        core.normalizer = tokenizers.normalizers.NFC()
        core.pre_tokenizer = pre_tokenizers.Sequence([split, symbols])
    else:  # GPT2Tokenizer
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(with_prefix))
    if stored.post_processor is not None:
        core.post_processor = stored.post_processor
    return core


def text_of(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def as_special(token: str | tokenizers.AddedToken, named: Collection[str]) -> tokenizers.AddedToken:
    """Return a token as transformers adds it: texts and named tokens are special."""
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True)
    if token.content in named:
        token.special = True
    return token


def cleaned_up(text: str) -> str:
    """Remove spaces before punctuation and English contractions."""
    for old, new in CLEAN_UP:
        text = text.replace(old, new)
    return text


def environment() -> jinja2.Environment:
    """Return jinja2's immutable sandbox with the settings and helpers of chat templates in transformers."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    helpers: dict[str, Any] = sandbox.globals
    helpers["raise_exception"] = raise_exception
    helpers["strftime_now"] = strftime_now
    sandbox.filters["tojson"] = to_json
    return sandbox


class GenerationTag(jinja2.ext.Extension):
    """Render the contents of {% generation %}, the tag that marks an assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (typed so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replacement of jinja2's filter `tojson`, which escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def limit(kind: int, amount: int) -> None:
    """Lower a resource limit of this process."""
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if most == resource.RLIM_INFINITY else min(amount, most), most))


def limit_memory(size: int) -> None:
    """Limit the address space of this process to `size` bytes, and disable core dumps."""
    limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # not supported on other systems
        limit(resource.RLIMIT_AS, size)


def limit_time(seconds: int) -> None:
    """End this process after `seconds` more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)


def answer(text: Text, function: str, arguments: list[Any]) -> list[Any]:
    try:
        return [True, getattr(text, function)(*arguments)]
    except BaseException as error:  # noqa: BLE001  panics of the tokenizers library derive from BaseException
        return [False, str(error) or type(error).__name__]


def main(seconds: int, memory: int) -> None:
    """Handle requests from standard input until it is closed."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to stderr, not between the responses
    limit_memory(memory)
    text = Text()
    for line in sys.stdin.buffer:
        limit_time(seconds)
        function, *arguments = json.loads(line)
        replies.write(json.dumps(answer(text, function, arguments)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
