"""`plan_decode` in Triton: one kernel with one program. Its plans equal the plans of `xla.py` exactly.

`xla.py` defines the terms. A place is an index of `order`; a group is adjacent rows with separate CTAs. All rows and
all CTAs are processed at once, as vectors that are padded to powers of two. Arrays that are read at computed indices
are in global memory: `offsets` and `parts` as scratch, `split_indptr` as an output. The threads of a program see each
other's stores after `tl.debug_barrier`.

    pages, share = visible pages of each row, equal share of all rows
    if rows <= CTAs:                                         # schedule 1: separate CTAs for each row
        split_indptr = prefix sums of the number of CTAs of each row
        if even enough:  write the plan; stop
    order = rows by length, alternating over the groups      # only if there are few rows; otherwise the given order
    offsets = prefix sums of the costs in this order
    schedule 2: equal shares of each group, if even enough; else schedule 3: equal shares of all rows
    split_indptr = prefix sums of the splits of each place
    for each CTA:  start offset -> place, page, split

Branches are taken by the whole program, so all threads reach the same barriers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl

from pallas_attn.ops.plan_decode.call import PlanDecodeCall, PlanResult
from pallas_attn.portable import schedule
from pallas_attn.runtime import device
from pallas_attn.triton import tiles
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.types import DecodePlan, HeadWindow

MAX_ROWS = 4096
"""Maximum number of rows (sequences times KV heads), and of CTAs. With 4,096, a thread holds 8 of them."""

RANKED = 32
"""Number of rows that each row is compared with at a time to find its rank by length."""


def plan_decode(call: PlanDecodeCall) -> PlanResult:
    device.triton_card()
    rows, programs, sharing = call.kv_lens.shape[0] * call.num_kv_heads, call.num_programs, call.sharing
    if max(rows, programs + 1) > MAX_ROWS:
        raise NotImplementedError(
            f"supports at most {MAX_ROWS} plan rows (sequences x KV heads) and CTAs, got {rows} and {programs}"
        )
    window = call.window
    row_vector, cta_vector = tiles.power_of_two(rows), tiles.power_of_two(programs + 1)
    of_lens, of_rows, of_starts, of_ctas = (
        jax.ShapeDtypeStruct((n,), jnp.int32) for n in (call.kv_lens.shape[0], rows, rows + 1, programs + 1)
    )
    arrays = launch(
        _plan,
        *(call.kv_lens, call.q_lens),
        *((window.window, window.sink_tokens) if isinstance(window, HeadWindow) else (None, None)),
        outputs=[*(of_lens,) * 2, *(of_rows,) * 5, *(of_starts,) * 2, *(of_ctas,) * 3, of_starts, of_rows],
        grid=(1,),
        constants={
            "ROWS": rows,
            "CTAS": programs,
            "KV_HEADS": call.num_kv_heads,
            "QUERIES": call.num_queries,
            "PAGE": call.page_size,
            "TABLE_TOKENS": call.table_tokens,
            "WINDOW": window if isinstance(window, int) else None,
            "OVERHEAD": sharing.overhead,
            "CUT": sharing.cut,
            "LEAST": sharing.least,
            "TAIL": sharing.tail,
            "SPLIT_PAGES": sharing.split_pages,
            "UNEVENNESS": schedule.UNEVENNESS,
            "SNAKE_ROWS": schedule.MAX_SNAKE_ROWS if sharing.uses_snake_order(rows) else 0,
            "ROW_VECTOR": row_vector,
            "CTA_VECTOR": cta_vector,
            "RANKED": RANKED,
            "ROW_BITS": rows.bit_length(),
        },
        num_warps=4 if max(row_vector, cta_vector) <= 512 else 16,
    )
    kv_lens, q_lens, order, sink_pages, first_page, num_pages, next_row, *arrays = arrays
    split_indptr, merged, cta_row, cta_page, cta_split, *_ = arrays
    plan = DecodePlan(
        row_order=order,
        sink_pages=sink_pages,
        first_page=first_page,
        num_pages=num_pages,
        next_row=next_row,
        merged_rows=merged,
        split_indptr=split_indptr,
        cta_row=cta_row,
        cta_page=cta_page,
        cta_split=cta_split,
        made_for=call.made_for,
        implementation=call.implementation,
        split_pages=sharing.split_pages,
    )
    return plan, kv_lens, None if call.q_lens is None else q_lens


@kernel
def _plan(
    kv_lens_ptr,  # [B]
    q_lens_ptr,  # [B] or None
    window_ptr,  # [KV_HEADS] or None
    sink_tokens_ptr,
    bounded_kv_lens_ptr,  # [B]
    bounded_q_lens_ptr,  # [B]; not written if q_lens_ptr is None
    row_order_ptr,  # [ROWS] each
    sink_pages_ptr,
    first_page_ptr,
    num_pages_ptr,
    next_row_ptr,
    split_indptr_ptr,  # [ROWS + 1] each
    merged_rows_ptr,
    cta_row_ptr,  # [CTAS + 1] each
    cta_page_ptr,
    cta_split_ptr,
    offsets_ptr,  # scratch, [ROWS + 1]: offset where each place starts; last the total
    parts_ptr,  # scratch, [ROWS]: pages per CTA in schedule 1, else sort keys
    ROWS: tl.constexpr,
    CTAS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    TABLE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERHEAD: tl.constexpr,
    CUT: tl.constexpr,
    LEAST: tl.constexpr,
    TAIL: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    UNEVENNESS: tl.constexpr,
    SNAKE_ROWS: tl.constexpr,
    ROW_VECTOR: tl.constexpr,
    CTA_VECTOR: tl.constexpr,
    RANKED: tl.constexpr,
    ROW_BITS: tl.constexpr,
):
    row, cta = tl.arange(0, ROW_VECTOR), tl.arange(0, CTA_VECTOR)
    is_row, is_cta = row < ROWS, cta <= CTAS
    sequence, head = row // KV_HEADS, row % KV_HEADS
    kv_len = _bounded(tl.load(kv_lens_ptr + sequence, mask=is_row, other=0), TABLE_TOKENS)
    tl.store(bounded_kv_lens_ptr + sequence, kv_len, mask=is_row & (head == 0))
    q_len = QUERIES
    if q_lens_ptr is not None:
        q_len = _bounded(tl.load(q_lens_ptr + sequence, mask=is_row, other=0), QUERIES)
        tl.store(bounded_q_lens_ptr + sequence, q_len, mask=is_row & (head == 0))
    sink_pages, first_page, num_pages = _visible_pages(
        head, is_row, kv_len, q_len, window_ptr, sink_tokens_ptr, PAGE, WINDOW
    )
    total = tl.sum(_cost(num_pages, OVERHEAD, SPLIT_PAGES), 0)
    share = _share(total, CTAS, OVERHEAD)

    is_done = False
    if SPLIT_PAGES == 0 and ROWS <= CTAS:
        own_share = tl.maximum((tl.sum(num_pages, 0) + CTAS - 1) // CTAS, LEAST)
        ctas_of_row = tl.maximum((num_pages + own_share // 2) // own_share, 1)
        part = tl.maximum((num_pages + ctas_of_row - 1) // ctas_of_row, 1)
        parts = tl.where(is_row, (num_pages + part - 1) // part, 0)
        is_uneven = is_row & (part > share + tl.minimum(share // UNEVENNESS, CUT))
        last = tl.sum(parts, 0)
        is_done = (tl.max(is_uneven.to(tl.int32), 0) == 0) & (last <= CTAS)
        if is_done:
            tl.store(parts_ptr + row, part, mask=is_row)
            _store_rows(
                *(row, is_row, row, sink_pages, first_page, num_pages),
                *(row_order_ptr, sink_pages_ptr, first_page_ptr, num_pages_ptr),
            )
            _store_splits(row, is_row, parts, num_pages, split_indptr_ptr, merged_rows_ptr, next_row_ptr, ROWS)
            tl.debug_barrier()
            place = _segment_of(split_indptr_ptr, cta, ROWS, ROW_BITS)
            held = is_cta & (place < ROWS)
            first = tl.load(split_indptr_ptr + place, mask=held, other=0)
            page = tl.where(held, (cta - first) * tl.load(parts_ptr + place, mask=held, other=0), 0)
            tl.store(cta_row_ptr + cta, place, mask=is_cta)
            tl.store(cta_page_ptr + cta, page, mask=is_cta)
            tl.store(cta_split_ptr + cta, tl.minimum(cta, last), mask=is_cta)

    if not is_done:
        busy = ROWS
        if SNAKE_ROWS:
            busy = tl.sum((num_pages > 0).to(tl.int32), 0)
        groups, group_ctas, first_groups, of_first, of_others = _groups(busy, CTAS)
        place_of_row = row
        if SNAKE_ROWS:
            key = tl.minimum(num_pages, (1 << 24) // SNAKE_ROWS - 1) * SNAKE_ROWS + (SNAKE_ROWS - 1 - row)
            tl.store(parts_ptr + row, key, mask=is_row)
            tl.debug_barrier()
            rank = tl.zeros([ROW_VECTOR], tl.int32)
            for start in range(0, ROWS, RANKED):
                other = start + tl.arange(0, RANKED)
                others = tl.load(parts_ptr + other, mask=other < ROWS, other=-1)
                rank += tl.sum((others[None, :] > key[:, None]).to(tl.int32), 1)
            place_of_row = _snake_place(rank, busy, groups, first_groups, of_first, of_others)
        _store_rows(
            *(row, is_row, place_of_row, sink_pages, first_page, num_pages),
            *(row_order_ptr, sink_pages_ptr, first_page_ptr, num_pages_ptr),
        )
        tl.debug_barrier()
        place = row  # from here on, the vector index is a place
        num_pages = tl.load(num_pages_ptr + place, mask=is_row, other=0)
        cost = _cost(num_pages, OVERHEAD, SPLIT_PAGES)
        ends = tl.cumsum(cost, 0)
        tl.store(offsets_ptr + 1 + place, ends, mask=is_row)
        tl.store(offsets_ptr + place, ends - cost, mask=place == 0)
        tl.debug_barrier()

        # Schedule 3, one range of rows for all CTAs, unless schedule 2 is even enough.
        begin, row_share = tl.zeros([ROW_VECTOR], tl.int32), tl.zeros([ROW_VECTOR], tl.int32) + share
        number, cta_share = cta, tl.zeros([CTA_VECTOR], tl.int32) + share
        cta_begin, cta_end = tl.zeros([CTA_VECTOR], tl.int32), tl.zeros([CTA_VECTOR], tl.int32) + total
        if SPLIT_PAGES == 0:
            group = _group_of(place, groups, first_groups, of_first, of_others)
            group_begin, group_end = _group_bounds(group, groups, first_groups, of_first, of_others, offsets_ptr)
            group_share = _share(group_end - group_begin, group_ctas, OVERHEAD)
            alone = OVERHEAD + tl.minimum(share // UNEVENNESS, CUT)
            slack = tl.where(group_ctas == 1, alone, tl.minimum(2 * share // UNEVENNESS, CUT // 2))
            if tl.max((is_row & (group_share > share + slack)).to(tl.int32), 0) == 0:
                begin, row_share = group_begin, group_share
                group_of_cta = cta // group_ctas
                number = cta - group_of_cta * group_ctas
                cta_begin, cta_end = _group_bounds(group_of_cta, groups, first_groups, of_first, of_others, offsets_ptr)
                cta_share = _share(cta_end - cta_begin, group_ctas, OVERHEAD)

        row_begin, row_end = ends - cost - begin, ends - begin
        if SPLIT_PAGES:
            splits = row_end - row_begin
        else:
            cuts = (row_end - 1 - TAIL) // row_share - (row_begin + OVERHEAD) // row_share
            splits = tl.where(row_end > row_begin, 1 + tl.maximum(cuts, 0), 0)
        splits = tl.where(is_row, splits, 0)
        _store_splits(place, is_row, splits, num_pages, split_indptr_ptr, merged_rows_ptr, next_row_ptr, ROWS)
        tl.debug_barrier()

        length = cta_end - cta_begin
        at = tl.minimum(number, (length + cta_share - 1) // cta_share) * cta_share
        at = cta_begin + tl.minimum(at, length)
        near = tl.minimum(_segment_of(offsets_ptr, at, ROWS, ROW_BITS) + 1, ROWS)
        end = tl.load(offsets_ptr + near)
        at = tl.where(end - at <= TAIL, end, at)
        start_place = _segment_of(offsets_ptr, at, ROWS, ROW_BITS)
        offset = tl.load(offsets_ptr + start_place)
        into = at - offset
        split = tl.load(split_indptr_ptr + start_place)
        if SPLIT_PAGES:
            page, split = into * SPLIT_PAGES, split + into
        else:
            page = tl.maximum(into - OVERHEAD, 0)
            cut = number - (offset - cta_begin + OVERHEAD) // cta_share
            split += tl.where(into > OVERHEAD, cut, 0)
        tl.store(cta_row_ptr + cta, start_place, mask=is_cta)
        tl.store(cta_page_ptr + cta, page, mask=is_cta)
        tl.store(cta_split_ptr + cta, split, mask=is_cta)


@kernel
def _bounded(lens, MOST: tl.constexpr):
    """Return lengths clipped to the range from 0 to MOST."""
    return tl.minimum(tl.maximum(lens, 0), MOST)


@kernel
def _visible_pages(
    head,
    is_row,
    kv_len,
    q_len,
    window_ptr,
    sink_tokens_ptr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return sink pages, first page and number of pages of each row, as `portable.visibility.page_walk`; 0 where
    `is_row` is false.
    """
    first_query = tl.maximum(kv_len - q_len, 0)
    end = tl.where(q_len > 0, kv_len, 0)
    is_idle = end <= first_query
    first_page, sink_pages = tl.zeros_like(head), tl.zeros_like(head)
    if window_ptr is not None:
        window = tl.load(window_ptr + head, mask=is_row, other=1)
        first_page = tl.where(is_idle, 0, tl.maximum(first_query - window + 1, 0) // PAGE)
        sinks = tl.minimum(tl.load(sink_tokens_ptr + head, mask=is_row, other=0), tl.maximum(end, 0))
        sink_pages = tl.minimum((sinks + PAGE - 1) // PAGE, first_page)
    elif WINDOW is not None:
        first_page = tl.where(is_idle, 0, tl.maximum(first_query - WINDOW + 1, 0) // PAGE)
    end_page = tl.where(is_idle, 0, (end + PAGE - 1) // PAGE)
    return sink_pages, first_page, sink_pages + end_page - first_page


@kernel
def _cost(num_pages, OVERHEAD: tl.constexpr, SPLIT_PAGES: tl.constexpr):
    """Return the cost of each row (`Sharing.cost`)."""
    if SPLIT_PAGES:
        cost = (num_pages + SPLIT_PAGES - 1) // SPLIT_PAGES
    else:
        cost = tl.where(num_pages > 0, num_pages + OVERHEAD, 0)
    return cost


@kernel
def _share(total, ctas, OVERHEAD: tl.constexpr):
    """Return the cost that each CTA processes (`Sharing.share`)."""
    return tl.maximum((total + ctas - 1) // ctas, OVERHEAD + 1)


@kernel
def _groups(rows, CTAS: tl.constexpr):
    """Return the number of groups, CTAs per group, the number of leading groups of equal size, and the rows of a
    leading and of another group (`Groups.of`).
    """
    rows_per_cta = tl.maximum((rows + CTAS - 1) // CTAS, 1)
    of_each = tl.where(rows_per_cta > 1, rows_per_cta, 2)
    number = tl.maximum((rows + of_each - 1) // of_each, 1)
    rounds = rows // number
    left, back = rows - number * rounds, rounds & 1
    first = tl.where(back == 1, number - left, left)
    return number, tl.maximum(CTAS // number, 1), first, rounds + 1 - back, rounds + back


@kernel
def _group_start(group, groups, first_groups, of_first, of_others):
    """Return the place of a group's first row (`Groups.start`)."""
    group = tl.minimum(group, groups)
    others = tl.maximum(group - first_groups, 0)
    return (group - others) * of_first + others * of_others


@kernel
def _group_of(place, groups, first_groups, of_first, of_others):
    """Return the group of the row at a place (`Groups.group`)."""
    start_of_others = first_groups * of_first
    among_first = place < start_of_others
    into = tl.where(among_first, place, place - start_of_others)
    size = tl.where(among_first, tl.maximum(of_first, 1), tl.maximum(of_others, 1))
    return tl.minimum(into // size + tl.where(among_first, 0, first_groups), groups - 1)


@kernel
def _group_bounds(group, groups, first_groups, of_first, of_others, offsets_ptr):
    """Return the offsets where groups begin and end."""
    begin = tl.load(offsets_ptr + _group_start(group, groups, first_groups, of_first, of_others))
    return begin, tl.load(offsets_ptr + _group_start(group + 1, groups, first_groups, of_first, of_others))


@kernel
def _snake_place(rank, rows, groups, first_groups, of_first, of_others):
    """Return the place of the row with this rank by length (`Groups.place`)."""
    round_number = rank // groups
    in_round = rank - round_number * groups
    group = tl.where(round_number & 1 == 0, in_round, groups - 1 - in_round)
    start = _group_start(group, groups, first_groups, of_first, of_others)
    return tl.where(rank < rows, start + round_number, rank)


@kernel
def _segment_of(starts_ptr, index, ROWS: tl.constexpr, ROW_BITS: tl.constexpr):
    """Return the largest i for which starts[i] <= index, by bisection. starts [ROWS + 1] begins with 0 and does not
    decrease. ROWS has ROW_BITS bits.
    """
    found = tl.zeros_like(index)
    for bit in tl.static_range(ROW_BITS):
        candidate = found + (1 << (ROW_BITS - 1 - bit))
        start = tl.load(starts_ptr + candidate, mask=candidate <= ROWS, other=2147483647)
        found = tl.where(start <= index, candidate, found)
    return found


@kernel
def _store_rows(
    row,
    is_row,
    place,
    sink_pages,
    first_page,
    num_pages,
    row_order_ptr,
    sink_pages_ptr,
    first_page_ptr,
    num_pages_ptr,
):
    tl.store(row_order_ptr + place, row, mask=is_row)
    tl.store(sink_pages_ptr + place, sink_pages, mask=is_row)
    tl.store(first_page_ptr + place, first_page, mask=is_row)
    tl.store(num_pages_ptr + place, num_pages, mask=is_row)


@kernel
def _smaller(a, b):
    return tl.minimum(a, b)


@kernel
def _store_splits(
    place, is_row, splits, num_pages, split_indptr_ptr, merged_rows_ptr, next_row_ptr, ROWS: tl.constexpr
):
    """Store the fields that follow from the splits and pages of each place; both are 0 where `is_row` is false."""
    ends = tl.cumsum(splits, 0)
    tl.store(split_indptr_ptr + 1 + place, ends, mask=is_row)
    tl.store(split_indptr_ptr + place, ends - splits, mask=place == 0)
    needs_merge = is_row & (splits != 1)
    merged = needs_merge.to(tl.int32)
    tl.store(merged_rows_ptr + tl.cumsum(merged, 0) - 1, place, mask=needs_merge)
    first_unused = tl.sum(merged, 0)
    tl.store(merged_rows_ptr + place, tl.full(place.shape, ROWS, tl.int32), mask=is_row & (place >= first_unused))
    tl.store(merged_rows_ptr + ROWS + place, tl.full(place.shape, ROWS, tl.int32), mask=place == 0)
    busy = tl.where(is_row & (num_pages > 0), place, ROWS)
    following = tl.associative_scan(busy, 0, _smaller, reverse=True)
    tl.store(next_row_ptr + place - 1, following, mask=(place > 0) & is_row)
    tl.store(next_row_ptr + ROWS - 1 - place, tl.full(place.shape, ROWS, tl.int32), mask=place == 0)
