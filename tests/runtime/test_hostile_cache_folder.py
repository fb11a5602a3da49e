"""Tests of malicious or damaged folders of cached kernels.

The library must not execute the contents of a file that another user can write, must not read an endless file, must not
block, and must return the correct result.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pallas_attn.runtime import kernel_cache
from tests.kit.slow_cases import slow_cases
from tests.runtime.cache_damages import DAMAGES, UNREADABLE
from tests.runtime.test_kernel_cache import TRACED, Call, X, Y, cache_folder, forget, run

__all__ = ["cache_folder"]


def expect_traced(*, warning: str | None = None) -> None:
    """Run two calls with no kernels in memory, as in a new process.

    Check the results, that both kernels were traced, and that there was only the given warning or no warning.
    """
    forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(run(Call(X, Y)), X * 2 + 1)
        np.testing.assert_array_equal(run(Call(X, Y, scale=3.0)), X * 3 + 1)
    assert len(TRACED) == 2
    messages = [str(one.message) for one in caught]
    assert len(messages) == (warning is not None)
    assert all(re.search(warning, message) for message in messages if warning)


def expect_cached() -> None:
    forget()
    np.testing.assert_array_equal(run(Call(X, Y)), X * 2 + 1)
    np.testing.assert_array_equal(run(Call(X, Y, scale=3.0)), X * 3 + 1)
    assert not TRACED


@pytest.fixture
def kernels(cache_folder: Path) -> list[Path]:
    """Return the cache files of the two kernels that `expect_traced` runs."""
    run(Call(X, Y))
    run(Call(X, Y, scale=3.0))
    files = sorted(cache_folder.iterdir())
    assert len(files) == 2
    expect_cached()
    return files


def test_files_are_private(kernels: list[Path]) -> None:
    assert [stat.S_IMODE(file.stat().st_mode) for file in kernels] == [0o600, 0o600]


def test_new_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(tmp_path / "new"))
    run(Call(X, Y))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720, 0o702])
def test_folder_that_others_can_write(kernels: list[Path], mode: int) -> None:
    before = [file.read_bytes() for file in kernels]
    kernels[0].parent.chmod(mode)
    expect_traced(warning="other users own it or can write it")
    kernels[0].parent.chmod(0o700)
    assert [file.read_bytes() for file in kernels] == before
    assert len(list(kernels[0].parent.iterdir())) == 2


def test_folder_of_another_user(kernels: list[Path]) -> None:
    with mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1):  # another user runs the process
        if os.geteuid() == 1:
            os.chown(kernels[0].parent, 2, -1)
        expect_traced(warning="other users own it or can write it")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change the owner of a file")
def test_file_of_another_user_is_replaced(kernels: list[Path]) -> None:
    for file in kernels:
        os.chown(file, 12345, -1)
    expect_traced()
    assert {file.stat().st_uid for file in kernels} == {0}
    expect_cached()


def test_file_that_others_can_write_is_replaced(kernels: list[Path]) -> None:
    for file in kernels:
        file.chmod(0o666)
    expect_traced()
    expect_cached()
    assert {stat.S_IMODE(file.stat().st_mode) for file in kernels} == {0o600}


@slow_cases("link to nothing", "zeros", "random bytes")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_replaced(kernels: list[Path], damage: str) -> None:
    for file in kernels:
        DAMAGES[damage](file)
    expect_traced(
        warning="cannot deserialize a cached kernel in .*, and lowers it again: " if damage in UNREADABLE else None
    )
    assert all(stat.S_ISREG(file.lstat().st_mode) for file in kernels)
    expect_cached()


def test_file_under_the_key_of_another_kernel_is_replaced(kernels: list[Path]) -> None:
    contents = [file.read_bytes() for file in kernels]
    for file, content in zip(kernels, reversed(contents), strict=True):
        file.write_bytes(content)
    expect_traced()
    expect_cached()


def test_folder_under_a_key(kernels: list[Path]) -> None:
    for file in kernels:
        file.unlink()
        file.mkdir()
    expect_traced(warning="cannot write cached kernels")


def test_failed_write_leaves_no_file(kernels: list[Path]) -> None:
    for file in kernels:
        file.unlink()
    with mock.patch.object(os, "replace", side_effect=OSError(28, "No space left on device")):
        expect_traced(warning="No space left on device")
    assert not list(kernels[0].parent.iterdir())
