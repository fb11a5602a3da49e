"""`plan_decode` in plain JAX, which XLA compiles to about ten kernels.

Terms, here and in `portable.schedule`:

    row      one KV head of one sequence; its cost is its number of visible pages plus a constant
    order    permutation of the rows; "place" is an index of the order
    offset   position on a line on which the rows lie end to end, in this order, each as long as its cost
    share    cost per CTA of the plan (program); CTA j starts near offset j·share
    split    the part of a row that one CTA processes
    group    adjacent rows of the order with separate CTAs: no other CTA processes these rows

`balanced` mode computes up to three schedules, and `jnp.where` selects one on the device: separate CTAs for each row,
separate CTAs for each group, or equal shares of the whole line. `fixed` mode uses the last schedule.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_attn import checks
from pallas_attn.ops.plan_decode.call import PlanDecodeCall, PlanResult
from pallas_attn.portable.schedule import Groups, Sharing, ratio
from pallas_attn.portable.segments import segment_of
from pallas_attn.portable.visibility import PageWalk, head_windows, page_walk, real_queries
from pallas_attn.types import DecodePlan


def plan_decode(call: PlanDecodeCall) -> PlanResult:
    sharing, num_programs = call.sharing, call.num_programs
    kv_lens, bounded_q_lens = checks.bound_decode_lens(call.made_for, call.kv_lens, call.q_lens)
    q_lens = real_queries(bounded_q_lens, kv_lens, call.num_queries)
    windows = head_windows(call.window, call.num_kv_heads)
    first_query = jnp.maximum(kv_lens - q_lens, 0)[:, None]
    end = jnp.where(q_lens > 0, kv_lens, 0)[:, None]
    walk = page_walk(first_query, end, windows.window[None], windows.sink_tokens[None], page_size=call.page_size)
    walk = PageWalk(*(x.reshape(-1) for x in walk))
    rows, program = (jnp.arange(n, dtype=jnp.int32) for n in (walk.num_pages.shape[0], num_programs + 1))
    share = sharing.share(jnp.sum(sharing.cost(walk.num_pages), dtype=jnp.int32), num_programs)
    order, busy = (
        _snake_order(sharing, walk.num_pages, num_programs)
        if sharing.uses_snake_order(len(rows))
        else (rows, len(rows))
    )
    offsets = _prefix_sums(sharing.cost(walk.num_pages[order]))
    cuts = _at_equal_distances(sharing, offsets, share, program)
    if not sharing.split_pages:
        cuts = _unless(*_in_groups(sharing, offsets, share, program, jnp.int32(busy)), cuts)
        if len(rows) <= num_programs:
            own, are_worse = _for_each_row(sharing, walk.num_pages, share, program)
            cuts, order = _unless(own, are_worse, cuts), jnp.where(are_worse, order, rows)
    sink_pages, first_page, num_pages = (x[order] for x in walk)
    plan = DecodePlan(
        row_order=order,
        sink_pages=sink_pages,
        first_page=first_page,
        num_pages=num_pages,
        next_row=_next_busy(num_pages),
        merged_rows=_merged(cuts.split_indptr),
        **cuts._asdict(),
        made_for=call.made_for,
        implementation=call.implementation,
        split_pages=sharing.split_pages,
    )
    return plan, kv_lens, bounded_q_lens


class PlanCuts(NamedTuple):
    """Fields of a `DecodePlan` that define the splits of rows and the starts of CTAs."""

    split_indptr: Int32[Array, "rows_plus_1"]
    cta_row: Int32[Array, "programs_plus_1"]
    cta_page: Int32[Array, "programs_plus_1"]
    cta_split: Int32[Array, "programs_plus_1"]


def _snake_order(sharing: Sharing, num_pages: Array, num_programs: int) -> tuple[Array, Array]:
    """Return the rows in the order of their groups, int32 [rows], and the number of rows with visible pages.

    Rows are assigned to groups from the longest to the shortest: to groups 0, 1, ..., n - 1, then n - 1, ..., 0, and so
    on (snake order). All groups then have similar costs. Rows of one group are adjacent in the returned order.
    """
    rows = jnp.arange(num_pages.shape[0], dtype=jnp.int32)
    busy = jnp.sum(num_pages > 0, dtype=jnp.int32)
    place = Groups.of(busy, num_programs).place(rows)
    longest_first = jnp.argsort(-sharing.length_key(num_pages, rows)).astype(jnp.int32)
    return jnp.zeros_like(rows).at[place].set(longest_first), busy


def _unless(others: PlanCuts, are_worse: Bool[Array, ""], cuts: PlanCuts) -> PlanCuts:
    """Return `cuts` if `are_worse`, else `others`. The flag is on the device, so both are computed."""
    return jax.tree.map(functools.partial(jnp.where, are_worse), cuts, others)


def _at_equal_distances(sharing: Sharing, offsets: Array, share: Array, program: Array) -> PlanCuts:
    """Return the schedule in which CTA j starts at offset j·share on the line of all rows.

    Args:
      offsets: int32 [rows + 1], offset where each row starts; last the total.
      share: int32 [], cost per CTA.
      program: int32 [CTAs + 1], 0, 1, ...
    """
    start = jnp.minimum(sharing.start(program, share, offsets[-1]), offsets[-1])
    split_indptr = _prefix_sums(sharing.splits(offsets[:-1], offsets[1:], share))
    place, into = _locate(sharing, offsets, start)
    split = sharing.split(program, offsets[place], into, split_indptr[place], share)
    return PlanCuts(split_indptr, place, sharing.page(into), split)


def _locate(sharing: Sharing, offsets: Array, start: Array) -> tuple[Array, Array]:
    """Return the place of the row that each CTA starts in, and the offset of the start from the start of this row.

    Args:
      offsets: int32 [rows + 1], offset where each row starts; last the total.
      start: int32 [CTAs + 1], offset where each CTA starts. Starts shortly before the end of a row move to its end.
    """
    ends = offsets[1:]
    start = sharing.snap_to_row_end(start, jnp.append(ends, ends[-1])[segment_of(ends, start)])
    place = segment_of(ends, start)
    return place, start - offsets[place]


def _in_groups(
    sharing: Sharing, offsets: Array, share: Array, program: Array, busy: Array
) -> tuple[PlanCuts, Bool[Array, ""]]:
    """Return the schedule in which each group's CTAs share the group's rows equally, and whether it is too uneven.

    Args:
      offsets, share, program: as for `_at_equal_distances`.
      busy: int32 [], number of rows that are distributed over groups: in snake order the rows with visible pages,
        which come first; otherwise all rows.
    """
    rows, num_programs = offsets.shape[0] - 1, program.shape[0] - 1
    groups = Groups.of(busy, num_programs)

    def bounds(group: Array) -> tuple[Array, Array, Array]:
        begin, end = (offsets[groups.start(group + i)] for i in range(2))
        return begin, end, sharing.share(end - begin, groups.programs)

    begin, _, shares = bounds(groups.group(jnp.arange(rows, dtype=jnp.int32)))
    are_worse = jnp.any(sharing.is_group_uneven(shares, groups.programs, share))
    split_indptr = _prefix_sums(sharing.splits(offsets[:-1] - begin, offsets[1:] - begin, shares))
    of = ratio(program, groups.programs)
    begin, end, shares = bounds(of)
    number = program - of * groups.programs
    into_group = jnp.minimum(sharing.start(number, shares, end - begin), end - begin)
    place, into = _locate(sharing, offsets, begin + into_group)
    split = sharing.split(number, offsets[place] - begin, into, split_indptr[place], shares)
    return PlanCuts(split_indptr, place, sharing.page(into), split), are_worse


def _for_each_row(sharing: Sharing, num_pages: Array, share: Array, program: Array) -> tuple[PlanCuts, Bool[Array, ""]]:
    """Return the schedule in which each row has separate CTAs, each with an equal part of the row's pages.

    The order of the rows is 0, 1, ... Also return whether a part is too large or the CTAs do not suffice.
    """
    own_share = sharing.own_share(jnp.sum(num_pages, dtype=jnp.int32), program.shape[0] - 1)
    parts, part = sharing.parts(num_pages, own_share)
    split_indptr = _prefix_sums(parts)
    place = segment_of(split_indptr[1:], program)
    page = (program - split_indptr[place]) * jnp.append(part, jnp.int32(0))[place]
    are_worse = jnp.any(sharing.is_part_uneven(part, share)) | (split_indptr[-1] >= program.shape[0])
    return PlanCuts(split_indptr, place, page, jnp.minimum(program, split_indptr[-1])), are_worse


def _next_busy(num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
    """Return for each row the index of the next row that has visible pages, or the number of rows if none follows."""
    rows = num_pages.shape[0]
    busy = jnp.where(num_pages > 0, jnp.arange(rows, dtype=jnp.int32), rows)
    return jnp.append(lax.cummin(busy, reverse=True)[1:], jnp.int32(rows))


def _merged(split_indptr: Int32[Array, "rows_plus_1"]) -> Int32[Array, "rows_plus_1"]:
    """Return the indices of the rows whose number of splits is not 1. Unused entries are the number of rows."""
    (rows_plus_1,) = split_indptr.shape
    (places,) = jnp.nonzero(jnp.diff(split_indptr) != 1, size=rows_plus_1, fill_value=rows_plus_1 - 1)
    return places.astype(jnp.int32)


def _prefix_sums(x: Int32[Array, "rows"]) -> Int32[Array, "rows_plus_1"]:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
