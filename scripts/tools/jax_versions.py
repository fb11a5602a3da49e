"""Write benchmarks/results/jax_versions.json from the tests that `make test-jax` ran with several versions of jax.

    python -m scripts.tools.jax_versions 0.10.2 0.11.2 0.12 nightly

For each name, the folder .venv-jax-NAME has the environment and install.log, the output of both installations, and
.pytest_cache/test-jax-NAME.xml is the JUnit file of the tests. A name whose environment has no Python, no jax or not
this package gets the reason instead of results. `python -m scripts.tools.performance` makes the table of
docs/support.md from the results.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pallas_attn.models.cli.output_files import output_file
from scripts.bench.harness.device import description

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "jax_versions.json"
GROUPS = ("xla", "triton", "mosaic", "compat", "other")
"""Groups of tests: tests of one implementation, all tests of the compat suite, and the other tests, which have no
implementation or `reference`."""

OWN = "pallas_attn"
PACKAGES = ("jax", "jaxlib", "triton", "flax", "numpy", OWN)
ASK = f"""
import importlib.metadata, json
installed = {{each.name.lower(): each.version for each in importlib.metadata.distributions()}}
print(json.dumps({{name: installed[name] for name in {PACKAGES} if name in installed}}))
"""


def group_of(case: ElementTree.Element) -> str:
    """Return the group of a test, given its element in a JUnit file."""
    if "compat" in case.attrib["classname"]:
        return "compat"
    arguments = re.findall(r"[\w.]+", case.attrib["name"].partition("[")[2])
    named = {argument.removesuffix("_sm100") for argument in arguments} & set(GROUPS)
    return named.pop() if len(named) == 1 else "other"


def reason_of(problem: ElementTree.Element) -> str:
    """Return the first line that pytest marks with "E", without tracebacks; the message if no line is marked."""
    marked = re.findall(r"^E +(\S.*)$", problem.text or "", re.MULTILINE)
    lines = [line for line in marked if not re.match(r"File |.*\(most recent call last\):$", line)]
    message = problem.attrib.get("message", "")
    return (lines or message.splitlines() or ["unknown"])[0][:200]


def results_of(cases: Iterable[ElementTree.Element]) -> dict[str, dict[str, Any]]:
    """Return the numbers of passed, failed and skipped tests of each group, and the first failed test with its reason.
    A module that cannot be imported counts as a failed test of the group "other".
    """
    found: dict[str, dict[str, Any]] = {name: {"passed": 0, "failed": 0, "skipped": 0} for name in GROUPS}
    for case in cases:
        of_group = found[group_of(case)]
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        if problem is not None:
            of_group["failed"] += 1
            of_group.setdefault("first_failed", case.attrib["name"])
            of_group.setdefault("reason", reason_of(problem))
        else:
            of_group["skipped" if case.find("skipped") is not None else "passed"] += 1
    return found


def refusal(log: str) -> str:
    """Return the reason why pip did not install a version: a failed connection to an index, or the first error."""
    found = re.search(
        r"Failed to establish a new connection: [^')]*|^ERROR: (?:(?! \(from versions).)*", log, re.MULTILINE
    )
    return found[0][:200] if found else "pip found no such version"


def record(name: str, environment: Path, junit: Path) -> dict[str, Any]:
    """Return versions and results of one environment."""
    python, log = environment / "bin" / "python", environment / "install.log"
    if not python.is_file():
        return {"name": name, "not_installed": f"{environment.name} has no Python interpreter"}
    asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True)
    versions = json.loads(asked.stdout)
    text = log.read_text() if log.is_file() else ""
    if "jax" not in versions or (name == "nightly" and "dev" not in versions["jax"]):
        return {"name": name, "not_installed": refusal(text)}
    if versions.pop(OWN, None) is None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        return {"name": name, "not_installed": (errors or [f"{OWN} is not installed"])[-1][:200]}
    if not junit.is_file():
        return {"name": name, "versions": versions, "not_run": "pytest ended before it wrote results"}
    return {
        "name": name,
        "versions": versions,
        "results": results_of(ElementTree.parse(junit).getroot().iter("testcase")),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="jax_versions", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="suffix of an environment's folder")
    names = parser.parse_args(argv).names
    found = [
        record(name, ROOT / f".venv-jax-{name}", ROOT / ".pytest_cache" / f"test-jax-{name}.xml") for name in names
    ]
    with output_file(RESULTS) as file:
        file.write((json.dumps(description() | {"jax_versions": found}, indent=2) + "\n").encode())
    for entry in found:
        print(json.dumps(entry))
    return 0


if __name__ == "__main__":
    sys.exit(main())
