"""Compile gate: sends cases to a process that has the CUDA plugin, and keeps the reports.

A report is kept beside the packages, and holds as long as nothing changes that its case depends on (`sources.key`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.aot import environment, sources
from tests.aot.case import Cases
from tests.aot.cases import ALL, MODULES
from tests.aot.report import Report
from tests.aot.samples import SAMPLES

ANSWER = '{"error":'
"""Beginning of a line with a report; no message of the compilers begins like this."""


class Compiler:
    """Processes that compile cases one at a time, one for each card; a case that ends one costs only a new start.

    Attributes:
      kept: whether reports of earlier runs are taken, without their disassembly.
    """

    def __init__(self, plugin: str, kept: bool = True):
        self._plugin = plugin
        self._kept = kept
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._reports: dict[str, Report] = {}

    def report(self, name: str) -> Report:
        """Report on the case, or sample, of this name."""
        if name not in self._reports:  # a second time, jax would take the first's result and nothing would be compiled
            kept = _load(self._plugin, name) if self._kept else None
            self._reports[name] = self._compile(name) if kept is None else kept
            if kept is None:
                _keep(self._plugin, name, self._reports[name])
        return self._reports[name]

    def close(self) -> None:
        """Ends the processes."""
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
        said = []
        for line in process.stdout:
            if line.startswith(ANSWER):
                return Report.from_json(json.loads(line))
            said.append(line)
        self._processes.pop(card).communicate()
        return Report(error="".join(said[-12:]))

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
    """Hash of everything that a case's report depends on; None for the gate's samples, which are always compiled."""
    return sources.key(f"tests.aot.{MODULES[name]}", plugin) if name in MODULES else None


def _load(plugin: str, name: str) -> Report | None:
    """Kept report of a case, or None if something it depends on has changed."""
    key, path = _key(plugin, name), _path(plugin, name)
    if key is None or not path.is_file():
        return None
    kept = json.loads(path.read_text())
    return Report.from_json(kept["report"]) if kept["key"] == key else None


def _keep(plugin: str, name: str, report: Report) -> None:
    """Keep a report for later runs, replacing the file in one step since several processes may."""
    key, path = _key(plugin, name), _path(plugin, name)
    if key is None or report.error is not None:
        return
    brief = dataclasses.replace(report, kernels=tuple(dataclasses.replace(k, sass="") for k in report.kernels))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"key": key, "report": dataclasses.asdict(brief)}))
    partial.replace(path)
