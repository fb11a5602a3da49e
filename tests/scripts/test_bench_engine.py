"""Tests of scripts/bench_engine.py with small models: options and a consistent report. Times are not tested."""

import dataclasses
import functools
import json
import math
import os

import jax
import pytest

from scripts import bench_engine
from scripts.bench.engine import small_models
from tests.models.engine_case import CONFIG

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


@pytest.fixture
def tiny(monkeypatch):
    """Patch the benchmark to use a model of one layer and one step size, so that little is compiled."""
    monkeypatch.setitem(bench_engine.PRESETS, "v3-tiny", dataclasses.replace(CONFIG, num_hidden_layers=1))
    one_bucket = functools.partial(bench_engine.Workload, max_batched_tokens=32)
    monkeypatch.setattr(bench_engine, "Workload", one_bucket)


@pytest.mark.slow
def test_report_has_every_batch_and_the_prefix_cache(tiny, tmp_path, capsys):
    out = tmp_path / "engine.json"
    work = ["--prompt-tokens", "16", "--new-tokens", "3", "--repeats", "1", "--implementation", "reference"]
    assert bench_engine.main(["--config", "v3-tiny", "--batch", "2", *work, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert {"python", "jax"} <= report["versions"].keys()
    assert {"device", "machine", "commit", "dirty", "dtype", "workload"} <= report.keys()
    (result,) = report["results"]
    (batch,) = result["batches"]
    assert batch["batch"] == 2
    assert batch["prefill_tokens_per_s"] == pytest.approx(2 * 16 / batch["prefill_s"])
    assert batch["decode_tokens_per_s"] == pytest.approx(2 * 2 / (batch["total_s"] - batch["prefill_s"]))
    cache = result["prefix_cache"]
    assert cache["prefix_hit_rate_off"] == 0
    assert 0 < cache["prefix_hit_rate_on"] < 1
    assert cache["speedup"] == pytest.approx(cache["total_s_off"] / cache["total_s_on"])
    assert "prefix cache" in capsys.readouterr().out


def test_failed_configuration_does_not_affect_others(tiny, monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise RuntimeError("failed")

    monkeypatch.setattr(small_models, "bench_batch", lambda model, work, batch: {"batch": batch})
    monkeypatch.setattr(small_models, "bench_prefix_cache", lambda *_: {})
    monkeypatch.setattr(bench_engine, "show", fail)
    monkeypatch.setattr(bench_engine, "check_transformers", lambda _: None)
    for peer in ([], ["--transformers", "python"]):
        out = tmp_path / f"{len(peer)}.json"
        if peer:
            monkeypatch.setattr(small_models, "bench_transformers", fail)
        work = ["--config", "v3-tiny", "--batch", "2", "--prompt-tokens", "8", "--new-tokens", "3"]
        assert bench_engine.main([*work, *peer, "--json", str(out)]) == 3
        assert capsys.readouterr().err.endswith("RuntimeError: failed\n")
        (result,) = json.loads(out.read_text())["results"]
        assert (result["config"], result["batches"]) == ("v3-tiny", [{"batch": 2}])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--json", "/etc"], "--json: cannot write /etc: it is a directory"),
        (["--json", "/dev/null/out.json"], "--json: "),
        (["--head-windows", "--plot", "/etc"], "--plot: cannot write /etc: it is a directory"),
        (["--transformers", "/nonexistent/python"], "--transformers: cannot run /nonexistent/python: No such file"),
        (["--transformers", "false"], "--transformers: false cannot import torch and transformers"),
        (["--config", "v3-tiny", "--prompt-tokens", "700"], "at most 2560 tokens, the maximum of v3-tiny, got 2896"),
        (["--config", "v2-lite", "--contexts", "163840"], "at most 163840 tokens, the maximum of v2-lite, got 1"),
        (
            ["--config", "v2-lite", "--batch", "5000"],
            "--batch, --contexts, --step-tokens: num_pages: expected fewer than 2**31 tokens",
        ),
        (["--implementation", "bogus"], "bogus"),
        (["--config", "v2-lite", "--implementation", "bogus"], "bogus"),
        (["--head-windows", "--implementation", "bogus"], "bogus"),
        (["--implementation", "mosaic"], "--implementation: write_latent cannot run here"),
    ],
)
def test_late_failures_are_errors_before_the_measurement(args, message, monkeypatch, capsys):
    for bench in ("bench_config", "bench_large", "bench_head_wise"):
        monkeypatch.setattr(bench_engine, bench, lambda *_: pytest.fail("something was measured"))
    with pytest.raises(SystemExit) as raised:
        bench_engine.main(args)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


LARGE = ["--config", "v2-lite"]


@pytest.mark.parametrize(
    ("measured", "given", "takers"),
    [
        ([], ["--plot", "out.png"], "--head-windows"),
        ([], ["--contexts", "8"], "--config v2-lite and models with fewer layers"),
        ([], ["--windowed", "1"], "--head-windows"),
        (
            [],
            ["--limit-seconds", "1"],
            "--config v2-lite and models with fewer layers and --head-windows and --shared-prefix",
        ),
        (LARGE, ["--transformers", "python"], "small models"),
        (LARGE, ["--prompt-tokens", "8"], "small models"),
        (LARGE, ["--repeats", "1"], "small models"),
        (LARGE, ["--plot", "out.png"], "--head-windows"),
        (["--head-windows"], LARGE, "small models and --config v2-lite and models with fewer layers"),
        (["--head-windows"], ["--batch", "1"], "small models and --config v2-lite and models with fewer layers"),
        (["--head-windows"], ["--new-tokens", "2"], "small models and --config v2-lite and models with fewer layers"),
        (["--head-windows"], ["--contexts", "8"], "--config v2-lite and models with fewer layers"),
        (["--head-windows"], ["--repeats", "1"], "small models"),
        (["--head-windows"], ["--transformers", "python"], "small models"),
    ],
)
def test_options_of_other_measurements_are_errors(measured, given, takers, capsys):
    with pytest.raises(SystemExit) as raised:
        bench_engine.parse_args([*measured, *given])
    assert raised.value.code == 2
    name = " ".join(measured) or "small models"
    assert f"error: {given[0]}: expected only for {takers}, got it for {name}\n" in capsys.readouterr().err


def test_each_measurement_has_its_defaults():
    small, large, windows = map(bench_engine.parse_args, ([], LARGE, ["--head-windows"]))
    assert (small.config, small.batch, small.dtype) == (["v3-tiny", "mla-25m"], [1, 8, 32], "float32")
    assert (large.config, large.batch, large.dtype) == (["v2-lite"], [1, 8, 64], "bfloat16")
    assert (windows.windowed, windows.limit_seconds, windows.dtype) == ([1, 7], math.inf, "float32")


@pytest.mark.parametrize("wrong", [["--new-tokens", "1"], ["--batch", "0"], ["--config", "v2-lite", "v3-tiny"]])
def test_wrong_sizes_are_errors(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        bench_engine.main(wrong)
    assert raised.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, ("0.95", None)), ({OLD: "0.5"}, ("0.5", None)), ({NEW: "0.5"}, (None, "0.5"))],
)
def test_memory_fraction_is_set_before_device_initialization(monkeypatch, given, wanted):
    for name in (OLD, NEW):
        monkeypatch.setenv(name, "restored by the fixture")
        monkeypatch.delenv(name)
    for name, fraction in given.items():
        monkeypatch.setenv(name, fraction)
    seen = []

    def look():
        seen.append((os.environ.get(OLD), os.environ.get(NEW)))
        return "cpu"

    monkeypatch.setattr(jax, "default_backend", look)
    with pytest.raises(SystemExit):
        bench_engine.main(["--head-windows", "--windowed", "0"])
    assert seen[:1] == [wanted]
