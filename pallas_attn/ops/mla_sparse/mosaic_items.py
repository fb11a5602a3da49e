"""Work items of `mla_sparse` on Hopper: inputs, lookup of selected latents, results and merge. Both kernels use them.

Terms:

    slot            index of a latent in the pool (page · ps + offset); each token names the slots that it attends to,
                    as a list or as a range of keys whose slots follow from a block table (`types.SlotRange`)
    place           index of a slot among the slots of a token, in all caches
    query row       one head of one token; up to 64 query rows form a block
    split           a range of a token's slots; all tokens have the same number of splits
    item            a block of a token and one split of the token's slots, which one CTA processes (`SparseItem`)
    tile, pair      a tile is 64 gathered latents; the CTA processes tiles in pairs
    partial state   result of one item if tokens have several splits; `merge_splits` merges partial states
"""

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

from pallas_attn.mosaic.hopper import gather
from pallas_attn.mosaic.hopper.mla_rows import ROWS, TOKENS, merge_columns, merge_scratch_types, merge_slice
from pallas_attn.mosaic.partial_states import PartialLoader, PartialStates
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.mosaic.primitives.tile_scheduler import merge_programs
from pallas_attn.ops.mla_sparse.call import MlaSparseCall, SlotRangeInputs, inside_pool
from pallas_attn.types import POWER_OF_TWO, PagedLatent

PAIR_TOKENS = 2 * TOKENS
"""Latents of a pair of tiles."""

ROTATED = 64
"""Rotated columns of a latent that are values, too."""


@dataclasses.dataclass(frozen=True)
class SparseStatic:
    """Compile-time parameters of a call.

    Attributes:
      latent_dim: L.
      rope_dim: R.
      top_k: K, slots of a token in all caches.
      first_extra: number of a token's slots in the first cache, a multiple of TOKENS, for ranges of PAIR_TOKENS; the
        others are in the second cache. top_k if there is no second cache.
      heads: Hq, padded to blocks with equal numbers of rows.
      splits: number of splits of a token's slots.
      sm_scale: factor of the scores.
      small_groups: whether the caches have records of DeepSeek-V4: L - ROTATED fp8 columns with scales that are powers
        of two, and ROTATED bfloat16 columns, all of them key and value.
      page_sizes: tokens per page of each cache if slots are ranges; () for lists of slots.
    """

    latent_dim: int
    rope_dim: int
    top_k: int
    first_extra: int
    heads: int
    splits: int
    sm_scale: float
    small_groups: bool = False
    page_sizes: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Query rows of a block, including padding, at most ROWS."""
        return self.heads // self.blocks

    @property
    def blocks(self) -> int:
        """Blocks of heads of a token."""
        return -(-self.heads // ROWS)

    def block_heads(self, block: Any) -> Any:
        """Slice of the heads of a block."""
        return pl.ds(block * self.rows, self.rows)


class SparseInputs(NamedTuple):
    """Arrays of a call, or references to them in a kernel.

    Attributes:
      q_latent, q_rope: [T, heads, L or R]; q_rope is None if R = 0.
      latents: [pool slots, L + R]; fp8 [pool slots, L], or [pool slots, L - ROTATED] with `small_groups`.
      scale: float32 [pool slots, L / LATENT_GROUP] for fp8 latents, else None. With `small_groups` uint8 [pool slots,
        groups], the exponents.
      rope: [pool slots, R] for fp8 latents, with `small_groups` [pool slots, ROTATED]; else None.
      extra, extra_scale, extra_rope: the same arrays of the second cache, or None.
      slots: int32 [T·K], the slots of all tokens; for ranges of keys `SlotRangeInputs.first_slots`.
      ranges: for ranges of keys int32 [T, caches, 3], else None. For each token and cache, index of the first page of
        the token's sequence in `slots`, position of the key at place 0, and the place after the last key.
      ends: int32 [T], for each token one plus the index of its last slot in the pool; 0 if it has none.
      sinks: float32 [blocks·ROWS], padded, or None.
    """

    q_latent: Any
    q_rope: Any
    latents: Any
    scale: Any
    rope: Any
    extra: Any
    extra_scale: Any
    extra_rope: Any
    slots: Any
    ranges: Any
    ends: Any
    sinks: Any

    @staticmethod
    def of(call: MlaSparseCall, static: SparseStatic) -> SparseInputs:
        """Return the inputs of a call, with queries and sinks padded to the number of heads."""
        padding = ((0, 0), (0, static.heads - call.q_latent.shape[1]), (0, 0))
        cache, extra = _pool_arrays(call.cache), _pool_arrays(call.extra_cache)
        sinks, ranges = call.sinks, call.ranges
        return SparseInputs(
            q_latent=jnp.pad(call.q_latent, padding),
            q_rope=None if call.q_rope is None else jnp.pad(call.q_rope, padding),
            **dict(zip(("latents", "scale", "rope"), cache, strict=True)),
            **dict(zip(("extra", "extra_scale", "extra_rope"), extra, strict=True)),
            **(_listed(call, static) if ranges is None else _ranged(ranges, static)),
            sinks=None if sinks is None else jnp.pad(sinks, (0, static.blocks * ROWS - sinks.shape[0])),
        )


def _listed(call: MlaSparseCall, static: SparseStatic) -> dict[str, Any]:
    """Return the fields of `SparseInputs` about lists of slots."""
    pools: Any = call.pools
    in_pool, *extra_lists = (inside_pool(*pool) for pool in pools)
    slots: Any = call.slots
    for extra_slots in extra_lists:
        padded = jnp.pad(in_pool, ((0, 0), (0, static.first_extra - in_pool.shape[1])), constant_values=-1)
        slots = in_pool = jnp.concatenate([padded, extra_slots], axis=1)
    place = jnp.arange(1, static.top_k + 1, dtype=jnp.int32)[None]
    ends = jnp.max(jnp.where(in_pool >= 0, place, 0), axis=1)
    return {"slots": slots.reshape(-1), "ranges": None, "ends": ends}


def _ranged(ranges: SlotRangeInputs, static: SparseStatic) -> dict[str, Any]:
    """Return the fields of `SparseInputs` about ranges."""
    first_place = jnp.array([[0, static.first_extra][: len(static.page_sizes)]], jnp.int32)
    page, position, count = (ranges.keys[..., i] for i in range(3))  # [T, caches]
    ends = jnp.max(jnp.where(count > 0, first_place + count, 0), axis=1)
    keys = jnp.stack([page, position - first_place, first_place + count], axis=-1)
    return {"slots": ranges.first_slots, "ranges": keys, "ends": ends}


def _pool_arrays(cache: PagedLatent | None) -> list[Any]:
    """Return the arrays pages, scale and rope of a cache as [pool slots, columns], or None. Scales that are powers of
    two become uint8 exponents.
    """
    arrays = [None] * 3 if cache is None else [cache.pages, cache.scale, cache.rope]
    if arrays[1] is not None and arrays[1].dtype == POWER_OF_TWO:
        arrays[1] = lax.bitcast_convert_type(arrays[1], jnp.uint8)
    return [None if x is None else x.reshape(-1, x.shape[-1]) for x in arrays]


class SparseResults(NamedTuple):
    """Results in global memory: out [T, heads, L], and lse float32 [T, blocks, ROWS]. In lse, entries after the rows of
    a block have any value."""

    out: Any
    lse: Any

    @staticmethod
    def types(static: SparseStatic, num_tokens: int, out_dtype: jax.typing.DTypeLike) -> SparseResults:
        return SparseResults(
            jax.ShapeDtypeStruct((num_tokens, static.heads, static.latent_dim), out_dtype),
            jax.ShapeDtypeStruct((num_tokens, static.blocks, ROWS), jnp.float32),
        )


def results_of(static: SparseStatic, num_tokens: int, out_dtype: jax.typing.DTypeLike) -> SparseResults | PartialStates:
    """Return the output types of an attention kernel: final results if tokens have one split, else partial states."""
    if static.splits == 1:
        return SparseResults.types(static, num_tokens, out_dtype)
    # `PartialLoader` copies batches of up to `splits` states, and the last batch may extend past the last state.
    return PartialStates.types((num_tokens * static.blocks + 1) * static.splits, ROWS, static.latent_dim)


def launch(
    kernel: Callable[..., None],
    x: SparseInputs,
    static: SparseStatic,
    out_dtype: jax.typing.DTypeLike,
    *,
    scratch_types: Any,
    compiler_params: plgpu.CompilerParams,
    name: str,
) -> SparseResults | PartialStates:
    """Run an attention kernel of three warpgroups on all items.

    Args:
      kernel: function kernel(kind, x, *refs). `kind` is the class of the results, `SparseResults` or `PartialStates`;
        `kind(*refs[:2])` has the references of the results. The other references are the scratch memory.

    Returns:
      Final results if tokens have one split, else partial states.
    """
    num_tokens = x.q_latent.shape[0]
    items, results = num_tokens * static.blocks, results_of(static, num_tokens, out_dtype)
    return plgpu.kernel(
        functools.partial(kernel, type(results)),
        out_type=results,
        grid=(max(1, min(items * static.splits, basics.multiprocessors())),),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=compiler_params,
        kernel_name=name,
    )(basics.materialize(x))


# --- items


class SparseItem(NamedTuple):
    """A block of heads of a token, and one split of the token's slots.

    Attributes:
      index: index of the item. Items of a token are adjacent, because they read the same latents.
      start, stop: range of the split in `SparseInputs.slots`; for ranges of keys, in the places of the token.
      count: number of pairs of tiles of the split, at least one.
      pair: number of pairs of tiles that the CTA processed before this item.
    """

    index: Any
    start: Any
    stop: Any
    count: Any
    pair: Any

    @staticmethod
    def first() -> SparseItem:
        """Return the first item of this CTA, without its slots."""
        return SparseItem(lax.axis_index("program"), *[jnp.int32(0)] * 4)

    def place(self, static: SparseStatic) -> tuple[Any, Any, Any]:
        """Return the indices of the token, of the block of heads, and of the split."""
        index = lax.optimization_barrier(self.index)  # recomputed at each use, which saves registers
        split, block = lax.div(index, static.blocks), lax.rem(index, static.blocks)
        return lax.div(split, static.splits), block, lax.rem(split, static.splits)

    def state_index(self, static: SparseStatic) -> Any:
        """Return the index of the item's partial state."""
        token, block, split = self.place(static)
        return (token * static.blocks + block) * static.splits + split


def for_each_item(static: SparseStatic, x: SparseInputs, attend: Callable[[SparseItem], None]) -> None:
    """Call attend(item) for each item of this CTA."""
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
        first = 0 if static.page_sizes else token * static.top_k
        attend(item._replace(start=first + start, stop=first + stop, count=count))
        return pair + count

    lax.fori_loop(0, lax.div(items - program + programs - 1, programs), step, jnp.int32(0))


# --- the producer warpgroup


class TileSlots(NamedTuple):
    """Slots of a tile.

    Attributes:
      slot: int32 [128], one slot per thread in the order of `gather.tile_row`; negative for places outside the split
        and for slots outside the pool.
      is_extra: int32 scalar, 1 if the slots are in the second cache, else 0. None without a second cache.
    """

    slot: Any
    is_extra: Any


def tile_slots(static: SparseStatic, x: SparseInputs, item: SparseItem, i: Any, tile: int) -> TileSlots:
    """Look up the slots of a tile of an item's i-th pair of tiles."""
    first = item.start + lax.optimization_barrier(i) * PAIR_TOKENS + tile * TOKENS  # recomputed for each tile
    place = first + gather.tile_row()
    slot = RowLayout(1, 1).take(x.slots, jnp.minimum(place, x.slots.shape[0] - 1))
    if x.extra is None:
        return TileSlots(jnp.where((place < item.stop) & basics.in_pool(slot, x.latents.shape[0]), slot, -1), None)
    # `SparseInputs.of` has replaced slots outside the pools by -1.
    is_extra = (lax.rem(first, static.top_k) >= static.first_extra).astype(jnp.int32)
    return TileSlots(jnp.where(place < item.stop, slot, -1), is_extra)


def _pair_slots_of_range(static: SparseStatic, x: SparseInputs, item: SparseItem, i: Any) -> tuple[TileSlots, ...]:
    """Compute the slots of an item's i-th pair of tiles. Both tiles are in the same cache."""
    first = item.start + lax.optimization_barrier(i) * PAIR_TOKENS
    token, _, _ = item.place(static)
    is_extra = None if x.extra is None else (first >= static.first_extra).astype(jnp.int32)
    page, shift, end = (x.ranges[token, 0 if is_extra is None else is_extra, i] for i in range(3))

    def tile_slots(tile: int) -> TileSlots:
        place = first + tile * TOKENS + gather.tile_row()
        position = (place + shift).astype(jnp.uint32)
        (number, offset), *of_extra = ((lax.div(position, n), lax.rem(position, n)) for n in map(jnp.uint32, sizes))
        for extra_number, extra_offset in of_extra:
            in_extra = place >= static.first_extra
            number = jnp.where(in_extra, extra_number, number)
            offset = jnp.where(in_extra, extra_offset, offset)
        # Only the last split of a token has a tile that extends past its end, so `item.stop` would hide no other place.
        page_place = jnp.where(place < end, page + number.astype(jnp.int32), x.slots.shape[0] - 1)
        return TileSlots(RowLayout(1, 1).take(x.slots, page_place) + offset.astype(jnp.int32), is_extra)

    sizes = static.page_sizes
    return tuple(tile_slots(tile) for tile in range(2))


def gather_items(
    static: SparseStatic,
    x: SparseInputs,
    copy_query: Callable[[SparseItem], None],
    gather_pair: Callable[[Any, tuple[TileSlots, ...]], None],
) -> None:
    """Gather the latents of all items of this CTA. The caller has started the copy of the first item's query.

    At the end of an item, consumers release the memory of its last tiles before the memory of its query. The query of
    the next item is therefore copied after the first pair of tiles.

    Args:
      copy_query: (item) -> None. Wait until the query's memory is free, then start the copies of an item's query.
      gather_pair: (pair, slots of both tiles) -> None. Start the copies of a pair as its memory becomes free. `pair`
        counts the pairs of tiles of the CTA.
    """

    def gather_item(item: SparseItem) -> None:
        def slots(i: Any) -> tuple[TileSlots, ...]:
            if static.page_sizes:
                return _pair_slots_of_range(static, x, item, i)
            return tuple(tile_slots(static, x, item, i, tile) for tile in range(2))

        def step(i: Any, now: tuple[TileSlots, ...]) -> tuple[TileSlots, ...]:
            later = slots(i + 1)  # loads overlap the waits below
            gather_pair(item.pair + i, now)
            pl.when((i == 0) & (item.pair > 0))(lambda: copy_query(item))
            return later

        lax.fori_loop(0, item.count, step, slots(jnp.int32(0)))

    for_each_item(static, x, gather_item)


class ChosenScratch(NamedTuple):
    """Masks of the n tiles in shared memory.

    Attributes:
      is_none: int32 [n, TOKENS], 1 for rows of a tile whose slot is absent, else 0.
      all_given: int32 [n, 4], for each tile and each of the four gathering warps, 1 if no row of the warp is absent.
    """

    is_none: Any
    all_given: Any

    @staticmethod
    def types(num_tiles: int) -> ChosenScratch:
        """Scratch types, for a number of tiles in shared memory."""
        return ChosenScratch(plgpu.SMEM((num_tiles, TOKENS), jnp.int32), plgpu.SMEM((num_tiles, 4), jnp.int32))

    def is_full(self, tile: Any) -> Any:
        """Return whether no row of a tile is absent."""
        given = self.all_given.at[tile]
        return (given[0] & given[1] & given[2] & given[3]) == 1


# --- the merge


def merge_splits(
    partials: PartialStates, sinks: Any, static: SparseStatic, num_tokens: int, out_dtype: jax.typing.DTypeLike
) -> SparseResults:
    """Merge the partial states of each block of each token, in the order of the splits.

    Args:
      sinks: `SparseInputs.sinks`.
    """
    items = num_tokens * static.blocks
    columns = merge_columns(items, static.latent_dim)
    return plgpu.kernel(
        functools.partial(_merge_kernel, static, columns),
        out_type=SparseResults.types(static, num_tokens, out_dtype),
        grid=(merge_programs(static.latent_dim // columns * items),),
        grid_names=("program",),
        scratch_types=merge_scratch_types(partials, items + 1, columns, plgpu.SMEM((ROWS, columns), out_dtype)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_sparse_rows",
    )(*basics.materialize((partials, sinks)))


def _merge_kernel(
    static: SparseStatic,
    columns: int,
    partials: PartialStates,
    sinks: Ref | None,
    out: Ref,
    lse: Ref,
    loader: PartialLoader,
    tile: Ref,
) -> None:
    """Merge the partial states of one block of query rows and one slice of latent columns after the other."""
    slices = static.latent_dim // columns
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    total = out.shape[0] * static.blocks * slices

    def merge(i: Any, _: None) -> None:
        index = program + i * programs
        item, column_slice = lax.div(index, slices), lax.rem(index, slices)
        token, block = lax.div(item, static.blocks), lax.rem(item, static.blocks)
        first, count = item * static.splits, jnp.int32(static.splits)
        to = out.at[token, static.block_heads(block)]
        of_block = None if sinks is None else sinks.at[pl.ds(block * static.rows, ROWS)]
        merge_slice(loader, partials, first, count, column_slice, tile, to, lse.at[token, block], of_block)

    lax.fori_loop(0, lax.div(total - program + programs - 1, programs), merge, None)
    plgpu.wait_smem_to_gmem(0)
