"""The prefill kernel on Hopper: attention of many queries, one warpgroup that copies and up to three that compute.

After FlashAttention-3 (Shah et al., arXiv 2407.08608). A program takes work tiles (`sm90.flash.schedule`): a block of
neighbouring queries of one head, 64 rows for each consumer, against the keys that the block sees, tile by tile. The
producer copies keys and values into rings of `stages` slots. A consumer holds its scores S, probabilities P and output
O in registers, and starts two products at once: S of a tile, and O += P V of the tile before, during which it finds the
maxima of S. Its exponentials wait for both products, because the 16-bit P that they make takes the registers of the P
that is multiplied. Consumers start their products in turn, so that the softmax of one overlaps the products of the
others:

    consumer 0   S0 ·softmax· S1 PV0 ·softmax· S2 PV1 ·softmax·
    consumer 1      ········ S0 ·softmax· S1 PV0 ·softmax· S2 PV1
    producer     Q K0 K1 V0 K2 V1 ······ as slots become free; of the next block K0 K1 V0 Q K2 V1 ······

`ragged_attention` and `paged_prefill` are front ends of this one kernel. A `FrontEnd` turns a work tile into a
`FrontTile`, which knows where the queries, keys and values are and what each row sees. This file is read downward:
launch and roles, producer, consumer, output.

Barriers, for n consumers:

    barrier                    arrivals           who waits
    q_landed                   the copies         consumers, before the first product of a block
    q_free                     n consumers        producer, before the queries of its next block go to the same buffer
    k_landed[slot]             the copies         consumers, before S
    k_free[slot]               n consumers        producer, before it fills the slot again
    v_landed, v_free           as for keys        as for keys
    v_landed[-1]               the copies         producer, where masked values are to be zeroed before they count
    schedule_barrier[consumer] the consumer       consumer, before it starts its products
                               before it
    next_tile_landed[slot]     the producer       consumers, before their next work tile (`TileQueue`)

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
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics, shared_memory, tiles
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.row_layout import RowLayout
from pallas_attn.mosaic.sm90 import wgmma
from pallas_attn.mosaic.sm90.flash.config import ALIGNMENT, QUERIES
from pallas_attn.mosaic.sm90.flash.schedule import FlashWorkTile, TileQueue, WorkList, WorkTiles
from pallas_attn.mosaic.sm90.flash.split import KvSplits, RowState, merge_splits
from pallas_attn.mosaic.sm90.tiles import PER_TOKEN, TILE, token_iota
from pallas_attn.mosaic.tiles import BY_64, clear_rows, over_columns, over_tokens

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


ROWS = ResultRows(threads=4, vector=2)


@dataclasses.dataclass(frozen=True)
class FlashStatic:
    """Compile-time facts of the kernel, beside dtypes and the front end.

    Attributes:
      tile_keys: keys of a tile.
      stages: tiles of keys, and as many of values, in shared memory.
      copies: number of copies that bring a tile of keys, or one of values.
      score_scale: multiplies q kᵀ.
      query_terms: 16-bit numbers whose sum a query is.
      query_copies: number of copies that bring a term of a consumer's queries.
      dequantizes: whether keys and values come as 8 bits, of which the producer makes 16.
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
    dequantizes: bool = False

    @property
    def block_rows(self) -> int:
        return QUERIES * self.consumers

    @property
    def warpgroups(self) -> int:
        return self.consumers + 1

    def most_tiles(self, most_keys: int, window: int | None) -> int:
        """Most tiles that a block sees of a sequence that can have so many keys."""
        if window is not None:
            most_keys = min(most_keys, window + self.block_rows)
        return -(-most_keys // self.tile_keys)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's thread, and of one of the producer."""
        return (DEQUANTIZE_REGISTERS if self.dequantizes else REGISTERS)[self.consumers]


class FlashScratch(NamedTuple):
    """Shared memory and barriers of a program; the module's docstring lists the barriers.

    Attributes:
      q: [consumers · query_terms, 64, Dk].
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
    schedule_barrier: Any

    @staticmethod
    def types(static: FlashStatic, dtype: Any) -> FlashScratch:
        stages, keys, consumers = static.stages, static.tile_keys, static.consumers
        queries, copies = consumers * static.query_terms, 1 if static.dequantizes else static.copies
        free = plgpu.Barrier(num_barriers=stages, num_arrivals=consumers)
        return FlashScratch(
            q=tiles.operand((queries, QUERIES, static.key_dim), dtype),
            k=tiles.operand((stages, keys, static.key_dim), dtype),
            v=tiles.operand((stages, keys, static.value_dim), dtype),
            q_landed=plgpu.Barrier(num_arrivals=queries * static.query_copies),
            q_free=plgpu.Barrier(num_arrivals=consumers),
            k_landed=plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
            k_free=free,
            v_landed=plgpu.Barrier(num_barriers=stages + 1, num_arrivals=copies),
            v_free=free,
            schedule_barrier=plgpu.Barrier(num_barriers=consumers),
        )


# --- launch and roles


class FrontTile(Protocol):
    """A work tile as an operation sees it."""

    @property
    def kv_tiles(self) -> Any:
        """Number of tiles of keys, at least 1."""

    def load(self, producer: Producer, again: Any, kv_tile: Any) -> None:
        """Brings the queries, and the keys and values to the rings from tile number `kv_tile` on.

        Args:
          again: whether the program had a work tile before.
        """

    def attend(self, consumer: Consumer, kv_tile: Any, result: OutputRows | RowState) -> None:
        """Attention of a consumer's rows over the tiles of the rings from number `kv_tile` on, written to `result`."""


class FrontEnd(Protocol):
    """Part of the kernel that is an operation's own.

    Attributes:
      static: compile-time facts of the kernel.
      kernel_name: shown by profilers.
      num_heads: heads, or groups of heads that share a block, that blocks are done for.
      l2_head_group: see `WorkTiles`.
      compiler_params: of the kernel.
    """

    @property
    def static(self) -> FlashStatic: ...
    @property
    def kernel_name(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def l2_head_group(self) -> int: ...
    @property
    def compiler_params(self) -> plgpu.CompilerParams: ...

    def scratch_types(self) -> Any:
        """Shared memory and barriers of its own; None for none."""

    def tile(self, x: Any, scratch: Any, work: FlashWorkTile) -> FrontTile:
        """Turn a work tile into the operation's, given references to the operands and to its own scratch."""


def flash_attention(
    front: FrontEnd,
    inputs: Any,
    work: WorkList,
    splits: KvSplits,
    *,
    shape: tuple[int, int],
    sinks: Float[Array, "Hq"] | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    """Output and LSE of `shape` [T, Hq] queries.

    Args:
      inputs: operands of the front end; `q` is among them, and `blocks` and `counts` of the work list.
      sinks: learned logits that enter once splits are merged; where nothing is cut they are among the inputs instead.
    """
    static, work_tiles = front.static, work.blocks.shape[0] * front.num_heads * splits.most
    programs = min(work_tiles, basics.multiprocessors())
    tile_counter = TileQueue.counter(work.zero, programs, work_tiles)
    scratch_types = (
        FlashScratch.types(static, jax.tree.leaves(inputs.q)[0].dtype),
        *TileQueue.scratch_types(tile_counter),
        front.scratch_types(),
    )
    _require_shared_memory(front, scratch_types)
    rows, is_cut = splits.most * math.prod(shape), splits.most > 1
    (result,) = plgpu.kernel(
        functools.partial(_kernel, front, programs),
        out_type=(
            RowState.types(rows, static.value_dim) if is_cut else OutputRows.types(rows, static.value_dim, out_dtype),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=static.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=front.compiler_params,
        kernel_name=front.kernel_name,
    )(basics.materialize(inputs), tile_counter)
    if is_cut:
        state = merge_splits(result, splits.most, work.counts[1])
        sink = None if sinks is None else jnp.tile(sinks, shape[0])
        result = OutputRows(state.output(sink).astype(out_dtype), state.lse())
    return result.out.reshape(*shape, -1), result.lse.reshape(shape)


def _require_shared_memory(front: FrontEnd, scratch_types: Any) -> None:
    """Raises NotImplementedError if a multiprocessor has too little shared memory for a program."""
    static, reductions = front.static, front.compiler_params.reduction_scratch_bytes
    if not shared_memory.fits(scratch_types, 1, reduction_bytes=reductions):
        needed = shared_memory.block_bytes(scratch_types, reduction_bytes=reductions)
        raise NotImplementedError(
            f"{static.stages} stages of {static.tile_keys} keys for {static.consumers} consumers take {needed} bytes "
            f"of shared memory, expected at most {shared_memory.MULTIPROCESSOR_BYTES - shared_memory.SYSTEM_BYTES}"
        )


def _kernel(
    front: FrontEnd,
    programs: int,
    x: Any,
    tile_counter: Ref | None,
    result: OutputRows | RowState,
    scratch: FlashScratch,
    next_tile: Ref | None,
    next_tile_landed: Ref | None,
    front_scratch: Any,
) -> None:
    static, warpgroup = front.static, lax.axis_index("warpgroup")

    def work_tiles() -> WorkTiles:
        queue = None if tile_counter is None else TileQueue(programs, tile_counter, next_tile, next_tile_landed)
        return WorkTiles.of(x.blocks, x.counts, front.num_heads, front.l2_head_group, queue)

    def produce() -> None:
        plgpu.set_max_registers(static.registers[1], action="decrease")
        producer = Producer(static, scratch)

        def load(again: Any, kv_tile: Any, work: FlashWorkTile) -> Any:
            tile = front.tile(x, front_scratch, work)
            tile.load(producer, again, kv_tile)
            return tile.kv_tiles

        count, kv_tiles = work_tiles().produce(load)
        producer.drain(kv_tiles, count > 0)

    def consume() -> None:
        plgpu.set_max_registers(static.registers[0], action="increase")
        consumer = Consumer(static, scratch, warpgroup)

        def attend(_: Any, kv_tile: Any, work: FlashWorkTile) -> Any:
            tile = front.tile(x, front_scratch, work)
            tile.attend(consumer, kv_tile, result)
            return tile.kv_tiles

        consumer.begin_round()
        work_tiles().consume(attend)
        consumer.end_round()

    # One branch, not a `pl.when` for each role: values of one role would stay alive through the other.
    lax.cond(warpgroup < static.consumers, consume, produce)


def ring_slot(number: Any, slots: int) -> Any:
    """`number` modulo `slots`, for a number that is not negative, which the compiler does not know."""
    return number & (slots - 1) if slots & (slots - 1) == 0 else lax.rem(number, slots)


def wait_if(condition: Any, barrier: Ref) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


# --- the producer


@dataclasses.dataclass(frozen=True)
class Producer:
    """Fills the rings. Tiles are counted from a program's first to its last, over all of its work tiles."""

    static: FlashStatic
    scratch: FlashScratch

    def load_keys(self, kv_tile: Any, copy: Callable[[Ref, Ref], None]) -> None:
        """Brings a tile of keys; copy(slot, barrier) starts its copies."""
        slot = ring_slot(kv_tile, self.static.stages)
        wait_if(kv_tile >= self.static.stages, self.scratch.k_free.at[slot])
        copy(self.scratch.k.at[slot], self.scratch.k_landed.at[slot])

    def load_values(
        self, kv_tile: Any, copy: Callable[[Ref, Ref], None], whole: Any, live_mask: Callable[[jax.Array], jax.Array]
    ) -> None:
        """Brings a tile of values. Unless `whole`, rows outside live_mask(row numbers) are zeroed: they may hold NaN,
        which a probability of 0 would not keep out of the output.
        """
        scratch, stages = self.scratch, self.static.stages
        slot = ring_slot(kv_tile, stages)
        wait_if(kv_tile >= stages, scratch.v_free.at[slot])
        copy(scratch.v.at[slot], scratch.v_landed.at[jnp.where(whole, slot, stages)])

        @pl.when(~whole)
        def _clear() -> None:
            plgpu.barrier_wait(scratch.v_landed.at[stages])
            for first in range(0, self.static.tile_keys, 64):
                clear_rows(scratch.v.at[slot, pl.ds(first, 64)], live_mask(token_iota(64) + first), BY_64)
            plgpu.commit_smem()
            for _ in range(self.static.copies):
                plgpu.barrier_arrive(scratch.v_landed.at[slot])

    def load_queries(self, again: Any, copy: Callable[[], None]) -> Callable[[Any], None]:
        """Starts the copies of a block's queries: at once for the program's first block. Later ones go where the
        queries before them are, which are needed longer than the slots that the block's first tiles of keys go to.

        Returns:
          a function to be called after the copies of each tile of values, with the tile's number in the block.
        """

        def load() -> None:
            plgpu.barrier_wait(self.scratch.q_free)
            copy()

        pl.when(~again)(copy)
        return lambda i: pl.when(again & (i == 0))(load)

    def drain(self, kv_tiles: Any, any_work: Any) -> None:
        """Waits for the last phases of all barriers, after this number of tiles."""

        def wait(i: Any, _: None) -> None:
            slot = ring_slot(kv_tiles - 1 - i, self.static.stages)
            plgpu.barrier_wait(self.scratch.k_free.at[slot])
            plgpu.barrier_wait(self.scratch.v_free.at[slot])

        lax.fori_loop(0, jnp.minimum(kv_tiles, self.static.stages), wait, None)
        wait_if(any_work, self.scratch.q_free)


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


class ValueScales(NamedTuple):
    """Scales of a tile's values by token: [tile_keys], their log2 and their inverses."""

    log2: Any
    inverse: Any


class ScoreTransform(NamedTuple):
    """Mask and scales for the scores of a block's i-th tile.

    Attributes:
      mask: mask(i, scores) puts -inf where a row does not see a key.
      dequantize: dequantize(i, q kᵀ) multiplies products with the scales of the keys; None if there are none.
      value_scales: value_scales(i), or None.
    """

    mask: Callable[[Any, jax.Array], jax.Array]
    dequantize: Callable[[Any, jax.Array], jax.Array] | None = None
    value_scales: Callable[[Any], ValueScales] | None = None


@dataclasses.dataclass(frozen=True)
class Consumer:
    """Attention of 64 rows over the tiles of a block.

    Attributes:
      number: index among the consumers.
    """

    static: FlashStatic
    scratch: FlashScratch
    number: Any

    def attend(self, begin: Any, kv_tiles: Any, transform: ScoreTransform) -> RowState:
        """Attention over some tiles, at least one, from the program's tile number `begin` on."""

        def step(i: Any, state: SoftmaxState) -> SoftmaxState:
            return self._step(begin + i, state, i + 1 < kv_tiles, functools.partial(self._scores, transform, i))

        plgpu.barrier_wait(self.scratch.q_landed)
        state = self._first(begin, kv_tiles > 1, functools.partial(self._scores, transform, jnp.int32(0)))
        state = lax.fori_loop(1, kv_tiles, step, state)
        return RowState(self._last(begin + kv_tiles - 1, state), state.m, state.l.sum(axis=1))

    def _first(self, kv_tile: Any, more: Any, scores_of: Callable[[Any], Scores]) -> SoftmaxState:
        """Takes the first tile, and waits for the keys of the one after it."""
        scratch, slot = self.scratch, ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(scratch.k_landed.at[slot])
        self._await_turn()
        s = wgmma.multiply(self._query_terms(), scratch.k.at[slot], self._pass_turn)
        self._release_keys(slot, more)
        scores = scores_of(s)
        m = scores.update_max(tiles.filled(-jnp.inf, (QUERIES,), PER_TOKEN))
        p, l = scores.probabilities(m)  # noqa: E741
        self._await_keys(kv_tile + 1, more)
        o = tiles.filled(0.0, (QUERIES, self.static.value_dim), TILE)
        return SoftmaxState(o, m, l, p.astype(scratch.q.dtype))

    def _step(self, kv_tile: Any, state: SoftmaxState, more: Any, scores_of: Callable[[Any], Scores]) -> SoftmaxState:
        """Takes a tile whose keys have landed, and meanwhile adds the values of the tile before to the output."""
        scratch = self.scratch
        slot, previous = ring_slot(kv_tile, self.static.stages), ring_slot(kv_tile - 1, self.static.stages)
        k, v = scratch.k.at[slot], scratch.v.at[previous]
        plgpu.barrier_wait(scratch.v_landed.at[previous])
        self._await_turn()
        s, o = wgmma.start(self._query_terms(), k, state.p, v, state.o)
        self._pass_turn()
        s = wgmma.finish(s, under_way=1)
        self._release_keys(slot, more)
        scores = scores_of(s)
        m = scores.update_max(state.m)
        o, l = wgmma.rescale_accumulator((o, state.l), state.m, m, finished=False)  # noqa: E741
        plgpu.barrier_arrive(scratch.v_free.at[previous])
        # Only now: the product that is finished read the registers of the last probabilities.
        p, more_l = scores.probabilities(m)
        p, l = lax.optimization_barrier((p.astype(scratch.q.dtype), l + more_l))  # noqa: E741
        self._await_keys(kv_tile + 1, more)
        return SoftmaxState(o, m, l, p)

    def _last(self, kv_tile: Any, state: SoftmaxState) -> jax.Array:
        """Adds the values of the last tile to the output."""
        slot = ring_slot(kv_tile, self.static.stages)
        plgpu.barrier_wait(self.scratch.v_landed.at[slot])
        o = wgmma.accumulate(state.p, self.scratch.v.at[slot], state.o)
        plgpu.barrier_arrive(self.scratch.v_free.at[slot])
        return o

    def _query_terms(self) -> list[Ref]:
        """The terms of the queries. The compiler is kept from knowing where they are if there are several: what is the
        same for every tile it computes ahead, such as their addresses, which take many registers.
        """
        terms = self.static.query_terms
        unknown = basics.unknown_zero() if terms > 1 else 0
        return [self.scratch.q.at[self.number * terms + unknown + i] for i in range(terms)]

    def _release_keys(self, slot: Any, more: Any) -> None:
        """Frees keys after their products; the queries, too, if these were the block's last."""
        plgpu.barrier_arrive(self.scratch.k_free.at[slot])
        pl.when(~more)(lambda: plgpu.barrier_arrive(self.scratch.q_free))

    def _await_keys(self, kv_tile: Any, more: Any) -> None:
        wait_if(more, self.scratch.k_landed.at[ring_slot(kv_tile, self.static.stages)])

    # Turns

    def begin_round(self) -> None:
        """Gives the first consumer its turn, before the first work tile."""
        if self.static.consumers > 1:
            pl.when(self.number == self.static.consumers - 1)(self._pass_turn)

    def end_round(self) -> None:
        """Takes back the turn, after the last work tile."""
        if self.static.consumers > 1:
            pl.when(self.number == 0)(self._await_turn)

    def _await_turn(self) -> None:
        if self.static.consumers > 1:
            plgpu.barrier_wait(self.scratch.schedule_barrier.at[self.number])

    def _pass_turn(self) -> None:
        if self.static.consumers > 1:
            following = ring_slot(self.number + 1, self.static.consumers)
            plgpu.barrier_arrive(self.scratch.schedule_barrier.at[following])

    # Scores

    def _scores(self, transform: ScoreTransform, i: Any, s: Any) -> Scores:
        """Scores of the i-th tile, from its products q kᵀ."""
        static = self.static
        s = s if transform.dequantize is None else transform.dequantize(i, s)
        s = s if static.soft_cap is None else wgmma.capped(s, static.score_scale, static.soft_cap)
        s = transform.mask(i, s)
        scale = static.score_scale * LOG2E if static.soft_cap is None else LOG2E
        if transform.value_scales is None:
            return Scores(s, scale)
        scales = transform.value_scales(i)
        return Scores(s * scale + over_columns(scales.log2, s.shape), 1.0, scales.inverse)


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


# --- output


class OutputRows(NamedTuple):
    """Finished rows: out [n, Dv] and lse [n], arrays or references to them."""

    out: Any
    lse: Any

    @staticmethod
    def types(rows: int, value_dim: int, dtype: jax.typing.DTypeLike) -> OutputRows:
        """Shapes of so many rows."""
        return OutputRows(jax.ShapeDtypeStruct((rows, value_dim), dtype), jax.ShapeDtypeStruct((rows,), jnp.float32))


def store_rows(result: OutputRows | RowState, row: jax.Array, state: RowState, sink: jax.Array | None = None) -> None:
    """Write 64 rows to rows `row` of the result where that is not negative: finished, or as they are to be merged.

    Args:
      sink: [64] learned logits of the rows; None where rows are merged, after which sinks enter.
    """
    if isinstance(result, RowState):
        ROWS.store(result.o, row, 0, state.o)
        ROWS.put(result.m, row, state.m)
        ROWS.put(result.l, row, state.l)
        return
    ROWS.store(result.out, row, 0, state.output(sink).astype(result.out.dtype))
    ROWS.put(result.lse, row, state.lse())


def pad_rows(x: Float[Array, "n H D"], least: int) -> Float[Array, "m H D"]:
    """x with rows appended: a multiple of 8, and at least as many as one copy brings."""
    more = max(-(-x.shape[0] // ALIGNMENT) * ALIGNMENT, least) - x.shape[0]
    return jnp.pad(x, ((0, more), (0, 0), (0, 0))) if more else x
