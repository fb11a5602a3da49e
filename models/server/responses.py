"""OpenAI's response objects, built from the parts that the engine returns.

A reply turns each part into the choice of an event of a stream. A response without streaming has the choices of one
part per output, joined from all its parts. A choice does not depend on the division of an output into parts.
"""

from __future__ import annotations

import operator
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from pallas_attn.models.llm import Delta
from pallas_attn.models.llm.results import Logprob, TokenLogprobTable
from pallas_attn.models.server.messages import Part, Prompt
from pallas_attn.models.server.options import ApiError
from pallas_attn.models.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from pallas_attn.models.server.reasoning import ReasoningParser
from pallas_attn.models.server.tool_calls import ContentDelta, ToolCallDelta, ToolCallParser

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(content: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: %b\n\n" % _encode(content)


class Reply:
    """Builds the response of one request.

    Attributes:
      request, prompts: the request and its prompts.

    Args:
      request, prompts: as the attributes.
      model: name of the model.
    """

    id_prefix = object_name = chunk_name = ""

    def __init__(self, request: GenerationRequest, prompts: Sequence[Prompt], model: str):
        self.request, self.prompts = request, prompts
        self._completion_tokens = self._cached_tokens = 0
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        head = _encode({**self._head, "object": self.chunk_name}).removesuffix(b"}")
        self._event = b'data: %b,"choices":[%%b]%b}\n\n' % (
            head.replace(b"%", b"%%"),
            b',"usage":null' if request.includes_usage else b"",
        )

    def choice(self, part: Part) -> dict[str, Any] | None:
        """Return the choice of the event for a part; None for no event."""
        raise NotImplementedError

    def events(self, parts: Iterable[Part]) -> bytes:
        """Return the events of a stream for new parts.

        Raises:
          ApiError: an output has failed.
        """
        choices = [self._counted(part) for part in parts]
        return b"".join([self._event % _encode(choice) for choice in choices if choice is not None])

    def last_event(self) -> bytes:
        """Return the event with the numbers of tokens."""
        return event({**self._head, "object": self.chunk_name, "choices": [], "usage": self.usage})

    def result(self, parts: Iterable[Part]) -> dict[str, Any]:
        """Return the response without streaming. `parts` are all parts."""
        choices = [self._whole(choice) for part in _joined(parts) if (choice := self._counted(part)) is not None]
        choices.sort(key=operator.itemgetter("index"))
        return {**self._head, "object": self.object_name, "choices": choices, "usage": self.usage}

    @property
    def usage(self) -> dict[str, Any]:
        """Numbers of tokens."""
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        return choice

    def _counted(self, part: Part) -> dict[str, Any] | None:
        if part.delta.finish_reason is not None:
            check_output(part.delta)
        self._completion_tokens += len(part.delta.token_ids)
        self._cached_tokens += part.cached_tokens
        return self.choice(part)

    def _ending(self, part: Part, delta: Delta, is_first: bool) -> dict[str, Any]:
        """Return the entries of a choice after its text. `delta` is what the choice shows of a part."""
        request = self.request
        ending: dict[str, Any] = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if request.return_token_ids:
            ending["token_ids"] = delta.token_ids
            if is_first:
                ending["prompt_token_ids"] = [*self.prompts[part.prompt].ids]
        if part.prompt_logprobs is not None and request.prompt_logprobs is not None:
            ending["prompt_logprobs"] = _shown_prompt_logprobs(part.prompt_logprobs)
        return ending


def check_output(delta: Delta) -> None:
    """Raise ApiError if a delta says that its output has failed."""
    if delta.finish_reason in ("nonfinite", "filter_error", "abort", "refused"):
        reason = "the logits are NaN or infinite" if delta.finish_reason == "nonfinite" else delta.stop_reason
        raise ApiError(f"the output ended early: {reason or delta.finish_reason}", 500, code="output_failed")


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Join the parts of each output to one part."""
    outputs: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        outputs.setdefault((part.prompt, part.delta.index), []).append(part)
    result = []
    for (prompt, index), own in outputs.items():
        deltas = [part.delta for part in own]
        tables = None if deltas[0].logprobs is None else [table for delta in deltas for table in delta.logprobs or ()]
        whole = Delta(
            index,
            "".join([delta.text for delta in deltas]),
            [token for delta in deltas for token in delta.token_ids],
            deltas[-1].finish_reason,
            deltas[-1].stop_reason,
            tables,
        )
        result.append(Part(prompt, whole, sum(part.cached_tokens for part in own), own[0].prompt_logprobs))
    return result


class CompletionReply(Reply):
    """Builds the response of /v1/completions.

    Args:
      request, prompts, model: as in `Reply`.
      texts: texts of the prompts if the request has `echo`; otherwise empty.
      first_tokens: text of the first token of each prompt if the request has `echo` and `logprobs`; otherwise empty.
      echoes_only: whether only the prompts are returned (`echo` with max_tokens 0).
    """

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[Prompt],
        model: str,
        texts: Sequence[str] = (),
        first_tokens: Sequence[str] = (),
        *,
        echoes_only: bool = False,
    ):
        super().__init__(request, prompts, model)
        self._texts, self._first_tokens, self._echoes_only = texts, first_tokens, echoes_only
        self._offsets: dict[int, int] = {}  # length of the text of each output
        self._prompt_logprobs: dict[int, Any] = {}

    def choice(self, part: Part) -> dict[str, Any] | None:
        delta = part.delta
        index = part.prompt * self.request.n + delta.index
        ids, tables, text = delta.token_ids, delta.logprobs, delta.text
        is_first = index not in self._offsets
        if part.prompt_logprobs is not None:
            self._prompt_logprobs[part.prompt] = part.prompt_logprobs
        if self._echoes_only:
            self._completion_tokens = 0
            if not is_first:
                return None
            delta = Delta(delta.index, "", [], "length")
            ids, tables, text = [], None if tables is None else [], ""
        all_tables: Sequence[TokenLogprobTable | None] | None = tables
        if self._texts and is_first:
            text = self._texts[part.prompt] + text
            if tables is not None:
                ids = [*self.prompts[part.prompt].ids, *ids]
                all_tables = [*self._prompt_logprobs[part.prompt], *tables]
        offset = self._offsets.setdefault(index, 0)
        first = self._first_tokens[part.prompt] if self._first_tokens else ""
        logprobs = None if all_tables is None else self._logprobs(ids, all_tables, offset, first)
        self._offsets[index] += len(text) if logprobs is None else sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": text, "logprobs": logprobs, **self._ending(part, delta, is_first)}

    def _logprobs(
        self, ids: Sequence[int], tables: Sequence[TokenLogprobTable | None], offset: int, first: str
    ) -> dict[str, list[Any]]:
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, table in zip(ids, tables, strict=True):
            text, logprob, top = first, None, None
            if table is not None:
                text, logprob = table[token].decoded_token, _finite(table[token].logprob)
                top = {entry.decoded_token: _finite(entry.logprob) for entry in table.values()}
            for name, value in zip(result, (text, logprob, top, offset), strict=True):
                result[name].append(value)
            offset += len(text)
        return result


class ChatReply(Reply):
    """Builds the response of /v1/chat/completions.

    Args:
      request, prompts, model: as in `Reply`.
      parsers: function that returns new parsers for an output: reasoning, then tool calls.
      token_bytes: bytes of each token by id; needed with `logprobs`. For other tokens, the UTF-8 encoding of their text
        is shown.
      is_function_forced: whether `tool_choice` names a function. Then calls do not change the finish reason.
    """

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        prompts: Sequence[Prompt],
        model: str,
        parsers: Callable[[], tuple[ReasoningParser, ToolCallParser]],
        token_bytes: Mapping[int, bytes] = MappingProxyType({}),
        *,
        is_function_forced: bool = False,
    ):
        super().__init__(request, prompts, model)
        self._chat, self._make_parsers, self._is_function_forced = request, parsers, is_function_forced
        self._token_bytes = token_bytes
        self._parsers: dict[int, tuple[ReasoningParser, ToolCallParser]] = {}
        self._called: set[int] = set()  # outputs with tool calls

    def choice(self, part: Part) -> dict[str, Any] | None:
        delta, index = part.delta, part.delta.index
        is_first = index not in self._parsers
        if is_first:
            self._parsers[index] = self._make_parsers()
        message = self._message(index, delta.text, is_last=delta.finish_reason is not None)
        ending = self._ending(part, delta, is_first)
        if index in self._called and delta.finish_reason == "stop" and not self._is_function_forced:
            ending["finish_reason"] = "tool_calls"
        logprobs = None if delta.logprobs is None else {"content": self._logprobs(delta)}
        if is_first:
            message = {"role": "assistant", "content": "", **message}
        elif not (message or logprobs or delta.finish_reason or self._chat.return_token_ids):
            return None
        return {"index": index, "delta": message, "logprobs": logprobs, **ending}

    def _message(self, index: int, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the parts of the message that are certain after a further text of the output."""
        reasoning, calls = self._parsers[index]
        parts = [*reasoning.feed(text), *(reasoning.finish() if is_last else ())]
        deltas: list[ContentDelta | ToolCallDelta] = []
        message: dict[str, Any] = {}
        for kind, piece in parts:
            if kind == "content":
                deltas += calls.feed(piece)
            elif self._chat.include_reasoning:
                message["reasoning_content"] = message.get("reasoning_content", "") + piece
        if is_last:
            deltas += calls.finish()
        for new in deltas:
            if isinstance(new, ContentDelta):
                message["content"] = message.get("content", "") + new.text
            elif new.index == 0 or self._chat.parallel_tool_calls:
                self._called.add(index)
                call: dict[str, Any] = {"index": new.index, "function": {"arguments": new.arguments}}
                if new.id is not None:
                    call |= {"id": new.id, "type": "function"}
                    call["function"]["name"] = new.name
                message.setdefault("tool_calls", []).append(call)
        return message

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        most = self._chat.top_logprobs or 0
        return [
            {
                **self._logprob(token, table[token]),
                "top_logprobs": [self._logprob(other, entry) for other, entry in table.items() if entry.rank <= most],
            }
            for token, table in zip(delta.token_ids, delta.logprobs or (), strict=True)
        ]

    def _logprob(self, token: int, entry: Logprob) -> dict[str, Any]:
        text = entry.decoded_token
        # A token with a part of a character has the text U+FFFD.
        content = self._token_bytes.get(token, text.encode())
        return {"token": text, "logprob": _finite(entry.logprob), "bytes": [*content]}

    def _whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = choice.pop("delta")
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            calls: list[dict[str, Any]] = []
            for delta in message["tool_calls"]:
                if "id" in delta:
                    calls.append({"id": delta["id"], "type": "function", "function": delta["function"]})
                else:
                    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
            message["tool_calls"] = calls
        return {**choice, "message": message}


def _finite(logprob: float) -> float:
    """Return a log probability that JSON can represent; -9999 for minus infinity, as vLLM."""
    return max(logprob, -9999.0)


def _shown_prompt_logprobs(tables: Sequence[TokenLogprobTable | None]) -> list[dict[str, Any] | None]:
    """Return log probabilities of a prompt in vLLM's form: by token id as text."""
    return [
        None
        if table is None
        else {str(token): entry._replace(logprob=_finite(entry.logprob))._asdict() for token, entry in table.items()}
        for table in tables
    ]
