"""Arrays that kernels which follow a `DecodePlan` take, and the memory for what they leave to be merged."""

from __future__ import annotations

import jax

from pallas_attn.types import DecodePlan


def followed(plan: DecodePlan) -> tuple[jax.Array, ...]:
    """Arrays that a program follows: rows by their place in the plan's order, and where each program starts."""
    return (
        *(plan.row_order, plan.sink_pages, plan.first_page, plan.num_pages, plan.next_row),
        *(plan.cta_row, plan.cta_page, plan.cta_split),
    )


def num_programs(plan: DecodePlan) -> int:
    """Programs that share the plan's pages."""
    return plan.cta_row.shape[0] - 1
