"""The scheduler: plans which tokens of which requests the next step computes, and allocates pages for their K/V."""

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
"""Number of prompt tokens whose computation takes as long as the fixed cost of a step, which is mostly the time to read
the weights. DeepSeek-V2-Lite on an H100: the fixed cost is 15 ms, and 1,000 tokens take 8 to 9 ms. The number is
smaller for dense models."""


class Scheduler:
    """Continuous batching by token budget, first come first served.

    `schedule` plans a step, which the engine launches; `retire` takes its sampled tokens. A step may be scheduled and
    launched before earlier steps are retired, so that reading tokens overlaps with computation. Consequences:

    - The end of a request is known only after its last token is read. So it may have surplus tokens in flight, which
      `retire` drops.
    - Launched steps may still use the pages of a request that ended or was preempted. The pages are nevertheless
      released at once. This is safe because the device runs steps in launch order, and the next owner writes to the
      pages in a later step. For the same reason the prefix cache can match a page once the step that fills it has been
      launched.
    - Every step recycles the pages before a window, before it allocates pages. Launched steps may still read them, but
      no query of a later step does. Tokens in flight count as computed, because they are never withdrawn. Drafts do not
      count, because they may be rejected.
    - Only the device knows the length of a row with drafts in flight. Until the length is read, the request has pages
      for all drafts that may be accepted, and its next row is planned from the smallest possible length. Drafts use
      free pages only; they never preempt a request.

    Running requests are in order of arrival, and every waiting request arrived later. When pages run out in a cache
    group, the youngest running request is preempted: it releases its pages and becomes the first waiting request. It is
    admitted again when all groups have room for its known tokens, and then computes all tokens that the prefix cache no
    longer has. `retire` still delivers its tokens in flight, and it is not admitted before that. A request that runs
    alone takes prompt chunks of the size that fits the pools. Therefore the oldest request always progresses, up to the
    size of the pools.

    Only requests and tokens that have been read must survive an exception. An exception in any call (MemoryError,
    Ctrl-C) may leave the other state inconsistent. `requeue_all` must then be the next call; it rebuilds that state.
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
        """Start without requests.

        Args:
            pools: Page pools of all cache groups, with one batch slot per running request.
            prefix_cache: Prefix cache over `pools`; None to disable it.
            max_batched_tokens: Maximum number of new tokens per step, decode and prefill together.
            max_prefill_seqs: Maximum number of prefill rows per step; None for the number of batch slots.
            max_model_len: Maximum number of tokens per sequence, prompt and output together.
            chunked_prefill: Whether prompts may be split over several steps. If a request has more known tokens than a
                step or the pools can take, for example after a preemption, they are split in any case.
            padded_sizes: Sizes to which the prompt tokens of a step are padded, ascending up to `max_batched_tokens`. A
                step takes fewer tokens than possible if that reduces the total padding of this step and the next one.
                Empty to disable this.
            eos_token_ids: Tokens that end a sequence unless its request ignores them.
            draft_control: Chooses the number of drafts per step; None for no drafts.

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
        # A sequence may be one token longer than the pools, because the K/V of its last token is never computed.
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
        """Number of preemptions."""
        return self._num_preemptions

    @property
    def looked_up_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache at first admission."""
        return self._looked_up_tokens

    @property
    def found_tokens(self) -> int:
        """Number of `looked_up_tokens` that the prefix cache had."""
        return self._found_tokens

    @property
    def max_len(self) -> int:
        """Maximum sequence length in tokens, limited by the model and the pools."""
        return self._max_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def cached_pages(self, request: Request) -> int:
        """Number of pages of a request's tokens in the prefix cache."""
        cache = self._prefix_cache
        return 0 if cache is None else cache.lookup(request.token_ids, request.salt)[0].shape[1]

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestRefused: the request could never be completed; the message says why.
            ValueError: an unfinished request has the same id, or the request has finished.
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
        """Plan the next step. The caller must launch it before it calls the scheduler again.

        Returns:
            The plan; None if nothing can be computed until a launched step is retired or a request is added.
        """
        self._recycle()
        decode = self._schedule_decode()
        prefill = self._schedule_prefill(self._max_batched_tokens - len(decode))
        if not decode and not prefill:
            return None
        tables = self._pools.tables([row.request_slot for row in (*decode, *prefill)])
        plan = StepPlan(tuple(decode), tuple(prefill), tables)
        self._launched.append(plan)
        for row in prefill:
            self._publish(row.request)
        return plan

    def retire(self, plan: StepPlan, tokens: Sequence[RowTokens]) -> list[tuple[Request, int]]:
        """Add the sampled tokens of a step to its requests.

        Args:
            plan: The oldest launched plan that has not been retired.
            tokens: Tokens of each of `plan.sampling_rows`.

        Returns:
            (request, token) for each token that continues a request, in order. `finish_reason` of the request is set if
            the request has ended. Tokens after the end are dropped. A token NONFINITE ends the request and is not
            added to it.

        Raises:
            ValueError: `plan` is not the oldest launched plan, or `tokens` has the wrong length.
        """
        if not self._launched or plan is not self._launched[0]:
            raise ValueError("plan must be the oldest launched plan that has not been retired")
        rows = plan.sampling_rows
        if len(tokens) != len(rows):
            raise ValueError(f"tokens must be one for each of {len(rows)} sampling rows, got {len(tokens)}")
        continued = [(row, got) for row, got in zip(rows, tokens, strict=True) if not row.request.is_finished]
        kept = [self._until_end(row.request, got.tokens) for row, got in continued]
        self._launched.popleft()  # no state changes before this line, in case a token is invalid and raises
        for (row, got), (new, reason) in zip(continued, kept, strict=True):
            request = row.request
            request.num_in_flight -= 1
            request.num_drafts_in_flight -= row.num_drafts
            if request.is_running:
                # The K/V of the last token is never computed, and rows launched after the end are idle.
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
        """Record the duration of a step, from which the number of drafts of later steps is chosen."""
        if self._draft_control is None:
            return
        if has_prompts:
            self._draft_control.record_prompts()
        else:
            self._draft_control.record_time(num_rows, num_drafts, seconds)

    def abort(self, request_id: int | str) -> bool:
        """End a waiting or running request. Return False if the request is unknown or has finished."""
        if request_id not in self._requests:
            return False
        self._finish(self._requests[request_id], "abort")
        return True

    def requeue_all(self, requests: Iterable[Request]) -> None:
        """Start over after the contents of the cache were lost or a call was interrupted. The cache is lost, for
        example, if a step raises after its caches were donated.

        The method does not use the previous state: it resets pools, slots, queues and the progress of every request.
        Therefore it may itself be interrupted and repeated. Every request keeps the tokens that have been read and is
        computed again. Launched plans cannot be retired any more. Their tokens are sampled again with equal results,
        because a draw depends only on seed and position.

        Args:
            requests: All requests that are not known to have ended, in order of arrival.
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
            if request.output_ids and not request.is_finished:  # `retire` may have added the token but not the reason
                request.finish_reason = self._reason_to_finish(request, request.token_ids[-1], len(request.token_ids))
            if not request.is_finished:
                unfinished.append(request)
        self._waiting = deque(unfinished)
        self._requests = {request.request_id: request for request in unfinished}

    def _recycle(self) -> None:
        """Recycle pages of running requests that no later step reads."""
        slots = [cast(int, request.request_slot) for request in self._running]
        self._pools.recycle(slots, [request.num_computed for request in self._running])

    def _schedule_decode(self) -> list[ScheduledRow]:
        """Schedule one row for each decoding request. The token budget suffices: a request is admitted only if the step
        has a token left for it after one token for each decoding request. Drafts do not count."""
        decoding = [
            request
            for request in self._running
            if not request.is_prefilling and not self._is_full_length(request, request.num_tokens)
        ]
        wanted = 0 if self._draft_control is None else self._draft_control.num_drafts(decoding)
        with_room = [request for request in decoding if self._make_room(request)]  # before pages are used for drafts
        return [self._schedule_row(request, 1, self._draft_room(request, wanted)) for request in with_room]

    def _schedule_prefill(self, budget: int) -> list[ScheduledRow]:
        rows = []
        budget = self._without_padding(budget)
        while budget > 0 and len(rows) < self._max_prefill_seqs:
            # Prompts are computed in order: only the youngest running request can be partly prefilled.
            partly_prefilled = bool(self._running) and self._running[-1].is_prefilling
            request = self._running[-1] if partly_prefilled else self._admit()
            if request is None:
                break
            lacking = request.prefill_end - request.num_computed
            num_tokens = min(lacking, budget)
            fits = num_tokens == lacking or self._chunked_prefill or lacking > self._max_batched_tokens
            if not fits:
                break
            if request is self._running[0]:  # it runs alone, so waiting would release no pages
                num_tokens = min(num_tokens, self._pools.room(cast(int, request.request_slot)) - request.num_computed)
            if num_tokens < 1 or not self._allocate(request, request.num_computed + num_tokens):
                break
            rows.append(self._schedule_row(request, num_tokens))
            budget -= num_tokens
        return rows

    def _without_padding(self, budget: int) -> int:
        """Reduce the budget of prompt tokens to one of `padded_sizes` if a separate step for the remaining tokens costs
        less than padding this step to the next size. The decision is an estimate: cached prefixes or missing pages may
        leave the step with fewer tokens. It affects when tokens are computed, but not their values."""
        if not self._chunked_prefill or not self._padded_sizes:
            return budget
        sizes, tokens = self._padded_sizes, min(budget, self._known_prompt_tokens())
        fits = bisect.bisect_left(sizes, tokens)
        if fits == 0:
            return budget
        rest = sizes[bisect.bisect_left(sizes, tokens - sizes[fits - 1])]
        return sizes[fits - 1] if sizes[fits - 1] + rest + STEP_TOKENS <= sizes[fits] else budget

    def _known_prompt_tokens(self) -> int:
        """Prompt tokens that the next step could compute without a token budget and without cached prefixes."""
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
            request, cast(int, request.request_slot), start, num_tokens, samples, num_drafts, self._limit(request)
        )

    def _admit(self) -> Request | None:
        """Admit the first waiting request if there is a free slot and room for all its known tokens."""
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
        request.request_slot = self._free_slots.pop()
        request.num_computed = 0 if cache is None else cache.match(request.request_slot, known, request.salt)
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
        """Allocate room for one more token. Preempt the youngest running requests if necessary.

        Returns:
            False if the request itself was preempted, in this call or an earlier one. Also False if it must wait for
            its drafts in flight, because pages reserved for them may become unnecessary.
        """
        while request.is_running and not self._allocate(request, self._end_of_row(request, 0)):
            if request.num_drafts_in_flight:
                return False
            self._requeue(self._running[-1])
            self._num_preemptions += 1
        return request.is_running

    def _draft_room(self, request: Request, wanted: int) -> int:
        """Allocate free pages for drafts after one more token: for `wanted` drafts, or fewer near the request's end.
        Return the number of drafts, 0 without room."""
        num_drafts = max(min(wanted, self._limit(request) - request.num_tokens - 1), 0)
        return num_drafts if num_drafts and self._allocate(request, self._end_of_row(request, num_drafts)) else 0

    def _end_of_row(self, request: Request, num_drafts: int) -> int:
        """Number of tokens that a decode row needs room for if all drafts in flight are accepted. The K/V of a
        request's last token is never computed."""
        end = request.num_computed + 1 + request.num_drafts_in_flight + num_drafts
        return min(end, self._limit(request) - 1)

    def _allocate(self, request: Request, end: int) -> bool:
        """Allocate page rows so that the request can hold `end` tokens. Return False, and allocate nothing, if too few
        are free."""
        if end <= request.num_computed + -request.num_computed % self._page_size:
            return True  # the last page has room, as for most decode rows
        try:
            self._pools.allocate(cast(int, request.request_slot), end)
        except OutOfPages:
            return False
        return True

    def _publish(self, request: Request) -> None:
        """Publish full pages whose tokens are known and whose K/V launched steps write."""
        num_tokens = min(request.num_computed, len(request.token_ids))
        num_full = num_tokens // self._page_size
        if self._prefix_cache is not None and num_full > request.num_published:
            self._prefix_cache.publish(cast(int, request.request_slot), request.token_ids[:num_tokens], request.salt)
            request.num_published = num_full

    def _requeue(self, request: Request) -> None:
        """Make the youngest running request the first waiting request."""
        self._give_up(request)
        self._waiting.appendleft(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason  # first, because `requeue_all` can rebuild everything else
        if request.is_running:
            self._give_up(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]

    def _give_up(self, request: Request) -> None:
        """Release the pages and the slot of a running request."""
        self._running.remove(request)
        self._free_slots.append(cast(int, request.request_slot))
        self._pools.release(cast(int, request.request_slot))
        request.request_slot = None
        request.num_computed = request.prefill_end = 0  # tokens in flight will still be retired

    def _reason_to_finish(self, request: Request, token: int, num_tokens: int) -> FinishReason | None:
        """Return why a request ends with this token, the last of `num_tokens`; None if it continues."""
        params = request.params
        if token == NONFINITE:
            return "nonfinite"
        if token in params.stop_token_ids or (token in self._eos_token_ids and not params.ignore_eos):
            return "stop"
        return "length" if self._is_full_length(request, num_tokens) else None

    def _until_end(self, request: Request, tokens: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
        """Return the tokens up to the token that ends the request, and the reason; all tokens and None otherwise."""
        for i, token in enumerate(tokens, 1):
            if reason := self._reason_to_finish(request, token, len(request.token_ids) + i):
                return tokens[:i], reason
        return tokens, None

    def _count_drafts(self, row: ScheduledRow, got: RowTokens, accepted: int) -> None:
        """Count a row's drafts; the first `accepted` were accepted."""
        request, places = row.request, row.num_drafts
        if self._draft_control is not None:
            self._draft_control.record(request, row.num_drafts, accepted)
            places = self._draft_control.depth(row.num_drafts)
        request.drafted = counted(request.drafted, got.drafted, places)
        request.accepted = counted(request.accepted, accepted, places)

    def _limit(self, request: Request) -> int:
        """Number of tokens at which a request ends."""
        return min(self._max_len, len(request.prompt_ids) + request.params.max_tokens)

    def _is_full_length(self, request: Request, num_tokens: int) -> bool:
        return num_tokens >= self._limit(request)
