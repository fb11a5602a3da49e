"""`paged_prefill`: a front end of the prefill kernel (`flash.pipeline`) for keys and values in pages.

Heads of a group share blocks of queries (`BlockRows`). A tile of keys is a range of positions: several pages,
or part of one. Tiles with a visible key are walked like the pages of decode, those of sink tokens first. Pages that no
row of a block sees, or that are absent, are not copied: their tokens are masked and their values zeroed. With each tile
the producer publishes where it begins, which of its pages are present, and whether all rows see all of it, which saves
the consumers registers. Consumers that wait for products, and not for keys, have a barrier that tells them
(`tile_meta_full`). Where the cache has 8 bits, tiles go to the rings by way of `mosaic_dequantize`.
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
    Producer,
    Results,
    Rings,
    RowOptions,
    ScoreTransform,
    shared_heads,
)
from pallas_attn.mosaic.prefill.schedule import (
    Blocking,
    FlashWorkTile,
    QueryBlock,
    SequenceLengths,
    list_blocks,
    ring_slot,
)
from pallas_attn.mosaic.prefill.split import KvSplits
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles, unsupported
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.masks import Limits
from pallas_attn.mosaic.primitives.register_tiles import BY_64
from pallas_attn.mosaic.primitives.row_io import THREADS, RowLayout
from pallas_attn.mosaic.primitives.tma import (
    LANES,
    copy_pages,
    lane_iota,
    present_pages,
    zero_rows_past_end,
)
from pallas_attn.ops.paged_prefill import config
from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.ops.paged_prefill.mosaic_dequantize import CacheScales, Dequantizer, StagedQuant
from pallas_attn.portable.visibility import PageWalk
from pallas_attn.types import HeadWindow, ScaleLayout

FULL_TILE = -1
"""Published in place of the present pages of a tile: all of them are, and all rows of the block see all tokens."""


class PrefillInputs(NamedTuple):
    """Operands of the kernel: arrays, or in the kernel references to them.

    Attributes:
      q: terms of the queries, whose sum they are: [T, Hq, D] each, of `zero_rows_past_end`.
      k, v: [N·Hkv, ps, D], or with several tokens in a row (`dequantise.tokens_per_smem_row`).
      k_scale, v_scale: [Hkv], [Hkv, D] (k_scale is None then, being part of q), [N·Hkv·g] or None.
      blocks, counts: of the `WorkList`.
      window: a `HeadWindow` or None.
      sinks: [Hq] or None.
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
    check_supported(call)
    settings = config.mosaic_config(config_key(call))
    return attend(call, hopper.flash_attention, settings, hopper.QUERIES, hopper.ROWS)


def config_key(call: PagedPrefillCall) -> config.PagedPrefillKey:
    """Facts that the sizes of the kernel depend on."""
    scales = dequantize.scale_layout(call.kv)
    return config.PagedPrefillKey(
        call.head_dim,
        call.page_size,
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
    """Output and LSE, by the kernel of an architecture with these sizes.

    Args:
      tile_rows, rows: see `FlashStatic`.
    """
    kv = call.kv
    terms, query_scale = dequantize.plain_query_terms(call.q[None], kv)
    loader = PagedLoader.of(call, settings, tile_rows, rows, terms=len(terms), score_scale=call.scale / query_scale)
    blocking = Blocking(
        call.num_tokens, loader.static.block_rows, loader.static.tile_keys, call.causal, loader.static.block_heads
    )
    head_window = call.window if isinstance(call.window, HeadWindow) else None
    lengths = SequenceLengths(call.cu_q_lens, kv_lens=call.kv_lens, window=head_window)
    most_tiles = loader.static.most_tiles(call.block_tables.shape[-1] * call.page_size, loader.window)
    splits = KvSplits.of(
        heads=loader.num_heads,
        num_blocks=blocking.num_blocks(lengths),
        most_tiles=most_tiles,
        rows=call.num_tokens * loader.num_q_heads,
        rows_of_a_tile=loader.static.rows_of_a_tile,
    )
    work = list_blocks(blocking, lengths, splits, loader.l2_head_group)
    pool_rows = call.page_size // loader.tokens_per_smem_row, call.head_dim * loader.tokens_per_smem_row
    inputs = PrefillInputs(
        q=tuple(zero_rows_past_end(term[0], tile_rows) for term in terms),
        k=kv.k.reshape(-1, *pool_rows),
        v=kv.values[0].reshape(-1, *pool_rows),
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


def check_supported(call: PagedPrefillCall) -> None:
    """Raises NotImplementedError for what the kernel takes on no architecture."""
    if call.draft_mask is not None:
        raise NotImplementedError("takes no draft mask")
    unsupported.require_apart(call.kv)
    unsupported.require_dtypes(call.q, call.kv.k)
    unsupported.require_head_dim(call.head_dim)
    unsupported.require_page_size(call.page_size)
    unsupported.require_soft_cap(call.soft_cap)


def _flat(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Scales, those of tokens along one axis."""
    return scale.reshape(-1) if scale is not None and scale.ndim == 3 else scale


class PrefillScratch(NamedTuple):
    """Shared memory of a program, beside the rings.

    Attributes:
      tile_meta: int32 [slots, 2], for each tile a bit for each present page, or `FULL_TILE`; and its position. There is
        a slot more than there are stages, or two where the keys of a tile may be multiplied, and make room for others,
        while a consumer is at the tile before.
      staged: tiles as cached, where the cache has 8 bits; else None.
      tile_meta_full: a barrier for each slot of `tile_meta`; None where consumers wait for the keys themselves.
    """

    tile_meta: Any
    staged: StagedQuant | None
    tile_meta_full: Any


@dataclasses.dataclass(frozen=True)
class PagedLoader:
    """The `OperandLoader` of keys and values in pages.

    Attributes:
      num_tokens: T.
      group: query heads of a KV head.
      causal: whether a query sees keys up to its own position, instead of all keys of its sequence.
      window: window of all heads, if there is no `HeadWindow`.
      cache_dtype: dtype of keys and values.
      tokens_per_smem_row: tokens beside one another in a row of the pools.
    """

    static: FlashStatic
    num_tokens: int
    group: int
    num_kv_heads: int
    page_size: int
    causal: bool
    window: int | None
    cache_dtype: Any
    scales: ScaleLayout
    tokens_per_smem_row: int

    kernel_name = "paged_prefill"
    compiler_params = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)

    @staticmethod
    def of(
        call: PagedPrefillCall,
        settings: FlashConfig,
        tile_rows: int,
        rows: RowLayout,
        *,
        terms: int,
        score_scale: float,
    ) -> PagedLoader:
        """Makes the front end of a call.

        Args:
          tile_rows, rows: see `FlashStatic`.
          terms: 16-bit numbers whose sum a query is.
          score_scale: multiplies q kᵀ.
        """
        kv, head_dim, page_size = call.kv, call.head_dim, call.page_size
        if settings.tile_keys % page_size and page_size % settings.tile_keys:
            got = f"{settings.tile_keys} keys of pages of {page_size}"
            raise NotImplementedError(f"takes tiles of whole pages, or of a part of one, got {got}")
        scales = dequantize.scale_layout(kv)
        static = FlashStatic(
            head_dim,
            head_dim,
            settings.tile_keys,
            settings.stages,
            settings.consumers,
            copies=max(1, settings.tile_keys // page_size),
            score_scale=score_scale,
            tile_rows=tile_rows,
            rows=rows,
            soft_cap=call.soft_cap,
            query_parts=terms,
            block_heads=shared_heads(call.group, tile_rows),
            dequantizes=scales is not None,
        )
        return PagedLoader(
            static,
            num_tokens=call.num_tokens,
            group=call.group,
            num_kv_heads=call.num_kv_heads,
            page_size=page_size,
            causal=call.causal,
            window=call.window if isinstance(call.window, int) else None,
            cache_dtype=kv.k.dtype,
            scales=scales,
            tokens_per_smem_row=dequantize.tokens_per_smem_row(kv.k.dtype, kv.k.shape[-1]),
        )

    @property
    def num_q_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def num_heads(self) -> int:
        """Groups of heads that share a block."""
        return self.num_q_heads // self.static.block_heads

    @property
    def l2_head_group(self) -> int:
        """Groups of heads of one KV head."""
        return self.group // self.static.block_heads

    def rows(self, work: FlashWorkTile) -> BlockRows:
        """Rows of the block of a work tile."""
        return BlockRows(self.static, work, self.num_tokens, self.num_q_heads)

    @property
    def scale_groups(self) -> int:
        """Groups of tokens in a page that have a scale each; 0 if scales do not come with the tokens."""
        return self.scales if isinstance(self.scales, int) else 0

    def scratch_types(self, *, orders_tensor_core: bool = False) -> PrefillScratch:
        slots = self.static.stages + (2 if orders_tensor_core else 1)
        return PrefillScratch(
            plgpu.SMEM((slots, 2), jnp.int32),
            StagedQuant.types(
                self.static, self.cache_dtype, self.tokens_per_smem_row, slots if self.scale_groups else 0
            )
            if self.static.dequantizes
            else None,
            plgpu.Barrier(num_barriers=slots, orders_tensor_core=True) if orders_tensor_core else None,
        )

    def tile(self, x: PrefillInputs, scratch: PrefillScratch, work: FlashWorkTile) -> PagedTile:
        return PagedTile.of(self, x, scratch, work)


class PagedTile(NamedTuple):
    """The `OperandTile` of keys and values in pages: what the rows of a block see of one KV head.

    Attributes:
      position_offset: position of a query minus its row, if causal.
      first, end: positions of the block's first query, or 0, and of one past its last. Without causality all queries
        are taken to be at the sequence's last position, which sees all keys.
      window, sink_tokens: of the head; a window of None hides nothing.
      walk: the tiles with a key that some row sees, in place of pages.
      first_tile, kv_tiles: this work tile's part of the walk.
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
        """Position of the first token of the i-th tile."""
        return self.walk.entry(self.first_tile + i) * self.static.tile_keys

    def tile_meta(self, kv_tile: Any) -> Ref:
        """Position and pages that are published of tile number `kv_tile` of the rings."""
        return self.scratch.tile_meta.at[ring_slot(kv_tile, self.scratch.tile_meta.shape[0])]

    @property
    def rows(self) -> BlockRows:
        """Rows of the block."""
        return self.loader.rows(self.work)

    def position(self, query: jax.Array) -> jax.Array:
        """[tile_rows]: the position of each query."""
        return query + self.position_offset if self.loader.causal else self.rows.filled(self.block.end_key - 1)

    # Producer

    def load(self, producer: Producer, again: Any, kv_tile: Any) -> None:
        load_later_queries = producer.load_queries(again, functools.partial(self.copy_queries, producer.rings))
        if self.scratch.staged is None:
            self.load_tiles(producer, kv_tile, load_later_queries)
        else:
            dequantizer = Dequantizer(self.static, producer.rings, self.scratch.staged)
            self.dequantize_tiles(dequantizer, kv_tile, load_later_queries)

    def copy_queries(self, rings: Rings, consumer: int, full: Ref) -> None:
        terms = len(self.x.q)
        for i, term in enumerate(self.x.q):
            self.rows.copy(term, consumer, rings.q.at[consumer * terms + i], full)

    def load_tiles(self, producer: Producer, kv_tile: Any, load_later_queries: Callable[[Any], None]) -> None:
        """Copies the keys and values to the rings, from tile number `kv_tile` on."""

        def keys(i: Any, pages: jax.Array) -> None:
            def copy(slot: Ref, full: Ref) -> None:
                self.store_tile_meta(kv_tile + i, i, pages)
                self.signal_tile_meta(kv_tile + i)
                self.copy_pages(self.x.k, i, pages, slot, full, self.tokens_from(i))

            producer.load_keys(kv_tile + i, copy)

        def values(i: Any, pages: jax.Array) -> None:
            producer.load_values(
                kv_tile + i,
                functools.partial(self.copy_pages, self.x.v, i, pages, needed=self.tokens_from(i)),
                whole=self.is_whole(i, pages),
                live_mask=functools.partial(self.live_mask, i, pages),
            )

        def load(i: Any, pages: jax.Array) -> jax.Array:
            following = self.locate(i + 1)
            pl.when(i + 1 < self.kv_tiles)(lambda: keys(i + 1, following))
            pl.when(i >= 0)(lambda: values(i, pages))
            load_later_queries(i)
            return following

        lax.fori_loop(-1, self.kv_tiles, load, LANES.filled(jnp.int32(-1), THREADS))

    def dequantize_tiles(
        self, dequantizer: Dequantizer, kv_tile: Any, load_later_queries: Callable[[Any], None]
    ) -> None:
        """Copies keys and values as cached, and brings them to the rings as float16, from tile number `kv_tile` on."""
        x, staged = self.x, dequantizer.staged

        def store_meta(i: Any, pages: jax.Array, scales: list[jax.Array]) -> None:
            self.store_tile_meta(kv_tile + i, i, pages)
            if scales:
                dequantizer.store_token_scales(kv_tile + i, *scales)
            self.signal_tile_meta(kv_tile + i)

        def load(i: Any, located: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            (pages, following), after = located, self.locate(i + 2)

            @pl.when(i + 1 < self.kv_tiles)
            def _keys() -> None:
                scales = self.token_scales(i + 1, following)
                dequantizer.dequantize_keys(kv_tile + i + 1, functools.partial(store_meta, i + 1, following, scales))

            pl.when(i + 2 < self.kv_tiles)(lambda: self.copy_pages(x.k, i + 2, after, staged.k, staged.full.at[0]))

            @pl.when(i >= 0)
            def _values() -> None:
                live_mask = functools.partial(self.live_mask, i, pages)
                dequantizer.dequantize_values(kv_tile + i, self.is_whole(i, pages), live_mask)

            in_middle = (i >= 0) & (i + 1 < self.kv_tiles)
            pl.when(in_middle)(lambda: self.copy_pages(x.v, i + 1, following, staged.v, staged.full.at[1]))
            load_later_queries(i)
            return following, after

        first = self.locate(jnp.int32(0))
        for i, (pool, slot) in enumerate(((x.k, staged.k), (x.v, staged.v))):
            self.copy_pages(pool, jnp.int32(0), first, slot, staged.full.at[i])
        lax.fori_loop(-1, self.kv_tiles, load, (first, first))

    # Pages of a tile

    @property
    def part_tokens(self) -> int:
        """Tokens that one copy brings: of a page, or of a part of one as long as a tile."""
        return min(self.loader.page_size, self.static.tile_keys)

    def locate(self, i: Any) -> jax.Array:
        """[128]: row of the pool of the page of the i-th tile that a lane of each warp has, in layout `LANES`; -1 where
        no row of the block sees a token of it, and in lanes that have none.
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
        """Rows of the pool of the pages of positions [n], and whether they are there."""
        tables, pool_rows, loader = self.x.block_tables, self.x.k.shape[0], self.loader
        entry = jnp.minimum(lax.div(position, jnp.int32(loader.page_size)), tables.shape[-1] - 1)
        if len(tables.shape) == 3:
            of_head = self.block.sequence * loader.num_kv_heads + self.kv_head
            row = layout.take(tables, of_head * tables.shape[-1] + entry)
            return row, basics.in_pool(row, pool_rows)
        page = layout.take(tables, self.block.sequence * tables.shape[-1] + entry)
        return page * loader.num_kv_heads + self.kv_head, basics.in_pool(page, pool_rows // loader.num_kv_heads)

    def tokens_from(self, i: Any) -> Any:
        """Number of the sequence's tokens from the first one of the i-th tile on."""
        return self.block.end_key - self.first_position(i)

    def copy_pages(self, pool: Ref, i: Any, pages: jax.Array, slot: Ref, full: Ref, needed: Any = None) -> None:
        """Starts the copies of the i-th tile, or of its `needed` first tokens."""
        first = jnp.int32(0)
        if self.loader.page_size > self.part_tokens:
            first = lax.div(lax.rem(self.first_position(i), self.loader.page_size), self.loader.tokens_per_smem_row)
            first = pl.multiple_of(first, self.part_tokens // self.loader.tokens_per_smem_row)
        copy_pages(pool, pages, first, slot, full, self.static.copies, needed)

    def store_tile_meta(self, kv_tile: Any, i: Any, pages: jax.Array) -> None:
        """Publishes the present pages and the position of the i-th tile, number `kv_tile` of the rings."""
        meta = self.tile_meta(kv_tile)
        start, present = self.first_position(i), present_pages(pages)
        end = start + self.static.tile_keys
        full = (end <= self.first + 1) & (present == self.all_pages)
        if self.window is not None:
            full &= (start > self.end - 1 - self.window) | (end <= self.sink_tokens)
        meta[0], meta[1] = jnp.where(full, FULL_TILE, present), start

    def signal_tile_meta(self, kv_tile: Any) -> None:
        """Tells consumers that all that is published of tile number `kv_tile` is there."""
        if self.scratch.tile_meta_full is not None:
            plgpu.barrier_arrive(self.scratch.tile_meta_full.at[ring_slot(kv_tile, self.scratch.tile_meta.shape[0])])

    def await_tile_meta(self, kv_tile: Any) -> None:
        """Waits for what is published of tile number `kv_tile` of the rings."""
        plgpu.barrier_wait(self.scratch.tile_meta_full.at[ring_slot(kv_tile, self.scratch.tile_meta.shape[0])])

    @property
    def all_pages(self) -> int:
        return (1 << self.static.copies) - 1

    def is_whole(self, i: Any, pages: jax.Array) -> Any:
        """True if every token of the i-th tile is seen by some row, of this block or another."""
        start = self.first_position(i)
        end = start + self.static.tile_keys
        whole = (present_pages(pages) == self.all_pages) & (end <= self.block.end_key)
        if self.window is not None:
            whole &= (start > self.first - self.window) | (end <= self.sink_tokens)
        return whole

    def live_mask(self, i: Any, pages: jax.Array, token: jax.Array) -> jax.Array:
        """Mask [n] of the tokens of the i-th tile that some row sees, of this block or another."""
        position = self.first_position(i) + token
        present = lax.shift_right_logical(
            TOKENS.filled(present_pages(pages), token.shape[0]), lax.div(token, self.part_tokens)
        )
        live = (position < self.block.end_key) & ((present & 1) == 1)
        if self.window is not None:
            live &= (position < self.sink_tokens) | (position > self.first - self.window)
        return live

    def token_scales(self, i: Any, pages: jax.Array) -> list[jax.Array]:
        """Scales of the keys and of the values of each token of the i-th tile, 1 for masked values; an empty list if
        scales do not come with the tokens.
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
        if self.static.dequantizes:  # whose consumers have no register for the part of this that all work tiles share
            number += basics.opaque_zero()
        query = self.rows.queries(number)
        position, row = self.position(query), self.rows.output_row(query, number)
        if self.work.split is not None:  # Before keys are walked: they take fewer registers than what they are made of.
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
        """Limits of the i-th tile, number kv_tile + i of the rings, for rows at these positions (`ScoreTransform`)."""
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
