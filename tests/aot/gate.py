"""Compiler of the compile gate: it sends cases to worker processes with a CUDA plugin, and caches their reports.

A cached report is valid until the code that its case can reach or the pinned compiler versions change (`sources.key`).
There are two caches. `.aot/reports` has the reports of this checkout. `recorded.json` in this folder is committed and
has the reports of the cases of `make test`; `python -m tests.aot --record` writes it. Therefore, `make test` in a new
clone compiles only the cases whose code changed after the last recording.
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
"""First characters of an output line that is a report. No message of a compiler starts with them."""


class Compiler:
    """Compiler of cases, one at a time, in one worker process per GPU type.

    If a case crashes its process, its report has the error, and the next case starts a new process.

    Args:
      plugin: CUDA plugin, "cuda13" or "cuda12".
      cached: whether to return cached reports of earlier runs. They have no disassembly.
    """

    def __init__(self, plugin: str, cached: bool = True):
        self._plugin = plugin
        self._cached = cached
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._reports: dict[str, Report] = {}

    def report(self, name: str) -> Report:
        """Return the report of a case of `cases.py` or of a sample of `samples.py`."""
        if name not in self._reports:  # a worker process cannot compile a call twice: jax caches it
            cached = _load(self._plugin, name) if self._cached else None
            self._reports[name] = self._compile(name) if cached is None else cached
            if cached is None:
                _save(self._plugin, name, self._reports[name])
        return self._reports[name]

    def close(self) -> None:
        """End the worker processes."""
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
    """Return the hash of everything on which the report of a case depends; None for samples, which are not cached."""
    return sources.key(f"tests.aot.{MODULES[name]}", plugin) if name in MODULES else None


def _load(plugin: str, name: str) -> Report | None:
    """Return the cached report of a case; None if no cache has a report with the current key."""
    if (key := _key(plugin, name)) is None:
        return None
    path = _path(plugin, name)
    cached = [json.loads(path.read_text())] if path.is_file() else []
    cached += [entries[name] for entries in [recorded().get(plugin, {})] if name in entries]
    return next((Report.from_json(entry["report"]) for entry in cached if entry["key"] == key), None)


def _recorded_path() -> Path:
    return environment.ROOT / "tests" / "aot" / "recorded.json"


def recorded() -> dict[str, dict[str, Any]]:
    """Return the contents of recorded.json: plugin -> name of the case -> key and report."""
    return json.loads(_recorded_path().read_text()) if _recorded_path().is_file() else {}


def record(reports: dict[str, dict[str, Report]]) -> None:
    """Write recorded.json. `reports` has the reports by plugin and name of the case."""
    entries = {
        plugin: {name: {"key": _key(plugin, name), "report": _brief(report)} for name, report in sorted(cases.items())}
        for plugin, cases in sorted(reports.items())
    }
    _recorded_path().write_text(json.dumps(entries, indent=1) + "\n")


def _brief(report: Report) -> dict[str, Any]:
    """Return a report without disassembly as a JSON object."""
    kernels = tuple(dataclasses.replace(kernel, sass="") for kernel in report.kernels)
    return dataclasses.asdict(dataclasses.replace(report, kernels=kernels))


def _save(plugin: str, name: str, report: Report) -> None:
    """Write a report to the cache of this checkout. The file is replaced atomically, because several pytest workers may
    write it at the same time. Reports of errors are not cached.
    """
    key, path = _key(plugin, name), _path(plugin, name)
    if key is None or report.error is not None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"key": key, "report": _brief(report)}))
    partial.replace(path)
