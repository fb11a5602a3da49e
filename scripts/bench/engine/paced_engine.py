"""An engine without a model, to measure the processor time of everything around the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pallas_attn.models.engine import Engine, SamplingParams


class PacedEngine:
    """Replaces `LLM.engine`. Each step waits for its time, and then every request gets a token from a fixed sequence.

    It has the methods that `LLM` and the server call. Prompts, sampling parameters and token filters have no effect
    except `max_tokens`.

    Args:
      engine: the engine whose configuration and limits are reported.
      tokens: token ids that are generated in turn.
      steps_per_s: maximum number of steps per second.
    """

    def __init__(self, engine: Engine, tokens: Sequence[int], steps_per_s: float):
        self.config, self.max_sequence_len, self.stats = engine.config, engine.max_sequence_len, engine.stats
        self._tokens, self._interval_s = tokens, 1 / steps_per_s
        self._running: dict[int, tuple[int, Callable[..., object]]] = {}
        self._ids: dict[int, list[int]] = {}  # output tokens of all requests
        self._next_s, self._added = 0.0, 0

    def warmup(self) -> float:
        return 0.0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def add_request(
        self, ids: Sequence[int], params: SamplingParams, *, on_token: Callable[..., object], **ignored: object
    ) -> int:
        self._added += 1
        self._running[self._added], self._ids[self._added] = (params.max_tokens, on_token), []
        return self._added

    def step(self) -> None:
        now = time.perf_counter()
        time.sleep(max(self._next_s - now, 0.0))
        self._next_s = max(self._next_s, now) + self._interval_s
        for request_id, (max_tokens, on_token) in [*self._running.items()]:
            ids = self._ids[request_id]
            ids.append(self._tokens[(request_id * 997 + len(ids)) % len(self._tokens)])
            is_last = len(ids) == max_tokens
            if is_last:
                del self._running[request_id]
            on_token(request_id, ids[-1], "length" if is_last else None)

    def output(self, request_id: int) -> Any:
        reason = None if request_id in self._running else "length"
        return SimpleNamespace(
            output_ids=self._ids[request_id], finish_reason=reason, refusal=None, error=None, cached_tokens=0
        )

    def has_ended(self, request_id: int) -> bool:
        return request_id not in self._running

    def abort(self, request_id: int) -> None:
        self._running.pop(request_id, None)

    def forget(self, request_id: int) -> None:
        del self._ids[request_id]
