"""Tests of the plugin `tests.kit.slow_cases`: named cases are slow, and unknown names are errors."""

from pathlib import Path

import pytest

from tests.kit import slow_cases as module

MODULE = """
import pytest
from tests.kit.slow_cases import slow_cases

@slow_cases({ids})
@pytest.mark.parametrize("x", ["a", "b", "c"])
def test_one(x): pass

def test_other(): pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(module.__file__).parents[2]))

    def run_module(ids: str, *arguments: str) -> pytest.RunResult:
        pytester.makeini("[pytest]\nmarkers =\n    slow: slow\n    slow_cases: ids")
        pytester.makepyfile(MODULE.format(ids=ids))
        plugins = ("-p", "tests.kit.slow_cases", "-p", "no:cacheprovider")
        return pytester.runpytest_inprocess(*plugins, *arguments)

    return run_module


def test_named_cases_are_slow(run) -> None:
    run('"b", "c"', "-m", "not slow").assert_outcomes(passed=2, deselected=2)


def test_unknown_case_is_an_error(run) -> None:
    result = run('"b", "d"')
    result.stderr.fnmatch_lines("*slow_cases names cases that do not exist: *test_one: d*")
