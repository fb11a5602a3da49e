"""Token masks of a step, which the host computes with the token filters of requests (`TokenFilter`).

A mask has one bit per token of the vocabulary, in 32-bit words. The mask of a token depends on all earlier tokens of
the request. Therefore the host computes the masks of a step after it has read the tokens of the previous step.

With drafts, a decode row has Q = 1 + d inputs: input 0 is its newest token, and input j + 1 is draft j. It has one mask
per input, for the token after the input. The mask of an input depends on the drafts before it on its branch. A draft
that the mask before it excludes, or that ends the request, is never followed by an accepted token. The masks after this
draft are arbitrary, and the token filter is not called for them.

The masks of input j of all rows are computed together, so that filters which support it (`BatchTokenFilter`) use
several CPU cores.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32, UInt32

from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.step.plan import ScheduledRow, StepPlan
from pallas_attn.models.engine.token_filter import FilterCall, compute_masks

type FilterErrors = list[tuple[Request, Exception]]
"""Requests whose token filter raised an exception or returned no mask, and the exceptions."""


def has_masks(plans: Sequence[StepPlan | None]) -> bool:
    """Whether a row of a step needs a token mask."""
    return any(row.request.token_filter is not None for plan in plans if plan for row in plan.sampling_rows)


def needs_drafts(plans: Sequence[StepPlan | None]) -> bool:
    """Whether a row of a step needs a token mask and has drafts."""
    return any(row.request.token_filter is not None and row.num_drafts for plan in plans if plan for row in plan.decode)


def step_masks(
    plans: Sequence[StepPlan | None],
    bucket: Bucket,
    shape: tuple[int, int],
    drafts: Int32[np.ndarray, "rows d2"] | None,
    eos_token_ids: Collection[int],
) -> tuple[UInt32[np.ndarray, "n W"], FilterErrors]:
    """Compute the masks of a step. The host has read the tokens of all earlier steps.

    Args:
      plans: plan of each data rank; None for a rank without rows.
      bucket: padded shape of the step.
      shape: shape of the masks: Q masks of each decode row, then one of each prefill row, for each data rank.
      drafts: drafts and parents of all decode rows, as `Unsampled.for_host`; None if no row needs them.
      eos_token_ids: end-of-sequence tokens of the model.

    Returns:
      The masks, 0 for rows without a token filter; and the failures of token filters.
    """
    masks, errors = np.zeros(shape, np.uint32), list[tuple[Request, Exception]]()
    of_ranks = masks.reshape(len(plans), -1, shape[1])
    queries, rows = 1 + bucket.num_drafts, list[_MaskedRow]()
    for rank, plan in enumerate(plans):
        if plan is None:
            continue
        for i, row in enumerate(plan.decode):
            of_row = None if drafts is None else drafts[rank * bucket.decode_rows + i]
            rows += _MaskedRow.of(row, of_ranks[rank, i * queries : (i + 1) * queries], of_row)
        for i, row in enumerate(plan.prefill, bucket.decode_rows * queries):
            rows += _MaskedRow.of(row, of_ranks[rank, i : i + 1], None)
    for j in range(queries):  # the masks of input j of all rows together: they need the masks of earlier inputs
        due = [row for row in rows if row.move_to(j, eos_token_ids)]
        calls = [FilterCall(row.request.token_filter, row.paths[j] or ()) for row in due]
        for row, mask in zip(due, compute_masks(calls), strict=True):
            error = mask if isinstance(mask, Exception) else _error_of(mask, shape[1])
            if error is None:
                row.masks[j] = np.uint32(2**32 - 1) if mask is None else mask
            else:
                row.has_failed = True
                errors.append((row.request, error))
    return masks, errors


@dataclass
class _MaskedRow:
    """A row with a token filter.

    Attributes:
      request: request of the row.
      masks: uint32 [Q, W], masks of the inputs of the row.
      drafts: (token, parent) of each draft. Draft j has the parent -1 if it follows the newest token, or i < j if it
        follows draft i.
      paths: output tokens up to each input; None if the masks after the input are arbitrary.
      has_failed: whether the token filter has failed.
    """

    request: Request
    masks: UInt32[np.ndarray, "Q W"]
    drafts: list[list[int]]
    paths: list[list[int] | None] = field(default_factory=list)
    has_failed: bool = False

    @staticmethod
    def of(
        row: ScheduledRow, masks: UInt32[np.ndarray, "Q W"], drafts: Int32[np.ndarray, "d2"] | None
    ) -> tuple[_MaskedRow, ...]:
        """Return the row, or nothing if it needs no mask."""
        if row.request.token_filter is None or not row.samples or row.request.is_finished:
            return ()
        return (_MaskedRow(row.request, masks, [] if drafts is None else drafts.reshape(2, -1).T.tolist()),)

    def move_to(self, j: int, eos_token_ids: Collection[int]) -> bool:
        """Append the path of input j. Return whether the mask after this input is needed."""
        if self.has_failed or j > len(self.drafts):
            return False
        if j == 0:
            self.paths.append(self.request.output_ids)
            return True
        token, parent = self.drafts[j - 1]
        before, num_tokens = self.paths[parent + 1], 32 * self.masks.shape[1]
        is_allowed = 0 <= token < num_tokens and self.masks[parent + 1, token // 32] >> (token % 32) & 1
        is_needed = before is not None and is_allowed and not self.request.ends_with(token, eos_token_ids)
        self.paths.append([*before, token] if before is not None and is_needed else None)
        return bool(is_needed)


def _error_of(mask: object, num_words: int) -> ValueError | None:
    """Return the error of a result of a token filter that is neither None nor a mask uint32 [num_words]."""
    found = getattr(mask, "dtype", None), getattr(mask, "shape", None)
    if mask is None or found == (np.uint32, (num_words,)):
        return None
    got = reprlib.repr(mask) if found[1] is None else f"{found[0]} {[*found[1]]}"
    return ValueError(f"token_filter: expected masks uint32 [{num_words}], got {got}")
