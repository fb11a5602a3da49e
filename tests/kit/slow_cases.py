"""Pytest plugin that marks single cases of a parametrised test as slow, by their ids.

Example:
  @slow_cases("many pages", "long-float32")
  @pytest.mark.parametrize(...)
  def test_lengths(...): ...

`make test` skips these cases; `make test-slow` runs them. An id that matches no case is an error at collection.
"""

from __future__ import annotations

import collections

import jax
import pytest


def slow_cases(*ids: str) -> pytest.MarkDecorator:
    """Return a decorator that marks the cases with these ids as slow. The id of a case is the text in brackets of the
    test id.
    """
    return pytest.mark.slow_cases(*ids)


def unknown_ids(items: list[pytest.Item]) -> list[str]:
    """Return "test: id" for each id in a `slow_cases` mark that matches no case of its test."""
    known: dict[str, set[str]] = collections.defaultdict(set)
    named: dict[str, set[str]] = collections.defaultdict(set)
    for item in items:
        for mark in item.iter_markers("slow_cases"):
            test, _, case = item.nodeid.partition("[")
            known[test].add(case.removesuffix("]"))
            named[test].update(mark.args)
    return [f"{test}: {case}" for test, cases in named.items() for case in sorted(cases - known[test])]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the named cases as slow. This hook runs first, so that `-m slow` sees the marks."""
    for item in items:
        case = item.nodeid.partition("[")[2].removesuffix("]")
        if any(case in mark.args for mark in item.iter_markers("slow_cases")):
            item.add_marker(pytest.mark.slow)
    complete = not any("::" in argument for argument in config.args) and jax.default_backend() != "gpu"
    if complete and (unknown := unknown_ids(items)):  # on a GPU, fewer backends and therefore fewer cases are collected
        raise pytest.UsageError(f"slow_cases names cases that do not exist: {unknown}")
