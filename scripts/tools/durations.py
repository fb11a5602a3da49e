"""Write tests/durations.json and tests/durations.md from the JUnit files of `make test` and `make test-slow`.

    python -m scripts.tools.durations .pytest_cache/test.xml .pytest_cache/test-slow*.xml

The tables have the number of tests and the seconds of each test module. Modules that occur in the JUnit files are
replaced, other modules stay. Files with "slow" in their names count as runs of `make test-slow`. `pytest --shard` uses
durations.json to distribute modules evenly.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

from pallas_attn.models.cli.output_files import output_file

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "durations.json"
PAGE = ROOT / "tests" / "durations.md"
KINDS = {"every_run": "make test", "slow": "make test-slow"}


def module_of(classname: str) -> str:
    """Return the path of the module of a JUnit class name: "tests.ops.test_a.TestB" -> "tests/ops/test_a.py"."""
    words = classname.split(".")
    last = next(index for index, word in enumerate(words) if word.startswith("test_"))
    return "/".join(words[: last + 1]) + ".py"


def read(file: Path) -> dict[str, tuple[int, float]]:
    """Return the number of tests, including skipped tests, and the seconds of each module in a JUnit file."""
    found: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        module = module_of(case.attrib["classname"])
        tests, seconds = found[module]
        found[module] = tests + 1, seconds + float(case.attrib["time"])
    return dict(found)


def updated(table: dict[str, dict[str, dict[str, float]]], files: list[Path]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the table with the modules of the JUnit files replaced or added."""
    modules = {module: dict(entry) for module, entry in table.get("modules", {}).items()}
    for file in files:
        kind = "slow" if "slow" in file.name else "every_run"
        for module, (tests, seconds) in read(file).items():
            entry = modules.setdefault(module, {})
            entry[kind], entry[f"{kind}_tests"] = round(seconds, 1), tests
    return {"modules": dict(sorted(modules.items()))}


def page(table: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a Markdown page with a table of the modules, in falling order of their seconds in `make test`."""
    modules = table["modules"]
    total = {kind: sum(entry.get(kind, 0.0) for entry in modules.values()) for kind in KINDS}
    lines = [
        "# Durations of the tests",
        "",
        "Seconds of one worker for each module. `python -m scripts.tools.durations` writes this page from JUnit files.",
        f"In total {total['every_run']:,.0f} s for `make test` and {total['slow']:,.0f} s for `make test-slow`.",
        "",
        "| module | tests in `make test` | s | tests in `make test-slow` | s |",
        "|---|---|---|---|---|",
    ]
    for module, entry in sorted(modules.items(), key=lambda item: (-item[1].get("every_run", 0.0), item[0])):
        cells = [f"{entry.get(f'{kind}_tests', 0):,.0f} | {entry.get(kind, 0.0):,.1f}" for kind in KINDS]
        lines.append(f"| {module} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.tools.durations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="JUNIT.xml")
    options = parser.parse_args()
    if missing := [file for file in options.files if not file.is_file()]:
        parser.error(f"no such file: {', '.join(map(str, missing))}")
    table = updated(json.loads(TABLE.read_text()) if TABLE.is_file() else {}, options.files)
    with output_file(TABLE) as file:
        file.write(f"{json.dumps(table, indent=1)}\n".encode())
    with output_file(PAGE) as file:
        file.write(page(table).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
