"""Experimental: has never run on a card. The prefill kernel on Blackwell: attention of many queries to packed or paged
keys and values.

The design follows FlashAttention-4 (Dao et al.). A CTA processes work tiles (`mosaic.prefill.schedule`). A work tile is
a block of query rows, 128 for each consumer, and the keys that these rows see, or a split of these keys. A query row is
one head of one query. A tile is `tile_keys` consecutive keys or their values, in a slot of the rings of
`mosaic.prefill.pipeline`. Warpgroups:

    0, or 0 and 1   consumers: softmax of 128 query rows each, one row per thread; they also rescale O in tensor memory
                    (TMEM) and write the output
    next            producer: loads Q, K and V into the rings
    last            issuer: one thread issues all products, S = Q Kᵀ and O += P V

TMEM has 512 columns of 32 bits. They hold the output O of each consumer and two buffers for scores. A consumer reads S
and overwrites it with the 16-bit probabilities P, the left operand of the second product. Two consumers have one buffer
each: while one consumer computes its softmax, the tensor core computes a product of the other. A single consumer has
both buffers: while it computes the softmax of a tile, the tensor core computes the next S (S' below):

    two consumers                                           one consumer
    tensor core   S₀   S₁  ···  PV₀  S₀'  PV₁  S₁' ···      S  S'   PV   S''  PV'  ···
    consumer 0    ····softmax₀·······softmax₀'              ···softmax···softmax'···softmax''
    consumer 1    ·········softmax₁·······softmax₁'

Loops over the tiles t of a work tile (two consumers c; one consumer alternates the buffers instead):

    issuer       wait q_full; wait k_full; S(0) of each c
                 for each t:  wait v_full
                              for each c:  wait p_full[c]; O += P V, commit o_done[c]; wait o_done[c];
                                           wait k_full; S(t + 1), commit s_full[c]
                              after the last c: commit v_empty of t, k_empty of t + 1 (and q_empty after the last tile)
    consumer c   for each t:  wait s_full[c]; load S; mask; m, P = exp(S - m); store P;
                              wait o_done[c] of tile t - 1; rescale O if m grew by more than the threshold;
                              arrive p_full[c]
                 wait o_done[c]; write output, or a partial state

Barriers, in addition to the barriers of the rings. The tensor core arrives at k_empty, v_empty and q_empty by commits.
Every barrier at which no TMA copy arrives is an `OrderedBarrier`:

    barrier                 arrivals (one per phase)   waits
    s_full[buffer]          commit of S                its consumer, before it reads S
    p_full[buffer]          its consumer, after it     the issuer, before P V. The consumer has then also read S, and
                            stored P and rescaled O    written O of the previous block to global memory
    o_done[consumer]        commit of P V              the consumer, before it rescales or reads O; the issuer,
                                                       before it overwrites P with the next S
    fetched                 the producer               the producer, before it looks up a work tile (`TileQueue`)
    next_tile_full[slot]    the producer               all warpgroups, before their next work tile

Deadlock freedom: all warpgroups process the same work tiles and tiles in the same order. The issuer waits for tiles in
the order in which the producer loads them, for P of a tile whose S it has issued before, and for products that it has
issued before. A consumer waits only for products that the issuer has issued without waiting for this consumer's later
steps. The producer waits for slots and for Q until earlier products have read them; these products do not depend on
tiles that are not loaded yet.
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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from pallas_attn.mosaic.blackwell import tmem
from pallas_attn.mosaic.blackwell.tmem import OrderedBarrier
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
from pallas_attn.mosaic.prefill.schedule import FlashWorkTile, WorkList, WorkTiles, ring_slot
from pallas_attn.mosaic.prefill.split import KvSplits, OutputRows, RowState
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref, interpreted
from pallas_attn.mosaic.primitives.exponents import in_log2_units, next_reference, over_scores
from pallas_attn.mosaic.primitives.masks import Limits
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.mosaic.primitives.soft_cap import reciprocal_of_pairs, soft_capped

QUERIES = tmem.ROWS
"""Query rows of a consumer: M of a product."""

TILE = tmem.ROW_A_THREAD

PER_COLUMN = TILE.reduce(0)

CHUNK = 32
"""Number of columns of S or O that a thread loads from TMEM at a time."""

RESCALE_THRESHOLD_LOG2 = 8.0
"""Growth of the maximum score [log2] up to which a consumer keeps the old maximum and does not rescale O. Probabilities
are then at most 2**8.
"""

BUFFERS = 2
"""Number of buffers for scores in TMEM."""

REGISTERS = {1: (248, 80, 40), 2: (208, 64, 32)}
DEQUANTIZE_REGISTERS = {1: (248, 160, 40), 2: (192, 96, 32)}
"""Registers per thread, by the number of consumers: (for consumers, for the producer, for the issuer).

The sum over all threads is at most the number of registers with which the kernel starts. A producer that converts an
8-bit cache (`FlashStatic.dequantizes`) needs more registers than a producer that only copies.
"""


class ThreadRows(RowLayout):
    """Register layout with one row per thread, in which TMEM is loaded, with stores of rows to global memory."""

    @property
    def tile(self) -> Any:
        return TILE

    def store(self, ref: Ref, row: jax.Array, column: int, values: jax.Array) -> None:
        """Store rows as in `RowLayout.store`, with 16 bytes per access."""
        if interpreted():
            super().store(ref, row, column, values)
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, TILE.reduce(1)))
        def store(_: Any, ref: ir.Value, values: Any, row: Any) -> None:
            i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
            memref = ir.MemRefType(ref.type)
            (number,) = (vector.extract(register, [], [0]) for register in row.registers.flat)
            words = [
                vector.extract(mgpu.utils.bitcast(r, ir.VectorType.get((size,), i32)), [], [i])
                for r in values.registers.flat
                for size in (mgpu.utils.bitwidth(r.type) // 32,)
                for i in range(size)
            ]
            start = arith.muli(arith.extsi(i64, number), mgpu.c(memref.shape[1], i64))
            start = arith.addi(start, mgpu.c(column, i64))
            element = ir.IntegerType.get_signless(mgpu.utils.bitwidth(memref.element_type))
            base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [start], element)
            four = ir.VectorType.get((4,), i32)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, number, mgpu.c(0, number.type))):
                for i in range(0, len(words), 4):
                    pointer = mgpu.utils.getelementptr(base, [i], i32)
                    llvm.store(vector.from_elements(four, words[i : i + 4]), pointer, alignment=16)

        store(ref, values, row)


ROWS = ThreadRows(threads=1, vector=2)


class TensorScratch(NamedTuple):
    """Shared memory, TMEM and barriers of a CTA. The docstring of the module explains the barriers.

    Attributes:
      rings: Q, K and V in shared memory, and their barriers.
      scores: for each buffer in TMEM, a pair of references to the same memory: S, float32 [128, tile_keys], and P,
        16-bit [128, tile_keys].
      outputs: for each consumer, O, float32 [128, Dv] in TMEM.
    """

    rings: Rings
    scores: tuple[Any, ...]
    outputs: tuple[Any, ...]
    s_full: Any
    p_full: Any
    o_done: Any

    @staticmethod
    def types(static: FlashStatic, dtype: Any) -> TensorScratch:
        shape = QUERIES, static.tile_keys
        both = plgpu.RefUnion(plgpu.TMEM(shape, jnp.float32), plgpu.TMEM(shape, dtype, packed=True))
        return TensorScratch(
            Rings.types(static, dtype, readers=1, orders_tensor_core=True),
            scores=(both,) * BUFFERS,
            outputs=(plgpu.TMEM((QUERIES, static.value_dim), jnp.float32),) * static.consumers,
            s_full=OrderedBarrier(num_barriers=BUFFERS),
            p_full=OrderedBarrier(num_barriers=BUFFERS),
            o_done=OrderedBarrier(num_barriers=static.consumers),
        )


# --- launch and roles


def flash_attention(
    loader: OperandLoader, inputs: Any, work: WorkList, splits: KvSplits, **rest: Any
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"] | None]:
    """Run the kernel and return output and LSE. See `mosaic.prefill.pipeline.launch`."""
    static = loader.static
    _require_tmem(static)
    scratch = TensorScratch.types(static, jax.tree.leaves(inputs.q)[0].dtype)
    kernel = FlashKernel(_kernel, scratch, static.consumers + 2, static.stages + 1, orders_tensor_core=True)
    return launch(kernel, loader, inputs, work, splits, **rest)


def _require_tmem(static: FlashStatic) -> None:
    """Raise NotImplementedError for more than two consumers, and for sizes that exceed the columns of TMEM."""
    if static.consumers not in REGISTERS:
        raise NotImplementedError(f"takes one or two consumers, got {static.consumers}")
    columns = BUFFERS * static.tile_keys + static.consumers * static.value_dim
    if columns > tmem.COLUMNS:
        raise NotImplementedError(
            f"scores of {static.tile_keys} keys and values of width {static.value_dim} for {static.consumers} "
            f"consumers take {columns} columns of TMEM, expected at most {tmem.COLUMNS}"
        )


def _kernel(
    loader: OperandLoader,
    x: Any,
    work_tiles: Callable[[], WorkTiles],
    result: Results,
    scratch: TensorScratch,
    loader_scratch: Any,
) -> None:
    static, warpgroup = loader.static, lax.axis_index("warpgroup")
    consumer_registers, producer_registers, issuer_registers = (
        DEQUANTIZE_REGISTERS if static.dequantizes else REGISTERS
    )[static.consumers]

    def attend(index: int) -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")
        consumer = SoftmaxConsumer(static, scratch, index, basics.opaque_zero() + index)
        consume(loader, x, work_tiles(), consumer, result, loader_scratch)

    def load() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        produce(loader, x, work_tiles(), scratch.rings, loader_scratch)

    def multiply() -> None:
        plgpu.set_max_registers(issuer_registers, action="decrease")
        issuer = Issuer(static, scratch)

        def attend(_: Any, kv_tile: Any, work: FlashWorkTile) -> Any:
            kv_tiles = loader.tile(x, loader_scratch, work).kv_tiles
            issuer.attend(kv_tile, kv_tiles)
            return kv_tiles

        work_tiles().consume(attend)

    roles = [functools.partial(attend, index) for index in range(static.consumers)]
    lax.switch(warpgroup, [*roles, load, multiply])


# --- products


@dataclasses.dataclass(frozen=True)
class Issuer:
    """The issuer warpgroup. One thread issues the products; all threads wait for the barriers.

    In the methods, `begin` and `kv_tile` are numbers of tiles, counted over all work tiles of the CTA. `buffer` is the
    index of a buffer for scores.
    """

    static: FlashStatic
    scratch: TensorScratch

    def attend(self, begin: Any, kv_tiles: Any) -> None:
        """Issue the products of a work tile with `kv_tiles` tiles, at least one, from tile number `begin` on."""
        for consumer in range(self.static.consumers):
            plgpu.barrier_wait(self.scratch.rings.q_full.at[consumer])
        (self._one_consumer if self.static.consumers == 1 else self._two_consumers)(begin, kv_tiles)

    def _two_consumers(self, begin: Any, kv_tiles: Any) -> None:
        """Issue the products of a work tile for two consumers. Consumer c uses buffer c."""
        scratch, last = self.scratch, self.static.consumers - 1

        def scores(i: Any, consumer: int) -> None:
            if consumer == 0:
                self._await_keys(begin + i)
            self._multiply_keys(begin + i, consumer, consumer)
            if consumer == last:
                self._release_keys(begin + i, i + 1 == kv_tiles)

        def step(i: Any, _: None) -> None:
            self._await_values(begin + i)
            for consumer in range(self.static.consumers):
                self._multiply_values(begin + i, consumer, consumer, i > 0)
                if consumer == last:
                    self._release_values(begin + i)
                plgpu.barrier_wait(scratch.o_done.at[consumer])  # P was read; the next S overwrites it
                pl.when(i + 1 < kv_tiles)(functools.partial(scores, i + 1, consumer))

        for consumer in range(self.static.consumers):
            scores(jnp.int32(0), consumer)
        lax.fori_loop(0, kv_tiles, step, None)

    def _one_consumer(self, begin: Any, kv_tiles: Any) -> None:
        """Issue the products of a work tile for one consumer. Its tiles alternate between the two buffers."""

        def scores(i: Any, buffer: int) -> None:
            self._await_keys(begin + i)
            self._multiply_keys(begin + i, 0, buffer)
            self._release_keys(begin + i, i + 1 == kv_tiles)

        def step(i: Any, buffer: int) -> None:
            wait_if(i > 0, self.scratch.o_done.at[0])  # P of tile i - 1 was read: S of i + 1 overwrites it
            pl.when(i + 1 < kv_tiles)(functools.partial(scores, i + 1, 1 - buffer))
            self._await_values(begin + i)
            self._multiply_values(begin + i, 0, buffer, i > 0)
            self._release_values(begin + i)

        def both(pair: Any, _: None) -> None:
            step(2 * pair, 0)
            pl.when(2 * pair + 1 < kv_tiles)(functools.partial(step, 2 * pair + 1, 1))

        scores(jnp.int32(0), 0)
        lax.fori_loop(0, pl.cdiv(kv_tiles, 2), both, None)
        plgpu.barrier_wait(self.scratch.o_done.at[0])

    def _await_keys(self, kv_tile: Any) -> None:
        plgpu.barrier_wait(self.scratch.rings.k_full.at[ring_slot(kv_tile, self.static.stages)])

    def _await_values(self, kv_tile: Any) -> None:
        plgpu.barrier_wait(self.scratch.rings.v_full.at[ring_slot(kv_tile, self.static.stages)])

    def _multiply_keys(self, kv_tile: Any, consumer: int, buffer: int) -> None:
        """Issue S = Q Kᵀ. Q is the sum of `query_parts` 16-bit arrays, and there is one product per array."""
        rings, parts = self.scratch.rings, self.static.query_parts
        s, _ = self.scratch.scores[buffer]
        k = rings.k.at[ring_slot(kv_tile, self.static.stages)].transpose((1, 0))
        for part in range(parts):
            plgpu.tcgen05_mma(s, rings.q.at[consumer * parts + part], k, accumulate=part > 0)
        plgpu.tcgen05_commit_arrive(self.scratch.s_full.at[buffer])

    def _multiply_values(self, kv_tile: Any, consumer: int, buffer: int, accumulate: Any) -> None:
        """Wait for P and issue O += P V; O = P V if `accumulate` is False."""
        scratch = self.scratch
        _, p = scratch.scores[buffer]
        plgpu.barrier_wait(scratch.p_full.at[buffer])
        v = scratch.rings.v.at[ring_slot(kv_tile, self.static.stages)]
        plgpu.tcgen05_mma(scratch.outputs[consumer], p, v, accumulate=accumulate)
        plgpu.tcgen05_commit_arrive(scratch.o_done.at[consumer])

    def _release_keys(self, kv_tile: Any, is_last: Any) -> None:
        """Arrive at k_empty when the products issued before have finished; after the last S of a block, also at
        q_empty.
        """
        rings = self.scratch.rings
        plgpu.tcgen05_commit_arrive(rings.k_empty.at[ring_slot(kv_tile, self.static.stages)])

        @pl.when(is_last)
        def _release_queries() -> None:
            for consumer in range(self.static.consumers):
                plgpu.tcgen05_commit_arrive(rings.q_empty.at[consumer])

    def _release_values(self, kv_tile: Any) -> None:
        plgpu.tcgen05_commit_arrive(self.scratch.rings.v_empty.at[ring_slot(kv_tile, self.static.stages)])


# --- a consumer


class RowStats(NamedTuple):
    """Softmax statistics of a consumer's 128 query rows, over the tiles up to the newest.

    Scores are scaled so that probabilities are powers of 2: score = log2(e) · score_scale · (q kᵀ).

    Attributes:
      m: [128] float32, number that is subtracted from scores: the largest score, or up to `RESCALE_THRESHOLD_LOG2`
        less.
      l: [128] float32, sums of 2**(score - m).
    """

    m: Any
    l: Any  # noqa: E741


@dataclasses.dataclass(frozen=True)
class SoftmaxConsumer:
    """A consumer warpgroup: softmax of 128 query rows. `Issuer` issues its products.

    Attributes:
      index: index among the consumers, as a Python constant.
      number: the same index as a traced value that the compiler cannot fold. Values computed from a constant would be
        hoisted out of the loop over work tiles, and take registers.
    """

    static: FlashStatic
    scratch: TensorScratch
    index: int
    number: Any

    def attend(self, begin: Any, kv_tiles: Any, transform: ScoreTransform, has_rows: Any) -> RowStats:
        """Compute the softmax over `kv_tiles` tiles, at least one. Afterwards, O of all these tiles is in TMEM."""
        del begin  # the buffers of scores are not ring slots, so the number of a tile does not matter
        del has_rows  # the issuer issues products for all consumers
        state = RowStats(ROWS.filled(jnp.float32(-jnp.inf), QUERIES), ROWS.filled(jnp.float32(0.0), QUERIES))
        if self.static.consumers > 1:
            step = functools.partial(self._step, transform, self.index)
            state = lax.fori_loop(0, kv_tiles, step, state)
        else:

            def both(pair: Any, state: RowStats) -> RowStats:
                state = self._step(transform, 0, 2 * pair, state)
                second = functools.partial(self._step, transform, 1, 2 * pair + 1)
                return lax.cond(2 * pair + 1 < kv_tiles, second, lambda state: state, state)

            state = lax.fori_loop(0, pl.cdiv(kv_tiles, 2), both, state)
        plgpu.barrier_wait(self.scratch.o_done.at[self.index])
        return state._replace(m=in_log2_units(state.m, self._scale(transform)))

    def _step(self, transform: ScoreTransform, buffer: int, i: Any, state: RowStats) -> RowStats:
        """Compute the probabilities of the i-th tile of the work tile. Rescale O if a maximum has grown by more than
        `RESCALE_THRESHOLD_LOG2`.
        """
        scratch = self.scratch
        s_ref, p_ref = scratch.scores[buffer]
        if transform.await_tile is not None:
            transform.await_tile(i)
        plgpu.barrier_wait(scratch.s_full.at[buffer])
        s = [plgpu.async_load_tmem(s_ref.at[:, columns], layout=TILE) for columns in self._chunks()]
        plgpu.wait_load_tmem()
        s = self._scores(transform, i, s)  # list of [query_rows, CHUNK]
        highest = functools.reduce(jnp.maximum, (part.max(axis=1) for part in s))
        m, scale = next_reference(highest, state.m, self._scale(transform), RESCALE_THRESHOLD_LOG2)  # [query_rows] each
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        factor = jnp.where(m == state.m, 1.0, jnp.exp2(state.m - m))
        scale = over_scores(scale, over_rows, s[0].shape)
        l = state.l * factor  # noqa: E741
        for columns, part in zip(self._chunks(), s, strict=True):
            p = jnp.exp2(part * scale - over_rows(shift, part.shape))  # [query_rows, CHUNK]
            plgpu.async_store_tmem(p_ref.at[:, columns], p.astype(p_ref.dtype))
            if transform.token_scales is not None:
                p = p * over_columns(basics.load(transform.token_scales(i).at[2, columns], PER_COLUMN), p.shape)
            l = l + p.sum(axis=1)  # noqa: E741

        # Store P before O is loaded and rescaled, because P and O together would take too many registers.
        @pl.when(i > 0)
        def _after_first() -> None:
            plgpu.barrier_wait(scratch.o_done.at[self.index])
            pl.when(any_of_warp(m != state.m))(lambda: self._rescale(factor))

        plgpu.commit_tmem()
        plgpu.barrier_arrive(scratch.p_full.at[buffer])
        return RowStats(m, l)

    def _rescale(self, factor: jax.Array) -> None:
        """Multiply the rows of O in TMEM by `factor` [128]."""
        o_ref = self.scratch.outputs[self.index]
        for first in range(0, self.static.value_dim, CHUNK):
            part = o_ref.at[:, pl.ds(first, CHUNK)]
            o = plgpu.async_load_tmem(part, layout=TILE)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(part, o * over_rows(factor, o.shape))

    def _chunks(self) -> list[Any]:
        """Slices of `CHUNK` columns that cover a tile of scores."""
        return [pl.ds(first, CHUNK) for first in range(0, self.static.tile_keys, CHUNK)]

    def _scale(self, transform: ScoreTransform) -> float:
        """Return the factor that turns the scores of `_scores` into exponents of 2."""
        if transform.token_scales is not None:
            return 1.0
        return self.static.score_scale * LOG2E if self.static.soft_cap is None else LOG2E

    def _scores(self, transform: ScoreTransform, i: Any, s: list[Any]) -> list[Any]:
        """Scale, cap and mask the product q kᵀ of the i-th tile.

        If values have a scale per token, log2 of these scales is added to the scores, so the probabilities include the
        scales. The maximum is also taken with the scales, so these probabilities are at most 2**8 when they are rounded
        to 16 bits.

        Args:
          s: the product, a list of chunks [128, CHUNK].

        Returns:
          The scores as a list of chunks. The probabilities are 2**(scores · factor - m); `_scale` gives the factor.
        """
        static, token_scales = self.static, transform.token_scales
        if transform.key_scale is not None:
            s = [part * transform.key_scale for part in s]
        if token_scales is not None:
            s = [part * self._of_columns(token_scales(i).at[0], columns, part) for columns, part in self._with(s)]
        s = s if static.soft_cap is None else [capped(part, static.score_scale, static.soft_cap) for part in s]
        sees_all, limits = transform.limits(i)
        s = lax.cond(sees_all, lambda s: s, lambda s: hide(s, limits()), s)
        if token_scales is None:
            return s
        scale = static.score_scale * LOG2E if static.soft_cap is None else LOG2E
        log2 = token_scales(i).at[1]
        return [part * scale + self._of_columns(log2, columns, part) for columns, part in self._with(s)]

    def _with(self, s: list[Any]) -> zip[tuple[Any, Any]]:
        """Pair the slice of columns of each chunk with the chunk."""
        return zip(self._chunks(), s, strict=True)

    def _of_columns(self, ref: Ref, columns: Any, part: jax.Array) -> jax.Array:
        """Load the values for some columns from `ref` [tile_keys], and broadcast them over the rows of a chunk
        `part`.
        """
        return over_columns(basics.load(ref.at[columns], PER_COLUMN), part.shape)

    def store(self, result: Results, row: jax.Array, state: RowStats, options: RowOptions) -> None:
        """Store output and LSE if the work tile has all keys of its block, else the partial state.

        Args:
          row: int32 [128], index of each query row in the result; negative for rows that are not stored.
        """
        o_ref = self.scratch.outputs[self.index]
        for first in range(0, self.static.value_dim, CHUNK):
            o = plgpu.async_load_tmem(o_ref.at[:, pl.ds(first, CHUNK)], layout=TILE)
            plgpu.wait_load_tmem()  # before p_full of the next block, after which a product overwrites O
            o = o if options.scale is None else options.scale(o, first, PER_COLUMN)

            def partial(states: RowState, o: jax.Array = o, first: int = first) -> None:
                ROWS.store(states.o, row, first, o)

            def finished(rows: OutputRows, o: jax.Array = o, first: int = first) -> None:
                out = RowState(o, *state).output(options.sink)
                ROWS.store(rows.out, row, first, out.astype(rows.out.dtype))

            result.store(options.is_whole, finished, partial)

        def partial_sums(states: RowState) -> None:
            ROWS.put(states.m, row, state.m)
            ROWS.put(states.l, row, state.l)

        def finished_sums(rows: OutputRows) -> None:
            if rows.lse is not None:
                ROWS.put(rows.lse, row, RowState(None, *state).lse())

        result.store(options.is_whole, finished_sums, partial_sums)


# --- a tile of scores


def over_rows(per_row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast an array with a value per row over the columns of an array of shape `shape`."""
    return lax.broadcast_in_dim(per_row, shape, [0])


def over_columns(per_column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast an array with a value per column over the rows of an array of shape `shape`."""
    return lax.broadcast_in_dim(per_column, shape, [1])


def hide(s: list[jax.Array], limits: Limits) -> list[jax.Array]:
    """Set scores to -inf in columns that a row does not see.

    A thread holds a whole row, so it compares the limits of its row with constant column indices.

    Args:
      s: scores of a tile, a list of chunks [128, CHUNK].
    """
    hidden = []
    for number, part in enumerate(s):
        column = plgpu.broadcasted_iota(jnp.int32, part.shape, 1, layout=TILE) + number * CHUNK
        seen = column >= over_rows(limits.low, part.shape)
        if limits.sink is not None:
            seen |= column < over_rows(limits.sink, part.shape)
        seen &= column < over_rows(limits.high, part.shape)
        if limits.pages is not None:
            page = lax.div(column, jnp.int32(limits.page_tokens))
            seen &= (lax.shift_right_logical(over_rows(limits.pages, part.shape), page) & 1) == 1
        hidden.append(jnp.where(seen, part, -jnp.inf))
    return hidden


def capped(s: jax.Array, scale: float, soft_cap: float) -> jax.Array:
    """Compute soft_cap * tanh(scale * s / soft_cap)."""
    return soft_capped(s, scale, soft_cap, functools.partial(reciprocal_of_pairs, layout=TILE))


def any_of_warp(condition: jax.Array) -> Any:
    """Return whether a condition [128] holds for at least one row of the warp.

    The result may differ between the warps of a warpgroup, so code that depends on it must not synchronize the
    warpgroup. Pallas's own reduction would synchronize the warpgroup, and uses shared memory that is common to all
    warpgroups.
    """
    if interpreted():
        return jnp.any(condition)

    @plgpu.inline_mgpu(
        arg_types=(TILE.reduce(1),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_: Any, condition: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        (register,) = condition.registers.flat
        number = vector.extract(register, [], [0])
        text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        voted: Any = llvm.inline_asm(i32, [number], text, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(voted, (), is_signed=True)

    return vote(jnp.where(condition, jnp.int32(1), jnp.int32(0))) != 0
