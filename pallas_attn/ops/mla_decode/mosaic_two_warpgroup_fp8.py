"""`mla_decode` on Hopper (H100, H200) for many query rows over fp8 latents: pages, masks and results.

The main loop, its barriers and the deadlock argument are in `pallas_attn.mosaic.hopper.mla_fp8`. A query row is one
head of one query token; a split is a range of pages of a sequence. A CTA holds a block of up to 64 query rows of a
sequence, which are the columns of its tiles. It processes the splits that the plan assigns to it in tiles of 64
latents:

    for split in plan:                             warpgroup 2, producer
        for tile in split:                         up to three tiles ahead of the consumers
            wait empty[slot]; store the tile's metadata
            start TMA copies of latents, scale factors and rotated keys from each page
            after each pair: look up the pages of the next pair
            after the first pair: wait q_free; copy the query
    for split in plan:                             warpgroups 0 and 1
        mla_fp8.attend(pairs of the split)
        write the output, or a partial state if the sequence has several splits

Barrier `full[slot]` has three arrivals per page: one for each copy, or three by the producer if the page is absent.
Consumers execute a proxy fence (`see_copies`) before they release a tile, because threads read latents through the
generic proxy and TMA overwrites them through the async proxy.

Splits, visibility and partial states are shared with the 16-bit kernel (`mosaic_splits`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper import mla_fp8, mla_fp8_products
from pallas_attn.mosaic.hopper.copy_barriers import see_copies
from pallas_attn.mosaic.hopper.mla_fp8 import SLOTS, Fp8LoopConfig, Fp8Scratch, Fp8TileAccess, slot_of
from pallas_attn.mosaic.hopper.mla_rows import LOG2_COLUMN_STATES, copy_query, run_roles
from pallas_attn.mosaic.latent_tiles import DEAD, FULL, OLDER_BIT, TOKENS, RowInputs
from pallas_attn.mosaic.partial_states import PartialStates
from pallas_attn.mosaic.primitives import basics, dequantize
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, PER_COLUMN, over_columns, over_tokens
from pallas_attn.ops.mla_decode import mosaic_two_warpgroup_bf16
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.mla_decode.mosaic_rows import in_blocks, out_of_blocks, tile_parameters
from pallas_attn.ops.mla_decode.mosaic_splits import (
    BlockTiles,
    LatentSplit,
    PageLookup,
    SplitResults,
    bit_index,
    copy_splits,
    for_each_split,
    live_tokens,
    merge_splits,
    seen_bits,
    token_positions,
)
from pallas_attn.types import LATENT_GROUP, DecodePlan

REGISTERS = 240, 24
"""Registers per thread of a consumer, and of the producer."""

PAIRS = 2
"""Maximum number of pairs of tiles, rounded up, by which copies are ahead of the consumers. Shared memory holds three
tiles."""


def decode(call: MlaDecodeCall, plan: DecodePlan) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Compute output and LSE of `mla_decode` for many query rows over fp8 latents."""
    static = DecodeFp8Static(**tile_parameters(call))
    x = in_blocks(call, plan, static.rows)
    x = x._replace(scale=x.scale.reshape(x.scale.shape[0], -1))
    out, lse, partials = _attend(x, static, call.output_dtype)
    return out_of_blocks(call, *merge_splits(out, lse, partials, plan))


def num_programs(call: MlaDecodeCall) -> int:
    """Return the number of CTAs of a plan for this call. The kernel runs each of them once per block of 64 query rows.

    Raises:
      NotImplementedError: `mosaic_two_warpgroup_bf16.num_programs` raises it, the queries are not bfloat16, or they do
        not have 64 rotated columns.
    """
    programs = mosaic_two_warpgroup_bf16.num_programs(call)
    if call.q_latent.dtype != jnp.bfloat16 or call.rope_dim != TOKENS:
        raise NotImplementedError(
            f"takes bfloat16 queries and {TOKENS} rotated columns over quantised latents, "
            f"got {call.q_latent.dtype.name} and {call.rope_dim}"
        )
    return programs


# --- sizes and scratch


@dataclasses.dataclass(frozen=True)
class DecodeFp8Static(BlockTiles):
    """Compile-time parameters of the kernel."""

    @property
    def loop(self) -> Fp8LoopConfig:
        """Parameters of the main loop."""
        return Fp8LoopConfig(self.latent_dim, self.rows, self.sm_scale, self.page_tokens)


class DecodeFp8Scratch(NamedTuple):
    """Shared memory and barriers of a CTA.

    Attributes:
      loop: scratch of the main loop.
      tile_meta: int32 [SLOTS, 1 + pages], metadata of each tile, stored by `PageLookup.store_meta`. Positions are
        relative to the position of the oldest query of the sequence.
      page_ids: int32 [PAIRS + 1, 2, pages], the array `PageLookup.ref`.
      full: [SLOTS] barriers; a phase ends when the copies of a tile are complete.
    """

    loop: Fp8Scratch
    tile_meta: Any
    page_ids: Any
    full: Any

    @staticmethod
    def types(static: DecodeFp8Static, dtype: jax.typing.DTypeLike) -> DecodeFp8Scratch:
        """Scratch types of the kernel, for queries of a dtype."""
        return DecodeFp8Scratch(
            loop=Fp8Scratch.types(static.loop, dtype),
            tile_meta=plgpu.SMEM((SLOTS, 1 + static.pages), jnp.int32),
            page_ids=plgpu.SMEM((PAIRS + 1, 2, static.pages), jnp.int32),
            full=plgpu.Barrier(num_barriers=SLOTS, num_arrivals=3 * static.pages),
        )


# --- the kernel


def _attend(x: RowInputs, static: DecodeFp8Static, out_dtype: jax.typing.DTypeLike) -> SplitResults:
    """Run the kernel."""
    programs = x.plan.cta_row.shape[0] - 1
    return plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=SplitResults.types(x, out_dtype),
        grid=(programs, static.blocks),
        grid_names=("program", "blocks"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=DecodeFp8Scratch.types(static, x.q_latent.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_decode_fp8",
    )(basics.materialize(x))


def _kernel(static: DecodeFp8Static, x: RowInputs, out: Ref, lse: Ref, partials: PartialStates, *refs: Any) -> None:
    """Roles of the three warpgroups."""
    results, mem = SplitResults(out, lse, partials), DecodeFp8Scratch(*refs)

    run_roles(
        REGISTERS,
        lambda half: _consume(static, x, mem, half, lax.axis_index("blocks"), results),
        lambda: _produce(static, x, mem, lax.axis_index("blocks")),
    )


def _produce(static: DecodeFp8Static, x: RowInputs, mem: DecodeFp8Scratch, block: Any) -> None:
    """Start all copies (warpgroup 2)."""
    pages, loop = PageLookup(static, x, mem.page_ids), mem.loop

    def copy_split_query(split: LatentSplit) -> None:
        rows = static.block(block)
        plgpu.barrier_wait(loop.q_free)
        halves = loop.q[0].at[0], loop.q[1].at[0]
        copy_query(x.q_latent.at[split.row, rows], x.q_rope.at[split.row, rows], halves, loop.q_rope.at[0], loop.q_full)

    def copy_page(slot: Any, j: Any, page: Any, tile_of_page: Any) -> None:
        """Start the copies of the j-th page of a tile, or arrive at `full` if the page is absent."""
        full = mem.full.at[slot]

        @pl.when(page >= 0)
        def _copy() -> None:
            tokens = pl.ds(tile_of_page * TOKENS, static.page_tokens)
            target = pl.ds(pl.multiple_of(j * static.page_tokens, static.page_tokens), static.page_tokens)
            plgpu.copy_gmem_to_smem(x.pages.at[page, tokens], loop.k.at[slot, target], full)
            plgpu.copy_gmem_to_smem(x.rope.at[page, tokens], loop.rope.at[slot, target], full)
            count = static.page_tokens * static.latent_dim // LATENT_GROUP
            scales = x.scale.at[page, pl.ds(tile_of_page * count, count)]
            plgpu.copy_gmem_to_smem(scales, loop.scales.at[slot, j, pl.ds(0, count)], full)

        @pl.when(page < 0)
        def _arrive() -> None:
            for _ in range(3):
                plgpu.barrier_arrive(full)

    def copy_pair(split: LatentSplit, i: Any, oldest_query: Any) -> None:
        """Copy each tile of a pair as soon as its slot is free."""
        for tile in range(2):
            slot, _ = slot_of(split.pair + i, tile)
            first = pages.first_page(split, i, tile)
            plgpu.barrier_wait(loop.empty.at[slot])
            meta = mem.tile_meta.at[slot_of(split.pair + i, tile)[0]]
            pages.store_meta(split, i, tile, meta, oldest_query, origin=oldest_query)  # saves consumers a register
            pages.copy_tile(split, i, tile, first, functools.partial(copy_page, slot))

    copy_splits(pages, copy_split_query, copy_pair)
    plgpu.barrier_wait(loop.q_free)
    for i in range(SLOTS):
        plgpu.barrier_wait(loop.empty.at[i])


def _consume(
    static: DecodeFp8Static, x: RowInputs, mem: DecodeFp8Scratch, half: int, block: Any, results: SplitResults
) -> None:
    """Attend to all splits (warpgroups 0 and 1)."""

    def attend(split: LatentSplit) -> None:
        tiles = _tile_access(static, x, mem, block, split)
        acc = mla_fp8.attend(static.loop, mem.loop, half, tiles, split.pair, split.num_pairs(static))
        _write(static, x, mem.loop, half, block, split, results, acc)

    mla_fp8.begin(mem.loop, half)
    for_each_split(static, x.plan, attend)
    mla_fp8.end(mem.loop, half)


def _tile_access(
    static: DecodeFp8Static, x: RowInputs, mem: DecodeFp8Scratch, block: Any, split: LatentSplit
) -> Fp8TileAccess:
    """Waits and masks of the tiles of a split."""

    def await_tile(slot: Any, use: Any) -> None:
        plgpu.barrier_wait(mem.full.at[slot])

    def is_full(slot: Any) -> Any:
        return mem.tile_meta.at[slot][0] == FULL

    def mask(slot: Any, s: Any) -> Any:
        meta = mem.tile_meta.at[slot]
        bit = bit_index(token_positions(static, meta, mla_fp8_products.token_index()))  # [TOKENS]

        @pl.when(meta[0] == DEAD)
        def _clear() -> None:
            live = live_tokens(static, x, split.row, bit)  # [TOKENS]
            plgpu.commit_smem()  # all warps have computed their scores
            dequantize.clear_tokens(mem.loop.k.at[slot], static.latent_dim, live, BY_64)
            mla_fp8_products.clear_scales(mem.loop.scales.at[slot], live, static.page_tokens, static.latent_dim)

        seen = plgpu.layout_cast(over_columns(_seen(static, x, split, block), s.shape), BY_64.tile)  # [TOKENS, ROWS]
        bits = plgpu.layout_cast(over_tokens(bit, s.shape), BY_64.tile)
        return plgpu.layout_cast(jnp.where((lax.shift_right_logical(seen, bits) & 1) == 1, s, -jnp.inf), BY_64.tile)

    return Fp8TileAccess(await_tile, await_tile, is_full, mask, before_release=see_copies)


def _seen(static: DecodeFp8Static, x: RowInputs, split: LatentSplit, block: Any) -> Any:
    """Visibility bits [rows] of the query rows, in layout `PER_COLUMN`."""
    rows = static.rows
    if x.seen is not None or basics.interpreted():
        row = block * rows + jnp.arange(rows, dtype=jnp.int32) if x.seen is None else None
        return seen_bits(static, x, split, row, block, rows, PER_COLUMN)

    # Written in MLIR, because Pallas finds no register layout for the division of an iota over columns.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()),),
        return_type=plgpu.ShapeDtypeStruct((rows,), jnp.int32, layout=PER_COLUMN),
    )
    def bits(_: Any, block: Any) -> Any:
        _, lane = dequantize.warp_and_lane()
        number, layout = ir.IntegerType.get_signless(32), PER_COLUMN.to_mgpu()
        none: Any = mgpu.c(0, number)
        first = arith.addi(
            arith.muli(block.registers.item(), mgpu.c(rows, number)),
            arith.muli(arith.andi(lane, mgpu.c(3, number)), mgpu.c(2, number)),
        )
        registers = np.empty(layout.registers_shape((rows,)), dtype=object)
        for j in range(rows // 8):
            pair = []
            for i in range(2):
                query = arith.divui(arith.addi(first, mgpu.c(8 * j + i, number)), mgpu.c(static.heads, number))
                newer = arith.subi(mgpu.c(static.queries - 1, number), query)
                seen = arith.shrui(mgpu.c(static.draft_bits, number), arith.maxsi(newer, none))
                seen = arith.ori(seen, mgpu.c(-(2**OLDER_BIT), number))
                pair.append(arith.select(arith.cmpi(arith.CmpIPredicate.sge, newer, none), seen, none))
            registers.reshape(-1)[j] = vector.from_elements(ir.VectorType.get((2,), number), pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return bits(jnp.asarray(block, jnp.int32))


def _write(
    static: DecodeFp8Static,
    x: RowInputs,
    mem: Fp8Scratch,
    half: int,
    block: Any,
    split: LatentSplit,
    results: SplitResults,
    acc: Any,
) -> None:
    """Write this warpgroup's columns of the output, or of the partial state, of a split.

    Args:
      acc: [columns, rows].
    """
    rows = pl.ds(0, static.rows)
    row, state = lax.optimization_barrier((split.row, split.state))  # addresses are recomputed, which saves registers
    sums = mla_fp8.exchange_sums(static.loop, mem, half)
    seen = None  # all rows are queries, or padding
    if x.seen is not None:
        seen = basics.load(x.seen.at[row, static.block(block)], PER_COLUMN)  # < 0 for queries: bit OLDER_BIT
        sums = jnp.where(seen < 0, sums, 0.0)

    def load_max() -> Any:  # [rows]
        m = mla_fp8.load_max(mem)
        return m if seen is None else jnp.where(seen < 0, m, -jnp.inf)

    @pl.when(split.is_whole_row)
    def _write_output() -> None:
        widths = static.loop.widths
        to = results.out.at[row, static.block(block), pl.ds(half * widths[0], widths[half])]
        mla_fp8_products.store_heads(LOG2_COLUMN_STATES.normalise(acc, sums), to)
        if half == 0:
            results.lse[block, row, rows] = LOG2_COLUMN_STATES.lse(load_max(), sums)

    @pl.when(~split.is_whole_row)
    def _write_partial() -> None:
        partials = results.partials
        index = partials.state_index(block, results.lse.shape[0], state)
        kept = acc if seen is None else jnp.where(over_columns(seen, acc.shape) < 0, acc, 0.0)
        mla_fp8.write_partial(static.loop, half, kept, partials.acc.at[index])
        if half == 0:
            partials.stats[index, 0, rows] = load_max() * (1 / LOG2E)
            partials.stats[index, 1, rows] = sums
