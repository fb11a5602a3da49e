"""The backend of a contract test, running as it does on this machine."""

from collections.abc import Iterator

import pytest

from tests.contract.backends import Backend


@pytest.fixture
def backend(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Backend]:
    """See `backends.every_backend`."""
    chosen: Backend = request.param
    with chosen.running(capsys):
        yield chosen
