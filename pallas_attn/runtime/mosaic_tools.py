"""Find the tools that XLA compiles Mosaic kernels with, for processes that do not import Mosaic.

Importing `jax.experimental.mosaic.gpu` takes 0.3 to 0.4 s and sets environment variables that XLA reads when it
compiles or loads a kernel. A kept kernel (`kernel_cache`) needs nothing else of Mosaic, so they are set here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from pathlib import Path

import jax

CORE = "jax.experimental.mosaic.gpu.core"
"""Module that sets the variables when it is imported."""

KNOWN_CORE = frozenset({"bbf7a913dcaab68a142021ff6c8bdaffd5cade5e7e25eb12291e88f2a87218fe"})
"""SHA-256 of the files of that module for which `find` is known to set all that kernels need (jax 0.11.2)."""

VARIABLES = (
    "MOSAIC_GPU_CUDA_ROOT",
    "MOSAIC_GPU_RUNTIME_LIB_PATH",
    "MOSAIC_GPU_NVSHMEM_BC_PATH",
    "MOSAIC_GPU_NVSHMEM_SO_PATH",
)
"""Variables that jax itself sets. The last two are for kernels that communicate, of which we have none."""


@functools.cache
def find() -> None:
    """Set what importing Mosaic sets; import it if this jax's module is not a known one."""
    if CORE in sys.modules:
        return
    file = Path(jax.__file__).parent.joinpath(*CORE.split(".")[1:]).with_suffix(".py")
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() not in KNOWN_CORE:
        importlib.import_module(CORE)
        return
    from jax._src.lib import cuda_path

    os.environ["MOSAIC_GPU_CUDA_ROOT"] = cuda_path or "/usr/local/cuda"
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:  # no CUDA plugin: nothing is compiled
        return
    runtime = Path(mosaic_gpu._mosaic_gpu_ext.__file__).parent / "libmosaic_gpu_runtime.so"
    if runtime.exists():
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
