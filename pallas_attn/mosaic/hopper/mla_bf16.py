"""Latent attention of 64 query rows over 16-bit latents: main loop of the two-warpgroup MLA kernel.

    S [64 rows, 64 tokens] = Q [64, L + R] Cᵀ       O [64 rows, L] += P C[:, :L]

O in float32 does not fit the registers of one warpgroup. Warpgroup 0 accumulates the left half of the L columns,
warpgroup 1 the right half. Tiles C of 64 latents come in pairs C0, C1. Each warpgroup computes the scores of one tile
and stores its probabilities for the other warpgroup:

    m is the reference of the exponent; rescale(a, b) multiplies O and l by exp(a - b)

    warpgroup 0, per pair                          warpgroup 1, per pair
    S0 = Q C0ᵀ  (issued in the previous pair)      start S1 = Q C1ᵀ as the columns of C1 arrive
    m0 = max(m, S0);  P0 = exp(S0 - m0)            wait ready[0];  rescale(m, m0)
    store P0, m0;  arrive ready[0]                 start O += P0 right(C0)
    rescale(m, m0)                                 wait S1;  m1 = max(m0, S1);  P1 = exp(S1 - m1)
    O += P0 left(C0);  arrive free[C0, left]       store P1, m1
    wait ready[1];  rescale(m0, m1)                wait O;  arrive free[C0, right];  arrive ready[1]
    O += P1 left(C1);  arrive free[C1, left]       rescale(m0, m1)
    start S0 of the next pair; wait for it         O += P1 right(C1);  arrive free[C1, right]
    m = m1                                         m = m1

The scheme is FlashMLA's "seesaw" (deep dive of April 2025) with one difference: in FlashMLA, warpgroup 1 receives the
probabilities of the first tile only after the maxima of the second tile are known.

A warpgroup reads its own probabilities from registers and the other warpgroup's from shared memory. The probabilities
of a tile overwrite the tile's rotated keys, which have the same size and are not needed after the scores. If R is not
64, probabilities have their own memory. O and l are rescaled only if the maximum of some row grows by more than
`RESCALE_THRESHOLD_LOG2`.

A third warpgroup, the producer, belongs to the calling kernel: `mla_decode` copies pages with TMA, `mla_sparse` gathers
rows with `cp.async`. The kernel passes its waits and masks as `Bf16TileAccess`.

Barriers (arrivals are per phase):

| barrier | phase | arrivals | waits |
|---|---|---|---|
| `q_full` | a split | copies of the three parts of a query | both warpgroups, before the first scores |
| `full` | use of a slot | producer's copies of a part of a tile | the warpgroup that scores the tile |
| `free[slot, half]` | use of a slot | warpgroup `half` (of every CTA of the cluster) | producer |
| `ready[tile]` | a pair | the warpgroup that scores the tile | the other warpgroup |
| `joint[SUMS]` | a split | both warpgroups | both warpgroups |
| `joint[Q_FREE]` | a split | both warpgroups | producer, before it copies the next query |

Deadlock freedom. Each wait below is for an event that does not depend on the waiting warpgroup's later steps.

- full: the producer starts each copy after free. Only the warpgroup that scores a tile waits for full, for all parts.
  The other warpgroup reads the tile after ready, which implies full.
- free: the number of phases is the number of copies plus one. Each consumer arrives once at the start and once after
  each use of a half. The producer waits for one phase before each copy. It waits in the order left(C0), right(C0),
  right(C1), left(C1) (`HALVES`). Consumers free these four halves before they wait for anything of the next pair. At
  its end the producer waits for the last phase, so that no CTA of a cluster exits while another CTA still arrives at
  its barriers.
- ready[0]: warpgroup 0 arrives after its scores, which depend on copies only. ready[1]: warpgroup 1 arrives after its
  scores and its product with P0, which depend on copies and on ready[0] of the same pair.
- joint[SUMS]: both warpgroups arrive once per split.
- joint[Q_FREE]: the number of phases is the number of splits plus one. The producer copies the first query at once. It
  copies each later query after the first pair of that split. The halves for this pair become free without the query.
- Data that one warpgroup stores for the other is overwritten after a wait that follows the other's last read. m0 and P0
  are overwritten after ready[1] of the same pair: warpgroup 1 arrives there after its product with P0. m1 and P1 are
  overwritten after ready[0] of the next pair: warpgroup 0 arrives there after all its products of this pair.
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

from pallas_attn.mosaic.hopper import mla_rows, wgmma
from pallas_attn.mosaic.hopper.mla_rows import INITIAL_MAX, PER_ROW, ROWS, TOKENS
from pallas_attn.mosaic.hopper.tiles import TILE
from pallas_attn.mosaic.hopper.wgmma import RESCALE_THRESHOLD_LOG2, UNPAIRED, partial_sums, rescale_accumulator
from pallas_attn.mosaic.merge import num_fragments, store_fragments
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, over_tokens, store_tile

PARTS = 3
"""Parts of a tile: left half and right half of the latent columns, and rotated keys."""

ROPE = 2
"""Index of the rotated keys among the parts."""

HALVES = ((0, 0), (0, 1), (1, 1), (1, 0))
"""(Tile of a pair, half of its columns) in the order in which consumers free them."""

Q_FREE, SUMS = 0, 1
"""Indices of `Bf16Scratch.joint`: the query may be overwritten; the sums of both warpgroups are in `stats`."""


class LatentParts(NamedTuple):
    """Columns of a query or of a tile: left half, right half, and rotated columns."""

    left: Any
    right: Any
    rope: Any


@dataclasses.dataclass(frozen=True)
class Bf16LoopConfig:
    """Compile-time parameters of the main loop.

    Attributes:
      latent_dim: L.
      rope_dim: R.
      row_bytes: bytes of a swizzled row of a tile.
      sm_scale: factor of the scores.
      pairs: pairs of tiles in shared memory.
    """

    latent_dim: int
    rope_dim: int
    row_bytes: int
    sm_scale: float
    pairs: int

    @property
    def widths(self) -> tuple[int, int]:
        """Latent columns that each warpgroup accumulates."""
        return mla_rows.halves(self.latent_dim)

    @property
    def has_own_probs(self) -> bool:
        """Whether probabilities have their own memory. Otherwise they overwrite the rotated keys."""
        return self.rope_dim != TOKENS

    def slot(self, pair: Any, tile: int) -> Any:
        """Shared-memory slot of a tile of a pair."""
        return tile if self.pairs == 1 else 2 * lax.rem(pair, self.pairs) + tile


class Bf16Scratch(NamedTuple):
    """Shared memory and barriers of a CTA. The module docstring has the barrier table.

    Attributes:
      q: [1, ROWS, columns].
      k: [2 · pairs, TOKENS, columns], pairs of tiles.
      p: [2, ROWS, TOKENS], probabilities of each tile of a pair; None if they overwrite `k.rope`.
      stats: float32 [4, ROWS]: reference m after each tile of a pair, then the sums of each warpgroup.
      producer: shared memory of the calling kernel.
      q_full, full, free, ready, joint: barriers. The calling kernel defines `full`.
    """

    q: LatentParts
    k: LatentParts
    p: Any
    stats: Any
    producer: Any
    q_full: Any
    full: Any
    free: Any
    ready: Any
    joint: Any

    @staticmethod
    def types(
        config: Bf16LoopConfig, dtype: jax.typing.DTypeLike, *, producer: Any, full: Any, cluster: str | None = None
    ) -> Bf16Scratch:
        """Bf16Scratch types.

        Args:
          dtype: of queries and latents.
          producer: scratch types of the calling kernel.
          full: type of the barriers `full`.
          cluster: name of the cluster axis whose CTAs share copies; None without clusters.
        """
        slots = 2 * config.pairs
        operand = functools.partial(register_tiles.operand, dtype=dtype, row_bytes=config.row_bytes)
        columns = LatentParts(*config.widths, config.rope_dim)
        if cluster is None:
            free = plgpu.Barrier(num_barriers=2 * slots)
        else:
            free = plgpu.ClusterBarrier(collective_axes=(cluster,), num_barriers=2 * slots)
        return Bf16Scratch(
            q=LatentParts(*(operand((1, ROWS, n)) for n in columns)),
            k=LatentParts(*(operand((slots, TOKENS, n)) for n in columns)),
            p=operand((2, ROWS, TOKENS)) if config.has_own_probs else None,
            stats=plgpu.SMEM((4, ROWS), jnp.float32),
            producer=producer,
            q_full=plgpu.Barrier(num_arrivals=3),
            full=full,
            free=free,
            ready=plgpu.Barrier(num_barriers=2),
            joint=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )


class Bf16TileAccess(NamedTuple):
    """Functions by which a kernel describes its tiles to the main loop. A pair is an index, a tile 0 or 1.

    Attributes:
      await_part: (pair, slot, part) -> None. Wait until a part of a tile is full.
      is_full: (pair, tile) -> bool. Whether every row sees every token of a tile.
      mask: (pair, slot, s) -> s. For a tile that is not full and that this warpgroup scores: set scores to -inf where a
        row does not see a token, and set latents that no row sees to 0 in this warpgroup's half.
      clear_dead_rows: (pair, tile, slot) -> None. For a tile that the other warpgroup scores: set latents that no row
        sees to 0 in this warpgroup's half.
    """

    await_part: Callable[[Any, Any, int], None]
    is_full: Callable[[Any, int], Any]
    mask: Callable[[Any, Any, Any], Any]
    clear_dead_rows: Callable[[Any, int, Any], None]


class HalfState(NamedTuple):
    """Attention of a block's rows over some tiles, as one warpgroup holds it.

    Attributes:
      m: [ROWS], reference of the exponent, in units of log2: at most RESCALE_THRESHOLD_LOG2 below the row's maximum.
      l: [ROWS, 8], sums of exp2(score - m) over the tiles that this warpgroup scored. Element j adds up the tokens with
        index j modulo 8.
      acc: [ROWS, columns], weighted sums of all latents, in this warpgroup's columns; in layout `UNPAIRED` inside the
        main loop.
    """

    m: Any
    l: Any  # noqa: E741
    acc: Any


# --- the main loop


def attend(
    config: Bf16LoopConfig, mem: Bf16Scratch, half: int, tiles: Bf16TileAccess, first: Any, count: Any
) -> HalfState:
    """Attend to `count` pairs of tiles, at least one, starting with pair `first`.

    Args:
      half: index of this warpgroup: the tile of each pair that it scores, and the half of the columns of its output.
    """
    row_bytes, layouts = config.row_bytes, (UNPAIRED, TILE)  # of accumulator and sums

    def slots(pair: Any) -> tuple[Any, Any]:
        zero = basics.opaque_zero()
        return zero + config.slot(pair, 0), zero + config.slot(pair, 1)

    def probs_ref(slot: Any, tile: int) -> Ref:  # [ROWS, TOKENS]
        return mem.k.rope.at[slot] if mem.p is None else mem.p.at[tile]

    def start_scores(pair: Any, slot: Any, parts: tuple[int, ...]) -> Any:
        """Start the products of queries with the parts of a tile, each part when it becomes full."""
        s: Any = None  # [ROWS, TOKENS]
        q, k, zero, columns = mem.q, mem.k, basics.opaque_zero(), row_bytes // 2
        for part in parts:
            tiles.await_part(pair, slot, part)
            chunks = [pl.ds(i, columns) for i in range(0, q[part].shape[2], columns)]
            operands = [(q[part].at[zero, :, chunk], k[part].at[slot, :, chunk]) for chunk in chunks]
            s = wgmma.start_scores(operands, s, row_bytes)
        return s

    def start_values(p: Any, slot: Any, acc: Any) -> Any:
        """Start the product of probabilities with this warpgroup's half of a tile."""
        return wgmma.start_values(p, mem.k[half].at[slot], acc, row_bytes)

    def softmax(pair: Any, slot: Any, m: Any, s: Any, full: Any) -> tuple[Any, Any, Any]:
        """Return the new reference [ROWS], and probabilities [ROWS, TOKENS] in float32 and in 16 bits."""
        s = lax.cond(full, lambda s: s, lambda s: tiles.mask(pair, slot, s), s)
        scale = config.sm_scale * LOG2E
        highest = s.max(axis=1) * scale  # [ROWS]
        m = jnp.where(highest > m + RESCALE_THRESHOLD_LOG2, highest, m)
        p = jnp.exp2(s * scale - over_tokens(m, s.shape))
        return m, p, p.astype(mem.k.left.dtype)

    def first_scores(pair: Any) -> tuple[Any, Any]:
        """Compute the scores of the first tile of a pair, and whether the tile is full."""
        s = start_scores(pair, slots(pair)[0], (0, 1, 2))
        full = tiles.is_full(pair, 0)  # loaded while the products run
        return wgmma.finish(s, UNPAIRED, TILE, under_way=0), full

    def warpgroup_0(pair: Any, state: HalfState, s: Any, full: Any, *, more: bool) -> tuple[HalfState, Any, Any]:
        """Attend to a pair whose first tile has scores s. If `more`, compute the first scores of the next pair."""
        mine, other = slots(pair)
        m, p, p16 = softmax(pair, mine, state.m, s, full)
        wgmma.publish_probs(p16, probs_ref(mine, 0), m, mem.stats.at[0], row_bytes)
        plgpu.barrier_arrive(mem.ready.at[0])
        acc, l = rescale_accumulator((state.acc, state.l), layouts, state.m, m)  # noqa: E741
        acc = start_values(p16, mine, acc)
        l = l + partial_sums(p)  # noqa: E741
        acc = wgmma.finish(acc, UNPAIRED, UNPAIRED, under_way=0)
        release(mem, mine, half)
        plgpu.barrier_wait(mem.ready.at[1])
        m_both = basics.load(mem.stats.at[1], PER_ROW)
        acc, l = rescale_accumulator((acc, l), layouts, m, m_both)  # noqa: E741
        tiles.clear_dead_rows(pair, 1, other)
        acc = start_values(probs_ref(other, 1), other, acc)
        acc = wgmma.finish(acc, UNPAIRED, UNPAIRED, under_way=0)
        release(mem, other, half)
        if more:
            s, full = first_scores(pair + 1)
        return HalfState(m_both, l, acc), s, full

    def warpgroup_1(pair: Any, state: HalfState) -> HalfState:
        """Attend to a pair whose second tile this warpgroup scores."""
        other, mine = slots(pair)
        s = start_scores(pair, mine, (1, 0, 2))
        full = tiles.is_full(pair, 1)
        plgpu.barrier_wait(mem.ready.at[0])
        m_first = basics.load(mem.stats.at[0], PER_ROW)
        acc, l = rescale_accumulator((state.acc, state.l), layouts, state.m, m_first)  # noqa: E741
        tiles.clear_dead_rows(pair, 0, other)
        acc = start_values(probs_ref(other, 0), other, acc)
        s = wgmma.finish(s, UNPAIRED, TILE, under_way=1)
        m, p, p16 = softmax(pair, mine, m_first, s, full)
        wgmma.publish_probs(p16, probs_ref(mine, 1), m, mem.stats.at[1], row_bytes)
        acc = wgmma.finish(acc, UNPAIRED, UNPAIRED, under_way=0)
        release(mem, other, half)
        plgpu.barrier_arrive(mem.ready.at[1])
        acc, l = rescale_accumulator((acc, l), layouts, m_first, m)  # noqa: E741
        acc = start_values(p16, mine, acc)
        l = l + partial_sums(p)  # noqa: E741
        acc = wgmma.finish(acc, UNPAIRED, UNPAIRED, under_way=0)
        release(mem, mine, half)
        return HalfState(m, l, acc)

    state = HalfState(
        register_tiles.filled(INITIAL_MAX, (ROWS,), PER_ROW),
        register_tiles.filled(0.0, (ROWS, 8), TILE),
        register_tiles.filled(0.0, (ROWS, config.widths[half]), UNPAIRED),
    )
    if half == 1:
        state = lax.fori_loop(0, count, lambda i, state: warpgroup_1(first + i, state), state)
    else:
        s, full = first_scores(first)
        state, s, full = lax.fori_loop(
            0, count - 1, lambda i, carry: warpgroup_0(first + i, *carry, more=True), (state, s, full)
        )
        state, *_ = warpgroup_0(first + (count - 1), state, s, full, more=False)
    return state._replace(acc=wgmma.as_tile(state.acc))


# --- consumers' barriers and results


def begin(config: Bf16LoopConfig, mem: Bf16Scratch, half: int) -> None:
    """Mark the query and all tiles as free, once before the first split."""
    release_query(mem)
    for slot in range(2 * config.pairs):
        release(mem, slot, half)


def release(mem: Bf16Scratch, slot: Any, half: int) -> None:
    """Allow the producer to overwrite this warpgroup's half of a tile."""
    plgpu.barrier_arrive(mem.free.at[2 * slot + half])


def release_query(mem: Bf16Scratch) -> None:
    """Allow the producer to overwrite the query."""
    plgpu.barrier_arrive(mem.joint.at[Q_FREE])


def exchange_sums(mem: Bf16Scratch, half: int, state: HalfState) -> Any:
    """Return the sums of weights [ROWS] over the tiles of both warpgroups."""
    own = state.l.sum(axis=1)
    mem.stats[2 + half] = own
    plgpu.barrier_arrive(mem.joint.at[SUMS])
    plgpu.barrier_wait(mem.joint.at[SUMS])
    return own + basics.load(mem.stats.at[2 + 1 - half], PER_ROW)


def write_output(config: Bf16LoopConfig, mem: Bf16Scratch, half: int, out: Any, to: Ref) -> None:
    """Write this warpgroup's columns of the output to global memory, and release the query.

    An output of the queries' dtype goes through the query's shared memory.

    Args:
      out: [ROWS, columns].
      to: [rows, columns], the first rows of the block; all ROWS rows if its dtype is not the queries' dtype.
    """
    if out.dtype == mem.q.left.dtype:
        store_tile(mem.q[half].at[0], out, TILE, config.row_bytes)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mem.q[half].at[0, pl.ds(0, to.shape[0])], to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        release_query(mem)
    else:
        release_query(mem)
        to[...] = out


def write_partial(config: Bf16LoopConfig, half: int, acc: Any, m: Any, l: Any, to_acc: Ref, to_stats: Ref) -> None:  # noqa: E741
    """Write this warpgroup's columns of a partial state to global memory; warpgroup 0 also writes m and l.

    Args:
      acc: [ROWS, columns].
      m, l: [ROWS], reference of the exponent and sums of weights.
      to_acc, to_stats: one state of `PartialStates`.
    """
    fragments = pl.ds(num_fragments(ROWS * half * config.widths[0]), num_fragments(ROWS * config.widths[half]))
    store_fragments(acc, to_acc.at[fragments], BY_64)
    if half == 0:
        to_stats[0] = m * (1 / LOG2E)
        to_stats[1] = l
