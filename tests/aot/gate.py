"""Compile gate: sends cases to a process that has the CUDA plugin, and caches the reports.

A report is valid as long as the code and the pins on which its case depends do not change (`sources.key`). There are
two caches. `.aot/reports` has the reports of this checkout. `recorded.json`, next to this file, has the reports of
the cases of `make test`; `python -m tests.aot --record` writes it. So `make test` on a clean clone compiles only
kernels that changed since then.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.aot import environment, sources
from tests.aot.case import Cases
from tests.aot.cases import ALL, MODULES
from tests.aot.report import Report
from tests.aot.samples import SAMPLES

ANSWER = '{"error":'
"""Prefix of a line that contains a report. No compiler message starts with it."""


class Compiler:
    """Compiles cases one at a time in worker processes, one process per card.

    If a case crashes its process, the report has the error, and the next case starts a new process.

    Args:
      plugin: "cuda13" or "cuda12".
      cached: whether to use cached reports of earlier runs. Cached reports have no disassembly.
    """

    def __init__(self, plugin: str, cached: bool = True):
        self._plugin = plugin
        self._cached = cached
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._reports: dict[str, Report] = {}

    def report(self, name: str) -> Report:
        """Return the report of a case or sample."""
        if name not in self._reports:  # jax does not compile an equal call again in one process
            cached = _load(self._plugin, name) if self._cached else None
            self._reports[name] = self._compile(name) if cached is None else cached
            if cached is None:
                _save(self._plugin, name, self._reports[name])
        return self._reports[name]

    def close(self) -> None:
        """End the processes."""
        for card in list(self._processes):
            self._processes.pop(card).communicate()

    def _compile(self, name: str) -> Report:
        card = Cases(SAMPLES | ALL)[name].card
        process = self._processes.get(card)
        if process is None:
            process = self._processes[card] = self._start(card)
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        printed = []
        for line in process.stdout:
            if line.startswith(ANSWER):
                return Report.from_json(json.loads(line))
            printed.append(line)
        self._processes.pop(card).communicate()
        return Report(error="".join(printed[-12:]))

    def _start(self, card: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.aot.compile", card],
            cwd=environment.ROOT,
            env=environment.variables(self._plugin),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _path(plugin: str, name: str) -> Path:
    return environment.ROOT / ".aot" / "reports" / plugin / f"{name}.json"


def _key(plugin: str, name: str) -> str | None:
    """Return a hash of everything that a case's report depends on; None for samples, which are always compiled."""
    return sources.key(f"tests.aot.{MODULES[name]}", plugin) if name in MODULES else None


def _load(plugin: str, name: str) -> Report | None:
    """Return the cached report of a case, or None if something it depends on has changed."""
    if (key := _key(plugin, name)) is None:
        return None
    path = _path(plugin, name)
    cached = [json.loads(path.read_text())] if path.is_file() else []
    cached += [entries[name] for entries in [recorded().get(plugin, {})] if name in entries]
    return next((Report.from_json(entry["report"]) for entry in cached if entry["key"] == key), None)


def _recorded_path() -> Path:
    return environment.ROOT / "tests" / "aot" / "recorded.json"


def recorded() -> dict[str, dict[str, Any]]:
    """Return the committed reports: plugin -> case -> key and report."""
    return json.loads(_recorded_path().read_text()) if _recorded_path().is_file() else {}


def record(reports: dict[str, dict[str, Report]]) -> None:
    """Write the committed reports: plugin -> case -> report."""
    entries = {
        plugin: {name: {"key": _key(plugin, name), "report": _brief(report)} for name, report in sorted(cases.items())}
        for plugin, cases in sorted(reports.items())
    }
    _recorded_path().write_text(json.dumps(entries, indent=1) + "\n")


def _brief(report: Report) -> dict[str, Any]:
    """Return a report as JSON without the disassembly."""
    kernels = tuple(dataclasses.replace(kernel, sass="") for kernel in report.kernels)
    return dataclasses.asdict(dataclasses.replace(report, kernels=kernels))


def _save(plugin: str, name: str, report: Report) -> None:
    """Cache a report for later runs. Replace the file atomically, because several processes may write it."""
    key, path = _key(plugin, name), _path(plugin, name)
    if key is None or report.error is not None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"key": key, "report": _brief(report)}))
    partial.replace(path)
