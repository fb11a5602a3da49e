"""Tests of the check of ptxas: versions that miscompile kernels raise an error; other versions, or none, are
accepted.
"""

import os
from pathlib import Path

import pytest

from pallas_attn.mosaic.primitives.assembler import assembler, require_sound_assembler


def ptxas(folder: Path, says: str) -> Path:
    """Write a script that prints `says` as the version of ptxas."""
    folder.mkdir(parents=True)
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\necho 'ptxas: NVIDIA (R) Ptx optimizing assembler'\necho '{says}'\n")
    path.chmod(0o755)
    return path


def release(version: str) -> str:
    return f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Return a folder and set an environment in which neither PATH nor the packages have a ptxas."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", str(tmp_path / "packages"))
    return tmp_path


@pytest.mark.parametrize("version", ["12.8.61", "12.8.93", "12.9.41"])
def test_broken_assembler_raises(bare, monkeypatch, version):
    path = ptxas(bare / "bin", release(version))
    monkeypatch.setenv("PATH", str(path.parent))
    with pytest.raises(NotImplementedError, match=f"{path} is version {version}.*first on PATH"):
        require_sound_assembler()


@pytest.mark.parametrize("says", [release("12.6.85"), release("12.9.86"), release("13.0.88"), "no version at all"])
def test_other_assemblers_are_accepted(bare, monkeypatch, says):
    monkeypatch.setenv("PATH", str(ptxas(bare / "bin", says).parent))
    require_sound_assembler()


def test_missing_assembler_is_accepted(bare):
    assert assembler() is None
    require_sound_assembler()


def test_path_precedes_the_cuda_packages(bare, monkeypatch):
    packaged = ptxas(bare / "packages" / "bin", release("12.8.93"))
    assert assembler() == packaged
    with pytest.raises(NotImplementedError, match="12.8.93"):
        require_sound_assembler()
    first = ptxas(bare / "bin", release("13.0.88"))
    monkeypatch.setenv("PATH", os.pathsep.join([str(bare / "empty"), str(first.parent)]))
    assert assembler() == first
    require_sound_assembler()
