"""The assembler (ptxas) that XLA would run on kernels here, and a refusal of versions known to miscompile them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

BROKEN_SINCE, SOUND_SINCE = (12, 8, 0), (12, 9, 86)
"""ptxas of CUDA 12.8.0 to 12.9.0 miscompiles some causal masks (jax's own attention kernel refuses it too); 12.9.86 is
that of CUDA 12.9.1.
"""


def require_sound_assembler() -> None:
    """Raise NotImplementedError if kernels would go through an assembler that is known to miscompile them."""
    path = assembler()
    version = None if path is None else _version(path)
    if version is not None and BROKEN_SINCE <= version < SOUND_SINCE:
        raise NotImplementedError(
            f"{path} is version {'.'.join(map(str, version))}, and ptxas of CUDA 12.8.0 to 12.9.0 miscompiles causal "
            "masks; put another one first on PATH"
        )


def assembler() -> Path | None:
    """Path of the ptxas that XLA runs: the first on PATH, else that of the CUDA packages; None if there is neither."""
    if found := shutil.which("ptxas"):
        return Path(found)
    cuda_root = Path(os.environ.get("MOSAIC_GPU_CUDA_ROOT", ""))  # set when jax's Mosaic GPU is imported
    packaged = cuda_root / "bin" / "ptxas"
    return packaged if packaged.is_file() else None


@functools.cache
def _version(path: Path) -> tuple[int, ...] | None:
    """Version of a ptxas, such as (12, 9, 86); None if its output names none."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else None
