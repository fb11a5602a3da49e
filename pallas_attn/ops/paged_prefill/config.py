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
    """Return tile and group sizes of the portable implementation.

    Args:
      num_tokens: T, packed queries.
      num_sequences: S.
      rows_per_sequence: number of KV heads that read pages separately; 1 if all heads read the same pages.
    """

    def heuristic() -> XlaConfig:
        tile = tile_queries(num_tokens, num_sequences)
        rows = (-(-num_tokens // tile) + num_sequences) * rows_per_sequence
        return prefill_heuristic(rows=rows, tile_queries=tile)

    key = {"num_tokens": num_tokens, "num_sequences": num_sequences, "rows_per_sequence": rows_per_sequence}
    return tuning.lookup("paged_prefill/xla", key, XlaConfig, heuristic)


@dataclasses.dataclass(frozen=True)
class PagedPrefillKey:
    """Properties of a call that determine the best sizes of the Mosaic kernel.

    Attributes:
      head_dim: D.
      page_size: ps.
      cache_bytes: bytes per cached value.
      token_scales: whether the cache has a scale per token or group of tokens.
      terms: number of 16-bit parts whose sum is a query; 2 if the cache has a scale per channel, else 1.
      capped: whether the call has a soft cap.
    """

    head_dim: int
    page_size: int
    cache_bytes: int
    token_scales: bool
    terms: int
    capped: bool


def mosaic_config(key: PagedPrefillKey) -> FlashConfig:
    """Return the sizes of the Mosaic kernel."""
    return tuning.lookup("paged_prefill/mosaic", dataclasses.asdict(key), FlashConfig, lambda: _heuristic(key))


def _heuristic(key: PagedPrefillKey) -> FlashConfig:
    """Return the largest tile whose scores, probabilities and output fit the registers of two consumer warpgroups.

    8-bit caches with heads of width 256 have one consumer if the call has scales per token or channel, or a soft cap.
    Then shared memory (with staging buffers) or registers do not suffice for two consumers. Heads of more than 256
    columns have two consumers that share query rows; shared memory suffices for one stage.
    """
    if key.head_dim > 256:
        return FlashConfig(64, 1, consumers=2, column_parts=2)
    tile_keys = 128 if key.head_dim <= 128 else 64
    stages = 2 if tile_keys * key.head_dim > 8192 else 4
    demanding = key.cache_bytes == 1 and (key.token_scales or key.terms > 1 or key.capped)
    return FlashConfig(tile_keys, stages, consumers=1 if key.head_dim == 256 and demanding else 2)


def sm100_config(key: PagedPrefillKey) -> FlashConfig:
    """Return the sizes of the Mosaic kernel on Blackwell."""
    return tuning.lookup("paged_prefill/mosaic", dataclasses.asdict(key), FlashConfig, lambda: _sm100_heuristic(key))


def _sm100_heuristic(key: PagedPrefillKey) -> FlashConfig:
    """Maximize the rows of a block, then the keys of a tile, then the stages, within shared memory and TMEM.

    Shared memory also has the staging buffers of 8-bit caches. Pages of 16 tokens have tiles of 64 keys. No size fits
    8-bit heads of width 256 with scales per channel or token.
    """
    narrow, quantised = key.head_dim == 64, key.cache_bytes == 1
    large = key.page_size > 16 and not key.token_scales  # token scales need the registers of a large tile
    tile_keys = 128 if large and (narrow or (key.head_dim == 128 and not quantised)) else 64
    stages = 4 if tile_keys * key.head_dim <= 8192 and (narrow or key.terms == 1) else 2
    return FlashConfig(tile_keys, stages, consumers=1 if key.head_dim == 256 else 2)


def triton_tile(card: Device, rows: int, head_dim: int, *, demanding: bool) -> FlashTile:
    """Return the sizes of the Triton kernel; see `flash_tile`.

    Args:
      rows: average number of query rows (heads times tokens) per sequence and KV head, which read the same keys.
      head_dim: D.
      demanding: whether scales, a soft cap or a draft mask need registers.
    """
    key = {"head_dim": head_dim, "rows": min(MOST_ROWS, power_of_two(rows)), "demanding": demanding}
    make = functools.partial(flash_tile, card, rows, head_dim, demanding=demanding)
    return tuning.lookup("paged_prefill/triton", key, FlashTile, make)
