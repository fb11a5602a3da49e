"""Register layouts of wgmma tiles."""

from __future__ import annotations

import jax

from pallas_attn.mosaic.primitives import register_tiles

TILE = register_tiles.BY_64.tile
"""Layout of a tile in the registers of a warpgroup."""

PER_TOKEN = register_tiles.BY_64.per_row
"""Layout of a value for each row of a tile."""


def token_iota(tokens: int) -> jax.Array:
    """Index of each row of a tile, int32."""
    return register_tiles.row_iota(tokens, register_tiles.BY_64)
