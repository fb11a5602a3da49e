"""Tests of scripts/tools/jax_versions.py: results of the suites with several versions of jax, and their table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.tools import jax_versions, performance
from scripts.tools.jax_versions import results_of

JUNIT = """
<testsuites><testsuite>
<testcase classname="tests.contract.test_a" name="test_lse[mosaic-few heads]"/>
<testcase classname="tests.contract.test_a" name="test_lse[few heads-mosaic_sm100]"><failure message="E: boom&#10;more">
def test():
&gt;       call()
E       AttributeError: module has no attribute 'x'
E       second line
</failure></testcase>
<testcase classname="tests.contract.test_a" name="test_lse[xla-16]"><skipped message="slow"/></testcase>
<testcase classname="tests.contract.test_a" name="test_kernel[xla-mosaic]"/>
<testcase classname="tests.contract.test_a" name="test_lse[triton-16]"><failure message="INTERNAL">
E   JaxRuntimeError: INTERNAL: Traceback (most recent call last):
E     File "/a.py", line 1, in f
E   RuntimeWarning: invalid value
</failure></testcase>
<testcase classname="tests.contract.test_compat_jax_gpu" name="test_decode[xla-16]"/>
<testcase classname="" name="tests.ops.test_b"><error message="collection failure">ImportError while importing
E   ModuleNotFoundError: No module named 'z'
</error></testcase>
</testsuite></testsuites>
"""


def test_results_are_counted_by_group():
    found = results_of(ElementTree.fromstring(JUNIT).iter("testcase"))
    assert found["mosaic"] == {
        "passed": 1,
        "failed": 1,
        "skipped": 0,
        "first_failed": "test_lse[few heads-mosaic_sm100]",
        "reason": "AttributeError: module has no attribute 'x'",
    }
    assert found["xla"] == {"passed": 0, "failed": 0, "skipped": 1}
    assert found["compat"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert (found["triton"]["failed"], found["triton"]["reason"]) == (1, "RuntimeWarning: invalid value")
    assert (found["other"]["passed"], found["other"]["failed"]) == (1, 1)
    assert found["other"]["reason"] == "ModuleNotFoundError: No module named 'z'"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError('<x>: Failed to establish a"
            " new connection: [Errno -2] Name or service not known')': /simple/jax/\nERROR: No matching distribution\n",
            "Failed to establish a new connection: [Errno -2] Name or service not known",
        ),
        (
            "WARNING: a\nERROR: Could not find a version that satisfies the requirement jax==9 (from versions: 0.1)\n",
            "ERROR: Could not find a version that satisfies the requirement jax==9",
        ),
        ("", "pip found no such version"),
    ],
)
def test_reasons_of_pip(log: str, reason: str):
    assert jax_versions.refusal(log) == reason


def environment(folder: Path, log: str) -> Path:
    """Make an environment whose Python reports the packages of this process."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    (folder / "install.log").write_text(log)
    return folder


def test_missing_interpreter_is_recorded(tmp_path: Path):
    entry = jax_versions.record("0.12", tmp_path / ".venv-jax-0.12", tmp_path / "test.xml")
    assert entry == {"name": "0.12", "not_installed": ".venv-jax-0.12 has no Python interpreter"}


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("error: first\nERROR: second\nhint: a\n\n", "ERROR: second"),
        ("a\nkilled\n", "killed"),
        ("", "pallas_attn is not installed"),
    ],
)
def test_failed_installation_of_the_package_is_recorded(tmp_path: Path, log: str, reason: str):
    folder = environment(tmp_path / "a", log)
    (folder / "bin" / "python").write_text("""#!/bin/sh\necho '{"jax": "0.12.0"}'\n""")
    (tmp_path / "test.xml").write_text(JUNIT)
    entry = jax_versions.record("0.12", folder, tmp_path / "test.xml")
    assert entry == {"name": "0.12", "not_installed": reason}


def test_environments_are_recorded_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax_versions, "ROOT", tmp_path)
    monkeypatch.setattr(jax_versions, "RESULTS", tmp_path / "jax_versions.json")
    for name in ("0.11.2", "0.12", "nightly"):
        environment(tmp_path / f".venv-jax-{name}", "WARNING: a\nERROR: No matching distribution found for jax\n")
    junit = tmp_path / ".pytest_cache" / "test-jax-0.11.2.xml"
    junit.parent.mkdir()
    junit.write_text(JUNIT)
    assert jax_versions.main(["0.11.2", "0.12", "nightly"]) == 0
    report = json.loads((tmp_path / "jax_versions.json").read_text())
    tested, crashed, nightly = report["jax_versions"]
    assert tested["versions"]["jax"] == report["versions"]["jax"]
    assert tested["results"]["mosaic"]["failed"] == 1
    assert "results" not in crashed
    assert crashed["not_run"]
    assert nightly == {"name": "nightly", "not_installed": "ERROR: No matching distribution found for jax"}

    monkeypatch.setattr(performance, "read", lambda stem: report)
    table = performance.jax_versions("jax_versions")("docs/support.md")
    version = tested["versions"]["jax"]
    assert (
        f"| {version} | {tested['versions']['triton']} | 0 / 0 / 1 | 0 / 1 / 0 | 1 / 1 / 0 | 1 / 0 / 0 | 1 / 1 / 0 |"
        in table
    )
    assert f"- {version}, mosaic: `test_lse[few heads-mosaic_sm100]`, " in table
    assert "- nightly: `ERROR: No matching" in table
