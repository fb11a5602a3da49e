"""Attention of up to 64 query rows to wide latents in 8 bits, which stay so in shared memory, by two warpgroups.

Tokens are the rows of a tile's products, and query rows their columns (`mosaic.hopper.raw_latents`). The output of a
block, [L, 64] in float32, does not fit the registers of one warpgroup: each accumulates half of the latent's columns.
They score tiles of 64 latents in turn, and each needs the other's probabilities too:

    warpgroup 0                                  warpgroup 1
    S2 = C2 Q^T                                  P1 = exp(S1 - m), publishes P1
    O += left(C1)^T P1                      <-   O += right(C1)^T P1
    P2 = exp(S2 - m), publishes P2               S3 = C3 Q^T
    O += left(C2)^T P2                      ->   O += right(C2)^T P2
    S4 = C4 Q^T                                  P3 = exp(S3 - m), publishes P3

So either one does the same, half a pair later: it scores its tile, adds the other's tile before it, publishes, and adds
its own. A tile is held for little longer than that, of the time that two tiles take, and the rest is there to copy the
tile that takes its place.

What probabilities are relative to, m, goes from one to the other with them. It changes where a score exceeds it by
much, so mostly not at all; then whoever changes it publishes the factor of the sums so far, too.

Where latents come from is for a kernel to say; that of `mla_sparse` gathers them.

No wait can last. Below, "waits for x" means that x was asked for and does not itself depend on the one that waits.

- free: both warpgroups, once at the start, and after each use of a tile. It has one phase more than there are tiles in
  a slot. Whoever fills tiles waits for one phase before each, and for the last one before it ends.
- ready[i]: warpgroup i arrives after its scores, for which it waits for a tile to be filled, for ready of the tile
  before, and for taken[i]. A tile is filled once that three before it is freed, which has to wait for nothing after the
  scores of the tile after it.
- taken[i]: the other warpgroup than that of ready[i], once at the start, and after each use of what was published.
  Warpgroup i waits for one phase before it publishes, and for the last one before it ends.
- sums, q_converted: both warpgroups, as often as there are splits. q_free: both, once at the start, and after a split's
  last scores; whoever copies queries waits for one phase before each, and for the last one before it ends.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper import raw_columns, raw_latents, wgmma
from pallas_attn.mosaic.hopper.seesaw import INITIAL_MAX
from pallas_attn.mosaic.hopper.wgmma import RESCALE_THRESHOLD_LOG2
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E
from pallas_attn.mosaic.primitives.register_tiles import BY_64, PER_COLUMN, over_columns, over_tokens
from pallas_attn.portable.quantise import QUERY_SCALE
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP

TOKENS = 64
"""Latents of a tile."""

SLOTS = 3
"""Tiles in shared memory."""

MAX, FACTORS, SUMS, SCRATCH = 0, 1, 3, 5
"""Rows of `RawMemory.stats`."""


def slot_of(pair: Any, tile: int) -> tuple[Any, Any]:
    """Slot in shared memory of a tile of a pair, and how often it was used before."""
    index = 2 * pair + tile
    return lax.rem(index, SLOTS), lax.div(index, SLOTS)


class RawMemory(NamedTuple):
    """Shared memory and barriers of a program, beside those of a kernel's own.

    Attributes:
      q: [1, rows, columns], those of either half; once they are there, converted by `raw_latents.convert_queries`.
      q_rope: [1, rows, R].
      k: e4m3 [SLOTS, TOKENS, L].
      rope: [SLOTS, TOKENS, R].
      scales: float32 [SLOTS, pages, at least page tokens · groups].
      p: float16 [2, rows, TOKENS], probabilities of either tile of a pair.
      ratios: float16 [2, groups, TOKENS], scales of either tile by their token's largest one.
      stats: float32 [13, rows]: what probabilities are relative to; factors of either tile; sums of either warpgroup;
        memory for maxima and sums, four rows for each.
      weights: of `raw_columns.sums_type`, of either warpgroup's tiles.
      changed: int32 [2], whether either tile of a pair has factors.
      q_landed: a query is there.
      free: [SLOTS], a tile may be overwritten.
      ready, taken: [2], what belongs to either tile of a pair is published, and may be overwritten.
      sums, q_converted, q_free: sums of both warpgroups are in `stats`; the query is converted, and may be overwritten.
    """

    q: Any
    q_rope: Any
    k: Any
    rope: Any
    scales: Any
    p: Any
    ratios: Any
    stats: Any
    weights: Any
    changed: Any
    q_landed: Any
    free: Any
    ready: Any
    taken: Any
    sums: Any
    q_converted: Any
    q_free: Any

    @staticmethod
    def types(rows: int, widths: tuple[int, int], page_tokens: int, dtype: jax.typing.DTypeLike) -> RawMemory:
        """Scratch types for queries of a dtype.

        Args:
          widths: columns of either half.
          page_tokens: tokens of a tile whose scales come together.
        """
        latent_dim = sum(widths)
        scales = page_tokens * latent_dim // LATENT_GROUP
        return RawMemory(
            q=tuple(register_tiles.operand((1, rows, width), dtype) for width in widths),
            q_rope=register_tiles.operand((1, rows, TOKENS), dtype),
            k=register_tiles.operand((SLOTS, TOKENS, latent_dim), LATENT_8BIT),
            rope=register_tiles.operand((SLOTS, TOKENS, TOKENS), dtype),
            scales=plgpu.SMEM((SLOTS, TOKENS // page_tokens, -(-scales // 32) * 32), jnp.float32),
            p=register_tiles.operand((2, rows, TOKENS), jnp.float16),
            ratios=plgpu.SMEM((2, latent_dim // LATENT_GROUP, TOKENS), jnp.float16),
            stats=plgpu.SMEM((13, rows), jnp.float32),
            weights=raw_columns.sums_type(rows),
            changed=plgpu.SMEM((2,), jnp.int32),
            q_landed=plgpu.Barrier(num_arrivals=3),
            free=plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
            ready=plgpu.Barrier(num_barriers=2),
            taken=plgpu.Barrier(num_barriers=2),
            sums=plgpu.Barrier(num_arrivals=2),
            q_converted=plgpu.Barrier(num_arrivals=2),
            q_free=plgpu.Barrier(num_arrivals=2),
        )


class RawFacts(Protocol):
    """Compile-time facts of a kernel.

    Attributes:
      latent_dim: L.
      rows: query rows of a block.
      sm_scale: multiplies the scores.
      widths: columns of the latent that each warpgroup accumulates.
      page_tokens: tokens of a tile whose scales lie together.
    """

    @property
    def latent_dim(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def sm_scale(self) -> float: ...
    @property
    def widths(self) -> tuple[int, int]: ...
    @property
    def page_tokens(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class RawTurns[Split]:
    """One of the two warpgroups that compute, and its turns at pairs of tiles.

    A split is what a kernel attends to before it writes a result; it is handed to the methods that a kernel defines.

    Attributes:
      half: which of the tiles of a pair it scores, and which half of the latent it accumulates.
    """

    static: RawFacts
    memory: RawMemory
    half: int

    # What a kernel defines

    def await_tile(self, slot: Any, use: Any, *, keys: bool) -> None:
        """Wait until a tile is there.

        Args:
          keys: whether tensor cores read its rotated keys after that; else threads alone read its latents.
        """
        raise NotImplementedError

    def release(self, slot: Any) -> None:
        """Let a tile be overwritten."""
        plgpu.barrier_arrive(self.memory.free.at[slot])

    def is_full(self, pair: Any, slot: Any) -> Any:
        """Whether every row sees every token of this warpgroup's tile of a pair."""
        raise NotImplementedError

    def mask_tile(self, split: Split, pair: Any, slot: Any, s: Any) -> Any:
        """Set scores [TOKENS, rows] of such a tile to -inf where rows do not see tokens; make latents that no row sees
        0, and their scales 1.
        """
        raise NotImplementedError

    # Turns

    def begin(self) -> None:
        """Let all memory be filled; once, before the first split."""
        mem = self.memory
        plgpu.barrier_arrive(mem.q_free)
        for slot in range(SLOTS):
            plgpu.barrier_arrive(mem.free.at[slot])
        plgpu.barrier_arrive(mem.taken.at[1 - self.half])

    def end(self) -> None:
        """Wait for the last arrivals; once, after the last split."""
        plgpu.barrier_wait(self.memory.taken.at[self.half])

    def attend(self, split: Split, first: Any, count: Any) -> Any:
        """Attend to `count` pairs of tiles, of which `first` is the first, with the next query: all latents times
        weights, [columns, rows], in this warpgroup's columns.
        """
        mem, rows = self.memory, self.static.rows
        plgpu.barrier_wait(mem.q_landed)
        raw_latents.convert_queries(mem.q[self.half].at[0])
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.q_converted)
        plgpu.barrier_wait(mem.q_converted)
        if self.half == 0:
            mem.stats[MAX] = register_tiles.filled(INITIAL_MAX, (rows,), PER_COLUMN)
            plgpu.commit_smem()
        acc = register_tiles.filled(0.0, (self.static.widths[self.half], rows), BY_64.tile)
        raw_columns.clear_sums(mem.weights.at[self.half], rows)
        acc = lax.fori_loop(first, first + count, lambda pair, acc: self.attend_pair(split, first, pair, acc), acc)
        return acc if self.half else self.add_others(first + count - 1, acc)

    def attend_pair(self, split: Split, first: Any, pair: Any, acc: Any) -> Any:
        """Attend to this warpgroup's tile of a pair, and to the other one's before it."""
        slot, use = slot_of(pair, self.half)
        self.await_tile(slot, use, keys=True)
        s = self.scores(slot)
        if self.half:
            acc = self.add_others(pair, acc)
        else:
            acc = lax.cond(pair > first, lambda acc: self.add_others(pair - 1, acc), lambda acc: acc, acc)
        self.publish(split, pair, slot, s)
        acc = self.add(slot, self.half, acc)
        self.release(slot)
        return acc

    def add_others(self, pair: Any, acc: Any) -> Any:
        """Add the other warpgroup's tile of a pair, once its probabilities are there."""
        tile = 1 - self.half
        slot, use = slot_of(pair, tile)
        self.await_tile(slot, use, keys=False)
        self.await_other()
        acc = self.add(slot, tile, acc)
        self.release(slot)
        plgpu.barrier_arrive(self.memory.taken.at[tile])
        return acc

    def await_other(self) -> None:
        """Wait until the other warpgroup's tile of a pair is published, and let weights be relative to the same."""
        mem, tile = self.memory, 1 - self.half
        plgpu.barrier_wait(mem.ready.at[tile])
        raw_columns.rescale_weights(mem.weights.at[self.half], mem.changed[tile], mem.stats.at[FACTORS + tile])

    def scores(self, slot: Any) -> Any:
        """Products of the query with a tile, [TOKENS, rows], divided by the scales of the last group of columns."""
        mem, zero = self.memory, basics.opaque_zero()
        rotated = wgmma.start_scores([(mem.rope.at[slot], mem.q_rope.at[zero])], None, register_tiles.ROW_BYTES)
        queries = [q.at[zero] for q in mem.q]
        return raw_latents.add_scores(rotated, mem.k.at[slot], queries, mem.scales.at[slot], self.static.page_tokens)

    def scales(self, slot: Any) -> list[jax.Array]:
        """Scales of a tile's tokens, for each group of columns."""
        groups = self.static.latent_dim // LATENT_GROUP
        ref = self.memory.scales.at[slot]
        loaded = dequantize.load_group_scales(ref, self.static.page_tokens, groups, TOKENS, BY_64)
        return [jnp.maximum(scale, dequantize.SMALLEST_SCALE) for scale in loaded]

    def publish(self, split: Split, pair: Any, slot: Any, s: Any) -> None:
        """Publish the probabilities of this warpgroup's tile, and add up their weights."""
        mem, half, shape = self.memory, self.half, s.shape
        s = lax.cond(self.is_full(pair, slot), lambda s: s, lambda s: self.mask_tile(split, pair, slot, s), s)
        scales = self.scales(slot)
        largest = functools.reduce(jnp.maximum, scales)
        x = s * over_tokens(scales[-1] * (self.static.sm_scale / QUERY_SCALE * LOG2E), shape)
        x = x + over_tokens(jnp.log2(largest), shape)
        plgpu.barrier_wait(mem.taken.at[half])
        relative = x - over_columns(basics.load(mem.stats.at[MAX], PER_COLUMN), shape)
        changed = raw_columns.exceeds(relative, RESCALE_THRESHOLD_LOG2)

        @pl.when(changed == 1)
        def _raise_max() -> None:
            m = basics.load(mem.stats.at[MAX], PER_COLUMN)
            highest = raw_columns.largest_of_rows(x, mem.stats.at[pl.ds(SCRATCH + 4 * half, 4)])
            raised = jnp.where(highest > m + RESCALE_THRESHOLD_LOG2, highest, m)
            mem.stats[FACTORS + half] = jnp.exp2(m - raised)
            mem.stats[MAX] = raised

        mem.changed[half] = changed
        raw_columns.rescale_weights(mem.weights.at[half], changed, mem.stats.at[FACTORS + half])
        p = jnp.exp2(x - over_columns(basics.load(mem.stats.at[MAX], PER_COLUMN), shape))
        ratios = [(scale / largest).astype(jnp.float16) for scale in self.scales(slot + basics.opaque_zero())]
        zero = basics.opaque_zero()  # places are computed here, not kept
        raw_columns.publish(p.astype(jnp.float16), mem.p.at[half + zero], ratios, mem.ratios.at[half + zero])
        plgpu.barrier_arrive(mem.ready.at[half])
        raw_columns.add_weights(mem.weights.at[half], p, 1 / largest)

    def add(self, slot: Any, tile: int, acc: Any) -> Any:
        """Add a tile's latents times their probabilities."""
        mem, half = self.memory, self.half
        acc = raw_columns.rescale_columns(acc, mem.changed[tile], mem.stats.at[FACTORS + tile])
        first, p = half * self.static.widths[0], mem.p.at[tile + basics.opaque_zero()]
        return raw_latents.add_values(acc, mem.k.at[slot], first, p, mem.ratios.at[tile])

    # Results

    def trade_sums(self) -> Any:
        """Sums [rows] of the weights of all tiles, also the other warpgroup's. The next query may come."""
        mem, half = self.memory, self.half
        plgpu.barrier_arrive(mem.q_free)
        own = raw_columns.total_weights(
            mem.weights.at[half], self.static.rows, mem.stats.at[pl.ds(SCRATCH + 4 * half, 4)]
        )
        mem.stats[SUMS + half] = own
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.sums)
        plgpu.barrier_wait(mem.sums)
        return own + basics.load(mem.stats.at[SUMS + 1 - half], PER_COLUMN)

    def largest(self) -> Any:
        """Load the maxima that weights are relative to, [rows]; for warpgroup 0 alone, which resets them for the next
        split.
        """
        return basics.load(self.memory.stats.at[MAX], PER_COLUMN)


def normalise(acc: Any, l: Any) -> Any:  # noqa: E741
    """Divide acc [columns, rows] by sums of weights l [rows]; 0 where a row sees nothing, whatever acc holds."""
    seen = l != 0
    inverse = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
    return jnp.where(over_columns(seen, acc.shape), acc * over_columns(inverse, acc.shape), 0.0)
