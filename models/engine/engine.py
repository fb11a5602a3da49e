"""The inference engine: takes requests with prompts and returns generated tokens.

>>> engine = Engine(random_model(PRESETS["v3-tiny"]), EngineConfig(num_pages=256))
>>> outputs = engine.generate([[1, 2, 3], [1, 2, 4]], SamplingParams(max_tokens=8))

Parts of the engine:

- `request_table`: records of all requests, and the calls of `on_token` that are due.
- `step_loop`: the main loop, which plans, launches and reads steps. `step_log`: statistics of steps.
- `scheduler`: plans steps and allocates cache pages. `distributed.data_ranks` divides requests among schedulers.
- `runner`: compiled programs and caches on the device. `warmup`: compilation before steps need the programs.
- `kv_transfer.engine_transfers`: copies cache pages to and from other engines.
- `assembly` constructs the parts; `request_checks` checks new requests.
"""

from __future__ import annotations

import contextlib
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_attn.cache import PrefixCache
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine.assembly import (
    check_devices,
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
from pallas_attn.models.engine.request import Request, SamplingParams
from pallas_attn.models.engine.request_checks import check_params, check_types, checked_ids
from pallas_attn.models.engine.request_table import RequestTable
from pallas_attn.models.engine.runner import OnCompiled, Runner
from pallas_attn.models.engine.scheduler import RequestRefused, RunningRequests
from pallas_attn.models.engine.step_log import StepLog
from pallas_attn.models.engine.step_loop import StepLoop
from pallas_attn.models.engine.token_filter import TokenFilter
from pallas_attn.models.engine.tracked_request import OnToken, TrackedRequest
from pallas_attn.models.engine.warmup import Warmup


class Engine:
    """Generates tokens for many requests at a time, with continuous batching and a paged KV cache.

    The engine launches a step before it reads the tokens of the previous step, so the host and the device work at the
    same time. Requests are served first come, first served. When pages run out, the youngest running request is
    preempted: it loses its pages, and its tokens are computed again later. Preemption does not change any token.

    Any call may be interrupted by an exception, such as KeyboardInterrupt. All requests, and all tokens that the host
    has read from the device, survive the exception. All other state may be inconsistent afterwards. Therefore the next
    call that changes the engine rebuilds pools, queues and caches from the requests.

    Methods with an argument `request_id` raise ValueError if the engine has no records of the request.
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
        check_devices(model, config, processes)
        self.config = config
        self.max_model_len = checked_model_len(model, config)
        self._model_config = model.config
        self._capture_logits = capture_logits
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
            config,
            self._groups,
            self._pools,
            self._prefix_caches,
            self._runner,
            self._changing,
            vocab_size=model.config.vocab_size,
            max_len=self._ranks.max_len,
        )
        self._requests = RequestTable(config.history, model.config.vocab_size)
        self._log = StepLog(config.history, self._groups, len(self._pools), self._runner.now())
        self._loop = StepLoop(
            self._runner, self._ranks, self._transfers, self._requests, self._log, capture_logits=capture_logits
        )
        self._warmup = Warmup(
            self._runner, self._ranks, all_logits=capture_logits, freeze_objects=config.freeze_objects
        )
        self._intact = True

    @property
    def max_sequence_len(self) -> int:
        """Maximum number of tokens of a sequence, prompt and output. A request ends at this length. It is
        `max_model_len`, or, if this is smaller, 1 + (tokens that fit the cache): the last token of a sequence is not
        cached."""
        return self._ranks.max_len

    # --- requests

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
            argument of the wrong type, a receiver of another engine, or `params` with a parameter that needs a
            tokenizer (see `SamplingParams`). Nothing is queued.
        """
        return self._add(
            prompt_ids, params, request_id, salt, on_token, incoming=incoming, token_filter=token_filter
        ).request.request_id

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
        request_id = self._requests.new_id(request_id)
        check_types(on_token, incoming, token_filter)
        rank = None if incoming is None else self._transfers.rank_of(incoming)
        vocab_size, eos_token_ids = self._model_config.vocab_size, self._model_config.eos_token_ids
        ids = checked_ids("prompt_ids", prompt_ids, vocab_size)
        request = Request(request_id, ids, params, salt, token_filter)
        check_params(params, self.config, vocab_size, eos_token_ids)
        tracked = TrackedRequest(request, self._runner.now(), on_token, is_owned=own is not None)
        with self._changing():
            try:
                self._ranks.add(request, rank)
            except RequestRefused as refusal:
                tracked.refusal = str(refusal)
            if own is not None:
                own.append(tracked)
            self._requests.add(tracked)
        if incoming is not None:
            self._transfers.awaited.append((tracked, incoming))
        return tracked

    def abort(self, request_id: RequestId) -> bool:
        """End a request. Its output keeps the tokens that have been read from the device.

        Returns:
          False if the request had already ended.
        """
        tracked = self._requests.find(request_id)
        with self._changing():
            aborted = self._ranks.abort(request_id)
            if aborted:
                self._requests.end(tracked)
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
                if self._requests.tracked.get(tracked.request.request_id) is tracked:
                    self.abort(tracked.request.request_id)
                    self.forget(tracked.request.request_id)

    def output(self, request_id: RequestId) -> RequestOutput:
        """Return the state of a running or finished request, with the tokens that have been read."""
        return self._requests.find(request_id).output()

    def output_logprobs(self, request_id: RequestId, first: int, end: int) -> Sequence[TokenLogprobs]:
        """Return log probabilities of the output tokens from `first` to `end`, without a copy of all others; empty
        without `SamplingParams.logprobs`."""
        return self._requests.find(request_id).request.logprobs[first:end]

    def has_ended(self, request_id: RequestId) -> bool:
        """Whether a request has ended, for example because it was aborted."""
        return self._requests.find(request_id).finish_reason is not None

    def knows(self, request_id: RequestId) -> bool:
        """Whether the engine has records of the request, which may be waiting, running or finished."""
        return request_id in self._requests.tracked

    def forget(self, request_id: RequestId) -> None:
        """Delete the records of a finished request. Without this call the engine deletes them when
        `EngineConfig.history` more requests have finished.

        Raises:
          ValueError: no such request, or it has not finished.
        """
        tracked = self._requests.find(request_id)
        if tracked.finish_reason is None:
            raise ValueError(f"request_id: expected a finished request, {request_id!r} is not")
        with self._changing():
            self._requests.delete(tracked)

    def prompt_logits(self, request_id: RequestId) -> np.ndarray:
        """Return float32 logits [prompt length, V] of the prompt. Rows of tokens that are not computed, or not computed
        yet, are NaN. Tokens found in the prefix cache are not computed.

        Raises:
          ValueError: no such request, or the engine was made without capture_logits.
        """
        if not self._capture_logits:
            raise ValueError("capture_logits: expected an engine that was made with capture_logits=True")
        return self._requests.prompt_logits(request_id)

    # --- steps

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` must be called again: a request is unfinished, a step is in flight, or callbacks are
        pending."""
        if not self._intact:  # the schedulers may be inconsistent; the records of requests are not
            return self._requests.has_unfinished
        return self._loop.has_unfinished or self._requests.has_due_calls

    @property
    def _records_times(self) -> bool:
        """Whether the durations of steps affect the number of drafts of later steps.

        Processes measure different durations and must choose the same number of drafts. While programs are compiled in
        the background, steps with too much padding take longer.
        """
        return self._is_one_process and not self._warmup.is_compiling

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
            self._warmup.take_compiled(is_idle=not self._loop.has_unfinished)
            progressed = self._loop.step(records_time=self._records_times)
        self._requests.call_back()  # last, so that an exception in a callback loses no token
        return progressed

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
        self._loop.drop()
        self._runner.reset()
        self._transfers.start_over()
        self._ranks.requeue_all(self._requests.unfinished())
        self._requests.start_over(self._runner.now())

    # --- compilation

    def warmup(self, on_compiled: OnCompiled | None = None, *, wait: bool | None = None) -> float:
        """Compile the step programs for all batch shapes that the engine pads steps to. On a GPU, also run each program
        with an empty batch, which loads its kernels.

        After this call no step compiles, unless `watch_written` is called later. Without this call, a program is
        compiled when the first step needs it.

        If `wait` is False, the call returns when the programs of the largest shapes are compiled. They serve every
        step, with more padding. A thread compiles the other programs (docs/compiled_steps.md).

        Args:
          on_compiled: function (number of compiled shapes, number of all shapes to compile) that is called when
            compilation starts and whenever a shape has been compiled. It does not count shapes that a thread compiles.
          wait: whether to wait for all programs; None for the opposite of `EngineConfig.background_compilation`. While
            page copies are watched (`watch_written`), the call waits for all programs in any case.

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
        with self._changing():
            self._warmup.compile(on_compiled, wait=waits, layers=self._transfers.is_watched)
        self._warmup.freeze()
        return self._runner.compile_s - before

    @property
    def is_compiling(self) -> bool:
        """Whether programs are compiled in the background, or are not all available to steps. While this is true and no
        request is unfinished, call `take_compiled` from time to time."""
        return self._warmup.is_compiling

    def take_compiled(self) -> None:
        """Make one more shape available to steps, if one has been compiled in the background. On a GPU, first run its
        program. `step` does the same. Call this method while no requests run."""
        if self.is_compiling:
            with self._changing():
                self._warmup.take_compiled(is_idle=not self._loop.has_unfinished)

    def close(self) -> None:
        """End the compilation in the background, after the shape that is being compiled. Steps can still run, with the
        compiled programs."""
        self._warmup.stop()

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
        callbacks. All later tokens are computed with the new weights. The prefix cache is emptied.
        docs/weight_updates.md compares the options.

        Arguments are checked before anything changes. After a ValueError or NotImplementedError the engine continues
        with the old weights, and all requests and cached prefixes remain.

        Args:
          weights: a `Decoder`, a tree such as `nnx.state(model)`, or a dict with the names of `Engine.weights`. The
            leaves are jax or numpy arrays with the shapes and dtypes of the old weights, on any devices.
          draft: new weights of the proposer, in the same forms: the draft model, or the `MTP` module. None keeps the
            weights that the proposer does not share with the model. The tokens are the same, but fewer drafts may be
            accepted.
          running: what happens to requests that have keys and values computed with the old weights. "recompute":
            their keys and values are computed again. "keep": they continue with the old keys and values. "abort": they
            end with the finish reason "abort".
          copy: whether arrays that are already on the devices of the engine are copied, too. If False, the engine uses
            the arrays themselves, so they must not be donated or deleted before the next update.
          in_place: whether each old weight is released just before its successor is copied, which saves memory. If an
            exception interrupts the copies, steps raise RuntimeError until another call of this method has succeeded.

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
            progressed = self._loop.read(records_time=self._records_times)
        self._requests.call_back()
        with self._changing():
            if in_place:
                self._warmup.finish()  # tracing reads the weights
                new = self._runner.place_weights(new, copy=copy, in_place=True)
            self._runner.use_weights(new)
            self._transfers.replace_weights()
            for request in self._ranks.replace_weights(running):
                self._requests.end(self._requests.tracked[request.request_id])
        return progressed

    # --- KV-cache transfer

    @property
    def cache_format(self) -> dict[str, Any]:
        """Properties of the model and its cache: a dict from name to JSON value. Two engines can exchange cache pages
        only if all these properties are equal."""
        return self._transfers.cache_format

    def export_pages(self, request_id: RequestId) -> CachedPages:
        """Copy the full pages of a running or finished request to the host; see `EngineTransfers.export_pages`."""
        return self._transfers.export_pages(self._requests.find(request_id).request)

    def export_prefix_cache(self) -> CachedPages:
        """Copy all pages of the prefix cache to the host; see `EngineTransfers.export_prefix_cache`."""
        return self._transfers.export_prefix_cache()

    def import_pages(self, pages: CachedPages) -> int:
        """Add pages of another engine to the prefix cache; see `EngineTransfers.import_pages`.

        Returns:
          Number of tokens of the imported sequences that requests would now find in the prefix cache.
        """
        return self._transfers.import_pages(pages)

    def receive_pages(self, tokens: Sequence[int], made_for: Mapping[str, Any], *, salt: str = "") -> IncomingPages:
        """Make a receiver for the pages of a prompt that another engine computes, to be passed to `add_request` as
        `incoming`; see `EngineTransfers.receive_pages`."""
        num_unfinished = [scheduler.num_unfinished for scheduler in self._ranks.schedulers]
        return self._transfers.receive_pages(tokens, made_for, salt, num_unfinished)

    def compile_page_writes(self) -> None:
        """Compile the programs with which receivers of `receive_pages` write pages. Call it before `warmup`. Otherwise,
        the programs are compiled when the first pages arrive."""
        self._transfers.compile_page_writes()

    def num_cached_tokens(self, prompt_ids: Sequence[int], *, salt: str = "") -> int:
        """Return the number of tokens of a prompt that a request would find in the prefix cache now; on a mesh, the
        maximum of all data ranks."""
        return self._transfers.num_cached_tokens(prompt_ids, salt)

    def watch_written(
        self, consumer: Callable[[WrittenLayer], object], *, max_bytes: int = 2**30, pieces: int = 4
    ) -> WrittenFeed:
        """Pass each page that a prefill row fills to a consumer, layer by layer, from the next step on; see
        `EngineTransfers.watch_written`."""
        feed = self._transfers.watch_written(consumer, max_bytes, pieces)
        weakref.finalize(self, feed.close)  # otherwise the feed's thread would wait forever
        return feed

    # --- statistics

    def stats(self) -> EngineStats:
        """Return totals since the engine was made, and the records of the newest steps."""
        return self._log.stats(self._ranks, self._runner, self._warmup, self.config.num_pages * len(self._pools))
