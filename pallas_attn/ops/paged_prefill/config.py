"""Settings of `paged_prefill`."""

from __future__ import annotations

import dataclasses
import functools

from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.portable.online_softmax import XlaConfig, prefill_heuristic, tile_queries
from pallas_attn.runtime import tuning
from pallas_attn.runtime.device import Device
from pallas_attn.triton.tiles import MOST_ROWS, FlashTile, flash_tile, power_of_two


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
class PagedPrefillKey:
    """Facts of a call that the best sizes of the Mosaic kernel depend on.

    Attributes:
      head_dim: D.
      page_size: ps.
      cache_bytes: bytes of a cached value.
      token_scales: whether scales come with the tokens.
      terms: 16-bit numbers whose sum a query is.
      capped: whether there is a soft cap.
    """

    head_dim: int
    page_size: int
    cache_bytes: int
    token_scales: bool
    terms: int
    capped: bool


def mosaic_config(key: PagedPrefillKey) -> FlashConfig:
    """Sizes of the Mosaic kernel."""
    return tuning.lookup("paged_prefill/mosaic", dataclasses.asdict(key), FlashConfig, lambda: _heuristic(key))


def _heuristic(key: PagedPrefillKey) -> FlashConfig:
    """The largest tile whose scores, probabilities and output fit the registers of two consumers. One consumer for the
    widest heads of 8-bit caches, where staging buffers leave too little shared memory for two, or a soft cap too few
    registers.
    """
    tile_keys = 128 if key.head_dim <= 128 else 64
    stages = 2 if tile_keys * key.head_dim > 8192 else 4
    demanding = key.cache_bytes == 1 and (key.token_scales or key.terms > 1 or key.capped)
    return FlashConfig(tile_keys, stages, consumers=1 if key.head_dim == 256 and demanding else 2)


def sm100_config(key: PagedPrefillKey) -> FlashConfig:
    """Sizes of the Mosaic kernel on Blackwell."""
    return tuning.lookup("paged_prefill/mosaic", dataclasses.asdict(key), FlashConfig, lambda: _sm100_heuristic(key))


def _sm100_heuristic(key: PagedPrefillKey) -> FlashConfig:
    """Take as many rows, then keys, then stages as fit shared memory, with staging buffers for a cache of 8 bits, and
    TMEM. Pages of 16 take small tiles, as on Hopper. Nothing fits 8-bit heads of width 256 with scales by channel or
    token.
    """
    narrow, quantised = key.head_dim == 64, key.cache_bytes == 1
    large = key.page_size > 16 and not key.token_scales  # whose scales take the registers of a large tile
    tile_keys = 128 if large and (narrow or (key.head_dim == 128 and not quantised)) else 64
    stages = 4 if tile_keys * key.head_dim <= 8192 and (narrow or key.terms == 1) else 2
    return FlashConfig(tile_keys, stages, consumers=1 if key.head_dim == 256 else 2)


def triton_tile(card: Device, rows: int, head_dim: int, *, demanding: bool) -> FlashTile:
    """Sizes of the Triton kernel, by the query rows that share keys, on average, and D; see `flash_tile`."""
    key = {"head_dim": head_dim, "rows": min(MOST_ROWS, power_of_two(rows)), "demanding": demanding}
    make = functools.partial(flash_tile, card, rows, head_dim, demanding=demanding)
    return tuning.lookup("paged_prefill/triton", key, FlashTile, make)
