"""Version check of ptxas, the assembler that XLA runs on kernels. Some versions miscompile kernels of this package."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

BROKEN_SINCE, SOUND_SINCE = (12, 8, 0), (12, 9, 86)
"""First ptxas version that miscompiles some causal masks, and first later version that does not (part of CUDA 12.9.1).
jax's own attention kernel rejects the versions between them, too.
"""


def require_sound_assembler() -> None:
    """Raise NotImplementedError if kernels would be assembled by a ptxas version that miscompiles them."""
    path = assembler()
    version = None if path is None else _version(path)
    if version is not None and BROKEN_SINCE <= version < SOUND_SINCE:
        raise NotImplementedError(
            f"{path} is version {'.'.join(map(str, version))}, and ptxas of CUDA 12.8.0 to 12.9.0 miscompiles causal "
            "masks; put another ptxas first on PATH"
        )


def assembler() -> Path | None:
    """Return the path of the ptxas that XLA runs: the first ptxas on PATH, otherwise the ptxas of the installed CUDA
    packages. None if neither exists.
    """
    if found := shutil.which("ptxas"):
        return Path(found)
    cuda_root = Path(os.environ.get("MOSAIC_GPU_CUDA_ROOT", ""))  # set by the import of Mosaic GPU
    packaged = cuda_root / "bin" / "ptxas"
    return packaged if packaged.is_file() else None


@functools.cache
def _version(path: Path) -> tuple[int, ...] | None:
    """Return the version of a ptxas, such as (12, 9, 86); None if the output of `ptxas --version` has no version."""
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else None
