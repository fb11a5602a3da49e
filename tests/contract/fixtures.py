"""Fixtures that run the backend of a contract test, and hooks for its marks `in_every_run` and `unsupported`.

The conftest.py of a folder with contract tests imports everything in `__all__`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest

from tests.contract.backends import AllBut, Backend
from tests.kit.harness import Variant

__all__ = ["backend", "pytest_collection_modifyitems", "pytest_pyfunc_call", "variant"]


@pytest.fixture
def backend(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Backend]:
    """See `backends.every_backend`."""
    chosen: Backend = request.param
    with chosen.running(capsys):
        yield chosen


@pytest.fixture
def variant(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Variant]:
    """See `backends.every_variant`."""
    chosen: Backend = request.param
    with chosen.running(capsys):
        yield chosen.variant


def backend_of(item: pytest.Item) -> Backend | None:
    """Return the backend that a test is parametrised by, or None."""
    parameters = getattr(item, "callspec", None)
    found = {} if parameters is None else parameters.params
    return next((value for value in found.values() if isinstance(value, Backend)), None)


def case_of(item: pytest.Item, backend: Backend) -> str:
    """Return the id of a test's parameters without the backend."""
    words = item.nodeid.partition("[")[2].removesuffix("]").split("-")
    words.remove(backend.id)
    return "-".join(words)


def is_slow(item: pytest.Item, backend: Backend) -> bool:
    """Return whether the marks leave a test to `make test-slow`. On a GPU, kernels run all cases."""
    mark = item.get_closest_marker("in_every_run")
    if mark is None or backend.kernels != backend.interpreted:
        return False
    return case_of(item, backend) not in mark.kwargs.get(backend.id, ())


def unsupported_reason(item: pytest.Item, backend: Backend) -> str | None:
    """Return the pattern of the error message of an unsupported case, or None if the backend has to run it."""
    for mark in item.iter_markers("unsupported"):
        reasons = mark.kwargs.get(backend.id, mark.kwargs.get(backend.name, {}))
        reason = reasons if isinstance(reasons, str) else reasons.get(case_of(item, backend))
        if reason is not None:
            return reason
    return None


def unknown_cases(items: list[pytest.Item]) -> list[str]:
    """Return "test: case" for each case that a mark names and no parameter set has."""
    known: dict[str, set[str]] = collections.defaultdict(set)
    named: dict[str, set[str]] = collections.defaultdict(set)
    for item in items:
        if (chosen := backend_of(item)) is None:
            continue
        test = item.nodeid.partition("[")[0]
        known[test].add(case_of(item, chosen))
        for mark in (*item.iter_markers("in_every_run"), *item.iter_markers("unsupported")):
            for cases in mark.kwargs.values():
                named[test] |= (
                    cases.names if isinstance(cases, AllBut) else set() if isinstance(cases, str) else set(cases)
                )
    return [f"{test}: {name}" for test, names in named.items() for name in sorted(names - known[test])]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that take an interpreter long as slow, and check the names in marks."""
    for item in items:
        chosen = backend_of(item)
        if chosen and is_slow(item, chosen):
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args) and (unknown := unknown_cases(items)):
        raise pytest.UsageError(f"marks name cases that do not exist: {unknown}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Pass an unsupported case if and only if the backend raises NotImplementedError for the stated reason."""
    chosen = backend_of(pyfuncitem)
    reason = unsupported_reason(pyfuncitem, chosen) if chosen else None
    if reason is None:
        return (yield)
    with pytest.raises(NotImplementedError, match=reason):
        yield
    return True
