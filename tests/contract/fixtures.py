"""The backend of a contract test, running as it does on this machine, and what it refuses.

The conftest.py of a folder with such tests imports all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.backends import Backend
from tests.kit.harness import Variant


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
    """Backend that a test is parametrised by; None if there is none."""
    parameters = getattr(item, "callspec", None)
    found = {} if parameters is None else parameters.params
    return next((value for value in found.values() if isinstance(value, Backend)), None)


def name_of(item: pytest.Item) -> str:
    """The test as the patterns of `backends` have it."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves to the slow run what takes an interpreter long."""
    for item in items:
        chosen = backend_of(item)
        if chosen and chosen.is_slow(name_of(item)):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Holds a backend to the refusals that its table promises: the test passes if it ends with one, for that reason."""
    chosen = backend_of(pyfuncitem)
    reason = chosen.refusal(name_of(pyfuncitem)) if chosen else None
    if reason is None:
        return (yield)
    with pytest.raises(NotImplementedError, match=reason):
        yield
    return True
