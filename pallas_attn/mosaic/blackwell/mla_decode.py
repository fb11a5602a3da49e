"""Experimental: has never run on a card. The MLA decode kernel, and its operands and scratch.

Terms:

    query row        one head of one query token
    block            128 query rows of a sequence, padded if the sequence has fewer
    split            consecutive pages of a sequence, which one CTA (or two, see below) processes for one block
    tile C           L latent and R rotated numbers of each of 64 cached tokens
    stage            shared-memory buffer of one tile
    own, other       the L latent columns are divided into own and other columns. L = 512 has 256 own columns
    few, many rows   whether a sequence has at most 64 query rows, or more

The scores are S [128 rows, 64 tokens] = Q Cᵀ. The left operand Q may be in TMEM or in shared memory. Its own and
rotated columns are in TMEM, its other columns in shared memory: all of Q [128, 576] in shared memory would leave no
room for two tiles. The output O has one of two forms:

    many rows    O [128 rows, own columns] += P C      P in TMEM. If L is over 256, two CTAs share O: each owns half of
                                                       the columns and scores every tile
    few rows     Oᵀ [L, rows] += Cᵀ Pᵀ                 P in shared memory. One CTA has all columns of O. The time of the
                                                       product is proportional to the number of query rows

The first form with all columns, O [128, 512] in float32, would fill TMEM. With many rows, the tensor core limits the
speed of the kernel, and all 128 rows of its products must be used. With few rows, memory limits the speed: one CTA
reads each tile once, and the tensor core has time to compute scores of padding rows.

Warp roles. Each role loops over the splits of the CTA independently:

    warpgroup 0           softmax: a row per thread (many rows), or per four threads (few rows)
    warpgroup 1, warp 0   starts TMA of latents
    warpgroup 1, warp 1   issues all MMAs and the copies of the query to TMEM
    warpgroup 1, warp 2   starts TMA of queries

Loop of each role over the splits and tiles t of the CTA (stage = t % stages; "rest" is the rotated and other columns):

    warp 2       wait q_empty; TMA Q own, rotated; wait q_moved; TMA Q other -> the memory of Q own
    warp 0       wait rest_empty[stage]; TMA other and rotated columns; wait own_empty[stage]; TMA own columns
    warp 1       wait q_full; copy Q own, rotated to TMEM; wait other_full
                 for each tile t: wait rest_full, own_full; S(t) = Q C(t)ᵀ    (ahead of O, see `scored_ahead`)
                                  wait s_empty, p_full; O += P(t) C(t)
    warpgroup 0  for each tile t: wait s_full; load S(t); mask; m, P(t) = exp(S - m); wait o_done of tile t - 1;
                                  rescale O if m grew by more than the threshold; store P(t)
                 wait o_done; write output, or a partial state

Barriers ("commit" is an arrival of the tensor core when products or copies have finished):

    barrier             one phase per   arrivals                                          waits
    q_full              split           TMA of own and rotated columns of Q               warp 1
    q_moved             split           commit of the copies of these columns to TMEM     warp 2
    other_full          split           TMA of the other columns of Q                     warp 1
    q_empty             split           commit of the last product that reads Q (few      warp 2
                                        rows: that reads P, which may have the memory of
                                        the rotated columns of Q)
    own_full[stage],    tile            TMA; warp 0 for an absent page                    warp 1; warpgroup 0 before it
    rest_full[stage]                                                                      reads or zeroes the tile
    own_empty[stage],   tile            commit of the products that read it               warp 0
    rest_empty[stage]
    s_full              tile            commit of the scores                              warpgroup 0
    s_empty             tile            warpgroup 0 has the scores in registers           warp 1, before the next scores
    p_full              tile            warpgroup 0 has stored P, rescaled O, zeroed      warp 1
                                        invisible values, and read O of the previous
                                        split
    o_done              tile            commit of the product with P                      warpgroup 0, before it stores
                                                                                          the next P or rescales O

Deadlock freedom: all roles process the same splits and tiles in the same order. TMA to a stage waits for the commit of
the products that read the previous tile of the stage. The scores of a tile wait for s_empty of the previous tile, also
across splits. The store of P(t + 1) waits for o_done of tile t. So every role waits only for arrivals that depend on
earlier tiles, or on earlier steps of the same tile.

Every barrier at which no TMA copy arrives is an `OrderedBarrier`.
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

from pallas_attn.mosaic.blackwell import native_tiles, tmem
from pallas_attn.mosaic.blackwell.native_tiles import (
    num_fragments,
    store_columns,
    store_fragments,
    store_rows,
)
from pallas_attn.mosaic.blackwell.tmem import ROW_A_THREAD, ROWS, OrderedBarrier
from pallas_attn.mosaic.latent_tiles import (
    DEAD,
    FULL,
    INITIAL_MAX,
    NEVER_BIT,
    OLDER_BIT,
    PARTIAL,
    TOKENS,
    LatentTiles,
    RowInputs,
)
from pallas_attn.mosaic.merge import StateForm
from pallas_attn.mosaic.primitives import basics, register_tiles, shared_memory
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.exponents import in_log2_units, next_reference, over_scores
from pallas_attn.mosaic.primitives.tile_scheduler import ABSENT, WorkTile, for_each_work_tile
from pallas_attn.portable.schedule import most_splits

COLUMNS = 64
"""Number of columns of Q that one TMA copy loads."""

SLICE = 16
"""Number of columns of O that are loaded to registers at a time if O has query rows as columns (few rows). Each thread
then also holds a factor for each of these columns.
"""

MAX_COLUMNS = 64
"""Maximum number of query rows of a sequence for the form "few rows". With more query rows, the tensor core would limit
the speed, and the form "many rows" uses it better.
"""

MAX_OWN = 256
"""Maximum number of columns of O that fit in TMEM together with Q, scores and probabilities."""

VALUE_ROWS = 128
"""Number of latent columns in one product Cᵀ Pᵀ of the form "few rows": M of tcgen05."""

RESCALE_THRESHOLD_LOG2 = 8
"""Growth of the maximum score [log2] up to which the kernel keeps the old maximum and does not rescale O. Probabilities
are then at most 2**8.
"""

REDUCTION_BYTES = 1024
"""Shared memory [bytes] for the only reduction over all warps of the softmax warpgroup: whether O must be rescaled."""

MAX_STAGES = 4
"""Largest number of stages that `choose_static` tries."""

TILE_META = 8
"""Number of int32 reserved for the metadata of a tile: its visibility and the positions of up to four pages."""


# --- compile-time parameters, scratch and results


@dataclasses.dataclass(frozen=True)
class TcgenStatic(LatentTiles):
    """Compile-time parameters of the kernel and its tiles.

    Attributes:
      columns: few rows: number of query rows, with padding, which are the columns of Oᵀ. Many rows: 0.
      stages: number of stages.
    """

    columns: int
    stages: int

    @property
    def own(self) -> int:
        """Number of own columns: latent columns of Q that are in TMEM. With many rows, also the columns of O of a
        CTA.
        """
        return self.latent_dim if self.latent_dim <= MAX_OWN else -(-self.latent_dim // 128) * 64

    @property
    def other(self) -> int:
        """Number of other columns: latent columns of Q that are in shared memory."""
        return self.latent_dim - self.own

    @property
    def halves(self) -> int:
        """Number of CTAs that share O, 1 or 2. The two CTAs are called halves."""
        return 2 if self.other and not self.columns else 1

    @property
    def form(self) -> StateForm:
        """Form of attention states."""
        return StateForm(query_axis=1 if self.columns else 0, log2=True)

    @property
    def layout(self) -> Any:
        """Register layout of the scores. With few rows it is not `ROW_A_THREAD`, which cannot be stored to swizzled
        shared memory as P.
        """
        return tmem.TILE if self.columns else ROW_A_THREAD

    @property
    def probs_replace_query(self) -> bool:
        """Whether P overwrites `TcgenScratch.q_stage`, the rotated columns of Q in shared memory, after they were
        copied to TMEM.
        """
        return bool(self.columns) and self.rope_dim == TOKENS

    @property
    def value_slices(self) -> int:
        """For few rows, the number of products Cᵀ Pᵀ per tile, with 128 latent columns each.

        If the number of own (or other) columns is not a multiple of 128, the last two products of the own (or other)
        columns overlap.
        """
        return pl.cdiv(self.own, VALUE_ROWS) + pl.cdiv(self.other, VALUE_ROWS)

    def value_slice(self, number: int) -> tuple[int, int]:
        """For few rows, return the columns of product `number`: 0 for own or 1 for other, and the first column."""
        part, width = (0, self.own) if number < pl.cdiv(self.own, VALUE_ROWS) else (1, self.other)
        within = number - part * pl.cdiv(self.own, VALUE_ROWS)
        return part, min(within * VALUE_ROWS, width - VALUE_ROWS)

    @property
    def state_columns(self) -> int:
        """Number of TMEM columns of a CTA's O, in each of the 128 rows of TMEM."""
        return self.columns * self.value_slices if self.columns else self.own

    @property
    def slice_columns(self) -> int:
        """Number of TMEM columns of O that are loaded to registers at a time."""
        return SLICE if self.columns else COLUMNS

    def ctas(self, query_rows: int) -> int:
        """Number of CTAs that process one split: blocks times halves.

        Args:
          query_rows: query rows of a sequence.
        """
        return self.halves * -(-query_rows // ROWS)


def choose_static(
    *,
    latent_dim: int,
    rope_dim: int,
    queries: int,
    heads: int,
    page_size: int,
    causal: bool,
    sm_scale: float,
    dtype: Any,
) -> TcgenStatic:
    """Choose the form of O, and the largest number of stages that fits in shared memory.

    The arguments are explained in `LatentTiles`; `dtype` is the dtype of queries and latents.

    Raises:
      NotImplementedError: two stages do not fit.
    """
    few = queries * heads <= MAX_COLUMNS and latent_dim >= VALUE_ROWS
    for stages in range(MAX_STAGES, 1, -1):
        static = TcgenStatic(
            latent_dim=latent_dim,
            rope_dim=rope_dim,
            queries=queries,
            heads=heads,
            columns=-(-queries * heads // SLICE) * SLICE if few else 0,
            page_size=page_size,
            stages=stages,
            causal=causal,
            sm_scale=sm_scale,
        )
        if shared_memory.fits(TcgenScratch.types(static, dtype), 1, reduction_bytes=REDUCTION_BYTES):
            return static
    raise NotImplementedError(f"two tiles of {latent_dim} + {rope_dim} columns do not fit shared memory")


class TileParts(NamedTuple):
    """Own, other and rotated columns of tiles. `other` is None if there are no other columns."""

    own: Any
    other: Any
    rope: Any


class TcgenScratch(NamedTuple):
    """Shared memory, TMEM and barriers of a CTA.

    Attributes:
      q: shared memory [own / 64, ROWS, 64]: the own columns of Q, until they are copied to TMEM, then the other
        columns.
      q_stage: shared memory [ROWS, R]: the rotated columns of Q, until they are copied to TMEM.
      k: shared memory [stages, TOKENS, columns] for own, other and rotated columns of tiles.
      p: shared memory [ROWS, TOKENS], P for few rows; None if P is in `p_tmem` or overwrites `q_stage`.
      meta: int32 [ROWS + stages·TILE_META] in shared memory. The first ROWS numbers are the bits of a float32 per query
        row, which the threads exchange (few rows). Then come for each stage the visibility of its tile (FULL, PARTIAL
        or DEAD), and the position of each page's first token or ABSENT.
      o: TMEM [128, state_columns], O.
      q_tmem: TMEM [ROWS, own + R], own and rotated columns of Q.
      s: TMEM [ROWS, TOKENS], S.
      p_tmem: TMEM [ROWS, TOKENS], P for many rows, otherwise None.
      q_full, ...: barriers, explained in the docstring of the module.
    """

    q: Any
    q_stage: Any
    k: TileParts
    p: Any
    meta: Any
    o: Any
    q_tmem: Any
    s: Any
    p_tmem: Any
    q_full: Any
    q_moved: Any
    other_full: Any
    q_empty: Any
    own_full: Any
    rest_full: Any
    own_empty: Any
    rest_empty: Any
    s_full: Any
    s_empty: Any
    p_full: Any
    o_done: Any

    @staticmethod
    def types(static: TcgenStatic, dtype: Any) -> TcgenScratch:
        """Scratch types of the kernel. `dtype` is the dtype of queries and latents."""
        operand = functools.partial(register_tiles.operand, dtype=dtype, row_bytes=static.row_bytes)
        stages, other = static.stages, static.other
        probs = register_tiles.operand((ROWS, TOKENS), dtype)
        return TcgenScratch(
            q=operand((static.own // COLUMNS, ROWS, COLUMNS)),
            q_stage=operand((ROWS, static.rope_dim)),
            k=TileParts(
                operand((stages, TOKENS, static.own)),
                operand((stages, TOKENS, other)) if other else None,
                operand((stages, TOKENS, static.rope_dim)),
            ),
            p=probs if static.columns and not static.probs_replace_query else None,
            meta=plgpu.SMEM((ROWS + stages * TILE_META,), jnp.int32),
            o=plgpu.TMEM((ROWS, static.state_columns), jnp.float32),
            q_tmem=plgpu.TMEM((ROWS, static.own + static.rope_dim), dtype, packed=True),
            s=plgpu.TMEM((ROWS, TOKENS), jnp.float32),
            p_tmem=None if static.columns else plgpu.TMEM((ROWS, TOKENS), dtype, packed=True),
            q_full=plgpu.Barrier(num_arrivals=static.own // COLUMNS + 1),
            q_moved=OrderedBarrier() if other else None,
            other_full=plgpu.Barrier(num_arrivals=other // COLUMNS) if other else None,
            q_empty=OrderedBarrier(),
            own_full=plgpu.Barrier(num_barriers=stages, num_arrivals=static.pages),
            rest_full=plgpu.Barrier(num_barriers=stages, num_arrivals=static.pages * (2 if other else 1)),
            own_empty=OrderedBarrier(num_barriers=stages),
            rest_empty=OrderedBarrier(num_barriers=stages),
            s_full=OrderedBarrier(),
            s_empty=OrderedBarrier(),
            p_full=OrderedBarrier(),
            o_done=OrderedBarrier(),
        )


class TcgenPartials(NamedTuple):
    """Partial states in global memory: one for each split, block of query rows and half.

    Scores in units of log2 are log2(e) times the scaled scores.

    Attributes:
      stats: float32 [states, 2, ROWS]. m: number that was subtracted from the scores [log2] of each query row. l: sum
        of 2**(score - m). The two halves of a split may have different m.
      acc: float32 [states, fragments, *FRAGMENT], O of the CTA, not divided by l.
    """

    stats: Any
    acc: Any

    @staticmethod
    def types(states: int, static: TcgenStatic) -> TcgenPartials:
        """Shapes of `states` partial states."""
        return TcgenPartials(
            jax.ShapeDtypeStruct((states, 2, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((states, num_fragments(static.state_columns), *native_tiles.FRAGMENT), jnp.float32),
        )


class TcgenResults(NamedTuple):
    """Results in global memory.

    Attributes:
      out: [B, rows, L], output of sequences with one split. For many rows, `rows` is a multiple of ROWS.
      lse: [blocks, B, ROWS], LSE of sequences with one split.
      partials: partial states of sequences with several splits.
    """

    out: Any
    lse: Any
    partials: TcgenPartials


# --- the kernel


def attend(x: RowInputs, static: TcgenStatic, out_dtype: jax.typing.DTypeLike) -> TcgenResults:
    """Run the kernel. Return output and LSE of sequences with one split, and partial states of the other sequences."""
    batch, rows, latent_dim = x.q_latent.shape
    blocks, programs = rows // ROWS, x.plan.cta_row.shape[0] - 1
    states = blocks * static.halves * most_splits(x.plan, x.block_tables.shape[1])
    out_rows = static.queries * static.heads if static.columns else rows
    return TcgenResults(
        *plgpu.kernel(
            functools.partial(_kernel, static),
            out_type=TcgenResults(
                jax.ShapeDtypeStruct((batch, out_rows, latent_dim), out_dtype),
                jax.ShapeDtypeStruct((blocks, batch, ROWS), jnp.float32),
                TcgenPartials.types(states, static),
            ),
            grid=(programs, blocks, static.halves),
            grid_names=("program", "block", "half"),
            num_threads=2,
            thread_name="warpgroup",
            scratch_types=TcgenScratch.types(static, x.pages.dtype),
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
            kernel_name="mla_decode_tcgen05",
        )(basics.materialize(x))
    )


def _kernel(static: TcgenStatic, x: RowInputs, out: Ref, lse: Ref, partials: TcgenPartials, *scratch: Ref) -> None:
    """Run the role of this warpgroup; in warpgroup 1, the role of each warp."""
    mem = TcgenScratch(*scratch)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _softmax() -> None:
        TcgenSoftmax(static, x, mem).run(TcgenResults(out, lse, partials))

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _issue() -> None:
        @plgpu.warp_map
        def _on_each(warp: Any) -> None:
            pl.when(warp == 0)(TcgenLatentCopies(static, x, mem).run)
            pl.when(warp == 1)(TcgenProducts(static, x, mem).run)
            pl.when(warp == 2)(TcgenQueryCopies(static, x, mem).run)


class TcgenSplit(NamedTuple):
    """One split: pages `start` to `stop` - 1 of a sequence, processed by one CTA, or by the two halves.

    Attributes:
      row: index of the sequence.
      state: index of the partial state, if the sequence has several splits.
      is_whole_row: whether the split has all pages of the sequence.
      index, tile: number of splits, and number of tiles, that the CTA has processed before this split.
    """

    row: Any
    start: Any
    stop: Any
    state: Any
    is_whole_row: Any
    index: Any
    tile: Any

    def queries(self, static: TcgenStatic, x: RowInputs) -> Any:
        """Number of query tokens of the sequence, without padding."""
        return static.queries if x.q_lens is None else x.q_lens[self.row]

    def oldest_query(self, static: TcgenStatic, x: RowInputs) -> Any:
        """Position of the first query."""
        return x.kv_lens[self.row] - self.queries(static, x)

    def num_tiles(self, static: TcgenStatic) -> Any:
        return pl.cdiv(self.stop - self.start, static.pages) * static.tiles_per_page


@dataclasses.dataclass(frozen=True)
class TcgenRole:
    """Base class of the roles: operands and scratch, and properties that several roles use."""

    static: TcgenStatic
    x: RowInputs
    mem: TcgenScratch

    @property
    def block(self) -> Any:
        """Index of the block of query rows."""
        return lax.axis_index("block")

    @property
    def first_own(self) -> Any:
        """First latent column of this CTA's own columns."""
        return lax.axis_index("half") * self.static.other if self.static.halves == 2 else 0

    @property
    def first_other(self) -> Any:
        """First latent column of this CTA's other columns."""
        return (1 - lax.axis_index("half")) * self.static.own if self.static.halves == 2 else self.static.own

    @property
    def probs(self) -> Ref:
        """Reference to P in TMEM or shared memory, the operand of the second product."""
        if not self.static.columns:
            return self.mem.p_tmem
        return self.mem.q_stage if self.mem.p is None else self.mem.p

    def stage(self, tile: Any) -> Any:
        """Stage of a tile, given its number in the order in which the CTA processes tiles."""
        return lax.rem(tile, self.static.stages)

    def tile_meta(self, stage: Any) -> Ref:
        """Reference to the metadata of the tile in a stage: its visibility, then the positions of its pages."""
        return self.mem.meta.at[pl.ds(ROWS + stage * TILE_META, TILE_META)]

    def for_each_split(self, work: Callable[[TcgenSplit], None]) -> tuple[Any, Any]:
        """Call work(split) for each split of this CTA. Return the number of splits and the number of tiles."""

        def step(tile: WorkTile, carry: Any) -> Any:
            split = TcgenSplit(tile.row, tile.start, tile.stop, tile.split, tile.is_whole_row, *carry)
            work(split)
            return split.index + 1, split.tile + split.num_tiles(self.static)

        return for_each_work_tile(self.x.plan, step, (jnp.int32(0), jnp.int32(0)), counted=True)


# --- the warp that copies queries


class TcgenQueryCopies(TcgenRole):
    """Starts the TMA copies of the queries of each split."""

    def run(self) -> None:
        splits, _ = self.for_each_split(self.copy_split)
        pl.when(splits > 0)(lambda: plgpu.barrier_wait(self.mem.q_empty))

    def copy_split(self, split: TcgenSplit) -> None:
        static, mem = self.static, self.mem
        rows = pl.ds(self.block * ROWS, ROWS)
        pl.when(split.index > 0)(lambda: plgpu.barrier_wait(mem.q_empty))
        self.copy_columns(split, self.first_own, static.own, mem.q_full)
        plgpu.copy_gmem_to_smem(self.x.q_rope.at[split.row, rows], mem.q_stage, mem.q_full)
        if static.other:
            plgpu.barrier_wait(mem.q_moved)
            self.copy_columns(split, self.first_other, static.other, mem.other_full)

    def copy_columns(self, split: TcgenSplit, first: Any, columns: int, barrier: Ref) -> None:
        rows = pl.ds(self.block * ROWS, ROWS)
        for i in range(columns // COLUMNS):
            source = self.x.q_latent.at[split.row, rows, pl.ds(first + i * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, self.mem.q.at[i], barrier)


# --- the warp that copies latents


class TcgenLatentCopies(TcgenRole):
    """Starts the TMA copies of all tiles."""

    def run(self) -> None:
        _, tiles_taken = self.for_each_split(self.copy_split)
        first = jnp.maximum(tiles_taken - self.static.stages, 0)

        def drain(tile: Any, _: None) -> None:
            plgpu.barrier_wait(self.mem.rest_empty.at[self.stage(tile)])
            plgpu.barrier_wait(self.mem.own_empty.at[self.stage(tile)])

        lax.fori_loop(first, tiles_taken, drain, None)

    def copy_split(self, split: TcgenSplit) -> None:
        oldest_query = split.oldest_query(self.static, self.x)
        lax.fori_loop(0, split.num_tiles(self.static), lambda i, _: self.copy_tile(split, i, oldest_query), None)

    def copy_tile(self, split: TcgenSplit, i: Any, oldest_query: Any) -> None:
        """Start the copies of the i-th tile of a split: first the rest, then the own columns, because the rest of a
        stage becomes empty earlier.
        """
        static, mem, tile = self.static, self.mem, split.tile + i
        stage = self.stage(tile)
        first, tile_of_page = static.first_page(i)
        pages = [self.look_up(split, first + j) for j in range(static.pages)]

        def refill(free: Ref, start: Callable[[], None]) -> None:
            pl.when(tile >= static.stages)(lambda: plgpu.barrier_wait(free.at[stage]))
            start()

        def start_rest() -> None:
            parts = [(mem.k.rope, static.latent_dim, static.rope_dim)]
            if static.other:
                parts.append((mem.k.other, self.first_other, static.other))
            self.copy_pages(stage, pages, tile_of_page, parts, mem.rest_full)

        def start_own() -> None:
            self.store_meta(split, i, pages, oldest_query)
            self.copy_pages(stage, pages, tile_of_page, [(mem.k.own, self.first_own, static.own)], mem.own_full)

        refill(mem.rest_empty, start_rest)
        refill(mem.own_empty, start_own)

    def look_up(self, split: TcgenSplit, number: Any) -> Any:
        """Return the id of page number `number` of a split; -1 if the page is past the end of the split, or if its
        table entry names no page of the pool.
        """
        tables, entry = self.x.block_tables, split.start + number
        page = tables[split.row, jnp.minimum(entry, tables.shape[1] - 1)]
        return jnp.where((entry < split.stop) & basics.in_pool(page, self.x.pages.shape[0]), page, -1)

    def store_meta(self, split: TcgenSplit, i: Any, pages: list[Any], oldest_query: Any) -> None:
        """Store the metadata of a tile: visibility and positions.

        A tile is FULL if all its keys are older than the oldest query, because every query row sees such keys. With
        causal visibility, every query row also sees the key of the oldest query. A causal tile whose keys are not past
        the newest query is PARTIAL, because the newest query sees all of them. All other tiles are DEAD.

        Args:
          i: index of the tile in the split.
          pages: results of `look_up`.
          oldest_query: position of the first query.
        """
        static = self.static
        meta = self.tile_meta(self.stage(split.tile + i))
        first, tile_of_page = static.first_page(i)
        first_token = (split.start + first) * static.page_size + tile_of_page * TOKENS
        newer = first_token + TOKENS - oldest_query  # tokens of the tile that are not older than the oldest query
        visibility = jnp.where(newer <= (1 if static.causal else 0), FULL, DEAD)
        if static.causal:
            visibility = jnp.where(newer <= split.queries(static, self.x), jnp.maximum(visibility, PARTIAL), visibility)
        for j, page in enumerate(pages):
            visibility = jnp.where(page >= 0, visibility, DEAD)
            meta[1 + j] = jnp.where(page >= 0, first_token + j * static.page_tokens, ABSENT)
        meta[0] = visibility

    def copy_pages(
        self, stage: Any, pages: list[Any], tile_of_page: Any, parts: list[tuple[Ref, Any, int]], full: Ref
    ) -> None:
        """Start the copies of some columns of a tile. For each absent page, arrive at the barrier instead.

        Args:
          pages: results of `look_up`.
          tile_of_page: index of the tile in its page.
          parts: for each range of columns: shared memory, first column in the pool, and number of columns.
          full: barriers, one per stage.
        """
        static, barrier = self.static, full.at[stage]
        for j, page in enumerate(pages):

            @pl.when(page >= 0)
            def _copy(j: int = j, page: Any = page) -> None:
                source = self.x.pages.at[page, pl.ds(tile_of_page * TOKENS, static.page_tokens)]
                for k, first, columns in parts:
                    target = k.at[stage, pl.ds(j * static.page_tokens, static.page_tokens)]
                    plgpu.copy_gmem_to_smem(source.at[:, pl.ds(first, columns)], target, barrier)

            @pl.when(page < 0)
            def _arrive() -> None:
                for _ in parts:
                    plgpu.barrier_arrive(barrier)


# --- the warp that issues products


class TcgenProducts(TcgenRole):
    """Issues all products, and the copies of Q to TMEM."""

    def run(self) -> None:
        self.for_each_split(self.multiply_split)

    @property
    def scored_ahead(self) -> tuple[Callable[..., None], ...]:
        """Score products of tile t + 1 that are issued before the product of P with tile t.

        With more than two stages, these are all products. With two stages, own columns of tile t + 1 arrive late,
        because the copy of own columns waits for the product with P of two tiles before. Only the product of the rest
        is then issued ahead. With few rows and two stages, nothing is issued ahead: memory limits the speed, and the
        product with P should empty its stage as early as possible.
        """
        if self.static.stages > 2:
            return self.score_rest, self.score_own
        return () if self.static.columns else (self.score_rest,)

    def multiply_split(self, split: TcgenSplit) -> None:
        mem, static, last = self.mem, self.static, split.num_tiles(self.static) - 1
        self.move_query()
        for score in (self.score_rest, self.score_own):
            score(split.tile, is_last=last == 0)
        ahead = self.scored_ahead

        def step(i: Any, _: None) -> None:
            tile, is_last = split.tile + i, i + 1 == last

            def score(parts: tuple[Callable[..., None], ...]) -> None:
                @pl.when(i < last)
                def _score() -> None:
                    for part in parts:
                        part(tile + 1, is_last=is_last)

            plgpu.barrier_wait(mem.s_empty)
            score(ahead)
            plgpu.barrier_wait(mem.p_full)
            self.multiply_values(tile, i > 0)
            if static.columns:
                pl.when(i == last)(lambda: plgpu.tcgen05_commit_arrive(mem.q_empty))
            score(tuple(part for part in (self.score_rest, self.score_own) if part not in ahead))

        lax.fori_loop(0, last + 1, step, None)

    def move_query(self) -> None:
        """Copy own and rotated columns of Q to TMEM, then wait until the other columns are in shared memory."""
        static, mem = self.static, self.mem
        plgpu.barrier_wait(mem.q_full)
        for i in range(static.own // COLUMNS):
            plgpu.async_copy_smem_to_tmem(mem.q.at[i], mem.q_tmem.at[:, pl.ds(i * COLUMNS, COLUMNS)])
        plgpu.async_copy_smem_to_tmem(mem.q_stage, mem.q_tmem.at[:, pl.ds(static.own, static.rope_dim)])
        if static.other:
            plgpu.tcgen05_commit_arrive(mem.q_moved)
            plgpu.barrier_wait(mem.other_full)

    def score_rest(self, tile: Any, *, is_last: Any) -> None:
        """Issue S = Q Cᵀ for the rotated and other columns of a tile."""
        del is_last
        static, mem, stage = self.static, self.mem, self.stage(tile)
        plgpu.barrier_wait(mem.rest_full.at[stage])
        q = mem.q_tmem.at[:, pl.ds(static.own, static.rope_dim)]
        plgpu.tcgen05_mma(mem.s, q, mem.k.rope.at[stage].transpose((1, 0)), accumulate=False)
        for i in range(static.other // COLUMNS):
            columns = mem.k.other.at[stage, :, pl.ds(i * COLUMNS, COLUMNS)]
            plgpu.tcgen05_mma(mem.s, mem.q.at[i], columns.transpose((1, 0)))
        if not static.columns:
            plgpu.tcgen05_commit_arrive(mem.rest_empty.at[stage])

    def score_own(self, tile: Any, *, is_last: Any) -> None:
        """Issue S += Q Cᵀ for the own columns of a tile, which completes S.

        Args:
          is_last: whether the tile is the last of its split.
        """
        static, mem, stage = self.static, self.mem, self.stage(tile)
        plgpu.barrier_wait(mem.own_full.at[stage])
        q = mem.q_tmem.at[:, pl.ds(0, static.own)]
        plgpu.tcgen05_mma(mem.s, q, mem.k.own.at[stage].transpose((1, 0)))
        plgpu.tcgen05_commit_arrive(mem.s_full)
        if not static.columns:
            pl.when(is_last)(lambda: plgpu.tcgen05_commit_arrive(mem.q_empty))

    def multiply_values(self, tile: Any, accumulate: Any) -> None:
        """Issue O += P C for a tile; O = P C if `accumulate` is False."""
        static, mem, stage = self.static, self.mem, self.stage(tile)
        if not static.columns:
            plgpu.tcgen05_mma(mem.o, mem.p_tmem, mem.k.own.at[stage], accumulate=accumulate)
        for i in range(static.value_slices if static.columns else 0):
            part, first = static.value_slice(i)
            values = mem.k[part].at[stage, :, pl.ds(first, VALUE_ROWS)]
            o = mem.o.at[:, pl.ds(i * static.columns, static.columns)]
            p = self.probs.at[pl.ds(0, static.columns)]
            plgpu.tcgen05_mma(o, values.transpose((1, 0)), p.transpose((1, 0)), accumulate=accumulate)
        plgpu.tcgen05_commit_arrive(mem.own_empty.at[stage])
        if static.columns:
            plgpu.tcgen05_commit_arrive(mem.rest_empty.at[stage])
        plgpu.tcgen05_commit_arrive(mem.o_done)


# --- the warpgroup of softmax


class TcgenSoftmax(TcgenRole):
    """Computes probabilities from scores, rescales O, and writes results."""

    def run(self, results: TcgenResults) -> None:
        def attend(split: TcgenSplit) -> None:
            per_row = self.static.layout.reduce(1)
            empty = register_tiles.filled(INITIAL_MAX, (ROWS,), per_row), register_tiles.filled(0.0, (ROWS,), per_row)
            num_tiles = split.num_tiles(self.static)
            m, l = lax.fori_loop(0, num_tiles, functools.partial(self.step, split), empty)  # noqa: E741
            plgpu.barrier_wait(self.mem.o_done)
            self.write(results, split, in_log2_units(m, self.static.sm_scale * LOG2E), l)

        self.for_each_split(attend)

    def step(self, split: TcgenSplit, i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        """Compute the probabilities of the i-th tile of a split. Return the new maxima m and sums l, [ROWS] each.

        m stays unchanged while scores exceed it by at most the threshold, so that O need not be rescaled. In a tile
        that is not FULL, scores are masked, and values that no query row sees are zeroed.
        """
        (m, l), static, mem, tile = carry, self.static, self.mem, split.tile + i  # noqa: E741
        stage = self.stage(tile)
        plgpu.barrier_wait(mem.s_full)
        s = plgpu.async_load_tmem(mem.s, layout=static.layout)  # [query_rows, tokens]
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(mem.s_empty)
        plgpu.barrier_wait(mem.own_full.at[stage])  # also makes the metadata visible, which is stored before the copies
        if static.columns:
            plgpu.barrier_wait(mem.rest_full.at[stage])

        def mask_tile(s: Any) -> Any:
            self.clear_dead_rows(split, stage)
            return self.mask_scores(split, stage, s)

        s = lax.cond(self.tile_meta(stage)[0] == FULL, lambda s: s, mask_tile, s)
        m_new, factor = next_reference(
            s.max(axis=1), m, static.sm_scale * LOG2E, RESCALE_THRESHOLD_LOG2
        )  # [query_rows]
        rescale = jnp.exp2(m - m_new)
        factor = over_scores(factor, register_tiles.over_tokens, s.shape)
        p = jnp.exp2(s * factor - register_tiles.over_tokens(m_new, s.shape))  # [query_rows, tokens]
        l = l * rescale + p.sum(axis=1)  # noqa: E741

        @pl.when(i > 0)
        def _after_first() -> None:
            plgpu.barrier_wait(mem.o_done)  # the product with the last P has finished: P and O may change
            pl.when((m_new - m).max() > 0)(lambda: self.rescale_accumulator(rescale))

        p = p.astype(mem.q.dtype)
        if static.columns:
            self.probs[...] = p
            plgpu.commit_smem()
        else:
            plgpu.async_store_tmem(mem.p_tmem, p)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(mem.p_full)
        return m_new, l

    def rescale_accumulator(self, factor: Any) -> None:
        """Multiply O by a factor of each query row [ROWS]."""

        def rescale(part: Ref, _: Any, values: Any, factors: Any) -> None:
            plgpu.async_store_tmem(part, values * factors)

        self.for_each_slice(factor, rescale)

    def for_each_slice(self, factor: Any, work: Callable[[Ref, Any, Any, Any], None]) -> None:
        """Load O slice by slice, and call `work` for each slice.

        With few rows, query rows are columns of O, and each thread needs the factors of all columns. The threads
        exchange them through shared memory.

        Args:
          factor: a number for each query row, [ROWS].
          work: work(part, place, values, factors). `part` is the slice in TMEM. `values` are its contents, and
            `factors` has the query row's number for each of them. `place` is the first column of O (many rows), or a
            pair (few rows): number of the product (`value_slice`) and first query row.
        """
        static, bits = self.static, self.mem.meta

        def call(first: Any, place: Any, factor: Any) -> None:
            part = self.mem.o.at[:, pl.ds(first, static.slice_columns)]
            values = plgpu.async_load_tmem(part, layout=ROW_A_THREAD)
            plgpu.wait_load_tmem()
            work(part, place, values, static.form.spread(factor, values.shape))

        if not static.columns:
            for first in range(0, static.state_columns, static.slice_columns):
                call(first, first, factor)
            return
        bits.at[pl.ds(0, ROWS)][...] = lax.bitcast_convert_type(factor, jnp.int32)
        plgpu.commit_smem()
        for row in range(0, static.columns, SLICE):
            loaded = basics.load(bits.at[pl.ds(row, SLICE)], native_tiles.PER_COLUMN)
            of_rows = lax.bitcast_convert_type(loaded, jnp.float32)

            def each(i: Any, _: None, row: int = row, of_rows: Any = of_rows) -> None:
                call(i * static.columns + row, (i, row), of_rows)

            lax.fori_loop(0, static.value_slices, each, None)

    # Visibility

    def token_bits(self, split: TcgenSplit, stage: Any, token: Any) -> Any:
        """Return for each token of a tile the index of its bit in visibility masks (`RowInputs.seen`).

        Args:
          token: int32, index of each token in the tile.
        """
        meta, oldest_query = self.tile_meta(stage), split.oldest_query(self.static, self.x)
        position = token + meta[1]
        for j in range(1, self.static.pages):
            first = j * self.static.page_tokens
            position = jnp.where(token >= first, token + (meta[1 + j] - first), position)
        draft = position - oldest_query
        return jnp.where(draft < 0, OLDER_BIT, jnp.minimum(draft, NEVER_BIT))

    def mask_scores(self, split: TcgenSplit, stage: Any, s: Any) -> Any:
        """Return the scores s [query_rows, tokens], with -inf where a query row does not see a token."""
        token = plgpu.broadcasted_iota(jnp.int32, (TOKENS,), 0, layout=self.static.layout.reduce(0))
        bit = register_tiles.over_columns(self.token_bits(split, stage, token), s.shape)
        seen = register_tiles.over_tokens(self.seen(split), s.shape)
        return jnp.where((lax.shift_right_logical(seen, bit) & 1) == 1, s, -jnp.inf)

    def seen(self, split: TcgenSplit) -> Any:
        """Return the visibility mask of each query row, int32 [ROWS]. Bits are as in `RowInputs.seen`; padding has
        0.
        """
        per_row = self.static.layout.reduce(1)
        if self.x.seen is not None:
            return basics.load(self.x.seen.at[split.row, pl.ds(self.block * ROWS, ROWS)], per_row)
        row = self.block * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=per_row)
        newer = self.static.queries - 1 - lax.div(row, self.static.heads)  # number of newer queries, which are hidden
        bits = lax.shift_right_logical(jnp.full_like(row, self.static.draft_bits), jnp.maximum(newer, 0))
        return jnp.where(newer >= 0, bits | jnp.int32(-(2**OLDER_BIT)), 0)

    def clear_dead_rows(self, split: TcgenSplit, stage: Any) -> None:
        """Zero values that no query row sees, in the columns that this CTA multiplies by P, if the tile is DEAD."""

        @pl.when(self.tile_meta(stage)[0] == DEAD)
        def _clear() -> None:
            token = register_tiles.row_iota(TOKENS, register_tiles.BY_64)
            bit = self.token_bits(split, stage, token)
            every = jnp.int32(self.static.draft_bits - 2**OLDER_BIT)
            any_row = every if self.x.seen_by_any is None else self.x.seen_by_any[split.row]
            live_mask = (lax.shift_right_logical(jnp.full_like(bit, any_row), bit) & 1) == 1
            for part in self.mem.k[: 2 if self.static.columns and self.static.other else 1]:
                register_tiles.clear_rows(part.at[stage], live_mask, register_tiles.BY_64, self.static.row_bytes)
            plgpu.commit_smem()

    # Results

    def write(self, results: TcgenResults, split: TcgenSplit, m: Any, l: Any) -> None:  # noqa: E741
        """Write output and LSE if the split has all pages of the sequence, else a partial state."""
        l = jnp.where(self.seen(split) < 0, l, 0.0)  # noqa: E741
        seen = l != 0
        is_first = self.first_own == 0
        static, block, half = self.static, self.block, lax.axis_index("half")
        inverse = static.form.inverse(m, l)

        @pl.when(split.is_whole_row)
        def _write() -> None:
            def normalise(_: Ref, place: Any, values: Any, factors: Any) -> None:
                write_slice(results.out, static, split.row, block, half, place, masked(values, factors))

            self.for_each_slice(inverse, normalise)

            @pl.when(is_first)
            def _store_lse() -> None:
                results.lse[block, split.row] = static.form.lse(m, l)

        @pl.when(~split.is_whole_row)
        def _store_partial() -> None:
            partials = results.partials
            index = state_index(partials, static, results.lse.shape[0], block, split.state, half)

            def store(_: Ref, place: Any, values: Any, factors: Any) -> None:
                first = place[0] * static.columns + place[1] if static.columns else place
                fragments = pl.ds(num_fragments(first), num_fragments(static.slice_columns))
                store_fragments(masked(values, factors), partials.acc.at[index, fragments])

            self.for_each_slice(jnp.where(seen, 1.0, 0.0), store)
            partials.stats[index, 0] = jnp.where(seen, m, -jnp.inf)
            partials.stats[index, 1] = l


def masked(values: Any, factors: Any) -> Any:
    """Return values · factors; 0 where a factor is 0, even if the value is NaN or infinite."""
    return jnp.where(factors != 0, values * factors, 0.0)


def state_index(partials: TcgenPartials, static: TcgenStatic, blocks: int, block: Any, split: Any, half: Any) -> Any:
    """Return the index of a partial state.

    Args:
      blocks: number of blocks.
      block, split, half: block, index of the split's state in the plan, and half, to which the state belongs.
    """
    states = partials.stats.shape[0] // (blocks * static.halves)
    return (block * static.halves + half) * states + split


def write_slice(out: Ref, static: TcgenStatic, row: Any, block: Any, half: Any, place: Any, tile: Any) -> None:
    """Write a normalised slice of O to the output.

    Args:
      row: index of the sequence.
      place: as in `TcgenSoftmax.for_each_slice`.
      tile: the slice in registers.
    """
    tile = tile.astype(out.dtype)
    if static.columns:
        _write_columns(out, static, row, place, tile)
        return
    column = half * static.other + place if static.halves == 2 else place
    # If the columns of the two halves overlap, only the first half writes them, because the results may differ by
    # rounding.
    is_written = (half == 0) | (place >= static.own - static.other) if static.halves == 2 else True

    @pl.when(is_written)
    def _store() -> None:
        store_rows(tile, out.at[row, pl.ds(block * ROWS, ROWS), pl.ds(column, tile.shape[1])])


def _write_columns(out: Ref, static: TcgenStatic, row: Any, place: tuple[Any, int], tile: Any) -> None:
    """Write a slice [128 latent columns, query rows] to the output, except latent columns that the previous slice also
    has.
    """
    number, query_row = place
    of_own = pl.cdiv(static.own, VALUE_ROWS)
    is_own = number < of_own
    begin = jnp.where(is_own, number, number - of_own) * VALUE_ROWS
    first = jnp.minimum(begin, jnp.where(is_own, static.own, static.other) - VALUE_ROWS)
    column = first + jnp.where(is_own, 0, static.own)
    query_rows = pl.ds(query_row, min(SLICE, out.shape[1] - query_row))
    to = out.at[row, query_rows, pl.ds(column, VALUE_ROWS)]
    for overlap in (0, VALUE_ROWS // 2) if static.own % VALUE_ROWS or static.other % VALUE_ROWS else (0,):
        pl.when(begin - first == overlap)(functools.partial(store_columns, tile, to, overlap))
