"""`paged_prefill` on Hopper; see `sm90.flash.kernel` for how a program works.

A block has some neighbouring queries of a head, then the same ones of others of its group, each head's brought by
copies of its own: so blocks are nearly full where queries are few, and keys are read once for all heads in them. A tile
of keys is a stretch of positions, in several pages or in a part of one. Tiles with a visible key are walked like the
pages of decode, those of sink tokens first. Pages that no row of a block sees, or that are absent, are not copied:
their tokens are masked, and their values cleared. What `mosaic_widening` says of caches of 8 bits is where tiles are
not copied to the rings themselves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.sm90 import dequantise, tiles, wgmma
from pallas_attn.mosaic.sm90.flash import kernel
from pallas_attn.mosaic.sm90.flash.config import ALIGNMENT, QUERIES
from pallas_attn.mosaic.sm90.flash.kernel import ROWS, Consumer, Memory, Producer, Static
from pallas_attn.mosaic.sm90.flash.schedule import Lengths, Listing, list_blocks
from pallas_attn.mosaic.sm90.flash.split import Cuts
from pallas_attn.mosaic.sm90.flash.work import Block, Piece, Queue, Work, aligned, padded
from pallas_attn.ops.paged_prefill import config
from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.ops.paged_prefill.config import Packing
from pallas_attn.ops.paged_prefill.mosaic_inputs import Inputs, Paged
from pallas_attn.ops.paged_prefill.mosaic_widening import Narrow, Scales, Widener
from pallas_attn.portable.visibility import PageWalk
from pallas_attn.types import HeadWindow, PagedKV


def paged_prefill(call: PagedPrefillCall) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"]]:
    q, kv, kv_lens, block_tables = call.q, call.kv, call.kv_lens, call.block_tables
    window, sinks, soft_cap, out_dtype = call.window, call.sinks, call.soft_cap, call.output_dtype
    _refuse(q, kv, soft_cap)
    (num_tokens, num_heads, head_dim), (num_kv_heads, page_size) = q.shape, kv.k.shape[1:3]
    if not num_tokens:
        return call.without_tokens()
    scales, beside = dequantise.scale_layout(kv), dequantise.tokens_per_smem_row(kv.k.dtype, head_dim)
    terms, query_scale = dequantise.plain_query_terms(q[None], kv)
    group = call.group
    static, packing = _static(kv, len(terms), call.scale / query_scale, soft_cap, group, num_tokens // kv_lens.shape[0])
    heads, block_queries = packing.heads, static.queries // packing.places
    apart = packing.places // static.query_copies
    int_window = window if isinstance(window, int) else None
    paged = Paged(num_tokens, block_queries, heads, apart, group, num_kv_heads, page_size, int_window, scales, beside)
    listing = Listing(num_tokens, block_queries, static.tile_keys, causal=True)
    head_window = window if isinstance(window, HeadWindow) else None
    lengths = Lengths(call.cu_q_lens, kv_lens=kv_lens, window=head_window)
    limit = _limit(static, block_tables.shape[-1] * page_size, window)
    cuts = Cuts.of(heads=num_heads // heads, blocks=listing.num_blocks(lengths), limit=limit)
    listed = list_blocks(listing, lengths, cuts)
    inputs = Inputs(
        q=tuple(padded(term[0], block_queries) for term in terms),
        k=kv.k.reshape(-1, page_size // beside, head_dim * beside),
        v=kv.v.reshape(-1, page_size // beside, head_dim * beside),
        k_scale=None if scales == "channel" else _flat(kv.k_scale),
        v_scale=_flat(kv.v_scale),
        block_tables=block_tables,
        blocks=listed.blocks,
        count=listed.count,
        window=head_window,
        sinks=sinks if cuts.most == 1 else None,
    )
    pieces = listed.blocks.shape[0] * num_heads // heads * cuts.most
    programs = min(pieces, basics.multiprocessors())
    taken = Queue.untouched(listed.zero, programs, pieces)
    rows = cuts.most * num_tokens * num_heads
    out, lse = plgpu.kernel(
        functools.partial(_kernel, static, paged, programs),
        out_type=(
            jax.ShapeDtypeStruct((rows, head_dim), out_dtype if cuts.most == 1 else jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=static.warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            *Memory.types(static, terms[0].dtype),
            *Queue.types(taken),
            plgpu.SMEM((static.stages + 1, 2), jnp.int32),
            Narrow.types(static, kv.k.dtype, beside, token_scales=paged.groups > 0) if static.widens else None,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_prefill",
    )(basics.materialize(inputs), taken)
    return cuts.merged(out, lse, listed.count, (num_tokens, num_heads), sinks, out_dtype)


def _refuse(q: Float[Array, "T Hq D"], kv: PagedKV, soft_cap: float | None) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    basics.require_capability((9, 0))
    refusals.require_dtypes(q, kv.k)
    refusals.require_head_dim(q.shape[2])
    refusals.require_page_size(kv.page_size)
    refusals.require_soft_cap(soft_cap)


def _static(
    kv: PagedKV, terms: int, score_scale: float, soft_cap: float | None, group: int, queries: int
) -> tuple[Static, Packing]:
    """What a kernel is compiled for, and how heads of a group share a block, for so many queries a sequence."""
    page_size, head_dim = kv.k.shape[2:]
    scales = dequantise.scale_layout(kv)
    key = config.MosaicKey(
        head_dim,
        page_size,
        kv.k.dtype.itemsize,
        token_scales=isinstance(scales, int),
        terms=terms,
        capped=soft_cap is not None,
    )
    settings = config.mosaic_config(key)
    if settings.tile_keys % page_size and page_size % settings.tile_keys:
        raise NotImplementedError(
            f"takes tiles of whole pages, or of a part of one, got {settings.tile_keys} keys of pages of {page_size}"
        )
    packing = config.packing(group, queries, QUERIES * settings.consumers)
    static = Static(
        head_dim,
        head_dim,
        settings.tile_keys,
        settings.stages,
        settings.consumers,
        copies=max(1, settings.tile_keys // page_size),
        score_scale=score_scale,
        soft_cap=soft_cap,
        query_terms=terms,
        query_copies=packing.places // math.gcd(packing.places, settings.consumers),
        widens=scales is not None,
    )
    return static, packing


def _flat(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Scales, those of tokens along one axis."""
    return scale.reshape(-1) if scale is not None and scale.ndim == 3 else scale


def _limit(static: Static, most_keys: int, window: int | HeadWindow | None) -> int:
    """Of the tiles that a block sees, of a sequence which can have so many keys."""
    if isinstance(window, int):
        most_keys = min(most_keys, window + static.queries)
    return -(-most_keys // static.tile_keys)


# --- the kernel

SEEN = -1
"""In place of the pages of a tile that are there: all of its tokens are, and all rows see them."""


def _kernel(
    static: Static, paged: Paged, programs: int, x: Inputs, taken: Ref | None, out: Ref, lse: Ref, *scratch: Ref
) -> None:
    *memory, told, landed, notes, narrow = scratch
    warpgroup, mem, num_packs = lax.axis_index("warpgroup"), Memory(*memory), x.q[0].shape[1] // paged.heads

    def work() -> Work:
        queue = None if taken is None else Queue(programs, taken, told, landed)
        return Work.of(x.blocks, x.count, num_packs, paged.group // paged.heads, queue)

    def produce() -> None:
        plgpu.set_max_registers(static.registers[1], action="decrease")
        producer = Producer(static, mem)

        def copy(again: Any, tile: Any, piece: Piece) -> Any:
            span = Span.of(static, paged, x, piece)
            later_queries = producer.load_queries(again, lambda: span.copy_queries(mem))
            if narrow is None:
                span.copy(producer, notes, tile, later_queries)
            else:
                span.widen(Widener(static, mem, narrow), notes, tile, later_queries)
            return span.tiles

        pieces, tiles = work().produce(copy)
        producer.drain(tiles, pieces > 0)

    def consume() -> None:
        plgpu.set_max_registers(static.registers[0], action="increase")
        consumer = Consumer(static, mem, warpgroup, x.q[0].dtype)
        scales = Scales(paged.scales, x.k_scale, x.v_scale, None if narrow is None else narrow.factors)

        def attend(_: Any, tile: Any, piece: Piece) -> Any:
            span = Span.of(static, paged, x, piece)
            query = span.rows(warpgroup)
            position, place = query + span.shift, span.place(query, warpgroup)
            if piece.part is not None:  # Before keys are walked: they take fewer registers than what they are made of.
                position, place = lax.optimization_barrier((position, place))
            mask = functools.partial(span.mask, position, notes, tile)
            view = scales.view(mask, span.kv_head, tile)
            o, m, l = consumer.attend(tile, span.tiles, view)  # noqa: E741
            kernel.write_rows(out, lse, place, (scales.applied(o, span.kv_head), m, l), span.sinks(place))
            return span.tiles

        consumer.start_round()
        work().consume(attend)
        consumer.end_round()

    lax.cond(warpgroup < static.consumers, consume, produce)


class Span(NamedTuple):
    """Keys that a block of rows of one head sees.

    Attributes:
      shift: what makes a query's token its position.
      first, end: positions of the block's first query, or 0, and of one past its last.
      window, sink_tokens: of the head; a window of None hides nothing.
      walk: tiles of positions with a key that some row sees; numbers as of pages.
      first_tile: the first of them, or of the part that a piece of work is.
      tiles: how many there are, or 1.
    """

    static: Static
    paged: Paged
    x: Inputs
    piece: Piece
    kv_head: Any
    shift: Any
    first: Any
    end: Any
    window: Any
    sink_tokens: Any
    walk: PageWalk
    first_tile: Any
    tiles: Any

    @staticmethod
    def of(static: Static, paged: Paged, x: Inputs, piece: Piece) -> Span:
        block, kv_head = piece.block, lax.div(piece.head * paged.heads, paged.group)
        shift = block.end_key - block.end_row
        first = jnp.maximum(jnp.maximum(block.start, block.first_row) + shift, 0)
        end = jnp.maximum(jnp.minimum(block.start + paged.block_queries, block.end_row) + shift, 0)
        window, sink_tokens = paged.window, jnp.int32(0)
        if x.window is not None:
            window, sink_tokens = x.window.window[kv_head], x.window.sink_tokens[kv_head]
        oldest = jnp.int32(0) if window is None else jnp.maximum(first - window + 1, 0)
        first_tile = lax.div(oldest, jnp.int32(static.tile_keys))
        sink_tiles = jnp.minimum(pl.cdiv(jnp.minimum(sink_tokens, end), static.tile_keys), first_tile)
        tiles = jnp.maximum(sink_tiles + pl.cdiv(end, static.tile_keys) - first_tile, 1)
        walk = PageWalk(sink_tiles, first_tile, tiles)
        share = piece.share(tiles)
        return Span(static, paged, x, piece, kv_head, shift, first, end, window, sink_tokens, walk, *share)

    @property
    def block(self) -> Block:
        return self.piece.block

    def base(self, i: Any) -> Any:
        """Position of the first token of the i-th tile."""
        return self.walk.entry(self.first_tile + i) * self.static.tile_keys

    # Copies

    def copy_queries(self, mem: Memory) -> None:
        for i, (term, q), copy in itertools.product(
            range(self.static.consumers), enumerate(self.x.q), range(self.static.query_copies)
        ):
            place = i % self.paged.apart * self.static.query_copies + copy
            head = self.first_head + min(place, self.paged.heads - 1)
            source = q.at[pl.ds(pl.multiple_of(self.first_query(i), ALIGNMENT), self.consumer_queries), head]
            slot = mem.q.at[i * len(self.x.q) + term, pl.ds(copy * self.consumer_queries, self.consumer_queries)]
            plgpu.copy_gmem_to_smem(source, slot, mem.q_landed)

    def copy(self, producer: Producer, notes: Ref, tile: Any, later_queries: Callable[[Any], None]) -> None:
        """Copies the block's keys and values from number `tile` of the rings on."""

        def keys(i: Any, pages: list[Any]) -> None:
            def copy(slot: Ref, landed: Ref) -> None:
                self.note(notes, tile + i, i, pages)
                self.copy_pages(self.x.k, i, pages, slot, landed)

            producer.load_keys(tile + i, copy)

        def values(i: Any, pages: list[Any]) -> None:
            producer.load_values(
                tile + i,
                functools.partial(self.copy_pages, self.x.v, i, pages),
                whole=self.is_whole(i, pages),
                alive=functools.partial(self.alive, i, pages),
            )

        def work(i: Any, found: list[Any]) -> list[Any]:
            following = self.locate(i + 1)
            pl.when(i + 1 < self.tiles)(lambda: keys(i + 1, following))
            pl.when(i >= 0)(lambda: values(i, found))
            later_queries(i)
            return following

        lax.fori_loop(-1, self.tiles, work, [jnp.int32(-1)] * self.static.copies)

    def widen(self, widener: Widener, notes: Ref, tile: Any, later_queries: Callable[[Any], None]) -> None:
        """Copies the block's keys and values, and brings them to the rings, from number `tile` of them on."""
        x, narrow = self.x, widener.narrow

        def prepare(i: Any, pages: list[Any], scales: list[jax.Array]) -> None:
            self.note(notes, tile + i, i, pages)
            if scales:
                widener.write_factors(tile + i, *scales)

        def work(i: Any, found: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            (these, following), after = found, self.locate(i + 2)

            @pl.when(i + 1 < self.tiles)
            def _keys() -> None:
                scales = self.token_scales(i + 1, following)
                widener.widen_keys(tile + i + 1, functools.partial(prepare, i + 1, following, scales))

            pl.when(i + 2 < self.tiles)(lambda: self.copy_pages(x.k, i + 2, after, narrow.k, narrow.landed.at[0]))

            @pl.when(i >= 0)
            def _values() -> None:
                alive = functools.partial(self.alive, i, these)
                widener.widen_values(tile + i, self.is_whole(i, these), alive)

            first_or_more = (i >= 0) & (i + 1 < self.tiles)
            pl.when(first_or_more)(lambda: self.copy_pages(x.v, i + 1, following, narrow.v, narrow.landed.at[1]))
            later_queries(i)
            return following, after

        first = self.locate(jnp.int32(0))
        for i, (pool, slot) in enumerate(((x.k, narrow.k), (x.v, narrow.v))):
            self.copy_pages(pool, jnp.int32(0), first, slot, narrow.landed.at[i])
        lax.fori_loop(-1, self.tiles, work, ([jnp.int32(-1)] * self.static.copies, first))

    def note(self, notes: Ref, tile: Any, i: Any, pages: list[Any]) -> None:
        """Leaves to consumers which pages of the i-th tile, number `tile` of the rings, are there, or `SEEN` where all
        rows of the block see all of it; and the position of its first token.
        """
        note = notes.at[kernel.turn_of(tile, self.static.stages + 1)]
        base, there = self.base(i), self.there(pages)
        end = base + self.static.tile_keys
        seen = (end <= self.first + 1) & (there == self.all_there)
        if self.window is not None:
            seen &= (base > self.end - 1 - self.window) | (end <= self.sink_tokens)
        note[0], note[1] = jnp.where(seen, SEEN, there), base

    def token_scales(self, i: Any, pages: list[Any]) -> list[jax.Array]:
        """Those of keys and of values of each token of the i-th tile; none if they do not come with the tokens. Of
        values that nobody sees it is 1.
        """
        groups, page_size = self.paged.groups, self.paged.page_size
        if not groups:
            return []
        token = tiles.token_iota(self.static.tile_keys)
        row = ROWS.filled(jnp.maximum(pages[0], 0), self.static.tile_keys)
        for j, page in enumerate(pages[1:], start=1):
            row = jnp.where(token >= j * self.part_tokens, jnp.maximum(page, 0), row)
        within = lax.rem(self.base(i) + token, jnp.int32(page_size))
        index = row * groups + lax.div(within, jnp.int32(page_size // groups))
        k_scale, v_scale = (ROWS.take(scale, index) for scale in (self.x.k_scale, self.x.v_scale))
        return [k_scale, jnp.where(self.alive(i, pages, token), v_scale, 1.0)]

    @property
    def part_tokens(self) -> int:
        """Tokens that one copy brings: of a page, or of a part of one as long as a tile."""
        return min(self.paged.page_size, self.static.tile_keys)

    def locate(self, i: Any) -> list[Any]:
        """Rows of the pool of the pages of the i-th tile; negative where no row of the block sees a token of one."""
        tables, found = self.x.block_tables, []
        for j in range(self.static.copies):
            position = self.base(i) + j * self.part_tokens
            entry = jnp.minimum(lax.div(position, self.paged.page_size), tables.shape[-1] - 1)
            if len(tables.shape) == 3:
                row = tables[self.block.sequence, self.kv_head, entry]
            else:
                page = tables[self.block.sequence, entry]
                row = jnp.where(page < 0, page, page * self.paged.num_kv_heads + self.kv_head)
            seen = position < self.block.end_key
            if self.window is not None:
                newest = position + self.part_tokens - 1
                seen &= (position < self.sink_tokens) | (newest > self.first - self.window)
            found.append(jnp.where(seen, row, -1))
        return found

    def copy_pages(self, pool: Ref, i: Any, pages: list[Any], slot: Ref, landed: Ref) -> None:
        """Starts the copies of the i-th tile. What is not there arrives at once."""
        rows = self.part_tokens // self.paged.beside
        part = pl.ds(0, rows)
        if self.paged.page_size > self.part_tokens:
            first = lax.div(lax.rem(self.base(i), self.paged.page_size), self.paged.beside)
            part = pl.ds(pl.multiple_of(first, rows), rows)
        for j, row in enumerate(pages):
            place = slot.at[pl.ds(j * rows, rows)]

            @pl.when(row >= 0)
            def _copy(row: Any = row, place: Ref = place) -> None:
                plgpu.copy_gmem_to_smem(pool.at[row, part], place, landed)

            pl.when(row < 0)(lambda: plgpu.barrier_arrive(landed))

    def there(self, pages: list[Any]) -> Any:
        """A bit for each page of a tile."""
        return sum(jnp.where(row >= 0, jnp.int32(1 << j), 0) for j, row in enumerate(pages))

    @property
    def all_there(self) -> int:
        return (1 << self.static.copies) - 1

    def is_whole(self, i: Any, pages: list[Any]) -> Any:
        """Whether some row, of this block or another, sees every token of the i-th tile."""
        base = self.base(i)
        end = base + self.static.tile_keys
        whole = (self.there(pages) == self.all_there) & (end <= self.block.end_key)
        if self.window is not None:
            whole &= (base > self.first - self.window) | (end <= self.sink_tokens)
        return whole

    def alive(self, i: Any, pages: list[Any], token: jax.Array) -> jax.Array:
        """Which tokens [n] of the i-th tile some row sees, of this block or another."""
        position = self.base(i) + token
        there = lax.shift_right_logical(
            ROWS.filled(self.there(pages), token.shape[0]), lax.div(token, self.part_tokens)
        )
        alive = (position < self.block.end_key) & ((there & 1) == 1)
        if self.window is not None:
            alive &= (position < self.sink_tokens) | (position > self.first - self.window)
        return alive

    # Rows

    @property
    def first_head(self) -> Any:
        """The first of those that share the block."""
        return self.piece.head * self.paged.heads

    @property
    def consumer_queries(self) -> int:
        """Of a head, that a consumer has."""
        return QUERIES // self.static.query_copies

    def first_query(self, number: Any) -> Any:
        """The first one that a consumer has."""
        start = aligned(jnp.minimum(self.block.start, self.x.q[0].shape[0] - self.paged.block_queries))
        all_apart = self.paged.apart == self.static.consumers
        return start if all_apart else start + lax.div(number, self.paged.apart) * self.consumer_queries

    def rows(self, number: Any) -> jax.Array:
        """[64]: of which query a consumer's rows are."""
        row = tiles.token_iota(QUERIES)
        return self.first_query(number) + (row & (self.consumer_queries - 1))

    def mask(self, position: jax.Array, notes: Ref, tile: Any, i: Any, s: jax.Array) -> jax.Array:
        """Scores of the i-th tile, number tile + i of the rings, for rows at these positions."""
        note = notes.at[kernel.turn_of(tile + i, self.static.stages + 1)]
        there, base = note[0], note[1]

        def hide(s: jax.Array) -> jax.Array:
            low, sink = ROWS.filled(jnp.int32(0), QUERIES), None
            if self.window is not None:
                low = jnp.maximum(jnp.maximum(position, 0) - self.window + 1, 0) - base
                sink = ROWS.filled(jnp.minimum(self.sink_tokens, base + self.static.tile_keys) - base, QUERIES)
            limits = wgmma.Limits(low, position + 1 - base, sink, ROWS.filled(there, QUERIES), self.part_tokens)
            return wgmma.hide(s, limits)

        return lax.cond(there == SEEN, lambda s: s, hide, s)

    def place(self, query: jax.Array, number: Any) -> jax.Array:
        """Of each row in the output, or -1."""
        low = jnp.maximum(self.block.start, self.block.first_row)
        ours = (query >= low) & (query < self.block.end_row)
        place = ROWS.filled(lax.rem(number, self.paged.apart) * self.static.query_copies, QUERIES)
        if self.static.query_copies > 1:  # MLIR folds row / 64 to a constant, and then no kernel comes of it
            place += lax.div(tiles.token_iota(QUERIES), jnp.int32(self.consumer_queries))
        ours &= place < self.paged.heads
        head = self.first_head + jnp.minimum(place, self.paged.heads - 1)
        return jnp.where(ours, self.piece.output(query, self.paged.num_tokens) * self.num_heads + head, -1)

    def sinks(self, place: jax.Array) -> jax.Array | None:
        """Learned ones of the heads of rows in such places of the output."""
        if self.x.sinks is None:
            return None
        return ROWS.take(self.x.sinks, lax.rem(jnp.maximum(place, 0), jnp.int32(self.num_heads)))

    @property
    def num_heads(self) -> int:
        return self.x.q[0].shape[1]
