"""Latent attention of up to 64 query rows over fp8 latents: main loop of the two-warpgroup MLA kernel.

    S [64 tokens, rows] = C Qᵀ       O [L, rows] += C[:, :L]ᵀ P       (tokens are the rows of a tile of scores)

Latents stay in fp8 in shared memory. Threads convert them to float16 in registers, the left operand of wgmma
(`pallas_attn.mosaic.hopper.mla_fp8_products`). O in float32 does not fit the registers of one warpgroup: warpgroup 0
accumulates the left half of the L columns, warpgroup 1 the right half. Tiles of 64 latents alternate between the
warpgroups: each warpgroup computes the scores of every other tile and stores its probabilities for the other one. Both
warpgroups run the same loop, half a pair apart:

    warpgroup 0                                  warpgroup 1
    S2 = C2 Qᵀ                                   P1 = exp(S1 - m); store P1; arrive ready[1]
    wait ready[1];  O += left(C1)ᵀ P1            O += right(C1)ᵀ P1
    P2 = exp(S2 - m); store P2; arrive ready[0]  S3 = C3 Qᵀ
    O += left(C2)ᵀ P2                            wait ready[0];  O += right(C2)ᵀ P2
    S4 = C4 Qᵀ                                   P3 = exp(S3 - m); store P3; arrive ready[1]

As pseudocode, for warpgroup w (tile index t = 2 · pair + w; tile t - 1 belongs to the other warpgroup):

    for pair in split:
        wait full[t];  S = C[t] Qᵀ
        wait full[t - 1], ready[1 - w];  rescale O and l by the factors of tile t - 1 if m has changed
        O += half(C[t - 1])ᵀ P[t - 1];  release slot of t - 1;  arrive taken[1 - w]
        wait taken[w];  if some score exceeds m by much: raise m, store factors
        P = exp(S - m);  store P and the ratios of the scales;  arrive ready[w];  l += sums of P
        O += half(C[t])ᵀ P;  release slot of t

Warpgroup 0 skips the middle block in the first pair of a split, and adds the last tile of warpgroup 1 after the loop.
A slot is occupied for little more than one of the two tile times, so copies have time to refill it.

The reference m of the exponent is common to both warpgroups and lies in shared memory. It changes only if a score
exceeds it by more than `RESCALE_THRESHOLD_LOG2`. The warpgroup that changes m also stores the factors for O and l.

A third warpgroup, the producer, belongs to the calling kernel: `mla_decode` copies pages with TMA, `mla_sparse` gathers
rows with `cp.async`. The kernel passes its waits and masks as `Fp8TileAccess`.

Barriers (arrivals are per phase; `full` belongs to the calling kernel):

| barrier | phase | arrivals | waits |
|---|---|---|---|
| `q_full` | a split | copies of the three parts of a query | both warpgroups |
| `q_converted` | a split | both warpgroups, after converting half of the query to float16 | both warpgroups |
| `q_free` | a split | both warpgroups | producer, before it copies the next query |
| `full[slot]` | use of a slot | producer's copies of a tile | both warpgroups |
| `free[slot]` | use of a slot | both warpgroups | producer, before it refills the slot |
| `ready[w]` | a pair | warpgroup w: its P, ratios and factors are stored | the other warpgroup |
| `taken[w]` | a pair | the other warpgroup, after reading P, ratios and factors of w | warpgroup w, before stores |
| `sums` | a split | both warpgroups | both warpgroups |

Deadlock freedom. Each wait below is for an event that does not depend on the waiting warpgroup's later steps.

- free: the number of phases is the number of uses of a slot plus one. Both warpgroups arrive once at the start and
  once after each use. The producer waits for one phase before each tile, and for the last one before it ends.
- ready[w]: warpgroup w arrives after its scores. They depend on full of the tile, on ready of the previous tile, and on
  taken[w]. A tile is copied once the tile three before it is released, which waits for nothing later than the scores of
  the tile after it.
- taken[w]: the other warpgroup arrives once at the start and once after each use of P. Warpgroup w waits for one phase
  before it stores, and in `mla_fp8.end` for the last one.
- sums, q_converted: both warpgroups arrive once per split.
- q_free: both warpgroups arrive once at the start and after the last scores of each split. The producer waits for one
  phase before each query, and for the last one before it ends.
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

from pallas_attn.mosaic.hopper import mla_fp8_products, mla_fp8_softmax, mla_rows, wgmma
from pallas_attn.mosaic.hopper.mla_rows import INITIAL_MAX, ROWS, TOKENS
from pallas_attn.mosaic.hopper.wgmma import RESCALE_THRESHOLD_LOG2
from pallas_attn.mosaic.merge import num_fragments
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, PER_COLUMN, over_columns, over_tokens
from pallas_attn.portable.quantise import QUERY_SCALE
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP

SLOTS = 3
"""Tiles in shared memory."""

MAX, FACTORS, SUMS, REDUCTION = 0, 1, 3, 5
"""First rows of the sections of `Fp8Scratch.stats`."""


def slot_of(pair: Any, tile: int) -> tuple[Any, Any]:
    """Return the shared-memory slot of a tile of a pair, and the number of earlier uses of the slot."""
    index = 2 * pair + tile
    return lax.rem(index, SLOTS), lax.div(index, SLOTS)


@dataclasses.dataclass(frozen=True)
class Fp8LoopConfig:
    """Compile-time parameters of the main loop.

    Attributes:
      latent_dim: L.
      rows: query rows of a block, at most 64.
      sm_scale: factor of the scores.
      page_tokens: number of tokens of a tile whose scale factors are contiguous.
    """

    latent_dim: int
    rows: int
    sm_scale: float
    page_tokens: int

    @property
    def widths(self) -> tuple[int, int]:
        """Latent columns that each warpgroup accumulates."""
        return mla_rows.halves(self.latent_dim)


class Fp8Scratch(NamedTuple):
    """Shared memory and barriers of the main loop. The module docstring has the barrier table.

    Attributes:
      q: two arrays [1, rows, columns], the halves of the latent columns; bfloat16 as copied, then float16 in place
        (`mla_fp8_products.convert_queries`).
      q_rope: [1, rows, R].
      k: e4m3 [SLOTS, TOKENS, L].
      rope: [SLOTS, TOKENS, R].
      scales: float32 [SLOTS, pages, at least page_tokens · groups].
      p: float16 [2, rows, TOKENS], probabilities of each tile of a pair.
      ratios: float16 [2, groups, TOKENS], scales of each tile divided by the token's largest scale.
      stats: float32 [13, rows]: reference m; rescaling factors of each tile of a pair; sums of each warpgroup; memory
        for reductions over warps, four rows for each warpgroup.
      weights: of `mla_fp8_softmax.sums_type`, sums of the weights of each warpgroup's tiles.
      changed: int32 [2], whether each tile of a pair changed m.
      q_full, free, ready, taken, sums, q_converted, q_free: barriers.
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
    q_full: Any
    free: Any
    ready: Any
    taken: Any
    sums: Any
    q_converted: Any
    q_free: Any

    @staticmethod
    def types(config: Fp8LoopConfig, dtype: jax.typing.DTypeLike) -> Fp8Scratch:
        """Scratch types, for queries of a dtype."""
        rows, groups = config.rows, config.latent_dim // LATENT_GROUP
        scales = config.page_tokens * config.latent_dim // LATENT_GROUP
        return Fp8Scratch(
            q=tuple(register_tiles.operand((1, rows, width), dtype) for width in config.widths),
            q_rope=register_tiles.operand((1, rows, TOKENS), dtype),
            k=register_tiles.operand((SLOTS, TOKENS, config.latent_dim), LATENT_8BIT),
            rope=register_tiles.operand((SLOTS, TOKENS, TOKENS), dtype),
            scales=plgpu.SMEM((SLOTS, TOKENS // config.page_tokens, -(-scales // 32) * 32), jnp.float32),
            p=register_tiles.operand((2, rows, TOKENS), jnp.float16),
            ratios=plgpu.SMEM((2, groups, TOKENS), jnp.float16),
            stats=plgpu.SMEM((13, rows), jnp.float32),
            weights=mla_fp8_softmax.sums_type(rows),
            changed=plgpu.SMEM((2,), jnp.int32),
            q_full=plgpu.Barrier(num_arrivals=3),
            free=plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
            ready=plgpu.Barrier(num_barriers=2),
            taken=plgpu.Barrier(num_barriers=2),
            sums=plgpu.Barrier(num_arrivals=2),
            q_converted=plgpu.Barrier(num_arrivals=2),
            q_free=plgpu.Barrier(num_arrivals=2),
        )


class Fp8TileAccess(NamedTuple):
    """Functions by which a kernel describes its tiles to the main loop.

    Attributes:
      await_keys: (slot, use) -> None. Wait until a tile is full, before tensor cores read its rotated keys. `use` is
        the number of earlier uses of the slot.
      await_values: (slot, use) -> None. Wait until a tile is full, before threads read its latents.
      is_full: (slot) -> bool. Whether every row sees every token of a tile.
      mask: (slot, s) -> s. For a tile that is not full and that this warpgroup scores: set scores [TOKENS, rows] to
        -inf where a row does not see a token; set latents that no row sees to 0, and their scales to 1.
      before_release: () -> None. Fence between the threads' reads of a tile and the producer's next copy.
    """

    await_keys: Callable[[Any, Any], None]
    await_values: Callable[[Any, Any], None]
    is_full: Callable[[Any], Any]
    mask: Callable[[Any, Any], Any]
    before_release: Callable[[], None]


# --- the main loop


def attend(config: Fp8LoopConfig, mem: Fp8Scratch, half: int, tiles: Fp8TileAccess, first: Any, count: Any) -> Any:
    """Attend to `count` pairs of tiles, at least one, starting with pair `first`, for the next query.

    Args:
      half: index of this warpgroup: the tile of each pair that it scores, and the half of the columns of its output.

    Returns:
      The weighted sums of all latents [columns, rows], in this warpgroup's columns.
    """
    rows, shape, other = config.rows, (TOKENS, config.rows), 1 - half
    groups = config.latent_dim // LATENT_GROUP

    def compute_scores(slot: Any) -> Any:
        """Return Q Kᵀ [TOKENS, rows] of a tile, divided by the scale of the last group of columns."""
        zero = basics.opaque_zero()
        rotated = wgmma.start_scores([(mem.rope.at[slot], mem.q_rope.at[zero])], None, register_tiles.ROW_BYTES)
        queries = [q.at[zero] for q in mem.q]
        return mla_fp8_products.add_scores(rotated, mem.k.at[slot], queries, mem.scales.at[slot], config.page_tokens)

    def load_scales(slot: Any) -> list[jax.Array]:  # [TOKENS] for each group of columns
        loaded = dequantize.load_group_scales(mem.scales.at[slot], config.page_tokens, groups, TOKENS, BY_64)
        return [jnp.maximum(scale, dequantize.SMALLEST_SCALE) for scale in loaded]

    def rescale_weights(tile: int, changed: Any) -> None:
        mla_fp8_softmax.rescale_weights(mem.weights.at[half], changed, mem.stats.at[FACTORS + tile])

    def store_probs(slot: Any, s: Any) -> None:
        """Store the probabilities of this warpgroup's tile, and add their weights to the sums."""
        s = lax.cond(tiles.is_full(slot), lambda s: s, lambda s: tiles.mask(slot, s), s)
        scales = load_scales(slot)
        largest = functools.reduce(jnp.maximum, scales)  # [TOKENS]
        x = s * over_tokens(scales[-1] * (config.sm_scale / QUERY_SCALE * LOG2E), shape)  # [TOKENS, rows]
        x = x + over_tokens(jnp.log2(largest), shape)
        plgpu.barrier_wait(mem.taken.at[half])
        relative = x - over_columns(basics.load(mem.stats.at[MAX], PER_COLUMN), shape)
        changed = mla_fp8_softmax.exceeds(relative, RESCALE_THRESHOLD_LOG2)

        @pl.when(changed == 1)
        def _raise_max() -> None:
            m = basics.load(mem.stats.at[MAX], PER_COLUMN)  # [rows]
            highest = mla_fp8_softmax.largest_of_rows(x, mem.stats.at[pl.ds(REDUCTION + 4 * half, 4)])
            raised = jnp.where(highest > m + RESCALE_THRESHOLD_LOG2, highest, m)
            mem.stats[FACTORS + half] = jnp.exp2(m - raised)
            mem.stats[MAX] = raised

        mem.changed[half] = changed
        rescale_weights(half, changed)
        p = jnp.exp2(x - over_columns(basics.load(mem.stats.at[MAX], PER_COLUMN), shape))
        ratios = [(scale / largest).astype(jnp.float16) for scale in load_scales(slot + basics.opaque_zero())]
        zero = basics.opaque_zero()  # addresses are recomputed here, which saves registers
        mla_fp8_softmax.store_probs(p.astype(jnp.float16), mem.p.at[half + zero], ratios, mem.ratios.at[half + zero])
        plgpu.barrier_arrive(mem.ready.at[half])
        mla_fp8_softmax.add_weights(mem.weights.at[half], p, 1 / largest)

    def add_values(slot: Any, tile: int, acc: Any) -> Any:
        """Add a tile's latents times their probabilities, and release the tile."""
        acc = mla_fp8_softmax.rescale_columns(acc, mem.changed[tile], mem.stats.at[FACTORS + tile])
        column, p = half * config.widths[0], mem.p.at[tile + basics.opaque_zero()]
        acc = mla_fp8_products.add_values(acc, mem.k.at[slot], column, p, mem.ratios.at[tile])
        tiles.before_release()
        plgpu.barrier_arrive(mem.free.at[slot])
        return acc

    def add_other_tile(pair: Any, acc: Any) -> Any:
        """Add the other warpgroup's tile of a pair, after its probabilities are ready."""
        slot, use = slot_of(pair, other)
        tiles.await_values(slot, use)
        plgpu.barrier_wait(mem.ready.at[other])
        rescale_weights(other, mem.changed[other])
        acc = add_values(slot, other, acc)
        plgpu.barrier_arrive(mem.taken.at[other])
        return acc

    def step(pair: Any, acc: Any) -> Any:
        slot, use = slot_of(pair, half)
        tiles.await_keys(slot, use)
        s = compute_scores(slot)
        if half == 1:
            acc = add_other_tile(pair, acc)
        else:
            acc = lax.cond(pair > first, lambda acc: add_other_tile(pair - 1, acc), lambda acc: acc, acc)
        store_probs(slot, s)
        return add_values(slot, half, acc)

    plgpu.barrier_wait(mem.q_full)
    mla_fp8_products.convert_queries(mem.q[half].at[0])
    plgpu.commit_smem()
    plgpu.barrier_arrive(mem.q_converted)
    plgpu.barrier_wait(mem.q_converted)
    if half == 0:
        mem.stats[MAX] = register_tiles.filled(INITIAL_MAX, (rows,), PER_COLUMN)
        plgpu.commit_smem()
    acc = register_tiles.filled(0.0, (config.widths[half], rows), BY_64.tile)
    mla_fp8_softmax.clear_sums(mem.weights.at[half], rows)
    acc = lax.fori_loop(first, first + count, step, acc)
    return acc if half == 1 else add_other_tile(first + count - 1, acc)


# --- consumers' barriers and results


def begin(mem: Fp8Scratch, half: int) -> None:
    """Mark the query, all tiles and the other warpgroup's probabilities as free, once before the first split."""
    plgpu.barrier_arrive(mem.q_free)
    for slot in range(SLOTS):
        plgpu.barrier_arrive(mem.free.at[slot])
    plgpu.barrier_arrive(mem.taken.at[1 - half])


def end(mem: Fp8Scratch, half: int) -> None:
    """Wait for the other warpgroup's last arrival, once after the last split."""
    plgpu.barrier_wait(mem.taken.at[half])


def exchange_sums(config: Fp8LoopConfig, mem: Fp8Scratch, half: int) -> Any:
    """Return the sums of weights [rows] over the tiles of both warpgroups, and release the query."""
    plgpu.barrier_arrive(mem.q_free)
    own = mla_fp8_softmax.total_weights(mem.weights.at[half], config.rows, mem.stats.at[pl.ds(REDUCTION + 4 * half, 4)])
    mem.stats[SUMS + half] = own
    plgpu.commit_smem()
    plgpu.barrier_arrive(mem.sums)
    plgpu.barrier_wait(mem.sums)
    return own + basics.load(mem.stats.at[SUMS + 1 - half], PER_COLUMN)


def load_max(mem: Fp8Scratch) -> Any:
    """Load the reference m [rows] of the exponent. Only warpgroup 0 may call this: it resets m for the next split."""
    return basics.load(mem.stats.at[MAX], PER_COLUMN)


def normalise_columns(acc: Any, l: Any) -> Any:  # noqa: E741
    """Divide acc [columns, rows] by the sums of weights l [rows]. A row with sum 0 becomes 0, whatever acc holds."""
    seen = l != 0
    inverse = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
    return jnp.where(over_columns(seen, acc.shape), acc * over_columns(inverse, acc.shape), 0.0)


def write_partial(config: Fp8LoopConfig, half: int, acc: Any, to: Ref) -> None:
    """Write this warpgroup's columns [columns, rows] of a partial state to its place in `PartialStates.acc`."""
    widths = config.widths
    fragments = pl.ds(num_fragments(ROWS * half * widths[0]), num_fragments(ROWS * widths[half]))
    mla_fp8_products.store_fragments(acc, to.at[fragments])
