"""Scheduling of the prefill kernel: blocks of queries are listed on the device, and programs fetch them from a queue.

A sequence's queries are cut into blocks of neighbouring ones; rows after the last sequence and before the first are two
segments more, which see no keys. A work tile is a block for one head (or for a few heads that share blocks), against
all keys that the block sees or against one of several splits of them (`flash.split`).

1. `list_blocks`, a short kernel before attention, lists the blocks, those that see the most tiles of keys first: the
   last ones to run are short, and those that run at a time find their keys and values in the L2 cache. XLA would start
   up to eight kernels for that. This one gives a thread to each segment, and then to each block:

       segments   number of blocks    -> where the blocks of each end (prefix sums)
       blocks     segment, tiles      -> sort key
       blocks     rank of sort key    -> row of the list
       heads      longest block, sum  -> number that take turns
       splits     time that they take -> number of splits, where keys may be cut

   Calls with the same lengths, such as the layers of a step make, share one list: it is traced once for all of them,
   so that XLA finds the same kernel given the same arrays.

2. In the prefill kernel there is a program for each multiprocessor. `WorkTiles` numbers the work tiles, and each
   program takes them from a `TileQueue` until none is left.
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
from jaxlib.mlir.dialects import arith, llvm, memref
from jaxtyping import Array, Int32

from pallas_attn.mosaic.prefill.config import ALIGNMENT
from pallas_attn.mosaic.prefill.split import WORK_TILE_OVERHEAD, KvSplits
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import Ref, interpreted
from pallas_attn.mosaic.primitives.block_scan import (
    COMPARED,
    MOST_WARPGROUPS,
    PER_THREAD,
    Lanes,
    exclusive_sum,
    segment_of,
)
from pallas_attn.mosaic.primitives.row_io import THREADS
from pallas_attn.portable.schedule import order_key, ratio
from pallas_attn.types import HeadWindow

MOST_LISTED = 48 * 1024
"""Largest number of sequences and blocks together: 4 bytes of shared memory for each."""


class QueryBlock(NamedTuple):
    """A row of the list: neighbouring queries of one sequence, and the keys of that sequence.

    Attributes:
      sequence: index of the sequence; the last one for rows of none.
      start: first query of the block, a multiple of 8.
      skipped_heads: of the heads that share blocks, those whose 8 queries from `start` on end the block before.
      first_row, end_row: rows of the sequence.
      first_key, end_key: keys of the sequence; none for rows of no sequence.
      kv_tiles: tiles of keys that the block sees at most, counted from the row where copies of `first_key` begin; at
        least 1.
    """

    sequence: Any
    start: Any
    skipped_heads: Any
    first_row: Any
    end_row: Any
    first_key: Any
    end_key: Any
    kv_tiles: Any


class FlashWorkTile(NamedTuple):
    """A block for one head, against all keys that it sees or one split of them.

    Attributes:
      head: index among the heads, or groups of heads, that blocks are done for.
      split, num_splits: which split of the keys, of how many; None if keys are not cut.
    """

    block: QueryBlock
    head: Any
    split: Any = None
    num_splits: Any = None

    def kv_range(self, kv_tiles: Any) -> tuple[Any, Any]:
        """First one and number of the tiles of keys that are this work tile's, out of all that its block sees.

        The number is at least 1: a split without a tile gets the one after the last, of which nothing is seen.
        """
        if self.num_splits is None:
            return 0, kv_tiles
        first, end = (lax.div(kv_tiles * split, self.num_splits) for split in (self.split, self.split + 1))
        return jnp.where(first < end, first, kv_tiles), jnp.maximum(end - first, 1)

    @property
    def is_whole(self) -> Any:
        """Whether the work tile has all keys of its block; None where keys are never cut."""
        return None if self.num_splits is None else self.num_splits == 1

    def output_row(self, row: Any, num_rows: int) -> Any:
        """Row of the output for a query row: the outputs of all splits, `num_rows` each, follow one another."""
        return row if self.split is None else self.split * num_rows + row


# --- before the prefill kernel: the list of blocks


class SequenceLengths(NamedTuple):
    """Lengths of the sequences, as the operation is given them.

    Attributes:
      cu_q_lens: int32 [S + 1].
      cu_kv_lens: int32 [S + 1] for packed keys, or None and
      kv_lens: int32 [S] for keys in pages.
      window: windows of the heads, which limit what a block sees where keys may be cut; or None.
    """

    cu_q_lens: Any
    cu_kv_lens: Any = None
    kv_lens: Any = None
    window: HeadWindow | None = None

    @property
    def sequences(self) -> int:
        return self.cu_q_lens.shape[0] - 1

    @property
    def segments(self) -> int:
        """Number of the sequences, the rows after the last one, and the rows before the first."""
        return self.sequences + 2


@dataclasses.dataclass(frozen=True)
class Blocking:
    """Sizes of the blocks that queries are cut into.

    Attributes:
      num_rows: number of query rows of a head.
      block_rows: rows of a block, a multiple of 8.
      tile_keys: keys of a tile.
      causal: whether the keys of a block end with its last query's.
      heads: heads that share blocks (`flash.pipeline.BlockRows`), at most as many as a block has groups of 8 rows.
    """

    num_rows: int
    block_rows: int
    tile_keys: int
    causal: bool
    heads: int = 1

    @property
    def groups(self) -> int:
        """Groups of 8 rows of a block."""
        return self.block_rows // ALIGNMENT

    def num_blocks(self, lengths: SequenceLengths) -> tuple[int, int]:
        """The least and the largest number of blocks, whatever the lengths. Rows of no sequence may need blocks
        of their own, and up to 7 rows before a sequence's first and after its last are part of its groups of 8.
        """
        segments = lengths.segments
        most = (self.num_rows + 2 * (ALIGNMENT - 1) * segments) * self.heads // self.block_rows + segments
        return pl.cdiv(self.num_rows * self.heads, self.block_rows), min(self.num_rows, most)


class WorkList(NamedTuple):
    """The listed blocks; arrays, or in a kernel references to them.

    Attributes:
      blocks: int32 [most, fields of a `QueryBlock`]; the first `counts[0]` rows are set.
      counts: int32 [2 or 3], the number of blocks, of the heads that take turns (`WorkTiles`) and, where keys may be
        cut, of splits of each block.
      zero: int32 [1], for a `TileQueue`.
    """

    blocks: Any
    counts: Any
    zero: Any


class ListScratch(NamedTuple):
    """Shared memory of the listing kernel.

    Attributes:
      ends: int32, number of blocks up to the end of each segment; entries after the last segment repeat its.
      sort_keys: float32, by which blocks are put in order.
      lanes: the threads.
    """

    ends: Any
    sort_keys: Any
    lanes: Any


def list_blocks(blocking: Blocking, lengths: SequenceLengths, splits: KvSplits, l2_head_group: int = 1) -> WorkList:
    """All blocks, those of the most tiles of keys first, and how many there are.

    Args:
      l2_head_group: heads whose keys and values are meant to be in the L2 cache at a time, a divisor of `splits.heads`.

    Raises:
      NotImplementedError: there can be too many.
    """
    _, most = blocking.num_blocks(lengths)
    if lengths.sequences + most > MOST_LISTED:
        raise NotImplementedError(
            f"takes at most {MOST_LISTED} sequences and blocks of {blocking.block_rows} rows together, got "
            f"{lengths.sequences} sequences of {blocking.num_rows} rows, which may have {most} blocks"
        )
    lengths = lengths if splits.most > 1 else lengths._replace(window=None)
    return _listed(blocking, splits, l2_head_group, lengths)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _listed(blocking: Blocking, splits: KvSplits, l2_head_group: int, lengths: SequenceLengths) -> WorkList:
    segments, (_, most) = lengths.segments, blocking.num_blocks(lengths)
    warpgroups = min(MOST_WARPGROUPS, pl.cdiv(max(segments, most, splits.most), THREADS))
    chunk = warpgroups * THREADS
    scratch = ListScratch(
        ends=plgpu.SMEM((pl.cdiv(segments, chunk) * chunk,), jnp.int32),
        sort_keys=plgpu.SMEM((pl.cdiv(most, COMPARED) * COMPARED,), jnp.float32),
        lanes=Lanes.types(warpgroups),
    )
    (listed,) = plgpu.kernel(
        functools.partial(_list_kernel, blocking, splits, l2_head_group),
        out_type=(
            WorkList(
                jax.ShapeDtypeStruct((most * len(QueryBlock._fields),), jnp.int32),
                jax.ShapeDtypeStruct((2 if splits.most == 1 else 3,), jnp.int32),
                jax.ShapeDtypeStruct((1,), jnp.int32),
            ),
        ),
        scratch_types=(scratch,),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=basics.lane_semantics()),
        kernel_name="list_blocks",
    )(basics.materialize(lengths))
    return listed._replace(blocks=listed.blocks.reshape(most, -1))


def _list_kernel(
    blocking: Blocking,
    splits: KvSplits,
    l2_head_group: int,
    x: SequenceLengths,
    listed: WorkList,
    scratch: ListScratch,
) -> None:
    lanes, (_, most), zeros = scratch.lanes, blocking.num_blocks(x), PER_THREAD.filled(jnp.int32(0), THREADS)
    count = lanes.each_chunk(x.segments, functools.partial(_count_blocks, blocking, x, scratch), zeros)
    lane = lanes.number()
    first = _describe(blocking, x, scratch, lane, count)

    def describe(number: Any) -> tuple[QueryBlock, Any]:
        return first if most <= lanes.threads else _describe(blocking, x, scratch, number, count)

    def store_sort_keys(number: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
        most_tiles, cost = before
        block, sort_key = describe(number)
        PER_THREAD.put(scratch.sort_keys, jnp.where(number < scratch.sort_keys.shape[0], number, -1), sort_key)
        kv_tiles = jnp.where(number < count, block.kv_tiles, 0)
        # Below 2**31 for all blocks together, whatever the lengths are.
        cost += jnp.where(number < count, jnp.minimum(kv_tiles + WORK_TILE_OVERHEAD, (1 << 31) // (most + 1)), 0)
        return jnp.maximum(most_tiles, kv_tiles), cost

    def write(number: Any, _: None) -> None:
        block, sort_key = describe(number)
        rank = lanes.count_larger(scratch.sort_keys, sort_key)
        for i, field in enumerate(block):
            PER_THREAD.put(listed.blocks, jnp.where(number < count, rank * len(block) + i, -1), field)

    most_tiles, cost = lanes.each_chunk(scratch.sort_keys.shape[0], store_sort_keys, (zeros, zeros))
    lanes.barrier()
    lanes.each_chunk(most, write)
    PER_THREAD.put(listed.zero, jnp.where(lane == 0, 0, -1), zeros)
    PER_THREAD.put(listed.counts, jnp.where(lane == 0, 0, -1), count)
    by_turns = l2_head_group < splits.heads
    longest = lanes.max(most_tiles) if by_turns or splits.most > 1 else None
    heads = PER_THREAD.filled(jnp.int32(splits.heads), THREADS)
    if by_turns:
        heads = _heads_in_turn(splits, l2_head_group, count, longest, lanes.sum(cost))
        # Blocks of as many sequences share no keys, and heads of one lie side by side in memory.
        heads = jnp.where(count <= x.sequences, jnp.int32(splits.heads), heads)
    PER_THREAD.put(listed.counts, jnp.where(lane == 0, 1, -1), heads)
    if splits.most > 1:
        num_splits = splits.choose(lanes, count, _limit_by_windows(blocking, x, lanes, longest))
        PER_THREAD.put(listed.counts, jnp.where(lane == 0, 2, -1), PER_THREAD.filled(num_splits, THREADS))


MOST_TAIL = 1 / 32
"""Part of a call's time for which programs may have nothing to do at its end."""


def _heads_in_turn(splits: KvSplits, l2_head_group: int, count: jax.Array, longest: Any, cost: Any) -> jax.Array:
    """Number of heads that take turns on all blocks before the next ones do, for each thread: `l2_head_group`, or more
    if the longest block of the last ones would end long after everything else.

    That happens where a call's lengths differ much, and few heads share its time: 200 new tokens after 9,000 beside
    prompts, with heads one by one, take a half longer. Where no block is twice as long as they are on average, no order
    fills the end.

    Args:
      count: number of blocks of a head.
      longest: most tiles of keys of a block.
      cost: of the blocks of a head, in tiles of keys.
    """
    mean = cost.astype(jnp.float32) * (1 / splits.num_ctas)  # of a program, for one head
    end = (longest + WORK_TILE_OVERHEAD).astype(jnp.float32)
    chosen: Any = jnp.int32(splits.heads)
    for heads in reversed(range(l2_head_group, splits.heads, l2_head_group)):
        if splits.heads % heads == 0:
            chosen = jnp.where(end - heads * mean <= MOST_TAIL * splits.heads * mean, jnp.int32(heads), chosen)
    differ = count.astype(jnp.float32) * end > 2.0 * cost.astype(jnp.float32)
    return jnp.where(differ, chosen, jnp.int32(l2_head_group))


def _count_blocks(blocking: Blocking, x: SequenceLengths, scratch: ListScratch, segment: Any, before: Any) -> Any:
    """Writes where the blocks of each segment end, on top of the number `before`; returns that of all so far."""
    first_row, end_row = _query_rows(blocking, x, jnp.minimum(segment, x.segments - 1))
    eights = ratio(end_row - _align_each_down(first_row) + (ALIGNMENT - 1), ALIGNMENT)
    blocks = ratio(eights * blocking.heads + (blocking.groups - 1), blocking.groups)
    blocks = jnp.where((segment < x.segments) & (end_row > first_row), blocks, 0)
    return scratch.lanes.append(scratch.ends, segment, blocks, before)


def _describe(
    blocking: Blocking, x: SequenceLengths, scratch: ListScratch, number: Any, count: Any
) -> tuple[QueryBlock, Any]:
    """The blocks of these numbers and their sort keys, the largest first; -1 for numbers from `count` on, whose blocks
    are arbitrary.
    """
    segment = jnp.minimum(segment_of(scratch.ends, x.segments, number), x.segments - 1)
    first_row, end_row = _query_rows(blocking, x, segment)
    first_key, end_key = _key_rows(x, segment)
    group = (number - exclusive_sum(scratch.ends, segment)) * blocking.groups
    eight, skipped_heads = _divide_each(group, blocking.heads)
    end_eight = _divide_each(group + (blocking.groups - 1), blocking.heads)[0] + 1
    start, end = (_align_each_down(first_row) + ALIGNMENT * x for x in (eight, end_eight))
    seen = end_key - _align_each_down(first_key)
    if blocking.causal:
        seen -= jnp.maximum(end_row - end, 0)  # keys of the queries that follow the block's
    kv_tiles = ratio(jnp.maximum(seen, 1) + (blocking.tile_keys - 1), blocking.tile_keys)
    sequence = jnp.minimum(segment, x.sequences - 1)
    block = QueryBlock(sequence, start, skipped_heads, first_row, end_row, first_key, end_key, kv_tiles)
    sort_key = order_key(kv_tiles, number, 1 << blocking.num_blocks(x)[1].bit_length())
    return block, jnp.where(number < count, sort_key, -1).astype(jnp.float32)


def _query_rows(blocking: Blocking, x: SequenceLengths, segment: Any) -> tuple[Any, Any]:
    """First and end row of the queries of segments; S is what follows the last sequence, S + 1 what precedes the
    first.
    """
    last = x.sequences
    first_row = PER_THREAD.take(x.cu_q_lens, jnp.minimum(segment, last))
    end_row = PER_THREAD.take(x.cu_q_lens, jnp.where(segment < last, segment + 1, 0))
    end_row = jnp.where(segment == last, blocking.num_rows, end_row)
    return jnp.where(segment > last, 0, first_row), end_row


def _key_rows(x: SequenceLengths, segment: Any) -> tuple[Any, Any]:
    """First and end key of segments."""
    if x.cu_kv_lens is not None:
        first, next_one = (jnp.minimum(segment + i, x.sequences) for i in range(2))
        return PER_THREAD.take(x.cu_kv_lens, first), PER_THREAD.take(x.cu_kv_lens, next_one)
    kv_len = PER_THREAD.take(x.kv_lens, jnp.minimum(segment, x.sequences - 1))
    return PER_THREAD.filled(jnp.int32(0), THREADS), jnp.where(segment < x.sequences, kv_len, 0)


def _limit_by_windows(blocking: Blocking, x: SequenceLengths, lanes: Lanes, kv_tiles: Any) -> Any:
    """At most so many tiles of keys, and no more than the widest window of a head shows to a block."""
    if x.window is None:
        return kv_tiles
    window, sink_tokens = x.window.window, x.window.sink_tokens
    num_heads = window.shape[0]

    def widest(head: Any, most: Any) -> Any:
        real, head = head < num_heads, jnp.minimum(head, num_heads - 1)
        shown = (PER_THREAD.take(ref, head) for ref in (window, sink_tokens))
        keys = functools.reduce(jnp.add, (jnp.minimum(n, kv_tiles * blocking.tile_keys) for n in shown))
        return jnp.maximum(most, jnp.where(real, keys, 0))

    keys = lanes.max(lanes.each_chunk(num_heads, widest, PER_THREAD.filled(jnp.int32(0), THREADS)))
    return jnp.minimum(kv_tiles, pl.cdiv(keys + blocking.block_rows, blocking.tile_keys))


# --- in the prefill kernel: work tiles, one after the other


class WorkTiles(NamedTuple):
    """The work tiles of all programs, numbered so that those which share keys run at about the same time.

    A group of `l2_head_group` heads takes its turn on all blocks before the next group does; within it heads alternate.
    Where no two blocks of a head share keys all heads are one group.

    Attributes:
      blocks: int32 [n, fields of a `QueryBlock`] in global memory.
      num_blocks: number of them.
      num_splits: of the keys of each block, where they may be cut; else None.
      num_heads: heads, or groups of heads that share a block.
      l2_head_group: heads that take turns, whose keys and values are meant to be in the L2 cache at a time.
      queue: hands out numbers of work tiles; None if each program does the one of its own number.
    """

    blocks: Ref
    num_blocks: Any
    num_splits: Any
    num_heads: int
    l2_head_group: Any
    queue: TileQueue | None

    @staticmethod
    def of(blocks: Ref, counts: Ref, num_heads: int, queue: TileQueue | None) -> WorkTiles:
        num_splits = counts[2] if counts.shape[0] > 2 else None
        return WorkTiles(blocks, counts[0], num_splits, num_heads, counts[1], queue)

    def produce(self, work: Callable[[Any, Any, FlashWorkTile], Any]) -> tuple[Any, Any]:
        """Fetches work tiles, and calls work(whether one came before it, number of its first tile of keys, work tile)
        for each, which returns how many tiles of keys it took.

        Returns:
          the number of work tiles, and of tiles of keys.
        """
        return self._each(work, lambda queue, i, before: queue.fetch(i, before, self._fields_of))

    def consume(self, work: Callable[[Any, Any, FlashWorkTile], Any]) -> None:
        """`produce` in other warpgroups, for the work tiles that the producer has fetched."""
        self._each(work, lambda queue, i, _: queue.receive(i))

    def _each(self, work: Callable[..., Any], number_of: Callable[[TileQueue, Any, Any], Any]) -> tuple[Any, Any]:
        queue, work_tiles = self.queue, self._blocks_of_head * self.num_heads

        def number(i: Any, before: Any) -> Any:
            """Number of the program's i-th work tile; `before` is that of the one before it, if there is one."""
            if queue is not None:
                return number_of(queue, i, before)
            return lax.axis_index("cta") if before is None else work_tiles

        def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            i, work_tile, kv_tile = state
            described = self._work_tile(work_tile) if queue is None else self._stored(queue, i)
            kv_tile += work(i > 0, kv_tile, described)
            return i + 1, number(i + 1, work_tile), kv_tile

        first = (jnp.int32(0), number(jnp.int32(0), None), jnp.int32(0))
        i, _, kv_tiles = lax.while_loop(lambda state: state[1] < work_tiles, step, first)
        return i, kv_tiles

    @property
    def _blocks_of_head(self) -> Any:
        """Number of the blocks of a head, or of their splits."""
        return self.num_blocks if self.num_splits is None else self.num_blocks * self.num_splits

    def _work_tile(self, number: Any) -> FlashWorkTile:
        """The work tile of a number, from the list."""
        group, rest = divide(number, self._blocks_of_head * self.l2_head_group)
        row, head = divide(rest, self.l2_head_group)
        row, split = (row, None) if self.num_splits is None else divide(row, self.num_splits)
        block = QueryBlock(*(self.blocks[row, field] for field in range(self.blocks.shape[1])))
        return FlashWorkTile(block, group * self.l2_head_group + head, split, self.num_splits)

    def _fields_of(self, number: Any) -> list[Any]:
        """Fields of a work tile that the queue passes on; arbitrary beyond the last."""
        last = self._blocks_of_head * self.num_heads - 1
        tile = self._work_tile(jnp.minimum(number, last))
        return [*tile.block, tile.head, 0 if tile.split is None else tile.split]

    def _stored(self, queue: TileQueue, i: Any) -> FlashWorkTile:
        """The program's i-th work tile, as published."""
        *block, head, split = queue.fields(i)
        block = QueryBlock(*block)
        return FlashWorkTile(block, head, None if self.num_splits is None else split, self.num_splits)


class TileQueue(NamedTuple):
    """A counter in global memory that hands out the numbers of work tiles to programs as they become free.

    A program begins with the work tile of its own number. Its producer fetches the next number when the last copies for
    the current work tile are under way, so that no warpgroup waits for it. It looks up the work tile, which takes as
    long as global memory does, and passes it on to the others in shared memory. On Hopper that has two slots: one is
    overwritten when the queries of the work tile after it have been copied, which was no sooner than all consumers had
    begun with it. Where consumers do not free the queries themselves there is a slot more than there are stages: the
    values that the producer copied last took the place of those that are `stages` tiles older, after whose
    probabilities all consumers had begun with a work tile that recent.

    Attributes:
      programs: number of programs.
      tile_counter: int32 [1] in global memory, 0 to begin with: work tiles fetched after the first ones.
      next_tile: int32 [slots, fields] in shared memory: the number of a work tile, and what is published of it.
      fetched: a barrier at which the producer waits for itself.
      full: a barrier for each slot.
    """

    num_ctas: int
    tile_counter: Ref
    next_tile: Ref
    fetched: Ref
    full: Ref

    @staticmethod
    def counter(zero: Int32[Array, "1"], num_ctas: int, work_tiles: int) -> Ref | None:
        """`tile_counter` made of the list's `zero`, or None if no work tile is left after the first ones."""
        return basics.alias_in_place(zero) if num_ctas < work_tiles else None

    @staticmethod
    def scratch_types(tile_counter: Ref | None, slots: int = 2, *, orders_tensor_core: bool = False) -> Any:
        """Scratch for `next_tile`, `fetched` and `full`; None without a counter."""
        if tile_counter is None:
            return None
        signal = functools.partial(plgpu.Barrier, orders_tensor_core=orders_tensor_core)
        fields = 1 + len(QueryBlock._fields) + 2  # the block, its head and the split
        return plgpu.SMEM((slots, fields), jnp.int32), signal(), signal(num_barriers=slots)

    def slot(self, i: Any) -> Any:
        return ring_slot(i, self.next_tile.shape[0])

    def fetch(self, i: Any, before: Any, fields_of: Callable[[Any], list[Any]]) -> Any:
        """Number of a producer's i-th work tile, after that of number `before`; beyond the last if none is left.

        Args:
          published: fields_of(number) makes the fields of a work tile that others are told.
        """
        slot = self.slot(i)
        if before is None:
            self.next_tile[slot, 0] = lax.axis_index("cta")
        elif interpreted():
            self.next_tile[slot, 0] = before + self.num_ctas
        else:
            self._increment(slot)
            plgpu.barrier_arrive(self.fetched)
            plgpu.barrier_wait(self.fetched)
        for field, value in enumerate(fields_of(self.next_tile[slot, 0]), 1):
            self.next_tile[slot, field] = value
        plgpu.barrier_arrive(self.full.at[slot])
        return self.receive(i)

    def _increment(self, slot: Any) -> None:
        """Writes to a slot what the counter was, plus the number of programs, and counts it up."""
        num_ctas = self.num_ctas

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def increment(_: Any, tile_counter: ir.Value, next_tile: ir.Value) -> None:
            with mgpu.utils.single_thread(mgpu.utils.ThreadSubset.WARPGROUP):
                one = mgpu.c(1, ir.IntegerType.get_signless(32))
                ordering, add = llvm.AtomicOrdering.monotonic, llvm.AtomicBinOp.add
                pointer = mgpu.utils.memref_ptr(tile_counter)
                number = llvm.atomicrmw(add, pointer, one, ordering, syncscope="device")
                first: Any = mgpu.c(0, ir.IndexType.get())
                memref.store(arith.addi(number, mgpu.c(num_ctas, one.type)), next_tile, [first])

        increment(self.tile_counter, self.next_tile.at[slot])

    def receive(self, i: Any) -> Any:
        """Number of the i-th work tile, when it is there."""
        slot = self.slot(i)
        plgpu.barrier_wait(self.full.at[slot])
        return self.next_tile[slot, 0]

    def fields(self, i: Any) -> list[Any]:
        """Published fields of the i-th work tile, which is there."""
        return [self.next_tile[self.slot(i), field] for field in range(1, self.next_tile.shape[1])]


# --- arithmetic


def ring_slot(number: Any, slots: int) -> Any:
    """`number` modulo `slots`, for a number that is not negative, which the compiler does not know."""
    return number & (slots - 1) if slots & (slots - 1) == 0 else lax.rem(number, slots)


def divide(x: Any, y: Any) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are not negative."""
    return lax.div(x, y), lax.rem(x, y)


def _divide_each(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
    """`divide` of each of several numbers [128]. A division by 1 is left out, of which Mosaic's compiler makes nothing
    that it can lower.
    """
    if y == 1:
        return x, PER_THREAD.filled(jnp.int32(0), THREADS)
    quotient = ratio(x, y)
    return quotient, x - quotient * y


def align_down(row: Any) -> Any:
    """The last row up to this one where copies may begin."""
    return pl.multiple_of(lax.div(row, ALIGNMENT) * ALIGNMENT, ALIGNMENT)


def _align_each_down(row: Any) -> Any:
    """`align_down` of each of several rows."""
    return row & -ALIGNMENT
