"""The start-up times of operations are taken in processes of their own, and reported with card, versions and commit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.tools import startup


def test_operations_are_those_there_are() -> None:
    assert tuple(startup.calls()) == startup.OPS


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


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    with pytest.raises(RuntimeError, match="no_such_platform"):
        startup.in_a_process("write_latent", "cold", tmp_path)
