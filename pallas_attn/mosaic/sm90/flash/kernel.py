"""Flash attention on Hopper where queries are many: one warpgroup copies, the others compute.

After FlashAttention-3 (Shah et al., arXiv 2407.08608). A program takes a block of neighbouring queries of one head, 64
for each of its consumers, and walks the keys that the block sees, tile by tile. The producer copies keys and values
into rings of `stages` slots. A consumer has its scores S, probabilities P and output O in registers, and starts two
products at once: S of a tile, and O += P V of the one before, during which it finds the maxima of S. Its exponentials
wait for both, as their 16-bit results take the registers of the P that is multiplied.
Consumers take turns at starting products, so that one's softmax falls into the others' products:

    consumer 0   S0 ·softmax· S1 PV0 ·softmax· S2 PV1 ·softmax·
    consumer 1      ········ S0 ·softmax· S1 PV0 ·softmax· S2 PV1
    producer     Q K0 K1 V0 K2 V1 ······ as slots are freed; of the next block K0 K1 V0 Q K2 V1 ······

Barriers (n is the number of consumers):

    q_landed        the copies     consumers, before the first product of a block
    q_free          n consumers    producer, before the queries of its next block, for which there is one place
    k_landed[slot]  the copies     consumers, before S
    k_free[slot]    n consumers    producer, before the slot is filled again
    v_landed, v_free               the same for values
    v_landed[-1]    the copies     producer, where values that nobody may see are to be cleared before they count
    turn[consumer]  the one before it, once it has started its products

(and two of `sm90.flash.work.Queue`, where programs draw what they do.)

No wait can last: all warpgroups go through the same blocks and tiles. The producer waits for slots that every consumer
frees one product after it used them, and for queries to be given up after the last product of the block before, for
which it has brought everything; and a consumer for tiles that the producer brings in the order in which they are
used, keys of a tile before values of the one before. Who has its turn waits for nothing before it passes it on, and
passes it on once a tile, as all do; the last consumer starts the round, and the first sees its end.
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

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.row_layout import RowLayout
from pallas_attn.mosaic.sm90 import tiles, wgmma
from pallas_attn.mosaic.sm90.flash.config import QUERIES
from pallas_attn.mosaic.sm90.tiles import PER_TOKEN, TILE, clear_rows, over_columns, over_tokens

REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32)}
WIDENING_REGISTERS = {1: (248, 128), 2: (216, 72), 3: (152, 56)}
"""Of a thread of a consumer and of the producer, by the number of consumers: together no more than all threads begin
with, the most that are a multiple of 8 and fit a multiprocessor. A producer that widens what it copies takes more;
beside one consumer there are enough for both.
"""


class ResultRows(RowLayout):
    """Rows as wgmma leaves its results."""

    @property
    def tile(self) -> Any:
        return TILE


ROWS = ResultRows(threads=4, vector=2)


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for, beside dtypes.

    Attributes:
      tile_keys: keys taken at once.
      stages: tiles of keys, and as many of values, in shared memory.
      copies: that bring a tile of keys, and one of values.
      score_scale: multiplies q kᵀ.
      query_terms: numbers of 16 bits whose sum a query is.
      query_copies: that bring a term of a consumer's queries.
      widens: keys and values come as 8 bits, and the producer makes 16 of them.
    """

    key_dim: int
    value_dim: int
    tile_keys: int
    stages: int
    consumers: int
    copies: int
    score_scale: float
    soft_cap: float | None = None
    query_terms: int = 1
    query_copies: int = 1
    widens: bool = False

    @property
    def queries(self) -> int:
        """Rows of a block."""
        return QUERIES * self.consumers

    @property
    def warpgroups(self) -> int:
        return self.consumers + 1

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's thread, and of one of the producer."""
        return (WIDENING_REGISTERS if self.widens else REGISTERS)[self.consumers]


class Memory(NamedTuple):
    """Shared memory and barriers of a program; see the module's docstring.

    Attributes:
      q: [consumers · terms of a query, 64, Dk].
      k, v: [stages, tile_keys, Dk or Dv].
    """

    q: Any
    k: Any
    v: Any
    q_landed: Any
    q_free: Any
    k_landed: Any
    k_free: Any
    v_landed: Any
    v_free: Any
    turn: Any

    @staticmethod
    def types(static: Static, dtype: Any) -> Memory:
        stages, keys, consumers = static.stages, static.tile_keys, static.consumers
        queries, copies = consumers * static.query_terms, 1 if static.widens else static.copies
        free = plgpu.Barrier(num_barriers=stages, num_arrivals=consumers)
        return Memory(
            q=tiles.operand((queries, QUERIES, static.key_dim), dtype),
            k=tiles.operand((stages, keys, static.key_dim), dtype),
            v=tiles.operand((stages, keys, static.value_dim), dtype),
            q_landed=plgpu.Barrier(num_arrivals=queries * static.query_copies),
            q_free=plgpu.Barrier(num_arrivals=consumers),
            k_landed=plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
            k_free=free,
            v_landed=plgpu.Barrier(num_barriers=stages + 1, num_arrivals=copies),
            v_free=free,
            turn=plgpu.Barrier(num_barriers=consumers),
        )


def turn_of(number: Any, places: int) -> Any:
    """The remainder of a number that is not negative, which the compiler does not know."""
    return number & (places - 1) if places & (places - 1) == 0 else lax.rem(number, places)


def wait_if(condition: Any, barrier: Ref) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


# --- the producer


@dataclasses.dataclass(frozen=True)
class Producer:
    """Fills the rings. Tiles are counted from a program's first to its last, whatever blocks they are for."""

    static: Static
    mem: Memory

    def load_keys(self, tile: Any, copy: Callable[[Ref, Ref], None]) -> None:
        """copy(slot, barrier) starts the copies of a tile."""
        slot = turn_of(tile, self.static.stages)
        wait_if(tile >= self.static.stages, self.mem.k_free.at[slot])
        copy(self.mem.k.at[slot], self.mem.k_landed.at[slot])

    def load_values(
        self, tile: Any, copy: Callable[[Ref, Ref], None], whole: Any, alive: Callable[[jax.Array], jax.Array]
    ) -> None:
        """The same for values. Unless the tile is whole, those of rows that are not alive become 0: they may be NaN,
        and probabilities of 0 would not keep them out of the output.
        """
        mem, stages = self.mem, self.static.stages
        slot = turn_of(tile, stages)
        wait_if(tile >= stages, mem.v_free.at[slot])
        copy(mem.v.at[slot], mem.v_landed.at[jnp.where(whole, slot, stages)])

        @pl.when(~whole)
        def _clear() -> None:
            plgpu.barrier_wait(mem.v_landed.at[stages])
            self._clear(slot, alive)
            plgpu.commit_smem()
            for _ in range(self.static.copies):
                plgpu.barrier_arrive(mem.v_landed.at[slot])

    def _clear(self, slot: Any, alive: Callable[[jax.Array], jax.Array]) -> None:
        for first in range(0, self.static.tile_keys, 64):
            clear_rows(self.mem.v.at[slot, pl.ds(first, 64)], alive(tiles.token_iota(64) + first))

    def load_queries(self, again: Any, copy: Callable[[], None]) -> Callable[[Any], None]:
        """Starts the copies of a block's queries at once, if it is the first one. Else they come when those before are
        no longer needed, which is later than the first tiles may come: returns what to call after each value tile's
        copies with its number in the block.
        """

        def load() -> None:
            plgpu.barrier_wait(self.mem.q_free)
            copy()

        pl.when(~again)(copy)
        return lambda i: pl.when(again & (i == 0))(load)

    def drain(self, tiles: Any, any_block: Any) -> None:
        """After the last of so many tiles: sees the ends of all phases."""

        def wait(i: Any, _: None) -> None:
            slot = turn_of(tiles - 1 - i, self.static.stages)
            plgpu.barrier_wait(self.mem.k_free.at[slot])
            plgpu.barrier_wait(self.mem.v_free.at[slot])

        lax.fori_loop(0, jnp.minimum(tiles, self.static.stages), wait, None)
        wait_if(any_block, self.mem.q_free)


# --- consumers


class State(NamedTuple):
    """Attention of a consumer's rows over the tiles before the last one that was scored, and that tile's probabilities.

    Attributes:
      o: [64, Dv] float32, values weighted with 2**(score - m).
      m: [64] float32, what scores are relative to, times log2 e: at most `RESCALE_THRESHOLD_LOG2` below the largest of
        all tiles.
      l: [64, 8] float32, sums of 2**(score - m) of columns that are a multiple of 8 apart.
      p: [64, tile_keys], 2**(score - m) of the last tile, which is not in o yet.
    """

    o: Any
    m: Any
    l: Any  # noqa: E741
    p: Any


class Weights(NamedTuple):
    """Of the values of a tile, where each token has its own scale: [tile_keys], log2 of them and their inverses."""

    log2: Any
    inverse: Any


class View(NamedTuple):
    """What the rows of a block make of the i-th of its tiles.

    Attributes:
      mask: mask(i, scores) puts -inf where a row does not see a key.
      scaled: scaled(i, products) are those of queries with keys as they are meant; None where they already are.
      weights: weights(i), or None.
    """

    mask: Callable[[Any, jax.Array], jax.Array]
    scaled: Callable[[Any, jax.Array], jax.Array] | None = None
    weights: Callable[[Any], Weights] | None = None


@dataclasses.dataclass(frozen=True)
class Consumer:
    """Attention of 64 rows over the tiles of a block.

    Attributes:
      number: which consumer this is.
      dtype: of probabilities, as they are multiplied.
    """

    static: Static
    mem: Memory
    number: Any
    dtype: Any

    def _terms(self) -> list[Ref]:
        """Terms of the queries. If there are several, the compiler is not to know which: what is the same for every
        tile it computes ahead, such as their addresses, which take many registers.
        """
        terms = self.static.query_terms
        unknown = basics.unknown_zero() if terms > 1 else 0
        return [self.mem.q.at[self.number * terms + unknown + i] for i in range(terms)]

    def attend(self, begin: Any, tiles: Any, view: View) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Attention over some tiles, at least one, from number `begin` of the program's on.

        Returns:
          o and m of `State`, and l [64], over all tiles.
        """

        def step(i: Any, state: State) -> State:
            return self._step(begin + i, state, i + 1 < tiles, functools.partial(self._scores, view, i))

        plgpu.barrier_wait(self.mem.q_landed)
        state = self._first(begin, tiles > 1, functools.partial(self._scores, view, jnp.int32(0)))
        state = lax.fori_loop(1, tiles, step, state)
        return self._last(begin + tiles - 1, state), state.m, state.l.sum(axis=1)

    def start_round(self) -> None:
        """Before the first block."""
        if self.static.consumers > 1:
            pl.when(self.number == self.static.consumers - 1)(self._pass_turn)

    def end_round(self) -> None:
        """After the last block."""
        if self.static.consumers > 1:
            pl.when(self.number == 0)(self._await_turn)

    def _await_turn(self) -> None:
        if self.static.consumers > 1:
            plgpu.barrier_wait(self.mem.turn.at[self.number])

    def _pass_turn(self) -> None:
        if self.static.consumers > 1:
            plgpu.barrier_arrive(self.mem.turn.at[turn_of(self.number + 1, self.static.consumers)])

    def _first(self, tile: Any, more: Any, scores_of: Callable[[Any], Scores]) -> State:
        """Takes the first tile, and waits for the keys of the one after it."""
        mem, slot = self.mem, turn_of(tile, self.static.stages)
        plgpu.barrier_wait(mem.k_landed.at[slot])
        self._await_turn()
        s = wgmma.multiply(self._terms(), mem.k.at[slot], self._pass_turn)
        self._release_keys(slot, more)
        scores = scores_of(s)
        m = scores.outgrow(tiles.filled(-jnp.inf, (QUERIES,), PER_TOKEN))
        p, l = scores.weights(m)  # noqa: E741
        self._await_keys(tile + 1, more)
        return State(tiles.filled(0.0, (QUERIES, self.static.value_dim), TILE), m, l, p.astype(self.dtype))

    def _step(self, tile: Any, state: State, more: Any, scores_of: Callable[[Any], Scores]) -> State:
        """Takes a tile whose keys are there: adds up the values of the one before meanwhile."""
        mem = self.mem
        slot, previous = turn_of(tile, self.static.stages), turn_of(tile - 1, self.static.stages)
        k, v = mem.k.at[slot], mem.v.at[previous]
        plgpu.barrier_wait(mem.v_landed.at[previous])
        self._await_turn()
        s, o = wgmma.start(self._terms(), k, state.p, v, state.o)
        self._pass_turn()
        s = wgmma.finish(s, under_way=1)
        self._release_keys(slot, more)
        scores = scores_of(s)
        m = scores.outgrow(state.m)
        o, l = wgmma.rescale_accumulator((o, state.l), state.m, m, finished=False)  # noqa: E741
        plgpu.barrier_arrive(mem.v_free.at[previous])
        # Only now: the product that is finished read the registers of the last probabilities.
        p, more_l = scores.weights(m)
        p, l = lax.optimization_barrier((p.astype(self.dtype), l + more_l))  # noqa: E741
        self._await_keys(tile + 1, more)
        return State(o, m, l, p)

    def _last(self, tile: Any, state: State) -> jax.Array:
        slot = turn_of(tile, self.static.stages)
        plgpu.barrier_wait(self.mem.v_landed.at[slot])
        o = wgmma.accumulate(state.p, self.mem.v.at[slot], state.o)
        plgpu.barrier_arrive(self.mem.v_free.at[slot])
        return o

    def _release_keys(self, slot: Any, more: Any) -> None:
        """After their products; the queries, too, if these were the block's last."""
        plgpu.barrier_arrive(self.mem.k_free.at[slot])
        pl.when(~more)(lambda: plgpu.barrier_arrive(self.mem.q_free))

    def _await_keys(self, tile: Any, more: Any) -> None:
        wait_if(more, self.mem.k_landed.at[turn_of(tile, self.static.stages)])

    def _capped(self, s: Any) -> Any:
        """Products, or the scores that a soft cap makes of them."""
        static = self.static
        return s if static.soft_cap is None else wgmma.capped(s, static.score_scale, static.soft_cap)

    def _scores(self, view: View, i: Any, s: Any) -> Scores:
        """What products of the i-th tile are."""
        s = view.mask(i, self._capped(s if view.scaled is None else view.scaled(i, s)))
        scale = self.static.score_scale * LOG2E if self.static.soft_cap is None else LOG2E
        if view.weights is None:
            return Scores(s, scale)
        weights = view.weights(i)
        return Scores(s * scale + over_columns(weights.log2, s.shape), 1.0, weights.inverse)


class Scores(NamedTuple):
    """Of a tile.

    Attributes:
      s: [64, tile_keys].
      scale: makes them exponents of 2.
      inverse: [tile_keys], of scales that values have by token, or None. The scales are in the probabilities, which
        become 16 bits, and by way of the exponent: so they are no larger then either.
    """

    s: Any
    scale: float
    inverse: Any = None

    def outgrow(self, m: Any) -> Any:
        """What they are relative to, after m for earlier ones."""
        highest = self.s.max(axis=1) * self.scale
        return jnp.where(highest > m + wgmma.RESCALE_THRESHOLD_LOG2, highest, m)

    def weights(self, m: Any) -> tuple[Any, Any]:
        """Probabilities, and their sums as in `State`."""
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        p = jnp.exp2(self.s * self.scale - over_tokens(shift, self.s.shape))
        meant = p if self.inverse is None else p * over_columns(self.inverse, p.shape)
        return p, wgmma.partial_sums(meant)


def write_rows(
    out: Ref,
    lse: Ref,
    place: jax.Array,
    result: tuple[jax.Array, jax.Array, jax.Array],
    sink: jax.Array | None = None,
) -> None:
    """Writes output and LSE of 64 rows to rows `place` of out [n, Dv] and lse [n] where that is not negative.

    Args:
      result: o, m and l, see `State`.
      sink: [64] learned logits of the rows.
    """
    o, m, l = result  # noqa: E741
    seen = l != 0
    shift = jnp.where(seen, m, 0.0)
    denominator = l if sink is None else l + jnp.exp2(sink * LOG2E - shift)
    inverse = jnp.where(seen, 1 / jnp.where(seen, denominator, 1.0), 0.0)
    # Rows that see nothing may hold 0 times an infinite value.
    normalised = jnp.where(over_tokens(seen, o.shape), o * over_tokens(inverse, o.shape), 0.0)
    ROWS.store(out, place, 0, normalised.astype(out.dtype))
    log2 = shift + jnp.log2(jnp.where(seen, l, 1.0))
    ROWS.put(lse, place, jnp.where(seen, log2 * (1 / LOG2E), -jnp.inf))
