"""`paged_prefill` on Hopper: the operand loader of the prefill kernel for keys and values in pages.

The main loop is in `mosaic/hopper/prefill.py`. This file has the operands, and for each work tile which pages the
producer copies (`PagedTile.load`) and which keys each query row sees (`PagedTile.attend`, `PagedTile.limits`).
`mosaic_sm100.py` uses the same loader for Blackwell.

    load, in the producer:                          attend, in each consumer:
      for tile i of the visible tiles:                positions and output rows of the query rows
        look up the pages of tile i+1                 attend to all tiles; for each tile:
        store the metadata of tile i+1                  read its metadata
        copy the keys of tile i+1                       mask scores unless the metadata is FULL_TILE
        copy the values of tile i                     scale and store the rows
        zero masked values of tile i
        i == 0: copy the queries

- A work tile is a block of query rows of one sequence and one KV head, with a range of its keys. A query row is one
  query head of one token.
- A tile is a range of `tile_keys` positions: several pages, or a part of one page. Only tiles with a visible key are
  processed. Tiles with sink tokens come first.
- A page is absent if its table entry is outside the pool. Absent pages, and pages that no row of the block sees, are
  not copied. Their scores are masked, and their values are set to 0.
- For each tile the producer stores metadata in shared memory: the position of the tile, which of its pages are present,
  and whether all rows see all of its keys. Computing this in every consumer would take registers.
- On Hopper, consumers wait for the keys of a tile, which the producer copies after it stored the metadata. On Blackwell
  consumers wait for products instead, so the metadata has a barrier (`tile_meta_full`).
- Rings are the pipeline stages in shared memory from which consumers read keys and values. With an int8 or fp8 cache,
  `mosaic_dequantize.py` converts tiles to float16 before they are stored to the rings.
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

from pallas_attn.mosaic.hopper import prefill as hopper
from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.mosaic.prefill.pipeline import (
    TOKENS,
    BlockConsumer,
    BlockRows,
    FlashStatic,
    PackedLoader,
    Producer,
    Results,
    Rings,
    RowOptions,
    ScoreTransform,
    list_work,
    shared_heads,
)
from pallas_attn.mosaic.prefill.schedule import (
    FlashWorkTile,
    QueryBlock,
    SequenceLengths,
    ring_slot,
)
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles, unsupported
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.dequantize import PIECE_TOKENS
from pallas_attn.mosaic.primitives.masks import Limits
from pallas_attn.mosaic.primitives.register_tiles import BY_64
from pallas_attn.mosaic.primitives.row_io import THREADS, RowLayout
from pallas_attn.mosaic.primitives.tma import (
    LANES,
    PagesOfHead,
    lane_iota,
    present_pages,
    tma_load_pages,
    zero_rows_past_end,
)
from pallas_attn.ops.paged_prefill import config
from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.ops.paged_prefill.mosaic_dequantize import (
    CacheScales,
    Dequantizer,
    PieceDequantizer,
    PieceOrder,
    StagedPieces,
    StagedQuant,
)
from pallas_attn.portable.visibility import PageWalk
from pallas_attn.types import HeadWindow, ScaleLayout

SHARED_ROWS = (512,)
"""Widths of heads for which two consumers share query rows. Half of the columns of a head must be a multiple of the 64
columns of a swizzled row. With 384 columns, the kernel spills registers if a call has all options."""

FULL_TILE = -1
"""Metadata of a tile whose pages are all present, and whose keys are visible to all rows of the block."""


class PrefillInputs(NamedTuple):
    """Operands of the kernel; arrays, or references to them.

    Attributes:
      q: results of `dequantize.split_queries`, [T, Hq, D] each, padded by `zero_rows_past_end`. With scales per
        channel, there are two float16 arrays, whose sum is the queries times k_scale times a factor. Otherwise there is
        one array.
      k, v: [N · Hkv, ps, columns]; with r = `dequantize.tokens_per_smem_row` > 1 tokens per row
        [N · Hkv, ps / r, r · D]; with `PagedLoader.tokens_first` [tokens of the pool, Hkv, columns]. A key or value has
        D of the columns.
      k_scale, v_scale: [Hkv] per head; [Hkv, D] per channel, where k_scale is None because q includes it;
        [N · Hkv · g] for g groups of tokens per page; None without scales.
      block_tables: [S, P] or [S, Hkv, P]; [S, P · ps] with one entry per token with `PagedLoader.tokens_first`.
      blocks, counts: arrays of the `WorkList`.
      window: a `HeadWindow`, or None.
      sinks: [Hq], or None.
    """

    q: tuple[Any, ...]
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    block_tables: Any
    blocks: Any
    counts: Any
    window: HeadWindow | None
    sinks: Any


def paged_prefill(call: PagedPrefillCall) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"] | None]:
    basics.require_capability((9, 0))
    unsupported.require_layout(call.kv, call.head_dim, call.block_tables)
    check_supported(call, (*unsupported.HEAD_DIMS, *SHARED_ROWS))
    settings = config.mosaic_config(config_key(call))
    return attend(call, hopper.flash_attention, settings, hopper.QUERIES, hopper.ROWS)


def config_key(call: PagedPrefillCall) -> config.PagedPrefillKey:
    """Return the properties of a call that determine the sizes of the kernel."""
    scales = dequantize.scale_layout(call.kv)
    return config.PagedPrefillKey(
        call.head_dim,
        call.kv.plan_page_size,
        call.kv.k.dtype.itemsize,
        token_scales=isinstance(scales, int),
        terms=2 if scales == "channel" else 1,
        capped=call.soft_cap is not None,
    )


def attend(
    call: PagedPrefillCall,
    flash_attention: Callable[..., tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"] | None]],
    settings: FlashConfig,
    tile_rows: int,
    rows: RowLayout,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"] | None]:
    """Prepare the operands, list the work tiles, and run the kernel of an architecture.

    Args:
      flash_attention: kernel of the architecture.
      settings: sizes of the kernel.
      tile_rows, rows: see `FlashStatic`.
    """
    kv = call.kv
    parts, query_scale = dequantize.split_queries(call.q[None], kv)
    loader = PagedLoader.of(call, settings, tile_rows, rows, parts=len(parts), score_scale=call.scale / query_scale)
    head_window = call.window if isinstance(call.window, HeadWindow) else None
    lengths = SequenceLengths(call.cu_q_lens, kv_lens=call.kv_lens, window=head_window)
    splits, work = list_work(loader, lengths, call.block_tables.shape[-1] * call.page_size, loader.l2_head_group)
    pool_of = functools.partial(
        basics.pool_of_pages,
        page_size=loader.page_size,
        tokens_per_row=loader.tokens_per_smem_row,
        tokens_first=loader.tokens_first,
    )
    inputs = PrefillInputs(
        q=tuple(zero_rows_past_end(part[0], tile_rows) for part in parts),
        k=pool_of(kv.k),
        v=pool_of(kv.values[0]),
        k_scale=None if loader.scales == "channel" else _flat(kv.k_scale),
        v_scale=_flat(kv.v_scale),
        block_tables=call.block_tables,
        blocks=work.blocks,
        counts=work.counts,
        window=head_window,
        sinks=call.sinks,
    )
    shape = call.num_tokens, loader.num_q_heads
    results = {"shape": shape, "out_dtype": call.output_dtype, "return_lse": call.return_lse}
    return flash_attention(loader, inputs, work, splits, sinks=call.sinks, **results)


def check_supported(call: PagedPrefillCall, head_dims: tuple[int, ...], no_wider: str | None = None) -> None:
    """Raise NotImplementedError unless a Mosaic kernel of `paged_prefill` supports the call.

    Args:
      head_dims: supported widths of heads.
      no_wider: why there are no wider heads.
    """
    if call.draft_mask is not None:
        raise NotImplementedError("takes no draft mask")
    unsupported.require_dtypes(call.q.dtype, call.kv.k.dtype)
    unsupported.require_head_dim(call.head_dim, head_dims, no_wider)
    unsupported.require_page_size(call.kv.plan_page_size)
    unsupported.require_soft_cap(call.soft_cap)


def _flat(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Flatten scales per token to one axis; return other scales as they are."""
    return scale.reshape(-1) if scale is not None and scale.ndim == 3 else scale


class PrefillScratch(NamedTuple):
    """Shared memory of the loader.

    Attributes:
      tile_meta: int32 [slots, 2]. For each tile, `FULL_TILE` or one bit per present page, and the position of the tile.
        There is one slot more than stages. On Blackwell there are two more, because a tile of keys may be multiplied
        and replaced while a consumer still processes the tile before it.
      staged: `StagedQuant` or `StagedPieces` of an int8 or fp8 cache, or None.
      tile_meta_full: one barrier per slot of `tile_meta`; None on Hopper, where consumers wait for the keys.
    """

    tile_meta: Any
    staged: Any
    tile_meta_full: Any


@dataclasses.dataclass(frozen=True)
class PagedLoader(PackedLoader):
    """The `OperandLoader` of keys and values in pages.

    Attributes:
      num_kv_heads: Hkv.
      page_size: tokens of a page.
      cache_dtype: dtype of keys and values in the cache.
      scales: layout of the scales of the cache, or None.
      tokens_per_smem_row: tokens in one row of the pools.
      tokens_first: whether the pools have tokens before heads, and block tables have one entry per token. The entry of
        the first token of a page is then its pool row.
      first_value_column: column of the pool of values where a value starts; above 0 if keys and values are one array.
    """

    num_kv_heads: int
    page_size: int
    cache_dtype: Any
    scales: ScaleLayout
    tokens_per_smem_row: int
    tokens_first: bool
    first_value_column: int

    kernel_name = "paged_prefill"
    compiler_params = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)

    @staticmethod
    def of(
        call: PagedPrefillCall,
        settings: FlashConfig,
        tile_rows: int,
        rows: RowLayout,
        *,
        parts: int,
        score_scale: float,
    ) -> PagedLoader:
        """Return the loader of a call.

        Args:
          tile_rows, rows: see `FlashStatic`.
          parts: split-fp16 parts of the queries.
          score_scale: factor of q kᵀ.
        """
        kv, head_dim, page_size = call.kv, call.head_dim, call.kv.plan_page_size
        if settings.tile_keys % page_size and page_size % settings.tile_keys:
            got = f"{settings.tile_keys} keys of pages of {page_size}"
            raise NotImplementedError(f"takes tiles of whole pages, or of a part of one page, got {got}")
        scales = dequantize.scale_layout(kv)
        in_pieces = scales is not None and settings.column_parts > 1
        if in_pieces and scales == "channel":
            raise NotImplementedError("takes scales per head, token or token group with two column parts, got channel")
        static = FlashStatic(
            head_dim,
            head_dim,
            settings.tile_keys,
            settings.stages,
            settings.consumers,
            copies=settings.tile_keys // min(page_size, PIECE_TOKENS if in_pieces else settings.tile_keys),
            score_scale=score_scale,
            tile_rows=tile_rows,
            rows=rows,
            soft_cap=call.soft_cap,
            query_parts=parts,
            block_heads=shared_heads(call.group, tile_rows),
            dequantizes=scales is not None,
            column_parts=settings.column_parts,
        )
        return PagedLoader(
            static,
            num_tokens=call.num_tokens,
            num_q_heads=call.group * call.num_kv_heads,
            causal=call.causal,
            window=call.window if isinstance(call.window, int) else None,
            num_kv_heads=call.num_kv_heads,
            page_size=page_size,
            cache_dtype=kv.k.dtype,
            scales=scales,
            tokens_per_smem_row=dequantize.tokens_per_smem_row(kv.k.dtype, head_dim),
            tokens_first=kv.view_page_size is not None,
            first_value_column=kv.values[1],
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def l2_head_group(self) -> int:
        """Number of sets of query heads of one KV head. The heads of a set share a block."""
        return self.group // self.static.block_heads

    @property
    def scale_groups(self) -> int:
        """Groups of tokens with one scale each in a page; 0 if scales are not per token."""
        return self.scales if isinstance(self.scales, int) else 0

    def scratch_types(self, *, orders_tensor_core: bool = False) -> PrefillScratch:
        slots = self.static.stages + (2 if orders_tensor_core else 1)
        return PrefillScratch(
            plgpu.SMEM((slots, 2), jnp.int32),
            self._staged_types(slots if self.scale_groups else 0) if self.static.dequantizes else None,
            plgpu.Barrier(num_barriers=slots, orders_tensor_core=True) if orders_tensor_core else None,
        )

    def _staged_types(self, scale_slots: int) -> StagedQuant | StagedPieces:
        """Return the scratch types of the buffers of an 8-bit cache. `scale_slots` is 0 without scales per token."""
        if self.static.column_parts > 1:
            return StagedPieces.types(self.static, self.cache_dtype, scale_slots)
        return StagedQuant.types(self.static, self.cache_dtype, self.tokens_per_smem_row, scale_slots)

    def tile(self, x: PrefillInputs, scratch: PrefillScratch, work: FlashWorkTile) -> PagedTile:
        return PagedTile.of(self, x, scratch, work)


class PagedTile(NamedTuple):
    """The `OperandTile` of keys and values in pages: one KV head of one sequence.

    Attributes:
      kv_head: KV head of the work tile.
      position_offset: position of a query minus the index of its token in q.
      first, end: position of the first query of the block, and position after its last query. Without causality, all
        queries have the last position of the sequence, from which all keys are visible.
      window: window of the head, or None.
      sink_tokens: sink tokens of the head.
      walk: order of the visible tiles of the block. A `PageWalk` usually orders pages; here each entry is a tile.
      first_tile, kv_tiles: start and length of the range of `walk` that this work tile processes.
    """

    loader: PagedLoader
    x: PrefillInputs
    scratch: PrefillScratch
    work: FlashWorkTile
    kv_head: Any
    position_offset: Any
    first: Any
    end: Any
    window: Any
    sink_tokens: Any
    walk: PageWalk
    first_tile: Any
    kv_tiles: Any

    @staticmethod
    def of(loader: PagedLoader, x: PrefillInputs, scratch: PrefillScratch, work: FlashWorkTile) -> PagedTile:
        block, kv_head = work.block, lax.div(work.head * loader.static.block_heads, loader.group)
        tile_keys = loader.static.tile_keys
        offset = block.end_key - block.end_row
        first = jnp.maximum(jnp.maximum(block.start, block.first_row) + offset, 0)
        end = jnp.maximum(jnp.minimum(loader.rows(work).end_query, block.end_row) + offset, 0)
        if not loader.causal:
            first, end = jnp.maximum(block.end_key - 1, 0), block.end_key
        window, sink_tokens = loader.window, jnp.int32(0)
        if x.window is not None:
            window, sink_tokens = x.window.window[kv_head], x.window.sink_tokens[kv_head]
        oldest = jnp.int32(0) if window is None else jnp.maximum(first - window + 1, 0)
        first_tile = lax.div(oldest, jnp.int32(tile_keys))
        sink_tiles = jnp.minimum(pl.cdiv(jnp.minimum(sink_tokens, end), tile_keys), first_tile)
        walked = jnp.maximum(sink_tiles + pl.cdiv(end, tile_keys) - first_tile, 1)
        walk, part = PageWalk(sink_tiles, first_tile, walked), work.kv_range(walked)
        return PagedTile(loader, x, scratch, work, kv_head, offset, first, end, window, sink_tokens, walk, *part)

    @property
    def static(self) -> FlashStatic:
        return self.loader.static

    @property
    def block(self) -> QueryBlock:
        return self.work.block

    def first_position(self, i: Any) -> Any:
        """Return the position of the first token of the i-th tile."""
        return self.walk.entry(self.first_tile + i) * self.static.tile_keys

    def tile_meta(self, kv_tile: Any) -> Ref:
        """Return the metadata slot of tile number `kv_tile` of the CTA."""
        return self.scratch.tile_meta.at[ring_slot(kv_tile, self.scratch.tile_meta.shape[0])]

    @property
    def rows(self) -> BlockRows:
        """Query rows of the block."""
        return self.loader.rows(self.work)

    def position(self, query: jax.Array) -> jax.Array:
        """Return the position of each query, int32 [tile_rows]."""
        return query + self.position_offset if self.loader.causal else self.rows.filled(self.block.end_key - 1)

    # Producer

    def load(self, producer: Producer, again: Any, kv_tile: Any) -> None:
        load_later_queries = producer.load_queries(again, functools.partial(self.copy_queries, producer.rings))
        if self.scratch.staged is None:
            self.load_tiles(producer, kv_tile, load_later_queries)
        elif isinstance(self.scratch.staged, StagedPieces):
            dequantizer = PieceDequantizer(self.static, producer.rings, self.scratch.staged)
            self.dequantize_pieces(dequantizer, kv_tile, load_later_queries)
        else:
            dequantizer = Dequantizer(self.static, producer.rings, self.scratch.staged)
            self.dequantize_tiles(dequantizer, kv_tile, load_later_queries)

    def copy_queries(self, rings: Rings, consumer: int, full: Ref) -> None:
        """Start the copies of all parts of the queries of a consumer."""
        parts = len(self.x.q)
        for i, part in enumerate(self.x.q):
            self.rows.copy(part, consumer, rings.q.at[consumer * parts + i], full)

    def load_tiles(self, producer: Producer, kv_tile: Any, load_later_queries: Callable[[Any], None]) -> None:
        """Copy keys and values of a 16-bit cache to the rings."""

        def keys(i: Any, pages: jax.Array) -> None:
            def copy(slot: Ref, full: Ref) -> None:
                self.store_tile_meta(kv_tile + i, i, pages)
                self.signal_tile_meta(kv_tile + i)
                self.copy_pages(self.keys, i, pages, slot, full, self.tokens_from(i))

            producer.load_keys(kv_tile + i, copy)

        def values(i: Any, pages: jax.Array) -> None:
            producer.load_values(
                kv_tile + i,
                functools.partial(self.copy_pages, self.values, i, pages, needed=self.tokens_from(i)),
                whole=self.is_whole(i, pages),
                live_mask=functools.partial(self.live_mask, i, pages),
            )

        has_one_stage = self.static.stages == 1

        def load(i: Any, pages: jax.Array) -> jax.Array:
            following = self.locate(i + 1)
            if has_one_stage:  # first: consumers need these queries to empty the only slot of keys
                load_later_queries(i)
            pl.when(i + 1 < self.kv_tiles)(lambda: keys(i + 1, following))
            pl.when(i >= 0)(lambda: values(i, pages))
            if not has_one_stage:
                load_later_queries(i)
            return following

        lax.fori_loop(-1, self.kv_tiles, load, LANES.filled(jnp.int32(-1), THREADS))

    def dequantize_tiles(
        self, dequantizer: Dequantizer, kv_tile: Any, load_later_queries: Callable[[Any], None]
    ) -> None:
        """Copy keys and values of an int8 or fp8 cache to staging buffers, and write them as float16 to the rings."""
        staged = dequantizer.staged

        def load(i: Any, located: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            (pages, following), after = located, self.locate(i + 2)

            @pl.when(i + 1 < self.kv_tiles)
            def _keys() -> None:
                scales = self.token_scales(i + 1, following)
                store_meta = functools.partial(self.store_meta, dequantizer, kv_tile, i + 1, following, scales)
                dequantizer.dequantize_keys(kv_tile + i + 1, store_meta)

            pl.when(i + 2 < self.kv_tiles)(
                lambda: self.copy_pages(self.keys, i + 2, after, staged.k, staged.full.at[0])
            )

            @pl.when(i >= 0)
            def _values() -> None:
                live_mask = functools.partial(self.live_mask, i, pages)
                dequantizer.dequantize_values(kv_tile + i, self.is_whole(i, pages), live_mask)

            in_middle = (i >= 0) & (i + 1 < self.kv_tiles)
            pl.when(in_middle)(lambda: self.copy_pages(self.values, i + 1, following, staged.v, staged.full.at[1]))
            load_later_queries(i)
            return following, after

        first = self.locate(jnp.int32(0))
        for i, (pool, slot) in enumerate(((self.keys, staged.k), (self.values, staged.v))):
            self.copy_pages(pool, jnp.int32(0), first, slot, staged.full.at[i])
        lax.fori_loop(-1, self.kv_tiles, load, (first, first))

    def dequantize_pieces(
        self, dequantizer: PieceDequantizer, kv_tile: Any, load_later_queries: Callable[[Any], None]
    ) -> None:
        """Copy keys and values of an int8 or fp8 cache in pieces, and write them as float16 to the rings."""
        order, pieces = PieceOrder(self.kv_tiles), self.static.copies  # pieces of a tile
        begin = 2 * pieces * kv_tile  # number of the first piece of the work tile

        def copy(place: Any, pages: jax.Array, piece: int, slot: Ref, full: Ref) -> None:
            """Start the copy of a piece of the tile at `place`. `pages` is the result of `locate` for this tile."""
            i = order.tile(place)
            for pool, is_here in ((self.keys, order.has_keys(place)), (self.values, order.has_values(place))):
                pl.when(is_here)(lambda pool=pool: self.copy_piece(pool, i, pages, piece, slot, full))

        def convert(place: Any, located: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            (pages, following), i = located, order.tile(place)
            after = self.locate(order.tile(place + 2))
            first, whole = begin + pieces * place, self.is_whole(i, pages)

            def copy_next(piece: int, slot: Ref, full: Ref) -> None:
                if piece < pieces:
                    copy(place, pages, piece, slot, full)
                else:
                    copy(place + 1, following, piece - pieces, slot, full)

            load_later_queries(place - 1)  # first: consumers need these queries to empty the only slot of keys

            @pl.when(order.has_keys(place))
            def _keys() -> None:
                scales = self.token_scales(i, pages)
                store_meta = functools.partial(self.store_meta, dequantizer, kv_tile, i, pages, scales)
                dequantizer.convert_keys(kv_tile + i, first, store_meta, copy_next)

            @pl.when(order.has_values(place))
            def _values() -> None:
                live_mask = functools.partial(self.live_mask, i, pages)
                dequantizer.convert_values(kv_tile + i, first, whole, live_mask, copy_next)

            return following, after

        located = tuple(self.locate(order.tile(jnp.int32(place))) for place in range(2))
        for piece in range(dequantizer.slots):
            copy(jnp.int32(0), located[0], piece, *dequantizer.slot(begin + piece))
        lax.fori_loop(0, order.places, convert, located)

    def store_meta(
        self, dequantizer: Dequantizer, kv_tile: Any, i: Any, pages: jax.Array, scales: list[jax.Array]
    ) -> None:
        """Store the metadata and the token scales of the i-th tile.

        Args:
          kv_tile: number of the first tile of the work tile.
          scales: result of `token_scales`.
        """
        self.store_tile_meta(kv_tile + i, i, pages)
        if scales:
            dequantizer.store_token_scales(kv_tile + i, *scales)
        self.signal_tile_meta(kv_tile + i)

    # Pages of a tile

    @property
    def part_tokens(self) -> int:
        """Tokens of one copy: a page, a tile if a page is longer than a tile, or a piece (`StagedPieces`)."""
        return self.static.tile_keys // self.static.copies

    def locate(self, i: Any) -> jax.Array:
        """Look up the pages of the i-th tile, one per lane of a warp.

        Returns:
          int32 [128] in layout `LANES`, equal in all warps: the pool row of each page. It is -1 for lanes without a
          page, for absent pages, and for pages that no row of the block sees.
        """
        lane = lane_iota()
        position = self.first_position(i) + jnp.minimum(lane, self.static.copies - 1) * self.part_tokens
        row, seen = self.look_up(position, LANES)
        seen &= (position < self.block.end_key) & (lane < self.static.copies)
        if self.window is not None:
            newest = position + self.part_tokens - 1
            seen &= (position < self.sink_tokens) | (newest > self.first - self.window)
        return jnp.where(seen, row, -1)

    def look_up(self, position: jax.Array, layout: RowLayout) -> tuple[jax.Array, jax.Array]:
        """Return the pool rows of the pages that contain positions [n], and whether these pages are present."""
        tables, pool_rows, loader = self.x.block_tables, self.x.k.shape[0], self.loader
        pages = tables.shape[-1] // (loader.page_size if loader.tokens_first else 1)
        entry = jnp.minimum(lax.div(position, jnp.int32(loader.page_size)), pages - 1)
        if loader.tokens_first:
            row = layout.take(tables, self.block.sequence * tables.shape[-1] + entry * loader.page_size)
            return row, basics.in_pool(row, pool_rows)
        if len(tables.shape) == 3:
            of_head = self.block.sequence * loader.num_kv_heads + self.kv_head
            row = layout.take(tables, of_head * tables.shape[-1] + entry)
            return row, basics.in_pool(row, pool_rows)
        page = layout.take(tables, self.block.sequence * tables.shape[-1] + entry)
        return page * loader.num_kv_heads + self.kv_head, basics.in_pool(page, pool_rows // loader.num_kv_heads)

    def tokens_from(self, i: Any) -> Any:
        """Return the number of tokens of the sequence from the start of the i-th tile."""
        return self.block.end_key - self.first_position(i)

    @property
    def keys(self) -> PagesOfHead:
        """The keys of the KV head."""
        return PagesOfHead(self.x.k, self.kv_head if self.loader.tokens_first else None)

    @property
    def values(self) -> PagesOfHead:
        """The values of the KV head."""
        return self.keys._replace(pages=self.x.v, first_column=self.loader.first_value_column)

    def copy_pages(self, pool: PagesOfHead, i: Any, pages: jax.Array, slot: Ref, full: Ref, needed: Any = None) -> None:
        """Start the copies of the i-th tile from the pool of keys or values; see `tma_load_pages`.

        Args:
          pool: `keys` or `values`.
          i: index of the tile in this work tile.
          pages: result of `locate`.
          slot: destination in shared memory.
          full: barrier at which the copies arrive.
          needed: number of tokens of the tile that are needed, from its first token on; None for all.
        """
        first = jnp.int32(0)
        if self.loader.page_size > self.part_tokens:
            first = lax.div(lax.rem(self.first_position(i), self.loader.page_size), self.loader.tokens_per_smem_row)
            first = pl.multiple_of(first, self.part_tokens // self.loader.tokens_per_smem_row)
        tma_load_pages(pool, pages, first, slot, full, self.static.copies, needed)

    def copy_piece(self, pool: PagesOfHead, i: Any, pages: jax.Array, piece: int, slot: Ref, full: Ref) -> None:
        """Start the copy of a piece of the i-th tile to a slot of `StagedPieces`. `pages` is from `locate`."""
        first = lax.rem(self.first_position(i) + piece * PIECE_TOKENS, jnp.int32(self.loader.page_size))
        tma_load_pages(pool, pages, pl.multiple_of(first, PIECE_TOKENS), slot, full, 1, lane=piece)

    def store_tile_meta(self, kv_tile: Any, i: Any, pages: jax.Array) -> None:
        """Store the metadata of the i-th tile, which is tile number `kv_tile` of the CTA."""
        meta = self.tile_meta(kv_tile)
        start, present = self.first_position(i), present_pages(pages)
        end = start + self.static.tile_keys
        full = (end <= self.first + 1) & (present == self.all_pages)
        if self.window is not None:
            full &= (start > self.end - 1 - self.window) | (end <= self.sink_tokens)
        meta[0], meta[1] = jnp.where(full, FULL_TILE, present), start

    def signal_tile_meta(self, kv_tile: Any) -> None:
        """Arrive at the barrier of the metadata of tile number `kv_tile`, if it has one."""
        if self.scratch.tile_meta_full is not None:
            plgpu.barrier_arrive(self.scratch.tile_meta_full.at[ring_slot(kv_tile, self.scratch.tile_meta.shape[0])])

    def await_tile_meta(self, kv_tile: Any) -> None:
        """Wait for the metadata of tile number `kv_tile`."""
        plgpu.barrier_wait(self.scratch.tile_meta_full.at[ring_slot(kv_tile, self.scratch.tile_meta.shape[0])])

    @property
    def all_pages(self) -> int:
        return (1 << self.static.copies) - 1

    def is_whole(self, i: Any, pages: jax.Array) -> Any:
        """Return whether every token of the i-th tile is present, and visible to the first query of the block or to a
        later query of the sequence.
        """
        start = self.first_position(i)
        end = start + self.static.tile_keys
        whole = (present_pages(pages) == self.all_pages) & (end <= self.block.end_key)
        if self.window is not None:
            whole &= (start > self.first - self.window) | (end <= self.sink_tokens)
        return whole

    def live_mask(self, i: Any, pages: jax.Array, token: jax.Array) -> jax.Array:
        """Return which tokens of the i-th tile are present, and visible to the first query of the block or to a later
        query of the sequence, bool [n].

        Args:
          token: indices of the tokens in the tile, int32 [n].
        """
        position = self.first_position(i) + token
        present = lax.shift_right_logical(
            TOKENS.filled(present_pages(pages), token.shape[0]), lax.div(token, self.part_tokens)
        )
        live = (position < self.block.end_key) & ((present & 1) == 1)
        if self.window is not None:
            live &= (position < self.sink_tokens) | (position > self.first - self.window)
        return live

    def token_scales(self, i: Any, pages: jax.Array) -> list[jax.Array]:
        """Load the scales of keys and values of the i-th tile, [tile_keys] each.

        The scale of the value of a masked token is 1. The list is empty if scales are not per token.
        """
        groups, page_size = self.loader.scale_groups, self.loader.page_size
        if not groups:
            return []
        token = register_tiles.row_iota(self.static.tile_keys, BY_64)
        row, exists = self.look_up(self.first_position(i) + token, TOKENS)
        within = lax.rem(self.first_position(i) + token, jnp.int32(page_size))
        index = jnp.where(exists, row, 0) * groups + lax.div(within, jnp.int32(page_size // groups))
        k_scale, v_scale = (TOKENS.take(scale, index) for scale in (self.x.k_scale, self.x.v_scale))
        return [k_scale, jnp.where(self.live_mask(i, pages, token), v_scale, 1.0)]

    # Consumer

    def attend(self, consumer: BlockConsumer, kv_tile: Any, result: Results) -> None:
        staged, scales = self.scratch.staged, None
        if staged is not None:
            scales = CacheScales(self.loader.scales, self.x.k_scale, self.x.v_scale, staged.token_scales)
        number = consumer.number
        if self.static.dequantizes:  # saves registers: the compiler does not move work out of the loop over work tiles
            number += basics.opaque_zero()
        query = self.rows.queries(number)
        position, row = self.position(query), self.rows.output_row(query, number)
        if self.work.split is not None:  # saves registers: both are computed once, before the loop over tiles
            position, row = lax.optimization_barrier((position, row))
        transform = ScoreTransform(functools.partial(self.limits, position, kv_tile))
        if scales is not None:
            transform = scales.transform(transform, self.kv_head, kv_tile)
        if self.scratch.tile_meta_full is not None:
            transform = transform._replace(await_tile=lambda i: self.await_tile_meta(kv_tile + i))
        state = consumer.attend(kv_tile, self.kv_tiles, transform, self.rows.any_of(number))
        scale = None if scales is None else scales.output_scale(self.kv_head)
        sinks = self.rows.sinks(self.x.sinks, row)
        consumer.store(result, row, state, RowOptions(sinks, self.work.is_whole, scale))

    def limits(self, position: jax.Array, kv_tile: Any, i: Any) -> tuple[Any, Callable[[], Limits]]:
        """Return the limits of the i-th tile for query rows at these positions. See `ScoreTransform`."""
        meta = self.tile_meta(kv_tile + i)
        present, start = meta[0], meta[1]

        filled = self.rows.filled

        def limits() -> Limits:
            low, sink = filled(jnp.int32(0)), None
            if self.window is not None:
                low = jnp.maximum(jnp.maximum(position, 0) - self.window + 1, 0) - start
                sink = filled(jnp.minimum(self.sink_tokens, start + self.static.tile_keys) - start)
            return Limits(low, position + 1 - start, sink, filled(present), self.part_tokens)

        return present == FULL_TILE, limits
