"""Token masks of a step: one per input of a row, from token filters and the paths of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pallas_attn.models.engine import SamplingParams
from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.step.masks import has_masks, needs_drafts, step_masks
from pallas_attn.models.engine.step.plan import ScheduledRow, StepPlan
from pallas_attn.models.engine.token_filter import FilterCall, compute_masks

ALL = 2**32 - 1
EOS = 30


class Rising:
    """Token filter that allows tokens above the last one, and raises an exception after token 20."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        self.seen.append([*output_ids])
        if not output_ids:
            return None
        if output_ids[-1] == 20:
            raise KeyError("token 20")
        return mask_above(output_ids[-1])


class RisingTogether(Rising):
    """The same filter, whose class computes many masks in one call."""

    batches: list[list[list[int]]]

    @classmethod
    def allowed_batch(cls, calls: Sequence[FilterCall]) -> list[np.ndarray | Exception | None]:
        cls.batches.append([[*output_ids] for _, output_ids in calls])
        results: list[np.ndarray | Exception | None] = []
        for of_call, output_ids in calls:
            try:
                results.append(of_call.allowed(output_ids))
            except KeyError as error:
                results.append(error)
        return results


class Broken:
    """Token filter whose batch call has the wrong result."""

    def allowed(self, output_ids: Sequence[int]) -> None:
        pass

    @classmethod
    def allowed_batch(cls, calls: Sequence[FilterCall]) -> list[None]:
        if not calls[0].output_ids:
            raise KeyError("no tokens")
        return [None] * (len(calls) - 1)


def mask_above(token: int) -> np.ndarray:
    return np.array([ALL & ~((1 << token + 1) - 1)], np.uint32)


def row(
    token_filter: Rising | None, output: Sequence[int], num_drafts: int = 0, *, samples: bool = True
) -> ScheduledRow:
    request = Request(len(output), (1, 2), SamplingParams(), token_filter=token_filter)
    request.token_ids += output
    return ScheduledRow(request, 0, len(request.token_ids) - 1, 1, samples, num_drafts)


def masks_of(decode: Sequence[ScheduledRow], drafts: list[list[int]] | None, num_drafts: int, rows: int = 2):
    plan = StepPlan(tuple(decode), (), ())
    shape = rows * (1 + num_drafts), 1
    of_host = None if drafts is None else np.array(drafts, np.int32)
    masks, errors = step_masks([plan], Bucket(rows, 0, num_drafts=num_drafts), shape, of_host, [EOS])
    return masks.reshape(rows, 1 + num_drafts), errors


def test_each_draft_of_a_tree_has_the_mask_of_its_branch():
    rising = Rising()
    drafts = [[5, 7, 6, 9, -1, -1, 0, 1], [0] * 8]  # 5 -> 6 and 7 -> 9
    masks, errors = masks_of([row(rising, [3], 4)], drafts, 4)
    assert masks[0].tolist() == [int(mask_above(token)[0]) for token in (3, 5, 7, 6, 9)]
    assert rising.seen == [[3], [3, 5], [3, 7], [3, 5, 6], [3, 7, 9]]
    assert not masks[1].any()
    assert errors == []


def test_filter_is_not_called_after_excluded_drafts_and_ends():
    rising = Rising()
    masks, errors = masks_of([row(rising, [3], 3)], [[8, 4, 9, -1, 0, 1], [0] * 6], 3)  # 4 is excluded after 8
    assert rising.seen == [[3], [3, 8]]
    assert not masks[0, 2:].any()
    rising.seen.clear()
    masks_of([row(rising, [3], 3)], [[EOS, 31, -1, -1, 0, 1], [0] * 6], 3)
    assert rising.seen == [[3]]
    rising.seen.clear()
    masks_of([row(rising, [3], 3)], [[-1, -1, -1, -1, 0, 1], [0] * 6], 3)  # the proposer has no draft
    assert rising.seen == [[3]]
    assert errors == []


def test_failure_is_recorded_and_other_rows_get_their_masks():
    failing, other = row(Rising(), [20], 1), row(Rising(), [], 1)
    masks, ((request, error),) = masks_of([failing, other], [[21, -1], [5, -1]], 1)
    assert (request, str(error)) == (failing.request, "'token 20'")
    assert masks[1].tolist() == [ALL, int(mask_above(5)[0])]


def test_rows_without_filter_or_without_sample_need_no_mask():
    assert not has_masks([StepPlan((row(None, [3], 2),), (), ()), None])
    assert not has_masks([StepPlan((), (row(Rising(), [], samples=False),), ())])
    filtered = StepPlan((row(Rising(), [3]),), (), ())
    assert has_masks([None, filtered])
    assert not needs_drafts([filtered])
    assert needs_drafts([StepPlan((row(Rising(), [3], 1),), (), ())])


def test_masks_of_each_input_of_all_rows_are_computed_together():
    RisingTogether.batches = []
    filters = [RisingTogether() for _ in range(4)]
    rows = [row(token_filter, [token], 2) for token_filter, token in zip(filters, [3, 20, 9, 4], strict=True)]
    drafts = [[5, 7, -1, 0], [21, 22, -1, 0], [8, 9, -1, -1], [6, 9, -1, -1]]  # drafts of row 2 are excluded after 9
    together = masks_of(rows, drafts, 2, rows=4)
    assert RisingTogether.batches == [[[3], [20], [9], [4]], [[3, 5], [4, 6]], [[3, 5, 7], [4, 9]]]
    one_by_one = masks_of([row(Rising(), row_.request.output_ids, 2) for row_ in rows], drafts, 2, rows=4)
    np.testing.assert_array_equal(together[0], one_by_one[0])
    ((request, error),) = together[1]
    assert (request, str(error)) == (rows[1].request, "'token 20'")


def test_failure_of_a_batch_call_ends_its_calls_only():
    RisingTogether.batches = []
    calls = [FilterCall(Broken(), []), FilterCall(Rising(), [20]), FilterCall(RisingTogether(), [5])] * 2
    first, second, third, *others = compute_masks(calls)
    assert [str(first), str(second)] == ["'no tokens'", "'token 20'"]
    np.testing.assert_array_equal(third, mask_above(5))
    assert list(map(str, others)) == [str(first), str(second), str(third)]
    assert RisingTogether.batches == [[[5], [5]]]
    results = compute_masks([FilterCall(Broken(), [1])] * 3)
    message = "token_filter: expected 3 results of Broken.allowed_batch, got 2"
    assert [(type(result), str(result)) for result in results] == [(ValueError, message)] * 3
