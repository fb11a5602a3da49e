"""`mla_decode` on data-center Blackwell (B200): the kernel, read downward.

128 query rows of a sequence (heads of each query, query by query, then padding) are tcgen05's M in the scores, whose
left operand is the query: S [128 rows, 64 latents] = Q Cᵀ. The first columns of the query ("own") and the rotated ones
lie in TMEM, where a left operand may be, the others in shared memory: all of it, [128, 576], would leave no room for
two tiles of latents. O takes one of two forms:

    many rows    O [128 rows, own columns] += P C      P in TMEM; two programs share O if the latent has over 256
                                                       columns: each has half of them, and scores every tile
    few rows     Oᵀ [latent columns, rows] += Cᵀ Pᵀ    P in shared memory; one program has all columns of O, and the
                                                       product takes time in proportion to the rows

O [128, 512] in float32 would be all of TMEM. Few rows are limited by memory, so a tile is read once and the tensor core
may score rows that are padding; many rows by the tensor core, so none of its rows may be idle.

Roles: warpgroup 0 is softmax, a row a thread or four. In warpgroup 1, warp 0 copies latents, warp 1 issues all MMAs,
warp 2 copies queries. Each walks the program's work tiles by itself.

    warp 2       Q own, rotated -> shared memory         (then, once in TMEM) Q other -> where Q own was
    warp 0       tile t -> stage t % stages: other and rotated columns, then own
    warp 1       S(t) = Q C(t)ᵀ                  S(t + 1), as far as it is ahead       O += P(t) C(t)
    warpgroup 0               S(t) -> registers, P(t) = exp(S - m), O rescaled if m grew much, P(t) -> memory

No wait can last. Each names a barrier, its phases, and who arrives:

- q_full, a split: copies of own and rotated queries. They follow q_empty of the split before.
- q_moved, a split: commit of the copies of those to TMEM. Then others may be copied over the own: other_full.
- q_empty, a split: commit of the last product that reads the query (few rows: also P, which has the memory of the
  rotated query).
- own_full, rest_full [stage], a tile: copies; where a page does not exist, warp 0 itself. own_empty, rest_empty:
  commit of the products that read it. Copies to a stage follow those.
- s_full, a tile: commit of its scores. s_empty: warpgroup 0 has them in registers. Scores follow s_empty of the tile
  before, also across splits.
- p_full, a tile: warpgroup 0 has stored P, rescaled O, zeroed values that no row sees, and has read O of the split
  before. o_done: commit of the product with P. P(t + 1) is stored after it, O rescaled after it.

Every barrier at which no copy arrives orders the tensor core.
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
from pallas_attn.mosaic.primitives import basics, register_tiles, shared_memory
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.tile_scheduler import ABSENT, WorkTile, for_each_work_tile
from pallas_attn.portable.schedule import most_splits

COLUMNS = 64
"""Columns of the query that are copied at a time."""

SLICE = 16
"""Columns of O that are in registers at a time where query rows are columns; a thread then has a factor for each."""

MAX_COLUMNS = 64
"""Query rows that are columns of O. With more, memory would no longer be what limits, and rows of O fill better."""

MAX_OWN = 256
"""Columns of O for which TMEM has room beside the query, scores and probabilities."""

VALUE_ROWS = 128
"""Latent columns in a product of few rows: tcgen05's M."""

RESCALE_THRESHOLD_LOG2 = 8
"""log2 of the largest unnormalised probability that leaves the running maximum, and so O, as it is."""

REDUCTION_BYTES = 1024
"""Shared memory for the one number that warps reduce among them, whether O is to be rescaled."""

MAX_STAGES = 4
"""More would have to be measured to help."""

TILE_META = 8
"""Numbers that are noted of a tile, at most."""


# --- what the kernel is compiled for, given, and holds


@dataclasses.dataclass(frozen=True)
class TcgenStatic(LatentTiles):
    """Compile-time facts of the kernel, beside those of its tiles.

    Attributes:
      columns: query rows as columns of Oᵀ, padding included; 0 where they are rows of O.
      stages: tiles in shared memory.
    """

    columns: int
    stages: int

    @property
    def own(self) -> int:
        """Columns of the latent whose queries are in TMEM; and those of O in a program of many rows."""
        return self.latent_dim if self.latent_dim <= MAX_OWN else -(-self.latent_dim // 128) * 64

    @property
    def other(self) -> int:
        """Columns of the latent whose queries are in shared memory."""
        return self.latent_dim - self.own

    @property
    def halves(self) -> int:
        """Programs that share O."""
        return 2 if self.other and not self.columns else 1

    @property
    def layout(self) -> Any:
        """Layout of scores in registers. To shared memory, P does not go from where a thread has a row."""
        return tmem.TILE if self.columns else ROW_A_THREAD

    @property
    def probs_replace_query(self) -> bool:
        """Whether P takes the shared memory in which the rotated query is on its way to TMEM."""
        return bool(self.columns) and self.rope_dim == TOKENS

    @property
    def value_slices(self) -> int:
        """For few rows, products of P with 128 columns of the latent each. Where own or other columns are no multiple
        of 128, their last two overlap.
        """
        return pl.cdiv(self.own, VALUE_ROWS) + pl.cdiv(self.other, VALUE_ROWS)

    def value_slice(self, number: int) -> tuple[int, int]:
        """Part of a tile (0 own, 1 other) that such a product takes, and the first of its columns there."""
        part, width = (0, self.own) if number < pl.cdiv(self.own, VALUE_ROWS) else (1, self.other)
        within = number - part * pl.cdiv(self.own, VALUE_ROWS)
        return part, min(within * VALUE_ROWS, width - VALUE_ROWS)

    @property
    def state_columns(self) -> int:
        """Columns of a program's O, for each of 128 rows."""
        return self.columns * self.value_slices if self.columns else self.own

    @property
    def slice_columns(self) -> int:
        """Columns of O that are in registers at a time."""
        return SLICE if self.columns else COLUMNS

    def ctas(self, query_rows: int) -> int:
        """Programs that a split of a sequence takes."""
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
    """Compile-time facts for a call, with the form of O for its query rows, and as many stages as fit shared memory.

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
    """Columns of tiles of latents: own, other (None if there are none), rotated."""

    own: Any
    other: Any
    rope: Any


class TcgenScratch(NamedTuple):
    """Shared memory, TMEM and barriers of a program.

    Attributes:
      q: [own / 64, ROWS, 64], columns of the query: own, on their way to TMEM, then other.
      q_stage: [ROWS, R], the rotated query on its way to TMEM.
      k: [stages, TOKENS, columns].
      p: [ROWS, TOKENS] for few rows, or None.
      meta: int32 [ROWS + stages·TILE_META]. A float of each row, as bits, for few rows; for each stage visibility of
        its tile (FULL, PARTIAL, DEAD), and the position of each page's first token or ABSENT.
      o: TMEM [128, state_columns].
      q_tmem: TMEM [ROWS, own + R].
      s: TMEM [ROWS, TOKENS].
      p_tmem: TMEM [ROWS, TOKENS] for many rows, or None.
      q_full, ...: see above.
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
        """Scratch types of the kernel, for queries and latents of a dtype."""
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
    """Partial states in global memory: stats [states, 2, ROWS] (m and l), acc [states, fragments, *FRAGMENT].

    They are not normalised: m is what weights are relative to, times log2 e, l the sum of 2**(score - m) of each query
    row, acc the program's columns of O. There is one for each split, block of rows and half, whose maxima may differ.
    """

    stats: Any
    acc: Any

    @staticmethod
    def types(states: int, static: TcgenStatic) -> TcgenPartials:
        """Shapes of so many states."""
        return TcgenPartials(
            jax.ShapeDtypeStruct((states, 2, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((states, num_fragments(static.state_columns), *native_tiles.FRAGMENT), jnp.float32),
        )


class TcgenResults(NamedTuple):
    """Results in global memory.

    Attributes:
      out: [B, rows, L], sequences in one split; of many rows with padding to blocks of ROWS.
      lse: [blocks, B, ROWS], likewise.
      partials: states of the others.
    """

    out: Any
    lse: Any
    partials: TcgenPartials


# --- the kernel


def attend(x: RowInputs, static: TcgenStatic, out_dtype: jax.typing.DTypeLike) -> TcgenResults:
    """Run the kernel: output and LSE of sequences in one split, partial states of the others."""
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
    """Roles of the two warpgroups, and of the warps of the second."""
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
    """Pages `start` to `stop` of a sequence, as one program attends to them.

    Attributes:
      row: the sequence.
      state: index of the partial state, where the sequence is in several splits.
      is_whole_row: whether no other program has pages of the sequence.
      index, tile: splits, and tiles, that the program took before.
    """

    row: Any
    start: Any
    stop: Any
    state: Any
    is_whole_row: Any
    index: Any
    tile: Any

    def queries(self, static: TcgenStatic, x: RowInputs) -> Any:
        """Number of queries."""
        return static.queries if x.q_lens is None else x.q_lens[self.row]

    def oldest_query(self, static: TcgenStatic, x: RowInputs) -> Any:
        """Position of the first query."""
        return x.kv_lens[self.row] - self.queries(static, x)

    def num_tiles(self, static: TcgenStatic) -> Any:
        return pl.cdiv(self.stop - self.start, static.pages) * static.tiles_per_page


@dataclasses.dataclass(frozen=True)
class TcgenRole:
    """Operands and memory that every role of a program has."""

    static: TcgenStatic
    x: RowInputs
    mem: TcgenScratch

    @property
    def block(self) -> Any:
        """Index of the block of query rows."""
        return lax.axis_index("block")

    @property
    def first_own(self) -> Any:
        """First column of the latent that is this program's own."""
        return lax.axis_index("half") * self.static.other if self.static.halves == 2 else 0

    @property
    def first_other(self) -> Any:
        """First of the other columns."""
        return (1 - lax.axis_index("half")) * self.static.own if self.static.halves == 2 else self.static.own

    @property
    def probs(self) -> Ref:
        """P, as an operand of products."""
        if not self.static.columns:
            return self.mem.p_tmem
        return self.mem.q_stage if self.mem.p is None else self.mem.p

    def stage(self, tile: Any) -> Any:
        """Slot of a tile, by the number of tiles that the program took before."""
        return lax.rem(tile, self.static.stages)

    def tile_meta(self, stage: Any) -> Ref:
        """Visibility of the tile in a stage, and positions of its pages."""
        return self.mem.meta.at[pl.ds(ROWS + stage * TILE_META, TILE_META)]

    def for_each_split(self, work: Callable[[TcgenSplit], None]) -> tuple[Any, Any]:
        """Call work(split) for each split of this program; return the numbers of splits and of tiles."""

        def step(tile: WorkTile, carry: Any) -> Any:
            split = TcgenSplit(tile.row, tile.start, tile.stop, tile.split, tile.is_whole_row, *carry)
            work(split)
            return split.index + 1, split.tile + split.num_tiles(self.static)

        return for_each_work_tile(self.x.plan, step, (jnp.int32(0), jnp.int32(0)), counted=True)


# --- the warp that copies queries


class TcgenQueryCopies(TcgenRole):
    """Starts the copies of the queries of each split."""

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

    def copy_columns(self, split: TcgenSplit, first: Any, columns: int, full: Ref) -> None:
        rows = pl.ds(self.block * ROWS, ROWS)
        for i in range(columns // COLUMNS):
            source = self.x.q_latent.at[split.row, rows, pl.ds(first + i * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, self.mem.q.at[i], full)


# --- the warp that copies latents


class TcgenLatentCopies(TcgenRole):
    """Starts the copies of all tiles."""

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
        """Start the copies of the i-th tile of a split, in the order in which columns fall free."""
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
        """Page of the pool that is this one of a split; negative where there is none."""
        tables, entry = self.x.block_tables, split.start + number
        page = tables[split.row, jnp.minimum(entry, tables.shape[1] - 1)]
        return jnp.where((entry < split.stop) & basics.in_pool(page, self.x.pages.shape[0]), page, -1)

    def store_meta(self, split: TcgenSplit, i: Any, pages: list[Any], oldest_query: Any) -> None:
        """Store visibility and positions of a tile.

        All rows see what is older than their queries, and under a causal mask the newest one sees everything. The
        oldest query itself is seen by all then.
        """
        static = self.static
        meta = self.tile_meta(self.stage(split.tile + i))
        first, tile_of_page = static.first_page(i)
        first_token = (split.start + first) * static.page_size + tile_of_page * TOKENS
        newer = first_token + TOKENS - oldest_query  # tokens of the tile that are no older than the oldest query
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
        """Start the copies of parts of a tile, each a ref, first column and columns. An absent page arrives at once."""
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
    """Issues all products, and copies of the query to TMEM."""

    def run(self) -> None:
        self.for_each_split(self.multiply_split)

    @property
    def scored_ahead(self) -> tuple[Callable[..., None], ...]:
        """Parts of the next tile that are scored before this tile's product with P. With two stages, the own columns of
        the next tile but one can only come after that product, so the next tile waits for them as late as it can; and
        few rows, which memory limits, score nothing ahead, so as to free a stage as soon as they can.
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
        """Copy own and rotated columns of the query to TMEM."""
        static, mem = self.static, self.mem
        plgpu.barrier_wait(mem.q_full)
        for i in range(static.own // COLUMNS):
            plgpu.async_copy_smem_to_tmem(mem.q.at[i], mem.q_tmem.at[:, pl.ds(i * COLUMNS, COLUMNS)])
        plgpu.async_copy_smem_to_tmem(mem.q_stage, mem.q_tmem.at[:, pl.ds(static.own, static.rope_dim)])
        if static.other:
            plgpu.tcgen05_commit_arrive(mem.q_moved)
            plgpu.barrier_wait(mem.other_full)

    def score_rest(self, tile: Any, *, is_last: Any) -> None:
        """Start the scores of a tile: those of its rotated and other columns."""
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
        """Finish the scores of a tile."""
        static, mem, stage = self.static, self.mem, self.stage(tile)
        plgpu.barrier_wait(mem.own_full.at[stage])
        q = mem.q_tmem.at[:, pl.ds(0, static.own)]
        plgpu.tcgen05_mma(mem.s, q, mem.k.own.at[stage].transpose((1, 0)))
        plgpu.tcgen05_commit_arrive(mem.s_full)
        if not static.columns:
            pl.when(is_last)(lambda: plgpu.tcgen05_commit_arrive(mem.q_empty))

    def multiply_values(self, tile: Any, accumulate: Any) -> None:
        """Add the product of a tile's P and values to O."""
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
    """Makes probabilities of scores, rescales O, and writes results."""

    def run(self, results: TcgenResults) -> None:
        def attend(split: TcgenSplit) -> None:
            per_row = self.static.layout.reduce(1)
            empty = register_tiles.filled(INITIAL_MAX, (ROWS,), per_row), register_tiles.filled(0.0, (ROWS,), per_row)
            num_tiles = split.num_tiles(self.static)
            m, l = lax.fori_loop(0, num_tiles, functools.partial(self.step, split), empty)  # noqa: E741
            plgpu.barrier_wait(self.mem.o_done)
            self.write(results, split, m, l)

        self.for_each_split(attend)

    def step(self, split: TcgenSplit, i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        """Turn the scores of a tile to probabilities; maxima and sums with it.

        A maximum stays as it is while scores exceed it by little, so that O need not be rescaled. In a tile that is not
        full, what rows do not see is masked, in scores and values.
        """
        (m, l), static, mem, tile = carry, self.static, self.mem, split.tile + i  # noqa: E741
        stage = self.stage(tile)
        plgpu.barrier_wait(mem.s_full)
        s = plgpu.async_load_tmem(mem.s, layout=static.layout)
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(mem.s_empty)
        plgpu.barrier_wait(mem.own_full.at[stage])  # what is noted of the tile comes before its copies
        if static.columns:
            plgpu.barrier_wait(mem.rest_full.at[stage])

        def mask_tile(s: Any) -> Any:
            self.clear_dead_rows(split, stage)
            return self.mask_scores(split, stage, s)

        s = lax.cond(self.tile_meta(stage)[0] == FULL, lambda s: s, mask_tile, s)
        scale = static.sm_scale * LOG2E
        highest = s.max(axis=1) * scale
        m_new = jnp.where(highest > m + RESCALE_THRESHOLD_LOG2, highest, m)
        rescale = jnp.exp2(m - m_new)
        p = jnp.exp2(s * scale - register_tiles.over_tokens(m_new, s.shape))
        l = l * rescale + p.sum(axis=1)  # noqa: E741

        @pl.when(i > 0)
        def _after_first() -> None:
            plgpu.barrier_wait(mem.o_done)  # the product with the P before: P is read, and O whole
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
        """Multiply O with a factor of each query row [ROWS]."""

        def rescale(part: Ref, _: Any, values: Any, factors: Any) -> None:
            plgpu.async_store_tmem(part, values * factors)

        self.for_each_slice(factor, rescale)

    def for_each_slice(self, factor: Any, work: Callable[[Ref, Any, Any, Any], None]) -> None:
        """Call work(part, place, values, factors) for each slice of O, with the part of TMEM that it is, its place (of
        few rows the number of the product and the first query row, else the first column), its values, and the factor
        [ROWS] of their query rows.

        Where query rows are columns of O, each thread needs those of all columns: they go through shared memory.
        """
        static, bits = self.static, self.mem.meta

        def call(first: Any, place: Any, factor: Any) -> None:
            part = self.mem.o.at[:, pl.ds(first, static.slice_columns)]
            values = plgpu.async_load_tmem(part, layout=ROW_A_THREAD)
            plgpu.wait_load_tmem()
            work(part, place, values, spread(static, factor, values.shape))

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
        """Index of the bit that says whether a row sees each token of a tile."""
        meta, oldest_query = self.tile_meta(stage), split.oldest_query(self.static, self.x)
        position = token + meta[1]
        for j in range(1, self.static.pages):
            first = j * self.static.page_tokens
            position = jnp.where(token >= first, token + (meta[1 + j] - first), position)
        draft = position - oldest_query
        return jnp.where(draft < 0, OLDER_BIT, jnp.minimum(draft, NEVER_BIT))

    def mask_scores(self, split: TcgenSplit, stage: Any, s: Any) -> Any:
        """Scores, -inf where a row does not see a token."""
        token = plgpu.broadcasted_iota(jnp.int32, (TOKENS,), 0, layout=self.static.layout.reduce(0))
        bit = register_tiles.over_columns(self.token_bits(split, stage, token), s.shape)
        seen = register_tiles.over_tokens(self.seen(split), s.shape)
        return jnp.where((lax.shift_right_logical(seen, bit) & 1) == 1, s, -jnp.inf)

    def seen(self, split: TcgenSplit) -> Any:
        """Bits [ROWS] of what each row sees."""
        per_row = self.static.layout.reduce(1)
        if self.x.seen is not None:
            return basics.load(self.x.seen.at[split.row, pl.ds(self.block * ROWS, ROWS)], per_row)
        row = self.block * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=per_row)
        newer = self.static.queries - 1 - lax.div(row, self.static.heads)  # drafts that the row does not see
        bits = lax.shift_right_logical(jnp.full_like(row, self.static.draft_bits), jnp.maximum(newer, 0))
        return jnp.where(newer >= 0, bits | jnp.int32(-(2**OLDER_BIT)), 0)

    def clear_dead_rows(self, split: TcgenSplit, stage: Any) -> None:
        """Make values that no row sees 0, where this program multiplies them."""

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
        """Write output and LSE, or the partial state, of a split."""
        l = jnp.where(self.seen(split) < 0, l, 0.0)  # noqa: E741
        seen = l != 0
        inverse = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
        is_first = self.first_own == 0
        static, block, half = self.static, self.block, lax.axis_index("half")

        @pl.when(split.is_whole_row)
        def _write() -> None:
            def normalise(_: Ref, place: Any, values: Any, factors: Any) -> None:
                write_slice(results.out, static, split.row, block, half, place, masked(values, factors))

            self.for_each_slice(inverse, normalise)

            @pl.when(is_first)
            def _store_lse() -> None:
                results.lse[block, split.row] = log_sum_exp(m, l)

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
    """Multiply values of O with factors; 0 where those are, whatever the values."""
    return jnp.where(factors != 0, values * factors, 0.0)


def spread(static: TcgenStatic, per_query_row: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast a value of each query row over a slice of O."""
    return (register_tiles.over_columns if static.columns else register_tiles.over_tokens)(per_query_row, shape)


def log_sum_exp(m: Any, l: Any) -> Any:  # noqa: E741
    """LSE of rows whose weights, exp2(score · log2 e - m), sum up to l."""
    seen = l != 0
    return jnp.where(seen, (m + jnp.log2(jnp.where(seen, l, 1.0))) * (1 / LOG2E), -jnp.inf)


def state_index(partials: TcgenPartials, static: TcgenStatic, blocks: int, block: Any, split: Any, half: Any) -> Any:
    """Index of the state of a split, for a block of query rows and a half of the latent."""
    states = partials.stats.shape[0] // (blocks * static.halves)
    return (block * static.halves + half) * states + split


def write_slice(out: Ref, static: TcgenStatic, row: Any, block: Any, half: Any, place: Any, tile: Any) -> None:
    """Write a slice of O, normalised, by its place as in `TcgenSoftmax.for_each_slice`."""
    tile = tile.astype(out.dtype)
    if static.columns:
        _write_columns(out, static, row, place, tile)
        return
    column = half * static.other + place if static.halves == 2 else place
    # Where the halves overlap, the first one writes: their bits may differ.
    is_written = (half == 0) | (place >= static.own - static.other) if static.halves == 2 else True

    @pl.when(is_written)
    def _store() -> None:
        store_rows(tile, out.at[row, pl.ds(block * ROWS, ROWS), pl.ds(column, tile.shape[1])])


def _write_columns(out: Ref, static: TcgenStatic, row: Any, place: tuple[Any, int], tile: Any) -> None:
    """Write a slice [128 columns of the latent, query rows], without the columns that the slice before has, too."""
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
