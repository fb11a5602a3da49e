"""Work of a CTA in a decode plan: its work tiles in the attention kernel, and its items in the merge kernel.

A plan row is one KV head of one sequence. A split, also called work tile, is a range of visible pages of a plan row
that one CTA attends to. If a plan row has several splits, the attention kernel stores a partial state for each split,
and a merge kernel merges them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.mosaic.primitives import basics
from pallas_attn.types import DecodePlan

ABSENT = 2**30
"""Position of the tokens of an absent page (table entry outside the pool). It is larger than the position of every
query, so that causality hides the tokens."""

MERGE_PROGRAMS = 3
"""Number of CTAs of a merge kernel per multiprocessor. Each CTA has up to 64 KB of partial states in flight. If outputs
are so wide that fewer CTAs fit a multiprocessor, the other CTAs run later.
"""


class WorkTile(NamedTuple):
    """Consecutive visible pages of a plan row, for one CTA.

    Attributes:
      row: index of the plan row: b·Hkv + h for KV head h of sequence b.
      plan_index: index of the row in `plan.row_order`.
      start, stop: first page, and one past the last page. The plan numbers the visible pages of a row from 0.
      split: index of the split in the plan, and of its partial state if the row has several splits.
      is_whole_row: whether the work tile contains all pages of the row.
    """

    row: Any
    plan_index: Any
    start: Any
    stop: Any
    split: Any
    is_whole_row: Any


def for_each_work_tile(
    plan: DecodePlan, work: Callable[[WorkTile, Any], Any], carry: Any = (), *, counted: bool = False
) -> Any:
    """Call carry = work(tile, carry) for each work tile of this CTA, and return the last carry.

    The index of the CTA on the grid axis "program" is its index in the plan.

    Args:
      counted: whether to run a loop whose number of iterations is read from the plan, instead of a `while` loop. A
        single warp cannot run a `while` loop.
    """
    program = lax.axis_index("program")
    end_index, end_page = plan.cta_row[program + 1], plan.cta_page[program + 1]

    def step(at: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        index, page, split, carry = at
        row, num_pages = plan.row_order[index], plan.num_pages[index]
        stop = jnp.where(index == end_index, end_page, num_pages)
        if plan.split_pages:
            stop = jnp.minimum(stop, (lax.div(page, plan.split_pages) + 1) * plan.split_pages)
        row_ends = stop == num_pages
        carry = work(WorkTile(row, index, page, stop, split, (page == 0) & row_ends), carry)
        return jnp.where(row_ends, plan.next_row[index], index), jnp.where(row_ends, 0, stop), split + 1, carry

    def has_more(at: tuple[Any, Any, Any, Any]) -> Any:
        index, page, *_ = at
        return (index < end_index) | ((index == end_index) & (page < end_page))

    begin = plan.cta_row[program], plan.cta_page[program], plan.cta_split[program]
    if counted:
        splits = plan.cta_split[program + 1] - plan.cta_split[program]
        *_, carry = lax.fori_loop(0, splits, lambda _, at: step(at), (*begin, carry))
    else:
        *_, carry = lax.while_loop(has_more, step, (*begin, carry))
    return carry


def merge_programs(items: int) -> int:
    """Return the number of CTAs of a merge kernel for up to `items` slices of plan rows.

    It is at most about the number of CTAs that run at the same time, because each CTA has a start-up cost even if it
    has nothing to merge.
    """
    return min(items, MERGE_PROGRAMS * basics.multiprocessors())


class MergeItem(NamedTuple):
    """One slice of the output of a plan row, which one CTA of a merge kernel merges.

    Attributes:
      row: index of the plan row.
      first_split: index of the row's first split in the plan.
      splits: number of the row's partial states; 0 if the row sees no key.
      slice: index of the output slice.
    """

    row: Any
    first_split: Any
    splits: Any
    slice: Any


def for_each_merged(plan: DecodePlan, slices: int, work: Callable[[MergeItem], None]) -> None:
    """Call work(item) for each merge item of this CTA.

    Plan rows that do not have exactly one split are merged; each has `slices` items. The items are distributed
    cyclically to the CTAs on the grid axis "program".
    """
    rows, programs = plan.row_order.shape[0], lax.axis_size("program")

    def index_of(item: Any) -> Any:
        return plan.merged_rows[jnp.minimum(lax.div(item, slices), rows)]

    def step(at: tuple[Any, Any]) -> tuple[Any, Any]:
        item, index = at
        first_split = plan.split_indptr[index]
        splits = plan.split_indptr[index + 1] - first_split
        work(MergeItem(plan.row_order[index], first_split, splits, lax.rem(item, slices)))
        return item + programs, index_of(item + programs)

    program = lax.axis_index("program")
    lax.while_loop(lambda at: at[1] < rows, step, (program, index_of(program)))
