"""Latent attention of 64 query rows over 16-bit latents: main loop of the two-warpgroup MLA kernel.

    S [64 rows, 64 tokens] = Q [64, L + R] Cᵀ       O [64 rows, L] += P C[:, :L]

Terms:

    query row   one head of one query token; 64 query rows are a block
    tile C      L latent and R rotated numbers of each of 64 cached tokens
    pair        two consecutive tiles C0 and C1. Warpgroup w scores tile w
    part        columns of a tile or of Q that have a separate array in shared memory: left half of the L columns, right
                half, or the R rotated columns
    slot        shared-memory buffer of one tile
    split       consecutive pairs that a CTA processes for one block of query rows

O in float32 does not fit the registers of one warpgroup, so warpgroup 0 accumulates the left half of the L columns and
warpgroup 1 the right half. Each warpgroup computes the scores of one tile of a pair and stores the probabilities for
the other warpgroup:

    m is subtracted from the scores; rescale(a, b) multiplies O and l by exp(a - b)

    warpgroup 0, per pair                          warpgroup 1, per pair
    S0 = Q C0ᵀ  (issued in the previous pair)      start S1 = Q C1ᵀ as the columns of C1 arrive
    m0 = max(m, S0);  P0 = exp(S0 - m0)            wait ready[0];  rescale(m, m0)
    store P0, m0;  arrive ready[0]                 start O += P0 right(C0)
    rescale(m, m0)                                 wait S1;  m1 = max(m0, S1);  P1 = exp(S1 - m1)
    O += P0 left(C0);  arrive empty[C0, left]      store P1, m1
    wait ready[1];  rescale(m0, m1)                wait O;  arrive empty[C0, right];  arrive ready[1]
    O += P1 left(C1);  arrive empty[C1, left]      rescale(m0, m1)
    start S0 of the next pair; wait for it         O += P1 right(C1);  arrive empty[C1, right]
    m = m1                                         m = m1

The scheme is FlashMLA's "seesaw" (deep dive of April 2025) with one difference: in FlashMLA, warpgroup 1 receives P0
only after the maxima of C1 are known.

A warpgroup reads its own probabilities from registers, and the probabilities of the other warpgroup from shared memory.
The probabilities of a tile overwrite its rotated keys, which have the same size if R = 64 and are not needed after the
scores. If R is not 64, probabilities have their own memory. m changes, and O and l are rescaled, only if the maximum of
a query row grows by more than `RESCALE_THRESHOLD_LOG2`.

A third warpgroup, the producer, copies tiles and queries to shared memory. It belongs to the calling kernel:
`mla_decode` copies pages with TMA, `mla_sparse` gathers tokens with `cp.async`. The kernel passes its waits and masks
as `Bf16TileAccess`.

Barriers (arrivals are per phase):

| barrier | phase | arrivals | waits |
|---|---|---|---|
| `q_full` | a split | copies of the parts of Q | both warpgroups, before the first scores |
| `full` (one per part) | use of a slot | producer's copies of a part of a tile | the warpgroup that scores the tile |
| `empty[slot, half]` | use of a slot | warpgroup `half` (of every CTA of the cluster) | producer |
| `ready[tile]` | a pair | the warpgroup that scores the tile | the other warpgroup |
| `joint[SUMS]` | a split | both warpgroups | both warpgroups |
| `joint[Q_FREE]` | a split | both warpgroups | producer, before it copies the next query |

Deadlock freedom. Each wait below is for an event that does not depend on the waiting warpgroup's later steps.

- full: the producer starts each copy after it has waited for empty. Only the warpgroup that scores a tile waits for
  full, for all three parts. The other warpgroup reads the tile after ready, which implies full.
- empty: warpgroup `half` arrives once at the start and once after each use of its half of a slot. The producer waits
  for one phase before it copies a half. It waits in the order left(C0), right(C0), right(C1), left(C1) (`HALVES`). Both
  warpgroups free these four halves before they wait for anything of the next pair. Before it ends, the producer waits
  for the last phase, so that no CTA of a cluster exits while another CTA still arrives at its barriers.
- ready[0]: warpgroup 0 arrives after its scores, which depend on copies only. ready[1]: warpgroup 1 arrives after its
  scores and its product with P0, which depend on copies and on ready[0] of the same pair.
- joint[SUMS]: both warpgroups arrive once per split.
- joint[Q_FREE]: both warpgroups arrive once at the start and once per split. The producer copies Q of the first split
  at once. It copies Q of a later split after the first pair of that split. The slots for this pair become free when the
  previous split is finished, which does not depend on the new Q.

Shared memory that one warpgroup writes for the other is overwritten only after the other warpgroup has read it:

- m0 and P0 are overwritten after ready[1] of the same pair. Warpgroup 1 arrives there after its product with P0.
- m1 and P1 are overwritten after ready[0] of the next pair. Warpgroup 0 arrives there after all its products of this
  pair.
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
from pallas_attn.mosaic.hopper.mla_rows import PER_ROW, ROWS, TOKENS
from pallas_attn.mosaic.hopper.tiles import TILE
from pallas_attn.mosaic.hopper.wgmma import RESCALE_THRESHOLD_LOG2, UNPAIRED, partial_sums, rescale_accumulator
from pallas_attn.mosaic.latent_tiles import INITIAL_MAX
from pallas_attn.mosaic.partial_states import num_fragments, store_fragments
from pallas_attn.mosaic.primitives import basics, register_tiles, row_io
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.exponents import in_log2_units, next_reference, over_scores
from pallas_attn.mosaic.primitives.register_tiles import BY_64, over_tokens, store_tile

PARTS = 3
"""Number of parts of a tile: left half and right half of the latent columns, and rotated columns."""

ROPE = 2
"""Index of the rotated columns among the parts."""

HALVES = ((0, 0), (0, 1), (1, 1), (1, 0))
"""Halves of a pair, in the order in which the warpgroups free them: (tile, 0 for the left or 1 for the right half)."""

Q_FREE, SUMS = 0, 1
"""Indices of the barriers `Bf16Scratch.joint`. Q_FREE: Q may be overwritten. SUMS: both warpgroups have stored their
sums in `Bf16Scratch.stats`.
"""


class LatentParts(NamedTuple):
    """The three parts of Q or of a tile: left half and right half of the latent columns, and rotated columns."""

    left: Any
    right: Any
    rope: Any


@dataclasses.dataclass(frozen=True)
class Bf16LoopConfig:
    """Compile-time parameters of the main loop.

    Attributes:
      latent_dim, rope_dim: L and R. R is 0 if all columns are values.
      row_bytes: swizzle width [bytes] of tiles and Q in shared memory.
      sm_scale: factor of the scores.
      pairs: number of pairs of slots.
    """

    latent_dim: int
    rope_dim: int
    row_bytes: int
    sm_scale: float
    pairs: int

    @property
    def widths(self) -> tuple[int, int]:
        """Number of latent columns that warpgroup 0 and warpgroup 1 accumulate."""
        return mla_rows.halves(self.latent_dim)

    @property
    def has_own_probs(self) -> bool:
        """Whether probabilities have their own memory. Otherwise they overwrite the rotated keys."""
        return self.rope_dim != TOKENS

    def slot(self, pair: Any, tile: int) -> Any:
        """Slot of tile 0 or 1 of a pair."""
        return tile if self.pairs == 1 else 2 * lax.rem(pair, self.pairs) + tile


class Bf16Scratch(NamedTuple):
    """Shared memory and barriers of a CTA. The module docstring has the barrier table.

    Attributes:
      q: for each part, [1, ROWS, columns]. The part with rotated columns is None if R = 0.
      k: for each part, [slots, TOKENS, columns].
      p: [2, ROWS, TOKENS], probabilities of each tile of a pair; None if they overwrite `k.rope`.
      stats: float32 [4, ROWS]: m0, m1, and at the end of a split the sums l of warpgroup 0 and of warpgroup 1.
      producer: shared memory of the calling kernel.
      q_full, full, empty, ready, joint: barriers. The calling kernel defines the type of `full`.
    """

    q: LatentParts
    k: LatentParts
    p: Any
    stats: Any
    producer: Any
    q_full: Any
    full: Any
    empty: Any
    ready: Any
    joint: Any

    @staticmethod
    def types(
        config: Bf16LoopConfig, dtype: jax.typing.DTypeLike, *, producer: Any, full: Any, cluster: str | None = None
    ) -> Bf16Scratch:
        """Scratch types.

        Args:
          dtype: dtype of queries and latents.
          producer: scratch types of the calling kernel.
          full: type of the barriers `full`.
          cluster: name of the cluster axis whose CTAs share copies; None without clusters.
        """
        slots = 2 * config.pairs
        operand = functools.partial(register_tiles.operand, dtype=dtype, row_bytes=config.row_bytes)
        columns = LatentParts(*config.widths, config.rope_dim)
        num_parts = sum(n > 0 for n in columns)
        if cluster is None:
            empty = plgpu.Barrier(num_barriers=2 * slots)
        else:
            empty = plgpu.ClusterBarrier(collective_axes=(cluster,), num_barriers=2 * slots)
        return Bf16Scratch(
            q=LatentParts(*(operand((1, ROWS, n)) if n else None for n in columns)),
            k=LatentParts(*(operand((slots, TOKENS, n)) if n else None for n in columns)),
            p=operand((2, ROWS, TOKENS)) if config.has_own_probs else None,
            stats=plgpu.SMEM((4, ROWS), jnp.float32),
            producer=producer,
            q_full=plgpu.Barrier(num_arrivals=num_parts),
            full=full,
            empty=empty,
            ready=plgpu.Barrier(num_barriers=2),
            joint=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        )


class Bf16TileAccess(NamedTuple):
    """Functions of the calling kernel that wait for tiles and mask them.

    `pair` is the index of a pair, `tile` is 0 or 1, `slot` is the slot of the tile.

    Attributes:
      await_part: await_part(pair, slot, part) waits until a part of a tile has arrived.
      is_full: is_full(pair, tile) returns whether every query row sees every token of a tile.
      mask: mask(pair, slot, s) returns the masked scores [ROWS, TOKENS]. It is called if `is_full` is False, by the
        warpgroup that scores the tile. It sets scores to -inf where a query row does not see a token. For tokens that
        no query row sees, it also sets this warpgroup's half of the latents in shared memory to 0.
      clear_dead_rows: clear_dead_rows(pair, tile, slot) is called for the tile that the other warpgroup scores. For
        tokens that no query row sees, it sets this warpgroup's half of the latents in shared memory to 0.
    """

    await_part: Callable[[Any, Any, int], None]
    is_full: Callable[[Any, int], Any]
    mask: Callable[[Any, Any, Any], Any]
    clear_dead_rows: Callable[[Any, int, Any], None]


class HalfState(NamedTuple):
    """Attention of a block's query rows over some tiles, as one warpgroup holds it in registers.

    Scores are scaled so that probabilities are powers of 2: score = log2(e) · sm_scale · (q cᵀ).

    Attributes:
      m: [ROWS], number that is subtracted from scores: the largest score of the row, or up to `RESCALE_THRESHOLD_LOG2`
        less.
      l: [ROWS, 8], sums of 2**(score - m) over the tiles that this warpgroup scored. Column j has the sum over the
        tokens j, j + 8, j + 16, ... of each tile.
      acc: [ROWS, columns], this warpgroup's columns of O, over the tiles of both warpgroups; with layout `UNPAIRED`
        inside the main loop.
    """

    m: Any
    l: Any  # noqa: E741
    acc: Any


# --- the main loop


def attend(
    config: Bf16LoopConfig, mem: Bf16Scratch, half: int, tiles: Bf16TileAccess, first: Any, count: Any
) -> HalfState:
    """Attend to a split. Runs in both warpgroups, each with its own result.

    Args:
      half: index w of this warpgroup. It scores tile w of each pair, and accumulates the left (0) or right (1) half of
        the columns of O.
      tiles: functions of the calling kernel.
      first, count: index of the first pair, and number of pairs, at least 1.
    """
    row_bytes, layouts = config.row_bytes, (UNPAIRED, TILE)  # layouts of acc and l
    scale = config.sm_scale * LOG2E

    def slots(pair: Any) -> tuple[Any, Any]:
        zero = basics.opaque_zero()
        return zero + config.slot(pair, 0), zero + config.slot(pair, 1)

    def probs_ref(slot: Any, tile: int) -> Ref:  # [ROWS, TOKENS]
        return mem.k.rope.at[slot] if mem.p is None else mem.p.at[tile]

    def start_scores(pair: Any, slot: Any, parts: tuple[int, ...]) -> Any:
        """Start the product Q Cᵀ of a tile, in the given order of its parts. Wait for each part before its product."""
        s: Any = None  # [ROWS, TOKENS]
        q, k, zero, columns = mem.q, mem.k, basics.opaque_zero(), row_bytes // 2
        for part in parts:
            if q[part] is None:
                continue
            tiles.await_part(pair, slot, part)
            chunks = [pl.ds(i, columns) for i in range(0, q[part].shape[2], columns)]
            operands = [(q[part].at[zero, :, chunk], k[part].at[slot, :, chunk]) for chunk in chunks]
            s = wgmma.start_scores(operands, s, row_bytes)
        return s

    def start_values(p: Any, slot: Any, acc: Any) -> Any:
        """Start the product acc + P C with this warpgroup's half of the columns of a tile."""
        return wgmma.start_values(p, mem.k[half].at[slot], acc, row_bytes)

    def softmax(pair: Any, slot: Any, m: Any, s: Any, full: Any) -> tuple[Any, Any, Any]:
        """Return the new m [ROWS], and the probabilities [ROWS, TOKENS] in float32 and in 16 bits.

        Args:
          full: result of `Bf16TileAccess.is_full`.
        """
        s = lax.cond(full, lambda s: s, lambda s: tiles.mask(pair, slot, s), s)
        m, factor = next_reference(s.max(axis=1), m, scale, RESCALE_THRESHOLD_LOG2)  # [ROWS] each
        p = jnp.exp2(s * over_scores(factor, over_tokens, s.shape) - over_tokens(m, s.shape))
        return m, p, p.astype(mem.k.left.dtype)

    def first_scores(pair: Any) -> tuple[Any, Any]:
        """Compute the scores of the first tile of a pair. Also return the result of `is_full` for this tile."""
        s = start_scores(pair, slots(pair)[0], (0, 1, 2))
        full = tiles.is_full(pair, 0)  # a load from shared memory, which overlaps the products
        return wgmma.finish(s, UNPAIRED, TILE, under_way=0), full

    def warpgroup_0(pair: Any, state: HalfState, s: Any, full: Any, *, more: bool) -> tuple[HalfState, Any, Any]:
        """Run warpgroup 0 for one pair.

        Args:
          s, full: results of `first_scores` for this pair.
          more: whether another pair follows. Its `first_scores` are then returned.
        """
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
        """Run warpgroup 1 for one pair."""
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
    return state._replace(m=in_log2_units(state.m, scale), acc=wgmma.as_tile(state.acc))


# --- consumers' barriers and results


def begin(config: Bf16LoopConfig, mem: Bf16Scratch, half: int) -> None:
    """Make the first arrivals at empty and joint[Q_FREE], so that the producer's first waits end. Call it once, before
    the first split.
    """
    release_query(mem)
    for slot in range(2 * config.pairs):
        release(mem, slot, half)


def release(mem: Bf16Scratch, slot: Any, half: int) -> None:
    """Arrive at empty[slot, half]: this warpgroup has finished reading its half of the slot."""
    plgpu.barrier_arrive(mem.empty.at[2 * slot + half])


def release_query(mem: Bf16Scratch) -> None:
    """Arrive at joint[Q_FREE]: this warpgroup has finished reading Q."""
    plgpu.barrier_arrive(mem.joint.at[Q_FREE])


def exchange_sums(mem: Bf16Scratch, half: int, state: HalfState) -> Any:
    """Return the sums l [ROWS] over the tiles of both warpgroups. Call it once per split."""
    own = state.l.sum(axis=1)
    mem.stats[2 + half] = own
    plgpu.barrier_arrive(mem.joint.at[SUMS])
    plgpu.barrier_wait(mem.joint.at[SUMS])
    return own + basics.load(mem.stats.at[2 + 1 - half], PER_ROW)


def write_output(config: Bf16LoopConfig, mem: Bf16Scratch, half: int, out: Any, to: Ref) -> None:
    """Write this warpgroup's columns of the output to global memory, and call `release_query`.

    If the output has the dtype of the queries, it is first stored in the shared memory of Q, and copied from there with
    TMA. Otherwise threads store it directly.

    Args:
      out: [ROWS, columns].
      to: [n, columns] in global memory, for the first n query rows of the tile.
    """
    if out.dtype == mem.q.left.dtype:
        store_tile(mem.q[half].at[0], out, TILE, config.row_bytes)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mem.q[half].at[0, pl.ds(0, to.shape[0])], to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        release_query(mem)
    else:
        release_query(mem)
        row_io.store_first_rows(TILE, to, out)


def write_partial(config: Bf16LoopConfig, half: int, acc: Any, m: Any, l: Any, to_acc: Ref, to_stats: Ref) -> None:  # noqa: E741
    """Write this warpgroup's columns of a partial state to global memory; warpgroup 0 also writes m and l.

    Args:
      acc: [ROWS, columns], unnormalised output.
      m, l: [ROWS], m of `HalfState` and the result of `exchange_sums`.
      to_acc, to_stats: accumulator, and m and l, of one state of `PartialStates`.
    """
    fragments = pl.ds(num_fragments(ROWS * half * config.widths[0]), num_fragments(ROWS * config.widths[half]))
    store_fragments(acc, to_acc.at[fragments], BY_64)
    if half == 0:
        to_stats[0] = m * (1 / LOG2E)
        to_stats[1] = l
