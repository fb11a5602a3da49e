"""Tests of scripts/tools/fp8_attention_costs.py, which rounds operands of attention like FlashMLA."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from scripts.tools import fp8_attention_costs as costs
from scripts.tools.cache_costs import ROOT


def test_values_are_rounded_to_fp8_with_a_scale() -> None:
    """The largest value becomes 448 times the scale, exactly. With a scale of 1, the values are those of ml_dtypes."""
    x = np.random.default_rng(0).standard_normal((50, 40), np.float32) * np.float32(30)
    rounded = np.asarray(costs.round_to_fp8(jnp.asarray(x), 448.0))
    np.testing.assert_array_equal(rounded, x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert costs.round_to_fp8(jnp.full(1, -500.0), 448.0) == -448  # saturates
    largest = np.abs(x).max(1, keepdims=True)
    rounded = np.asarray(costs.round_to_fp8(jnp.asarray(x), jnp.asarray(largest)))
    np.testing.assert_allclose(np.abs(rounded).max(1), largest[:, 0], rtol=1e-6)
    assert 1e-3 < np.abs(rounded - x).max() / largest.max() <= 16 / 448


def test_weights_are_rounded_relative_to_the_maximum_of_newer_tiles() -> None:
    """A score of the newest tile is rounded relative to the maximum of its tile, although an older tile has a larger
    score. Scores of the oldest tile are rounded relative to this larger score, and the smallest becomes 0.
    """
    scores = np.full((1, 3 * costs.TILE), -np.inf, np.float32)
    scores[0, [0, 1, 2]] = [9.0, 8.9, 0.0]
    scores[0, [100, 101]] = [0.0, -0.1]
    exact, total = costs.softmax_weights(jnp.asarray(scores), rounded=False)
    np.testing.assert_allclose(exact, np.exp(scores - 9), rtol=1e-6)
    np.testing.assert_allclose(total, np.exp(scores - 9).sum(), rtol=1e-6)
    rounded, same = costs.softmax_weights(jnp.asarray(scores), rounded=True)
    assert same == total  # the sum of the weights before rounding
    fp8 = np.exp(np.float32(-0.1)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_allclose(rounded[0, [0, 1, 2]], [1.0, fp8, 0.0], rtol=1e-6)
    np.testing.assert_allclose(rounded[0, [100, 101]], np.array([1.0, fp8]) * np.exp(-9), rtol=1e-6)


@pytest.mark.slow
def test_each_operand_is_rounded_alone() -> None:
    """Attention to two keys whose values show which of them are rounded."""
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((64, 128 + 16)), jnp.float32)
    largest = jnp.abs(keys).max()

    def changed(kind: str | None) -> list[bool]:
        found = costs.rounded_keys(keys, 128, kind, largest)
        exact = found == keys.astype(jnp.bfloat16).astype(jnp.float32)
        return [bool((found[:, :128] == keys[:, :128]).all()), bool(exact[:, 128:].all())]

    assert changed(None) == [True, False]
    assert changed("token") == changed("latents") == [False, True]
    assert changed("all") == [False, False]
    by_token, at_once = (np.abs(costs.rounded_keys(keys, 128, kind, largest) - keys).max() for kind in ("token", "all"))
    assert by_token < at_once


@pytest.mark.slow  # compiles a model
def test_the_baseline_has_the_logits_of_the_golden() -> None:
    golden = ROOT / "tests" / "goldens" / "v2-group"
    logits = np.split(
        costs.load_study(golden, "float32").logits(0), np.cumsum([*map(len, costs.sequences_of(golden))])[:-1]
    )
    with np.load(golden / "golden.npz") as arrays:
        for i, of_sequence in enumerate(logits):
            wanted = arrays[f"logits_{i}"]
            np.testing.assert_allclose(of_sequence[: len(wanted)], wanted, atol=1e-4)


@pytest.mark.slow  # compiles a model
def test_each_rounding_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["fp8_attention_costs", "v2-group", "--weights", "float32", "--json", str(out)])
    assert costs.main() == 0
    found = {case["rounding"]: case["attention_error"] for case in json.loads(out.read_text())["cases"]}
    assert [*found] == [*costs.ROUNDINGS][1:]
    assert found["scale per token"] < found["one scale"] < found["one scale; queries"] < 0.2


def test_unknown_goldens_are_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fp8_attention_costs", "llama"])
    with pytest.raises(SystemExit):
        costs.main()
    assert "no golden with latent attention named llama; the goldens are glm-dsa, " in capsys.readouterr().err


def test_every_golden_is_in_the_committed_report() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "fp8_attention_costs.json").read_text())
    found = [(case["model"], case["weights"], case["rounding"]) for case in report["cases"]]
    names = costs.latent_goldens(ROOT / "tests" / "goldens")
    wanted = [(n, w, r) for n in names for w in ("float32", "bfloat16") for r in [*costs.ROUNDINGS][1:]]
    assert sorted(found) == sorted(wanted)
