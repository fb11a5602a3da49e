"""Description of the machine of a benchmark: device, measured rates, software versions, and commit of this project."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scripts.bench.harness.timing import Stopwatch

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "pallas_attn", "numpy", "torch", "triton")
PACKAGES += ("flashinfer-python", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cuda-nvcc")
"""Packages whose versions are reported if they are installed."""

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "PALLAS_ATTN_COMMIT"
"""Environment variable that names the commit, for a source tree without git."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Copy bandwidth and matrix rate, measured on this device in this run.

    Attributes:
      copy: bytes per second, read plus written, of a large copy in device memory.
      matrix: operations per second of a bfloat16 GEMM.
    """

    copy: float
    matrix: float

    def floor(self, num_bytes: int, flops: int) -> float:
        """Return the roofline time in seconds: the longer of the times to move `num_bytes` and to compute `flops`."""
        return max(num_bytes / self.copy, flops / self.matrix)


def measure_rates(stopwatch: Stopwatch) -> Rates:
    """Measure both rates with random data, because a GPU lowers its clock for operands that take more power."""
    on_gpu = jax.default_backend() == "gpu"
    elements, width = (2**28, 8192) if on_gpu else (2**24, 512)
    stopwatch = dataclasses.replace(stopwatch, kernels=False)
    sources = [jax.random.normal(jax.random.key(i), (elements,)) for i in range(2)]
    copied = stopwatch.chain(lambda _, __, source: (None, jnp.copy(source)), sources)
    copy = 2 * sources[0].nbytes / copied.median
    del sources
    factors = [jax.random.normal(jax.random.key(i), (width, width), jnp.bfloat16) for i in range(3)]
    vendors = {"xla_gpu_enable_triton_gemm": False}  # no autotuning over other libraries
    multiplied = stopwatch.chain(lambda _, b, a: (None, a @ b), factors[1:], shared=factors[0], options=vendors)
    return Rates(copy, 2 * width**3 / multiplied.median)


def memory_bytes() -> int:
    """Return the bytes of device memory that arrays may use; a quarter of the RAM if the device has no limit."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def multiprocessors() -> int:
    """Return the number of multiprocessors (SMs) of a GPU; 1 for other devices."""
    return getattr(jax.local_devices()[0], "core_count", 1) if jax.default_backend() == "gpu" else 1


def driver() -> str | None:
    """Return the version of NVIDIA's driver; None without a driver."""
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, Any]:
    """Return the commit of this source tree, and whether files differ from it; both None if unknown.

    The environment variable PALLAS_ATTN_COMMIT overrides git. It is for source trees without git, or inside another
    repository; the suffix "-dirty" marks changed files. Files in benchmarks/, such as results, do not count as changed.
    """
    if given := os.environ.get(COMMIT):
        sha, _, dirty = given.partition("-")
        return {"commit": sha, "dirty": dirty == "dirty"}
    if not (ROOT / ".git").exists():
        return {"commit": None, "dirty": None}
    sha = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _output(
        "git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks"
    )
    known = sha is not None and changed is not None
    return {"commit": sha.strip(), "dirty": bool(changed)} if known else {"commit": None, "dirty": None}


def _output(*command: str) -> str | None:
    """Return the standard output of a command; None if it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def description() -> dict[str, Any]:
    """Return the device, software versions, commit and today's date (UTC) for a JSON report."""
    here = {"device": jax.local_devices()[0].device_kind, "driver": driver(), "versions": versions()}
    return here | commit() | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
