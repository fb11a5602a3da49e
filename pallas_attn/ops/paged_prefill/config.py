"""What can be turned in `paged_prefill`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from pallas_attn import tuning
from pallas_attn.mosaic.sm90.flash.config import ALIGNMENT, QUERIES, MosaicConfig
from pallas_attn.portable.online_softmax import XlaConfig, prefill_heuristic, tile_queries


def xla_config(num_tokens: int, num_sequences: int, rows_per_sequence: int) -> XlaConfig:
    """Tile and group sizes of the portable implementation.

    Args:
      num_tokens: T, packed queries.
      num_sequences: S.
      rows_per_sequence: KV heads that walk pages on their own.
    """

    def heuristic() -> XlaConfig:
        tile = tile_queries(num_tokens, num_sequences)
        rows = (-(-num_tokens // tile) + num_sequences) * rows_per_sequence
        return prefill_heuristic(rows=rows, tile_queries=tile)

    key = {"num_tokens": num_tokens, "num_sequences": num_sequences, "rows_per_sequence": rows_per_sequence}
    return tuning.lookup("paged_prefill/xla", key, XlaConfig, heuristic)


@dataclasses.dataclass(frozen=True)
class MosaicKey:
    """What the best sizes of the Mosaic kernel depend on.

    Attributes:
      head_dim: D.
      page_size: ps.
      cache_bytes: bytes of a cached value.
      token_scales: whether scales come with the tokens.
      terms: 16-bit numbers a query is made of.
      capped: whether scores are.
    """

    head_dim: int
    page_size: int
    cache_bytes: int
    token_scales: bool
    terms: int
    capped: bool


def mosaic_config(key: MosaicKey) -> MosaicConfig:
    """Sizes of the Mosaic kernel."""
    return tuning.lookup("paged_prefill/mosaic", dataclasses.asdict(key), MosaicConfig, lambda: _heuristic(key))


def _heuristic(key: MosaicKey) -> MosaicConfig:
    """The largest tile whose scores, probabilities and output fit the registers of two consumers, and whose pages fit
    those of the producer. Only one consumer where heads are widest and what is widened leaves no shared memory, or a
    soft cap no registers, for two.
    """
    tile_keys = 128 if key.head_dim <= 128 and key.page_size > 16 else 64
    stages = 2 if tile_keys * key.head_dim > 8192 else 4
    demanding = key.cache_bytes == 1 and (key.token_scales or key.terms > 1 or key.capped)
    return MosaicConfig(tile_keys, stages, consumers=1 if key.head_dim == 256 and demanding else 2)


class Packing(NamedTuple):
    """How heads of a group share a block.

    Attributes:
      heads: that do.
      places: for them, a power of two; those left over repeat the last head.
    """

    heads: int
    places: int


MOST_PLACES = QUERIES // ALIGNMENT
"""For heads in a block, so that one of the smallest blocks has as many queries of each as copies begin at multiples
of.
"""


def packing(group: int, queries: int, block: int) -> Packing:
    """That with the fewest rows of blocks, as many heads as possible if there are several. The more heads share a
    block, the fewer queries of each it has, and the less of a sequence's last one is empty.

    Args:
      group: heads of one.
      queries: of a sequence, on average.
      block: rows of a block.
    """

    def rows(some: Packing) -> float:
        """Expected of a head: queries begin anywhere, the rows before them that copies bring, and a last block's."""
        return some.places / some.heads * (queries + (ALIGNMENT - 1) / 2 + block // some.places - 1)

    heads = [heads for heads in range(min(group, MOST_PLACES), 0, -1) if group % heads == 0]
    return min((Packing(several, 1 << (several - 1).bit_length()) for several in heads), key=rows)
