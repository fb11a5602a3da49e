"""`mla_decode` on Hopper (H100, H200) for many query rows over latents in 8 bits, which stay so in shared memory.

A program holds 64 query rows of a sequence, and takes its share of the plan. Warpgroup 2 copies pages of latents, of
their scales and of their rotated keys, three tiles ahead; the other two attend to them (`mosaic.hopper.raw_seesaw`,
which tells why no wait can last). Splits, visibility and partial states are those of `mosaic_splits`.
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

from pallas_attn.mosaic.hopper import raw_latents
from pallas_attn.mosaic.hopper.copy_barriers import see_copies
from pallas_attn.mosaic.hopper.raw_seesaw import SLOTS, RawMemory, RawTurns, normalise, slot_of
from pallas_attn.mosaic.hopper.seesaw import ROWS, log_sum_exp
from pallas_attn.mosaic.merge import PartialStates, num_fragments
from pallas_attn.mosaic.primitives import basics, dequantize
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, PER_COLUMN, over_columns, over_tokens
from pallas_attn.ops.mla_decode import mosaic_seesaw
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.mla_decode.mosaic_rows import (
    DEAD,
    FULL,
    NEVER_BIT,
    OLDER_BIT,
    TOKENS,
    RowInputs,
    in_blocks,
    out_of_blocks,
)
from pallas_attn.ops.mla_decode.mosaic_splits import (
    LatentSplit,
    PageProducer,
    PairedTiles,
    SplitResults,
    for_each_split,
    merge_splits,
    seen_bits,
)
from pallas_attn.portable.schedule import most_splits
from pallas_attn.types import LATENT_GROUP, DecodePlan

COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24
"""Registers of a thread that computes, and of one that starts copies."""


def decode(call: MlaDecodeCall, plan: DecodePlan) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Compute `mla_decode`, output and LSE, of many query rows over latents in 8 bits."""
    static = RawDecodeStatic(
        latent_dim=call.latent_dim,
        rope_dim=call.rope_dim,
        queries=call.num_queries,
        heads=call.num_heads,
        page_size=call.page_size,
        causal=call.draft_mask is None,
        sm_scale=call.sm_scale,
    )
    x = in_blocks(call, plan, ROWS)
    x = x._replace(scale=x.scale.reshape(x.scale.shape[0], -1))
    out, lse, partials = _attend(x, static, call.output_dtype)
    return out_of_blocks(call, *merge_splits(out, lse, partials, plan))


def num_programs(call: MlaDecodeCall) -> int:
    """Number of programs for plans of such calls.

    Raises:
      NotImplementedError: as `mosaic_seesaw.num_programs`; and unless queries are bfloat16 with 64 rotated columns.
    """
    programs = mosaic_seesaw.num_programs(call)
    if call.q_latent.dtype != jnp.bfloat16 or call.rope_dim != TOKENS:
        raise NotImplementedError(
            f"takes bfloat16 queries and {TOKENS} rotated columns over quantised latents, "
            f"got {call.q_latent.dtype.name} and {call.rope_dim}"
        )
    return programs


@dataclasses.dataclass(frozen=True)
class RawDecodeStatic(PairedTiles):
    """Compile-time facts of the kernel."""

    pairs: int = 2  # that copies are ahead, at most: shared memory holds a tile less

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return ROWS


class RawDecodeScratch(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      seesaw: of the warpgroups that compute.
      tile_meta: int32 [SLOTS, 1 + pages]: for a tile its visibility (FULL, PARTIAL, DEAD), and the position of each
        page's first token, counted from the oldest query, or ABSENT.
      page_ids: int32 [pairs + 1, 2, pages]: the pages of either tile of a pair, looked up before there is room for
        them; negative where there is none.
      landed: [SLOTS], a tile is there.
    """

    seesaw: RawMemory
    tile_meta: Any
    page_ids: Any
    landed: Any

    @staticmethod
    def types(static: RawDecodeStatic, dtype: jax.typing.DTypeLike) -> RawDecodeScratch:
        """Scratch types of the kernel, for queries of a dtype."""
        return RawDecodeScratch(
            seesaw=RawMemory.types(ROWS, static.widths, static.page_tokens, dtype),
            tile_meta=plgpu.SMEM((SLOTS, 1 + static.pages), jnp.int32),
            page_ids=plgpu.SMEM((static.pairs + 1, 2, static.pages), jnp.int32),
            landed=plgpu.Barrier(num_barriers=SLOTS, num_arrivals=3 * static.pages),
        )


def _attend(
    x: RowInputs, static: RawDecodeStatic, out_dtype: jax.typing.DTypeLike
) -> tuple[Array, Array, PartialStates]:
    """Run the kernel: output and LSE of rows in one split, partial states of the others."""
    batch, rows, latent_dim = x.q_latent.shape
    blocks, programs = rows // ROWS, x.plan.cta_row.shape[0] - 1
    return plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=SplitResults(
            jax.ShapeDtypeStruct((batch, rows, latent_dim), out_dtype),
            jax.ShapeDtypeStruct((blocks, batch, ROWS), jnp.float32),
            PartialStates.types(blocks * most_splits(x.plan, x.block_tables.shape[1]), ROWS, latent_dim),
        ),
        grid=(programs, blocks),
        grid_names=("program", "blocks"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=RawDecodeScratch.types(static, x.q_latent.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_decode_raw",
    )(basics.materialize(x))


def _kernel(static: RawDecodeStatic, x: RowInputs, out: Ref, lse: Ref, partials: PartialStates, *scratch: Any) -> None:
    """Roles of the three warpgroups."""
    results, mem = SplitResults(out, lse, partials), RawDecodeScratch(*scratch)

    def compute(half: int) -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        RawDecodeConsumer(static, mem.seesaw, half, mem, x, lax.axis_index("blocks")).run(results)

    def copy() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        RawDecodeProducer(static, x, mem, lax.axis_index("blocks")).run()

    branches = [functools.partial(compute, 0), functools.partial(compute, 1), copy]
    lax.switch(lax.axis_index("warpgroup"), branches)


@dataclasses.dataclass(frozen=True)
class RawDecodeProducer(PageProducer[RawDecodeStatic, RawDecodeScratch]):
    """The warpgroup that starts all copies, of whole tiles."""

    def await_end(self) -> None:
        plgpu.barrier_wait(self.mem.seesaw.q_free)
        for i in range(SLOTS):
            plgpu.barrier_wait(self.mem.seesaw.free.at[i])

    def copy_query(self, split: LatentSplit) -> None:
        x, mem, rows = self.x, self.mem.seesaw, pl.ds(self.block * ROWS, ROWS)
        plgpu.barrier_wait(mem.q_free)
        for first, to in zip((0, self.static.widths[0]), mem.q, strict=True):
            plgpu.copy_gmem_to_smem(x.q_latent.at[split.row, rows, pl.ds(first, to.shape[2])], to.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_rope.at[split.row, rows], mem.q_rope.at[0], mem.q_landed)

    def tile_meta(self, pair: Any, tile: int) -> Ref:
        return self.mem.tile_meta.at[slot_of(pair, tile)[0]]

    def copy_pair(self, split: LatentSplit, i: Any, oldest_query: Any) -> None:
        """Start the copies of a pair of tiles, each as soon as the one that it replaces is free."""
        static = self.static
        for tile in range(2):
            slot, _ = slot_of(split.pair + i, tile)
            ids = self.page_ids(split, i, tile)
            page, (_, tile_of_page) = ids[0], static.first_page(2 * i + tile)
            plgpu.barrier_wait(self.mem.seesaw.free.at[slot])
            self.store_meta(split, i, tile, oldest_query, origin=oldest_query)  # which consumers need not keep
            self.copy_pages(slot, (), ids, page, tile_of_page)

    def copy_page(self, slot: Any, parts: tuple[int, ...], j: Any, page: Any, tile_of_page: Any) -> None:
        """Start the copies of the j-th page of a tile. An absent page arrives at once."""
        static, x, mem, landed = self.static, self.x, self.mem.seesaw, self.mem.landed.at[slot]

        @pl.when(page >= 0)
        def _copy() -> None:
            tokens = pl.ds(tile_of_page * TOKENS, static.page_tokens)
            target = pl.ds(pl.multiple_of(j * static.page_tokens, static.page_tokens), static.page_tokens)
            plgpu.copy_gmem_to_smem(x.pages.at[page, tokens], mem.k.at[slot, target], landed)
            plgpu.copy_gmem_to_smem(x.rope.at[page, tokens], mem.rope.at[slot, target], landed)
            count = static.page_tokens * static.latent_dim // LATENT_GROUP
            scales = x.scale.at[page, pl.ds(tile_of_page * count, count)]
            plgpu.copy_gmem_to_smem(scales, mem.scales.at[slot, j, pl.ds(0, count)], landed)

        @pl.when(page < 0)
        def _arrive() -> None:
            for _ in range(3):
                plgpu.barrier_arrive(landed)


@dataclasses.dataclass(frozen=True)
class RawDecodeConsumer(RawTurns[LatentSplit]):
    """One of the two warpgroups that compute, over pages of a sequence."""

    static: RawDecodeStatic
    memory: RawMemory
    half: int
    mem: RawDecodeScratch
    x: RowInputs
    block: Any

    def run(self, results: SplitResults) -> None:
        """Attend to all splits."""
        self.begin()

        def attend(split: LatentSplit) -> None:
            self.write(results, split, self.attend(split, split.pair, split.num_pairs(self.static)))

        for_each_split(self.static, self.x.plan, attend)
        self.end()

    def await_tile(self, slot: Any, use: Any, *, keys: bool) -> None:
        plgpu.barrier_wait(self.mem.landed.at[slot])

    def release(self, slot: Any) -> None:
        see_copies()  # threads have read what the next copy overwrites
        super().release(slot)

    def is_full(self, pair: Any, slot: Any) -> Any:
        return self.mem.tile_meta.at[slot][0] == FULL

    def mask_tile(self, split: LatentSplit, pair: Any, slot: Any, s: Any) -> Any:
        static, x, meta = self.static, self.x, self.mem.tile_meta.at[slot]
        token = raw_latents.token_index()
        draft = token + meta[1]
        for j in range(1, static.pages):
            first = j * static.page_tokens
            draft = jnp.where(token >= first, token + (meta[1 + j] - first), draft)
        bit = jnp.where(draft < 0, OLDER_BIT, jnp.minimum(draft, NEVER_BIT))

        @pl.when(meta[0] == DEAD)
        def _clear() -> None:
            every = jnp.int32(static.draft_bits - 2**OLDER_BIT)
            any_row = every if x.seen_by_any is None else x.seen_by_any[split.row]
            live_mask = (lax.shift_right_logical(jnp.full_like(bit, any_row), bit) & 1) == 1
            plgpu.commit_smem()  # every warp has its scores
            dequantize.clear_tokens(self.memory.k.at[slot], static.latent_dim, live_mask, BY_64)
            raw_latents.clear_scales(self.memory.scales.at[slot], live_mask, static.page_tokens, static.latent_dim)

        seen = plgpu.layout_cast(over_columns(self.seen(split), s.shape), BY_64.tile)
        bits = plgpu.layout_cast(over_tokens(bit, s.shape), BY_64.tile)
        return plgpu.layout_cast(jnp.where((lax.shift_right_logical(seen, bits) & 1) == 1, s, -jnp.inf), BY_64.tile)

    def seen(self, split: LatentSplit) -> Any:
        """Bits [ROWS] of what each row sees."""
        static, x = self.static, self.x
        if x.seen is not None or basics.interpreted():
            row = self.block * ROWS + jnp.arange(ROWS, dtype=jnp.int32) if x.seen is None else None
            return seen_bits(static, x, split, row, self.block, PER_COLUMN)

        # Pallas finds no layouts for an iota of columns that is divided.
        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WG_SPLAT(()),),
            return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=PER_COLUMN),
        )
        def bits(_: Any, block: Any) -> Any:
            _, lane = dequantize.warp_and_lane()
            number, layout = ir.IntegerType.get_signless(32), PER_COLUMN.to_mgpu()
            none: Any = mgpu.c(0, number)
            first = arith.addi(
                arith.muli(block.registers.item(), mgpu.c(ROWS, number)),
                arith.muli(arith.andi(lane, mgpu.c(3, number)), mgpu.c(2, number)),
            )
            registers = np.empty(layout.registers_shape((ROWS,)), dtype=object)
            for j in range(ROWS // 8):
                pair = []
                for i in range(2):
                    query = arith.divui(arith.addi(first, mgpu.c(8 * j + i, number)), mgpu.c(static.heads, number))
                    newer = arith.subi(mgpu.c(static.queries - 1, number), query)
                    seen = arith.shrui(mgpu.c(static.draft_bits, number), arith.maxsi(newer, none))
                    seen = arith.ori(seen, mgpu.c(-(2**OLDER_BIT), number))
                    pair.append(arith.select(arith.cmpi(arith.CmpIPredicate.sge, newer, none), seen, none))
                registers.reshape(-1)[j] = vector.from_elements(ir.VectorType.get((2,), number), pair)
            return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

        return bits(jnp.asarray(self.block, jnp.int32))

    def write(self, results: SplitResults, split: LatentSplit, acc: Any) -> None:
        """Write this warpgroup's half of the output, or of the partial state, of a split."""
        static, half, block = self.static, self.half, self.block
        row, state = lax.optimization_barrier((split.row, split.state))  # places are computed here, not kept
        sums, largest, kept = self.trade_sums(), self.largest, lambda acc: acc
        if self.x.seen is not None:  # else all rows are queries, or nobody reads them
            seen = basics.load(self.x.seen.at[row, pl.ds(block * ROWS, ROWS)], PER_COLUMN)
            sums = jnp.where(seen < 0, sums, 0.0)

            def largest() -> Any:
                return jnp.where(seen < 0, self.largest(), -jnp.inf)

            def kept(acc: Any) -> Any:
                return jnp.where(over_columns(seen, acc.shape) < 0, acc, 0.0)

        first, width = half * static.widths[0], static.widths[half]

        @pl.when(split.is_whole_row)
        def _write() -> None:
            place = results.out.at[row, pl.ds(block * ROWS, ROWS), pl.ds(first, width)]
            raw_latents.store_heads(normalise(acc, sums), place)
            if half == 0:
                results.lse[block, row] = log_sum_exp(largest(), sums)

        @pl.when(~split.is_whole_row)
        def _store_partial() -> None:
            partials = results.partials
            index = partials.state_index(block, results.lse.shape[0], state)
            fragments = pl.ds(num_fragments(ROWS * first), num_fragments(ROWS * width))
            raw_latents.store_fragments(kept(acc), partials.acc.at[index, fragments])
            if half == 0:
                partials.stats[index, 0] = largest() * (1 / LOG2E)
                partials.stats[index, 1] = sums
