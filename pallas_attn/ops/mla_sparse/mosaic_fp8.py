"""`mla_sparse` on Hopper over fp8 latents: gathered tiles, masks and results.

The main loop, its barriers and the deadlock argument are in `pallas_attn.mosaic.hopper.mla_fp8`. A work item is a block
of heads of a token and a range of the token's slots (`SparseItem`). One CTA per SM:

    for item in items of this CTA:                 warpgroup 2, producer
        for pair of tiles:
            look up the pool slots of the next pair
            for tile in pair:                      wait empty[slot]; gather latents, rotated keys and scales (cp.async)
            after the first pair: wait q_free; copy the query with TMA
    for item in items of this CTA:                 warpgroups 0 and 1
        mla_fp8.attend(pairs of the item)
        write the output, or a partial state if a token has several splits

Here `slot` in brackets is a place for one tile in shared memory. All threads of the producer arrive at `full[slot]`
(`CopyBarriers`) when their asynchronous copies are done. A row of a tile whose pool slot is absent (-1, or outside the
split) is filled with zeros, and its scores are masked. A tile without absent pool slots is not masked.

Records of DeepSeek-V4 (`SparseStatic.small_groups`) have scales of 7 bytes, which `cp.async` cannot copy. Two producer
threads load the scales of a pool row before the wait for empty[slot], and store the largest scale and ratios to it in
the tile. The tiles of a second cache follow the tiles of the first cache; a tile has rows of one cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper import gather, mla_fp8, mla_fp8_products
from pallas_attn.mosaic.hopper.copy_barriers import CopyBarriers, see_copies
from pallas_attn.mosaic.hopper.mla_fp8 import SLOTS, Fp8LoopConfig, Fp8Scratch, Fp8TileAccess, slot_of
from pallas_attn.mosaic.hopper.mla_rows import LOG2_COLUMN_STATES, TOKENS, copy_query, run_roles
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import LOG2E
from pallas_attn.mosaic.primitives.register_tiles import BY_64, PER_COLUMN, over_tokens
from pallas_attn.ops.mla_sparse.mosaic_items import (
    ROTATED,
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

REGISTERS = 232, 40
"""Registers per thread of a consumer, and of the producer."""


def loop_config(static: SparseStatic) -> Fp8LoopConfig:
    """Parameters of the main loop. The scales of all tokens of a gathered tile are contiguous."""
    latent_dim = static.latent_dim - (ROTATED if static.small_groups else 0)
    return Fp8LoopConfig(latent_dim, static.rows, static.sm_scale, TOKENS, static.small_groups)


class SparseFp8Scratch(NamedTuple):
    """Shared memory and barriers of a CTA.

    Attributes:
      loop: scratch of the main loop.
      chosen: masks of the tiles.
      full: array of `CopyBarriers` [SLOTS]; a phase ends when a tile has been gathered.
    """

    loop: Fp8Scratch
    chosen: ChosenScratch
    full: Any

    @staticmethod
    def types(static: SparseStatic, dtype: jax.typing.DTypeLike) -> SparseFp8Scratch:
        """Scratch types of the kernel, for queries of a dtype."""
        return SparseFp8Scratch(
            loop=Fp8Scratch.types(loop_config(static), dtype),
            chosen=ChosenScratch.types(SLOTS),
            full=CopyBarriers.types(SLOTS),
        )


def attend(x: SparseInputs, static: SparseStatic, out_dtype: jax.typing.DTypeLike) -> Any:
    """Run the kernel. Return `SparseResults` if tokens have one split, else `PartialStates`."""
    return launch(
        functools.partial(_kernel, static),
        x,
        static,
        out_dtype,
        scratch_types=SparseFp8Scratch.types(static, x.q_latent.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=16),
        name="mla_sparse_fp8",
    )


def _kernel(static: SparseStatic, kind: Callable[..., Any], x: SparseInputs, *refs: Any) -> None:
    """Roles of the three warpgroups."""
    results, mem = kind(*refs[:2]), SparseFp8Scratch(*refs[2:])
    CopyBarriers(mem.full).begin()

    run_roles(REGISTERS, lambda half: _consume(static, x, mem, half, results), lambda: _produce(static, x, mem))


def _produce(static: SparseStatic, x: SparseInputs, mem: SparseFp8Scratch) -> None:
    """Gather latents and start the copies of queries (warpgroup 2)."""
    loop = mem.loop

    def copy_item_query(item: SparseItem) -> None:
        plgpu.barrier_wait(loop.q_free)
        token, block, _ = item.place(static)
        heads, halves = static.block_heads(block), (loop.q[0].at[0], loop.q[1].at[0])
        if static.small_groups:
            q_rope = x.q_latent.at[token, heads, pl.ds(static.latent_dim - ROTATED, ROTATED)]
        else:
            q_rope = x.q_rope.at[token, heads]
        copy_query(x.q_latent.at[token, heads], q_rope, halves, loop.q_rope.at[0], loop.q_full)

    def gather_pair(pair: Any, slots: tuple[TileSlots, ...]) -> None:
        """Gather each tile of a pair as soon as its slot is free."""
        exponents = []
        if static.small_groups:
            for chosen in slots:
                other = {"other": x.extra_scale, "use_other": chosen.is_extra}
                exponents.append(gather.load_exponents(x.scale, chosen.slot, **other))
        for tile, chosen in enumerate(slots):
            slot, _ = slot_of(pair, tile)
            plgpu.barrier_wait(loop.empty.at[slot])
            gather.store_none(chosen.slot, mem.chosen.is_none.at[slot], mem.chosen.all_given.at[slot])
            for ref, extra, to in ((x.latents, x.extra, loop.k), (x.rope, x.extra_rope, loop.rope)):
                other = {"other": extra, "use_other": chosen.is_extra}
                gather.gather_rows_async(ref, chosen.slot, 0, to.at[slot], **other)
            if static.small_groups:
                gather.store_ratios(exponents[tile], loop.scales.at[slot, 0], loop.ratios.at[slot])
            else:
                gather.gather_scales_async(x.scale, chosen.slot, loop.scales.at[slot, 0])
            CopyBarriers(mem.full).arrive(slot)

    copy_item_query(SparseItem.first())
    gather_items(static, x, copy_item_query, gather_pair)
    plgpu.barrier_wait(loop.q_free)
    for i in range(SLOTS):
        plgpu.barrier_wait(loop.empty.at[i])


def _consume(static: SparseStatic, x: SparseInputs, mem: SparseFp8Scratch, half: int, results: Any) -> None:
    """Attend to all items (warpgroups 0 and 1)."""
    config, tiles = loop_config(static), _tile_access(mem)

    def attend_item(item: SparseItem) -> None:
        acc = mla_fp8.attend(config, mem.loop, half, tiles, item.pair, item.count)
        _write(static, x, mem.loop, half, item, results, acc)

    mla_fp8.begin(mem.loop, half)
    for_each_item(static, x, attend_item)
    mla_fp8.end(mem.loop, half)


def _tile_access(mem: SparseFp8Scratch) -> Fp8TileAccess:
    """Waits and masks of gathered tiles."""

    def await_keys(slot: Any, use: Any) -> None:
        CopyBarriers(mem.full).wait(slot, use)
        see_copies()

    def await_values(slot: Any, use: Any) -> None:
        CopyBarriers(mem.full).wait(slot, use)

    def mask(slot: Any, s: Any) -> Any:  # [TOKENS, rows]
        is_none = basics.load(mem.chosen.is_none.at[slot], BY_64.per_row)  # [TOKENS]
        return jnp.where(over_tokens(is_none, s.shape) == 0, s, -jnp.inf)

    def before_release() -> None:
        """Do nothing: threads read latents through the generic proxy, in which cp.async writes, and reads of wgmma have
        completed."""

    return Fp8TileAccess(await_keys, await_values, mem.chosen.is_full, mask, before_release)


def _write(
    static: SparseStatic, x: SparseInputs, mem: Fp8Scratch, half: int, item: SparseItem, results: Any, acc: Any
) -> None:
    """Write this warpgroup's columns of the output, or of the partial state, of an item.

    Args:
      acc: [columns, rows].
    """
    config, rows = loop_config(static), pl.ds(0, static.rows)
    sums = mla_fp8.exchange_sums(config, mem, half)
    if isinstance(results, SparseResults):
        token, block, _ = item.place(static)
        columns = pl.ds(half * config.widths[0], config.value_widths[half])
        to = results.out.at[token, static.block_heads(block), columns]
        inverse = None
        if x.sinks is not None:
            sink = basics.load(x.sinks.at[static.block_heads(block)], PER_COLUMN)
            inverse = LOG2_COLUMN_STATES.inverse(mla_fp8.load_max(mem), sums, sink)
        mla_fp8_products.store_heads(LOG2_COLUMN_STATES.normalise(acc, sums, inverse), to)
        if half == 0:
            results.lse[token, block, rows] = LOG2_COLUMN_STATES.lse(mla_fp8.load_max(mem), sums)
        return
    index = item.state_index(static)
    mla_fp8.write_partial(config, half, acc, results.acc.at[index])
    if half == 0:
        results.stats[index, 0, rows] = mla_fp8.load_max(mem) * (1 / LOG2E)
        results.stats[index, 1, rows] = sums
