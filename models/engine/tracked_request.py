"""The engine's records of a request: times of its tokens, pending callbacks, captured logits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from pallas_attn.models.engine.outputs import RequestId, RequestOutput
from pallas_attn.models.engine.request import NONFINITE, FinishReason, Request

type OnToken = Callable[[RequestId, int, FinishReason | None], None]
"""Callback (request_id, token, finish_reason), called once per generated token. The finish reason is "stop" or "length"
in the call for the token that ends the request, and None in all other calls. If a request ends because its logits are
NaN or infinite, or because its token filter fails, a last call has token -1 and the reason "nonfinite" or
"filter_error". If a request is aborted, no call has a finish reason."""

_WITHOUT_TOKEN = ("nonfinite", "filter_error")
"""Finish reasons that `OnToken` gets in a call of their own."""


@dataclasses.dataclass(eq=False)
class TrackedRequest:
    """A request and the engine's records of it.

    Attributes:
      request: the request. The engine can rebuild all its other state from the tokens and finish reasons of requests.
      added_s: time of `add_request`, in seconds of the engine's clock, which stops during compilation.
      on_token: the caller's callback; None for no callback.
      token_times: time at which the host read each generated token, in seconds of the same clock.
      scheduled_s: time at which planning of the first step with tokens of the request began, in seconds of the same
        clock; None before.
      num_calls: number of calls of `on_token` that were made. It is increased before each call, so that no call is
        repeated after an exception.
      refusal: why the request was refused; None if it was accepted.
      is_owned: whether `Engine.generate` made the request and will delete this record. Other records are deleted when
        the history exceeds `EngineConfig.history`.
      prompt_logits: float32 [prompt length, V]; None if the engine does not capture logits or has computed none yet.
    """

    request: Request
    added_s: float
    on_token: OnToken | None
    token_times: list[float] = dataclasses.field(default_factory=list)
    scheduled_s: float | None = None
    num_calls: int = 0
    refusal: str | None = None
    is_owned: bool = False
    prompt_logits: np.ndarray | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return "refused" if self.refusal is not None else self.request.finish_reason

    @property
    def num_due_calls(self) -> int:
        """Number of pending calls of `on_token`: one for each token that the host has read and not passed to it, and
        one for the end of a request with a reason of `_WITHOUT_TOKEN`. 0 if there is no callback."""
        if self.on_token is None:
            return 0
        request = self.request
        num_tokens = len(request.token_ids) - len(request.prompt_ids)
        return num_tokens + (request.finish_reason in _WITHOUT_TOKEN) - self.num_calls

    def next_call(self) -> tuple[int, FinishReason | None] | None:
        """Return the token and finish reason for the next call of `on_token`, and count the call as made. Return None
        if no call is pending."""
        request, at = self.request, len(self.request.prompt_ids) + self.num_calls
        if not self.num_due_calls:
            return None
        self.num_calls += 1
        if at == len(request.token_ids):
            return NONFINITE, request.finish_reason
        ends = at == len(request.token_ids) - 1 and request.finish_reason in ("stop", "length")
        return request.token_ids[at], request.finish_reason if ends else None

    def output(self) -> RequestOutput:
        times, output_ids = self.token_times, self.request.output_ids
        wants_logprobs = self.request.params.logprobs is not None
        wants_prompt = self.request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.request.num_cached or 0,
            output_ids=output_ids,
            finish_reason=self.finish_reason,
            refusal=self.refusal,
            ttft_s=times[0] - self.added_s if times else None,
            itl_s=[later - earlier for earlier, later in itertools.pairwise(times)],
            drafted=self.request.drafted,
            accepted=self.request.accepted,
            logprobs=self.request.logprobs[: len(output_ids)] if wants_logprobs else None,
            prompt_logprobs=[None, *self.request.prompt_logprobs] if wants_prompt else None,
            queue_s=None if self.scheduled_s is None else self.scheduled_s - self.added_s,
            error=self.request.error,
        )
