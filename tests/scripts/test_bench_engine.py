"""The engine's benchmark: it runs, and what it writes adds up. What it measures is nobody's promise."""

import functools
import json
import os

import jax
import pytest

from scripts import bench_engine
from tests.models.engine_case import CONFIG

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


@pytest.fixture
def tiny(monkeypatch):
    """A tiny model, and steps of one size: each size is a compilation."""
    monkeypatch.setitem(bench_engine.PRESETS, "v3-tiny", CONFIG)
    one_bucket = functools.partial(bench_engine.Workload, max_batched_tokens=32)
    monkeypatch.setattr(bench_engine, "Workload", one_bucket)


def test_the_report_holds_every_batch_and_the_prefix_cache(tiny, tmp_path, capsys):
    out = tmp_path / "engine.json"
    work = ["--prompt-tokens", "16", "--new-tokens", "3", "--repeats", "1"]
    assert bench_engine.main(["--config", "v3-tiny", "--batch", "2", *work, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["versions"].keys() == {"python", "jax"}
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


@pytest.mark.parametrize("wrong", [["--new-tokens", "1"], ["--batch", "0"], ["--config", "v2-lite", "v3-tiny"]])
def test_wrong_sizes_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        bench_engine.main(wrong)
    assert raised.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, ("0.95", None)), ({OLD: "0.5"}, ("0.5", None)), ({NEW: "0.5"}, (None, "0.5"))],
)
def test_the_fraction_of_memory_is_set_before_anything_looks_at_the_device(monkeypatch, given, wanted):
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
