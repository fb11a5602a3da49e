"""`mla_sparse` on Hopper (H100, H200): gathered latents, multiplied as in latent decode of many query rows.

An item is a block of up to 64 heads of a token, and a share of the token's slots. Programs, one to a multiprocessor,
take items in turn. Two warpgroups share the tiles of 64 latents and trade probabilities (`mosaic.hopper.seesaw`). The
third one gathers: threads look up slots a pair of tiles ahead, and start asynchronous copies of rows to each half of a
tile once it is free (`mosaic.hopper.gather`). Latents in 8 bits have a kernel of their own (`mosaic_raw`).

A tile with tokens that are none has zeros in their place, and a mask for its scores. Tiles after the last slot of a
token are left out. How many shares a token's slots have depends on shapes alone; each is an equal part of the tiles
that the token has. States of several are merged by a second kernel.

No wait can last. Below, "waits for x" means that x was asked for and does not itself depend on the one that waits.

- landed, rope_landed: copied by the gathering warpgroup, after free. Only the warpgroup that scores a tile waits for
  them, and for all of it; the other one reads values after ready, which comes after that.
- free: has one phase more than there are copies: consumers arrive once at the start, and after each use of a half. The
  gathering warpgroup waits for one phase before it copies a half, and for the last one before it ends. It waits for
  left(C0), right(C0), right(C1), left(C1) of a pair in turn, which are freed before anything of the next pair is waited
  for.
- ready, both: as in `mla_decode`'s kernel. The first item's query is copied at once, another one after the first pair
  of its item, for which halves are free once the pairs before are done, whatever becomes of their results.
- The mask of a tile is stored after free of the half that the warpgroup which scores it frees, and read before that.
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
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper import gather
from pallas_attn.mosaic.hopper.copy_barriers import CopyBarriers, see_copies
from pallas_attn.mosaic.hopper.seesaw import (
    HALVES,
    Q_FREE,
    ROPE,
    ROWS,
    TOKENS,
    LatentParts,
    SeesawState,
    SeesawTurns,
    log_sum_exp,
    normalise,
)
from pallas_attn.mosaic.hopper.tiles import TILE
from pallas_attn.mosaic.merge import num_fragments, store_fragments
from pallas_attn.mosaic.primitives import basics, register_tiles, unsupported
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, PER_COLUMN, over_columns, store_tile
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.ops.mla_sparse import config, mosaic_raw
from pallas_attn.ops.mla_sparse.call import MlaSparseCall
from pallas_attn.ops.mla_sparse.mosaic_items import (
    PAIR_TOKENS,
    SparseFacts,
    SparseInputs,
    SparseItem,
    SparseResults,
    for_each_item,
    merge_splits,
    results_of,
)

EIGHT_ROWS = 8
"""Rows of a block come in groups of so many, as they lie in shared memory."""

COMPUTE_REGISTERS, GATHER_REGISTERS = 216, 72
"""Registers of a thread that computes, and of one that gathers."""

# --- the call


def mla_sparse(call: MlaSparseCall) -> tuple[Float[Array, "T Hq L"], Float[Array, "T Hq"]]:
    _refuse(call)
    (num_tokens, num_heads, latent_dim), top_k = call.q_latent.shape, call.slots.shape[1]
    blocks, pairs, quantised = -(-num_heads // ROWS), -(-top_k // PAIR_TOKENS), call.cache.is_quantised
    any_rows = quantised or call.output_dtype == call.q_latent.dtype  # else outputs do not fit the query's memory
    unit = EIGHT_ROWS if blocks == 1 and any_rows else ROWS
    facts = SparseFacts(
        latent_dim=latent_dim,
        top_k=top_k,
        heads=-(-num_heads // unit) * unit,
        splits=config.num_splits(num_tokens * blocks, pairs, basics.multiprocessors()),
        sm_scale=call.sm_scale,
    )
    inputs = SparseInputs.of(call, facts.heads)
    if quantised:
        results = mosaic_raw.attend(inputs, mosaic_raw.RawSparseStatic(**vars(facts)), call.output_dtype)
    else:
        results = _attend(inputs, SparseStatic(**vars(facts)), call.output_dtype)
    out, lse = results if facts.splits == 1 else merge_splits(results, facts, num_tokens, call.output_dtype)
    return out[:, :num_heads], lse.reshape(num_tokens, -1)[:, :num_heads]


def _refuse(call: MlaSparseCall) -> None:
    """Raise NotImplementedError for calls that the kernel does not take."""
    basics.require_capability((9, 0))
    cache, latent_dim, rope_dim = call.cache, call.q_latent.shape[2], call.q_rope.shape[2]
    unsupported.require_dtypes(call.q_latent, cache.pages if cache.rope is None else cache.rope)
    if cache.is_quantised and call.q_latent.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 queries over quantised latents, got {call.q_latent.dtype.name}")
    if latent_dim % 64 or not 128 <= latent_dim <= 512 or rope_dim != TOKENS:
        raise NotImplementedError(
            f"takes latents of 128 to 512 columns, a multiple of 64, and {TOKENS} rotated ones, "
            f"got {latent_dim} and {rope_dim}"
        )
    unsupported.require_int32_rows(cache.pages.shape[0] * cache.page_size)


# --- what the kernel is compiled for, given, and holds


@dataclasses.dataclass(frozen=True)
class SparseStatic(SparseFacts):
    """Compile-time facts of the kernel."""

    row_bytes: int = register_tiles.ROW_BYTES

    def slot(self, pair: Any, tile: int) -> Any:
        """Slot in shared memory of a tile of a pair."""
        return tile

    def landed(self, mem: SparseScratch) -> CopyBarriers:
        """Barriers of the halves of tiles."""
        return CopyBarriers(mem.landed)

    def rope_landed(self, mem: SparseScratch) -> CopyBarriers:
        """Barriers of the rotated keys of tiles."""
        return CopyBarriers(mem.rope_landed)


class SparseScratch(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      q: [1, ROWS, columns].
      k: [2, TOKENS, columns].
      stats: [4, ROWS]: the largest scores after either tile of a pair, and the sums of either warpgroup.
      is_none: int32 [2, TOKENS], for each tile which of its tokens are none.
      all_given: int32 [2, 4], for each tile and each warp that gathers whether none of its tokens is.
      q_landed, landed [2 · 2], rope_landed [2]: a query, half of a tile, its rotated keys, are there.
      free: [2 · 2], half of a tile may be overwritten.
      ready: [2], the largest scores after either tile of a pair are in `stats`, and its probabilities in its rope part.
      both: [SUMS], those of both warpgroups are in `stats`; [Q_FREE], the query may be overwritten.
    """

    q: LatentParts
    k: LatentParts
    stats: Any
    is_none: Any
    all_given: Any
    q_landed: Any
    landed: Any
    rope_landed: Any
    free: Any
    ready: Any
    both: Any

    @property
    def p(self) -> None:
        """Probabilities take the place of the rotated keys."""

    @staticmethod
    def types(static: SparseStatic, dtype: jax.typing.DTypeLike) -> SparseScratch:
        """Scratch types of the kernel, for queries and tiles of a dtype."""
        operand = functools.partial(register_tiles.operand, dtype=dtype)
        columns = LatentParts(*static.widths, TOKENS)
        return SparseScratch(
            q=LatentParts(*(operand((1, ROWS, n)) for n in columns)),
            k=LatentParts(*(operand((2, TOKENS, n)) for n in columns)),
            stats=plgpu.SMEM((4, ROWS), jnp.float32),
            is_none=plgpu.SMEM((2, TOKENS), jnp.int32),
            all_given=plgpu.SMEM((2, 4), jnp.int32),
            q_landed=plgpu.Barrier(num_arrivals=3),
            landed=CopyBarriers.types(4),
            rope_landed=CopyBarriers.types(2),
            free=plgpu.Barrier(num_barriers=4),
            ready=plgpu.Barrier(num_barriers=2),
            both=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )


# --- the kernel


def _attend(x: SparseInputs, static: SparseStatic, out_dtype: jax.typing.DTypeLike) -> Any:
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
        scratch_types=SparseScratch.types(static, x.q_latent.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=basics.lane_semantics()),
        kernel_name="mla_sparse_rows",
    )(basics.materialize(x))


def _kernel(static: SparseStatic, kind: Callable[..., Any], x: SparseInputs, *refs: Ref) -> None:
    """Roles of the three warpgroups."""
    results, mem = kind(*refs[:2]), SparseScratch(*refs[2:])
    static.landed(mem).begin()
    static.rope_landed(mem).begin()

    def compute(half: int) -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        SparseConsumer(static, mem, half, x).run(results)
        plgpu.wait_smem_to_gmem(0)

    def fetch() -> None:
        plgpu.set_max_registers(GATHER_REGISTERS, action="decrease")
        SparseProducer(static, x, mem).run()

    branches = [functools.partial(compute, 0), functools.partial(compute, 1), fetch]
    lax.switch(lax.axis_index("warpgroup"), branches)


# --- the warpgroup that gathers


@dataclasses.dataclass(frozen=True)
class SparseProducer:
    """The warpgroup that gathers latents, and starts copies of queries."""

    static: SparseStatic
    x: SparseInputs
    mem: SparseScratch

    def run(self) -> None:
        """Gather the latents of all items."""
        self.copy_query(SparseItem.first())
        plgpu.commit_smem()  # lest the assembler starts copies while all registers hold rows
        for_each_item(self.static, self.x, self.gather_item)
        plgpu.barrier_wait(self.mem.both.at[Q_FREE])
        for i in range(4):
            plgpu.barrier_wait(self.mem.free.at[i])

    def gather_item(self, item: SparseItem) -> None:
        """Gather the latents of an item. Its query comes after the first pair, for which there is room earlier, except
        in the first item.
        """

        def step(i: Any, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            later = tuple(self.rows(item, i + 1, tile) for tile in range(2))  # on their way while these are used
            self.gather_pair(item.pair + i, rows)
            pl.when((i == 0) & (item.pair > 0))(lambda: self.copy_query(item))
            return later

        lax.fori_loop(0, item.count, step, tuple(self.rows(item, jnp.int32(0), tile) for tile in range(2)))

    def copy_query(self, item: SparseItem) -> None:
        x, mem, static = self.x, self.mem, self.static
        plgpu.barrier_wait(mem.both.at[Q_FREE])
        token, block, _ = item.place(static)
        heads, rows = pl.ds(block * ROWS, static.rows), pl.ds(0, static.rows)
        left, right = static.widths
        plgpu.copy_gmem_to_smem(x.q_latent.at[token, heads, pl.ds(0, left)], mem.q.left.at[0, rows], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_latent.at[token, heads, pl.ds(left, right)], mem.q.right.at[0, rows], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_rope.at[token, heads], mem.q.rope.at[0, rows], mem.q_landed)

    # Rows

    def rows(self, item: SparseItem, i: Any, tile: int) -> jax.Array:
        """Rows of the pool that the tokens of a tile of the item's i-th pair are, in the order of `gather.tile_row`; -1
        for none.
        """
        first = item.start + lax.optimization_barrier(i) * PAIR_TOKENS + tile * TOKENS  # not kept for each tile
        place = first + gather.tile_row()
        slot = RowLayout(1, 1).take(self.x.slots, jnp.minimum(place, self.x.slots.shape[0] - 1))
        return jnp.where((place < item.stop) & basics.in_pool(slot, self.x.latents.shape[0]), slot, -1)

    # Halves of tiles

    def gather_pair(self, pair: Any, rows: tuple[jax.Array, ...]) -> None:
        """Gather a pair of tiles, half by half as these fall free."""
        for tile, half in HALVES:
            self.copy(pair, tile, half, rows[tile])

    def copy(self, pair: Any, tile: int, half: int, rows: jax.Array) -> None:
        """Start copies of half of a tile once it is free; with the half whose last reader also reads the probabilities
        that lie over them, of the rotated keys.
        """
        x, mem, static = self.x, self.mem, self.static
        slot = static.slot(pair, tile)
        plgpu.barrier_wait(mem.free.at[2 * slot + half])
        if tile == half:
            gather.store_none(rows, mem.is_none.at[slot], mem.all_given.at[slot])
        gather.copy_rows(x.latents, rows, half * static.widths[0], mem.k[half].at[slot])
        static.landed(mem).arrive(2 * slot + half)
        if tile != half:
            rope, column = (x.latents, static.latent_dim) if x.rope is None else (x.rope, 0)
            gather.copy_rows(rope, rows, column, mem.k[ROPE].at[slot])
            static.rope_landed(mem).arrive(slot)


# --- the two warpgroups that compute


@dataclasses.dataclass(frozen=True)
class SparseConsumer(SeesawTurns[SparseItem]):
    """One of the two warpgroups that compute, over gathered latents."""

    static: SparseStatic
    mem: SparseScratch
    x: SparseInputs

    def run(self, results: Any) -> None:
        """Attend to all items."""
        self.release_query()
        for slot in range(2):
            self.release(slot)

        def attend(item: SparseItem) -> None:
            plgpu.barrier_wait(self.mem.q_landed)
            state = self.attend(item, item.pair, item.count)
            self.write(results, item, state)

        for_each_item(self.static, self.x, attend)

    def await_part(self, pair: Any, slot: Any, part: int) -> None:
        static, mem = self.static, self.mem
        if part == ROPE:
            static.rope_landed(mem).wait(slot, pair)
        else:
            static.landed(mem).wait(2 * slot + part, pair)
        see_copies()

    def release(self, slot: Any) -> None:
        plgpu.barrier_arrive(self.mem.free.at[2 * slot + self.half])

    def is_full(self, pair: Any, tile: int) -> Any:
        given = self.mem.all_given.at[self.static.slot(pair, tile)]
        return (given[0] & given[1] & given[2] & given[3]) == 1

    def mask_tile(self, split: SparseItem, pair: Any, slot: Any, s: Any) -> Any:
        is_none = basics.load(self.mem.is_none.at[slot], PER_COLUMN)
        return jnp.where(over_columns(is_none, s.shape) == 0, s, -jnp.inf)

    # Results

    def write(self, results: Any, item: SparseItem, state: SeesawState) -> None:
        """Write this warpgroup's half of the output, or of the partial state, of an item."""
        static, half = self.static, self.half
        sums = self.trade_sums(state)
        token, block, split = item.place(static)
        if isinstance(results, SparseResults):
            self.write_output(results, token, block, normalise(state.acc, sums).astype(results.out.dtype))
            if half == 0:
                results.lse[token, block] = log_sum_exp(state.m, sums)
            return
        index = (token * static.blocks + block) * static.splits + split
        self.release_query()  # so that the next one comes while this is written
        fragments = pl.ds(num_fragments(ROWS * half * static.widths[0]), num_fragments(ROWS * static.widths[half]))
        store_fragments(state.acc, results.acc.at[index, fragments], BY_64)
        if half == 0:
            results.stats[index, 0] = state.m * (1 / LOG2E)
            results.stats[index, 1] = sums

    def write_output(self, results: SparseResults, token: Any, block: Any, out: Any) -> None:
        """Write this warpgroup's columns of the output."""
        static, mem, half = self.static, self.mem, self.half
        columns = pl.ds(half * static.widths[0], static.widths[half])
        place = results.out.at[token, pl.ds(block * ROWS, static.rows), columns]
        if out.dtype == mem.q.left.dtype:
            store_tile(mem.q[half].at[0], out, TILE, static.row_bytes)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mem.q[half].at[0, pl.ds(0, static.rows)], place)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.release_query()
        else:
            self.release_query()
            place[...] = out
