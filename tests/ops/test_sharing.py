"""Tests of `Groups`, which assigns groups of plan rows to groups of programs (CTAs), and of the order of rows in a
plan.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn.portable.schedule import MAX_SNAKE_ROWS, Groups, Sharing

MOST = 40
NUMBERS = jnp.arange(MOST + 5, dtype=jnp.int32)
ROWS = st.integers(0, MOST)
PROGRAMS = st.integers(1, 50)


def groups_of(rows: int, num_programs: int) -> Groups:
    return Groups.of(jnp.int32(rows), num_programs)


@settings(deadline=None)
@given(rows=ROWS, num_programs=PROGRAMS)
def test_groups_cover_all_rows_and_have_programs(rows: int, num_programs: int) -> None:
    groups = groups_of(rows, num_programs)
    number, programs = int(groups.number), int(groups.programs)
    assert 1 <= number <= max(rows, 1)
    assert programs >= 1
    assert number * programs <= num_programs
    starts = np.asarray(groups.start(NUMBERS))
    assert starts[0] == 0
    assert (starts[number:] == rows).all()
    sizes = np.diff(starts[: number + 1])
    assert sizes.max() - sizes.min() <= 1
    np.testing.assert_array_equal(groups.group(NUMBERS)[:rows], np.repeat(np.arange(number), sizes))


@settings(deadline=None)
@given(rows=ROWS, num_programs=PROGRAMS)
def test_places_are_a_permutation_with_idle_rows_last(rows: int, num_programs: int) -> None:
    places = np.asarray(groups_of(rows, num_programs).place(NUMBERS))
    np.testing.assert_array_equal(np.sort(places), NUMBERS)
    np.testing.assert_array_equal(places[rows:], NUMBERS[rows:])


@pytest.mark.slow
@settings(deadline=None)
@given(lens=st.lists(st.integers(1, 1000), min_size=1, max_size=MOST), num_programs=PROGRAMS)
def test_shares_of_groups_differ_by_at_most_the_longest_row(lens: list[int], num_programs: int) -> None:
    groups = groups_of(len(lens), num_programs)
    at = np.empty(len(lens), int)
    at[np.asarray(groups.place(NUMBERS))[: len(lens)]] = sorted(lens, reverse=True)
    shares = np.add.reduceat(at, np.asarray(groups.start(NUMBERS))[: int(groups.number)])
    assert shares.max() - shares.min() <= max(lens)


def test_sort_keys_are_distinct_and_exact_in_float32() -> None:
    sharing = Sharing(overhead=4, cut=8, least=2, split_pages=0)
    longest = 2**24 // MAX_SNAKE_ROWS - 1  # longer rows have the same key, up to the index of the row
    num_pages = jnp.asarray([3, 0, 2**27, 3, longest, 4], jnp.int32)
    keys = np.asarray(sharing.length_key(num_pages, jnp.arange(6, dtype=jnp.int32)))
    assert np.argsort(-keys).tolist() == [2, 4, 5, 0, 3, 1]
    longest_first, idle_last = sharing.length_key(
        jnp.asarray([2**31 - 1, 0], jnp.int32), jnp.asarray([0, MAX_SNAKE_ROWS - 1], jnp.int32)
    ).tolist()
    assert (longest_first, idle_last) == (2**24 - 1, 0)
    assert int(np.float32(longest_first)) == longest_first
