"""Tests of scripts/bench_sparse.py, which measures sparse and dense decoding over caches with random contents.

The tests check that the report is consistent. They do not check times.
"""

import json
from pathlib import Path

import pytest

from scripts import bench_sparse


@pytest.mark.slow  # compiles four engines; tests/models/test_sparse.py has more tests of the engine
def test_report_is_consistent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    sizes = ["--cases", "2x96", "1x192", "--page-size", "16", "--new-tokens", "4", "--caches", "fp8"]
    model = ["--config", "v32-tiny", "--dtype", "float32", "--implementation", "reference"]
    assert bench_sparse.main([*sizes, *model, "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [(case["sparse"], case["batch"], case["context"]) for case in results] == [
        (True, 2, 96),
        (True, 1, 192),
        (False, 2, 96),
        (False, 1, 192),
    ]
    for case in results:
        assert case["decode_tokens_per_s"] == pytest.approx(case["batch"] / case["step_s"]["median"])
        assert case["fraction_of_floor"] == pytest.approx(case["floor_s"] / case["step_s"]["median"])
    assert capsys.readouterr().out.count("sparse, float8_e4m3fn") == 2


@pytest.mark.parametrize("wrong", [["0x64"], ["2x65"], ["2x"], ["1x163840"]])
def test_cases_are_checked(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_sparse.main(["--cases", *wrong])
    assert "cases: " in capsys.readouterr().err
