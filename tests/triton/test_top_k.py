"""Tests of the Triton kernels that select the highest scores.

A row is the scores of all keys for one token. With few rows, several programs share a row. With many rows, one program
selects from a row, in several rounds if the row does not fit into registers. `index_top_k` processes many tokens in
portions, to limit the memory of the scores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import index_top_k, select_top_k
from pallas_attn.ops.index_top_k import triton as index_module
from pallas_attn.triton import top_k
from tests.contract.index_case import SM_SCALE, IndexCase, IndexInputs, best
from tests.kit import harness
from tests.kit.slow_cases import slow_cases


def test_long_rows_take_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The selection is exact if a row takes three rounds. The test patches the limits of a round. One row has many
    equal scores.
    """
    monkeypatch.setattr(top_k, "MOST_SHARED", 0)
    monkeypatch.setattr(top_k, "MOST_HELD", 64)
    monkeypatch.setattr(top_k, "SEGMENT", 64)
    rng = harness.fresh_rng()
    scores = rng.integers(-2, 3, (3, 400)).astype(np.float32)
    scores[1] = rng.normal(size=400)
    scores[2, 8:] = -np.inf
    got = jax.jit(lambda s: select_top_k(s, top_k=11, implementation="triton"))(jnp.asarray(scores))
    np.testing.assert_array_equal(got, best(scores, 11))


def rows(kind: str) -> np.ndarray:
    rng = harness.fresh_rng()
    scores = rng.normal(size=(3, 5000)).astype(np.float32)
    match kind:
        case "few values":
            scores = rng.integers(-2, 3, scores.shape).astype(np.float32)
        case "one value":
            scores[:] = -0.5
        case "a bin":  # all scores are in one bin of the histogram, too many for registers
            scores = (1 + 0.1 * rng.random(scores.shape)).astype(np.float32)
        case "few and none":
            scores[0], scores[1, 5:], scores[2, 7:4000] = -np.inf, -np.inf, -np.inf
        case "ends":
            scores[:, ::3], scores[:, 1::3] = -np.finfo(np.float32).max, np.inf
    return scores


@slow_cases(
    "ordinary-100", "ordinary-4999", "few values-1", "few values-100", "few values-4999",
    "few values-6000", "one value-1", "one value-100", "one value-4999", "a bin-1", "a bin-100",
    "a bin-4999", "few and none-1", "few and none-100", "few and none-4999", "ends-1", "ends-100",
    "ends-4999",
)  # fmt: skip
@pytest.mark.parametrize("top_k_wanted", [1, 100, 4999, 6000])
@pytest.mark.parametrize("kind", ["ordinary", "few values", "one value", "a bin", "few and none", "ends"])
def test_shared_rows(kind: str, top_k_wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "LEAST_SHARED", 5000)
    scores = rows(kind)
    chosen = select_top_k(jnp.asarray(scores), top_k=top_k_wanted, implementation="triton")
    np.testing.assert_array_equal(chosen, best(scores, top_k_wanted))


@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_shared_rows_of_index_scores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The selection of `index_top_k` is exact if several programs share a row.

    The kernel that computes the scores also makes the histogram for the selection. Scores of keys after the position of
    the token are undefined, and must not be selected.
    """
    monkeypatch.setattr(top_k, "LEAST_SHARED", 1)
    q_lens = (0, 1, 1, 1) if kind == "decode" else (0, 1, 6, 4)
    case = IndexCase(kv_lens=(0, 9, 40, 30), q_lens=q_lens, padding=2, pages_per_row=5, exact=True)
    inputs = IndexInputs.draw(case, harness.fresh_rng(), "bfloat16")
    arrays = jax.tree.map(jnp.asarray, inputs.arguments())
    choose = jax.jit(lambda arrays: index_top_k(**arrays, sm_scale=SM_SCALE, top_k=7, implementation="triton"))
    np.testing.assert_array_equal(choose(arrays), best(inputs.scores(), 7))


def test_large_top_k_of_long_rows_is_unsupported() -> None:
    """If one program selects from a long row, `top_k` may be at most 8192. The limit does not apply if several programs
    share a row.
    """
    with pytest.raises(NotImplementedError, match="top_k of up to 8192 for rows of more than 32768 scores, got 8193"):
        select_top_k(jnp.zeros((200, 32769)), top_k=8193, implementation="triton")


@slow_cases("14")
@pytest.mark.parametrize("padding", [2, 14])
def test_tokens_are_processed_in_portions(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection in portions of 5 tokens is exact. The test patches the limit of a portion. Portions begin and end
    inside sequences, and the last portion is smaller. With more padding, whole portions have no tokens of a sequence.
    """
    case = IndexCase(kv_lens=(0, 9, 40, 30), q_lens=(0, 1, 6, 4), padding=padding, pages_per_row=5, exact=True)
    inputs = IndexInputs.draw(case, harness.fresh_rng(), "bfloat16")
    monkeypatch.setattr(index_module, "MAX_SCORES", 5 * inputs.visible.shape[1])
    arrays = jax.tree.map(jnp.asarray, inputs.arguments())
    choose = jax.jit(lambda arrays: index_top_k(**arrays, sm_scale=SM_SCALE, top_k=7, implementation="triton"))
    np.testing.assert_array_equal(choose(arrays), best(inputs.scores(), 7))
