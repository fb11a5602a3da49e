"""Fixtures of the tests of the server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.shared_steps import share_steps
from tests.models import llm_case
from tests.server.server_case import Running, serving


@pytest.fixture(scope="package", autouse=True)
def shared_steps() -> Iterator[None]:
    """Let all servers of the package share compiled steps. No test of the package patches code of a model."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        share_steps(monkeypatch)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a tokenizer and a chat template."""
    path = llm_case.write_model(tmp_path_factory.mktemp("model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Running]:
    """The server of most tests of a module."""
    with serving(folder) as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The server. After the test no request may be unfinished, and no page may be used."""
    yield shared
    shared.wait_until_idle()
