"""Tests of `scripts/bench_engine.py --shared-prefix`."""

import dataclasses
import json

import pytest

from scripts import bench_engine
from scripts.bench.engine import head_windows, shared_prefix


@pytest.mark.slow
def test_steps_with_a_common_prefix_are_cascades(tmp_path, monkeypatch, capsys):
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 8, "head_dim": 16, "vocab_size": 64}
    monkeypatch.setitem(head_windows.MODELS, "cpu", dataclasses.replace(head_windows.MODELS["cpu"], **sizes))
    tiny = shared_prefix.SharedPrefixSizes((3,), (0, 40), new_tokens=6, page_size=8, step_tokens=64, repeats=2)
    monkeypatch.setitem(shared_prefix.SIZES, "cpu", tiny)
    out = tmp_path / "out.json"
    args = ["--shared-prefix", "--implementation", "reference", "--json", str(out)]  # `reference` compiles fastest
    assert bench_engine.main(args) == 0
    report = json.loads(out.read_text())
    assert report["compilations"]["on"] == report["compilations"]["off"] + 1
    none, shared = report["cases"]
    assert (none["prefix_tokens"], shared["prefix_tokens"]) == (0, 40)
    assert none["cascade_steps"] == {"off": 0, "on": 0}
    assert shared["cascade_steps"] == {"off": 0, "on": shared["steps"]["on"]}
    assert shared["steps"]["on"] >= 2 * 4
    assert none["equal_tokens"] == shared["equal_tokens"] == 1
    assert "of" in capsys.readouterr().out


def test_kinds_of_measurement_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        bench_engine.main(["--shared-prefix", "--head-windows"])
    assert "--head-windows and --shared-prefix are measured separately" in capsys.readouterr().err
