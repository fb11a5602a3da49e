"""Outputs of requests, and statistics of the engine's steps.

A page row is the unit of cache allocation: one page of one KV head if the heads of a layer have different windows,
otherwise one page of all heads. A cache group is a set of layers with equal windows, which share a page pool. A data
rank is a group of devices with its own requests and page pools; without data parallelism there is one. A draft is a
proposed token that a step verifies (speculation). A mixed step has both decode rows and prefill rows. A request is
admitted when it starts to run, and again after each preemption.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallas_attn.models.engine.logprob_list import TokenLogprobs
from pallas_attn.models.engine.request import FinishReason

type RequestId = int | str


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """State and generated tokens of a running or finished request. Times exclude compilation.

    Attributes:
      request_id: the id given to `add_request`.
      prompt_tokens: number of prompt tokens.
      cached_tokens: prompt tokens found in the prefix cache when the request was first admitted; 0 before.
      output_ids: generated tokens.
      finish_reason: "stop", "length", "abort", "refused", "nonfinite" or "filter_error", as in `Request.finish_reason`;
        None while the request waits or runs.
      refusal: why the request was refused; None if it was accepted.
      ttft_s: seconds from `add_request` to the first token; None before the first token.
      itl_s: seconds between consecutive tokens; 0 between tokens of the same step.
      drafted: entry i is the number of steps that verified a draft i + 1 positions after the newest token.
      accepted: entry i is the number of steps that accepted a draft i + 1 positions after the newest token.
      logprobs: log probabilities of each of `output_ids`; None if `SamplingParams.logprobs` is None.
      prompt_logprobs: log probabilities of each prompt token that has been computed: None for the first token, which
        follows no token, then one entry per token. None if `SamplingParams.prompt_logprobs` is None.
      queue_s: seconds from `add_request` to the planning of the first step with tokens of the request; None before.
      error: exception of the token filter if the finish reason is "filter_error"; otherwise None.
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
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    queue_s: float | None = None
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """Record of one step, made when its tokens have been read.

    Attributes:
      ended_s: time at which the tokens of the step were read, in seconds since the engine was made.
      duration_s: seconds from the end of the previous step to the end of this step. If planning of this step began
        later than the previous step ended, seconds from the start of planning.
      prefill_tokens: number of tokens computed in prefill rows.
      decode_tokens: number of tokens sampled by decode rows: one per row, plus accepted drafts.
      cached_tokens: tokens that requests admitted by this step found in the prefix cache. If a request is admitted
        again after a preemption, they include generated tokens.
      used_pages: pages owned by requests after planning, counted as in `EngineStats`.
      used_rows: page rows owned by requests in each cache group, counted as in `GroupStats`.
      drafted_tokens: number of verified drafts. If drafts form trees, several drafts for one position count once.
      accepted_tokens: number of accepted drafts.
      launch_s: host time to plan and launch the step in seconds, without compilation.
      cascade: whether the step read pages that all its sequences share once (`EngineConfig.cascade_attention`).
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
    cascade: bool = False


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Use of the page pool of one cache group. Numbers of rows are summed over data ranks.

    Attributes:
      layers: indices of the group's layers.
      num_heads: page rows per page: the number of KV heads if they have different windows, otherwise 1.
      num_rows: page rows of the pool.
      used_rows: page rows that requests own now.
      peak_rows: maximum of `used_rows` since the engine was made.
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
        """Return the sums with one more step.

        The time of a step without tokens is added to `decode_s`. With speculation such a step occurs if all its
        requests ended in steps that the host had not read when it launched this step.
        """
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
      prefix_hit_rate: share of the prompt tokens of admitted requests that were found in the prefix cache at the first
        admission; 0 without requests.
      used_pages: number of pages that requests own now, summed over data ranks. A page counts as one page of every
        layer. If requests own different numbers of pages in different layers or heads, their memory is converted to
        pages of all layers and rounded up.
      peak_pages: maximum of `used_pages` since the engine was made.
      num_pages: number of all pages, summed over data ranks.
      preemptions: number of preemptions.
      compilations, compile_s: number of compiled step shapes, and compile time in seconds.
      cache_bytes: bytes of all layers' caches and of the state of speculation, on each device.
      groups: statistics of every cache group.
      num_steps: number of all steps.
      drafted_tokens, accepted_tokens: as in `StepRecord`.
      pending_compilations: number of step shapes that are compiled in the background and that steps do not use yet.
      failed_compilations: number of step shapes whose compilation in the background failed.
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
    pending_compilations: int = 0
    failed_compilations: int = 0
