"""Tests of merging attention states (maximum, sum of weights, weighted sum of values) of several KV splits. The result
is compared with attention to all keys at once, for each form in which kernels store states.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.mosaic.merge import AttentionState, StateForm, merge_in_order
from tests.kit import harness

ROWS, KEYS, VALUES = 6, 24, 8
NO_KEY, NAN_VALUES = 1, 2  # query rows: sees no key at all; sees no key of the split with NaN values
BOUNDS = (0, 8, 9, 24)  # the three splits are keys 0 to 7, 8, and 9 to 23

FORMS = [StateForm(query_axis, log2) for query_axis in (0, 1) for log2 in (False, True)]


def state_of(form: StateForm, scores: np.ndarray, values: np.ndarray) -> AttentionState:
    """Return the state of one split from float64 scores [ROWS, keys], -inf for invisible keys."""
    unit = np.log2(np.e) if form.log2 else 1.0
    m = np.float32(scores.max(axis=1) * unit)  # float32, as in kernels; the weights below use the rounded maximum
    seen = np.isfinite(m)
    weights = np.where(np.isneginf(scores), 0, np.exp(scores - np.where(seen, np.float64(m) / unit, 0)[:, None]))
    with np.errstate(invalid="ignore"):
        acc = weights @ values  # 0 · NaN is NaN, as in the kernels
    acc = np.where(seen[:, None], acc, 0)  # kernels use 0 for query rows that see no key of a split
    return AttentionState(
        *(jnp.asarray(x, jnp.float32) for x in (m, weights.sum(axis=1), acc if form.query_axis == 0 else acc.T))
    )


@pytest.mark.parametrize("level", [0.0, 5e5, -5e5])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_merged_splits_equal_attention_to_all_keys(form: StateForm, level: float) -> None:
    """Merged splits equal attention to all keys, also for scores near 5e5. A state has maximum and sum of weights,
    because their combination in one float32 LSE would have an error of up to 1/64 there.
    """
    rng = harness.fresh_rng()
    scores = level + rng.uniform(-4, 4, (ROWS, KEYS))
    values = rng.standard_normal((KEYS, VALUES))
    scores[NO_KEY] = -np.inf
    scores[NAN_VALUES, BOUNDS[1] : BOUNDS[2]] = -np.inf
    sink = (rng.uniform(-4, 4, ROWS) + level).astype(np.float32)
    sink[NO_KEY] = 0
    states = [state_of(form, scores[:, a:b], values[a:b]) for a, b in itertools.pairwise(BOUNDS)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    merged = merge_in_order(form, lambda i: jax.tree.map(lambda x: x[i], stacked), 1, len(states), states[0])

    seen = np.arange(ROWS) != NO_KEY
    top = np.where(seen, scores.max(axis=1), 0)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    cases: list[tuple[Any, np.ndarray]] = [(None, total)]
    if not form.log2 or level == 0:  # kernels round sink · log2(e); at 5e5 the error is up to 2%
        cases.append((jnp.asarray(sink), total + np.exp(np.float64(sink) - top)))
    for own_sink, denominator in cases:
        out = np.asarray(form.output(merged, own_sink))
        out = out if form.query_axis == 0 else out.T
        expected = (weights @ values)[seen] / denominator[seen, None]
        harness.assert_close("output", out[seen], expected, harness.F32_OUT)
        assert not out[~seen].any()
    lse = np.asarray(form.lse(merged.m, merged.l))
    harness.assert_close("LSE", lse[seen], (top + np.log(np.where(seen, total, 1)))[seen], harness.F32_LSE)
    assert np.isneginf(lse[~seen]).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_output_of_a_row_without_keys_is_zero_over_nan(form: StateForm) -> None:
    acc = jnp.full((ROWS, ROWS), jnp.nan)
    state = AttentionState(jnp.full(ROWS, -jnp.inf), jnp.zeros(ROWS), acc)
    assert not np.asarray(form.output(state)).any()
    assert not np.asarray(form.output(state, jnp.zeros(ROWS))).any()
    seen_nan = state._replace(m=jnp.zeros(ROWS), l=jnp.full(ROWS, jnp.nan))
    assert np.isnan(form.output(seen_nan)).all()
    assert np.isnan(form.lse(seen_nan.m, seen_nan.l)).all()
