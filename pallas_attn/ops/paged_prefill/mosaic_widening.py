"""8-bit caches in `paged_prefill` on Hopper: how tiles become the 16 bits that the tensor cores multiply.

They multiply in float16, which holds what e4m3 and int8 do. Both operands that come from the cache have to lie in
shared memory as wgmma reads them, and all rows of a block use them: the producer, which has little else to do, copies
a tile as it is cached to where there is room for one of keys and one of values, and writes it as float16 to a slot of
the rings. Consumers see nothing of it but scales:

    producer     K0 V0 copied ·widen K0· K1 copied ·widen K1· K2 copied ·widen V0· V1 copied ·widen K2· K3 copied ···

A narrow tile is copied right after the one before it was widened, and arrives while one of the other kind is. Scales
of a head multiply a tile of scores, and the finished output. Those of channels are in the queries, as a sum of two
terms of 16 bits, and multiply the output. Those of tokens the producer brings with the keys of a tile, as factors:
scales of keys, which multiply columns of scores, and logarithms and inverses of those of values, which go into
probabilities by way of the exponent, and out of their sum.

    narrow.landed[0], [1]   the copies of a tile   producer, before it widens keys, values
    k_landed, v_landed      the producer           consumers; see `sm90.flash.kernel` for all others

No wait can last, beside those of `sm90.flash.kernel`: the producer waits for copies it started itself, one tile of keys
and one of values at a time, each once, and brings keys and values to the rings in the order in which it copies them
there where nothing is widened. Factors are written where those of `stages` + 1 tiles before were: once keys of the tile
after that have been multiplied by all consumers, which then were done with them. Before a narrow tile is copied over
another, all threads are done reading it, which what is committed to the tensor cores makes sure of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.sm90 import dequantise, tiles
from pallas_attn.mosaic.sm90.flash.kernel import Memory, Static, View, Weights, turn_of, wait_if
from pallas_attn.mosaic.sm90.tiles import PER_COLUMN, over_columns
from pallas_attn.types import ScaleLayout


class Narrow(NamedTuple):
    """Shared memory and barriers of a program, beside `Memory`.

    Attributes:
      k, v: a tile as cached: [tile_keys, D], or with several tokens in a row (`dequantise.tokens_per_smem_row`).
      landed: barriers of both.
      factors: [stages + 1, 3, tile_keys] float32: for each token the scale of its keys, and log2 and inverse of that of
        its values; None if scales do not come with the tokens.
    """

    k: Any
    v: Any
    landed: Any
    factors: Any

    @staticmethod
    def types(static: Static, dtype: Any, beside: int, *, token_scales: bool) -> Narrow:
        """For a cache of some dtype with `beside` tokens in a row."""
        tile = tiles.operand((static.tile_keys // beside, static.key_dim * beside), dtype)
        factors = plgpu.SMEM((static.stages + 1, 3, static.tile_keys), jnp.float32)
        landed = plgpu.Barrier(num_barriers=2, num_arrivals=static.copies)
        return Narrow(tile, tile, landed, factors if token_scales else None)


@dataclasses.dataclass(frozen=True)
class Widener:
    """Fills the rings of `sm90.flash.kernel`, as its `Producer`, with what was copied to `narrow`."""

    static: Static
    mem: Memory
    narrow: Narrow

    def widen_keys(self, tile: Any, prepare: Callable[[], None]) -> None:
        """prepare() writes what consumers are to know of a tile."""
        slot = turn_of(tile, self.static.stages)
        plgpu.barrier_wait(self.narrow.landed.at[0])
        wait_if(tile >= self.static.stages, self.mem.k_free.at[slot])
        prepare()
        dequantise.dequantise_tile(self.narrow.k, self.mem.k.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.mem.k_landed.at[slot])

    def widen_values(self, tile: Any, whole: Any, alive: Callable[[jax.Array], jax.Array]) -> None:
        """Unless the tile is whole, those of tokens that are not alive become 0, as they may be NaN; no int8 is."""
        slot = turn_of(tile, self.static.stages)
        plgpu.barrier_wait(self.narrow.landed.at[1])
        if self.narrow.v.dtype != jnp.int8:

            @pl.when(~whole)
            def _clear() -> None:
                kept = alive(tiles.token_iota(self.static.tile_keys))
                dequantise.clear_tokens(self.narrow.v, self.static.value_dim, kept)
                plgpu.commit_smem()

        wait_if(tile >= self.static.stages, self.mem.v_free.at[slot])
        dequantise.dequantise_tile(self.narrow.v, self.mem.v.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.mem.v_landed.at[slot])

    def write_factors(self, tile: Any, k_scale: jax.Array, v_scale: jax.Array) -> None:
        """Of tokens that nobody sees the scale of values has to be 1."""
        v_scale = jnp.maximum(v_scale, dequantise.SMALLEST_SCALE)
        place = self.narrow.factors.at[turn_of(tile, self.static.stages + 1)]
        for i, factor in enumerate((k_scale, jnp.log2(v_scale), 1 / v_scale)):
            place[i, ...] = factor


class Scales(NamedTuple):
    """Of a head; references to those of keys (None if they are in the queries) and of values.

    Attributes:
      layout: which they are.
    """

    layout: ScaleLayout
    k: Any
    v: Any
    factors: Any

    def view(self, mask: Callable[[Any, jax.Array], jax.Array], head: Any, tile: Any) -> View:
        """Of a block whose tiles are number `tile` of the rings and on."""
        if self.layout == "head":
            scale = self.k[head]
            return View(mask, scaled=lambda _, s: s * scale)
        if self.factors is None:
            return View(mask)

        def load(i: Any, number: int) -> jax.Array:
            return basics.load(self.factors.at[turn_of(tile + i, self.factors.shape[0]), number], PER_COLUMN)

        return View(
            mask,
            scaled=lambda i, s: s * over_columns(load(i, 0), s.shape),
            weights=lambda i: Weights(load(i, 1), load(i, 2)),
        )

    def applied(self, o: jax.Array, head: Any) -> jax.Array:
        """Sums of values as cached, times the scales that are the same for all tokens."""
        if self.layout == "head":
            return o * self.v[head]
        if self.layout == "channel":
            return o * over_columns(basics.load(self.v.at[head], PER_COLUMN), o.shape)
        return o
