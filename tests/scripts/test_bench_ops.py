"""Tests of scripts/bench_ops.py: a consistent report, timing, cases, and failures that do not stop the run. The tests
do not check how long calls take.
"""

import dataclasses
import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import constraints

from pallas_attn import FULL, HeadWindow
from pallas_attn.jax_patches import faster_lowering
from pallas_attn.runtime import tuning
from scripts import bench_ops
from scripts.bench.cases.paged_decode import DecodeCase
from scripts.bench.harness import pools, session, timing
from scripts.bench.harness.case import Bench, noting_configs
from scripts.bench.harness.device import Rates
from scripts.bench.harness.plot import plot_report
from scripts.bench.harness.report import cache_ratios, cell
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.ops import paged_decode, write_kv
from scripts.bench.ops import plan_decode as plan_bench
from scripts.bench.peers import torch_decode
from scripts.bench.shapes import Decode
from tests.kit.slow_cases import slow_cases
from tests.ops import plan_case

RATES = Rates(copy=4e12, matrix=8e14)


@pytest.fixture
def quick(monkeypatch):
    """Patch the benchmark: time chains of three calls, and use fixed copy and GEMM rates instead of measured rates."""
    monkeypatch.setattr(pools, "MAX_CALLS", 3)
    monkeypatch.setattr(pools, "MIN_CALLS", 3)
    monkeypatch.setattr(plan_bench, "MAX_CALLS", 3)
    monkeypatch.setattr(bench_ops, "measure_rates", lambda _: RATES)


CALLS = dict.fromkeys(("ragged_attention", "paged_prefill", "mla_prefill"), 2)
"""Number of calls of a timed chain, for operations whose chains the fixture `quick` does not shorten."""


def run(operation, tmp_path, *more):
    out = tmp_path / "out.json"
    settings = ["--samples", "2", "--sample-seconds", "0.001", "--json", str(out)]
    assert bench_ops.main([operation, *settings, *more]) == 0
    return json.loads(out.read_text())


# --- whole runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "case", "contender"),
    [
        ("plan_decode", "", "xla"),
        ("write_kv", "int8-head", "xla"),
        *(
            # Slow, because one function writes the reports of all operations, and the two cases above test it.
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (
                ("paged_decode", "int8-head", "xla"),
                ("mla_decode", "f32", "xla"),
                ("paged_prefill", "int8-head", "xla"),
                ("merge_states", "", "ours"),
                ("ragged_attention", "f32", "xla"),
                ("mla_prefill", "f32", "xla"),
                ("write_latent", "f32", "xla"),
                ("gather_latent", "f32", "xla"),
                ("compress_and_write", "float32", "xla"),
                ("hyper_connection_weights", "", "xla"),
            )
        ),
    ],
)
def test_report_is_consistent(quick, tmp_path, capsys, operation, case, contender):
    report = run(operation, tmp_path, "--match", case)
    assert report["complete"]
    assert report["device"] == jax.devices()[0].device_kind
    assert report["versions"]["jax"] == jax.__version__
    assert {"commit", "dirty", "driver"} <= report.keys()
    assert report["rates"] == dataclasses.asdict(RATES)
    (case,) = report["cases"]
    entry = case["results"][contender]
    assert entry["min_us"] <= entry["median_us"] <= entry["max_us"]
    assert entry["samples"] == 2
    assert entry["calls_per_sample"] % CALLS.get(operation, 3) == 0
    assert case["floor_us"] == pytest.approx(1e6 * max(case["bytes"] / 4e12, case["flops"] / 8e14))
    assert entry["fraction_of_floor"] == pytest.approx(case["floor_us"] / entry["median_us"])
    assert entry["fraction_of_copy"] == pytest.approx(entry["bytes_per_s"] / 4e12)
    assert entry["fraction_of_matrix"] == pytest.approx(entry["flops_per_s"] / 8e14)
    assert entry["bytes_per_s"] == pytest.approx(1e6 * case["bytes"] / entry["median_us"])
    assert case["case"] in capsys.readouterr().out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_unavailable_baselines_are_reported_with_the_reason(quick, tmp_path, capsys):
    report = run("paged_decode", tmp_path, "--match", "int8-head", "--contenders", "mosaic", "cudnn")
    results = report["cases"][0]["results"]
    if jax.default_backend() == "cpu":
        assert "compute capability 9.0" in results["mosaic"]["absent"]
        assert re.search("torch|does not support int8-head caches", results["cudnn"]["absent"])
        assert "compute capability 9.0" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("case", "splits"), [("p64 f32", (1, 4)), ("p16 int8-token", (4, 16))])
def test_jax_and_our_function_for_its_layout_give_equal_outputs(quick, tmp_path, case, splits):
    contenders = ["xla", *(f"jax-{number}" for number in splits)]
    report = run("jax_paged_attention", tmp_path, "--match", case, "--contenders", *contenders)
    results = report["cases"][0]["results"]
    assert "median_us" in results["xla"]
    for name in contenders[1:]:
        assert results[name]["largest_difference"] < 1e-2


@pytest.mark.slow
def test_configurations_are_reported(quick, tmp_path):
    report = run("paged_decode", tmp_path, "--match", "int8-head", "--contenders", "xla")
    assert report["cases"][0]["results"]["xla"]["config"]["paged_decode/xla"]["group_rows"] == 2


@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_kernels_are_lowered_fast_while_configurations_are_noted(backend, monkeypatch):
    """Kernels are not cached meanwhile. A contender's kernels are therefore lowered in the context that the kernel
    cache enters otherwise.
    """
    monkeypatch.delenv(faster_lowering.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    original = constraints.compute_transitively_equal_vars
    with noting_configs():
        assert tuning.is_deciding()
        assert (constraints.compute_transitively_equal_vars is not original) == (backend == "gpu")
    assert constraints.compute_transitively_equal_vars is original


@dataclasses.dataclass(frozen=True)
class FakeCase:
    name: str
    num_bytes: int = 4_000_000
    flops: int = 0


def fake_inputs(case, pools):
    if case.name == "large":
        raise MemoryError("it is too large")


def broken(case, inputs, stopwatch):
    if case.name == "second":
        raise RuntimeError("out\nof luck")
    return Timing([2e-6, 1e-6, 4e-6], 30, "counted", output=np.ones(3, np.float32))


def sound(case, inputs, stopwatch):
    return Timing([5e-6], 10, "counted", output=np.full((1, 3), 1.5, np.float32))


@pytest.fixture
def fake(monkeypatch, quick):
    cases = [FakeCase("first"), FakeCase("large"), FakeCase("second"), FakeCase("third")]
    bench = Bench({"small": cases}, {"broken": broken, "sound": sound}, fake_inputs)
    monkeypatch.setattr(bench_ops, "load", lambda _: bench)


def test_failures_are_reported_and_the_run_continues(fake, tmp_path):
    cases = {case["case"]: case for case in run("merge_states", tmp_path)["cases"]}
    assert list(cases) == ["first", "large", "second", "third"]
    assert cases["large"]["skipped"] == "it is too large"
    assert cases["second"]["results"]["broken"] == {"error": "RuntimeError: out of luck"}
    assert cases["second"]["results"]["sound"]["median_us"] == pytest.approx(5)
    assert cases["third"]["results"]["broken"]["fraction_of_floor"] == pytest.approx(0.5)


def test_outputs_are_compared(fake, tmp_path):
    results = run("merge_states", tmp_path, "--match", "first")["cases"][0]["results"]
    assert "compared_with" not in results["broken"]
    assert results["sound"]["compared_with"] == "broken"
    assert results["sound"]["largest_difference"] == 0.5


def test_time_limit_stops_between_cases(fake, tmp_path, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(session.time, "perf_counter", lambda: next(clock))
    report = run("merge_states", tmp_path, "--limit-seconds", "12")
    assert 0 < len(report["cases"]) < 4
    assert not report["complete"]
    report = run("merge_states", tmp_path, "--limit-seconds", "0")
    assert report["cases"] == []


@pytest.mark.parametrize(
    "wrong", [["--grid", "none"], ["--contenders", "xla", "nobody"], ["--samples", "0"], ["--sample-seconds", "0"]]
)
def test_wrong_arguments_are_errors(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        bench_ops.main(["paged_decode", *wrong])
    assert raised.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_report_without_results_can_be_plotted(tmp_path):
    cases = [{"case": "large", "bytes": 8, "flops": 8, "skipped": "too large"}]
    report = {"operation": "x", "device": "cpu", "grid": "small", "rates": dataclasses.asdict(RATES), "cases": cases}
    with (tmp_path / "empty.png").open("wb") as file:
        plot_report(file, report)
    assert (tmp_path / "empty.png").stat().st_size


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, "5.0 us 50%"),
        ({"host_us": 1.0}, "5.0 us 50%"),
        ({"host_us": 4.9}, "5.0 us of the host 50%"),
        ({"kernels_us": {"decode": 3.0, "merge": 1.25}}, "5.0 us (4.2 in kernels) 50%"),
    ],
)
def test_cell_shows_host_and_kernel_times(more, shown):
    assert cell({"median_us": 5.0, "fraction_of_floor": 0.5} | more) == shown


def test_quantized_caches_are_compared_with_bfloat16():
    def case(cache, size, **medians):
        results = {name: {"median_us": median} for name, median in medians.items()}
        return {
            "case": f"{size} {cache}",
            "arguments": {"cache": cache},
            "results": results | {"flex": {"absent": "no"}},
        }

    cases = [
        case("int8-head", "B1", mosaic=6.0, xla=30.0),
        case("bf16", "B1", mosaic=10.0),
        case("bf16", "B2", mosaic=9.0),
    ]
    cases += [case("fp8-token", "B3", mosaic=5.0), {"case": "B2 fp8-token", "arguments": {"cache": "fp8-token"}}]
    assert cache_ratios({"cases": cases}) == ["B1 int8-head relative to bf16: mosaic 0.60x"]


# --- timing


def test_samples_are_long_enough_and_exclude_constant_time():
    asked = []

    def run(repeats):
        asked.append(repeats)
        return 2e-4 + 1e-4 * repeats

    samples, repeats = Stopwatch(sample_seconds=0.01, samples=5).take(run)
    assert samples == pytest.approx([1e-4] * 5)
    assert asked[-10:] == [repeats // 4, 3 * repeats // 4] * 5
    assert 1e-4 * repeats >= 0.008


def test_long_runs_are_repeated_only_for_the_difference():
    _, repeats = Stopwatch(sample_seconds=0.01, samples=3).take(lambda repeats: 7.0 * repeats)
    assert repeats == 4


def test_noise_gives_no_negative_times():
    seconds = iter([0.0, 1.0] + [3.0, 2.7] * 3)
    samples, _ = Stopwatch(sample_seconds=0.01, samples=3).take(lambda repeats: next(seconds))
    assert samples == pytest.approx([0.9] * 3)


def multiply(carried, shared, own):
    return carried + 1, own @ shared


def test_every_call_of_a_chain_is_made():
    owns = [jnp.full((8, 8), i, jnp.float32) for i in range(4)]
    shared = jnp.eye(8)
    compiled = jax.jit(timing._chain(multiply)).lower(jnp.int32(0), shared, owns).compile()
    module = compiled.as_text() or ""
    assert module.count(" dot(") == 4
    outputs, carried = timing._chain(multiply)(jnp.int32(0), shared, owns)
    assert carried == 4
    np.testing.assert_array_equal(outputs[3], owns[3])


def test_runs_pass_on_carried_state_and_donate_outputs():
    owns = [jnp.full((8, 8), i, jnp.float32) for i in range(1, 4)]
    runs = timing._Runs(timing.Chain(multiply), jnp.int32(0), jnp.eye(8), owns)
    before = runs._outputs[0].unsafe_buffer_pointer()
    assert runs.run(2) > 0
    assert runs.carried == 6
    assert runs.host_seconds() > 0
    assert runs.carried == 18
    np.testing.assert_array_equal(runs.first_output(), owns[0])
    assert runs._outputs[0].unsafe_buffer_pointer() == before


def test_chain_reports_time_per_call():
    timed = Stopwatch(0.001, 3).chain(multiply, [jnp.ones((8, 8))] * 5, carried=jnp.int32(0), shared=jnp.eye(8))
    assert len(timed.samples) == 3
    assert timed.calls % 5 == 0
    assert timed.output is not None
    assert timed.output.shape == (8, 8)


def test_gpu_only_steps(monkeypatch):
    """On a GPU, a chain is compiled with options for GPUs, and the host time is measured. The test
    patches the backend.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    timed = Stopwatch(0.001, 1).chain(multiply, [jnp.ones((8, 8))], carried=jnp.int32(0), shared=jnp.eye(8))
    assert timed.fields()["host_us"] > 0
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_thing"):
        Stopwatch(0.001, 1).chain(
            multiply, [jnp.ones((8, 8))], carried=jnp.int32(0), shared=jnp.eye(8), options={"xla_gpu_no_such_thing": 1}
        )


def test_writes_are_in_place():
    """The benchmark writes to the pool in place. Otherwise it would measure a copy of the pool."""
    case = write_kv.WriteKVCase(8, 4, "f32", rope=False, kv_heads=2, head_dim=16, page_size=16, pool_bytes=2**20)
    compiled: list[Any] = []

    def compile_chain(call, owns, *, carried, shared):
        chain = jax.jit(timing._chain(call), donate_argnums=0)
        compiled.append(chain.lower(carried, shared, owns[:2]).compile())
        return Timing([1.0], 1, "not at all")

    stopwatch: Any = SimpleNamespace(chain=compile_chain)
    write_kv.ours("xla", case, write_kv.inputs(case, pools.Pools()), stopwatch)
    memory = compiled[0].memory_analysis()
    assert memory.alias_size_in_bytes >= 2**20
    assert memory.temp_size_in_bytes < 2**19


# --- cases


def test_decode_bytes_count_keys_and_values():
    shape = Decode(4, 100, 32, 8, 128, page_size=64)
    assert DecodeCase(shape).num_bytes == 2 * 8 * 128 * 400 * 2
    assert DecodeCase(shape, "int8-head").num_bytes == 8 * 128 * 400 * 2
    assert DecodeCase(shape, "fp8-token").num_bytes == 8 * (128 + 4) * 400 * 2
    assert DecodeCase(shape).flops == 4 * 32 * 128 * 400


@slow_cases("100-2-20")
@slow_cases("64-3-0")
@pytest.mark.parametrize(("window", "heads", "sinks"), [(64, 3, 0), (100, 2, 20), (100, 2, 128), (1000, 4, 0)])
def test_walked_pages_match_the_plan(window, heads, sinks):
    shape = Decode(5, 700, 8, 4, 64, queries=3, page_size=16, window=window)
    case = DecodeCase(shape, varied=True, windowed_heads=heads, sink_tokens=sinks)
    plan = plan_case.plan(
        jnp.asarray(case.lens),
        q_lens=jnp.full((5,), 3, jnp.int32),
        window=case.window,
        page_size=16,
        num_kv_heads=4,
        num_programs=7,
    )
    np.testing.assert_array_equal(case.walked_pages.reshape(-1)[np.asarray(plan.row_order)], plan.num_pages)
    assert isinstance(case.window, HeadWindow)
    assert np.count_nonzero(np.asarray(case.window.window) == FULL) == 4 - heads


@pytest.mark.parametrize("operation", session.OPERATIONS)
def test_cases_of_a_grid_have_unique_names_and_floors(operation):
    for grid in session.load(operation).grids.values():
        assert len({case.name for case in grid}) == len(grid)
        assert all(case.num_bytes > 0 for case in grid)
        json.dumps([dataclasses.asdict(case) for case in grid])


@pytest.mark.parametrize(
    ("operation", "tuned"), [("mla_decode", "between-tiles"), ("paged_decode", "few-long"), ("mla_sparse", "few-rows")]
)
def test_held_out_cases_are_in_no_other_grid(operation, tuned):
    grids = dict(session.load(operation).grids)
    held_out = {case.name for case in grids.pop(f"{tuned}-held-out")}
    assert tuned in grids
    assert not held_out & {case.name for grid in grids.values() for case in grid}


def test_quick_grids_are_quick():
    quick = paged_decode.GRIDS["gqa-quick"]
    assert {case.cache for case in quick} == {"bf16", "int8-head", "fp8-head"}
    assert len(quick) <= 36


def test_no_two_calls_read_the_same_page():
    tables = pools.tables(np.random.default_rng(0), 40, 3, (4, 3))
    ids = np.concatenate([np.asarray(table).reshape(-1) for table in tables])
    assert len(set(ids.tolist())) == 36
    assert ids.min() >= 0
    assert ids.max() < 40


def test_chains_read_more_than_caches_hold():
    shapes = {case.shape for case in paged_decode.GRIDS["gqa-quick"]}
    for case in map(DecodeCase, shapes):
        assert case.calls * case.num_bytes >= 2**31 or case.calls == pools.MAX_CALLS


@pytest.mark.parametrize(("tokens", "run"), [(6, 1), (8, 4), (7, 4), (96, 48)])
def test_slots_are_written_once(tokens, run):
    case = write_kv.WriteKVCase(tokens, run, "bf16", rope=False, page_size=16, pool_bytes=2**16)
    calls = np.stack(case.slots)
    assert calls.shape == (case.calls, tokens)
    assert len(np.unique(calls)) == calls.size
    assert calls.min() >= 0
    assert calls.max() < case.pool.num_pages * 16
    for i in range(1, tokens):
        if i % run and i % 16:
            np.testing.assert_array_equal(calls[:, i], calls[:, i - 1] + 1)


def test_pools_are_reused_by_suitable_cases():
    cache = pools.Pools()
    sizes = {"page_size": 16, "num_kv_heads": 2, "head_dim": 16}
    first = cache.get("int8-head", 6, **sizes)
    assert first.k.shape == (6, 2, 16, 16)
    assert np.std(np.asarray(first.k, np.float32)) == pytest.approx(40, rel=0.1)
    assert np.abs(np.asarray(first.k[5], np.float32)).max() > 0
    assert cache.get("int8-head", 5, **sizes) is first
    assert cache.get("int8-head", 7, **sizes) is not first
    scales = cache.get("fp8-token", 5, **sizes).k_scale
    assert scales is not None
    assert scales.shape == (5, 2, 16)


def test_pools_larger_than_memory_are_errors_before_allocation(monkeypatch):
    monkeypatch.setattr(pools, "memory_bytes", lambda: 10_000)
    with pytest.raises(MemoryError, match="GB"):
        pools.Pools().get("bf16", 100, page_size=16, num_kv_heads=2, head_dim=16)


def test_long_pools_are_filled_to_the_end(monkeypatch):
    monkeypatch.setattr(pools, "CHUNK_BYTES", 3 * 2 * 16 * 16 * 4)
    spec = pools.cache_spec("f32", num_pages=8, page_size=16, num_kv_heads=2, head_dim=16)
    pool = pools.random_pool(spec)
    spread = np.std(np.asarray(pool.k).reshape(8, -1), axis=1)
    np.testing.assert_allclose(spread, 1.0, rtol=0.25)


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(Decode(2, 64, 4, 2, 16), "int8-head"),
        DecodeCase(Decode(2, 64, 4, 2, 16), varied=True),
        DecodeCase(Decode(2, 64, 4, 2, 16, window=8)),
        DecodeCase(Decode(2, 64, 4, 2, 16, learned_sinks=True)),
    ],
)
def test_cases_without_contiguous_equivalent_are_not_supported(case):
    with pytest.raises(NotImplementedError):
        torch_decode.check_supported(case)


def test_unwritable_report_is_an_error_before_the_measurement(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_ops, "measure_rates", lambda _: pytest.fail("something was measured"))
    assert bench_ops.main(["merge_states", "--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"bench_ops: error: --json: cannot write {tmp_path}: it is a directory\n"
    picture = str(tmp_path / "report.png")
    assert bench_ops.main(["merge_states", "--json", picture]) == 2
    assert capsys.readouterr().err.endswith(f"cannot write {picture}: --json does\n")


def test_a_full_disk_ends_the_run_in_one_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "report.json").symlink_to("/dev/full")
    monkeypatch.setattr(bench_ops, "measure_rates", lambda _: RATES)
    assert bench_ops.main(["merge_states", "--json", str(tmp_path / "report.json")]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("report.json: No space left on device")
