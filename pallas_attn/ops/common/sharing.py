"""The arithmetic of `plan_decode`: rows laid end to end, each as long as it costs, and programs at equal distances. Or,
where that is nearly as even, at every so many rows, or as many for each row: then none takes parts of two rows.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

UNEVENNESS = 16
"""Whole rows may make the largest share larger by one in so many, at most."""


@dataclasses.dataclass(frozen=True)
class Sharing:
    """What rows cost and where they are cut.

    In `balanced` mode a row costs its pages and a constant, and is cut where a program starts beyond the constant,
    unless rows are so alike that none need be cut, or that each can have programs to itself. In `fixed` mode it is cut
    at multiples of `piece_pages`, whoever takes them, and each piece costs 1.

    Attributes:
      overhead: the constant, in pages; 0 in `fixed` mode.
      cut: what a program may take beyond an equal share if then none takes parts of two rows, in pages; 0 in `fixed`
        mode.
      piece_pages: pages of a piece; 0 in `balanced` mode.
    """

    overhead: int
    cut: int
    piece_pages: int

    def cost(self, num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
        """Of each row; an idle one costs nothing."""
        if self.piece_pages:
            return (num_pages + (self.piece_pages - 1)) // self.piece_pages
        return jnp.where(num_pages > 0, num_pages + self.overhead, 0)

    def share(self, total: Int32[Array, ""], num_programs: int) -> Int32[Array, ""]:
        """What a program takes, at least a row's overhead and a page."""
        return jnp.maximum((total + (num_programs - 1)) // num_programs, self.overhead + 1)

    def parts(self, num_pages: Int32[Array, "rows"], share: Int32[Array, ""]) -> Int32[Array, "rows"]:
        """How many programs rows have to themselves if each takes about a share; none where a row is idle. Each takes
        `part` pages, but the last may take fewer.
        """
        programs = jnp.maximum((num_pages + share // 2) // share, 1)
        part = jnp.maximum(self.part(num_pages, programs), 1)
        return (num_pages + (part - 1)) // part

    def part(self, num_pages: Int32[Array, "n"], parts: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """Pages of each of so many parts."""
        return (num_pages + (parts - 1)) // parts

    def rows_each(self, first: Int32[Array, ""], share: Int32[Array, ""], num_rows: int) -> Int32[Array, ""]:
        """How many whole rows come closest to a share if all cost what the first one does."""
        first = jnp.maximum(first, 1)
        return jnp.clip((share + first // 2) // first, 1, num_rows)

    def first_row(
        self, program: Int32[Array, "n"], each: Int32[Array, ""], num_programs: int, num_rows: int
    ) -> Int32[Array, "n"]:
        """The row that programs start with if each takes so many, and the last one all that are left."""
        return jnp.where(program < num_programs, jnp.minimum(program * each, num_rows), num_rows)

    def is_uneven(self, taken: Int32[Array, "n"], share: Int32[Array, ""]) -> Bool[Array, "n"]:
        """Whether a program would take so much that programs at equal distances are better."""
        return taken > share + jnp.minimum(share // UNEVENNESS, self.cut)

    def start(self, program: Int32[Array, "n"], share: Int32[Array, ""], total: Int32[Array, ""]) -> Int32[Array, "n"]:
        """Where programs start among the rows; the first one without work, and all after it, at or past the end."""
        return jnp.minimum(program, (total + (share - 1)) // share) * share

    def pieces(
        self, begin: Int32[Array, "rows"], end: Int32[Array, "rows"], share: Int32[Array, ""]
    ) -> Int32[Array, "rows"]:
        """Of rows that lie between these places and are cut at equal distances. A piece begins with each busy row and
        with each cut.
        """
        if self.piece_pages:
            return end - begin
        return jnp.where(end > begin, 1 + (end - 1) // share - (begin + self.overhead) // share, 0)

    def page(self, into: Int32[Array, "n"]) -> Int32[Array, "n"]:
        """The page that lies so far into a row. Its first follows the overhead: who starts in that starts the row."""
        return into * self.piece_pages if self.piece_pages else jnp.maximum(into - self.overhead, 0)

    def piece(
        self,
        program: Int32[Array, "n"],
        begin: Int32[Array, "n"],
        into: Int32[Array, "n"],
        first: Int32[Array, "n"],
        share: Int32[Array, ""],
    ) -> Int32[Array, "n"]:
        """Number of the piece a program starts with, `into` a row that begins at `begin` and with piece `first`."""
        if self.piece_pages:
            return first + into
        return first + jnp.where(into > self.overhead, program - (begin + self.overhead) // share, 0)
