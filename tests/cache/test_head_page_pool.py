"""Tests of `HeadPagePool`, which allocates page rows. A page row (row) is one page of one KV head.

`recycle` frees the rows that no query at a given position or later sees.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL, PAGE_NONE, HeadWindow, slot_mapping, validate_metadata
from pallas_attn.cache import HeadPagePool, InconsistentCache, OutOfPages, PageError
from pallas_attn.portable.visibility import page_walk

PAGE_SIZE = 4


def heads(*widths: int, sink_tokens: int | list[int] = 0) -> HeadWindow:
    window = np.array(widths, np.int32)
    return HeadWindow(jnp.asarray(window), jnp.asarray(np.broadcast_to(sink_tokens, window.shape).astype(np.int32)))


def make_pool(window: HeadWindow, num_rows: int = 64, **sizes: int) -> HeadPagePool:
    return HeadPagePool(
        num_rows, window, **{"page_size": PAGE_SIZE, "max_num_seqs": 3, "max_pages_per_seq": 8, **sizes}
    )


def snapshot(pool: HeadPagePool) -> tuple:
    """Return the full state of a pool, including the order of free rows."""
    state = (pool._tables, pool._num_pages, pool._oldest_query, pool._first_page)
    return list(pool._rows._free), pool._rows._refcounts[:], [values.tolist() for values in state]


def held(pool: HeadPagePool, batch_slot: int = 0) -> list[list[int]]:
    """Return, for each head, the indices of the sequence's pages that have a row."""
    return [np.flatnonzero(table != PAGE_NONE).tolist() for table in pool.tables([batch_slot])[0]]


def test_full_heads_have_the_row_ids_of_rank_2_tables():
    pool = make_pool(heads(FULL, FULL, FULL), num_rows=15)
    pool.allocate(1, 4)
    pool.allocate(0, 13)
    pages = np.array([[1, 2, 3, 4], [0, PAGE_NONE, PAGE_NONE, PAGE_NONE]])
    wanted = np.where(pages[:, None] == PAGE_NONE, PAGE_NONE, pages[:, None] * 3 + np.arange(3)[:, None])
    np.testing.assert_array_equal(pool.tables([0, 1])[:, :, :4], wanted)
    assert pool.num_free == 0
    assert pool.recycle([0], [13]) == []
    pool.check()


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 31, 32])
def test_room_grows_by_pages(num_tokens):
    pool = make_pool(heads(FULL, 2))
    pages = -(-num_tokens // PAGE_SIZE)
    assert pool.num_lacking(1, num_tokens) == 2 * pages
    pool.allocate(1, num_tokens)
    assert held(pool, 1) == [list(range(pages))] * 2
    assert pool.num_owned == 2 * pages
    before = snapshot(pool)
    for again in (num_tokens, pages * PAGE_SIZE, num_tokens // 2):
        assert pool.num_lacking(1, again) == 0
        pool.allocate(1, again)
    assert snapshot(pool) == before


def test_allocation_is_all_heads_or_none():
    pool = make_pool(heads(FULL, 4, 4), num_rows=8)
    pool.allocate(0, 8)
    before = snapshot(pool)
    for batch_slot, num_tokens in ((0, 9), (1, 1)):
        with pytest.raises(OutOfPages, match="3 pages requested, 2 free"):
            pool.allocate(batch_slot, num_tokens)
        assert snapshot(pool) == before
    pool.recycle([0], [8])
    pool.allocate(1, 1)
    assert held(pool, 0) == [[0, 1], [1], [1]], "a window of 4 before token 8 is tokens 5 to 8"
    pool.check()


def test_every_head_can_use_recycled_rows():
    pool = make_pool(heads(FULL, 1), num_rows=8)
    pool.allocate(0, 16)
    assert pool.recycle([0], [16]) == [1, 3, 5, 7]
    pool.allocate(0, 24)
    assert pool.tables([0])[0, 0, :6].tolist() == [0, 2, 4, 6, 7, 3]
    assert held(pool) == [[0, 1, 2, 3, 4, 5], [4, 5]]


# A query at position p sees the keys at positions p - window + 1 to p. If p is the oldest query, `recycle` frees a page
# whose last token is at position p - window or before.
BOUNDARIES = [
    # window, sink tokens, oldest query, and the pages of a sequence of 32 tokens that `recycle` frees
    (1, 0, 3, []),
    (1, 0, 4, [0]),
    (1, 0, 31, list(range(7))),
    (1, 0, 32, list(range(8))),
    (2, 0, 4, []),
    (2, 0, 5, [0]),
    (PAGE_SIZE - 1, 0, 5, []),
    (PAGE_SIZE - 1, 0, 6, [0]),
    (PAGE_SIZE, 0, 6, []),
    (PAGE_SIZE, 0, 7, [0]),
    (PAGE_SIZE + 1, 0, 7, []),
    (PAGE_SIZE + 1, 0, 8, [0]),
    (PAGE_SIZE + 1, 0, 11, [0]),
    (PAGE_SIZE + 1, 0, 12, [0, 1]),
    (32, 0, 32, []),
    (29, 0, 32, [0]),
    (33, 0, 32, []),
    (FULL, 0, 32, []),
    (FULL, 5, 32, []),
    (1, 1, 32, [1, 2, 3, 4, 5, 6, 7]),
    (1, PAGE_SIZE, 32, [1, 2, 3, 4, 5, 6, 7]),
    (1, PAGE_SIZE + 1, 32, [2, 3, 4, 5, 6, 7]),  # the sink tokens end inside page 1
    (1, PAGE_SIZE + 1, 11, []),
    (1, PAGE_SIZE + 1, 12, [2]),
    (1, 32, 32, []),
    (1, 100, 32, []),
]


@pytest.mark.parametrize(("window", "sink_tokens", "oldest_query", "gone"), BOUNDARIES)
def test_recycled_pages_are_outside_window_and_sinks(window, sink_tokens, oldest_query, gone):
    pool = make_pool(heads(window, FULL, sink_tokens=sink_tokens))
    pool.allocate(0, 32)
    rows = pool.tables([0])[0, 0]
    assert pool.recycle([0], [oldest_query]) == rows[gone].tolist()
    assert held(pool) == [[page for page in range(8) if page not in gone], list(range(8))]
    assert pool.recycle([0], [oldest_query]) == []
    pool.check()


def test_rejected_drafts_delay_recycling():
    pool = make_pool(heads(2))
    pool.allocate(0, 10)  # a step computed tokens 5 to 9; tokens 6 to 9 are rejected drafts
    rows = pool.tables([0])[0, 0]
    assert pool.recycle([0], [5]) == rows[:1].tolist(), "5 comes again, and sees 4: after 9 nobody would have"
    assert pool.recycle([0], [6]) == []
    assert held(pool) == [[1, 2]]
    assert pool.slots([0], [6]).tolist() == [[rows[1] * PAGE_SIZE + 2]], "and is written where it was"
    assert pool.recycle([0], [9]) == rows[1:2].tolist()


def test_second_release_does_nothing():
    pool = make_pool(heads(FULL, 3, sink_tokens=[0, 5]), num_rows=20)
    pool.allocate(0, 20)
    pool.recycle([0], [20])
    pool.allocate(1, 4)
    pool.release(0)
    assert held(pool, 0) == [[], []]
    assert pool.num_owned == 2
    before = snapshot(pool)
    pool.release(0)
    pool.release(2)
    assert snapshot(pool) == before
    pool.allocate(0, 12)
    assert held(pool, 0) == [[0, 1, 2]] * 2, "a new sequence starts with nothing recycled"
    assert pool.recycle([0], [0]) == []
    pool.check()


def test_swap_exchanges_rows_and_state():
    pool = make_pool(heads(FULL, 3, sink_tokens=[0, 1]))
    pool.allocate(0, 20)
    pool.recycle([0], [12])
    pool.allocate(2, 7)
    tables = pool.tables([0, 1, 2])
    pool.swap(0, 2)
    pool.swap(1, 1)
    np.testing.assert_array_equal(pool.tables([2, 1, 0]), tables)
    pool.swap(0, 1)  # one of the two batch slots is idle
    np.testing.assert_array_equal(pool.tables([2, 0, 1]), tables)
    with pytest.raises(ValueError, match="from 12"):
        pool.recycle([2], [11])
    assert pool.recycle([2], [20]) == tables[0, 1, [2, 3]].tolist()
    assert pool.num_lacking(1, 9) == 2
    pool.release(0)
    pool.check()


def test_free_fraction_shows_every_row():
    pool = make_pool(heads(FULL, FULL, 1), num_rows=8)
    assert pool.free_fraction == 1.0
    pool.allocate(0, 8)
    assert (pool.num_rows, pool.num_owned, pool.num_free, pool.free_fraction) == (8, 6, 2, 0.25)
    pool.recycle([0], [4])
    assert pool.free_fraction == 0.375, "three rows are one page, of which a count of pages would not have known"


def test_tables_are_copies_with_idle_rows():
    pool = make_pool(heads(FULL, FULL))
    pool.allocate(2, 5)
    tables = pool.tables([-1, 2, 0])
    assert tables.shape == (3, 2, 8)
    assert tables.dtype == np.int32
    assert (tables[[0, 2]] == PAGE_NONE).all()
    assert tables[1, :, :3].tolist() == [[0, 2, -1], [1, 3, -1]]
    tables.fill(7)
    assert held(pool, 2) == [[0, 1], [0, 1]]
    assert pool.tables([]).shape == (0, 2, 8)


def test_slots_equal_slot_mapping_and_are_unique():
    window = heads(FULL, 5, 1, sink_tokens=[0, 2, 0])
    pool = make_pool(window)
    old, new = np.array([9, 0, 14]), np.array([3, 6, 1])
    for batch_slot, (start, num_tokens) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        pool.allocate(batch_slot, start)
        pool.recycle([batch_slot], [start])
        pool.allocate(batch_slot, start + num_tokens)
    sequence = np.array([0] * 3 + [1] * 6 + [2] + [-1] * 2)
    position = np.concatenate([start + np.arange(count) for start, count in zip(old, new, strict=True)] + [[-9, 99]])
    slots = pool.slots(sequence, position)
    tables = pool.tables([0, 1, 2])
    ends, cu_q_lens = (old + new).astype(np.int32), np.array([0, 3, 9, 10], np.int32)
    wanted = slot_mapping(
        jnp.asarray(tables), jnp.asarray(cu_q_lens), jnp.asarray(ends), page_size=PAGE_SIZE, length=len(sequence)
    )
    assert slots.dtype == np.int32
    np.testing.assert_array_equal(slots, wanted)
    assert (slots[-2:] == -1).all()
    metadata = {"num_pages": 22, "page_size": PAGE_SIZE, "cu_q_lens": cu_q_lens, "window": window}
    validate_metadata(tables, ends, slots=slots, **metadata)
    assert pool.slots([], []).shape == (0, 3)


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_remaining_pages_equal_page_walk(page_size):
    sink_tokens = [0, 1, 4, 5, 11, 0]
    window = heads(FULL, 1, 3, 4, 5, 9, sink_tokens=sink_tokens)
    for step_tokens in (1, 5):
        pool = make_pool(window, 200, page_size=page_size, max_pages_per_seq=32)
        for start in range(0, 25, step_tokens):
            pool.recycle([0], [start])
            pool.allocate(0, start + step_tokens)
            ends = jnp.full((6,), start + step_tokens, jnp.int32)
            walk = page_walk(ends - step_tokens, ends, window.window, window.sink_tokens, page_size=page_size)
            sinks, first, count = (np.asarray(values).tolist() for values in walk)
            walked = [[*range(s), *range(f, f + n - s)] for s, f, n in zip(sinks, first, count, strict=True)]
            assert held(pool) == walked
            assert pool.num_owned <= pool.peak_rows(start + step_tokens, step_tokens=step_tokens)


def test_peak_rows_grow_with_the_tokens_until_the_window_is_full():
    pool = make_pool(heads(FULL, 6, sink_tokens=[0, 1]))
    assert [pool.peak_rows(n, step_tokens=1) for n in (0, 1, 4, 5, 16, 17, 32)] == [0, 2, 2, 4, 8, 5 + 4, 8 + 4]
    assert pool.peak_rows(32, step_tokens=32) == 16


@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("step_tokens", [1, 2, 4, 5])
def test_peak_rows_is_the_maximum(width, step_tokens):
    def rows(start: int) -> int:
        pool = make_pool(heads(width, sink_tokens=5))
        pool.allocate(0, start)
        pool.recycle([0], [start])
        pool.allocate(0, start + step_tokens)
        return pool.num_owned

    assert max(map(rows, range(28))) == make_pool(heads(width, sink_tokens=5)).peak_rows(32, step_tokens=step_tokens)


def test_largest_slot_fits_int32():
    pool = HeadPagePool(2, heads(FULL), page_size=2**30, max_num_seqs=1, max_pages_per_seq=2)
    pool.allocate(0, 2**31)
    assert pool.slots([0], [2**31 - 1]).tolist() == [[2**31 - 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.allocate(3, 1), "batch_slot must be from 0 to 2, got 3"),
        (lambda pool: pool.allocate(-1, 1), "batch_slot must be from 0 to 2, got -1"),
        (lambda pool: pool.allocate(0, -1), "num_tokens must be from 0 to the 32 tokens .*, got -1"),
        (lambda pool: pool.allocate(0, 33), "num_tokens must be from 0 to the 32 tokens .*, got 33"),
        (lambda pool: pool.num_lacking(3, 1), "batch_slot must be from 0 to 2, got 3"),
        (lambda pool: pool.recycle([-1], [0]), r"batch_slots\[0\] must be from 0 to 2, got -1"),
        (
            lambda pool: pool.recycle([0], [8]),
            r"oldest_queries\[0\] must be from 9, its earlier value, to 12, .*, got 8",
        ),
        (
            lambda pool: pool.recycle([0], [13]),
            r"oldest_queries\[0\] must be from 9, .* to 12, the room of the sequence, got 13",
        ),
        (
            lambda pool: pool.recycle([1], [-1]),
            r"oldest_queries\[0\] must be from 0, .* to 0, the room of the sequence, got -1",
        ),
        (lambda pool: pool.release(3), "batch_slot must be from 0 to 2, got 3"),
        (lambda pool: pool.swap(0, 3), "batch_slot must be from 0 to 2, got 3"),
        (lambda pool: pool.swap(-1, 0), "batch_slot must be from 0 to 2, got -1"),
        (lambda pool: pool.tables([0, 3]), r"batch_slots\[1\] must be from -1 to 2, got 3"),
        (lambda pool: pool.tables([-2]), r"batch_slots\[0\] must be from -1 to 2, got -2"),
        (lambda pool: pool.tables([[0]]), r"batch_slots must be a vector of integers, got shape \(1, 1\) of int64"),
        (lambda pool: pool.tables([0.0]), "batch_slots must be a vector of integers, .* of float64"),
        (lambda pool: pool.slots([0], [9.0]), "positions must be a vector of integers, .* of float64"),
        (lambda pool: pool.slots([0, 0], [9]), "positions must be as many as the 2 batch_slots, got 1"),
        (
            lambda pool: pool.slots([-1, 0], [9, 12]),
            r"positions\[1\] must be .* batch slot 0 has rows in all .*, got 12",
        ),
        (lambda pool: pool.slots([0], [7]), r"positions\[0\] must be .* batch slot 0 has rows in all heads, got 7"),
        (lambda pool: pool.slots([2], [-1]), r"positions\[0\] must be .*, got -1"),
        (lambda pool: pool.slots([2], [32]), r"positions\[0\] must be .*, got 32"),
        (lambda pool: pool.slots([1], [0]), r"positions\[0\] must be .* batch slot 1 .*, got 0"),
        (lambda pool: pool.peak_rows(-1, step_tokens=1), "num_tokens not be negative .*, got num_tokens=-1"),
        (lambda pool: pool.peak_rows(1, step_tokens=0), "step_tokens at least 1, got num_tokens=1, step_tokens=0"),
    ],
)
def test_misuse_raises_and_changes_nothing(call, message):
    pool = make_pool(heads(FULL, 1))
    pool.allocate(0, 9)
    pool.recycle([0], [9])
    pool.allocate(2, 32)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=message):
        call(pool)
    assert snapshot(pool) == before
    pool.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 0}, "sizes must be at least 1, got num_rows=0"),
        ({"page_size": 0}, "page_size=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_pages_per_seq": 0}, "max_pages_per_seq=0"),
        ({"num_rows": 2**29 + 1}, "num_rows must be at most 536870912 .* int32, got 536870913"),
        ({"window": 128}, "window must be a HeadWindow, got 128"),
        ({"window": heads()}, "one entry of each per KV head, got 0 windows and 0 numbers"),
        ({"window": HeadWindow(jnp.int32(4), jnp.int32(0))}, r"window.window must be a vector of .*shape \(\)"),
        ({"window": HeadWindow(jnp.ones(2, jnp.int32), jnp.ones(3, jnp.int32))}, "got 2 windows and 3 numbers of sink"),
        ({"window": HeadWindow(jnp.ones(2), jnp.ones(2, jnp.int32))}, "window.window must be .* of float32"),
        ({"window": HeadWindow(jnp.ones(2, jnp.int32), jnp.ones(2))}, "window.sink_tokens must be .* of float32"),
        ({"window": heads(4, 0)}, r"window.window\[1\] must be at least 1, got 0"),
        ({"window": heads(4, 4, sink_tokens=[0, -1])}, r"window.sink_tokens\[1\] must be at least 0, got -1"),
    ],
)
def test_invalid_arguments(arguments, message, unchecked_shapes):
    good: dict[str, Any] = {"num_rows": 8, "page_size": 4, "max_num_seqs": 2, "max_pages_per_seq": 8}
    good["window"] = heads(FULL)
    with pytest.raises(ValueError, match=message):
        HeadPagePool(**(good | arguments))


def owned(pool: HeadPagePool, row: int, count: int) -> None:
    pool._rows._refcounts[row] = count
    if count:
        pool._rows._free.pop(row, None)
    else:
        pool._rows._free[row] = None


def share_row_0(pool: HeadPagePool) -> None:
    """Violate an invariant: two pages of a sequence have row 0. The second page had row 2. Reference counts match."""
    pool._tables[0, 0, 1] = 0
    owned(pool, 0, 2)
    owned(pool, 2, 0)


@pytest.mark.parametrize(
    ("break_pool", "message"),
    [
        (lambda pool: pool._rows._refcounts.__setitem__(0, 0), "page 0 has 0 references"),
        (lambda pool: pool._tables.__setitem__((0, 0, 1), -1), "page 1 of head 0 in batch slot 0 must not be absent"),
        (lambda pool: pool._tables.__setitem__((0, 1, 1), 9), "page 1 of head 1 in batch slot 0 must not be present"),
        (lambda pool: pool._tables.__setitem__((1, 0, 0), 9), "page 0 of head 0 in batch slot 1 must not be present"),
        (lambda pool: pool._tables.__setitem__((0, 0, 1), 0), "row 0 is 2x in tables and owned 1x"),
        (lambda pool: pool._tables.__setitem__((0, 0, 1), 9), "row 2 is 0x in tables and owned 1x"),
        (lambda pool: pool._tables.__setitem__((0, 0, 1), -2), "row -2 is 1x in tables and owned 0x"),
        (lambda pool: pool._tables.__setitem__((0, 0, 1), 64), "row 2 is 0x in tables and owned 1x"),
        (lambda pool: owned(pool, 9, 1), "row 9 is 0x in tables and owned 1x"),
        (share_row_0, r"row 0 is shared between \[head, page\] \[0, 0\] and \[0, 1\]"),
        (lambda pool: owned(pool, 0, 2), "row 0 is 1x in tables and owned 2x"),
    ],
)
def test_check_finds_violated_invariants(break_pool, message):
    pool = make_pool(heads(FULL, 1))
    pool.allocate(0, 9)
    pool.recycle([0], [9])
    pool.check()
    break_pool(pool)
    with pytest.raises(InconsistentCache, match=message):
        pool.check()


def test_held_rows_are_not_allocated_and_dropped_once():
    pool = make_pool(heads(FULL), num_rows=4)
    rows = pool.take(3)
    pool.check()
    assert (pool.num_free, pool.num_owned) == (1, 3)
    with pytest.raises(OutOfPages):
        pool.allocate(0, 2 * PAGE_SIZE)
    pool.hold(rows[:1])
    pool.drop(rows)
    pool.check()
    assert pool.num_free == 3
    with pytest.raises(PageError, match=f"cannot drop row {rows[1]} 1x: it is held 0x"):
        pool.drop(rows[:2])
    pool.drop(rows[:1])
    pool.check()
    assert pool.num_free == 4
    pool.take(2)
    pool.reset()
    pool.check()
    assert pool.num_free == 4


def test_unseen_pages_are_between_sink_tokens_and_window():
    pool = make_pool(heads(FULL, 6, sink_tokens=3))
    unseen = pool.is_unseen(0, 5, oldest_query=16)  # with a window of 6, the query at 16 sees tokens 11 to 16
    assert unseen.tolist() == [[False] * 5, [False, True, False, False, False]]
    assert pool.is_unseen(1, 3, oldest_query=16).tolist() == [[False] * 2, [True, False]]
