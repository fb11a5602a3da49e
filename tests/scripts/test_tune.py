"""The tuner: it finds the fastest configuration, passes over unusable ones, and keeps its results."""

import dataclasses
import json
import math
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.ops.mla_decode import config as mla_config
from pallas_attn.ops.paged_decode.config import PagedDecodeKey, mosaic_config
from pallas_attn.ops.paged_prefill import config as paged_config
from pallas_attn.ops.plan_decode.config import PlanConfig, heuristic_costs
from pallas_attn.ops.ragged_attention import config as ragged_config
from pallas_attn.runtime import tuning
from scripts import tune
from scripts.bench.harness.case import Bench
from scripts.bench.harness.compiler import printed
from scripts.bench.harness.session import load
from scripts.bench.harness.timing import Stopwatch, Timing
from tests.ops import plan_case

SPILLING = "    0 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
CLEAN = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"


@dataclasses.dataclass(frozen=True)
class Config:
    size: int
    programs_per_multiprocessor: int = 1


@dataclasses.dataclass(frozen=True)
class FakeCase:
    name: str
    kind: str
    best_size: int
    num_bytes: int = 1
    flops: int = 0


CASES = [FakeCase("a", "x", 8), FakeCase("b", "x", 8), FakeCase("c", "y", 2)]


class Card:
    """An implementation that is fastest at a case's best size; some sizes do not compile."""

    def __init__(self):
        self.measured = []

    def __call__(self, case, inputs, stopwatch):
        config = tuning.lookup("fake", {"kind": case.kind}, Config, lambda: Config(4))
        self.measured.append((case.name, config.size))
        if config.size == 16:
            raise ValueError("16 does not fit")
        os.write(1, (SPILLING if config.size == 6 else CLEAN).encode())
        return Timing([1e-6 * (1 + abs(math.log2(config.size / case.best_size)))], 1, "counted")


@pytest.fixture
def card(monkeypatch):
    card = Card()
    bench = Bench({"tune": CASES}, {"mosaic": card}, lambda case, pools: None)
    monkeypatch.setattr(tune, "load", lambda _: bench)
    monkeypatch.setattr(tune, "SPACES", {"fake": lambda key: ({"size": size} for size in (2, 4, 6, 8, 16, 32))})
    return card


@pytest.fixture
def run(tmp_path):
    """Runs the tuner; returns the tuned configurations and the report, None for a file that was not written."""

    def run(*more):
        tuned, report = tmp_path / "tuned.json", tmp_path / "report.json"
        status = tune.main(["paged_decode", "--only", "fake", *more, "--tuned", str(tuned), "--json", str(report)])
        return status, *(json.loads(path.read_text()) if path.is_file() else None for path in (tuned, report))

    return run


def test_the_fastest_is_found_for_each_key(card, run, tmp_path):
    other = {"key": {"kind": "z"}, "config": {"size": 1}}
    old = {"key": {"kind": "y"}, "config": {"size": 64}}
    (tmp_path / "tuned.json").write_text(json.dumps({"fake": [old, other], "more": [other]}))
    status, tuned, report = run()
    assert status == 0
    assert tuned["fake"][-1]["config"].keys() == {"size", "programs_per_multiprocessor"}
    found = {entry["key"]["kind"]: entry["config"]["size"] for entry in tuned["fake"]}
    assert found == {"x": 8, "y": 2, "z": 1}
    assert tuned["more"] == [other]
    x = report["searched"]["fake"][0]
    assert x["us_before_and_after"] == {"a": pytest.approx([2, 1]), "b": pytest.approx([2, 1])}


def test_what_cannot_be_had_is_told(card, run):
    _, _, report = run()
    tried = {entry["config"]["size"]: entry for entry in report["searched"]["fake"][0]["tried"]}
    assert tried[16]["passed over"] == "ValueError: 16 does not fit"
    assert tried[6]["passed over"] == "RuntimeError: spills 20 bytes"
    assert 4 not in tried


def test_a_hopeless_candidate_is_tried_on_one_case(card, run):
    run()
    assert ("a", 32) in card.measured
    assert ("b", 32) not in card.measured
    assert ("b", 8) in card.measured


def test_what_only_seemed_faster_is_not_kept(card, run, monkeypatch):
    """The first measurements of cases take twice as long as later ones."""
    slow = iter([2.0, 2.0])
    bench = tune.load("")

    def drifting(case, inputs, stopwatch):
        tuning.lookup("fake", {"kind": case.kind}, Config, lambda: Config(4))
        os.write(1, CLEAN.encode())
        return Timing([1e-6 * next(slow, 1.0)], 1, "counted")

    monkeypatch.setattr(tune, "load", lambda _: Bench({"tune": CASES[:2]}, {"mosaic": drifting}, bench.inputs))
    _, tuned, report = run()
    (entry,) = report["searched"]["fake"]
    assert entry["config"]["size"] == tuned["fake"][0]["config"]["size"] == 4
    assert entry["us_before_and_after"] == {"a": pytest.approx([1, 1]), "b": pytest.approx([1, 1])}
    assert any("us" in tried for tried in entry["tried"])


def test_no_time_leaves_what_there_was(card, run):
    status, tuned, report = run("--limit-seconds", "0")
    assert (status, tuned, report) == (1, None, None)


def test_a_search_that_ends_keeps_the_best_so_far(card):
    clock = time.perf_counter()
    tuner = tune.Tuner(tune.load(""), "mosaic", Stopwatch(), math.inf, Console(quiet=True))
    key = ("fake", (("kind", "x"),))
    cases: dict[Any, Any] = {CASES[0]: (2e-6, {"size": 4, "programs_per_multiprocessor": 1})}
    entry = tuner.search(key, cases, clock)
    assert entry["tried"] == [{"not reached": 5}]
    assert entry["config"]["size"] == 4


def test_candidates_nearest_to_what_is_in_use_come_first():
    candidates = [{"size": size, "more": more} for size in (1, 2, 4, 8, 64) for more in (0, 3)]
    order = tune.nearest_first(candidates, {"size": 4, "more": 0})
    assert {"size": 4, "more": 0} not in order
    assert order[0] == {"size": 8, "more": 0} or order[0] == {"size": 2, "more": 0}
    assert order[-1] == {"size": 64, "more": 3}


@pytest.mark.parametrize(
    ("said", "programs", "complaint"),
    [
        (CLEAN, [1], None),
        (SPILLING, [1], "spills 20 bytes"),
        ("Resources(smem_scratch_bytes=70000, barriers=())", [3], None),
        ("Resources(smem_scratch_bytes=80000, barriers=())", [3], "3 programs of 81024 bytes do not fit"),
        ("Resources(smem_scratch_bytes=80000)\nResources(smem_scratch_bytes=2000)", [2], None),
    ],
)
def test_what_compilers_say_is_heeded(said, programs, complaint):
    if complaint is None:
        tune.check_compiled(said, programs)
        return
    with pytest.raises(RuntimeError, match=complaint):
        tune.check_compiled(said, programs)


def test_what_is_printed_by_any_library_is_read(capfd):
    with printed() as said:
        os.write(1, b"from below\n")
        assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "1"
    assert said == ["from below\n"]
    assert "MOSAIC_GPU_DUMP_PTXAS" not in os.environ
    os.write(1, b"afterwards\n")
    assert capfd.readouterr().out == "afterwards\n"


KEYS = [
    PagedDecodeKey(head_dim, cache_bytes, False, 8, 1, 2, 64) for head_dim in (64, 128, 256) for cache_bytes in (1, 2)
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_candidates_are_configurations_and_among_them_is_what_is_in_use(key):
    candidates = list(tune.paged_decode_mosaic(dataclasses.asdict(key)))
    assert len(candidates) >= 2
    assert all(DecodeConfig(**candidate) for candidate in candidates)
    assert dataclasses.asdict(mosaic_config(key)) in candidates


@pytest.mark.parametrize("widths", [(512, 64), (448, 64), (256, 64), (256, 32), (128, 32)], ids=str)
def test_pairs_and_clusters_are_configurations(widths):
    key = dict(zip(("latent_dim", "rope_dim", "page_size"), (*widths, 64), strict=True))
    candidates = list(tune.mla_decode_mosaic(key))
    assert all(mla_config.TwoWarpgroupConfig(**candidate) for candidate in candidates)
    assert dataclasses.asdict(mla_config.two_warpgroup_config(**key)) in candidates


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("widths", [(192, 128), (128, 128), (64, 64), (256, 256)], ids=str)
def test_tiles_of_packed_keys_are_configurations(widths, long):
    key = ragged_config.RaggedAttentionKey(*widths, long=long)
    check_tiles(dataclasses.asdict(key), ragged_config.mosaic_config(key))


@pytest.mark.parametrize("key", [(64, 64, 2, False), (128, 64, 2, False), (256, 64, 1, True)], ids=str)
@pytest.mark.parametrize("capped", [False, True])
def test_tiles_of_pages_are_configurations(key, capped):
    key = paged_config.PagedPrefillKey(*key, terms=1, capped=capped)
    check_tiles(dataclasses.asdict(key), paged_config.mosaic_config(key))


def check_tiles(key: dict[str, Any], used: FlashConfig) -> None:
    candidates = list(tune.flash_mosaic(key))
    assert all(FlashConfig(**candidate) for candidate in candidates)
    assert dataclasses.asdict(used) in candidates


TUNED = ["paged_decode", "mla_decode", "ragged_attention", "paged_prefill", "mla_prefill"]


@pytest.mark.parametrize("operation", TUNED)
def test_there_are_cases_to_tune_by(operation):
    assert load(operation).grids["tune"]


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_overheads_are_configurations(page_size):
    candidates = list(tune.plan_decode({"page_size": page_size}))
    assert dataclasses.asdict(heuristic_costs(page_size)) in candidates
    assert max(PlanConfig(**candidate).row_overhead_pages for candidate in candidates) * page_size <= 512


def test_the_overhead_moves_the_cuts():
    def starts(overhead):
        def decide(op, key, config):
            return PlanConfig(overhead, cut_pages=0) if op == "plan_decode" else config

        lens = jnp.asarray([600, 40, 40, 40], jnp.int32)
        with tuning.deciding(decide):
            plan = plan_case.plan(lens, page_size=16, num_kv_heads=1, num_programs=4)
        return np.asarray(plan.cta_page).tolist(), np.asarray(plan.cta_row).tolist()

    assert starts(0) != starts(8)
    assert starts(16) == starts(heuristic_costs(16).row_overhead_pages)


def test_whoever_decides_last_has_the_last_word():
    def add(size):
        return lambda op, key, config: Config(config.size + size) if op == "fake" else config

    def look_up():
        return tuning.lookup("fake", {}, Config, lambda: Config(1)).size

    with tuning.deciding(add(10)):
        assert look_up() == 11
        with tuning.deciding(lambda op, key, config: Config(2 * config.size)):
            assert look_up() == 22
        assert look_up() == 11
    assert look_up() == 1


def test_what_is_written_is_what_is_looked_up(card, run, monkeypatch):
    _, tuned, _ = run()
    monkeypatch.setattr(tuning, "_tuned", lambda device: tuned)
    assert tuning.lookup("fake", {"kind": "x"}, Config, lambda: Config(4)) == Config(8)
    assert tuning.lookup("fake", {"kind": "unknown"}, Config, lambda: Config(4)) == Config(4)


def test_the_real_operation_is_tuned(tmp_path, monkeypatch):
    """Tunes the portable implementation on the device of the tests."""
    monkeypatch.setattr("scripts.bench.harness.pools.MAX_CALLS", 2)
    monkeypatch.setattr(tune, "Stopwatch", lambda **_: Stopwatch(0.001, 1))
    space = {"paged_decode/xla": lambda key: [{"tile_tokens": 64, "group_rows": 1}]}
    monkeypatch.setattr(tune, "SPACES", space)
    out = ["--tuned", str(tmp_path / "tuned.json"), "--json", str(tmp_path / "report.json")]
    small = ["--grid", "small", "--match", "int8-head", "--contender", "xla"]
    assert tune.main(["paged_decode", *small, "--only", "paged_decode/xla", *out]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    (entry,) = report["searched"]["paged_decode/xla"]
    assert entry["key"] == {"rows": 2, "heads": 2, "head_dim": 16}
    assert entry["tried"][0]["config"] == {"tile_tokens": 64, "group_rows": 1}
    assert "us" in entry["tried"][0]
    assert report["device"] == jax.devices()[0].device_kind


@pytest.mark.parametrize("wrong", [["--grid", "none"], ["--contender", "nobody"], ["--only", "none"]])
def test_wrong_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as raised:
        tune.main(["paged_decode", *wrong])
    assert raised.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "content"), [("--tuned", "[]"), ("--tuned", "{"), ("--json", None)])
def test_files_that_are_no_good_are_refused_before_anything_is_measured(card, tmp_path, capsys, flag, content):
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_text(content)
    files = {"--tuned": tmp_path / "tuned.json", "--json": tmp_path / "report.json", flag: path}
    assert tune.main(["paged_decode", *(str(part) for file in files.items() for part in file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tune: error: {flag}: ")
    assert str(path) in line
    assert card.measured == []
