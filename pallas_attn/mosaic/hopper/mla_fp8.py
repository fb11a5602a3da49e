"""Latent attention of up to 64 query rows over fp8 latents: main loop of the two-warpgroup MLA kernel.

    S [64, rows] = C Qᵀ  (tokens are the rows of S)       O [L, rows] += C[:, :L]ᵀ P

Terms:

    query row      one head of one query token; `rows` query rows are the columns of all tiles
    tile C[t]      L latent and R rotated numbers of each of 64 cached tokens; tiles are numbered within a split
    pair           tiles 2i and 2i + 1. Warpgroup w scores tile 2i + w
    slot           shared-memory buffer of one tile; there are three
    split          consecutive pairs that a CTA processes for one block of query rows
    channel group  128 consecutive latent channels, or 64 with `small_groups`. Each token has one scale per group

Latents stay in fp8 in shared memory. Threads convert them to float16 in registers, from which wgmma reads its left
operand (`pallas_attn.mosaic.hopper.mla_fp8_products`). O in float32 does not fit the registers of one warpgroup, so
warpgroup 0 accumulates the left half of the L columns and warpgroup 1 the right half. Each warpgroup computes the
scores of every other tile and stores the probabilities in shared memory for the other warpgroup. Both warpgroups run
the same loop, half a pair apart:

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

In the first pair of a split, warpgroup 0 has no tile t - 1 and skips the steps for it. After the loop, it adds the last
tile of warpgroup 1. A slot is in use from the scores of its tile until the other warpgroup has added the tile. This is
about the duration of a pair. Tile t + 3 uses the slot next, so copies have half of this duration to refill it.

m [rows] is the number that is subtracted from the scores, in shared memory and common to both warpgroups. It changes
only if a score exceeds it by more than `RESCALE_THRESHOLD_LOG2`. The warpgroup that changes m also stores the factors
by which both warpgroups multiply O and l. Each warpgroup has its own l, the sums over the tiles that it scored.

A third warpgroup, the producer, copies tiles and queries to shared memory. It belongs to the calling kernel:
`mla_decode` copies pages with TMA, `mla_sparse` gathers tokens with `cp.async`. The kernel passes its waits and masks
as `Fp8TileAccess`.

With `Fp8LoopConfig.small_groups`, the latents are those of DeepSeek-V4: channel groups of 64 channels with scales that
are powers of two, and R bfloat16 columns that are values, too. The producer stores the largest scale of each token and
the ratios of its scales to the largest scale. Warpgroup 1 also accumulates the R columns, with probabilities P' in
bfloat16 without scale: O_R += R[t]ᵀ P'[t], before its other columns. P' is stored with P.

Barriers (arrivals are per phase; `full` belongs to the calling kernel):

| barrier | phase | arrivals | waits |
|---|---|---|---|
| `q_full` | a split | copies of left half, right half and rotated columns of the queries | both warpgroups |
| `q_converted` | a split | both warpgroups, after each has converted half of the queries to float16 | both warpgroups |
| `q_free` | a split | both warpgroups | producer, before it copies the next queries |
| `full[slot]` | use of a slot | producer's copies of a tile | both warpgroups |
| `empty[slot]` | use of a slot | both warpgroups | producer, before it refills the slot |
| `ready[w]` | a pair | warpgroup w: its P, ratios and factors are stored | the other warpgroup |
| `taken[w]` | a pair | the other warpgroup, after reading P, ratios and factors of w | warpgroup w, before stores |
| `sums` | a split | both warpgroups | both warpgroups |

Deadlock freedom. Each wait below is for an event that does not depend on the waiting warpgroup's later steps.

- empty: both warpgroups arrive once at the start and once after each use of a slot. The producer waits for one phase
  before it copies each tile, and for the last phase before it ends.
- ready[w]: warpgroup w arrives after it has stored the probabilities of tile t. Before, it has waited for full of tile
  t, for ready of tile t - 1, and for taken[w]. The copy of tile t waits until tile t - 3 is released. This release
  needs nothing later than the scores of tile t - 2.
- taken[w]: the other warpgroup arrives once at the start and once after each use of P. Warpgroup w waits for one phase
  before each store of P, and for the last phase in `mla_fp8.end`.
- sums, q_converted: both warpgroups arrive once per split.
- q_free: both warpgroups arrive once at the start and once per split, after the last scores. The producer waits for one
  phase before it copies queries, and for the last phase before it ends.
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
from pallas_attn.mosaic.hopper.mla_rows import ROWS, TOKENS
from pallas_attn.mosaic.hopper.wgmma import RESCALE_THRESHOLD_LOG2
from pallas_attn.mosaic.latent_tiles import INITIAL_MAX
from pallas_attn.mosaic.partial_states import num_fragments
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.register_tiles import BY_64, PER_COLUMN, over_columns, over_tokens
from pallas_attn.portable.quantise import QUERY_SCALE
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP, SMALL_LATENT_GROUP

SLOTS = 3
"""Number of slots."""

MAX, FACTORS, SUMS, REDUCTION = 0, 1, 3, 5
"""First row of each section of `Fp8Scratch.stats`."""


def slot_of(pair: Any, tile: int) -> tuple[Any, Any]:
    """Return the slot of a tile, and the number of earlier uses of this slot.

    Args:
      pair: index of the pair, counted over all splits of the CTA.
      tile: 0 or 1, index of the tile in the pair.
    """
    index = 2 * pair + tile
    return lax.rem(index, SLOTS), lax.div(index, SLOTS)


@dataclasses.dataclass(frozen=True)
class Fp8LoopConfig:
    """Compile-time parameters of the main loop.

    Attributes:
      latent_dim: number L of latent channels.
      rows: number of query rows, at most 64.
      sm_scale: factor of the scores.
      page_tokens: number of consecutive tokens of a tile whose scales are contiguous in shared memory.
      small_groups: whether latents have scales that are powers of two for `SMALL_LATENT_GROUP` channels each, and the
        rotated columns are values, too.
    """

    latent_dim: int
    rows: int
    sm_scale: float
    page_tokens: int
    small_groups: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Number of latent columns that warpgroup 0 and warpgroup 1 accumulate."""
        return mla_rows.halves(self.latent_dim)

    @property
    def value_widths(self) -> tuple[int, int]:
        """Number of columns of O that warpgroup 0 and warpgroup 1 accumulate, including rotated columns."""
        left, right = self.widths
        return left, right + (TOKENS if self.small_groups else 0)

    @property
    def scales(self) -> int:
        """Number of float32 scales per token in shared memory: one per channel group, or only the largest."""
        return 1 if self.small_groups else self.latent_dim // LATENT_GROUP


class Fp8Scratch(NamedTuple):
    """Shared memory and barriers of the main loop. The module docstring has the barrier table.

    `groups` is the number of channel groups. `pages` is TOKENS / `Fp8LoopConfig.page_tokens`.

    Attributes:
      q: two arrays [1, rows, columns], left and right half of the latent columns of the queries. TMA writes bfloat16,
        which `mla_fp8_products.convert_queries` converts to float16 in place.
      q_rope: [1, rows, R], rotated columns of the queries.
      k: e4m3 [SLOTS, TOKENS, L], latents.
      rope: [SLOTS, TOKENS, R], rotated columns of the keys.
      scales: float32 [SLOTS, pages, at least page_tokens · groups]. With `small_groups`, the largest scale of each
        token, [SLOTS, pages, at least page_tokens].
      p: float16 [2, rows, TOKENS], probabilities of each tile of a pair, times the largest scale of each token.
      p_rope: bfloat16 [2, rows, TOKENS], probabilities without scale; None without `small_groups`.
      ratios: float16 [2, groups, TOKENS], for each tile of a pair: scale of each token and channel group, divided by
        the largest scale of the token. With `small_groups` [SLOTS, groups, TOKENS], for each slot.
      stats: float32 [13, rows]. Row 0: m. Rows 1 and 2: factors by which O and l are multiplied after tile 0 or 1 of a
        pair has changed m. Rows 3 and 4: l of each warpgroup at the end of a split. Then four rows for each warpgroup,
        for reductions over its warps.
      weights: partial sums of l of each warpgroup, of type `mla_fp8_softmax.sums_type`.
      changed: int32 [2], 1 if tile 0 or 1 of a pair has changed m, else 0.
      q_full, empty, ready, taken, sums, q_converted, q_free: barriers.
    """

    q: Any
    q_rope: Any
    k: Any
    rope: Any
    scales: Any
    p: Any
    p_rope: Any
    ratios: Any
    stats: Any
    weights: Any
    changed: Any
    q_full: Any
    empty: Any
    ready: Any
    taken: Any
    sums: Any
    q_converted: Any
    q_free: Any

    @staticmethod
    def types(config: Fp8LoopConfig, dtype: jax.typing.DTypeLike) -> Fp8Scratch:
        """Scratch types.

        Args:
          dtype: dtype of the queries and of the rotated columns of the keys.
        """
        rows, latent_dim = config.rows, config.latent_dim
        scales = config.page_tokens * config.scales
        ratios = (SLOTS, latent_dim // SMALL_LATENT_GROUP) if config.small_groups else (2, latent_dim // LATENT_GROUP)
        return Fp8Scratch(
            q=tuple(register_tiles.operand((1, rows, width), dtype) for width in config.widths),
            q_rope=register_tiles.operand((1, rows, TOKENS), dtype),
            k=register_tiles.operand(
                (SLOTS, TOKENS, latent_dim), LATENT_8BIT, row_bytes=register_tiles.swizzle_bytes(latent_dim)
            ),
            rope=register_tiles.operand((SLOTS, TOKENS, TOKENS), dtype),
            scales=plgpu.SMEM((SLOTS, TOKENS // config.page_tokens, -(-scales // 32) * 32), jnp.float32),
            p=register_tiles.operand((2, rows, TOKENS), jnp.float16),
            p_rope=register_tiles.operand((2, rows, TOKENS), dtype) if config.small_groups else None,
            ratios=plgpu.SMEM((*ratios, TOKENS), jnp.float16),
            stats=plgpu.SMEM((13, rows), jnp.float32),
            weights=mla_fp8_softmax.sums_type(rows),
            changed=plgpu.SMEM((2,), jnp.int32),
            q_full=plgpu.Barrier(num_arrivals=3),
            empty=plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
            ready=plgpu.Barrier(num_barriers=2),
            taken=plgpu.Barrier(num_barriers=2),
            sums=plgpu.Barrier(num_arrivals=2),
            q_converted=plgpu.Barrier(num_arrivals=2),
            q_free=plgpu.Barrier(num_arrivals=2),
        )


class Fp8TileAccess(NamedTuple):
    """Functions of the calling kernel that wait for tiles and mask them.

    `slot` is the slot of a tile, and `use` the number of earlier uses of this slot.

    Attributes:
      await_keys: await_keys(slot, use) waits until the tile has arrived and tensor cores may read its rotated keys.
      await_values: await_values(slot, use) waits until the tile has arrived and threads may read its latents. If
        rotated columns are values, warpgroup 1 calls `await_keys` instead.
      is_full: is_full(slot) returns whether every query row sees every token of the tile.
      mask: mask(slot, s) returns the masked scores [TOKENS, rows]. It is called if `is_full` is False, by the warpgroup
        that scores the tile. It sets scores to -inf where a query row does not see a token. For tokens that no query
        row sees, it also sets the latents in shared memory to 0 and their scales to 1.
      before_release: before_release() issues a fence, if one is needed, between the threads' reads of a tile and the
        producer's next copy to the same slot.
    """

    await_keys: Callable[[Any, Any], None]
    await_values: Callable[[Any, Any], None]
    is_full: Callable[[Any], Any]
    mask: Callable[[Any, Any], Any]
    before_release: Callable[[], None]


# --- the main loop


def attend(config: Fp8LoopConfig, mem: Fp8Scratch, half: int, tiles: Fp8TileAccess, first: Any, count: Any) -> Any:
    """Attend to a split, with the queries that arrive next in `Fp8Scratch.q`. Runs in both warpgroups.

    Args:
      half: index w of this warpgroup. It scores tile w of each pair, and accumulates the left (0) or right (1) half of
        the columns of O.
      tiles: functions of the calling kernel.
      first, count: index of the first pair, counted over all splits of the CTA, and number of pairs, at least 1.

    Returns:
      Unnormalised O [columns, rows] of this warpgroup's columns, over all tiles.
    """
    rows, shape, other = config.rows, (TOKENS, config.rows), 1 - half
    adds_rotated = config.small_groups and half == 1

    def compute_scores(slot: Any) -> Any:
        """Return C Qᵀ [TOKENS, rows] of a tile, divided by each token's scale of the last channel group, or by its
        largest scale with `small_groups`.
        """
        zero = basics.opaque_zero()
        rotated = wgmma.start_scores([(mem.rope.at[slot], mem.q_rope.at[zero])], None, register_tiles.ROW_BYTES)
        queries = [q.at[zero] for q in mem.q]
        ratios = mem.ratios.at[slot] if config.small_groups else None
        scales = mem.scales.at[slot]
        return mla_fp8_products.add_scores(rotated, mem.k.at[slot], queries, scales, config.page_tokens, ratios)

    def load_scales(slot: Any) -> list[jax.Array]:  # [TOKENS] for each channel group, or the largest
        loaded = dequantize.load_group_scales(mem.scales.at[slot], config.page_tokens, config.scales, TOKENS, BY_64)
        return [jnp.maximum(scale, dequantize.SMALLEST_SCALE) for scale in loaded]

    def rescale_weights(tile: int, changed: Any) -> None:
        mla_fp8_softmax.rescale_weights(mem.weights.at[half], changed, mem.stats.at[FACTORS + tile])

    def store_probs(slot: Any, s: Any) -> None:
        """Compute and store the probabilities of this warpgroup's tile, and add them to l.

        The stored probabilities are multiplied by the largest scale of the token; the sums l are not.
        """
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
        if config.small_groups:
            zero = basics.opaque_zero()
            p_rope = (p * over_tokens(1 / largest, shape)).astype(mem.p_rope.dtype)
            places = mem.p.at[half + zero], mem.p_rope.at[half + zero]
            mla_fp8_softmax.store_probs((p.astype(jnp.float16), p_rope), places)
        else:
            ratios = [(scale / largest).astype(jnp.float16) for scale in load_scales(slot + basics.opaque_zero())]
            zero = basics.opaque_zero()  # the compiler then does not compute these addresses earlier: fewer registers
            place, ratios_to = mem.p.at[half + zero], mem.ratios.at[half + zero]
            mla_fp8_softmax.store_probs((p.astype(jnp.float16),), (place,), ratios, ratios_to)
        plgpu.barrier_arrive(mem.ready.at[half])
        mla_fp8_softmax.add_weights(mem.weights.at[half], p, 1 / largest)

    def add_values(slot: Any, tile: int, acc: Any) -> Any:
        """Add a tile's latents times its probabilities to O, and release the tile's slot.

        Args:
          tile: 0 or 1, index of the tile in its pair.
        """
        acc = mla_fp8_softmax.rescale_columns(acc, mem.changed[tile], mem.stats.at[FACTORS + tile])
        column, p = half * config.widths[0], mem.p.at[tile + basics.opaque_zero()]
        rotated, ratios = None, mem.ratios.at[slot if config.small_groups else tile]
        if adds_rotated:
            rotated = mem.rope.at[slot], mem.p_rope.at[tile + basics.opaque_zero()]
        acc = mla_fp8_products.add_values(acc, mem.k.at[slot], column, p, ratios, rotated)
        tiles.before_release()
        plgpu.barrier_arrive(mem.empty.at[slot])
        return acc

    def add_other_tile(pair: Any, acc: Any) -> Any:
        """Add the tile of `pair` that the other warpgroup scores to O, after its probabilities have been stored."""
        slot, use = slot_of(pair, other)
        (tiles.await_keys if adds_rotated else tiles.await_values)(slot, use)
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
    acc = register_tiles.filled(0.0, (config.value_widths[half], rows), BY_64.tile)
    mla_fp8_softmax.clear_sums(mem.weights.at[half], rows)
    acc = lax.fori_loop(first, first + count, step, acc)
    if half == 0:
        acc = add_other_tile(first + count - 1, acc)
    return mla_fp8_products.ordered_as_values(acc) if adds_rotated else acc


# --- consumers' barriers and results


def begin(mem: Fp8Scratch, half: int) -> None:
    """Make the first arrivals at q_free, empty and taken, so that the first waits for them end. Call it once, before
    the first split.
    """
    plgpu.barrier_arrive(mem.q_free)
    for slot in range(SLOTS):
        plgpu.barrier_arrive(mem.empty.at[slot])
    plgpu.barrier_arrive(mem.taken.at[1 - half])


def end(mem: Fp8Scratch, half: int) -> None:
    """Wait for the other warpgroup's last arrival at taken. Call it once, after the last split."""
    plgpu.barrier_wait(mem.taken.at[half])


def exchange_sums(config: Fp8LoopConfig, mem: Fp8Scratch, half: int) -> Any:
    """Return l [rows], summed over the tiles of both warpgroups, and arrive at q_free. Call it once per split."""
    plgpu.barrier_arrive(mem.q_free)
    own = mla_fp8_softmax.total_weights(mem.weights.at[half], config.rows, mem.stats.at[pl.ds(REDUCTION + 4 * half, 4)])
    mem.stats[SUMS + half] = own
    plgpu.commit_smem()
    plgpu.barrier_arrive(mem.sums)
    plgpu.barrier_wait(mem.sums)
    return own + basics.load(mem.stats.at[SUMS + 1 - half], PER_COLUMN)


def load_max(mem: Fp8Scratch) -> Any:
    """Load m [rows] after `exchange_sums`, before the next split.

    Warpgroup 0 resets m in the next split, after both warpgroups have arrived at `q_converted`.
    """
    return basics.load(mem.stats.at[MAX], PER_COLUMN)


def write_partial(config: Fp8LoopConfig, half: int, acc: Any, to: Ref) -> None:
    """Write this warpgroup's half of O, acc [columns, rows], to a partial state in global memory.

    Args:
      to: the accumulator of one state of `PartialStates`; this warpgroup writes the fragments of its columns.
    """
    widths = config.value_widths
    fragments = pl.ds(num_fragments(ROWS * half * widths[0]), num_fragments(ROWS * widths[half]))
    mla_fp8_products.store_fragments(acc, to.at[fragments])
