"""`plan_decode` on Hopper and data-center Blackwell: one program, so that a step pays for one short kernel.

The arithmetic is that of `portable.schedule`, which also says what offsets, places and pieces are. Each thread takes a
row, a place or a program; where there are more of them than threads, they are taken a chunk at a time. Prefix sums stay
in shared memory, and are searched to find the row at an offset:

    rows      cost              -> ends: the offset where each row ends (prefix sums)
    total     -> share, own share
    rows      parts             -> piece_ends, and whether this is even enough; if so, each part is a program's
    else
    rows      rank by length    -> place, and the lists by place
    places    cost              -> ends                              (prefix sums)
    places    pieces in groups  -> piece_ends, and whether this is even enough
    else
    places    pieces            -> piece_ends                        (prefix sums)
    programs  start             -> place, page, piece

Steps that a call does not need are branched around: every instruction is fetched once, and most of the kernel's time is
latency. It cannot deadlock: threads wait only for each other, and all take the same branches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import Ref, opaque_zero
from pallas_attn.mosaic.primitives.block_scan import (
    COMPARED,
    MOST_WARPGROUPS,
    PER_THREAD,
    Lanes,
    exclusive_sum,
    segment_of,
)
from pallas_attn.mosaic.primitives.row_io import THREADS
from pallas_attn.ops.plan_decode.call import PlanDecodeCall
from pallas_attn.portable.schedule import Groups, Sharing, ratio
from pallas_attn.portable.visibility import PageWalk, page_walk
from pallas_attn.types import FULL, DecodePlan, HeadWindow

MAX_ROWS = 24 * 1024
"""Rows whose two prefix sums fit shared memory."""


@dataclasses.dataclass(frozen=True)
class PlanStatic:
    """Compile-time facts of the kernel, beside shapes and dtypes.

    Attributes:
      window: of all heads, unless there is a `HeadWindow`.
      rows, programs: number of rows, and of programs of the plan.
    """

    sharing: Sharing
    window: int
    num_kv_heads: int
    page_size: int
    rows: int
    programs: int

    @property
    def is_balanced(self) -> bool:
        """Whether groups or rows may have programs of their own."""
        return not self.sharing.split_pages

    @property
    def for_each_row(self) -> bool:
        """Whether there are enough programs for each row to have its own."""
        return self.is_balanced and self.rows <= self.programs

    @property
    def warpgroups(self) -> int:
        return min(MOST_WARPGROUPS, pl.cdiv(max(self.rows, self.programs + 1), THREADS))

    @property
    def chunk(self) -> int:
        """Rows or programs that all threads take at a time."""
        return self.warpgroups * THREADS

    @property
    def padded_rows(self) -> int:
        return pl.cdiv(self.rows, self.chunk) * self.chunk

    @property
    def most_pieces(self) -> int:
        """Largest number of pieces: each begins with a row or with a program."""
        return self.rows + self.programs


class PlanInputs(NamedTuple):
    """Arrays of a `PlanDecodeCall`."""

    kv_lens: Any
    q_lens: Any
    window: HeadWindow | None


class PlanOutputs(NamedTuple):
    """Arrays of a `DecodePlan`."""

    row_order: Any
    sink_pages: Any
    first_page: Any
    num_pages: Any
    next_row: Any
    merged_rows: Any
    split_indptr: Any
    cta_row: Any
    cta_page: Any
    cta_split: Any

    @staticmethod
    def types(static: PlanStatic) -> PlanOutputs:
        rows, rows_plus_1, programs_plus_1 = (
            jax.ShapeDtypeStruct((n,), jnp.int32) for n in (static.rows, static.rows + 1, static.programs + 1)
        )
        programs = (programs_plus_1, programs_plus_1, programs_plus_1)
        return PlanOutputs(*(rows,) * 5, *(rows_plus_1,) * 2, *programs)


class PlanScratch(NamedTuple):
    """Shared memory of the kernel.

    Attributes:
      ends, piece_ends: int32 [padded rows], inclusive prefix sums of costs and of numbers of pieces, by row or place;
        constant past the last.
      keys: float32 [rows, padded], sort keys; None where rows keep their order.
      lanes: the threads.
    """

    ends: Any
    piece_ends: Any
    keys: Any
    lanes: Any


def plan_decode(call: PlanDecodeCall) -> DecodePlan:
    basics.require_capability((9, 0), (10, 0))
    rows = call.kv_lens.shape[0] * call.num_kv_heads
    if rows > MAX_ROWS:
        raise NotImplementedError(f"takes at most {MAX_ROWS} rows (sequences x KV heads), got {rows}")
    static = PlanStatic(
        sharing=call.sharing,
        window=call.window if isinstance(call.window, int) else FULL,
        num_kv_heads=call.num_kv_heads,
        page_size=call.page_size,
        rows=rows,
        programs=call.num_programs,
    )
    inputs = PlanInputs(call.kv_lens, call.q_lens, call.window if isinstance(call.window, HeadWindow) else None)
    sums = plgpu.SMEM((static.padded_rows,), jnp.int32)
    keys = (
        plgpu.SMEM((pl.cdiv(rows, COMPARED) * COMPARED,), jnp.float32) if call.sharing.uses_snake_order(rows) else None
    )
    (outputs,) = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(PlanOutputs.types(static),),
        scratch_types=(PlanScratch(sums, sums, keys, Lanes.types(static.warpgroups)),),
        num_threads=static.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=basics.lane_semantics()),
        kernel_name="plan_decode",
    )(basics.materialize(inputs))
    return DecodePlan(
        **outputs._asdict(),
        made_for=call.made_for,
        implementation=call.implementation,
        split_pages=call.sharing.split_pages,
    )


def _kernel(static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch) -> None:
    sharing = static.sharing
    total, busy = _lay_out(static, x, mem)
    share = sharing.share(total, static.programs)
    if static.for_each_row:
        own_share = sharing.own_share(total - busy * sharing.overhead, static.programs)
        is_even = _part(static, mem, share, own_share)
        pl.when(is_even)(lambda: _list_parts(static, x, plan, mem, own_share))
        pl.when(~is_even)(lambda: _share(static, x, plan, mem, total, busy, share))
    else:
        _share(static, x, plan, mem, total, busy, share)


def _lay_out(static: PlanStatic, x: PlanInputs, mem: PlanScratch) -> tuple[Any, Any]:
    """Write `ends` of rows in their own order; return the total cost, and how many rows are not idle."""

    def lay_out(row: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
        cost, busy = before
        pages = jnp.where(row < static.rows, _walk(static, x, row).num_pages, 0)
        return mem.lanes.append(mem.ends, row, static.sharing.cost(pages), cost), busy + jnp.where(pages > 0, 1, 0)

    _, busy = mem.lanes.each_chunk(static.rows, lay_out, (_of_each(0), _of_each(0)))
    return _last(static, mem.ends), mem.lanes.sum(busy)


# --- programs for each row


def _part(static: PlanStatic, mem: PlanScratch, share: Any, own_share: Any) -> Any:
    """Write `piece_ends` for rows that have programs of their own; return whether that is even enough, and programs
    suffice.
    """

    def part(row: Any, before: Any) -> Any:
        parts, pages = static.sharing.parts(_pages(static, mem, row), own_share)
        is_uneven = static.sharing.is_part_uneven(pages, share)
        return mem.lanes.append(mem.piece_ends, row, _flagged(static, parts, is_uneven), before)

    mem.lanes.each_chunk(static.rows, part, _of_each(0))
    return _last(static, mem.piece_ends) <= static.programs


def _flagged(static: PlanStatic, pieces: Any, are_worse: Any) -> Any:
    """Sentinel count, more than any plan has, that makes this schedule lose the comparison."""
    return jnp.where(are_worse, static.most_pieces + 1, pieces)


def _list_parts(static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch, own_share: Any) -> None:
    _list_in_order(static, x, plan, mem.lanes)
    _list_rows(
        static, plan, mem, lambda place: segment_of(mem.piece_ends, static.rows, PER_THREAD.take(mem.piece_ends, place))
    )

    def start(program: Any, _: None) -> None:
        row = segment_of(mem.piece_ends, static.rows, program)
        pages = static.sharing.parts(_pages(static, mem, row), own_share)[1]
        before = exclusive_sum(mem.piece_ends, row)
        page = jnp.where(row < static.rows, (program - before) * pages, 0)
        _list_programs(static, plan, program, (row, page, jnp.where(row < static.rows, program, before)))

    mem.lanes.each_chunk(static.programs + 1, start)


# --- programs for groups, or for all


def _share(
    static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch, total: Any, busy: Any, share: Any
) -> None:
    in_snake_order, sharing = static.sharing.uses_snake_order(static.rows), static.sharing
    groups = Groups.of(busy if in_snake_order else jnp.int32(static.rows), static.programs)
    if in_snake_order:
        _list_in_snake_order(static, x, plan, mem, groups)
    else:
        _list_in_order(static, x, plan, mem.lanes)

    def following(place: Any) -> Any:
        """Next place of a row that is not idle."""
        if in_snake_order:
            return jnp.where(place + 1 < busy, place + 1, static.rows)
        return segment_of(mem.ends, static.rows, PER_THREAD.take(mem.ends, place))

    def bounds(group: Any) -> tuple[Any, Any, Any]:
        """Offsets where groups begin and end, and the share of each of their programs."""
        begin, end = (exclusive_sum(mem.ends, groups.start(group + i)) for i in range(2))
        return begin, end, sharing.share(end - begin, groups.programs)

    def pieces_in_groups(place: Any) -> Any:
        start, _, shares = bounds(groups.group(place))
        begin, end = exclusive_sum(mem.ends, place), PER_THREAD.take(mem.ends, place)
        pieces = sharing.pieces(begin - start, end - start, shares)
        return _flagged(static, pieces, sharing.is_group_uneven(shares, groups.programs, share))

    def start_in_groups(program: Any) -> ProgramStart:
        group = ratio(program, groups.programs)
        begin, end, shares = bounds(group)
        number = program - group * groups.programs
        at = jnp.minimum(sharing.start(number, shares, end - begin), end - begin)
        return ProgramStart(number, shares, begin, begin + at)

    def pieces(place: Any) -> Any:
        return sharing.pieces(exclusive_sum(mem.ends, place), PER_THREAD.take(mem.ends, place), share)

    def start(program: Any) -> ProgramStart:
        at = jnp.minimum(sharing.start(program, share, total), total)
        return ProgramStart(program, _of_each(share), jnp.zeros_like(program), at)

    def at_equal_distances() -> None:
        _cut(static, mem, pieces)
        _list_pieces(static, plan, mem, following, start)

    if not static.is_balanced:
        at_equal_distances()
        return
    are_even = _cut(static, mem, pieces_in_groups) <= static.most_pieces
    pl.when(are_even)(lambda: _list_pieces(static, plan, mem, following, start_in_groups))
    pl.when(~are_even)(at_equal_distances)


class ProgramStart(NamedTuple):
    """Starts of programs.

    Attributes:
      number: index of the program among those that take equal shares of the same rows.
      share: cost that each of those takes.
      begin: offset where their rows begin.
      at: offset where the program starts.
    """

    number: Any
    share: Any
    begin: Any
    at: Any


def _list_in_snake_order(
    static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch, groups: Groups
) -> None:
    """List rows in the order of groups, and write `ends` of places."""
    row = mem.lanes.number()
    walk = _walk(static, x, row)
    key = jnp.where(row < static.rows, static.sharing.length_key(walk.num_pages, row), -1).astype(jnp.float32)
    PER_THREAD.put(mem.keys, jnp.where(row < mem.keys.shape[0], row, -1), key)
    mem.lanes.barrier()
    place = groups.place(mem.lanes.count_larger(mem.keys, key))
    _list(static, plan, place, row, walk)
    PER_THREAD.put(mem.ends, jnp.where(row < static.rows, place, -1), walk.num_pages)
    mem.lanes.barrier()
    pages = jnp.where(row < static.rows, PER_THREAD.take(mem.ends, row), 0)  # by place
    mem.lanes.append(mem.ends, row, static.sharing.cost(pages), _of_each(0))


def _cut(static: PlanStatic, mem: PlanScratch, pieces: Callable[[Any], Any]) -> Any:
    """Write `piece_ends` of places, given the number of pieces of each; return the total."""

    def cut(place: Any, before: Any) -> Any:
        return mem.lanes.append(mem.piece_ends, place, jnp.where(place < static.rows, pieces(place), 0), before)

    mem.lanes.each_chunk(static.rows, cut, _of_each(0))
    return _last(static, mem.piece_ends)


def _list_pieces(
    static: PlanStatic,
    plan: PlanOutputs,
    mem: PlanScratch,
    following: Callable[[Any], Any],
    start: Callable[[Any], ProgramStart],
) -> None:
    sharing = static.sharing
    _list_rows(static, plan, mem, following)

    def list_programs(program: Any, _: None) -> None:
        number, share, begin, at = start(program)
        place = segment_of(mem.ends, static.rows, at)
        last = jnp.minimum(place, static.rows - 1)
        snapped = sharing.snap_to_row_end(at, jnp.maximum(PER_THREAD.take(mem.ends, last), at))
        place = jnp.where(snapped > at, following(last), place)
        row_begin = exclusive_sum(mem.ends, place)
        into = snapped - row_begin
        piece = sharing.piece(number, row_begin - begin, into, exclusive_sum(mem.piece_ends, place), share)
        _list_programs(static, plan, program, (place, sharing.page(into), piece))

    mem.lanes.each_chunk(static.programs + 1, list_programs)


# --- lists of the plan


def _list_in_order(static: PlanStatic, x: PlanInputs, plan: PlanOutputs, lanes: Lanes) -> None:
    """List rows in their own order."""

    def write(row: Any, _: None) -> None:
        _list(static, plan, row, row, _walk(static, x, row))

    lanes.each_chunk(static.rows, write)


def _list(static: PlanStatic, plan: PlanOutputs, place: Any, row: Any, walk: PageWalk) -> None:
    """Write rows and their pages to their places in the plan."""
    refs = plan.row_order, plan.sink_pages, plan.first_page, plan.num_pages
    for ref, values in zip(refs, (row, *walk), strict=True):
        PER_THREAD.put(ref, jnp.where(row < static.rows, place, -1), values)


def _list_rows(static: PlanStatic, plan: PlanOutputs, mem: PlanScratch, following: Callable[[Any], Any]) -> None:
    """Write `next_row`, `split_indptr` and `merged_rows` of the plan.

    Args:
      following: maps a place to the next one that is not idle.
    """

    def write(place: Any, merged_before: Any) -> Any:
        exists, is_last = place < static.rows, place == static.rows - 1
        end, begin = PER_THREAD.take(mem.piece_ends, place), exclusive_sum(mem.piece_ends, place)
        PER_THREAD.put(plan.next_row, jnp.where(exists, place, -1), following(place))
        PER_THREAD.put(plan.split_indptr, jnp.where(exists, place, -1), begin)
        PER_THREAD.put(plan.split_indptr, jnp.where(is_last, static.rows, -1), end)
        is_merged = exists & (end - begin != 1)
        so_far, total = mem.lanes.prefix_sums(jnp.where(is_merged, 1, 0))
        so_far += merged_before
        at = jnp.where(is_merged, so_far - 1, static.rows - (place - so_far))  # others fill the list from its end
        PER_THREAD.put(plan.merged_rows, jnp.where(exists, at, -1), jnp.where(is_merged, place, static.rows))
        PER_THREAD.put(plan.merged_rows, jnp.where(is_last, so_far, -1), _of_each(static.rows))
        return merged_before + total

    mem.lanes.each_chunk(static.rows, write, _of_each(0))


def _list_programs(static: PlanStatic, plan: PlanOutputs, program: Any, start: tuple[Any, Any, Any]) -> None:
    """Write the place, page and piece that each program starts with."""
    at = jnp.where(program <= static.programs, program, -1)
    for ref, values in zip((plan.cta_row, plan.cta_page, plan.cta_split), start, strict=True):
        PER_THREAD.put(ref, at, values)


# --- rows and places


def _walk(static: PlanStatic, x: PlanInputs, row: Any) -> PageWalk:
    """Visible pages of rows; arbitrary for rows past the last."""
    row = jnp.minimum(row, static.rows - 1)
    batch = ratio(row, static.num_kv_heads)
    head = row - batch * static.num_kv_heads
    kv_len = PER_THREAD.take(x.kv_lens, batch)
    q_len = jnp.full_like(kv_len, 1) if x.q_lens is None else PER_THREAD.take(x.q_lens, batch)
    if x.window is None:
        window, sink_tokens = jnp.full_like(kv_len, static.window), jnp.zeros_like(kv_len)
    else:
        window, sink_tokens = PER_THREAD.take(x.window.window, head), PER_THREAD.take(x.window.sink_tokens, head)
    end = jnp.where(q_len > 0, kv_len, 0)
    return page_walk(jnp.maximum(kv_len - q_len, 0), end, window, sink_tokens, page_size=static.page_size)


def _pages(static: PlanStatic, mem: PlanScratch, row: Any) -> Any:
    """Number of pages of rows in `balanced` mode, from their costs; 0 for rows past the last."""
    last = jnp.minimum(row, static.rows - 1)
    cost = PER_THREAD.take(mem.ends, last) - exclusive_sum(mem.ends, last)
    return jnp.where(row < static.rows, jnp.maximum(cost - static.sharing.overhead, 0), 0)


def _of_each(number: Any) -> Any:
    """Give each thread the same number."""
    return PER_THREAD.filled(jnp.int32(number), THREADS)


def _last(static: PlanStatic, sums: Ref) -> Any:
    """Total of prefix sums."""
    return sums[static.padded_rows - 1 + opaque_zero()]  # constants are not valid indices
