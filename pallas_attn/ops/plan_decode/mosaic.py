"""`plan_decode` on Hopper and data-center Blackwell: one kernel with one CTA of up to 1,024 threads.

The plan assigns pages to the CTAs of a decode kernel, which runs later. "CTA" means a CTA of the decode kernel here,
unless the text says otherwise. Terms:

    row      one KV head of one sequence; its cost is its number of visible pages plus a constant
    place    index of a row in the order of the plan
    offset   position on a line on which the rows lie end to end, each as long as its cost
    share    cost that each CTA processes in a schedule with equal shares
    split    pages of one row that one CTA processes; `portable.schedule` has the arithmetic
    group    adjacent places whose rows have separate CTAs

A thread processes one row, one place or one CTA at a time. Two arrays in shared memory contain prefix sums: `ends`, of
costs, and `split_ends`, of numbers of splits. A search in them finds the row at an offset.

    ends = prefix sums of cost(row) for all rows             # in the original order
    share = ends[last] / number of CTAs
    if rows <= CTAs:                                         # schedule 1: separate CTAs for each row
        split_ends = prefix sums of the number of CTAs of each row
        if even enough:  write the plan; stop
    if few rows:                                             # sort by length, alternate over the groups
        place of each row;  ends = prefix sums of cost(place)
    split_ends = prefix sums of the splits of each place     # schedule 2: equal shares within each group
    if not even enough:                                      # schedule 3: equal shares of all rows
        split_ends = prefix sums of the splits of each place
    for each CTA:  start offset -> place, page, split        # write the plan

Schedule 3 has the most splits. A schedule is even enough if its largest share exceeds an equal share only slightly.
`fixed` mode has only schedule 3. Branches skip schedules that are not needed: the kernel executes most instructions
once, so its time is the latency of fetching and executing them.

Barriers: only barriers of the whole CTA of this kernel, inside `Lanes`. Deadlock freedom: all threads take the same
branches, so all threads reach the same barriers.
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
from pallas_attn.ops.plan_decode.call import PlanDecodeCall, PlanResult
from pallas_attn.portable.schedule import Groups, Sharing, ratio
from pallas_attn.portable.visibility import PageWalk, page_walk
from pallas_attn.types import FULL, DecodePlan, HeadWindow

MAX_ROWS = 24 * 1024
"""Maximum number of rows (sequences x KV heads). Their two arrays of prefix sums take 192 KiB of shared memory."""


@dataclasses.dataclass(frozen=True)
class PlanStatic:
    """Compile-time parameters of the kernel.

    Attributes:
      sharing: cost model, and the arithmetic of shares and splits.
      window: window of all heads in tokens; ignored if the call has a `HeadWindow`.
      num_kv_heads: KV heads of a sequence; 1 for latents.
      num_queries: maximum number of queries of a sequence.
      page_size: tokens per page.
      table_tokens: maximum number of tokens of a sequence.
      rows: number of rows, sequences times KV heads.
      ctas: number of CTAs of the plan.
    """

    sharing: Sharing
    window: int
    num_kv_heads: int
    num_queries: int
    page_size: int
    table_tokens: int
    rows: int
    ctas: int

    @property
    def is_balanced(self) -> bool:
        """Whether the mode is `balanced`: rows or groups may have separate CTAs."""
        return not self.sharing.split_pages

    @property
    def for_each_row(self) -> bool:
        """Whether the schedule with separate CTAs for each row is tried: the CTAs suffice for one per row."""
        return self.is_balanced and self.rows <= self.ctas

    @property
    def warpgroups(self) -> int:
        return min(MOST_WARPGROUPS, pl.cdiv(max(self.rows, self.ctas + 1), THREADS))

    @property
    def chunk(self) -> int:
        """Number of threads of this kernel: rows, places or CTAs that are processed at the same time."""
        return self.warpgroups * THREADS

    @property
    def padded_rows(self) -> int:
        return pl.cdiv(self.rows, self.chunk) * self.chunk

    @property
    def max_splits(self) -> int:
        """Maximum number of splits in `balanced` mode. Each split starts where a row or a CTA starts."""
        return self.rows + self.ctas


class PlanInputs(NamedTuple):
    """Arrays of a `PlanDecodeCall`: kv_lens and q_lens int32 [B], or None; window with int32 [Hkv], or None."""

    kv_lens: Any
    q_lens: Any
    window: HeadWindow | None


class PlanOutputs(NamedTuple):
    """Arrays of a `DecodePlan`, and clipped lengths, in global memory.

    Attributes:
      kv_lens, q_lens: int32 [B]; `q_lens` is None if the call has none.
      row_order, ...: the fields of the plan.
    """

    kv_lens: Any
    q_lens: Any
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
    def types(static: PlanStatic, x: PlanInputs) -> PlanOutputs:
        kv_lens, q_lens = jax.tree.map(lambda lens: jax.ShapeDtypeStruct(lens.shape, jnp.int32), (x.kv_lens, x.q_lens))
        rows, rows_plus_1, ctas_plus_1 = (
            jax.ShapeDtypeStruct((n,), jnp.int32) for n in (static.rows, static.rows + 1, static.ctas + 1)
        )
        return PlanOutputs(kv_lens, q_lens, *(rows,) * 5, *(rows_plus_1,) * 2, *(ctas_plus_1,) * 3)


class PlanScratch(NamedTuple):
    """Shared memory of the kernel.

    Attributes:
      ends: int32 [padded rows], inclusive prefix sums of the costs of rows, by row or by place. Entries past the last
        row repeat the total.
      split_ends: int32 [padded rows], the same for the numbers of splits.
      keys: float32 [rows, rounded up to a multiple of 32], sort keys of rows; None if the plan does not sort rows.
      lanes: scans and reductions over the threads.
    """

    ends: Any
    split_ends: Any
    keys: Any
    lanes: Any


def plan_decode(call: PlanDecodeCall) -> PlanResult:
    basics.require_capability((9, 0), (10, 0))
    rows = call.kv_lens.shape[0] * call.num_kv_heads
    if rows > MAX_ROWS:
        raise NotImplementedError(f"takes at most {MAX_ROWS} plan rows (sequences x KV heads), got {rows}")
    static = PlanStatic(
        sharing=call.sharing,
        window=call.window if isinstance(call.window, int) else FULL,
        num_kv_heads=call.num_kv_heads,
        num_queries=call.num_queries,
        page_size=call.page_size,
        table_tokens=call.table_tokens,
        rows=rows,
        ctas=call.num_programs,
    )
    inputs = PlanInputs(call.kv_lens, call.q_lens, call.window if isinstance(call.window, HeadWindow) else None)
    sums = plgpu.SMEM((static.padded_rows,), jnp.int32)
    keys = (
        plgpu.SMEM((pl.cdiv(rows, COMPARED) * COMPARED,), jnp.float32) if call.sharing.uses_snake_order(rows) else None
    )
    (outputs,) = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(PlanOutputs.types(static, inputs),),
        scratch_types=(PlanScratch(sums, sums, keys, Lanes.types(static.warpgroups)),),
        num_threads=static.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=basics.lane_semantics()),
        kernel_name="plan_decode",
    )(basics.materialize(inputs))
    fields = outputs._asdict()
    kv_lens, q_lens = fields.pop("kv_lens"), fields.pop("q_lens")
    plan = DecodePlan(
        **fields,
        made_for=call.made_for,
        implementation=call.implementation,
        split_pages=call.sharing.split_pages,
    )
    return plan, kv_lens, q_lens


def _kernel(static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch) -> None:
    sharing = static.sharing
    total, busy = _lay_out(static, x, plan, mem)
    share = sharing.share(total, static.ctas)
    if static.for_each_row:
        own_share = sharing.own_share(total - busy * sharing.overhead, static.ctas)
        is_even = _part(static, mem, share, own_share)
        pl.when(is_even)(lambda: _list_parts(static, x, plan, mem, own_share))
        pl.when(~is_even)(lambda: _share(static, x, plan, mem, total, busy, share))
    else:
        _share(static, x, plan, mem, total, busy, share)


def _lay_out(static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch) -> tuple[Any, Any]:
    """Write `ends` for the original order of the rows, and the clipped lengths.

    Return the total cost, and the number of rows with visible pages (int32 scalars).
    """

    def lay_out(row: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
        cost, busy = before
        lengths = RowLengths.of(static, x, row)
        sequence = jnp.where((row < static.rows) & (lengths.head == 0), lengths.sequence, -1)
        PER_THREAD.put(plan.kv_lens, sequence, lengths.kv_len)
        if x.q_lens is not None:
            PER_THREAD.put(plan.q_lens, sequence, lengths.q_len)
        pages = jnp.where(row < static.rows, _walk(static, x, lengths).num_pages, 0)
        return mem.lanes.append(mem.ends, row, static.sharing.cost(pages), cost), busy + jnp.where(pages > 0, 1, 0)

    _, busy = mem.lanes.each_chunk(static.rows, lay_out, (_of_each(0), _of_each(0)))
    return _last(static, mem.ends), mem.lanes.sum(busy)


# --- separate CTAs for each row


def _part(static: PlanStatic, mem: PlanScratch, share: Any, own_share: Any) -> Any:
    """Write `split_ends` for the schedule in which each row has separate CTAs, each with an equal part of the pages.

    Return whether this schedule is used: no part is much larger than `share`, and the CTAs suffice.
    """

    def part(row: Any, before: Any) -> Any:
        parts, pages = static.sharing.parts(_pages(static, mem, row), own_share)
        is_uneven = static.sharing.is_part_uneven(pages, share)
        return mem.lanes.append(mem.split_ends, row, _flagged(static, parts, is_uneven), before)

    mem.lanes.each_chunk(static.rows, part, _of_each(0))
    return _last(static, mem.split_ends) <= static.ctas


def _flagged(static: PlanStatic, splits: Any, are_worse: Any) -> Any:
    """Replace the number of splits by a number above `max_splits` where `are_worse`.

    The caller rejects a schedule whose total number of splits is above a limit. One flagged row suffices to exceed it.
    """
    return jnp.where(are_worse, static.max_splits + 1, splits)


def _list_parts(static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch, own_share: Any) -> None:
    """Write the plan of the schedule in which each row has separate CTAs. Places are rows in their original order."""
    _list_in_order(static, x, plan, mem.lanes)
    _list_rows(
        static, plan, mem, lambda place: segment_of(mem.split_ends, static.rows, PER_THREAD.take(mem.split_ends, place))
    )

    def start(cta: Any, _: None) -> None:
        row = segment_of(mem.split_ends, static.rows, cta)
        pages = static.sharing.parts(_pages(static, mem, row), own_share)[1]
        before = exclusive_sum(mem.split_ends, row)
        page = jnp.where(row < static.rows, (cta - before) * pages, 0)
        _list_ctas(static, plan, cta, (row, page, jnp.where(row < static.rows, cta, before)))

    mem.lanes.each_chunk(static.ctas + 1, start)


# --- CTAs for groups, or for all rows


def _share(
    static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch, total: Any, busy: Any, share: Any
) -> None:
    """Write the plan of a schedule with equal shares: of the rows of each group if this is even enough, else of all
    rows.
    """
    in_snake_order, sharing = static.sharing.uses_snake_order(static.rows), static.sharing
    groups = Groups.of(busy if in_snake_order else jnp.int32(static.rows), static.ctas)
    if in_snake_order:
        _list_in_snake_order(static, x, plan, mem, groups)
    else:
        _list_in_order(static, x, plan, mem.lanes)

    def following(place: Any) -> Any:
        """Return the next place of a row with visible pages, or the number of rows if none follows."""
        if in_snake_order:
            return jnp.where(place + 1 < busy, place + 1, static.rows)
        return segment_of(mem.ends, static.rows, PER_THREAD.take(mem.ends, place))

    def bounds(group: Any) -> tuple[Any, Any, Any]:
        """Return the offsets where groups begin and end, and the cost per CTA of each group."""
        begin, end = (exclusive_sum(mem.ends, groups.start(group + i)) for i in range(2))
        return begin, end, sharing.share(end - begin, groups.programs)

    def splits_in_groups(place: Any) -> Any:
        start, _, shares = bounds(groups.group(place))
        begin, end = exclusive_sum(mem.ends, place), PER_THREAD.take(mem.ends, place)
        number = sharing.splits(begin - start, end - start, shares)
        return _flagged(static, number, sharing.is_group_uneven(shares, groups.programs, share))

    def start_in_groups(cta: Any) -> CtaStart:
        group = ratio(cta, groups.programs)
        begin, end, shares = bounds(group)
        number = cta - group * groups.programs
        at = jnp.minimum(sharing.start(number, shares, end - begin), end - begin)
        return CtaStart(number, shares, begin, begin + at)

    def splits(place: Any) -> Any:
        return sharing.splits(exclusive_sum(mem.ends, place), PER_THREAD.take(mem.ends, place), share)

    def start(cta: Any) -> CtaStart:
        at = jnp.minimum(sharing.start(cta, share, total), total)
        return CtaStart(cta, _of_each(share), jnp.zeros_like(cta), at)

    def at_equal_distances() -> None:
        _cut(static, mem, splits)
        _list_splits(static, plan, mem, following, start)

    if not static.is_balanced:
        at_equal_distances()
        return
    are_even = _cut(static, mem, splits_in_groups) <= static.max_splits
    pl.when(are_even)(lambda: _list_splits(static, plan, mem, following, start_in_groups))
    pl.when(~are_even)(at_equal_distances)


class CtaStart(NamedTuple):
    """Starts of CTAs, int32 [128], one CTA per thread. A CTA belongs to a set of CTAs that share a range of rows
    equally: the rows of a group, or all rows.

    Attributes:
      number: index of the CTA in its set.
      share: cost per CTA of the set.
      begin: offset where the range of rows begins.
      at: offset where the CTA starts.
    """

    number: Any
    share: Any
    begin: Any
    at: Any


def _list_in_snake_order(
    static: PlanStatic, x: PlanInputs, plan: PlanOutputs, mem: PlanScratch, groups: Groups
) -> None:
    """Write the rows and their pages to the plan in snake order, and write `ends` by place.

    Snake order: rows are assigned to groups from the longest to the shortest, to groups 0, 1, ..., n - 1, then n - 1,
    ..., 0, and so on. All groups then have similar costs.
    """
    row = mem.lanes.number()
    walk = _walk(static, x, RowLengths.of(static, x, row))
    key = jnp.where(row < static.rows, static.sharing.length_key(walk.num_pages, row), -1).astype(jnp.float32)
    PER_THREAD.put(mem.keys, jnp.where(row < mem.keys.shape[0], row, -1), key)
    mem.lanes.barrier()
    place = groups.place(mem.lanes.count_larger(mem.keys, key))
    _list(static, plan, place, row, walk)
    PER_THREAD.put(mem.ends, jnp.where(row < static.rows, place, -1), walk.num_pages)
    mem.lanes.barrier()
    pages = jnp.where(row < static.rows, PER_THREAD.take(mem.ends, row), 0)  # [128], the thread index is a place now
    mem.lanes.append(mem.ends, row, static.sharing.cost(pages), _of_each(0))


def _cut(static: PlanStatic, mem: PlanScratch, splits: Callable[[Any], Any]) -> Any:
    """Write `split_ends`, where splits(place) is the number of splits of each place. Return the total."""

    def cut(place: Any, before: Any) -> Any:
        return mem.lanes.append(mem.split_ends, place, jnp.where(place < static.rows, splits(place), 0), before)

    mem.lanes.each_chunk(static.rows, cut, _of_each(0))
    return _last(static, mem.split_ends)


def _list_splits(
    static: PlanStatic,
    plan: PlanOutputs,
    mem: PlanScratch,
    following: Callable[[Any], Any],
    start: Callable[[Any], CtaStart],
) -> None:
    """Write all fields of the plan except the rows and their pages, for a schedule with equal shares.

    Args:
      following: maps a place to the next place whose row has visible pages.
      start: maps the index of a CTA to its start.
    """
    sharing = static.sharing
    _list_rows(static, plan, mem, following)

    def list_ctas(cta: Any, _: None) -> None:
        number, share, begin, at = start(cta)
        place = segment_of(mem.ends, static.rows, at)
        last = jnp.minimum(place, static.rows - 1)
        snapped = sharing.snap_to_row_end(at, jnp.maximum(PER_THREAD.take(mem.ends, last), at))
        place = jnp.where(snapped > at, following(last), place)
        row_begin = exclusive_sum(mem.ends, place)
        into = snapped - row_begin
        split = sharing.split(number, row_begin - begin, into, exclusive_sum(mem.split_ends, place), share)
        _list_ctas(static, plan, cta, (place, sharing.page(into), split))

    mem.lanes.each_chunk(static.ctas + 1, list_ctas)


# --- lists of the plan


def _list_in_order(static: PlanStatic, x: PlanInputs, plan: PlanOutputs, lanes: Lanes) -> None:
    """Write the rows and their pages to the plan in their original order."""

    def write(row: Any, _: None) -> None:
        _list(static, plan, row, row, _walk(static, x, RowLengths.of(static, x, row)))

    lanes.each_chunk(static.rows, write)


def _list(static: PlanStatic, plan: PlanOutputs, place: Any, row: Any, walk: PageWalk) -> None:
    """Write one row per thread and its visible pages to the plan, at `place`. Rows past the last are not written."""
    refs = plan.row_order, plan.sink_pages, plan.first_page, plan.num_pages
    for ref, values in zip(refs, (row, *walk), strict=True):
        PER_THREAD.put(ref, jnp.where(row < static.rows, place, -1), values)


def _list_rows(static: PlanStatic, plan: PlanOutputs, mem: PlanScratch, following: Callable[[Any], Any]) -> None:
    """Write `next_row`, `split_indptr` and `merged_rows` of the plan.

    Args:
      following: maps a place to the next place whose row has visible pages.
    """

    def write(place: Any, merged_before: Any) -> Any:
        exists, is_last = place < static.rows, place == static.rows - 1
        end, begin = PER_THREAD.take(mem.split_ends, place), exclusive_sum(mem.split_ends, place)
        PER_THREAD.put(plan.next_row, jnp.where(exists, place, -1), following(place))
        PER_THREAD.put(plan.split_indptr, jnp.where(exists, place, -1), begin)
        PER_THREAD.put(plan.split_indptr, jnp.where(is_last, static.rows, -1), end)
        is_merged = exists & (end - begin != 1)
        so_far, total = mem.lanes.prefix_sums(jnp.where(is_merged, 1, 0))
        so_far += merged_before
        # Merged rows fill the list from its start. The other entries, which are `rows`, fill it from its end.
        at = jnp.where(is_merged, so_far - 1, static.rows - (place - so_far))
        PER_THREAD.put(plan.merged_rows, jnp.where(exists, at, -1), jnp.where(is_merged, place, static.rows))
        PER_THREAD.put(plan.merged_rows, jnp.where(is_last, so_far, -1), _of_each(static.rows))
        return merged_before + total

    mem.lanes.each_chunk(static.rows, write, _of_each(0))


def _list_ctas(static: PlanStatic, plan: PlanOutputs, cta: Any, start: tuple[Any, Any, Any]) -> None:
    """Write the place, page and split that each CTA starts with, one CTA per thread."""
    at = jnp.where(cta <= static.ctas, cta, -1)
    for ref, values in zip((plan.cta_row, plan.cta_page, plan.cta_split), start, strict=True):
        PER_THREAD.put(ref, at, values)


# --- rows and places


class RowLengths(NamedTuple):
    """Sequence, KV head and clipped lengths of rows, one row per thread, int32 [128]. Rows past the last have the
    values of the last row.
    """

    sequence: Any
    head: Any
    kv_len: Any
    q_len: Any

    @staticmethod
    def of(static: PlanStatic, x: PlanInputs, row: Any) -> RowLengths:
        row = jnp.minimum(row, static.rows - 1)
        sequence = ratio(row, static.num_kv_heads)
        kv_len = _bounded(PER_THREAD.take(x.kv_lens, sequence), static.table_tokens)
        if x.q_lens is None:
            q_len = jnp.full_like(kv_len, static.num_queries)
        else:
            q_len = _bounded(PER_THREAD.take(x.q_lens, sequence), static.num_queries)
        return RowLengths(sequence, row - sequence * static.num_kv_heads, kv_len, q_len)


def _bounded(lens: Any, most: int) -> Any:
    """Return lengths clipped to the range from 0 to `most`."""
    return jnp.minimum(jnp.maximum(lens, 0), most)


def _walk(static: PlanStatic, x: PlanInputs, lengths: RowLengths) -> PageWalk:
    """Return the visible pages of rows, one row per thread."""
    _, head, kv_len, q_len = lengths
    if x.window is None:
        window, sink_tokens = jnp.full_like(kv_len, static.window), jnp.zeros_like(kv_len)
    else:
        window, sink_tokens = PER_THREAD.take(x.window.window, head), PER_THREAD.take(x.window.sink_tokens, head)
    end = jnp.where(q_len > 0, kv_len, 0)
    return page_walk(jnp.maximum(kv_len - q_len, 0), end, window, sink_tokens, page_size=static.page_size)


def _pages(static: PlanStatic, mem: PlanScratch, row: Any) -> Any:
    """Return the number of visible pages of rows in `balanced` mode, one row per thread; 0 for rows past the last.

    `ends` contains the costs, which are the pages plus a constant, so lengths and windows are not read again.
    """
    last = jnp.minimum(row, static.rows - 1)
    cost = PER_THREAD.take(mem.ends, last) - exclusive_sum(mem.ends, last)
    return jnp.where(row < static.rows, jnp.maximum(cost - static.sharing.overhead, 0), 0)


def _of_each(number: Any) -> Any:
    """Return an int32 [128] array, one entry per thread of a warpgroup, with the same number in all entries."""
    return PER_THREAD.filled(jnp.int32(number), THREADS)


def _last(static: PlanStatic, sums: Ref) -> Any:
    """Return the total of prefix sums: their last entry."""
    return sums[static.padded_rows - 1 + opaque_zero()]  # Mosaic does not accept constants as indices
