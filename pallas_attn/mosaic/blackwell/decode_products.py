"""Experimental: has never run on a card. Tensor-core products of the decode kernel (`mosaic.decode`) with tcgen05.

Operands are in shared memory. Results are in tensor memory (TMEM), from which threads load them to registers:

    S [tokens, query_rows] = K qᵀ          O [channels, query_rows] = Vᵀ P

Dimension M of the tensor core is 128: tokens in S, channels in O. S of a tile with 64 tokens, and O of a head of width
64, use M = 64. The tensor core reads V transposed. Each product overwrites its result in TMEM, and threads add O to an
accumulator in registers. This needs few registers, because there are few query rows, and nothing in TMEM is rescaled.
For 8-bit caches, threads convert K, and later V, to float16 in a common shared-memory buffer (`staged`). If the queries
are fp8, K is not converted, and the tensor core multiplies fp8 by fp8.

Steps per tile (the loop over tiles is in `mosaic.decode`):

    scores:      convert K if 8-bit; arrive ready; first warp: wait ready, issue S = K qᵀ, commit to done; wait done
    store_probs: write P to shared memory, commit
    load_values: convert V if 8-bit
    add_values:  arrive ready; first warp: wait ready, issue O = Vᵀ P, commit to done; wait done; acc += O

Barriers:

    barrier   one phase per   arrivals                             arrivals per phase   waits
    ready     product         the warpgroup: operands committed,   1                    the first warp
                              earlier results loaded from TMEM
    done      product         the tensor core (commit)             1                    all threads

Deadlock freedom: the warps arrive at `ready` without another wait in between, so the first warp's wait for `ready`
  ends.
It then issues the product, whose commit completes `done`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.blackwell import tmem
from pallas_attn.mosaic.decode import DecodeTile
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, BY_128, RegisterLayout
from pallas_attn.mosaic.primitives.soft_cap import reciprocal_of_pairs, soft_capped

NARROW_ROW_BYTES = 32
"""Swizzle width [bytes] of right operands of products with M = 64, and of the probabilities. A product with M = 64
reads its right operand in two halves of columns.
"""


def layout_of(rows: int) -> RegisterLayout:
    """Register layout of a result with `rows` rows."""
    return BY_64 if rows % 128 else BY_128


def column_step(tokens: int, value_dim: int) -> int:
    """The number of columns of a tile must be a multiple of the result: 16, or 32 if a product has M = 64."""
    return 32 if tokens % 128 or value_dim % 128 else 16


class Tcgen05Scratch(NamedTuple):
    """Memory and barriers of the products. `width` is the number of query rows of a tile, with padding.

    Attributes:
      scores: TMEM [tokens, width], S.
      values: TMEM [M, width] for each M channels, where M is 128 or 64; together they are O.
      staged: float16 [tokens, D] in shared memory, converted K or V of an 8-bit cache; None for 16-bit caches.
      ready, done: barriers, explained in the docstring of the module.
    """

    scores: Any
    values: tuple[Any, ...]
    staged: Any
    ready: Any
    done: Any


@dataclasses.dataclass(frozen=True)
class Tcgen05Products:
    """`DecodeProducts` on data-center Blackwell. The methods are explained there."""

    max_lookahead: ClassVar[int] = 2**14

    def scores_layout(self, tile: DecodeTile) -> RegisterLayout:
        return layout_of(tile.tokens)

    def values_layout(self, tile: DecodeTile) -> RegisterLayout:
        return layout_of(tile.value_dim)

    def query_row_bytes(self, tile: DecodeTile, key_row_bytes: int) -> int:
        return NARROW_ROW_BYTES if tile.tokens % 128 else register_tiles.ROW_BYTES

    def probs_type(self, tile: DecodeTile) -> Any:
        dtype = jnp.float16 if _is_8_bit(tile.q_dtype) else tile.q_dtype
        return register_tiles.operand(tile.shape, dtype, row_bytes=NARROW_ROW_BYTES)

    def probs(self, tile: DecodeTile, p: Ref) -> list[Ref]:
        return [p]

    def scratch_types(self, tile: DecodeTile) -> Any:
        rows, (tokens, width) = self.values_layout(tile).rows, tile.shape
        return Tcgen05Scratch(
            scores=plgpu.TMEM((tokens, width), jnp.float32),
            values=tuple(plgpu.TMEM((rows, width), jnp.float32) for _ in range(tile.value_dim // rows)),
            staged=None if tile.scales is None else register_tiles.operand((tokens, tile.value_dim), jnp.float16),
            ready=tmem.OrderedBarrier(),
            done=tmem.OrderedBarrier(),
        )

    def scores(
        self,
        tile: DecodeTile,
        own: Tcgen05Scratch,
        keys: list[Ref],
        queries: list[list[Ref]],
        scales: tuple[jax.Array, ...],
    ) -> jax.Array:
        if own.staged is not None and not _is_8_bit(tile.q_dtype):
            dequantize.dequantize_tile(keys[0], own.staged)
            plgpu.commit_smem()
            keys = [own.staged]
        pairs = [(k, q.transpose((1, 0))) for k, parts in zip(keys, queries, strict=True) for q in parts]
        _multiply(own, [(own.scores, k, q, i > 0) for i, (k, q) in enumerate(pairs)])
        return _load(own.scores, self.scores_layout(tile))

    def store_probs(self, tile: DecodeTile, ps: list[jax.Array], to: list[Ref]) -> None:
        to[0][...] = ps[0]
        plgpu.commit_smem()

    def load_values(self, tile: DecodeTile, own: Tcgen05Scratch, v: Ref) -> Any:
        if own.staged is None:
            return v
        dequantize.dequantize_tile(v, own.staged)
        return own.staged

    def add_values(
        self, tile: DecodeTile, own: Tcgen05Scratch, acc: jax.Array, values: Any, ps: list[Ref]
    ) -> jax.Array:
        (p,), layout = ps, self.values_layout(tile)
        slices = [(i * layout.rows, o) for i, o in enumerate(own.values)]
        channels = [values.at[:, pl.ds(first, layout.rows)] for first, _ in slices]
        _multiply(own, [(o, v.transpose((1, 0)), p, False) for (_, o), v in zip(slices, channels, strict=True)])
        # Load and add one part of O at a time: the registers cannot hold all of O and the accumulator.
        sums = [acc[first : first + layout.rows] + _load(o, layout) for first, o in slices]
        return sums[0] if len(sums) == 1 else jnp.concatenate(sums)

    def in_channel_order(self, tile: DecodeTile, acc: jax.Array) -> jax.Array:
        return acc

    def capped(self, s: jax.Array, soft_cap: float) -> jax.Array:
        reciprocal = functools.partial(reciprocal_of_pairs, layout=layout_of(s.shape[0]).tile)
        return soft_capped(s, 1.0, soft_cap, reciprocal)


def _is_8_bit(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize == 1


def _multiply(own: Tcgen05Scratch, products: list[tuple[Ref, Ref, Ref, bool]]) -> None:
    """Compute matrix products and wait until they have finished.

    Args:
      products: for each product (accumulator, a, b, accumulate). `accumulator` in TMEM becomes a @ b, or
        accumulator + a @ b if `accumulate` is True.
    """
    plgpu.barrier_arrive(own.ready)

    @basics.first_warp
    def _issue() -> None:
        plgpu.barrier_wait(own.ready)
        for accumulator, a, b, accumulate in products:
            plgpu.tcgen05_mma(accumulator, a, b, accumulate=accumulate)
        plgpu.tcgen05_commit_arrive(own.done)

    plgpu.barrier_wait(own.done)


def _load(accumulator: Ref, layout: RegisterLayout) -> jax.Array:
    """Load the result of a finished product from TMEM to registers."""
    result = plgpu.async_load_tmem(accumulator, layout=layout.tile)
    plgpu.wait_load_tmem()
    return result
