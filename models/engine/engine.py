"""The inference engine: requests in, tokens out. Every model is driven through it.

>>> engine = Engine(random_model(PRESETS["v3-tiny"]), EngineConfig(num_pages=256))
>>> outputs = engine.generate([[1, 2, 3], [1, 2, 4]], SamplingParams(max_tokens=8))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax.sharding import Mesh

from models.config import DeepSeekConfig
from models.decoder import Decoder, normal_mesh, split_model
from models.decoder.mesh import DATA, ExpertSplit, bytes_on_device, spans_processes
from models.engine.config import EngineConfig
from models.engine.distributed.data_ranks import DataRanks
from models.engine.distributed.processes import Processes
from models.engine.group_sizes import group_sizes, make_pools
from models.engine.kv_transfer.cached_pages import CachedPages, CachedSequence, difference, joined, numbered
from models.engine.kv_transfer.incoming_pages import IncomingPages
from models.engine.kv_transfer.written_pages import WrittenFeed, WrittenLayer
from models.engine.outputs import EngineStats, GroupStats, RequestId, RequestOutput, StepRecord, Totals
from models.engine.request import NONFINITE, FinishReason, Request, SamplingParams, as_integers
from models.engine.runner import Runner, StepResult
from models.engine.scheduler import RequestRefused, Scheduler
from models.engine.speculation.draft_control import DraftControl, step_cost
from models.engine.step.plan import StepPlan
from pallas_attn import PAGE_NONE
from pallas_attn.cache import Prefix, PrefixCache

type OnToken = Callable[[RequestId, int, FinishReason | None], None]
"""Callback for every token as it arrives; the reason is None until the last one. A request that ends for want of finite
logits gets a call with token -1 and the reason "nonfinite"."""


@dataclasses.dataclass(eq=False)
class _Tracked:
    """A request with the engine's own records of it.

    Attributes:
      request: the request; its tokens and its reason to end are what everything else follows from.
      added_s: when it was added.
      on_token: the caller's callback.
      token_times: when each token arrived.
      num_told: calls of `on_token` so far, counted before each, so that none is repeated.
      refusal: why it was refused, if it was.
      kept: whether its caller, and not the bound of the history, decides when it is forgotten.
      prompt_logits: float32 [prompt length, V], if logits are captured and any was computed.
    """

    request: Request
    added_s: float
    on_token: OnToken | None
    token_times: list[float] = dataclasses.field(default_factory=list)
    num_told: int = 0
    refusal: str | None = None
    kept: bool = False
    prompt_logits: np.ndarray | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return "refused" if self.refusal is not None else self.request.finish_reason

    @property
    def num_untold(self) -> int:
        """Calls of `on_token` that are due."""
        if self.on_token is None:
            return 0
        request = self.request
        num_tokens = len(request.token_ids) - len(request.prompt_ids)
        return num_tokens + (request.finish_reason == "nonfinite") - self.num_told

    def tell(self) -> tuple[int, FinishReason | None] | None:
        """Counts the next call of `on_token` that is due, and returns its token and reason; None if none is."""
        request, at = self.request, len(self.request.prompt_ids) + self.num_told
        if not self.num_untold:
            return None
        self.num_told += 1
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


@dataclasses.dataclass(frozen=True)
class _Launched:
    """A step that runs on the device."""

    result: StepResult
    planned_s: float
    launched_s: float
    cached_tokens: int
    used_rows: tuple[int, ...]


class Engine:
    """Continuous batching over a paged cache.

    A step is launched before the tokens of the one before it are read back, so that the host works while the device
    does. Requests are first come first served; when pages run out the youngest is preempted and computed again later,
    which changes no token.

    Requests, with the tokens that have arrived, are the one thing that cannot be made anew. A call that is cut short by
    any exception leaves the rest in whatever state it is in, and the next call that changes anything first makes pools,
    queues and caches anew from the requests.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig = EngineConfig(),
        *,
        capture_logits: bool = False,
        processes: Processes | None = None,
    ):
        """Allocates the cache.

        Args:
          model: its weights stay where they are.
          config: sizes and policies.
          capture_logits: keep the logits of every computed prompt token, for `prompt_logits`.
          processes: those whose devices the mesh has, each of which makes the same calls; None for this one alone.

        Raises:
          ValueError: max_model_len is more than the model was made for, or less than 2; the model was loaded for
            other devices than `config.mesh`; or its devices are of several processes and `processes` is None.
          ProcessError: from here and from every call that steps, if another process has failed.
          NotImplementedError: batch_invariant or speculate, for a model whose settings rule it out.
        """
        if model.mesh != (config.mesh and normal_mesh(config.mesh)):
            raise ValueError(
                f"mesh: expected the one that the model was loaded for, {_devices(model.mesh)}; got"
                f" {_devices(config.mesh)}. load_model and random_model take a mesh"
            )
        if spans_processes(model.mesh) and processes is None:
            raise ValueError("processes: expected those of the mesh's devices, which are several; got None")
        limit = model.config.max_position_embeddings
        max_model_len = limit if config.max_model_len is None else config.max_model_len
        if not 2 <= max_model_len <= limit:
            raise ValueError(f"max_model_len: expected 2 to the model's {limit}, got {max_model_len}")
        self.config = config
        self.max_model_len = max_model_len
        self._vocab_size = model.config.vocab_size
        self._capture_logits = capture_logits
        self._decides_by_time = processes is None  # several would measure different times, and must decide alike
        self._groups = group_sizes(
            model.part,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            step_tokens=config.max_batched_tokens,
            recycling=config.recycling,
        )
        self._pools = tuple(
            make_pools(
                self._groups,
                page_size=config.page_size,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                whole_tables=config.batch_invariant,
            )
            for _ in range(1 if model.mesh is None else model.mesh.shape[DATA])
        )
        runner_config = config.runner_config(self._pools[0].table_tokens, self._groups)
        self._runner = Runner(model, runner_config, processes)
        self._prefix_caches = tuple(map(PrefixCache, self._pools)) if config.prefix_caching else ()
        schedulers = (
            Scheduler(
                pools,
                prefix_cache,
                max_batched_tokens=config.max_batched_tokens,
                max_prefill_seqs=config.prefill_seqs,
                max_model_len=max_model_len,
                chunked_prefill=config.chunked_prefill,
                # Several ranks' steps are padded to the largest of them, which none of them knows.
                padded_sizes=runner_config.prefill_buckets if len(self._pools) == 1 else (),
                eos_token_ids=model.config.eos_token_ids,
                draft_control=_draft_control(model, config),
            )
            for pools, prefix_cache in itertools.zip_longest(self._pools, self._prefix_caches)
        )
        self._ranks = DataRanks([*schedulers])
        self._tracked: dict[RequestId, _Tracked] = {}  # in order of arrival
        self._ids = itertools.count()
        self._intact = True
        self._in_flight: _Launched | None = None
        self._untold: deque[_Tracked] = deque()  # once for each call of `on_token` that is due
        self._feed: WrittenFeed | None = None
        self._incoming: list[IncomingPages] = []
        self._awaited: list[tuple[_Tracked, IncomingPages]] = []  # closed once the request has found them
        self._finished: deque[_Tracked] = deque()  # those that the bound of the history decides on, oldest first
        self._records: deque[StepRecord] = deque(maxlen=config.history)
        self._totals = Totals()
        self._peak_rows = (0,) * len(self._groups)
        self._peak_pages = 0
        self._made_s = self._now()

    @property
    def max_sequence_len(self) -> int:
        """Tokens at which a request ends: the lesser limit of model and cache."""
        return self._ranks.max_len

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has any work left."""
        if not self._intact:
            return any(tracked.finish_reason is None or tracked.num_untold for tracked in self._tracked.values())
        return self._ranks.has_unfinished or self._in_flight is not None or bool(self._untold)

    def warmup(self) -> float:
        """Compiles every shape a step can have, and on a GPU runs it without rows, so that its kernels are loaded;
        afterwards no traffic compiles anything. Returns the seconds it took.

        Without it a shape is compiled when the first step needs it.
        """
        before = self._runner.compile_s
        with self._changing():
            buckets = self._runner.buckets(self._capture_logits)
            self._runner.compile(buckets)
            if self._feed is not None and self._feed.is_open:
                self._runner.compile_layers(buckets)
        return self._runner.compile_s - before

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        request_id: RequestId | None = None,
        salt: str = "",
        on_token: OnToken | None = None,
        incoming: IncomingPages | None = None,
    ) -> RequestId:
        """Queues a request.

        A prompt that can never run (too long for the model, the pool or, unchunked, a step) is not queued: its output
        says "refused" and why.

        Args:
          prompt_ids: token ids, at least one.
          params: how to sample and when to stop.
          request_id: a name that no request the engine keeps has; None for the next number that none has.
          salt: only requests of the same salt share cached prefixes.
          on_token: called from within `step` with every token.
          incoming: pages of the prompt that have arrived. They are held until the request has found them, and closed
            then.

        Returns:
          The request's id.

        Raises:
          ValueError: an empty prompt, ids that are no integers or outside the vocabulary, a request_id in use, or
            arguments of another kind. Nothing is queued.
        """
        tracked = self._add(prompt_ids, params, request_id, salt, on_token)
        if incoming is not None:
            self._awaited.append((tracked, incoming))
        return tracked.request.request_id

    def abort(self, request_id: RequestId) -> bool:
        """Ends a request; its output keeps the tokens that have arrived. False if it had ended already.

        Raises:
          ValueError: no such request.
        """
        tracked = self._find(request_id)
        with self._changing():
            aborted = self._ranks.abort(request_id)
            if aborted:
                self._retain(tracked)
        return aborted

    def step(self) -> list[RequestId]:
        """Launches the next step and collects the tokens of the one before it.

        Whatever raises in here (the device, a callback, want of memory, Ctrl-C), no token that has arrived is lost, and
        every unfinished request goes on with the next call: computed again, unless a callback raised. A callback gets
        each token once, or not at all if Ctrl-C comes as it is about to be called.

        Returns:
          Ids of the requests that got a token.
        """
        with self._changing():
            launched = self._launch()
            progressed = self._collect(self._in_flight) if self._in_flight else []
            self._in_flight = launched
        while self._untold:
            tracked = self._untold[0]
            call = tracked.tell()
            self._untold.popleft()
            if call is not None and tracked.on_token is not None:
                tracked.on_token(tracked.request.request_id, *call)
        return progressed

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[RequestOutput]:
        """Runs prompts to their ends, and forgets them.

        Args:
          prompts: token ids.
          params: for all prompts, or one for each.

        Returns:
          One output a prompt, in their order.

        Raises:
          ValueError: as `add_request`; or not as many params as prompts. No prompt is queued, nor is any left after
            whatever else `step` raises.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: expected one for each of {len(prompts)} prompts, got {len(each)}")
        own: list[_Tracked] = []
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
        """Returns a request's output so far.

        Raises:
          ValueError: no such request.
        """
        return self._find(request_id).output()

    def knows(self, request_id: RequestId) -> bool:
        """Whether there is such a request, finished or not, that was not forgotten."""
        return request_id in self._tracked

    def forget(self, request_id: RequestId) -> None:
        """Drops the records of a finished request, which are otherwise kept until `EngineConfig.history` requests have
        finished after it.

        Raises:
          ValueError: no such request, or it has not finished.
        """
        tracked = self._find(request_id)
        if tracked.finish_reason is None:
            raise ValueError(f"request_id: expected a finished request, {request_id!r} is not")
        with self._changing():
            self._tracked.pop(request_id, None)
            with contextlib.suppress(ValueError):  # it is not in there if its caller kept it
                self._finished.remove(tracked)

    def prompt_logits(self, request_id: RequestId) -> np.ndarray:
        """Returns float32 logits [prompt length, V], NaN where the prefix cache spared computing; needs capture_logits.

        Raises:
          ValueError: no such request, or the engine was not made to capture logits.
        """
        if not self._capture_logits:
            raise ValueError("capture_logits: the engine was made without it")
        tracked = self._find(request_id)
        return self._no_logits(tracked) if tracked.prompt_logits is None else tracked.prompt_logits

    def export_pages(self, request_id: RequestId) -> CachedPages:
        """Copies the full pages of a request's tokens, running or finished, as far as they are written and still there,
        to the host: for `import_pages` of another engine, which then computes the rest of the request alone.

        Raises:
          ValueError: no such request, or the engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        caches, request = self._intact_prefix_caches(), self._find(request_id).request
        # Without a token after them, the tokens would be looked up but for the last.
        found = [cache.lookup([*request.token_ids, 0], request.salt) for cache in caches]
        rank = max(range(len(found)), key=lambda rank: found[rank][0].shape[1])  # the one that ran it, or as good
        return self._export({rank: [(request.token_ids, request.salt, found[rank])]})

    def watch_written(
        self, consumer: Callable[[WrittenLayer], object], *, max_bytes: int = 2**30, pieces: int = 4
    ) -> WrittenFeed:
        """Tells a consumer, layer by layer, of the pages that steps with prompts complete, from the next step on.

        A step that completes pages is then launched in pieces of some layers each, and the copies of their pages go to
        the host while later pieces compute; other steps, and all steps without a consumer, are single programs. Tokens
        are the same up to rounding. `WrittenLayer` says in which order layers come; pages that a request found in the
        prefix cache come with the first that it completes.

        Args:
          consumer: called on a thread of the feed. It must not call the engine. No step waits for it.
          max_bytes: of pages that it may be behind; with more the feed ends.
          pieces: of a step, as even as can be. With more of them pages come earlier, and the step takes longer; with as
            many as there are layers, each layer's pages leave while the next one computes.

        Returns:
          The feed, to wait for, look at and close.

        Raises:
          ValueError: the engine has an open feed already, or an argument of another kind.
          NotImplementedError: the engine runs on a mesh, with drafts, or with batch-invariant steps.
        """
        if not callable(consumer):
            raise ValueError(f"consumer: expected a function, got {consumer!r}")
        if max_bytes < 1:
            raise ValueError(f"max_bytes: expected at least 1, got {max_bytes}")
        if pieces < 1:
            raise ValueError(f"pieces: expected at least 1, got {pieces}")
        if self._feed is not None and self._feed.is_open:
            raise ValueError("consumer: the engine has one already, whose feed has to be closed first")
        if self.config.mesh is not None:
            raise NotImplementedError("mesh: steps of one device alone can be launched layer by layer")
        if self.config.speculate is not None:
            raise NotImplementedError("speculate: proposers see whole steps, which are not launched layer by layer")
        if self.config.batch_invariant:
            raise NotImplementedError(
                "batch_invariant: steps launched layer by layer are other programs than whole ones"
            )
        self._runner.cut_steps(pieces)
        groups = {layer: number for number, group in enumerate(self._groups) for layer in group.layers}
        row_bytes = {
            layer: sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays.values())
            for group in self._groups
            for layer, arrays in self._runner.row_format(group).of_layers().items()
        }
        layers = sorted(groups)
        self._feed = WrittenFeed(
            consumer,
            [groups[layer] for layer in layers],
            [row_bytes[layer] for layer in layers],
            self._pools[0],
            max_bytes,
        )
        weakref.finalize(self, self._feed.close)  # or its thread would wait for ever
        return self._feed

    def export_prefix_cache(self) -> CachedPages:
        """Copies all pages of the prefix cache to the host, such as to save them for the next start.

        Raises:
          ValueError: the engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        return self._export(
            {
                rank: [(tokens, salt, cache.published(tokens, salt)) for tokens, salt in cache.sequences()]
                for rank, cache in enumerate(self._intact_prefix_caches())
            }
        )

    def import_pages(self, pages: CachedPages) -> int:
        """Adds pages from another engine of the same model and the same kind of cache to the prefix cache, where the
        next requests find them. They take the place of free pages, as a request's do, on each rank along `data`.

        The number of pages, the sizes of steps, the implementations and the devices of the two engines may differ, but
        of heads with windows of their own each device must have as many. Caches of proposers are not part of it, so
        that drafts for such requests are worse at first.

        Returns:
          Tokens that requests for the sequences would find now, on any rank: all of them if the free pages held them.

        Raises:
          ValueError: pages of another model or another kind of cache, or malformed ones; nothing is taken in. Or the
            engine was made without a prefix cache.
          NotImplementedError: the engine runs as several processes.
        """
        caches = self._intact_prefix_caches()
        if (unlike := difference(pages.made_for, self.cache_format)) is not None:
            raise ValueError(f"pages: expected those of an engine like this one, got {unlike}")
        formats = [self._runner.row_format(group) for group in self._groups]
        pages.check(self.config.page_size, self._vocab_size, formats)
        for sequence, (rank, cache) in itertools.product(pages.sequences, enumerate(caches)):
            with self._changing():
                known = [rows != PAGE_NONE for rows in sequence.rows]
                self._write_pages(pages, sequence, cache.insert(sequence.tokens, known, sequence.salt), rank)
        hits = (
            min(cache.lookup([*sequence.tokens, 0], sequence.salt)[0].shape[1] for cache in caches)
            for sequence in pages.sequences
        )
        return sum(hits) * self.config.page_size

    def receive_pages(self, tokens: Sequence[int], made_for: Mapping[str, Any], *, salt: str = "") -> IncomingPages:
        """Prepares for pages of a prompt that another engine computes, to be written layer by layer as they arrive.

        Args:
          tokens: token ids of the prompt.
          made_for: `cache_format` of the other engine.
          salt: of the request for the prompt.

        Returns:
          The pages to come: hand them to `add_request` as `incoming`, or close them.

        Raises:
          ValueError: pages of another model or another kind of cache, ids as `add_request` refuses them, a prompt that
            is longer than the cache, or the engine was made without a prefix cache.
          NotImplementedError: the engine runs on a mesh.
        """
        if self.config.mesh is not None:
            raise NotImplementedError(
                "mesh: layers are written as they arrive on one device alone; import_pages takes pages"
            )
        (cache,) = self._intact_prefix_caches()
        if (unlike := difference(made_for, self.cache_format)) is not None:
            raise ValueError(f"made_for: expected an engine like this one, got {unlike}")
        ids = self._checked_ids("tokens", tokens)
        if len(ids) > self.max_sequence_len:
            raise ValueError(f"tokens: expected at most {self.max_sequence_len}, got {len(ids)}")
        incoming = IncomingPages(ids, salt, self._groups, self._pools[0], cache, self._runner, self._changing)
        self._incoming.append(incoming)
        return incoming

    def stats(self) -> EngineStats:
        """Returns totals since the engine was made, which are kept as it runs, and the records of the newest steps."""
        totals, ranks = self._totals, self._ranks
        return EngineStats(
            steps=tuple(self._records),
            num_steps=totals.steps,
            drafted_tokens=totals.drafted_tokens,
            accepted_tokens=totals.accepted_tokens,
            prefill_tokens=totals.prefill_tokens,
            decode_tokens=totals.decode_tokens,
            prefill_tokens_per_s=totals.prefill_tokens / totals.prefill_s if totals.prefill_s else 0.0,
            decode_tokens_per_s=totals.decode_tokens / totals.decode_s if totals.decode_s else 0.0,
            prefix_hit_rate=ranks.found_tokens / (ranks.looked_up_tokens or 1),
            used_pages=self._pages(self._num_owned),
            peak_pages=self._peak_pages,
            num_pages=self.config.num_pages * len(self._pools),
            groups=tuple(
                GroupStats(group.layers, group.num_heads, group.num_rows * len(self._pools), used, peak)
                for group, used, peak in zip(self._groups, self._num_owned, self._peak_rows, strict=True)
            ),
            preemptions=ranks.num_preemptions,
            compilations=self._runner.num_compilations,
            compile_s=self._runner.compile_s,
            cache_bytes=self._runner.cache_bytes,
        )

    def _intact_prefix_caches(self) -> tuple[PrefixCache, ...]:
        """The prefix caches, emptied if the contents of pages were lost when a call was cut short."""
        if not self._prefix_caches:
            raise ValueError("prefix_caching: expected True, pages are found by way of the prefix cache")
        if spans_processes(self.config.mesh):
            raise NotImplementedError("processes: pages on devices of other processes can be neither read nor written")
        with self._changing():
            return self._prefix_caches

    @property
    def _num_owned(self) -> tuple[int, ...]:
        """Rows that belong to requests, in each cache group, on all data ranks together."""
        return tuple(map(sum, zip(*(pools.num_owned for pools in self._pools), strict=True)))

    @property
    def _hit_tokens(self) -> int:
        """Tokens found in prefix caches so far."""
        return sum(cache.hit_tokens for cache in self._prefix_caches)

    @functools.cached_property
    def cache_format(self) -> dict[str, Any]:
        """Facts that an engine must have in common with this one to take its pages; JSON, by name."""
        groups = [[g.layers, g.heads.window, g.heads.sink_tokens, g.head_wise] for g in self._groups]
        return json.loads(json.dumps(self._runner.cache_format() | {"groups": groups}))

    def _export(self, found_on_ranks: Mapping[int, Iterable[tuple[Sequence[int], str, Prefix]]]) -> CachedPages:
        """Copies pages that were found on data ranks for tokens under a salt."""
        page_size, parts = self.config.page_size, []
        for rank, found in found_on_ranks.items():
            taken = [CachedSequence(tuple(t[: r[0].shape[1] * page_size]), salt, r) for t, salt, r in found]
            sequences, held = numbered([each for each in taken if each.tokens], len(self._groups))
            rows = zip(self._groups, held, strict=True)
            parts.append((sequences, [self._runner.read_rows(group, of_group, rank) for group, of_group in rows]))
        return CachedPages(self.cache_format, *joined(parts))

    def _write_pages(self, pages: CachedPages, sequence: CachedSequence, rows: Prefix, rank: int) -> None:
        """Writes pages of a sequence to the rows that they were given on a rank, where they were given any."""
        for group, contents, theirs, own in zip(self._groups, pages.groups, sequence.rows, rows, strict=True):
            given = own != PAGE_NONE
            new = {name: array[theirs[given]] for name, array in contents.items()}
            self._runner.write_rows(group, own[given], new, rank)

    def _find(self, request_id: RequestId) -> _Tracked:
        if request_id not in self._tracked:
            bound = self.config.history
            kept = "" if bound is None else f"; of finished ones the newest {bound} are kept"
            raise ValueError(f"request_id: no request {request_id!r}{kept}")
        return self._tracked[request_id]

    def _add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: RequestId | None = None,
        salt: str = "",
        on_token: OnToken | None = None,
        *,
        own: list[_Tracked] | None = None,
    ) -> _Tracked:
        """Queues a request, or notes its refusal; arguments as for `add_request`. The caller may keep a list of its
        own, which then holds the request whatever comes, and has to forget it."""
        if request_id is None:
            request_id = next(number for number in self._ids if number not in self._tracked)
        if not isinstance(request_id, Hashable):
            raise ValueError(f"request_id: expected an int or a str, got {request_id!r}")
        if request_id in self._tracked:
            raise ValueError(f"request_id: expected a new one, got {request_id!r} again")
        if on_token is not None and not callable(on_token):
            raise ValueError(f"on_token: expected a function or None, got {on_token!r}")
        ids = self._checked_ids("prompt_ids", prompt_ids)
        tracked = _Tracked(Request(request_id, ids, params, salt), self._now(), on_token, kept=own is not None)
        with self._changing():
            try:
                self._ranks.add(tracked.request)
            except RequestRefused as refusal:
                tracked.refusal = str(refusal)
            if own is not None:
                own.append(tracked)
            self._tracked[request_id] = tracked  # from here on there is such a request
            if tracked.refusal is not None:
                self._retain(tracked)
        return tracked

    def _checked_ids(self, name: str, given: Sequence[int]) -> tuple[int, ...]:
        """Token ids that the model knows."""
        ids = as_integers(name, given)
        outside = [token for token in ids if not 0 <= token < self._vocab_size]
        if outside:
            raise ValueError(f"{name}: expected ids from 0 to {self._vocab_size - 1}, got {outside[0]}")
        return ids

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Surrounds every change: if one was cut short, however far it had come, the next one first starts over."""
        if not self._intact:
            self._start_over()
        self._intact = False
        yield
        self._intact = True

    def _start_over(self) -> None:
        """Makes everything anew from the requests: pools, queues, empty caches, and what is to be told or kept. It may
        itself be cut short, and is then repeated."""
        self._in_flight = None
        self._runner.reset()
        if self._feed is not None:
            self._feed.start_over()
        for incoming in self._incoming:
            incoming.lose(dropping=False)
        self._incoming = []
        tracked = [*self._tracked.values()]
        self._ranks.requeue_all([t.request for t in tracked if t.finish_reason is None])
        now = self._now()
        for t in tracked:
            t.token_times.extend([now] * (len(t.request.output_ids) - len(t.token_times)))
        with_callbacks = dict.fromkeys([*self._untold, *tracked])
        self._untold = deque(t for t in with_callbacks for _ in range(t.num_untold))
        self._finished = deque()
        for t in tracked:
            t.kept = False  # who kept it was cut short, too
            if t.finish_reason is not None:
                self._retain(t)

    def _retain(self, tracked: _Tracked) -> None:
        """Keeps the records of a request that has finished, and forgets the oldest if those are too many."""
        if tracked.kept or self.config.history is None:
            return
        self._finished.append(tracked)
        if len(self._finished) > self.config.history:
            self._tracked.pop(self._finished[0].request.request_id, None)
            self._finished.popleft()

    def _pages(self, rows: Sequence[int]) -> int:
        """Memory of so many rows of each cache group, in pages of all layers, rounded up."""
        shares = (len(g.layers) * Fraction(n, g.num_heads) for g, n in zip(self._groups, rows, strict=True))
        return math.ceil(sum(shares, Fraction(0)) / sum(len(g.layers) for g in self._groups))

    def _now(self) -> float:
        """Seconds on a clock that stands still while a step is compiled."""
        return time.perf_counter() - self._runner.compile_s

    def _launch(self) -> _Launched | None:
        planned_s = self._now()
        hits = self._hit_tokens
        plans = self._schedule()
        if plans is None:
            return None
        cached, used = self._hit_tokens - hits, self._num_owned
        self._peak_rows = tuple(map(max, self._peak_rows, used))
        self._peak_pages = max(self._peak_pages, self._pages(used))
        result = self._launch_told(plans)
        return _Launched(result, planned_s, self._now(), cached, used)

    def _schedule(self) -> tuple[StepPlan | None, ...] | None:
        """Plans a step. If nothing runs and nobody can move, because of pages that are held for prompts to come, these
        are given up."""
        plans = self._ranks.schedule()
        self._incoming = [incoming for incoming in self._incoming if incoming.is_open]
        if plans is None and self._incoming and self._in_flight is None and self._ranks.has_unfinished:
            for incoming in self._incoming:
                incoming.lose()
            plans = self._ranks.schedule()
        found = [one for one in self._awaited if one[0].request.num_cached is not None or one[0].finish_reason]
        if found:
            self._awaited = [one for one in self._awaited if one not in found]
            for _, incoming in found:
                if incoming.is_open:
                    incoming.lose()
        return plans

    def _launch_told(self, plans: Sequence[StepPlan | None]) -> StepResult:
        """Launches a step; layer by layer if it completes pages that a consumer is to be told of."""
        feed = self._feed
        step = None if feed is None else feed.plan(plans[0])
        if feed is None or step is None:
            return self._runner.launch(plans, self._capture_logits)
        on_layer = functools.partial(feed.add, step)
        result = self._runner.launch(plans, self._capture_logits, rows=step.rows, on_layer=on_layer)
        feed.launched(step)
        return result

    def _collect(self, step: _Launched) -> list[RequestId]:
        plans = step.result.plans
        rows = step.result.sampled()
        if step.result.logits is not None:
            for plan, logits in zip(plans, np.split(step.result.read(step.result.logits), len(plans)), strict=True):
                self._keep_logits(plan, logits)
        now = self._now()
        progressed: dict[RequestId, None] = {}
        continued = self._ranks.retire(plans, rows)
        for request, token in continued:
            tracked = self._tracked[request.request_id]
            if token != NONFINITE:
                tracked.token_times.append(now)
                progressed[request.request_id] = None
            if tracked.on_token is not None:
                self._untold.append(tracked)
        for request in dict.fromkeys(request for request, _ in continued):
            if request.is_finished:
                self._retain(self._tracked[request.request_id])
        ended = self._records[-1].ended_s + self._made_s if self._records else 0.0
        launched = [plan for plan in plans if plan is not None]
        decodes = [i < len(plan.decode) for plan in launched for i in range(len(plan.sampling_rows))]
        record = StepRecord(
            ended_s=now - self._made_s,
            duration_s=now - max(ended, step.planned_s),
            prefill_tokens=sum(row.num_tokens for plan in launched for row in plan.prefill),
            decode_tokens=sum(len(row.tokens) for row, is_decode in zip(rows, decodes, strict=True) if is_decode),
            cached_tokens=step.cached_tokens,
            used_pages=self._pages(step.used_rows),
            used_rows=step.used_rows,
            drafted_tokens=sum(row.drafted for row in rows),
            accepted_tokens=sum(max(len(row.tokens) - 1, 0) for row in rows),
            launch_s=step.launched_s - step.planned_s,
        )
        if self._decides_by_time:
            self._ranks.record_time(plans, record.duration_s)
        self._records.append(record)
        self._totals = self._totals.plus(record)
        return [*progressed]

    def _keep_logits(self, plan: StepPlan | None, logits: np.ndarray) -> None:
        end = 0
        for row in () if plan is None else plan.prefill:
            request, first = row.request, end
            end += row.num_tokens
            num_prompt = min(row.num_tokens, len(request.prompt_ids) - row.start)
            tracked = self._tracked.get(request.request_id)
            # Since the launch the request may have been forgotten, and its id given to another one.
            if num_prompt > 0 and tracked is not None and tracked.request is request:
                if tracked.prompt_logits is None:
                    tracked.prompt_logits = self._no_logits(tracked)
                tracked.prompt_logits[row.start : row.start + num_prompt] = logits[first : first + num_prompt]

    def _no_logits(self, tracked: _Tracked) -> np.ndarray:
        return np.full((len(tracked.request.prompt_ids), self._vocab_size), np.nan, np.float32)


def _devices(mesh: Mesh | None) -> str:
    if mesh is None:
        return "one device"
    sizes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"{sizes} of devices {[device.id for device in mesh.devices.flat]}"


def _draft_control(model: Decoder, config: EngineConfig) -> DraftControl | None:
    """Makes the control of the number of drafts, for the weights that a device has; None without speculation."""
    if config.speculate is None:
        return None
    sizes, (_, weights) = model.part, split_model(model)
    itemsize = model.embed_tokens[...].dtype.itemsize
    if isinstance(sizes, DeepSeekConfig):
        layers, experts, width = sizes.num_moe_layers, sizes.n_routed_experts, sizes.moe_intermediate_size
    else:
        layers, experts, width = sizes.num_hidden_layers, sizes.num_local_experts, sizes.intermediate_size
    own_experts = ExpertSplit.over(model.mesh).num_own(experts)
    routed = layers * own_experts * 3 * sizes.hidden_size * width * itemsize
    embedding = 0 if sizes.tie_word_embeddings else bytes_on_device(model.embed_tokens[...])
    dense = sum(map(bytes_on_device, weights)) - embedding - routed
    share = sizes.num_experts_per_tok / experts if experts else 0.0
    cost = step_cost(dense, routed, share, itemsize)
    proposer = config.speculate.proposer
    return DraftControl(config.speculate.draft_buckets, cost, proposer.draft_bytes, proposer.depth)
