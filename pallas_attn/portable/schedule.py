"""Arithmetic of `plan_decode`, shared by its implementations.

Rows are concatenated along a line, with a length equal to their cost, and the line is cut into equal shares, one per
CTA. If the result is nearly as even, groups of rows get their own CTAs instead, so that fewer rows are cut. A position
on the line is called an offset; a place is a row's index in the plan's order; a split is the part of a row that one CTA
processes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_attn.types import DecodePlan

UNEVENNESS = 16
"""A schedule with fewer cuts is accepted if its largest share exceeds the mean by at most 1/16."""

MAX_SNAKE_ROWS = 256
"""Maximum number of rows that are sorted by length. A kernel compares all pairs, in one chunk. A power of two."""


def ratio(a: Int32[Array, "*of"], b: Int32[Array, "*by"] | int) -> Int32[Array, "*quotients"]:
    """Return a // b of non-negative numbers, for b of a's shape or a scalar. Unsigned division has the fewest
    instructions.
    """
    unsigned = (x.astype(jnp.uint32) for x in jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))
    return lax.div(*unsigned).astype(jnp.int32)


def order_key(size: Int32[Array, "n"], number: Int32[Array, "n"], count: int) -> Int32[Array, "n"]:
    """Return sort keys, descending, of up to `count` sizes: the largest size first, equal sizes by number.

    Keys are integers below 2**24, which float32 represents exactly. Sizes that are too large for this count as equal.
    """
    return jnp.minimum(size, (1 << 24) // count - 1) * count + (count - 1 - number)


class Groups(NamedTuple):
    """Groups of rows with their own CTAs.

    Rows are distributed over groups in snake order: the longest first, alternating in direction, so that all groups get
    similar costs. The rows of a group are adjacent in the plan's order. Groups have equal numbers of rows, except that
    the first or the last groups may have one more row.

    Attributes:
      number: number of groups, at least 1.
      programs: CTAs per group.
      rows: number of rows of all groups, without idle rows.
      first: number of groups with the same number of rows as the first group.
      rows_of_first, rows_of_others: rows per group, for these first groups and for the other groups.
    """

    number: Int32[Array, ""]
    programs: Int32[Array, ""]
    rows: Int32[Array, ""]
    first: Int32[Array, ""]
    rows_of_first: Int32[Array, ""]
    rows_of_others: Int32[Array, ""]

    @staticmethod
    def of(rows: Int32[Array, ""], num_programs: int) -> Groups:
        """Return one group per CTA if there are more rows than CTAs. Otherwise return groups of about two rows each."""
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
        """Return the place of a group's first row; the number of rows for groups past the last."""
        group = jnp.minimum(group, self.number)
        others = jnp.maximum(group - self.first, 0)
        return (group - others) * self.rows_of_first + others * self.rows_of_others

    def place(self, rank: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Return the place of the row with this rank by length; the longest row has rank 0. Idle rows stay last."""
        round_number = ratio(rank, self.number)
        in_round = rank - round_number * self.number
        group = jnp.where(round_number & 1 == 0, in_round, self.number - 1 - in_round)
        return jnp.where(rank < self.rows, self.start(group) + round_number, rank)

    def group(self, place: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Return the group of the row at a place; the last group for idle rows."""
        start_of_others = self.first * self.rows_of_first
        among_first = place < start_of_others
        into = jnp.where(among_first, place, place - start_of_others)
        size = jnp.where(among_first, jnp.maximum(self.rows_of_first, 1), jnp.maximum(self.rows_of_others, 1))
        return jnp.minimum(ratio(into, size) + jnp.where(among_first, 0, self.first), self.number - 1)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Costs of rows, and offsets of cuts.

    In `balanced` mode, the cost of a row is its number of pages plus a constant overhead. A row is cut where a CTA's
    share starts, but not within the overhead or the last few pages. There are three schedules: separate CTAs for each
    row, equal shares of each group's rows, and equal shares of all rows. The schedule with the fewest cuts that is even
    enough is used. In `fixed` mode, rows are cut at multiples of `split_pages`, independent of the CTAs that process
    them, and each split costs 1.

    Attributes:
      overhead: the constant, in pages; 0 in `fixed` mode.
      cut: pages that a CTA may process beyond an equal share if then no CTA processes parts of two rows; 0 in `fixed`
        mode.
      least: minimum pages of a part if rows have their own CTAs.
      split_pages: pages per split; 0 in `balanced` mode.
    """

    overhead: int
    cut: int
    least: int
    split_pages: int

    @property
    def tail(self) -> int:
        """Number of pages at the end of a row that are never cut off, because starting a split costs more than these
        pages.
        """
        return self.overhead // 2

    def uses_snake_order(self, num_rows: int) -> bool:
        """Return whether this number of rows is sorted by length and grouped in snake order; otherwise rows keep their
        order.
        """
        return not self.split_pages and num_rows <= MAX_SNAKE_ROWS

    def length_key(self, num_pages: Int32[Array, "rows"], row: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """Return sort keys of rows, descending: the longest first, rows of equal length by index."""
        return order_key(num_pages, row, MAX_SNAKE_ROWS)

    def cost(self, num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """Return the cost of each row; 0 for idle rows."""
        if self.split_pages:
            return ratio(num_pages + (self.split_pages - 1), self.split_pages)
        return jnp.where(num_pages > 0, num_pages + self.overhead, 0)

    def share(self, total: Int32[Array, "*of"], num_programs: Int32[Array, ""] | int) -> Int32[Array, "*of"]:
        """Return the cost that each CTA processes, at least the cost of a row of one page."""
        return jnp.maximum(ratio(total + (num_programs - 1), num_programs), self.overhead + 1)

    def own_share(self, total_pages: Int32[Array, ""], num_programs: int) -> Int32[Array, ""]:
        """Return the approximate number of pages per CTA if rows have their own CTAs.

        Overheads are left out, because every CTA has one.
        """
        return jnp.maximum(ratio(total_pages + (num_programs - 1), num_programs), self.least)

    def parts(
        self, num_pages: Int32[Array, "rows"], own_share: Int32[Array, ""]
    ) -> tuple[Int32[Array, "rows"], Int32[Array, "rows"]]:
        """Return the number of CTAs per row, 0 if idle, and the pages that each of them processes; the last may process
        fewer.

        Args:
          own_share: approximate number of pages per CTA.
        """
        programs = jnp.maximum(ratio(num_pages + ratio(own_share, 2), own_share), 1)
        part = jnp.maximum(ratio(num_pages + (programs - 1), programs), 1)
        return ratio(num_pages + (part - 1), part), part

    def is_part_uneven(self, part: Int32[Array, "n"], share: Int32[Array, ""]) -> Bool[Array, "n"]:
        """Return whether parts of this size exceed an equal share by so many pages that equal shares are better.

        A CTA starts once in both schedules, so overheads are left out.
        """
        return part > share + jnp.minimum(ratio(share, UNEVENNESS), self.cut)

    def is_group_uneven(
        self, taken: Int32[Array, "n"], programs: Int32[Array, ""], share: Int32[Array, ""]
    ) -> Bool[Array, "n"]:
        """Return whether CTAs of a group have so many more pages than an equal share that equal shares are better.

        A group of one CTA cuts no row. Its share may exceed an equal share by the limit of `is_part_uneven` plus the
        overhead of a row. A group of several CTAs cuts about half as many rows as equal shares do. Its share may exceed
        an equal share by twice the fraction, but at most half the pages, of the limit of `is_part_uneven`.
        """
        alone = self.overhead + jnp.minimum(ratio(share, UNEVENNESS), self.cut)
        several = jnp.minimum(ratio(2 * share, UNEVENNESS), self.cut // 2)
        return taken > share + jnp.where(programs == 1, alone, several)

    def start(
        self, program: Int32[Array, "n"], share: Int32[Array, "*of"], total: Int32[Array, "*of"]
    ) -> Int32[Array, "n"]:
        """Return the offset at which each CTA starts; at or past the end for CTAs without work."""
        return jnp.minimum(program, ratio(total + (share - 1), share)) * share

    def splits(
        self, begin: Int32[Array, "rows"], end: Int32[Array, "rows"], share: Int32[Array, "*of"]
    ) -> Int32[Array, "rows"]:
        """Return the number of splits of rows between these offsets: one per row that is not idle, and one per cut."""
        if self.split_pages:
            return end - begin
        cuts = ratio(end - 1 - self.tail, share) - ratio(begin + self.overhead, share)
        return jnp.where(end > begin, 1 + jnp.maximum(cuts, 0), 0)

    def snap_to_row_end(self, at: Int32[Array, "n"], end: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Move offsets in the last few pages of a row, which ends at `end`, to its end."""
        return jnp.where(end - at <= self.tail, end, at)

    def page(self, into: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Return the page at an offset into a row: page 0 within the overhead, which comes first."""
        return into * self.split_pages if self.split_pages else jnp.maximum(into - self.overhead, 0)

    def split(
        self,
        program: Int32[Array, "n"],
        begin: Int32[Array, "n"],
        into: Int32[Array, "n"],
        first: Int32[Array, "n"],
        share: Int32[Array, "*of"],
    ) -> Int32[Array, "n"]:
        """Return the index of the split that a CTA starts with.

        Args:
          begin, first: offset and first split of the row.
          into: offset into the row at which the CTA starts.
        """
        if self.split_pages:
            return first + into
        return first + jnp.where(into > self.overhead, program - ratio(begin + self.overhead, share), 0)


def most_splits(plan: DecodePlan, table_pages: int) -> int:
    """Return the maximum number of splits of a plan for rows with this number of table entries."""
    rows, programs = plan.row_order.shape[0], plan.cta_row.shape[0] - 1
    return rows + (rows * -(-table_pages // plan.split_pages) if plan.split_pages else programs)
