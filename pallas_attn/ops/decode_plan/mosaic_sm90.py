"""`plan_decode` on Hopper: one program, so that a step pays for one short kernel, of more warpgroups the more rows.

Rows are taken a chunk at a time by each warpgroup, a few of them by each thread. Prefix sums of their costs stay in
shared memory, where every place among the rows is then found by bisection:

    rows      walk, cost       -> ends: where each row ends          (prefix sums)
    total     -> share
    rows      pieces, next row -> piece_ends                         (prefix sums)
    rows      pieces before
    programs  start            -> row, page, piece

Neighbours in memory are written by neighbouring threads, but summed by one: for sums a thread takes a stretch of rows,
and what comes before its stretch is all that threads have to tell each other.

No wait can last: nothing waits but warpgroups for each other, all as often, wherever they meet.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas_attn.ops.common import mosaic
from pallas_attn.ops.common.mosaic import Ref
from pallas_attn.ops.common.mosaic_rows import THREADS, RowLayout
from pallas_attn.ops.common.sharing import Sharing
from pallas_attn.ops.common.visibility import page_walk
from pallas_attn.types import FULL, DecodePlan, HeadWindow

LANES = RowLayout(threads=1, vector=1)
"""Numbers by thread: the i-th of a chunk is thread i % 128's."""

MAX_CHUNK = 8 * THREADS
"""Rows or programs of a warpgroup at a time: more would be more registers, fewer more rounds."""

MAX_WARPGROUPS, WARPGROUP_ROWS = 4, 256
"""Of a program, and rows worth another one: they hide each other's latencies, and wait for each other."""

RADIX = 8
"""Numbers that a round of a scan adds up."""

MAX_ROWS = 24 * 1024
"""What fits shared memory, twice."""


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for, beside shapes."""

    sharing: Sharing
    window: int
    num_kv_heads: int
    page_size: int
    rows: int
    programs: int

    @property
    def warpgroups(self) -> int:
        return min(MAX_WARPGROUPS, pl.cdiv(self.rows, WARPGROUP_ROWS))

    @property
    def threads(self) -> int:
        return THREADS * self.warpgroups

    @property
    def padded_rows(self) -> int:
        """Rows of all chunks."""
        return self.num_chunks(self.rows) * self.warpgroups * self.chunk(self.rows)

    def chunk(self, count: int) -> int:
        """How many of so many each warpgroup takes at a time."""
        return min(MAX_CHUNK, pl.cdiv(count, self.threads) * THREADS)

    def num_chunks(self, count: int) -> int:
        """Of each warpgroup."""
        return pl.cdiv(count, self.warpgroups * self.chunk(count))


class Inputs(NamedTuple):
    """As `plan_decode` takes them."""

    kv_lens: Any
    q_lens: Any
    window: HeadWindow | None


class Outputs(NamedTuple):
    """The arrays of a `DecodePlan`."""

    sink_pages: Any
    first_page: Any
    num_pages: Any
    next_row: Any
    piece_offsets: Any
    program_row: Any
    program_page: Any
    program_piece: Any

    @staticmethod
    def types(static: Static) -> Outputs:
        rows, rows_plus_1, programs_plus_1 = (
            jax.ShapeDtypeStruct((n,), jnp.int32) for n in (static.rows, static.rows + 1, static.programs + 1)
        )
        programs = (programs_plus_1, programs_plus_1, programs_plus_1)
        return Outputs(rows, rows, rows, rows, rows_plus_1, *programs)


class Memory(NamedTuple):
    """Shared memory, all int32, and a barrier.

    Attributes:
      ends, piece_ends: prefix sums of costs and of pieces, up to and with each row. Past the last one, anything.
      sums: [2 · threads], of a scan on its way.
      here: all warpgroups are.
    """

    ends: Any
    piece_ends: Any
    sums: Any
    here: Any

    @staticmethod
    def types(static: Static) -> Memory:
        rows = plgpu.SMEM((static.padded_rows,), jnp.int32)
        sums = plgpu.SMEM((2 * static.threads,), jnp.int32)
        return Memory(rows, rows, sums, plgpu.Barrier(num_arrivals=static.warpgroups))


def plan_decode(
    kv_lens: Int32[Array, "B"],
    q_lens: Int32[Array, "B"] | None,
    window: int | HeadWindow | None,
    sharing: Sharing,
    *,
    num_kv_heads: int,
    page_size: int,
    num_programs: int,
) -> DecodePlan:
    mosaic.require_hopper()
    rows = kv_lens.shape[0] * num_kv_heads
    if rows > MAX_ROWS:
        raise NotImplementedError(f"takes at most {MAX_ROWS} rows (sequences x KV heads), got {rows}")
    static = Static(
        sharing=sharing,
        window=window if isinstance(window, int) else FULL,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        rows=rows,
        programs=num_programs,
    )
    (outputs,) = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(Outputs.types(static),),
        num_threads=static.warpgroups,
        thread_name="warpgroup",
        scratch_types=Memory.types(static),
        kernel_name="plan_decode",
    )(mosaic.unsliced(Inputs(kv_lens, q_lens, window if isinstance(window, HeadWindow) else None)))
    return DecodePlan(**outputs._asdict(), page_size=page_size, piece_pages=sharing.piece_pages)


def _each_chunk(static: Static, count: int, body: Callable[[Any, Any], None]) -> None:
    """body(first, numbers) for each chunk of a warpgroup's of 0, 1, ... and at least `count` - 1."""
    chunk, warpgroup = static.chunk(count), lax.axis_index("warpgroup")

    def step(i: Any, _: None) -> None:
        first = (i * static.warpgroups + warpgroup) * chunk
        body(first, LANES.iota(chunk) + first)

    lax.fori_loop(0, static.num_chunks(count), step, None)


def _kernel(static: Static, x: Inputs, plan: Outputs, *memory: Ref) -> None:
    mem, sharing, programs_plus_1 = Memory(*memory), static.sharing, static.programs + 1

    def lay_out(first: Any, row: Any) -> None:
        walk = _walk(static, x, row)
        for ref, values in zip((plan.sink_pages, plan.first_page, plan.num_pages), walk, strict=True):
            _write(ref, row, static.rows, values)
        mem.ends[pl.ds(first, row.shape[0])] = sharing.cost(walk.num_pages)

    _each_chunk(static, static.rows, lay_out)
    total = _add_up(static, mem, mem.ends)
    share = sharing.share(total, static.programs)

    def cut(first: Any, row: Any) -> None:
        end = LANES.take(mem.ends, row)
        mem.piece_ends[pl.ds(first, row.shape[0])] = sharing.pieces(_before(mem.ends, row), end, share)
        _write(plan.next_row, row, static.rows, _find(static, mem, end))

    _each_chunk(static, static.rows, cut)
    num_pieces = _add_up(static, mem, mem.piece_ends)
    _each_chunk(
        static, static.rows, lambda _, row: _write(plan.piece_offsets, row, static.rows, _before(mem.piece_ends, row))
    )

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _all_pieces() -> None:
        plan.piece_offsets[static.rows] = num_pieces

    def start(_: Any, program: Any) -> None:
        place = jnp.minimum(sharing.start(program, share, total), total)
        row = _find(static, mem, place)
        begin = _before(mem.ends, row)
        into, first_piece = place - begin, _before(mem.piece_ends, row)
        _write(plan.program_row, program, programs_plus_1, row)
        _write(plan.program_page, program, programs_plus_1, sharing.page(into))
        _write(plan.program_piece, program, programs_plus_1, sharing.piece(program, begin, into, first_piece, share))

    _each_chunk(static, programs_plus_1, start)


def _walk(static: Static, x: Inputs, row: Any) -> Any:
    """Pages of rows; anything for those past the last."""
    row = jnp.minimum(row, static.rows - 1)
    batch, head = row // static.num_kv_heads, row % static.num_kv_heads
    kv_len = LANES.take(x.kv_lens, batch)
    q_len = jnp.full_like(kv_len, 1) if x.q_lens is None else LANES.take(x.q_lens, batch)
    if x.window is None:
        window, sink_tokens = jnp.full_like(kv_len, static.window), jnp.zeros_like(kv_len)
    else:
        window, sink_tokens = LANES.take(x.window.window, head), LANES.take(x.window.sink_tokens, head)
    end = jnp.where(q_len > 0, kv_len, 0)
    return page_walk(jnp.maximum(kv_len - q_len, 0), end, window, sink_tokens, page_size=static.page_size)


def _meet(static: Static, mem: Memory) -> None:
    """Waits until all threads are here; then each sees what the others have written."""
    if static.warpgroups == 1:
        plgpu.commit_smem()
    else:
        plgpu.barrier_arrive(mem.here)
        plgpu.barrier_wait(mem.here)


def _add_up(static: Static, mem: Memory, numbers: Ref) -> Any:
    """Makes numbers of all rows prefix sums, in place, and returns the last one. Each thread takes a stretch."""
    _meet(static, mem)
    thread, stretch = LANES.iota(THREADS), static.padded_rows // static.threads
    first = lax.axis_index("warpgroup") * (THREADS * stretch)
    own = numbers.at[pl.ds(first, THREADS * stretch)]
    sums = list(itertools.accumulate(LANES.take(own, thread * stretch + i) for i in range(stretch)))
    before = _sum_of_earlier(static, mem, sums[-1])
    for i, value in enumerate(sums):
        _write(numbers, first + thread * stretch + i, static.rows, value + before)
    _meet(static, mem)
    return numbers[static.rows - 1]


def _sum_of_earlier(static: Static, mem: Memory, own: Any) -> Any:
    """Of the numbers of all threads before.

    In every round each takes in the sums of RADIX - 1 others: of those just before what its own one covers, of those
    before these, ... (Hillis and Steele, 1986, with RADIX 2).
    """
    first = lax.axis_index("warpgroup") * THREADS
    thread = LANES.iota(THREADS) + first
    total, far, half = own, 1, 0
    while far < static.threads:
        sums = mem.sums.at[pl.ds(half, static.threads)]
        sums[pl.ds(first, THREADS)] = total
        _meet(static, mem)
        for back in range(far, min(RADIX * far, static.threads), far):
            total += jnp.where(thread >= back, LANES.take(sums, jnp.maximum(thread - back, 0)), 0)
        far, half = RADIX * far, static.threads - half  # who still reads this half meets all before it is written again
    return total - own


def _before(sums: Ref, i: Any) -> Any:
    """The sum of all that come before number i."""
    return jnp.where(i > 0, LANES.take(sums, jnp.maximum(i - 1, 0)), 0)


def _find(static: Static, mem: Memory, place: Any) -> Any:
    """The row that covers each place; the number of rows past the end."""
    found, step = LANES.filled(jnp.int32(0), place.shape[0]), pl.next_power_of_2(static.rows)
    while step:
        last = found + (step - 1)
        passed = (last < static.rows) & (LANES.take(mem.ends, jnp.minimum(last, static.rows - 1)) <= place)
        found, step = jnp.where(passed, found + step, found), step // 2
    return found


def _write(ref: Ref, number: Any, count: int, values: Any) -> None:
    """ref[number[i]] = values[i] for numbers below `count`."""
    LANES.put(ref, jnp.where(number < count, number, -1), values)
