"""Tests of the merge of partial states in Triton."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.runtime import device
from pallas_attn.triton.split_states import EvenSplits, MergeTile, merge_splits
from tests.contract import backends
from tests.kit.slow_cases import slow_cases

TRITON = next(backend for backend in backends.BACKENDS if backend.name == "triton")

ROWS, SPLITS, QUERIES, HEADS = 2, 11, 2, 5
SCALE = 0.5


def merged(monkeypatch: pytest.MonkeyPatch, states: list[np.ndarray], multiprocessors: int) -> list[np.ndarray]:
    """Merge states on an emulated GPU with this number of multiprocessors. Return output and LSE."""
    monkeypatch.setattr(device, "INTERPRETED_MULTIPROCESSORS", multiprocessors)
    shape = ROWS, QUERIES, HEADS
    out = jnp.full((*shape, states[0].shape[-1]), jnp.nan, jnp.float32)
    plan = EvenSplits.of(ROWS, SPLITS)
    merge = jax.jit(lambda *states: merge_splits(out, jnp.full(shape, jnp.nan), states, plan, scale=SCALE))
    return [np.asarray(x) for x in merge(*map(jnp.asarray, states))]


@slow_cases("192")
@pytest.mark.parametrize("width", [64, 192, pytest.param(512, marks=pytest.mark.slow)])
def test_small_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The number of splits is no multiple of the number of splits that are loaded together."""
    monkeypatch.setenv(device.INTERPRET_VARIABLE, "9.0")
    rng, states = np.random.default_rng(0), (ROWS * SPLITS, QUERIES * HEADS)
    top = rng.normal(0, 20, states).astype(np.float32)
    total = rng.uniform(1, 9, states).astype(np.float32)
    acc = rng.normal(size=(*states, width)).astype(np.float32)
    top[3], total[3], acc[3] = -np.inf, 0, np.nan  # a split without visible keys

    out, lse = merged(monkeypatch, [acc, top, total], 1)
    for multiprocessors in (16, 132):
        other_out, other_lse = merged(monkeypatch, [acc, top, total], multiprocessors)
        np.testing.assert_array_equal(other_out, out)
        np.testing.assert_array_equal(other_lse, lse)

    each = np.arange(SPLITS)[None] + SPLITS * np.arange(ROWS)[:, None]
    m, l, a = (x.astype(np.float64)[each] for x in (top * SCALE, total, acc))  # noqa: E741
    weights = np.exp(m - m.max(axis=1, keepdims=True))
    sums = np.where(l[..., None] > 0, a, 0) * weights[..., None]
    denominator = (l * weights).sum(axis=1)
    shape = ROWS, QUERIES, HEADS
    expected = (sums.sum(axis=1) / denominator[..., None]).reshape(*shape, width)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, (m.max(axis=1) + np.log(denominator)).reshape(shape), rtol=1e-5)


@pytest.mark.parametrize(
    ("plan_rows", "query_rows", "width", "expected"),
    [
        (64, 128, 512, MergeTile(8, 512, 1)),
        (1, 16, 512, MergeTile(1, 128, 8)),
        (1, 128, 512, MergeTile(1, 256, 8)),
        (2, 8, 128, MergeTile(1, 128, 8)),
        (1, 1, 64, MergeTile(2, 64, 8)),
        (64, 128, 192, MergeTile(16, 256, 1)),
    ],
)
def test_merge_tile(plan_rows: int, query_rows: int, width: int, expected: MergeTile) -> None:
    assert MergeTile.of(plan_rows, query_rows, width, 132) == expected
