"""One of two processes is killed, and how the other one ended is the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cli.command_line import Failure
from scripts.tools import killed_process


@pytest.mark.slow  # tests/models/test_processes.py has a killed process in every run
@pytest.mark.parametrize("killed", [0, 1])
def test_the_other_process_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int) -> None:
    monkeypatch.setattr(killed_process, "driver", lambda: None)
    out = tmp_path / "killed.json"
    options = ["--step", "10", "--kill", str(killed), "--dtype", "float32", "--timeout", "2", "--json", str(out)]
    assert killed_process.main(options) == 0
    result = json.loads(out.read_text())["result"]
    assert result["status"] == 3
    assert result["line"] == f"run_decode: error: process {killed} sent no heartbeat for 2 s"
    assert 2 <= result["seconds"] < 10


def test_each_process_has_a_card_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killed_process, "driver", lambda: "580.1")
    assert killed_process.environment(1)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setattr(killed_process, "driver", lambda: None)
    assert killed_process.environment(1)["JAX_PLATFORMS"] == "cpu"


def test_an_end_before_anything_was_killed_is_a_failure(tmp_path: Path) -> None:
    program = "import sys; sys.exit('no memory')"
    left = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    with pytest.raises(Failure, match="ended with status 1 before the other was killed: no memory"):
        killed_process.watch(left, tmp_path / "died", limit_s=60)
    hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stderr=subprocess.PIPE, text=True)
    with pytest.raises(Failure, match="did not end within 0.1 s"):
        killed_process.watch(hanging, tmp_path / "died", limit_s=0.1)
    hanging.kill()
    hanging.communicate()


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--kill", "2"], ["--step", "1"]):
        assert killed_process.main(wrong) == 2
        assert "--kill is 0 or 1, --step at least 2" in capsys.readouterr().err
