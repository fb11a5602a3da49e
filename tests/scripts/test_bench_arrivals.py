"""Tests of scripts/bench_serving.py: when the waiting time of a request starts, and a consistent report."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from scripts import bench_serving
from scripts.bench.engine import arrivals
from scripts.bench.engine.arrivals import Arrivals


class FakeEngine:
    """Engine with a fake clock. Only `step` and `sleep` advance the clock. Each step gives every request one token."""

    def __init__(self) -> None:
        self.now, self.durations, self.running = 0.0, [], []

    def stats(self) -> Any:
        return SimpleNamespace(
            num_steps=len(self.durations),
            steps=[
                SimpleNamespace(duration_s=d, decode_tokens=1, prefill_tokens=4, launch_s=0.0) for d in self.durations
            ],
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add_request(self, prompt: list[int], params: Any, on_token: Any) -> None:
        self.running.append([params.max_tokens, on_token])

    def step(self) -> None:
        took = 3.0 if len(self.running) > 1 else 1.0
        self.now += took
        self.durations.append(took)
        for request in self.running:
            request[0] -= 1
            request[1](0, 0, 0)
        self.running = [request for request in self.running if request[0]]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_waiting_starts_when_a_request_is_due(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(arrivals.time, "perf_counter", lambda: engine.now)
    monkeypatch.setattr(arrivals.time, "sleep", engine.sleep)
    monkeypatch.setattr(arrivals, "_lengths", lambda rng, mean, count: [mean] * count)
    rng = SimpleNamespace(exponential=lambda scale, n: np.array([1.0, 0.5]), integers=np.random.default_rng(0).integers)
    work = Arrivals((1.0,), requests=2, prompt_tokens=4, new_tokens=3, step_tokens=(8,))
    result = arrivals.measure(cast(Any, engine), work, 1.0, 10, cast(Any, rng))
    # Requests are due at 1 s and 1.5 s. Steps end at 2 s (first request only), 5 s, 8 s (both) and 9 s (second only).
    assert engine.durations == [1, 3, 3, 1]
    assert result["ttft_ms"]["p50"] == pytest.approx(1e3 * (1.0 + 3.5) / 2)
    assert result["between_tokens_ms"]["max"] == pytest.approx(3e3)
    assert result["between_tokens_ms"]["p50"] == pytest.approx(3e3)
    assert result["tokens_per_s"] == pytest.approx(6 / 9)
    assert result["longest_step_over_median"] == 1  # later steps, without arrivals, do not count


def test_longest_steps_are_described():
    steps = [
        SimpleNamespace(duration_s=s, decode_tokens=i, prefill_tokens=2 * i, launch_s=s / 2)
        for i, s in enumerate([0.1, 0.3, 0.2])
    ]
    first, second = arrivals.longest(cast(Any, steps), [0.0, 0.25, 0.0], count=2)
    assert (first["step"], first["decode_tokens"], first["prefill_tokens"]) == (1, 1, 2)
    assert first["ms"] == pytest.approx(300)
    assert first["launch_ms"] == pytest.approx(150)
    assert first["garbage_collection_ms"] == pytest.approx(250)
    assert second["step"] == 2


def test_garbage_collections_are_timed_inside_the_block():
    with arrivals._garbage_collection() as seconds:
        gc.collect()
    count = len(seconds)
    assert count >= 1
    assert min(seconds) > 0
    gc.collect()
    assert len(seconds) == count


@pytest.mark.slow
def test_report_of_a_small_model(tmp_path: Path, capsys):
    out = tmp_path / "serving.json"
    sizes = ["--rates", "200", "--requests", "5", "--prompt-tokens", "16", "--new-tokens", "4", "--step-tokens", "16"]
    options = ["--config", "v3-tiny", "--max-num-seqs", "4", "--dtype", "float32", "--implementation", "reference"]
    assert bench_serving.main([*options, *sizes, "--json", str(out)]) == 0
    [result] = json.loads(out.read_text())["results"]
    assert result["rate"] == 200
    assert result["longest_steps"][0]["ms"] == pytest.approx(result["step_ms"]["max"])
    assert all(result["ttft_ms"][low] <= result["ttft_ms"]["max"] for low in ("p50", "p90", "p99"))
    assert "200 requests/s, steps of 16: first token after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--rates", "0"], "--rates"),
        (["--requests", "0"], "--requests"),
        (["--step-tokens", "8", "--max-num-seqs", "16"], "--step-tokens"),
    ],
)
def test_sizes_out_of_range_are_errors(wrong, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_serving.main(wrong)
    assert named in capsys.readouterr().err
