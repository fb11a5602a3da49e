"""From request bodies to prompts of the engine: JSON, chat templates, tokenization and texts of grammars.

All methods of `Preparer` run in worker threads. Texts go through `text_process`, which limits time and memory. The
engine's process compiles grammars; `GrammarChecker` limits time, memory and stack of the compilation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pallas_attn.models.checkpoints import Tokenizer
from pallas_attn.models.checkpoints.detokenizer import token_bytes
from pallas_attn.models.llm import SamplingParams, StructuredOutputs
from pallas_attn.models.server import protocol
from pallas_attn.models.server.messages import Prompt
from pallas_attn.models.server.options import ApiError, ServerOptions
from pallas_attn.models.server.protocol import Body, ChatRequest, CompletionRequest, ToolChoice
from pallas_attn.models.server.reasoning import ReasoningParser, reasoning_parser
from pallas_attn.models.server.responses import ChatReply, CompletionReply
from pallas_attn.models.server.tool_calls import ForcedCallParser, ToolCallParser, tool_call_parser
from pallas_attn.models.server.tool_grammar import answer_grammar, tool_grammar

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}


class Preparer:
    """Prepares requests. The methods of the routes get the body of a request, and raise ApiError.

    Args:
      tokenizers: tokenizers of the model, one for each worker thread; empty for a model without tokenizer.
      options: options of the server.
    """

    def __init__(self, tokenizers: Sequence[Tokenizer], options: ServerOptions):
        self._options, self._limits = options, options.limits
        self._tokenizers: queue.SimpleQueue[Tokenizer] = queue.SimpleQueue()
        self._has_tokenizer = bool(tokenizers)
        for tokenizer in tokenizers:
            self._tokenizers.put(tokenizer)

    # --- routes

    def completion(self, body: bytes) -> CompletionReply:
        """Prepare a request of /v1/completions."""
        request = self._parsed(body, CompletionRequest)
        given = [request.prompt] if isinstance(request.prompt, str) or _is_ids(request.prompt) else request.prompt
        if not given or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in given):
            raise ApiError("prompt: expected a text, token ids, or a list of texts or token ids", param="prompt")
        self._check_outputs(request.n * len(given))
        echoes_only = request.echo and request.max_tokens == 0
        if echoes_only:
            request.max_tokens = 1
        of_prompt = request.prompt_logprobs if request.logprobs is None or not request.echo else request.logprobs
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
            prompts.append(self._prompt(request, ids, structured, prompt_logprobs=of_prompt))
        return CompletionReply(request, prompts, self._model(request), texts, first_tokens, echoes_only=echoes_only)

    def chat(self, body: bytes) -> ChatReply:
        """Prepare a request of /v1/chat/completions."""
        request, families = self._parsed(body, ChatRequest), self._options.families
        self._check_outputs(request.n)
        choice = protocol.tool_choice(request, self._limits)
        if choice.tools and not choice.is_forced and families.tool_calls is None:
            raise ApiError(
                "tools: the format of the model's tool calls is not known; use tool_choice, or the option"
                " --tool-call-parser of the server",
                param="tools",
            )
        structured = protocol.structured_outputs(request, self._limits)
        if structured is not None and choice.is_forced:
            raise ApiError("tool_choice: expected no other format of the output", param="tool_choice")
        text, ids = self._rendered(request, choice.tools)
        is_json, function = choice.is_forced and families.tool_calls is None, choice.function
        if is_json:
            structured = StructuredOutputs(json=choice.schema)
        elif choice.is_forced or structured is not None:
            structured = self._grammar(request, choice, structured, text)
        is_parsed = families.reasoning is not None or (bool(choice.tools) and families.tool_calls is not None)

        def parsers() -> tuple[ReasoningParser, ToolCallParser]:
            if is_json or not is_parsed:
                return reasoning_parser(None), ForcedCallParser(function) if is_json else tool_call_parser(None)
            return reasoning_parser(families.reasoning, text), tool_call_parser(families.tool_calls, choice.tools)

        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        # Parsers need the special tokens, and remove them.
        prompt = self._prompt(request, ids, structured, logprobs=logprobs, skip_special_tokens=not is_parsed)
        model = self._model(request)
        token_bytes = {} if logprobs is None else self._token_bytes
        return ChatReply(request, [prompt], model, parsers, token_bytes, is_function_forced=function is not None)

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Return the response of /tokenize."""
        request = self._parsed(body, protocol.TokenizeRequest)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError("prompt, messages: expected one of them", param="prompt")
        if request.prompt is None:
            protocol.check_tools(request.tools or [], self._limits)
            _, ids = self._rendered(request, request.tools)
        else:
            with self._tokenizer("prompt") as tokenizer:
                ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        texts = {token: self._decode([token]) for token in set(ids)} if request.return_token_strs else {}
        shown = [texts[token] for token in ids] if texts else None
        return {"count": len(ids), "max_model_len": self._options.max_len, "tokens": ids, "token_strs": shown}

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """Return the response of /detokenize."""
        return {"prompt": self._decode(self._parsed(body, protocol.DetokenizeRequest).tokens)}

    # --- checks and sampling parameters

    def _parsed[Kind: Body](self, body: bytes, kind: type[Kind]) -> Kind:
        request = protocol.parse(body, kind, self._limits)
        if self._model(request) not in self._options.names:
            message = f"model: {request.model!r:.200} does not exist; expected {', '.join(self._options.names)}"
            raise ApiError(message, 404, param="model", code="model_not_found")
        return request

    def _model(self, request: Body) -> str:
        return self._options.names[0] if request.model is None else request.model

    def _check_outputs(self, number: int) -> None:
        if not 1 <= number <= self._limits.max_outputs:
            limit = self._limits.max_outputs
            raise ApiError(f"n: expected 1 to {limit} outputs of all prompts, got {number}", param="n")

    def _prompt(
        self,
        request: CompletionRequest | ChatRequest,
        ids: Sequence[int],
        structured: StructuredOutputs | None,
        *,
        skip_special_tokens: bool = True,
        **values: int | None,
    ) -> Prompt:
        """Return a prompt with the sampling parameters of a request.

        Args:
          request: the request.
          ids: tokens of the prompt.
          structured: format of the output.
          skip_special_tokens: default of the field of this name.
          values: sampling parameters that differ from the fields of the request.
        """
        wanted = self._wanted_tokens(request, len(ids))
        max_tokens = min(wanted, self._options.max_len - len(ids))
        names = _SAMPLING.intersection(request.__struct_fields__)
        given = {name: value for name in names if (value := getattr(request, name)) is not None}
        if isinstance(request.stop, str):
            given["stop"] = [request.stop]
        for name in given.keys() & {"stop", "bad_words"}:
            protocol.check_entries(name, given[name], self._limits.max_stops)
        for name in given.keys() & {"stop_token_ids", "allowed_token_ids", "logit_bias"}:
            protocol.check_entries(name, given[name], self._limits.max_token_entries)
        if "logit_bias" in given:
            try:
                given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
            except ValueError as error:
                raise ApiError("logit_bias: expected token ids as keys", param="logit_bias") from error
        if request.min_tokens <= wanted:
            given["min_tokens"] = min(request.min_tokens, max_tokens)
        given["seed"] = random.getrandbits(32) if request.seed is None else request.seed % 2**32
        given |= {"max_tokens": max_tokens, "structured_outputs": structured, **values}
        params: dict[str, Any] = {"temperature": 1.0, "skip_special_tokens": skip_special_tokens}
        params |= {**self._options.defaults, **given}
        if not ids:
            raise ApiError("prompt: expected at least one token", param="prompt")
        with _as_api_error():
            return Prompt(ids, SamplingParams(**params))

    def _wanted_tokens(self, request: CompletionRequest | ChatRequest, num_prompt_tokens: int) -> int:
        """Return the requested number of output tokens or its default. Raise ApiError if it or the prompt is too
        long."""
        is_chat, max_len = isinstance(request, ChatRequest), self._options.max_len
        most = min(max_len - 1, self._limits.max_prompt_tokens or max_len)
        if num_prompt_tokens > most:
            raise ApiError(
                f"prompt: expected at most {most} tokens, got {num_prompt_tokens}; the maximum of prompt and output is"
                f" {max_len}",
                param="messages" if is_chat else "prompt",
                code="context_length_exceeded",
            )
        limit, wanted = self._limits.max_output_tokens or max_len, request.max_tokens
        if wanted is None:
            return min(max_len - num_prompt_tokens if is_chat else 16, limit)
        if wanted > limit:
            raise ApiError(f"max_tokens: expected at most {limit}, got {wanted}", param="max_tokens")
        return wanted

    # --- texts

    def _grammar(
        self, request: ChatRequest, choice: ToolChoice, structured: StructuredOutputs | None, text: str
    ) -> StructuredOutputs:
        """Return the grammar of forced tool calls, or of an answer with a format, after optional reasoning."""
        families = self._options.families
        with self._tokenizer("messages") as tokenizer:
            if structured is not None:
                return answer_grammar(structured, families, tokenizer, text)
            name, parallel = choice.function, request.parallel_tool_calls
            return tool_grammar(families, choice.tools, tokenizer, name=name, parallel=parallel, prompt=text)

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

    @functools.cached_property
    def _token_bytes(self) -> Mapping[int, bytes]:
        """Bytes of each token by id, before spaces are cleaned up. Empty if they depend on other tokens, as with
        WordPiece."""
        with self._tokenizer("logprobs") as tokenizer:
            pieces = dataclasses.replace(tokenizer.pieces, clean_up=())
        try:
            return token_bytes(pieces)
        except NotImplementedError:
            return {}

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
            with _as_api_error():
                yield tokenizer
        finally:
            self._tokenizers.put(tokenizer)


@contextlib.contextmanager
def _as_api_error() -> Iterator[None]:
    """Context manager that converts ValueError and NotImplementedError of the engine to ApiError."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise protocol.of_engine(error) from error


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
