"""Limits of the server, and the error that a request gets if it exceeds one."""

from __future__ import annotations

import dataclasses
from typing import Any


def _limit(default: Any, text: str) -> Any:
    """Return a field with the help of its option."""
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


class ApiError(Exception):
    """A request fails. The client gets OpenAI's error object.

    Args:
      message: reason, for the client.
      status: HTTP status.
      param: name of the wrong parameter; None if no single parameter is wrong.
      code: short code for programs; None for no code.
    """

    def __init__(self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message[:2000], status, param, code

    @property
    def content(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = kinds.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def check_depth(value: Any, limit: int) -> None:
    """Raise ApiError if arrays and objects of a decoded JSON value are nested deeper than the limit."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ApiError(f"request: expected JSON with at most {limit} nested arrays and objects", code="too_deep")
