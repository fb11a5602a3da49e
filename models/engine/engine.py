"""The inference engine: takes requests with prompts and returns generated tokens.

>>> engine = Engine(random_model(PRESETS["v3-tiny"]), EngineConfig(num_pages=256))
>>> outputs = engine.generate([[1, 2, 3], [1, 2, 4]], SamplingParams(max_tokens=8))

A step is one forward pass of the model over a batch. The batch has at most one row per running request: a decode row
with the newest token of the request, or a prefill row with a chunk of its prompt. A token is sampled after each decode
row, and after a prefill row that ends the prompt. With speculation, a decode row also has drafts (guesses of later
tokens), and yields one more token per accepted draft.

Main loop. The caller calls `Engine.step` as long as `Engine.has_unfinished` is true. Call n does:

    plans = schedulers.schedule()          # choose the rows of step n and allocate cache pages for them
    step_n = runner.launch(plans)          # asynchronous: the device runs step n after step n - 1
    tokens = step_n_minus_1.sampled()      # blocks until step n - 1 has ended; step n is queued on the device meanwhile
    schedulers.retire(tokens)              # append the tokens to the requests; end requests and release their pages
    runner.sample(step_n)                  # only if a request of step n has a token filter, see below
    for each new token: on_token(...)      # callbacks run last, so an exception in a callback loses no token

A step is at least two programs: one computes logits, the other samples tokens. A token filter needs all earlier tokens
of its request. Therefore the host computes its mask for step n after it has read step n - 1, while the device computes
the logits of step n. In a step without token filters, `launch` starts both programs.

A data rank is a group of devices with its own requests, scheduler and page pools. All data ranks run the same step
together. Without data parallelism there is one data rank.

Other modules: `scheduler` (plans steps), `runner` (compiled programs and caches on the device),
`kv_transfer.engine_transfers` (copies cache pages to and from other engines), `step_log` (statistics), `request_checks`
(token ids and sampling parameters of a new request), `assembly` (constructs the parts of an engine).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
import typing
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_attn.cache import PrefixCache
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine.assembly import (
    check_mesh,
    checked_model_len,
    make_groups,
    make_rank_pools,
    make_schedulers,
)
from pallas_attn.models.engine.config import EngineConfig
from pallas_attn.models.engine.distributed.data_ranks import DataRanks
from pallas_attn.models.engine.distributed.processes import Processes
from pallas_attn.models.engine.kv_transfer.cached_pages import CachedPages
from pallas_attn.models.engine.kv_transfer.engine_transfers import EngineTransfers
from pallas_attn.models.engine.kv_transfer.incoming_pages import IncomingPages
from pallas_attn.models.engine.kv_transfer.written_pages import WrittenFeed, WrittenLayer
from pallas_attn.models.engine.logprob_list import TokenLogprobs
from pallas_attn.models.engine.outputs import EngineStats, RequestId, RequestOutput
from pallas_attn.models.engine.request import NONFINITE, Request, SamplingParams
from pallas_attn.models.engine.request_checks import check_params, checked_ids
from pallas_attn.models.engine.runner import OnCompiled, Runner
from pallas_attn.models.engine.scheduler import RequestRefused, RunningRequests
from pallas_attn.models.engine.step.plan import StepPlan
from pallas_attn.models.engine.step_log import LaunchedStep, StepLog
from pallas_attn.models.engine.token_filter import TokenFilter
from pallas_attn.models.engine.tracked_request import OnToken, TrackedRequest


class Engine:
    """Generates tokens for many requests at a time, with continuous batching and a paged KV cache.

    The engine launches a step before it reads the tokens of the previous step, so the host and the device work at the
    same time. Requests are served first come, first served. When pages run out, the youngest running request is
    preempted: it loses its pages, and its tokens are computed again later. Preemption does not change any token.

    Any call may be interrupted by an exception, such as KeyboardInterrupt. All requests, and all tokens that the host
    has read from the device, survive the exception. All other state may be inconsistent afterwards. Therefore the next
    call that changes the engine rebuilds pools, queues and caches from the requests.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig = EngineConfig(),
        *,
        capture_logits: bool = False,
        processes: Processes | None = None,
    ):
        """Allocate the cache on the device. Nothing is compiled.

        Args:
          model: the model. Its weights are neither copied nor moved.
          config: cache and batch sizes, and options such as prefix caching and speculation.
          capture_logits: whether to store the logits of every computed prompt token, for `prompt_logits`.
          processes: the processes whose devices form the mesh; None for a single process. Every process must make the
            same calls of its engine, in the same order.

        Raises:
          ValueError: max_model_len is below 2 or above the model's limit; the model was loaded for another mesh than
            `config.mesh`; the mesh spans several processes and `processes` is None; or cache_dtype, kv_scales or the
            proposer does not fit the model.
          ProcessError: another process has failed. Calls that launch or read a step may raise this error, too.
          NotImplementedError: the model, on its mesh, does not support the value of batch_invariant, cache_dtype,
            speculate or cascade_attention in `config`; or `config.background_compilation` with several processes.
        """
        check_mesh(model, config, processes)
        if config.background_compilation and processes is not None:
            raise NotImplementedError(
                "background_compilation: not supported with several processes, which must all run the same programs,"
                " but compile them at different times"
            )
        self.config = config
        self.max_model_len = checked_model_len(model, config)
        self._vocab_size, self._eos_token_ids = model.config.vocab_size, tuple(model.config.eos_token_ids)
        self._capture_logits = capture_logits
        # With speculation, recorded step times affect the number of drafts per step. All processes must choose the same
        # number, but they measure different times. Therefore several processes record no times.
        self._is_one_process = processes is None
        self._groups = make_groups(model, config, self.max_model_len)
        self._pools = make_rank_pools(model, config, self._groups, self.max_model_len)
        runner_config = config.runner_config(self._pools[0].table_tokens, self._groups)
        self._runner = Runner(model, runner_config, processes)
        self._prefix_caches = tuple(map(PrefixCache, self._pools)) if config.prefix_caching else ()
        self._ranks = DataRanks(
            make_schedulers(model, config, runner_config, self._pools, self._prefix_caches, self.max_model_len)
        )
        self._transfers = EngineTransfers(
            config, self._groups, self._pools, self._prefix_caches, self._runner, self._changing
        )
        self._tracked: dict[RequestId, TrackedRequest] = {}  # in order of arrival
        self._finished: deque[TrackedRequest] = deque()  # bounded by `EngineConfig.history`, oldest first
        self._ids = itertools.count()
        self._intact = True
        self._in_flight: LaunchedStep | None = None
        self._is_compiling = False  # in the background
        self._due_calls: deque[TrackedRequest] = deque()  # one entry per token that `on_token` has not received yet
        self._log = StepLog(config.history, self._groups, len(self._pools), self._now())

    @property
    def max_sequence_len(self) -> int:
        """Maximum number of tokens of a sequence, prompt and output. A request ends at this length. It is
        `max_model_len`, or, if this is smaller, 1 + (tokens that fit the cache): the last token of a sequence is not
        cached."""
        return self._ranks.max_len

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` must be called again: a request is unfinished, a step is in flight, or callbacks are
        pending."""
        if not self._intact:  # the schedulers may be inconsistent; the records of requests are not
            return any(tracked.finish_reason is None or tracked.num_due_calls for tracked in self._tracked.values())
        return self._ranks.has_unfinished or self._in_flight is not None or bool(self._due_calls)

    @property
    def cache_format(self) -> dict[str, Any]:
        """Properties of the model and its cache: a dict from name to JSON value. Two engines can exchange cache pages
        only if all these properties are equal."""
        return self._transfers.cache_format

    # --- main loop

    def step(self) -> list[RequestId]:
        """Launch the next step, then read the tokens of the previous step and call the callbacks.

        The call may raise errors of the device, exceptions of callbacks, MemoryError and KeyboardInterrupt. Tokens that
        have been read are not lost, and the next call continues all unfinished requests. After an exception of a
        callback it continues with the same cache. After other exceptions it allocates an empty cache and computes the
        tokens of all unfinished requests again.

        Each callback receives each token at most once. A token is skipped only if KeyboardInterrupt interrupts this
        method just before it calls the callback.

        Returns:
          Ids of the requests that received a token.
        """
        with self._changing():
            if self._is_compiling:
                self._take_compiled()
            launched = self._launch()
            progressed = self._collect(self._in_flight) if self._in_flight else []
            if launched is not None and not launched.result.is_sampled:
                self._sample(launched)
            self._in_flight = launched
        self._call_back()
        return progressed

    def _call_back(self) -> None:
        """Call the callbacks of all tokens that they have not received."""
        while self._due_calls:
            tracked = self._due_calls[0]
            call = tracked.next_call()
            self._due_calls.popleft()
            if call is not None and tracked.on_token is not None:
                tracked.on_token(tracked.request.request_id, *call)

    def _launch(self) -> LaunchedStep | None:
        """Plan a step and start it on the device. Return None if no request has tokens to compute."""
        planned_s = self._now()
        hits = self._hit_tokens
        plans = self._schedule()
        if plans is None:
            return None
        for row in (row for plan in plans if plan is not None for row in plan.prefill):
            tracked = self._tracked[row.request.request_id]
            if tracked.scheduled_s is None:
                tracked.scheduled_s = planned_s
        cached, used = self._hit_tokens - hits, self._num_owned
        self._log.record_use(used)
        result = self._transfers.launch(plans, self._capture_logits)
        return LaunchedStep(result, planned_s, self._now(), cached, used)

    def _schedule(self) -> tuple[StepPlan | None, ...] | None:
        """Plan a step: one plan per data rank, None for a rank without rows; None if no rank has rows.

        Incoming pages (see `receive_pages`) occupy cache memory until their request is admitted. If no step is in
        flight and no request fits into the remaining memory, release all incoming pages and plan again.
        """
        plans = self._ranks.schedule()
        self._transfers.remove_closed()
        if plans is None and self._transfers.incoming and self._in_flight is None and self._ranks.has_unfinished:
            self._transfers.give_up_incoming()
            plans = self._ranks.schedule()
        self._transfers.close_found()
        return plans

    def _collect(self, step: LaunchedStep) -> list[RequestId]:
        """Wait until the device has finished a step, read its tokens, and append them to the requests.

        Returns:
          Ids of the requests that received a token.
        """
        plans = step.result.plans
        rows = step.result.sampled()
        for request, start, logprobs in step.result.prompt_logprobs():
            # After an exception the prompt is computed again, so the list may have later entries already.
            request.prompt_logprobs.write(start, logprobs)
        if step.result.logits is not None:
            for plan, logits in zip(plans, np.split(step.result.read(step.result.logits), len(plans)), strict=True):
                self._store_logits(plan, logits)
        now = self._now()
        progressed: dict[RequestId, None] = {}
        continued = self._ranks.retire(plans, rows)
        for request, token in continued:
            tracked = self._tracked[request.request_id]
            if token != NONFINITE:
                tracked.token_times.append(now)
                progressed[request.request_id] = None
            if tracked.on_token is not None:
                self._due_calls.append(tracked)
        for request in dict.fromkeys(request for request, _ in continued):
            if request.is_finished:
                self._retain(self._tracked[request.request_id])
        record = self._log.add(step, rows, now)
        if self._is_one_process and not self._is_compiling:  # steps with too much padding take longer
            self._ranks.record_time(plans, record.duration_s)
        return [*progressed]

    def _sample(self, step: LaunchedStep) -> None:
        """Compute the token masks of a step and start its sampling. End the requests whose token filter failed."""
        for request, error in self._runner.sample(step.result):
            request.error = error  # before the finish reason, so that a request that ended has its error
            self._ranks.abort(request.request_id, "filter_error")
            tracked = self._tracked[request.request_id]
            if tracked.on_token is not None:
                self._due_calls.append(tracked)
            self._retain(tracked)

    # --- recovery

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Context manager around every change of the engine's state. If an exception interrupted an earlier change, the
        state is rebuilt before this change."""
        if not self._intact:
            self._start_over()
        self._intact = False
        yield
        self._intact = True

    def _start_over(self) -> None:
        """Rebuild all state from the requests and the tokens that have been read: page pools, queues, empty caches,
        pending callbacks and the history. If an exception interrupts this call, `_changing` repeats it before the next
        change."""
        self._in_flight = None
        self._runner.reset()
        self._transfers.start_over()
        tracked = [*self._tracked.values()]
        self._ranks.requeue_all([t.request for t in tracked if t.finish_reason is None])
        now = self._now()
        for t in tracked:
            t.token_times.extend([now] * (len(t.request.output_ids) - len(t.token_times)))
        with_callbacks = dict.fromkeys([*self._due_calls, *tracked])
        self._due_calls = deque(t for t in with_callbacks for _ in range(t.num_due_calls))
        self._finished = deque()
        for t in tracked:
            t.is_owned = False  # the interrupted call may be `generate`, which then may not delete the record
            if t.finish_reason is not None:
                self._retain(t)

    # --- requests

    def warmup(self, on_compiled: OnCompiled | None = None, *, wait: bool | None = None) -> float:
        """Compile the step programs for all batch shapes that the engine pads steps to. On a GPU, also run each program
        with an empty batch, which loads its kernels.

        After this call no step compiles, unless `watch_written` is called later. Without this call, a program is
        compiled when the first step needs it.

        Without `wait`, the call returns when the programs of the largest shapes are compiled. They serve every step,
        with more padding. A thread compiles the other programs, and each step uses the smallest shape that is compiled
        at its start. `stats().pending_compilations` is the number of shapes that steps do not use yet. If a compilation
        fails in the thread, the error is logged, and steps continue with the other programs; a later call with `wait`
        compiles the shape again and raises the error. If page copies are watched (`watch_written`), the call waits
        for all programs.

        Args:
          on_compiled: function (number of compiled shapes, number of all shapes to compile) that is called when
            compilation starts and whenever a shape has been compiled. It does not count shapes that a thread compiles.
          wait: whether to wait for all programs; None for the opposite of `EngineConfig.background_compilation`.

        Returns:
          Duration in seconds.

        Raises:
          NotImplementedError: `wait` is False, and the engine runs as several processes.

        Example:
          >>> engine = Engine(random_model(PRESETS["v3-tiny"]), EngineConfig(max_num_seqs=2, max_batched_tokens=64))
          >>> seconds = engine.warmup(wait=False)
          >>> outputs = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
          >>> seconds = engine.warmup(wait=True)
          >>> engine.stats().pending_compilations
          0
        """
        waits = not self.config.background_compilation if wait is None else wait
        if not (waits or self._is_one_process):
            raise NotImplementedError("wait: expected None or True with several processes, got False")
        before = self._runner.compile_s
        feed = self._transfers.feed
        with self._changing():
            # Steps that compute log probabilities of prompt tokens may be separate buckets.
            scoring = self._runner.buckets(self._capture_logits, prompt_logprobs=True)
            buckets = [*dict.fromkeys([*self._runner.buckets(self._capture_logits), *scoring])]
            self._runner.compile_writes()  # first: loading a program drops the CUDA graphs that `compile` records
            if waits or (feed is not None and feed.is_open):
                self._runner.finish_background()
                self._is_compiling = False
                self._runner.compile(buckets, on_compiled)
                if feed is not None and feed.is_open:
                    self._runner.compile_layers(buckets)
            elif not self._runner.num_pending:
                self._runner.compile(self._runner.covering_buckets(self._capture_logits), on_compiled)
                self._runner.compile_in_background(buckets)
                self._is_compiling = self._runner.num_pending > 0
            self._ranks.set_padded_sizes(self._runner.prompt_sizes(self._capture_logits))
        if self.config.freeze_objects:
            gc.collect()
            gc.freeze()
        return self._runner.compile_s - before

    @property
    def is_compiling(self) -> bool:
        """Whether programs are compiled in the background, or are not all available to steps. While this is true and no
        request is unfinished, call `take_compiled` from time to time."""
        return self._is_compiling

    def take_compiled(self) -> None:
        """Make one more shape available to steps, if one has been compiled in the background. On a GPU, first run its
        program. `step` does the same. Call this method while no requests run."""
        if self._is_compiling:
            with self._changing():
                self._take_compiled()

    def _take_compiled(self) -> None:
        if self._runner.take_compiled():
            self._ranks.set_padded_sizes(self._runner.prompt_sizes(self._capture_logits))
        if self._runner.num_pending or self._ranks.has_unfinished or self._in_flight is not None:
            return
        self._runner.warm_up()
        self._is_compiling = False
        if self.config.freeze_objects:
            gc.collect()
            gc.freeze()

    def close(self) -> None:
        """End the compilation in the background, after the shape that is being compiled. Steps can still run, with the
        compiled programs."""
        self._runner.stop_background()

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        request_id: RequestId | None = None,
        salt: str = "",
        on_token: OnToken | None = None,
        incoming: IncomingPages | None = None,
        token_filter: TokenFilter | None = None,
    ) -> RequestId:
        """Queue a request.

        A prompt that is too long for the model, for the page pool or, without chunked prefill, for a step is refused
        instead: its output has the finish reason "refused" and an explanation in `refusal`.

        Args:
          prompt_ids: token ids, at least one.
          params: sampling parameters and stop conditions.
          request_id: an int or str that no other recorded request has; None for the next free number.
          salt: requests share cached prefixes only with requests of the same salt.
          on_token: function (request_id, token, finish_reason) that `step` calls for each token.
          incoming: receiver of pages of the prompt, from `receive_pages`. When the request is admitted (starts to run),
            it uses the pages that have arrived, and the receiver is closed.
          token_filter: limits each next token of the request; None to allow all tokens.

        Returns:
          The request's id.

        Raises:
          ValueError: an empty prompt, token ids that are not integers or not in the vocabulary, a request_id in use, an
            argument of the wrong type, or `params` with a parameter that needs a tokenizer (see `SamplingParams`).
            Nothing is queued.
        """
        return self._add(
            prompt_ids, params, request_id, salt, on_token, incoming=incoming, token_filter=token_filter
        ).request.request_id

    def abort(self, request_id: RequestId) -> bool:
        """End a request. Its output keeps the tokens that have been read from the device.

        Returns:
          False if the request had already ended.

        Raises:
          ValueError: no such request.
        """
        tracked = self._find(request_id)
        with self._changing():
            aborted = self._ranks.abort(request_id)
            if aborted:
                self._retain(tracked)
        return aborted

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[RequestOutput]:
        """Add one request per prompt, step until all of them have finished, and delete their records.

        Args:
          prompts: token ids of each prompt.
          params: sampling parameters of all prompts, or a sequence with one entry per prompt.

        Returns:
          One output per prompt, in the same order.

        Raises:
          ValueError: as `add_request`, or `params` is a sequence of another length than `prompts`. After this or any
            other exception, none of the prompts stays queued.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: expected one for each of {len(prompts)} prompts, got {len(each)}")
        own: list[TrackedRequest] = []
        try:
            for prompt, of_prompt in zip(prompts, each, strict=True):
                self._add(prompt, of_prompt, own=own)
            while self.has_unfinished:
                self.step()
            return [tracked.output() for tracked in own]
        finally:
            for tracked in own:
                if self._tracked.get(tracked.request.request_id) is tracked:
                    self.abort(tracked.request.request_id)
                    self.forget(tracked.request.request_id)

    def output(self, request_id: RequestId) -> RequestOutput:
        """Return the state of a running or finished request, with the tokens that have been read.

        Raises:
          ValueError: no such request.
        """
        return self._find(request_id).output()

    def output_logprobs(self, request_id: RequestId, first: int, end: int) -> Sequence[TokenLogprobs]:
        """Return log probabilities of the output tokens from `first` to `end`, without a copy of all others; empty
        without `SamplingParams.logprobs`.

        Raises:
          ValueError: no such request.
        """
        return self._find(request_id).request.logprobs[first:end]

    def has_ended(self, request_id: RequestId) -> bool:
        """Whether a request has ended, for example because it was aborted.

        Raises:
          ValueError: no such request.
        """
        return self._find(request_id).finish_reason is not None

    def knows(self, request_id: RequestId) -> bool:
        """Whether the engine has records of the request, which may be waiting, running or finished."""
        return request_id in self._tracked

    def forget(self, request_id: RequestId) -> None:
        """Delete the records of a finished request. Without this call the engine deletes them when
        `EngineConfig.history` more requests have finished.

        Raises:
          ValueError: no such request, or it has not finished.
        """
        tracked = self._find(request_id)
        if tracked.finish_reason is None:
            raise ValueError(f"request_id: expected a finished request, {request_id!r} is not")
        with self._changing():
            self._tracked.pop(request_id, None)
            with contextlib.suppress(ValueError):  # requests of `generate` are not in `_finished`
                self._finished.remove(tracked)

    def prompt_logits(self, request_id: RequestId) -> np.ndarray:
        """Return float32 logits [prompt length, V] of the prompt. Rows of tokens that are not computed, or not computed
        yet, are NaN. Tokens found in the prefix cache are not computed.

        Raises:
          ValueError: no such request, or the engine was made without capture_logits.
        """
        if not self._capture_logits:
            raise ValueError("capture_logits: expected an engine that was made with capture_logits=True")
        tracked = self._find(request_id)
        return self._no_logits(tracked) if tracked.prompt_logits is None else tracked.prompt_logits

    def stats(self) -> EngineStats:
        """Return totals since the engine was made, and the records of the newest steps."""
        totals, ranks, log = self._log.totals, self._ranks, self._log
        return EngineStats(
            steps=tuple(log.records),
            num_steps=totals.steps,
            drafted_tokens=totals.drafted_tokens,
            accepted_tokens=totals.accepted_tokens,
            prefill_tokens=totals.prefill_tokens,
            decode_tokens=totals.decode_tokens,
            prefill_tokens_per_s=totals.prefill_tokens / totals.prefill_s if totals.prefill_s else 0.0,
            decode_tokens_per_s=totals.decode_tokens / totals.decode_s if totals.decode_s else 0.0,
            prefix_hit_rate=ranks.found_tokens / (ranks.looked_up_tokens or 1),
            used_pages=log.pages(self._num_owned),
            peak_pages=log.peak_pages,
            num_pages=self.config.num_pages * len(self._pools),
            groups=log.group_stats(self._num_owned),
            preemptions=ranks.num_preemptions,
            compilations=self._runner.num_compilations,
            pending_compilations=self._runner.num_pending,
            failed_compilations=self._runner.num_compile_errors,
            compile_s=self._runner.compile_s,
            cache_bytes=self._runner.cache_bytes,
        )

    # --- weights

    @property
    def weights(self) -> dict[str, jax.Array]:
        """The model's weights by name, such as "layers.0.self_attn.o_proj.weight". Steps read these arrays: do not
        donate or delete them."""
        return self._runner.weights

    def update_weights(
        self,
        weights: Any,
        *,
        draft: Any = None,
        running: RunningRequests = "recompute",
        copy: bool = True,
        in_place: bool = False,
    ) -> list[RequestId]:
        """Replace the weights of the model between two steps. No program is compiled again.

        The call first reads the tokens of the step in flight, which the old weights computed, and calls their
        callbacks. All later tokens are computed with the new weights. The prefix cache is emptied. Waiting requests
        start with the new weights.

        Arguments are checked before anything changes. After a ValueError or NotImplementedError the engine continues
        with the old weights, and all requests and cached prefixes remain.

        Args:
          weights: the new weights: a `Decoder`, a tree such as `nnx.state(model)`, or a dict with the names of
            `Engine.weights`. The leaves are jax or numpy arrays with the shapes and dtypes of the old weights. Arrays
            with another sharding or on another device are copied to the devices of the engine.
          draft: new weights of the proposer, in the same forms: the draft model, or the `MTP` module. None keeps the
            weights that the proposer does not share with the model. The tokens are the same, but fewer drafts may be
            accepted.
          running: what happens to requests that have keys and values computed with the old weights.
            "recompute": their pages are released, and the keys and values of the prompt and of all generated tokens are
            computed again. The next tokens are the tokens of a new engine whose prompt ends with the tokens generated
            so far. "keep": they continue with the old keys and values, so that later tokens depend on old and new
            weights. Their pages never enter the prefix cache. "abort": they end with the finish reason "abort".
          copy: whether arrays that are already on the devices of the engine are copied, too. If False, the engine uses
            the arrays themselves, so they must not be donated or deleted before the next update.
          in_place: whether each old weight is released just before its successor is copied, so that the device needs no
            memory for a second copy of all weights. The memory of an old weight is not free as long as the caller
            refers to it, for example through the model that the engine was made with. If an exception such as a failed
            allocation interrupts the copies, steps raise RuntimeError until another call of this method has succeeded.

        Returns:
          Ids of the requests that received a token of the step in flight.

        Raises:
          ValueError: a weight is missing, unknown, deleted, or has another shape or dtype: the message names the first
            one. Or `running` has another value, or `draft` is given without a proposer that has weights.
          NotImplementedError: the engine runs as several processes, `watch_written` has an open feed, or a receiver of
            `receive_pages` is open.
        """
        if running not in (modes := typing.get_args(RunningRequests.__value__)):
            raise ValueError(f"running: expected one of {', '.join(modes)}, got {running!r}")
        if not self._is_one_process:
            raise NotImplementedError(
                "weights: an engine in several processes cannot replace its weights, because the processes would not"
                " notice if they replaced them before different steps"
            )
        self._transfers.check_idle()
        new = self._runner.check_weights(weights, draft)
        if not in_place:
            new = self._runner.place_weights(new, copy=copy, in_place=False)
        with self._changing():
            progressed = self._collect(self._in_flight) if self._in_flight else []
            self._in_flight = None
        self._call_back()
        with self._changing():
            if in_place:
                self._runner.finish_background()  # tracing reads the weights
                new = self._runner.place_weights(new, copy=copy, in_place=True)
            self._runner.use_weights(new)
            self._transfers.replace_weights()
            for request in self._ranks.replace_weights(running):
                self._retain(self._tracked[request.request_id])
        return progressed

    # --- KV-cache transfer

    def export_pages(self, request_id: RequestId) -> CachedPages:
        """Copy pages of a running or finished request to the host. `import_pages` of another engine adds them to its
        prefix cache, so it computes only the rest of the request.

        Only full pages are copied: the pages from the first token of the request up to the first page that is not
        computed or no longer in the cache.

        Raises:
          ValueError: no such request, or the engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        return self._transfers.export_request(self._find(request_id).request)

    def export_prefix_cache(self) -> CachedPages:
        """Copy all pages of the prefix cache to the host, for example to store them until the next start.

        Raises:
          ValueError: the engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        return self._transfers.export_all()

    def import_pages(self, pages: CachedPages) -> int:
        """Copy pages of another engine into free pages of this cache, on every data rank, and add them to the prefix
        cache, where later requests find them.

        Both engines need the same model and the same `cache_format`. The number of pages, the step sizes, the attention
        implementations and the number of devices may differ. If the KV heads of a layer have different windows, both
        engines need the same number of KV heads per device. Caches of draft proposers are not copied. Therefore fewer
        drafts are accepted at first for requests with imported pages.

        Returns:
          Number of tokens of the imported sequences that requests would now find in the prefix cache, whatever data
          rank they run on. It is less than the number of tokens in `pages` if there were too few free pages.

        Raises:
          ValueError: `pages` are malformed or their engine has another `cache_format`; nothing is added. Or this engine
            was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        return self._transfers.insert(pages, self._vocab_size)

    def receive_pages(self, tokens: Sequence[int], made_for: Mapping[str, Any], *, salt: str = "") -> IncomingPages:
        """Make a receiver for the pages of a prompt that another engine computes. The pages arrive layer by layer.

        Args:
          tokens: token ids of the prompt.
          made_for: `cache_format` of the other engine.
          salt: salt of the request.

        Returns:
          The receiver of the pages. Pass it to `add_request` as `incoming`, or close it.

        Raises:
          ValueError: `made_for` differs from this engine's `cache_format`; `tokens` has invalid ids or is longer than
            `max_sequence_len`; or the engine was made without a prefix cache.
          NotImplementedError: the engine runs on a mesh.
        """
        check_ids = functools.partial(checked_ids, vocab_size=self._vocab_size)
        return self._transfers.receive(tokens, made_for, salt, check_ids=check_ids, max_len=self.max_sequence_len)

    def watch_written(
        self, consumer: Callable[[WrittenLayer], object], *, max_bytes: int = 2**30, pieces: int = 4
    ) -> WrittenFeed:
        """Copy each page that a prefill row fills to the host, layer by layer, and pass it to a consumer, from the next
        step on.

        Each step whose prefill rows fill a page is then launched as several programs, each with consecutive layers.
        Pages of the first layers are copied to the host while later layers compute. All other steps run as before.
        Logits of the several programs equal the logits of the single program up to rounding.

        `WrittenLayer` describes one call of the consumer and the order of the calls. Pages that a request found in the
        prefix cache are passed to the consumer together with the first page that the request fills.

        Args:
          consumer: function called on a thread of the feed. It must not call the engine. No step waits for it.
          max_bytes: maximum bytes of page copies that the consumer has not processed. The feed ends if a step would
            exceed this limit. A single step may exceed it if the consumer has processed all earlier copies.
          pieces: maximum number of layer ranges of a step. Each range is one program. Two more programs compute the
            embedding and the logits. More ranges deliver pages earlier and make the step slower. If `pieces` equals the
            number of layers, the pages of each layer are copied while the next layer computes.

        Returns:
          The feed. Its methods wait for pages, report its state and close it.

        Raises:
          ValueError: the engine already has an open feed, or an argument has the wrong type or value.
          NotImplementedError: the engine runs on a mesh, with drafts, or with batch-invariant steps.
        """
        feed = self._transfers.watch(consumer, max_bytes, pieces)
        weakref.finalize(self, feed.close)  # otherwise the feed's thread would wait forever
        return feed

    # --- records

    def _find(self, request_id: RequestId) -> TrackedRequest:
        if request_id not in self._tracked:
            bound = self.config.history
            limit = "" if bound is None else f"; the engine remembers the newest {bound} finished requests"
            raise ValueError(f"request_id: no request {request_id!r}{limit}")
        return self._tracked[request_id]

    def _add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: RequestId | None = None,
        salt: str = "",
        on_token: OnToken | None = None,
        *,
        incoming: IncomingPages | None = None,
        token_filter: TokenFilter | None = None,
        own: list[TrackedRequest] | None = None,
    ) -> TrackedRequest:
        """Queue a request, or record its refusal. Arguments as `add_request`.

        Args:
          own: list of the caller, to which the request is appended as soon as it is queued. If this call is interrupted
            later, the caller therefore still knows the request and can delete it. None for `add_request`.
        """
        if request_id is None:
            request_id = next(number for number in self._ids if number not in self._tracked)
        if not isinstance(request_id, Hashable):
            raise ValueError(f"request_id: expected an int or a str, got {request_id!r}")
        if request_id in self._tracked:
            raise ValueError(f"request_id: expected a new one, got {request_id!r} again")
        if on_token is not None and not callable(on_token):
            raise ValueError(f"on_token: expected a function or None, got {on_token!r}")
        if incoming is not None and not isinstance(incoming, IncomingPages):
            raise ValueError(f"incoming: expected the result of receive_pages or None, got {incoming!r}")
        if token_filter is not None and not isinstance(token_filter, TokenFilter):
            raise ValueError(f"token_filter: expected an object with a method allowed, or None, got {token_filter!r}")
        ids = checked_ids("prompt_ids", prompt_ids, self._vocab_size)
        request = Request(request_id, ids, params, salt, token_filter)
        check_params(params, self.config, self._vocab_size, self._eos_token_ids)
        tracked = TrackedRequest(request, self._now(), on_token, is_owned=own is not None)
        with self._changing():
            try:
                self._ranks.add(tracked.request)
            except RequestRefused as refusal:
                tracked.refusal = str(refusal)
            if own is not None:
                own.append(tracked)
            self._tracked[request_id] = tracked  # from here on the request survives an exception
            if tracked.refusal is not None:
                self._retain(tracked)
        if incoming is not None:
            self._transfers.awaited.append((tracked, incoming))
        return tracked

    def _retain(self, tracked: TrackedRequest) -> None:
        """Add a finished request to the history. If the history is then longer than `EngineConfig.history`, delete the
        records of its oldest request. Requests of `generate` are not added, because `generate` deletes them. If
        `EngineConfig.history` is None, the history stays empty, because only `forget` deletes records."""
        if tracked.is_owned or self.config.history is None:
            return
        self._finished.append(tracked)
        if len(self._finished) > self.config.history:
            self._tracked.pop(self._finished[0].request.request_id, None)
            self._finished.popleft()

    def _store_logits(self, plan: StepPlan | None, logits: np.ndarray) -> None:
        """Store the prompt logits of a step, float32 [prefill tokens, V], in the records of its requests."""
        end = 0
        for row in () if plan is None else plan.prefill:
            request, first = row.request, end
            end += row.num_tokens
            num_prompt = min(row.num_tokens, len(request.prompt_ids) - row.start)
            tracked = self._tracked.get(request.request_id)
            # Since the launch the request may have been forgotten, and another request may have its id.
            if num_prompt > 0 and tracked is not None and tracked.request is request:
                if tracked.prompt_logits is None:
                    tracked.prompt_logits = self._no_logits(tracked)
                tracked.prompt_logits[row.start : row.start + num_prompt] = logits[first : first + num_prompt]

    def _no_logits(self, tracked: TrackedRequest) -> np.ndarray:
        return np.full((len(tracked.request.prompt_ids), self._vocab_size), np.nan, np.float32)

    @property
    def _num_owned(self) -> tuple[int, ...]:
        """Number of page rows that requests own, for each cache group, summed over data ranks.

        A cache group is a set of layers with equal attention windows, which share page pools. A page row is one page of
        one KV head, or one page of all KV heads if the heads have equal windows.
        """
        return tuple(map(sum, zip(*(pools.num_owned for pools in self._pools), strict=True)))

    @property
    def _hit_tokens(self) -> int:
        """Number of tokens that the prefix caches have found for requests since the engine was made."""
        return sum(cache.hit_tokens for cache in self._prefix_caches)

    def _now(self) -> float:
        """Time in seconds, on a clock that stops during compilation."""
        return time.perf_counter() - self._runner.compile_s
