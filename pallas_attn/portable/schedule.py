"""Arithmetic of `plan_decode`: rows are laid end to end, each as long as it costs, and cut at equal distances, one for
each program. Where that is nearly as even, groups of rows get programs to themselves, so that fewer rows are cut.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

UNEVENNESS = 16
"""Accept a schedule with fewer cuts if its largest share exceeds the mean by at most 1/16."""

MAX_SNAKE_ROWS = 256
"""Rows that are sorted by length, at most: each is compared with each, in one chunk of a kernel. A power of two."""


def ratio(a: Int32[Array, "*of"], b: Int32[Array, "*by"] | int) -> Int32[Array, "*quotients"]:
    """Quotient a // b of non-negative numbers, for b of a's shape or a scalar. Unsigned division takes the fewest
    instructions.
    """
    unsigned = (x.astype(jnp.uint32) for x in jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))
    return lax.div(*unsigned).astype(jnp.int32)


def order_key(size: Int32[Array, "n"], number: Int32[Array, "n"], count: int) -> Int32[Array, "n"]:
    """Sort keys of up to `count` sizes, the largest first, and of equal sizes the first: integers that float32 holds.
    Sizes too large for that count as equal.
    """
    return jnp.minimum(size, (1 << 24) // count - 1) * count + (count - 1 - number)


class Groups(NamedTuple):
    """Groups of rows that have programs to themselves.

    Rows go to groups in snake order, the longest first, back and forth, so that all groups get about as much. The rows
    of a group are neighbours in the order of the plan. Groups have equally many rows, except that some of them, the
    first or the last, may have one more.

    Attributes:
      number: of groups, at least 1.
      programs: of each.
      rows: of all, that are not idle.
      first: groups that have as many rows as the first one.
      rows_of_first, rows_of_others: of each.
    """

    number: Int32[Array, ""]
    programs: Int32[Array, ""]
    rows: Int32[Array, ""]
    first: Int32[Array, ""]
    rows_of_first: Int32[Array, ""]
    rows_of_others: Int32[Array, ""]

    @staticmethod
    def of(rows: Int32[Array, ""], num_programs: int) -> Groups:
        """As many as there are programs for; or of two rows, which is the least that can be evened out."""
        most = jnp.maximum(ratio(rows + (num_programs - 1), num_programs), 1)  # rows of a program
        of_each = jnp.where(most > 1, most, 2)
        number = jnp.maximum(ratio(rows + of_each - 1, of_each), 1)
        programs = jnp.maximum(ratio(jnp.int32(num_programs), number), 1)
        rounds = ratio(rows, number)  # in which every group takes a row
        left = rows - number * rounds  # taken after that, in the direction of another round
        back = rounds % 2
        first = jnp.where(back == 1, number - left, left)
        return Groups(number, programs, rows, first, rounds + 1 - back, rounds + back)

    def start(self, group: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Place of a group's first row; of those past the last group, the number of rows."""
        group = jnp.minimum(group, self.number)
        others = jnp.maximum(group - self.first, 0)
        return (group - others) * self.rows_of_first + others * self.rows_of_others

    def place(self, rank: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Of a row that comes at `rank` where the longest come first. Idle rows stay last."""
        turn = ratio(rank, self.number)
        seat = rank - turn * self.number
        group = jnp.where(turn % 2 == 0, seat, self.number - 1 - seat)
        return jnp.where(rank < self.rows, self.start(group) + turn, rank)

    def group(self, place: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Whose row that is; the last group for idle ones."""
        start_of_others = self.first * self.rows_of_first
        among_first = place < start_of_others
        into = jnp.where(among_first, place, place - start_of_others)
        size = jnp.where(among_first, jnp.maximum(self.rows_of_first, 1), jnp.maximum(self.rows_of_others, 1))
        return jnp.minimum(ratio(into, size) + jnp.where(among_first, 0, self.first), self.number - 1)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """What rows cost and where they are cut.

    In `balanced` mode a row costs its pages and a constant, and is cut where a program starts beyond the constant, and
    not in the last few pages. That is done among all rows, or among those of each group, or each row has programs to
    itself: what cuts least of what is even enough. In `fixed` mode rows are cut at multiples of `split_pages`, whoever
    takes them, and each piece costs 1.

    Attributes:
      overhead: the constant, in pages; 0 in `fixed` mode.
      cut: what a program may take beyond an equal share if then none takes parts of two rows, in pages; 0 in `fixed`
        mode.
      least: pages of a part, where rows have programs to themselves.
      split_pages: pages of a piece; 0 in `balanced` mode.
    """

    overhead: int
    cut: int
    least: int
    split_pages: int

    @property
    def tail(self) -> int:
        """Pages at the end of a row that stay with the program of those before: a start costs more than they do."""
        return self.overhead // 2

    def uses_snake_order(self, num_rows: int) -> bool:
        """Whether groups take so many rows in snake order, sorted by length; else they take them as they come."""
        return not self.split_pages and num_rows <= MAX_SNAKE_ROWS

    def length_key(self, num_pages: Int32[Array, "rows"], row: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """Sort keys of rows, the largest first: the longest row, and the first of those as long."""
        return order_key(num_pages, row, MAX_SNAKE_ROWS)

    def cost(self, num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """Of each row; an idle one costs nothing."""
        if self.split_pages:
            return ratio(num_pages + (self.split_pages - 1), self.split_pages)
        return jnp.where(num_pages > 0, num_pages + self.overhead, 0)

    def share(self, total: Int32[Array, "*of"], num_programs: Int32[Array, ""] | int) -> Int32[Array, "*of"]:
        """What a program takes, at least a row's overhead and a page."""
        return jnp.maximum(ratio(total + (num_programs - 1), num_programs), self.overhead + 1)

    def own_share(self, total_pages: Int32[Array, ""], num_programs: int) -> Int32[Array, ""]:
        """Pages that a program takes about if rows have programs to themselves. None starts two, so what that costs is
        the same for all.
        """
        return jnp.maximum(ratio(total_pages + (num_programs - 1), num_programs), self.least)

    def parts(
        self, num_pages: Int32[Array, "rows"], own_share: Int32[Array, ""]
    ) -> tuple[Int32[Array, "rows"], Int32[Array, "rows"]]:
        """How many programs rows have to themselves if each takes about so many pages, none where a row is idle; and
        the pages of each, of which the last may take fewer.
        """
        programs = jnp.maximum(ratio(num_pages + ratio(own_share, 2), own_share), 1)
        part = jnp.maximum(ratio(num_pages + (programs - 1), programs), 1)
        return ratio(num_pages + (part - 1), part), part

    def is_part_uneven(self, part: Int32[Array, "n"], share: Int32[Array, ""]) -> Bool[Array, "n"]:
        """Whether a program would have so much of a row that programs at equal distances are better. There, too, a
        program starts once without a row's start in its share.
        """
        return part > share + jnp.minimum(ratio(share, UNEVENNESS), self.cut)

    def is_group_uneven(
        self, taken: Int32[Array, "n"], programs: Int32[Array, ""], share: Int32[Array, ""]
    ) -> Bool[Array, "n"]:
        """Whether a program of a group of so many would take so much. One by itself starts rows only, and none is cut.
        Those of several cut about half as many as all programs would, and may take twice the part of a share more, but
        half the pages.
        """
        alone = self.overhead + jnp.minimum(ratio(share, UNEVENNESS), self.cut)
        several = jnp.minimum(ratio(2 * share, UNEVENNESS), self.cut // 2)
        return taken > share + jnp.where(programs == 1, alone, several)

    def start(
        self, program: Int32[Array, "n"], share: Int32[Array, "*of"], total: Int32[Array, "*of"]
    ) -> Int32[Array, "n"]:
        """Where programs start among the rows; the first one without work, and all after it, at or past the end."""
        return jnp.minimum(program, ratio(total + (share - 1), share)) * share

    def pieces(
        self, begin: Int32[Array, "rows"], end: Int32[Array, "rows"], share: Int32[Array, "*of"]
    ) -> Int32[Array, "rows"]:
        """Of rows that lie between these places and are cut at equal distances. A piece begins with each busy row and
        with each cut.
        """
        if self.split_pages:
            return end - begin
        cuts = ratio(end - 1 - self.tail, share) - ratio(begin + self.overhead, share)
        return jnp.where(end > begin, 1 + jnp.maximum(cuts, 0), 0)

    def snap_to_row_end(self, at: Int32[Array, "n"], end: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Move starts in the last few pages of a row, which ends at `end`, to the row's end."""
        return jnp.where(end - at <= self.tail, end, at)

    def page(self, into: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """The page that lies so far into a row. Its first follows the overhead: who starts in that starts the row."""
        return into * self.split_pages if self.split_pages else jnp.maximum(into - self.overhead, 0)

    def piece(
        self,
        program: Int32[Array, "n"],
        begin: Int32[Array, "n"],
        into: Int32[Array, "n"],
        first: Int32[Array, "n"],
        share: Int32[Array, "*of"],
    ) -> Int32[Array, "n"]:
        """Number of the piece a program starts with, `into` a row that begins at `begin` and with piece `first`."""
        if self.split_pages:
            return first + into
        return first + jnp.where(into > self.overhead, program - ratio(begin + self.overhead, share), 0)
