"""Options and limits of the server, and the error that a request gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_attn.models.server.formats import ParserNames


def _limit(default: Any, text: str) -> Any:
    """Return a dataclass field whose metadata has the help text of its option."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits of requests and connections. Each is an option of `pallas-attn serve`, whose help describes the field.
    Fields that end with "_s" are times in seconds."""

    max_body_bytes: int = _limit(4 * 2**20, "bytes of a request")
    max_json_depth: int = _limit(64, "nested arrays and objects of a request")
    max_prompt_tokens: int | None = _limit(None, "tokens of a prompt (default: --max-model-len)")
    max_output_tokens: int | None = _limit(None, "value of max_tokens (default: --max-model-len)")
    max_requests: int = _limit(1024, "unfinished requests, running and waiting; more get the status 429")
    max_waiting: int = _limit(512, "unfinished requests without a token; more get the status 429")
    max_outputs: int = _limit(16, "number of prompts of a request times n")
    max_stops: int = _limit(128, "entries of each of stop, bad_words and tools")
    max_token_entries: int = _limit(1024, "entries of each of logit_bias, stop_token_ids and allowed_token_ids")
    max_grammar_bytes: int = _limit(2**17, "bytes of a JSON schema, regular expression or grammar")
    max_unread_tokens: int = _limit(4096, "generated tokens of a stream that the client has not read")
    max_connections: int = _limit(4096, "open connections")
    request_s: float = _limit(600.0, "seconds from the arrival of a request to the end of its response")
    read_s: float = _limit(20.0, "seconds in which the header of a request must arrive, and then its body")
    write_s: float = _limit(30.0, "seconds in which a client must read a part of a response")
    keep_alive_s: float = _limit(30.0, "seconds until the next request on a connection")
    step_s: float | None = _limit(None, "seconds of a step of the engine after which the server exits (default: none)")
    max_engine_errors: int = _limit(3, "failed steps in succession after which the server exits")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
      names: names of the model in requests and responses, at least one.
      max_len: maximum number of tokens of a sequence, prompt and output.
      families: names of the parsers of reasoning and tool calls.
      limits: limits of requests and connections.
      api_keys: accepted API keys; empty if requests need no key.
      allowed_origins: origins of web pages that may read responses.
      allowed_hosts: accepted names of the header Host, besides localhost and IP addresses; None for any.
      grace_s: seconds after `Server.stop` in which earlier requests may end.
      defaults: sampling parameters of the model, by name, which replace OpenAI's defaults.
      access_log: whether a line is logged for each request.
      tokenizer: folder of the tokenizer; None for a model without tokenizer.
      text_workers: number of threads for tokenization.
      prog: name of the command, for errors.
    """

    names: Sequence[str]
    max_len: int
    families: ParserNames
    limits: ServerLimits = ServerLimits()
    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] | None = None
    grace_s: float = 30.0
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    access_log: bool = False
    tokenizer: Path | None = None
    text_workers: int = 1
    prog: str = "pallas-attn serve"


type ErrorFields = tuple[str, int, str | None, str | None]
"""Arguments of `ApiError`, for messages between processes."""


class ApiError(Exception):
    """A request fails. The client gets OpenAI's error object.

    Args:
      message: reason, for the client.
      status: HTTP status.
      param: name of the wrong parameter; None if no single parameter is wrong.
      code: short code for programs; None for no code.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message[:2000], status, param, code

    @property
    def fields(self) -> ErrorFields:
        """Arguments for an equal error."""
        return self.message, self.status, self.param, self.code

    @property
    def content(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = kinds.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
