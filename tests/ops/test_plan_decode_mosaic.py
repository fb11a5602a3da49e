"""Tests of the Mosaic kernel of `plan_decode`: its plans equal the plans of the XLA implementation exactly.

A plan row is one KV head of one sequence. A program is a CTA of the decode kernel.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.mosaic.primitives.block_scan import MOST_WARPGROUPS
from pallas_attn.mosaic.primitives.row_io import THREADS
from pallas_attn.ops.plan_decode import mosaic
from pallas_attn.ops.plan_decode.mosaic import MAX_ROWS
from pallas_attn.portable import schedule
from tests.kit import harness
from tests.ops import plan_case
from tests.ops.plan_case import PS, arguments, check

modes = pytest.mark.parametrize("mode", ["balanced", "fixed"])


@pytest.mark.parametrize(
    ("mode", "windows", "drafts"),
    [
        pytest.param("balanced", False, False, marks=pytest.mark.slow),
        pytest.param("balanced", True, True, marks=pytest.mark.slow),
        pytest.param("fixed", False, False, marks=pytest.mark.slow),
        ("fixed", True, True),
    ],
)
def test_interpreted(mode: str, windows: bool, drafts: bool, capsys: pytest.CaptureFixture[str]) -> None:
    rng = harness.fresh_rng()
    for longest in (100, 20_000):
        given = arguments(rng, 6, 2, longest, windows=windows, drafts=drafts)
        with harness.interpreting(capsys):
            check("mosaic", mode, 140, **given, table_pages=1000, num_queries=3)  # clips lengths


@pytest.mark.slow  # `make test` runs a fixed case of test_interpreted
@pytest.mark.parametrize("mode", ["balanced", "fixed"])
def test_interpreted_in_chunks(mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "MOST_WARPGROUPS", 1)
    given = arguments(harness.fresh_rng(), 100, 3, 3000)
    with harness.interpreting(capsys):
        check("mosaic", mode, 132, **given)


@pytest.mark.slow  # `make test` runs other cases in test_interpreted
@pytest.mark.parametrize(("idle", "num_programs"), [(2, 12), (0, 49), (2, 49), (0, 12)])
def test_interpreted_without_cuts(idle: int, num_programs: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows have such similar lengths that the planner cuts none. There are fewer rows than programs, or more."""
    lens = jnp.asarray([2000, 2040, 2010, 2030, 2020, 2000, 2040, 2010] * 3 + [0] * idle, jnp.int32)
    given = {"kv_lens": lens, "page_size": PS, "num_kv_heads": 2}
    plan = plan_case.plan(**given, num_programs=num_programs, implementation="xla")
    assert np.diff(plan.split_indptr).max() == 1
    with harness.interpreting(capsys):
        check("mosaic", "balanced", num_programs, **given)


@pytest.mark.slow  # `make test` runs other cases in test_interpreted
@pytest.mark.parametrize(("spare", "snake_order"), [(0, True), (3, False)])
def test_interpreted_with_separate_programs_per_row(
    spare: int, snake_order: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row lengths are 0 or near multiples of 3,200 tokens, the share of a program, so each row gets its own programs.

    Snake order sorts rows by length and deals them to groups of programs back and forth. Without it (the limit of
    sorted rows is patched to 128, fewer than the 180 rows), rows stay unsorted. Three programs then have no row.
    """
    if not snake_order:
        monkeypatch.setattr(mosaic, "MOST_WARPGROUPS", 1)
        monkeypatch.setattr(schedule, "MAX_SNAKE_ROWS", 128)
    lens = jnp.asarray(([3200, 0, 6400, 3190, 9600, 0, 6370] * 13)[:90], jnp.int32)
    shares = int(np.sum(np.ceil(np.asarray(lens) / 3200))) * 2
    given = {"kv_lens": lens, "page_size": PS, "num_kv_heads": 2}
    plan = plan_case.plan(**given, num_programs=shares + spare, implementation="xla")
    assert plan.split_indptr[-1] == shares
    np.testing.assert_array_equal(plan.cta_split, np.minimum(np.arange(shares + spare + 1), shares))
    with harness.interpreting(capsys):
        check("mosaic", "balanced", shares + spare, **given)


@pytest.mark.slow  # `make test` runs other cases in test_interpreted
@pytest.mark.parametrize(("batch", "num_programs"), [(13, 6), (14, 13), (15, 4)])
def test_interpreted_in_groups(batch: int, num_programs: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows have different lengths. Groups of rows make equal shares: a row per program, or two rows for two
    programs.
    """
    lens = jnp.asarray([1000 + 100 * (i * 5 % batch) for i in range(batch)] + [0], jnp.int32)
    given = {"kv_lens": lens, "page_size": PS, "num_kv_heads": 1}
    with harness.interpreting(capsys):
        check("mosaic", "balanced", num_programs, **given)


@pytest.mark.slow
def test_interpreted_with_uneven_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """There are as many programs as rows, and rows have different lengths, so the planner sorts the rows and groups
    them in snake order (back and forth). The kernel has two warpgroups.
    """
    lens = jnp.asarray([1000 + 100 * (i * 5 % 70) for i in range(70)], jnp.int32)
    given = {"kv_lens": lens, "page_size": 64, "num_kv_heads": 2}
    plan = plan_case.plan(**given, num_programs=140, implementation="xla")
    assert (np.diff(plan.row_order) < 0).any()
    with harness.interpreting(capsys):
        check("mosaic", "balanced", 140, **given)


@pytest.mark.slow  # `make test` runs windows per head in test_interpreted
def test_interpreted_with_one_window_and_with_idle_rows(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(harness.fresh_rng(), 5, 1, 1000)
    given["window"] = 40
    with harness.interpreting(capsys):
        check("mosaic", "balanced", 3, **given)
        check("mosaic", "balanced", 3, **given | {"kv_lens": jnp.zeros((5,), jnp.int32)})


@pytest.mark.gpu
@modes
@pytest.mark.parametrize(
    ("batch", "kv_heads", "num_programs"),
    [(1, 1, 1), (1, 8, 396), (17, 3, 132), (64, 8, 528), (256, 8, 396), (1000, 8, 2112), (MAX_ROWS // 8, 8, 132)],
)
def test_compiled_kernel_makes_the_plan_of_xla(mode: str, batch: int, kv_heads: int, num_programs: int) -> None:
    rng = harness.fresh_rng()
    alike = jnp.asarray(rng.integers(8000, 8100, batch), jnp.int32)
    check("mosaic", mode, num_programs, kv_lens=alike, page_size=PS, num_kv_heads=kv_heads)
    for longest in (64, 131_072):
        check(
            "mosaic",
            mode,
            num_programs,
            **arguments(rng, batch, kv_heads, longest, windows=kv_heads > 1, drafts=batch > 1),
        )


def test_compiled_sizes_include_several_chunks() -> None:
    assert MOST_WARPGROUPS * THREADS < 1000 * 8 < MAX_ROWS


def test_more_than_max_rows_is_unsupported(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(harness.fresh_rng(), MAX_ROWS // 2 + 1, 2, 100) | {"num_programs": 3}
    with harness.interpreting(capsys), pytest.raises(NotImplementedError, match=f"at most {MAX_ROWS} plan rows"):
        plan_case.plan(**given, implementation="mosaic")
