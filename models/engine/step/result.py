"""Tokens and logits of a launched step, on the device until the host reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.logprob_list import LogprobList
from pallas_attn.models.engine.logprobs import read_logprobs
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.speculation.step import Drafts, read_tokens
from pallas_attn.models.engine.step.plain import StepOutputs
from pallas_attn.models.engine.step.plan import RowTokens, StepPlan


class Unsampled(NamedTuple):
    """Arguments of the program that samples.

    Attributes:
      outputs: results of the forward program, on the device.
      drafts: drafts of the step, on the device; None without drafts.
      for_host: int32 [ranks · Bd, 2 · d], the drafts of each decode row and their parents, as
        `speculation.step.propose` returns them for the host; None without drafts.
    """

    outputs: StepOutputs
    drafts: Drafts | None
    for_host: Int32[Array, "rows d2"] | None


@dataclasses.dataclass(eq=False)
class StepResult:
    """Tokens and logits of a launched step, on the device.

    A data rank is a group of devices with its own requests. All data ranks run the same step together. The step is
    padded to a bucket, the shape for which its programs were compiled.

    Attributes:
      plans: the plan of each data rank; None for a rank without rows.
      bucket: the bucket of the step.
      logits: float32 [ranks · prefill tokens, V]; None if `bucket.all_logits` is False.
      prompt_words: int32 [ranks · prefill tokens, words], log probabilities of the prompt token after each prefill
        token, in the format of `pack_logprobs`; None if no request wants them.
      speculates: whether the step verifies drafts.
      read: function that waits until an array is computed and copies it to the host.
      unsampled: arguments of the program that samples; None if this program was launched.
      tokens: int32 [ranks · n], sampled tokens of each data rank, NONFINITE where no token could be chosen. If
        `speculates` is False, the tokens of all decode rows of the bucket, then of all prefill rows, including padding.
        Otherwise in the format that `speculation.step.read_tokens` describes. None before the tokens are sampled.
      logprobs: int32 [ranks · m, words], log probabilities of m sampled tokens in the format of `pack_logprobs`. A
        decode row has 1 + num_drafts tokens. None if no request wants them.
    """

    plans: tuple[StepPlan | None, ...]
    bucket: Bucket
    logits: Float[Array, "tokens V"] | None
    prompt_words: Int32[Array, "T words"] | None = None
    speculates: bool = False
    read: Callable[[Array], np.ndarray] = np.asarray
    unsampled: Unsampled | None = None
    tokens: Int32[Array, "n"] | None = None
    logprobs: Int32[Array, "m words"] | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether the program that samples was launched."""
        return self.tokens is not None

    def sampled(self) -> list[RowTokens]:
        """Wait until the step has ended. Return the tokens of each row of `StepPlan.sampling_rows`, rank by rank.

        Raises:
          ValueError: the program that samples was not launched.
        """
        if self.tokens is None:
            raise ValueError("step: expected a step whose tokens are sampled; call `Runner.sample` first")
        of_ranks = self.read(self.tokens).reshape(len(self.plans), -1)
        rows = []
        for plan, tokens, logprobs in zip(self.plans, of_ranks, self._of_ranks(self.logprobs), strict=True):
            if plan is not None:
                rows += self._with_logprobs(plan, self._sampled_by(plan, tokens), logprobs)
        return rows

    def prompt_logprobs(self) -> list[tuple[Request, int, LogprobList]]:
        """Wait until the step has ended. Return the log probabilities of prompt tokens that this step computed: the
        request, the position of the token before the first of them, and the log probabilities."""
        each = []
        for plan, words in zip(self.plans, self._of_ranks(self.prompt_words), strict=True):
            if plan is None or words is None:
                continue
            begin = 0
            for row in plan.prefill:
                ids = row.request.prompt_ids[row.start + 1 : row.start + 1 + row.num_scored]
                if ids:
                    count = row.request.params.prompt_logprobs or 0
                    each.append((row.request, row.start, read_logprobs(words[begin : begin + len(ids)], ids, count)))
                begin += row.num_tokens
        return each

    def _of_ranks(self, words: Int32[Array, "m words"] | None) -> list[np.ndarray] | list[None]:
        """Wait for log probabilities. Return the part of each data rank."""
        return [None] * len(self.plans) if words is None else np.split(self.read(words), len(self.plans))

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
