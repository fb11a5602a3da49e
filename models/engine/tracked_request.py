"""The engine's records of a request: arrival times, due callbacks, captured logits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from models.engine.outputs import RequestId, RequestOutput
from models.engine.request import NONFINITE, FinishReason, Request

type OnToken = Callable[[RequestId, int, FinishReason | None], None]
"""Callback (request_id, token, finish_reason), called once per token; the reason is None before the last token. If the
logits of a request are not finite, its last call has token -1 and the reason "nonfinite"."""


@dataclasses.dataclass(eq=False)
class TrackedRequest:
    """A request and the engine's records of it.

    Attributes:
      request: the request. All other state of the engine can be rebuilt from its tokens and its finish reason.
      added_s: time of `add_request`, in seconds of the engine's clock.
      on_token: the caller's callback.
      token_times: arrival time of each token.
      num_calls: calls of `on_token` so far. The counter increases before the call, so no call is repeated.
      refusal: why the request was refused; None if it was accepted.
      is_owned: whether the caller removes the records (`Engine.generate`). Otherwise `EngineConfig.history` decides.
      prompt_logits: float32 [prompt length, V], if the engine captures logits and has computed any.
    """

    request: Request
    added_s: float
    on_token: OnToken | None
    token_times: list[float] = dataclasses.field(default_factory=list)
    num_calls: int = 0
    refusal: str | None = None
    is_owned: bool = False
    prompt_logits: np.ndarray | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return "refused" if self.refusal is not None else self.request.finish_reason

    @property
    def num_due_calls(self) -> int:
        """Calls of `on_token` for tokens that have arrived and were not delivered."""
        if self.on_token is None:
            return 0
        request = self.request
        num_tokens = len(request.token_ids) - len(request.prompt_ids)
        return num_tokens + (request.finish_reason == "nonfinite") - self.num_calls

    def next_call(self) -> tuple[int, FinishReason | None] | None:
        """Count the next due call of `on_token`. Return its token and reason, or None if no call is due."""
        request, at = self.request, len(self.request.prompt_ids) + self.num_calls
        if not self.num_due_calls:
            return None
        self.num_calls += 1
        if at == len(request.token_ids):
            return NONFINITE, "nonfinite"
        ends = at == len(request.token_ids) - 1 and request.finish_reason in ("stop", "length")
        return request.token_ids[at], request.finish_reason if ends else None

    def output(self) -> RequestOutput:
        times = self.token_times
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.request.num_cached or 0,
            output_ids=self.request.output_ids,
            finish_reason=self.finish_reason,
            refusal=self.refusal,
            ttft_s=times[0] - self.added_s if times else None,
            itl_s=[later - earlier for earlier, later in itertools.pairwise(times)],
            drafted=self.request.drafted,
            accepted=self.request.accepted,
        )
