"""Set the environment variables that XLA reads when it compiles or loads a Mosaic kernel, without importing Mosaic.

Importing `jax.experimental.mosaic.gpu` also sets the variables, but takes 0.3 to 0.4 s. A kernel that is already
lowered (from this package's kernel cache) needs nothing else from Mosaic, so this module sets the variables itself.
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
"""Module of JAX that sets the variables when it is imported."""

KNOWN_CORE = frozenset({"bbf7a913dcaab68a142021ff6c8bdaffd5cade5e7e25eb12291e88f2a87218fe"})
"""SHA-256 digests of the source files of `CORE` whose behaviour `find` reproduces (jax 0.11.2)."""

VARIABLES = (
    "MOSAIC_GPU_CUDA_ROOT",
    "MOSAIC_GPU_RUNTIME_LIB_PATH",
    "MOSAIC_GPU_NVSHMEM_BC_PATH",
    "MOSAIC_GPU_NVSHMEM_SO_PATH",
)
"""Variables that `CORE` sets. `find` sets the first two. The others are for kernels that communicate between devices,
which this package does not have.
"""


@functools.cache
def find() -> None:
    """Set the variables that kernels need. If the file of `CORE` has an unknown digest, import `CORE` instead."""
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
    except ImportError:  # without JAX's CUDA plugin, no kernel is compiled
        return
    runtime = Path(mosaic_gpu._mosaic_gpu_ext.__file__).parent / "libmosaic_gpu_runtime.so"
    if runtime.exists():
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
