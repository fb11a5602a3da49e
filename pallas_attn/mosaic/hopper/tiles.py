"""Register layouts of wgmma tiles."""

from __future__ import annotations

import jax

from pallas_attn.mosaic.primitives import register_tiles

TILE = register_tiles.BY_64.tile
"""Layout of a tile [64 n, columns] in the registers of a warpgroup: the layout of wgmma results."""

PER_TOKEN = register_tiles.BY_64.per_row
"""Layout of an array with a value for each row of a tile."""


def token_iota(tokens: int) -> jax.Array:
    """Index of each row of a tile of decode scores [tokens, query_rows], int32 [tokens]."""
    return register_tiles.row_iota(tokens, register_tiles.BY_64)
