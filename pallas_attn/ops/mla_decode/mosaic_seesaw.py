"""`mla_decode` on Hopper (H100, H200) for many query rows: two warpgroups share a block of rows and trade P.

A program holds 64 query rows of a sequence (heads of each query, query by query), wgmma's M, and takes its share of the
plan. How its two warpgroups share tiles and trade probabilities is told in `mosaic.sm90.seesaw`. Warpgroup 2 starts all
copies: of the halves of a pair's tiles, in the order in which they fall free. Shared memory holds one pair where
latents are wide, so everything hangs on how soon probabilities are published and halves fall free.

Programs of neighbouring blocks of a sequence are a cluster of two: each copies one half of what both read, to both.

Latents in 8 bits are not copied. Threads of warpgroup 2 load them into registers, some pieces ahead of where there is
room, and store them as bfloat16, scales multiplied in, once there is; each program of a cluster one half of every half,
to both.

Masking and clearing are for the tiles that need them, by the metadata that the copying warpgroup stores: a tile that
all rows see in full is not masked. Latents that no row sees, past a sequence's end for one, become 0 before they are
values, since 0 · NaN is NaN.

No wait can last. Below, "waits for x" means that x was asked for and does not itself depend on the one that waits.

- landed: copies, started after free. A page that does not exist arrives without a copy. Only the warpgroup that scores
  a tile waits for it, and for all of it; the other one reads values after ready, which comes after that.
- converted: stored by warpgroup 2, of both programs of a cluster, after free; waited for like landed.
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
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics, refusals, tiles
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.row_layout import RowLayout
from pallas_attn.mosaic.sm90 import gather, sharing
from pallas_attn.mosaic.sm90.pieces import HALVES, ROPE, Place, Steps, pieces_of_half, stream
from pallas_attn.mosaic.sm90.seesaw import (
    PARTS,
    PER_ROW,
    Q_FREE,
    ROWS,
    LatentParts,
    SeesawState,
    SeesawTurns,
    add_partial_rows,
    empty_rows,
    log_sum_exp,
    normalise,
)
from pallas_attn.mosaic.sm90.sharing import PartBarriers
from pallas_attn.mosaic.sm90.tiles import token_iota
from pallas_attn.mosaic.split_states import (
    FRAGMENT_COLUMNS,
    PartialLoader,
    PartialStates,
    num_fragments,
    store_fragments,
)
from pallas_attn.mosaic.tile_scheduler import (
    ABSENT,
    WorkTile,
    for_each_merged,
    for_each_work_tile,
    merge_programs,
)
from pallas_attn.mosaic.tiles import BY_64, clear_rows, over_columns, over_tokens
from pallas_attn.ops.mla_decode import config
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.mla_decode.mosaic_rows import (
    DEAD,
    FULL,
    NEVER_BIT,
    OLDER_BIT,
    PARTIAL,
    TOKENS,
    LatentTiles,
    RowInputs,
    in_blocks,
    out_of_blocks,
)
from pallas_attn.portable.schedule import most_splits
from pallas_attn.types import LATENT_GROUP, DecodePlan

PIECE = 64
"""Columns of a tile of 8 bits that are converted at a time."""

MERGE_COLUMNS = 64
"""Columns of the latent that one program of the merge takes, at most."""

# --- the call


def decode(call: MlaDecodeCall, plan: DecodePlan) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    """Compute `mla_decode`, output and LSE, of many query rows."""
    settings = config.seesaw_config(call.latent_dim, call.rope_dim, call.page_size)
    pages, scale = call.cache.pages, call.cache.scale
    blocks = -(-call.query_rows // ROWS)
    static = SeesawStatic(
        latent_dim=call.latent_dim,
        rope_dim=call.rope_dim,
        queries=call.num_queries,
        heads=call.num_heads,
        page_size=call.page_size,
        pairs=settings.pairs,
        cluster=settings.cluster if blocks % settings.cluster == 0 else 1,
        conversion=None if scale is None else config.conversion_config(call.latent_dim, call.page_size),
        causal=call.draft_mask is None,
        sm_scale=call.sm_scale,
    )
    x = in_blocks(call, plan, ROWS)
    if scale is not None:
        x = x._replace(pages=pages.reshape(-1, pages.shape[-1]), scale=scale.reshape(-1, scale.shape[-1]))
    out, lse, partials = _attend(x, static, call.output_dtype)
    return out_of_blocks(call, *_merge_splits(out, lse, partials, plan))


def num_programs(call: MlaDecodeCall) -> int:
    """Number of programs for plans of such calls: each block of rows of a program takes a multiprocessor.

    Raises:
      NotImplementedError: not on Hopper, or dtypes, widths, pages or numbers of queries that the kernel does not take.
    """
    basics.require_capability((9, 0))
    cache = call.cache
    refusals.require_dtypes(call.q_latent, cache.pages if cache.rope is None else cache.rope)
    refusals.require_page_size(call.page_size)
    num_queries, latent_dim, rope_dim = call.num_queries, call.latent_dim, call.rope_dim
    if latent_dim % 64 or not 128 <= latent_dim <= 512 or rope_dim not in (32, 64):
        raise NotImplementedError(
            "takes latents of 128 to 512 columns, a multiple of 64, and 32 or 64 rotated ones, "
            f"got {latent_dim} and {rope_dim}"
        )
    if cache.is_quantised:
        if call.q_latent.dtype != jnp.bfloat16 or rope_dim != TOKENS:
            raise NotImplementedError(
                f"takes bfloat16 queries and {TOKENS} rotated columns over quantised latents, "
                f"got {call.q_latent.dtype.name} and {rope_dim}"
            )
        refusals.require_int32_rows(cache.pages.shape[0] * cache.page_size)
    if num_queries > NEVER_BIT:
        raise NotImplementedError(f"takes at most {NEVER_BIT} queries, got {num_queries}")
    return max(1, basics.multiprocessors() // -(-call.query_rows // ROWS))


# --- what the kernel is compiled for, given, and holds


@dataclasses.dataclass(frozen=True)
class SeesawStatic(LatentTiles):
    """Compile-time facts of the kernel, beside those of its tiles.

    Attributes:
      pairs: of tiles in shared memory.
      cluster: blocks of rows that share what is read, on neighbouring multiprocessors.
      conversion: sizes of that of latents in 8 bits; None for 16.
    """

    pairs: int
    cluster: int
    conversion: config.ConversionConfig | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of the latent that each warpgroup accumulates."""
        left = -(-self.latent_dim // 128) * 64
        return left, self.latent_dim - left

    @property
    def has_own_probs(self) -> bool:
        """Whether probabilities have memory of their own; else they take the place of the rotated keys."""
        return self.rope_dim != TOKENS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of one that copies: 504 for one in each warpgroup."""
        if self.conversion is not None:
            return self.conversion.compute_registers, self.conversion.registers
        return (232, 40) if self.widths[0] > 128 else (192, 120)

    @property
    def quantised(self) -> bool:
        """Whether latents have 8 bits."""
        return self.conversion is not None

    @property
    def sharers(self) -> int:
        """Programs that share the conversion of each half. The interpreter has no stores to another program's memory:
        there each converts everything.
        """
        return 1 if basics.interpreted() or any(width % (2 * PIECE) for width in self.widths) else self.cluster

    @property
    def looks_up_early(self) -> bool:
        """Whether threads that convert take a pair's pages from where they were looked up, in the pair before; else
        each looks up its own, for want of registers.
        """
        return self.cluster > 1 and self.pages == 1

    @property
    def copies_shares(self) -> bool:
        """Whether a program's share of a half is copied to the other one, once it is complete. Where a tile is four
        pages, registers do not suffice for that, and each piece is stored twice.
        """
        return self.sharers > 1 and self.pages < 4

    def places(self, tile: int, half: int, sharer: int) -> list[Place]:
        """Pieces of half of a tile that one of the programs that share it converts."""
        share = self.widths[half] // self.sharers
        return pieces_of_half(tile, half, sharer * share, (sharer + 1) * share, PIECE)

    def converted(self, mem: SeesawScratch) -> PartBarriers:
        """Barriers of the halves of tiles that are converted."""
        return PartBarriers(mem.converted, shared=self.sharers > 1)

    def columns(self, part: int) -> Any:
        """Columns of a part, in what the cache holds for a token."""
        if self.quantised:
            return pl.ds(0, self.rope_dim)  # the others are not copied
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
        them; negative where there is none. Where nothing is copied, a warp can be `pairs` ahead of another.
      q_landed, landed [2 · pairs · PARTS]: a query, a part of a tile, is there.
      converted: [2 · pairs · 2], half of a tile of 8 bits is there; None for 16 bits.
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
    converted: Any
    free: Any
    ready: Any
    both: Any

    @staticmethod
    def types(static: SeesawStatic, dtype: jax.typing.DTypeLike) -> SeesawScratch:
        """Scratch types of the kernel, for queries and latents of a dtype."""
        slots = 2 * static.pairs
        operand = functools.partial(tiles.operand, dtype=dtype, row_bytes=static.row_bytes)
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
            converted=PartBarriers.types(2 * slots, shared=static.sharers > 1) if static.quantised else None,
            free=plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=2 * slots),
            ready=plgpu.Barrier(num_barriers=2),
            both=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )


class SeesawResults(NamedTuple):
    """Results in global memory.

    Attributes:
      out: [B, blocks·ROWS, L], rows in one split.
      lse: [blocks, B, ROWS], rows in one split.
      partials: states of the others.
    """

    out: Any
    lse: Any
    partials: PartialStates


# --- the kernel


def _attend(x: RowInputs, static: SeesawStatic, out_dtype: jax.typing.DTypeLike) -> tuple[Array, Array, PartialStates]:
    """Run the kernel: output and LSE of rows in one split, partial states of the others."""
    batch, rows, latent_dim = x.q_latent.shape
    blocks, programs = rows // ROWS, x.plan.cta_row.shape[0] - 1
    states = blocks * most_splits(x.plan, x.block_tables.shape[1])
    return plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=SeesawResults(
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
    results = SeesawResults(out, lse, partials)
    warpgroup = lax.axis_index("warpgroup")
    mem = SeesawScratch(*scratch)
    if static.quantised:
        static.converted(mem).begin()

    def block() -> Any:  # in each role anew: shared, it is kept in local memory while barriers are made
        return lax.axis_index("blocks") * static.cluster + lax.axis_index("cluster")

    def compute(half: int) -> None:
        plgpu.set_max_registers(static.registers[0], action="increase")
        SeesawConsumer(static, mem, half, x, block()).run(results)
        plgpu.wait_smem_to_gmem(0)

    def copy() -> None:
        plgpu.set_max_registers(static.registers[1], action="decrease")
        if static.conversion is None:
            SeesawProducer(static, x, mem, block()).run()
            return
        pieces = static.conversion.pieces
        run = [SeesawConverter(static, x, mem, block(), sharer, pieces).run for sharer in range(static.sharers)]
        lax.switch(lax.axis_index("cluster"), run) if static.sharers > 1 else run[0]()

    lax.switch(warpgroup, [functools.partial(compute, 0), functools.partial(compute, 1), copy])


class LatentSplit(NamedTuple):
    """Pages `start` to `stop` of a sequence, as one program attends to them.

    Attributes:
      row: the sequence.
      state: index of the partial state, where the sequence is in several splits.
      is_whole_row: whether no other program has pages of the sequence.
      pair: pairs of tiles that the program took before.
    """

    row: Any
    start: Any
    stop: Any
    state: Any
    is_whole_row: Any
    pair: Any

    def queries(self, static: SeesawStatic, x: RowInputs) -> Any:
        """Number of queries."""
        return static.queries if x.q_lens is None else x.q_lens[self.row]

    def oldest_query(self, static: SeesawStatic, x: RowInputs) -> Any:
        """Position of the first query."""
        return x.kv_lens[self.row] - self.queries(static, x)

    def num_pairs(self, static: SeesawStatic) -> Any:
        num_tiles = pl.cdiv(self.stop - self.start, static.pages) * static.tiles_per_page
        return pl.cdiv(num_tiles, 2)


def _for_each_split(static: SeesawStatic, plan: DecodePlan, attend: Callable[[LatentSplit], None]) -> None:
    """Call attend(split) for each split of this program."""

    def step(work: WorkTile, pair: Any) -> Any:
        split = LatentSplit(work.row, work.start, work.stop, work.split, work.is_whole_row, pair)
        attend(split)
        return pair + split.num_pairs(static)

    for_each_work_tile(plan, step, jnp.int32(0))


# --- the warpgroup that copies


@dataclasses.dataclass(frozen=True)
class SeesawProducer:
    """The warpgroup that starts all copies."""

    static: SeesawStatic
    x: RowInputs
    mem: SeesawScratch
    block: Any

    def run(self) -> None:
        """Start the copies of all splits."""
        _for_each_split(self.static, self.x.plan, self.copy_split)
        plgpu.barrier_wait(self.mem.both.at[Q_FREE])
        for i in range(4 * self.static.pairs):
            plgpu.barrier_wait(self.mem.free.at[i])

    def copy_split(self, split: LatentSplit) -> None:
        """Start the copies of one split. Its query comes after the first pair, for which there is room earlier, except
        in the first split.
        """
        oldest_query = split.oldest_query(self.static, self.x)

        def copy(i: Any, _: None) -> None:
            self.copy_pair(split, i, oldest_query)
            self.look_up_pages(split, i + 1)
            pl.when((i == 0) & (split.pair > 0))(lambda: self.copy_query(split))

        self.look_up_pages(split, jnp.int32(0))
        pl.when(split.pair == 0)(lambda: self.copy_query(split))
        lax.fori_loop(0, split.num_pairs(self.static), copy, None)

    def copy_query(self, split: LatentSplit) -> None:
        x, mem, rows = self.x, self.mem, pl.ds(self.block * ROWS, ROWS)
        plgpu.barrier_wait(mem.both.at[Q_FREE])
        left, right = self.static.widths
        plgpu.copy_gmem_to_smem(x.q_latent.at[split.row, rows, pl.ds(0, left)], mem.q.left.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_latent.at[split.row, rows, pl.ds(left, right)], mem.q.right.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_rope.at[split.row, rows], mem.q.rope.at[0], mem.q_landed)

    def page_ids(self, split: LatentSplit, i: Any, tile: int) -> Ref:
        """Pages of a tile in shared memory. Each thread reads what it has written itself."""
        return self.mem.page_ids.at[lax.rem(split.pair + i, self.static.pairs + 1), tile]

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.x.pages.shape[0]

    def look_up_pages(self, split: LatentSplit, i: Any) -> None:
        """Store the pages of a pair of tiles, while the pair before is attended to."""
        tables, static, num_pages = self.x.block_tables, self.static, self.num_pages
        for tile in (0, 1):
            first, _ = static.first_page(2 * i + tile)
            entries = [split.start + first + j for j in range(static.pages)]
            pages = [tables[split.row, jnp.minimum(entry, tables.shape[1] - 1)] for entry in entries]
            for j, (entry, page) in enumerate(zip(entries, pages, strict=True)):
                is_page = (entry < split.stop) & basics.in_pool(page, num_pages)
                basics.store_scalar(self.page_ids(split, i, tile).at[j], jnp.where(is_page, page, -1))

    def copy_pair(self, split: LatentSplit, i: Any, oldest_query: Any) -> None:
        """Start the copies of a pair of tiles: of each half as soon as the one that it replaces is free.

        The rotated keys come with the half whose last reader also reads the probabilities that lie over them. What can
        be done before a half is free, or after its copies have started, is.
        """
        static = self.static
        for tile, half in ((0, 0), (0, 1), (1, 1), (1, 0)):
            slot = static.slot(split.pair + i, tile) + basics.unknown_zero()
            parts = (half,) if tile == half else (half, 2)
            ids = self.page_ids(split, i, tile)
            page, (_, tile_of_page) = ids[0], static.first_page(2 * i + tile)
            plgpu.barrier_wait(self.mem.free.at[2 * slot + half])
            self.copy_pages(slot, parts, ids, page, tile_of_page)
            if tile == half:
                self.store_meta(split, i, tile, oldest_query)

    def store_meta(self, split: LatentSplit, i: Any, tile: int, oldest_query: Any) -> None:
        """Store visibility and positions of a tile for the consumers, before the tile's last copies are started.

        All rows see what is older than their queries, and under a causal mask the newest one sees everything. The
        oldest query itself is seen by all then.
        """
        static, ids = self.static, self.page_ids(split, i, tile)
        meta = self.mem.tile_meta.at[static.meta_slot(split.pair + i), tile]
        first, tile_of_page = static.first_page(2 * i + tile)
        first_token = (split.start + first) * static.page_size + tile_of_page * TOKENS
        newer = first_token + TOKENS - oldest_query  # tokens of the tile that are no older than the oldest query
        visibility = jnp.where(newer <= (1 if static.causal else 0), FULL, DEAD)
        if static.causal:
            visibility = jnp.where(newer <= split.queries(static, self.x), jnp.maximum(visibility, PARTIAL), visibility)
        for j in range(static.pages):
            exists = ids[j] >= 0
            visibility = jnp.where(exists, visibility, DEAD)
            basics.store_scalar(meta.at[1 + j], jnp.where(exists, first_token + j * static.page_tokens, ABSENT))
        basics.store_scalar(meta.at[0], visibility)

    def copy_pages(self, slot: Any, parts: tuple[int, ...], ids: Ref, page: Any, tile_of_page: Any) -> None:
        """Start the copies of parts of a tile, of which `page` is the first page."""

        def step(j: Any, page: Any) -> Any:
            self.copy_page(slot, parts, j, page, tile_of_page)
            return ids[jnp.minimum(j + 1, self.static.pages - 1)]

        lax.fori_loop(0, self.static.pages, step, page)

    def copy_page(self, slot: Any, parts: tuple[int, ...], j: Any, page: Any, tile_of_page: Any) -> None:
        """Start the copies of parts of the j-th page of a tile. An absent page arrives at once."""
        static, landed = self.static, [self.mem.landed.at[PARTS * slot + part] for part in parts]

        @pl.when(page >= 0)
        def _copy() -> None:
            pages = self.x.pages if self.x.rope is None else self.x.rope
            source = pages.at[page, pl.ds(tile_of_page * TOKENS, static.page_tokens)]
            target = pl.ds(pl.multiple_of(j * static.page_tokens, static.page_tokens), static.page_tokens)
            for part, barrier in zip(parts, landed, strict=True):
                columns, slots = source.at[:, static.columns(part)], self.mem.k[part].at[slot, target]
                plgpu.copy_gmem_to_smem(columns, slots, barrier, collective_axes="cluster")

        @pl.when(page < 0)
        def _arrive() -> None:
            for barrier in landed:
                plgpu.barrier_arrive(barrier)


@dataclasses.dataclass(frozen=True)
class SeesawConverter(SeesawProducer):
    """The warpgroup that converts latents in 8 bits, and starts copies of queries and of rotated keys.

    Attributes:
      sharer: which of the programs that share the conversion of each half this is.
      pieces: on their way at a time.
    """

    sharer: int
    pieces: int

    @property
    def num_pages(self) -> int:
        return self.x.rope.shape[0]

    def run(self) -> None:
        plgpu.commit_smem()  # lest the assembler starts copies while all registers hold rows
        super().run()

    def copy_split(self, split: LatentSplit) -> None:
        """Convert the latents of one split, and start the copies of its rotated keys and of its query, in the order of
        a `SeesawProducer`.
        """
        oldest_query, static = split.oldest_query(self.static, self.x), self.static

        def store(i: Any, place: Place, piece: tuple[jax.Array, jax.Array], _: Any) -> None:
            slot = static.slot(split.pair + i, place.tile) + basics.unknown_zero()
            if place.is_first:
                self.make_room(split, i, place, slot, oldest_query)
            self.store(slot, place, piece)

        def rows(i: Any, tile: int) -> jax.Array:
            found = self.rows(split, i, tile)
            if tile == 1 and static.looks_up_early:  # of the pair before all threads have stored the last half
                self.look_up_pages(split, i + 1)
            return found

        def then(i: Any) -> None:
            if not static.looks_up_early:
                self.look_up_pages(split, i + 1)
            pl.when((i == 0) & (split.pair > 0))(lambda: self.copy_query(split))

        self.look_up_pages(split, jnp.int32(0))
        pl.when(split.pair == 0)(lambda: self.copy_query(split))
        places = [static.places(tile, half, self.sharer) for tile, half in HALVES]
        steps = Steps(rows, self.load, store, then)
        stream(tuple(itertools.chain(*places)), self.pieces, split.num_pairs(static), steps)

    def make_room(self, split: LatentSplit, i: Any, place: Place, slot: Any, oldest_query: Any) -> None:
        """Wait until a half may be overwritten, and start the copy of the rotated keys that come with it."""
        tile, half, ids = place.tile, place.part, self.page_ids(split, i, place.tile)
        page, (_, tile_of_page) = ids[0], self.static.first_page(2 * i + tile)
        plgpu.barrier_wait(self.mem.free.at[2 * slot + half])
        if tile == half:
            self.store_meta(split, i, tile, oldest_query)
        else:
            self.copy_pages(slot, (ROPE,), ids, page, tile_of_page)

    def rows(self, split: LatentSplit, i: Any, tile: int) -> jax.Array:
        """Rows of the pool that the tokens of a tile of the split's i-th pair are, in the order of `gather.tile_row`;
        -1 for none.
        """
        x, static, token = self.x, self.static, gather.tile_row(gather.EIGHT_BIT_THREADS)
        if static.looks_up_early:
            page, (_, tile_of_page) = self.page_ids(split, i, tile)[0], static.first_page(2 * i + tile)
            row = token + (page * static.page_size + tile_of_page * TOKENS)
            return jnp.where(jnp.zeros_like(token) + page >= 0, row, -1)
        token += (2 * lax.optimization_barrier(i) + tile) * TOKENS
        entry = split.start + lax.shift_right_logical(token, static.page_size.bit_length() - 1)
        width = x.block_tables.shape[1]
        page = RowLayout(1, 1).take(x.block_tables, split.row * width + jnp.minimum(entry, width - 1))
        row = page * static.page_size + (token & static.page_size - 1)
        return jnp.where((entry < split.stop) & basics.in_pool(page, self.num_pages), row, -1)

    def load(self, place: Place, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Load a piece of a tile: its numbers, and their scales."""
        column = place.column + place.part * self.static.widths[0]
        numbers = gather.load_rows(self.x.pages, rows, column, place.columns)
        return numbers, gather.load_values(self.x.scale, rows, column // LATENT_GROUP)

    def store(self, slot: Any, place: Place, piece: tuple[jax.Array, jax.Array]) -> None:
        """Store a piece to its tile, and once this program's share of a half is complete, tell, and start its copy to
        the other program.
        """
        static, part, barriers = self.static, 2 * slot + place.part, self.static.converted(self.mem)
        tile, width = self.mem.k[place.part], static.widths[place.part]
        numbers, scale = piece
        to = tile.at[slot, :, pl.ds(place.column, place.columns)]
        stored_twice = static.sharers > 1 and not static.copies_shares
        gather.store_rows(numbers, to, scale, barriers.at(part) if stored_twice else None)
        if place.is_last:
            plgpu.commit_smem()
            if static.copies_shares:
                share = width // static.sharers
                sharing.copy_to_other(tile.at[slot, :, pl.ds(self.sharer * share, share)], barriers.at(part))
            barriers.arrive(part, TOKENS * width)  # half of its columns, of 16 bits


# --- the two warpgroups that compute


@dataclasses.dataclass(frozen=True)
class SeesawConsumer(SeesawTurns["LatentSplit"]):
    """One of the two warpgroups that compute, over pages of a sequence."""

    static: SeesawStatic
    mem: SeesawScratch
    x: RowInputs
    block: Any

    def run(self, results: SeesawResults) -> None:
        """Attend to all splits."""
        self.release_query()
        for slot in range(2 * self.static.pairs):
            self.release(slot)

        def attend(split: LatentSplit) -> None:
            plgpu.barrier_wait(self.mem.q_landed)
            state = self.attend(split, split.pair, split.num_pairs(self.static))
            self.write(results, split, state)

        _for_each_split(self.static, self.x.plan, attend)

    def await_part(self, pair: Any, slot: Any, part: int) -> None:
        if self.static.quantised and part != ROPE:
            self.static.converted(self.mem).wait(2 * slot + part, lax.div(pair, self.static.pairs))
        else:
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
        meta, oldest_query = self.tile_meta(pair, tile), split.oldest_query(self.static, self.x)
        position = token + meta[1]
        for j in range(1, self.static.pages):
            first = j * self.static.page_tokens
            position = jnp.where(token >= first, token + (meta[1 + j] - first), position)
        draft = position - oldest_query
        return jnp.where(draft < 0, OLDER_BIT, jnp.minimum(draft, NEVER_BIT))

    def mask_scores(self, split: LatentSplit, pair: Any, s: Any) -> Any:
        """Scores, -inf where a row does not see a token."""
        bit = over_columns(self.token_bits(split, pair, self.half, tiles.column_iota(TOKENS)), s.shape)
        seen = over_tokens(self.seen(split), s.shape)
        return jnp.where((lax.shift_right_logical(seen, bit) & 1) == 1, s, -jnp.inf)

    def seen(self, split: LatentSplit) -> Any:
        """Bits [ROWS] of what each row sees."""
        if self.x.seen is None:
            row = self.block * ROWS + token_iota(ROWS)
            newer = self.static.queries - 1 - lax.div(row, self.static.heads)  # drafts that the row does not see
            bits = lax.shift_right_logical(jnp.full_like(row, self.static.draft_bits), jnp.maximum(newer, 0))
            return jnp.where(newer >= 0, bits | jnp.int32(-(2**OLDER_BIT)), 0)
        return basics.load(self.x.seen.at[split.row, pl.ds(self.block * ROWS, ROWS)], PER_ROW)

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

    def write(self, results: SeesawResults, split: LatentSplit, state: SeesawState) -> None:
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
                mem.q[half][0] = out
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


# --- the merge


def _merge_splits(
    out: Float[Array, "B rows L"],
    lse: Float[Array, "blocks B ROWS"],
    partials: PartialStates,
    plan: DecodePlan,
) -> tuple[Float[Array, "B rows L"], Float[Array, "blocks B ROWS"]]:
    """Finish, in place, the sequences that `out` and `lse` lack: those of several splits, and those that see nothing.

    Splits are merged in their order, whichever programs they came from.
    """
    (blocks, batch, _), latent_dim = lse.shape, out.shape[2]
    columns = MERGE_COLUMNS
    while columns > FRAGMENT_COLUMNS and 2 * blocks * batch * (latent_dim // columns) <= basics.multiprocessors():
        columns //= 2  # to keep all multiprocessors busy
    refs = basics.alias_in_place(out), basics.alias_in_place(lse)
    plgpu.kernel(
        functools.partial(_merge_kernel, columns),
        grid=(merge_programs(latent_dim // columns * blocks * batch),),
        grid_names=("program",),
        scratch_types=[
            PartialLoader.types(partials, blocks * batch, ROWS, num_fragments(ROWS * columns)),
            plgpu.SMEM((ROWS, columns), out.dtype),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_rows",
    )(*refs, *basics.materialize((partials, plan)))
    return basics.read_back(refs[0]), basics.read_back(refs[1])


def _merge_kernel(
    columns: int, out: Ref, lse: Ref, partials: PartialStates, plan: DecodePlan, loader: PartialLoader, tile: Ref
) -> None:
    """Merge some columns of the latent of blocks of rows, one after the other."""
    blocks, slices, slice_fragments = lse.shape[0], out.shape[2] // columns, num_fragments(ROWS * columns)

    def merge(index: Any, item: Any) -> None:
        block, column_slice = lax.div(item, slices), lax.rem(item, slices)
        row, first_split = plan.row_order[index], plan.split_indptr[index]
        first = partials.state_index(block, blocks, first_split)
        count = plan.split_indptr[index + 1] - first_split
        fragments = pl.ds(column_slice * slice_fragments, slice_fragments)
        merged = loader.for_each(partials, first, count, slice(None), fragments, add_partial_rows, empty_rows(columns))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # an earlier copy may still read the tile
        tile[...] = normalise(merged.acc, merged.l).astype(tile.dtype)
        plgpu.commit_smem()
        to = out.at[row, pl.ds(block * ROWS, ROWS), pl.ds(column_slice * columns, columns)]
        plgpu.copy_smem_to_gmem(tile, to)

        @pl.when(column_slice == 0)
        def _store_lse() -> None:
            lse[block, row] = log_sum_exp(merged.m * LOG2E, merged.l)

    for_each_merged(plan, slices * blocks, merge)
    plgpu.wait_smem_to_gmem(0)
