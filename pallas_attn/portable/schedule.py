"""Arithmetic of `plan_decode`, shared by its implementations.

Rows are laid end to end, each as long as its cost, and cut at equal distances, a share for each program. Where that is
nearly as even, groups of rows get programs of their own, so that fewer rows are cut. Positions along this line are
called offsets; a place is a row's index in the plan's order; a piece is the part of a row that one program takes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_attn.types import DecodePlan

UNEVENNESS = 16
"""Accept a schedule with fewer cuts if its largest share exceeds the mean by at most 1/16."""

MAX_SNAKE_ROWS = 256
"""Up to this many rows are sorted by length: a kernel compares each with each, in one chunk. A power of two."""


def ratio(a: Int32[Array, "*of"], b: Int32[Array, "*by"] | int) -> Int32[Array, "*quotients"]:
    """Quotient a // b of non-negative numbers, for b of a's shape or a scalar; unsigned division takes the fewest
    instructions.
    """
    unsigned = (x.astype(jnp.uint32) for x in jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))
    return lax.div(*unsigned).astype(jnp.int32)


def order_key(size: Int32[Array, "n"], number: Int32[Array, "n"], count: int) -> Int32[Array, "n"]:
    """Sort keys, descending, of up to `count` sizes: the largest size first, equal sizes by number. Whole numbers below
    2**24, which float32 holds; sizes too large for that count as equal.
    """
    return jnp.minimum(size, (1 << 24) // count - 1) * count + (count - 1 - number)


class Groups(NamedTuple):
    """Groups of rows that have programs of their own.

    Rows go to groups in snake order, the longest first, back and forth, so that all groups get about as much. The rows
    of a group are neighbours in the plan's order. Groups have equally many rows, except that some of them, the first
    ones or the last ones, may have one more.

    Attributes:
      number: number of groups, at least 1.
      programs: programs of each group.
      rows: rows of all groups together, without idle ones.
      first: number of groups that have as many rows as the first one.
      rows_of_first, rows_of_others: rows of each of those, and of each of the others.
    """

    number: Int32[Array, ""]
    programs: Int32[Array, ""]
    rows: Int32[Array, ""]
    first: Int32[Array, ""]
    rows_of_first: Int32[Array, ""]
    rows_of_others: Int32[Array, ""]

    @staticmethod
    def of(rows: Int32[Array, ""], num_programs: int) -> Groups:
        """Groups for one program each if there are more rows than programs; else of two rows each, the fewest that even
        out.
        """
        rows_per_program = jnp.maximum(ratio(rows + (num_programs - 1), num_programs), 1)
        of_each = jnp.where(rows_per_program > 1, rows_per_program, 2)
        number = jnp.maximum(ratio(rows + of_each - 1, of_each), 1)
        programs = jnp.maximum(ratio(jnp.int32(num_programs), number), 1)
        rounds = ratio(rows, number)  # every group takes a row in each
        left = rows - number * rounds  # rows of one more round, which not every group takes part in
        back = rounds & 1  # whether that round runs from the last group to the first
        first = jnp.where(back == 1, number - left, left)
        return Groups(number, programs, rows, first, rounds + 1 - back, rounds + back)

    def start(self, group: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Place of a group's first row; the number of rows for groups past the last."""
        group = jnp.minimum(group, self.number)
        others = jnp.maximum(group - self.first, 0)
        return (group - others) * self.rows_of_first + others * self.rows_of_others

    def place(self, rank: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Place of the row of this rank by length, the longest being 0. Idle rows stay last."""
        round_number = ratio(rank, self.number)
        in_round = rank - round_number * self.number
        group = jnp.where(round_number & 1 == 0, in_round, self.number - 1 - in_round)
        return jnp.where(rank < self.rows, self.start(group) + round_number, rank)

    def group(self, place: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Group of the row at a place; the last group for idle rows."""
        start_of_others = self.first * self.rows_of_first
        among_first = place < start_of_others
        into = jnp.where(among_first, place, place - start_of_others)
        size = jnp.where(among_first, jnp.maximum(self.rows_of_first, 1), jnp.maximum(self.rows_of_others, 1))
        return jnp.minimum(ratio(into, size) + jnp.where(among_first, 0, self.first), self.number - 1)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Costs of rows, and offsets at which they are cut.

    In `balanced` mode a row costs its pages plus a constant overhead, and is cut where a program's share starts, except
    within the overhead and in the last few pages. Of three schedules, that with the fewest cuts is taken which is even
    enough: programs of its own for each row, equal shares of the rows of each group, or equal shares of all rows. In
    `fixed` mode rows are cut at multiples of `split_pages`, whichever programs take them, and each piece costs 1.

    Attributes:
      overhead: the constant, in pages; 0 in `fixed` mode.
      cut: pages that a program may take beyond an equal share if no program then takes parts of two rows; 0 in `fixed`
        mode.
      least: least pages of a part, where rows have programs of their own.
      split_pages: pages of a piece; 0 in `balanced` mode.
    """

    overhead: int
    cut: int
    least: int
    split_pages: int

    @property
    def tail(self) -> int:
        """Pages at the end of a row that are never cut off: a start costs more than they do."""
        return self.overhead // 2

    def uses_snake_order(self, num_rows: int) -> bool:
        """Whether so many rows are sorted by length and go to groups in snake order; else they keep their order."""
        return not self.split_pages and num_rows <= MAX_SNAKE_ROWS

    def length_key(self, num_pages: Int32[Array, "rows"], row: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """Sort keys of rows, descending: the longest first, equally long ones by index."""
        return order_key(num_pages, row, MAX_SNAKE_ROWS)

    def cost(self, num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """Cost of each row; 0 for idle ones."""
        if self.split_pages:
            return ratio(num_pages + (self.split_pages - 1), self.split_pages)
        return jnp.where(num_pages > 0, num_pages + self.overhead, 0)

    def share(self, total: Int32[Array, "*of"], num_programs: Int32[Array, ""] | int) -> Int32[Array, "*of"]:
        """Cost that each program takes, at least that of a row of one page."""
        return jnp.maximum(ratio(total + (num_programs - 1), num_programs), self.overhead + 1)

    def own_share(self, total_pages: Int32[Array, ""], num_programs: int) -> Int32[Array, ""]:
        """Pages that each program takes, about, if rows have programs of their own. Overheads are left out, since every
        program has one.
        """
        return jnp.maximum(ratio(total_pages + (num_programs - 1), num_programs), self.least)

    def parts(
        self, num_pages: Int32[Array, "rows"], own_share: Int32[Array, ""]
    ) -> tuple[Int32[Array, "rows"], Int32[Array, "rows"]]:
        """Number of programs of each row, 0 if idle, and pages that each of these takes; the last one may take fewer.

        Args:
          own_share: pages that a program should take, about.
        """
        programs = jnp.maximum(ratio(num_pages + ratio(own_share, 2), own_share), 1)
        part = jnp.maximum(ratio(num_pages + (programs - 1), programs), 1)
        return ratio(num_pages + (part - 1), part), part

    def is_part_uneven(self, part: Int32[Array, "n"], share: Int32[Array, ""]) -> Bool[Array, "n"]:
        """Whether parts of so many pages are so much more than an equal share that equal shares are better. A program
        starts once in either schedule, so overheads are left out.
        """
        return part > share + jnp.minimum(ratio(share, UNEVENNESS), self.cut)

    def is_group_uneven(
        self, taken: Int32[Array, "n"], programs: Int32[Array, ""], share: Int32[Array, ""]
    ) -> Bool[Array, "n"]:
        """Whether the share of a group's programs is so much more than an equal share that equal shares are better.

        A group of one program cuts no row: it may exceed an equal share as `is_part_uneven` allows, and by a row's
        overhead. A group of several cuts about half as many rows as equal shares do: it may exceed them by twice that
        fraction, but by half as many pages.
        """
        alone = self.overhead + jnp.minimum(ratio(share, UNEVENNESS), self.cut)
        several = jnp.minimum(ratio(2 * share, UNEVENNESS), self.cut // 2)
        return taken > share + jnp.where(programs == 1, alone, several)

    def start(
        self, program: Int32[Array, "n"], share: Int32[Array, "*of"], total: Int32[Array, "*of"]
    ) -> Int32[Array, "n"]:
        """Offset at which each program starts; at the end or past it for programs without work."""
        return jnp.minimum(program, ratio(total + (share - 1), share)) * share

    def pieces(
        self, begin: Int32[Array, "rows"], end: Int32[Array, "rows"], share: Int32[Array, "*of"]
    ) -> Int32[Array, "rows"]:
        """Number of pieces of rows that lie between these offsets: one for each row that is not idle, and one for each
        cut.
        """
        if self.split_pages:
            return end - begin
        cuts = ratio(end - 1 - self.tail, share) - ratio(begin + self.overhead, share)
        return jnp.where(end > begin, 1 + jnp.maximum(cuts, 0), 0)

    def snap_to_row_end(self, at: Int32[Array, "n"], end: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Move offsets in the last few pages of a row, which ends at `end`, to its end."""
        return jnp.where(end - at <= self.tail, end, at)

    def page(self, into: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Page at an offset into a row: page 0 for the overhead, which comes first."""
        return into * self.split_pages if self.split_pages else jnp.maximum(into - self.overhead, 0)

    def piece(
        self,
        program: Int32[Array, "n"],
        begin: Int32[Array, "n"],
        into: Int32[Array, "n"],
        first: Int32[Array, "n"],
        share: Int32[Array, "*of"],
    ) -> Int32[Array, "n"]:
        """Index of the piece that a program starts with.

        Args:
          begin, first: offset and first piece of the row.
          into: offset into the row at which the program starts.
        """
        if self.split_pages:
            return first + into
        return first + jnp.where(into > self.overhead, program - ratio(begin + self.overhead, share), 0)


def most_splits(plan: DecodePlan, table_pages: int) -> int:
    """Largest number of splits that a plan makes of rows with so many table entries."""
    rows, programs = plan.row_order.shape[0], plan.cta_row.shape[0] - 1
    return rows + (rows * -(-table_pages // plan.split_pages) if plan.split_pages else programs)
