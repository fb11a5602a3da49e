"""Fixture for the tests of the compile gate: one `Compiler` per CUDA plugin, shared by all tests of a pytest worker."""

from collections.abc import Callable, Iterator

import pytest

from tests.aot import environment
from tests.aot.gate import Compiler


@pytest.fixture(scope="session")
def compilers() -> Iterator[Callable[[str], Compiler]]:
    """Return a function of the name of a CUDA plugin. It returns the compiler, or skips the test without the plugin."""
    started: dict[str, Compiler] = {}

    def compiler(plugin: str) -> Compiler:
        if reason := environment.missing(plugin):
            pytest.skip(reason)
        return started.setdefault(plugin, Compiler(plugin))

    yield compiler
    for each in started.values():
        each.close()
