"""Tests of the plugin `tests.kit.shards`: shards are disjoint, cover all tests, and are balanced by duration."""

from pathlib import Path

import pytest

from tests.kit import shards
from tests.kit.slow_cases import slow_cases


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"])
def test_bad_shard_is_an_error(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--shard: expected K/N with 1 <= K <= N, got"):
        shards.parse_shard(text)


def test_modules_are_assigned_longest_first() -> None:
    modules = {"a": 60.0, "b": 30.0, "c": 20.0, "d": 10.0, "e": 1.0}
    found = shards.assign(modules, 2)
    assert found == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 0}
    assert set(shards.assign(modules, 9).values()) == {0, 1, 2, 3, 4}


@slow_cases("3")
@pytest.mark.parametrize("number", [1, 3])
def test_shards_cover_all_tests_once(number: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(shards.__file__).parents[2]))
    for module in "abcd":
        pytester.makepyfile(**{f"test_{module}": "def test_one(): pass\ndef test_two(): pass"})
    passed = 0
    for shard in range(number):
        arguments = ("-p", "tests.kit.shards", "-p", "no:cacheprovider", "--shard", f"{shard + 1}/{number}")
        passed += pytester.runpytest_inprocess(*arguments).parseoutcomes().get("passed", 0)
    assert passed == 8
