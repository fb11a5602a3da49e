"""Tests of the Triton kernel of `plan_decode`: its plans equal the plans of the XLA implementation exactly.

A plan row is one KV head of one sequence. A program is a CTA of the decode kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from pallas_attn import FULL, PagedKV, kv_cache_spec, paged_decode
from pallas_attn.ops.plan_decode.triton import MAX_ROWS
from tests.kit import harness
from tests.kit.slow_cases import slow_cases
from tests.ops import plan_case
from tests.ops.plan_case import PS, arguments, check

modes = pytest.mark.parametrize("mode", ["balanced", "fixed"])
WINDOWS_AND_DRAFTS = {"windows": True, "drafts": True}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@slow_cases("1-8-396-fixed, windows and drafts", "100-3-132-balanced")
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        pytest.param("balanced", {}, id="balanced"),
        pytest.param("fixed", WINDOWS_AND_DRAFTS, id="fixed, windows and drafts"),
        pytest.param("balanced", WINDOWS_AND_DRAFTS, id="balanced, windows and drafts", marks=pytest.mark.slow),
        pytest.param("fixed", {}, id="fixed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("batch", "kv_heads", "num_programs"),
    [
        *((1, 8, 396), (100, 3, 132)),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((15, 1, 4), (6, 2, 140), (1, 1, 1), (2, 2, 3))),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_interpreted(mode: str, changes: dict, batch: int, kv_heads: int, num_programs: int) -> None:
    """There are fewer rows than programs, as many, or more. More than 256 rows are not sorted by length."""
    rng = harness.fresh_rng()
    for longest in (64, 131_072):
        check("triton", mode, num_programs, **arguments(rng, batch, kv_heads, longest, **changes))


@settings(max_examples=12, deadline=None)
@drawn(
    st.lists(st.integers(0, 700) | st.sampled_from((-(2**31), -1, 2**31 - 1)), min_size=5, max_size=5),
    st.lists(st.integers(-2, 5), min_size=5, max_size=5),
    st.sampled_from([3, 16]),
)
def test_interpreted_with_drawn_and_wrong_lengths(kv_lens: list[int], q_lens: list[int], num_programs: int) -> None:
    """The planner clips lengths to 40 pages, and numbers of queries to 3."""
    lens, queries = (jnp.asarray(x, jnp.int32) for x in (kv_lens, q_lens))
    sizes = {"page_size": PS, "num_kv_heads": 2, "table_pages": 40, "num_queries": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        _, bounded, real = check("triton", "balanced", num_programs, kv_lens=lens, q_lens=queries, **sizes)
    np.testing.assert_array_equal(bounded, np.clip(kv_lens, 0, 40 * PS))
    np.testing.assert_array_equal(real, np.clip(q_lens, 0, 3))


@slow_cases("0-49", "2-49", "0-12")
@pytest.mark.parametrize(("idle", "num_programs"), [(2, 12), (0, 49), (2, 49), (0, 12)])
@pytest.mark.usefixtures("interpreted")
def test_interpreted_without_cuts(idle: int, num_programs: int) -> None:
    """Rows have such similar lengths that the planner cuts none."""
    lens = jnp.asarray([2000, 2040, 2010, 2030, 2020, 2000, 2040, 2010] * 3 + [0] * idle, jnp.int32)
    given = {"kv_lens": lens, "page_size": PS, "num_kv_heads": 2}
    plan = plan_case.plan(**given, num_programs=num_programs, implementation="xla")
    assert np.diff(plan.split_indptr).max() == 1
    check("triton", "balanced", num_programs, **given)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_interpreted_with_one_window_and_with_idle_rows() -> None:
    given = arguments(harness.fresh_rng(), 5, 1, 1000)
    for window in (40, FULL):
        check("triton", "balanced", 3, **given | {"window": window})
        check("triton", "balanced", 3, **given | {"window": window, "kv_lens": jnp.zeros((5,), jnp.int32)})


@pytest.mark.gpu
@modes
@pytest.mark.parametrize(
    ("batch", "kv_heads", "num_programs"),
    [(1, 1, 1), (1, 8, 396), (17, 3, 132), (64, 8, 528), (256, 8, 396), (MAX_ROWS // 8, 8, 2112)],
)
def test_compiled_kernel_makes_the_plan_of_xla(mode: str, batch: int, kv_heads: int, num_programs: int) -> None:
    rng = harness.fresh_rng()
    alike = jnp.asarray(rng.integers(8000, 8100, batch), jnp.int32)
    check("triton", mode, num_programs, kv_lens=alike, page_size=PS, num_kv_heads=kv_heads)
    for longest in (64, 131_072):
        given = arguments(rng, batch, kv_heads, longest, windows=kv_heads > 1, drafts=batch > 1)
        check("triton", mode, num_programs, **given)


@pytest.mark.usefixtures("interpreted")
def test_more_than_max_rows_is_unsupported() -> None:
    given = arguments(harness.fresh_rng(), MAX_ROWS // 2 + 1, 2, 100)
    with pytest.raises(NotImplementedError, match=f"at most {MAX_ROWS} plan rows"):
        plan_case.plan(**given, num_programs=3, implementation="triton")


@pytest.mark.usefixtures("interpreted")
def test_decode_without_a_plan_clips_lengths() -> None:
    """The kernel of the plan clips the lengths that the decode kernel reads."""
    spec = kv_cache_spec(num_pages=4, page_size=16, num_kv_heads=1, head_dim=16, dtype=jnp.float16)
    kv = jax.tree.map(
        lambda x: jnp.asarray(harness.fresh_rng().standard_normal(x.shape), x.dtype), PagedKV.allocate(spec)
    )
    q = jnp.ones((3, 2, 1, 16), jnp.float16)
    tables = jnp.asarray([[0, 1], [2, 3], [1, 2]], jnp.int32)

    def outputs(kv_lens: list[int], q_lens: list[int]) -> np.ndarray:
        lens, queries = (jnp.asarray(x, jnp.int32) for x in (kv_lens, q_lens))
        return np.asarray(paged_decode(q, kv, tables, lens, q_lens=queries, implementation="triton"))

    np.testing.assert_array_equal(outputs([40, -5, 20], [7, 1, -1]), outputs([32, 0, 20], [2, 1, 0]))
