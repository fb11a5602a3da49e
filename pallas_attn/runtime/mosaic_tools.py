"""Set the environment variables for compiling and loading Mosaic kernels without importing Mosaic.

Importing `jax.experimental.mosaic.gpu` takes 0.3 to 0.4 s and sets environment variables that XLA reads when it
compiles or loads a kernel. A kernel from the kernel cache needs nothing else from Mosaic, so this module sets the
variables.
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
"""SHA-256 digests of the files of `CORE` for which `find` sets all variables that kernels need (jax 0.11.2)."""

VARIABLES = (
    "MOSAIC_GPU_CUDA_ROOT",
    "MOSAIC_GPU_RUNTIME_LIB_PATH",
    "MOSAIC_GPU_NVSHMEM_BC_PATH",
    "MOSAIC_GPU_NVSHMEM_SO_PATH",
)
"""Variables that JAX sets. The last two are for kernels that communicate between devices, which this package does not
have.
"""


@functools.cache
def find() -> None:
    """Set the variables that importing Mosaic sets. Import Mosaic instead if the file of `CORE` is not a known one."""
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
    except ImportError:  # there is no CUDA plugin, so nothing is compiled
        return
    runtime = Path(mosaic_gpu._mosaic_gpu_ext.__file__).parent / "libmosaic_gpu_runtime.so"
    if runtime.exists():
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
