"""The warpgroup of `mosaic.row_layout` that copies."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import Ref
from pallas_attn.ops.mla_decode.mosaic_rows_memory import (
    BY_ALL,
    BY_NONE,
    BY_SOME,
    NOWHERE,
    PARTS,
    Q_FREE,
    ROWS,
    TOKENS,
    Inputs,
    Memory,
    Piece,
    Static,
    for_each_piece,
)


@dataclasses.dataclass(frozen=True)
class Producer:
    """The warpgroup that starts all copies."""

    static: Static
    x: Inputs
    mem: Memory
    block: Any

    def run(self) -> None:
        for_each_piece(self.static, self.x.plan, self.work)
        plgpu.barrier_wait(self.mem.both.at[Q_FREE])
        for i in range(4 * self.static.pairs):
            plgpu.barrier_wait(self.mem.free.at[i])

    def work(self, piece: Piece) -> None:
        """One piece: its query comes after the first tiles, for which there is room earlier, but for the first's."""
        oldest_query = piece.oldest_query(self.static, self.x)

        def load(i: Any, _: None) -> None:
            self.load_pair(piece, i, oldest_query)
            self.look_up(piece, i + 1)
            pl.when((i == 0) & (piece.pair > 0))(lambda: self.load_query(piece))

        self.look_up(piece, jnp.int32(0))
        pl.when(piece.pair == 0)(lambda: self.load_query(piece))
        lax.fori_loop(0, piece.num_pairs(self.static), load, None)

    def load_query(self, piece: Piece) -> None:
        x, mem, rows = self.x, self.mem, pl.ds(self.block * ROWS, ROWS)
        plgpu.barrier_wait(mem.both.at[Q_FREE])
        left, right = self.static.widths
        plgpu.copy_gmem_to_smem(x.q_latent.at[piece.row, rows, pl.ds(0, left)], mem.q.left.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_latent.at[piece.row, rows, pl.ds(left, right)], mem.q.right.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_rope.at[piece.row, rows], mem.q.rope.at[0], mem.q_landed)

    def ids(self, piece: Piece, i: Any, tile: int) -> Ref:
        """Where the pages of a tile are noted. Each thread reads what it has written itself."""
        return self.mem.ids.at[lax.rem(piece.pair + i, self.static.pairs + 1), tile]

    def look_up(self, piece: Piece, i: Any) -> None:
        """Notes the pages of a pair of tiles, while the pair before is worked off."""
        tables, static = self.x.block_tables, self.static
        for tile in (0, 1):
            first, _ = static.page_and_part(2 * i + tile)
            entries = [piece.start + first + j for j in range(static.pages)]
            pages = [tables[piece.row, jnp.minimum(entry, tables.shape[1] - 1)] for entry in entries]
            for j, (entry, page) in enumerate(zip(entries, pages, strict=True)):
                self.ids(piece, i, tile)[j] = jnp.where(entry < piece.stop, page, -1)

    def load_pair(self, piece: Piece, i: Any, oldest_query: Any) -> None:
        """Starts the copies of a pair of tiles: of each half, as soon as what it takes the place of was used.

        The rotated keys come with the half whose last reader also reads the probabilities that lie over them. What can
        be done before a half is free, or after its copies have started, is.
        """
        static = self.static
        for tile, half in ((0, 0), (0, 1), (1, 1), (1, 0)):
            slot = static.slot(piece.pair + i, tile) + basics.unknown_zero()
            parts = (half,) if tile == half else (half, 2)
            ids = self.ids(piece, i, tile)
            page, (_, of_page) = ids[0], static.page_and_part(2 * i + tile)
            plgpu.barrier_wait(self.mem.free.at[2 * slot + half])
            self.copy_pages(slot, parts, ids, page, of_page)
            if tile == half:
                self.note(piece, i, tile, oldest_query)

    def note(self, piece: Piece, i: Any, tile: int, oldest_query: Any) -> None:
        """Leaves for the others which tokens a tile holds, before the last copies of the tile are started.

        All rows see what is older than their queries, and the newest one that is there sees everything if masks are
        causal. The oldest query itself is seen by all then.
        """
        static, ids = self.static, self.ids(piece, i, tile)
        notes = self.mem.notes.at[static.notes_slot(piece.pair + i), tile]
        first, part = static.page_and_part(2 * i + tile)
        first_token = (piece.start + first) * static.page_size + part * TOKENS
        newer = first_token + TOKENS - oldest_query  # tokens of the tile that are no older than the oldest query
        seen = jnp.where(newer <= (1 if static.causal else 0), BY_ALL, BY_NONE)
        if static.causal:
            seen = jnp.where(newer <= piece.queries(static, self.x), jnp.maximum(seen, BY_SOME), seen)
        for j in range(static.pages):
            there = ids[j] >= 0
            seen = jnp.where(there, seen, BY_NONE)
            notes[1 + j] = jnp.where(there, first_token + j * static.page_tokens, NOWHERE)
        notes[0] = seen

    def copy_pages(self, slot: Any, parts: tuple[int, ...], ids: Ref, page: Any, of_page: Any) -> None:
        """Starts the copies of parts of a tile, of which `page` is the first page."""

        def step(j: Any, page: Any) -> Any:
            self.copy(slot, parts, j, page, of_page)
            return ids[jnp.minimum(j + 1, self.static.pages - 1)]

        lax.fori_loop(0, self.static.pages, step, page)

    def copy(self, slot: Any, parts: tuple[int, ...], j: Any, page: Any, of_page: Any) -> None:
        """Starts the copies of columns of a page, or of what of it is meant; says so where there is none."""
        static, landed = self.static, [self.mem.landed.at[PARTS * slot + part] for part in parts]

        @pl.when(page >= 0)
        def _copy() -> None:
            source = self.x.pages.at[page, pl.ds(of_page * TOKENS, static.page_tokens)]
            place = pl.ds(pl.multiple_of(j * static.page_tokens, static.page_tokens), static.page_tokens)
            for part, barrier in zip(parts, landed, strict=True):
                some, to = source.at[:, static.columns(part)], self.mem.k[part].at[slot, place]
                plgpu.copy_gmem_to_smem(some, to, barrier, collective_axes="cluster")

        @pl.when(page < 0)
        def _pass() -> None:
            for barrier in landed:
                plgpu.barrier_arrive(barrier)
