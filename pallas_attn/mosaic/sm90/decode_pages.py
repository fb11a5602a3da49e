"""Attention of the query rows of a KV head over pages of its keys and values, on Hopper: one warpgroup, tile by tile.

`Piece` is what a kernel runs; `sm90.decode` says how its parts work together.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.sm90 import dequantise, tiles, wgmma
from pallas_attn.mosaic.sm90.decode_memory import Inputs, Memory, Static
from pallas_attn.mosaic.sm90.mask import clear_rows
from pallas_attn.mosaic.sm90.query_packing import State
from pallas_attn.mosaic.sm90.tiles import PER_COLUMN, PER_TOKEN, TILE, over_columns, over_tokens
from pallas_attn.mosaic.tile_scheduler import Span
from pallas_attn.portable.visibility import PageWalk

NOWHERE = 2**30
"""Position of a token that does not exist: newer than every query."""

SCALES_AT_ONCE = 4
"""Copies begin at multiples of 16 bytes and are as long."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Pages `start` to `stop` of a row, numbered as in the plan, as a program works through them.

    Attributes:
      walk: which pages of the table those numbers mean.
      batch, head: sequence and KV head of the row.
      first: position of the first query; negative if there are more queries than keys.
      window, sink_tokens: of the head; a window of None hides nothing.
    """

    static: Static
    x: Inputs
    mem: Memory
    block: Any
    row: Any
    start: Any
    stop: Any
    walk: PageWalk
    batch: Any
    head: Any
    kv_len: Any
    q_len: Any
    first: Any
    window: Any
    sink_tokens: Any

    @staticmethod
    def of(static: Static, x: Inputs, mem: Memory, block: Any, span: Span) -> Piece:
        batch, head = lax.div(span.row, static.num_kv_heads), lax.rem(span.row, static.num_kv_heads)
        walk = PageWalk(x.plan.sink_pages[span.place], x.plan.first_page[span.place], span.stop)
        kv_len = x.kv_lens[batch]
        q_len = jnp.int32(static.columns.queries) if x.q_lens is None else x.q_lens[batch]
        if x.window is None:
            window, sink_tokens = static.window, 0
        else:
            window, sink_tokens = x.window.window[head], x.window.sink_tokens[head]
        lens = kv_len, q_len, kv_len - q_len
        which = span.row, span.start, span.stop
        return Piece(static, x, mem, block, *which, walk, batch, head, *lens, window, sink_tokens)

    @property
    def num_tiles(self) -> Any:
        return pl.cdiv(self.stop - self.start, self.static.pages) * self.static.tiles_per_page

    def attend(self) -> State:
        """Attention over the piece."""
        mem, static = self.mem, self.static
        # No load can pass a copy: all pages are looked up before the first one's copy starts.
        first = [(jnp.int32(tile), self.locate(jnp.int32(tile))) for tile in range(static.stages)]

        @basics.first_warp
        def _fill() -> None:
            self.fetch_queries()
            for tile, pages in first:
                pl.when(tile < self.num_tiles)(functools.partial(self.fetch, tile, pages))

        self.note_limits()
        plgpu.barrier_wait(mem.q_landed)
        if static.raw_queries:
            mem.q[0].at[0].transpose((1, 0))[...] = basics.load(mem.raw_q.transpose((1, 0)), TILE)
            plgpu.commit_smem()
        state = State.empty(self.x.value_dim, static.columns.width)
        state = state._replace(l=tiles.filled(0.0, static.shape, TILE))  # summed over tokens at the end
        m, l, acc = lax.fori_loop(0, self.num_tiles, self.step, state)  # noqa: E741
        if static.scales is not None:
            acc = self.scaled(dequantise.restore_channel_order(acc))
        real = basics.load(self.limits(0), PER_COLUMN) >= 0
        return State(
            jnp.where(real, m, -jnp.inf),
            jnp.where(real, l.sum(axis=0), 0.0),
            jnp.where(over_columns(real, acc.shape), acc, 0.0),
        )

    def scaled(self, acc: Any) -> Any:
        """Sums of values as cached, times the scales that are the same for all tokens."""
        if self.static.scales == "head":
            return acc * self.x.v_scale[self.head]
        if self.static.scales == "channel":
            return acc * over_tokens(basics.load(self.x.v_scale.at[self.head], PER_TOKEN), acc.shape)
        return acc  # those of tokens are in it

    # Copies

    def fetch_queries(self) -> None:
        """On one warp: starts the copies of the queries."""
        x, mem, columns = self.x, self.mem, self.static.columns
        if not self.static.raw_queries:
            place = self.block * x.plan.num_pages.shape[0] + self.row
            for q, part in zip(x.q, mem.q, strict=True):
                for term in range(q.shape[0]):
                    plgpu.copy_gmem_to_smem(q.at[term, place], part.at[term], mem.q_landed)
            return
        heads = pl.ds(columns.first_head(self.block, self.head), columns.block_heads)
        for i in range(columns.block_queries):
            query = columns.query_block(self.block) * columns.block_queries + i
            place = mem.raw_q.at[pl.ds(i * columns.block_heads, columns.block_heads)]

            @pl.when(query < columns.queries)
            def _copy(query: Any = query, place: Ref = place) -> None:
                plgpu.copy_gmem_to_smem(x.q[0].at[self.batch, query, heads], place, mem.q_landed)

            pl.when(query >= columns.queries)(lambda: plgpu.barrier_arrive(mem.q_landed))

    def locate(self, tile: Any) -> list[tuple[Any, Any]]:
        """Pages of a tile: row of the pool, and position of the first token or NOWHERE. Anything past the last tile."""
        static, tables = self.static, self.x.block_tables
        first, part = static.page_and_part(tile)
        pages = []
        for j in range(static.pages):
            i = self.start + first + j
            entry = jnp.minimum(self.walk.entry(jnp.minimum(i, self.stop - 1)), tables.shape[-1] - 1)
            if len(tables.shape) == 3:
                pool_row = tables[self.batch, self.head, entry]
            else:
                page = tables[self.batch, entry]
                pool_row = jnp.where(page < 0, page, page * static.num_kv_heads + self.head)
            base = entry * static.page_size + part * static.tokens
            pages.append((pool_row, jnp.where((i < self.stop) & (pool_row >= 0), base, NOWHERE)))
        return pages

    def fetch(self, tile: Any, pages: list[tuple[Any, Any]]) -> None:
        """On one warp: starts the copies of a tile. Pages that do not exist arrive at once."""
        static, mem = self.static, self.mem
        slot = lax.rem(tile, static.stages)
        for j, (pool_row, base) in enumerate(pages):
            mem.notes[slot, j] = base
            pl.when(base < NOWHERE)(functools.partial(self.copy, tile, j, pool_row))

            @pl.when(base >= NOWHERE)
            def _nothing_to_copy() -> None:
                for _ in range(self.x.copies(static)):
                    plgpu.barrier_arrive(mem.landed.at[slot])

    def copy(self, tile: Any, j: int, pool_row: Any) -> None:
        """Starts the copies of the j-th page of a tile, or of the part of it that is meant."""
        static, x, mem = self.static, self.x, self.mem
        slot = lax.rem(tile, static.stages)
        landed = mem.landed.at[slot]
        _, part = static.page_and_part(tile)
        rows = static.rows(x.k, static.page_tokens)
        some, place = pl.ds(part * rows, rows), pl.ds(j * rows, rows)
        for (first, columns), k in zip(x.key_parts, mem.k, strict=True):
            plgpu.copy_gmem_to_smem(x.k.at[pool_row, some, pl.ds(first, columns)], k.at[slot, place], landed)
        if x.v is not None:
            plgpu.copy_gmem_to_smem(x.v.at[pool_row, some], mem.v.at[slot, place], landed)
        if static.groups:
            first = pool_row * static.groups
            if static.tiles_per_page > 1:
                first += lax.div(part * (static.tokens * static.groups), static.page_size)
            width = static.part_groups
            if width < SCALES_AT_ONCE:
                over = lax.rem(first, SCALES_AT_ONCE)
                mem.notes[static.stages + 2 + slot, j] = over
                first, width = first - over, SCALES_AT_ONCE
            for i, scale in enumerate((x.k_scale, x.v_scale)):
                plgpu.copy_gmem_to_smem(
                    scale.at[pl.ds(first, width)], mem.scales.at[slot, i, j, pl.ds(0, width)], landed
                )

    # Visibility

    def note_limits(self) -> None:
        """Leaves in shared memory between which positions each column's query sees tokens. It is seldom asked for, and
        would take registers from the steps that do without.
        """
        query = self.static.columns.query(self.block)
        newest = self.first + query if self.x.drafts is None else self.kv_len - 1
        self.limits(0)[...] = jnp.where(query < self.q_len, newest, -1)
        if self.window is not None:
            self.limits(1)[...] = jnp.maximum(self.first + query, 0) - self.window

    def limits(self, i: int) -> Ref:
        return self.mem.notes.at[self.static.stages + i, pl.ds(0, self.static.columns.width)]

    def positions(self, base: list[Any]) -> Any:
        """Of each token of a tile."""
        token = tiles.token_iota(self.static.tokens)
        position = token + base[0]
        for j in range(1, self.static.pages):
            first = j * self.static.page_tokens
            position = jnp.where(token >= first, token + (base[j] - first), position)
        return position

    def masked(self, position: Any, s: Any) -> Any:
        """Scores [tokens, width], -inf where a column does not see a token."""
        static, shape = self.static, self.static.shape
        each = over_tokens(position, shape)

        def limit(i: int) -> Any:
            return over_columns(basics.load(self.limits(i), PER_COLUMN), shape)

        s = jnp.where(each <= limit(0), s, -jnp.inf)
        if self.x.drafts is not None:
            drafts = self.x.drafts.at[static.columns.query_block(self.block), self.batch]
            draft = over_tokens(position - self.first, shape)
            bits = over_columns(basics.load(drafts, PER_COLUMN), shape)
            seen = (lax.shift_right_logical(bits, jnp.clip(draft, 0, 31)) & 1) == 1
            s = jnp.where((draft < 0) | seen, s, -jnp.inf)
        if self.window is not None:
            s = jnp.where((each < self.sink_tokens) | (each > limit(1)), s, -jnp.inf)
        return s

    def alive(self, position: Any, s: Any) -> Any:
        """Which token some query sees: [tokens], from positions and masked scores."""
        if self.x.drafts is not None:
            return jnp.where(s == -jnp.inf, 0.0, 1.0).max(axis=1) > 0  # a score of NaN is one, too
        alive = position < self.kv_len
        if self.window is not None:
            # Of the new tokens each sees itself; the first query's window reaches back farthest.
            alive &= (position < self.sink_tokens) | (position > jnp.maximum(self.first, 0) - self.window)
        return alive

    def sees_all(self, base: list[Any]) -> Any:
        """Whether every query sees every token of a tile."""
        last = functools.reduce(jnp.maximum, base) + (self.static.page_tokens - 1)  # of an absent page, if there is one
        newest = self.first if self.x.drafts is None else self.first - 1  # the first query, unless masks may hide it
        whole = (last - base[0] == self.static.tokens - 1) & (last <= newest)
        if self.window is not None:
            whole &= (base[0] > self.kv_len - 1 - self.window) | (last < self.sink_tokens)
        return whole

    def hide(self, base: list[Any], v: Ref, s: Any, v_scale: Any) -> tuple[Any, Any]:
        """Masks what is not visible. Values no column sees become 0 whatever they are, 0 · NaN being NaN; their scales
        become 1.
        """
        position = self.positions(base)
        s = self.masked(position, s)
        alive = self.alive(position, s)
        if self.x.v is None:
            plgpu.commit_smem()  # every warp has its scores: the keys may change
        if self.static.scales is None:
            clear_rows(v, alive, self.x.row_bytes)
        else:
            dequantise.clear_tokens(v, self.x.value_dim, alive)
            plgpu.commit_smem()
        if v_scale is not None:
            v_scale = jnp.where(alive, v_scale, 1.0)
        return s, v_scale

    # Arithmetic

    def step(self, tile: Any, state: State) -> State:
        """Takes in one tile."""
        static, x, mem, shape = self.static, self.x, self.mem, self.static.shape
        m, l, acc = state  # noqa: E741
        slot, following = lax.rem(tile, static.stages), tile + static.stages
        pages = self.locate(following) if x.looks_ahead(static) else None
        plgpu.barrier_wait(mem.landed.at[slot])
        base = [mem.notes[slot, j] for j in range(static.pages)]
        # What is the same in every step the compiler computes ahead, such as addresses, two registers for 32 bytes of a
        # row. For the long rows of latents it is not to know that a position, read from memory, is never negative.
        zero = jnp.minimum(base[0], 0) if x.v is None else 0
        slot += zero
        v = mem.values(slot)
        k_scale, v_scale = self.token_scales(slot)
        s = self.scores(slot, zero, k_scale)
        hide = functools.partial(self.hide, base, v)
        s, v_scale = lax.cond(self.sees_all(base), lambda *x: x, hide, s, v_scale)
        if v_scale is not None:
            # Into the probability, which is rounded to 16 bits: no more than 1 then either.
            v_scale = jnp.maximum(v_scale, dequantise.SMALLEST_SCALE)
            s += over_tokens(jnp.log2(v_scale) * (1 / LOG2E), shape)
        highest = jnp.maximum(m, s.max(axis=0))
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        p = jnp.exp2((s - over_columns(shift, shape)) * LOG2E)
        shrink = jnp.exp2((m - shift) * LOG2E)
        quantised = static.scales is not None
        transposed = dequantise.load_transposed(v, x.value_dim) if quantised else v.transpose((1, 0))
        mem.p.transpose((1, 0))[...] = p.astype(mem.p.dtype)
        plgpu.commit_smem()
        acc = acc * over_columns(shrink, acc.shape)
        acc = tiles.add_product(acc, transposed, mem.p.transpose((1, 0)))
        if v_scale is not None:
            p *= over_tokens(1 / v_scale, shape)
        l = l * over_columns(shrink, shape) + p  # noqa: E741

        @pl.when(following < self.num_tiles)
        def _refill() -> None:
            found = self.locate(following) if pages is None else pages
            basics.first_warp(functools.partial(self.fetch, following, found))

        return State(highest, l, acc)

    def token_scales(self, slot: Any) -> tuple[Any, Any]:
        """Scales of the keys and values of a tile, one a token, if they come with the tokens."""
        static, mem = self.static, self.mem
        if not static.groups:
            return None, None
        begin = None
        if static.part_groups < SCALES_AT_ONCE:
            begin = mem.notes.at[static.stages + 2 + slot, pl.ds(0, static.pages)]
        k_scale, v_scale = (
            dequantise.load_per_token(mem.scales.at[slot, i], begin, static.part_groups, static.group_tokens)
            for i in range(2)
        )
        return k_scale, v_scale

    def scores(self, slot: Any, first_term: Any, k_scale: Any) -> Any:
        """K qᵀ of a tile, scaled and capped."""
        static, mem = self.static, self.mem
        queries = [[q.at[first_term + i] for i in range(q.shape[0])] for q in mem.q]
        if static.scales is None:
            parts = zip(mem.k, queries, strict=True)
            s = tiles.multiply([(k.at[slot], term) for k, terms in parts for term in terms])
        else:
            s = dequantise.multiply_dequantised(mem.k[0].at[slot], queries[0])
        s *= static.score_scale * self.x.k_scale[self.head] if static.scales == "head" else static.score_scale
        if k_scale is not None:
            s *= over_tokens(k_scale, static.shape)
        return s if static.soft_cap is None else wgmma.capped(s, 1.0, static.soft_cap)
