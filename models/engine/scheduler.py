"""The scheduler: which tokens of which requests the next step computes, and in which pages their K/V goes."""

import bisect
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import cast

from models.engine.request import NONFINITE, FinishReason, Request, RequestRefused
from models.engine.speculation.draft_control import DraftControl, counted
from models.engine.step.plan import RowTokens, ScheduledRow, StepPlan
from pallas_attn.cache import GroupPools, OutOfPages, PrefixCache

STEP_TOKENS = 2048
"""Prompt tokens that take as long as what a step costs whatever its size, which is mostly reading the weights: 15 ms of
DeepSeek-V2-Lite's on an H100, where 1,000 tokens take 8 to 9 (benchmarks/log/118). A dense model's are fewer."""


class Scheduler:
    """Continuous batching by token budget, first come first served.

    `schedule` plans a step, which the engine launches; `retire` takes its sampled tokens. A step may be scheduled and
    launched before the previous ones are retired, so that reading back overlaps with computing. This has consequences:

    - A request whose end is not known yet may have a token too many in flight, which `retire` drops.
    - The pages of a request that ended or was preempted may still be used by launched steps. They are released at once
      all the same: the device runs steps in the order they were launched, and their next owner writes to them in a step
      launched later. For the same reason a page may be matched once the step that fills it was launched.
    - So may the pages behind a window, which every step recycles before it takes new ones: those that no query of a
      later step sees. Tokens in flight count as computed, because none is ever taken back; drafts do not, because those
      that are rejected are.
    - How far a row with drafts has come is known on the device alone. Until it is read back the request has pages for
      all that may be accepted, and the rows after it are planned from the least. Pages for drafts are taken where they
      are free; for drafts nobody is preempted.

    Running requests are in order of arrival, and every waiting one arrived after them. When pages run out in some cache
    group the youngest running request is preempted: it gives up its pages, waits in front, and is computed again
    (except for tokens that the prefix cache still has) once there is room in all groups to get through its known
    tokens. Tokens of it in flight are still delivered by `retire`, and it is not admitted before. A request that has
    the pools to itself takes prompt chunks as large as they allow. So the oldest request always moves, up to the size
    of the pools.

    Requests and the tokens that were read back are all that has to be kept; `requeue_all` makes the rest anew. A call
    that was cut short by an exception (of memory, or Ctrl-C) may have left anything half done, so `requeue_all` has to
    come next.
    """

    def __init__(
        self,
        pools: GroupPools,
        prefix_cache: PrefixCache | None,
        *,
        max_batched_tokens: int,
        max_prefill_seqs: int | None = None,
        max_model_len: int,
        chunked_prefill: bool,
        padded_sizes: Sequence[int] = (),
        eos_token_ids: Collection[int] = (),
        draft_control: DraftControl | None = None,
    ) -> None:
        """Starts without requests.

        Args:
            pools: Rows for the K/V of every cache group; a running request has a batch slot of theirs.
            prefix_cache: Over `pools`; None disables reuse.
            max_batched_tokens: New tokens per step, decode and prefill together.
            max_prefill_seqs: Prefill rows per step; None for as many as can run.
            max_model_len: Tokens per sequence, prompt and output together.
            chunked_prefill: Whether prompts may be spread over steps. Tokens that exceed a step after a preemption, or
                the pools at once, always may.
            padded_sizes: Sizes that the prompt tokens of a step are padded to, ascending up to `max_batched_tokens`.
                A step takes fewer than it could where it and the next are then padded to less than one; empty for no
                such cuts.
            eos_token_ids: Tokens that end a sequence unless its request ignores them.
            draft_control: Decides how many drafts a step verifies; None for no drafts.

        Raises:
            ValueError: a size is too small, or padded_sizes end below max_batched_tokens.
        """
        max_prefill_seqs = pools.max_num_seqs if max_prefill_seqs is None else max_prefill_seqs
        if min(max_batched_tokens, max_prefill_seqs) < 1 or max_model_len < 2:
            sizes = f"{max_batched_tokens=}, {max_prefill_seqs=}, {max_model_len=}"
            raise ValueError(f"sizes must be at least 1, and max_model_len at least 2, got {sizes}")
        if padded_sizes and padded_sizes[-1] < max_batched_tokens:
            raise ValueError(f"padded_sizes must reach max_batched_tokens={max_batched_tokens}, got {padded_sizes}")
        self._pools = pools
        self._page_size = pools.page_size
        self._prefix_cache = prefix_cache
        self._max_batched_tokens = max_batched_tokens
        self._max_prefill_seqs = max_prefill_seqs
        self._max_model_len = max_model_len
        # A sequence may have one token more than the pools hold, because its last token is never computed.
        self._max_len = min(max_model_len, pools.max_tokens + 1)
        self._chunked_prefill = chunked_prefill
        self._padded_sizes = tuple(padded_sizes)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._draft_control = draft_control
        self._requests: dict[int | str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(reversed(range(pools.max_num_seqs)))
        self._launched: deque[StepPlan] = deque()
        self._num_preemptions = self._looked_up_tokens = self._found_tokens = 0

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    @property
    def num_preemptions(self) -> int:
        """Number of times that a request lost its pages to an older one."""
        return self._num_preemptions

    @property
    def looked_up_tokens(self) -> int:
        """Prompt tokens that were looked up in the prefix cache, when their requests were first admitted."""
        return self._looked_up_tokens

    @property
    def found_tokens(self) -> int:
        """Tokens of `looked_up_tokens` that were found."""
        return self._found_tokens

    @property
    def max_len(self) -> int:
        """Longest possible sequence in tokens, given the model and the pools."""
        return self._max_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def cached_pages(self, request: Request) -> int:
        """Pages of a request's tokens that the prefix cache has."""
        cache = self._prefix_cache
        return 0 if cache is None else cache.lookup(request.token_ids, request.salt)[0].shape[1]

    def add(self, request: Request) -> None:
        """Queues a new request.

        Raises:
            RequestRefused: it could never be completed; the message says why.
            ValueError: an unfinished request has the same id, or the request is not new.
        """
        if request.request_id in self._requests or request.is_finished:
            raise ValueError(f"request_id must be new, got {request.request_id!r} again")
        length = len(request.prompt_ids)
        if length >= self._max_model_len:
            raise RequestRefused(f"the prompt has {length} tokens, the model takes at most {self._max_model_len - 1}")
        if (pool := self._pools.lacking_pool(length)) is not None:
            needed, kind = pool.peak_rows(length, step_tokens=1), "pages" if pool.num_heads == 1 else "rows"
            raise RequestRefused(f"the prompt needs {needed} {kind}, the pool has {pool.num_rows}")
        if length > (limit := self._max_batched_tokens) and not self._chunked_prefill:
            raise RequestRefused(f"the prompt has {length} tokens, a step takes {limit} unless prefill is chunked")
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """Plans the next step, which has to be launched before the scheduler is called again.

        Returns:
            The plan, or None when there is nothing to do before a launched step is retired or a request is added.
        """
        self._recycle()
        decode = self._schedule_decode()
        prefill = self._schedule_prefill(self._max_batched_tokens - len(decode))
        if not decode and not prefill:
            return None
        tables = self._pools.tables([row.slot for row in (*decode, *prefill)])
        plan = StepPlan(tuple(decode), tuple(prefill), tables)
        self._launched.append(plan)
        for row in prefill:
            self._publish(row.request)
        return plan

    def retire(self, plan: StepPlan, tokens: Sequence[RowTokens]) -> list[tuple[Request, int]]:
        """Takes the sampled tokens of a step.

        Args:
            plan: The oldest launched plan that has not been retired.
            tokens: What each of `plan.sampling_rows` got.

        Returns:
            (request, token) for each token that continues a request, in order; its `finish_reason` is set if this was
            the last one. Tokens after one that ends the request are dropped. A request whose token is NONFINITE gets
            none, and ends.

        Raises:
            ValueError: another plan is next, or the number of `tokens` is not that of the plan's sampling rows.
        """
        if not self._launched or plan is not self._launched[0]:
            raise ValueError("plan must be the oldest launched plan that has not been retired")
        rows = plan.sampling_rows
        if len(tokens) != len(rows):
            raise ValueError(f"tokens must be one for each of {len(rows)} sampling rows, got {len(tokens)}")
        continued = [(row, got) for row, got in zip(rows, tokens, strict=True) if not row.request.is_finished]
        kept = [self._until_end(row.request, got.tokens) for row, got in continued]
        self._launched.popleft()  # nothing has changed so far, in case a token is no number
        for (row, got), (new, reason) in zip(continued, kept, strict=True):
            request = row.request
            request.num_in_flight -= 1
            request.num_drafts_in_flight -= row.num_drafts
            if request.is_running:
                # The last token is never computed, and rows launched after it was sampled are idle.
                computed = request.num_computed + max(len(got.tokens) - 1, 0)
                request.num_computed = min(computed, self._limit(request) - 1)
            if row.num_drafts:
                self._count_drafts(row, got, len(new) - 1)
            request.token_ids.extend(token for token in new if token != NONFINITE)
            self._publish(request)
            if reason:
                self._finish(request, reason)
        return [(row.request, token) for (row, _), (new, _) in zip(continued, kept, strict=True) for token in new]

    def record_time(self, num_rows: int, num_drafts: int, seconds: float, *, has_prompts: bool) -> None:
        """Takes note of how long a step with so many decode rows and drafts took, for the number of drafts of later
        ones."""
        if self._draft_control is None:
            return
        if has_prompts:
            self._draft_control.record_prompts()
        else:
            self._draft_control.record_time(num_rows, num_drafts, seconds)

    def abort(self, request_id: int | str) -> bool:
        """Ends a request wherever it is. Returns False if it is unknown or finished already."""
        if request_id not in self._requests:
            return False
        self._finish(self._requests[request_id], "abort")
        return True

    def requeue_all(self, requests: Iterable[Request]) -> None:
        """Starts over after the contents of the cache were lost, such as when a step raised after its caches were
        donated, or after any call was cut short.

        Nothing is taken over from the state so far: pools, slots, queues and the progress of every request are made
        anew, so that the call may itself be cut short and repeated. Every request keeps the tokens that were read back
        and is computed again. Launched plans cannot be retired any more: as a draw depends on seed and position only,
        the tokens they lose are sampled again.

        Args:
            requests: All that are not known to have ended, in order of arrival.
        """
        self._pools.reset()
        if self._prefix_cache is not None:
            self._prefix_cache.clear()
        self._free_slots = list(reversed(range(self._pools.max_num_seqs)))
        self._launched = deque()
        self._running = []
        unfinished = []
        for request in requests:
            request.requeue()
            if request.output_ids and not request.is_finished:  # it may have been cut short between token and reason
                request.finish_reason = self._reason_to_finish(request, request.token_ids[-1], len(request.token_ids))
            if not request.is_finished:
                unfinished.append(request)
        self._waiting = deque(unfinished)
        self._requests = {request.request_id: request for request in unfinished}

    def _recycle(self) -> None:
        """Recycles the pages of running requests that no later step reads."""
        slots = [cast(int, request.slot) for request in self._running]
        self._pools.recycle(slots, [request.num_computed for request in self._running])

    def _schedule_decode(self) -> list[ScheduledRow]:
        """Schedules one row for each decoding request. The budget suffices: a request is admitted only if it leaves a
        token for each of the others; drafts are not counted."""
        decoding = [
            request
            for request in self._running
            if not request.is_prefilling and not self._is_full_length(request, request.num_tokens)
        ]
        wanted = 0 if self._draft_control is None else self._draft_control.num_drafts(decoding)
        with_room = [request for request in decoding if self._make_room(request)]  # all of it before any drafts'
        return [self._schedule_row(request, 1, self._draft_room(request, wanted)) for request in with_room]

    def _schedule_prefill(self, budget: int) -> list[ScheduledRow]:
        rows = []
        budget = self._without_padding(budget)
        while budget > 0 and len(rows) < self._max_prefill_seqs:
            # Prompts are completed in order: only the youngest running request can be partly prefilled.
            partly_prefilled = bool(self._running) and self._running[-1].is_prefilling
            request = self._running[-1] if partly_prefilled else self._admit()
            if request is None:
                break
            lacking = request.prefill_end - request.num_computed
            num_tokens = min(lacking, budget)
            fits = num_tokens == lacking or self._chunked_prefill or lacking > self._max_batched_tokens
            if not fits:
                break
            if request is self._running[0]:  # it runs alone, so waiting would free nothing
                num_tokens = min(num_tokens, self._pools.room(cast(int, request.slot)) - request.num_computed)
            if num_tokens < 1 or not self._allocate(request, request.num_computed + num_tokens):
                break
            rows.append(self._schedule_row(request, num_tokens))
            budget -= num_tokens
        return rows

    def _without_padding(self, budget: int) -> int:
        """Cuts the budget of prompt tokens to one of `padded_sizes` if what it leaves is cheaper in a step of its own
        than padding is now. A guess, which changes when a token is computed, not what: prefixes that turn out to be
        cached, or pages that are missing, may leave the step with fewer tokens."""
        if not self._chunked_prefill or not self._padded_sizes:
            return budget
        sizes, tokens = self._padded_sizes, min(budget, self._known_prompt_tokens())
        fits = bisect.bisect_left(sizes, tokens)
        if fits == 0:
            return budget
        rest = sizes[bisect.bisect_left(sizes, tokens - sizes[fits - 1])]
        return sizes[fits - 1] if sizes[fits - 1] + rest + STEP_TOKENS <= sizes[fits] else budget

    def _known_prompt_tokens(self) -> int:
        """Prompt tokens that the next step could compute if it had no budget, and nothing were cached."""
        partly = [request for request in self._running[-1:] if request.is_prefilling]
        num_waiting = min(self._max_prefill_seqs - len(partly), len(self._free_slots))
        waiting = itertools.islice(self._waiting, num_waiting)
        lacking = sum(request.prefill_end - request.num_computed for request in partly)
        return lacking + sum(len(request.token_ids) for request in waiting)

    def _schedule_row(self, request: Request, num_tokens: int, num_drafts: int = 0) -> ScheduledRow:
        start = request.num_computed
        request.num_computed += num_tokens
        samples = not request.is_prefilling
        request.num_in_flight += samples
        request.num_drafts_in_flight += num_drafts
        return ScheduledRow(
            request, cast(int, request.slot), start, num_tokens, samples, num_drafts, self._limit(request)
        )

    def _admit(self) -> Request | None:
        """Moves the first waiting request to the running ones, if there is a slot and room for all its known tokens."""
        if not self._waiting or not self._free_slots:
            return None
        request = self._waiting[0]
        if request.num_in_flight:
            return None  # its last tokens are still on the device
        cache, known = self._prefix_cache, request.token_ids
        prefix = None if cache is None else cache.lookup(known, request.salt)
        step_tokens = self._max_batched_tokens
        if self._running and not self._pools.has_room(len(known), step_tokens=step_tokens, prefix=prefix):
            return None
        request.slot = self._free_slots.pop()
        request.num_computed = 0 if cache is None else cache.match(request.slot, known, request.salt)
        request.num_published = request.num_computed // self._page_size
        request.prefill_end = len(known)
        if request.num_cached is None:
            request.num_cached = request.num_computed
            if cache is not None:
                self._looked_up_tokens += len(known)
                self._found_tokens += request.num_computed
        self._running.append(self._waiting.popleft())
        return request

    def _make_room(self, request: Request) -> bool:
        """Allocates room for one more token, preempting the youngest running requests as needed. False if the request
        was preempted itself, now or to make room for an older one, or has to wait for the pages that its drafts in
        flight may turn out not to need."""
        while request.is_running and not self._allocate(request, self._end_of_row(request, 0)):
            if request.num_drafts_in_flight:
                return False
            self._requeue(self._running[-1])
            self._num_preemptions += 1
        return request.is_running

    def _draft_room(self, request: Request, wanted: int) -> int:
        """Allocates room for drafts after one more token if it is free: for those wanted, or fewer near the request's
        end. Returns their number, 0 without room."""
        num_drafts = max(min(wanted, self._limit(request) - request.num_tokens - 1), 0)
        return num_drafts if num_drafts and self._allocate(request, self._end_of_row(request, num_drafts)) else 0

    def _end_of_row(self, request: Request, num_drafts: int) -> int:
        """Tokens that a decode row needs room for, if all drafts in flight are accepted. The last one of a request is
        never computed."""
        end = request.num_computed + 1 + request.num_drafts_in_flight + num_drafts
        return min(end, self._limit(request) - 1)

    def _allocate(self, request: Request, end: int) -> bool:
        """Gives a request the rows it lacks to hold `end` tokens; False, and no rows, if too few are free."""
        if end <= request.num_computed + -request.num_computed % self._page_size:
            return True  # in the page it has begun, as most decode rows are
        try:
            self._pools.allocate(cast(int, request.slot), end)
        except OutOfPages:
            return False
        return True

    def _publish(self, request: Request) -> None:
        """Publishes the full pages whose tokens are known and whose K/V is written by launched steps."""
        num_tokens = min(request.num_computed, len(request.token_ids))
        num_full = num_tokens // self._page_size
        if self._prefix_cache is not None and num_full > request.num_published:
            self._prefix_cache.publish(cast(int, request.slot), request.token_ids[:num_tokens], request.salt)
            request.num_published = num_full

    def _requeue(self, request: Request) -> None:
        """Puts the youngest running request back in front of the waiting ones."""
        self._give_up(request)
        self._waiting.appendleft(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason  # first: all else can be made anew
        if request.is_running:
            self._give_up(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]

    def _give_up(self, request: Request) -> None:
        """Takes pages and slot from a running request."""
        self._running.remove(request)
        self._free_slots.append(cast(int, request.slot))
        self._pools.release(cast(int, request.slot))
        request.slot = None
        request.num_computed = request.prefill_end = 0  # its tokens in flight are still to be retired

    def _reason_to_finish(self, request: Request, token: int, num_tokens: int) -> FinishReason | None:
        """Reason for which a request ends with this token, the last of `num_tokens`; None if it goes on."""
        params = request.params
        if token == NONFINITE:
            return "nonfinite"
        if token in params.stop_token_ids or (token in self._eos_token_ids and not params.ignore_eos):
            return "stop"
        return "length" if self._is_full_length(request, num_tokens) else None

    def _until_end(self, request: Request, tokens: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
        """The tokens up to one that ends the request, and the reason; all of them and None if it goes on."""
        for i, token in enumerate(tokens, 1):
            if reason := self._reason_to_finish(request, token, len(request.token_ids) + i):
                return tokens[:i], reason
        return tokens, None

    def _count_drafts(self, row: ScheduledRow, got: RowTokens, accepted: int) -> None:
        """Counts a row's drafts, the first `accepted` of which became tokens."""
        request, places = row.request, row.num_drafts
        if self._draft_control is not None:
            self._draft_control.record(request, row.num_drafts, accepted)
            places = self._draft_control.depth(row.num_drafts)
        request.drafted = counted(request.drafted, got.drafted, places)
        request.accepted = counted(request.accepted, accepted, places)

    def _limit(self, request: Request) -> int:
        """Tokens at which a request ends."""
        return min(self._max_len, len(request.prompt_ids) + request.params.max_tokens)

    def _is_full_length(self, request: Request, num_tokens: int) -> bool:
        return num_tokens >= self._limit(request)
