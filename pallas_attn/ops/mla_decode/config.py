"""Tunable sizes of `mla_decode`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_attn.mosaic.decode_config import MAX_STAGES, DecodeConfig
from pallas_attn.portable.online_softmax import XlaConfig, decode_heuristic
from pallas_attn.runtime import tuning
from pallas_attn.types import LATENT_8BIT

if TYPE_CHECKING:
    from pallas_attn.mosaic.decode import DecodeTile
    from pallas_attn.mosaic.primitives.query_packing import QueryPacking


def xla_config(rows: int, width: int) -> XlaConfig:
    """Return tile and group sizes of the portable implementation, for `rows` sequences and `width` = L + R columns."""
    key = {"rows": rows, "width": width}
    return tuning.lookup("mla_decode/xla", key, XlaConfig, lambda: decode_heuristic(rows, width))


# --- few query rows, as columns of tiles (mosaic_swap_ab)

TILE_TOKENS = 64


def max_columns(out_dtype: jax.typing.DTypeLike, *, quantised: bool = False, masked: bool = False) -> int:
    """Return the maximum number of query rows of the swap-AB kernel, in which query rows are the columns of a tile.

    A query row is one head of one query token. The registers of a warpgroup at L = 512 limit the number. Float32
    outputs, conversion of quantised latents, and draft masks over quantised latents need registers, too. With more
    query rows, the two-warpgroup kernels, in which query rows are the rows of a tile, are faster.
    """
    if quantised:
        return 16 if masked else 24
    return 32 if jnp.dtype(out_dtype).itemsize == 2 else 24


@dataclasses.dataclass(frozen=True)
class SwapAbKey:
    """Properties of a call that determine the best sizes of the swap-AB kernel.

    Attributes:
      latent_dim, rope_dim: L, R.
      columns: query rows per CTA, including padding.
      out_bytes: bytes per element of the output.
      page_size: ps, tokens.
      quantised: whether latents are quantised to 8 bits.
    """

    latent_dim: int
    rope_dim: int
    columns: int
    out_bytes: int
    page_size: int
    quantised: bool = False


def swap_ab_config(key: SwapAbKey) -> DecodeConfig:
    """Return the sizes of the swap-AB kernel."""
    return tuning.lookup(
        "mla_decode/mosaic_columns", dataclasses.asdict(key), DecodeConfig, lambda: _swap_ab_heuristic(key)
    )


def _swap_ab_heuristic(key: SwapAbKey) -> DecodeConfig:
    """Maximise the number of CTAs per SM within registers and shared memory, with at least two tiles per CTA.

    For quantised latents, CTAs may have a single tile.
    """
    # Imported here because the portable implementation must work without Mosaic.
    from pallas_attn.mosaic.primitives.query_packing import QueryPacking

    values = key.latent_dim * key.columns
    most, least = 4 if values <= 2048 else 3 if values <= 3072 else 2 if values <= 8192 else 1, 2
    if key.quantised:  # conversion takes more registers, and a second CTA per SM hides its latency
        most, least = 3 if values <= 2048 else 2, 1
    tile = swap_ab_tile(
        QueryPacking(group=key.columns, queries=1, limit=key.columns),
        TILE_TOKENS,
        key.page_size,
        (key.latent_dim, key.rope_dim),
        dtype=jnp.bfloat16,
        out_dtype=jnp.bfloat16 if key.out_bytes == 2 else jnp.float32,
        quantised=key.quantised,
    )
    for programs in range(most, 0, -1):
        stages = tile.max_stages(programs, MAX_STAGES)
        if stages >= least:
            return DecodeConfig(TILE_TOKENS, stages, programs)
    raise NotImplementedError(f"two tiles of {key.latent_dim} + {key.rope_dim} columns do not fit shared memory")


def swap_ab_tile(
    packing: QueryPacking,
    tokens: int,
    page_size: int,
    key_dims: tuple[int, int],
    *,
    dtype: Any,
    out_dtype: Any,
    quantised: bool = False,
) -> DecodeTile:
    """Return the tile of the swap-AB kernel.

    Args:
      packing: arrangement of query rows in columns.
      tokens: tokens of a tile.
      page_size: tokens of a page.
      key_dims: L and R.
      dtype: dtype of queries and cache; over quantised latents, dtype of queries and rotated keys.
      out_dtype: dtype of the output.
      quantised: whether latents are quantised to 8 bits.
    """
    from pallas_attn.mosaic.decode import DecodeTile
    from pallas_attn.mosaic.hopper.decode_products import WgmmaProducts

    return DecodeTile(
        packing=packing,
        tokens=tokens,
        page_size=page_size,
        key_dims=key_dims,
        has_values=False,
        query_parts=1,
        packs_queries=False,
        scales=None,
        q_dtype=jnp.float16 if quantised else dtype,
        cache_dtype=LATENT_8BIT if quantised else dtype,
        out_dtype=out_dtype,
        products=WgmmaProducts(),
        rope_dtype=dtype if quantised else None,
    )


# --- many query rows, as rows of tiles (mosaic_two_warpgroup_bf16)


@dataclasses.dataclass(frozen=True)
class TwoWarpgroupConfig:
    """Sizes of the two-warpgroup kernel over 16-bit latents.

    Attributes:
      pairs: pairs of tiles of 64 latents in shared memory.
      cluster: number of CTAs of a cluster, which share copies: 1 or 2. The kernel uses 1 if the number of blocks of 64
        query rows is odd.
    """

    pairs: int
    cluster: int

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= 5:
            raise ValueError(f"pairs: expected an int from 1 to 5, got {self.pairs}")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster: expected 1 or 2, got {self.cluster}")


def two_warpgroup_config(latent_dim: int, rope_dim: int, page_size: int) -> TwoWarpgroupConfig:
    """Return the sizes of the two-warpgroup kernel over 16-bit latents."""
    key = {"latent_dim": latent_dim, "rope_dim": rope_dim, "page_size": page_size}
    heuristic = TwoWarpgroupConfig(pairs=1 if latent_dim + rope_dim > 320 else 2, cluster=2)
    return tuning.lookup("mla_decode/mosaic", key, TwoWarpgroupConfig, lambda: heuristic)
