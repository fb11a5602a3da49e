"""`mla_decode` on Hopper (H100, H200) for many query rows: two warpgroups share a block of rows and trade P.

A program holds 64 query rows of a sequence (heads of each query, query by query), wgmma's M, and takes its share of the
plan. How its two warpgroups share tiles and trade probabilities is told in `mosaic.hopper.seesaw`. Warpgroup 2 starts
all copies: of the halves of a pair's tiles, in the order in which they fall free. Shared memory holds one pair where
latents are wide, so everything hangs on how soon probabilities are published and halves fall free.

Programs of neighbouring blocks of a sequence are a cluster of two: each copies one half of what both read, to both.

Latents in 8 bits have a kernel of their own (`mosaic_raw`).

Masking and clearing are for the tiles that need them, by the metadata that the copying warpgroup stores: a tile that
all rows see in full is not masked. Latents that no row sees, past a sequence's end for one, become 0 before they are
values, since 0 · NaN is NaN.

No wait can last. Below, "waits for x" means that x was asked for and does not itself depend on the one that waits.

- landed: copies, started after free. A page that does not exist arrives without a copy. Only the warpgroup that scores
  a tile waits for it, and for all of it; the other one reads values after ready, which comes after that.
- free: has one phase more than there are copies: consumers arrive once at the start, and after each use of a half. The
  producer waits for one phase before each copy, and for the last one before it ends, so that no program of a cluster
  ends while another still arrives there. Both programs of a cluster have the same plan, pages and order. The producer
  waits for left(C0), right(C0), right(C1), left(C1) of a pair in turn, which are freed before anything of the next pair
  is waited for.
- ready[0]: warpgroup 0 arrives after its scores, for which it waits for copies only. ready[1]: warpgroup 1 arrives
  after its scores and its product with P0, for which it waits for copies and for ready[0] of the same pair.
- both[SUMS]: both warpgroups, after the same number of pairs. both[Q_FREE]: like free. The first split's query is
  copied at once, another one after the first pair of its split, for which halves are free once the pairs before are
  done, whatever becomes of their results.
- What a warpgroup publishes is overwritten after it waited for something that the other one does after reading it: m0
  after m1 of the same pair, and so is P0, as ready[1] comes after the product that reads it; m1 and P1 after ready[0]
  of the next pair, before which warpgroup 0 sees the ends of all its products. Metadata has room for twice the pairs.
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

from pallas_attn.mosaic.hopper.seesaw import (
    HALVES,
    PARTS,
    PER_ROW,
    Q_FREE,
    ROPE,
    ROWS,
    LatentParts,
    SeesawState,
    SeesawTurns,
    log_sum_exp,
    normalise,
)
from pallas_attn.mosaic.hopper.tiles import TILE, token_iota
from pallas_attn.mosaic.merge import (
    PartialStates,
    num_fragments,
    store_fragments,
)
from pallas_attn.mosaic.primitives import basics, register_tiles, unsupported
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, clear_rows, over_columns, over_tokens, store_tile
from pallas_attn.ops.mla_decode import config
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
    token_bits,
)
from pallas_attn.portable.schedule import most_splits
from pallas_attn.types import DecodePlan

# --- the call


def decode(call: MlaDecodeCall, plan: DecodePlan) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Compute `mla_decode`, output and LSE, of many query rows."""
    settings = config.seesaw_config(call.latent_dim, call.rope_dim, call.page_size)
    blocks = -(-call.query_rows // ROWS)
    static = SeesawStatic(
        latent_dim=call.latent_dim,
        rope_dim=call.rope_dim,
        queries=call.num_queries,
        heads=call.num_heads,
        page_size=call.page_size,
        pairs=settings.pairs,
        cluster=settings.cluster if blocks % settings.cluster == 0 else 1,
        causal=call.draft_mask is None,
        sm_scale=call.sm_scale,
    )
    out, lse, partials = _attend(in_blocks(call, plan, ROWS), static, call.output_dtype)
    return out_of_blocks(call, *merge_splits(out, lse, partials, plan))


def num_programs(call: MlaDecodeCall) -> int:
    """Number of programs for plans of such calls: each block of rows of a program takes a multiprocessor.

    Raises:
      NotImplementedError: not on Hopper, or dtypes, widths, pages or numbers of queries that the kernel does not take.
    """
    basics.require_capability((9, 0))
    cache = call.cache
    unsupported.require_dtypes(call.q_latent, cache.pages if cache.rope is None else cache.rope)
    unsupported.require_page_size(call.page_size)
    num_queries, latent_dim, rope_dim = call.num_queries, call.latent_dim, call.rope_dim
    if latent_dim % 64 or not 128 <= latent_dim <= 512 or rope_dim not in (32, 64):
        raise NotImplementedError(
            "takes latents of 128 to 512 columns, a multiple of 64, and 32 or 64 rotated ones, "
            f"got {latent_dim} and {rope_dim}"
        )
    if num_queries > NEVER_BIT:
        raise NotImplementedError(f"takes at most {NEVER_BIT} queries, got {num_queries}")
    return max(1, basics.multiprocessors() // -(-call.query_rows // ROWS))


# --- what the kernel is compiled for, given, and holds


@dataclasses.dataclass(frozen=True)
class SeesawStatic(PairedTiles):
    """Compile-time facts of the kernel, beside those of its tiles.

    Attributes:
      cluster: blocks of rows that share what is read, on neighbouring multiprocessors.
    """

    cluster: int

    @property
    def has_own_probs(self) -> bool:
        """Whether probabilities have memory of their own; else they take the place of the rotated keys."""
        return self.rope_dim != TOKENS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of one that copies: 504 for one in each warpgroup."""
        return (232, 40) if self.widths[0] > 128 else (192, 120)

    def columns(self, part: int) -> Any:
        """Columns of a part, in what the cache holds for a token."""
        return pl.ds((0, self.widths[0], self.latent_dim)[part], (*self.widths, self.rope_dim)[part])

    def slot(self, pair: Any, tile: int) -> Any:
        """Slot in shared memory of a tile of a pair."""
        return tile if self.pairs == 1 else 2 * lax.rem(pair, self.pairs) + tile

    def meta_slot(self, pair: Any) -> Any:
        """Slot for the metadata of a pair: twice as many as pairs, since one warpgroup may be a pair behind."""
        return lax.rem(pair, 2 * self.pairs)


class SeesawScratch(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      q: [1, ROWS, columns].
      k: [2 · pairs, TOKENS, columns].
      p: [2, ROWS, TOKENS], probabilities of either tile of a pair, or None.
      stats: [4, ROWS]: the largest scores after either tile of a pair, and the sums of either warpgroup.
      tile_meta: int32 [2 · pairs, 2, 1 + pages]: for a tile its visibility (FULL, PARTIAL, DEAD), and the position of
        each page's first token or ABSENT.
      page_ids: int32 [pairs + 1, 2, pages]: the pages of either tile of a pair, looked up before there is room for
        them; negative where there is none.
      q_landed, landed [2 · pairs · PARTS]: a query, a part of a tile, is there.
      free: [2 · pairs · 2], half of a tile may be overwritten.
      ready: [2], the largest scores after either tile of a pair are in `stats`, and its probabilities in `p`.
      both: [SUMS], those of both warpgroups are in `stats`; [Q_FREE], the query may be overwritten.
    """

    q: LatentParts
    k: LatentParts
    p: Any
    stats: Any
    tile_meta: Any
    page_ids: Any
    q_landed: Any
    landed: Any
    free: Any
    ready: Any
    both: Any

    @staticmethod
    def types(static: SeesawStatic, dtype: jax.typing.DTypeLike) -> SeesawScratch:
        """Scratch types of the kernel, for queries and latents of a dtype."""
        slots = 2 * static.pairs
        operand = functools.partial(register_tiles.operand, dtype=dtype, row_bytes=static.row_bytes)
        columns = LatentParts(*static.widths, static.rope_dim)
        return SeesawScratch(
            q=LatentParts(*(operand((1, ROWS, n)) for n in columns)),
            k=LatentParts(*(operand((slots, TOKENS, n)) for n in columns)),
            p=operand((2, ROWS, TOKENS)) if static.has_own_probs else None,
            stats=plgpu.SMEM((4, ROWS), jnp.float32),
            tile_meta=plgpu.SMEM((slots, 2, 1 + static.pages), jnp.int32),
            page_ids=plgpu.SMEM((static.pairs + 1, 2, static.pages), jnp.int32),
            q_landed=plgpu.Barrier(num_arrivals=3),
            landed=plgpu.Barrier(num_barriers=PARTS * slots, num_arrivals=static.pages),
            free=plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=2 * slots),
            ready=plgpu.Barrier(num_barriers=2),
            both=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )


# --- the kernel


def _attend(x: RowInputs, static: SeesawStatic, out_dtype: jax.typing.DTypeLike) -> tuple[Array, Array, PartialStates]:
    """Run the kernel: output and LSE of rows in one split, partial states of the others."""
    batch, rows, latent_dim = x.q_latent.shape
    blocks, programs = rows // ROWS, x.plan.cta_row.shape[0] - 1
    states = blocks * most_splits(x.plan, x.block_tables.shape[1])
    return plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=SplitResults(
            jax.ShapeDtypeStruct((batch, rows, latent_dim), out_dtype),
            jax.ShapeDtypeStruct((blocks, batch, ROWS), jnp.float32),
            PartialStates.types(states, ROWS, latent_dim),
        ),
        grid=(programs, blocks // static.cluster),
        grid_names=("program", "blocks"),
        cluster=(static.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=SeesawScratch.types(static, x.q_latent.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=basics.lane_semantics()),
        kernel_name="mla_decode_rows",
    )(basics.materialize(x))


def _kernel(static: SeesawStatic, x: RowInputs, out: Ref, lse: Ref, partials: PartialStates, *scratch: Ref) -> None:
    """Roles of the three warpgroups."""
    results = SplitResults(out, lse, partials)
    warpgroup = lax.axis_index("warpgroup")
    mem = SeesawScratch(*scratch)

    def block() -> Any:  # in each role anew: shared, it would be kept in local memory
        return lax.axis_index("blocks") * static.cluster + lax.axis_index("cluster")

    def compute(half: int) -> None:
        plgpu.set_max_registers(static.registers[0], action="increase")
        SeesawConsumer(static, mem, half, x, block()).run(results)
        plgpu.wait_smem_to_gmem(0)

    def copy() -> None:
        plgpu.set_max_registers(static.registers[1], action="decrease")
        SeesawProducer(static, x, mem, block()).run()

    lax.switch(warpgroup, [functools.partial(compute, 0), functools.partial(compute, 1), copy])


# --- the warpgroup that copies


@dataclasses.dataclass(frozen=True)
class SeesawProducer(PageProducer[SeesawStatic, SeesawScratch]):
    """The warpgroup that starts all copies."""

    def await_end(self) -> None:
        plgpu.barrier_wait(self.mem.both.at[Q_FREE])
        for i in range(4 * self.static.pairs):
            plgpu.barrier_wait(self.mem.free.at[i])

    def copy_query(self, split: LatentSplit) -> None:
        x, mem, rows = self.x, self.mem, pl.ds(self.block * ROWS, ROWS)
        plgpu.barrier_wait(mem.both.at[Q_FREE])
        left, right = self.static.widths
        plgpu.copy_gmem_to_smem(x.q_latent.at[split.row, rows, pl.ds(0, left)], mem.q.left.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_latent.at[split.row, rows, pl.ds(left, right)], mem.q.right.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_rope.at[split.row, rows], mem.q.rope.at[0], mem.q_landed)

    def copy_pair(self, split: LatentSplit, i: Any, oldest_query: Any) -> None:
        """Start the copies of a pair of tiles, of each half as soon as the one that it replaces is free.

        The rotated keys come with the half whose last reader also reads the probabilities that lie over them. What can
        be done before a half is free, or after its copies have started, is.
        """
        static = self.static
        for tile, half in HALVES:
            slot = static.slot(split.pair + i, tile) + basics.opaque_zero()
            parts = (half,) if tile == half else (half, ROPE)
            ids = self.page_ids(split, i, tile)
            page, (_, tile_of_page) = ids[0], static.first_page(2 * i + tile)
            plgpu.barrier_wait(self.mem.free.at[2 * slot + half])
            self.copy_pages(slot, parts, ids, page, tile_of_page)
            if tile == half:
                self.store_meta(split, i, tile, oldest_query)

    def tile_meta(self, pair: Any, tile: int) -> Ref:
        return self.mem.tile_meta.at[self.static.meta_slot(pair), tile]

    def copy_page(self, slot: Any, parts: tuple[int, ...], j: Any, page: Any, tile_of_page: Any) -> None:
        """Start the copies of parts of the j-th page of a tile. An absent page arrives at once."""
        static, landed = self.static, [self.mem.landed.at[PARTS * slot + part] for part in parts]

        @pl.when(page >= 0)
        def _copy() -> None:
            source = self.x.pages.at[page, pl.ds(tile_of_page * TOKENS, static.page_tokens)]
            target = pl.ds(pl.multiple_of(j * static.page_tokens, static.page_tokens), static.page_tokens)
            for part, barrier in zip(parts, landed, strict=True):
                columns, slots = source.at[:, static.columns(part)], self.mem.k[part].at[slot, target]
                plgpu.copy_gmem_to_smem(columns, slots, barrier, collective_axes="cluster")

        @pl.when(page < 0)
        def _arrive() -> None:
            for barrier in landed:
                plgpu.barrier_arrive(barrier)


# --- the two warpgroups that compute


@dataclasses.dataclass(frozen=True)
class SeesawConsumer(SeesawTurns["LatentSplit"]):
    """One of the two warpgroups that compute, over pages of a sequence."""

    static: SeesawStatic
    mem: SeesawScratch
    x: RowInputs
    block: Any

    def run(self, results: SplitResults) -> None:
        """Attend to all splits."""
        self.release_query()
        for slot in range(2 * self.static.pairs):
            self.release(slot)

        def attend(split: LatentSplit) -> None:
            plgpu.barrier_wait(self.mem.q_landed)
            state = self.attend(split, split.pair, split.num_pairs(self.static))
            self.write(results, split, state)

        for_each_split(self.static, self.x.plan, attend)

    def await_part(self, pair: Any, slot: Any, part: int) -> None:
        plgpu.barrier_wait(self.mem.landed.at[PARTS * slot + part])

    def release(self, slot: Any) -> None:
        plgpu.barrier_arrive(self.mem.free.at[2 * slot + self.half])

    def mask_tile(self, split: LatentSplit, pair: Any, slot: Any, s: Any) -> Any:
        self.clear_dead_rows(split, pair, self.half, slot)
        return self.mask_scores(split, pair, s)

    # Visibility

    def tile_meta(self, pair: Any, tile: int) -> Ref:
        return self.mem.tile_meta.at[self.static.meta_slot(pair), tile]

    def is_full(self, pair: Any, tile: int) -> Any:
        return self.tile_meta(pair, tile)[0] == FULL

    def token_bits(self, split: LatentSplit, pair: Any, tile: int, token: Any) -> Any:
        """Index of the bit that says whether a row sees each token of a tile."""
        return token_bits(self.static, self.x, split, self.tile_meta(pair, tile), token)

    def mask_scores(self, split: LatentSplit, pair: Any, s: Any) -> Any:
        """Scores, -inf where a row does not see a token."""
        bit = over_columns(self.token_bits(split, pair, self.half, register_tiles.column_iota(TOKENS)), s.shape)
        seen = over_tokens(self.seen(split), s.shape)
        return jnp.where((lax.shift_right_logical(seen, bit) & 1) == 1, s, -jnp.inf)

    def seen(self, split: LatentSplit) -> Any:
        """Bits [ROWS] of what each row sees."""
        row = self.block * ROWS + token_iota(ROWS)
        return seen_bits(self.static, self.x, split, row, self.block, PER_ROW)

    def clear_dead_rows(self, split: LatentSplit, pair: Any, tile: int, slot: Any) -> None:
        @pl.when(self.tile_meta(pair, tile)[0] == DEAD)
        def _clear() -> None:
            bit = self.token_bits(split, pair, tile, token_iota(TOKENS))
            every = jnp.int32(self.static.draft_bits - 2**OLDER_BIT)
            any_row = every if self.x.seen_by_any is None else self.x.seen_by_any[split.row]
            live_mask = (lax.shift_right_logical(jnp.full_like(bit, any_row), bit) & 1) == 1
            clear_rows(self.mem.k[self.half].at[slot], live_mask, BY_64, self.static.row_bytes)
            plgpu.commit_smem()

    # Results

    def write(self, results: SplitResults, split: LatentSplit, state: SeesawState) -> None:
        """Write this warpgroup's half of the output, or of the partial state, of a split."""
        mem, static, half, block = self.mem, self.static, self.half, self.block
        sums = self.trade_sums(state)
        is_query = self.seen(split) < 0
        m = jnp.where(is_query, state.m, -jnp.inf)
        l = jnp.where(is_query, sums, 0.0)  # noqa: E741
        columns = pl.ds(half * static.widths[0], static.widths[half])

        @pl.when(split.is_whole_row)
        def _write() -> None:
            out = normalise(state.acc, l).astype(results.out.dtype)
            place = results.out.at[split.row, pl.ds(block * ROWS, ROWS), columns]
            if out.dtype == mem.q.left.dtype:
                store_tile(mem.q[half].at[0], out, TILE, static.row_bytes)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(mem.q[half].at[0], place)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.release_query()
            else:
                self.release_query()
                place[...] = out
            if half == 0:
                results.lse[block, split.row] = log_sum_exp(m, l)

        @pl.when(~split.is_whole_row)
        def _store_partial() -> None:
            self.release_query()  # so that the next one comes while this is written
            partials = results.partials
            index = partials.state_index(block, results.lse.shape[0], split.state)
            fragments = pl.ds(num_fragments(ROWS * half * static.widths[0]), num_fragments(ROWS * static.widths[half]))
            acc = jnp.where(over_tokens(is_query, state.acc.shape), state.acc, 0.0)
            store_fragments(acc, partials.acc.at[index, fragments], BY_64)
            if half == 0:
                partials.stats[index, 0] = m * (1 / LOG2E)
                partials.stats[index, 1] = l
