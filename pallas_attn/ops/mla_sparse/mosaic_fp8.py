"""`mla_sparse` on Hopper over fp8 latents: gathered tiles, masks and results.

The main loop, its barriers and the deadlock argument are in `pallas_attn.mosaic.hopper.mla_fp8`. One CTA per SM:

    for item in items of this CTA:                 warpgroup 2, producer
        for pair of tiles:
            look up the pool slots of the next pair
            for tile in pair:                      wait free[slot]; gather latents, rotated keys and scales (cp.async)
            after the first pair: wait q_free; copy the query with TMA
    for item in items of this CTA:                 warpgroups 0 and 1
        mla_fp8.attend(pairs of the item)
        write the output, or a partial state if a token has several splits

All threads of the producer arrive at `full[slot]` (`CopyBarriers`) when their asynchronous copies are done. A token
without a latent, i.e. slot -1, is filled with zeros and its scores are masked. A tile without such tokens is not
masked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper import gather, mla_fp8, mla_fp8_products
from pallas_attn.mosaic.hopper.copy_barriers import CopyBarriers, see_copies
from pallas_attn.mosaic.hopper.mla_fp8 import SLOTS, Fp8LoopConfig, Fp8Scratch, Fp8TileAccess, slot_of
from pallas_attn.mosaic.hopper.mla_rows import ROWS, TOKENS, log_sum_exp
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import LOG2E
from pallas_attn.mosaic.primitives.register_tiles import BY_64, over_tokens
from pallas_attn.ops.mla_sparse.mosaic_items import (
    ChosenScratch,
    SparseInputs,
    SparseItem,
    SparseResults,
    SparseStatic,
    for_each_item,
    gather_items,
    results_of,
)

COMPUTE_REGISTERS, GATHER_REGISTERS = 232, 40
"""Registers per thread of a consumer, and of the producer."""


def loop_config(static: SparseStatic) -> Fp8LoopConfig:
    """Parameters of the main loop. The scales of all tokens of a gathered tile are contiguous."""
    return Fp8LoopConfig(static.latent_dim, static.rows, static.sm_scale, page_tokens=TOKENS)


class SparseFp8Scratch(NamedTuple):
    """Shared memory and barriers of a CTA.

    Attributes:
      loop: scratch of the main loop.
      chosen: masks of the tiles.
      full: of `CopyBarriers.types`, [SLOTS], a tile is full.
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
    """Run the kernel. Return `SparseResults` for one split per token, else `PartialStates`."""
    num_tokens = x.q_latent.shape[0]
    items, results = num_tokens * static.blocks, results_of(static, num_tokens, out_dtype)
    return plgpu.kernel(
        functools.partial(_kernel, static, type(results)),
        out_type=results,
        grid=(max(1, min(items * static.splits, basics.multiprocessors())),),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=SparseFp8Scratch.types(static, x.q_rope.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=16),
        kernel_name="mla_sparse_fp8",
    )(basics.materialize(x))


def _kernel(static: SparseStatic, kind: Callable[..., Any], x: SparseInputs, *refs: Any) -> None:
    """Roles of the three warpgroups."""
    results, mem = kind(*refs[:2]), SparseFp8Scratch(*refs[2:])
    CopyBarriers(mem.full).begin()

    def compute(half: int) -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _consume(static, x, mem, half, results)

    def fetch() -> None:
        plgpu.set_max_registers(GATHER_REGISTERS, action="decrease")
        _produce(static, x, mem)

    branches = [functools.partial(compute, 0), functools.partial(compute, 1), fetch]
    lax.switch(lax.axis_index("warpgroup"), branches)


def _produce(static: SparseStatic, x: SparseInputs, mem: SparseFp8Scratch) -> None:
    """Gather latents and start the copies of queries (warpgroup 2)."""
    loop = mem.loop

    def copy_query(item: SparseItem) -> None:
        plgpu.barrier_wait(loop.q_free)
        token, block, _ = item.place(static)
        heads = pl.ds(block * ROWS, static.rows)
        for first, to in zip((0, loop_config(static).widths[0]), loop.q, strict=True):
            columns = pl.ds(first, to.shape[2])
            plgpu.copy_gmem_to_smem(x.q_latent.at[token, heads, columns], to.at[0], loop.q_full)
        plgpu.copy_gmem_to_smem(x.q_rope.at[token, heads], loop.q_rope.at[0], loop.q_full)

    def gather_pair(pair: Any, slots: tuple[jax.Array, ...]) -> None:
        """Gather each tile of a pair as soon as its slot is free."""
        for tile in range(2):
            slot, _ = slot_of(pair, tile)
            plgpu.barrier_wait(loop.free.at[slot])
            gather.store_none(slots[tile], mem.chosen.is_none.at[slot], mem.chosen.all_given.at[slot])
            gather.copy_rows(x.latents, slots[tile], 0, loop.k.at[slot])
            gather.copy_rows(x.rope, slots[tile], 0, loop.rope.at[slot])
            gather.copy_scales(x.scale, slots[tile], loop.scales.at[slot, 0])
            CopyBarriers(mem.full).arrive(slot)

    copy_query(SparseItem.first())
    gather_items(static, x, copy_query, gather_pair)
    plgpu.barrier_wait(loop.q_free)
    for i in range(SLOTS):
        plgpu.barrier_wait(loop.free.at[i])


def _consume(static: SparseStatic, x: SparseInputs, mem: SparseFp8Scratch, half: int, results: Any) -> None:
    """Attend to all items (warpgroups 0 and 1)."""
    config, tiles = loop_config(static), _tile_access(mem)

    def attend_item(item: SparseItem) -> None:
        acc = mla_fp8.attend(config, mem.loop, half, tiles, item.pair, item.count)
        _write(static, mem.loop, half, item, results, acc)

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
        """Do nothing: the next copies are writes of threads, like these reads through the generic proxy."""

    return Fp8TileAccess(await_keys, await_values, mem.chosen.is_full, mask, before_release)


def _write(static: SparseStatic, mem: Fp8Scratch, half: int, item: SparseItem, results: Any, acc: Any) -> None:
    """Write this warpgroup's columns of the output, or of the partial state, of an item.

    Args:
      acc: [columns, rows].
    """
    config, rows = loop_config(static), pl.ds(0, static.rows)
    sums = mla_fp8.exchange_sums(config, mem, half)
    if isinstance(results, SparseResults):
        token, block, _ = item.place(static)
        columns = pl.ds(half * config.widths[0], config.widths[half])
        to = results.out.at[token, pl.ds(block * ROWS, static.rows), columns]
        mla_fp8_products.store_heads(mla_fp8.normalise_columns(acc, sums), to)
        if half == 0:
            results.lse[token, block, rows] = log_sum_exp(mla_fp8.load_max(mem), sums)
        return
    index = item.state_index(static)
    mla_fp8.write_partial(config, half, acc, results.acc.at[index])
    if half == 0:
        results.stats[index, 0, rows] = mla_fp8.load_max(mem) * (1 / LOG2E)
        results.stats[index, 1, rows] = sums
