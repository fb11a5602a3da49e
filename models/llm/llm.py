"""`LLM`: loads a model and generates texts with an `Engine`."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from pallas_attn.models.checkpoints import IncrementalDetokenizer, Tokenizer, load_model, load_tokenizer
from pallas_attn.models.compilation_cache import enable_compilation_cache
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.engine import Engine, EngineConfig, RequestOutput, SamplingParams, TokenFilter, TokenLogprobs
from pallas_attn.models.engine.outputs import RequestId
from pallas_attn.models.engine.request import NONFINITE, FinishReason, as_integers
from pallas_attn.models.llm.hub import TOKENIZER_FILES, model_folder
from pallas_attn.models.llm.results import Completion, Delta, Generation, Logprob, OutputTimes, TokenLogprobTable
from pallas_attn.models.llm.text_output import TextOutput
from pallas_attn.models.llm.token_filters import AllOf, BadWords, GrammarFilter, GrammarTokenizer, token_mask

type Messages = Sequence[Mapping[str, Any]]
"""Chat messages: objects with the keys `role` and `content`, and others that the chat template supports."""

type Prompt = str | Sequence[int]
"""A text, or token ids."""


@dataclasses.dataclass(eq=False)
class _Sequence:
    """One output of a prompt.

    Attributes:
      request_id: id of the request in the engine; -1 until it is added.
      grammar: filter of the grammar of the request; None without a grammar.
      text: tokens and text that the engine has returned.
      result: output of the engine, after the sequence has ended.
    """

    text: TextOutput
    request_id: RequestId = -1
    grammar: GrammarFilter | None = None
    result: RequestOutput | None = None


@dataclasses.dataclass(eq=False)
class _PromptOutputs:
    """A prompt with its outputs.

    Attributes:
      prepared: the prompt.
      salt: salt of the prefix cache.
      sequences: outputs. Sequences after the first may be added to the engine later than the first.
    """

    prepared: PreparedPrompt
    salt: str
    sequences: list[_Sequence]

    @property
    def is_finished(self) -> bool:
        return all(sequence.result is not None for sequence in self.sequences)


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedPrompt:
    """A prompt with its token ids and filters, made by `LLM.prepare` for one call of `LLM.add`.

    Attributes:
      text: text of the prompt; None for a prompt of token ids.
      ids: token ids, at least one.
      params: sampling parameters.
      bad_words: filter of `SamplingParams.bad_words`, which all outputs share; None without bad words.
      grammars: filter of `SamplingParams.structured_outputs` for each output; empty without a grammar.
    """

    text: str | None
    ids: tuple[int, ...]
    params: SamplingParams
    bad_words: BadWords | None
    grammars: tuple[GrammarFilter, ...]


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
        self._vocab_size, self._eos_token_ids = model.config.vocab_size, model.config.eos_token_ids
        self._open: dict[RequestId, _Sequence] = {}  # sequences that the engine computes
        self._ended: deque[_Sequence] = deque()  # sequences of `_open` whose end `_settle` has not processed
        self._waiting: list[_PromptOutputs] = []  # prompts whose later sequences wait for the first
        self._abandoned: list[_PromptOutputs] = []  # prompts of streams that were deleted
        # The engine must not refer to this object, so that deleting the last reference to it frees the engine.
        self._on_token = functools.partial(_receive, self._open, self._ended)
        self._token_texts: dict[int, str] = {}
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

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> PreparedPrompt:
        """Tokenize a prompt and compile the grammar of its parameters, for `add`.

        Any thread may call this method, also while another thread runs `step`.

        Args:
          prompt: a text, or token ids.
          params: sampling parameters; None for the defaults.

        Raises:
          ValueError: an argument has the wrong type or value, or a grammar is not valid.
          NotImplementedError: the tokenizer does not support grammars.
        """
        (one,) = _as_prompts([prompt])
        return self._prepared(self._tokenized(one), SamplingParams() if params is None else params)

    def add(self, prompt: PreparedPrompt, *, salt: str = "") -> Stream:
        """Queue a prepared prompt.

        Args:
          prompt: the prompt. It can be added once.
          salt: prompts share cached prefixes only with prompts of the same salt.

        Returns:
          Iterator as `stream`.

        Raises:
          ValueError: the prompt is too long, or the engine does not support a parameter. Nothing is queued.
        """
        return Stream(self, self._add(prompt, salt=salt))

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
        own: list[_PromptOutputs] = []
        try:
            for i, (prompt, of_prompt) in enumerate(zip(prompts, each, strict=True)):
                own.append(self._add(self._prepared(prompt, of_prompt, f"prompt {i}"), f"prompt {i}"))
            while not all(prompt.is_finished for prompt in own):
                self.step()
            return [self._generation(prompt) for prompt in own]
        finally:
            for prompt in own:
                self._drop(prompt)

    def _prepared(
        self, prompt: tuple[str | None, Sequence[int]], params: SamplingParams, name: str = "prompt"
    ) -> PreparedPrompt:
        """Return a prompt of a text and token ids. `name` is its name in error messages."""
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
            grammars = [GrammarFilter(self.grammars, params.structured_outputs, params.min_tokens, ends)]
            grammars += [grammars[0].copy() for _ in range(params.n - 1)]
        return PreparedPrompt(text, ids, params, bad_words, tuple(grammars))

    def _add(self, prompt: PreparedPrompt, name: str = "prompt", salt: str = "") -> _PromptOutputs:
        """Queue the outputs of a prompt. `name` is its name in error messages.

        Outputs after the first wait until the first has a token. They then find the full pages of the prompt in the
        prefix cache, so that all outputs share these pages.
        """
        self._check_open()
        outputs = [TextOutput(self.tokenizer, prompt.params, self._eos_token_ids) for _ in range(prompt.params.n)]
        added = _PromptOutputs(prompt, salt, [_Sequence(output) for output in outputs])
        shares_pages = self.engine.config.prefix_caching and len(prompt.ids) > self.engine.config.page_size
        try:
            self._add_sequences(added, 0, 1 if shares_pages else prompt.params.n)
            if refusal := self.engine.output(added.sequences[0].request_id).refusal:
                raise ValueError(f"{name}: {refusal}")
        except BaseException:
            self._drop(added)
            raise
        if shares_pages and prompt.params.n > 1:
            self._waiting.append(added)
        return added

    def _add_sequences(self, prompt: _PromptOutputs, first: int, end: int) -> None:
        """Add outputs of a prompt to the engine. Output i has the seed `seed` + i, modulo 2**32, as in vLLM."""
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
                prepared.ids, own, salt=prompt.salt, on_token=self._on_token, token_filter=self._all_of(filters)
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

    def _settle(self, sequence: _Sequence) -> None:
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

    def _drop(self, prompt: _PromptOutputs) -> None:
        """Abort the unfinished sequences of a prompt, store the results, and delete the requests from the engine."""
        if prompt in self._waiting:
            self._waiting.remove(prompt)
        for sequence in prompt.sequences:
            if self._open.get(sequence.request_id) is sequence:
                self._settle(sequence)
            elif sequence.text.finish_reason is None:  # not added to the engine
                sequence.text.end("abort")

    # --- results

    def _generation(self, prompt: _PromptOutputs) -> Generation:
        """Return the current state of a prompt."""
        results = [self._result(sequence) for sequence in prompt.sequences]
        return Generation(
            prompt=prompt.prepared.text,
            prompt_token_ids=[*prompt.prepared.ids],
            prompt_logprobs=self._prompt_logprobs(results[0]),
            outputs=[self._completion(i, s, r) for i, (s, r) in enumerate(zip(prompt.sequences, results, strict=True))],
        )

    def _result(self, sequence: _Sequence) -> RequestOutput | None:
        """Return the output of the engine for a sequence; None if the sequence was dropped or is not added yet."""
        if sequence.result is not None or sequence.request_id not in self._open:
            return sequence.result
        return self.engine.output(sequence.request_id)

    def _prompt_logprobs(self, result: RequestOutput | None) -> list[TokenLogprobTable | None] | None:
        if result is None or result.prompt_logprobs is None:
            return None
        return [None if entry is None else self._table(entry) for entry in result.prompt_logprobs]

    def _logprobs(self, sequence: _Sequence, first: int, end: int) -> Sequence[TokenLogprobs]:
        """Return the log probabilities of the output tokens from `first` to `end`, without a copy of all others."""
        if sequence.result is not None:
            return (sequence.result.logprobs or ())[first:end]
        if sequence.request_id not in self._open:
            return ()
        return self.engine.output_logprobs(sequence.request_id, first, end)

    def _completion(self, index: int, sequence: _Sequence, result: RequestOutput | None) -> Completion:
        text = sequence.text
        number = len(text.token_ids)
        first = None if result is None or not number else result.ttft_s
        entries = None if result is None or result.logprobs is None else result.logprobs[:number]
        return Completion(
            index=index,
            text=text.text,
            token_ids=[*text.token_ids],
            finish_reason=text.finish_reason,
            stop_reason=text.stop_reason,
            cumulative_logprob=None if entries is None else sum(entry.logprob for entry in entries),
            logprobs=None if entries is None else [self._table(entry) for entry in entries],
            cached_tokens=0 if result is None else result.cached_tokens,
            timing=OutputTimes(
                first_token_s=first,
                total_s=None if result is None or first is None else first + sum(result.itl_s[: number - 1]),
                queue_s=None if result is None else result.queue_s,
            ),
        )

    def _table(self, entry: TokenLogprobs) -> TokenLogprobTable:
        """Return the log probabilities at one position by token id: the token, then the likeliest tokens."""
        table = {entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            table.setdefault(token, Logprob(logprob, rank, self._token_text(token)))
        return table

    def _token_text(self, token: int) -> str:
        if self.tokenizer is None:
            return ""
        if token not in self._token_texts:
            detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=False)
            self._token_texts[token] = detokenizer.add([token]) + detokenizer.finish()
        return self._token_texts[token]


class Stream:
    """Iterator over the deltas of a prompt, made by `LLM.stream`.

    The prompt has `SamplingParams.n` texts, whose deltas alternate. The last delta of a text has a finish reason.
    """

    def __init__(self, llm: LLM, prompt: _PromptOutputs):
        self._llm, self._prompt = llm, prompt
        self._ready: deque[Delta] = deque()
        self._has_ended = [False] * len(prompt.sequences)
        # A finalizer may run at any time, therefore the requests are aborted by the next step.
        weakref.finalize(self, llm._abandoned.append, prompt)

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._ready:
            if all(self._has_ended):
                raise StopIteration
            self._ready = deque(self.take())
            if not self._ready:
                self._llm.step()
        return self._ready.popleft()

    def take(self) -> list[Delta]:
        """Return the deltas that earlier steps have made available, without running the engine."""
        deltas, self._ready = [*self._ready], deque()
        for index, sequence in enumerate(self._prompt.sequences):
            if self._has_ended[index]:
                continue
            # The result is stored after the text has ended. It has the log probabilities.
            output, first = sequence.text, sequence.text.num_taken
            ended = sequence.result is not None
            text, tokens = output.take() if output.finish_reason is None or ended else ("", [])
            if not (text or tokens or ended):
                continue
            logprobs = None
            if self._prompt.prepared.params.logprobs is not None:
                entries = self._llm._logprobs(sequence, first, first + len(tokens))
                logprobs = [self._llm._table(entry) for entry in entries]
            self._has_ended[index] = ended
            reason, stop = (output.finish_reason, output.stop_reason) if ended else (None, None)
            deltas.append(Delta(index, text, tokens, reason, stop, logprobs))
        return deltas

    @property
    def generation(self) -> Generation:
        """The prompt, and the texts that have been generated so far."""
        return self._llm._generation(self._prompt)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobTable | None] | None:
        """Log probabilities of the prompt as in `Generation`. They are complete after the first token."""
        return self._llm._prompt_logprobs(self._llm._result(self._prompt.sequences[0]))

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that the first output found in the prefix cache; 0 until the output has ended."""
        result = self._prompt.sequences[0].result
        return 0 if result is None else result.cached_tokens

    @property
    def is_finished(self) -> bool:
        """Whether `take` has returned the last delta, or the stream is closed."""
        return all(self._has_ended)

    def close(self) -> None:
        """Abort the unfinished requests, and end the iteration."""
        if not self._llm._is_closed:
            self._llm._drop(self._prompt)
        self._ready.clear()
        self._has_ended = [True] * len(self._has_ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _receive(
    sequences: Mapping[RequestId, _Sequence],
    ended: deque[_Sequence],
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
