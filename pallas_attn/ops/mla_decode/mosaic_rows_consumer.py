"""The two warpgroups of `mosaic.row_layout` that compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.sm90 import tiles
from pallas_attn.mosaic.sm90.tiles import clear_rows, over_columns, over_tokens
from pallas_attn.mosaic.sm90.wgmma import RESCALE_THRESHOLD_LOG2, finish, partial_sums, rescale_accumulator
from pallas_attn.ops.mla_decode.mosaic_rows_memory import (
    BY_ALL,
    BY_NONE,
    LOWEST,
    NO_DRAFT,
    PARTS,
    PER_ROW,
    Q_FREE,
    REAL,
    ROWS,
    TOKENS,
    Inputs,
    Memory,
    Piece,
    Static,
    for_each_piece,
)
from pallas_attn.ops.mla_decode.mosaic_rows_products import leave, start_scores, start_values


class State(NamedTuple):
    """Attention of a block's rows over some latents, as one of the two warpgroups has it.

    Attributes:
      m: [ROWS], what scores are relative to, times log2 e: at most RESCALE_THRESHOLD_LOG2 below the largest so far.
      l: [ROWS, 8], its own tiles' share of the sums of 2**(score - m) of columns that are a multiple of 8 apart.
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
        self.release_query()
        for slot in range(2 * static.pairs):
            self.release(slot)

        def work(piece: Piece) -> None:
            plgpu.barrier_wait(mem.q_landed)
            empty = State(
                tiles.filled(LOWEST, (ROWS,), PER_ROW),
                tiles.filled(0.0, (ROWS, 8), tiles.TILE),
                tiles.filled(0.0, (ROWS, static.widths[self.half]), tiles.TILE),
            )
            finish(self, piece, (self.all_odd if self.half else self.all_even)(piece, empty))

        for_each_piece(static, self.x.plan, work)

    def release_query(self) -> None:
        """Lets it be overwritten."""
        plgpu.barrier_arrive(self.mem.both.at[Q_FREE])

    def release(self, slot: Any) -> None:
        """Lets the half that this warpgroup reads values from be overwritten."""
        plgpu.barrier_arrive(self.mem.free.at[2 * slot + self.half])

    def all_even(self, piece: Piece, state: State) -> State:
        """Takes in all pairs of tiles of a piece, as warpgroup 0."""

        def step(i: Any, carry: tuple[State, Any, Any]) -> tuple[State, Any, Any]:
            return self.even(piece, piece.pair + i, *carry, more=True)

        s, whole = self.first_scores(piece.pair)
        last = piece.num_pairs(self.static) - 1
        state, s, whole = lax.fori_loop(0, last, step, (state, s, whole))
        state, *_ = self.even(piece, piece.pair + last, state, s, whole, more=False)
        return state

    def all_odd(self, piece: Piece, state: State) -> State:
        """The same as warpgroup 1."""
        return lax.fori_loop(0, piece.num_pairs(self.static), lambda i, s: self.odd(piece, piece.pair + i, s), state)

    def slots(self, pair: Any) -> tuple[Any, Any]:
        """Of the tiles of a pair."""
        here = basics.unknown_zero()
        return here + self.static.slot(pair, 0), here + self.static.slot(pair, 1)

    def even(self, piece: Piece, pair: Any, state: State, s: Any, whole: Any, *, more: bool) -> tuple[State, Any, Any]:
        """Takes in a pair of tiles, of which the first has products s, and multiplies for the next if there is one."""
        mem, (mine, other) = self.mem, self.slots(pair)
        m, p, p16 = self.probabilities(piece, pair, mine, state.m, s, whole)
        leave(p16, self.p(mine, 0), m, mem.stats.at[0], self.static.row_bytes)
        plgpu.barrier_arrive(mem.ready.at[0])
        acc, l = rescale_accumulator((state.acc, state.l), state.m, m)  # noqa: E741
        acc = self.start_values(p16, mine, acc)
        l = l + partial_sums(p)  # noqa: E741
        acc = finish(acc, under_way=0)
        self.release(mine)
        plgpu.barrier_wait(mem.ready.at[1])
        m_both = basics.load(mem.stats.at[1], PER_ROW)
        acc, l = rescale_accumulator((acc, l), m, m_both)  # noqa: E741
        self.clear_unseen(piece, pair, 1, other)
        acc = self.start_values(self.p(other, 1), other, acc)
        acc = finish(acc, under_way=0)
        self.release(other)
        if more:
            s, whole = self.first_scores(pair + 1)
        return State(m_both, l, acc), s, whole

    def first_scores(self, pair: Any) -> tuple[Any, Any]:
        """Products with the first tile of a pair, and whether every row sees all of it."""
        s = self.start_scores(self.slots(pair)[0], (0, 1, 2))
        whole = self.is_whole(pair, 0)  # not after the products, which is when it would be waited for
        return finish(s, under_way=0), whole

    def odd(self, piece: Piece, pair: Any, state: State) -> State:
        """Takes in a pair of tiles, and scores the second."""
        mem, (other, mine) = self.mem, self.slots(pair)
        s = self.start_scores(mine, (1, 0, 2))
        whole = self.is_whole(pair, 1)
        plgpu.barrier_wait(mem.ready.at[0])
        m_first = basics.load(mem.stats.at[0], PER_ROW)
        acc, l = rescale_accumulator((state.acc, state.l), state.m, m_first)  # noqa: E741
        self.clear_unseen(piece, pair, 0, other)
        acc = self.start_values(self.p(other, 0), other, acc)
        s = finish(s, under_way=1)
        m, p, p16 = self.probabilities(piece, pair, mine, m_first, s, whole)
        leave(p16, self.p(mine, 1), m, mem.stats.at[1], self.static.row_bytes)
        acc = finish(acc, under_way=0)
        self.release(other)
        plgpu.barrier_arrive(mem.ready.at[1])
        acc, l = rescale_accumulator((acc, l), m_first, m)  # noqa: E741
        acc = self.start_values(p16, mine, acc)
        l = l + partial_sums(p)  # noqa: E741
        acc = finish(acc, under_way=0)
        self.release(mine)
        return State(m, l, acc)

    def probabilities(self, piece: Piece, pair: Any, slot: Any, m: Any, s: Any, whole: Any) -> tuple[Any, Any, Any]:
        """Of products of this warpgroup's tile: what they are relative to now, and they, in float32 and as multiplied.

        Scores relative to less than the largest are as good as long as they are in range, and what was added up before
        need not shrink. A tile that is not whole loses what rows do not see, among the scores and the values.
        """

        def hide(s: Any) -> Any:
            self.clear_unseen(piece, pair, self.half, slot)
            return self.masked(piece, pair, s)

        s = lax.cond(whole, lambda s: s, hide, s)
        scale = self.static.sm_scale * LOG2E
        highest = s.max(axis=1) * scale
        m = jnp.where(highest > m + RESCALE_THRESHOLD_LOG2, highest, m)
        p = jnp.exp2(s * scale - over_tokens(m, s.shape))
        return m, p, p.astype(self.mem.k.left.dtype)

    def p(self, slot: Any, tile: int) -> Ref:
        """Where the probabilities of a tile lie."""
        return self.mem.k.rope.at[slot] if self.mem.p is None else self.mem.p.at[tile]

    def start_scores(self, slot: Any, parts: tuple[int, ...], s: Any = None) -> Any:
        """Starts products of queries with parts of a tile, as these land, which are added to those started before."""
        q, k, here, columns = self.mem.q, self.mem.k, basics.unknown_zero(), self.static.row_bytes // 2
        for part in parts:
            plgpu.barrier_wait(self.mem.landed.at[PARTS * slot + part])
            for i in range(0, q[part].shape[2], columns):
                left, right = q[part].at[here, :, pl.ds(i, columns)], k[part].at[slot, :, pl.ds(i, columns)]
                s = start_scores(left, right, s, self.static.row_bytes)
        return s

    def start_values(self, p: Any, slot: Any, acc: Any) -> Any:
        """Starts the product of probabilities with this warpgroup's half of a tile."""
        return start_values(p, self.mem.k[self.half].at[slot], acc, self.static.row_bytes)

    # Visibility

    def note(self, pair: Any, tile: int) -> Ref:
        return self.mem.notes.at[self.static.notes_slot(pair), tile]

    def is_whole(self, pair: Any, tile: int) -> Any:
        """Whether every row sees every token of a tile that is there."""
        return self.note(pair, tile)[0] == BY_ALL

    def bits(self, piece: Piece, pair: Any, tile: int, token: Any) -> Any:
        """Which bit of what a row sees tells of each token of a tile."""
        note, oldest_query = self.note(pair, tile), piece.oldest_query(self.static, self.x)
        position = token + note[1]
        for j in range(1, self.static.pages):
            first = j * self.static.page_tokens
            position = jnp.where(token >= first, token + (note[1 + j] - first), position)
        draft = position - oldest_query
        return jnp.where(draft < 0, REAL, jnp.minimum(draft, NO_DRAFT))

    def masked(self, piece: Piece, pair: Any, s: Any) -> Any:
        """Scores, -inf where a row does not see a token."""
        bit = over_columns(self.bits(piece, pair, self.half, tiles.column_iota(TOKENS)), s.shape)
        seen = over_tokens(self.seen(piece), s.shape)
        return jnp.where((lax.shift_right_logical(seen, bit) & 1) == 1, s, -jnp.inf)

    def seen(self, piece: Piece) -> Any:
        """[ROWS]: what each row sees."""
        if self.x.seen is None:
            row = self.block * ROWS + tiles.token_iota(ROWS)
            newer = self.static.queries - 1 - lax.div(row, self.static.heads)  # drafts, which it does not see
            bits = lax.shift_right_logical(jnp.full_like(row, self.static.drafts), jnp.maximum(newer, 0))
            return jnp.where(newer >= 0, bits | jnp.int32(-(2**REAL)), 0)
        return basics.load(self.x.seen.at[piece.row, pl.ds(self.block * ROWS, ROWS)], PER_ROW)

    def clear_unseen(self, piece: Piece, pair: Any, tile: int, slot: Any) -> None:
        """Makes values that no row sees 0, whatever they are, in this warpgroup's half of a tile."""

        @pl.when(self.note(pair, tile)[0] == BY_NONE)
        def _clear() -> None:
            bit = self.bits(piece, pair, tile, tiles.token_iota(TOKENS))
            every = jnp.int32(self.static.drafts - 2**REAL)
            any_row = every if self.x.seen_by_any is None else self.x.seen_by_any[piece.row]
            alive = (lax.shift_right_logical(jnp.full_like(bit, any_row), bit) & 1) == 1
            clear_rows(self.mem.k[self.half].at[slot], alive, self.static.row_bytes)
            plgpu.commit_smem()
