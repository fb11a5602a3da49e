"""Items of `mla_sparse` on Hopper: blocks of heads of a token with shares of its slots, and how these are merged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper.seesaw import ROWS, TOKENS, add_partial_rows, empty_rows, halves, log_sum_exp, normalise
from pallas_attn.mosaic.merge import FRAGMENT_COLUMNS, PartialLoader, PartialStates, num_fragments
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.tile_scheduler import merge_programs
from pallas_attn.ops.mla_sparse.call import MlaSparseCall

PAIR_TOKENS = 2 * TOKENS
"""Latents of a pair of tiles."""

MERGE_COLUMNS = 64
"""Columns of the latent that one program of the merge takes, at most."""


@dataclasses.dataclass(frozen=True)
class SparseFacts:
    """Compile-time facts of a kernel, beside shapes and dtypes of its arrays.

    Attributes:
      latent_dim: L.
      top_k: K.
      heads: Hq, padded.
      splits: shares of a token's slots.
      sm_scale: multiplies the scores.
    """

    latent_dim: int
    top_k: int
    heads: int
    splits: int
    sm_scale: float

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of the latent that each warpgroup accumulates."""
        return halves(self.latent_dim)

    @property
    def rows(self) -> int:
        """Rows of a block that are heads."""
        return min(self.heads, ROWS)

    @property
    def blocks(self) -> int:
        return -(-self.heads // ROWS)


class SparseInputs(NamedTuple):
    """Arrays of a call, or in a kernel references to them.

    Attributes:
      q_latent, q_rope: [T, heads, L or R].
      latents: [pool slots, L + R], or [pool slots, L] of 8 bits.
      scale: float32 [pool slots, L / LATENT_GROUP], or None.
      rope: [pool slots, R], or None.
      slots: int32 [T·K].
      ends: int32 [T], one past the last place of a token's slots that is one.
    """

    q_latent: Any
    q_rope: Any
    latents: Any
    scale: Any
    rope: Any
    slots: Any
    ends: Any

    @staticmethod
    def of(call: MlaSparseCall, heads: int) -> SparseInputs:
        padding = ((0, 0), (0, heads - call.q_latent.shape[1]), (0, 0))
        cache = call.cache
        scale, rope = (None if x is None else x.reshape(-1, x.shape[-1]) for x in (cache.scale, cache.rope))
        place = jnp.arange(1, call.slots.shape[1] + 1, dtype=jnp.int32)[None]
        return SparseInputs(
            q_latent=jnp.pad(call.q_latent, padding),
            q_rope=jnp.pad(call.q_rope, padding),
            latents=cache.pages.reshape(-1, cache.pages.shape[-1]),
            scale=scale,
            rope=rope,
            slots=call.slots.reshape(-1),
            ends=jnp.max(jnp.where(call.chosen, place, 0), axis=1),
        )


class SparseResults(NamedTuple):
    """Results in global memory, of rows in one split: out [T, heads, L], lse [T, blocks, ROWS]."""

    out: Any
    lse: Any

    @staticmethod
    def types(static: SparseFacts, num_tokens: int, out_dtype: jax.typing.DTypeLike) -> SparseResults:
        return SparseResults(
            jax.ShapeDtypeStruct((num_tokens, static.heads, static.latent_dim), out_dtype),
            jax.ShapeDtypeStruct((num_tokens, static.blocks, ROWS), jnp.float32),
        )


def results_of(static: SparseFacts, num_tokens: int, out_dtype: jax.typing.DTypeLike) -> SparseResults | PartialStates:
    """Types of what a kernel writes: results, or the partial states of several splits."""
    if static.splits == 1:
        return SparseResults.types(static, num_tokens, out_dtype)
    # A loader of states may read as many as another item has beyond the last one.
    return PartialStates.types((num_tokens * static.blocks + 1) * static.splits, ROWS, static.latent_dim)


class SparseItem(NamedTuple):
    """A block of heads of a token, and a share of the token's slots.

    Attributes:
      index: of the item. Items of a token are neighbours: they read the same latents.
      start, stop: first slot of the share, of all tokens', and one past the last.
      count: number of pairs of tiles, at least one.
      pair: number of pairs that the program took before.
    """

    index: Any
    start: Any
    stop: Any
    count: Any
    pair: Any

    @staticmethod
    def first() -> SparseItem:
        """First item of this program, as far as its place goes."""
        return SparseItem(lax.axis_index("program"), *[jnp.int32(0)] * 4)

    def place(self, static: SparseFacts) -> tuple[Any, Any, Any]:
        """Token, block of its heads, and share of its slots."""
        index = lax.optimization_barrier(self.index)  # computed where it is needed, lest registers be kept for it
        split, block = lax.div(index, static.blocks), lax.rem(index, static.blocks)
        return lax.div(split, static.splits), block, lax.rem(split, static.splits)


def for_each_item(static: SparseFacts, x: SparseInputs, attend: Callable[[SparseItem], None]) -> None:
    """Call attend(item) for each item of this program."""
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    items = x.ends.shape[0] * static.blocks * static.splits

    def step(i: Any, pair: Any) -> Any:
        none = jnp.int32(0)
        item = SparseItem(program + i * programs, none, none, none, pair)
        token, _, split = item.place(static)
        end = x.ends[token]
        share = pl.cdiv(pl.cdiv(end, PAIR_TOKENS), static.splits) * PAIR_TOKENS
        start = jnp.minimum(split * share, end)
        stop = jnp.minimum(start + share, end)
        count = jnp.maximum(1, pl.cdiv(stop - start, PAIR_TOKENS))
        first = token * static.top_k
        attend(item._replace(start=first + start, stop=first + stop, count=count))
        return pair + count

    lax.fori_loop(0, lax.div(items - program + programs - 1, programs), step, jnp.int32(0))


# --- the merge


def merge_splits(
    partials: PartialStates, static: SparseFacts, num_tokens: int, out_dtype: jax.typing.DTypeLike
) -> SparseResults:
    """Merge the states of the shares of each token's slots, in their order."""
    items, columns = num_tokens * static.blocks, MERGE_COLUMNS
    while columns > FRAGMENT_COLUMNS and 2 * items * (static.latent_dim // columns) <= basics.multiprocessors():
        columns //= 2  # to keep all multiprocessors busy
    return plgpu.kernel(
        functools.partial(_merge_kernel, static, columns),
        out_type=SparseResults.types(static, num_tokens, out_dtype),
        grid=(merge_programs(static.latent_dim // columns * items),),
        grid_names=("program",),
        scratch_types=[
            PartialLoader.types(partials, items + 1, ROWS, num_fragments(ROWS * columns)),
            plgpu.SMEM((ROWS, columns), out_dtype),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_sparse_rows",
    )(basics.materialize(partials))


def _merge_kernel(
    static: SparseFacts, columns: int, partials: PartialStates, out: Ref, lse: Ref, loader: PartialLoader, tile: Ref
) -> None:
    """Merge some columns of the latent of blocks of rows, one after the other."""
    slices, slice_fragments = static.latent_dim // columns, num_fragments(ROWS * columns)
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    total = out.shape[0] * static.blocks * slices

    def merge(i: Any, _: None) -> None:
        index = program + i * programs
        item, column_slice = lax.div(index, slices), lax.rem(index, slices)
        token, block = lax.div(item, static.blocks), lax.rem(item, static.blocks)
        fragments = pl.ds(column_slice * slice_fragments, slice_fragments)
        merged = loader.for_each(
            partials,
            item * static.splits,
            jnp.int32(static.splits),
            slice(None),
            fragments,
            add_partial_rows,
            empty_rows(columns),
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # an earlier copy may still read the tile
        tile[...] = normalise(merged.acc, merged.l).astype(tile.dtype)
        plgpu.commit_smem()
        to = out.at[token, pl.ds(block * ROWS, static.rows), pl.ds(column_slice * columns, columns)]
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, static.rows)], to)

        @pl.when(column_slice == 0)
        def _store_lse() -> None:
            lse[token, block] = log_sum_exp(merged.m * LOG2E, merged.l)

    lax.fori_loop(0, lax.div(total - program + programs - 1, programs), merge, None)
    plgpu.wait_smem_to_gmem(0)
