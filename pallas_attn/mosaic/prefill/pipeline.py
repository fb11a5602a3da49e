"""The architecture-independent part of the prefill kernel: launch, operand loaders, rings, and the producer.

The kernel of an architecture (`hopper/prefill.py`, `blackwell/prefill.py`) has a producer warpgroup, consumer
warpgroups, and on Blackwell a warpgroup that issues products. All of them process the same work tiles (`schedule.py`).

- `launch` starts the kernel and, if keys are split, the merge (`split.py`).
- An `OperandLoader` belongs to an operation (`ops/paged_prefill`, `ops/ragged_attention`). For each work tile it makes
  an `OperandTile`, which knows where queries, keys and values are and which keys each query row sees.
- `Rings` are the buffers in shared memory: Q, and `stages` slots each for tiles of K and V.
- The `Producer` fills the rings.

Barriers of the rings (the file of each architecture has the complete table):

    barrier            arrivals                            waits
    q_full[consumer]   copies of Q                         consumer, before its first product of a block
    q_empty[consumer]  reader of Q                         producer, before it copies the Q of the next block
    k_full[slot]       copies of K, or the producer        readers, before S = Q Kᵀ
    k_empty[slot]      readers                             producer, before it fills the slot again
    v_full, v_empty    as for K                            as for K
    v_full[stages]     copies of V, if values are masked   producer, before it zeroes masked values
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic.prefill.config import ALIGNMENT
from pallas_attn.mosaic.prefill.schedule import FlashWorkTile, TileQueue, WorkList, WorkTiles, ring_slot
from pallas_attn.mosaic.prefill.split import BYTES_OF_A_TILE, KvSplits, OutputRows, RowState, merge_splits
from pallas_attn.mosaic.primitives import basics, register_tiles, shared_memory
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.masks import Limits
from pallas_attn.mosaic.primitives.register_tiles import BY_64, clear_rows
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.mosaic.primitives.tma import arrivals, copy_row_groups, copy_rows


class TokenRows(RowLayout):
    """Tokens of a tile of keys or values, in registers of the producer."""

    @property
    def tile(self) -> Any:
        return BY_64.tile


TOKENS = TokenRows(threads=4, vector=2)


@dataclasses.dataclass(frozen=True)
class FlashStatic:
    """Compile-time constants of the kernel.

    Attributes:
      key_dim, value_dim: Dk and Dv.
      tile_keys: keys of a tile.
      stages: slots of the ring of K, and of the ring of V.
      consumers: consumer warpgroups.
      copies: TMA copies of a tile of K or of V; a group of copies is one arrival.
      score_scale: factor of q kᵀ.
      tile_rows: query rows of a consumer, M of its products.
      rows: layout of the query rows of a consumer in registers.
      soft_cap: cap of the scores, or None.
      query_parts: number of 16-bit operands whose sum is Q (split-fp16).
      block_heads: query heads that share a block (`BlockRows`).
      dequantizes: whether the producer converts an int8 or fp8 cache to float16.
    """

    key_dim: int
    value_dim: int
    tile_keys: int
    stages: int
    consumers: int
    copies: int
    score_scale: float
    tile_rows: int
    rows: RowLayout
    soft_cap: float | None = None
    query_parts: int = 1
    block_heads: int = 1
    dequantizes: bool = False

    @property
    def block_rows(self) -> int:
        return self.tile_rows * self.consumers

    @property
    def query_copies(self) -> int:
        """TMA copies of one part of Q for one consumer."""
        return 1 if self.block_heads == 1 else self.tile_rows // ALIGNMENT

    @property
    def rows_of_a_tile(self) -> int:
        """Rows whose partial states are written and read in the time that a tile of keys takes."""
        multiply_adds = self.block_rows * self.tile_keys * (self.key_dim + self.value_dim)
        return max(1, int(BYTES_OF_A_TILE * multiply_adds) // (8 * self.value_dim))

    def most_tiles(self, most_keys: int, window: int | None) -> int:
        """Return the maximum number of tiles that a block sees if a sequence has at most `most_keys` keys."""
        if window is not None:
            most_keys = min(most_keys, window + self.block_rows)
        return -(-most_keys // self.tile_keys)


class Rings(NamedTuple):
    """Queries, keys and values in shared memory, and their barriers (see the docstring of the module).

    Attributes:
      q: [consumers · query_parts, tile_rows, Dk].
      k, v: [stages, tile_keys, Dk or Dv].
    """

    q: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any

    @staticmethod
    def types(static: FlashStatic, dtype: Any, *, readers: int, orders_tensor_core: bool = False) -> Rings:
        """Return the scratch types.

        Args:
          readers: arrivals at k_empty and v_empty per phase.
          orders_tensor_core: whether barriers without TMA arrivals order tensor-core operations.
        """
        stages, keys, consumers, parts = static.stages, static.tile_keys, static.consumers, static.query_parts
        copies = 1 if static.dequantizes else arrivals(static.copies)
        signal = functools.partial(plgpu.Barrier, orders_tensor_core=orders_tensor_core)
        full = signal if static.dequantizes else plgpu.Barrier
        empty = signal(num_barriers=stages, num_arrivals=readers)
        return Rings(
            q=register_tiles.operand((consumers * parts, static.tile_rows, static.key_dim), dtype),
            k=register_tiles.operand((stages, keys, static.key_dim), dtype),
            v=register_tiles.operand((stages, keys, static.value_dim), dtype),
            q_full=plgpu.Barrier(num_barriers=consumers, num_arrivals=parts * arrivals(static.query_copies)),
            q_empty=signal(num_barriers=consumers),
            k_full=full(num_barriers=stages, num_arrivals=copies),
            k_empty=empty,
            v_full=full(num_barriers=stages + 1, num_arrivals=copies),
            v_empty=empty,
        )


# --- rows of a block


def shared_heads(group: int, tile_rows: int) -> int:
    """Return the number of query heads that share a block.

    The result is the largest divisor of `group` for which `tile_rows` holds at least 8 queries of each head.

    Args:
      group: query heads per KV head.
      tile_rows: query rows of a consumer.
    """
    return max(heads for heads in range(1, tile_rows // ALIGNMENT + 1) if group % heads == 0)


class BlockRows(NamedTuple):
    """Query rows of the block of a work tile.

    A set of `block_heads` heads of one KV head shares the block. The rows of a sequence are ordered in groups of 8:
    queries 0 to 7 of the first head, queries 0 to 7 of the second head, and so on, then queries 8 to 15 of the first
    head. Blocks are cut from this order, so a sequence has at most one block that is not full, and each tile of keys is
    read once for all heads of a block. A TMA copy brings one group of 8 rows.

    Attributes:
      work: the work tile. Its `head` is the index of a set of `block_heads` heads.
      num_tokens, num_q_heads: T and Hq.
    """

    static: FlashStatic
    work: FlashWorkTile
    num_tokens: int
    num_q_heads: int

    @property
    def heads(self) -> int:
        return self.static.block_heads

    @property
    def first_head(self) -> Any:
        """First head of the set."""
        return self.work.head * self.heads

    @property
    def end_query(self) -> Any:
        """One past the last query of the block. This query may belong to the next sequence."""
        last_group = self.work.block.skipped_heads + self.static.block_rows // ALIGNMENT - 1
        return self.work.block.start + (lax.div(last_group, jnp.int32(self.heads)) + 1) * ALIGNMENT

    def filled(self, value: Any) -> jax.Array:
        """Return `value` for each row of a consumer, [tile_rows]."""
        return self.static.rows.filled(value, self.static.tile_rows)

    def queries(self, number: Any) -> jax.Array:
        """Return the query of each row of consumer `number`, int32 [tile_rows]."""
        row, start = self.static.rows.iota(self.static.tile_rows), self.work.block.start
        if self.heads == 1:
            return start + (number * self.static.tile_rows + row)
        eight = lax.div(self._groups(number, row), jnp.int32(self.heads))
        return start + eight * ALIGNMENT + (row & (ALIGNMENT - 1))

    def _groups(self, number: Any, row: jax.Array) -> jax.Array:
        """Return the group of 8 of each row of a consumer, int32 [tile_rows].

        Group 0 is the group of the first head at the first query of the block.
        """
        return self._first_group(number) + lax.div(row, jnp.int32(ALIGNMENT))

    def _first_group(self, number: Any) -> Any:
        return self.work.block.skipped_heads + number * (self.static.tile_rows // ALIGNMENT)

    def first_query(self, number: Any) -> Any:
        """Return the first query of a consumer. All its queries are less than `tile_rows` after it."""
        if self.heads == 1:
            return self.work.block.start + number * self.static.tile_rows
        return self.work.block.start + lax.div(self._first_group(number), jnp.int32(self.heads)) * ALIGNMENT

    def any_of(self, number: Any) -> Any:
        """Return whether a consumer has query rows of the sequence."""
        return self.first_query(number) < self.work.block.end_row

    def output_row(self, query: jax.Array, number: Any) -> jax.Array:
        """Return the row of the output [T · Hq, Dv] of each row of a consumer, int32 [tile_rows].

        Rows of another sequence get -1.
        """
        block = self.work.block
        in_sequence = (query >= block.first_row) & (query < block.end_row)
        head = self.filled(self.first_head)
        if self.heads > 1:
            head += lax.rem(self._groups(number, self.static.rows.iota(self.static.tile_rows)), jnp.int32(self.heads))
        return jnp.where(in_sequence, self.work.output_row(query, self.num_tokens) * self.num_q_heads + head, -1)

    def sinks(self, sinks: Ref | None, output_row: jax.Array) -> jax.Array | None:
        """Return the sink logit of each row, [tile_rows].

        Args:
          sinks: [Hq], or None.
          output_row: from `output_row`.
        """
        if sinks is None:
            return None
        if self.heads == 1:
            return self.filled(sinks[self.first_head])
        head = lax.rem(jnp.maximum(output_row, 0), jnp.int32(self.num_q_heads))
        return self.static.rows.take(sinks, head)

    def copy(self, q: Ref, number: int, tile: Ref, full: Ref) -> None:
        """Start the TMA copies of the queries of consumer `number`.

        Args:
          q: [T, Hq, Dk] in global memory, from `zero_rows_past_end`.
          tile: [tile_rows, Dk] in shared memory.
          full: barrier with `arrivals(static.query_copies)` arrivals for these copies.
        """
        start = self.work.block.start
        if self.heads == 1:
            copy_rows(q, start + number * self.static.tile_rows, self.first_head, tile, full)
        else:
            copy_row_groups(q, start, self.first_head, self.heads, self._first_group(number), tile, full)


# --- interfaces: operand loaders, and consumers of an architecture


@runtime_checkable
class OperandTile(Protocol):
    """Operands of one work tile."""

    @property
    def kv_tiles(self) -> Any:
        """Number of tiles of keys, at least 1."""

    def load(self, producer: Producer, again: Any, kv_tile: Any) -> None:
        """Copy queries, keys and values to the rings. Runs in the producer.

        Args:
          again: whether the CTA has processed a work tile before.
          kv_tile: number of the first tile of keys, counted over all work tiles of the CTA.
        """

    def attend(self, consumer: BlockConsumer, kv_tile: Any, result: Results) -> None:
        """Attend with the query rows of a consumer and store the result. Runs in each consumer."""


@runtime_checkable
class OperandLoader(Protocol):
    """Operand loading and masking of an operation.

    Attributes:
      static: compile-time constants of the kernel.
      kernel_name: name in profiles.
      num_heads: number of heads, or of sets of heads that share a block.
      compiler_params: compiler parameters of the kernel.
    """

    @property
    def static(self) -> FlashStatic: ...
    @property
    def kernel_name(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def compiler_params(self) -> plgpu.CompilerParams: ...

    def scratch_types(self, *, orders_tensor_core: bool = False) -> Any:
        """Return scratch types of the loader, or None. See `Rings.types`."""

    def tile(self, x: Any, scratch: Any, work: FlashWorkTile) -> OperandTile:
        """Return the operands of a work tile.

        Args:
          x: operands of the kernel in global memory.
          scratch: from `scratch_types`.
        """


@runtime_checkable
class BlockConsumer(Protocol):
    """A consumer warpgroup, with `tile_rows` query rows of a block.

    Attributes:
      number: index among the consumers.
    """

    @property
    def number(self) -> Any: ...

    def attend(self, begin: Any, kv_tiles: Any, transform: ScoreTransform, has_rows: Any) -> Any:
        """Attend to `kv_tiles` tiles, at least one. The first is tile number `begin` of the CTA.

        Args:
          has_rows: whether the consumer has query rows of the sequence. The result is arbitrary if not.
        """

    def store(self, result: Results, row: jax.Array, state: Any, options: RowOptions) -> None:
        """Store the state that `attend` returned: output and LSE, or the partial state if the keys are split.

        Args:
          row: row of the result for each query row; negative for rows that are not stored.
        """


class ScoreTransform(NamedTuple):
    """Mask and scales of the scores of a work tile.

    Attributes:
      limits: limits(i) returns whether all rows see all keys of the i-th tile, and a function that computes the
        `Limits` of the tile if not.
      key_scale: factor of q kᵀ, or None.
      token_scales: token_scales(i) is [3, tile_keys] in shared memory: the scale of each key, and log2 and inverse of
        the scale of each value. None if scales are not per token.
      await_tile: await_tile(i) waits for the metadata of the i-th tile. None if the wait for its keys is enough.
    """

    limits: Callable[[Any], tuple[Any, Callable[[], Limits]]]
    key_scale: Any = None
    token_scales: Callable[[Any], Ref] | None = None
    await_tile: Callable[[Any], None] | None = None


class RowOptions(NamedTuple):
    """Options of storing query rows.

    Attributes:
      sink: sink logits [rows], or None. If keys are split, the merge adds the sinks instead.
      is_whole: whether the work tile has all keys of its rows; None if keys are never split.
      scale: scale(o, first_column, layout of a value per column) applies the scales of the values to `o`; or None.
    """

    sink: Any = None
    is_whole: Any = None
    scale: Callable[[Any, int, Any], Any] | None = None


# --- launch


class Results(NamedTuple):
    """Outputs of the kernel; arrays, or references to them.

    Attributes:
      finished: output and LSE of n rows.
      partial: partial states of n rows for each possible split, or None if keys are never split.
    """

    finished: OutputRows
    partial: RowState | None

    def store(self, is_whole: Any, finished: Callable[[OutputRows], None], partial: Callable[[RowState], None]) -> None:
        """Call `finished` if the work tile has all keys of its rows, else `partial`.

        Args:
          is_whole: see `RowOptions`.
        """
        if self.partial is None:
            finished(self.finished)
        else:
            states = self.partial
            lax.cond(is_whole, lambda: finished(self.finished), lambda: partial(states))


class FlashKernel(NamedTuple):
    """The kernel of an architecture.

    Attributes:
      body: body(loader, operands, work_tiles, result, scratch, scratch of the loader). work_tiles() returns the
        `WorkTiles`; each warpgroup calls it.
      scratch: scratch types of the kernel.
      warpgroups: number of warpgroups.
      queue_slots: see `TileQueue`.
      orders_tensor_core: whether barriers without TMA arrivals order tensor-core operations.
    """

    body: Callable[..., None]
    scratch: Any
    warpgroups: int
    queue_slots: int = 2
    orders_tensor_core: bool = False


def launch(
    kernel: FlashKernel,
    loader: OperandLoader,
    inputs: Any,
    work: WorkList,
    splits: KvSplits,
    *,
    shape: tuple[int, int],
    sinks: Float[Array, "Hq"] | None,
    out_dtype: jax.typing.DTypeLike,
    return_lse: bool,
) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"] | None]:
    """Run the kernel, and the merge if keys are split.

    Args:
      inputs: operands of the loader, among them `q`, `sinks`, and `blocks` and `counts` of `work`.
      work: from `list_blocks`.
      shape: T and Hq.
      sinks: sink logits [Hq], or None.
      return_lse: whether to store the LSE. Storing one float per row takes longer than its size suggests.

    Returns:
      Output [T, Hq, Dv], and LSE [T, Hq] or None.
    """
    static, work_tiles = loader.static, work.blocks.shape[0] * loader.num_heads * splits.most
    num_ctas = min(work_tiles, basics.multiprocessors())
    tile_counter = TileQueue.counter(work.zero, num_ctas, work_tiles)
    scratch_types = (
        kernel.scratch,
        TileQueue.scratch_types(tile_counter, kernel.queue_slots, orders_tensor_core=kernel.orders_tensor_core),
        loader.scratch_types(orders_tensor_core=kernel.orders_tensor_core),
    )
    _require_shared_memory(loader, scratch_types)
    rows, is_cut = math.prod(shape), splits.most > 1
    (result,) = plgpu.kernel(
        functools.partial(_kernel, kernel, loader, num_ctas),
        out_type=(
            Results(
                OutputRows.types(rows, static.value_dim, out_dtype, lse=return_lse),
                RowState.types(splits.most * rows, static.value_dim) if is_cut else None,
            ),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=kernel.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=loader.compiler_params,
        kernel_name=loader.kernel_name,
    )(basics.materialize(inputs), tile_counter)
    out, lse = merge_splits(result.partial, result.finished, work.counts, sinks) if is_cut else result.finished
    return out.reshape(*shape, -1), None if lse is None else lse.reshape(shape)


def _require_shared_memory(loader: OperandLoader, scratch_types: Any) -> None:
    """Raise NotImplementedError if a CTA needs more shared memory than a multiprocessor has."""
    static, reductions = loader.static, loader.compiler_params.reduction_scratch_bytes
    if not shared_memory.fits(scratch_types, 1, reduction_bytes=reductions):
        needed = shared_memory.block_bytes(scratch_types, reduction_bytes=reductions)
        raise NotImplementedError(
            f"{static.stages} stages of {static.tile_keys} keys for {static.consumers} consumers take {needed} bytes "
            f"of shared memory, expected at most {shared_memory.MULTIPROCESSOR_BYTES - shared_memory.SYSTEM_BYTES}"
        )


def _kernel(
    kernel: FlashKernel,
    loader: OperandLoader,
    num_ctas: int,
    x: Any,
    tile_counter: Ref | None,
    result: Results,
    scratch: Any,
    queue_scratch: Any,
    loader_scratch: Any,
) -> None:
    def work_tiles() -> WorkTiles:
        queue = None if tile_counter is None else TileQueue(num_ctas, tile_counter, *queue_scratch)
        return WorkTiles.of(x.blocks, x.counts, loader.num_heads, queue)

    kernel.body(loader, x, work_tiles, result, scratch, loader_scratch)


def wait_if(condition: Any, barrier: Ref) -> None:
    """Wait for a barrier if a condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


# --- the producer


@dataclasses.dataclass(frozen=True)
class Producer:
    """The producer warpgroup, which fills the rings. `kv_tile` counts tiles of keys over all work tiles of the CTA."""

    static: FlashStatic
    rings: Rings

    def load_keys(self, kv_tile: Any, copy: Callable[[Ref, Ref], None]) -> None:
        """Load a tile of keys. copy(slot, barrier) starts its TMA copies."""
        slot = ring_slot(kv_tile, self.static.stages)
        wait_if(kv_tile >= self.static.stages, self.rings.k_empty.at[slot])
        copy(self.rings.k.at[slot], self.rings.k_full.at[slot])

    def load_values(
        self, kv_tile: Any, copy: Callable[[Ref, Ref], None], whole: Any, live_mask: Callable[[jax.Array], jax.Array]
    ) -> None:
        """Load a tile of values, and zero masked values.

        Masked values may be NaN, and a probability of 0 would not keep NaN out of the output.

        Args:
          copy: copy(slot, barrier) starts the TMA copies.
          whole: whether no value of the tile is masked.
          live_mask: live_mask(tokens of the tile [n]) returns which values are not masked, bool [n].
        """
        rings, stages = self.rings, self.static.stages
        slot = ring_slot(kv_tile, stages)
        wait_if(kv_tile >= stages, rings.v_empty.at[slot])
        copy(rings.v.at[slot], rings.v_full.at[jnp.where(whole, slot, stages)])

        @pl.when(~whole)
        def _clear() -> None:
            plgpu.barrier_wait(rings.v_full.at[stages])
            for first in range(0, self.static.tile_keys, 64):
                clear_rows(
                    rings.v.at[slot, pl.ds(first, 64)], live_mask(register_tiles.row_iota(64, BY_64) + first), BY_64
                )
            plgpu.commit_smem()
            for _ in range(arrivals(self.static.copies)):
                plgpu.barrier_arrive(rings.v_full.at[slot])

    def load_queries(self, again: Any, copy: Callable[[int, Ref], None]) -> Callable[[Any], None]:
        """Load the queries of a block.

        There is one buffer for Q. The queries of the first block of a CTA are copied at once. The queries of a later
        block are copied after its first tiles of K and V, because consumers empty the slots of K and V earlier than Q.

        Args:
          again: whether the CTA has processed a work tile before.
          copy: copy(consumer, barrier) starts the TMA copies for a consumer.

        Returns:
          A function to call with i, the index of a tile in the block, after the copies of the values of the tile.
        """

        def load(*, await_empty: bool) -> None:
            for consumer in range(self.static.consumers):
                if await_empty:
                    plgpu.barrier_wait(self.rings.q_empty.at[consumer])
                copy(consumer, self.rings.q_full.at[consumer])

        pl.when(~again)(lambda: load(await_empty=False))
        return lambda i: pl.when(again & (i == 0))(lambda: load(await_empty=True))

    def drain(self, kv_tiles: Any, any_work: Any) -> None:
        """Wait for the last phase of each barrier after the last of `kv_tiles` tiles."""

        def wait(i: Any, _: None) -> None:
            slot = ring_slot(kv_tiles - 1 - i, self.static.stages)
            plgpu.barrier_wait(self.rings.k_empty.at[slot])
            plgpu.barrier_wait(self.rings.v_empty.at[slot])

        lax.fori_loop(0, jnp.minimum(kv_tiles, self.static.stages), wait, None)
        for consumer in range(self.static.consumers):
            wait_if(any_work, self.rings.q_empty.at[consumer])


def produce(loader: OperandLoader, x: Any, work_tiles: WorkTiles, rings: Rings, loader_scratch: Any) -> None:
    """Run the producer: load the operands of all work tiles of the CTA."""
    producer = Producer(loader.static, rings)

    def load(again: Any, kv_tile: Any, work: FlashWorkTile) -> Any:
        tile = loader.tile(x, loader_scratch, work)
        tile.load(producer, again, kv_tile)
        return tile.kv_tiles

    count, kv_tiles = work_tiles.produce(load)
    producer.drain(kv_tiles, count > 0)


def consume(
    loader: OperandLoader,
    x: Any,
    work_tiles: WorkTiles,
    consumer: BlockConsumer,
    result: Results,
    loader_scratch: Any,
) -> None:
    """Run a consumer: attend with its query rows in all work tiles of the CTA."""

    def attend(_: Any, kv_tile: Any, work: FlashWorkTile) -> Any:
        tile = loader.tile(x, loader_scratch, work)
        tile.attend(consumer, kv_tile, result)
        return tile.kv_tiles

    work_tiles.consume(attend)
