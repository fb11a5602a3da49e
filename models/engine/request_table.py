"""The requests that an engine has records of, and the calls of `on_token` that are due."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from pallas_attn.models.engine.outputs import RequestId
from pallas_attn.models.engine.request import NONFINITE, Request
from pallas_attn.models.engine.step.plan import StepPlan
from pallas_attn.models.engine.tracked_request import TrackedRequest


class RequestTable:
    """Records of waiting, running and finished requests.

    The history is the list of finished requests. If it exceeds its limit, the record of its oldest request is deleted.
    Requests of `Engine.generate` are not in the history, because `generate` deletes their records.

    Attributes:
      tracked: the records by request id, in order of arrival.
    """

    def __init__(self, history: int | None, vocab_size: int):
        """Start without records.

        Args:
          history: maximum length of the history; None to delete records only in `delete`.
          vocab_size: number of tokens of the vocabulary, V.
        """
        self._history, self._vocab_size = history, vocab_size
        self.tracked: dict[RequestId, TrackedRequest] = {}
        self._finished: deque[TrackedRequest] = deque()  # the history, oldest first; empty if it has no limit
        self._ids = itertools.count()
        self._due_calls: deque[TrackedRequest] = deque()  # one entry per call of `on_token` that is due

    @property
    def has_due_calls(self) -> bool:
        return bool(self._due_calls)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished or a call of `on_token` is due, according to the records alone. They are
        consistent even after an interrupted call."""
        return any(tracked.finish_reason is None or tracked.num_due_calls for tracked in self.tracked.values())

    def new_id(self, request_id: RequestId | None) -> RequestId:
        """Return the id of a new request: the given id, or the next free number if it is None.

        Raises:
          ValueError: the id cannot be a key of a dict, or a request has it.
        """
        if request_id is None:
            return next(number for number in self._ids if number not in self.tracked)
        if not isinstance(request_id, Hashable):
            raise ValueError(f"request_id: expected an int or a str, got {request_id!r}")
        if request_id in self.tracked:
            raise ValueError(f"request_id: expected a new one, got {request_id!r} again")
        return request_id

    def find(self, request_id: RequestId) -> TrackedRequest:
        """Return the record of a request.

        Raises:
          ValueError: there is none.
        """
        if request_id not in self.tracked:
            limit = (
                "" if self._history is None else f"; the engine remembers the newest {self._history} finished requests"
            )
            raise ValueError(f"request_id: no request {request_id!r}{limit}")
        return self.tracked[request_id]

    def add(self, tracked: TrackedRequest) -> None:
        """Add the record of a new request, which may have been refused."""
        self.tracked[tracked.request.request_id] = tracked  # from here on the request survives an exception
        if tracked.refusal is not None:
            self.end(tracked)

    def end(self, tracked: TrackedRequest) -> None:
        """Add a finished request to the history."""
        if tracked.is_owned or self._history is None:
            return
        self._finished.append(tracked)
        if len(self._finished) > self._history:
            self.tracked.pop(self._finished[0].request.request_id, None)
            self._finished.popleft()

    def delete(self, tracked: TrackedRequest) -> None:
        """Delete the record of a finished request."""
        self.tracked.pop(tracked.request.request_id, None)
        with contextlib.suppress(ValueError):  # requests of `generate` are not in `_finished`
            self._finished.remove(tracked)

    # --- results of steps

    def record_start(self, plans: Sequence[StepPlan | None], planned_s: float) -> None:
        """Record the time at which planning of a step began, for requests that have their first tokens in this step."""
        for row in (row for plan in plans if plan is not None for row in plan.prefill):
            tracked = self.tracked[row.request.request_id]
            if tracked.scheduled_s is None:
                tracked.scheduled_s = planned_s

    def record_tokens(self, new: Sequence[tuple[Request, int]], read_s: float) -> list[RequestId]:
        """Record the tokens that `DataRanks.retire` has appended to the requests.

        Args:
          new: (request, token) for each token, or NONFINITE for the end of a request without a token.
          read_s: time at which the tokens were read, in seconds of the engine's clock.

        Returns:
          Ids of the requests that received a token.
        """
        progressed: dict[RequestId, None] = {}
        for request, token in new:
            tracked = self.tracked[request.request_id]
            if token != NONFINITE:
                tracked.token_times.append(read_s)
                progressed[request.request_id] = None
            if tracked.on_token is not None:
                self._due_calls.append(tracked)
        for request in dict.fromkeys(request for request, _ in new):
            if request.is_finished:
                self.end(self.tracked[request.request_id])
        return [*progressed]

    def record_filter_error(self, request: Request) -> None:
        """Record the end of a request whose token filter failed. `on_token` receives this end in a call of its own."""
        tracked = self.tracked[request.request_id]
        if tracked.on_token is not None:
            self._due_calls.append(tracked)
        self.end(tracked)

    def store_logits(self, plans: Sequence[StepPlan | None], logits: np.ndarray) -> None:
        """Store the prompt logits of a step.

        Args:
          plans: the plan of each data rank.
          logits: float32 [data ranks · padded prefill tokens, V].
        """
        for plan, of_plan in zip(plans, np.split(logits, len(plans)), strict=True):
            end = 0
            for row in () if plan is None else plan.prefill:
                request, first = row.request, end
                end += row.num_tokens
                num_prompt = min(row.num_tokens, len(request.prompt_ids) - row.start)
                tracked = self.tracked.get(request.request_id)
                # Since the launch the request may have been forgotten, and another request may have its id.
                if num_prompt > 0 and tracked is not None and tracked.request is request:
                    if tracked.prompt_logits is None:
                        tracked.prompt_logits = self._no_logits(tracked)
                    tracked.prompt_logits[row.start : row.start + num_prompt] = of_plan[first : first + num_prompt]

    def prompt_logits(self, request_id: RequestId) -> np.ndarray:
        """Return the stored logits of a prompt, float32 [prompt length, V]. Rows without logits are NaN.

        Raises:
          ValueError: no such request.
        """
        tracked = self.find(request_id)
        return self._no_logits(tracked) if tracked.prompt_logits is None else tracked.prompt_logits

    def _no_logits(self, tracked: TrackedRequest) -> np.ndarray:
        return np.full((len(tracked.request.prompt_ids), self._vocab_size), np.nan, np.float32)

    def call_back(self) -> None:
        """Make all due calls of `on_token`. After an exception of `on_token`, the next call of this method continues
        with the following token."""
        while self._due_calls:
            tracked = self._due_calls[0]
            call = tracked.next_call()
            self._due_calls.popleft()
            if call is not None and tracked.on_token is not None:
                tracked.on_token(tracked.request.request_id, *call)

    # --- recovery

    def unfinished(self) -> list[Request]:
        """Return the requests that have not ended, in order of arrival."""
        return [tracked.request for tracked in self.tracked.values() if tracked.finish_reason is None]

    def start_over(self, now: float) -> None:
        """Derive token times, due calls and the history again from the requests, after a call was interrupted.

        An exception may interrupt this method at any point. It may then be called again.

        Args:
          now: time of tokens without a recorded time, in seconds of the engine's clock.
        """
        tracked = [*self.tracked.values()]
        for t in tracked:
            t.token_times.extend([now] * (len(t.request.output_ids) - len(t.token_times)))
        with_callbacks = dict.fromkeys([*self._due_calls, *tracked])
        self._due_calls = deque(t for t in with_callbacks for _ in range(t.num_due_calls))
        self._finished = deque()
        for t in tracked:
            t.is_owned = False  # the interrupted call may be `generate`, which then may not delete the record
            if t.finish_reason is not None:
                self.end(t)
