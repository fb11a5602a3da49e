"""The architecture-independent part of the prefill kernel: launch, operand loaders, rings, and the producer.

The kernel of an architecture (`hopper/prefill.py`, `blackwell/prefill.py`) has a producer warpgroup, which loads
operands, and consumer warpgroups, which compute the softmax of `tile_rows` query rows each. On Hopper consumers also
issue their products; on Blackwell another warpgroup issues them. All warpgroups process the same work tiles.

- `launch` starts the kernel. If the call may split keys, it also starts the merge kernel (`split.py`).
- An `OperandLoader` belongs to an operation (`ops/paged_prefill`, `ops/ragged_attention`). For each work tile it makes
  an `OperandTile`, which computes the addresses of queries, keys and values, and which keys each query row sees.
- `Rings` are the buffers in shared memory: Q, `stages` slots for tiles of K, and `stages` slots for tiles of V.
- The `Producer` fills the rings.

Terms (`schedule.py` explains block, head set, split and work tile in more detail):

    query row    one head of one query token
    block        up to `block_rows` query rows of one sequence, from a set of heads of one KV head
    tile         `tile_keys` consecutive keys, or their values. Tiles are numbered over all work tiles of a CTA: tile
                 number n is in slot n % stages
    work tile    a block with all tiles that it sees, or with a split: some consecutive tiles
    query part   16-bit array; the sum of `query_parts` parts is Q

Barriers of the rings (the file of each architecture has the complete table). The reader is the warpgroup that issues
the products; on Blackwell, the tensor core arrives for it:

    barrier            arrivals                            waits
    q_full[consumer]   TMA copies of Q                     reader, before the first product of a block
    q_empty[consumer]  reader                              producer, before it copies the Q of the next block
    k_full[slot]       TMA copies of K; the producer if    readers, before S = Q Kᵀ
                       it converts K from 8 bits
    k_empty[slot]      readers                             producer, before it fills the slot again
    v_full[slot]       as k_full; the producer if it       readers, before O += P V
                       zeroes masked values
    v_empty[slot]      readers                             producer, before it fills the slot again
    v_full[stages]     TMA copies of V, if values are      producer, before it zeroes masked values
                       masked
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
from pallas_attn.mosaic.prefill.schedule import (
    Blocking,
    FlashWorkTile,
    SequenceLengths,
    TileQueue,
    WorkList,
    WorkTiles,
    list_blocks,
    ring_slot,
)
from pallas_attn.mosaic.prefill.split import BYTES_OF_A_TILE, KvSplits, OutputRows, RowState, merge_splits
from pallas_attn.mosaic.primitives import basics, register_tiles, shared_memory
from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.masks import Limits
from pallas_attn.mosaic.primitives.register_tiles import BY_64, clear_rows
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.mosaic.primitives.tma import arrivals, tma_load_row_groups, tma_load_rows


class TokenRows(RowLayout):
    """Register layout of arrays [tile_keys] with a value per token of a tile. The producer computes with them."""

    @property
    def tile(self) -> Any:
        return BY_64.tile


TOKENS = TokenRows(threads=4, vector=2)


@dataclasses.dataclass(frozen=True)
class FlashStatic:
    """Compile-time constants of the kernel.

    Attributes:
      key_dim, value_dim: widths Dk and Dv of a key and of a value.
      tile_keys: keys of a tile.
      stages: slots of the ring of K, and of the ring of V.
      consumers: number of consumer warpgroups.
      copies: number of TMA copies for a tile of K, and for a tile of V. They count as a single barrier arrival.
      score_scale: factor of q kᵀ.
      tile_rows: query rows of a consumer, M of its products.
      rows: register layout of arrays [tile_rows] with a value per query row.
      soft_cap: cap of the scores, or None.
      query_parts: number of query parts.
      block_heads: number of query heads that share a block (`BlockRows`).
      dequantizes: whether the producer converts an int8 or fp8 cache to float16.
      column_parts: number of consumers that share query rows. Each of them computes all scores of these rows, and a
        part of the columns of the output.
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
    column_parts: int = 1

    @property
    def row_groups(self) -> int:
        """Number of groups of `tile_rows` query rows of a block. A group belongs to `column_parts` consumers."""
        return self.consumers // self.column_parts

    @property
    def block_rows(self) -> int:
        return self.tile_rows * self.row_groups

    @property
    def query_copies(self) -> int:
        """Number of TMA copies of one query part for one consumer."""
        return 1 if self.block_heads == 1 else self.tile_rows // ALIGNMENT

    @property
    def rows_of_a_tile(self) -> int:
        """Number of query rows whose partial states are written and read in the time that a CTA takes for a tile."""
        multiply_adds = self.block_rows * self.tile_keys * (self.key_dim + self.value_dim)
        return max(1, int(BYTES_OF_A_TILE * multiply_adds) // (8 * self.value_dim))

    def most_tiles(self, most_keys: int, window: int | None) -> int:
        """Return the maximum number of tiles that a block sees, if a sequence has at most `most_keys` keys.

        Args:
          window: window of all heads [tokens], or None.
        """
        if window is not None:
            most_keys = min(most_keys, window + self.block_rows)
        return -(-most_keys // self.tile_keys)


class Rings(NamedTuple):
    """Queries, keys and values in shared memory, and their barriers (see the docstring of the module).

    Attributes:
      q: [row_groups · query_parts, tile_rows, Dk].
      k, v: [stages, tile_keys, Dk] and [stages, tile_keys, Dv].
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
          dtype: 16-bit dtype of Q, K and V in shared memory.
          readers: number of arrivals at k_empty and v_empty per phase.
          orders_tensor_core: whether the barriers at which no TMA copy arrives also order tensor-core operations, which
            Blackwell needs.
        """
        stages, keys, groups, parts = static.stages, static.tile_keys, static.row_groups, static.query_parts
        copies = 1 if static.dequantizes else arrivals(static.copies)
        signal = functools.partial(plgpu.Barrier, orders_tensor_core=orders_tensor_core)
        full = signal if static.dequantizes else plgpu.Barrier
        empty = signal(num_barriers=stages, num_arrivals=readers)
        return Rings(
            q=register_tiles.operand((groups * parts, static.tile_rows, static.key_dim), dtype),
            k=register_tiles.operand((stages, keys, static.key_dim), dtype),
            v=register_tiles.operand((stages, keys, static.value_dim), dtype),
            q_full=plgpu.Barrier(num_barriers=groups, num_arrivals=parts * arrivals(static.query_copies)),
            q_empty=signal(num_barriers=groups, num_arrivals=static.column_parts),
            k_full=full(num_barriers=stages, num_arrivals=copies),
            k_empty=empty,
            v_full=full(num_barriers=stages + 1, num_arrivals=copies),
            v_empty=empty,
        )


# --- rows of a block


def shared_heads(group: int, tile_rows: int) -> int:
    """Return the number of query heads that share a block (`BlockRows`).

    The result is the largest divisor of `group` for which a consumer has at least 8 queries of each head.

    Args:
      group: query heads per KV head.
      tile_rows: query rows of a consumer.
    """
    return max(heads for heads in range(1, tile_rows // ALIGNMENT + 1) if group % heads == 0)


class BlockRows(NamedTuple):
    """Query rows of the block of a work tile.

    `block_heads` heads of one KV head share a block. The query rows of a sequence are ordered in groups of 8: queries 0
    to 7 of the first head, queries 0 to 7 of the second head, and so on, then queries 8 to 15 of the first head. Each
    `block_rows` consecutive query rows in this order are a block. Two advantages follow: at most one block of a
    sequence is not full, and a tile is loaded once for all heads of a block. One TMA copy loads one group of 8 query
    rows.

    In the methods, `number` is the index of a group of `tile_rows` query rows of the block, which belongs to one
    consumer, or to `column_parts` consumers.

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
        """First query head of the block."""
        return self.work.head * self.heads

    @property
    def end_query(self) -> Any:
        """One past the last query of the block. The block may end after the last query of its sequence."""
        last_group = self.work.block.skipped_heads + self.static.block_rows // ALIGNMENT - 1
        return self.work.block.start + (lax.div(last_group, jnp.int32(self.heads)) + 1) * ALIGNMENT

    def filled(self, value: Any) -> jax.Array:
        """Return `value` for each row of a consumer, [tile_rows]."""
        return self.static.rows.filled(value, self.static.tile_rows)

    def queries(self, number: Any) -> jax.Array:
        """Return the index in [0, T) of each row's query, int32 [tile_rows]. It may be past the end of the sequence."""
        row, start = self.static.rows.iota(self.static.tile_rows), self.work.block.start
        if self.heads == 1:
            return start + (number * self.static.tile_rows + row)
        eight = lax.div(self._groups(number, row), jnp.int32(self.heads))
        return start + eight * ALIGNMENT + (row & (ALIGNMENT - 1))

    def _groups(self, number: Any, row: jax.Array) -> jax.Array:
        """Return the index of the group of 8 that contains each row of a consumer, int32 [tile_rows].

        Group 0 has the queries `start` to `start` + 7 of the first head. The groups before `skipped_heads` belong to
        the previous block.

        Args:
          row: int32 [tile_rows], index of each row.
        """
        return self._first_group(number) + lax.div(row, jnp.int32(ALIGNMENT))

    def _first_group(self, number: Any) -> Any:
        return self.work.block.skipped_heads + number * (self.static.tile_rows // ALIGNMENT)

    def first_query(self, number: Any) -> Any:
        """Return the first query of a consumer. Its other queries have larger indices, by less than `tile_rows`."""
        if self.heads == 1:
            return self.work.block.start + number * self.static.tile_rows
        return self.work.block.start + lax.div(self._first_group(number), jnp.int32(self.heads)) * ALIGNMENT

    def any_of(self, number: Any) -> Any:
        """Return whether a consumer has a query row of the block's sequence."""
        return self.first_query(number) < self.work.block.end_row

    def output_row(self, query: jax.Array, number: Any) -> jax.Array:
        """Return the index of each row of a consumer in the output [T · Hq, Dv], int32 [tile_rows].

        The index is -1 for query rows of another sequence. If keys are split, indices of split i start at i · T · Hq.

        Args:
          query: int32 [tile_rows], from `queries`.
        """
        block = self.work.block
        in_sequence = (query >= block.first_row) & (query < block.end_row)
        head = self.filled(self.first_head)
        if self.heads > 1:
            head += lax.rem(self._groups(number, self.static.rows.iota(self.static.tile_rows)), jnp.int32(self.heads))
        return jnp.where(in_sequence, self.work.output_row(query, self.num_tokens) * self.num_q_heads + head, -1)

    def sinks(self, sinks: Ref | None, output_row: jax.Array) -> jax.Array | None:
        """Return the sink logit of each row, float32 [tile_rows]; None if `sinks` is None.

        Args:
          sinks: float32 [Hq], or None.
          output_row: int32 [tile_rows], from the method `output_row`.
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
            tma_load_rows(q, start + number * self.static.tile_rows, self.first_head, tile, full)
        else:
            tma_load_row_groups(q, start, self.first_head, self.heads, self._first_group(number), tile, full)


# --- interfaces: operand loaders, and consumers of an architecture


@runtime_checkable
class OperandTile(Protocol):
    """Addresses, masks and scales of one work tile. An operation implements it."""

    @property
    def kv_tiles(self) -> Any:
        """Number of tiles of the work tile, at least 1."""

    def load(self, producer: Producer, again: Any, kv_tile: Any) -> None:
        """Copy queries, keys and values to the rings. Runs in the producer.

        Args:
          again: whether the CTA has processed a work tile before.
          kv_tile: number of the first tile of the work tile, counted over all work tiles of the CTA.
        """

    def attend(self, consumer: BlockConsumer, kv_tile: Any, result: Results) -> None:
        """Attend with the query rows of a consumer and store the result. Runs in each consumer. `kv_tile` is as in
        `load`.
        """


@runtime_checkable
class OperandLoader(Protocol):
    """Operand loading and masking of an operation. The operation implements it.

    Attributes:
      static: compile-time constants of the kernel.
      kernel_name: name of the kernel in profiles.
      num_heads: number of sets of heads that share a block.
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
        """Return the scratch types that only the loader uses, or None. `orders_tensor_core` is as in `Rings.types`."""

    def tile(self, x: Any, scratch: Any, work: FlashWorkTile) -> OperandTile:
        """Return the operands of a work tile.

        Args:
          x: operands of the kernel in global memory.
          scratch: scratch allocated from `scratch_types`.
          work: the work tile.
        """


@dataclasses.dataclass(frozen=True)
class PackedLoader:
    """Base class of `OperandLoader`s of packed queries [T, Hq, D].

    Attributes:
      static: compile-time constants of the kernel.
      num_tokens, num_q_heads: T and Hq.
      causal: whether a query sees no keys after its own position.
      window: number of newest keys that a query of every head sees, or None.
    """

    static: FlashStatic
    num_tokens: int
    num_q_heads: int
    causal: bool
    window: int | None

    @property
    def num_heads(self) -> int:
        """Number of sets of heads that share a block."""
        return self.num_q_heads // self.static.block_heads

    def rows(self, work: FlashWorkTile) -> BlockRows:
        """Return the query rows of the block of a work tile."""
        return BlockRows(self.static, work, self.num_tokens, self.num_q_heads)


@runtime_checkable
class BlockConsumer(Protocol):
    """A consumer warpgroup, which has `tile_rows` query rows of each block. The kernel of an architecture implements
    it.

    Attributes:
      number: index of the consumer's group of query rows.
    """

    @property
    def number(self) -> Any: ...

    def attend(self, begin: Any, kv_tiles: Any, transform: ScoreTransform, has_rows: Any) -> Any:
        """Attend to the tiles of a work tile. Return a state for `store`.

        Args:
          begin: number of the first tile, counted over all work tiles of the CTA.
          kv_tiles: number of tiles, at least 1.
          transform: mask and scales of the scores.
          has_rows: whether the consumer has query rows of the sequence. If not, the state is arbitrary.
        """

    def store(self, result: Results, row: jax.Array, state: Any, options: RowOptions) -> None:
        """Store the state from `attend`: output and LSE if the work tile has all keys of its block, else a partial
        state.

        Args:
          row: int32 [tile_rows], index of each query row in the result; negative for rows that are not stored.
        """


class ScoreTransform(NamedTuple):
    """Mask and scales of the scores of a work tile.

    Attributes:
      limits: limits(i) returns a pair for the i-th tile of the work tile: whether all query rows see all its keys, and
        a function that returns its `Limits`. The function is called only if some row does not see some key.
      key_scale: factor of q kᵀ, or None.
      token_scales: token_scales(i) returns float32 [3, tile_keys] in shared memory for the i-th tile: scale of each
        key, log2 of the scale of each value, and inverse of the scale of each value. None if scales are not per token.
      await_tile: await_tile(i) waits until the producer has written the data that `limits` and `token_scales` read for
        the i-th tile. None if waiting for the keys of the tile is sufficient.
    """

    limits: Callable[[Any], tuple[Any, Callable[[], Limits]]]
    key_scale: Any = None
    token_scales: Callable[[Any], Ref] | None = None
    await_tile: Callable[[Any], None] | None = None


class RowOptions(NamedTuple):
    """Options of `BlockConsumer.store`.

    Attributes:
      sink: sink logits [tile_rows], or None. They are not added to partial states; the merge kernel adds them.
      is_whole: whether the work tile has all keys of its block; None if the call never splits keys.
      scale: scale(o, first_column, layout) returns columns of the output multiplied by the scales of the values. `o`
        has the columns from `first_column` on, and `layout` is the layout of an array with a value per column. None if
        there are no scales, or if they were multiplied into the probabilities.
    """

    sink: Any = None
    is_whole: Any = None
    scale: Callable[[Any, int, Any], Any] | None = None


# --- launch


class Results(NamedTuple):
    """Outputs of the kernel; arrays, or references to them.

    Attributes:
      finished: output and LSE of T · Hq query rows.
      partial: partial states of T · Hq query rows for each possible split, or None if the call never splits keys.
    """

    finished: OutputRows
    partial: RowState | None

    def store(self, is_whole: Any, finished: Callable[[OutputRows], None], partial: Callable[[RowState], None]) -> None:
        """Call `finished` with the finished rows if the work tile has all keys of its block, else call `partial` with
        the partial states.

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
      body: body(loader, operands, work_tiles, result, scratch, loader_scratch) is the kernel body. Each warpgroup calls
        work_tiles() to get its `WorkTiles`.
      scratch: scratch types of the kernel.
      warpgroups: number of warpgroups.
      queue_slots: number of slots of `TileQueue`.
      orders_tensor_core: see `Rings.types`.
    """

    body: Callable[..., None]
    scratch: Any
    warpgroups: int
    queue_slots: int = 2
    orders_tensor_core: bool = False


def list_work(
    loader: PackedLoader, lengths: SequenceLengths, most_keys: int, l2_head_group: int
) -> tuple[KvSplits, WorkList]:
    """List the blocks of query rows of packed sequences, and bound the number of splits of their keys.

    Args:
      most_keys: upper bound of the keys of a sequence.
      l2_head_group: see `list_blocks`.
    """
    static = loader.static
    blocking = Blocking(loader.num_tokens, static.block_rows, static.tile_keys, loader.causal, static.block_heads)
    splits = KvSplits.of(
        heads=loader.num_heads,
        num_blocks=blocking.num_blocks(lengths),
        most_tiles=static.most_tiles(most_keys, loader.window),
        rows=loader.num_tokens * loader.num_q_heads,
        rows_of_a_tile=static.rows_of_a_tile,
    )
    return splits, list_blocks(blocking, lengths, splits, l2_head_group)


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
    """Run the attention kernel, then the merge kernel if the call may split keys.

    Args:
      kernel: kernel of the architecture.
      loader: operand loader of the operation.
      inputs: operands of the loader: a structure with the fields `q`, `sinks`, `blocks` and `counts`, among others. The
        latter two are fields of `work`.
      work: result of `list_blocks`.
      splits: bounds of the number of splits, as passed to `list_blocks`.
      shape: T and Hq.
      sinks: sink logits [Hq], or None.
      out_dtype: dtype of the output.
      return_lse: whether to store the LSE. Without it the kernel is faster, because a store of a single number per row
        uses memory bandwidth badly.

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
    """Raise NotImplementedError if the scratch of a CTA exceeds the shared memory of a multiprocessor."""
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
    """The producer warpgroup, which fills the rings.

    In the methods, `kv_tile` is the number of a tile, counted over all work tiles of the CTA.
    """

    static: FlashStatic
    rings: Rings

    def load_keys(self, kv_tile: Any, copy: Callable[[Ref, Ref], None]) -> None:
        """Load a tile of keys into its slot, after the readers have emptied the slot.

        Args:
          copy: copy(slot, barrier) starts the TMA copies to the slot.
        """
        slot = ring_slot(kv_tile, self.static.stages)
        wait_if(kv_tile >= self.static.stages, self.rings.k_empty.at[slot])
        copy(self.rings.k.at[slot], self.rings.k_full.at[slot])

    def load_values(
        self, kv_tile: Any, copy: Callable[[Ref, Ref], None], whole: Any, live_mask: Callable[[jax.Array], jax.Array]
    ) -> None:
        """Load a tile of values into its slot, and zero the values that no query of the block sees.

        Such values may be NaN, and a probability of 0 times NaN is NaN.

        Args:
          copy: copy(slot, barrier) starts the TMA copies to the slot.
          whole: whether the tile has no such values.
          live_mask: live_mask(tokens) returns bool [n]: whether some query of the block may see each token. `tokens` is
            int32 [n], indices in the tile.
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
        """Load the queries of a block, now or later.

        The queries of the first block of a CTA are copied at once. Q has a single buffer, which the readers empty later
        than slots of K and V. The queries of a later block are therefore copied after the first tiles of K and V, by
        the returned function.

        Args:
          again: whether the CTA has processed a work tile before.
          copy: copy(consumer, barrier) starts the TMA copies of the queries of a consumer.

        Returns:
          load(i). Call it for each tile i of the work tile, after the copies of its values are started.
        """

        def load(*, await_empty: bool) -> None:
            for consumer in range(self.static.row_groups):
                if await_empty:
                    plgpu.barrier_wait(self.rings.q_empty.at[consumer])
                copy(consumer, self.rings.q_full.at[consumer])

        pl.when(~again)(lambda: load(await_empty=False))
        return lambda i: pl.when(again & (i == 0))(lambda: load(await_empty=True))

    def drain(self, kv_tiles: Any, any_work: Any) -> None:
        """Wait at the end of the kernel until the readers have emptied all slots, so that no barrier phase is left.

        Args:
          kv_tiles: number of tiles that the CTA has loaded.
          any_work: whether the CTA has processed a work tile.
        """

        def wait(i: Any, _: None) -> None:
            slot = ring_slot(kv_tiles - 1 - i, self.static.stages)
            plgpu.barrier_wait(self.rings.k_empty.at[slot])
            plgpu.barrier_wait(self.rings.v_empty.at[slot])

        lax.fori_loop(0, jnp.minimum(kv_tiles, self.static.stages), wait, None)
        for consumer in range(self.static.row_groups):
            wait_if(any_work, self.rings.q_empty.at[consumer])


def produce(loader: OperandLoader, x: Any, work_tiles: WorkTiles, rings: Rings, loader_scratch: Any) -> None:
    """Run the producer warpgroup: load the operands of all work tiles of the CTA."""
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
    """Run a consumer warpgroup: attend with its query rows of all work tiles of the CTA."""

    def attend(_: Any, kv_tile: Any, work: FlashWorkTile) -> Any:
        tile = loader.tile(x, loader_scratch, work)
        tile.attend(consumer, kv_tile, result)
        return tile.kv_tiles

    work_tiles.consume(attend)
