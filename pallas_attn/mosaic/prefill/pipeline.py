"""The prefill kernel as far as it is the same on every architecture: launch, rings, producer, and what front ends are.

A kernel has one warpgroup that copies (`Producer`), some that compute, its consumers, and where the tensor core works
by itself one that starts its products. All go through the same work tiles (`flash.schedule`). The producer fills rings
of `stages` slots with tiles of keys and values. In each operation an `OperandLoader`
turns a work tile into a `OperandTile`, which knows where the queries, keys and values are and what each row sees.

Barriers of the rings:

    barrier                    arrivals           who waits
    q_full[consumer]         the copies         before the first product of a consumer's rows of a block
    q_empty[consumer]           their reader       producer, before the queries of its next block go to the same buffer
    k_full[slot]             the copies         before S
    k_empty[slot]               readers            producer, before it fills the slot again
    v_full, v_empty           as for keys        as for keys
    v_full[-1]               the copies         producer, where masked values are to be zeroed before they count
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
    """Rows of tiles of keys or values, in the registers of the producer."""

    @property
    def tile(self) -> Any:
        return BY_64.tile


TOKENS = TokenRows(threads=4, vector=2)


@dataclasses.dataclass(frozen=True)
class FlashStatic:
    """Compile-time facts of the kernel, beside dtypes and the front end.

    Attributes:
      tile_keys: keys of a tile.
      stages: tiles of keys, and as many of values, in shared memory.
      copies: number of copies that bring a tile of keys, or one of values, started together.
      score_scale: multiplies q kᵀ.
      tile_rows: query rows of a consumer, M of a product.
      rows: layout of a consumer's rows in registers.
      query_parts: 16-bit numbers whose sum a query is.
      block_heads: heads of a group that share blocks (`BlockRows`).
      dequantizes: whether keys and values come as 8 bits, of which the producer makes 16.
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
        """Number of copies that bring a term of a consumer's queries, started together."""
        return 1 if self.block_heads == 1 else self.tile_rows // ALIGNMENT

    @property
    def rows_of_a_tile(self) -> int:
        """Rows whose partial states are written and read in the time of a tile of keys."""
        multiply_adds = self.block_rows * self.tile_keys * (self.key_dim + self.value_dim)
        return max(1, int(BYTES_OF_A_TILE * multiply_adds) // (8 * self.value_dim))

    def most_tiles(self, most_keys: int, window: int | None) -> int:
        """Most tiles that a block sees of a sequence that can have so many keys."""
        if window is not None:
            most_keys = min(most_keys, window + self.block_rows)
        return -(-most_keys // self.tile_keys)


class Rings(NamedTuple):
    """Queries, keys and values in shared memory, and their barriers; the module's docstring lists those.

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
        """Scratch types.

        Args:
          readers: arrivals that free a slot of keys or values.
          orders_tensor_core: of barriers that no copy arrives at.
        """
        stages, keys, consumers, terms = static.stages, static.tile_keys, static.consumers, static.query_parts
        copies = 1 if static.dequantizes else arrivals(static.copies)
        signal = functools.partial(plgpu.Barrier, orders_tensor_core=orders_tensor_core)
        full = signal if static.dequantizes else plgpu.Barrier
        empty = signal(num_barriers=stages, num_arrivals=readers)
        return Rings(
            q=register_tiles.operand((consumers * terms, static.tile_rows, static.key_dim), dtype),
            k=register_tiles.operand((stages, keys, static.key_dim), dtype),
            v=register_tiles.operand((stages, keys, static.value_dim), dtype),
            q_full=plgpu.Barrier(num_barriers=consumers, num_arrivals=terms * arrivals(static.query_copies)),
            q_empty=signal(num_barriers=consumers),
            k_full=full(num_barriers=stages, num_arrivals=copies),
            k_empty=empty,
            v_full=full(num_barriers=stages + 1, num_arrivals=copies),
            v_empty=empty,
        )


# --- rows of a block


def shared_heads(group: int, tile_rows: int) -> int:
    """Number of heads, of the `group` of a KV head, that share blocks: as many as divide the group and leave room for 8
    queries of each in a consumer's `tile_rows` rows.
    """
    return max(heads for heads in range(1, tile_rows // ALIGNMENT + 1) if group % heads == 0)


class BlockRows(NamedTuple):
    """Rows of a work tile's block.

    The rows of a sequence that heads share are those of 8 neighbouring queries of the first head, the same 8 queries of
    the next, and after the last head the next 8 queries. Blocks are cut from these rows wherever they are full, so a
    sequence has one block at most that is not, and keys are read once for all heads in a block. Each group of 8 rows is
    brought by a copy of its own from where the queries lie.

    Attributes:
      work: the work tile, whose `head` counts sets of heads that share blocks.
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
        """The first of the heads that share blocks."""
        return self.work.head * self.heads

    @property
    def end_query(self) -> Any:
        """One past the last query that the block has rows of, which may be of the next sequence."""
        last_group = self.work.block.skipped_heads + self.static.block_rows // ALIGNMENT - 1
        return self.work.block.start + (lax.div(last_group, jnp.int32(self.heads)) + 1) * ALIGNMENT

    def filled(self, value: Any) -> jax.Array:
        """[tile_rows]: one value for each row of a consumer."""
        return self.static.rows.filled(value, self.static.tile_rows)

    def queries(self, number: Any) -> jax.Array:
        """[tile_rows]: the query that each row of consumer `number` is of."""
        row, start = self.static.rows.iota(self.static.tile_rows), self.work.block.start
        if self.heads == 1:
            return start + (number * self.static.tile_rows + row)
        eight = lax.div(self._groups(number, row), jnp.int32(self.heads))
        return start + eight * ALIGNMENT + (row & (ALIGNMENT - 1))

    def _groups(self, number: Any, row: jax.Array) -> jax.Array:
        """[tile_rows]: the group of 8 rows of each row of a consumer, counted from that of the first head at the
        block's first query.
        """
        return self._first_group(number) + lax.div(row, jnp.int32(ALIGNMENT))

    def _first_group(self, number: Any) -> Any:
        return self.work.block.skipped_heads + number * (self.static.tile_rows // ALIGNMENT)

    def first_query(self, number: Any) -> Any:
        """The first query that a consumer has rows of; no other is `tile_rows` after it or more."""
        if self.heads == 1:
            return self.work.block.start + number * self.static.tile_rows
        return self.work.block.start + lax.div(self._first_group(number), jnp.int32(self.heads)) * ALIGNMENT

    def any_of(self, number: Any) -> Any:
        """Whether a consumer has rows of the block's sequence."""
        return self.first_query(number) < self.work.block.end_row

    def output_row(self, query: jax.Array, number: Any) -> jax.Array:
        """[tile_rows]: row of the output [T · Hq, Dv] for each row of a consumer, given its query; -1 for none."""
        block = self.work.block
        ours = (query >= block.first_row) & (query < block.end_row)
        head = self.filled(self.first_head)
        if self.heads > 1:
            head += lax.rem(self._groups(number, self.static.rows.iota(self.static.tile_rows)), jnp.int32(self.heads))
        return jnp.where(ours, self.work.output_row(query, self.num_tokens) * self.num_q_heads + head, -1)

    def sinks(self, sinks: Ref | None, output_row: jax.Array) -> jax.Array | None:
        """[tile_rows]: learned logits [Hq] of the heads of such rows of the output."""
        if sinks is None:
            return None
        if self.heads == 1:
            return self.filled(sinks[self.first_head])
        head = lax.rem(jnp.maximum(output_row, 0), jnp.int32(self.num_q_heads))
        return self.static.rows.take(sinks, head)

    def copy(self, q: Ref, number: int, tile: Ref, full: Ref) -> None:
        """Start the copies of the queries of consumer `number`.

        Args:
          q: [T, Hq, Dk] in global memory, of `zero_rows_past_end`.
          tile: `tiles.operand` [tile_rows, Dk].
          full: barrier, with `arrivals(static.query_copies)` for these copies.
        """
        start = self.work.block.start
        if self.heads == 1:
            copy_rows(q, start + number * self.static.tile_rows, self.first_head, tile, full)
        else:
            copy_row_groups(q, start, self.first_head, self.heads, self._first_group(number), tile, full)


# --- front ends


@runtime_checkable
class OperandTile(Protocol):
    """A work tile as an operation sees it."""

    @property
    def kv_tiles(self) -> Any:
        """Number of tiles of keys, at least 1."""

    def load(self, producer: Producer, again: Any, kv_tile: Any) -> None:
        """Brings the queries, and the keys and values to the rings from tile number `kv_tile` on.

        Args:
          again: whether the program had a work tile before.
        """

    def attend(self, consumer: BlockConsumer, kv_tile: Any, result: Results) -> None:
        """Attention of a consumer's rows over the tiles of the rings from number `kv_tile` on, written to `result`."""


@runtime_checkable
class OperandLoader(Protocol):
    """Part of the kernel that is an operation's own.

    Attributes:
      static: compile-time facts of the kernel.
      kernel_name: shown by profilers.
      num_heads: heads, or groups of heads that share a block, that blocks are done for.
      compiler_params: of the kernel.
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
        """Shared memory and barriers of its own, as `Rings.types`; None for none."""

    def tile(self, x: Any, scratch: Any, work: FlashWorkTile) -> OperandTile:
        """Turn a work tile into the operation's, given references to the operands and to its own scratch."""


@runtime_checkable
class BlockConsumer(Protocol):
    """Attention of some of a block's rows.

    Attributes:
      number: index among the consumers.
    """

    @property
    def number(self) -> Any: ...

    def attend(self, begin: Any, kv_tiles: Any, transform: ScoreTransform, has_rows: Any) -> Any:
        """Attention over some tiles, at least one, from the program's tile number `begin` on.

        Args:
          has_rows: whether the consumer has rows of the block's sequence; what is returned is arbitrary if not.
        """

    def store(self, result: Results, row: jax.Array, state: Any, options: RowOptions) -> None:
        """Write what `attend` returned to rows `row` of the result where that is not negative: finished, or as it is to
        be merged.
        """


class ScoreTransform(NamedTuple):
    """Mask and scales for the scores of a block's i-th tile.

    Attributes:
      limits: limits(i) tells whether every row sees all of a tile, and has a function that makes the `Limits` if not.
      key_scale: multiplies q kᵀ, or None.
      token_scales: token_scales(i) is [3, tile_keys] in shared memory, for each token the scale of its key, and log2
        and inverse of the scale of its value; or None.
      await_tile: await_tile(i) waits for what the producer published of a tile; None where its keys tell.
    """

    limits: Callable[[Any], tuple[Any, Callable[[], Limits]]]
    key_scale: Any = None
    token_scales: Callable[[Any], Ref] | None = None
    await_tile: Callable[[Any], None] | None = None


class RowOptions(NamedTuple):
    """Treatment of finished rows.

    Attributes:
      sink: [rows] learned logits, or None; of rows that are merged they enter after that.
      is_whole: whether rows are finished, and not to be merged; None where keys are never cut.
      scale: scale(o, first column, layout of a value for each column) multiplies sums of values as cached; or None.
    """

    sink: Any = None
    is_whole: Any = None
    scale: Callable[[Any, int, Any], Any] | None = None


# --- launch


class Results(NamedTuple):
    """Output of the kernel: finished rows where keys are not cut, else partial states; arrays or references.

    Attributes:
      finished: of n rows.
      partial: of n rows for each split that there is room for; None where keys are never cut.
    """

    finished: OutputRows
    partial: RowState | None

    def store(self, is_whole: Any, finished: Callable[[OutputRows], None], partial: Callable[[RowState], None]) -> None:
        """Call one of two functions that write rows.

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
      body: body(front end, operands, work tiles, result, scratch, scratch of the front end), where calling work_tiles()
        gives the `WorkTiles`.
      scratch: scratch types of its own.
      warpgroups: number of them.
      queue_slots: see `TileQueue`.
      orders_tensor_core: of barriers that no copy arrives at.
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
    """Output of `shape` [T, Hq] queries, and their LSE, or None if it is not to be returned: single numbers in memory
    take longer to write than their bytes tell.

    Args:
      inputs: operands of the front end; `q` is among them, and `blocks` and `counts` of the work list.
      sinks: learned logits, which are among the inputs, too.
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
    """Raises NotImplementedError if a multiprocessor has too little shared memory for a program."""
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
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


# --- the producer


@dataclasses.dataclass(frozen=True)
class Producer:
    """Fills the rings. Tiles are counted from a program's first to its last, over all of its work tiles."""

    static: FlashStatic
    rings: Rings

    def load_keys(self, kv_tile: Any, copy: Callable[[Ref, Ref], None]) -> None:
        """Brings a tile of keys; copy(slot, barrier) starts its copies."""
        slot = ring_slot(kv_tile, self.static.stages)
        wait_if(kv_tile >= self.static.stages, self.rings.k_empty.at[slot])
        copy(self.rings.k.at[slot], self.rings.k_full.at[slot])

    def load_values(
        self, kv_tile: Any, copy: Callable[[Ref, Ref], None], whole: Any, live_mask: Callable[[jax.Array], jax.Array]
    ) -> None:
        """Brings a tile of values. Unless `whole`, rows outside live_mask(row numbers) are zeroed: they may hold NaN,
        which a probability of 0 would not keep out of the output.
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
        """Starts the copies of a block's queries: at once for the program's first block. Later ones go where the
        queries before them are, which are needed longer than the slots that the block's first tiles of keys go to.

        Args:
          copy: copy(consumer, barrier) starts those of a consumer's queries.

        Returns:
          a function to be called after the copies of each tile of values, with the tile's number in the block.
        """

        def load(*, await_empty: bool) -> None:
            for consumer in range(self.static.consumers):
                if await_empty:
                    plgpu.barrier_wait(self.rings.q_empty.at[consumer])
                copy(consumer, self.rings.q_full.at[consumer])

        pl.when(~again)(lambda: load(await_empty=False))
        return lambda i: pl.when(again & (i == 0))(lambda: load(await_empty=True))

    def drain(self, kv_tiles: Any, any_work: Any) -> None:
        """Waits for the last phases of all barriers, after this number of tiles."""

        def wait(i: Any, _: None) -> None:
            slot = ring_slot(kv_tiles - 1 - i, self.static.stages)
            plgpu.barrier_wait(self.rings.k_empty.at[slot])
            plgpu.barrier_wait(self.rings.v_empty.at[slot])

        lax.fori_loop(0, jnp.minimum(kv_tiles, self.static.stages), wait, None)
        for consumer in range(self.static.consumers):
            wait_if(any_work, self.rings.q_empty.at[consumer])


def produce(loader: OperandLoader, x: Any, work_tiles: WorkTiles, rings: Rings, loader_scratch: Any) -> None:
    """Loads all of a program's work tiles."""
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
    """Attends to a consumer's rows of all of a program's work tiles."""

    def attend(_: Any, kv_tile: Any, work: FlashWorkTile) -> Any:
        tile = loader.tile(x, loader_scratch, work)
        tile.attend(consumer, kv_tile, result)
        return tile.kv_tiles

    work_tiles.consume(attend)
