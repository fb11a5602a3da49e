"""Results of a launched step, on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Array, Float, Int32

from models.engine.config import Bucket
from models.engine.speculation.step import read_tokens
from models.engine.step.plan import RowTokens, StepPlan


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Results of a launched step, on the device.

    Attributes:
      plans: the plan of each data rank; None for a rank without rows.
      tokens: int32 [ranks · n], sampled tokens of each rank: decode rows of the bucket, then prefill rows. NONFINITE
        where logits were not finite.
      bucket: the bucket that the step was padded to.
      logits: float32 [ranks · prefill tokens, V] if the bucket has all_logits; else None.
      speculates: whether `tokens` has the format of `speculation.step`.
      read: function that waits for tokens or logits and copies them to the host.
    """

    plans: tuple[StepPlan | None, ...]
    tokens: Int32[Array, "n"]
    bucket: Bucket
    logits: Float[Array, "tokens V"] | None
    speculates: bool = False
    read: Callable[[Array], np.ndarray] = np.asarray

    def sampled(self) -> list[RowTokens]:
        """Wait for the device and return the tokens of the plans' `sampling_rows`, rank by rank."""
        of_ranks = self.read(self.tokens).reshape(len(self.plans), -1)
        ranks = zip(self.plans, of_ranks, strict=True)
        return [row for plan, tokens in ranks if plan is not None for row in self._sampled_by(plan, tokens)]

    def _sampled_by(self, plan: StepPlan, tokens: Int32[np.ndarray, "n"]) -> list[RowTokens]:
        num_decode = len(plan.decode)
        if self.speculates:
            decode, prefill = read_tokens(tokens, self.bucket, num_decode)
        else:
            each = [RowTokens([token]) for token in tokens.tolist()]
            decode, prefill = each[:num_decode], each[self.bucket.decode_rows :]
        return [*decode, *(prefill[i] for i, row in enumerate(plan.prefill) if row.samples)]
