"""Tests that the tests of the Blackwell kernels, and of decode with wide heads on Hopper, detect mistakes.

These kernels have not run on a GPU, so their correctness depends on tests in the interpreter. `make test-slow` plants
each mistake of `planted_breaks.py` in a copy of the library, one at a time, and runs the test that must fail. That test
is part of `make test`, which also checks that the text of each mistake matches the current code.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mosaic.planted_breaks import BREAKS, PlantedBreak

ROOT = Path(__file__).parents[2]
COPIED = ("pallas_attn", "models", "scripts", "tests")
SEEDS = (1, 2, 3)
"""Seeds of the random inputs of tests. With each mistake, the test must fail for at least one seed.

One seed is not enough: if a mistake makes one more key among hundreds visible, the change of the result is below the
tolerance for about one seed in six.
"""

HANGS_AFTER_SECONDS = 120
"""Time limit of a test in seconds. With some mistakes a kernel waits forever at a barrier."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the library and the tests."""
    folder = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "goldens")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@contextlib.contextmanager
def planted_in(folder: Path, planted: PlantedBreak) -> Iterator[None]:
    """Return a context in which the library in a folder has the mistake."""
    file = folder / planted.file
    right = file.read_text()
    file.write_text(right.replace(planted.right, planted.wrong))
    try:
        yield
    finally:
        file.write_text(right)


def passes(folder: Path, *tests: str, seed: int) -> bool:
    """Return whether tests pass in a folder with random inputs of a seed. A test that hangs does not pass.

    A test that is marked slow is an error, because `make test` has to notice each mistake.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    variables = os.environ | {"PYTHONPATH": str(folder), "TEST_SEED": str(seed)}
    try:
        ended = subprocess.run(
            [*command, "-m", "not slow and not gpu"],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANGS_AFTER_SECONDS * len(tests),
        )
    except subprocess.TimeoutExpired:
        return False
    assert ended.returncode in (0, 1), ended.stdout  # other codes mean that pytest ran no test
    return ended.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, planted in BREAKS.items() if planted.noticed_by])
def test_planted_mistake_is_noticed(name: str, copy: Path) -> None:
    with planted_in(copy, BREAKS[name]):
        assert not all(passes(copy, BREAKS[name].noticed_by, seed=seed) for seed in SEEDS)


@pytest.mark.slow
def test_all_pass_without_a_mistake(copy: Path) -> None:
    suites = sorted({planted.noticed_by for planted in BREAKS.values() if planted.noticed_by})
    assert passes(copy, *suites, seed=SEEDS[0])


def test_most_mistakes_are_noticed() -> None:
    unnoticed = [name for name, planted in BREAKS.items() if not planted.noticed_by]
    assert len(BREAKS) >= 30
    assert len(unnoticed) * 30 <= 2 * len(BREAKS)
    assert all(BREAKS[name].why_not for name in unnoticed)


def test_planted_mistakes_match_the_code() -> None:
    for name, planted in BREAKS.items():
        source = (ROOT / planted.file).read_text()
        assert source.count(planted.right) == 1, name
        ast.parse(source.replace(planted.right, planted.wrong))
        file, _, test = planted.noticed_by.partition("::")
        assert not planted.noticed_by or f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name
