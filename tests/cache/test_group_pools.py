"""Tests of `GroupPools`, the pools of several cache groups. A cache group is a set of layers with equal windows.

A row is one page of one KV head.
"""

import numpy as np
import pytest

from pallas_attn import FULL, PAGE_NONE
from pallas_attn.cache import GroupPools, HeadPagePool, OutOfPages, PageError
from tests.cache.prefix_case import Heads, Sequences, head_window, make_pools

GROUPS: list[tuple[int, Heads]] = [(16, [(FULL, 0)]), (12, [(FULL, 0), (5, 0)])]


def pools() -> GroupPools:
    return Sequences(groups=GROUPS).pools


def snapshot(of: GroupPools) -> list:
    state = ("_tables", "_num_pages", "_oldest_query", "_first_page")
    return [
        (list(pool._rows._free), pool._rows._refcounts[:], *(getattr(pool, name).tolist() for name in state))
        for pool in of.pools
    ]


def test_allocation_in_all_groups_or_none():
    both = pools()
    both.allocate(0, 20)
    assert both.num_owned == (5, 10)
    before = snapshot(both)
    with pytest.raises(OutOfPages, match="4 pages requested, 2 free"):
        both.allocate(1, 8)
    assert snapshot(both) == before, "although the first group has room"
    assert (both.room(1), both.room(0)) == (4, 24)
    both.recycle([0], [20])
    assert both.num_owned == (5, 5 + 1)
    both.allocate(1, 12)
    both.check()


def test_groups_recycle_release_and_swap_together():
    both = pools()
    both.allocate(0, 20)
    both.allocate(1, 4)
    tables = both.tables([0, 1])
    assert [table.shape for table in tables] == [(2, 1, 8), (2, 2, 8)]
    assert both.recycle([0, 1], [17, 3]) == ([], tables[1][0, 1, :3].tolist())
    before = both.tables([0, 1])
    both.swap(0, 1)
    assert all(np.array_equal(a, b) for a, b in zip(both.tables([1, 0]), before, strict=True))
    both.release(1)
    both.release(1)
    assert both.num_owned == (1, 2)
    both.check()


def test_reset_after_an_interrupted_call():
    both = pools()
    both.allocate(0, 20)
    both.recycle([0], [17])
    both.pools[1]._rows._free.clear()  # an inconsistent state, as after an interrupted call
    both.pools[0]._num_pages[1] = 3
    both.reset()
    assert snapshot(both) == snapshot(pools())
    both.check()


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [
        ([(5, [(FULL, 0)])], 20),
        ([(5, [(FULL, 0)]), (3, [(FULL, 0)])], 12),
        ([(16, [(FULL, 0), (FULL, 0)])], 32),
        ([(11, [(FULL, 0), (5, 0)])], 32),
        ([(9, [(FULL, 0), (5, 0)])], 28),  # 7 rows of the head without a window, 2 of the other
        ([(3, [(5, 4)])], 32),
        ([(2, [(5, 4)])], 8),
        ([(1, [(FULL, 0), (5, 0)])], 0),
    ],
)
def test_max_tokens_of_a_single_sequence(groups, tokens):
    alone = make_pools(groups)
    assert alone.max_tokens == tokens
    for position in range(tokens):
        alone.recycle([0], [position])
        alone.allocate(0, position + 1)
    assert alone.lacking_pool(tokens) is None
    assert tokens == alone.table_tokens or alone.lacking_pool(tokens + 1) is alone.pools[-1]


@pytest.mark.parametrize("windowed_rows", [6, 10])
def test_has_room_counts_the_prefix(windowed_rows):
    case = Sequences(groups=[(8, [(FULL, 0)]), (windowed_rows, [(5, 0)])])
    tokens = list(range(30))
    slot = case.room(16)
    case.cache.publish(slot, tokens[:16])
    roomy = windowed_rows == 10
    assert case.pools.has_room(16, step_tokens=16) == roomy
    assert not case.pools.has_room(20, step_tokens=4), "five pages of the group that sees everything, and four free"
    prefix = case.cache.lookup(tokens)
    assert [rows.shape for rows in prefix] == [(1, 4), (1, 4)]
    assert case.pools.has_room(30, step_tokens=4, prefix=prefix) == roomy, "four more of one, three of the other"
    case.pools.release(slot)
    assert case.pools.has_room(32, step_tokens=4, prefix=prefix)
    assert not case.pools.has_room(33, step_tokens=4, prefix=prefix), (
        "what it begins with is free, but for nothing else"
    )
    assert not case.pools.has_room(33, step_tokens=4)


def test_pools_of_different_shapes():
    good = {"page_size": 4, "max_num_seqs": 2, "max_pages_per_seq": 8}
    for change in ({"page_size": 8}, {"max_num_seqs": 3}, {"max_pages_per_seq": 9}):
        members = [HeadPagePool(8, head_window([(FULL, 0)]), **{**good, **changed}) for changed in ({}, change)]
        with pytest.raises(ValueError, match="pools must be at least one, all of one page size"):
            GroupPools(members)
    with pytest.raises(ValueError, match="pools must be at least one"):
        GroupPools([])


SEEN = np.array([[0, 1, 2], [PAGE_NONE, PAGE_NONE, 3]], np.int32)
"""Row ids of the first three pages of a sequence, for a head without a window and a head with a window of 5 tokens. A
row is one page of one KV head.
"""


def test_adopted_sequence_equals_a_computed_one():
    both = pools()
    both.adopt(3, (SEEN[:1], SEEN))
    assert both.num_owned == (3, 4)
    assert [pool.allocated_tokens(3) for pool in both.pools] == [12, 12]
    assert both.recycle([3], [12]) == ([], [])
    both.adopt(4, (SEEN[:1], SEEN))
    assert both.num_owned == (3, 4), "shared"
    both.allocate(3, 20)
    assert both.recycle([3], [16]) == ([], [3])
    assert both.pools[1].num_owned == 4 + 4, "another holds it"
    both.release(4)
    assert both.pools[1].num_owned == 3 + 4 - 2 + 2
    both.check()


@pytest.mark.parametrize(
    ("batch_slot", "rows", "error", "message"),
    [
        (0, SEEN, ValueError, "batch_slot must be idle, 0 is not"),
        (8, SEEN, ValueError, "batch_slot must be from 0 to 7, got 8"),
        (1, SEEN[:, :0], ValueError, "as many pages for 2 groups"),
        (1, SEEN[:1], ValueError, r"rows must be \[2, 8\] or fewer pages, got \[1, 3\]"),
        (1, SEEN[[1, 0]], ValueError, r"rows\[0, 0\] must be present, got -1"),
        (1, SEEN[[0, 0]], ValueError, r"rows\[1, 0\] must be absent, got 0"),
        (1, np.where(SEEN == 3, 2, SEEN), ValueError, r"rows must be given once each, got \[0, 1, 2, 2\]"),
        (1, np.where(SEEN == 3, 12, SEEN), PageError, "page 12 is not of this pool of 12"),
    ],
)
def test_invalid_prefix_changes_no_group(batch_slot, rows, error, message):
    both = pools()
    both.allocate(0, 4)
    before = snapshot(both)
    with pytest.raises(error, match=message):
        both.adopt(batch_slot, (SEEN[:1], rows.astype(np.int32)))
    assert snapshot(both) == before
    both.check()


def test_prefix_needs_rows_of_every_group():
    both = pools()
    with pytest.raises(ValueError, match=r"for 2 groups, got \[\[1, 3\]\]"):
        both.adopt(0, (SEEN[:1],))
