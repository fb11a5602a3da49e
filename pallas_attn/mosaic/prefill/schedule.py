"""Scheduling of the prefill kernel: a kernel lists the query blocks, and CTAs fetch work tiles from a queue.

Terms:

    query        one row of the packed queries [T, Hq, D]: all heads of one new token
    segment      consecutive queries: the queries of one sequence, or the queries before the first or after the last
                 sequence. The latter two belong to no sequence and see no keys
    head set     query heads of one KV head that share blocks (`pipeline.BlockRows`). It is often a single head
    query row    one head of one query. It is one row of the tensor cores' left operand
    block        up to `block_rows` consecutive query rows of a segment, for one head set
    tile         `tile_keys` consecutive keys, which a CTA loads and multiplies at a time
    split        consecutive tiles of a block, if several CTAs share the keys of a block (`split.py`)
    work tile    one block of one head set with one split of its keys, or with all of them. A CTA processes one at a
    time

1. `list_blocks` is a short kernel that runs before attention. It lists the blocks, sorted by decreasing number of
   tiles. The last blocks to run are then short, and blocks that run at the same time share keys in the L2 cache.
   XLA would launch up to eight kernels for this. Each step is done by one thread per segment, block, head or split:

       segments   count the blocks of a segment            -> prefix sums: index of the last block of each segment
       blocks     find the segment, count the tiles        -> sort key
       blocks     count the larger sort keys               -> row of the list
       heads      longest block and total cost of a head   -> `l2_head_group` of `WorkTiles`
       splits     estimate the time with i + 1 splits      -> number of splits

   All layers of a model call `list_blocks` with the same lengths. The `jax.jit` around it is traced once, so XLA sees
   identical calls and runs one of them.

2. The prefill kernel has one CTA per multiprocessor. `WorkTiles` numbers the work tiles. Each CTA fetches numbers from
   a `TileQueue` until all work tiles are taken.
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
"""Maximum number of sequences plus blocks. Each takes 4 bytes of shared memory in the kernel of `list_blocks`."""


class QueryBlock(NamedTuple):
    """One entry of the list: a block, and the queries and keys of its segment.

    A block begins with 8 queries of one head. Earlier heads of the head set may have the same 8 queries at the end of
    the previous block; `skipped_heads` is their number.

    Attributes:
      sequence: index of the sequence; the last sequence if the segment belongs to none.
      start: first query of the block, a multiple of 8.
      skipped_heads: number of heads of the head set whose queries `start` to `start` + 7 are in the previous block.
      first_row, end_row: first query of the segment, and one past its last query.
      first_key, end_key: first key of the sequence, and one past its last key. They are equal for a segment of no
        sequence.
      kv_tiles: number of tiles that the block sees, at least 1. Tiles start at `first_key` rounded down to a multiple
        of 8.
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
    """A work tile of the prefill kernel: a block with all keys that it sees, or with one split of them.

    Attributes:
      block: the block.
      head: index of the head set.
      split, num_splits: index of the split and number of splits; None if the call never splits keys.
    """

    block: QueryBlock
    head: Any
    split: Any = None
    num_splits: Any = None

    def kv_range(self, kv_tiles: Any) -> tuple[Any, Any]:
        """Return the first tile of this work tile and its number of tiles, at least 1.

        If there are more splits than tiles, some splits have no tile. They get the tile after the last tile that the
        block sees, and all its keys are masked.

        Args:
          kv_tiles: number of tiles that the block sees.
        """
        if self.num_splits is None:
            return 0, kv_tiles
        first, end = (lax.div(kv_tiles * split, self.num_splits) for split in (self.split, self.split + 1))
        return jnp.where(first < end, first, kv_tiles), jnp.maximum(end - first, 1)

    @property
    def is_whole(self) -> Any:
        """Whether the work tile has all keys of its block; None if the call never splits keys."""
        return None if self.num_splits is None else self.num_splits == 1

    def output_row(self, row: Any, num_rows: int) -> Any:
        """Return the row of the result for a query. Split i has the rows i · num_rows to (i + 1) · num_rows - 1."""
        return row if self.split is None else self.split * num_rows + row


# --- the listing kernel


class SequenceLengths(NamedTuple):
    """Lengths of the sequences.

    Attributes:
      cu_q_lens: int32 [S + 1], first query of each sequence, then one past the last query.
      cu_kv_lens: int32 [S + 1], the same for packed keys; None if keys are in pages.
      kv_lens: int32 [S], number of keys of each sequence if keys are in pages, else None.
      window: window per head, or None. It limits the number of splits.
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
        """Number of segments: the sequences, the rows after the last sequence, and the rows before the first."""
        return self.sequences + 2


@dataclasses.dataclass(frozen=True)
class Blocking:
    """Sizes of query blocks.

    Attributes:
      num_rows: number of queries of the call, T.
      block_rows: query rows of a block, a multiple of 8.
      tile_keys: keys of a tile.
      causal: whether a query sees no keys after its own position.
      heads: heads of a head set, at most `groups`.
    """

    num_rows: int
    block_rows: int
    tile_keys: int
    causal: bool
    heads: int = 1

    @property
    def groups(self) -> int:
        """Number of groups of 8 query rows in a block."""
        return self.block_rows // ALIGNMENT

    def num_blocks(self, lengths: SequenceLengths) -> tuple[int, int]:
        """Return the smallest and largest number of blocks of a head set that any lengths can give.

        Queries of no sequence may need blocks, too. Blocks consist of aligned groups of 8 queries, so the groups of a
        segment may include up to 7 queries before its first and up to 7 after its last query.
        """
        segments = lengths.segments
        most = (self.num_rows + 2 * (ALIGNMENT - 1) * segments) * self.heads // self.block_rows + segments
        return pl.cdiv(self.num_rows * self.heads, self.block_rows), min(self.num_rows, most)


class WorkList(NamedTuple):
    """Result of `list_blocks`; arrays, or references to them in a kernel.

    Attributes:
      blocks: int32 [largest number of blocks, fields of `QueryBlock`]. The first `counts[0]` entries are set.
      counts: int32 [2 or 3]: number of blocks of a head set, `WorkTiles.l2_head_group`, and number of splits if the
        call may split keys.
      zero: int32 [1], the number 0, with which `TileQueue.tile_counter` starts.
    """

    blocks: Any
    counts: Any
    zero: Any


class ListScratch(NamedTuple):
    """Shared memory of the listing kernel.

    Attributes:
      ends: int32 [at least segments], number of blocks up to the end of each segment. Entries after the last segment
        repeat its value.
      sort_keys: float32 [at least blocks], sort key of each block.
      lanes: scans and reductions over the threads of the CTA.
    """

    ends: Any
    sort_keys: Any
    lanes: Any


def list_blocks(blocking: Blocking, lengths: SequenceLengths, splits: KvSplits, l2_head_group: int = 1) -> WorkList:
    """List the blocks of a head set, sorted by decreasing number of tiles. All head sets have equal blocks.

    Args:
      blocking: sizes of blocks and tiles.
      lengths: lengths of the sequences.
      splits: bounds of the number of splits, and the number of head sets.
      l2_head_group: number of head sets whose keys and values fit the L2 cache together, a divisor of `splits.heads`.

    Raises:
      NotImplementedError: the shapes allow more than `MOST_LISTED` sequences and blocks.
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
        # The clamp keeps the sum over all blocks below 2**31.
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
    is_grouped = l2_head_group < splits.heads
    longest = lanes.max(most_tiles) if is_grouped or splits.most > 1 else None
    heads = PER_THREAD.filled(jnp.int32(splits.heads), THREADS)
    if is_grouped:
        heads = _alternating_heads(splits, l2_head_group, count, longest, lanes.sum(cost))
        # With one block per sequence, no two blocks share keys, so grouping heads saves no memory access. All heads of
        # a block then run next to each other, because the heads of a token are adjacent in memory.
        heads = jnp.where(count <= x.sequences, jnp.int32(splits.heads), heads)
    PER_THREAD.put(listed.counts, jnp.where(lane == 0, 1, -1), heads)
    if splits.most > 1:
        num_splits = splits.choose(lanes, count, _limit_by_windows(blocking, x, lanes, longest))
        PER_THREAD.put(listed.counts, jnp.where(lane == 0, 2, -1), PER_THREAD.filled(num_splits, THREADS))


MOST_TAIL = 1 / 32
"""Limit of the idle time of CTAs at the end of a call, as a fraction of the duration of the call."""


def _alternating_heads(splits: KvSplits, l2_head_group: int, count: jax.Array, longest: Any, cost: Any) -> jax.Array:
    """Choose `WorkTiles.l2_head_group`, the number of head sets that are processed together, int32 [128].

    Groups of heads run one after the other, each with its longest blocks first. If lengths differ much, the longest
    block of the last group ends late, and the other CTAs are idle meanwhile. With a larger group, this block starts
    earlier. Example: 200 new tokens after 9,000 cached tokens, in a batch with prompts, take 1.5 times as long with one
    head per group.

    The result is the smallest divisor of `splits.heads`, from `l2_head_group` on, for which CTAs are idle for at most
    `MOST_TAIL` of the time. It is `l2_head_group` if no block takes twice the average time of a block: larger groups
    then do not help.

    Args:
      count: number of blocks of a head set.
      longest: largest number of tiles of a block.
      cost: sum of the times of all blocks of a head set, in units of the time of a tile.
    """
    mean = cost.astype(jnp.float32) * (1 / splits.num_ctas)  # time per CTA for one head set
    end = (longest + WORK_TILE_OVERHEAD).astype(jnp.float32)  # time of the longest block
    chosen: Any = jnp.int32(splits.heads)
    for heads in reversed(range(l2_head_group, splits.heads, l2_head_group)):
        if splits.heads % heads == 0:
            chosen = jnp.where(end - heads * mean <= MOST_TAIL * splits.heads * mean, jnp.int32(heads), chosen)
    differ = count.astype(jnp.float32) * end > 2.0 * cost.astype(jnp.float32)
    return jnp.where(differ, chosen, jnp.int32(l2_head_group))


def _count_blocks(blocking: Blocking, x: SequenceLengths, scratch: ListScratch, segment: Any, before: Any) -> Any:
    """Store in `scratch.ends` the number of blocks up to the end of each segment.

    Args:
      segment: int32 [128], a segment for each thread.
      before: number of blocks of all segments before these.

    Returns:
      Number of blocks of all segments up to the last of these.
    """
    first_row, end_row = _query_rows(blocking, x, jnp.minimum(segment, x.segments - 1))
    eights = ratio(end_row - _align_each_down(first_row) + (ALIGNMENT - 1), ALIGNMENT)
    blocks = ratio(eights * blocking.heads + (blocking.groups - 1), blocking.groups)
    blocks = jnp.where((segment < x.segments) & (end_row > first_row), blocks, 0)
    return scratch.lanes.append(scratch.ends, segment, blocks, before)


def _describe(
    blocking: Blocking, x: SequenceLengths, scratch: ListScratch, number: Any, count: Any
) -> tuple[QueryBlock, Any]:
    """Compute a block and its sort key for each thread. A block with a larger sort key comes earlier in the list.

    Args:
      number: int32 [128], number of the thread's block, in the order of segments and queries. Numbers from `count` on
        get an arbitrary block and sort key -1.
      count: number of blocks.
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
        seen -= jnp.maximum(end_row - end, 0)  # the keys of later queries are not visible to this block
    kv_tiles = ratio(jnp.maximum(seen, 1) + (blocking.tile_keys - 1), blocking.tile_keys)
    sequence = jnp.minimum(segment, x.sequences - 1)
    block = QueryBlock(sequence, start, skipped_heads, first_row, end_row, first_key, end_key, kv_tiles)
    sort_key = order_key(kv_tiles, number, 1 << blocking.num_blocks(x)[1].bit_length())
    return block, jnp.where(number < count, sort_key, -1).astype(jnp.float32)


def _query_rows(blocking: Blocking, x: SequenceLengths, segment: Any) -> tuple[Any, Any]:
    """Return first query of each segment, and one past its last query.

    With S sequences, segment S has the queries after the last sequence, and segment S + 1 those before the first.
    """
    last = x.sequences
    first_row = PER_THREAD.take(x.cu_q_lens, jnp.minimum(segment, last))
    end_row = PER_THREAD.take(x.cu_q_lens, jnp.where(segment < last, segment + 1, 0))
    end_row = jnp.where(segment == last, blocking.num_rows, end_row)
    return jnp.where(segment > last, 0, first_row), end_row


def _key_rows(x: SequenceLengths, segment: Any) -> tuple[Any, Any]:
    """Return first key of each segment, and one past its last key."""
    if x.cu_kv_lens is not None:
        first, next_one = (jnp.minimum(segment + i, x.sequences) for i in range(2))
        return PER_THREAD.take(x.cu_kv_lens, first), PER_THREAD.take(x.cu_kv_lens, next_one)
    kv_len = PER_THREAD.take(x.kv_lens, jnp.minimum(segment, x.sequences - 1))
    return PER_THREAD.filled(jnp.int32(0), THREADS), jnp.where(segment < x.sequences, kv_len, 0)


def _limit_by_windows(blocking: Blocking, x: SequenceLengths, lanes: Lanes, kv_tiles: Any) -> Any:
    """Return the smaller of `kv_tiles` and the number of tiles that a block sees through the widest window of a
    head.
    """
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


# --- work tiles, in the prefill kernel


class WorkTiles(NamedTuple):
    """The work tiles of all CTAs, numbered so that work tiles with the same keys run at about the same time.

    All blocks of the first `l2_head_group` head sets come first, then all blocks of the next `l2_head_group` head sets.
    Within such a group, the work tiles of one block for the different head sets have consecutive numbers.

    Attributes:
      blocks: int32 [n, fields of `QueryBlock`] in global memory.
      num_blocks: number of blocks of a head set.
      num_splits: number of splits of each block; None if the call never splits keys.
      num_heads: number of head sets.
      l2_head_group: number of head sets that are processed together, so that their keys and values stay in the L2
        cache.
      queue: source of work tile numbers; None if each CTA has one work tile, whose number is the index of the CTA.
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
        """Fetch work tiles from the queue and process each. Runs in the producer warpgroup.

        Args:
          work: work(again, kv_tile, work_tile) processes a work tile and returns its number of tiles. `again` tells
            whether the CTA has processed a work tile before, and `kv_tile` is the number of tiles that it has
            processed.

        Returns:
          Number of work tiles, and total number of tiles.
        """
        return self._each(work, lambda queue, i, before: queue.fetch(i, before, self._fields_of))

    def consume(self, work: Callable[[Any, Any, FlashWorkTile], Any]) -> None:
        """Process the work tiles that the producer fetched. Runs in all other warpgroups. `work` is as in `produce`."""
        self._each(work, lambda queue, i, _: queue.receive(i))

    def _each(self, work: Callable[..., Any], number_of: Callable[[TileQueue, Any, Any], Any]) -> tuple[Any, Any]:
        queue, work_tiles = self.queue, self._blocks_of_head * self.num_heads

        def number(i: Any, before: Any) -> Any:
            """Return the number of the i-th work tile of this CTA.

            Args:
              before: number of the previous work tile, or None for the first.
            """
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
        """Number of work tiles of a head set: blocks times splits."""
        return self.num_blocks if self.num_splits is None else self.num_blocks * self.num_splits

    def _work_tile(self, number: Any) -> FlashWorkTile:
        """Read the block of a work tile from the list, and compute its head set and split from its number."""
        group, rest = divide(number, self._blocks_of_head * self.l2_head_group)
        row, head = divide(rest, self.l2_head_group)
        row, split = (row, None) if self.num_splits is None else divide(row, self.num_splits)
        block = QueryBlock(*(self.blocks[row, field] for field in range(self.blocks.shape[1])))
        return FlashWorkTile(block, group * self.l2_head_group + head, split, self.num_splits)

    def _fields_of(self, number: Any) -> list[Any]:
        """Return block, head set and split of a work tile as a list of integers. They are arbitrary if `number` is past
        the last work tile.
        """
        last = self._blocks_of_head * self.num_heads - 1
        tile = self._work_tile(jnp.minimum(number, last))
        return [*tile.block, tile.head, 0 if tile.split is None else tile.split]

    def _stored(self, queue: TileQueue, i: Any) -> FlashWorkTile:
        """Return the i-th work tile of this CTA, from the shared memory of the queue."""
        *block, head, split = queue.fields(i)
        block = QueryBlock(*block)
        return FlashWorkTile(block, head, None if self.num_splits is None else split, self.num_splits)


class TileQueue(NamedTuple):
    """A counter in global memory from which CTAs fetch the numbers of work tiles.

    The first work tile of a CTA has the index of the CTA as its number. The producer fetches the next number right
    after it has started the last copies of the current work tile, so the other warpgroups do not wait for the fetch.
    The producer also reads the block of the work tile from the list in global memory. It stores the number and all
    fields of the work tile in a slot of shared memory, where the other warpgroups read them. Work tile i of a CTA uses
    slot i % slots.

    The producer must not overwrite a slot before all warpgroups have read it:

    - On Hopper there are two slots, so work tile i + 2 overwrites the slot of work tile i. Before, the producer has
      copied the queries of work tile i + 1. These copies waited for q_empty, at which a consumer arrives while it
      processes work tile i, thus after it has read the slot.
    - On Blackwell consumers do not arrive at q_empty, so there are `stages` + 1 slots. The last copy of values that the
      producer started replaced the values of the tile `stages` tiles earlier. The product with those earlier values had
      waited for the probabilities of all consumers. So every consumer has read the slot of the work tile of that tile,
      which is at most `stages` work tiles back, because each work tile has at least one tile.

    Attributes:
      num_ctas: CTAs of the kernel.
      tile_counter: int32 [1] in global memory, initially 0: number of fetches of all CTAs.
      next_tile: int32 [slots, fields] in shared memory: for each slot, the number of a work tile, then its fields.
      fetched: barrier that makes the fetched number visible to the whole producer warpgroup.
      full: one barrier per slot. The producer arrives after it has stored a work tile.
    """

    num_ctas: int
    tile_counter: Ref
    next_tile: Ref
    fetched: Ref
    full: Ref

    @staticmethod
    def counter(zero: Int32[Array, "1"], num_ctas: int, work_tiles: int) -> Ref | None:
        """Return `tile_counter`, which updates `WorkList.zero` in place; None if each CTA has at most one work tile."""
        return basics.alias_in_place(zero) if num_ctas < work_tiles else None

    @staticmethod
    def scratch_types(tile_counter: Ref | None, slots: int = 2, *, orders_tensor_core: bool = False) -> Any:
        """Return scratch types of `next_tile`, `fetched` and `full`; None if `tile_counter` is None.

        Args:
          slots: number of slots.
          orders_tensor_core: whether the barriers also order tensor-core operations, as Pallas requires on Blackwell.
        """
        if tile_counter is None:
            return None
        signal = functools.partial(plgpu.Barrier, orders_tensor_core=orders_tensor_core)
        fields = 1 + len(QueryBlock._fields) + 2  # number of the work tile; block; head set and split
        return plgpu.SMEM((slots, fields), jnp.int32), signal(), signal(num_barriers=slots)

    def slot(self, i: Any) -> Any:
        return ring_slot(i, self.next_tile.shape[0])

    def fetch(self, i: Any, before: Any, fields_of: Callable[[Any], list[Any]]) -> Any:
        """Fetch the i-th work tile of this CTA and store it in its slot. Runs in the producer.

        Args:
          before: number of the previous work tile, or None for the first.
          fields_of: fields_of(number) returns the fields of a work tile.

        Returns:
          Number of the work tile. If all work tiles are taken, a number past the last one.
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
        """Increment the counter, and store its old value plus the number of CTAs as the next work tile number."""
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
        """Wait until the producer has stored the i-th work tile of this CTA. Return its number."""
        slot = self.slot(i)
        plgpu.barrier_wait(self.full.at[slot])
        return self.next_tile[slot, 0]

    def fields(self, i: Any) -> list[Any]:
        """Return the fields of the i-th work tile of this CTA. Call `receive` first."""
        return [self.next_tile[self.slot(i), field] for field in range(1, self.next_tile.shape[1])]


# --- arithmetic


def ring_slot(number: Any, slots: int) -> Any:
    """Return `number` modulo `slots`, for `number` >= 0.

    For a power of two, a bit mask replaces the division; the compiler could not do this, because it does not know that
    `number` is not negative.
    """
    return number & (slots - 1) if slots & (slots - 1) == 0 else lax.rem(number, slots)


def divide(x: Any, y: Any) -> tuple[Any, Any]:
    """Return quotient and remainder of two non-negative numbers."""
    return lax.div(x, y), lax.rem(x, y)


def _divide_each(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
    """Return quotients and remainders by `y` of the non-negative numbers `x`, int32 [128] each.

    `ratio` cannot be lowered for y = 1, so this case is separate.
    """
    if y == 1:
        return x, PER_THREAD.filled(jnp.int32(0), THREADS)
    quotient = ratio(x, y)
    return quotient, x - quotient * y


def align_down(row: Any) -> Any:
    """Round a scalar row index down to a multiple of `ALIGNMENT`."""
    return pl.multiple_of(lax.div(row, ALIGNMENT) * ALIGNMENT, ALIGNMENT)


def _align_each_down(row: Any) -> Any:
    """Round row indices [128] down to multiples of `ALIGNMENT`."""
    return row & -ALIGNMENT
