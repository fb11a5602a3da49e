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
    from pallas_attn.ops.paged_decode.call import PagedDecodeCall


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
    """Columns of a tile for which a warpgroup has registers, besides those that dequantising and a soft cap take."""
    columns = 64 * cache_bytes * 64 // max(head_dim, 128)
    return columns * 3 // 4 // 8 * 8 if capped else columns


def packs_queries(cache_bytes: int, columns: int) -> bool:
    """Whether the kernel packs queries. That saves a kernel before it, except where queries have to be converted
    anyway, and costs shared memory, of which wide tiles make better use.
    """
    return cache_bytes == 2 and columns == 8


@dataclasses.dataclass(frozen=True)
class PagedDecodeKey:
    """Facts of a call that the best sizes of the Mosaic kernel depend on.

    Attributes:
      head_dim: D.
      cache_bytes: bytes of a cached value.
      token_scales: whether scales come with the tokens.
      columns: query rows of a KV head that a program takes at once, padding included.
      terms: 16-bit numbers whose sum is a query.
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


def key_of(call: PagedDecodeCall, columns: int) -> PagedDecodeKey:
    """Key of a call, given the columns of its tiles."""
    scales = call.kv.k_scale
    return PagedDecodeKey(
        head_dim=call.head_dim,
        cache_bytes=call.kv.k.dtype.itemsize,
        token_scales=scales is not None and scales.ndim == 3,
        columns=columns,
        terms=2 if scales is not None and scales.ndim == 2 else 1,
        out_bytes=call.output_dtype.itemsize,
        page_size=call.page_size,
    )


def mosaic_config(key: PagedDecodeKey) -> DecodeConfig:
    """Sizes of the Mosaic kernel."""
    return tuning.lookup("paged_decode/mosaic", dataclasses.asdict(key), DecodeConfig, lambda: _mosaic_heuristic(key))


ENOUGH_BYTES = 96 * 1024
"""Tiles of a multiprocessor take no more: three times what keeps its share of the memory busy. Over 8-bit caches more
was 2 to 5% slower (pages of 16: 266 us with 96 KB, 280 us with 192). In 16 bits two tiles for each program come to
192 KB anyway.
"""


def _mosaic_heuristic(key: PagedDecodeKey) -> DecodeConfig:
    """Run as many programs side by side as registers and shared memory hold, each with two tiles or more: while one
    waits for memory or for its own arithmetic, the others work.
    """
    tile_tokens = 128 if key.head_dim == 64 and key.columns == 8 and key.page_size > 16 else 64
    most = 4 if key.columns == 8 and tile_tokens == 64 else 3 if key.columns * key.head_dim <= 2048 else 2
    if most == 4:  # registers for as many where nothing but the tile is in them
        most -= (key.terms == 2) + (key.cache_bytes == 1 and key.page_size == 16)
    tile = mosaic_tile(key, tile_tokens)
    tile_bytes = 2 * tile_tokens * key.head_dim * key.cache_bytes
    for programs in range(most, 0, -1):
        enough = max(2, -(-ENOUGH_BYTES // (programs * tile_bytes)))
        stages = tile.max_stages(programs, min(enough, MAX_STAGES))
        if stages >= 2:
            return DecodeConfig(tile_tokens, stages, programs)
    raise ValueError(f"two tiles of {tile_tokens} tokens of {key.head_dim} values do not fit shared memory")


def mosaic_tile(key: PagedDecodeKey, tile_tokens: int) -> DecodeTile:
    """Tile of the kernel for a key; of the calls that share the key, for the one that takes the most shared memory."""
    # Only here, since the portable implementation has to run where there is no kernel language.
    from pallas_attn.mosaic.hopper.decode_products import WgmmaProducts

    return _tile(key, tile_tokens, WgmmaProducts(), packs_queries=packs_queries(key.cache_bytes, key.columns))


# --- data-center Blackwell

MAX_COLUMNS_SM100 = 32
"""Columns of a tile of 128 tokens for which a warpgroup has registers."""


def column_step_sm100(head_dim: int, cache_bytes: int, *, fp8_products: bool = False) -> int:
    """Divisor of the number of columns of a tile."""
    from pallas_attn.mosaic.blackwell.decode_products import column_step

    return column_step(_tile_tokens_sm100(head_dim, cache_bytes, fp8_products=fp8_products), head_dim)


def _tile_tokens_sm100(head_dim: int, cache_bytes: int, *, fp8_products: bool) -> int:
    """128 tokens, the rows of the tensor core; 64 where tiles in float16 are so large that no second program, or in 16
    bits no second tile, would fit beside them. Products of fp8 take 128 whatever fits, since 64 rows would need 64
    columns.
    """
    return 128 if fp8_products or head_dim * 2 <= 128 * cache_bytes else 64


def mosaic_sm100_config(key: PagedDecodeKey, *, fp8_products: bool = False) -> DecodeConfig:
    """Sizes of the Mosaic kernel.

    Args:
      fp8_products: whether keys are multiplied as they are cached, with fp8 queries.
    """
    name = "paged_decode/mosaic_fp8_products" if fp8_products else "paged_decode/mosaic"
    heuristic = functools.partial(_mosaic_sm100_heuristic, key, fp8_products=fp8_products)
    return tuning.lookup(name, dataclasses.asdict(key), DecodeConfig, heuristic)


def _mosaic_sm100_heuristic(key: PagedDecodeKey, *, fp8_products: bool) -> DecodeConfig:
    """Run two programs side by side, which registers hold, if shared memory has two tiles or more for each: one that
    converts 8-bit tiles takes longer for a tile than its bytes, and the other has to work meanwhile.
    """
    tile_tokens = _tile_tokens_sm100(key.head_dim, key.cache_bytes, fp8_products=fp8_products)
    tile = mosaic_sm100_tile(key, tile_tokens)
    for programs in (2, 1):
        stages = tile.max_stages(programs, MAX_STAGES)
        if stages >= 2:
            return DecodeConfig(tile_tokens, stages, programs)
    raise ValueError(f"two tiles of {tile_tokens} tokens of {key.head_dim} values do not fit shared memory")


def mosaic_sm100_tile(key: PagedDecodeKey, tile_tokens: int) -> DecodeTile:
    """Tile of the kernel of data-center Blackwell; see `mosaic_tile`."""
    from pallas_attn.mosaic.blackwell.decode_products import Tcgen05Products

    return _tile(key, tile_tokens, Tcgen05Products(), packs_queries=False)


# --- either


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
