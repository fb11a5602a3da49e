"""The compile gate: hands cases to a process that has the CUDA plugin."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.aot import environment
from tests.aot.report import Report

ANSWER = '{"error":'
"""How a report begins, and no complaint of the compilers."""


class Compiler:
    """A process that compiles cases for an H200 one at a time; a case that ends it costs only a new start."""

    def __init__(self, plugin: str):
        self._plugin = plugin
        self._process: subprocess.Popen[str] | None = None
        self._reports: dict[str, Report] = {}

    def report(self, name: str) -> Report:
        """What came of compiling the case, or sample, of this name."""
        if name not in self._reports:  # a second time, jax would take the first's result and nothing would be compiled
            self._reports[name] = self._compile(name)
        return self._reports[name]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _compile(self, name: str) -> Report:
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return Report.from_json(json.loads(line))
            said.append(line)
        self.close()
        return Report(error="".join(said[-12:]))

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.aot.compile"],
            cwd=environment.ROOT,
            env=environment.variables(self._plugin),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
