"""`plan_decode` on Hopper: one program, one warpgroup, so that a step pays for one short kernel.

Rows are taken a chunk at a time, a few of them by each thread. Prefix sums of their costs stay in shared memory, where
every place among the rows is then found by bisection:

    rows      walk, rank        -> place, and what is listed by place
    places    cost              -> ends: where each row ends         (prefix sums)
    total     -> share
    groups    share of each     -> whether these are worse; and, if there are programs for all rows,
    places    pages             -> own share                         (prefix sums)
    places    parts             -> whether these are worse           (prefix sums)
    places    pieces, next      -> piece_ends                        (prefix sums)
    programs  start             -> place, page, piece

Nothing waits but the threads of the warpgroup for each other.
"""

from __future__ import annotations

import dataclasses
import functools
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
from pallas_attn.ops.common.sharing import Groups, Sharing, ratio
from pallas_attn.ops.common.visibility import PageWalk, page_walk
from pallas_attn.types import FULL, DecodePlan, HeadWindow

LANES = RowLayout(threads=1, vector=1)
"""Numbers by thread: the i-th of a chunk is thread i % 128's."""

MAX_CHUNK = 8 * THREADS
"""Rows or programs at a time: more would be more registers, fewer more rounds."""

COMPARED = 8
"""Rows that every row is compared with in a turn of a loop."""

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
        """Whether there are groups, and rows might have programs to themselves if these are enough."""
        return not self.sharing.piece_pages

    @property
    def for_each_row(self) -> bool:
        """Whether they are enough."""
        return self.is_balanced and self.rows <= self.programs


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
        return Outputs(*(rows,) * 5, rows_plus_1, *programs)


class Memory(NamedTuple):
    """Shared memory, all int32.

    Attributes:
      ends, piece_ends: prefix sums of costs and of pieces, up to and with each place; those past the last add nothing.
      sums: [2, chunk], of a scan on its way.
      worse: [2], 1 if groups, or programs for each row, are worse than programs at equal distances.
    """

    ends: Any
    piece_ends: Any
    sums: Any
    worse: Any


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
    padded = pl.cdiv(rows, _chunk(rows)) * _chunk(rows)
    (outputs,) = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(Outputs.types(static),),
        scratch_types=[
            plgpu.SMEM((padded,), jnp.int32),
            plgpu.SMEM((padded,), jnp.int32),
            plgpu.SMEM((2 * _chunk(rows),), jnp.int32),
            plgpu.SMEM((2,), jnp.int32),
        ],
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
    if sharing.are_dealt(static.rows):
        groups, total = _deal(static, x, plan, mem)
    else:
        groups = Groups.of(jnp.int32(static.rows), static.programs)
        total = _lay_out(static, x, plan, mem)
    share = sharing.share(total, static.programs)
    mem.worse[0] = jnp.where(groups.number > static.programs, 1, 0)
    mem.worse[1] = 0
    plgpu.commit_smem()
    own_share = share  # where no row has programs to itself
    if static.is_balanced:
        _compare_groups(static, mem, groups, share)
    if static.for_each_row:
        own_share = _compare_parts(static, mem, share)

    def cut(first: Any, before: Any) -> Any:
        place = LANES.iota(_chunk(static.rows)) + first
        end, begin = LANES.take(mem.ends, place), _before(mem.ends, place)
        pieces = sharing.pieces(begin, end, share)
        if static.is_balanced:
            start, _, shares = _bounds(static, mem, groups, groups.group(place))
            pieces = _unless_worse(mem, 0, sharing.pieces(begin - start, end - start, shares), pieces)
        if static.for_each_row:
            pieces = _unless_worse(mem, 1, sharing.parts(_pages(static, mem, place), own_share), pieces)
        _write(plan.next_place, place, static.rows, _find(static, mem.ends, end))
        after = _append(mem.piece_ends, first, pieces, mem.sums, before)
        _write(plan.piece_offsets, place, static.rows, _before(mem.piece_ends, place))
        return after

    num_pieces = _each_chunk(static.rows, cut, jnp.int32(0))
    plan.piece_offsets[static.rows] = num_pieces

    def start(first: Any, _: None) -> None:
        program = LANES.iota(_chunk(static.programs + 1)) + first
        number, shares, begin = program, LANES.filled(share, program.shape[0]), jnp.zeros_like(program)
        at = jnp.minimum(sharing.start(program, share, total), total)
        if static.is_balanced:
            of = ratio(program, groups.programs)
            begin, end, group_shares = _bounds(static, mem, groups, of)
            of_group = program - of * groups.programs
            into_group = jnp.minimum(sharing.start(of_group, group_shares, end - begin), end - begin)
            own = of_group, group_shares, begin + into_group, begin
            others = program, shares, at, jnp.zeros_like(begin)
            number, shares, at, begin = (_unless_worse(mem, 0, *both) for both in zip(own, others, strict=True))
        within = jnp.minimum(_find(static, mem.ends, at), static.rows - 1)
        at = sharing.untailed(at, jnp.maximum(LANES.take(mem.ends, within), at))
        place = _find(static, mem.ends, at)
        row_begin = _before(mem.ends, place)
        page = sharing.page(at - row_begin)
        first_piece = _before(mem.piece_ends, place)
        piece = sharing.piece(number, row_begin - begin, at - row_begin, first_piece, shares)
        if static.for_each_row:
            alone = _find(static, mem.piece_ends, program)
            pages, before = _pages(static, mem, alone), _before(mem.piece_ends, alone)
            part = sharing.part(pages, jnp.maximum(sharing.parts(pages, own_share), 1))
            of_part = jnp.where(alone < static.rows, (program - before) * part, 0)
            place, page, piece = (
                _unless_worse(mem, 1, *both)
                for both in ((alone, place), (of_part, page), (jnp.minimum(program, num_pieces), piece))
            )
        _write(plan.program_place, program, static.programs + 1, place)
        _write(plan.program_page, program, static.programs + 1, page)
        _write(plan.program_piece, program, static.programs + 1, piece)

    _each_chunk(static.programs + 1, start, None)


def _lay_out(static: Static, x: Inputs, plan: Outputs, mem: Memory) -> Any:
    """Lists rows as they come, and sums up their costs; returns the sum of all."""

    def lay_out(first: Any, before: Any) -> Any:
        row = LANES.iota(_chunk(static.rows)) + first
        walk = _walk(static, x, row)
        _list(static, plan, row, row, walk)
        cost = jnp.where(row < static.rows, static.sharing.cost(walk.num_pages), 0)
        return _append(mem.ends, first, cost, mem.sums, before)

    return _each_chunk(static.rows, lay_out, jnp.int32(0))


def _deal(static: Static, x: Inputs, plan: Outputs, mem: Memory) -> tuple[Groups, Any]:
    """The same in the order of groups; also returns these."""
    count, zero = _chunk(static.rows), mosaic.unknown_zero()  # constants are no indices
    row = LANES.iota(count)
    walk = _walk(static, x, row)
    pages = jnp.where(row < static.rows, walk.num_pages, 0)
    mem.piece_ends[pl.ds(zero, count)] = pages
    plgpu.commit_smem()

    def compare(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        rank, busy = carry
        for j in range(COMPARED):
            number = i * COMPARED + j + zero
            other = mem.piece_ends[number]
            comes_first = (other > pages) | ((other == pages) & (number < row))
            rank, busy = jnp.where(comes_first, rank + 1, rank), jnp.where(other > 0, busy + 1, busy)
        return rank, busy

    nothing = LANES.filled(jnp.int32(0), count), jnp.int32(0)
    rank, busy = lax.fori_loop(0, pl.cdiv(static.rows, COMPARED), compare, nothing)
    groups = Groups.of(busy, static.programs)
    place = groups.place(rank)
    _list(static, plan, place, row, walk)
    LANES.put(mem.ends, jnp.where(place < static.rows, place, -1), pages)
    plgpu.commit_smem()
    cost = jnp.where(row < static.rows, static.sharing.cost(LANES.take(mem.ends, row)), 0)  # of places now
    return groups, _append(mem.ends, zero, cost, mem.sums, zero)


def _list(static: Static, plan: Outputs, place: Any, row: Any, walk: PageWalk) -> None:
    """Writes what a plan lists of rows to their places."""
    refs = plan.row, plan.sink_pages, plan.first_page, plan.num_pages
    for ref, values in zip(refs, (row, *walk), strict=True):
        _write(ref, place, static.rows, values)


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


def _bounds(static: Static, mem: Memory, groups: Groups, group: Any) -> tuple[Any, Any, Any]:
    """Where groups begin and end, and the share of each one's programs."""
    begin, end = (_before(mem.ends, groups.start(group + i)) for i in range(2))
    return begin, end, static.sharing.share(end - begin, groups.programs)


def _pages(static: Static, mem: Memory, row: Any) -> Any:
    """Of rows, by what they cost where that is their pages and a constant; 0 for those past the last."""
    last = jnp.minimum(row, static.rows - 1)
    cost = LANES.take(mem.ends, last) - _before(mem.ends, last)
    return jnp.where(row < static.rows, jnp.maximum(cost - static.sharing.overhead, 0), 0)


def _compare_groups(static: Static, mem: Memory, groups: Groups, share: Any) -> None:
    """Notes whether some program of a group would take too much."""

    def note(first: Any, _: None) -> None:
        group = LANES.iota(_chunk(static.programs)) + first
        _, _, shares = _bounds(static, mem, groups, group)  # of those past the last: of nothing
        _note(mem, 0, static.sharing.is_group_uneven(shares, groups.programs, share))

    _each_chunk(static.programs, note, None)
    plgpu.commit_smem()


def _compare_parts(static: Static, mem: Memory, share: Any) -> Any:
    """Notes whether programs for each row would be too uneven, or too many; returns what each would take about."""
    sharing = static.sharing

    def add(first: Any, before: Any) -> Any:
        pages = _pages(static, mem, LANES.iota(_chunk(static.rows)) + first)
        return _append(mem.piece_ends, first, pages, mem.sums, before)

    own_share = sharing.own_share(_each_chunk(static.rows, add, jnp.int32(0)), static.programs)

    def note(first: Any, before: Any) -> Any:
        pages = _pages(static, mem, LANES.iota(_chunk(static.rows)) + first)
        parts = sharing.parts(pages, own_share)
        _note(mem, 1, sharing.is_part_uneven(sharing.part(pages, jnp.maximum(parts, 1)), share))
        return _append(mem.piece_ends, first, parts, mem.sums, before)

    needed = _each_chunk(static.rows, note, jnp.int32(0))
    _note(mem, 1, LANES.filled(needed, THREADS) > static.programs)
    plgpu.commit_smem()
    return own_share


def _note(mem: Memory, which: int, are_worse: Any) -> None:
    """That this is worse, if any of these is true."""
    LANES.put(
        mem.worse, jnp.where(are_worse, which, -1), LANES.filled(jnp.int32(1), are_worse.shape[0])
    )  # all the same


def _unless_worse(mem: Memory, which: int, values: Any, others: Any) -> Any:
    """The first values, or the others where these are worse."""
    return jnp.where(LANES.filled(mem.worse[which], values.shape[0]) == 1, others, values)


def _append(sums: Ref, first: Any, values: Any, scratch: Ref, before: Any) -> Any:
    """Writes prefix sums of a chunk to `sums` from `first` on, on top of the sum `before`; returns the last one.

    In every round each number takes in the one twice as far back as in the round before (Hillis and Steele, 1986).
    """
    chunk = values.shape[0]
    within = LANES.iota(chunk)
    far, half = 1, 0
    while far < chunk:
        written = scratch.at[pl.ds(half, chunk)]
        written[...] = values
        plgpu.commit_smem()
        values += jnp.where(within >= far, LANES.take(written, jnp.maximum(within - far, 0)), 0)
        far, half = 2 * far, chunk - half  # who is still reading this half is done before it is written again
    values += before
    sums[pl.ds(first, chunk)] = values
    plgpu.commit_smem()
    return sums[first + (chunk - 1)]


def _before(sums: Ref, i: Any) -> Any:
    """The sum of all that come before number i."""
    return jnp.where(i > 0, LANES.take(sums, jnp.maximum(i - 1, 0)), 0)


def _find(static: Static, ends: Ref, place: Any) -> Any:
    """The row that covers each place, by where rows end; the number of rows past the end."""
    found, step = LANES.filled(jnp.int32(0), place.shape[0]), pl.next_power_of_2(static.rows)
    while step:
        last = found + (step - 1)
        passed = (last < static.rows) & (LANES.take(ends, jnp.minimum(last, static.rows - 1)) <= place)
        found, step = jnp.where(passed, found + step, found), step // 2
    return found


def _write(ref: Ref, number: Any, count: int, values: Any) -> None:
    """ref[number[i]] = values[i] for numbers below `count`."""
    LANES.put(ref, jnp.where(number < count, number, -1), values)
