"""Packages that compile for an NVIDIA GPU on a machine without one, and the way in which a process finds them.

They stay outside the environment of the other tests, because jax warns at every start when its CUDA plugin finds no
driver. `make aot-cuda13` and `make aot-cuda12` bring them into folders that only the gate's own processes look into.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = ("cuda13", "cuda12")


def packages(plugin: str) -> Path:
    """The folder of a plugin's packages."""
    return ROOT / ".aot" / plugin


def missing(plugin: str) -> str | None:
    """Why nothing can be compiled with a plugin here, or None if it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the compile gate runs on Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not packages(plugin).is_dir():
        return f"the compile gate's packages are not here; `make aot-{plugin}` brings them"
    return None


def variables(plugin: str) -> dict[str, str]:
    """The environment of a process that compiles with a plugin.

    An assembler that comes first on PATH is preferred to the plugin's own, so the packages' tools are put before
    whatever the machine has.
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
        "CUDA_VISIBLE_DEVICES": "",  # XLA takes most of a card's memory, also where it compiles for another
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_TRACEBACK_FILTERING": "off",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # which tries variants, and has nothing to time them on
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
        "PALLAS_ATTN_KERNEL_CACHE": "0",  # of two kernels that are the same, jax would compile one
    }
