"""int8 and fp8 caches in `paged_prefill`: the producer converts tiles to float16 for the tensor cores.

Float16 represents all values of e4m3 and int8 exactly. A tile is converted once for all query rows of a block. The
producer copies the 8-bit tile to a staging buffer (one for K, one for V), and writes it as float16 to the rings, the
pipeline stages from which consumers read. Ki and Vi are the keys and values of tile i:

    producer     start K0, V0; convert K0; start K1; convert K1; start K2; convert V0; start V1; convert K2; ...

The copy of a tile to its staging buffer starts as soon as the previous tile in the buffer is converted. It completes
while a tile of the other buffer is converted.

If consumers share query rows (heads of 512 columns), the queries and one tile of K and of V leave no space for two
staging buffers. Tiles are then copied and converted in pieces of `PIECE_TOKENS` tokens, in the order in which consumers
need the tiles (`PieceDequantizer`). The staging buffer is a ring of pieces:

    tiles        K0, K1, V0, K2, V1, ..., V of the last tile
    producer     start the first pieces, one per slot; for each piece: wait for it, convert it, and start the copy of a
                 later piece to its slot

Scales are applied outside the tiles:

- per head: k_scale multiplies the scores, v_scale the output.
- per channel: k_scale multiplies the queries; each scaled query is the sum of two float16 parts. v_scale multiplies the
  output.
- per token: the producer stores the scales of a tile in shared memory. k_scale multiplies the columns of the scores.
  log2(v_scale) is added to the exponents of the probabilities; 1 / v_scale removes v_scale from the row sums.

Barriers, in addition to the barriers of `mosaic/prefill/pipeline.py`:

    barrier                    arrivals                      waits
    staged.full[0] (K), [1] (V) copies of a tile             producer, before it converts the tile
    staged.full[slot]          copy of a piece               producer, before it converts the piece
    k_full[slot], v_full[slot] producer                      consumers

Deadlock freedom. The producer waits for copies that it started itself, one tile of K and one of V at a time, or one
piece per slot, and fills the rings in the same order as with a 16-bit cache. A piece is copied to a slot after the
previous piece of the slot was waited for and converted, so each phase of `staged.full` has one arrival and one wait.

Reuse of buffers. Token scales have `stages` + 1 slots, so that the scales of tile i replace the scales of tile
i - stages - 1. The producer stores them after all consumers have multiplied the keys of tile i - stages. By then, they
have read the scales of the tile before. On Blackwell there are `stages` + 2 slots, because the tensor core may be one
tile ahead of a consumer. A copy to a staging buffer starts after `plgpu.commit_smem`, when all threads of the producer
have read the previous tile or piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.prefill.pipeline import FlashStatic, Rings, ScoreTransform, wait_if
from pallas_attn.mosaic.prefill.schedule import ring_slot
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles
from pallas_attn.mosaic.primitives.dequantize import PIECE_TOKENS
from pallas_attn.mosaic.primitives.register_tiles import BY_64, clear_rows, over_columns
from pallas_attn.mosaic.primitives.tma import arrivals
from pallas_attn.types import ScaleLayout


class StagedQuant(NamedTuple):
    """Staging buffers of a CTA.

    Attributes:
      k, v: an 8-bit tile, [tile_keys, D]; with r = `dequantize.tokens_per_smem_row` > 1, [tile_keys / r, r · D].
      full: two barriers, at which copies to k and v arrive.
      token_scales: float32 [slots, 3, tile_keys]: k_scale, log2(v_scale) and 1 / v_scale of each token. None if scales
        are not per token.
    """

    k: Any
    v: Any
    full: Any
    token_scales: Any

    @staticmethod
    def types(static: FlashStatic, dtype: Any, tokens_per_smem_row: int, slots: int) -> StagedQuant:
        """Return the scratch types.

        Args:
          dtype: dtype of the cache.
          tokens_per_smem_row: tokens in one row of the pools.
          slots: slots for scales per token, 0 for none.
        """
        rows, columns = static.tile_keys // tokens_per_smem_row, static.key_dim * tokens_per_smem_row
        tile = register_tiles.operand((rows, columns), dtype)
        scales = plgpu.SMEM((slots, 3, static.tile_keys), jnp.float32) if slots else None
        full = plgpu.Barrier(num_barriers=2, num_arrivals=arrivals(static.copies))
        return StagedQuant(tile, tile, full, scales)


class StagedPieces(NamedTuple):
    """Staging buffer of a CTA for tiles that are copied and converted in pieces.

    Attributes:
      pieces: ring of 8-bit pieces, [slots, PIECE_TOKENS, D].
      full: one barrier per slot, at which the copy of a piece arrives.
      token_scales: see `StagedQuant`.
    """

    pieces: Any
    full: Any
    token_scales: Any

    @staticmethod
    def types(static: FlashStatic, dtype: Any, scale_slots: int) -> StagedPieces:
        """Return the scratch types. The staging buffer has one tile, or one piece less with scales per token, which
        need the memory.

        Args:
          dtype: dtype of the cache.
          scale_slots: slots for scales per token, 0 for none.
        """
        slots = static.tile_keys // PIECE_TOKENS - (1 if scale_slots else 0)
        scales = plgpu.SMEM((scale_slots, 3, static.tile_keys), jnp.float32) if scale_slots else None
        pieces = register_tiles.operand((slots, PIECE_TOKENS, static.key_dim), dtype)
        return StagedPieces(pieces, plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals(1)), scales)


@dataclasses.dataclass(frozen=True)
class Dequantizer:
    """The producer warpgroup for an int8 or fp8 cache, which fills the rings from the staging buffers."""

    static: FlashStatic
    rings: Rings
    staged: Any

    def dequantize_keys(self, kv_tile: Any, store_meta: Callable[[], None]) -> None:
        """Convert a tile of keys to float16.

        Args:
          kv_tile: number of the tile, counted over all work tiles of the CTA.
          store_meta: function that stores the metadata and the token scales of the tile.
        """
        slot = ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(self.staged.full.at[0])
        wait_if(kv_tile >= self.static.stages, self.rings.k_empty.at[slot])
        store_meta()
        dequantize.dequantize_tile(self.staged.k, self.rings.k.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.rings.k_full.at[slot])

    def dequantize_values(self, kv_tile: Any, whole: Any, live_mask: Callable[[jax.Array], jax.Array]) -> None:
        """Convert a tile of values to float16. Set masked fp8 values to 0, because they may be NaN.

        Args:
          kv_tile: number of the tile, counted over all work tiles of the CTA.
          whole: whether no value of the tile is masked.
          live_mask: function that takes indices of tokens in the tile, int32 [n], and returns which of the tokens are
            not masked, bool [n].
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
        dequantize.dequantize_tile(self.staged.v, self.rings.v.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.rings.v_full.at[slot])

    def store_token_scales(self, kv_tile: Any, k_scale: jax.Array, v_scale: jax.Array) -> None:
        """Store the scales of the tokens of a tile, [tile_keys] each. `v_scale` must be 1 for masked tokens."""
        v_scale = jnp.maximum(v_scale, dequantize.SMALLEST_SCALE)
        target = self.staged.token_scales.at[ring_slot(kv_tile, self.staged.token_scales.shape[0])]
        for i, factor in enumerate((k_scale, jnp.log2(v_scale), 1 / v_scale)):
            target[i, ...] = factor


class PieceOrder(NamedTuple):
    """Order of the tiles of a work tile in the staging buffer of `StagedPieces`: K0, K1, V0, K2, V1, ...

    In the methods, `place` is an index in this order.

    Attributes:
      kv_tiles: number n of tiles of keys. There are 2 n places.
    """

    kv_tiles: Any

    @property
    def places(self) -> Any:
        return 2 * self.kv_tiles

    def has_keys(self, place: Any) -> Any:
        """Return whether a tile of keys is at the place. After the last place there is none."""
        return (place == 0) | ((place & 1) == 1) & (place < self.places - 1)

    def has_values(self, place: Any) -> Any:
        """Return whether a tile of values is at the place."""
        return (place < self.places) & ~self.has_keys(place)

    def tile(self, place: Any) -> Any:
        """Return the index of the tile at the place."""
        return lax.shift_right_arithmetic(jnp.where(self.has_keys(place), place + 1, place - 1), 1)


@dataclasses.dataclass(frozen=True)
class PieceDequantizer(Dequantizer):
    """The producer warpgroup for an int8 or fp8 cache that is copied in pieces (`StagedPieces`).

    In the methods, `first` is the number of the first piece of a tile, counted over all work tiles of the CTA, and
    `copy_next` is called when a slot is empty: copy_next(piece, slot, full) starts the copy of the piece that is
    `piece` pieces after the first piece of the tile.
    """

    @property
    def slots(self) -> int:
        return self.staged.pieces.shape[0]

    def slot(self, piece: Any) -> tuple[Any, Any]:
        """Return the slot of a piece, [PIECE_TOKENS, D], and its barrier."""
        slot = ring_slot(piece, self.slots)
        return self.staged.pieces.at[slot], self.staged.full.at[slot]

    def convert(self, first: Any, to: Any, copy_next: Callable[[int, Any, Any], None]) -> None:
        """Convert the pieces of a tile to float16."""
        for i in range(self.static.tile_keys // PIECE_TOKENS):
            piece, full = self.slot(first + i)
            plgpu.barrier_wait(full)
            dequantize.dequantize_tile(piece, to.at[pl.ds(i * PIECE_TOKENS, PIECE_TOKENS)])
            plgpu.commit_smem()
            copy_next(i + self.slots, piece, full)

    def convert_keys(
        self, kv_tile: Any, first: Any, store_meta: Callable[[], None], copy_next: Callable[[int, Any, Any], None]
    ) -> None:
        """Convert a tile of keys. `kv_tile` and `store_meta` are as in `dequantize_keys`."""
        slot = ring_slot(kv_tile, self.static.stages)
        wait_if(kv_tile >= self.static.stages, self.rings.k_empty.at[slot])
        store_meta()
        self.convert(first, self.rings.k.at[slot], copy_next)
        plgpu.barrier_arrive(self.rings.k_full.at[slot])

    def convert_values(
        self,
        kv_tile: Any,
        first: Any,
        whole: Any,
        live_mask: Callable[[jax.Array], jax.Array],
        copy_next: Callable[[int, Any, Any], None],
    ) -> None:
        """Convert a tile of values, and set masked values to 0, because fp8 values may be NaN. `kv_tile`, `whole` and
        `live_mask` are as in `dequantize_values`.
        """
        slot = ring_slot(kv_tile, self.static.stages)
        wait_if(kv_tile >= self.static.stages, self.rings.v_empty.at[slot])
        values = self.rings.v.at[slot]
        self.convert(first, values, copy_next)
        if self.staged.pieces.dtype != jnp.int8:

            @pl.when(~whole)
            def _clear() -> None:
                clear_rows(values, live_mask(register_tiles.row_iota(self.static.tile_keys, BY_64)), BY_64)
                plgpu.commit_smem()

        plgpu.barrier_arrive(self.rings.v_full.at[slot])


class CacheScales(NamedTuple):
    """Scales of the cache, as consumers apply them.

    Attributes:
      layout: layout of the scales.
      k, v: references to k_scale (None if q includes it) and v_scale.
      token_scales: see `StagedQuant`.
    """

    layout: ScaleLayout
    k: Any
    v: Any
    token_scales: Any

    def transform(self, transform: ScoreTransform, kv_head: Any, kv_tile: Any) -> ScoreTransform:
        """Return a `ScoreTransform` that also applies the scales.

        Args:
          kv_tile: number of the first tile of the work tile, counted over all work tiles of the CTA.
        """
        if self.layout == "head":
            return transform._replace(key_scale=self.k[kv_head])
        if self.token_scales is None:
            return transform
        slots = self.token_scales.shape[0]
        return transform._replace(token_scales=lambda i: self.token_scales.at[ring_slot(kv_tile + i, slots)])

    def output_scale(self, kv_head: Any) -> Callable[[Any, int, Any], Any] | None:
        """Return the function for `RowOptions` that applies v_scale to the output; None if v_scale is per token."""
        if self.layout == "head":
            return lambda o, *_: o * self.v[kv_head]
        if self.layout == "channel":
            return lambda o, first, per_column: (
                o * over_columns(basics.load(self.v.at[kv_head, pl.ds(first, o.shape[1])], per_column), o.shape)
            )
        return None
