"""From request bodies to prompts of the engine: JSON, chat templates, tokenization and texts of grammars.

All methods of `Preparer` run in worker threads. Texts go through `text_process`, which limits time and memory. The
engine's process compiles grammars; llguidance limits their size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pallas_attn.models.checkpoints import Tokenizer
from pallas_attn.models.llm import StructuredOutputs
from pallas_attn.models.server import protocol
from pallas_attn.models.server.limits import ApiError, ServerLimits
from pallas_attn.models.server.messages import Prompt
from pallas_attn.models.server.output_text import Steps
from pallas_attn.models.server.protocol import ChatRequest, CompletionRequest, ToolChoice, as_api_error
from pallas_attn.models.server.reasoning import ParserNames, ReasoningParser, reasoning_parser
from pallas_attn.models.server.tool_calls import ToolCallParser, tool_call_parser
from pallas_attn.models.server.tool_grammar import answer_grammar, tool_grammar


@dataclasses.dataclass(frozen=True)
class CompletionWork:
    """A request to continue texts.

    Attributes:
      request: the request.
      prompts: the prompts.
      texts: texts of the prompts if the request has `echo`; otherwise empty.
      echoes_only: whether only the prompts are returned (`echo` with max_tokens 0).
      first_tokens: text of the first token of each prompt if the request has `echo` and `logprobs`; otherwise empty.
    """

    request: CompletionRequest
    prompts: list[Prompt]
    texts: list[str]
    echoes_only: bool
    first_tokens: list[str]


@dataclasses.dataclass(frozen=True)
class ChatWork:
    """A request for the next message of a chat.

    Attributes:
      request: the request.
      prompts: the prompt.
      choice: tools that the model may call.
      parsers: function that returns new parsers for an output: reasoning, then tool calls.
    """

    request: ChatRequest
    prompts: list[Prompt]
    choice: ToolChoice
    parsers: Callable[[], tuple[ReasoningParser, ToolCallParser]]


class _NamedCall(ToolCallParser):
    """Output that is the arguments of one call."""

    def __init__(self, name: str):
        self._name = name
        super().__init__()

    def _parse(self) -> Steps[None]:
        self._start_call(self._name)
        yield from self._read_all(self._argument)


class _RequiredCalls(ToolCallParser):
    """Output that is a JSON array of objects with name and parameters."""

    def _parse(self) -> Steps[None]:
        while (yield from self._read_until(("{",), lambda text: None)) is not None:
            self._rest = "{" + self._rest
            yield from self._read_json_call()


class Preparer:
    """Prepares requests.

    Args:
      max_len: maximum number of tokens of a sequence.
      tokenizers: tokenizers of the model, one for each worker thread; empty for a model without tokenizer.
      names: names of the model; requests must use one of them.
      limits: limits of the server.
      defaults: sampling parameters of the model, by name, which replace OpenAI's defaults.
      families: names of the parsers of the model.
    """

    def __init__(
        self,
        max_len: int,
        tokenizers: Sequence[Tokenizer],
        names: Sequence[str],
        limits: ServerLimits,
        defaults: Mapping[str, Any],
        families: ParserNames,
    ):
        self.max_len, self._names, self._limits = max_len, names, limits
        self._defaults, self._families = defaults, families
        self._tokenizers: queue.SimpleQueue[Tokenizer] = queue.SimpleQueue()
        self._has_tokenizer = bool(tokenizers)
        for tokenizer in tokenizers:
            self._tokenizers.put(tokenizer)

    def completion(self, body: bytes) -> CompletionWork:
        """Prepare a request of /v1/completions. Raises ApiError."""
        request = protocol.parse(body, CompletionRequest, self._limits)
        self._check(request)
        given = [request.prompt] if isinstance(request.prompt, str) or _is_ids(request.prompt) else request.prompt
        if not given or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in given):
            raise ApiError("prompt: expected a text, token ids, or a list of texts or token ids", param="prompt")
        self._check_outputs(request.n * len(given))
        echoes_only = request.echo and request.max_tokens == 0
        if echoes_only:
            request.max_tokens = 1
        structured = protocol.structured_outputs(request, self._limits)
        prompts, texts, first_tokens = [], [], []
        for prompt in given:
            if isinstance(prompt, str):
                with self._tokenizer("prompt") as tokenizer:
                    ids = tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
            else:
                ids = prompt
            if request.echo:
                texts.append(prompt if isinstance(prompt, str) else self._decode(ids))
                if request.logprobs is not None:
                    first_tokens.append(self._decode(ids[:1]))
            prompts.append(self._prepared(request, ids, structured))
        return CompletionWork(request, prompts, texts, echoes_only, first_tokens)

    def chat(self, body: bytes) -> ChatWork:
        """Prepare a request of /v1/chat/completions. Raises ApiError."""
        request = protocol.parse(body, ChatRequest, self._limits)
        self._check(request)
        self._check_outputs(request.n)
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError("top_logprobs: expected logprobs to be true", param="top_logprobs")
        choice = protocol.tool_choice(request, self._limits)
        if choice.tools and not choice.forced and self._families.tool_calls is None:
            raise ApiError(
                "tools: the format of the model's tool calls is not known; use tool_choice, or the option"
                " --tool-call-parser of the server",
                param="tools",
            )
        structured = protocol.structured_outputs(request, self._limits)
        if structured is not None and choice.forced:
            raise ApiError("tool_choice: expected no other format of the output", param="tool_choice")
        text, ids = self._rendered(request, choice.tools)
        families = self._families
        if choice.forced and families.tool_calls is None:
            structured = StructuredOutputs(json=choice.schema)
        elif choice.forced or structured is not None:
            structured = self._grammar(request, choice, structured, text)
        is_parsed = families.reasoning is not None or (bool(choice.tools) and families.tool_calls is not None)
        # Parsers need the special tokens, and remove them.
        prompt = self._prepared(request, ids, structured, skip_special_tokens=not is_parsed)

        def parsers() -> tuple[ReasoningParser, ToolCallParser]:
            if choice.forced and families.tool_calls is None:
                calls = _RequiredCalls() if choice.forced == "required" else _NamedCall(choice.forced)
                return reasoning_parser(None), calls
            if not is_parsed:
                return reasoning_parser(None), tool_call_parser(None)
            return reasoning_parser(families.reasoning, text), tool_call_parser(families.tool_calls, choice.tools)

        return ChatWork(request, [prompt], choice, parsers)

    def _grammar(
        self, request: ChatRequest, choice: ToolChoice, structured: StructuredOutputs | None, text: str
    ) -> StructuredOutputs:
        """Return the grammar of forced tool calls, or of an answer with a format, after optional reasoning."""
        with self._tokenizer("messages") as tokenizer:
            if structured is not None:
                return answer_grammar(structured, self._families, tokenizer, text)
            name, parallel = None if choice.forced == "required" else choice.forced, request.parallel_tool_calls
            return tool_grammar(self._families, choice.tools, tokenizer, name=name, parallel=parallel, prompt=text)

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Return the response of /tokenize. Raises ApiError."""
        request = protocol.parse(body, protocol.TokenizeRequest, self._limits)
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError("prompt, messages: expected one of them", param="prompt")
        if request.prompt is None:
            _, ids = self._rendered(request, request.tools)
        else:
            with self._tokenizer("prompt") as tokenizer:
                ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        texts = {token: self._decode([token]) for token in set(ids)} if request.return_token_strs else {}
        shown = [texts[token] for token in ids] if texts else None
        return {"count": len(ids), "max_model_len": self.max_len, "tokens": ids, "token_strs": shown}

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """Return the response of /detokenize. Raises ApiError."""
        request = protocol.parse(body, protocol.DetokenizeRequest, self._limits)
        self._check_model(request.model)
        return {"prompt": self._decode(request.tokens)}

    def _check(self, request: protocol.GenerationRequest) -> None:
        self._check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise ApiError("stream_options: expected stream to be true", param="stream_options")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            message = f"model: {name!r:.200} does not exist; expected {', '.join(self._names)}"
            raise ApiError(message, 404, param="model", code="model_not_found")

    def _check_outputs(self, number: int) -> None:
        if not 1 <= number <= self._limits.max_outputs:
            limit = self._limits.max_outputs
            raise ApiError(f"n: expected 1 to {limit} outputs of all prompts, got {number}", param="n")

    def _prepared(
        self,
        request: CompletionRequest | ChatRequest,
        ids: Sequence[int],
        structured: StructuredOutputs | None,
        *,
        skip_special_tokens: bool = True,
    ) -> Prompt:
        params = protocol.sampling_params(
            request,
            len(ids),
            limits=self._limits,
            max_len=self.max_len,
            defaults=self._defaults,
            structured=structured,
            skip_special_tokens=skip_special_tokens,
        )
        if not ids:
            raise ApiError("prompt: expected at least one token", param="prompt")
        return Prompt(ids, params)

    def _rendered(
        self, request: ChatRequest | protocol.TokenizeRequest, tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[str, list[int]]:
        """Return text and token ids of a chat."""
        messages, variables = protocol.chat_arguments(request)
        with self._tokenizer("messages") as tokenizer:
            text = tokenizer.render_chat(
                messages,
                tools=tools or None,
                add_generation_prompt=request.add_generation_prompt,
                **variables,
            )
            return text, tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: Sequence[int]) -> str:
        with self._tokenizer("tokens") as tokenizer:
            return tokenizer.decode(ids, skip_special_tokens=False)

    @contextlib.contextmanager
    def _tokenizer(self, name: str) -> Iterator[Tokenizer]:
        """Context manager that yields a tokenizer which no other thread uses."""
        if not self._has_tokenizer:
            raise ApiError(f"{name}: the model has no tokenizer; use token ids with /v1/completions", param=name)
        tokenizer = self._tokenizers.get()
        try:
            with as_api_error():
                yield tokenizer
        finally:
            self._tokenizers.put(tokenizer)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
