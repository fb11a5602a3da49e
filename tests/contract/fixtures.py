"""Fixtures `backend` and `variant` of contract tests, and hooks that implement `in_every_run` and `unsupported`.

`tests/contract/backends.py` explains backends and defines the decorators. The conftest.py of each folder with contract
tests imports everything in `__all__`.
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
    """Yield the backend with which `backends.every_backend` runs the test, in the context in which its calls run."""
    chosen: Backend = request.param
    with chosen.running(capsys):
        yield chosen


@pytest.fixture
def variant(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Variant]:
    """Yield the variant with which `backends.every_variant` runs the test, in the context in which its calls run."""
    chosen: Backend = request.param
    with chosen.running(capsys):
        yield chosen.variant


def backend_of(item: pytest.Item) -> Backend | None:
    """Return the backend among the parameters of a test; None for a test without backends."""
    parameters = getattr(item, "callspec", None)
    found = {} if parameters is None else parameters.params
    return next((value for value in found.values() if isinstance(value, Backend)), None)


def case_of(item: pytest.Item, backend: Backend) -> str:
    """Return the name of a test's case: the part of the test id in brackets, without the backend."""
    words = item.nodeid.partition("[")[2].removesuffix("]").split("-")
    words.remove(backend.id)
    return "-".join(words)


def is_slow(item: pytest.Item, backend: Backend) -> bool:
    """Return whether `in_every_run` leaves a test to `make test-slow`. On a GPU, tests of kernels are never left to
    it.
    """
    mark = item.get_closest_marker("in_every_run")
    if mark is None or backend.kernels != backend.interpreted:
        return False
    return case_of(item, backend) not in mark.kwargs.get(backend.id, ())


def unsupported_reason(item: pytest.Item, backend: Backend) -> str | None:
    """Return the pattern of the error message of an unsupported case; None for a supported case."""
    for mark in item.iter_markers("unsupported"):
        reasons = mark.kwargs.get(backend.id, mark.kwargs.get(backend.name, {}))
        reason = reasons if isinstance(reasons, str) else reasons.get(case_of(item, backend))
        if reason is not None:
            return reason
    return None


def unknown_cases(items: list[pytest.Item]) -> list[str]:
    """Return "test: case" for each case that a decorator names and that the test does not have."""
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
    """Mark the cases that `in_every_run` does not name as slow, and check the names of cases in decorators."""
    for item in items:
        chosen = backend_of(item)
        if chosen and is_slow(item, chosen):
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args) and (unknown := unknown_cases(items)):
        raise pytest.UsageError(f"marks name cases that do not exist: {unknown}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run a test. An unsupported case passes if and only if it raises NotImplementedError whose message matches."""
    chosen = backend_of(pyfuncitem)
    reason = unsupported_reason(pyfuncitem, chosen) if chosen else None
    if reason is None:
        return (yield)
    with pytest.raises(NotImplementedError, match=reason):
        yield
    return True
