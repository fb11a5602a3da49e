"""Tests of scripts/tools/startup.py, which measures first calls in new processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.tools import startup


def test_operations_match_dispatch() -> None:
    assert tuple(startup.calls()) == startup.OPS


@pytest.mark.slow  # starts three processes
def test_each_mode_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "startup.json"
    monkeypatch.setattr(
        sys, "argv", ["startup", "--ops", "write_latent", "--modes", "cold", "warm", "--json", str(out)]
    )
    startup.main()
    report = json.loads(out.read_text())
    times = report["seconds"]["write_latent"]
    assert set(times) == {"cold", "warm"}
    assert all(seconds > 0 for mode in times.values() for seconds in mode.values())
    assert {"device", "versions", "commit"} <= report.keys()
    assert "write_latent" in capsys.readouterr().out


@pytest.mark.slow
def test_failed_process_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    with pytest.raises(RuntimeError, match="no_such_platform"):
        startup.measure_op("write_latent", "cold", tmp_path)


@pytest.mark.slow  # starts six processes
def test_engine_and_info_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["startup", "--ops", "--engine", "v3-tiny", "--info"])
    startup.main()
    *engine, info = capsys.readouterr().out.splitlines()
    kinds = [f"{mode}, {kind}" for kind in ("all programs first", "in the background") for mode in ("cold", "warm")]
    assert [line.partition("{")[0].strip() for line in engine] == [f"v3-tiny, {kind}" for kind in kinds]
    whole, _, first, _ = (json.loads("{" + line.partition("{")[2].replace("'", '"')) for line in engine)
    assert first["ready_programs"] < first["all_programs"] == whole["ready_programs"]
    assert info.startswith("pallas-attn info ")
