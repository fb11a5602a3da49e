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
"""Rows that are put in order: each is compared with each, in one chunk of a kernel."""


def ratio(a: Int32[Array, "*of"], b: Int32[Array, "*by"] | int) -> Int32[Array, "*quotients"]:
    """a / b without what is left, for b of a's shape or a single one. Numbers are not negative, or what comes of those
    that are does not matter: to round down would take more instructions than to round towards 0.
    """
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))


class Groups(NamedTuple):
    """Rows that share programs which no other rows have a part in.

    Rows are dealt to groups as cards are, the longest first, back and forth: so all get about as much. The rows of a
    group are neighbours then, in the order of the plan.

    Attributes:
      number: of groups, at least 1.
      programs: of each.
      rows: of all, that are not idle.
    """

    number: Int32[Array, ""]
    programs: Int32[Array, ""]
    rows: Int32[Array, ""]

    @staticmethod
    def of(rows: Int32[Array, ""], num_programs: int) -> Groups:
        """As many as there are programs for; or of two rows, which is the least that can be evened out."""
        most = jnp.maximum(ratio(rows + (num_programs - 1), num_programs), 1)  # rows of a program
        of_each = jnp.where(most > 1, most, 2)
        number = jnp.maximum(ratio(rows + of_each - 1, of_each), 1)
        return Groups(number, jnp.maximum(ratio(jnp.int32(num_programs), number), 1), rows)

    @property
    def rounds(self) -> Int32[Array, ""]:
        """In which every group is dealt a row."""
        return ratio(self.rows, self.number)

    @property
    def left(self) -> Int32[Array, ""]:
        """Rows dealt after that, to the first groups or, in the other direction, to the last."""
        return self.rows - self.number * self.rounds

    def start(self, group: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Place of a group's first row; of those past the last group, the number of rows."""
        group = jnp.minimum(group, self.number)
        forth, back = jnp.minimum(group, self.left), jnp.maximum(group - (self.number - self.left), 0)
        return group * self.rounds + self._dealt(forth, back)

    def place(self, rank: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Of a row that comes at `rank` where the longest come first. Idle rows stay last."""
        turn = ratio(rank, self.number)
        seat = rank - turn * self.number
        group = jnp.where(turn % 2 == 0, seat, self.number - 1 - seat)
        return jnp.where(rank < self.rows, self.start(group) + turn, rank)

    def group(self, place: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Whose row that is; any for idle ones."""
        rounds = jnp.maximum(self.rounds, 1)
        few = self.number - self.left  # groups that have no more rows than rounds
        longer, shorter = self.left * (rounds + 1), few * rounds
        forth = jnp.where(place < longer, ratio(place, rounds + 1), self.left + ratio(place - longer, rounds))
        back = jnp.where(place < shorter, ratio(place, rounds), few + ratio(place - shorter, rounds + 1))
        return jnp.clip(self._dealt(forth, back), 0, self.number - 1)

    def _dealt(self, forth: Int32[Array, "n"], back: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """By the direction in which the rows that are left are dealt. (A kernel takes no single condition for all.)"""
        return forth + (back - forth) * (self.rounds % 2)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """What rows cost and where they are cut.

    In `balanced` mode a row costs its pages and a constant, and is cut where a program starts beyond the constant, and
    not in the last few pages. That is done among all rows, or among those of each group, or each row has programs to
    itself: what cuts least of what is even enough. In `fixed` mode rows are cut at multiples of `piece_pages`, whoever
    takes them, and each piece costs 1.

    Attributes:
      overhead: the constant, in pages; 0 in `fixed` mode.
      cut: what a program may take beyond an equal share if then none takes parts of two rows, in pages; 0 in `fixed`
        mode.
      least: pages of a part, where rows have programs to themselves.
      piece_pages: pages of a piece; 0 in `balanced` mode.
    """

    overhead: int
    cut: int
    least: int
    piece_pages: int

    @property
    def tail(self) -> int:
        """Pages at the end of a row that are left to who has those before: to start with them costs more than they."""
        return self.overhead // 2

    def are_dealt(self, num_rows: int) -> bool:
        """Whether so many rows are put in the order in which groups take them; else groups take them as they come."""
        return not self.piece_pages and num_rows <= MAX_DEALT

    def cost(self, num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """Of each row; an idle one costs nothing."""
        if self.piece_pages:
            return ratio(num_pages + (self.piece_pages - 1), self.piece_pages)
        return jnp.where(num_pages > 0, num_pages + self.overhead, 0)

    def share(self, total: Int32[Array, "*of"], num_programs: Int32[Array, ""] | int) -> Int32[Array, "*of"]:
        """What a program takes, at least a row's overhead and a page."""
        return jnp.maximum(ratio(total + (num_programs - 1), num_programs), self.overhead + 1)

    def own_share(self, total_pages: Int32[Array, ""], num_programs: int) -> Int32[Array, ""]:
        """Pages that a program takes about if rows have programs to themselves. None starts two, so what that costs is
        the same for all.
        """
        return jnp.maximum(ratio(total_pages + (num_programs - 1), num_programs), self.least)

    def parts(self, num_pages: Int32[Array, "rows"], own_share: Int32[Array, ""]) -> Int32[Array, "rows"]:
        """How many programs rows have to themselves if each takes about so many pages; none where a row is idle. Each
        takes `part` pages, but the last may take fewer.
        """
        programs = jnp.maximum(ratio(num_pages + ratio(own_share, 2), own_share), 1)
        part = jnp.maximum(self.part(num_pages, programs), 1)
        return ratio(num_pages + (part - 1), part)

    def part(self, num_pages: Int32[Array, "n"], parts: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Pages of each of so many parts."""
        return ratio(num_pages + (parts - 1), parts)

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
        if self.piece_pages:
            return end - begin
        cuts = ratio(end - 1 - self.tail, share) - ratio(begin + self.overhead, share)
        return jnp.where(end > begin, 1 + jnp.maximum(cuts, 0), 0)

    def untailed(self, at: Int32[Array, "n"], end: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Where programs start instead that would start there, in rows which end at `end`."""
        return jnp.where(end - at <= self.tail, end, at)

    def page(self, into: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """The page that lies so far into a row. Its first follows the overhead: who starts in that starts the row."""
        return into * self.piece_pages if self.piece_pages else jnp.maximum(into - self.overhead, 0)

    def piece(
        self,
        program: Int32[Array, "n"],
        begin: Int32[Array, "n"],
        into: Int32[Array, "n"],
        first: Int32[Array, "n"],
        share: Int32[Array, "*of"],
    ) -> Int32[Array, "n"]:
        """Number of the piece a program starts with, `into` a row that begins at `begin` and with piece `first`."""
        if self.piece_pages:
            return first + into
        return first + jnp.where(into > self.overhead, program - ratio(begin + self.overhead, share), 0)
