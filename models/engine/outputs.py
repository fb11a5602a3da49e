"""Reports of the engine: of a request, of a step, of a whole run."""

from __future__ import annotations

import dataclasses

from models.engine.request import FinishReason

type RequestId = int | str


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """State and output of a request so far. No time includes compilation.

    Attributes:
      request_id: the caller's name for the request.
      prompt_tokens: tokens of the prompt.
      cached_tokens: prompt tokens found in the prefix cache when the request was first admitted.
      output_ids: generated tokens.
      finish_reason: "stop", "length", "abort", "refused", "nonfinite" (the next token's logits were NaN or infinite),
        or None while it runs.
      refusal: why it was refused, else None.
      ttft_s: seconds from `add_request` to the first token, None before.
      itl_s: seconds between consecutive tokens; 0 between those that one step gave.
      drafted, accepted: by position after the newest token, steps that verified a draft there, and that accepted it.
    """

    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int
    output_ids: list[int]
    finish_reason: FinishReason | None
    refusal: str | None
    ttft_s: float | None
    itl_s: list[float]
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """Record of one step, taken when its tokens had arrived.

    Attributes:
      ended_s: seconds since the engine was made.
      duration_s: since the step before it ended, or since it was planned if that was later.
      prefill_tokens: computed tokens of prompts.
      decode_tokens: tokens that decode rows got: one each, and the accepted drafts.
      cached_tokens: prompt tokens of requests admitted by this step that were not computed, being cached.
      used_pages: pages that belonged to requests after it was planned, counted as in `EngineStats`.
      used_rows: rows that belonged to requests in each cache group, counted as in `GroupStats`.
      drafted_tokens, accepted_tokens: drafts that were verified, and those of them that were accepted.
      launch_s: seconds of the host to plan and to start it, without compiling.
    """

    ended_s: float
    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    used_pages: int
    used_rows: tuple[int, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    launch_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Pool of one cache group. A row is a page of one KV head if heads have windows of their own, else of all heads.

    Attributes:
      layers: indices of its layers, which have equal windows.
      num_heads: rows of a page.
      num_rows: rows of the pool, or of those of all data ranks.
      used_rows, peak_rows: rows that belong to requests now, and at most so far.
    """

    layers: tuple[int, ...]
    num_heads: int
    num_rows: int
    used_rows: int
    peak_rows: int


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over all steps; the time of a step with both is split by its tokens.

    Attributes:
      steps: number of steps.
      prefill_tokens, decode_tokens: as in `StepRecord`.
      prefill_s, decode_s: seconds these took.
      drafted_tokens, accepted_tokens: as in `StepRecord`.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def plus(self, step: StepRecord) -> Totals:
        """Adds a step. One whose rows had all come to their ends before, as drafts make possible, counts as decode."""
        tokens = step.prefill_tokens + step.decode_tokens
        of_prefill = step.duration_s * step.prefill_tokens / tokens if tokens else 0.0
        return Totals(
            self.steps + 1,
            self.prefill_tokens + step.prefill_tokens,
            self.decode_tokens + step.decode_tokens,
            self.prefill_s + of_prefill,
            self.decode_s + step.duration_s - of_prefill,
            self.drafted_tokens + step.drafted_tokens,
            self.accepted_tokens + step.accepted_tokens,
        )


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made. No time includes compilation, which is reported apart.

    Attributes:
      steps: records of the newest `EngineConfig.history` steps.
      prefill_tokens, decode_tokens: as in `StepRecord`.
      prefill_tokens_per_s, decode_tokens_per_s: over the time of steps, a mixed step's split by its tokens.
      prefix_hit_rate: prompt tokens found in the prefix cache when their requests were first admitted, of all that
        were looked up then; 0 without any.
      used_pages, peak_pages, num_pages: pages that belong to requests now, at most so far, and in all. If layers or
        heads hold different numbers of tokens, their share of the memory in pages of all layers, rounded up. Those of
        all ranks along a mesh's data axis are counted together.
      preemptions: times a request gave up its pages to an older one.
      compilations, compile_s: step shapes compiled, and the seconds that took.
      cache_bytes: bytes of all layers' caches, and of what speculation keeps beside them; on a mesh, of each device's.
      groups: statistics of every cache group.
      num_steps: number of all steps.
      drafted_tokens, accepted_tokens: drafts that were verified, and those of them that were accepted.
    """

    steps: tuple[StepRecord, ...]
    prefill_tokens: int
    decode_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefix_hit_rate: float
    used_pages: int
    peak_pages: int
    num_pages: int
    preemptions: int
    compilations: int
    compile_s: float
    cache_bytes: int
    groups: tuple[GroupStats, ...] = ()
    num_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
