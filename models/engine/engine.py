"""The inference engine: requests in, tokens out. Every model is driven through it.

>>> engine = Engine(random_model(PRESETS["v3-tiny"]), EngineConfig(num_pages=256))
>>> outputs = engine.generate([[1, 2, 3], [1, 2, 4]], SamplingParams(max_tokens=8))
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from models.decoder import Decoder
from models.engine.config import EngineConfig
from models.engine.group_sizes import group_sizes, make_pools
from models.engine.outputs import EngineStats, GroupStats, RequestId, RequestOutput, StepRecord
from models.engine.request import FinishReason, Request, SamplingParams
from models.engine.runner import Runner, StepResult
from models.engine.scheduler import RequestRefused, Scheduler
from models.engine.step_plan import StepPlan
from pallas_attn.cache import PrefixCache

type OnToken = Callable[[RequestId, int, FinishReason | None], None]
"""Callback for every token as it arrives; the reason is None until the last one."""


@dataclasses.dataclass
class _Tracked:
    """A request with the engine's own records of it."""

    request: Request
    added_s: float
    on_token: OnToken | None
    token_times: list[float] = dataclasses.field(default_factory=list)
    refusal: str | None = None

    def output(self) -> RequestOutput:
        times = self.token_times
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.request.num_cached or 0,
            output_ids=self.request.output_ids,
            finish_reason="refused" if self.refusal is not None else self.request.finish_reason,
            refusal=self.refusal,
            ttft_s=times[0] - self.added_s if times else None,
            itl_s=[later - earlier for earlier, later in itertools.pairwise(times)],
        )


@dataclasses.dataclass(frozen=True)
class _Launched:
    """A step that runs on the device."""

    result: StepResult
    planned_s: float
    cached_tokens: int
    used_rows: tuple[int, ...]


class Engine:
    """Continuous batching over a paged cache.

    A step is launched before the tokens of the one before it are read back, so that the host works while the device
    does. Requests are first come first served; when pages run out the youngest is preempted and computed again later,
    which changes no token.
    """

    def __init__(self, model: Decoder, config: EngineConfig = EngineConfig(), *, capture_logits: bool = False):
        """Allocates the cache.

        Args:
          model: its weights stay where they are.
          config: sizes and policies.
          capture_logits: keep the logits of every computed prompt token, for `prompt_logits`.

        Raises:
          ValueError: max_model_len is more than the model was made for, or less than 2.
        """
        limit = model.config.max_position_embeddings
        max_model_len = limit if config.max_model_len is None else config.max_model_len
        if not 2 <= max_model_len <= limit:
            raise ValueError(f"max_model_len: expected 2 to the model's {limit}, got {max_model_len}")
        self.config = config
        self.max_model_len = max_model_len
        self._vocab_size = model.config.vocab_size
        self._capture_logits = capture_logits
        self._prompt_logits: dict[RequestId, np.ndarray] = {}
        self._groups = group_sizes(
            model.config,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            step_tokens=config.max_batched_tokens,
            recycling=config.recycling,
        )
        self._pools = make_pools(
            self._groups,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
        )
        self._runner = Runner(model, config.runner_config(self._pools.table_tokens, self._groups))
        self._prefix_cache = PrefixCache(self._pools) if config.prefix_caching else None
        self._scheduler = Scheduler(
            self._pools,
            self._prefix_cache,
            max_batched_tokens=config.max_batched_tokens,
            max_prefill_seqs=config.prefill_seqs,
            max_model_len=max_model_len,
            chunked_prefill=config.chunked_prefill,
            eos_token_ids=model.config.eos_token_ids,
        )
        self._tracked: dict[RequestId, _Tracked] = {}
        self._ids = itertools.count()
        self._in_flight: _Launched | None = None
        self._undelivered: deque[tuple[OnToken, RequestId, int, FinishReason | None]] = deque()
        self._records: list[StepRecord] = []
        self._peak_rows = (0,) * len(self._groups)
        self._peak_pages = 0
        self._made_s = self._now()

    @property
    def max_sequence_len(self) -> int:
        """Tokens at which a request ends: the lesser limit of model and cache."""
        return self._scheduler.max_len

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has any work left."""
        return self._scheduler.has_unfinished or self._in_flight is not None or bool(self._undelivered)

    def warmup(self) -> float:
        """Compiles every shape a step can have, and on a GPU runs it without rows, so that its kernels are loaded;
        afterwards no traffic compiles anything. Returns the seconds it took.

        Without it a shape is compiled when the first step needs it.
        """
        before = self._runner.compile_s
        self._runner.compile(self._runner.buckets(self._capture_logits))
        return self._runner.compile_s - before

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        request_id: RequestId | None = None,
        salt: str = "",
        on_token: OnToken | None = None,
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

        Returns:
          The request's id.

        Raises:
          ValueError: an empty prompt, an id outside the vocabulary, or a request_id in use.
        """
        if request_id is None:
            request_id = next(number for number in self._ids if number not in self._tracked)
        if request_id in self._tracked:
            raise ValueError(f"request_id: expected a new one, got {request_id!r} again")
        ids = tuple(int(token) for token in prompt_ids)
        outside = [token for token in ids if not 0 <= token < self._vocab_size]
        if outside:
            raise ValueError(f"prompt_ids: expected ids from 0 to {self._vocab_size - 1}, got {outside[0]}")
        tracked = _Tracked(Request(request_id, ids, params, salt), self._now(), on_token)
        try:
            self._scheduler.add(tracked.request)
        except RequestRefused as refusal:
            tracked.refusal = str(refusal)
        self._tracked[request_id] = tracked
        return request_id

    def abort(self, request_id: RequestId) -> bool:
        """Ends a request; its output keeps the tokens that have arrived. False if it had ended already.

        Raises:
          ValueError: no such request.
        """
        self._find(request_id)
        return self._scheduler.abort(request_id)

    def step(self) -> list[RequestId]:
        """Launches the next step and collects the tokens of the one before it.

        If this raises (a callback, or the device), no token is lost or repeated: every unfinished request goes on with
        the next call, computed again if the cache was lost.

        Returns:
          Ids of the requests that got a token.
        """
        collected = False
        try:
            launched = self._launch()
            progressed = self._collect(self._in_flight) if self._in_flight else []
            collected = True
        finally:
            if not collected:
                self._recover()
        self._in_flight = launched
        while self._undelivered:
            on_token, request_id, token, reason = self._undelivered.popleft()
            on_token(request_id, token, reason)
        return progressed

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[RequestOutput]:
        """Runs prompts to their ends.

        Args:
          prompts: token ids.
          params: for all prompts, or one for each.

        Returns:
          One output a prompt, in their order.

        Raises:
          ValueError: as `add_request`; or not as many params as prompts. No prompt is queued.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: expected one for each of {len(prompts)} prompts, got {len(each)}")
        ids: list[RequestId] = []
        try:
            for prompt, of_prompt in zip(prompts, each, strict=True):
                ids.append(self.add_request(prompt, of_prompt))
        except Exception:
            for request_id in ids:
                self.abort(request_id)
                self.forget(request_id)
            raise
        while self.has_unfinished:
            self.step()
        return [self.output(request_id) for request_id in ids]

    def output(self, request_id: RequestId) -> RequestOutput:
        """Returns a request's output so far.

        Raises:
          ValueError: no such request.
        """
        return self._find(request_id).output()

    def forget(self, request_id: RequestId) -> None:
        """Drops the records of a finished request, which are otherwise kept for good.

        Raises:
          ValueError: no such request, or it has not finished.
        """
        if self._find(request_id).output().finish_reason is None:
            raise ValueError(f"request_id: expected a finished request, {request_id!r} is not")
        del self._tracked[request_id]
        self._prompt_logits.pop(request_id, None)

    def prompt_logits(self, request_id: RequestId) -> np.ndarray:
        """Returns float32 logits [prompt length, V], NaN where the prefix cache spared computing; needs capture_logits.

        Raises:
          ValueError: no such request, or the engine was not made to capture logits.
        """
        tracked = self._find(request_id)
        if not self._capture_logits:
            raise ValueError("capture_logits: the engine was made without it")
        empty = np.full((len(tracked.request.prompt_ids), self._vocab_size), np.nan, np.float32)
        return self._prompt_logits.get(request_id, empty)

    def stats(self) -> EngineStats:
        """Returns totals since the engine was made."""
        cache = self._prefix_cache
        prefill_s = sum(r.duration_s * r.prefill_tokens / (r.prefill_tokens + r.decode_tokens) for r in self._records)
        decode_s = sum(r.duration_s for r in self._records) - prefill_s
        prefill, decode = (sum(getattr(r, f"{kind}_tokens") for r in self._records) for kind in ("prefill", "decode"))
        return EngineStats(
            steps=tuple(self._records),
            prefill_tokens=prefill,
            decode_tokens=decode,
            prefill_tokens_per_s=prefill / prefill_s if prefill_s else 0.0,
            decode_tokens_per_s=decode / decode_s if decode_s > 0 and decode else 0.0,
            prefix_hit_rate=cache.hit_tokens / cache.query_tokens if cache and cache.query_tokens else 0.0,
            used_pages=self._pages(self._pools.num_owned),
            peak_pages=self._peak_pages,
            num_pages=self.config.num_pages,
            groups=tuple(
                GroupStats(group.layers, group.num_heads, group.num_rows, used, peak)
                for group, used, peak in zip(self._groups, self._pools.num_owned, self._peak_rows, strict=True)
            ),
            preemptions=self._scheduler.num_preemptions,
            compilations=self._runner.num_compilations,
            compile_s=self._runner.compile_s,
            cache_bytes=self._runner.cache_bytes,
        )

    def _find(self, request_id: RequestId) -> _Tracked:
        if request_id not in self._tracked:
            raise ValueError(f"request_id: no request {request_id!r}")
        return self._tracked[request_id]

    def _pages(self, rows: Sequence[int]) -> int:
        """Memory of so many rows of each cache group, in pages of all layers, rounded up."""
        shares = (len(g.layers) * Fraction(n, g.num_heads) for g, n in zip(self._groups, rows, strict=True))
        return math.ceil(sum(shares, Fraction(0)) / sum(len(g.layers) for g in self._groups))

    def _now(self) -> float:
        """Seconds on a clock that stands still while a step is compiled."""
        return time.perf_counter() - self._runner.compile_s

    def _launch(self) -> _Launched | None:
        planned_s = self._now()
        hits = self._prefix_cache.hit_tokens if self._prefix_cache else 0
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        cached = self._prefix_cache.hit_tokens - hits if self._prefix_cache else 0
        used = self._pools.num_owned
        self._peak_rows = tuple(map(max, self._peak_rows, used))
        self._peak_pages = max(self._peak_pages, self._pages(used))
        return _Launched(self._runner.launch(plan, self._capture_logits), planned_s, cached, used)

    def _collect(self, step: _Launched) -> list[RequestId]:
        plan = step.result.plan
        tokens = step.result.sampled()
        if step.result.logits is not None:
            self._keep_logits(plan, np.asarray(step.result.logits))
        now = self._now()
        continued = self._scheduler.retire(plan, tokens)
        for request, token in continued:
            tracked = self._tracked[request.request_id]
            tracked.token_times.append(now)
            if tracked.on_token is not None:
                self._undelivered.append((tracked.on_token, request.request_id, token, request.finish_reason))
        ended = self._records[-1].ended_s + self._made_s if self._records else 0.0
        self._records.append(
            StepRecord(
                ended_s=now - self._made_s,
                duration_s=now - max(ended, step.planned_s),
                prefill_tokens=sum(row.num_tokens for row in plan.prefill),
                decode_tokens=len(plan.decode),
                cached_tokens=step.cached_tokens,
                used_pages=self._pages(step.used_rows),
                used_rows=step.used_rows,
            )
        )
        return [request.request_id for request, _ in continued]

    def _keep_logits(self, plan: StepPlan, logits: np.ndarray) -> None:
        end = 0
        for row in plan.prefill:
            request, first = row.request, end
            end += row.num_tokens
            num_prompt = min(row.num_tokens, len(request.prompt_ids) - row.start)
            tracked = self._tracked.get(request.request_id)
            # Since the launch the request may have been forgotten, and its id given to another one.
            if num_prompt > 0 and tracked is not None and tracked.request is request:
                kept = self._prompt_logits.setdefault(request.request_id, self.prompt_logits(request.request_id))
                kept[row.start : row.start + num_prompt] = logits[first : first + num_prompt]

    def _recover(self) -> None:
        """Starts from empty caches and computes everything again, since the step's caches were donated and may be
        gone."""
        self._in_flight = None
        self._scheduler.requeue_all()
        self._runner.reset()
