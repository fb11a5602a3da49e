"""Tests of the metadata of a step (positions, slots), compared with loops over tokens, and of `validate_metadata`."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_attn.portable.metadata import (
    cumulative_lens,
    is_prefill,
    slot_mapping,
    token_positions,
    token_slots,
    validate_metadata,
)
from pallas_attn.types import FULL, PAGE_NONE, HeadWindow
from tests.kit.harness import GARBAGE, fresh_rng
from tests.kit.slow_cases import slow_cases

PAGE_SIZE, TABLE_WIDTH, SEQUENCES, HEADS, LENGTH = 4, 3, 4, 2, 16

positions_of = jax.jit(token_positions, static_argnames="length")
slots_of = jax.jit(slot_mapping, static_argnames=("page_size", "length"))


def packed_tokens(q_lens: Any, kv_lens: Any) -> list[tuple[int, int]]:
    """Return (sequence, position) of each new token, in packed order."""
    return [(s, kv - q + i) for s, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True)) for i in range(q)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw the number of new tokens and the length of each sequence. Some sequences have no new tokens or no tokens."""
    kv_lens = draw(st.lists(st.integers(0, TABLE_WIDTH * PAGE_SIZE), min_size=SEQUENCES, max_size=SEQUENCES))
    q_lens = [draw(st.integers(0, min(kv, LENGTH // SEQUENCES))) for kv in kv_lens]
    return np.array(q_lens, np.int32), np.array(kv_lens, np.int32)


# --- on the device


@slow_cases("1")
@pytest.mark.parametrize("page_size", [1, 16])
def test_ids_with_slots_beyond_int32(page_size: int) -> None:
    """A slot that exceeds int32 becomes -1. It would otherwise wrap around to a slot of another page."""
    last = 2**31 // page_size - 1
    tables = jnp.asarray([[last], [min(last + 1, 2**31 - 1)], [min(last + 2, 2**31 - 1)]], jnp.int32)
    sums, lens = jnp.arange(4, dtype=jnp.int32), jnp.ones((3,), jnp.int32)
    want = [last * page_size] + [-1 if page_size > 1 else last] * 2
    assert slots_of(tables, sums, lens, page_size=page_size, length=3).tolist() == want
    chosen = token_slots(jnp.zeros((3, 1), jnp.int32), tables, sums, page_size=page_size)
    assert chosen[:, 0].tolist() == want


def test_cumulative_lens_starts_from_0() -> None:
    np.testing.assert_array_equal(cumulative_lens(jnp.asarray([3, 0, 2], jnp.int32)), [0, 3, 3, 5])


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(steps())
def test_positions_are_the_last_of_each_sequence(step: tuple[np.ndarray, np.ndarray]) -> None:
    q_lens, kv_lens = step
    want = [position for _, position in packed_tokens(q_lens, kv_lens)]
    got = positions_of(cumulative_lens(jnp.asarray(q_lens)), jnp.asarray(kv_lens), length=LENGTH)
    np.testing.assert_array_equal(got, want + [-1] * (LENGTH - len(want)))


@pytest.mark.parametrize("rank", [2, 3])
@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(step=steps(), seed=st.integers(0, 2**32 - 1))
def test_slots_follow_the_tables(rank: int, step: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    """Tokens of absent pages have slot -1. Table entries after the end of a sequence are not read."""
    q_lens, kv_lens = step
    rng = np.random.default_rng(seed)
    shape = (SEQUENCES, TABLE_WIDTH) if rank == 2 else (SEQUENCES, HEADS, TABLE_WIDTH)
    tables = rng.permutation(np.prod(shape)).reshape(shape).astype(np.int32)
    tables[rng.random(shape) < 0.2] = PAGE_NONE
    for s, kv_len in enumerate(kv_lens):
        tables[s, ..., -(-kv_len // PAGE_SIZE) :] = GARBAGE
    pages = [(tables[s, ..., position // PAGE_SIZE], position) for s, position in packed_tokens(q_lens, kv_lens)]
    want = [np.where(page < 0, -1, page * PAGE_SIZE + position % PAGE_SIZE) for page, position in pages]
    want += [np.full(shape[1:-1], -1)] * (LENGTH - len(want))
    cu_q_lens = cumulative_lens(jnp.asarray(q_lens))
    got = slots_of(jnp.asarray(tables), cu_q_lens, jnp.asarray(kv_lens), page_size=PAGE_SIZE, length=LENGTH)
    np.testing.assert_array_equal(got, want)


def test_positions_and_slots_need_no_loop() -> None:
    """The compiled code must have no loop, because XLA would launch kernels for every iteration in each step."""
    tables, cu_q_lens, kv_lens = (jnp.zeros(shape, jnp.int32) for shape in ((300, 4), (301,), (300,)))
    slots = functools.partial(slot_mapping, page_size=4, length=64)
    assert "while" not in jax.jit(slots).lower(tables, cu_q_lens, kv_lens).as_text()


def test_a_token_past_the_table_gets_no_slot() -> None:
    cu_q_lens, kv_lens = jnp.asarray([0, 3], jnp.int32), jnp.asarray([PAGE_SIZE + 1], jnp.int32)
    got = slot_mapping(jnp.asarray([[7]], jnp.int32), cu_q_lens, kv_lens, page_size=PAGE_SIZE, length=3)
    np.testing.assert_array_equal(got, [7 * PAGE_SIZE + 2, 7 * PAGE_SIZE + 3, -1])


def test_an_idle_decode_row_gets_no_slot() -> None:
    """The first sequence has two new tokens in `cu_q_lens`, but length 0, so its tokens have no position and no
    slot.
    """
    cu_q_lens, kv_lens = jnp.asarray([0, 2, 4], jnp.int32), jnp.asarray([0, 2], jnp.int32)
    np.testing.assert_array_equal(token_positions(cu_q_lens, kv_lens, length=4), [-1, -1, 0, 1])
    tables = jnp.asarray([[5], [6]], jnp.int32)
    got = slot_mapping(tables, cu_q_lens, kv_lens, page_size=PAGE_SIZE, length=4)
    np.testing.assert_array_equal(got, [-1, -1, 6 * PAGE_SIZE, 6 * PAGE_SIZE + 1])


def test_is_prefill_excludes_decode_and_padding() -> None:
    cu_q_lens = jnp.asarray([0, 2, 2, 3], jnp.int32)
    for decode in (3, jnp.int32(3)):
        np.testing.assert_array_equal(is_prefill(decode, cu_q_lens, length=8), [0, 0, 0, 1, 1, 1, 0, 0])


def test_other_lengths_and_tables_do_not_retrace() -> None:
    chex.clear_trace_counter()
    traced_once = jax.jit(chex.assert_max_traces(slot_mapping, n=1), static_argnames=("page_size", "length"))
    cu_q_lens = jnp.arange(SEQUENCES + 1, dtype=jnp.int32)
    for kv_len in (1, 5):
        tables, kv_lens = jnp.full((SEQUENCES, TABLE_WIDTH), kv_len), jnp.full((SEQUENCES,), kv_len)
        traced_once(tables, cu_q_lens, kv_lens, page_size=PAGE_SIZE, length=LENGTH)


I32 = functools.partial(jnp.asarray, dtype=jnp.int32)
BAD_DEVICE_CALLS = {
    "lens of rank 2": (lambda: cumulative_lens(I32([[1]])), "lens: expected shape"),
    "lens of floats": (lambda: cumulative_lens(jnp.ones((2,))), "lens: expected dtype"),
    "sums of other sequences": (
        lambda: token_positions(I32([0, 1]), I32([1, 1]), length=2),
        "cu_q_lens: expected shape",
    ),
    "no token": (lambda: token_positions(I32([0, 1]), I32([1]), length=0), "length"),
    "tables of other sequences": (
        lambda: slot_mapping(I32([[0], [1]]), I32([0, 1]), I32([1]), page_size=4, length=1),
        "block_tables: expected shape",
    ),
    "tables of rank 1": (
        lambda: slot_mapping(I32([0]), I32([0, 1]), I32([1]), page_size=4, length=1),
        "block_tables: expected shape",
    ),
    "pages of no token": (
        lambda: slot_mapping(I32([[0]]), I32([0, 1]), I32([1]), page_size=0, length=1),
        "page_size: expected at least 1, got 0",
    ),
    "sums of floats": (lambda: is_prefill(1, jnp.ones((2,)), length=2), "cu_q_lens: expected dtype"),
}


@pytest.mark.parametrize(("call", "message"), BAD_DEVICE_CALLS.values(), ids=BAD_DEVICE_CALLS)
@pytest.mark.usefixtures("unchecked_shapes")
def test_error_names_the_bad_shape(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


# --- on the host


def step(**changes: Any) -> dict[str, Any]:
    """Return valid arguments of `validate_metadata`: two decode rows, an idle row and a chunk of three tokens, with 8
    pages of 4 tokens.
    """
    good = {
        "block_tables": np.array([[3, 1, GARBAGE], [0, PAGE_NONE, 2], [GARBAGE] * 3, [4, 5, -7]], np.int32),
        "kv_lens": np.array([8, 9, 0, 7], np.int32),
        "num_pages": 8,
        "page_size": 4,
        "cu_q_lens": np.array([0, 1, 2, 3, 6], np.int32),
        "slots": np.array([1 * 4 + 3, 2 * 4, -1, 5 * 4, 5 * 4 + 1, 5 * 4 + 2, -1, -1], np.int32),
    }
    return good | changes


def head_wise(**changes: Any) -> dict[str, Any]:
    """Return valid arguments of `validate_metadata` with a table per head: one decode row and two heads. The second
    head sees a sink token and the newest two tokens.
    """
    good = {
        "block_tables": np.array([[[15, 2, 9], [6, GARBAGE, 0]]], np.int32),
        "kv_lens": np.array([10], np.int32),
        "num_pages": 8,
        "page_size": 4,
        "slots": np.array([[9 * 4 + 1, 1]], np.int32),
        "window": HeadWindow(jnp.asarray([FULL, 2], jnp.int32), jnp.asarray([0, 1], jnp.int32)),
    }
    return good | changes


def put(array: Any, at: Any, value: int) -> np.ndarray:
    array = np.array(array)
    array[at] = value
    return array


GOOD, HEAD_WISE = step(), head_wise()


def test_valid_metadata() -> None:
    validate_metadata(**GOOD)
    validate_metadata(**HEAD_WISE)
    validate_metadata(**step(cu_q_lens=None, slots=None, q_lens=np.array([1, 4, 4, 0])))
    validate_metadata(**step(cu_q_lens=None, slots=None))
    validate_metadata(**step(**{name: jnp.asarray(GOOD[name]) for name in ("block_tables", "kv_lens", "slots")}))
    validate_metadata(**step(block_tables=GOOD["block_tables"].tolist(), kv_lens=[8, 9, 0, 7]))


@pytest.mark.parametrize("cu_q_lens", [[0, 2, 5, 0, 0], [3, 4, 6, 6, 6], [1, 2, 0, 0, 0], [0, 0, 0, 0, 0]])
def test_sums_padded_with_zeros_and_sums_past_0(cu_q_lens: list[int]) -> None:
    """`cu_q_lens` may begin after 0 and end with zeros. Sequences of the zeros have no tokens. Tokens before the first
    and after the largest sum belong to no sequence.
    """
    kv_lens = np.array([9, 4, 7, 2], np.int32)
    bounds = np.maximum.accumulate(cu_q_lens)
    positions, packed = np.full(LENGTH, -1), np.diff(bounds)
    for s, (first, end) in enumerate(itertools.pairwise(bounds)):
        positions[first:end] = np.arange(kv_lens[s] - packed[s], kv_lens[s])
    np.testing.assert_array_equal(positions_of(jnp.asarray(cu_q_lens), kv_lens, length=LENGTH), positions)
    tables = np.arange(SEQUENCES * TABLE_WIDTH, dtype=np.int32).reshape(SEQUENCES, TABLE_WIDTH)
    slots = slots_of(tables, jnp.asarray(cu_q_lens), kv_lens, page_size=PAGE_SIZE, length=LENGTH)
    np.testing.assert_array_equal(np.asarray(slots) < 0, positions < 0)
    validate_metadata(tables, kv_lens, num_pages=tables.size, page_size=PAGE_SIZE, cu_q_lens=cu_q_lens, slots=slots)
    marked = np.zeros(LENGTH + 2, bool)
    marked[2 + bounds[0] : 2 + bounds[-1]] = True
    np.testing.assert_array_equal(is_prefill(2, jnp.asarray(cu_q_lens), length=LENGTH + 2), marked)


def test_slots_from_the_device_are_valid() -> None:
    rng = fresh_rng()
    tables = rng.permutation(SEQUENCES * TABLE_WIDTH).reshape(SEQUENCES, TABLE_WIDTH).astype(np.int32)
    q_lens, kv_lens = np.array([1, 3, 0, 4], np.int32), np.array([1, 3, 9, 12], np.int32)
    cu_q_lens = cumulative_lens(jnp.asarray(q_lens))
    slots = slots_of(jnp.asarray(tables), cu_q_lens, jnp.asarray(kv_lens), page_size=PAGE_SIZE, length=LENGTH)
    check = functools.partial(validate_metadata, tables, kv_lens, page_size=PAGE_SIZE, cu_q_lens=cu_q_lens)
    check(num_pages=tables.size, slots=slots)
    with pytest.raises(ValueError, match="block_tables"):
        check(num_pages=1, slots=slots)


def test_entries_of_a_sequence_without_new_tokens_are_ignored() -> None:
    validate_metadata([[0], [GARBAGE]], [4, 4], num_pages=1, page_size=4, q_lens=[1, 0])
    with pytest.raises(ValueError, match=re.escape("block_tables[1, 0]")):
        validate_metadata([[0], [GARBAGE]], [4, 4], num_pages=1, page_size=4, q_lens=[1, 1])


def test_entries_within_the_window_are_checked() -> None:
    """Only entries of visible pages are checked. With a window of 4 keys, the query at position 8 sees tokens 5 to 8,
    so the entry of page 0 is not checked; with a window of 6 it is.
    """
    tables, kv_lens = [[GARBAGE, 2, 3]], [9]
    validate_metadata(tables, kv_lens, num_pages=4, page_size=4, window=4)
    validate_metadata([[GARBAGE, GARBAGE, 3]], kv_lens, num_pages=4, page_size=4, window=1)
    for call in ({"window": 6}, {"window": 5, "q_lens": [2]}, {"window": None}):
        with pytest.raises(ValueError, match=re.escape("block_tables[0, 0]")):
            validate_metadata(tables, kv_lens, num_pages=4, page_size=4, **call)
    sinks = HeadWindow(jnp.asarray([4], jnp.int32), jnp.asarray([1], jnp.int32))
    with pytest.raises(ValueError, match=re.escape("block_tables[0, 0]")):
        validate_metadata(tables, kv_lens, num_pages=4, page_size=4, window=sinks)


BAD_STEPS = {
    "a page past the pool": (
        step(block_tables=put(GOOD["block_tables"], (0, 1), 8)),
        "block_tables[0, 1]: expected an id from 0 to 7 or PAGE_NONE, got 8",
    ),
    "a negative page": (step(block_tables=put(GOOD["block_tables"], (3, 0), -2)), "block_tables[3, 0]: expected"),
    "a row past the pool": (
        head_wise(block_tables=put(HEAD_WISE["block_tables"], (0, 0, 1), 16)),
        "block_tables[0, 0, 1]: expected an id from 0 to 15 or PAGE_NONE, got 16",
    ),
    "a sink's row": (head_wise(block_tables=put(HEAD_WISE["block_tables"], (0, 1, 0), 99)), "block_tables[0, 1, 0]"),
    "more tokens than the table has pages for": (
        step(kv_lens=put(GOOD["kv_lens"], 1, 13)),
        "kv_lens[1]: expected 0 to the 12 tokens a table row has pages for, got 13",
    ),
    "fewer tokens than none": (step(kv_lens=put(GOOD["kv_lens"], 2, -1)), "kv_lens[2]: expected"),
    "sums from below 0": (step(cu_q_lens=put(GOOD["cu_q_lens"], 0, -1)), "cu_q_lens[0]: expected at least 0, got -1"),
    "sums that fall": (step(cu_q_lens=put(GOOD["cu_q_lens"], 3, 1)), "cu_q_lens[3]: expected a rise of 0"),
    "more new tokens than a row holds": (
        step(cu_q_lens=put(GOOD["cu_q_lens"], 4, 11)),
        "cu_q_lens[4]: expected a rise of 0 to the row's kv_len from the entry before, got 11",
    ),
    "fewer slots than tokens": (
        step(slots=GOOD["slots"][:5]),
        "slots: expected one for each of 6 packed tokens, got 5",
    ),
    "more queries than a row holds": (
        step(cu_q_lens=None, q_lens=[1, 10, 1, 1]),
        "q_lens[1]: expected at most the row's kv_len, got 10",
    ),
    "fewer queries than none": (step(cu_q_lens=None, q_lens=[1, 1, -1, 1]), "q_lens[2]: expected at least 0, got -1"),
    "new tokens twice": (step(q_lens=[1, 1, 1, 3]), "q_lens: expected None with cu_q_lens"),
    "a slot past the pool": (step(slots=put(GOOD["slots"], 6, 32)), "slots[6]: expected 0 to 31 or -1, got 32"),
    "a negative slot": (step(slots=put(GOOD["slots"], 6, -2)), "slots[6]: expected 0 to 31 or -1, got -2"),
    "two tokens in one slot": (
        step(slots=put(GOOD["slots"], 4, 7)),
        "slots[4]: expected a unique slot, got 7, the slot of slots[0]",
    ),
    "two heads in one slot": (
        head_wise(slots=[[37, 37]]),
        "slots[0, 1]: expected a unique slot, got 37, the slot of slots[0, 0]",
    ),
    "slots of pages for tables of rows": (head_wise(slots=np.array([1])), "slots: expected shape"),
    "lengths of other rows": (step(kv_lens=GOOD["kv_lens"][:3]), "kv_lens: expected shape"),
    "lengths of floats": (step(kv_lens=GOOD["kv_lens"] * 1.0), "kv_lens: expected integers, got float64"),
    "no page": (step(num_pages=0), "num_pages: expected at least 1, got 0"),
    "pages of no token": (step(page_size=0), "page_size: expected at least 1, got 0"),
    "more slots than int32": (step(num_pages=2**30), "num_pages: slots of 1073741824 rows of 4 tokens"),
    "an empty window": (step(window=0), "window: expected"),
    "a window of other heads": (
        head_wise(window=HeadWindow(jnp.ones((3,), jnp.int32), jnp.ones((3,), jnp.int32))),
        "window.window: expected shape",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
@pytest.mark.usefixtures("unchecked_shapes")
def test_error_names_argument_position_and_value(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        validate_metadata(**call)
