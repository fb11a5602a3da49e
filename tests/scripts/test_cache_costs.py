"""Tests of scripts/tools/cache_costs.py, which compares the logits of a model with different dtypes of the KV cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.tools import cache_costs

GOLDENS = cache_costs.ROOT / "tests" / "goldens"


def test_costs_of_a_small_example() -> None:
    """Compare logits of two positions and two tokens. At the second position, the logits of the two tokens are
    exchanged.
    """
    wanted = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)
    found = cache_costs.cost(np.array([[1.0, 0.0], [2.0, 0.0]], np.float32), wanted)
    high = 1 / (1 + np.exp(-2.0))
    divergence = (high - (1 - high)) * 2.0  # Σ p log(p/q), where q has the probabilities of p in reverse order
    assert found.largest == 2.0
    assert found.rms == pytest.approx(np.sqrt(8 / 4))
    assert (found.kl_mean, found.kl_largest) == (pytest.approx(divergence / 2), pytest.approx(divergence))
    assert found.equal_tokens == 0.5
    assert cache_costs.cost(wanted, wanted) == cache_costs.Cost(0.0, 0.0, 0.0, 0.0, 1.0)
    assert cache_costs.cost(wanted + 3, wanted).kl_largest == pytest.approx(0.0, abs=1e-12)


@pytest.mark.slow
def test_cache_with_the_dtype_of_the_weights_gives_golden_logits() -> None:
    """The baseline of the tool, a cache with the dtype of the weights, has the golden logits. Differences of other
    dtypes are therefore due to rounding.
    """
    golden = GOLDENS / "qwen3-window"
    sequences = cache_costs.sequences_of(golden)
    model = cache_costs.load_model(golden, np.float32)
    logits = np.split(cache_costs.all_logits(model, sequences, "float32"), np.cumsum([*map(len, sequences)])[:-1])
    with np.load(golden / "golden.npz") as arrays:
        for i, of_sequence in enumerate(logits):
            wanted = arrays[f"logits_{i}"]
            np.testing.assert_allclose(of_sequence[: len(wanted)], wanted, atol=1e-4)
            greedy = of_sequence[len(wanted) - 1 : -1].argmax(-1)
            np.testing.assert_array_equal(greedy, arrays[f"tokens_{i}"])


@pytest.mark.slow  # compiles four models; `make test` tests only the committed report
def test_each_cache_dtype_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["cache_costs", "v2-group", "--weights", "float32", "--json", str(out)])
    assert cache_costs.main() == 0
    report = json.loads(out.read_text())
    assert {"device", "versions", "commit", "date"} <= report.keys()
    costs = {case["cache"]: case for case in report["cases"]}
    assert costs.keys() == {"bfloat16", "float8_e4m3fn"}
    assert 0 < costs["bfloat16"]["rms"] < costs["float8_e4m3fn"]["rms"] < 0.5
    assert {case["positions"] for case in report["cases"]} == {1 + 9 + 40 + 75 + 4 * 24}
    assert capsys.readouterr().out.count("v2-group") == 2


def test_unknown_goldens_are_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["cache_costs", "v9"])
    with pytest.raises(SystemExit):
        cache_costs.main()
    assert "there is no golden named v9; the goldens are gemma4, gemma4-k" in capsys.readouterr().err


def test_every_golden_is_in_the_committed_report() -> None:
    """The committed report has all cache dtypes that a model supports, for each model in tests/goldens and for weights
    in float32 and bfloat16.
    """
    report = json.loads((cache_costs.ROOT / "benchmarks" / "results" / "cache_costs.json").read_text())
    names = {path.parent.name for path in GOLDENS.glob("*/golden.npz")}
    found = {(case["model"], case["weights"], case["cache"]) for case in report["cases"]}
    for name in names:
        config = json.loads((GOLDENS / name / "config.json").read_text())
        caches = cache_costs.LATENT_CACHES if "kv_lora_rank" in config else cache_costs.KV_CACHES
        if config["model_type"] == "deepseek_v4":
            caches = cache_costs.V4_CACHES
        for weights in ("float32", "bfloat16"):
            assert {cache for model, dtype, cache in found if (model, dtype) == (name, weights)} == {*caches} - {
                weights
            }
