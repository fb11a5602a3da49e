"""Tokens and logits of a launched step, on the device until the host reads them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.logprobs import read_logprobs
from pallas_attn.models.engine.request import Request, TokenLogprobs
from pallas_attn.models.engine.speculation.step import read_tokens
from pallas_attn.models.engine.step.plan import RowTokens, StepPlan


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Tokens and logits of a launched step, on the device.

    A data rank is a group of devices with its own requests. All data ranks run the same step together. The step is
    padded to a bucket, the shape for which its program was compiled.

    Attributes:
      plans: the plan of each data rank; None for a rank without rows.
      tokens: int32 [ranks · n], sampled tokens of each data rank, NONFINITE where no token could be chosen. If
        `speculates` is False, the tokens of all decode rows of the bucket, then of all prefill rows, including padding.
        Otherwise in the format that `speculation.step.read_tokens` describes.
      bucket: the bucket of the step.
      logits: float32 [ranks · prefill tokens, V]; None if `bucket.all_logits` is False.
      speculates: whether the step's program verifies drafts.
      read: function that waits until an array is computed and copies it to the host.
      logprobs: int32 [ranks · m, words], log probabilities in the format of `pack_logprobs`; None if no request wants
        them. m is the number of sampled tokens, of which a decode row has 1 + num_drafts, plus the number of prefill
        tokens of the bucket.
    """

    plans: tuple[StepPlan | None, ...]
    tokens: Int32[Array, "n"]
    bucket: Bucket
    logits: Float[Array, "tokens V"] | None
    speculates: bool = False
    read: Callable[[Array], np.ndarray] = np.asarray
    logprobs: Int32[Array, "m words"] | None = None

    def sampled(self) -> list[RowTokens]:
        """Wait until the step has ended. Return the tokens of each row of `StepPlan.sampling_rows`, rank by rank."""
        of_ranks = self.read(self.tokens).reshape(len(self.plans), -1)
        rows = []
        for plan, tokens, logprobs in zip(self.plans, of_ranks, self._logprobs, strict=True):
            if plan is not None:
                rows += self._with_logprobs(plan, self._sampled_by(plan, tokens), logprobs)
        return rows

    def prompt_logprobs(self) -> list[tuple[Request, int, list[TokenLogprobs]]]:
        """Wait until the step has ended. Return the log probabilities of prompt tokens that this step computed: the
        request, the position of the token before the first of them, and the log probabilities."""
        each = []
        for plan, logprobs in zip(self.plans, self._logprobs, strict=True):
            if plan is None or logprobs is None or not plan.wants_prompt_logprobs:
                continue
            begin = len(logprobs) - self.bucket.prefill_tokens
            for row in plan.prefill:
                ids = row.request.prompt_ids[row.start + 1 : row.start + 1 + row.num_scored]
                if ids:
                    count = row.request.params.prompt_logprobs or 0
                    scored = read_logprobs(logprobs[begin : begin + len(ids)], ids, count)
                    each.append((row.request, row.start, scored))
                begin += row.num_tokens
        return each

    @functools.cached_property
    def _logprobs(self) -> list[np.ndarray] | list[None]:
        """Log probabilities of each data rank."""
        return (
            [None] * len(self.plans) if self.logprobs is None else np.split(self.read(self.logprobs), len(self.plans))
        )

    def _sampled_by(self, plan: StepPlan, tokens: Int32[np.ndarray, "n"]) -> list[RowTokens]:
        """Return the tokens of the sampling rows of one data rank."""
        num_decode = len(plan.decode)
        if self.speculates:
            decode, prefill = read_tokens(tokens, self.bucket, num_decode)
        else:
            each = [RowTokens([token]) for token in tokens.tolist()]
            decode, prefill = each[:num_decode], each[self.bucket.decode_rows :]
        return [*decode, *(prefill[i] for i, row in enumerate(plan.prefill) if row.samples)]

    def _with_logprobs(
        self, plan: StepPlan, rows: Sequence[RowTokens], packed: Int32[np.ndarray, "n words"] | None
    ) -> Sequence[RowTokens]:
        """Add the log probabilities of a data rank to the rows whose requests want them."""
        if packed is None:
            return rows
        width = 1 + self.bucket.num_drafts if self.speculates else 1
        first_prefill = self.bucket.decode_rows * width
        begins = [i * width for i in range(len(plan.decode))]
        begins += [first_prefill + i for i, row in enumerate(plan.prefill) if row.samples]
        each = []
        for row, got, begin in zip(plan.sampling_rows, rows, begins, strict=True):
            count = row.request.params.logprobs
            if count is not None:
                got = got._replace(logprobs=read_logprobs(packed[begin : begin + len(got.tokens)], got.tokens, count))
            each.append(got)
        return each
