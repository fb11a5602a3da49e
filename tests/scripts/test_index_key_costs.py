"""Tests of scripts/tools/index_key_costs.py: formats of rounded index keys, and counts of selected entries."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PagedIndexKeys
from scripts.tools import cache_costs, index_key_costs

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_fp4_has_a_power_of_two_per_group():
    rng = np.random.default_rng(0)
    keys = (rng.standard_normal((50, 64)) * np.exp2(rng.integers(-9, 9, (50, 1)))).astype(np.float32)
    keys[3, :32] = 0
    rounded = np.asarray(index_key_costs.to_fp4(jnp.asarray(keys)), np.float64).reshape(-1, 32)
    for before, after in zip(keys.reshape(-1, 32), rounded, strict=True):
        largest = np.abs(before).max()
        scale = 2.0 ** np.ceil(np.log2(largest / 6)) if largest else 1.0
        assert np.isin(np.abs(after) / scale, E2M1).all()
        nearest = np.abs(np.abs(before)[:, None] / scale - E2M1).min(axis=1)
        np.testing.assert_allclose(np.abs(before - after) / scale, nearest, atol=1e-6)


def test_fp8_and_rotated_keys_are_near_the_keys():
    keys = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    largest = np.abs(keys).max(axis=1, keepdims=True)
    for rounding, error in ((index_key_costs.to_fp8, 2**-4), (index_key_costs.to_rotated_fp4, 0.5)):
        moved = np.abs(np.asarray(rounding(jnp.asarray(keys))) - keys)
        assert 0 < moved.max() < error * largest.max()
    assert np.abs(np.asarray(index_key_costs.to_fp8(jnp.asarray(keys))) - keys).max() <= 2**-4 * np.abs(keys).max()


@pytest.mark.parametrize(("factor", "kept"), [(1.0, 6), (-1.0, 4)])
def test_selected_entries_are_counted(factor: float, kept: int):
    """Tokens 0 to 2 of a sequence see 2, 3 and 4 keys, and select 3 of them. Only the last has a choice. Negative
    scores count as 0, and the first three of four equal keys are selected. The second sequence is equal."""
    keys = jnp.asarray([[[1.0], [2.0], [3.0], [4.0]]] * 2)
    selections = index_key_costs.Selections(lambda keys: factor * keys)
    found = jax.jit(lambda index: selections(*queries(index), top_k=3, sm_scale=1.0, implementation="xla"))(
        PagedIndexKeys(keys)
    )
    jax.effects_barrier()
    assert (selections.selected, selections.kept) == (6, kept)
    assert found[0].tolist() == [0, 1, -1]


def queries(index: PagedIndexKeys) -> tuple:
    lens, tables = jnp.asarray([4, 4], jnp.int32), jnp.asarray([[0], [1]], jnp.int32)
    return jnp.ones((6, 1, 1)), jnp.ones((6, 1)), index, tables, jnp.asarray([0, 3, 6], jnp.int32), lens


def test_the_published_report_has_all_roundings():
    report = json.loads((cache_costs.ROOT / "benchmarks" / "results" / "index_key_costs.json").read_text())
    assert [(case["model"], case["cache"]) for case in report["cases"]] == [
        (model, name) for model in ("v4", "v4-published") for name in index_key_costs.ROUNDINGS
    ]
