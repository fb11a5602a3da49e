"""Tokens and logits of a launched step, on the device until the host reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.speculation.step import read_tokens
from pallas_attn.models.engine.step.plan import RowTokens, StepPlan


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Tokens and logits of a launched step, on the device.

    A data rank is a group of devices with its own requests. All data ranks run the same step together. The step is
    padded to a bucket, the shape for which its program was compiled.

    Attributes:
      plans: the plan of each data rank; None for a rank without rows.
      tokens: int32 [ranks · n], sampled tokens of each data rank, NONFINITE where logits were NaN or infinite. If
        `speculates` is False, the tokens of all decode rows of the bucket, then of all prefill rows, including padding.
        Otherwise in the format that `speculation.step.read_tokens` describes.
      bucket: the bucket of the step.
      logits: float32 [ranks · prefill tokens, V]; None if `bucket.all_logits` is False.
      speculates: whether the step's program verifies drafts.
      read: function that waits until an array is computed and copies it to the host.
    """

    plans: tuple[StepPlan | None, ...]
    tokens: Int32[Array, "n"]
    bucket: Bucket
    logits: Float[Array, "tokens V"] | None
    speculates: bool = False
    read: Callable[[Array], np.ndarray] = np.asarray

    def sampled(self) -> list[RowTokens]:
        """Wait until the step has ended. Return the tokens of each row of `StepPlan.sampling_rows`, rank by rank."""
        of_ranks = self.read(self.tokens).reshape(len(self.plans), -1)
        ranks = zip(self.plans, of_ranks, strict=True)
        return [row for plan, tokens in ranks if plan is not None for row in self._sampled_by(plan, tokens)]

    def _sampled_by(self, plan: StepPlan, tokens: Int32[np.ndarray, "n"]) -> list[RowTokens]:
        """Return the tokens of the sampling rows of one data rank."""
        num_decode = len(plan.decode)
        if self.speculates:
            decode, prefill = read_tokens(tokens, self.bucket, num_decode)
        else:
            each = [RowTokens([token]) for token in tokens.tolist()]
            decode, prefill = each[:num_decode], each[self.bucket.decode_rows :]
        return [*decode, *(prefill[i] for i, row in enumerate(plan.prefill) if row.samples)]
