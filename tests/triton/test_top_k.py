"""The choice of the highest scores in Triton, of rows that go through rounds and of calls that go through portions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import index_top_k, select_top_k
from pallas_attn.ops.index_top_k import triton as index_module
from pallas_attn.triton import top_k
from tests.contract.index_case import SM_SCALE, IndexCase, IndexInputs, best
from tests.ops import harness


def test_rows_longer_than_registers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds, whose candidates are of many equal scores and of few."""
    monkeypatch.setattr(top_k, "MOST_HELD", 64)
    monkeypatch.setattr(top_k, "SEGMENT", 64)
    rng = harness.fresh_rng()
    scores = rng.integers(-2, 3, (3, 400)).astype(np.float32)
    scores[1] = rng.normal(size=400)
    scores[2, 8:] = -np.inf
    got = jax.jit(lambda s: select_top_k(s, top_k=11, implementation="triton"))(jnp.asarray(scores))
    np.testing.assert_array_equal(got, best(scores, 11))


def test_too_many_of_a_long_row_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="chooses up to 8192 of more than 32768 scores, got 8193"):
        select_top_k(jnp.zeros((1, 32769)), top_k=8193, implementation="triton")


def test_tokens_go_through_the_workspace_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Portions begin and end within sequences, and the last one is not full."""
    case = IndexCase(kv_lens=(0, 9, 40, 30), q_lens=(0, 1, 6, 4), padding=2, pages_per_row=5, exact=True)
    inputs = IndexInputs.draw(case, harness.fresh_rng(), "bfloat16")
    monkeypatch.setattr(index_module, "MOST_SCORES", 5 * inputs.visible.shape[1])
    arrays = jax.tree.map(jnp.asarray, inputs.arguments())
    choose = jax.jit(lambda arrays: index_top_k(**arrays, sm_scale=SM_SCALE, top_k=7, implementation="triton"))
    np.testing.assert_array_equal(choose(arrays), best(inputs.scores(), 7))
