"""The prefill kernel on Hopper: attention of many queries, one warpgroup that copies and up to three that compute.

After FlashAttention-3 (Shah et al., arXiv 2407.08608). A program takes work tiles (`flash.schedule`): a block of
neighbouring queries of one head, 64 rows for each consumer, against the keys that the block sees, tile by tile. The
producer copies keys and values into the rings of `flash.pipeline`. A consumer holds its scores S, probabilities P and
output O in registers, and starts two products at once: S of a tile, and O += P V of the tile before, during which it
finds the maxima of S. Its exponentials wait for both products, because the 16-bit P that they make takes the registers
of the P that is multiplied. Consumers start their products in turn, so that the softmax of one overlaps the products of
the others:

    consumer 0   S0 ·softmax· S1 PV0 ·softmax· S2 PV1 ·softmax·
    consumer 1      ········ S0 ·softmax· S1 PV0 ·softmax· S2 PV1
    producer     Q K0 K1 V0 K2 V1 ······ as slots become free; of the next block K0 K1 V0 Q K2 V1 ······

This file is read downward: roles, consumer, output.

Barriers, beside those of the rings, which n consumers free:

    barrier                    arrivals           who waits
    schedule_barrier[consumer] the consumer       consumer, before it starts its products
                               before it
    fetched                    the producer       itself, before it looks up a work tile (`TileQueue`)
    next_tile_full[slot]     the producer       consumers, before their next work tile

The kernel cannot deadlock. All warpgroups go through the same work tiles and tiles of keys. The producer waits for
slots that every consumer frees one product after it used them, and for the buffer of the queries, which is free after
the last product of the block before, for which it has brought everything. A consumer waits for tiles that the producer
brings in the order in which they are used, keys of a tile before values of the tile before. The consumer whose turn it
is waits for nothing before it arrives at the next one's `schedule_barrier`, and does so once a tile, as all do; the
last consumer begins the round, and the first one ends it.
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
from pallas_attn.mosaic.primitives.register_tiles import PER_COLUMN, over_columns, over_tokens
from pallas_attn.mosaic.primitives.row_io import RowLayout, store_results

QUERIES = 64
"""Query rows of a consumer: wgmma's M."""

REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32)}
DEQUANTIZE_REGISTERS = {1: (248, 128), 2: (216, 72), 3: (152, 56)}
"""Registers of a consumer's thread and of one of the producer, by the number of consumers: together no more than all
threads begin with, the most that are a multiple of 8 and fit a multiprocessor. A producer that dequantizes what it
copies takes more; beside one consumer there are enough for both.
"""


class ResultRows(RowLayout):
    """The rows of wgmma's results."""

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
    """Shared memory and barriers of a program; the module's docstring lists the barriers."""

    rings: Rings
    schedule_barrier: Any


def flash_attention(
    loader: OperandLoader, inputs: Any, work: WorkList, splits: KvSplits, **rest: Any
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"] | None]:
    """Output and LSE; see `flash.pipeline.launch`."""
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
    of_consumer, of_producer = (DEQUANTIZE_REGISTERS if static.dequantizes else REGISTERS)[static.consumers]

    def load() -> None:
        plgpu.set_max_registers(of_producer, action="decrease")
        produce(loader, x, work_tiles(), scratch.rings, loader_scratch)

    def attend() -> None:
        plgpu.set_max_registers(of_consumer, action="increase")
        consumer = Consumer(static, scratch.rings, scratch.schedule_barrier, warpgroup)
        consumer.begin_round()
        consume(loader, x, work_tiles(), consumer, result, loader_scratch)
        consumer.end_round()

    # One branch, not a `pl.when` for each role: values of one role would stay alive through the other.
    lax.cond(warpgroup < static.consumers, attend, load)


# --- a consumer


class SoftmaxState(NamedTuple):
    """Attention of a consumer's rows over the tiles before the last one that was scored, and that tile's probabilities.

    Attributes:
      o: [64, Dv] float32, values weighted with 2**(score - m).
      m: [64] float32, what scores are relative to, times log2 e: the largest score of all tiles, or less than that by
        at most the threshold below which nothing is rescaled.
      l: [64, 8] float32, sums of 2**(score - m) over columns that are a multiple of 8 apart.
      p: [64, tile_keys], 2**(score - m) of the last tile, which is not in o yet.
    """

    o: Any
    m: Any
    l: Any  # noqa: E741
    p: Any


@dataclasses.dataclass(frozen=True)
class Consumer:
    """Attention of 64 rows over the tiles of a block.

    Attributes:
      number: index among the consumers.
    """

    static: FlashStatic
    rings: Rings
    schedule_barrier: Any
    number: Any

    def attend(self, begin: Any, kv_tiles: Any, transform: ScoreTransform, has_rows: Any) -> RowState:
        """Attention over some tiles, at least one, from the program's tile number `begin` on.

        Without rows only the first tile is multiplied, which leaves the tensor core to the other consumers. That is a
        matter of how often the loop runs, and no branch around it: of one that is not known to be uniform the assembler
        makes descriptors of products in ordinary registers.
        """
        multiplied = jnp.where(has_rows, kv_tiles, 1)

        def step(i: Any, state: SoftmaxState) -> SoftmaxState:
            return self._step(begin + i, state, i + 1 < multiplied, functools.partial(self._scores, transform, i))

        plgpu.barrier_wait(self._of_own(self.rings.q_full))
        state = self._first(begin, kv_tiles > 1, functools.partial(self._scores, transform, jnp.int32(0)))
        state = lax.fori_loop(1, multiplied, step, state)
        lax.fori_loop(multiplied, kv_tiles, lambda i, _: self._skip(begin + i, i + 1 < kv_tiles), None)
        return RowState(self._last(begin + kv_tiles - 1, state), state.m, state.l.sum(axis=1))

    def _first(self, kv_tile: Any, more: Any, scores_of: Callable[[Any], Scores]) -> SoftmaxState:
        """Takes the first tile, and waits for the keys of the one after it."""
        rings, slot = self.rings, ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(rings.k_full.at[slot])
        self._wait_for_turn()
        s = wgmma.multiply(self._query_terms(), rings.k.at[slot], self._pass_turn)
        self._release_keys(slot, more)
        scores = scores_of(s)
        m = scores.update_max(register_tiles.filled(-jnp.inf, (QUERIES,), PER_TOKEN))
        p, l = scores.probabilities(m)  # noqa: E741
        self._await_keys(kv_tile + 1, more)
        o = register_tiles.filled(0.0, (QUERIES, self.static.value_dim), TILE)
        return SoftmaxState(o, m, l, p.astype(rings.q.dtype))

    def _step(self, kv_tile: Any, state: SoftmaxState, more: Any, scores_of: Callable[[Any], Scores]) -> SoftmaxState:
        """Takes a tile whose keys have full, and meanwhile adds the values of the tile before to the output."""
        rings = self.rings
        slot, previous = ring_slot(kv_tile, self.static.stages), ring_slot(kv_tile - 1, self.static.stages)
        k, v = rings.k.at[slot], rings.v.at[previous]
        plgpu.barrier_wait(rings.v_full.at[previous])
        self._wait_for_turn()
        s, o = wgmma.start(self._query_terms(), k, state.p, v, state.o)
        self._pass_turn()
        s = wgmma.finish(s, TILE, TILE, under_way=1)
        self._release_keys(slot, more)
        scores = scores_of(s)
        m = scores.update_max(state.m)
        o, l = wgmma.rescale_accumulator((o, state.l), (TILE, TILE), state.m, m, finished=False)  # noqa: E741
        plgpu.barrier_arrive(rings.v_empty.at[previous])
        # Only now: the product that is finished read the registers of the last probabilities.
        p, more_l = scores.probabilities(m)
        p, l = lax.optimization_barrier((p.astype(rings.q.dtype), l + more_l))  # noqa: E741
        self._await_keys(kv_tile + 1, more)
        return SoftmaxState(o, m, l, p)

    def _skip(self, kv_tile: Any, more: Any) -> None:
        """Waits and arrives as `_step` does, without products."""
        slot, previous = ring_slot(kv_tile, self.static.stages), ring_slot(kv_tile - 1, self.static.stages)
        plgpu.barrier_wait(self.rings.v_full.at[previous])
        self._wait_for_turn()
        self._pass_turn()
        self._release_keys(slot, more)
        plgpu.barrier_arrive(self.rings.v_empty.at[previous])
        self._await_keys(kv_tile + 1, more)

    def _last(self, kv_tile: Any, state: SoftmaxState) -> jax.Array:
        """Adds the values of the last tile to the output."""
        slot = ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(self.rings.v_full.at[slot])
        o = wgmma.accumulate(state.p, self.rings.v.at[slot], state.o)
        plgpu.barrier_arrive(self.rings.v_empty.at[slot])
        return o

    def _query_terms(self) -> list[Ref]:
        """The terms of the queries. The compiler is kept from knowing where they are if there are several: what is the
        same for every tile it computes ahead, such as their addresses, which take many registers.
        """
        terms = self.static.query_parts
        unknown = basics.opaque_zero() if terms > 1 else 0
        return [self.rings.q.at[self.number * terms + unknown + i] for i in range(terms)]

    def _release_keys(self, slot: Any, more: Any) -> None:
        """Frees keys after their products; the consumer's queries, too, if these were the block's last."""
        plgpu.barrier_arrive(self.rings.k_empty.at[slot])
        pl.when(~more)(lambda: plgpu.barrier_arrive(self._of_own(self.rings.q_empty)))

    def _of_own(self, barriers: Any) -> Any:
        """The consumer's own barrier, of those of all, whose address is not kept in a register."""
        return barriers.at[self.number + basics.opaque_zero()]

    def _await_keys(self, kv_tile: Any, more: Any) -> None:
        wait_if(more, self.rings.k_full.at[ring_slot(kv_tile, self.static.stages)])

    # Turns

    def begin_round(self) -> None:
        """Gives the first consumer its turn, before the first work tile."""
        if self.static.consumers > 1:
            pl.when(self.number == self.static.consumers - 1)(self._pass_turn)

    def end_round(self) -> None:
        """Takes back the turn, after the last work tile."""
        if self.static.consumers > 1:
            pl.when(self.number == 0)(self._wait_for_turn)

    def _wait_for_turn(self) -> None:
        if self.static.consumers > 1:
            plgpu.barrier_wait(self.schedule_barrier.at[self.number])

    def _pass_turn(self) -> None:
        if self.static.consumers > 1:
            following = ring_slot(self.number + 1, self.static.consumers)
            plgpu.barrier_arrive(self.schedule_barrier.at[following])

    def store(self, result: Results, row: jax.Array, state: RowState, options: RowOptions) -> None:
        """Write 64 rows to rows `row` of the result where that is not negative: finished, or as is to be merged."""
        if options.scale is not None:
            state = state._replace(o=options.scale(state.o, 0, PER_COLUMN))

        def partial(states: RowState) -> None:
            ROWS.store(states.o, row, 0, state.o)
            ROWS.put(states.m, row, state.m)
            ROWS.put(states.l, row, state.l)

        def finished(rows: OutputRows) -> None:
            inverse = over_tokens(state.inverse(options.sink), state.o.shape)
            o = wgmma.zero_rows(state.o, state.l) * inverse
            ROWS.store(rows.out, row, 0, o.astype(rows.out.dtype))
            if rows.lse is not None:
                ROWS.put(rows.lse, row, state.lse())

        result.store(options.is_whole, finished, partial)

    # Scores

    def _scores(self, transform: ScoreTransform, i: Any, s: Any) -> Scores:
        """Scores of the i-th tile, from its products q kᵀ."""
        static, token_scales = self.static, transform.token_scales
        if transform.key_scale is not None:
            s = s * transform.key_scale
        if token_scales is not None:
            s = s * over_columns(basics.load(token_scales(i).at[0], PER_COLUMN), s.shape)
        s = s if static.soft_cap is None else wgmma.capped(s, static.score_scale, static.soft_cap)
        sees_all, limits = transform.limits(i)
        s = lax.cond(sees_all, lambda s: s, lambda s: wgmma.hide(s, limits()), s)
        scale = static.score_scale * LOG2E if static.soft_cap is None else LOG2E
        if token_scales is None:
            return Scores(s, scale)
        log2, inverse = (basics.load(token_scales(i).at[n], PER_COLUMN) for n in (1, 2))
        return Scores(s * scale + over_columns(log2, s.shape), 1.0, inverse)


class Scores(NamedTuple):
    """Masked scores of a tile.

    Attributes:
      s: [64, tile_keys].
      scale: makes them exponents of 2.
      inverse: [tile_keys], inverses of the scales that values have by token, or None. The scales themselves are in the
        probabilities, by way of the exponent: so these are no larger with them when they become 16 bits.
    """

    s: Any
    scale: float
    inverse: Any = None

    def update_max(self, m: Any) -> Any:
        """The m of `SoftmaxState` from this tile on, given that of earlier tiles."""
        highest = self.s.max(axis=1) * self.scale
        return jnp.where(highest > m + wgmma.RESCALE_THRESHOLD_LOG2, highest, m)

    def probabilities(self, m: Any) -> tuple[Any, Any]:
        """2**(score - m), and their sums as in `SoftmaxState`."""
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        p = jnp.exp2(self.s * self.scale - over_tokens(shift, self.s.shape))
        unscaled = p if self.inverse is None else p * over_columns(self.inverse, p.shape)
        return p, wgmma.partial_sums(unscaled)
