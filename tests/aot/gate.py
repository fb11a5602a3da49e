"""The compile gate: hands cases to a process that has the CUDA plugin."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from tests.aot import environment
from tests.aot.report import Report


class Compiler:
    """A process that compiles cases for an H200 one at a time; a case that ends it costs only a new start."""

    def __init__(self, plugin: str):
        self._plugin = plugin
        self._process: subprocess.Popen[str] | None = None
        self._reports: dict[str, Report] = {}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, it is needed as long as this is

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
        if answer := self._process.stdout.readline():
            return Report.from_json(json.loads(answer))
        self.close()
        self._errors.seek(0)
        return Report(error="\n".join(self._errors.read().splitlines()[-12:]))

    def _start(self) -> subprocess.Popen[str]:
        self._errors.seek(0)
        self._errors.truncate()
        return subprocess.Popen(
            [sys.executable, "-m", "tests.aot.compile"],
            cwd=environment.ROOT,
            env=environment.variables(self._plugin),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
