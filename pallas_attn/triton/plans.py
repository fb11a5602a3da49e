"""How a decode kernel reads a `DecodePlan`: the arrays that it receives, and where a split ends.

A plan assigns the visible pages of all rows to CTAs; a row is one KV head of one sequence. In Triton, one program
processes the pages of one CTA of the plan for a block of query rows.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from pallas_attn.types import DecodePlan


def plan_arrays(plan: DecodePlan) -> tuple[jax.Array, ...]:
    """Return the operands of a decode kernel: five int32 [rows] arrays, in the plan's order of rows, and three int32
    [CTAs + 1] arrays with the start of each CTA.
    """
    return (
        *(plan.row_order, plan.sink_pages, plan.first_page, plan.num_pages, plan.next_row),
        *(plan.cta_row, plan.cta_page, plan.cta_split),
    )


def num_programs(plan: DecodePlan) -> int:
    """Return the number of CTAs of the plan."""
    return plan.cta_row.shape[0] - 1


@triton.jit
def split_end(page, num_pages, is_last, end_page, SPLIT_PAGES: tl.constexpr):
    """Return where the split that starts at `page` ends: one past its last page.

    A split ends where the row ends, where the CTA's pages end, or at a multiple of SPLIT_PAGES. All page numbers count
    the visible pages of the row.

    Args:
      num_pages: number of visible pages of the row.
      is_last: whether the row is the last row of the CTA.
      end_page: one past the CTA's last page in its last row.
      SPLIT_PAGES: pages per split in `fixed` mode; 0 in `balanced` mode.
    """
    stop = tl.where(is_last, tl.minimum(end_page, num_pages), num_pages)
    if SPLIT_PAGES:
        stop = tl.minimum(stop, (page // SPLIT_PAGES + 1) * SPLIT_PAGES)
    return stop
