"""Tests of scripts/tools/first_run.py without a GPU: time limits, outcomes and messages."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

from pallas_attn.runtime.device import INTERPRET_VARIABLE
from scripts.bench.harness.session import load
from scripts.tools import first_run
from scripts.tools.first_run import Ended, SmokeCall
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

CARD = {"device": "NVIDIA B200", "capability": "10.0", "versions": {"jax": "0.11.2"}}
CONTRACT = first_run.ROOT / "tests" / "contract" / "test_mla_decode.py"
HANGS = f"""\
collecting ... collected 4 items

tests/contract/test_mla_decode.py::test_dtypes[mosaic-float16] PASSED    [ 25%]
tests/contract/test_mla_decode.py::test_pages[mosaic-pages of 64, few] {"+" * 20} Timeout {"+" * 20}
  File "python3.12/threading.py", line 1
"""


def test_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert first_run.main(["--out", str(tmp_path / "new")]) == 3
    printed = capsys.readouterr()
    assert printed.err == "first_run: error: needs a GPU of compute capability 9.0 or 10.0, this is cpu\n"
    assert not printed.out
    assert not (tmp_path / "new").exists()


SAMPLE = ("write_kv", "paged_decode of fp8 by fp8", "mla_decode of 128 heads")
SMOKE = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in first_run.SMOKE]


@slow_cases("mla_decode of 128 heads", "paged_decode of fp8 by fp8")
@pytest.mark.parametrize("name", SMOKE)
def test_smallest_calls_are_correct(name: str) -> None:
    assert first_run.error_of(name, "xla") <= first_run.TOLERANCE


@slow_cases("paged_decode of fp8 by fp8-9.0", "paged_decode of fp8 by fp8-10.0")
@pytest.mark.parametrize("capability", ["9.0", "10.0"])
@pytest.mark.parametrize("name", SMOKE)
def test_kernels_support_the_smallest_calls(capsys: pytest.CaptureFixture[str], name: str, capability: str) -> None:
    with mock.patch.dict(os.environ, {INTERPRET_VARIABLE: capability}), harness.interpreting(capsys):
        jax.eval_shape(lambda: first_run.SMOKE[name](SmokeCall("mosaic")))


def test_hanging_process_is_killed() -> None:
    """A process that exceeds its time limit is killed with its child processes. Its output until then is returned."""
    began = time.monotonic()
    child = "import subprocess, sys; print('said', flush=True); subprocess.run(['sleep', '60'])"
    ended = first_run.run_process(["-c", child], 1.0)
    assert (ended.status, ended.output) == (None, "said\n")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("ended", "outcome", "words"),
    [
        (Ended(None, "", 5), "hung", "write_kv had no result after 5 s and was killed"),
        (Ended(1, "Traceback ...\nRuntimeError: CUDA_ERROR\n", 5), "failed", "RuntimeError: CUDA_ERROR"),
        (Ended(0, 'warning\n{"error": 0.5}\n', 5), "wrong", "error 0.5"),
        (Ended(0, '{"error": NaN}\n', 5), "wrong", "error nan"),
        (Ended(0, '{"error": 0.001}\n', 5), "right", "error 0.001"),
    ],
)
def test_outcomes_of_a_smoke_case(monkeypatch: pytest.MonkeyPatch, ended: Ended, outcome: str, words: str) -> None:
    monkeypatch.setattr(first_run, "run_process", lambda *_: ended)
    entry = first_run.smoke("write_kv", 5)
    assert (entry["outcome"], entry["words"]) == (outcome, words)


def test_hanging_test_is_named_and_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def run_process(arguments: list[str], *_: Any) -> Ended:
        calls.append(arguments)
        return Ended(1, HANGS, 9) if len(calls) == 1 else Ended(0, "===== 3 passed, 9 deselected in 1.2s =====\n", 2)

    monkeypatch.setattr(first_run, "run_process", run_process)
    entry = first_run.contract(CONTRACT, tmp_path, 9)
    name = "tests/contract/test_mla_decode.py::test_pages[mosaic-pages of 64, few]"
    assert (entry["outcome"], entry["hung"], entry["counts"]) == ("hung", [name], {"passed": 3})
    assert [f"--deselect={name}" in arguments for arguments in calls] == [False, True]


def test_file_with_hanging_tests_only_is_abandoned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(first_run, "run_process", lambda *_: Ended(None, HANGS, 9))
    assert len(first_run.contract(CONTRACT, tmp_path, 9)["hung"]) == first_run.MOST_HANGS


@pytest.mark.slow
def test_contract_suite_runs_as_on_a_gpu(tmp_path: Path) -> None:
    """The part "contract" of the script runs the contract tests. The test runs one file of them. Without a GPU, the
    tests have the same names, and kernels are interpreted.
    """
    file = CONTRACT.with_name("test_surroundings.py")
    with mock.patch.object(first_run, "run_process", wraps=first_run.run_process) as process:
        entry = first_run.contract(file, tmp_path, 100)
    assert (entry["outcome"], process.call_count) == ("right", 1), entry
    assert (tmp_path / "contract_test_surroundings.log").read_text()


def test_summary_has_all_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_process(arguments: list[str], *_: Any) -> Ended:
        if "scripts/bench_ops.py" in arguments:
            entry = {"median_us": 9.0, "fraction_of_floor": 0.5}
            cases = [{"case": "B64", "results": {"mosaic": entry}}]
            report = {"rates": {"copy": 7e12, "matrix": 1e15}, "cases": cases}
            Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(report))
            return Ended(0, "written\n", 1)
        return Ended(None, "", 1) if "write_kv" in arguments else Ended(0, '{"error": 0.001}', 1)

    monkeypatch.setattr(first_run, "described", lambda _: CARD)
    monkeypatch.setattr(first_run, "run_process", run_process)
    assert first_run.main(["--out", str(tmp_path), "--parts", "benchmarks", "smoke"]) == 1
    report = json.loads((tmp_path / "summary.json").read_text())
    assert report["complete"]
    assert list(report)[-2:] == ["smoke", "benchmarks"], "smoke comes first"
    assert [entry["outcome"] for entry in report["smoke"]] == ["hung"] + ["right"] * (len(first_run.SMOKE) - 1)
    assert report["benchmarks"][0]["rates"]["copy"] == 7e12
    printed = capsys.readouterr().out
    assert "write_kv had no result after 240 s and was killed" in printed
    assert "at best 50% of the floor; copy 7.00 TB/s, GEMM 1000 TFLOP/s" in printed
    assert printed.splitlines()[-1].endswith("not: write_kv")


@pytest.mark.parametrize("operation", first_run.GRIDS)
def test_measured_grids_exist(operation: str) -> None:
    bench = load(operation)
    assert first_run.GRIDS[operation] in bench.grids
    assert {"mosaic", "xla"} <= set(bench.contenders)
