"""Fixture with one `Compiler` per plugin. The tests of a pytest worker share it; the first use starts it."""

from collections.abc import Callable, Iterator

import pytest

from tests.aot import environment
from tests.aot.gate import Compiler


@pytest.fixture(scope="session")
def compilers() -> Iterator[Callable[[str], Compiler]]:
    """Function that returns the compiler of a plugin, and skips the test if the plugin is not installed."""
    started: dict[str, Compiler] = {}

    def compiler(plugin: str) -> Compiler:
        if reason := environment.missing(plugin):
            pytest.skip(reason)
        return started.setdefault(plugin, Compiler(plugin))

    yield compiler
    for each in started.values():
        each.close()
