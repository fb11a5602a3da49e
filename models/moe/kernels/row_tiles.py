"""Row tiles of the grouped GEMMs: where the rows of each group (expert) start, and which tiles contain them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_attn.models.moe.kernels.pipeline import ROW_ALIGNMENT


class RowTiles(NamedTuple):
    """Tiles of rows, each within one group.

    Attributes:
      group: group of each tile.
      start: first row of each tile, a multiple of `ROW_ALIGNMENT`.
      rows: number of rows of each tile, rounded up to a multiple of `ROW_ALIGNMENT`.
      count: number of tiles, in an array of one element. Later entries of the other arrays are unused.
    """

    group: Int32[Array, "tiles"]
    start: Int32[Array, "tiles"]
    rows: Int32[Array, "tiles"]
    count: Int32[Array, "1"]

    @staticmethod
    def of(sizes: Int32[Array, "groups"], num_rows: int, tile_rows: int) -> RowTiles:
        """Cover groups of rows with tiles. Group g starts at row `first_rows(sizes)[g]`.

        Args:
          sizes: number of rows of each group.
          num_rows: maximum sum of `sizes`.
          tile_rows: maximum number of rows of a tile.
        """
        aligned = _align(sizes)
        tiles = (aligned + (tile_rows - 1)) // tile_rows
        first_tile, index = sums_before(tiles), jnp.arange(num_rows // tile_rows + sizes.shape[0], dtype=jnp.int32)
        within = index[:, None] - first_tile[None]  # [tiles, groups]
        is_own = (within >= 0) & (within < tiles[None])
        within *= tile_rows

        def of_group(values: Int32[Array, "tiles groups"]) -> Int32[Array, "tiles"]:
            return jnp.sum(jnp.where(is_own, values, 0), axis=1)

        number = jnp.arange(sizes.shape[0], dtype=jnp.int32)
        return RowTiles(
            of_group(jnp.broadcast_to(number[None], within.shape)),
            of_group(first_rows(sizes)[None] + within),
            of_group(jnp.clip(aligned[None] - within, 0, tile_rows)),
            jnp.sum(tiles, keepdims=True),
        )


def _align(sizes: Int32[Array, "groups"]) -> Int32[Array, "groups"]:
    return (sizes + (ROW_ALIGNMENT - 1)) // ROW_ALIGNMENT * ROW_ALIGNMENT


def first_rows(sizes: Int32[Array, "groups"]) -> Int32[Array, "groups"]:
    """First row of each group. Groups are padded to a multiple of `ROW_ALIGNMENT` rows."""
    return sums_before(_align(sizes))


def sums_before(sizes: Int32[Array, "groups"]) -> Int32[Array, "groups"]:
    """Exclusive prefix sum. It compares all pairs of groups, so that XLA fuses several prefix sums into one kernel."""
    number = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(number[None] < number[:, None], sizes[None], 0), axis=1)


def padded_rows(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Return the number of rows to allocate: the padded groups, and one tile, because the copy of the last tile may
    read past the last group."""
    return num_rows // ROW_ALIGNMENT * ROW_ALIGNMENT + num_groups * ROW_ALIGNMENT + tile_rows
