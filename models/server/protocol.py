"""Requests of the API: their fields, formats of the output, tools and messages.

Fields of OpenAI have OpenAI's meaning, other fields have vLLM's. A field with the value null counts as not given.
Fields that are neither here nor in `IGNORED` are refused, also fields of nested objects. Exceptions are messages,
documents and chat_template_kwargs, because the chat template gets all their fields.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from pallas_attn.models.llm import StructuredOutputs
from pallas_attn.models.server.options import ApiError, ServerLimits

IGNORED = frozenset(
    (
        *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        "parallel_tool_calls",  # of completions
    )
)
"""Fields of OpenAI without effect."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "the server generates text only"),
    "modalities": ((["text"],), "the server generates text only"),
    "prediction": ((), "predicted outputs are not supported"),
    "web_search_options": ((), "the server has no web search"),
    "verbosity": ((), "no chat template has it; describe the length in a message"),
    "store": ((False,), "the server stores nothing"),
    "suffix": ((), "models for insertion are not supported"),
    "best_of": ((1,), "use n and choose on the client"),
    "functions": (([],), "deprecated by OpenAI; use tools"),
    "function_call": (("none", "auto"), "deprecated by OpenAI; use tool_choice"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "length_penalty": ((1, 1.0), "beam search is not supported"),
    "truncate_prompt_tokens": ((), "shorten the prompt on the client"),
    "priority": ((0,), "requests are served first come, first served"),
    "chat_template": ((), "templates of clients are not accepted, because they run on the server"),
    "continue_final_message": ((False,), "use /v1/completions to continue a text"),
    "spaces_between_special_tokens": ((True,), "special tokens are not changed"),
    "logits_processors": ((), "code of clients is not accepted"),
}
"""Known fields that are not supported: the values that are accepted, and the reason."""

_STREAM_OPTIONS: Mapping[str, tuple[tuple[bool, ...], str]] = {
    "include_usage": ((False, True), ""),
    "include_obfuscation": ((False,), "the server sends no padding"),
    "continuous_usage_stats": ((False,), "the last event has the numbers of tokens"),
}
"""Entries of `stream_options`: the values that are accepted, and the reason."""

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "return", "response")
"""Fields of functions in `tools`. Chat templates use "return" and "response", which OpenAI does not have."""

_FUNCTION = re.compile(r"[\w.-]{1,64}")
_TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "chat_template")


class Body(msgspec.Struct, kw_only=True):
    """Fields of all requests."""

    model: str | None = None


class GenerationRequest(Body, kw_only=True):
    """Fields of both kinds of generation. Fields with the name of a field of `SamplingParams` set it."""

    stream: bool = False
    stream_options: dict[str, bool | None] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str = ""
    return_token_ids: bool = False

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options: expected stream to be true", param="stream_options")
        _check_fields("stream_options", self.stream_options or {}, _STREAM_OPTIONS)
        for name, value in (self.stream_options or {}).items():
            accepted, reason = _STREAM_OPTIONS.get(name, ((), ""))
            if value is not None and value not in accepted:
                param = f"stream_options.{name}"
                raise ApiError(f"{param}: not supported: {reason}", param=param, code="unsupported_parameter")

    @property
    def includes_usage(self) -> bool:
        """Whether the last event of a stream has the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[Any]
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs: expected logprobs to be true", param="top_logprobs")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens


class TokenizeRequest(Body, kw_only=True):
    """Body of /tokenize."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]


_PARAMETERS = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}


def parse[Kind: Body](body: bytes, kind: type[Kind], limits: ServerLimits) -> Kind:
    """Decode and check a request body.

    Raises:
      ApiError: the body is not JSON, or a field is unknown, not supported or of the wrong type.
    """
    try:
        given = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiError(f"request: expected JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise ApiError("request: expected a JSON object", code="invalid_json")
    _check_depth(given, limits.max_json_depth)
    given = {name: value for name, value in given.items() if value is not None}
    known = kind.__struct_fields__
    for name in [*given]:
        accepted, reason = REFUSED.get(name, ((given[name],), ""))
        if given[name] not in accepted:
            raise ApiError(f"{name}: not supported: {reason}", param=name, code="unsupported_parameter")
        if name not in known:
            if name not in IGNORED and name not in REFUSED:
                shown = name[:100]
                raise ApiError(f"unrecognized request argument: {shown!r}", param=shown, code="unknown_parameter")
            del given[name]
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        match = re.search(r"\$\.(\w+)|field `(\w+)`", str(error))
        param = None if match is None else match[1] or match[2]
        raise ApiError(f"{param or 'request'}: {error}", param=param) from error


def _check_fields(name: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ApiError if an object in the field `name` has an unknown field whose value is not null."""
    for field, value in given.items():
        if value is not None and field not in known:
            shown = f"{name}.{field:.100}"
            raise ApiError(f"unrecognized request argument: {shown!r}", param=shown, code="unknown_parameter")


def _check_depth(value: Any, limit: int) -> None:
    """Raise ApiError if arrays and objects of a decoded JSON value are nested deeper than the limit."""
    level = [value]
    for _ in range(limit):
        values = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in values if isinstance(inner, dict | list)]
        if not level:
            return
    raise ApiError(f"request: expected JSON with at most {limit} nested arrays and objects", code="too_deep")


def of_engine(error: BaseException) -> ApiError:
    """Return the error for a request that the engine or the tokenizer refuses with ValueError or NotImplementedError.
    Other exceptions are internal errors."""
    if not isinstance(error, ValueError | NotImplementedError):
        return ApiError("internal error", 500)
    match = re.match(r"\w+", str(error))
    return ApiError(str(error), param=match[0] if match and match[0] in _PARAMETERS else None)


def check_entries(name: str, entries: Collection[Any], limit: int) -> None:
    """Raise ApiError if the field `name` has too many entries."""
    if len(entries) > limit:
        raise ApiError(f"{name}: expected at most {limit} entries, got {len(entries)}", param=name)


def _check_bytes(name: str, value: Any, limits: ServerLimits) -> None:
    if (size := len(json.dumps(value))) > limits.max_grammar_bytes:
        raise ApiError(f"{name}: expected at most {limits.max_grammar_bytes} bytes, got {size}", param=name)


def structured_outputs(request: GenerationRequest, limits: ServerLimits) -> StructuredOutputs | None:
    """Return the format of the output from response_format, structured_outputs or the guided fields; None without.

    Raises:
      ApiError: several formats are given, or a format is not valid or too large.
    """
    kinds, others = ("json", "regex", "choice", "grammar"), request.structured_outputs or {}
    if any(kind not in kinds for kind in others):
        raise ApiError("structured_outputs: expected json, regex, choice or grammar", param="structured_outputs")
    values = {f"guided_{kind}": (kind, getattr(request, f"guided_{kind}")) for kind in kinds}
    values |= {f"structured_outputs.{kind}": (kind, value) for kind, value in others.items()}
    values["response_format"] = ("json", _response_schema(request.response_format))
    given = {param: (kind, value) for param, (kind, value) in values.items() if value is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ApiError(f"{', '.join(given)}: expected one format of the output", param=next(iter(given)))
    ((param, (kind, value)),) = given.items()
    _check_bytes(param, value, limits)
    try:
        return StructuredOutputs(**{kind: value})
    except ValueError as error:
        raise ApiError(f"{param}: {error}", param=param) from error


def _response_schema(given: Mapping[str, Any] | None) -> Any:
    """Return the JSON schema of response_format; None for text."""
    name = "response_format"
    match given:
        case None:
            return None
        case {"type": "text" | "json_object" as kind}:
            _check_fields(name, given, ("type",))
            return None if kind == "text" else {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)} as described}:
            _check_fields(name, given, ("type", "json_schema"))
            _check_fields(f"{name}.json_schema", described, ("name", "description", "schema", "strict"))
            return schema
    raise ApiError(
        "response_format: expected the type text, json_object, or json_schema with json_schema.schema",
        param="response_format",
    )


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """Tools of a chat.

    Attributes:
      tools: tools for the chat template and the parser; empty if the model may call none.
      is_forced: whether the model must call a tool.
      function: name of the only tool that it may call, once; None for any.
      schema: JSON schema of the output if `is_forced` is True and the model has no format of tool calls.
    """

    tools: list[dict[str, Any]]
    is_forced: bool = False
    function: str | None = None
    schema: Any = None


def check_tools(tools: Sequence[Mapping[str, Any]], limits: ServerLimits) -> dict[str, Any]:
    """Return the JSON schema of the arguments of each function, by name.

    Raises:
      ApiError: a tool is not valid.
    """
    check_entries("tools", tools, limits.max_stops)
    _check_bytes("tools", tools, limits)
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name)} as function} if _FUNCTION.fullmatch(name):
                _check_fields(f"tools[{i}]", tool, ("type", "function"))
                _check_fields(f"tools[{i}].function", function, _FUNCTION_FIELDS)
                schemas[name] = function.get("parameters") or {"type": "object"}
            case _:
                raise ApiError(
                    f'tools: expected {{"type": "function", "function": {{"name": ...}}}} as entry {i}', param="tools"
                )
    return schemas


def tool_choice(request: ChatRequest, limits: ServerLimits) -> ToolChoice:
    """Check the tools of a request and the choice between them.

    Raises:
      ApiError: a tool or the choice is not valid.
    """
    tools, choice = request.tools or [], request.tool_choice
    schemas = check_tools(tools, limits)
    match choice:
        case "none":
            return ToolChoice([])
        case None | "auto":
            if choice and not tools:
                raise ApiError("tool_choice: expected tools", param="tool_choice")
            return ToolChoice(tools)
        case "required" if tools:
            calls = [
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "parameters": schema},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
                for name, schema in schemas.items()
            ]
            most = {} if request.parallel_tool_calls else {"maxItems": 1}
            array = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
            return ToolChoice(tools, True, None, array)
        case {"type": "function", "function": {"name": name} as function} if name in schemas:
            _check_fields("tool_choice", choice, ("type", "function"))
            _check_fields("tool_choice.function", function, ("name",))
            return ToolChoice(tools, True, name, schemas[name])
    raise ApiError("tool_choice: expected none, auto, required with tools, or a function of tools", param="tool_choice")


def chat_arguments(request: ChatRequest | TokenizeRequest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages of a chat in the form that chat templates expect, and variables of the template.

    Parts of a text are joined by line breaks, and arguments of earlier tool calls are decoded, as in vLLM.

    Raises:
      ApiError: a message has another form, or a part that is not text.
    """
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages or ())]
    if not messages:
        raise ApiError("messages: expected at least one message", param="messages")
    variables = dict(request.chat_template_kwargs or {})
    if wrong := [name for name in variables if name in _TEMPLATE_ARGUMENTS]:
        raise ApiError(f"chat_template_kwargs: not {wrong[0]}, which is a field", param="chat_template_kwargs")
    for name in ("reasoning_effort", "documents"):
        if getattr(request, name, None) is not None:
            variables[name] = getattr(request, name)
    return messages, variables


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise ApiError(f"{name}.role: expected a string", param="messages")
    if isinstance(content, list):
        texts = []
        for part in content:
            match part:
                case {"type": "text" | "refusal" as kind} if isinstance(part.get(kind), str):
                    texts.append(part[kind])
                case _:
                    raise ApiError(f"{name}.content: expected parts of the type text only", param="messages")
        content = "\n".join(texts)
    if not isinstance(content, str | None):
        raise ApiError(f"{name}.content: expected a string or a list of parts", param="messages")
    result = {**message, "content": content or ""}
    if message.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call, f"{name}.tool_calls") for call in message["tool_calls"]]
    return result


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    """Decode the arguments of an earlier tool call, because chat templates expect an object."""
    match call:
        case {"function": {"name": str(), **function}}:
            arguments = function.get("arguments") or "{}"
            try:
                decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
            except ValueError:
                decoded = arguments  # a model may have written invalid JSON; the template prints it
            return {**call, "function": {**call["function"], "arguments": decoded}}
    raise ApiError(f"{name}: expected objects with a function", param="messages")
