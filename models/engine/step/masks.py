"""Token masks of a step, which the host computes with the token filters of requests (`TokenFilter`).

A mask has one bit per token of the vocabulary, in 32-bit words. The mask of a token depends on all earlier tokens of
the request. Therefore the host computes the masks of a step after it has read the tokens of the previous step.

With drafts, a decode row has Q = 1 + d inputs: input 0 is its newest token, and input j + 1 is draft j. It has one mask
per input, for the token after the input. The mask of an input depends on the drafts before it on its branch. A draft
that the mask before it excludes, or that ends the request, is never followed by an accepted token. The masks after this
draft are arbitrary, and the token filter is not called for them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Int32, UInt32

from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.step.plan import ScheduledRow, StepPlan

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
    queries = 1 + bucket.num_drafts
    for rank, plan in enumerate(plans):
        if plan is None:
            continue
        for i, row in enumerate(plan.decode):
            of_row = None if drafts is None else drafts[rank * bucket.decode_rows + i]
            _fill(of_ranks[rank, i * queries : (i + 1) * queries], row, of_row, eos_token_ids, errors)
        for i, row in enumerate(plan.prefill, bucket.decode_rows * queries):
            _fill(of_ranks[rank, i : i + 1], row, None, eos_token_ids, errors)
    return masks, errors


def _fill(
    masks: UInt32[np.ndarray, "Q W"],
    row: ScheduledRow,
    drafts: Int32[np.ndarray, "d2"] | None,
    eos_token_ids: Collection[int],
    errors: FilterErrors,
) -> None:
    """Write the masks of a row. Append to `errors` if its token filter fails."""
    request = row.request
    if request.token_filter is None or not row.samples or request.is_finished:
        return
    paths: list[list[int] | None] = [request.output_ids]
    try:
        masks[0] = _mask_after(request, request.output_ids, masks.shape[1])
        for j, (token, parent) in enumerate(() if drafts is None else drafts.reshape(2, -1).T.tolist(), 1):
            before = paths[parent + 1]
            is_allowed = 0 <= token < 32 * masks.shape[1] and masks[parent + 1, token // 32] >> (token % 32) & 1
            if before is None or not is_allowed or request.ends_with(token, eos_token_ids):
                paths.append(None)
            else:
                paths.append([*before, token])
                masks[j] = _mask_after(request, [*before, token], masks.shape[1])
    except _FilterFailed as failure:
        errors.append((request, failure.error))


class _FilterFailed(Exception):
    """A token filter raised `error`, or `error` says what is wrong with its mask."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def _mask_after(request: Request, output_ids: Sequence[int], num_words: int) -> UInt32[np.ndarray, "W"] | np.uint32:
    """Return the mask of the token after `output_ids`, or one word that all words of the mask are equal to.

    Raises:
      _FilterFailed: the token filter raised an exception, or returned an array of another shape or dtype.
    """
    try:
        mask = None if request.token_filter is None else request.token_filter.allowed(output_ids)
    except Exception as error:  # an error of the user's filter ends its request, and nothing else
        raise _FilterFailed(error) from error
    if mask is None:
        return np.uint32(2**32 - 1)
    found = getattr(mask, "dtype", None), getattr(mask, "shape", None)
    if found != (np.uint32, (num_words,)):
        got = reprlib.repr(mask) if found[1] is None else f"{found[0]} {[*found[1]]}"
        raise _FilterFailed(ValueError(f"token_filter: expected masks uint32 [{num_words}], got {got}"))
    return mask
