"""8-bit caches in `paged_prefill`: tiles as cached become the float16 that the tensor cores multiply.

Float16 holds all values of e4m3 and int8. Both operands that come from the cache have to lie in shared memory as tensor
cores read them, and all rows of a block use them: the producer, which has little else to do, copies a tile as cached to
a staging buffer, one for keys and one for values, and writes it as float16 to a slot of the rings. The consumers notice
only the scales:

    producer     K0 V0 copied ·dequant K0· K1 copied ·dequant K1· K2 copied ·dequant V0· V1 copied ·dequant K2· ···

A tile is copied to its staging buffer right after the one before it was dequantized, and arrives while a tile of the
other kind is dequantized. Scales of a head multiply a tile of scores, and the finished output. Scales of channels are
in the queries, as a sum of two terms of 16 bits, and multiply the output. Scales of tokens the producer publishes with
the keys of a tile: scales of keys, which multiply columns of scores, and logarithms and inverses of those of values,
which enter probabilities through the exponent, and leave their sum.

Barriers, beside those of `flash.pipeline`:

    barrier                      arrivals              who waits
    staged.full[0], [1]        the copies of a tile  producer, before it dequantizes keys, values
    k_full[slot], v_full     the producer          consumers

This cannot deadlock either: the producer waits for copies it started itself, one tile of keys and one of values at a
time, and brings keys and values to the rings in the order in which it copies 16-bit tiles there. Token scales are
written over those of `stages` + 1 tiles before, once all consumers have multiplied the keys of the tile after that one,
and so have read them; where the tensor core may be a tile ahead of its consumer, over those of `stages` + 2 tiles
before. Before a tile is copied over another in a staging buffer, all threads are done reading that:
committing what they wrote to the tensor cores makes sure of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.prefill.pipeline import FlashStatic, Rings, ScoreTransform, wait_if
from pallas_attn.mosaic.prefill.schedule import ring_slot
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles
from pallas_attn.mosaic.primitives.register_tiles import BY_64, over_columns
from pallas_attn.mosaic.primitives.tma import arrivals
from pallas_attn.types import ScaleLayout


class StagedQuant(NamedTuple):
    """Staging buffers of a program, beside the rings.

    Attributes:
      k, v: a tile as cached: [tile_keys, D], or with several tokens in a row (`dequantise.tokens_per_smem_row`).
      full: barriers of both.
      token_scales: [slots, 3, tile_keys] float32: for each token the scale of its key, and log2 and inverse of the
        scale of its value; None if scales do not come with the tokens.
    """

    k: Any
    v: Any
    full: Any
    token_scales: Any

    @staticmethod
    def types(static: FlashStatic, dtype: Any, tokens_per_smem_row: int, slots: int) -> StagedQuant:
        """For a cache with so many tokens in a row, and so many slots for scales of tokens, 0 for none."""
        rows, columns = static.tile_keys // tokens_per_smem_row, static.key_dim * tokens_per_smem_row
        tile = register_tiles.operand((rows, columns), dtype)
        scales = plgpu.SMEM((slots, 3, static.tile_keys), jnp.float32) if slots else None
        full = plgpu.Barrier(num_barriers=2, num_arrivals=arrivals(static.copies))
        return StagedQuant(tile, tile, full, scales)


@dataclasses.dataclass(frozen=True)
class Dequantizer:
    """Fills the rings of `flash.pipeline`, as its `Producer` does, with what was copied to the staging buffers."""

    static: FlashStatic
    rings: Rings
    staged: StagedQuant

    def dequantize_keys(self, kv_tile: Any, store_meta: Callable[[], None]) -> None:
        """Brings a tile of keys; store_meta() writes what consumers read beside it."""
        slot = ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(self.staged.full.at[0])
        wait_if(kv_tile >= self.static.stages, self.rings.k_empty.at[slot])
        store_meta()
        dequantize.dequantise_tile(self.staged.k, self.rings.k.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.rings.k_full.at[slot])

    def dequantize_values(self, kv_tile: Any, whole: Any, live_mask: Callable[[jax.Array], jax.Array]) -> None:
        """Brings a tile of values. Unless `whole`, those of tokens outside live_mask(token numbers) are zeroed, since
        they may be NaN; no int8 is.
        """
        slot = ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(self.staged.full.at[1])
        if self.staged.v.dtype != jnp.int8:

            @pl.when(~whole)
            def _clear() -> None:
                live = live_mask(register_tiles.row_iota(self.static.tile_keys, BY_64))
                dequantize.clear_tokens(self.staged.v, self.static.value_dim, live, BY_64)
                plgpu.commit_smem()

        wait_if(kv_tile >= self.static.stages, self.rings.v_empty.at[slot])
        dequantize.dequantise_tile(self.staged.v, self.rings.v.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.rings.v_full.at[slot])

    def store_token_scales(self, kv_tile: Any, k_scale: jax.Array, v_scale: jax.Array) -> None:
        """Writes the scales of a tile's tokens; that of masked values has to be 1."""
        v_scale = jnp.maximum(v_scale, dequantize.SMALLEST_SCALE)
        target = self.staged.token_scales.at[ring_slot(kv_tile, self.staged.token_scales.shape[0])]
        for i, factor in enumerate((k_scale, jnp.log2(v_scale), 1 / v_scale)):
            target[i, ...] = factor


class CacheScales(NamedTuple):
    """Scales of the cache in consumers.

    Attributes:
      layout: which scales there are.
      k, v: references to those of keys (None if they are in the queries) and of values.
      token_scales: of `StagedQuant`.
    """

    layout: ScaleLayout
    k: Any
    v: Any
    token_scales: Any

    def transform(self, transform: ScoreTransform, kv_head: Any, kv_tile: Any) -> ScoreTransform:
        """The transform with scales, of a block whose tiles have number `kv_tile` of the rings and the next ones."""
        if self.layout == "head":
            return transform._replace(key_scale=self.k[kv_head])
        if self.token_scales is None:
            return transform
        slots = self.token_scales.shape[0]
        return transform._replace(token_scales=lambda i: self.token_scales.at[ring_slot(kv_tile + i, slots)])

    def output_scale(self, kv_head: Any) -> Callable[[Any, int, Any], Any] | None:
        """Function that applies the scales which are the same for all tokens to sums of values; see `RowOptions`."""
        if self.layout == "head":
            return lambda o, *_: o * self.v[kv_head]
        if self.layout == "channel":
            return lambda o, first, per_column: (
                o * over_columns(basics.load(self.v.at[kv_head, pl.ds(first, o.shape[1])], per_column), o.shape)
            )
        return None
