"""Tests of the plans that `plan_decode` makes with XLA.

A plan row is one KV head of one sequence. A program is a CTA of the decode kernel. Plans must assign every visible page
to exactly one program, give all programs similar shares, and cut (split) no more rows than the mode requires.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import FULL, DecodePlan, HeadWindow, PagedKV, PagedLatent, mla_decode, paged_decode, plan_decode
from pallas_attn.ops.plan_decode import FIXED_SPLIT_TOKENS
from pallas_attn.ops.plan_decode.config import heuristic_costs
from pallas_attn.portable.schedule import UNEVENNESS
from tests.kit import harness
from tests.kit.slow_cases import slow_cases
from tests.ops import plan_case

BATCH, KV_HEADS, PS = 6, 2, 16
SPLIT_PAGES = FIXED_SPLIT_TOKENS // PS
OVERHEAD = heuristic_costs(PS).row_overhead_pages
CUT = heuristic_costs(PS).cut_pages
PAGES = jax.ShapeDtypeStruct((4, KV_HEADS, PS, 16), jnp.float32)
SIZES: dict[str, Any] = {
    "q": jax.ShapeDtypeStruct((BATCH, 1, 8, 16), jnp.float32),
    "cache": PagedKV(PAGES, PAGES),  # pyrefly: ignore[bad-argument-type]
    "block_tables": jax.ShapeDtypeStruct((BATCH, 4), jnp.int32),
}
modes = pytest.mark.parametrize("mode", ["balanced", "fixed"])


@functools.cache
def planner(mode: str, num_programs: int, window: int | None = None, page_size: int = PS) -> harness.Jitted:
    """Return the jitted `plan_decode` for a mode, number of programs and int window. Lengths and a `HeadWindow` are
    array arguments of the function.
    """

    @jax.jit
    def plan(kv_lens: jax.Array, q_lens: jax.Array | None, windows: HeadWindow | None) -> DecodePlan:
        return plan_case.plan(
            kv_lens,
            q_lens=q_lens,
            window=window if windows is None else windows,
            page_size=page_size,
            num_kv_heads=KV_HEADS,
            num_programs=num_programs,
            mode=mode,
        )

    return plan


class Split(NamedTuple):
    """The part of a row that one program processes: pages [start, stop) among the row's visible pages."""

    row: int
    start: int
    stop: int


def splits_of_programs(plan: DecodePlan) -> list[list[Split]]:
    """Return the splits of each program, computed from the fields of the plan as `DecodePlan` defines them."""
    num_pages = np.asarray(plan.num_pages).tolist()
    starts = list(zip(np.asarray(plan.cta_row).tolist(), np.asarray(plan.cta_page).tolist(), strict=True))
    assert starts[-1] == (len(num_pages), 0), "the last program does not reach the end"
    assert starts == sorted(starts), "programs are not in order"
    return [
        [
            split
            for i in range(begin[0], min(end[0], len(num_pages) - 1) + 1)
            for split in cut(i, begin[1] if i == begin[0] else 0, end[1] if i == end[0] else num_pages[i], plan)
        ]
        for begin, end in itertools.pairwise(starts)
    ]


def cut(place: int, start: int, stop: int, plan: DecodePlan) -> list[Split]:
    """Return the splits of pages [start, stop) of the row at a place. `fixed` mode cuts at multiples of
    `split_pages`.
    """
    size = plan.split_pages or max(stop, 1)
    edges = [start, *(p for p in range(size, stop, size) if p > start), stop]
    return [Split(int(plan.row_order[place]), a, b) for a, b in itertools.pairwise(edges) if b > a]


def by_row(plan: DecodePlan, of_places: Any) -> np.ndarray:
    """Reorder an array with a value per place in the plan's order of rows to a value per row."""
    listed = np.empty(len(of_places), np.int64)
    listed[np.asarray(plan.row_order)] = of_places
    return listed


def walked_entries(plan: DecodePlan, row: int) -> list[int]:
    """Return the table entries of a row's pages, in the order in which the plan visits them."""
    listed = plan.sink_pages, plan.first_page, plan.num_pages
    sink_pages, first_page, num_pages = (int(by_row(plan, x)[row]) for x in listed)
    return [*range(sink_pages), *range(first_page, first_page + num_pages - sink_pages)]


def visible_entries(kv_len: int, q_len: int, window: int = FULL, sink_tokens: int = 0) -> list[int]:
    """Return the table entries that have a token which a query sees, computed token by token."""
    seen = set()
    for position in range(max(kv_len - q_len, 0), kv_len):
        seen |= {t // PS for t in range(position + 1) if t < sink_tokens or t > position - window}
    return sorted(seen)


def check(plan: DecodePlan) -> list[list[Split]]:
    """Assert that every page of every row is in exactly one split, and that the plan has the right number of splits per
    row. Return the splits of each program.
    """
    rows = np.asarray(plan.row_order).tolist()
    assert sorted(rows) == list(range(len(rows)))
    programs = splits_of_programs(plan)
    splits = [split for program in programs for split in program]
    pages = [(row, page) for row, start, stop in splits for page in range(start, stop)]
    assert pages == [(row, page) for row, n in zip(rows, np.asarray(plan.num_pages), strict=True) for page in range(n)]
    counts = np.bincount([split.row for split in splits], minlength=len(rows))[rows]
    np.testing.assert_array_equal(plan.split_indptr, np.cumsum([0, *counts]))
    np.testing.assert_array_equal(plan.cta_split, np.cumsum([0, *map(len, programs)]))
    busy = np.flatnonzero(plan.num_pages).tolist()
    next_busy = [next((b for b in busy if b > place), len(rows)) for place in range(len(rows))]
    np.testing.assert_array_equal(plan.next_row, next_busy)
    merged = [place for place, count in enumerate(counts) if count != 1]
    np.testing.assert_array_equal(plan.merged_rows, merged + [len(rows)] * (len(rows) + 1 - len(merged)))
    return programs


def cost(program: list[Split]) -> int:
    return sum(stop - start + OVERHEAD for _, start, stop in program)


def as_lens(lens: Any) -> jax.Array:
    return jnp.asarray(lens, jnp.int32)


# Short lengths are near page boundaries. Long sequences are split.
LENS = st.lists(
    st.one_of(st.sampled_from([0, 1, PS - 1, PS, PS + 1]), st.integers(0, 300), st.integers(0, 20_000)),
    min_size=BATCH,
    max_size=BATCH,
)
PROGRAMS = st.sampled_from([1, 5, 132])


@pytest.mark.slow
@slow_cases("balanced")
@modes
@settings(deadline=None)
@given(lens=LENS, num_programs=PROGRAMS)
def test_every_page_is_in_exactly_one_split(mode: str, lens: list[int], num_programs: int) -> None:
    plan = planner(mode, num_programs)(as_lens(lens), None, None)
    check(plan)
    np.testing.assert_array_equal(by_row(plan, plan.num_pages), np.repeat(-(-np.array(lens) // PS), KV_HEADS))
    assert plan.made_for.page_size == PS
    assert plan.split_pages == (SPLIT_PAGES if mode == "fixed" else 0)


WINDOWS = st.one_of(st.sampled_from([1, PS - 1, PS, PS + 1, FULL]), st.integers(1, 400))
SINKS = st.one_of(st.sampled_from([0, 1, PS, PS + 1]), st.integers(0, 400))


@slow_cases("balanced")
@modes
@settings(deadline=None)
@given(
    lens=st.lists(st.integers(0, 300), min_size=BATCH, max_size=BATCH),
    q_lens=st.lists(st.integers(0, 20), min_size=BATCH, max_size=BATCH),
    windows=st.lists(st.tuples(WINDOWS, SINKS), min_size=KV_HEADS, max_size=KV_HEADS),
)
def test_rows_visit_the_pages_in_their_window(
    mode: str, lens: list[int], q_lens: list[int], windows: list[tuple[int, int]]
) -> None:
    per_head = HeadWindow(*(as_lens(x) for x in zip(*windows, strict=True)))
    plan = planner(mode, 5)(as_lens(lens), as_lens(q_lens), per_head)
    check(plan)
    for row, (b, h) in enumerate(np.ndindex(BATCH, KV_HEADS)):
        assert walked_entries(plan, row) == visible_entries(lens[b], q_lens[b], *windows[h])


@slow_cases("1-balanced", "17-balanced", "17-fixed", "2147483647-balanced", "2147483647-fixed")
@modes
@pytest.mark.parametrize(
    "window",  # `make test` runs the narrowest window, a window of just over a page, and the full window
    [1, pytest.param(PS, marks=pytest.mark.slow), PS + 1, pytest.param(100, marks=pytest.mark.slow), FULL],
)
def test_one_window_for_all_heads(mode: str, window: int) -> None:
    lens = [0, 1, PS, PS + 1, 100, 300]
    plan = planner(mode, 5, window)(as_lens(lens), None, None)
    check(plan)
    for row, (b, _) in enumerate(np.ndindex(BATCH, KV_HEADS)):
        assert walked_entries(plan, row) == visible_entries(lens[b], 1, window)
    given_q_lens = planner(mode, 5, window)(as_lens(lens), as_lens([1] * BATCH), None)
    chex.assert_trees_all_equal(dataclasses.replace(given_q_lens, made_for=plan.made_for), plan)


@pytest.mark.slow
@settings(deadline=None)
@given(lens=LENS, num_programs=PROGRAMS)
def test_balanced_shares_differ_by_less_than_the_row_overhead(lens: list[int], num_programs: int) -> None:
    """No program exceeds the mean share by more than the cost of a cut or the unevenness that the planner accepts."""
    plan = planner("balanced", num_programs)(as_lens(lens), None, None)
    programs = check(plan)
    costs = [cost(program) for program in programs]
    total = sum(n + OVERHEAD for n in np.asarray(plan.num_pages).tolist() if n)
    share = max(-(-total // num_programs), OVERHEAD + 1)
    tail = OVERHEAD // 2
    # Besides its share, a program may have the cost of starting inside a row (OVERHEAD), and the last pages of that row
    # (the larger of `tail` and the accepted unevenness).
    assert max(costs) <= share + OVERHEAD + max(tail, min(2 * share // UNEVENNESS, CUT))
    if np.diff(plan.split_indptr).max() <= 1 or max(map(len, programs)) <= 1:  # no row is cut, or no program has two
        assert max(costs) <= share + OVERHEAD + max(tail, min(share // UNEVENNESS, CUT))


@pytest.mark.slow
@settings(deadline=None)
@given(lens=LENS, num_programs=PROGRAMS)
def test_balanced_cuts_at_most_once_per_program(lens: list[int], num_programs: int) -> None:
    plan = planner("balanced", num_programs)(as_lens(lens), None, None)
    rows_with_pages = np.count_nonzero(plan.num_pages)
    assert rows_with_pages <= plan.split_indptr[-1] <= rows_with_pages + num_programs - 1


@slow_cases("lens2-2", "lens3-4", "lens5-3", "lens10-6")
@pytest.mark.parametrize(
    ("lens", "num_programs"),
    [
        ([1000] * BATCH, 1),
        ([7, 0, 30_000, 16, 1, 500], 1),
        ([1000] * BATCH, 2),
        ([1000] * BATCH, 4),
        ([1000] * BATCH, BATCH * KV_HEADS),
        ([1000, 0, 1000, 0, 0, 1000], 3),
        ([3, 9, 16, 1, 15, 2], 132),
        ([1000, 1030, 1010, 1040, 1020, 1035], BATCH * KV_HEADS),
        ([5000, 5100, 4900, 5000, 5050, 0], 5),
        ([9000, 0, 0, 0, 0, 0], 2),
        ([1000, 6000, 3000, 4000, 2000, 5000], BATCH),  # pairs of rows have equal sums
        ([1000, 6000, 3000, 4000, 2000, 5000], 3),
    ],
)
def test_balanced_keeps_rows_whole_if_nearly_even(lens: list[int], num_programs: int) -> None:
    """The planner cuts no row if whole rows make nearly equal shares, or if the row is too short for two programs."""
    plan = planner("balanced", num_programs)(as_lens(lens), None, None)
    check(plan)
    assert np.diff(plan.split_indptr).max() == 1


@pytest.mark.parametrize(
    ("lens", "num_programs"),
    [
        ([5000] * 4 + [6500] * 2, BATCH * KV_HEADS),  # the longest row is a fifth longer than the mean
        ([1000, 0, 0, 1000, 1000, 1000], BATCH * KV_HEADS + 1),  # without cuts, a third of the programs would be idle
        ([1_000_000] * 5 + [1_002_000], BATCH * KV_HEADS),  # 0.2% longer, which is more than the cost of a cut
    ],
)
def test_balanced_cuts_rows_if_whole_rows_are_uneven(lens: list[int], num_programs: int) -> None:
    plan = planner("balanced", num_programs)(as_lens(lens), None, None)
    check(plan)
    assert np.diff(plan.split_indptr).max() > 1


@slow_cases("lens1-62-parts1", "lens2-14-parts2", "lens4-140-parts4")
@pytest.mark.parametrize(
    ("lens", "num_programs", "parts"),
    [
        ([8000] * BATCH, 5 * BATCH * KV_HEADS, [5] * BATCH),
        ([8000] * BATCH, 5 * BATCH * KV_HEADS + 2, [5] * BATCH),
        ([8000, 0, 16_000, 8000, 15_900, 7990], 2 * 7, [1, 0, 2, 1, 2, 1]),
        ([32, 16, 48, 0, 0, 16], 132, [1, 1, 1, 0, 0, 1]),
        ([100_000, 0, 0, 0, 1, 0], 140, [69, 0, 0, 0, 1, 0]),
        (
            [256, 0, 0, 0, 0, 0],
            132,
            [3, 0, 0, 0, 0, 0],
        ),  # a part of a row has at least one tile and one page, for any number of programs
    ],
)
def test_balanced_gives_rows_separate_programs(lens: list[int], num_programs: int, parts: list[int]) -> None:
    """If programs that each process one row are nearly as even as equal shares, no program processes parts of two
    rows.
    """
    plan = planner("balanced", num_programs)(as_lens(lens), None, None)
    programs = check(plan)
    assert [len(program) for program in programs] == [1] * (sum(parts) * KV_HEADS) + [0] * (
        num_programs - sum(parts) * KV_HEADS
    )
    np.testing.assert_array_equal(by_row(plan, np.diff(plan.split_indptr)), np.repeat(parts, KV_HEADS))
    for row, pages in enumerate(by_row(plan, plan.num_pages)):
        sizes = [stop - start for program in programs for of, start, stop in program if of == row]
        assert not sizes or max(sizes) == -(-pages // len(sizes))


def test_balanced_splits_a_long_row_among_all_programs() -> None:
    plan = planner("balanced", 132)(as_lens([0, 0, 0, 100_000, 0, 1]), None, None)
    programs = check(plan)
    assert sum(bool(program) for program in programs) >= 130
    assert max(map(cost, programs)) < 1.05 * sum(map(cost, programs)) / 132 + OVERHEAD + OVERHEAD // 2


@pytest.mark.slow
@settings(deadline=None)
@given(lens=LENS, num_programs=PROGRAMS)
def test_fixed_splits_depend_only_on_the_length_of_the_row(lens: list[int], num_programs: int) -> None:
    plan = planner("fixed", num_programs)(as_lens(lens), None, None)
    in_batch = [split for program in check(plan) for split in program]
    for b, length in enumerate(lens):
        alone = planner("fixed", 5)(as_lens([0, 0, 0, 0, 0, length]), None, None)
        own = [split[1:] for program in check(alone) for split in program if split.row == (BATCH - 1) * KV_HEADS]
        assert own == [split[1:] for split in in_batch if split.row == b * KV_HEADS]
        assert all(start % SPLIT_PAGES == 0 for start, _ in own)


@settings(deadline=None)
@given(lens=LENS, num_programs=PROGRAMS)
def test_fixed_shares_are_equal_numbers_of_whole_splits(lens: list[int], num_programs: int) -> None:
    plan = planner("fixed", num_programs)(as_lens(lens), None, None)
    counts = [len(program) for program in check(plan)]
    assert max(counts) <= -(-sum(counts) // num_programs)
    assert (np.asarray(plan.cta_page) % SPLIT_PAGES == 0).all()


@modes
def test_plan_of_idle_rows_has_no_pages(mode: str) -> None:
    plan = planner(mode, 5)(as_lens([0] * BATCH), None, None)
    assert not any(check(plan))
    assert not np.asarray(plan.split_indptr).any()
    no_queries = planner(mode, 5)(as_lens([100] * BATCH), as_lens([0] * BATCH), None)
    assert not any(check(no_queries))


@modes
def test_pages_larger_than_a_fixed_split(mode: str) -> None:
    plan = planner(mode, 5, page_size=2 * FIXED_SPLIT_TOKENS)(as_lens([0, 1, 5000, 4096, 20_000, 9]), None, None)
    programs = check(plan)
    assert mode == "balanced" or all(stop - start == 1 for p in programs for _, start, stop in p)


@modes
def test_lengths_do_not_overflow(mode: str) -> None:
    """Several sequences have the maximum length of int32."""
    plan = planner(mode, 132)(as_lens([2**31 - 1, 0, 0, 2**31 - 1, 0, 0]), None, None)
    assert by_row(plan, plan.num_pages).tolist() == [2**27, 2**27, 0, 0, 0, 0] * 2
    places, pages = np.asarray(plan.cta_row), np.asarray(plan.cta_page)
    assert (np.diff(places) >= 0).all()
    assert (pages >= 0).all()
    taken = np.diff(np.concatenate([[0], np.cumsum(np.asarray(plan.num_pages, np.int64))])[places] + pages)
    assert taken[:-1].min() > 0.9 * 2**29 / 132


@modes
def test_jitted_without_retrace_or_host_callback(mode: str) -> None:
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(kv_lens: jax.Array, q_lens: jax.Array, window: HeadWindow) -> DecodePlan:
        return plan_decode(
            **SIZES,
            kv_lens=kv_lens,
            q_lens=q_lens,
            window=window,
            num_programs=5,
            mode=mode,  # pyrefly: ignore[bad-argument-type]
        )

    rng = harness.fresh_rng()
    for _ in range(5):
        lens, q_lens = as_lens(rng.integers(0, 9999, BATCH)), as_lens(rng.integers(0, 5, BATCH))
        window = HeadWindow(as_lens(rng.integers(1, 999, KV_HEADS)), as_lens(rng.integers(0, 99, KV_HEADS)))
        check(step(lens, q_lens, window))
    harness.assert_no_host_callbacks(step, lens, q_lens, window)


@slow_cases("balanced")
@modes
def test_under_vmap(mode: str) -> None:
    lens = as_lens(harness.fresh_rng().integers(0, 9999, (3, BATCH)))
    plans = jax.vmap(lambda lens: planner(mode, 5)(lens, None, None))(lens)
    for i in range(3):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i], plans), planner(mode, 5)(lens[i], None, None))


GOOD: dict[str, Any] = {**SIZES, "kv_lens": jnp.zeros((BATCH,), jnp.int32)}
QUERIES, LATENTS = jnp.zeros((BATCH, 1, 8, 16)), jnp.zeros((BATCH, 1, 8, 32))
BAD = {
    "kv_lens of rank 2": ("kv_lens", {"kv_lens": jnp.zeros((BATCH, 1), jnp.int32)}),
    "float kv_lens": ("kv_lens", {"kv_lens": jnp.zeros((BATCH,))}),
    "q_lens of another batch": ("q_lens", {"q_lens": jnp.zeros((BATCH - 1,), jnp.int32)}),
    "unsigned q_lens": ("q_lens", {"q_lens": jnp.zeros((BATCH,), jnp.uint32)}),
    "no window": ("window", {"window": 0}),
    "a window that is no integer": ("window", {"window": 2.5}),
    "a window of other heads": (
        "window.window",
        {"window": HeadWindow(jnp.ones((3,), jnp.int32), jnp.zeros((3,), jnp.int32))},
    ),
    "no programs": ("num_programs", {"num_programs": 0}),
    "heads that do not divide": ("q", {"q": jnp.zeros((BATCH, 1, 7, 16))}),
    "a table of another batch": ("block_tables", {"block_tables": jnp.zeros((1, 4), jnp.int32)}),
    "an unknown mode": ("mode", {"mode": "fair"}),
    "an unknown implementation": ("implementation", {"implementation": "cuda"}),
    "one array with latents": ("q", {"cache": PagedLatent(jnp.zeros((4, PS, 48)))}),
}


@slow_cases("float kv_lens")
@slow_cases("kv_lens of rank 2")
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("argument", "change"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(argument: str, change: dict[str, Any]) -> None:
    jax.eval_shape(lambda: plan_decode(**GOOD))
    with pytest.raises(ValueError, match=f"^{argument}:"):
        plan_decode(**(GOOD | change))


# --- use of a plan in a call for which it was not made

STEP: dict[str, Any] = {
    "q": jnp.ones((2, 2, 4, 8)),
    "kv": PagedKV(jnp.ones((6, 2, 4, 8)), jnp.ones((6, 2, 4, 8))),
    "block_tables": jnp.arange(6, dtype=jnp.int32).reshape(2, 3),
    "kv_lens": jnp.array([9, 4], jnp.int32),
    "q_lens": jnp.array([2, 1], jnp.int32),
    "window": 5,
}
OTHERS: dict[str, dict[str, Any]] = {
    "batch": {name: STEP[name][:1] for name in ("q", "block_tables", "kv_lens", "q_lens")},
    "num_queries": {"q": STEP["q"][:, :1]},
    "num_q_heads": {"q": STEP["q"][:, :, :2]},
    "num_kv_heads": {"kv": PagedKV(jnp.ones((6, 1, 4, 8)), jnp.ones((6, 1, 4, 8)))},
    "page_size": {"kv": PagedKV(jnp.ones((6, 2, 2, 8)), jnp.ones((6, 2, 2, 8)))},
    "table_pages": {"block_tables": STEP["block_tables"][:, :2]},
    "window": {"window": 6},
    "q_lens": {"q_lens": None},
}
OWN_WINDOWS = HeadWindow(jnp.array([5, 3], jnp.int32), jnp.array([0, 1], jnp.int32))


@slow_cases("batch-xla", "q_lens-reference")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("field", "change"), OTHERS.items(), ids=OTHERS)
def test_plan_made_for_another_call_raises(field: str, change: dict[str, Any], implementation: str) -> None:
    """Implementations that ignore plans also raise the error, so that the mistake is visible without a GPU."""
    plan = harness.plan_for(STEP, implementation=implementation)
    with pytest.raises(ValueError, match=f"^plan: was made for {field} = .*, this call has {field} = "):
        paged_decode(**STEP | change, plan=plan, implementation=implementation)


@slow_cases("5-None", "None-5", "made_for3-5", "made_for4-None")
@pytest.mark.parametrize(
    ("made_for", "other"), [(5, None), (None, 5), (5, OWN_WINDOWS), (OWN_WINDOWS, 5), (OWN_WINDOWS, None)]
)
def test_plan_made_for_another_window_raises(made_for: Any, other: Any) -> None:
    plan = harness.plan_for(STEP | {"window": made_for})
    jax.eval_shape(lambda: paged_decode(**STEP | {"window": made_for}, plan=plan))
    with pytest.raises(ValueError, match="^plan: was made for window"):
        paged_decode(**STEP | {"window": other}, plan=plan)


def test_full_window_equals_no_window() -> None:
    plan = harness.plan_for(STEP | {"window": FULL})
    jax.eval_shape(lambda: paged_decode(**STEP | {"window": None}, plan=plan))


@pytest.mark.slow
def test_plan_of_paged_kv_does_not_fit_latents() -> None:
    latents: dict[str, Any] = {"q_latent": LATENTS, "q_rope": QUERIES, "cache": PagedLatent(jnp.zeros((4, PS, 48)))}
    latents |= {"block_tables": jnp.zeros((BATCH, 4), jnp.int32), "kv_lens": GOOD["kv_lens"]}
    plan = harness.plan_for(latents)
    mla_decode(**latents, sm_scale=1.0, plan=plan)
    with pytest.raises(ValueError, match="^plan: was made for op = 'paged_decode', this call has op = 'mla_decode'"):
        mla_decode(**latents, sm_scale=1.0, plan=harness.plan_for(STEP))
    with pytest.raises(ValueError, match="^plan: was made for op = 'mla_decode'"):
        paged_decode(**STEP, plan=plan)


@pytest.mark.slow
def test_layers_with_other_scales_and_sinks_share_a_plan() -> None:
    plan = harness.plan_for(STEP)
    layers: list[dict[str, Any]] = [
        {"sm_scale": 0.1},
        {"sinks": jnp.zeros(4)},
        {"soft_cap": 3.0},
        {"out_dtype": jnp.bfloat16},
    ]
    for layer in layers:
        paged_decode(**STEP, **layer, plan=plan)


@pytest.mark.slow
def test_plan_made_for_another_implementation_raises_if_followed() -> None:
    pages = jnp.zeros((4, 1, 16, 64), jnp.bfloat16)
    step = {
        "q": jnp.zeros((1, 1, 4, 64), jnp.bfloat16),
        "kv": PagedKV(pages, pages),
        "block_tables": jnp.zeros((1, 4), jnp.int32),
        "kv_lens": jnp.ones((1,), jnp.int32),
    }

    def follow(made_for: str, implementation: str) -> None:
        plan = functools.partial(harness.plan_for, step, implementation=made_for)
        jax.eval_shape(lambda: paged_decode(**step, plan=plan(), implementation=implementation))

    with plgpu.force_gpu_interpret_mode():
        follow("mosaic", "mosaic")
        follow("mosaic", "xla")
        with pytest.raises(ValueError, match="^plan: was made for implementation 'xla', this call runs 'mosaic_sm90'"):
            follow("xla", "mosaic")
