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
    """Return tile and group sizes of the portable implementation for T packed queries of S sequences."""

    def heuristic() -> XlaConfig:
        tile = tile_queries(num_tokens, num_sequences)
        return prefill_heuristic(rows=-(-num_tokens // tile) + num_sequences, tile_queries=tile)

    key = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    return tuning.lookup("ragged_attention/xla", key, XlaConfig, heuristic)


@dataclasses.dataclass(frozen=True)
class RaggedAttentionKey:
    """Properties of a call that determine the sizes of the Mosaic kernel.

    Attributes:
      key_dim, value_dim: Dk and Dv.
      long: whether sequences have at least `LONG` queries on average.
    """

    key_dim: int
    value_dim: int
    long: bool


LONG = 512
"""Average number of queries of a sequence from which blocks of three consumers have few empty rows."""


def mosaic_config(key: RaggedAttentionKey) -> FlashConfig:
    """Return the sizes of the Mosaic kernel on Hopper."""
    return tuning.lookup("ragged_attention/mosaic", dataclasses.asdict(key), FlashConfig, lambda: _heuristic(key))


def _heuristic(key: RaggedAttentionKey) -> FlashConfig:
    """Choose the largest tile whose scores, probabilities and output fit the registers of two consumers.

    Narrow heads leave registers for three consumers.
    """
    tile_keys = 128 if key.value_dim <= 128 else 64
    return FlashConfig(tile_keys, stages=2, consumers=3 if key.key_dim == 64 and key.long else 2)


def sm100_config(key: RaggedAttentionKey) -> FlashConfig:
    """Return the sizes of the Mosaic kernel on Blackwell."""
    return tuning.lookup("ragged_attention/mosaic", dataclasses.asdict(key), FlashConfig, lambda: _sm100_heuristic(key))


def _sm100_heuristic(key: RaggedAttentionKey) -> FlashConfig:
    """Maximise query rows, then keys, then stages within shared memory and TMEM.

    One consumer if heads are wide, or if sequences are so short that blocks of two consumers would be half empty.
    """
    if key.value_dim > 128:
        return FlashConfig(tile_keys=64, stages=2, consumers=1)
    if not key.long:
        return FlashConfig(tile_keys=128, stages=2, consumers=1)
    if key.key_dim > 128:
        return FlashConfig(tile_keys=64, stages=3, consumers=2)
    return FlashConfig(tile_keys=128, stages=2 if key.key_dim > 64 else 4, consumers=2)


def triton_tile(card: Device, rows: int, key_dim: int, value_dim: int, *, capped: bool) -> tiles.FlashTile:
    """Return the sizes of the Triton kernel. See `flash_tile`.

    Args:
      rows: average number of query rows that share keys.
      key_dim, value_dim: Dk and Dv.
      capped: whether there is a soft cap.
    """
    rows = min(tiles.MOST_ROWS, tiles.power_of_two(rows))
    key = {"key_dim": key_dim, "value_dim": value_dim, "rows": rows, "demanding": capped}
    make = functools.partial(tiles.flash_tile, card, rows, max(key_dim, value_dim), demanding=capped)
    return tuning.lookup("ragged_attention/triton", key, tiles.FlashTile, make)


CACHE_BYTES = 32 * 2**20
"""Bytes of keys and values that CTAs share in an L2 cache of 50 MB at any time."""


def l2_head_group(num_heads: int, num_kv_heads: int, kv_bytes: int) -> int:
    """Return the number of query heads whose blocks alternate: the heads of the KV heads that fit in the L2 cache.

    Args:
      num_heads: query heads, or sets of query heads that share a block.
      num_kv_heads: Hkv.
      kv_bytes: bytes of the keys and values of one KV head.
    """
    most = max(1, CACHE_BYTES // kv_bytes)
    kv_heads = max(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n <= most)
    return kv_heads * (num_heads // num_kv_heads)
