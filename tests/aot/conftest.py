"""One compiling process for each plugin, shared by all tests of a worker and started when the first one needs it."""

from collections.abc import Callable, Iterator

import pytest

from tests.aot import environment
from tests.aot.gate import Compiler


@pytest.fixture(scope="session")
def compilers() -> Iterator[Callable[[str], Compiler]]:
    """The compiler of a plugin; the test is skipped where there is none."""
    started: dict[str, Compiler] = {}

    def compiler(plugin: str) -> Compiler:
        if reason := environment.missing(plugin):
            pytest.skip(reason)
        return started.setdefault(plugin, Compiler(plugin))

    yield compiler
    for each in started.values():
        each.close()
