"""Results and statistics of the engine: of a request, of a step, of all steps."""

from __future__ import annotations

import dataclasses

from models.engine.request import FinishReason

type RequestId = int | str


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """State and output of a request so far. Times exclude compilation.

    Attributes:
      request_id: the id given to `add_request`.
      prompt_tokens: number of prompt tokens.
      cached_tokens: prompt tokens found in the prefix cache when the request was first admitted.
      output_ids: generated tokens.
      finish_reason: "stop", "length", "abort", "refused", "nonfinite" (the next token's logits were NaN or infinite),
        or None while the request runs.
      refusal: why the request was refused; None if it was accepted.
      ttft_s: seconds from `add_request` to the first token; None before the first token.
      itl_s: seconds between consecutive tokens; 0 between tokens of the same step.
      drafted, accepted: numbers of steps that verified and that accepted a draft; entry i is for the draft i + 1
        positions after the newest token.
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
    """Record of one step, made when its tokens have been read.

    Attributes:
      ended_s: time since the engine was made, in seconds.
      duration_s: seconds since the previous step ended, or since this step was planned if that was later.
      prefill_tokens: computed prompt tokens.
      decode_tokens: tokens sampled by decode rows: one per row, plus accepted drafts.
      cached_tokens: prompt tokens that requests admitted by this step found in the prefix cache.
      used_pages: pages owned by requests after planning, counted as in `EngineStats`.
      used_rows: page rows owned by requests in each cache group, counted as in `GroupStats`.
      drafted_tokens, accepted_tokens: verified drafts, and accepted drafts.
      launch_s: host time to plan and launch the step in seconds, without compilation.
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
    """Page pool of one cache group. A page row holds one KV head if heads have different windows; otherwise all heads.

    Attributes:
      layers: indices of the group's layers, which have equal windows.
      num_heads: page rows per page.
      num_rows: page rows of the pools of all data ranks.
      used_rows, peak_rows: page rows owned by requests, now and at the maximum.
    """

    layers: tuple[int, ...]
    num_heads: int
    num_rows: int
    used_rows: int
    peak_rows: int


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over all steps. The time of a mixed step is divided in proportion to its prefill and decode tokens.

    Attributes:
      steps: number of steps.
      prefill_tokens, decode_tokens: as in `StepRecord`.
      prefill_s, decode_s: time of prefill and decode in seconds.
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
        """Return the sums with one more step. A step without tokens counts as decode. It occurs with drafts, if all
        its requests had ended in earlier steps."""
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
    """Totals since the engine was made. Times exclude compilation, which is reported separately.

    Attributes:
      steps: records of the newest `EngineConfig.history` steps.
      prefill_tokens, decode_tokens: as in `StepRecord`.
      prefill_tokens_per_s, decode_tokens_per_s: tokens per second of step time. The time of a mixed step is divided in
        proportion to its tokens.
      prefix_hit_rate: share of the looked-up prompt tokens that the prefix cache had at first admission; 0 without
        look-ups.
      used_pages, peak_pages, num_pages: pages owned by requests now and at the maximum, and all pages, summed over data
        ranks. If layers or heads hold different numbers of tokens, their memory is converted to pages of all layers and
        rounded up.
      preemptions: number of preemptions.
      compilations, compile_s: number of compiled step shapes, and compile time in seconds.
      cache_bytes: bytes of all layers' caches and of the state of speculation, on each device.
      groups: statistics of every cache group.
      num_steps: number of all steps.
      drafted_tokens, accepted_tokens: verified drafts, and accepted drafts.
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
