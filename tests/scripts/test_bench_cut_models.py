"""Tests of scripts/bench/engine/cut_models.py and layer_parts.py: chosen layers, pages, skipped cases, and a consistent
report of tiny models. Times are not tested.
"""

import dataclasses
import functools
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn import PAGE_NONE
from pallas_attn.models.checkpoints import count_parameters
from pallas_attn.models.config import GEMMA_PRESETS, V4_PRESETS
from pallas_attn.models.config.deepseek_v4 import CSA_KIND, HCA_KIND
from pallas_attn.models.config.windows import LOCAL_KIND
from pallas_attn.models.decoder import AttentionSettings, Decoder
from scripts import bench_engine
from scripts.bench.engine import cut_models, layer_parts
from scripts.bench.engine.cut_models import MODELS, CutWork, cut, kinds_of
from scripts.bench.engine.random_model import random_model
from scripts.bench.harness.timing import Chain, Stopwatch, compile_chains, kernels_of

FLASH = MODELS["v4-flash"]
FAST = ["--new-tokens", "4", "--implementation", "reference"]


# --- layers


@pytest.mark.parametrize(("name", "billions"), [("v4-flash", 284.3), ("gemma4-31b", 30.7), ("gemma4-26b-a4b", 25.2)])
def test_whole_models_have_published_sizes(name, billions):
    assert count_parameters(MODELS[name].config) / 1e9 == pytest.approx(billions, abs=0.05)


def test_flash_has_published_layers():
    kinds = FLASH.config.layer_types
    assert [kinds.count(kind) for kind in (LOCAL_KIND, CSA_KIND, HCA_KIND)] == [2, 21, 20]


@pytest.mark.parametrize(
    ("name", "layers", "taken"),
    [
        ("v4-flash", 4, (0, 2, 41, 42)),
        ("v4-flash", 6, (0, 2, 39, 40, 41, 42)),
        ("v4-flash", 43, tuple(range(43))),
        ("gemma4-31b", 12, tuple(range(48, 60))),
        ("gemma4-31b", 2, (58, 59)),
    ],
)
def test_cut_keeps_all_kinds_of_layers(name, layers, taken):
    whole = MODELS[name].config
    config, indices = cut(whole, layers)
    assert indices == taken
    assert kinds_of(config) == [kinds_of(whole)[index] for index in taken]
    assert {*kinds_of(config)} == {*kinds_of(whole)}


@pytest.mark.parametrize("layers", [3, 44])
def test_cut_to_impossible_number_of_layers(layers):
    with pytest.raises(ValueError, match=f"layers: expected 4, .* to 43, got {layers}"):
        cut(FLASH.config, layers)


def test_cut_of_layers_without_cache():
    with pytest.raises(NotImplementedError, match="layers: expected 6, because the last layers have no cache"):
        cut(GEMMA_PRESETS["gemma4-tiny"], 4)


# --- pages


@pytest.mark.parametrize("config", [V4_PRESETS["v4-tiny"], GEMMA_PRESETS["gemma4-tiny"]])
def test_tables_have_the_visible_pages(config):
    page_size, first, batch, context = 32, 500, 3, 520
    empty = cut_models.empty_groups(config, page_size)
    groups = cut_models.with_pages(empty, page_size, first, batch, context)
    tables = cut_models.random_tables(groups, page_size, first, batch, context, 20)
    for group, table in zip(groups, tables, strict=True):
        visible = {
            position // page_size for position in range(context) if position + int(group.heads.window[0]) > first
        }  # pages of the keys that the tokens from `first` on see, and of these tokens
        for row in table[:, 0]:
            assert {int(page) for page in np.flatnonzero(row != PAGE_NONE)} == visible
        used = table[table != PAGE_NONE]
        assert len({*used.tolist()}) == used.size == group.num_pages
        assert used.max() < group.num_pages


def test_cases_that_do_not_fit_are_skipped(monkeypatch):
    config, _ = cut(FLASH.config, 6)
    model = nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.bfloat16))
    work = CutWork((1, 16, 64), FLASH.contexts, 24, FLASH.page_size)
    monkeypatch.setattr(cut_models, "memory_bytes", lambda: 142_600_000_000)
    groups, fitting, skipped = cut_models.fit(model, work)
    assert len(fitting) == 8
    assert [*skipped] == [(64, 1048576)]
    assert "caches of 65." in skipped[64, 1048576]
    entries = next(group for group in groups if group.caches == ("entries", "index"))
    assert entries.num_pages == 16 * 1048576 // FLASH.page_size
    monkeypatch.setattr(cut_models, "memory_bytes", lambda: 80_000_000_000)
    with pytest.raises(
        ValueError, match="layers: expected weights and caches that fit .* got weights of 81.* and caches of"
    ):
        cut_models.fit(model, work)


def test_read_bytes_of_flash():
    config, _ = cut(FLASH.config, 4)
    model = nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.bfloat16))
    read = cut_models.read_bytes(model, 16, 8192, 256)
    window, csa, hca = 128 * 512, (128 + 512) * 512 + 2048 * 128, (128 + 64) * 512
    assert read["cache_bytes"] == 16 * 2 * (window + 2 * csa + hca)
    experts = 4 * 256 * 3 * 4096 * 2048 * 2
    assert 0.3 * experts < read["weight_bytes"] < 0.4 * experts  # 16 tokens select 80 of 256 experts
    fp8 = cut_models.read_bytes(model, 16, 8192, 256, "float8_e4m3fn")["cache_bytes"]
    keys = 128 + 2 * (128 + 512) + 128 + 64
    assert fp8 == 16 * (keys * (448 + 2 * 64 + 7) + 2 * 2048 * (128 + 4))


@pytest.mark.parametrize(
    ("name", "layers", "dtype", "wanted"),
    [
        ("v4-flash", 4, None, {("window",): 4 * 1024, ("entries", "index"): 2 * (1024 + 256) / 4 + 1024 / 128}),
        (
            "v4-flash",
            4,
            "float8_e4m3fn",
            {("window",): 4 * (448 + 7 + 128), ("entries", "index"): 2 * (583 + 132) / 4 + 583 / 128},
        ),
        ("gemma4-31b", 6, None, {1024: 5 * 2 * 16 * 256 * 2, None: 2 * 4 * 512 * 2}),
    ],
)
def test_bytes_per_token_of_cache_groups(name, layers, dtype, wanted):
    config, _ = cut(MODELS[name].config, layers)
    model = nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.bfloat16))
    work = CutWork((1,), (8192,), 4, MODELS[name].page_size, cache_dtype=dtype)
    groups = [cut_models.of_group(model, group, work) for group in cut_models.empty_groups(config, work.page_size)]
    assert {0, 1, 2, 3} <= {layer for group in groups for layer in group["layers"]}
    found = {tuple(group["caches"]) or group["window"]: group["token_bytes"] for group in groups}
    assert {key: found[key] for key in wanted} == wanted


def test_read_bytes_of_gemma():
    config, _ = cut(MODELS["gemma4-31b"].config, 2)
    model = nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.bfloat16))
    read = cut_models.read_bytes(model, 3, 8192, 64)
    assert read["cache_bytes"] == 3 * 2 * 2 * (1024 * 16 * 256 + 8192 * 4 * 512)
    assert read["weight_bytes"] == cut_models.weight_bytes(model)


# --- parts and harness


def test_shares_of_layers():
    config = V4_PRESETS["v4-tiny"]  # window, CSA, HCA, CSA
    seconds = {"layer window": 1.0, "layer CSA": 4.0, "layer HCA": 2.0, "hyper-connections": 0.5, "experts": 0.4}
    seconds |= {"index and select": 0.6, "attention CSA": 1.0, "attention HCA": 0.8}
    found = layer_parts.shares(config, config, seconds, step_s=12.5)
    assert (found["layers_s"], found["rest_s"], found["whole_model_step_s"]) == (11.0, 1.5, 12.5)
    assert found["hyper_connections_of_step"] == pytest.approx(4 * 0.5 / 12.5)
    assert found["hyper_connections_of_layer"]["layer HCA"] == 0.25
    assert found["index_and_select_of_layer"] == pytest.approx(0.15)
    assert found["attention_of_layer"] == {"layer CSA": 0.25, "layer HCA": 0.4}


def test_whole_model_has_the_layers_that_were_cut():
    whole = MODELS["gemma4-31b"].config
    config, _ = cut(whole, 6)
    found = layer_parts.shares(config, whole, {"layer window": 1.0, "layer full": 3.0}, step_s=10.0)
    assert (found["layers_s"], found["rest_s"], found["whole_model_step_s"]) == (8.0, 2.0, 82.0)


def test_compiled_chain_is_not_compiled_again():
    def add(carried, shared, own):
        return carried + own, own.astype(jnp.float32) * shared

    chain, arguments = Chain(add), (jnp.int32(0), jnp.ones(3), [jnp.int32(1), jnp.int32(2)])
    compile_chains([(chain, *arguments)])
    compiled = chain.run
    assert isinstance(compiled, jax.stages.Compiled)
    compile_chains([(chain, *arguments)])
    timing, carried = Stopwatch(0.001, 1).time(chain, arguments[2], carried=arguments[0], shared=arguments[1])
    assert chain.run is compiled
    assert carried % 3 == 0
    assert timing.median > 0


def test_kernels_are_measured_on_gpus_only():
    assert kernels_of(lambda: pytest.fail("was called")) == {}


@pytest.mark.slow
def test_random_model_selects_different_experts_by_token():
    config = V4_PRESETS["v4-tiny"]
    model = random_model(
        dataclasses.replace(
            config, num_hidden_layers=1, layer_types=config.layer_types[:1], mlp_layer_types=config.mlp_layer_types[:1]
        ),
        "float32",
        AttentionSettings(),
    )
    table = np.asarray(model.layers[0].ffn.gate.experts_of_tokens[...])
    assert 0 <= table.min() < table.max() < config.n_routed_experts
    assert all(len({*row}) == config.num_experts_per_tok for row in table.tolist())


# --- reports


def check_report(report, batches, contexts):
    (result,) = report["results"]
    cases = {(case["batch"], case["context"]): case for case in result["cases"]}
    assert {*cases} == {(batch, context) for batch in batches for context in contexts}
    for (batch, _), case in cases.items():
        step_s = case["step_s"]["median"]
        assert case["decode_tokens_per_s"] == pytest.approx(batch / step_s)
        assert case["per_layer_s"] == pytest.approx(step_s / len(result["layers"]))
        assert case["fraction_of_floor"] == pytest.approx(case["floor_s"] / step_s)
    return result, cases


@pytest.fixture
def two_layers(monkeypatch):
    """Patch the tiny Gemma model to have two layers, so that little is compiled, and parts to be measured shortly."""
    config, _ = cut(dataclasses.replace(GEMMA_PRESETS["gemma4-tiny"], num_kv_shared_layers=0), 2)
    entry = dataclasses.replace(MODELS["gemma4-tiny"], config=config, layers=2)
    monkeypatch.setitem(MODELS, "gemma4-tiny", entry)
    shortly = functools.partial(CutWork, stopwatch=Stopwatch(0.001, 1))
    monkeypatch.setattr(bench_engine, "CutWork", shortly)


@pytest.mark.slow
def test_report_of_gemma_is_consistent(two_layers, tmp_path, capsys):
    out = tmp_path / "out.json"
    work = ["--batch", "2", "--contexts", "40", "80", *FAST, "--json", str(out)]
    assert bench_engine.main(["--config", "gemma4-tiny", *work]) == 0
    report = json.loads(out.read_text())
    assert {"device", "commit", "versions", "dtype", "workload"} <= report.keys()
    result, cases = check_report(report, [2], [40, 80])
    assert [layer["kind"] for layer in result["layers"]] == [["sliding_attention"], ["full_attention"]]
    for case in cases.values():
        assert case["parts_us"].keys() == {"layer window", "layer full"}
        assert case["whole_model_step_s"] == pytest.approx(case["layers_s"] + case["rest_s"])
    assert "2 x 80" in capsys.readouterr().out


@pytest.mark.slow
def test_no_case_starts_after_the_limit(two_layers, monkeypatch, tmp_path, capsys):
    runner = SimpleNamespace(cache_bytes=0, compile_s=0.0, num_compilations=0), SimpleNamespace(table_pages=1)
    monkeypatch.setattr(cut_models, "runner_of", lambda *_: runner)
    monkeypatch.setattr(cut_models, "decode", lambda *_: pytest.fail("a case was measured"))
    monkeypatch.setattr(cut_models, "prompts", lambda *_: pytest.fail("a prompt was computed"))
    out = tmp_path / "out.json"
    work = ["--batch", "1", "--contexts", "40", "--prefill", "8", "--limit-seconds", "0", *FAST, "--json", str(out)]
    assert bench_engine.main(["--config", "gemma4-tiny", *work]) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert [case["skipped"] for case in result["cases"]] == ["the time limit of 0 s had passed"]
    assert result["prompts"] == []
    assert "skipped, the time limit" in capsys.readouterr().out


@pytest.mark.slow  # compiles decode steps, prompt steps and the chains of eight parts
def test_report_of_v4_is_consistent(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_engine, "CutWork", functools.partial(CutWork, stopwatch=Stopwatch(0.001, 1)))
    out = tmp_path / "out.json"
    work = ["--batch", "3", "--contexts", "128", "256", "--prefill", "90", "--step-tokens", "64", "--kernels"]
    assert bench_engine.main(["--config", "v4-tiny", *work, *FAST, "--json", str(out)]) == 0
    result, cases = check_report(json.loads(out.read_text()), [3], [128, 256])
    for case in cases.values():
        parts = {f"layer {kind}" for kind in ("window", "CSA", "HCA")} | {"attention CSA", "attention HCA"}
        assert case["parts_us"].keys() == parts | {"hyper-connections", "experts", "index and select"}
        assert case["kernels_us"] == {}
        assert case["index_and_select_of_layer"] > 0
    (prompt,) = result["prompts"]
    assert prompt["prefill_tokens_per_s"] == pytest.approx(90 / prompt["prefill_s"])
    assert "prompt of 90 tokens" in capsys.readouterr().out


@pytest.mark.slow  # compiles a decode step
def test_caches_in_published_format(tmp_path):
    out = tmp_path / "out.json"
    work = ["--batch", "1", "--contexts", "128", "--cache", "fp8", "--no-parts"]
    assert bench_engine.main(["--config", "v4-tiny", *work, *FAST, "--json", str(out)]) == 0
    result, cases = check_report(json.loads(out.read_text()), [1], [128])
    assert "parts_us" not in cases[1, 128]
    assert result["cache_bytes"] > 0


# --- options


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "v4-flash", "v3-tiny"], "are measured separately"),
        (["--config", "v4-flash", "--layers", "3"], "layers: expected 4"),
        (["--config", "v4-flash", "--layers", "0"], "--layers"),
        (
            ["--config", "v4-flash"],
            "layers: expected weights and caches that fit into the device memory, got weights of",
        ),
        (["--config", "v4-flash", "--contexts", "1048577"], "contexts: expected 28 to 1048576 tokens, got 1048577"),
        (["--config", "v4-tiny", "--contexts", "27"], "contexts: expected 28 to 2048 tokens, got 27"),
        (["--config", "v4-tiny", "--prefill", "2049"], "prefill: expected 1 to 2048 tokens, got 2049"),
        (["--config", "v4-tiny", "--implementation", "mosaic"], "--implementation: "),
        (["--config", "v2-lite", "--layers", "4"], "--layers: expected only for models with fewer layers"),
    ],
)
def test_wrong_options_are_errors_before_the_measurement(args, message, monkeypatch, capsys):
    monkeypatch.setattr(bench_engine, "bench_cut", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(cut_models, "memory_bytes", lambda: 10**9)
    with pytest.raises(SystemExit, match="2"):
        bench_engine.main(args)
    assert message in capsys.readouterr().err


def test_defaults_of_flash(monkeypatch):
    monkeypatch.setattr(cut_models, "memory_bytes", lambda: 142_600_000_000)
    args = bench_engine.parse_args(["--config", "v4-flash"])
    assert (args.batch, args.dtype, args.limit_seconds) == ([1, 16, 64], "bfloat16", math.inf)
    work = bench_engine.cut_work_of(args)
    assert (work.contexts, work.page_size, work.parts, work.kernels) == ((8192, 131072, 1048576), 256, True, False)
    assert bench_engine.cut_layers_of(args) == 6
