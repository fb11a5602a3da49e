"""`mla_sparse` on Hopper (H100, H200) over latents in 8 bits, which stay so in shared memory.

An item is a block of up to 64 heads of a token, and a share of the token's slots. Programs, one to a multiprocessor,
take items in turn. Tokens are rows of a tile's products, heads their columns. The third warpgroup copies tiles of 64
chosen latents, their scales and their rotated keys asynchronously (`mosaic.sm90.gather`), three tiles ahead. The other
two convert them in registers, wgmma's left operand (`mosaic.sm90.raw_latents`): warpgroup 0 scores even tiles,
warpgroup 1 odd ones, and each multiplies all probabilities with its half of the latents' columns:

    warpgroup 0                                  warpgroup 1
    S0 = C0 Q^T                                  S1 = C1 Q^T
    P0 = exp(S0 - m), publishes P0          ->   P1 = exp(S1 - m), publishes P1
    O += left(C0)^T P0                           O += right(C0)^T P0
    O += left(C1)^T P1                      <-   O += right(C1)^T P1

What probabilities are relative to, m, goes from one to the other with them. It changes where a score exceeds it by
much, so mostly not at all; then whoever changes it publishes the factor of the sums so far, too.

No wait can last. Below, "waits for x" means that x was asked for and does not itself depend on the one that waits.

- landed: copied by the gathering warpgroup, after free.
- free: both computing warpgroups, once at the start, and after each use of a tile. It has one phase more than there are
  tiles in a slot. The gathering warpgroup waits for one phase before each tile, and for the last one before it ends.
- ready[0]: warpgroup 0 arrives after its scores, for which it waits for copies, and for taken[0]. ready[1]: warpgroup 1
  arrives after its scores, for which it waits for copies, for ready[0] of the same pair and for taken[1].
- taken[i]: the other warpgroup than that of ready[i], once at the start, and after each use of what was published.
  Warpgroup i waits for one phase before it publishes, and for the last one before it ends.
- sums, q_converted: both warpgroups, as often as there are items. q_free: as in `mla_decode`'s kernel.
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

from pallas_attn.mosaic import basics, dequantise, tiles
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.row_layout import RowLayout
from pallas_attn.mosaic.sm90 import gather, raw_latents, wgmma
from pallas_attn.mosaic.sm90.seesaw import INITIAL_MAX, ROWS, TOKENS
from pallas_attn.mosaic.sm90.sharing import PartBarriers
from pallas_attn.mosaic.sm90.wgmma import RESCALE_THRESHOLD_LOG2
from pallas_attn.mosaic.split_states import PartialStates, num_fragments
from pallas_attn.mosaic.tiles import BY_64, PER_COLUMN, over_columns, over_tokens
from pallas_attn.ops.mla_sparse.mosaic_items import (
    PAIR_TOKENS,
    SparseFacts,
    SparseInputs,
    SparseItem,
    SparseResults,
    for_each_item,
)
from pallas_attn.portable.quantise import QUERY_SCALE
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP

COMPUTE_REGISTERS, GATHER_REGISTERS = 232, 40
"""Registers of a thread that computes, and of one that gathers."""

SLOTS = 3
"""Tiles in shared memory."""

THREADS_OF_ROW = 8
"""Threads that share a row when it is copied."""

MAX, FACTORS, SUMS, SCRATCH = 0, 1, 3, 5
"""Rows of `RawScratch.stats`."""

FLAGS, GIVEN = SLOTS, SLOTS + 1
"""Rows of `RawScratch.notes`."""


@dataclasses.dataclass(frozen=True)
class RawStatic(SparseFacts):
    """Compile-time facts of the kernel.

    Attributes:
      sm_scale: multiplies the scores.
    """

    sm_scale: float

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return self.latent_dim // LATENT_GROUP

    def slot(self, pair: Any, tile: int) -> tuple[Any, Any]:
        """Slot in shared memory of a tile of a pair, and how often it was used before."""
        index = 2 * pair + tile
        return lax.rem(index, SLOTS), lax.div(index, SLOTS)

    def landed(self, mem: RawScratch) -> PartBarriers:
        """Barriers of the tiles."""
        return PartBarriers(mem.landed, shared=False, copied=True)


class RawScratch(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      q: [1, rows, columns], those of either half; once they are there, converted by `raw_latents.convert_queries`.
      q_rope: [1, rows, R].
      k: e4m3 [SLOTS, TOKENS, L].
      rope: [SLOTS, TOKENS, R].
      scales: float32 [SLOTS, 1, TOKENS · groups].
      p: float16 [2, rows, TOKENS], probabilities of either tile of a pair.
      ratios: float16 [2, groups, TOKENS], scales of either tile by their token's largest one.
      stats: float32 [13, rows]: what probabilities are relative to; factors of either tile; sums of either warpgroup;
        memory for reductions, four rows for each.
      notes: int32 [SLOTS + 2, TOKENS]: for each tile which of its tokens are none; whether either tile of a pair has
        factors; for each tile and each warp that gathers whether none of its tokens is none.
      q_landed, landed [SLOTS]: a query, a tile, is there.
      free: [SLOTS], a tile may be overwritten.
      ready, taken: [2], what belongs to either tile of a pair is published, and may be overwritten.
      sums, q_converted, q_free: sums of both warpgroups are in `stats`; the query is converted, and may be overwritten.
    """

    q: Any
    q_rope: Any
    k: Any
    rope: Any
    scales: Any
    p: Any
    ratios: Any
    stats: Any
    notes: Any
    q_landed: Any
    landed: Any
    free: Any
    ready: Any
    taken: Any
    sums: Any
    q_converted: Any
    q_free: Any

    @staticmethod
    def types(static: RawStatic, dtype: jax.typing.DTypeLike) -> RawScratch:
        """Scratch types of the kernel, for queries of a dtype."""
        rows = static.rows
        return RawScratch(
            q=tuple(tiles.operand((1, rows, width), dtype) for width in static.widths),
            q_rope=tiles.operand((1, rows, TOKENS), dtype),
            k=tiles.operand((SLOTS, TOKENS, static.latent_dim), LATENT_8BIT),
            rope=tiles.operand((SLOTS, TOKENS, TOKENS), dtype),
            scales=plgpu.SMEM((SLOTS, 1, TOKENS * static.groups), jnp.float32),
            p=tiles.operand((2, rows, TOKENS), jnp.float16),
            ratios=plgpu.SMEM((2, static.groups, TOKENS), jnp.float16),
            stats=plgpu.SMEM((13, rows), jnp.float32),
            notes=plgpu.SMEM((SLOTS + 2, TOKENS), jnp.int32),
            q_landed=plgpu.Barrier(num_arrivals=3),
            landed=PartBarriers.types(SLOTS, shared=False, copied=True),
            free=plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
            ready=plgpu.Barrier(num_barriers=2),
            taken=plgpu.Barrier(num_barriers=2),
            sums=plgpu.Barrier(num_arrivals=2),
            q_converted=plgpu.Barrier(num_arrivals=2),
            q_free=plgpu.Barrier(num_arrivals=2),
        )


def attend(x: SparseInputs, static: RawStatic, out_dtype: jax.typing.DTypeLike) -> Any:
    """Run the kernel: `SparseResults`, or the `PartialStates` of several splits."""
    num_tokens = x.q_latent.shape[0]
    items = num_tokens * static.blocks
    results: Any = PartialStates.types((items + 1) * static.splits, ROWS, static.latent_dim)
    if static.splits == 1:
        results = SparseResults(
            jax.ShapeDtypeStruct((num_tokens, static.heads, static.latent_dim), out_dtype),
            jax.ShapeDtypeStruct((num_tokens, static.blocks, ROWS), jnp.float32),
        )
    return plgpu.kernel(
        functools.partial(_kernel, static, type(results)),
        out_type=results,
        grid=(max(1, min(items * static.splits, basics.multiprocessors())),),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=RawScratch.types(static, x.q_rope.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=16),
        kernel_name="mla_sparse_raw",
    )(basics.materialize(x))


def _kernel(static: RawStatic, kind: Callable[..., Any], x: SparseInputs, *refs: Ref) -> None:
    """Roles of the three warpgroups."""
    results, mem = kind(*refs[:2]), RawScratch(*refs[2:])
    static.landed(mem).begin()

    def compute(half: int) -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        RawConsumer(static, mem, half, x).run(results)

    def fetch() -> None:
        plgpu.set_max_registers(GATHER_REGISTERS, action="decrease")
        RawProducer(static, x, mem).run()

    branches = [functools.partial(compute, 0), functools.partial(compute, 1), fetch]
    lax.switch(lax.axis_index("warpgroup"), branches)


@dataclasses.dataclass(frozen=True)
class RawProducer:
    """The warpgroup that gathers latents, and starts copies of queries."""

    static: RawStatic
    x: SparseInputs
    mem: RawScratch

    def run(self) -> None:
        """Gather the latents of all items."""
        self.copy_query(SparseItem.first())
        for_each_item(self.static, self.x, self.gather_item)
        plgpu.barrier_wait(self.mem.q_free)
        for i in range(SLOTS):
            plgpu.barrier_wait(self.mem.free.at[i])

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
        x, mem, static = self.x, self.mem, self.static
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
        place = first + gather.tile_row(THREADS_OF_ROW)
        slot = RowLayout(1, 1).take(self.x.slots, jnp.minimum(place, self.x.slots.shape[0] - 1))
        return jnp.where((place < item.stop) & basics.in_pool(slot, self.x.latents.shape[0]), slot, -1)

    def copy(self, pair: Any, tile: int, rows: jax.Array) -> None:
        """Start the copies of a tile once it is free."""
        x, mem = self.x, self.mem
        slot, _ = self.static.slot(pair, tile)
        plgpu.barrier_wait(mem.free.at[slot])
        gather.store_none(THREADS_OF_ROW, rows, mem.notes.at[slot], mem.notes.at[GIVEN, pl.ds(4 * slot, 4)])
        gather.copy_rows(THREADS_OF_ROW, x.latents, rows, 0, mem.k.at[slot])
        gather.copy_rows(THREADS_OF_ROW, x.rope, rows, 0, mem.rope.at[slot])
        gather.copy_scales(THREADS_OF_ROW, x.scale, rows, mem.scales.at[slot, 0])
        self.static.landed(mem).arrive_copies(slot)


class RawState(NamedTuple):
    """Sums over some latents, as one of the two warpgroups has them.

    Attributes:
      l: [rows], its own tiles' weights, of `raw_latents.add_weights`.
      acc: [columns, rows], all latents times weights, in its own columns.
    """

    l: Any  # noqa: E741
    acc: Any


@dataclasses.dataclass(frozen=True)
class RawConsumer:
    """One of the two warpgroups that compute.

    Attributes:
      half: which of the tiles of a pair it scores, and which half of the latent it accumulates.
    """

    static: RawStatic
    mem: RawScratch
    half: int
    x: SparseInputs

    def run(self, results: Any) -> None:
        """Attend to all items."""
        mem = self.mem
        plgpu.barrier_arrive(mem.q_free)
        for slot in range(SLOTS):
            plgpu.barrier_arrive(mem.free.at[slot])
        plgpu.barrier_arrive(mem.taken.at[1 - self.half])

        def attend(item: SparseItem) -> None:
            plgpu.barrier_wait(mem.q_landed)
            raw_latents.convert_queries(mem.q[self.half].at[0])
            plgpu.commit_smem()
            plgpu.barrier_arrive(mem.q_converted)
            plgpu.barrier_wait(mem.q_converted)
            if self.half == 0:
                mem.stats[MAX] = tiles.filled(INITIAL_MAX, (self.static.rows,), PER_COLUMN)
                plgpu.commit_smem()
            columns = self.static.widths[self.half]
            state = RawState(
                raw_latents.empty_sums(self.static.rows),
                tiles.filled(0.0, (columns, self.static.rows), BY_64.tile),
            )
            state = lax.fori_loop(0, item.count, lambda i, state: self.attend_pair(item.pair + i, state), state)
            self.write(results, item, state)

        for_each_item(self.static, self.x, attend)
        plgpu.barrier_wait(mem.taken.at[self.half])

    def attend_pair(self, pair: Any, state: RawState) -> RawState:
        """Attend to a pair of tiles."""
        mem, half = self.mem, self.half
        landed = self.static.landed(mem)
        slots = [self.static.slot(pair, tile) for tile in range(2)]
        landed.wait(*slots[half])
        s = self.scores(slots[half][0])
        if half:
            plgpu.barrier_wait(mem.ready.at[0])
        state = self.publish(slots[half][0], s, state)
        plgpu.barrier_arrive(mem.ready.at[half])
        for tile, (slot, use) in enumerate(slots):
            if tile != half:
                landed.wait(slot, use)
                if tile:
                    plgpu.barrier_wait(mem.ready.at[1])
            state = self.add(slot, tile, state)
            plgpu.barrier_arrive(mem.free.at[slot])
            if tile != half:
                plgpu.barrier_arrive(mem.taken.at[tile])
        return state

    def scores(self, slot: Any) -> Any:
        """Products of the query with a tile, [TOKENS, rows], divided by the scales of the last group of columns."""
        mem, zero = self.mem, basics.unknown_zero()
        rotated = wgmma.start_scores(mem.rope.at[slot], mem.q_rope.at[zero], None, tiles.ROW_BYTES)
        queries = [q.at[zero] for q in mem.q]
        return raw_latents.add_scores(rotated, mem.k.at[slot], queries, mem.scales.at[slot, 0])

    def scales(self, slot: Any) -> list[jax.Array]:
        """Scales of a tile's tokens, for each group of columns."""
        groups = self.static.groups
        loaded = dequantise.load_group_scales(self.mem.scales.at[slot], TOKENS, groups, TOKENS, BY_64)
        return [jnp.maximum(scale, dequantise.SMALLEST_SCALE) for scale in loaded]

    def publish(self, slot: Any, s: Any, state: RawState) -> RawState:
        """Publish the probabilities of this warpgroup's tile, and add up their weights."""
        mem, half, shape = self.mem, self.half, s.shape
        scales = self.scales(slot)
        largest = functools.reduce(jnp.maximum, scales)
        x = s * over_tokens(scales[-1] * (self.static.sm_scale / QUERY_SCALE * LOG2E), shape)
        x = x + over_tokens(jnp.log2(largest), shape)
        given = mem.notes.at[GIVEN, pl.ds(4 * slot, 4)]
        full = (given[0] & given[1] & given[2] & given[3]) == 1

        def mask(x: Any) -> Any:
            is_none = basics.load(mem.notes.at[slot], BY_64.per_row)
            return jnp.where(over_tokens(is_none, shape) == 0, x, -jnp.inf)

        x = lax.cond(full, lambda x: x, mask, x)
        plgpu.barrier_wait(mem.taken.at[half])
        relative = x - over_columns(basics.load(mem.stats.at[MAX], PER_COLUMN), shape)
        changed = raw_latents.exceeds(relative, RESCALE_THRESHOLD_LOG2)

        @pl.when(changed == 1)
        def _raise_max() -> None:
            m = basics.load(mem.stats.at[MAX], PER_COLUMN)
            highest = raw_latents.largest_of_rows(x, mem.stats.at[pl.ds(SCRATCH + 4 * half, 4)])
            raised = jnp.where(highest > m + RESCALE_THRESHOLD_LOG2, highest, m)
            mem.stats[FACTORS + half] = jnp.exp2(m - raised)
            mem.stats[MAX] = raised

        mem.notes[FLAGS, half] = changed
        p = jnp.exp2(x - over_columns(basics.load(mem.stats.at[MAX], PER_COLUMN), shape))
        ratios = [(scale / largest).astype(jnp.float16) for scale in self.scales(slot + basics.unknown_zero())]
        raw_latents.publish(p.astype(jnp.float16), mem.p.at[half], ratios, mem.ratios.at[half])
        acc, l = raw_latents.rescale_columns(state.acc, state.l, changed, mem.stats.at[FACTORS + half])  # noqa: E741
        return RawState(raw_latents.add_weights(l, p, 1 / largest), acc)

    def add(self, slot: Any, tile: int, state: RawState) -> RawState:
        """Add a tile's latents times their probabilities."""
        mem, half, static = self.mem, self.half, self.static
        acc, l = state.acc, state.l  # noqa: E741
        if tile != half:
            changed = mem.notes[FLAGS, tile]
            acc, l = raw_latents.rescale_columns(acc, l, changed, mem.stats.at[FACTORS + tile])  # noqa: E741
        first = half * static.widths[0]
        zero = basics.unknown_zero()
        acc = raw_latents.add_values(acc, mem.k.at[slot], first, mem.p.at[tile + zero], mem.ratios.at[tile])
        return RawState(l, acc)

    # Results

    def write(self, results: Any, item: SparseItem, state: RawState) -> None:
        """Write this warpgroup's half of the output, or of the partial state, of an item."""
        static, mem, half = self.static, self.mem, self.half
        plgpu.barrier_arrive(mem.q_free)
        scratch = mem.stats.at[pl.ds(SCRATCH + 4 * half, 4)]
        own = raw_latents.total_weights(state.l, static.rows, scratch)
        mem.stats[SUMS + half] = own
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.sums)
        plgpu.barrier_wait(mem.sums)
        sums = own + basics.load(mem.stats.at[SUMS + 1 - half], PER_COLUMN)
        token, block, split = item.place(static)
        rows, width = pl.ds(0, static.rows), static.widths[half]
        if isinstance(results, SparseResults):
            seen = sums != 0
            inverse = jnp.where(seen, 1 / jnp.where(seen, sums, 1.0), 0.0)
            out = jnp.where(over_columns(seen, state.acc.shape), state.acc * over_columns(inverse, state.acc.shape), 0.0)
            columns = pl.ds(half * static.widths[0], width)
            raw_latents.store_heads(out, results.out.at[token, pl.ds(block * ROWS, static.rows), columns])
            if half == 0:
                m = basics.load(mem.stats.at[MAX], PER_COLUMN)
                lse = jnp.where(seen, (m + jnp.log2(jnp.where(seen, sums, 1.0))) * (1 / LOG2E), -jnp.inf)
                results.lse[token, block, rows] = lse
            return
        index = (token * static.blocks + block) * static.splits + split
        fragments = pl.ds(num_fragments(ROWS * half * static.widths[0]), num_fragments(ROWS * width))
        raw_latents.store_fragments(state.acc, results.acc.at[index, fragments])
        if half == 0:
            results.stats[index, 0, rows] = basics.load(mem.stats.at[MAX], PER_COLUMN) * (1 / LOG2E)
            results.stats[index, 1, rows] = sums
