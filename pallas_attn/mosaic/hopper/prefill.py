"""The prefill kernel on Hopper: attention of many queries to packed or paged keys and values.

The schedule is the one of FlashAttention-3 (Shah et al., arXiv:2407.08608). A CTA has one producer warpgroup, which
starts TMA copies, and one to three consumer warpgroups, which compute. It processes work tiles
(`mosaic.prefill.schedule`). A work tile is a block of query rows, 64 for each consumer, and the keys that these rows
see, or a split of these keys. A tile is `tile_keys` consecutive keys or their values. Tiles of K, and tiles of V, are
in the slots of a ring in shared memory (`mosaic.prefill.pipeline.Rings`): tile i is in slot i % stages.

    producer:                                   consumer, for each work tile:
      for each work tile:                         wait q_full[consumer]
        for tile i of its keys:                   S = Q Kᵀ of tile 0;  P = softmax(S)             # _first
          wait k_empty, start copies of K[i]      for tile i = 1, 2, ...:                         # _step
          wait v_empty, start copies of V[i-1]      wait k_full[i], v_full[i-1]
          if i == 1:                                wait schedule_barrier[consumer]
            wait q_empty, start copies of Q         start S = Q K[i]ᵀ and O += P V[i-1]
                                                    arrive schedule_barrier[next consumer]
                                                    wait for S; arrive k_empty[i]
                                                    mask S; m = running maximum
                                                    wait for O; rescale O, l; arrive v_empty[i-1]
                                                    P = exp2(S · scale - m); l += row sums of P
                                                  O += P V of the last tile                       # _last
                                                  store O / l and LSE, or O, m, l                 # store

If `FlashStatic.column_parts` is 2, both consumers have the same 64 query rows. Each computes all scores, and half of
the columns of O from half of the columns of V.

After S of the last tile of a block, the consumer also arrives at q_empty. Each consumer keeps S [64, tile_keys], P [64,
tile_keys] and O [64, Dv] in registers. It computes the exponentials after P V has finished, because the new P takes the
registers of the old P. Consumers start their products one after the other, so that the softmax of one consumer overlaps
the products of the others (two consumers; S0 is the product with K[0], PV0 the product with V[0]):

    consumer 0   S0 ·softmax· S1 PV0 ·softmax· S2 PV1 ·softmax·
    consumer 1      ········ S0 ·softmax· S1 PV0 ·softmax· S2 PV1
    producer     Q K0 K1 V0 K2 V1 ······ as slots become empty; for the next block K0 K1 V0 Q K2 V1 ······

Barriers, for n consumers. All TMA copies of a tile together are one arrival:

    barrier                    arrivals per phase           waits
    q_full[row group]          copies of Q, 1 per part      its consumers, before their first product of a block
    q_empty[row group]         each of its consumers, 1     producer, before it copies the next Q
    k_full[slot]               copies of K, 1               consumers, before S
    k_empty[slot]              each consumer, n             producer, before it fills the slot again
    v_full[slot]               copies of V, 1               consumers, before P V
    v_empty[slot]              each consumer, n             producer, before it fills the slot again
    v_full[stages]             copies of V, 1               producer, before it zeroes masked values of the slot;
                                                            it then arrives at v_full[slot] itself
    schedule_barrier[consumer] previous consumer, 1         consumer, before it starts products
    fetched                    producer, 1                  producer, before it reads a work tile (`TileQueue`)
    next_tile_full[slot]       producer, 1                  producer and consumers, before their next work tile

If the producer dequantizes a cache, it arrives at k_full and v_full itself (`mosaic_dequantize.py`).

Deadlock freedom. All warpgroups process the same work tiles and the same tiles in the same order.

- The producer waits for empty slots. A consumer arrives at k_empty of K[i] and v_empty of V[i-1] after it has waited
  for both tiles. The producer loads K[i] and then V[i-1], and for these loads it waits only for slots of earlier tiles.
  So consumers always get the tiles that they need to empty a slot.
- The producer waits for q_empty after it has loaded all tiles of the previous block, so the consumers can finish that
  block without the producer. It copies Q after the second tile of keys if `stages` is at least 2. With one stage, the
  slot of the second tile becomes empty only after a product with Q, so it copies Q before that tile.
- After a consumer's wait for schedule_barrier, it arrives at the schedule_barrier of the next consumer without any
  other wait. Every consumer does so once per tile. In addition, the last consumer arrives once before the first work
  tile (`begin_round`), and the first consumer waits once after the last work tile (`end_round`). So every arrival has
  one wait.
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
from jaxtyping import Array, Float

from pallas_attn.mosaic.hopper import wgmma
from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.prefill.pipeline import (
    FlashKernel,
    FlashStatic,
    OperandLoader,
    Results,
    Rings,
    RowOptions,
    ScoreTransform,
    consume,
    launch,
    produce,
    wait_if,
)
from pallas_attn.mosaic.prefill.schedule import WorkList, WorkTiles, ring_slot
from pallas_attn.mosaic.prefill.split import KvSplits, OutputRows, RowState
from pallas_attn.mosaic.primitives import basics, register_tiles
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.exponents import in_log2_units, next_reference, over_scores
from pallas_attn.mosaic.primitives.register_tiles import PER_COLUMN, over_columns, over_tokens
from pallas_attn.mosaic.primitives.row_io import RowLayout, store_results

QUERIES = 64
"""Query rows of a consumer: M of a wgmma instruction."""

REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32)}
DEQUANTIZE_REGISTERS = {1: (248, 128), 2: (216, 72), 3: (152, 56)}
"""Registers per thread, by the number of consumers: (for consumers, for the producer).

The registers of all warpgroups must not exceed the registers with which the kernel starts: the largest multiple of 8
  per
thread that fits a multiprocessor. A producer that converts an 8-bit cache (`FlashStatic.dequantizes`) needs more
registers than a producer that only copies.
"""


class ResultRows(RowLayout):
    """Register layout of a wgmma result [64, n], with stores of its rows to global memory."""

    @property
    def tile(self) -> Any:
        return TILE

    def store(self, ref: Ref, row: jax.Array, column: int, values: jax.Array) -> None:
        if jnp.dtype(values.dtype).itemsize == 2:
            store_results(TILE, ref, row, column, values)
        else:
            super().store(ref, row, column, values)


ROWS = ResultRows(threads=4, vector=2)


class FlashScratch(NamedTuple):
    """Shared memory and barriers of a CTA. The docstring of the module explains the barriers."""

    rings: Rings
    schedule_barrier: Any


def flash_attention(
    loader: OperandLoader, inputs: Any, work: WorkList, splits: KvSplits, **rest: Any
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"] | None]:
    """Run the kernel and return output and LSE. See `mosaic.prefill.pipeline.launch`."""
    static = loader.static
    scratch = FlashScratch(
        Rings.types(static, jax.tree.leaves(inputs.q)[0].dtype, readers=static.consumers),
        plgpu.Barrier(num_barriers=static.consumers),
    )
    return launch(FlashKernel(_kernel, scratch, static.consumers + 1), loader, inputs, work, splits, **rest)


def _kernel(
    loader: OperandLoader,
    x: Any,
    work_tiles: Callable[[], WorkTiles],
    result: Results,
    scratch: FlashScratch,
    loader_scratch: Any,
) -> None:
    static, warpgroup = loader.static, lax.axis_index("warpgroup")
    registers = DEQUANTIZE_REGISTERS if static.dequantizes else REGISTERS
    of_consumer, of_producer = registers[static.consumers]

    def load() -> None:
        plgpu.set_max_registers(of_producer, action="decrease")
        produce(loader, x, work_tiles(), scratch.rings, loader_scratch)

    def attend() -> None:
        plgpu.set_max_registers(of_consumer, action="increase")
        consumer = Consumer(static, scratch.rings, scratch.schedule_barrier, warpgroup)
        consumer.begin_round()
        consume(loader, x, work_tiles(), consumer, result, loader_scratch)
        consumer.end_round()

    # With a `pl.when` for each role, the compiler would keep values of one role in registers during the other role.
    lax.cond(warpgroup < static.consumers, attend, load)


# --- a consumer


class SoftmaxState(NamedTuple):
    """Online softmax of the 64 query rows of a consumer, after it has computed the probabilities of a tile.

    Scores are scaled so that probabilities are powers of 2: score = log2(e) · score_scale · (q kᵀ).

    Attributes:
      o: [64, Dv] float32, sum of values times 2**(score - m), over all tiles before the newest tile.
      m: [64] float32, number that is subtracted from scores: the largest score of all tiles, or up to
        `RESCALE_THRESHOLD_LOG2` less. It changes rarely, because a change requires that `o` and `l` are rescaled.
      l: [64, 8] float32, sums of 2**(score - m) over all tiles. Column j has the sum over the keys j, j + 8, j + 16,
        ... of each tile.
      p: [64, tile_keys] 16-bit, 2**(score - m) of the newest tile.
    """

    o: Any
    m: Any
    l: Any  # noqa: E741
    p: Any


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup: attention of 64 query rows.

    In the methods, `kv_tile` is the number of a tile, counted over all work tiles of the CTA, and `more` tells whether
    the work tile has a tile after it. `scores_of(s)` returns the `Scores` of a product s = q kᵀ.

    Attributes:
      turn: index of the warpgroup among the consumers.
    """

    static: FlashStatic
    rings: Rings
    schedule_barrier: Any
    turn: Any

    @property
    def number(self) -> Any:
        """Index of the consumer's group of query rows. Consumers that share query rows are the only consumers."""
        return self.turn if self.static.column_parts == 1 else jnp.int32(0)

    @property
    def width(self) -> int:
        """Number of columns of the output that the consumer has."""
        return self.static.value_dim // self.static.column_parts

    def _values(self, slot: Any) -> Ref:
        """Return the consumer's columns of the values in a slot, [tile_keys, width]."""
        if self.static.column_parts == 1:
            return self.rings.v.at[slot]
        first = pl.multiple_of((self.turn + basics.opaque_zero()) * self.width, self.width)
        return self.rings.v.at[slot, :, pl.ds(first, self.width)]

    def attend(self, begin: Any, kv_tiles: Any, transform: ScoreTransform, has_rows: Any) -> RowState:
        """Attend to `kv_tiles` tiles, at least one, from tile number `begin` of the CTA on.

        A consumer without query rows multiplies the first tile only, which leaves the tensor cores to the other
        consumers. `has_rows` changes the number of loop iterations, not a branch. In a branch that ptxas cannot prove
        uniform, ptxas puts wgmma descriptors into ordinary instead of uniform registers.
        """
        multiplied = jnp.where(has_rows, kv_tiles, 1)  # number of tiles that are multiplied; `_skip` handles the others

        def step(i: Any, state: SoftmaxState) -> SoftmaxState:
            return self._step(begin + i, state, i + 1 < multiplied, functools.partial(self._scores, transform, i))

        plgpu.barrier_wait(self._of_own(self.rings.q_full))
        state = self._first(begin, kv_tiles > 1, functools.partial(self._scores, transform, jnp.int32(0)))
        state = lax.fori_loop(1, multiplied, step, state)
        lax.fori_loop(multiplied, kv_tiles, lambda i, _: self._skip(begin + i, i + 1 < kv_tiles), None)
        m = in_log2_units(state.m, self._scale(transform))
        return RowState(self._last(begin + kv_tiles - 1, state), m, state.l.sum(axis=1))

    def _first(self, kv_tile: Any, more: Any, scores_of: Callable[[Any], Scores]) -> SoftmaxState:
        """Compute the probabilities of the first tile, then wait for the keys of the next tile."""
        rings, slot = self.rings, ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(rings.k_full.at[slot])
        self._wait_for_turn()
        s = wgmma.multiply(self._query_parts(), rings.k.at[slot], self._signal_next)  # [64, tile_keys]
        self._release_keys(slot, more)
        scores = scores_of(s)
        m, factor = scores.update_max(register_tiles.filled(-jnp.inf, (QUERIES,), PER_TOKEN))
        p, l = scores.probabilities(m, factor)  # noqa: E741
        self._await_keys(kv_tile + 1, more)
        o = register_tiles.filled(0.0, (QUERIES, self.width), TILE)
        return SoftmaxState(o, m, l, p.astype(rings.q.dtype))

    def _step(self, kv_tile: Any, state: SoftmaxState, more: Any, scores_of: Callable[[Any], Scores]) -> SoftmaxState:
        """Add the values of the previous tile to the output, and compute the probabilities of this tile.

        The previous call has waited for the keys of this tile.
        """
        rings = self.rings
        slot, previous = ring_slot(kv_tile, self.static.stages), ring_slot(kv_tile - 1, self.static.stages)
        k, v = rings.k.at[slot], self._values(previous)
        plgpu.barrier_wait(rings.v_full.at[previous])
        self._wait_for_turn()
        s, o = wgmma.start(self._query_parts(), k, state.p, v, state.o)  # [64, tile_keys], [64, Dv]
        self._signal_next()
        s = wgmma.finish(s, TILE, TILE, under_way=1)  # P V is still in flight
        self._release_keys(slot, more)
        scores = scores_of(s)
        m, factor = scores.update_max(state.m)  # [64] each
        # This function waits until P V has finished, because `finished` is False.
        o, l = wgmma.rescale_accumulator((o, state.l), (TILE, TILE), state.m, m, finished=False)  # noqa: E741
        plgpu.barrier_arrive(rings.v_empty.at[previous])
        # P V is finished: `p` may take the registers of `state.p`.
        p, more_l = scores.probabilities(m, factor)  # [64, tile_keys], [64, 8]
        p, l = lax.optimization_barrier((p.astype(rings.q.dtype), l + more_l))  # noqa: E741
        self._await_keys(kv_tile + 1, more)
        return SoftmaxState(o, m, l, p)

    def _skip(self, kv_tile: Any, more: Any) -> None:
        """Wait and arrive at the same barriers as `_step`, without products."""
        slot, previous = ring_slot(kv_tile, self.static.stages), ring_slot(kv_tile - 1, self.static.stages)
        plgpu.barrier_wait(self.rings.v_full.at[previous])
        self._wait_for_turn()
        self._signal_next()
        self._release_keys(slot, more)
        plgpu.barrier_arrive(self.rings.v_empty.at[previous])
        self._await_keys(kv_tile + 1, more)

    def _last(self, kv_tile: Any, state: SoftmaxState) -> jax.Array:
        """Add the values of the last tile to the output."""
        slot = ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(self.rings.v_full.at[slot])
        o = wgmma.accumulate(state.p, self._values(slot), state.o)
        plgpu.barrier_arrive(self.rings.v_empty.at[slot])
        return o

    def _query_parts(self) -> list[Ref]:
        """Return the 16-bit arrays [64, Dk] in shared memory whose sum is Q.

        If there are several, their indices are opaque to the compiler. It would otherwise compute their addresses
        before the loop and keep them in registers.
        """
        parts = self.static.query_parts
        opaque = basics.opaque_zero() if parts > 1 else 0
        return [self.rings.q.at[self.number * parts + opaque + i] for i in range(parts)]

    def _release_keys(self, slot: Any, more: Any) -> None:
        """Arrive at k_empty of a slot whose keys were multiplied; after the last tile of a block, also at q_empty."""
        plgpu.barrier_arrive(self.rings.k_empty.at[slot])
        pl.when(~more)(lambda: plgpu.barrier_arrive(self._of_own(self.rings.q_empty)))

    def _of_own(self, barriers: Any) -> Any:
        """Return the barrier of this consumer's query rows, of an array with one barrier per group of rows. The index
        is opaque to the compiler, which saves a register.
        """
        return barriers.at[self.number + basics.opaque_zero()]

    def _await_keys(self, kv_tile: Any, more: Any) -> None:
        wait_if(more, self.rings.k_full.at[ring_slot(kv_tile, self.static.stages)])

    # Order of products

    def begin_round(self) -> None:
        """Arrive at the schedule_barrier of the first consumer, so that it can start. Call before the first work
        tile.
        """
        if self.static.consumers > 1:
            pl.when(self.turn == self.static.consumers - 1)(self._signal_next)

    def end_round(self) -> None:
        """Wait for the last arrival at the schedule_barrier of the first consumer. Call after the last work tile."""
        if self.static.consumers > 1:
            pl.when(self.turn == 0)(self._wait_for_turn)

    def _wait_for_turn(self) -> None:
        if self.static.consumers > 1:
            plgpu.barrier_wait(self.schedule_barrier.at[self.turn])

    def _signal_next(self) -> None:
        if self.static.consumers > 1:
            following = ring_slot(self.turn + 1, self.static.consumers)
            plgpu.barrier_arrive(self.schedule_barrier.at[following])

    def store(self, result: Results, row: jax.Array, state: RowState, options: RowOptions) -> None:
        """Store output and LSE if the work tile has all keys of its block, else the partial state.

        Args:
          row: int32 [64], index of each query row in the result; negative for rows that are not stored.
        """
        if options.scale is not None:
            state = state._replace(o=options.scale(state.o, 0, PER_COLUMN))

        parts, part = self.static.column_parts, self.turn
        once = row if parts == 1 else jnp.where(ROWS.filled(part, QUERIES) == 0, row, -1)  # for values without columns

        def columns(ref: Ref, values: jax.Array) -> None:
            """Store this consumer's columns."""
            for i in range(parts):
                of_part = functools.partial(ROWS.store, ref, row, i * self.width, values)
                of_part() if parts == 1 else pl.when(part == i)(of_part)

        def partial(states: RowState) -> None:
            columns(states.o, state.o)
            ROWS.put(states.m, once, state.m)
            ROWS.put(states.l, once, state.l)

        def finished(rows: OutputRows) -> None:
            inverse = over_tokens(state.inverse(options.sink), state.o.shape)
            o = wgmma.zero_rows(state.o, state.l) * inverse
            columns(rows.out, o.astype(rows.out.dtype))
            if rows.lse is not None:
                ROWS.put(rows.lse, once, state.lse())

        result.store(options.is_whole, finished, partial)

    # Scores

    def _scale(self, transform: ScoreTransform) -> float:
        """Return the factor that makes the scores of `Scores` exponents of 2."""
        if transform.token_scales is not None:
            return 1.0
        return self.static.score_scale * LOG2E if self.static.soft_cap is None else LOG2E

    def _scores(self, transform: ScoreTransform, i: Any, s: Any) -> Scores:
        """Scale, cap and mask the product q kᵀ of the i-th tile of the work tile.

        Args:
          s: product, float32 [64, tile_keys].
        """
        static, token_scales = self.static, transform.token_scales
        if transform.key_scale is not None:
            s = s * transform.key_scale
        if token_scales is not None:
            s = s * over_columns(basics.load(token_scales(i).at[0], PER_COLUMN), s.shape)
        s = s if static.soft_cap is None else wgmma.capped(s, static.score_scale, static.soft_cap)
        sees_all, limits = transform.limits(i)
        s = lax.cond(sees_all, lambda s: s, lambda s: wgmma.hide(s, limits()), s)
        if token_scales is None:
            return Scores(s, self._scale(transform))
        scale = static.score_scale * LOG2E if static.soft_cap is None else LOG2E
        log2, inverse = (basics.load(token_scales(i).at[n], PER_COLUMN) for n in (1, 2))
        return Scores(s * scale + over_columns(log2, s.shape), 1.0, inverse)


class Scores(NamedTuple):
    """Masked scores of a tile.

    If values have a scale per token, `s` includes log2 of these scales, so the probabilities include the scales.
    Because the maximum is also taken with the scales, these probabilities are at most 2**8. `inverse` removes the
    scales from the row sums.

    Attributes:
      s: [64, tile_keys] float32, -inf where a query row does not see the key.
      scale: the probabilities are 2**(s · scale - m).
      inverse: float32 [tile_keys], inverse of each value's scale; None unless values have a scale per token.
    """

    s: Any
    scale: float
    inverse: Any = None

    def update_max(self, m: Any) -> tuple[Any, Any]:
        """Return `SoftmaxState.m` for this tile, given its value after the previous tile.

        The second result is the factor of this tile's scores: `scale`, or [64] from `exponent_factor`.
        """
        return next_reference(self.s.max(axis=1), m, self.scale, wgmma.RESCALE_THRESHOLD_LOG2)

    def probabilities(self, m: Any, factor: Any) -> tuple[Any, Any]:
        """Compute P = 2**(s · factor - m) and the partial row sums [64, 8].

        `m` is a rounded product s · factor, but the compiler computes s · factor - m as one fused multiply-add, with
        one rounding. The exponent of the largest score is therefore not exactly 0. This does not change the output,
        because P, row sums, partial states and LSE all use the same `m`.
        """
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        p = jnp.exp2(self.s * over_scores(factor, over_tokens, self.s.shape) - over_tokens(shift, self.s.shape))
        unscaled = p if self.inverse is None else p * over_columns(self.inverse, p.shape)
        return p, wgmma.partial_sums(unscaled)
