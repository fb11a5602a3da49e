"""Tests of `scripts/bench_engine.py --config v2-lite`: its floors (the roofline times of a step), and a consistent
report.
"""

import dataclasses
import functools
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import Engine
from scripts import bench_engine
from scripts.bench.engine import serving
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.serving import Costs, Serving
from scripts.bench.harness.device import Rates
from tests.models.engine_case import CONFIG

RATES = Rates(copy=1e9, matrix=1e10)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, jnp.bfloat16, AttentionSettings("absorb", "reference"))  # compiles fastest


@pytest.mark.slow
def test_random_weights_differ_and_are_scaled(model):
    weights = {".".join(map(str, path)): w for path, w in nnx.to_flat_state(nnx.state(model))}
    firsts = [float(w.reshape(-1)[0]) for w in weights.values()]
    assert len({np.float32(first) for first in firsts}) > 0.9 * len(firsts)
    for name, weight in weights.items():
        assert weight.dtype == (jnp.float32 if ".gate." in name else jnp.bfloat16), name
        assert np.isfinite(np.asarray(weight, np.float32)).all(), name
    up = np.asarray(weights["layers.1.mlp.gate_up_proj"], np.float32)
    assert up.std() == pytest.approx(CONFIG.hidden_size**-0.5, rel=0.05)
    assert np.asarray(weights["norm.weight"], np.float32).mean() == pytest.approx(1, abs=0.1)


# --- floors


@pytest.mark.slow
def test_steps_read_the_experts_of_their_tokens(model):
    costs = Costs.of(model, RATES)
    every = sum(w.size * w.dtype.itemsize for w in jax.tree.leaves(nnx.state(model)))
    assert costs.dense_bytes + costs.routed_bytes == every - 2 * CONFIG.vocab_size * CONFIG.hidden_size
    experts = 2 * CONFIG.n_routed_experts * 3 * CONFIG.hidden_size * CONFIG.moe_intermediate_size
    assert costs.routed_bytes == experts  # only the second layer has routed experts
    assert costs.weight_bytes(1) == costs.dense_bytes + experts * 2 / 4
    assert costs.weight_bytes(2) == costs.dense_bytes + experts * 3 / 4
    assert costs.weight_bytes(100) == pytest.approx(costs.dense_bytes + experts)


def test_floors_are_bytes_and_operations():
    costs = Costs(CONFIG, dense_bytes=1000, routed_bytes=800, token_bytes=10, rates=RATES)
    assert costs.decode_floor(1, 50) == pytest.approx((1000 + 400 + 500) / 1e9)
    pairs = 2 * 3 * (24 + 16) * (20 * 21 / 2)  # layers * heads * (key + value dimension) * pairs of query and key
    weights = (1000 + 400) / 2 - 64 * 32
    assert costs.prefill_floor(3, 20, 2) == pytest.approx(2 * 3 * (20 * weights + pairs) / 1e10)


def test_early_requests_decode_until_the_last_prompt_is_done():
    work = Serving((1, 4), (64, 8), new_tokens=5, limit_seconds=1, max_batched_tokens=36)
    assert work.tokens_each(4, 64) == [5 + 6 + 1, 5 + 4 + 1, 5 + 2 + 1, 5]
    assert work.tokens_each(1, 64) == [5]
    assert work.cases == [(1, 8), (4, 8), (1, 64), (4, 64)]
    assert work.engine_config().max_model_len == 64 + 12
    assert work.engine_config().prefill_buckets == (8, 36)
    assert dataclasses.replace(work, prefill_seqs=2).tokens_each(4, 8) == [5 + 2, 5 + 1, 5 + 1, 5]


# --- runs


@pytest.mark.slow  # test_bench_engine.py has more tests of reports
def test_report_is_consistent(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_engine.PRESETS, "v2-lite", CONFIG)
    monkeypatch.setattr(bench_engine, "Serving", functools.partial(Serving, page_size=16))
    monkeypatch.setattr(serving, "measure_rates", lambda _: RATES)
    out = tmp_path / "report.json"
    sizes = ["--batch", "3", "--contexts", "40", "--new-tokens", "6", "--step-tokens", "32"]
    sizes += ["--implementation", "reference"]
    assert bench_engine.main(["--config", "v2-lite", *sizes, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (result,) = report["results"]
    (case,) = result["cases"]
    assert (case["batch"], case["context"]) == (3, 40)
    assert report["dtype"] == "bfloat16"
    assert result["implementation"] == ["reference"]
    assert result["compilations"] == 3
    step_s = case["between_tokens_s"]
    assert step_s["min"] <= step_s["median"] <= step_s["max"]
    assert case["decode_tokens_per_s"] == pytest.approx(3 / step_s["median"])
    assert case["decode_fraction_of_floor"] == pytest.approx(case["decode_floor_s"] / step_s["median"])
    assert case["ttft_s"]["min"] < case["ttft_s"]["max"]
    assert "batch 3, context 40: prefill" in capsys.readouterr().out


@pytest.mark.slow  # `make test` tests the number of tokens without an engine
def test_all_requests_decode_together_despite_few_prompts_per_step(model):
    work = Serving((5,), (16,), new_tokens=2, limit_seconds=1, page_size=16, max_batched_tokens=128, prefill_seqs=2)
    engine = Engine(model, work.engine_config())
    _, steps = serving.generate(engine, [[1] * 16] * 5, work.tokens_each(5, 16))
    assert [step.prefill_tokens for step in steps if step.prefill_tokens] == [32, 32, 16]
    assert any(step.decode_tokens == 5 for step in steps if not step.prefill_tokens)


def test_cases_beyond_the_time_limit_are_skipped(monkeypatch, model):
    """A case is skipped if it would exceed the time limit. The second case takes ten times its floor (roofline time),
    so the benchmark expects the same factor for the third case.
    """
    clock = iter([0.0, 1.0, 2.0, 3.0, 95.0])
    monkeypatch.setattr(serving.time, "perf_counter", lambda: next(clock))
    stats = SimpleNamespace(compile_s=0.0, compilations=3, cache_bytes=0, steps=(), num_steps=0)
    engine: Any = SimpleNamespace(stats=lambda: stats, warmup=lambda: None)
    monkeypatch.setattr(serving, "Engine", lambda *_: engine)
    monkeypatch.setattr(serving, "random_model", lambda *_: model)
    monkeypatch.setattr(serving, "measure_rates", lambda _: RATES)
    monkeypatch.setattr(serving, "generate", lambda *_: ([], []))
    monkeypatch.setattr(serving, "measure", lambda *_: {"prefill_fraction_of_floor": 0.1})
    monkeypatch.setattr(Costs, "prefill_floor", lambda self, batch, context, itemsize: context / 10)
    work = Serving((1,), (10, 20, 30), new_tokens=5, limit_seconds=100)
    *_, report = serving.run(CONFIG, work, AttentionSettings(), "bfloat16")
    assert ["skipped" in case for case in report["cases"]] == [False, False, True]
    assert report["cases"][2]["skipped"] == "its prompts would take about 30 s, and 5 were left"
    assert "skipped" in serving.latest(report | {"parameters": 0})
