"""The scheduler: chooses the tokens that the next step computes, and allocates cache pages for their keys and values.

A step is one forward pass of the model over new tokens of several requests. With speculation, it also verifies drafts:
guesses of the tokens after the newest token of a request. One call of `Scheduler.schedule` does:

    recycle()                          # release pages that lie before the attention window of all later queries
    for request in decoding requests:  # one decode row each: the newest token, and drafts if pages are free
        allocate pages; if there are too few, preempt the youngest running request
    while token budget is left:        # one prefill row each: a chunk of a prompt
        take the youngest running request if its prompt is not complete, otherwise admit the next waiting request
        allocate pages for its chunk
    publish full pages of prompts      # in the prefix cache, where later requests find them

`Scheduler.retire` receives the sampled tokens of a step, appends them to the requests, publishes the pages that they
fill, and ends requests.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, cast

from pallas_attn.cache import GroupPools, OutOfPages, PrefixCache
from pallas_attn.models.engine.request import NONFINITE, FinishReason, Request, RequestRefused
from pallas_attn.models.engine.speculation.draft_control import DraftControl, counted
from pallas_attn.models.engine.step.plan import RowTokens, ScheduledRow, StepPlan

type RunningRequests = Literal["recompute", "keep", "abort"]
"""What happens to running requests when the weights are replaced."""

STEP_TOKENS = 2048
"""Fixed cost of a step, in prompt tokens whose computation takes equally long.

The fixed cost is mostly the time to read the weights. For DeepSeek-V2-Lite on an H100 it is 15 ms, and 1,000 prompt
tokens take 8 to 9 ms. The true number is smaller for dense models.
"""


class Scheduler:
    """Schedules continuous batching, first come first served, with a limit on the new tokens per step (token budget).

    Steps in flight. The engine launches each plan of `schedule`, and passes the sampled tokens of the step to `retire`.
    It may schedule and launch a step before earlier steps are retired, so that the host reads tokens while the device
    computes. A token is in flight if a launched step samples it and the host has not read it yet. Consequences:

    - The host learns that a request has ended only when it reads the last token of the request. Steps launched before
      may sample further tokens of this request, which `retire` drops.
    - Pages of a request that ends or is preempted are released at once, although launched steps may still use them.
      This is safe: the device runs steps in launch order, and the next owner of a page writes it in a later step.
    - Other requests may use a page of the prefix cache as soon as the step that fills the page has been launched: they
      read the page in later steps.
    - Before `schedule` allocates pages, it releases the pages that lie before the attention window of all later
      queries. Launched steps may still read these pages. The position of the next query includes tokens in flight,
      because they are final. It does not include drafts in flight, because they may be rejected.
    - If drafts of a request are in flight, only the device knows how many of them it accepted. Until the host has read
      this number, the request owns pages for all drafts, and its next row is planned as if all drafts were rejected.
      Drafts use free pages only: no request is preempted for them.

    Preemption. Running requests are in order of arrival. Every waiting request arrived after every running request. If
    a cache group (layers with equal windows, which share a page pool) has too few free pages, the youngest running
    request is preempted: it releases its pages and becomes the first waiting request. `retire` still appends its tokens
    in flight. After these, the request is admitted again as soon as every cache group has room for all its tokens. The
    tokens that the prefix cache does not have are then computed again.

    Progress. The oldest running request can preempt all others. When no other request runs, the size of its prompt
    chunks is limited to the free pages. Therefore it reaches its end, or the length that the pools can hold.

    Exceptions. An exception in any call, such as MemoryError or KeyboardInterrupt, may leave the state inconsistent,
    except the requests themselves and their tokens that have been read. After an exception the caller must call
    `requeue_all`, which rebuilds all other state.

    Attributes:
        max_len: Maximum sequence length in tokens: the smaller of `max_model_len` and 1 + (tokens that fit the pools).
            The last token of a sequence needs no room, because its keys and values are never computed.
        num_preemptions: Number of preemptions.
        looked_up_tokens: Total number of prompt tokens that were looked up in the prefix cache. Each request counts
            once, when it is admitted for the first time.
        found_tokens: Number of the `looked_up_tokens` that were found in the prefix cache.
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
            pools: Page pools of all cache groups (layers with equal attention windows). Their `max_num_seqs` limits the
                number of running requests.
            prefix_cache: Prefix cache over `pools`; None to disable it.
            max_batched_tokens: Maximum number of new tokens per step, decode and prefill together.
            max_prefill_seqs: Maximum number of prefill rows per step; None for `max_num_seqs` of the pools.
            max_model_len: Maximum number of tokens per sequence, prompt and output together.
            chunked_prefill: Whether a prompt may be split over several steps. Even if False, the tokens of a request
                are split if they exceed max_batched_tokens or the pools, for example after a preemption.
            padded_sizes: Numbers of prompt tokens to which the runner pads a step, ascending; the last one is at least
                `max_batched_tokens`. A step takes fewer prompt tokens than the budget allows if padding to the next
                size would cost more than another step. Empty to always use the budget.
            eos_token_ids: End-of-sequence tokens of the model. They end a request unless it sets `ignore_eos`.
            draft_control: Chooses the number of drafts per step; None without speculation.

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
        self.max_len = min(max_model_len, pools.max_tokens + 1)
        self._chunked_prefill = chunked_prefill
        self._padded_sizes = tuple(padded_sizes)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._draft_control = draft_control
        self._requests: dict[int | str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(reversed(range(pools.max_num_seqs)))
        self._launched: deque[StepPlan] = deque()
        self.num_preemptions = self.looked_up_tokens = self.found_tokens = 0

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    @property
    def hit_tokens(self) -> int:
        """Number of tokens that the prefix cache has found for requests, at every admission."""
        return 0 if self._prefix_cache is None else self._prefix_cache.hit_tokens

    @property
    def used_rows(self) -> tuple[int, ...]:
        """Number of page rows that requests own, for each cache group. A page row is one page of one KV head, or one
        page of all KV heads if the heads have equal windows."""
        return self._pools.num_owned

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def cached_pages(self, request: Request) -> int:
        """Number of leading pages of a request that the prefix cache has."""
        cache = self._prefix_cache
        return 0 if cache is None else cache.lookup(request.token_ids, request.salt)[0].shape[1]

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestRefused: the prompt is too long for the model, the pools or, without chunked prefill, a step.
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
        """Plan the next step and allocate its pages. The caller must launch the step before it calls the scheduler
        again.

        Returns:
            The plan; None if no request has a token to compute before a launched step is retired or a request is added.
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
            tokens: Sampled tokens of each row of `plan.sampling_rows`, in this order.

        Returns:
            (request, token) for each new token, in order of rows. Tokens of requests that had already ended, and tokens
            after the token that ends a request, are dropped. If a request ends with this step, its `finish_reason` is
            set. The token NONFINITE, which marks NaN or infinite logits, ends its request and is not appended to it.

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
        self._launched.popleft()  # the first change of state: lines above may raise because of an invalid token
        for (row, got), (new, reason) in zip(continued, kept, strict=True):
            request = row.request
            request.num_in_flight -= 1
            request.num_drafts_in_flight -= row.num_drafts
            if request.is_running:
                # Accepted drafts count as computed from now on. `num_computed` already includes rows of later launched
                # steps. These rows are idle on the device if the sequence has reached its limit, so the sum is reduced
                # to the number of tokens that are ever computed: all except the last.
                computed = request.num_computed + max(len(got.tokens) - 1, 0)
                request.num_computed = min(computed, self._limit(request) - 1)
            if row.num_drafts:
                self._count_drafts(row, got, len(new) - 1)
            if got.logprobs is not None:
                request.logprobs.extend(got.logprobs[: len(new)])  # before the tokens, so that every token has an entry
            request.token_ids.extend(token for token in new if token != NONFINITE)
            self._publish(request)
            if reason:
                self._finish(request, reason)
        return [(row.request, token) for (row, _), (new, _) in zip(continued, kept, strict=True) for token in new]

    def record_time(self, num_rows: int, num_drafts: int, seconds: float, *, has_prompts: bool) -> None:
        """Record the duration of a step. The number of drafts of later steps depends on these durations.

        Args:
            num_rows: Number of decode rows of the step.
            num_drafts: Largest number of drafts of a decode row.
            seconds: Duration of the step. It is ignored if the step computed prompts.
            has_prompts: Whether the step computed prompts.
        """
        if self._draft_control is None:
            return
        if has_prompts:
            self._draft_control.record_prompts()
        else:
            self._draft_control.record_time(num_rows, num_drafts, seconds)

    def abort(self, request_id: int | str, reason: FinishReason = "abort") -> bool:
        """End a waiting or running request. Return False if the request is unknown or has finished."""
        if request_id not in self._requests:
            return False
        self._finish(self._requests[request_id], reason)
        return True

    def replace_weights(self, running: RunningRequests) -> list[Request]:
        """Forget all published pages, because the weights that computed them were replaced. No step may be in flight.

        Args:
            running: What happens to requests that have keys and values: "recompute" preempts them, "keep" continues
                with these keys and values without publishing their pages, "abort" ends them. It also ends preempted
                requests with output tokens.

        Returns:
            The requests that were ended.
        """
        if self._prefix_cache is not None:
            self._prefix_cache.clear()
        if running == "abort":
            begun = [request for request in self._requests.values() if request.is_running or request.output_ids]
            for request in begun:
                self._finish(request, "abort")
            return begun
        for request in reversed(self._running.copy()):
            if running == "recompute":
                self._requeue(request)
            else:
                request.has_old_keys = True
        return []

    def requeue_all(self, requests: Iterable[Request]) -> None:
        """Reset the scheduler and queue all unfinished requests again, so that their tokens are computed again.

        Call it after an exception has interrupted a call of the scheduler, or after the contents of the cache were
        lost. For example, the contents are lost if a step raises after its caches were donated.

        The method resets pools, request slots (indices of running requests), queues, the prefix cache and the progress
        of every request, without use of their previous state. Therefore it may itself be interrupted and called again.
        Requests keep the tokens that have been read. Launched plans must not be retired any more. Their tokens are
        sampled again with equal results, because the random numbers of a draw depend only on the request's seed and the
        token's position.

        Args:
            requests: All requests that the caller does not know to have ended, in order of arrival.
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
            if request.output_ids and not request.is_finished:
                # An interrupted `retire` may have appended the last token without setting the finish reason.
                request.finish_reason = self._reason_to_finish(request, request.token_ids[-1], len(request.token_ids))
            if not request.is_finished:
                unfinished.append(request)
        self._waiting = deque(unfinished)
        self._requests = {request.request_id: request for request in unfinished}

    def _recycle(self) -> None:
        """Release pages of running requests whose tokens lie before the attention window of all later queries."""
        slots = [cast(int, request.request_slot) for request in self._running]
        self._pools.recycle(slots, [request.num_computed for request in self._running])

    def _schedule_decode(self) -> list[ScheduledRow]:
        """Schedule one row for each decoding request, and drafts as far as pages are free.

        The decode rows always fit into the token budget: a request is admitted only into a step whose decode rows leave
        at least one token of the budget. Drafts do not use the budget.
        """
        decoding = [
            request
            for request in self._running
            if not request.is_prefilling and not self._is_full_length(request, request.num_tokens)
        ]
        wanted = 0 if self._draft_control is None else self._draft_control.num_drafts(decoding)
        # Every request gets a page for its next token before any request gets pages for drafts.
        with_room = [request for request in decoding if self._make_room(request)]
        return [self._schedule_row(request, 1, self._draft_room(request, wanted)) for request in with_room]

    def _schedule_prefill(self, budget: int) -> list[ScheduledRow]:
        """Schedule prompt chunks of at most `budget` tokens together, and admit waiting requests for them."""
        rows = []
        budget = self._without_padding(budget)
        while budget > 0 and len(rows) < self._max_prefill_seqs:
            # A request is admitted only after the prompts of all running requests have been scheduled completely, so
            # only the youngest running request can have prompt tokens left.
            partly_prefilled = bool(self._running) and self._running[-1].is_prefilling
            request = self._running[-1] if partly_prefilled else self._admit()
            if request is None:
                break
            lacking = request.prefill_end - request.num_computed
            num_tokens = min(lacking, budget)
            fits = num_tokens == lacking or self._chunked_prefill or lacking > self._max_batched_tokens
            if not fits:
                break
            if request is self._running[0]:
                # The only running request takes the tokens that fit the free pages: no other request will release
                # pages.
                num_tokens = min(num_tokens, self._pools.room(cast(int, request.request_slot)) - request.num_computed)
            if num_tokens < 1 or not self._allocate(request, request.num_computed + num_tokens):
                break
            rows.append(self._schedule_row(request, num_tokens))
            budget -= num_tokens
        return rows

    def set_padded_sizes(self, padded_sizes: Sequence[int]) -> None:
        """Replace `padded_sizes`, for example by the sizes whose programs are compiled. It affects only in which step a
        token is computed."""
        self._padded_sizes = tuple(padded_sizes)

    def _without_padding(self, budget: int) -> int:
        """Return the budget of prompt tokens, reduced to one of `padded_sizes` if this makes the computation cheaper.

        Without reduction, the prompt tokens are padded to the next larger size. With reduction, this step fills a
        smaller size, and the other tokens are computed in another step with a fixed cost of `STEP_TOKENS`. The
        comparison is an estimate, because cached prefixes or missing pages may reduce the number of tokens. It affects
        only in which step a token is computed.
        """
        if not self._chunked_prefill or not self._padded_sizes:
            return budget
        sizes, tokens = self._padded_sizes, min(budget, self._known_prompt_tokens())
        fits = bisect.bisect_left(sizes, tokens)
        if fits == 0:
            return budget
        rest = sizes[bisect.bisect_left(sizes, tokens - sizes[fits - 1])]
        return sizes[fits - 1] if sizes[fits - 1] + rest + STEP_TOKENS <= sizes[fits] else budget

    def _known_prompt_tokens(self) -> int:
        """Upper limit of the prompt tokens of the next step, if token budget and pages were unlimited and the prefix
        cache were empty."""
        partly = [request for request in self._running[-1:] if request.is_prefilling]
        num_waiting = min(self._max_prefill_seqs - len(partly), len(self._free_slots))
        waiting = itertools.islice(self._waiting, num_waiting)
        lacking = sum(request.prefill_end - request.num_computed for request in partly)
        return lacking + sum(len(request.token_ids) for request in waiting)

    def _schedule_row(self, request: Request, num_tokens: int, num_drafts: int = 0) -> ScheduledRow:
        """Make a row with the request's next tokens, and count these as computed."""
        start = request.num_computed
        request.num_computed += num_tokens
        samples = not request.is_prefilling
        request.num_in_flight += samples
        request.num_drafts_in_flight += num_drafts
        return ScheduledRow(
            request, cast(int, request.request_slot), start, num_tokens, samples, num_drafts, self._limit(request)
        )

    def _admit(self) -> Request | None:
        """Move the first waiting request to the running requests, with the pages of its prefix that are cached.

        Return None in four cases: no request waits; all request slots are in use; the first waiting request was
        preempted and has tokens in flight; or other requests run, and the free pages are too few for all tokens of the
        request.
        """
        if not self._waiting or not self._free_slots:
            return None
        request = self._waiting[0]
        if request.num_in_flight:
            return None  # it was preempted; its tokens in flight become part of the prefill, so the host must know them
        cache, known = self._prefix_cache, request.token_ids
        if request.params.prompt_logprobs is not None:
            cache = None  # log probabilities need the logits of all prompt tokens
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
                self.looked_up_tokens += len(known)
                self.found_tokens += request.num_computed
        self._running.append(self._waiting.popleft())
        return request

    def _make_room(self, request: Request) -> bool:
        """Allocate a page for the next token of a running request if it needs one. Preempt the youngest running
        requests while too few pages are free.

        Returns:
            Whether the request can have a decode row in this step. False if the request itself has been preempted, in
            this call or in an earlier call for an older request. Also False if pages are missing and the request has
            drafts in flight: rejected drafts may leave it pages, so no request is preempted before they are read.
        """
        while request.is_running and not self._allocate(request, self._end_of_row(request, 0)):
            if request.num_drafts_in_flight:
                return False
            self._requeue(self._running[-1])
            self.num_preemptions += 1
        return request.is_running

    def _draft_room(self, request: Request, wanted: int) -> int:
        """Allocate free pages for drafts of a decode row. The row already has a page for its token.

        Returns:
            Number of drafts: `wanted`, or fewer if the request ends before; 0 if too few pages are free.
        """
        num_drafts = max(min(wanted, self._limit(request) - request.num_tokens - 1), 0)
        return num_drafts if num_drafts and self._allocate(request, self._end_of_row(request, num_drafts)) else 0

    def _end_of_row(self, request: Request, num_drafts: int) -> int:
        """Number of tokens of a sequence that need room in the cache after its next decode row with `num_drafts`
        drafts, if all drafts in flight are accepted. It is less than the limit of the sequence, because no step
        computes keys and values of the last token."""
        end = request.num_computed + 1 + request.num_drafts_in_flight + num_drafts
        return min(end, self._limit(request) - 1)

    def _allocate(self, request: Request, end: int) -> bool:
        """Allocate pages so that the request has room for `end` tokens in every cache group. If too few are free,
        allocate nothing and return False."""
        if end <= request.num_computed + -request.num_computed % self._page_size:
            return True  # the request's last page has room; a shortcut for most decode rows
        try:
            self._pools.allocate(cast(int, request.request_slot), end)
        except OutOfPages:
            return False
        return True

    def _publish(self, request: Request) -> None:
        """Make full pages of a request available to other requests through the prefix cache.

        A page can be published once the host knows all its tokens, and the steps that write it are in flight or have
        been planned by the present call of `schedule`.
        """
        num_tokens = min(request.num_computed, len(request.token_ids))
        num_full = num_tokens // self._page_size
        if self._prefix_cache is not None and num_full > request.num_published and not request.has_old_keys:
            self._prefix_cache.publish(cast(int, request.request_slot), request.token_ids[:num_tokens], request.salt)
            request.num_published = num_full

    def _requeue(self, request: Request) -> None:
        """Preempt the youngest running request: release its pages and make it the first waiting request."""
        self._give_up(request)
        self._waiting.appendleft(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason  # first: if an exception follows, `requeue_all` rebuilds all other state
        if request.is_running:
            self._give_up(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]

    def _give_up(self, request: Request) -> None:
        """Release the pages and the request slot of a running request."""
        self._running.remove(request)
        self._free_slots.append(cast(int, request.request_slot))
        self._pools.release(cast(int, request.request_slot))
        request.request_slot = None
        request.has_old_keys = False
        request.num_computed = request.prefill_end = 0  # `num_in_flight` stays: `retire` will receive these tokens

    def _reason_to_finish(self, request: Request, token: int, num_tokens: int) -> FinishReason | None:
        """Return why a request ends with this token; None if it continues.

        Args:
            request: The request.
            token: A sampled token.
            num_tokens: Length of the sequence including this token.
        """
        if token == NONFINITE:
            return "nonfinite"
        if request.ends_with(token, self._eos_token_ids):
            return "stop"
        return "length" if self._is_full_length(request, num_tokens) else None

    def _until_end(self, request: Request, tokens: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
        """Return the tokens up to and including the first token that ends the request, and the finish reason. Return
        all tokens and None if no token ends the request."""
        for i, token in enumerate(tokens, 1):
            if reason := self._reason_to_finish(request, token, len(request.token_ids) + i):
                return tokens[:i], reason
        return tokens, None

    def _count_drafts(self, row: ScheduledRow, got: RowTokens, accepted: int) -> None:
        """Add the drafts of a retired row to the statistics of its request. The first `accepted` drafts were
        accepted."""
        request, places = row.request, row.num_drafts
        if self._draft_control is not None:
            self._draft_control.record(request, row.num_drafts, accepted)
            places = self._draft_control.depth(row.num_drafts)
        request.drafted = counted(request.drafted, got.drafted, places)
        request.accepted = counted(request.accepted, accepted, places)

    def _limit(self, request: Request) -> int:
        """Length of the sequence, in tokens with the prompt, at which a request ends."""
        return min(self.max_len, len(request.prompt_ids) + request.params.max_tokens)

    def _is_full_length(self, request: Request, num_tokens: int) -> bool:
        return num_tokens >= self._limit(request)
