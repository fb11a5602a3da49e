"""The blocks of queries that `sm90.flash.kernel` works off, listed on the device by one short kernel before attention.

A sequence's queries are cut into blocks; rows after the last sequence are a sequence more, which sees no keys. Blocks
of the most tiles of keys come first: the last ones to run are short, and what runs at a time finds its keys and values
in the L2 cache. Where XLA would start up to eight kernels for that, this one has a thread for each sequence, and then
for each block:

    sequences   blocks             -> ends: of their blocks      (prefix sums)
    blocks      sequence, tiles    -> keys
    blocks      rank among keys    -> what is listed
    parts       time               -> how many parts keys are cut into, if they are

Calls with the same lengths, such as the layers of a step make, share one: it is traced once for all of them, so that
XLA finds the same kernel given the same arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.block_scan import COMPARED, MOST_WARPGROUPS, PER_THREAD, Lanes, find, sum_before
from pallas_attn.mosaic.row_layout import THREADS
from pallas_attn.mosaic.sm90.flash.config import ALIGNMENT
from pallas_attn.mosaic.sm90.flash.split import Cuts
from pallas_attn.mosaic.sm90.flash.work import Block
from pallas_attn.portable.schedule import order_key, ratio
from pallas_attn.types import HeadWindow

MOST_LISTED = 48 * 1024
"""Sequences and blocks together, as shared memory has room for."""


class Lengths(NamedTuple):
    """Of sequences, as attention is given them.

    Attributes:
      cu_q_lens: int32 [S + 1].
      cu_kv_lens: int32 [S + 1], for keys that follow one another; or None, and
      kv_lens: int32 [S], for those of pages.
      window: of the heads, which limits what a block sees where keys are cut; or None.
    """

    cu_q_lens: Any
    cu_kv_lens: Any = None
    kv_lens: Any = None
    window: HeadWindow | None = None

    @property
    def sequences(self) -> int:
        return self.cu_q_lens.shape[0] - 1


@dataclasses.dataclass(frozen=True)
class Listing:
    """What blocks are to be.

    Attributes:
      rows: of all queries.
      block_rows: of a block.
      tile_keys: of a tile.
      causal: the keys of a block end with its last query's.
    """

    rows: int
    block_rows: int
    tile_keys: int
    causal: bool

    def num_blocks(self, lengths: Lengths) -> tuple[int, int]:
        """The least and the most that there can be of these rows. What follows the last sequence may have some, too,
        and rows before a block's first may fill up to 7 places.
        """
        stretches = lengths.sequences + 1
        most = (self.rows + (ALIGNMENT - 1) * stretches) // self.block_rows + stretches
        return pl.cdiv(self.rows, self.block_rows), min(self.rows, most)


class Listed(NamedTuple):
    """Arrays, or in a kernel references to them.

    Attributes:
      blocks: int32 [most, fields of a `Block`], those that exist first.
      count: int32 [1 or 2], how many of them there are, and parts of a block where keys may be cut.
      zero: int32 [1], for a `Queue`.
    """

    blocks: Any
    count: Any
    zero: Any


class Memory(NamedTuple):
    """Shared memory.

    Attributes:
      ends: int32, where each sequence's blocks end (prefix sums); what follows the last sequence's rows adds nothing.
      keys: float32, by which blocks are put in order.
      lanes: the threads.
    """

    ends: Any
    keys: Any
    lanes: Any


def list_blocks(listing: Listing, lengths: Lengths, cuts: Cuts) -> Listed:
    """All blocks, those of the most tiles first, and how many there are.

    Raises:
      NotImplementedError: there can be too many.
    """
    _, most = listing.num_blocks(lengths)
    if lengths.sequences + most > MOST_LISTED:
        raise NotImplementedError(
            f"takes at most {MOST_LISTED} sequences and blocks of {listing.block_rows} rows together, got "
            f"{lengths.sequences} sequences of {listing.rows} rows, which may have {most} blocks"
        )
    return _listed(listing, cuts, lengths if cuts.most > 1 else lengths._replace(window=None))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _listed(listing: Listing, cuts: Cuts, lengths: Lengths) -> Listed:
    stretches, (_, most) = lengths.sequences + 1, listing.num_blocks(lengths)
    warpgroups = min(MOST_WARPGROUPS, pl.cdiv(max(stretches, most, cuts.most), THREADS))
    chunk = warpgroups * THREADS
    memory = Memory(
        ends=plgpu.SMEM((pl.cdiv(stretches, chunk) * chunk,), jnp.int32),
        keys=plgpu.SMEM((pl.cdiv(most, COMPARED) * COMPARED,), jnp.float32),
        lanes=Lanes.types(warpgroups),
    )
    (listed,) = plgpu.kernel(
        functools.partial(_kernel, listing, cuts),
        out_type=(
            Listed(
                jax.ShapeDtypeStruct((most * len(Block._fields),), jnp.int32),
                jax.ShapeDtypeStruct((1 if cuts.most == 1 else 2,), jnp.int32),
                jax.ShapeDtypeStruct((1,), jnp.int32),
            ),
        ),
        scratch_types=(memory,),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="list_blocks",
    )(basics.materialize(lengths))
    return listed._replace(blocks=listed.blocks.reshape(most, -1))


def _kernel(listing: Listing, cuts: Cuts, x: Lengths, listed: Listed, mem: Memory) -> None:
    lanes, (_, most), nothing = mem.lanes, listing.num_blocks(x), PER_THREAD.filled(jnp.int32(0), THREADS)
    there = lanes.each_chunk(x.sequences + 1, functools.partial(_lay_out, listing, x, mem), nothing)
    here = lanes.number()
    first = _described(listing, x, mem, here, there)

    def described(number: Any) -> tuple[Block, Any]:
        return first if most <= lanes.threads else _described(listing, x, mem, number, there)

    def note(number: Any, tiles: Any) -> Any:
        block, key = described(number)
        PER_THREAD.put(mem.keys, jnp.where(number < mem.keys.shape[0], number, -1), key)
        return jnp.maximum(tiles, jnp.where(number < there, block.tiles, 0))

    def write(number: Any, _: None) -> None:
        block, key = described(number)
        rank = lanes.count_larger(mem.keys, key)
        for i, field in enumerate(block):
            PER_THREAD.put(listed.blocks, jnp.where(number < there, rank * len(block) + i, -1), field)

    tiles = lanes.each_chunk(mem.keys.shape[0], note, nothing)
    lanes.barrier()
    lanes.each_chunk(most, write)
    PER_THREAD.put(listed.zero, jnp.where(here == 0, 0, -1), nothing)
    PER_THREAD.put(listed.count, jnp.where(here == 0, 0, -1), there)
    if cuts.most > 1:
        parts = _parts(listing, cuts, x, lanes, there, lanes.max(tiles))
        PER_THREAD.put(listed.count, jnp.where(here == 0, 1, -1), PER_THREAD.filled(parts, THREADS))


def _lay_out(listing: Listing, x: Lengths, mem: Memory, sequence: Any, before: Any) -> Any:
    """Sums up the blocks of sequences."""
    first_row, end_row = _rows(listing, x, jnp.minimum(sequence, x.sequences))
    blocks = ratio(end_row - _aligned(first_row) + (listing.block_rows - 1), listing.block_rows)
    blocks = jnp.where((sequence <= x.sequences) & (end_row > first_row), blocks, 0)
    return mem.lanes.append(mem.ends, sequence, blocks, before)


def _described(listing: Listing, x: Lengths, mem: Memory, number: Any, there: Any) -> tuple[Block, Any]:
    """What blocks are, and by what they are put in order, the largest first; of those that are not there, anything,
    and -1.
    """
    sequence = jnp.minimum(find(mem.ends, x.sequences + 1, number), x.sequences)
    first_row, end_row = _rows(listing, x, sequence)
    first_key, end_key = _keys(x, sequence)
    start = _aligned(first_row) + (number - sum_before(mem.ends, sequence)) * listing.block_rows
    seen = end_key - _aligned(first_key)
    if listing.causal:
        seen -= jnp.maximum(end_row - (start + listing.block_rows), 0)  # those of queries that the block does not have
    tiles = ratio(jnp.maximum(seen, 1) + (listing.tile_keys - 1), listing.tile_keys)
    block = Block(jnp.minimum(sequence, x.sequences - 1), start, first_row, end_row, first_key, end_key, tiles)
    key = order_key(tiles, number, 1 << listing.num_blocks(x)[1].bit_length())
    return block, jnp.where(number < there, key, -1).astype(jnp.float32)


def _rows(listing: Listing, x: Lengths, sequence: Any) -> tuple[Any, Any]:
    """Of the queries of sequences; number S is what follows the last one."""
    next_one = PER_THREAD.take(x.cu_q_lens, jnp.minimum(sequence + 1, x.sequences))
    end_row = jnp.where(sequence < x.sequences, next_one, listing.rows)
    return PER_THREAD.take(x.cu_q_lens, sequence), end_row


def _keys(x: Lengths, sequence: Any) -> tuple[Any, Any]:
    """Of sequences: where they begin and end."""
    if x.cu_kv_lens is not None:
        next_one = jnp.minimum(sequence + 1, x.sequences)
        return PER_THREAD.take(x.cu_kv_lens, sequence), PER_THREAD.take(x.cu_kv_lens, next_one)
    kv_len = PER_THREAD.take(x.kv_lens, jnp.minimum(sequence, x.sequences - 1))
    return PER_THREAD.filled(jnp.int32(0), THREADS), jnp.where(sequence < x.sequences, kv_len, 0)


def _aligned(row: Any) -> Any:
    """`sm90.flash.work.aligned`, of each of several."""
    return row & -ALIGNMENT


def _parts(listing: Listing, cuts: Cuts, x: Lengths, lanes: Lanes, blocks: Any, tiles: Any) -> Any:
    """How many parts take the least time, if a block sees so many tiles at most; every thread reckons one number."""
    if x.window is not None:

        def seen(head: Any, most: Any) -> Any:
            real, head = head < x.window.window.shape[0], jnp.minimum(head, x.window.window.shape[0] - 1)
            some = (PER_THREAD.take(ref, head) for ref in (x.window.window, x.window.sink_tokens))
            keys = functools.reduce(jnp.add, (jnp.minimum(n, tiles * listing.tile_keys) for n in some))
            return jnp.maximum(most, jnp.where(real, keys, 0))

        keys = lanes.max(lanes.each_chunk(x.window.window.shape[0], seen, PER_THREAD.filled(jnp.int32(0), THREADS)))
        tiles = jnp.minimum(tiles, pl.cdiv(keys + listing.block_rows, listing.tile_keys))
    # The least time is found together with who reckoned it: both are one number, a time above and a thread below.
    power = 1 << cuts.most.bit_length()
    longest = (1 << 31) // power - 1
    parts = lanes.number() + 1
    time = jnp.minimum(cuts.time(blocks, parts, tiles), longest)
    time = jnp.where(parts <= cuts.most, time, longest)
    least = -lanes.max(-(time * power + lanes.number() % power))
    return least % power + 1
