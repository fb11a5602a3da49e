"""`plan_decode` on Hopper: one program, one warpgroup, so that a step pays for one short kernel.

Rows are taken a chunk at a time, a few of them by each thread. Prefix sums of what they cost stay in shared memory,
where every place among the rows is then found by bisection:

    rows      cost              -> ends: where each row ends         (prefix sums)
    total     -> share, own share
    rows      parts             -> piece_ends, and whether that is even; if so, programs start with parts
    else
    rows      rank              -> place, and what is listed by place
    places    cost              -> ends                              (prefix sums)
    places    pieces in groups  -> piece_ends, and whether that is even
    else
    places    pieces            -> piece_ends                        (prefix sums)
    programs  start             -> place, page, piece

What is not needed is not done: every instruction is fetched once, and most of the kernel's time is latency. Nothing
waits but the threads of the warpgroup for each other.
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
from jaxtyping import Array, Int32

from pallas_attn.ops.common import mosaic
from pallas_attn.ops.common.mosaic import Ref, unknown_zero
from pallas_attn.ops.common.mosaic_lanes import (
    LANES,
    WARP,
    barrier,
    count_larger,
    prefix_sums,
    put_sums,
    take_sum,
)
from pallas_attn.ops.common.mosaic_rows import THREADS
from pallas_attn.ops.common.sharing import Groups, Sharing, ratio
from pallas_attn.ops.common.visibility import PageWalk, page_walk
from pallas_attn.types import FULL, DecodePlan, HeadWindow

MAX_CHUNK = 4 * THREADS
"""Rows or programs at a time: more would be more registers, fewer more rounds."""

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
    def is_balanced(self) -> bool:
        """Whether there may be groups, or programs for each row."""
        return not self.sharing.piece_pages

    @property
    def for_each_row(self) -> bool:
        """Whether there are programs enough for that."""
        return self.is_balanced and self.rows <= self.programs

    @property
    def most_pieces(self) -> int:
        """A piece begins with a row or with a program."""
        return self.rows + self.programs


class Inputs(NamedTuple):
    """As `plan_decode` takes them."""

    kv_lens: Any
    q_lens: Any
    window: HeadWindow | None


class Outputs(NamedTuple):
    """The arrays of a `DecodePlan`."""

    row: Any
    sink_pages: Any
    first_page: Any
    num_pages: Any
    next_place: Any
    merged_place: Any
    piece_offsets: Any
    program_place: Any
    program_page: Any
    program_piece: Any

    @staticmethod
    def types(static: Static) -> Outputs:
        rows, rows_plus_1, programs_plus_1 = (
            jax.ShapeDtypeStruct((n,), jnp.int32) for n in (static.rows, static.rows + 1, static.programs + 1)
        )
        programs = (programs_plus_1, programs_plus_1, programs_plus_1)
        return Outputs(*(rows,) * 5, *(rows_plus_1,) * 2, *programs)


class Memory(NamedTuple):
    """Shared memory, all int32.

    Attributes:
      ends, piece_ends: prefix sums of costs and of pieces, up to and with each place; those past the last add nothing.
      scratch: a number a warp of a chunk, of prefix sums on their way.
      busy: the same, of rows that are not idle.
    """

    ends: Any
    piece_ends: Any
    scratch: Any
    busy: Any


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
    padded, warps = pl.cdiv(rows, _chunk(rows)) * _chunk(rows), _chunk(rows) // WARP
    (outputs,) = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(Outputs.types(static),),
        scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in (padded, padded, warps, warps)],
        kernel_name="plan_decode",
    )(mosaic.unsliced(Inputs(kv_lens, q_lens, window if isinstance(window, HeadWindow) else None)))
    return DecodePlan(**outputs._asdict(), page_size=page_size, piece_pages=sharing.piece_pages)


def _chunk(count: int) -> int:
    """How many of so many are taken at a time."""
    return min(MAX_CHUNK, pl.cdiv(count, THREADS) * THREADS)


def _each_chunk(count: int, body: Any, carry: Any) -> Any:
    """body(first, carry) -> carry for each chunk of 0, 1, ... and at least `count` - 1, of which `first` begins one."""
    chunk = _chunk(count)

    def step(i: Any, carry: Any) -> Any:
        return body(i * chunk, carry)

    return lax.fori_loop(0, pl.cdiv(count, chunk), step, carry)


def _kernel(static: Static, x: Inputs, plan: Outputs, *memory: Ref) -> None:
    mem, sharing = Memory(*memory), static.sharing
    total, busy = _lay_out(static, x, mem)
    share = sharing.share(total, static.programs)
    if static.for_each_row:
        own_share = sharing.own_share(total - busy * sharing.overhead, static.programs)
        is_even = _part(static, mem, share, own_share)
        pl.when(is_even)(lambda: _list_parts(static, x, plan, mem, own_share))
        pl.when(~is_even)(lambda: _share(static, x, plan, mem, total, busy, share))
    else:
        _share(static, x, plan, mem, total, busy, share)


def _lay_out(static: Static, x: Inputs, mem: Memory) -> tuple[Any, Any]:
    """Sums up what rows cost, as they come; returns the sum of all, and how many are not idle."""

    def lay_out(first: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
        cost_before, busy_before = before
        row = LANES.iota(_chunk(static.rows)) + first
        pages = jnp.where(row < static.rows, _walk(static, x, row).num_pages, 0)
        ends = prefix_sums(static.sharing.cost(pages), mem.scratch) + cost_before
        put_sums(mem.busy, jnp.where(pages > 0, 1, 0))  # who still read them has passed a barrier by now
        return _put(mem.ends, first, ends), busy_before + take_sum(mem.busy)

    return _each_chunk(static.rows, lay_out, (jnp.int32(0), jnp.int32(0)))


# --- programs for each row


def _part(static: Static, mem: Memory, share: Any, own_share: Any) -> Any:
    """Sums up parts of rows, as they come; returns whether they are even enough, and no more than programs."""

    def part(first: Any, before: Any) -> Any:
        row = LANES.iota(_chunk(static.rows)) + first
        parts, pages = static.sharing.parts(_pages(static, mem, row), own_share)
        is_uneven = static.sharing.is_part_uneven(pages, share)
        return _append(mem.piece_ends, first, _flagged(static, parts, is_uneven), mem.scratch, before)

    return _each_chunk(static.rows, part, jnp.int32(0)) <= static.programs


def _flagged(static: Static, pieces: Any, are_worse: Any) -> Any:
    """More pieces than there are where these are worse."""
    return jnp.where(are_worse, static.most_pieces + 1, pieces)


def _list_parts(static: Static, x: Inputs, plan: Outputs, mem: Memory, own_share: Any) -> None:
    _list_in_order(static, x, plan)
    _list_rows(static, plan, mem, lambda place: _find(static, mem.piece_ends, LANES.take(mem.piece_ends, place)))

    def start(first: Any, _: None) -> None:
        program = LANES.iota(_chunk(static.programs + 1)) + first
        row = _find(static, mem.piece_ends, program)
        pages = static.sharing.parts(_pages(static, mem, row), own_share)[1]
        before = _before(mem.piece_ends, row)
        page = jnp.where(row < static.rows, (program - before) * pages, 0)
        _list_programs(static, plan, program, (row, page, jnp.where(row < static.rows, program, before)))

    _each_chunk(static.programs + 1, start, None)


# --- programs for groups, or for all


def _share(static: Static, x: Inputs, plan: Outputs, mem: Memory, total: Any, busy: Any, share: Any) -> None:
    is_dealt, sharing = static.sharing.are_dealt(static.rows), static.sharing
    groups = Groups.of(busy if is_dealt else jnp.int32(static.rows), static.programs)
    if is_dealt:
        _deal(static, x, plan, mem, groups)
    else:
        _list_in_order(static, x, plan)

    def following(place: Any) -> Any:
        """The next place of a row that is not idle."""
        if is_dealt:
            return jnp.where(place + 1 < busy, place + 1, static.rows)
        return _find(static, mem.ends, LANES.take(mem.ends, place))

    def bounds(group: Any) -> tuple[Any, Any, Any]:
        """Where groups begin and end, and the share of each one's programs."""
        begin, end = (_before(mem.ends, groups.start(group + i)) for i in range(2))
        return begin, end, sharing.share(end - begin, groups.programs)

    def pieces_in_groups(place: Any) -> Any:
        start, _, shares = bounds(groups.group(place))
        begin, end = _before(mem.ends, place), LANES.take(mem.ends, place)
        pieces = sharing.pieces(begin - start, end - start, shares)
        return _flagged(static, pieces, sharing.is_group_uneven(shares, groups.programs, share))

    def start_in_groups(program: Any) -> Start:
        of = ratio(program, groups.programs)
        begin, end, shares = bounds(of)
        number = program - of * groups.programs
        at = jnp.minimum(sharing.start(number, shares, end - begin), end - begin)
        return Start(number, shares, begin, begin + at)

    def pieces(place: Any) -> Any:
        return sharing.pieces(_before(mem.ends, place), LANES.take(mem.ends, place), share)

    def start(program: Any) -> Start:
        at = jnp.minimum(sharing.start(program, share, total), total)
        return Start(program, LANES.filled(share, program.shape[0]), jnp.zeros_like(program), at)

    def at_equal_distances() -> None:
        _cut(static, mem, pieces)
        _list_pieces(static, plan, mem, following, start)

    if not static.is_balanced:
        at_equal_distances()
        return
    are_even = _cut(static, mem, pieces_in_groups) <= static.most_pieces
    pl.when(are_even)(lambda: _list_pieces(static, plan, mem, following, start_in_groups))
    pl.when(~are_even)(at_equal_distances)


class Start(NamedTuple):
    """Where programs start among the rows.

    Attributes:
      number: of each among those which take equal shares of the same rows.
      share: what each of those takes.
      begin: where their rows begin.
      at: where the program starts.
    """

    number: Any
    share: Any
    begin: Any
    at: Any


def _deal(static: Static, x: Inputs, plan: Outputs, mem: Memory, groups: Groups) -> None:
    """Lists rows in the order of groups, and sums up what they cost."""
    row, zero = LANES.iota(_chunk(static.rows)), unknown_zero()  # constants are no indices
    walk = _walk(static, x, row)
    key = jnp.where(row < static.rows, static.sharing.length_key(walk.num_pages, row), -1)
    barrier()  # who still reads
    LANES.put(mem.piece_ends, row, key)
    barrier()
    place = groups.place(count_larger(mem.piece_ends, key))
    _list(static, plan, place, row, walk)
    LANES.put(mem.ends, jnp.where(row < static.rows, place, -1), walk.num_pages)
    barrier()
    pages = jnp.where(row < static.rows, LANES.take(mem.ends, row), 0)  # of places now
    _append(mem.ends, zero, static.sharing.cost(pages), mem.scratch, zero)


def _cut(static: Static, mem: Memory, pieces: Callable[[Any], Any]) -> Any:
    """Sums up pieces of the rows at these places; returns the sum of all."""

    def cut(first: Any, before: Any) -> Any:
        place = LANES.iota(_chunk(static.rows)) + first
        return _append(mem.piece_ends, first, jnp.where(place < static.rows, pieces(place), 0), mem.scratch, before)

    return _each_chunk(static.rows, cut, jnp.int32(0))


def _list_pieces(
    static: Static, plan: Outputs, mem: Memory, following: Callable[[Any], Any], start: Callable[[Any], Start]
) -> None:
    sharing = static.sharing
    _list_rows(static, plan, mem, following)

    def list_programs(first: Any, _: None) -> None:
        program = LANES.iota(_chunk(static.programs + 1)) + first
        number, share, begin, at = start(program)
        place = _find(static, mem.ends, at)
        last = jnp.minimum(place, static.rows - 1)
        untailed = sharing.untailed(at, jnp.maximum(LANES.take(mem.ends, last), at))
        place = jnp.where(untailed > at, following(last), place)
        row_begin = _before(mem.ends, place)
        into = untailed - row_begin
        piece = sharing.piece(number, row_begin - begin, into, _before(mem.piece_ends, place), share)
        _list_programs(static, plan, program, (place, sharing.page(into), piece))

    _each_chunk(static.programs + 1, list_programs, None)


# --- what is listed


def _list_in_order(static: Static, x: Inputs, plan: Outputs) -> None:
    """Lists rows as they come."""

    def write(first: Any, _: None) -> None:
        row = LANES.iota(_chunk(static.rows)) + first
        _list(static, plan, row, row, _walk(static, x, row))

    _each_chunk(static.rows, write, None)


def _list(static: Static, plan: Outputs, place: Any, row: Any, walk: PageWalk) -> None:
    """Writes what a plan lists of rows to their places."""
    refs = plan.row, plan.sink_pages, plan.first_page, plan.num_pages
    for ref, values in zip(refs, (row, *walk), strict=True):
        LANES.put(ref, jnp.where(row < static.rows, place, -1), values)


def _list_rows(static: Static, plan: Outputs, mem: Memory, following: Callable[[Any], Any]) -> None:
    """Writes which place follows each, where its pieces begin, and which are merged."""

    def write(first: Any, merged_before: Any) -> Any:
        place = LANES.iota(_chunk(static.rows)) + first
        at = jnp.where(place < static.rows, place, -1)
        before = _before(mem.piece_ends, place)
        LANES.put(plan.next_place, at, following(place))
        LANES.put(plan.piece_offsets, at, before)
        is_merged = (place < static.rows) & (LANES.take(mem.piece_ends, place) - before != 1)
        merged = prefix_sums(jnp.where(is_merged, 1, 0), mem.scratch) + merged_before  # up to and with this place
        to = jnp.where(is_merged, merged - 1, static.rows - (place - merged))  # others fill the list from its end
        LANES.put(plan.merged_place, jnp.where(place < static.rows, to, -1), jnp.where(is_merged, place, static.rows))
        return merged_before + take_sum(mem.scratch)

    merged = _each_chunk(static.rows, write, jnp.int32(0))
    plan.merged_place[merged] = static.rows
    plan.piece_offsets[static.rows] = mem.piece_ends[mem.piece_ends.shape[0] - 1]


def _list_programs(static: Static, plan: Outputs, program: Any, start: tuple[Any, Any, Any]) -> None:
    """Writes place, page and piece."""
    at = jnp.where(program <= static.programs, program, -1)
    for ref, values in zip((plan.program_place, plan.program_page, plan.program_piece), start, strict=True):
        LANES.put(ref, at, values)


# --- rows and places


def _walk(static: Static, x: Inputs, row: Any) -> PageWalk:
    """Pages of rows; anything for those past the last."""
    row = jnp.minimum(row, static.rows - 1)
    batch = ratio(row, static.num_kv_heads)
    head = row - batch * static.num_kv_heads
    kv_len = LANES.take(x.kv_lens, batch)
    q_len = jnp.full_like(kv_len, 1) if x.q_lens is None else LANES.take(x.q_lens, batch)
    if x.window is None:
        window, sink_tokens = jnp.full_like(kv_len, static.window), jnp.zeros_like(kv_len)
    else:
        window, sink_tokens = LANES.take(x.window.window, head), LANES.take(x.window.sink_tokens, head)
    end = jnp.where(q_len > 0, kv_len, 0)
    return page_walk(jnp.maximum(kv_len - q_len, 0), end, window, sink_tokens, page_size=static.page_size)


def _pages(static: Static, mem: Memory, row: Any) -> Any:
    """Of rows, by what they cost where that is their pages and a constant; 0 for those past the last."""
    last = jnp.minimum(row, static.rows - 1)
    cost = LANES.take(mem.ends, last) - _before(mem.ends, last)
    return jnp.where(row < static.rows, jnp.maximum(cost - static.sharing.overhead, 0), 0)


def _append(sums: Ref, first: Any, values: Any, scratch: Ref, before: Any) -> Any:
    """Writes prefix sums of a chunk to `sums` from `first` on, on top of the sum `before`; returns the last one."""
    return _put(sums, first, prefix_sums(values, scratch) + before)


def _put(sums: Ref, first: Any, values: Any) -> Any:
    """Writes a chunk to `sums` from `first` on, for all threads to read; returns the last one."""
    chunk = values.shape[0]
    LANES.put(sums, LANES.iota(chunk) + first, values)
    barrier()
    return sums[first + (chunk - 1)]


def _before(sums: Ref, i: Any) -> Any:
    """The sum of all that come before number i."""
    return jnp.where(i > 0, LANES.take(sums, jnp.maximum(i - 1, 0)), 0)


def _find(static: Static, ends: Ref, place: Any) -> Any:
    """The row that covers each place, by where rows end; the number of rows past the end. Each round reads three ends
    and leaves a quarter.
    """
    found = LANES.filled(jnp.int32(0), place.shape[0])
    step = 4 ** ((static.rows.bit_length() - 1) // 2)  # the largest power of 4 that is not larger
    while step:
        ends_at = [found + (i * step - 1) for i in range(1, 4)]
        passed = [(at < static.rows) & (LANES.take(ends, jnp.minimum(at, static.rows - 1)) <= place) for at in ends_at]
        found += sum(jnp.where(one, step, 0) for one in passed)
        step //= 4
    return found
