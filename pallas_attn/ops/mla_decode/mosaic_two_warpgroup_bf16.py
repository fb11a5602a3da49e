"""`mla_decode` on Hopper (H100, H200) for many query rows over 16-bit latents: pages, masks and results.

The main loop, its barriers and the deadlock argument are in `pallas_attn.mosaic.hopper.mla_bf16`. A query row is one
head of one query token; a split is a range of pages of a sequence. A CTA holds a block of up to 64 query rows of a
sequence (64 is the M of a wgmma; rows are ordered by query, then by head) and processes the splits that the plan
assigns to it. A tile of 64 latents has three parts: the left and the right half of the latent columns, and the rotated
columns.

    for split in plan:                             warpgroup 2, producer
        for pair of tiles:
            for tile, half in HALVES:              wait empty[tile, half]; start TMA copies of the half from each page
            look up the pages of the next pair
            after the first pair: wait joint[Q_FREE]; copy the query
    for split in plan:                             warpgroups 0 and 1
        wait q_full; mla_bf16.attend(pairs of the split)
        write the output, or a partial state if the sequence has several splits

Two CTAs with neighbouring blocks of the same sequence form a cluster if the number of blocks is even. Each CTA copies
one half of the bytes of every tile part into the shared memory of both CTAs (TMA multicast). A half tile is free when
both CTAs have released it. Both CTAs process the same splits and pages, so they start copies in the same order.

An absent page is not copied: the producer arrives at `full` instead. The producer stores for each tile which of its
tokens are visible. A tile whose tokens all rows see is not masked. Latents that no row sees, for example after the end
of a sequence, are set to 0 before they are used as values, because 0 · NaN is NaN. This metadata has room for 2 · pairs
pairs of tiles, because the two consumer warpgroups may be one pair apart.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper import mla_bf16
from pallas_attn.mosaic.hopper.mla_bf16 import HALVES, PARTS, Q_FREE, ROPE, Bf16LoopConfig, Bf16Scratch, Bf16TileAccess
from pallas_attn.mosaic.hopper.mla_rows import LOG2_ROW_STATES, PER_ROW, ROWS, copy_query, run_roles
from pallas_attn.mosaic.hopper.tiles import token_iota
from pallas_attn.mosaic.latent_tiles import DEAD, FULL, NEVER_BIT, TOKENS, RowInputs
from pallas_attn.mosaic.partial_states import PartialStates
from pallas_attn.mosaic.primitives import basics, register_tiles, unsupported
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, clear_rows, over_columns, over_tokens
from pallas_attn.ops.mla_decode import config
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
    num_blocks,
    seen_bits,
    token_positions,
)
from pallas_attn.types import DecodePlan

# --- the call


def decode(call: MlaDecodeCall, plan: DecodePlan) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Compute output and LSE of `mla_decode` for many query rows."""
    settings = config.two_warpgroup_config(call.latent_dim, call.rope_dim, call.page_size)
    static = DecodeBf16Static(
        **tile_parameters(call),
        pairs=settings.pairs,
        cluster=settings.cluster if num_blocks(call.query_rows) % settings.cluster == 0 else 1,
    )
    out, lse, partials = _attend(in_blocks(call, plan, static.rows, ROWS), static, call.output_dtype)
    return out_of_blocks(call, *merge_splits(out, lse, partials, plan))


def num_programs(call: MlaDecodeCall) -> int:
    """Return the number of CTAs of a plan for this call. The kernel runs each of them once per block of query rows.

    Raises:
      NotImplementedError: unsupported architecture, dtype, width, page size or number of queries.
    """
    basics.require_capability((9, 0))
    cache = call.cache
    unsupported.require_dtypes(call.q_latent.dtype, (cache.pages if cache.rope is None else cache.rope).dtype)
    unsupported.require_page_size(call.page_size)
    num_queries, latent_dim, rope_dim = call.num_queries, call.latent_dim, call.rope_dim
    if latent_dim % 64 or not 128 <= latent_dim <= 512 or rope_dim not in (32, 64):
        raise NotImplementedError(
            "takes latents of 128 to 512 columns, a multiple of 64, and 32 or 64 rotated ones, "
            f"got {latent_dim} and {rope_dim}"
        )
    if num_queries > NEVER_BIT:
        raise NotImplementedError(f"takes at most {NEVER_BIT} queries, got {num_queries}")
    return max(1, basics.multiprocessors() // num_blocks(call.query_rows))


# --- sizes and scratch


@dataclasses.dataclass(frozen=True)
class DecodeBf16Static(BlockTiles):
    """Compile-time parameters of the kernel.

    Attributes:
      pairs: pairs of tiles in shared memory.
      cluster: number of CTAs that share copies.
    """

    pairs: int
    cluster: int

    @property
    def loop(self) -> Bf16LoopConfig:
        """Parameters of the main loop."""
        return Bf16LoopConfig(self.latent_dim, self.rope_dim, self.row_bytes, self.sm_scale, self.pairs)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a consumer and of the producer.

        The registers of two consumers and the producer, 2 · consumer + producer, must not exceed 504.
        """
        return (232, 40) if self.loop.widths[0] > 128 else (192, 120)

    def columns(self, part: int) -> Any:
        """Columns of a tile part within a row of the cache."""
        left, right = self.loop.widths
        return pl.ds((0, left, self.latent_dim)[part], (left, right, self.rope_dim)[part])

    def scratch_types(self, dtype: jax.typing.DTypeLike) -> Bf16Scratch:
        """Return the scratch types of the kernel, for queries and latents of a dtype."""
        slots = 2 * self.pairs
        return Bf16Scratch.types(
            self.loop,
            dtype,
            producer=PageScratch(
                tile_meta=plgpu.SMEM((slots, 2, 1 + self.pages), jnp.int32),
                page_ids=plgpu.SMEM((self.pairs + 1, 2, self.pages), jnp.int32),
            ),
            full=plgpu.Barrier(num_barriers=PARTS * slots, num_arrivals=self.pages),
            cluster="cluster",
        )


class PageScratch(NamedTuple):
    """Shared memory for pages and masks.

    Attributes:
      tile_meta: int32 [2 · pairs, 2, 1 + pages], metadata of each tile of a pair, stored by `PageLookup.store_meta`.
      page_ids: int32 [pairs + 1, 2, pages], the array `PageLookup.ref`.
    """

    tile_meta: Any
    page_ids: Any


# --- the kernel


def _attend(x: RowInputs, static: DecodeBf16Static, out_dtype: jax.typing.DTypeLike) -> SplitResults:
    """Run the kernel."""
    programs = x.plan.cta_row.shape[0] - 1
    return plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=SplitResults.types(x, out_dtype),
        grid=(programs, static.blocks // static.cluster),
        grid_names=("program", "blocks"),
        cluster=(static.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=static.scratch_types(x.q_latent.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=basics.lane_semantics()),
        kernel_name="mla_decode_rows",
    )(basics.materialize(x))


def _kernel(static: DecodeBf16Static, x: RowInputs, out: Ref, lse: Ref, partials: PartialStates, *refs: Any) -> None:
    """Roles of the three warpgroups."""
    results, mem = SplitResults(out, lse, partials), Bf16Scratch(*refs)

    def block() -> Any:  # computed in each role; a shared value would be spilled to local memory
        return lax.axis_index("blocks") * static.cluster + lax.axis_index("cluster")

    def consume(half: int) -> None:
        _consume(static, x, mem, half, block(), results)
        plgpu.wait_smem_to_gmem(0)

    run_roles(static.registers, consume, lambda: _produce(static, x, mem, block()))


def _tile_meta(static: DecodeBf16Static, mem: Bf16Scratch, pair: Any, tile: int) -> Ref:  # [1 + pages]
    return mem.producer.tile_meta.at[lax.rem(pair, 2 * static.pairs), tile]


def _produce(static: DecodeBf16Static, x: RowInputs, mem: Bf16Scratch, block: Any) -> None:
    """Start all copies (warpgroup 2)."""
    pages = PageLookup(static, x, mem.producer.page_ids)

    def copy_split_query(split: LatentSplit) -> None:
        rows, to = static.block(block), pl.ds(0, static.rows)
        plgpu.barrier_wait(mem.joint.at[Q_FREE])
        halves, rope = (mem.q.left.at[0, to], mem.q.right.at[0, to]), mem.q.rope.at[0, to]
        copy_query(x.q_latent.at[split.row, rows], x.q_rope.at[split.row, rows], halves, rope, mem.q_full)

    def copy_page(slot: Any, parts: tuple[int, ...], j: Any, page: Any, tile_of_page: Any) -> None:
        """Start the copies of some parts of the j-th page of a tile, or arrive at `full` if the page is absent."""
        full = [mem.full.at[PARTS * slot + part] for part in parts]

        @pl.when(page >= 0)
        def _copy() -> None:
            source = x.pages.at[page, pl.ds(tile_of_page * TOKENS, static.page_tokens)]
            target = pl.ds(pl.multiple_of(j * static.page_tokens, static.page_tokens), static.page_tokens)
            for part, barrier in zip(parts, full, strict=True):
                columns, to = source.at[:, static.columns(part)], mem.k[part].at[slot, target]
                plgpu.copy_gmem_to_smem(columns, to, barrier, collective_axes="cluster")

        @pl.when(page < 0)
        def _arrive() -> None:
            for barrier in full:
                plgpu.barrier_arrive(barrier)

    def copy_pair(split: LatentSplit, i: Any, oldest_query: Any) -> None:
        """Copy each half of the tiles of a pair when its memory becomes free.

        Consumers store probabilities over the rotated keys of a tile. The next rotated keys are therefore copied with
        the half that is released after the last read of these probabilities. Work that needs no free memory is done
        before the wait, or after the copies have started.
        """
        for tile, half in HALVES:
            slot = static.loop.slot(split.pair + i, tile) + basics.opaque_zero()
            parts = (half,) if tile == half else (half, ROPE)
            first = pages.first_page(split, i, tile)
            plgpu.barrier_wait(mem.empty.at[2 * slot + half])
            pages.copy_tile(split, i, tile, first, functools.partial(copy_page, slot, parts))
            if tile == half:
                meta = _tile_meta(static, mem, split.pair + i, tile)
                pages.store_meta(split, i, tile, meta, oldest_query)

    copy_splits(pages, copy_split_query, copy_pair)
    plgpu.barrier_wait(mem.joint.at[Q_FREE])
    for i in range(4 * static.pairs):
        plgpu.barrier_wait(mem.empty.at[i])


def _consume(
    static: DecodeBf16Static, x: RowInputs, mem: Bf16Scratch, half: int, block: Any, results: SplitResults
) -> None:
    """Attend to all splits (warpgroups 0 and 1)."""

    def attend(split: LatentSplit) -> None:
        plgpu.barrier_wait(mem.q_full)
        tiles = _tile_access(static, x, mem, half, block, split)
        state = mla_bf16.attend(static.loop, mem, half, tiles, split.pair, split.num_pairs(static))
        _write(static, x, mem, half, block, split, results, state)

    mla_bf16.begin(static.loop, mem, half)
    for_each_split(static, x.plan, attend)


def _seen(static: DecodeBf16Static, x: RowInputs, split: LatentSplit, block: Any) -> Any:
    """Visibility bits [ROWS] of the query rows of a tile."""
    return seen_bits(static, x, split, block * static.rows + token_iota(ROWS), block, ROWS, PER_ROW)


def _tile_access(
    static: DecodeBf16Static, x: RowInputs, mem: Bf16Scratch, half: int, block: Any, split: LatentSplit
) -> Bf16TileAccess:
    """Waits and masks of the tiles of a split."""

    def await_part(pair: Any, slot: Any, part: int) -> None:
        plgpu.barrier_wait(mem.full.at[PARTS * slot + part])

    def is_full(pair: Any, tile: int) -> Any:
        return _tile_meta(static, mem, pair, tile)[0] == FULL

    def bits(pair: Any, tile: int, token: Any) -> Any:
        position = token_positions(static, _tile_meta(static, mem, pair, tile), token)
        return bit_index(position - split.oldest_query(static, x))

    def mask(pair: Any, slot: Any, s: Any) -> Any:
        clear_dead_rows(pair, half, slot)
        bit = over_columns(bits(pair, half, register_tiles.column_iota(TOKENS)), s.shape)  # [ROWS, TOKENS]
        seen = over_tokens(_seen(static, x, split, block), s.shape)  # [ROWS, TOKENS]
        return jnp.where((lax.shift_right_logical(seen, bit) & 1) == 1, s, -jnp.inf)

    def clear_dead_rows(pair: Any, tile: int, slot: Any) -> None:
        @pl.when(_tile_meta(static, mem, pair, tile)[0] == DEAD)
        def _clear() -> None:
            live = live_tokens(static, x, split.row, bits(pair, tile, token_iota(TOKENS)))  # [TOKENS]
            clear_rows(mem.k[half].at[slot], live, BY_64, static.row_bytes)
            plgpu.commit_smem()

    return Bf16TileAccess(await_part, is_full, mask, clear_dead_rows)


def _write(
    static: DecodeBf16Static,
    x: RowInputs,
    mem: Bf16Scratch,
    half: int,
    block: Any,
    split: LatentSplit,
    results: SplitResults,
    state: mla_bf16.HalfState,
) -> None:
    """Write this warpgroup's columns of the output, or of the partial state, of a split."""
    sums = mla_bf16.exchange_sums(mem, half, state)
    is_query = _seen(static, x, split, block) < 0  # bit OLDER_BIT is the sign
    m = jnp.where(is_query, state.m, -jnp.inf)
    l = jnp.where(is_query, sums, 0.0)  # noqa: E741
    widths = static.loop.widths

    @pl.when(split.is_whole_row)
    def _write_output() -> None:
        out = LOG2_ROW_STATES.normalise(state.acc, l).astype(results.out.dtype)
        to = results.out.at[split.row, static.block(block), pl.ds(half * widths[0], widths[half])]
        mla_bf16.write_output(static.loop, mem, half, out, to)
        if half == 0:
            results.lse[block, split.row] = LOG2_ROW_STATES.lse(m, l)

    @pl.when(~split.is_whole_row)
    def _write_partial() -> None:
        mla_bf16.release_query(mem)  # the next query is copied while the state is written
        partials = results.partials
        index = partials.state_index(block, results.lse.shape[0], split.state)
        acc = jnp.where(over_tokens(is_query, state.acc.shape), state.acc, 0.0)
        mla_bf16.write_partial(static.loop, half, acc, m, l, partials.acc.at[index], partials.stats.at[index])
