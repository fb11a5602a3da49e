"""What can be turned in `paged_decode`."""

from __future__ import annotations

import dataclasses

from pallas_attn import tuning
from pallas_attn.mosaic.sm90.decode_config import MAX_STAGES, SHARED_BYTES, MosaicConfig, reduction_bytes
from pallas_attn.portable.online_softmax import XlaConfig, decode_heuristic


def xla_config(rows: int, heads: int, head_dim: int) -> XlaConfig:
    """Tile and group sizes of the portable implementation.

    Args:
      rows: rows that walk pages.
      heads: KV heads a row holds.
      head_dim: D.
    """
    key = {"rows": rows, "heads": heads, "head_dim": head_dim}
    return tuning.lookup("paged_decode/xla", key, XlaConfig, lambda: decode_heuristic(rows, heads * head_dim))


def max_columns(head_dim: int, cache_bytes: int, *, capped: bool = False) -> int:
    """Query rows of a KV head that the registers of a warpgroup have room for, beside what dequantising takes, and a
    soft cap.
    """
    columns = 64 * cache_bytes * 64 // max(head_dim, 128)
    return columns * 3 // 4 // 8 * 8 if capped else columns


def takes_raw_queries(cache_bytes: int, columns: int) -> bool:
    """Whether programs arrange queries as columns themselves. It saves a kernel before, but not where that one converts
    queries too; and it costs shared memory that wide tiles have better use for.
    """
    return cache_bytes == 2 and columns == 8


@dataclasses.dataclass(frozen=True)
class MosaicKey:
    """What the best sizes of the Mosaic kernel depend on.

    Attributes:
      head_dim: D.
      cache_bytes: bytes of a cached value.
      token_scales: whether scales come with the tokens.
      columns: query rows of a KV head that a program takes at once.
      terms: 16-bit numbers a query is made of.
      out_bytes: bytes of a value of the output.
      page_size: ps.
    """

    head_dim: int
    cache_bytes: int
    token_scales: bool
    columns: int
    terms: int
    out_bytes: int
    page_size: int


def mosaic_config(key: MosaicKey) -> MosaicConfig:
    """Sizes of the Mosaic kernel."""
    return tuning.lookup("paged_decode/mosaic", dataclasses.asdict(key), MosaicConfig, lambda: _mosaic_heuristic(key))


ENOUGH_BYTES = 96 * 1024
"""Of tiles in a multiprocessor: three times what keeps its part of the memory busy. Over 8-bit caches more was 2 to 5%
slower (pages of 16: 266 us with 96 KB, 280 us with 192). In 16 bits two tiles for each program come to 192 KB anyway.
"""


def _mosaic_heuristic(key: MosaicKey) -> MosaicConfig:
    """As many programs side by side as registers and shared memory hold, each with two tiles or more: while one waits
    for memory or for its own arithmetic, the others work.
    """
    tile_tokens = 128 if key.head_dim == 64 and key.columns == 8 and key.page_size > 16 else 64
    most = 4 if key.columns == 8 and tile_tokens == 64 else 3 if key.columns * key.head_dim <= 2048 else 2
    if most == 4:  # registers for as many where nothing but the tile is in them
        most -= (key.terms == 2) + (key.cache_bytes == 1 and key.page_size == 16)
    tile = tile_tokens * key.head_dim
    for programs in range(most, 0, -1):
        stage = 2 * tile * key.cache_bytes + (16 * tile_tokens if key.token_scales else 0)
        stages = (SHARED_BYTES // programs - _bytes_beside_tiles(key, tile_tokens)) // stage
        if stages >= 2:
            wanted = max(2, -(-ENOUGH_BYTES // (programs * stage)))
            return MosaicConfig(tile_tokens, min(stages, wanted, MAX_STAGES), programs)
    raise ValueError(f"two tiles of {tile_tokens} tokens of {key.head_dim} values do not fit shared memory")


def _bytes_beside_tiles(key: MosaicKey, tile_tokens: int) -> int:
    """Shared memory a program takes, beside its tiles: arrays come in multiples of 1 KB, and the system takes 1 KB."""
    copies = key.terms + takes_raw_queries(key.cache_bytes, key.columns)
    queries, probabilities = copies * key.columns * key.head_dim * 2, key.columns * tile_tokens * 2
    output = key.columns * key.head_dim * key.out_bytes
    notes = -(-4 * (2 * MAX_STAGES + 2) * key.columns // 1024) * 1024
    scales = 1024 if key.token_scales else 0  # what rounding adds to those of the tiles
    barriers, system = 288, 1024
    reductions = reduction_bytes(key.columns)
    return queries + probabilities + output + notes + scales + barriers + system + reductions
