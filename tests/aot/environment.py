"""Folder and environment variables of the packages that compile for NVIDIA GPUs on a machine without a GPU.

The packages are jax's CUDA plugin and NVIDIA's compilers. `make aot-cuda13` and `make aot-cuda12` install them into
`.aot/cuda13` and `.aot/cuda12`. They are not installed in the environment of the tests, because jax would then warn at
every start that the CUDA plugin finds no driver. Only worker processes of the compile gate use them.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = ("cuda13", "cuda12")


def packages(plugin: str) -> Path:
    """Return the folder of a plugin's packages."""
    return ROOT / ".aot" / plugin


def missing(plugin: str) -> str | None:
    """Return the reason why this machine cannot compile with a plugin; None if it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the compile gate runs on Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not packages(plugin).is_dir():
        return f"the compile gate's packages are not installed; run `make aot-{plugin}`"
    return None


def variables(plugin: str) -> dict[str, str]:
    """Return the environment variables of a process that compiles with a plugin.

    jax uses the first ptxas on PATH, so the folders of the plugin's tools come first.
    """
    folder = packages(plugin)
    tools = sorted(str(path) for path in folder.glob("nvidia/*/bin"))
    (assembler,) = folder.glob("nvidia/*/bin/ptxas")
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return compiled | {
        "PYTHONPATH": str(folder),
        "PATH": os.pathsep.join([*tools, os.environ["PATH"]]),
        "CUDA_ROOT": str(assembler.parents[1]),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",  # hide attached GPUs, of which XLA would reserve most of the memory
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_TRACEBACK_FILTERING": "off",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # autotuning would need a GPU
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
        "PALLAS_ATTN_KERNEL_CACHE": "0",  # compile each kernel, because a cached kernel prints no resources
    }
