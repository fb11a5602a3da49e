"""`mla_sparse` on Hopper over 16-bit latents: gathered tiles, masks and results.

The main loop, its barriers and the deadlock argument are in `pallas_attn.mosaic.hopper.mla_bf16`. A work item is a
block of heads of a token and a range of the token's slots (`SparseItem`). One CTA per SM:

    for item in items of this CTA:                 warpgroup 2, producer
        for pair of tiles:
            look up the pool slots of the next pair
            for tile, half in HALVES:              wait empty[tile, half]; gather the half with cp.async
            after the first pair: wait joint[Q_FREE]; copy the query with TMA
    for item in items of this CTA:                 warpgroups 0 and 1
        wait q_full; mla_bf16.attend(pairs of the item)
        write the output, or a partial state if a token has several splits

`full` has two kinds of barriers (`CopyBarriers`): one for each half of the latent columns of a tile, and one for its
rotated keys. All threads of the producer arrive when their asynchronous copies are done.

The tiles of a second cache follow the tiles of the first cache; a tile has rows of one cache. Without rotated keys
(R = 0), the barriers of rotated keys are not used, and probabilities have their own memory.

A row of a tile whose slot is absent (-1, or outside the split) is filled with zeros, and its scores are masked. A tile
without absent slots is not masked. The producer stores the mask of a tile after it has waited for the half that the
scoring warpgroup releases. The scoring warpgroup reads the mask before it releases this half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper import gather, mla_bf16
from pallas_attn.mosaic.hopper.copy_barriers import CopyBarriers, see_copies
from pallas_attn.mosaic.hopper.mla_bf16 import (
    HALVES,
    Q_FREE,
    ROPE,
    Bf16LoopConfig,
    Bf16Scratch,
    Bf16TileAccess,
)
from pallas_attn.mosaic.hopper.mla_rows import LOG2_ROW_STATES, PER_ROW, ROWS, copy_query, run_roles
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.register_tiles import PER_COLUMN, over_columns
from pallas_attn.ops.mla_sparse.mosaic_items import (
    ChosenScratch,
    SparseInputs,
    SparseItem,
    SparseResults,
    SparseStatic,
    TileSlots,
    for_each_item,
    gather_items,
    launch,
)

REGISTERS = 216, 72
"""Registers per thread of a consumer, and of the producer."""


class GatherBarriers(NamedTuple):
    """Barriers `full` of gathered tiles.

    Attributes:
      halves: array of `CopyBarriers`, one per half of each of the two tiles [4].
      rope: array of `CopyBarriers`, one per tile [2].
    """

    halves: Any
    rope: Any


def loop_config(static: SparseStatic) -> Bf16LoopConfig:
    """Parameters of the main loop: one pair of tiles in shared memory."""
    return Bf16LoopConfig(static.latent_dim, static.rope_dim, register_tiles.ROW_BYTES, static.sm_scale, pairs=1)


def scratch_types(static: SparseStatic, dtype: jax.typing.DTypeLike) -> Bf16Scratch:
    """Scratch types of the kernel, for queries and latents of a dtype."""
    full = GatherBarriers(CopyBarriers.types(4), CopyBarriers.types(2))
    return Bf16Scratch.types(loop_config(static), dtype, producer=ChosenScratch.types(2), full=full)


def attend(x: SparseInputs, static: SparseStatic, out_dtype: jax.typing.DTypeLike) -> Any:
    """Run the kernel. Return `SparseResults` if tokens have one split, else `PartialStates`."""
    return launch(
        functools.partial(_kernel, static),
        x,
        static,
        out_dtype,
        scratch_types=scratch_types(static, x.q_latent.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=basics.lane_semantics()),
        name="mla_sparse_rows",
    )


def _kernel(static: SparseStatic, kind: Callable[..., Any], x: SparseInputs, *refs: Any) -> None:
    """Roles of the three warpgroups."""
    results, mem = kind(*refs[:2]), Bf16Scratch(*refs[2:])
    CopyBarriers(mem.full.halves).begin()
    CopyBarriers(mem.full.rope).begin()

    def consume(half: int) -> None:
        _consume(static, x, mem, half, results)
        plgpu.wait_smem_to_gmem(0)

    run_roles(REGISTERS, consume, lambda: _produce(static, x, mem))


def _produce(static: SparseStatic, x: SparseInputs, mem: Bf16Scratch) -> None:
    """Gather latents and start the copies of queries (warpgroup 2)."""
    widths = loop_config(static).widths

    def copy_item_query(item: SparseItem) -> None:
        plgpu.barrier_wait(mem.joint.at[Q_FREE])
        token, block, _ = item.place(static)
        heads, rows = static.block_heads(block), pl.ds(0, static.rows)
        halves = mem.q.left.at[0, rows], mem.q.right.at[0, rows]
        q_rope, rope = (None, None) if x.q_rope is None else (x.q_rope.at[token, heads], mem.q.rope.at[0, rows])
        copy_query(x.q_latent.at[token, heads], q_rope, halves, rope, mem.q_full)

    def gather_part(ref: Any, slots: TileSlots, column: int, to: Any) -> None:
        """Gather columns of a tile from the cache that contains its slots."""
        gather.gather_rows_async(ref, slots.slot, column, to, other=x.extra, use_other=slots.is_extra)

    def gather_pair(pair: Any, slots: tuple[TileSlots, ...]) -> None:
        """Gather each half of the tiles of a pair when its memory becomes free.

        Consumers store probabilities over the rotated keys of a tile. The next rotated keys are therefore gathered with
        the half that is released after the last read of these probabilities.
        """
        for tile, half in HALVES:
            plgpu.barrier_wait(mem.empty.at[2 * tile + half])
            if tile == half:
                gather.store_none(slots[tile].slot, mem.producer.is_none.at[tile], mem.producer.all_given.at[tile])
            gather_part(x.latents, slots[tile], half * widths[0], mem.k[half].at[tile])
            CopyBarriers(mem.full.halves).arrive(2 * tile + half)
            if tile != half and x.q_rope is not None:
                gather_part(x.latents, slots[tile], static.latent_dim, mem.k[ROPE].at[tile])
                CopyBarriers(mem.full.rope).arrive(tile)

    copy_item_query(SparseItem.first())
    plgpu.commit_smem()  # prevents ptxas from moving these copies to where all registers hold pool slots
    gather_items(static, x, copy_item_query, gather_pair)
    plgpu.barrier_wait(mem.joint.at[Q_FREE])
    for i in range(4):
        plgpu.barrier_wait(mem.empty.at[i])


def _consume(static: SparseStatic, x: SparseInputs, mem: Bf16Scratch, half: int, results: Any) -> None:
    """Attend to all items (warpgroups 0 and 1)."""
    loop, tiles = loop_config(static), _tile_access(mem)

    def attend_item(item: SparseItem) -> None:
        plgpu.barrier_wait(mem.q_full)
        state = mla_bf16.attend(loop, mem, half, tiles, item.pair, item.count)
        _write(static, x, mem, half, item, results, state)

    mla_bf16.begin(loop, mem, half)
    for_each_item(static, x, attend_item)


def _tile_access(mem: Bf16Scratch) -> Bf16TileAccess:
    """Waits and masks of gathered tiles."""

    def await_part(pair: Any, slot: Any, part: int) -> None:
        if part == ROPE:
            CopyBarriers(mem.full.rope).wait(slot, pair)
        else:
            CopyBarriers(mem.full.halves).wait(2 * slot + part, pair)
        see_copies()

    def is_full(pair: Any, tile: int) -> Any:
        return mem.producer.is_full(tile)

    def mask(pair: Any, slot: Any, s: Any) -> Any:  # [ROWS, TOKENS]
        is_none = basics.load(mem.producer.is_none.at[slot], PER_COLUMN)  # [TOKENS]
        return jnp.where(over_columns(is_none, s.shape) == 0, s, -jnp.inf)

    def clear_dead_rows(pair: Any, tile: int, slot: Any) -> None:
        """Do nothing: the producer has filled missing latents with zeros."""

    return Bf16TileAccess(await_part, is_full, mask, clear_dead_rows)


def _write(
    static: SparseStatic,
    x: SparseInputs,
    mem: Bf16Scratch,
    half: int,
    item: SparseItem,
    results: Any,
    state: mla_bf16.HalfState,
) -> None:
    """Write this warpgroup's columns of the output, or of the partial state, of an item."""
    loop = loop_config(static)
    sums = mla_bf16.exchange_sums(mem, half, state)
    if isinstance(results, SparseResults):
        token, block, _ = item.place(static)
        sink = None if x.sinks is None else basics.load(x.sinks.at[pl.ds(block * static.rows, ROWS)], PER_ROW)
        inverse = LOG2_ROW_STATES.inverse(state.m, sums, sink)
        out = LOG2_ROW_STATES.normalise(state.acc, sums, inverse).astype(results.out.dtype)
        columns = pl.ds(half * loop.widths[0], loop.widths[half])
        to = results.out.at[token, static.block_heads(block), columns]
        mla_bf16.write_output(loop, mem, half, out, to)
        if half == 0:
            results.lse[token, block] = LOG2_ROW_STATES.lse(state.m, sums)
        return
    index = item.state_index(static)
    mla_bf16.release_query(mem)  # the next query is copied while the state is written
    mla_bf16.write_partial(loop, half, state.acc, state.m, sums, results.acc.at[index], results.stats.at[index])
