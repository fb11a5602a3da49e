"""The warpgroup of `mosaic_rows` that copies."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.ops.mla_decode.mosaic_rows_memory import (
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
    unknown_zero,
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

        def load(i: Any, pages: Any) -> Any:
            following = self.locate_pair(piece, i + 1)
            self.load_pair(piece, i, pages)
            pl.when((i == 0) & (piece.pair > 0))(lambda: self.load_query(piece))
            return following

        pl.when(piece.pair == 0)(lambda: self.load_query(piece))
        lax.fori_loop(0, piece.num_pairs(self.static), load, self.locate_pair(piece, jnp.int32(0)))

    def load_query(self, piece: Piece) -> None:
        x, mem, rows = self.x, self.mem, pl.ds(self.block * ROWS, ROWS)
        plgpu.barrier_wait(mem.both.at[Q_FREE])
        left, right = self.static.widths
        plgpu.copy_gmem_to_smem(x.q_latent.at[piece.row, rows, pl.ds(0, left)], mem.q.left.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_latent.at[piece.row, rows, pl.ds(left, right)], mem.q.right.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_rope.at[piece.row, rows], mem.q.rope.at[0], mem.q_landed)

    def locate_pair(self, piece: Piece, i: Any) -> list[list[Any]] | None:
        """Pages of both tiles, if they are looked up ahead."""
        if not self.static.looks_ahead:
            return None
        return [self.locate(piece, 2 * i + tile) for tile in (0, 1)]

    def locate(self, piece: Piece, tile: Any) -> list[Any]:
        """The id of each page of a tile; negative where there is none."""
        tables, (first, _) = self.x.block_tables, self.static.page_and_part(tile)
        entries = [piece.start + first + j for j in range(self.static.pages)]
        ids = [tables[piece.row, jnp.minimum(entry, tables.shape[1] - 1)] for entry in entries]
        return [jnp.where(entry < piece.stop, page, -1) for entry, page in zip(entries, ids, strict=True)]

    def load_pair(self, piece: Piece, i: Any, tiles: list[list[Any]] | None) -> None:
        """Starts the copies of a pair of tiles: of each half, as soon as what it takes the place of was used.

        The rotated keys come with the half whose last reader also reads the probabilities that lie over them.
        """
        static, mem = self.static, self.mem
        for tile, half in ((0, 0), (0, 1), (1, 1), (1, 0)):
            slot = static.slot(piece.pair + i, tile) + unknown_zero()
            parts = (half,) if tile == half else (half, 2)
            pages = self.locate(piece, 2 * i + tile) if tiles is None else tiles[tile]
            plgpu.barrier_wait(mem.free.at[2 * slot + half])
            if tile == half:
                self.note(piece, i, tile, pages)
            _, of_page = static.page_and_part(2 * i + tile)
            for j, page in enumerate(pages):
                slot = slot + unknown_zero()  # else addresses for all pages are computed, and kept, before the first
                copies = functools.partial(self.copy, slot, parts, j, page, of_page)
                pl.when(page >= 0)(copies)

                @pl.when(page < 0)
                def _nothing_to_copy(slot: Any = slot, parts: tuple[int, ...] = parts) -> None:
                    for part in parts:
                        plgpu.barrier_arrive(mem.landed.at[PARTS * slot + part])

    def note(self, piece: Piece, i: Any, tile: int, pages: list[Any]) -> None:
        """Leaves for the others which tokens a tile holds."""
        static = self.static
        notes = self.mem.notes.at[static.notes_slot(piece.pair + i), tile]
        first, part = static.page_and_part(2 * i + tile)
        first_token = (piece.start + first) * static.page_size + part * TOKENS
        seen_by_all = first_token + TOKENS <= piece.oldest_query(static, self.x)
        for j, page in enumerate(pages):
            seen_by_all &= page >= 0
            notes[1 + j] = jnp.where(page >= 0, first_token + j * static.page_tokens, NOWHERE)
        notes[0] = seen_by_all.astype(jnp.int32)

    def copy(self, slot: Any, parts: tuple[int, ...], j: int, page: Any, of_page: Any) -> None:
        """Starts the copies of columns of a page, or of what of it is meant."""
        static, mem = self.static, self.mem
        source = self.x.pages.at[page, pl.ds(of_page * TOKENS, static.page_tokens)]
        place = pl.ds(j * static.page_tokens, static.page_tokens)
        for part in parts:
            to, landed = mem.k[part].at[slot, place], mem.landed.at[PARTS * slot + part]
            plgpu.copy_gmem_to_smem(source.at[:, static.columns(part)], to, landed, collective_axes="cluster")
