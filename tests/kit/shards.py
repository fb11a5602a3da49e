"""Pytest plugin that splits the test suite into shards: `pytest --shard 2/8` runs the second of eight shards.

A shard consists of whole modules, because the tests of a module share compiled programs. Modules are assigned in
falling order of their durations in `tests/durations.json`, each to the shard with the fewest seconds. The assignment is
deterministic, so all machines compute the same shards.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
"""Seconds of each module in `make test` and in `make test-slow`: {"modules": {path: {"every_run": s, "slow": s}}}."""

UNKNOWN_SECONDS = 5.0
"""Assumed duration of a module that is not in the table."""


def parse_shard(text: str) -> tuple[int, int]:
    """Parse "K/N" (the K-th of N shards, K from 1). Return K - 1 and N."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"--shard: expected K/N with 1 <= K <= N, got {text!r}")
    return int(match[1]) - 1, int(match[2])


def assign(modules: Mapping[str, float], num_shards: int) -> dict[str, int]:
    """Return the shard index of each module, given the seconds of each module."""
    work = [0.0] * num_shards
    shards: dict[str, int] = {}
    for module in sorted(modules, key=lambda module: (-modules[module], module)):
        shards[module] = min(range(num_shards), key=lambda shard: (work[shard], shard))
        work[shards[module]] += modules[module]
    return shards


def seconds_of(items: list[pytest.Item]) -> dict[str, float]:
    """Return the estimated seconds of each module that has collected tests."""
    table = json.loads(DURATIONS.read_text())["modules"] if DURATIONS.is_file() else {}
    found: dict[str, float] = collections.defaultdict(float)
    for item in items:
        kind = "slow" if item.get_closest_marker("slow") else "every_run"
        module = item.nodeid.partition("::")[0]
        found[module] = max(found[module], table.get(module, {}).get(kind, UNKNOWN_SECONDS))
    return dict(found)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="run only the K-th of N parts of the selected tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other shards. This hook runs last, so only the tests that -m and -k select are assigned."""
    if not (text := config.getoption("shard")):
        return
    index, num_shards = parse_shard(text)
    shards = assign(seconds_of(items), num_shards)
    mine = [item for item in items if shards[item.nodeid.partition("::")[0]] == index]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine
