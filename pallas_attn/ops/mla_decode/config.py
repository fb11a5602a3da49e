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
    """Return tile and group sizes of the portable implementation for L + R = `width` columns."""
    key = {"rows": rows, "width": width}
    return tuning.lookup("mla_decode/xla", key, XlaConfig, lambda: decode_heuristic(rows, width))


# --- few query rows, as tile columns (mosaic_swap_ab)

TILE_TOKENS = 64


def max_columns(out_dtype: jax.typing.DTypeLike, *, quantised: bool = False, masked: bool = False) -> int:
    """Return the number of query rows that the registers of a warpgroup can hold as tile columns if L is 512.

    It accounts for the registers that writing the outputs, converting quantised latents, and draft masks need. With
    more query rows, kernels with query rows as tile rows are faster.
    """
    if quantised:
        return 16 if masked else 24
    return 32 if jnp.dtype(out_dtype).itemsize == 2 else 24


@dataclasses.dataclass(frozen=True)
class SwapAbKey:
    """Facts of a call that determine the best sizes of the kernel for few query rows.

    Attributes:
      latent_dim, rope_dim: L, R.
      columns: query rows per CTA, including padding.
      out_bytes: bytes per output value.
      page_size: ps.
      quantised: whether latents have 8 bits.
    """

    latent_dim: int
    rope_dim: int
    columns: int
    out_bytes: int
    page_size: int
    quantised: bool = False


def swap_ab_config(key: SwapAbKey) -> DecodeConfig:
    """Return the sizes of the kernel for few query rows."""
    return tuning.lookup(
        "mla_decode/mosaic_columns", dataclasses.asdict(key), DecodeConfig, lambda: _swap_ab_heuristic(key)
    )


def _swap_ab_heuristic(key: SwapAbKey) -> DecodeConfig:
    """Run the maximum number of CTAs per multiprocessor that registers and shared memory permit, each with at least two
    tiles.
    """
    # Imported here because the portable implementation must run without Mosaic.
    from pallas_attn.mosaic.primitives.query_packing import QueryPacking

    values = key.latent_dim * key.columns
    most, least = 4 if values <= 2048 else 3 if values <= 3072 else 2 if values <= 8192 else 1, 2
    if key.quantised:  # converting latents needs more registers, and profits more from concurrent CTAs
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
    """Return the tile of the kernel for few query rows.

    Args:
      key_dims: L and R.
      dtype: dtype of queries and cache; with 8-bit latents, dtype of the rotated columns.
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


# --- many query rows, rows of tiles (mosaic_seesaw)


@dataclasses.dataclass(frozen=True)
class SeesawConfig:
    """Sizes of a CTA of the kernel for many query rows.

    Attributes:
      pairs: pairs of tiles of 64 latents in shared memory.
      cluster: CTAs on neighbouring multiprocessors that share loaded tiles: 1, or 2 if the number of CTAs is even.
    """

    pairs: int
    cluster: int

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= 5:
            raise ValueError(f"{self.pairs=} must be from 1 to 5")
        if self.cluster not in (1, 2):
            raise ValueError(f"{self.cluster=} must be 1 or 2")


def seesaw_config(latent_dim: int, rope_dim: int, page_size: int) -> SeesawConfig:
    """Return the sizes of the kernel for many query rows."""
    key = {"latent_dim": latent_dim, "rope_dim": rope_dim, "page_size": page_size}
    heuristic = SeesawConfig(pairs=1 if latent_dim + rope_dim > 320 else 2, cluster=2)
    return tuning.lookup("mla_decode/mosaic", key, SeesawConfig, lambda: heuristic)
