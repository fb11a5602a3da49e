"""Attention of 64 query rows to wide latents by two warpgroups, which trade probabilities (the "seesaw").

The output of a block of rows, [64, L] in float32, does not fit the registers of one warpgroup: warpgroup 0 accumulates
the left half of the latent's columns, warpgroup 1 the right one. They score tiles of 64 latents in turn, and each needs
the other's probabilities too (after the "seesaw" of FlashMLA's deep dive of April 2025, but tile by tile: there,
warpgroup 1 sees the probabilities of the first tile of a pair only once the maxima of the second are known). What
stands side by side runs at the same time; a product is waited for no sooner than its result is needed:

    warpgroup 0, even                            warpgroup 1, odd
    P0 = exp(S0 - m0), publishes P0 and m0       starts S1 = Q C1^T, as C1 lands
    O = O exp(m - m0) + P0 left(C0)         ->   O = O exp(m - m0) + P0 right(C0)
    frees left(C0)                               meanwhile P1 = exp(S1 - m1), publishes P1; frees right(C0); then m1
    O = O exp(m0 - m1) + P1 left(C1)        <-   O = O exp(m0 - m1) + P1 right(C1)
    frees left(C1)                               frees right(C1)
    the next S0 = Q C0^T, as C0 lands

A warpgroup multiplies its own probabilities from registers, the other's from shared memory. There they take the place
of the tile's rotated keys, which are as large and no longer needed (if R is not 64, they have memory of their own).
Sums are rescaled only where a row's maximum has grown by much, so mostly not at all.

Where latents come from is for the kernels of `mla_decode` (pages) and `mla_sparse` (rows here and there) to say.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper import wgmma
from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.hopper.wgmma import RESCALE_THRESHOLD_LOG2, UNPAIRED, partial_sums, rescale_accumulator
from pallas_attn.mosaic.merge import AttentionState, load_fragments
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, over_tokens

ROWS = 64
"""Query rows of a block: wgmma's M."""

TOKENS = 64
"""Latents of a tile."""

PARTS = 3
"""Parts of a tile: the latent's columns that either warpgroup accumulates, and the rotated columns."""

HALVES = ((0, 0), (0, 1), (1, 1), (1, 0))
"""Tile of a pair and half of its columns, in the order in which they fall free."""

ROPE = 2
"""Part of a tile that has the rotated keys."""

Q_FREE, SUMS = 0, 1
"""Barriers for which both warpgroups arrive."""

PER_ROW = PER_TOKEN
"""Layout of a value for each row of a tile, here a query row."""

INITIAL_MAX = -1e30
"""Initial running maximum: finite, so that no difference is NaN, and smaller than any score."""


def halves(latent_dim: int) -> tuple[int, int]:
    """Columns of the latent that each warpgroup accumulates: multiples of 64."""
    left = -(-latent_dim // 128) * 64
    return left, latent_dim - left


class LatentParts(NamedTuple):
    """Columns of a query or a latent: those of either warpgroup, and the rotated ones."""

    left: Any
    right: Any
    rope: Any


class SeesawFacts(Protocol):
    """Compile-time facts of a kernel.

    Attributes:
      row_bytes: of a swizzled row of a tile.
      sm_scale: multiplies the scores.
      widths: columns of the latent that each warpgroup accumulates.
    """

    @property
    def row_bytes(self) -> int: ...
    @property
    def sm_scale(self) -> float: ...
    @property
    def widths(self) -> tuple[int, int]: ...

    def slot(self, pair: Any, tile: int) -> Any:
        """Slot in shared memory of a tile of a pair."""


class SeesawMemory(Protocol):
    """Shared memory and barriers of a program, of which this needs:

    Attributes:
      q: [1, ROWS, columns].
      k: [slots, TOKENS, columns].
      p: [2, ROWS, TOKENS], probabilities of either tile of a pair, or None.
      stats: [4, ROWS]: the largest scores after either tile of a pair, and the sums of either warpgroup.
      ready: [2], the largest scores after either tile of a pair are in `stats`, and its probabilities in `p`.
      both: [SUMS], those of both warpgroups are in `stats`; [Q_FREE], the query may be overwritten.
    """

    @property
    def q(self) -> LatentParts: ...
    @property
    def k(self) -> LatentParts: ...
    @property
    def p(self) -> Any: ...
    @property
    def stats(self) -> Any: ...
    @property
    def ready(self) -> Any: ...
    @property
    def both(self) -> Any: ...


class SeesawState(NamedTuple):
    """Attention of a block's rows over some latents, as one of the two warpgroups has it.

    Attributes:
      m: [ROWS], what scores are relative to, times log2 e: at most RESCALE_THRESHOLD_LOG2 below the largest so far.
      l: [ROWS, 8], its own tiles' share of the sums of 2**(score - m) of columns that are a multiple of 8 apart.
      acc: [ROWS, columns], all latents times those weights, in its own columns; in layout `UNPAIRED` while pairs
        of tiles are added.
    """

    m: Any
    l: Any  # noqa: E741
    acc: Any


@dataclasses.dataclass(frozen=True)
class SeesawTurns[Split]:
    """One of the two warpgroups that compute, and its turns at pairs of tiles.

    A split is what a kernel attends to before it writes a result; it is handed to the methods that a kernel defines.

    Attributes:
      half: which of the tiles of a pair it scores, and which half of the latent it accumulates.
    """

    static: SeesawFacts
    mem: SeesawMemory
    half: int

    # What a kernel defines

    def await_part(self, pair: Any, slot: Any, part: int) -> None:
        """Wait until a part of a tile of a pair is there."""
        raise NotImplementedError

    def release(self, slot: Any) -> None:
        """Let the half that this warpgroup reads values from be overwritten."""
        raise NotImplementedError

    def is_full(self, pair: Any, tile: int) -> Any:
        """Whether every row sees every token of a tile."""
        raise NotImplementedError

    def mask_tile(self, split: Split, pair: Any, slot: Any, s: Any) -> Any:
        """Set scores of a tile that is not full to -inf where rows do not see tokens, and values none sees to 0."""
        raise NotImplementedError

    def clear_dead_rows(self, split: Split, pair: Any, tile: int, slot: Any) -> None:
        """Make values that no row sees 0, in this warpgroup's half of a tile that the other one scores."""

    # Turns

    def empty(self) -> SeesawState:
        """State over no latents."""
        return SeesawState(
            register_tiles.filled(INITIAL_MAX, (ROWS,), PER_ROW),
            register_tiles.filled(0.0, (ROWS, 8), TILE),
            register_tiles.filled(0.0, (ROWS, self.static.widths[self.half]), UNPAIRED),
        )

    def attend(self, split: Split, first: Any, count: Any) -> SeesawState:
        """Attend to `count` pairs of tiles, at least one, of which `first` is the first."""
        state = self.empty()
        if self.half:
            state = lax.fori_loop(0, count, lambda i, state: self.odd(split, first + i, state), state)
            return state._replace(acc=wgmma.as_tile(state.acc))

        def step(i: Any, carry: tuple[SeesawState, Any, Any]) -> tuple[SeesawState, Any, Any]:
            return self.even(split, first + i, *carry, more=True)

        s, full = self.first_scores(first)
        state, s, full = lax.fori_loop(0, count - 1, step, (state, s, full))
        state, *_ = self.even(split, first + (count - 1), state, s, full, more=False)
        return state._replace(acc=wgmma.as_tile(state.acc))

    def slots(self, pair: Any) -> tuple[Any, Any]:
        """Slots of the tiles of a pair."""
        zero = basics.opaque_zero()
        return zero + self.static.slot(pair, 0), zero + self.static.slot(pair, 1)

    def even(
        self, split: Split, pair: Any, state: SeesawState, s: Any, full: Any, *, more: bool
    ) -> tuple[SeesawState, Any, Any]:
        """Attend to a pair of tiles, of which the first has products s, and score the next pair's first if `more`."""
        mem, (mine, other) = self.mem, self.slots(pair)
        m, p, p16 = self.probabilities(split, pair, mine, state.m, s, full)
        wgmma.publish_probs(p16, self.probs(mine, 0), m, mem.stats.at[0], self.static.row_bytes)
        plgpu.barrier_arrive(mem.ready.at[0])
        acc, l = rescale_accumulator((state.acc, state.l), (UNPAIRED, TILE), state.m, m)  # noqa: E741
        acc = self.start_values(p16, mine, acc)
        l = l + partial_sums(p)  # noqa: E741
        acc = wgmma.finish(acc, UNPAIRED, UNPAIRED, under_way=0)
        self.release(mine)
        plgpu.barrier_wait(mem.ready.at[1])
        m_both = basics.load(mem.stats.at[1], PER_ROW)
        acc, l = rescale_accumulator((acc, l), (UNPAIRED, TILE), m, m_both)  # noqa: E741
        self.clear_dead_rows(split, pair, 1, other)
        acc = self.start_values(self.probs(other, 1), other, acc)
        acc = wgmma.finish(acc, UNPAIRED, UNPAIRED, under_way=0)
        self.release(other)
        if more:
            s, full = self.first_scores(pair + 1)
        return SeesawState(m_both, l, acc), s, full

    def first_scores(self, pair: Any) -> tuple[Any, Any]:
        """Products with the first tile of a pair, and whether every row sees all of it."""
        s = self.start_scores(pair, self.slots(pair)[0], (0, 1, 2))
        full = self.is_full(pair, 0)  # after the products, it would be waited for
        return wgmma.finish(s, UNPAIRED, TILE, under_way=0), full

    def odd(self, split: Split, pair: Any, state: SeesawState) -> SeesawState:
        """Attend to a pair of tiles, of which this warpgroup scores the second."""
        mem, (other, mine) = self.mem, self.slots(pair)
        s = self.start_scores(pair, mine, (1, 0, 2))
        full = self.is_full(pair, 1)
        plgpu.barrier_wait(mem.ready.at[0])
        m_first = basics.load(mem.stats.at[0], PER_ROW)
        acc, l = rescale_accumulator((state.acc, state.l), (UNPAIRED, TILE), state.m, m_first)  # noqa: E741
        self.clear_dead_rows(split, pair, 0, other)
        acc = self.start_values(self.probs(other, 0), other, acc)
        s = wgmma.finish(s, UNPAIRED, TILE, under_way=1)
        m, p, p16 = self.probabilities(split, pair, mine, m_first, s, full)
        wgmma.publish_probs(p16, self.probs(mine, 1), m, mem.stats.at[1], self.static.row_bytes)
        acc = wgmma.finish(acc, UNPAIRED, UNPAIRED, under_way=0)
        self.release(other)
        plgpu.barrier_arrive(mem.ready.at[1])
        acc, l = rescale_accumulator((acc, l), (UNPAIRED, TILE), m_first, m)  # noqa: E741
        acc = self.start_values(p16, mine, acc)
        l = l + partial_sums(p)  # noqa: E741
        acc = wgmma.finish(acc, UNPAIRED, UNPAIRED, under_way=0)
        self.release(mine)
        return SeesawState(m, l, acc)

    def probabilities(self, split: Split, pair: Any, slot: Any, m: Any, s: Any, full: Any) -> tuple[Any, Any, Any]:
        """Maxima [ROWS] and probabilities relative to them, in float32 and in 16 bits, of products of this warpgroup's
        tile.

        A maximum stays as it is while scores exceed it by little, so that the accumulator need not be rescaled. In a
        tile that is not full, what rows do not see is masked, in scores and values.
        """
        s = lax.cond(full, lambda s: s, lambda s: self.mask_tile(split, pair, slot, s), s)
        scale = self.static.sm_scale * LOG2E
        highest = s.max(axis=1) * scale
        m = jnp.where(highest > m + RESCALE_THRESHOLD_LOG2, highest, m)
        p = jnp.exp2(s * scale - over_tokens(m, s.shape))
        return m, p, p.astype(self.mem.k.left.dtype)

    def probs(self, slot: Any, tile: int) -> Ref:
        """Probabilities of a tile in shared memory."""
        return self.mem.k.rope.at[slot] if self.mem.p is None else self.mem.p.at[tile]

    def start_scores(self, pair: Any, slot: Any, parts: tuple[int, ...]) -> Any:
        """Start products of queries with parts of a tile of a pair, as these land."""
        s: Any = None
        q, k, zero, columns = self.mem.q, self.mem.k, basics.opaque_zero(), self.static.row_bytes // 2
        for part in parts:
            self.await_part(pair, slot, part)
            chunks = [pl.ds(i, columns) for i in range(0, q[part].shape[2], columns)]
            pieces = [(q[part].at[zero, :, chunk], k[part].at[slot, :, chunk]) for chunk in chunks]
            s = wgmma.start_scores(pieces, s, self.static.row_bytes)
        return s

    def start_values(self, p: Any, slot: Any, acc: Any) -> Any:
        """Start the product of probabilities with this warpgroup's half of a tile."""
        return wgmma.start_values(p, self.mem.k[self.half].at[slot], acc, self.static.row_bytes)

    # Results

    def release_query(self) -> None:
        """Let the query be overwritten."""
        plgpu.barrier_arrive(self.mem.both.at[Q_FREE])

    def trade_sums(self, state: SeesawState) -> Any:
        """Sums [ROWS] of the weights of all tiles, those of the other warpgroup's among them."""
        mem, half = self.mem, self.half
        own = state.l.sum(axis=1)
        mem.stats[2 + half] = own
        plgpu.barrier_arrive(mem.both.at[SUMS])
        plgpu.barrier_wait(mem.both.at[SUMS])
        return own + basics.load(mem.stats.at[2 + 1 - half], PER_ROW)


# --- results


def normalise(acc: Any, l: Any) -> Any:  # noqa: E741
    """Divide acc [ROWS, columns] by sums of weights l [ROWS]; 0 where a row sees nothing, whatever acc holds."""
    seen = l != 0
    inverse = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
    return jnp.where(over_tokens(seen, acc.shape), acc * over_tokens(inverse, acc.shape), 0.0)


def log_sum_exp(m: Any, l: Any) -> Any:  # noqa: E741
    """LSE of rows whose weights, exp2(score · log2 e - m), sum up to l."""
    seen = l != 0
    return jnp.where(seen, (m + jnp.log2(jnp.where(seen, l, 1.0))) * (1 / LOG2E), -jnp.inf)


def empty_rows(columns: int) -> AttentionState:
    """State of a block of rows over no latents, for so many columns."""
    return AttentionState(
        register_tiles.filled(-jnp.inf, (ROWS,), PER_ROW),
        register_tiles.filled(0.0, (ROWS,), PER_ROW),
        register_tiles.filled(0.0, (ROWS, columns), TILE),
    )


def add_partial_rows(stats: Ref, acc: Ref, merged: AttentionState) -> AttentionState:
    """Merge a partial state of a block of rows, stats [2, ROWS] and fragments of its columns, into another."""
    m, l = (basics.load(stats.at[i], PER_ROW) for i in range(2))  # noqa: E741
    return merged.merge(AttentionState(m, l, load_fragments(acc, merged.acc.shape, BY_64)), over_tokens)
