"""Tests of `scripts/bench_engine.py --head-windows`: its arithmetic, and a consistent report.

The benchmark compares how many requests fit into a cache if some KV heads have windows, with and without freeing the
pages outside the windows.
"""

import dataclasses
import json

import pytest

from pallas_attn.models.decoder import AttentionSettings
from scripts import bench_engine
from scripts.bench.engine import head_windows
from scripts.bench.engine.head_windows import MODELS, SIZES, HeadWindowBench, HeadWindowSizes

TINY = HeadWindowSizes(
    context=128,
    new_tokens=48,
    window=16,
    sink_tokens=2,
    page_size=4,
    pool_contexts=3,
    step_tokens=64,
    waiting_context=32,
    waiting_window=8,
    waiting_batch=2,
    waiting_tokens=4,
    repeats=1,
)


def test_bound_of_32k_contexts_and_4k_windows():
    for sizes in SIZES.values():
        assert [round(sizes.allowed(8, windowed), 2) for windowed in (1, 7)] == [1.12, 4.24]
        assert sizes.context / sizes.window == 8
    assert SIZES["gpu"].allowed(8, 0) == 1
    assert dataclasses.replace(TINY, window=1000).allowed(8, 7) == 1


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Run the benchmark with a small model. Return the report and the path of the plot."""
    with pytest.MonkeyPatch.context() as patch:
        small = dataclasses.replace(
            MODELS["cpu"], num_hidden_layers=1, hidden_size=32, num_attention_heads=8, head_dim=16, vocab_size=64
        )
        patch.setitem(head_windows.MODELS, "cpu", small)
        patch.setitem(head_windows.SIZES, "cpu", TINY)
        out, plot = (tmp_path_factory.mktemp("windows") / name for name in ("out.json", "rows.png"))
        args = ["--head-windows", "--windowed", "7", "--implementation", "reference"]  # `reference` compiles fastest
        assert bench_engine.main([*args, "--json", str(out), "--plot", str(plot)]) == 0
    return json.loads(out.read_text()), plot


@pytest.mark.slow
def test_recycling_reaches_the_bound(files):
    report, _ = files
    (case,) = report["cases"]
    assert case["windowed"] == 7
    assert case["allowed_ratio"] == pytest.approx(8 / (1 + 7 * 18 / 128))
    assert case["off"]["contexts"] in (3, 4)  # a fourth request fits while others are shorter
    assert case["on"]["contexts"] >= 10
    assert case["on"]["cache_bytes"] == case["off"]["cache_bytes"]
    assert case["on"]["steps"] < case["off"]["steps"]
    assert case["contexts_ratio"] == case["on"]["contexts"] / case["off"]["contexts"]
    assert case["fraction_of_allowed"] == case["contexts_ratio"] / case["allowed_ratio"]


@pytest.mark.slow
def test_latencies_of_both_kinds_of_tables(files):
    (case,) = files[0]["cases"]
    for kind in ("ttft", "between_tokens"):
        uniform, head_wise = (case[name][f"{kind}_s"]["median"] for name in ("uniform", "head_wise"))
        assert case[f"{kind}_saved"] == pytest.approx(1 - head_wise / uniform)


@pytest.mark.slow
def test_rows_in_use_stay_within_sinks_window_and_one_page(files):
    report, plot = files
    series = report["long_decode"]
    bench = HeadWindowBench(MODELS["cpu"], "float32", AttentionSettings(), TINY, (7,))
    assert len(series["on"]) == len(series["off"]) == 128 - 4
    bounds = [head_windows.most_rows(bench, 7, 4 + step) for step in range(len(series["on"]))]
    assert all(rows <= bound for rows, bound in zip(series["on"], bounds, strict=True))
    assert series["off"] == [8 * -(-(4 + step) // 4) for step in range(len(series["off"]))]
    assert series["on"][-1] < series["off"][-1] / 2
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("windowed", ["0", "8"])
def test_windows_of_all_or_no_heads_are_errors(windowed, capsys):
    with pytest.raises(SystemExit) as raised:
        bench_engine.main(["--head-windows", "--windowed", windowed])
    assert raised.value.code == 2
    assert "--windowed: expected 1 to 7 of 8 heads" in capsys.readouterr().err


def test_time_limit_of_zero_gives_no_cases(tmp_path):
    out = tmp_path / "out.json"
    assert bench_engine.main(["--head-windows", "--limit-seconds", "0", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["cases"], report["sizes"]["window"]) == ([], SIZES["cpu"].window)
