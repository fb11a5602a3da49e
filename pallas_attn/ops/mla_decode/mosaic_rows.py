"""Latent attention of many query rows on Hopper: rows are wgmma's M, and two warpgroups share each block of them.

A program holds 64 query rows of a sequence (heads of each query, query by query) and works off its share of the plan.
Their output, [64, L] in float32, does not fit the registers of one warpgroup: warpgroup 0 keeps the left half of the
latent's columns, warpgroup 1 the right one. Tiles of 64 latents come in pairs: warpgroup 0 scores the first, warpgroup
1 the second, and each needs the other's probabilities. While one is at its softmax, the other multiplies
("seesaw", FlashMLA's deep dive of April 2025):

    warpgroup 0, even                            warpgroup 1, odd
    S0 = Q C0^T; m0 = max(m, rows of S0)         S1 = Q C1^T
    leaves m0                               ->   m1 = max(m0, rows of S1), leaves m1
    P0 = exp(S0 - m0)                            P1 = exp(S1 - m1), leaves P1
    O = O exp(m - m0) + P0 left(C0)              O = O exp(m - m1) + P1 right(C1)
    P0 = P0 exp(m0 - m1), leaves P0         ->   O = O + P0 right(C0)
    O = O exp(m0 - m1) + P1 left(C1)

The own product takes probabilities from registers, the other one from shared memory; they lie where the tile's rotated
keys were, which are as large and no longer needed (if R is not 64, in memory of their own: there is enough then).
Warpgroup 2 starts all copies: of the halves of a pair's tiles, in the order in which they fall free.

Programs of neighbouring blocks of a sequence are a cluster of two: each copies one half of what both read, to both.

Masking and clearing are for the tiles that need them, by notes that the copying warpgroup leaves: a tile that all rows
see all of is not masked. In others, latents that no row sees become 0 before they are values, since 0 · NaN is NaN.

No wait can last. Below, "waits for x" means that x was asked for, and is not itself waiting for the waiter.

- landed: copies, started after free. A page that does not exist arrives without a copy.
- free: has a phase more than there are copies: consumers arrive once at the start, and after each use of a half. The
  warpgroup that copies waits for one phase before each copy, and for the last one before it ends, so that no program
  of a cluster ends while another still arrives there. Both programs of a cluster have the same plan, pages and order.
- ready[LARGEST]: warpgroup 0 arrives after its scores, for which it waits for copies only; warpgroup 1 arrives after it
  has seen that. ready[PROBABILITIES]: warpgroup 1 arrives right after its maxima, warpgroup 0 once it has seen these.
- both[SUMS]: both warpgroups, after the same number of pairs. both[Q_FREE]: like free.
- What a warpgroup leaves is overwritten after it waited for something that the other one does after reading it: m0
  after m1 of the same pair, P0 after m1 of the next, m1 and P1 after m0 of the next. Notes have room for twice the
  pairs.
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

from pallas_attn.ops.common import mosaic
from pallas_attn.ops.common.mosaic import LOG2E, PER_TOKEN, Ref, over_columns, over_tokens
from pallas_attn.ops.common.mosaic_merge import Partials
from pallas_attn.types import DecodePlan

ROWS = 64
"""Query rows of a block: wgmma's M."""

TOKENS = 64
"""Latents of a tile."""

NOWHERE = 2**30
"""Position of a token that does not exist: newer than every query."""

REAL, NO_DRAFT = 31, 30
"""Bits of what a query row sees, above those of the draft keys: whether there is such a query, and never."""

LOWEST = -1e30
"""What the largest score begins with: finite, so that no difference is NaN, and smaller than any score."""

Q_FREE, SUMS = 0, 1
"""What takes both warpgroups."""

LARGEST, PROBABILITIES = 0, 2
"""What one warpgroup has ready for the other, of the first tile of a pair; of the second, one more."""

PER_ROW = PER_TOKEN
"""A value for each row of a tile, here a query row."""


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernel is compiled for, beside shapes and dtypes.

    Attributes:
      pairs: of tiles in shared memory.
      cluster: blocks of rows that share what is read, on neighbouring multiprocessors.
      sm_scale: multiplies the scores.
    """

    latent_dim: int
    rope_dim: int
    page_size: int
    pairs: int
    cluster: int
    sm_scale: float

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of the latent that each warpgroup accumulates."""
        left = -(-self.latent_dim // 128) * 64
        return left, self.latent_dim - left

    @property
    def pages(self) -> int:
        """Pages, or parts of one, that make up a tile."""
        return max(1, TOKENS // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Tokens of each of them."""
        return min(TOKENS, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // TOKENS)

    @property
    def looks_ahead(self) -> bool:
        """Whether the pages of a pair are looked up before the pair before is loaded: there are registers for few."""
        return self.pages == 1

    @property
    def has_own_p(self) -> bool:
        """Whether probabilities need memory of their own; else they lie where the rotated keys were."""
        return self.rope_dim != TOKENS

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes, and of one that copies: 504 for one in each warpgroup."""
        return (232, 40) if self.widths[0] > 128 else (200, 104)

    def columns(self, half: int) -> Any:
        """Of a latent, those that either warpgroup accumulates."""
        return pl.ds(half * self.widths[0], self.widths[half])

    def page_and_part(self, tile: Any) -> tuple[Any, Any]:
        """The first page of a tile among those of a piece, and which part of it, if that takes several tiles."""
        if self.tiles_per_page == 1:
            return tile * self.pages, 0
        return lax.div(tile, self.tiles_per_page), lax.rem(tile, self.tiles_per_page)

    def slot(self, pair: Any, tile: int) -> Any:
        """Where in shared memory a tile of a pair goes."""
        return tile if self.pairs == 1 else 2 * lax.rem(pair, self.pairs) + tile

    def notes_slot(self, pair: Any) -> Any:
        """Where notes on a pair go: not over those that one warpgroup may still read, being a pair behind the other."""
        return lax.rem(pair, 2 * self.pairs)


class Inputs(NamedTuple):
    """Arrays, or in the kernel references to them.

    Attributes:
      q_latent, q_rope: [B, blocks·ROWS, L or R].
      pages: [N, ps, L + R].
      seen: int32 [B, blocks·ROWS], what each row sees: bit j for draft key j, bit REAL for all older ones.
      seen_by_any: int32 [B], by some row of the sequence.
    """

    q_latent: Any
    q_rope: Any
    pages: Any
    block_tables: Any
    kv_lens: Any
    q_lens: Any
    plan: DecodePlan
    seen: Any
    seen_by_any: Any


class Parts(NamedTuple):
    """The columns of a query or a latent: those of either warpgroup, and the rotated ones."""

    left: Any
    right: Any
    rope: Any


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
      q: [ROWS, columns].
      k: [2 · pairs, TOKENS, columns].
      p: [2, ROWS, TOKENS], probabilities of either tile of a pair, or None.
      stats: [4, ROWS]: the largest scores after either tile of a pair, and the sums of either warpgroup.
      notes: int32 [2 · pairs, 2, 1 + pages]: of a tile, whether every row sees all of it, and the position of each
        page's first token or NOWHERE.
      q_landed, landed [2 · pairs · 3]: a query, a part of a tile, is there.
      q_free, free [2 · pairs · 2]: it, or half of a tile, may be overwritten.
      ready: [LARGEST or PROBABILITIES + tile], either is in `stats` or `p`.
      sums: both are in `stats`.
    """

    q: Parts
    k: Parts
    p: Any
    stats: Any
    notes: Any
    q_landed: Any
    landed: Any
    free: Any
    ready: Any
    both: Any

    @staticmethod
    def types(x: Inputs, static: Static) -> Memory:
        dtype, slots = x.pages.dtype, 2 * static.pairs
        width = static.latent_dim + static.rope_dim
        operand = functools.partial(_operand, dtype=dtype, row_bytes=64 if width % 64 else 128)
        columns = Parts(*static.widths, static.rope_dim)
        return Memory(
            q=Parts(*(operand((1, ROWS, n)) for n in columns)),
            k=Parts(*(operand((slots, TOKENS, n)) for n in columns)),
            p=operand((2, ROWS, TOKENS)) if static.has_own_p else None,
            stats=plgpu.SMEM((4, ROWS), jnp.float32),
            notes=plgpu.SMEM((slots, 2, 1 + static.pages), jnp.int32),
            q_landed=plgpu.Barrier(num_arrivals=3),
            landed=plgpu.Barrier(num_barriers=3 * slots, num_arrivals=static.pages),
            free=plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=2 * slots),
            ready=plgpu.Barrier(num_barriers=4),
            both=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )


def _operand(shape: tuple[int, ...], *, dtype: Any, row_bytes: int) -> Any:
    """`mosaic.operand`, of rows that may be shorter."""
    tiling = plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(row_bytes)))


# --- pieces


class Piece(NamedTuple):
    """Pages `start` to `stop` of a row.

    Attributes:
      row: of the plan, a sequence.
      number: of its state, where the row is in several pieces.
      pair: how many pairs of tiles the program took before.
    """

    row: Any
    start: Any
    stop: Any
    number: Any
    pair: Any

    def num_pairs(self, static: Static) -> Any:
        tiles = pl.cdiv(self.stop - self.start, static.pages) * static.tiles_per_page
        return pl.cdiv(tiles, 2)


def for_each_piece(static: Static, plan: DecodePlan, work: Callable[[Piece], None]) -> None:
    """Works off the pieces of this program."""
    program = lax.axis_index("program")
    end_row, end_page = plan.program_row[program + 1], plan.program_page[program + 1]

    def step(at: tuple[Any, ...]) -> tuple[Any, ...]:
        row, page, number, pair = at
        num_pages = plan.num_pages[row]
        stop = jnp.where(row == end_row, end_page, num_pages)
        if plan.piece_pages:
            stop = jnp.minimum(stop, (lax.div(page, plan.piece_pages) + 1) * plan.piece_pages)
        piece = Piece(row, page, stop, number, pair)
        work(piece)
        done = stop == num_pages
        after = jnp.where(done, plan.next_row[row], row), jnp.where(done, 0, stop)
        return *after, number + 1, pair + piece.num_pairs(static)

    def is_ours(at: tuple[Any, ...]) -> Any:
        row, page, *_ = at
        return (row < end_row) | ((row == end_row) & (page < end_page))

    begin = plan.program_row[program], plan.program_page[program], plan.program_piece[program], jnp.int32(0)
    lax.while_loop(is_ours, step, begin)


# --- copies


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
        """One piece."""
        x, mem, rows = self.x, self.mem, pl.ds(self.block * ROWS, ROWS)
        first = self.locate_pair(piece, jnp.int32(0))
        plgpu.barrier_wait(mem.both.at[Q_FREE])
        left, right = self.static.widths
        plgpu.copy_gmem_to_smem(x.q_latent.at[piece.row, rows, pl.ds(0, left)], mem.q.left.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_latent.at[piece.row, rows, pl.ds(left, right)], mem.q.right.at[0], mem.q_landed)
        plgpu.copy_gmem_to_smem(x.q_rope.at[piece.row, rows], mem.q.rope.at[0], mem.q_landed)

        def load(i: Any, pages: Any) -> Any:
            following = self.locate_pair(piece, i + 1)
            self.load_pair(piece, i, pages)
            return following

        lax.fori_loop(0, piece.num_pairs(self.static), load, first)

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
        for tile, half in ((0, 0), (1, 1), (1, 0), (0, 1)):
            slot, with_rope = static.slot(piece.pair + i, tile) + unknown_zero(), tile != half
            pages = self.locate(piece, 2 * i + tile) if tiles is None else tiles[tile]
            plgpu.barrier_wait(mem.free.at[2 * slot + half])
            if tile == half:
                self.note(piece, i, tile, pages)
            _, part = static.page_and_part(2 * i + tile)
            for j, page in enumerate(pages):
                copies = functools.partial(self.copy, slot, half, j, page, part, with_rope=with_rope)
                pl.when(page >= 0)(copies)

                @pl.when(page < 0)
                def _nothing_to_copy(slot: Any = slot, half: int = half, with_rope: bool = with_rope) -> None:
                    plgpu.barrier_arrive(mem.landed.at[3 * slot + half])
                    if with_rope:
                        plgpu.barrier_arrive(mem.landed.at[3 * slot + 2])

    def note(self, piece: Piece, i: Any, tile: int, pages: list[Any]) -> None:
        """Leaves for the others which tokens a tile holds."""
        static = self.static
        notes = self.mem.notes.at[static.notes_slot(piece.pair + i), tile]
        first, part = static.page_and_part(2 * i + tile)
        first_token = (piece.start + first) * static.page_size + part * TOKENS
        seen_by_all = first_token + TOKENS <= self.x.kv_lens[piece.row] - self.x.q_lens[piece.row]
        for j, page in enumerate(pages):
            seen_by_all &= page >= 0
            notes[1 + j] = jnp.where(page >= 0, first_token + j * static.page_tokens, NOWHERE)
        notes[0] = seen_by_all.astype(jnp.int32)

    def copy(self, slot: Any, half: int, j: int, page: Any, part: Any, *, with_rope: bool) -> None:
        """Starts the copies of half of a page, or of the part of it that is meant."""
        static, mem = self.static, self.mem
        source = self.x.pages.at[page, pl.ds(part * TOKENS, static.page_tokens)]
        place = pl.ds(j * static.page_tokens, static.page_tokens)

        def copy(columns: Any, part: int) -> None:
            to, landed = mem.k[part].at[slot, place], mem.landed.at[3 * slot + part]
            plgpu.copy_gmem_to_smem(source.at[:, columns], to, landed, collective_axes="cluster")

        copy(static.columns(half), half)
        if with_rope:
            copy(pl.ds(static.latent_dim, static.rope_dim), 2)


# --- arithmetic


class State(NamedTuple):
    """Attention of a block's rows over some latents, as one of the two warpgroups has it.

    Attributes:
      m: [ROWS], the largest score so far, not scaled.
      l: [ROWS], its own tiles' share of the sum of `Consumer.weight` of scores beside m.
      acc: [ROWS, columns], all latents times those weights, in its own columns.
    """

    m: Any
    l: Any  # noqa: E741
    acc: Any


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One of the two warpgroups that compute.

    Attributes:
      half: which of the tiles of a pair it scores, and which half of the latent it accumulates.
    """

    static: Static
    x: Inputs
    mem: Memory
    block: Any
    half: int

    def run(self, finish: Callable[[Consumer, Piece, State], None]) -> None:
        """All pieces; `finish` takes what each comes to."""
        mem, static = self.mem, self.static
        plgpu.barrier_arrive(mem.both.at[Q_FREE])
        for slot in range(2 * static.pairs):
            self.release(slot)

        def work(piece: Piece) -> None:
            plgpu.barrier_wait(mem.q_landed)
            empty = State(
                mosaic.filled(LOWEST, (ROWS,), PER_ROW),
                mosaic.filled(0.0, (ROWS,), PER_ROW),
                mosaic.filled(0.0, (ROWS, static.widths[self.half]), mosaic.TILE),
            )
            step = functools.partial(self.odd if self.half else self.even, piece)
            finish(self, piece, lax.fori_loop(0, piece.num_pairs(static), step, empty))
            plgpu.barrier_arrive(mem.both.at[Q_FREE])

        for_each_piece(static, self.x.plan, work)

    def release(self, slot: Any) -> None:
        """Lets the half that this warpgroup reads values from be overwritten."""
        plgpu.barrier_arrive(self.mem.free.at[2 * slot + self.half])

    def even(self, piece: Piece, i: Any, state: State) -> State:
        """Takes in a pair of tiles, and scores the first."""
        mem, static = self.mem, self.static
        m, l, acc = state  # noqa: E741
        pair, here = piece.pair + i, unknown_zero()
        mine, other = (here + static.slot(pair, tile) for tile in (0, 1))
        s = self.scores(piece, pair, here, mine)
        m_mine = jnp.maximum(m, s.max(axis=1))
        mem.stats[0] = m_mine
        plgpu.barrier_arrive(mem.ready.at[LARGEST + 0])
        p = self.weight(s, over_tokens(m_mine, s.shape))
        shrink = self.weight(m, m_mine)
        acc = acc * over_tokens(shrink, acc.shape)
        acc = add_product(acc, p.astype(mem.k.left.dtype), lambda: mem.k[self.half].at[mine])
        self.release(mine)
        plgpu.barrier_wait(mem.ready.at[LARGEST + 1])
        m_both = mosaic.load(mem.stats.at[1], PER_ROW)
        again = self.weight(m_mine, m_both)
        p = p * over_tokens(again, p.shape)
        self.p(mine, 0)[...] = p.astype(mem.k.left.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.ready.at[PROBABILITIES + 0])
        l = l * (shrink * again) + p.sum(axis=1)  # noqa: E741
        plgpu.barrier_wait(mem.ready.at[PROBABILITIES + 1])
        plgpu.barrier_wait(mem.landed.at[3 * other + self.half])
        self.clear(piece, pair, 1, other)
        acc = acc * over_tokens(again, acc.shape)
        acc = add_product(acc, lambda: self.p(other, 1), lambda: mem.k[self.half].at[other])
        self.release(other)
        return State(m_both, l, acc)

    def odd(self, piece: Piece, i: Any, state: State) -> State:
        """Takes in a pair of tiles, and scores the second."""
        mem, static = self.mem, self.static
        m, l, acc = state  # noqa: E741
        pair, here = piece.pair + i, unknown_zero()
        other, mine = (here + static.slot(pair, tile) for tile in (0, 1))
        s = self.scores(piece, pair, here, mine)
        highest = s.max(axis=1)
        plgpu.barrier_wait(mem.ready.at[LARGEST + 0])
        m_both = jnp.maximum(mosaic.load(mem.stats.at[0], PER_ROW), highest)
        mem.stats[1] = m_both
        plgpu.barrier_arrive(mem.ready.at[LARGEST + 1])
        p = self.weight(s, over_tokens(m_both, s.shape))
        p16 = p.astype(mem.k.left.dtype)
        self.p(mine, 1)[...] = p16
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.ready.at[PROBABILITIES + 1])
        shrink = self.weight(m, m_both)
        l = l * shrink + p.sum(axis=1)  # noqa: E741
        acc = acc * over_tokens(shrink, acc.shape)
        acc = add_product(acc, p16, lambda: mem.k[self.half].at[mine])
        self.release(mine)
        plgpu.barrier_wait(mem.ready.at[PROBABILITIES + 0])
        plgpu.barrier_wait(mem.landed.at[3 * other + self.half])
        self.clear(piece, pair, 0, other)
        acc = add_product(acc, lambda: self.p(other, 0), lambda: mem.k[self.half].at[other])
        self.release(other)
        return State(m_both, l, acc)

    def weight(self, score: Any, largest: Any) -> Any:
        """exp of the difference of scaled scores."""
        return jnp.exp2((score - largest) * (self.static.sm_scale * LOG2E))

    def p(self, slot: Any, tile: int) -> Ref:
        """Where the probabilities of a tile lie."""
        return self.mem.k.rope.at[slot] if self.mem.p is None else self.mem.p.at[tile]

    def scores(self, piece: Piece, pair: Any, here: Any, slot: Any) -> Any:
        """Masked scores of the tile that is this warpgroup's to score."""
        q, k, landed = self.mem.q, self.mem.k, self.mem.landed
        plgpu.barrier_wait(landed.at[3 * slot + self.half])
        self.clear(piece, pair, self.half, slot)

        def multiply(total: Ref) -> Any:
            for part in (self.half, 1 - self.half, 2):  # as they land
                if part != self.half:
                    plgpu.barrier_wait(landed.at[3 * slot + part])
                plgpu.wgmma(total, q[part].at[here], k[part].at[slot].transpose((1, 0)))
            return total[...]

        s = pl.run_scoped(multiply, plgpu.ACC((ROWS, TOKENS), jnp.float32))
        return lax.cond(self.is_seen(pair, self.half), lambda s: s, functools.partial(self.masked, piece, pair), s)

    # Visibility

    def note(self, pair: Any, tile: int) -> Ref:
        return self.mem.notes.at[self.static.notes_slot(pair), tile]

    def is_seen(self, pair: Any, tile: int) -> Any:
        """Whether every row sees every token of a tile."""
        return self.note(pair, tile)[0] == 1

    def bits(self, piece: Piece, pair: Any, tile: int, token: Any) -> Any:
        """Which bit of what a row sees tells of each token of a tile."""
        note, oldest_query = self.note(pair, tile), self.x.kv_lens[piece.row] - self.x.q_lens[piece.row]
        position = token + note[1]
        for j in range(1, self.static.pages):
            first = j * self.static.page_tokens
            position = jnp.where(token >= first, token + (note[1 + j] - first), position)
        draft = position - oldest_query
        return jnp.where(draft < 0, REAL, jnp.minimum(draft, NO_DRAFT))

    def masked(self, piece: Piece, pair: Any, s: Any) -> Any:
        """Scores, -inf where a row does not see a token."""
        bit = over_columns(self.bits(piece, pair, self.half, mosaic.column_iota(TOKENS)), s.shape)
        seen = over_tokens(self.seen(piece), s.shape)
        return jnp.where((lax.shift_right_logical(seen, bit) & 1) == 1, s, -jnp.inf)

    def seen(self, piece: Piece) -> Any:
        """[ROWS]: what each row sees."""
        return mosaic.load(self.x.seen.at[piece.row, pl.ds(self.block * ROWS, ROWS)], PER_ROW)

    def clear(self, piece: Piece, pair: Any, tile: int, slot: Any) -> None:
        """Makes values that no row sees 0, whatever they are: 0 · NaN is NaN."""

        @pl.when(~self.is_seen(pair, tile))
        def _clear() -> None:
            bit = self.bits(piece, pair, tile, mosaic.token_iota(TOKENS))
            any_row = self.x.seen_by_any[piece.row]
            alive = (lax.shift_right_logical(jnp.full_like(bit, any_row), bit) & 1) == 1
            values = self.mem.k[self.half].at[slot]
            for i in range(0, values.shape[1], 64):  # in few registers
                part = values.at[:, pl.ds(i, 64)]
                loaded = plgpu.load(part, layout=mosaic.TILE)
                part[...] = jnp.where(over_tokens(alive, loaded.shape), loaded, jnp.zeros((), loaded.dtype))
            plgpu.commit_smem()


def unknown_zero() -> Any:
    """0, which the compiler can't know: addresses made with it are not computed, and kept, before a loop."""
    return lax.optimization_barrier(jnp.int32(0))


def add_product(total: Any, a: Any, b: Callable[[], Ref]) -> Any:
    """`mosaic.add_product` for operands that are sliced where they are used, and overwritten by copies later."""
    if mosaic.interpreted():
        product = jnp.dot(a()[...] if callable(a) else a, b()[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return total + product
    added: Any = pl.run_state(lambda result: plgpu.wgmma(result, a() if callable(a) else a, b()))(plgpu.ACC.init(total))
    return added


# --- results


class Results(NamedTuple):
    """In global memory: out [B, blocks·ROWS, L], lse [blocks, B, ROWS] of rows in one piece; states of the others."""

    out: Any
    lse: Any
    partials: Partials


def finish(results: Results, consumer: Consumer, piece: Piece, state: State) -> None:
    """Writes what a piece comes to."""
    mem, static, half, block = consumer.mem, consumer.static, consumer.half, consumer.block
    mem.stats[2 + half] = state.l
    plgpu.barrier_arrive(mem.both.at[SUMS])
    plgpu.barrier_wait(mem.both.at[SUMS])
    real = consumer.seen(piece) < 0
    m = jnp.where(real, state.m, -jnp.inf)
    l = jnp.where(real, state.l + mosaic.load(mem.stats.at[2 + 1 - half], PER_ROW), 0.0)  # noqa: E741
    num_pages = consumer.x.plan.num_pages[piece.row]
    alone = (piece.start == 0) & (piece.stop == num_pages)
    columns = static.columns(half)

    @pl.when(alone)
    def _write() -> None:
        seen = l != 0
        inverse = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
        normalised = state.acc * over_tokens(inverse, state.acc.shape)
        # NaN of a row that is not real
        normalised = jnp.where(over_tokens(seen, state.acc.shape), normalised, 0.0).astype(results.out.dtype)
        place = results.out.at[piece.row, pl.ds(block * ROWS, ROWS), columns]
        if normalised.dtype == mem.q.left.dtype:
            mem.q[half][0] = normalised
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mem.q[half].at[0], place)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        else:
            place[...] = normalised
        if half == 0:
            lse = m * static.sm_scale + jnp.log2(jnp.where(seen, l, 1.0)) * (1 / LOG2E)
            results.lse[block, piece.row] = jnp.where(seen, lse, -jnp.inf)

    @pl.when(~alone)
    def _keep() -> None:
        partials = results.partials
        place = block * (partials.acc.shape[0] // results.lse.shape[0]) + piece.number
        acc = jnp.where(over_tokens(real, state.acc.shape), state.acc, 0.0)
        for i in range(0, acc.shape[1], 64):
            some = pl.ds(half * static.widths[0] + i, 64)
            turned = plgpu.layout_cast(acc[:, i : i + 64], plgpu.Layout.WGMMA_TRANSPOSED)
            partials.acc.at[place, some].transpose((1, 0))[...] = turned
        if half == 0:
            partials.stats[place, 0] = m * static.sm_scale
            partials.stats[place, 1] = l


def kernel(static: Static, x: Inputs, out: Ref, lse: Ref, partials: Partials, *memory: Ref) -> None:
    """The roles of the three warpgroups."""
    results = Results(out, lse, partials)
    warpgroup = lax.axis_index("warpgroup")
    block = lax.axis_index("blocks") * static.cluster + lax.axis_index("cluster")
    mem = Memory(*memory)

    def compute(half: int) -> None:
        plgpu.set_max_registers(static.registers[0], action="increase")
        Consumer(static, x, mem, block, half).run(functools.partial(finish, results))
        plgpu.wait_smem_to_gmem(0)

    def copy() -> None:
        plgpu.set_max_registers(static.registers[1], action="decrease")
        Producer(static, x, mem, block).run()

    lax.switch(warpgroup, [functools.partial(compute, 0), functools.partial(compute, 1), copy])


def decode(x: Inputs, static: Static, out_dtype: jax.typing.DTypeLike) -> tuple[Any, Any, Partials]:
    """Runs the kernel: output and LSE of rows in one piece, and partial states of the others."""
    batch, rows, latent_dim = x.q_latent.shape
    blocks, num_programs = rows // ROWS, x.plan.program_row.shape[0] - 1
    cuts = batch * pl.cdiv(x.block_tables.shape[1], x.plan.piece_pages) if x.plan.piece_pages else num_programs
    states = blocks * (batch + cuts)
    return plgpu.kernel(
        functools.partial(kernel, static),
        out_type=Results(
            jax.ShapeDtypeStruct((batch, rows, latent_dim), out_dtype),
            jax.ShapeDtypeStruct((blocks, batch, ROWS), jnp.float32),
            Partials(
                jax.ShapeDtypeStruct((states, 2, ROWS), jnp.float32),
                jax.ShapeDtypeStruct((states, latent_dim, ROWS), jnp.float32),
            ),
        ),
        grid=(num_programs, blocks // static.cluster),
        grid_names=("program", "blocks"),
        cluster=(static.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=Memory.types(x, static),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_decode_rows",
    )(x)
