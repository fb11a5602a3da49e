"""`LLM`: loads a model and generates texts with an `Engine`."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import llguidance
import numpy as np

from pallas_attn.models.checkpoints import Tokenizer, load_config, load_model, load_tokenizer
from pallas_attn.models.compilation_cache import enable_compilation_cache
from pallas_attn.models.decoder import AttentionSettings, Decoder, page_size_of
from pallas_attn.models.engine import Engine, EngineConfig, IncomingPages, RequestOutput, SamplingParams, TokenFilter
from pallas_attn.models.engine.outputs import RequestId
from pallas_attn.models.engine.request import NONFINITE, FinishReason, as_integers
from pallas_attn.models.engine.scheduler import RunningRequests
from pallas_attn.models.llm.hub import TOKENIZER_FILES, model_folder
from pallas_attn.models.llm.outputs import OutputSequence, PreparedPrompt, PromptOutputs, ResultMaker, Stream
from pallas_attn.models.llm.results import Generation
from pallas_attn.models.llm.text_output import TextOutput
from pallas_attn.models.llm.token_filters import AllOf, BadWords, GrammarFilter, GrammarTokenizer, token_mask

_FILE_FORMAT = ("dtype", "fp8_block", "mxfp4_experts", "tie_word_embeddings")
"""Fields of a configuration that may differ between the files of old and new weights."""

type Messages = Sequence[Mapping[str, Any]]
"""Chat messages: objects with the keys `role` and `content`, and others that the chat template supports."""

type Prompt = str | Sequence[int]
"""A text, or token ids."""


class LLM:
    """Generates texts with a model from a local folder or the Hugging Face Hub.

    The engine runs in the calls of `generate`, `chat` and of iterators of `stream`, in the thread of the caller. A
    step computes tokens for all unfinished requests, also of other streams. Calls from several threads at the same time
    are not supported, except calls of `prepare`, `encode` and `decode`.

    Attributes:
      engine: the engine, for example for `engine.warmup()`, which compiles all steps, and `engine.stats()`.
      tokenizer: the tokenizer; None if the model has no tokenizer.json. Then only token ids can be used.
      dtype: dtype of weights and activations.

    Args:
      model: path of a Hugging Face folder, or id of a repository of the Hugging Face Hub. Files that the local cache of
        `huggingface_hub` does not have are downloaded.
      dtype: dtype of weights and activations, "float32" or "bfloat16". None or "auto": float32 if config.json says
        float32, otherwise bfloat16.
      tokenizer: another tokenizer, or its folder or repository; None for the tokenizer of the model.
      revision: branch, tag or commit of a repository; None for the main branch.
      settings: settings of attention.
      compilation_cache: folder of compiled programs, with which later processes start faster; "off" for none; None for
        a folder in the cache folder of the user. The setting applies to the whole process, see
        `pallas_attn.models.compilation_cache.enable_compilation_cache`.
      options: fields of `EngineConfig`, such as num_pages, max_model_len and mesh.

    Raises:
      ValueError: the model cannot be found, downloaded or loaded; a file is invalid; or an option has an invalid value.
      NotImplementedError: the model or an option is not supported.
      TypeError: unknown option.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        revision: str | None = None,
        settings: AttentionSettings = AttentionSettings(),
        compilation_cache: str | os.PathLike[str] | None = None,
        **options: Any,
    ):
        if dtype not in (None, "auto", "float32", "bfloat16"):
            raise ValueError(f"dtype: expected auto, float32 or bfloat16, got {dtype!r}")
        config = EngineConfig(**options)
        enable_compilation_cache(compilation_cache)
        folder = model_folder(model, revision)
        if tokenizer is None:
            tokenizer = load_tokenizer(folder)
        elif not isinstance(tokenizer, Tokenizer):
            source = model_folder(tokenizer, files=TOKENIZER_FILES)
            tokenizer = load_tokenizer(source)
            if tokenizer is None:
                raise ValueError(f"tokenizer: expected a folder with a tokenizer.json, {source} has none")
        if config.batch_invariant:
            settings = dataclasses.replace(settings, batch_invariant=True)
        decoder = load_model(folder, None if dtype == "auto" else dtype, settings, mesh=config.mesh)
        if "page_size" not in options:
            config = dataclasses.replace(config, page_size=page_size_of(decoder.config, config.page_size))
        self._start(decoder, config, tokenizer)

    @classmethod
    def of_model(
        cls, model: Decoder, config: EngineConfig = EngineConfig(), *, tokenizer: Tokenizer | None = None
    ) -> Self:
        """Return an LLM of a model in memory.

        Raises:
          ValueError, NotImplementedError: as `Engine`.
        """
        llm = cls.__new__(cls)
        llm._start(model, config, tokenizer)
        return llm

    def _start(self, model: Decoder, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        if config.history is not None:  # `_settle` needs the records of all requests that end in one step
            ranks = 1 if config.mesh is None else config.mesh.size
            config = dataclasses.replace(config, history=max(config.history, 2 * config.max_num_seqs * ranks))
        self.engine = Engine(model, config)
        self.tokenizer = tokenizer
        self.dtype: np.dtype = model.embed_tokens[...].dtype
        self._config = model.config
        self._vocab_size, self._eos_token_ids = model.config.vocab_size, model.config.eos_token_ids
        self._open: dict[RequestId, OutputSequence] = {}  # sequences that the engine computes
        self._ended: deque[OutputSequence] = deque()  # sequences of `_open` whose end `_settle` has not processed
        self._waiting: list[PromptOutputs] = []  # prompts whose later sequences wait for the first
        self._abandoned: list[PromptOutputs] = []  # prompts of streams that were deleted
        # The engine must not refer to this object, so that deleting the last reference to it frees the engine.
        self._on_token = functools.partial(_receive, self._open, self._ended)
        self._results = ResultMaker(self.engine, tokenizer, self._open)
        self._is_closed = False

    # --- text and tokens

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text.

        Args:
          text: the text. Special tokens in it are recognised.
          add_special_tokens: whether tokens are added that the tokenizer adds to prompts, such as the first token.

        Raises:
          ValueError: the model has no tokenizer, or it fails.
        """
        return self._tokenizer("text").encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids to a text. Unknown ids are skipped.

        Raises:
          ValueError: the model has no tokenizer, or it fails.
        """
        return self._tokenizer("token_ids").decode(token_ids, skip_special_tokens=skip_special_tokens)

    # --- generation

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Generate texts that continue prompts. No chat template is applied.

        Args:
          prompts: a text, token ids, or a list of texts and lists of token ids.
          params: sampling parameters of all prompts, or a list with one entry per prompt; None for the defaults.

        Returns:
          One result per prompt, in the same order.

        Raises:
          ValueError: an argument has the wrong type or value, a prompt is too long, or a grammar is not valid. Nothing
            is generated.
          NotImplementedError: the engine does not support a parameter.
        """
        return self._run([self._tokenized(prompt) for prompt in _as_prompts(prompts)], params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[Generation]:
        """Generate the next message of chats.

        Args:
          messages: the messages of a chat, or a list of chats. A message is an object with `role`, `content` and other
            keys that the chat template supports. A system prompt is a first message with the role "system".
          params: as in `generate`.
          tools: JSON schemas of functions that the model may call.
          add_generation_prompt: whether the prompt ends with the tokens that start an answer.
          chat_template: source or name of another template.
          variables: variables of the template, such as `enable_thinking`.

        Returns:
          One result per chat, in the same order.

        Raises:
          ValueError: as `generate`; or the model has no chat template, or the template raises an error.
          NotImplementedError: as `generate`.
        """
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise ValueError(f"messages: expected a list of messages or of chats, got {messages!r:.100}")
        chats: Sequence[Any] = messages
        if messages and isinstance(messages[0], Mapping):
            chats = [messages]
        given = {"tools": tools, "add_generation_prompt": add_generation_prompt, "chat_template": chat_template}
        return self._run([self._rendered(chat, {**given, **variables}) for chat in chats], params)

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> Stream:
        """Generate the continuation of a prompt, or the next message of a chat, in parts.

        Args:
          prompt: a text, token ids, or the messages of a chat.
          params: sampling parameters; None for the defaults.
          tools, add_generation_prompt, chat_template, variables: as in `chat`. Ignored without messages.

        Returns:
          Iterator over `Delta`. Several streams may be used at the same time. If the iterator is closed or deleted
          before its end, its requests are aborted.

        Raises:
          ValueError, NotImplementedError: as `chat`.
        """
        chat: Any = prompt
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            given = {"tools": tools, "add_generation_prompt": add_generation_prompt, "chat_template": chat_template}
            tokenized = self._rendered(chat, {**given, **variables})
        else:
            (one,) = _as_prompts([prompt])
            tokenized = self._tokenized(one)
        return self.add(self._prepared(tokenized, SamplingParams() if params is None else params))

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, matcher: llguidance.LLMatcher | None = None
    ) -> PreparedPrompt:
        """Tokenize a prompt and compile the grammar of its parameters, for `add`.

        Any thread may call this method, also while another thread runs `step`.

        Args:
          prompt: a text, or token ids.
          params: sampling parameters; None for the defaults.
          matcher: result of `grammars.matcher` for `params.structured_outputs`, which is copied, so that several
            prompts can share one compilation; None to compile the grammar.

        Raises:
          ValueError: an argument has the wrong type or value, or a grammar is not valid.
          NotImplementedError: the tokenizer does not support grammars.
        """
        (one,) = _as_prompts([prompt])
        return self._prepared(self._tokenized(one), SamplingParams() if params is None else params, matcher=matcher)

    def add(self, prompt: PreparedPrompt, *, salt: str = "", incoming: IncomingPages | None = None) -> Stream:
        """Queue a prepared prompt.

        Args:
          prompt: the prompt. It can be added once.
          salt: prompts share cached prefixes only with prompts of the same salt.
          incoming: receiver of pages of the prompt, as in `Engine.add_request`.

        Returns:
          Iterator as `stream`.

        Raises:
          ValueError: the prompt is too long, or the engine does not support a parameter. Nothing is queued.
        """
        return Stream(self, self._add(prompt, salt=salt, incoming=incoming))

    # --- the engine

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._open or self._waiting)

    def step(self) -> None:
        """Run one step of the engine, and give its tokens to the streams. Iterators of streams call this method. A
        program that serves several streams may call it itself and read the streams with `Stream.take`.

        Raises:
          ProcessError, jax.errors.JaxRuntimeError: as `Engine.step`. All requests continue with the next call.
        """
        self._check_open()
        while self._abandoned:
            self._drop(self._abandoned.pop())
        aborted = (sequence for request_id, sequence in self._open.items() if self.engine.has_ended(request_id))
        self._ended.extend([sequence for sequence in aborted if sequence not in self._ended])  # by a call of `engine`
        self._settle_ended()
        if self.engine.has_unfinished:
            self.engine.step()
        self._settle_ended()

    def update_weights(
        self,
        weights: Any,
        *,
        draft: Any = None,
        running: RunningRequests = "recompute",
        copy: bool = True,
        in_place: bool = False,
    ) -> None:
        """Replace the weights of the model. No program is compiled again, and cached prefixes are forgotten.

        Args:
          weights: a tree of arrays as for `Engine.update_weights`; or a path or Hub repository as for `LLM`, from which
            weights are loaded. Its config.json must describe the same model, but its weights may be quantised in
            another way, or not at all.
          draft, running, copy, in_place: as in `Engine.update_weights`. `in_place=True` and `copy=False` need a tree,
            because weights from files are loaded before the old weights are released.

        Raises:
          ValueError: as `Engine.update_weights`; or the folder has no valid checkpoint, or the checkpoint of another
            model. The old weights remain.
          NotImplementedError: as `Engine.update_weights`.
        """
        self._check_open()
        if isinstance(weights, str | os.PathLike):
            if in_place or not copy:
                raise ValueError(f"weights: expected a tree of arrays with in_place or without copy, got {weights!r}")
            weights, copy = self._load(model_folder(weights)), False
        self.engine.update_weights(weights, draft=draft, running=running, copy=copy, in_place=in_place)

    def _load(self, folder: Path) -> Decoder:
        """Load a model with the configuration of the engine's model, on the devices of the engine.

        Raises:
          ValueError: as `update_weights`.
        """
        own, given = dataclasses.asdict(self._config), dataclasses.asdict(load_config(folder))
        for name in given:
            # The loaded weights do not depend on the file format. The engine compares the output head.
            if name not in _FILE_FORMAT and given[name] != own.get(name):
                raise ValueError(f"weights: expected {name}={own.get(name)} as the engine's model, got {given[name]}")
        return load_model(folder, self.dtype, mesh=self.engine.config.mesh)

    def close(self) -> None:
        """Abort all requests, and release the engine and its memory on the device. The object cannot be used again.
        Further calls have no effect."""
        if self._is_closed:
            return
        for request_id in [*self._open]:
            self.engine.abort(request_id)
        self._open.clear()
        self._ended.clear()
        self._waiting.clear()
        self.engine.close()
        self._is_closed = True
        del self.engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the LLM is closed")

    def _tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{name}: the model has no tokenizer.json; use token ids, or give a tokenizer")
        return self.tokenizer

    # --- requests

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """Return text and token ids of a prompt."""
        return (prompt, self.encode(prompt)) if isinstance(prompt, str) else (None, prompt)

    def _rendered(self, messages: Messages, arguments: Mapping[str, Any]) -> tuple[str, Sequence[int]]:
        """Return text and token ids of a chat."""
        tokenizer = self._tokenizer("messages")
        text = tokenizer.render_chat(messages, **arguments)
        return text, tokenizer.encode(text, add_special_tokens=False)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, Sequence[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Generation]:
        """Generate the outputs of all prompts."""
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not isinstance(params, Sequence):
            raise ValueError(f"params: expected SamplingParams or a list of them, got {params!r:.100}")
        each = list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: expected one for each of {len(prompts)} prompts, got {len(each)}")
        own: list[PromptOutputs] = []
        try:
            for i, (prompt, of_prompt) in enumerate(zip(prompts, each, strict=True)):
                own.append(self._add(self._prepared(prompt, of_prompt, f"prompt {i}"), f"prompt {i}"))
            while not all(prompt.is_finished for prompt in own):
                self.step()
            return [self._results.generation(prompt) for prompt in own]
        finally:
            for prompt in own:
                self._drop(prompt)

    def _prepared(
        self,
        prompt: tuple[str | None, Sequence[int]],
        params: SamplingParams,
        name: str = "prompt",
        matcher: llguidance.LLMatcher | None = None,
    ) -> PreparedPrompt:
        """Return a prompt of a text and token ids. `name` is its name in error messages. `matcher` as in `prepare`."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: expected SamplingParams or None, got {params!r}")
        text, ids = prompt[0], as_integers(name, prompt[1])
        if not ids:
            raise ValueError(f"{name}: expected at least one token, got none")
        bad_words, grammars = None, list[GrammarFilter]()
        if params.bad_words:
            bad_words = BadWords(params.bad_words, self._tokenizer("bad_words"), self._vocab_size)
        if params.structured_outputs is not None:
            ends = params.stop_token_ids
            grammars = [GrammarFilter(self.grammars, params.structured_outputs, params.min_tokens, ends, matcher)]
            grammars += [grammars[0].copy() for _ in range(params.n - 1)]
        return PreparedPrompt(text, ids, params, bad_words, tuple(grammars))

    def _add(
        self, prompt: PreparedPrompt, name: str = "prompt", salt: str = "", incoming: IncomingPages | None = None
    ) -> PromptOutputs:
        """Queue the outputs of a prompt. `name` is its name in error messages.

        Outputs after the first wait until the first has a token. They then find the full pages of the prompt in the
        prefix cache, so that all outputs share these pages.
        """
        self._check_open()
        outputs = [TextOutput(self.tokenizer, prompt.params, self._eos_token_ids) for _ in range(prompt.params.n)]
        added = PromptOutputs(prompt, salt, [OutputSequence(output) for output in outputs])
        shares_pages = self.engine.config.prefix_caching and len(prompt.ids) > self.engine.config.page_size
        try:
            self._add_sequences(added, 0, 1 if shares_pages else prompt.params.n, incoming)
            if refusal := self.engine.output(added.sequences[0].request_id).refusal:
                raise ValueError(f"{name}: {refusal}")
        except BaseException:
            self._drop(added)
            raise
        if shares_pages and prompt.params.n > 1:
            self._waiting.append(added)
        return added

    def _add_sequences(
        self, prompt: PromptOutputs, first: int, end: int, incoming: IncomingPages | None = None
    ) -> None:
        """Add outputs of a prompt to the engine, the first of them with a receiver of pages. Output i has the seed
        `seed` + i, modulo 2**32, as in vLLM."""
        prepared = prompt.prepared
        params = prepared.params
        for i, sequence in enumerate(prompt.sequences[first:end], first):
            if sequence.request_id in self._open or sequence.result is not None:
                continue  # an exception interrupted an earlier call
            own = dataclasses.replace(
                params.token_level(),
                seed=(params.seed + i) % 2**32,
                prompt_logprobs=params.prompt_logprobs if i == 0 else None,
                min_tokens=0 if params.structured_outputs is not None else params.min_tokens,
            )
            sequence.grammar = prepared.grammars[i] if prepared.grammars else None
            filters = [f for f in (prepared.bad_words, sequence.grammar) if f is not None]
            request_id = self.engine.add_request(
                prepared.ids,
                own,
                salt=prompt.salt,
                on_token=self._on_token,
                incoming=incoming if i == first else None,
                token_filter=self._all_of(filters),
            )
            sequence.request_id = request_id
            self._open[request_id] = sequence

    def _all_of(self, filters: Sequence[TokenFilter]) -> TokenFilter | None:
        """Return a filter that allows what all filters allow; None without filters."""
        if len(filters) > 1:
            return AllOf(filters, token_mask(self._vocab_size, self._eos_token_ids))
        return filters[0] if filters else None

    @functools.cached_property
    def grammars(self) -> GrammarTokenizer:
        """The vocabulary of the model, prepared for grammars. The first use takes seconds for a large vocabulary."""
        return GrammarTokenizer(self._tokenizer("structured_outputs"), self._vocab_size, self._eos_token_ids)

    def _settle_ended(self) -> None:
        """Store the results of sequences that have ended, and add the sequences that waited for tokens."""
        while self._ended:
            sequence = self._ended[0]
            if self._open.get(sequence.request_id) is sequence:
                self._settle(sequence)
            self._ended.popleft()
        for prompt in [*self._waiting]:
            if prompt.sequences[0].text.token_ids or prompt.sequences[0].result is not None:
                self._add_sequences(prompt, 1, len(prompt.sequences))
                self._waiting.remove(prompt)  # last, so that the next step continues after an exception

    def _settle(self, sequence: OutputSequence) -> None:
        """Store the result of a sequence, and delete its request from the engine."""
        request_id = sequence.request_id
        self.engine.abort(request_id)  # it still runs if a stop text has ended it
        result, text = self.engine.output(request_id), sequence.text
        length = len(text.token_ids)
        if text.finish_reason is None or text.token_ids != result.output_ids[:length]:
            # The request was aborted, or an exception interrupted the engine just before it called `_receive`.
            sequence.text = self._decoded(text, result)
        if result.error is not None:
            sequence.text.stop_reason = str(result.error)
        if sequence.grammar is not None and sequence.grammar.error is not None:
            sequence.text.finish_reason, sequence.text.stop_reason = "abort", sequence.grammar.error
        sequence.result = result
        del self._open[request_id]
        self.engine.forget(request_id)  # last: if this call is interrupted, the engine keeps one record longer

    def _decoded(self, earlier: TextOutput, result: RequestOutput) -> TextOutput:
        """Return the text of a result whose tokens were not all added to `earlier`."""
        text, ids, reason = earlier.restarted(), result.output_ids, result.finish_reason or "abort"
        for i, token in enumerate(ids):
            if text.finish_reason is None:
                text.add(token, reason if i == len(ids) - 1 and reason in ("stop", "length") else None)
        if text.finish_reason is None:
            text.end(reason)
        return text

    def _drop(self, prompt: PromptOutputs) -> None:
        """Abort the unfinished sequences of a prompt, store the results, and delete the requests from the engine."""
        if prompt in self._waiting:
            self._waiting.remove(prompt)
        for sequence in prompt.sequences:
            if self._open.get(sequence.request_id) is sequence:
                self._settle(sequence)
            elif sequence.text.finish_reason is None:  # not added to the engine
                sequence.text.end("abort")


def _receive(
    sequences: Mapping[RequestId, OutputSequence],
    ended: deque[OutputSequence],
    request_id: RequestId,
    token: int,
    reason: FinishReason | None,
) -> None:
    """Add a token of the engine to its sequence."""
    sequence = sequences.get(request_id)
    if sequence is None or sequence.text.finish_reason is not None:  # aborted, or ended by a stop text
        return
    if token == NONFINITE:
        sequence.text.end(reason or "nonfinite")
    else:
        sequence.text.add(token, reason)
    if sequence.text.finish_reason is not None:
        ended.append(sequence)


def _as_prompts(prompts: Any) -> list[Prompt]:
    """Return one prompt or several prompts as a list. Raise ValueError for other values."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts: expected texts or token ids, got {prompts!r:.100}")
    if prompts and all(isinstance(entry, numbers.Integral) for entry in prompts):
        return [prompts]
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, Mapping) or (isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)):
            raise ValueError("prompts: expected texts or token ids, got chat messages; use `chat`")
        if not isinstance(prompt, str):
            as_integers(f"prompt {i}", prompt)
    return [*prompts]
