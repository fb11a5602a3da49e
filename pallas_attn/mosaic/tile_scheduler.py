"""A program's share of a plan: pieces of rows, one after the other; and of the rows that are merged then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_attn.mosaic import basics
from pallas_attn.types import DecodePlan

MERGE_PROGRAMS = 3
"""Programs of a merge on a multiprocessor; each has up to 64 KB of states on their way. Where outputs are so wide that
fewer fit, the others wait.
"""


class Span(NamedTuple):
    """Table entries `start` to `stop` of a row.

    Attributes:
      place: of the row in the plan.
      number: of its state, where the row is in several pieces.
      is_all: whether it is all of the row.
    """

    row: Any
    place: Any
    start: Any
    stop: Any
    number: Any
    is_all: Any


def for_each_span(plan: DecodePlan, work: Callable[[Span, Any], Any], carry: Any = ()) -> None:
    """Works off the spans of this program, the index of axis "program": carry = work(span, carry) for each."""
    program = lax.axis_index("program")
    end_place, end_page = plan.cta_row[program + 1], plan.cta_page[program + 1]

    def step(at: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        place, page, number, carry = at
        row, num_pages = plan.row_order[place], plan.num_pages[place]
        stop = jnp.where(place == end_place, end_page, num_pages)
        if plan.split_pages:
            stop = jnp.minimum(stop, (lax.div(page, plan.split_pages) + 1) * plan.split_pages)
        done = stop == num_pages
        carry = work(Span(row, place, page, stop, number, (page == 0) & done), carry)
        return jnp.where(done, plan.next_row[place], place), jnp.where(done, 0, stop), number + 1, carry

    def is_ours(at: tuple[Any, Any, Any, Any]) -> Any:
        place, page, *_ = at
        return (place < end_place) | ((place == end_place) & (page < end_page))

    begin = plan.cta_row[program], plan.cta_page[program], plan.cta_split[program]
    lax.while_loop(is_ours, step, (*begin, carry))


def merge_programs(items: int) -> int:
    """How many programs merge at most so many parts of rows: about as many as run at a time. Where nothing is to be
    merged, more would only have to be started.
    """
    return min(items, MERGE_PROGRAMS * basics.multiprocessors())


def for_each_merged(plan: DecodePlan, parts: int, work: Callable[[Any, Any], None]) -> None:
    """Calls work(place, part) for this program's share, by its index of axis "program", of the rows that are not in one
    piece, so many parts of each.
    """
    rows, programs = plan.row_order.shape[0], lax.axis_size("program")

    def place(item: Any) -> Any:
        return plan.merged_rows[jnp.minimum(lax.div(item, parts), rows)]

    def step(at: tuple[Any, Any]) -> tuple[Any, Any]:
        item, row_place = at
        work(row_place, lax.rem(item, parts))
        return item + programs, place(item + programs)

    program = lax.axis_index("program")
    lax.while_loop(lambda at: at[1] < rows, step, (program, place(program)))


def num_states(plan: DecodePlan, rows: int, table_pages: int) -> int:
    """How many states there can be of pieces, of rows with so many table entries."""
    return rows + (rows * pl.cdiv(table_pages, plan.split_pages) if plan.split_pages else plan.cta_row.shape[0] - 1)
