"""Compile FlashInfer's kernels before their first use, in a separate process with a time limit.

The benchmarks do this themselves. To compile kernels by hand:

    python -m scripts.bench.peers.flashinfer_build mla fa3 512 64 bfloat16
    python -m scripts.bench.peers.flashinfer_build attention fa2 192 128 bfloat16 0 0

The arguments of `mla` are the widths of latents and rotated keys, and the cache dtype. The arguments of `attention` are
key dimension, value dimension, cache dtype, and 1 or 0 for window and soft cap.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from pathlib import Path

from scripts.bench.peers.torch_decode import import_torch

BUILD_SECONDS = 150
"""Time limit in seconds for one set of command-line arguments."""


@functools.cache
def unbuilt(*arguments: str | int) -> str | None:
    """Build the kernels of these command-line arguments. Return the reason if that fails; None on success."""
    command = [sys.executable, "-m", "scripts.bench.peers.flashinfer_build", *map(str, arguments)]
    root = Path(__file__).resolve().parents[3]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        return f"its kernels were not compiled within {BUILD_SECONDS} s"
    said = " ".join((done.stderr or done.stdout).split())
    return f"its kernels do not compile: ...{said[-240:]}" if done.returncode else None


def require(*arguments: str | int) -> None:
    """Build the kernels of these command-line arguments. Raise NotImplementedError if they cannot be built."""
    if why := unbuilt(*arguments):
        raise NotImplementedError(why)


def build_mla(backend: str, latent_dim: int, rope_dim: int, cache_dtype: str) -> None:
    torch = import_torch()
    dtypes = torch.bfloat16, getattr(torch, cache_dtype), torch.bfloat16, torch.int32
    importlib.import_module("flashinfer.mla").get_batch_mla_module(backend, *dtypes, latent_dim, rope_dim, False)


def build_attention(backend: str, qk_dim: int, v_dim: int, cache_dtype: str, window: bool, soft_cap: bool) -> None:
    torch = import_torch()
    module = importlib.import_module("flashinfer.prefill")
    q_dtype = torch.float16 if cache_dtype == "float16" else torch.bfloat16
    dtypes = (q_dtype, getattr(torch, cache_dtype), q_dtype, torch.int32)
    module.get_batch_prefill_module(backend, *dtypes, qk_dim, v_dim, 0, window, soft_cap, False)


if __name__ == "__main__":
    kind, backend, *sizes = sys.argv[1:]
    if kind == "mla":
        latent_dim, rope_dim, cache_dtype = sizes
        build_mla(backend, int(latent_dim), int(rope_dim), cache_dtype)
    else:
        qk_dim, v_dim, cache_dtype, window, soft_cap = sizes
        build_attention(backend, int(qk_dim), int(v_dim), cache_dtype, bool(int(window)), bool(int(soft_cap)))
