"""ServerLimits of the server, and the error that a request gets if it exceeds one."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """ServerLimits of requests and connections. Each is an option of `pallas-attn serve`.

    Attributes:
      max_body_bytes: bytes of a request body.
      max_json_depth: depth of nested arrays and objects of a request.
      max_prompt_tokens: tokens of a prompt; None for the limit of the model.
      max_output_tokens: maximum of max_tokens; None for the limit of the model.
      max_requests: unfinished requests, running and waiting.
      max_waiting: unfinished requests without a token.
      max_outputs: outputs of a request: number of prompts times n.
      max_stops: entries of each of the lists stop, bad_words and tools.
      max_token_entries: entries of each of the lists logit_bias, stop_token_ids and allowed_token_ids.
      max_grammar_bytes: bytes of a JSON schema, a regular expression or a grammar.
      max_unread_tokens: generated tokens of a stream that the client has not read.
      max_connections: open connections.
      request_s: seconds from the arrival of a request to the end of its response.
      read_s: seconds until the header of a request has arrived, and seconds until its body has arrived.
      write_s: seconds in which a client must read a part of a response.
      keep_alive_s: seconds until the next request on a connection.
      max_engine_errors: consecutive failed steps of the engine after which the server exits.
    """

    max_body_bytes: int = 4 * 2**20
    max_json_depth: int = 64
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_requests: int = 1024
    max_waiting: int = 512
    max_outputs: int = 16
    max_stops: int = 128
    max_token_entries: int = 1024
    max_grammar_bytes: int = 2**17
    max_unread_tokens: int = 4096
    max_connections: int = 4096
    request_s: float = 600.0
    read_s: float = 20.0
    write_s: float = 30.0
    keep_alive_s: float = 30.0
    max_engine_errors: int = 3


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
