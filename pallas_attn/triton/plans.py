"""Following a `DecodePlan`: arrays that programs read, and where a split ends."""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from pallas_attn.types import DecodePlan


def plan_arrays(plan: DecodePlan) -> tuple[jax.Array, ...]:
    """Operands of a kernel that follows the plan: per-row arrays in plan order, and the start of each program."""
    return (
        *(plan.row_order, plan.sink_pages, plan.first_page, plan.num_pages, plan.next_row),
        *(plan.cta_row, plan.cta_page, plan.cta_split),
    )


def num_programs(plan: DecodePlan) -> int:
    """Number of programs that share the plan's pages."""
    return plan.cta_row.shape[0] - 1


@triton.jit
def split_end(page, num_pages, is_last, end_page, SPLIT_PAGES: tl.constexpr):
    """Return the page (exclusive) at which the split of a row that starts at `page` ends.

    Args:
      num_pages: number of visible pages of the row.
      is_last: whether this is the program's last row; the program then ends at `end_page`.
      SPLIT_PAGES: pages per split in a plan with splits of fixed size; 0 otherwise.
    """
    stop = tl.where(is_last, tl.minimum(end_page, num_pages), num_pages)
    if SPLIT_PAGES:
        stop = tl.minimum(stop, (page // SPLIT_PAGES + 1) * SPLIT_PAGES)
    return stop
