"""Tunable sizes of `paged_decode`."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_attn.mosaic.decode_config import MAX_STAGES, DecodeConfig
from pallas_attn.portable.online_softmax import XlaConfig, decode_heuristic
from pallas_attn.runtime import tuning

if TYPE_CHECKING:
    from pallas_attn.mosaic.decode import DecodeProducts, DecodeTile


def xla_config(rows: int, heads: int, head_dim: int) -> XlaConfig:
    """Return tile and group sizes of the portable implementation.

    Args:
      rows: number of units that read pages separately: sequences, or (sequence, KV head) pairs if heads have their own
        windows or tables.
      heads: KV heads per unit.
      head_dim: D.
    """
    key = {"rows": rows, "heads": heads, "head_dim": head_dim}
    return tuning.lookup("paged_decode/xla", key, XlaConfig, lambda: decode_heuristic(rows, heads * head_dim))


def max_columns(head_dim: int, cache_bytes: int, *, capped: bool = False) -> int:
    """Return the largest number of tile columns for which the registers of a warpgroup suffice.

    The columns of a tile are the query rows (query heads times queries) of a KV head. Dequantisation and a soft cap
    need registers, too.

    Args:
      cache_bytes: bytes per cached value.
      capped: whether scores have a soft cap.
    """
    if head_dim > 256:  # a thread may have 255 registers, because at most two CTAs fit shared memory
        return 16 if cache_bytes == 1 or capped else 24
    columns = 64 * cache_bytes * 64 // max(head_dim, 128)
    return columns * 3 // 4 // 8 * 8 if capped else columns


def packs_queries(head_dim: int, cache_bytes: int, columns: int) -> bool:
    """Return whether the attention kernel itself arranges queries as the columns of a tile.

    Otherwise a separate kernel arranges them. 8-bit caches need the separate kernel anyway, because it converts the
    queries. Packing in the attention kernel takes shared memory, which wide tiles need for keys and values, and a TMA
    copy of unpacked queries takes at most 256 columns.
    """
    return cache_bytes == 2 and columns == 8 and head_dim <= 256


@dataclasses.dataclass(frozen=True)
class PagedDecodeKey:
    """Properties of a call that determine the best sizes of the Mosaic kernel.

    Attributes:
      head_dim: D.
      cache_bytes: bytes per cached value.
      token_scales: whether the cache has a scale per token or group of tokens.
      columns: query rows of a KV head per CTA, including padding.
      terms: number of 16-bit parts whose sum is a query; 2 if the cache has a scale per channel, else 1.
      out_bytes: bytes per output value.
      page_size: ps.
    """

    head_dim: int
    cache_bytes: int
    token_scales: bool
    columns: int
    terms: int
    out_bytes: int
    page_size: int


def mosaic_config(key: PagedDecodeKey) -> DecodeConfig:
    """Return the sizes of the Mosaic kernel."""
    return tuning.lookup("paged_decode/mosaic", dataclasses.asdict(key), DecodeConfig, lambda: _mosaic_heuristic(key))


ENOUGH_BYTES = 96 * 1024
"""Size of all tiles of a multiprocessor from which no more pipeline stages are added, in bytes.

It is three times the number of bytes in flight per multiprocessor that saturates the memory. With 8-bit caches, more
bytes were 2 to 5% slower (pages of 16 tokens: 266 us with 96 KB, 280 us with 192 KB). With 16-bit caches, the minimum
of two tiles per CTA may already take 192 KB.
"""


def _mosaic_heuristic(key: PagedDecodeKey) -> DecodeConfig:
    """Run the maximum number of CTAs per multiprocessor that registers and shared memory permit, each with at least two
    tiles. One tile suffices if keys are refilled before values are multiplied.

    While one CTA waits for memory or computes, the other CTAs work.
    """
    tile_tokens = 128 if key.head_dim == 64 and key.columns == 8 and key.page_size > 16 else 64
    few_columns = key.columns == 8 and tile_tokens == 64 and key.head_dim <= 256
    most = 4 if few_columns else 3 if key.columns * key.head_dim <= 2048 else 2
    if most == 4:  # two query parts, and the conversion of small 8-bit pages, each take the registers of one CTA
        most -= (key.terms == 2) + (key.cache_bytes == 1 and key.page_size == 16)
    tile = mosaic_tile(key, tile_tokens)
    tile_bytes = 2 * tile_tokens * key.head_dim * key.cache_bytes
    for ctas in range(most, 0, -1):
        enough = max(2, -(-ENOUGH_BYTES // (ctas * tile_bytes)))
        stages = tile.max_stages(ctas, min(enough, MAX_STAGES))
        if stages >= (1 if tile.refills_keys_early else 2):
            return DecodeConfig(tile_tokens, stages, ctas)
    raise ValueError(f"two tiles of {tile_tokens} tokens of {key.head_dim} values do not fit shared memory")


def mosaic_tile(key: PagedDecodeKey, tile_tokens: int) -> DecodeTile:
    """Return a tile with which the shared memory of the kernel is computed.

    Several calls have the same key. The tile belongs to the call that needs the most shared memory.
    """
    # Imported here because the portable implementation must run without Mosaic.
    from pallas_attn.mosaic.hopper.decode_products import WgmmaProducts

    return _tile(
        key, tile_tokens, WgmmaProducts(), packs_queries=packs_queries(key.head_dim, key.cache_bytes, key.columns)
    )


# --- data-center Blackwell

MAX_COLUMNS_SM100 = 32
"""Maximum number of columns of a tile of 128 tokens, limited by the registers of a warpgroup."""


def column_step_sm100(head_dim: int, cache_bytes: int, *, fp8_products: bool = False) -> int:
    """Return the granularity of tile columns: the number of tile columns must be a multiple of the result."""
    from pallas_attn.mosaic.blackwell.decode_products import column_step

    return column_step(_tile_tokens_sm100(head_dim, cache_bytes, fp8_products=fp8_products), head_dim)


def _tile_tokens_sm100(head_dim: int, cache_bytes: int, *, fp8_products: bool) -> int:
    """Return the number of tokens per tile: 128, the rows of the tensor core, or 64.

    64 tokens are used if float16 tiles of 128 tokens are so large that shared memory has no room for a second CTA
    (8-bit caches) or for a second tile (16-bit caches). fp8 products always use 128 tokens: with 64 rows, the tensor
    core would need 64 columns.
    """
    return 128 if fp8_products or head_dim * 2 <= 128 * cache_bytes else 64


def mosaic_sm100_config(key: PagedDecodeKey, *, fp8_products: bool = False) -> DecodeConfig:
    """Return the sizes of the Mosaic kernel.

    Args:
      fp8_products: whether fp8 keys are multiplied by fp8 queries without conversion.
    """
    name = "paged_decode/mosaic_fp8_products" if fp8_products else "paged_decode/mosaic"
    heuristic = functools.partial(_mosaic_sm100_heuristic, key, fp8_products=fp8_products)
    return tuning.lookup(name, dataclasses.asdict(key), DecodeConfig, heuristic)


def _mosaic_sm100_heuristic(key: PagedDecodeKey, *, fp8_products: bool) -> DecodeConfig:
    """Run two CTAs per multiprocessor if shared memory has room for two tiles of each, else one CTA.

    Registers permit two CTAs. Converting an 8-bit tile takes longer than loading it, so a second CTA has to keep the
    memory busy meanwhile.
    """
    tile_tokens = _tile_tokens_sm100(key.head_dim, key.cache_bytes, fp8_products=fp8_products)
    tile = mosaic_sm100_tile(key, tile_tokens)
    for ctas in (2, 1):
        stages = tile.max_stages(ctas, MAX_STAGES)
        if stages >= 2:
            return DecodeConfig(tile_tokens, stages, ctas)
    raise ValueError(f"two tiles of {tile_tokens} tokens of {key.head_dim} values do not fit shared memory")


def mosaic_sm100_tile(key: PagedDecodeKey, tile_tokens: int) -> DecodeTile:
    """Return the tile of the kernel for data-center Blackwell; see `mosaic_tile`."""
    from pallas_attn.mosaic.blackwell.decode_products import Tcgen05Products

    return _tile(key, tile_tokens, Tcgen05Products(), packs_queries=False)


# --- both architectures


def _tile(key: PagedDecodeKey, tile_tokens: int, products: DecodeProducts, *, packs_queries: bool) -> DecodeTile:
    from pallas_attn.mosaic.decode import DecodeTile
    from pallas_attn.mosaic.primitives.query_packing import QueryPacking

    return DecodeTile(
        packing=QueryPacking(group=key.columns, queries=1, limit=key.columns),
        tokens=tile_tokens,
        page_size=key.page_size,
        key_dims=(key.head_dim,),
        has_values=True,
        query_parts=key.terms,
        packs_queries=packs_queries,
        scales=None if key.cache_bytes == 2 else key.page_size if key.token_scales else "head",
        q_dtype=jnp.bfloat16,
        cache_dtype=jnp.int8 if key.cache_bytes == 1 else jnp.bfloat16,
        out_dtype=jnp.bfloat16 if key.out_bytes == 2 else jnp.float32,
        products=products,
    )
