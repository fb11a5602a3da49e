"""Settings of `ragged_attention`."""

from __future__ import annotations

import dataclasses
import functools

from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.portable.online_softmax import XlaConfig, prefill_heuristic, tile_queries
from pallas_attn.runtime import tuning
from pallas_attn.runtime.device import Device
from pallas_attn.triton import tiles


def xla_config(num_tokens: int, num_sequences: int) -> XlaConfig:
    """Return tile and group sizes of the portable implementation by the number of packed queries and of sequences."""

    def heuristic() -> XlaConfig:
        tile = tile_queries(num_tokens, num_sequences)
        return prefill_heuristic(rows=-(-num_tokens // tile) + num_sequences, tile_queries=tile)

    key = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    return tuning.lookup("ragged_attention/xla", key, XlaConfig, heuristic)


@dataclasses.dataclass(frozen=True)
class RaggedAttentionKey:
    """Properties of a call that determine the best sizes of the Mosaic kernel.

    Attributes:
      key_dim, value_dim: Dk and Dv.
      long: whether sequences have at least `LONG` queries on average.
    """

    key_dim: int
    value_dim: int
    long: bool


LONG = 512
"""Minimum of the average number of queries per sequence for blocks with more consumer warpgroups. Larger blocks would
have many empty rows if sequences are shorter."""


def mosaic_config(key: RaggedAttentionKey) -> FlashConfig:
    """Return the sizes of the Mosaic kernel."""
    return tuning.lookup("ragged_attention/mosaic", dataclasses.asdict(key), FlashConfig, lambda: _heuristic(key))


def _heuristic(key: RaggedAttentionKey) -> FlashConfig:
    """Return the largest tile whose scores, probabilities and output fit the registers of the consumer warpgroups.

    There are three consumers if Dk is 64 and sequences are long, else two. With more than 256 columns, two consumers
    share query rows, and shared memory suffices for one stage.
    """
    if key.value_dim > 256:
        return FlashConfig(64, 1, consumers=2, column_parts=2)
    tile_keys = 128 if key.value_dim <= 128 else 64
    return FlashConfig(tile_keys, stages=2, consumers=3 if key.key_dim == 64 and key.long else 2)


def sm100_config(key: RaggedAttentionKey) -> FlashConfig:
    """Return the sizes of the Mosaic kernel on Blackwell."""
    return tuning.lookup("ragged_attention/mosaic", dataclasses.asdict(key), FlashConfig, lambda: _sm100_heuristic(key))


def _sm100_heuristic(key: RaggedAttentionKey) -> FlashConfig:
    """Maximize the rows of a block, then the keys of a tile, then the stages, within shared memory and TMEM.

    There is one consumer if values are wider than 128, or if sequences are short, because the blocks of two consumers
    would have many empty rows.
    """
    if key.value_dim > 128:
        return FlashConfig(tile_keys=64, stages=2, consumers=1)
    if not key.long:
        return FlashConfig(tile_keys=128, stages=2, consumers=1)
    if key.key_dim > 128:
        return FlashConfig(tile_keys=64, stages=3, consumers=2)
    return FlashConfig(tile_keys=128, stages=2 if key.key_dim > 64 else 4, consumers=2)


def triton_tile(card: Device, rows: int, key_dim: int, value_dim: int, *, capped: bool) -> tiles.FlashTile:
    """Return the sizes of the Triton kernel; see `flash_tile`.

    Args:
      rows: average number of query rows (heads times tokens) per sequence and KV head, which read the same keys.
      key_dim, value_dim: Dk and Dv.
      capped: whether scores have a soft cap.
    """
    rows = min(tiles.MOST_ROWS, tiles.power_of_two(rows))
    key = {"key_dim": key_dim, "value_dim": value_dim, "rows": rows, "demanding": capped}
    make = functools.partial(tiles.flash_tile, card, rows, max(key_dim, value_dim), demanding=capped)
    return tuning.lookup("ragged_attention/triton", key, tiles.FlashTile, make)


CACHE_BYTES = 32 * 2**20
"""Maximum bytes of keys and values that concurrent CTAs should read, so that an L2 cache of 50 MB keeps them."""


def l2_head_group(num_heads: int, num_kv_heads: int, kv_bytes: int) -> int:
    """Return the number of query heads whose blocks are processed together: the heads of the KV heads that fit in L2.

    Args:
      num_heads: query heads, or sets of query heads that share a block.
      num_kv_heads: Hkv.
      kv_bytes: bytes of the keys and values of one KV head.
    """
    most = max(1, CACHE_BYTES // kv_bytes)
    kv_heads = max(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n <= most)
    return kv_heads * (num_heads // num_kv_heads)
