"""The arithmetic of `plan_decode`: rows laid end to end, each as long as it costs, and programs at equal distances. Or,
where that is nearly as even, some rows for some programs, so that fewer rows are cut, or none.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

UNEVENNESS = 16
"""Who cuts no rows, or makes equal parts of them, may make the largest share larger by one in so many, at most."""

MAX_DEALT = 256
"""Rows that are put in order: each is compared with each, in one chunk of a kernel. A power of two."""

MOST_COMPARED = (1 << 24) // MAX_DEALT - 1
"""Pages beyond which rows count as equally long where they are put in order: a key is a whole number in float32."""


def ratio(a: Int32[Array, "*of"], b: Int32[Array, "*by"] | int) -> Int32[Array, "*quotients"]:
    """a / b without what is left, for b of a's shape or a single one. What comes of negative numbers does not matter:
    to divide without a sign takes fewer instructions, and to round down many more.
    """
    unsigned = (x.astype(jnp.uint32) for x in jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))
    return lax.div(*unsigned).astype(jnp.int32)


def order_key(size: Int32[Array, "n"], number: Int32[Array, "n"], count: int) -> Int32[Array, "n"]:
    """By which as many as `count` are put in order, the largest first, and of those as large the first: whole numbers
    that float32 holds. Sizes beyond what that leaves room for count as equal.
    """
    return jnp.minimum(size, (1 << 24) // count - 1) * count + (count - 1 - number)


class Groups(NamedTuple):
    """Rows that share programs which no other rows have a part in.

    Rows are dealt to groups as cards are, the longest first, back and forth: so all get about as much. The rows of a
    group are neighbours then, in the order of the plan. Groups have as many rows as each other, or some of them, which
    are the first or the last, have one more.

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
        rounds = ratio(rows, number)  # in which every group is dealt a row
        left = rows - number * rounds  # dealt after that, in the direction of another round
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
        """Pages at the end of a row that are left to who has those before: to start with them costs more than they."""
        return self.overhead // 2

    def are_dealt(self, num_rows: int) -> bool:
        """Whether so many rows are put in the order in which groups take them; else groups take them as they come."""
        return not self.split_pages and num_rows <= MAX_DEALT

    def length_key(self, num_pages: Int32[Array, "rows"], row: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """By which rows are put in order, the largest first: the longest, and the first of those as long."""
        return order_key(num_pages, row, MAX_DEALT)

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

    def untailed(self, at: Int32[Array, "n"], end: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Where programs start instead that would start there, in rows which end at `end`."""
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
