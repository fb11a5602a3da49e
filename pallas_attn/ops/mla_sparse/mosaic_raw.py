"""`mla_sparse` on Hopper (H100, H200) over latents in 8 bits, which stay so in shared memory.

An item is a block of up to 64 heads of a token, and a share of the token's slots. Programs, one to a multiprocessor,
take items in turn. The third warpgroup copies chosen latents, their scales and their rotated keys asynchronously
(`mosaic.hopper.gather`), three tiles ahead; the other two attend to them (`mosaic.hopper.raw_seesaw`, which tells why
no wait can last). A tile with tokens that are none has zeros in their place, and a mask for its scores.
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

from pallas_attn.mosaic.hopper import gather, raw_latents
from pallas_attn.mosaic.hopper.copy_barriers import CopyBarriers, see_copies
from pallas_attn.mosaic.hopper.raw_seesaw import (
    SLOTS,
    TOKENS,
    RawMemory,
    RawTurns,
    normalise,
    slot_of,
)
from pallas_attn.mosaic.hopper.seesaw import ROWS, log_sum_exp
from pallas_attn.mosaic.merge import num_fragments
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import LOG2E
from pallas_attn.mosaic.primitives.register_tiles import BY_64, over_tokens
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.ops.mla_sparse.mosaic_items import (
    PAIR_TOKENS,
    SparseFacts,
    SparseInputs,
    SparseItem,
    SparseResults,
    for_each_item,
    results_of,
)

COMPUTE_REGISTERS, GATHER_REGISTERS = 232, 40
"""Registers of a thread that computes, and of one that gathers."""


@dataclasses.dataclass(frozen=True)
class RawSparseStatic(SparseFacts):
    """Compile-time facts of the kernel."""

    @property
    def page_tokens(self) -> int:
        """Tokens of a tile whose scales lie together."""
        return TOKENS

    def landed(self, mem: RawSparseScratch) -> CopyBarriers:
        """Barriers of the tiles."""
        return CopyBarriers(mem.landed)


class RawSparseScratch(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      seesaw: of the warpgroups that compute.
      is_none: int32 [SLOTS, TOKENS], for each tile which of its tokens are none.
      all_given: int32 [SLOTS, 4], for each tile and each warp that gathers whether none of its tokens is none.
      landed: [SLOTS], a tile is there.
    """

    seesaw: RawMemory
    is_none: Any
    all_given: Any
    landed: Any

    @staticmethod
    def types(static: RawSparseStatic, dtype: jax.typing.DTypeLike) -> RawSparseScratch:
        """Scratch types of the kernel, for queries of a dtype."""
        return RawSparseScratch(
            seesaw=RawMemory.types(static.rows, static.widths, TOKENS, dtype),
            is_none=plgpu.SMEM((SLOTS, TOKENS), jnp.int32),
            all_given=plgpu.SMEM((SLOTS, 4), jnp.int32),
            landed=CopyBarriers.types(SLOTS),
        )


def attend(x: SparseInputs, static: RawSparseStatic, out_dtype: jax.typing.DTypeLike) -> Any:
    """Run the kernel: `SparseResults`, or the `PartialStates` of several splits."""
    num_tokens = x.q_latent.shape[0]
    items, results = num_tokens * static.blocks, results_of(static, num_tokens, out_dtype)
    return plgpu.kernel(
        functools.partial(_kernel, static, type(results)),
        out_type=results,
        grid=(max(1, min(items * static.splits, basics.multiprocessors())),),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=RawSparseScratch.types(static, x.q_rope.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=16),
        kernel_name="mla_sparse_raw",
    )(basics.materialize(x))


def _kernel(static: RawSparseStatic, kind: Callable[..., Any], x: SparseInputs, *refs: Any) -> None:
    """Roles of the three warpgroups."""
    results, mem = kind(*refs[:2]), RawSparseScratch(*refs[2:])
    static.landed(mem).begin()

    def compute(half: int) -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        RawSparseConsumer(static, mem.seesaw, half, mem).run(x, results)

    def fetch() -> None:
        plgpu.set_max_registers(GATHER_REGISTERS, action="decrease")
        RawSparseProducer(static, x, mem).run()

    branches = [functools.partial(compute, 0), functools.partial(compute, 1), fetch]
    lax.switch(lax.axis_index("warpgroup"), branches)


@dataclasses.dataclass(frozen=True)
class RawSparseProducer:
    """The warpgroup that gathers latents, and starts copies of queries."""

    static: RawSparseStatic
    x: SparseInputs
    mem: RawSparseScratch

    def run(self) -> None:
        """Gather the latents of all items."""
        self.copy_query(SparseItem.first())
        for_each_item(self.static, self.x, self.gather_item)
        plgpu.barrier_wait(self.mem.seesaw.q_free)
        for i in range(SLOTS):
            plgpu.barrier_wait(self.mem.seesaw.free.at[i])

    def gather_item(self, item: SparseItem) -> None:
        """Gather the latents of an item. Its query comes after the first pair, for which there is room earlier, except
        in the first item.
        """

        def step(i: Any, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            later = tuple(self.rows(item, i + 1, tile) for tile in range(2))  # on their way while these are used
            for tile in range(2):
                self.copy(item.pair + i, tile, rows[tile])
            pl.when((i == 0) & (item.pair > 0))(lambda: self.copy_query(item))
            return later

        lax.fori_loop(0, item.count, step, tuple(self.rows(item, jnp.int32(0), tile) for tile in range(2)))

    def copy_query(self, item: SparseItem) -> None:
        x, mem, static = self.x, self.mem.seesaw, self.static
        plgpu.barrier_wait(mem.q_free)
        token, block, _ = item.place(static)
        heads = pl.ds(block * ROWS, static.rows)
        for first, to in zip((0, static.widths[0]), mem.q, strict=True):
            columns = pl.ds(first, to.shape[2])
            plgpu.copy_gmem_to_smem(x.q_latent.at[token, heads, columns], to.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_rope.at[token, heads], mem.q_rope.at[0], mem.q_landed)

    def rows(self, item: SparseItem, i: Any, tile: int) -> jax.Array:
        """Rows of the pool that the tokens of a tile of the item's i-th pair are, in the order of `gather.tile_row`; -1
        for none.
        """
        first = item.start + lax.optimization_barrier(i) * PAIR_TOKENS + tile * TOKENS  # not kept for each tile
        place = first + gather.tile_row()
        slot = RowLayout(1, 1).take(self.x.slots, jnp.minimum(place, self.x.slots.shape[0] - 1))
        return jnp.where((place < item.stop) & basics.in_pool(slot, self.x.latents.shape[0]), slot, -1)

    def copy(self, pair: Any, tile: int, rows: jax.Array) -> None:
        """Start the copies of a tile once it is free."""
        x, mem, tiles = self.x, self.mem, self.mem.seesaw
        slot, _ = slot_of(pair, tile)
        plgpu.barrier_wait(tiles.free.at[slot])
        gather.store_none(rows, mem.is_none.at[slot], mem.all_given.at[slot])
        gather.copy_rows(x.latents, rows, 0, tiles.k.at[slot])
        gather.copy_rows(x.rope, rows, 0, tiles.rope.at[slot])
        gather.copy_scales(x.scale, rows, tiles.scales.at[slot, 0])
        self.static.landed(mem).arrive(slot)


@dataclasses.dataclass(frozen=True)
class RawSparseConsumer(RawTurns[SparseItem]):
    """One of the two warpgroups that compute, over gathered latents."""

    static: RawSparseStatic
    memory: RawMemory
    half: int
    mem: RawSparseScratch

    def run(self, x: SparseInputs, results: Any) -> None:
        """Attend to all items."""
        self.begin()

        def attend(item: SparseItem) -> None:
            self.write(results, item, self.attend(item, item.pair, item.count))

        for_each_item(self.static, x, attend)
        self.end()

    def await_tile(self, slot: Any, use: Any, *, keys: bool) -> None:
        self.static.landed(self.mem).wait(slot, use)
        if keys:
            see_copies()

    def is_full(self, pair: Any, slot: Any) -> Any:
        given = self.mem.all_given.at[slot]
        return (given[0] & given[1] & given[2] & given[3]) == 1

    def mask_tile(self, split: SparseItem, pair: Any, slot: Any, s: Any) -> Any:
        is_none = basics.load(self.mem.is_none.at[slot], BY_64.per_row)
        return jnp.where(over_tokens(is_none, s.shape) == 0, s, -jnp.inf)

    def write(self, results: Any, item: SparseItem, acc: Any) -> None:
        """Write this warpgroup's half of the output, or of the partial state, of an item."""
        static, half = self.static, self.half
        sums = self.trade_sums()
        token, block, split = item.place(static)
        rows, first, width = pl.ds(0, static.rows), half * static.widths[0], static.widths[half]
        if isinstance(results, SparseResults):
            place = results.out.at[token, pl.ds(block * ROWS, static.rows), pl.ds(first, width)]
            raw_latents.store_heads(normalise(acc, sums), place)
            if half == 0:
                results.lse[token, block, rows] = log_sum_exp(self.largest(), sums)
            return
        index = (token * static.blocks + block) * static.splits + split
        fragments = pl.ds(num_fragments(ROWS * first), num_fragments(ROWS * width))
        raw_latents.store_fragments(acc, results.acc.at[index, fragments])
        if half == 0:
            results.stats[index, 0, rows] = self.largest() * (1 / LOG2E)
            results.stats[index, 1, rows] = sums
