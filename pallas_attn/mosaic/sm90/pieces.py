"""Pairs of tiles that a warpgroup stores piece by piece, in the order in which the seesaw's warpgroups free them.

Pieces are loaded into registers some places ahead of where they are stored, so that they are there once there is room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class PieceSizes:
    """Sizes of a warpgroup that stores pieces, beside two that compute.

    Attributes:
      pieces: that a thread has in registers, on their way to shared memory.
      registers: of a thread that stores pieces; those that compute share the others.
    """

    pieces: int
    registers: int

    def __post_init__(self) -> None:
        if not 1 <= self.pieces <= 4:
            raise ValueError(f"{self.pieces=} must be from 1 to 4")
        if not 24 <= self.registers <= 152 or self.registers % 16 != 8:
            raise ValueError(f"{self.registers=} must be 8 more than a multiple of 16, from 24 to 152")

    @property
    def compute_registers(self) -> int:
        """Registers of a thread that computes: 504 for one in each warpgroup."""
        return (504 - self.registers) // 2


class Place(NamedTuple):
    """Place of a piece in a pair of tiles.

    Attributes:
      tile: of the pair.
      part: of the tile.
      column: of the part, the first.
      columns: number of them.
      is_first: whether its half of the tile has to be free.
      is_last: whether its part is there once it is.
    """

    tile: int
    part: int
    column: int
    columns: int
    is_first: bool
    is_last: bool


def pieces_of_half(tile: int, half: int, begin: int, end: int, columns: int) -> list[Place]:
    """Pieces of so many columns that make the columns from `begin` to `end` of a half."""
    begins = range(begin, end, columns)
    return [Place(tile, half, i, min(columns, end - i), i == begin, i == begins[-1]) for i in begins]


class Steps(NamedTuple):
    """Functions of a kernel that take the i-th pair of tiles from global to shared memory.

    Attributes:
      rows: rows(i, tile) -> rows of the pool that a tile's tokens are, or whatever `load` and `store` take.
      load: load(place, rows) -> piece.
      store: store(i, place, piece, rows), once there is room.
      then: then(i), after all of a pair is stored.
    """

    rows: Callable[[Any, int], Any]
    load: Callable[[Place, Any], Any]
    store: Callable[[Any, Place, Any, Any], None]
    then: Callable[[Any], None]


def stream(places: tuple[Place, ...], ahead: int, count: Any, steps: Steps) -> None:
    """Store the pieces of `count` pairs of tiles, each loaded `ahead` places before, but none of another tile's."""
    second = next(j for j, place in enumerate(places) if place.tile == 1)
    ahead = min(ahead, second)
    look_up = min(second, len(places) - ahead)  # what comes after this pair
    first_rows = steps.rows(jnp.int32(0), 0)
    under_way = tuple(steps.load(place, first_rows) for place in places[:ahead])

    def step(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        rows, under_way = [carry[0], steps.rows(i, 1)], list(carry[1])
        later: Any = None
        for j, place in enumerate(places):
            steps.store(i, place, under_way.pop(0), rows[place.tile])
            if j == look_up:
                later = steps.rows(i + 1, 0)
            following = j + ahead - len(places)
            is_later = following >= 0
            upcoming = places[following if is_later else j + ahead]
            if j == len(places) - 1:
                steps.then(i)  # before the last load, while a piece's registers are free
            under_way.append(steps.load(upcoming, later if is_later else rows[upcoming.tile]))
        return later, tuple(under_way)

    lax.fori_loop(0, count, step, (first_rows, under_way))
