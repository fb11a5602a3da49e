"""XLA options of compiled steps on GPUs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from models.engine.config import Bucket

GPU_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""Operations that XLA launches as CUDA graphs. WHILE is not in XLA's default. Without it the host would wait for the
device in every layer of a step with prompts, to learn how many chunks of a cached prefix to read."""

CONCURRENT: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""Options of steps on one device with at most `CONCURRENT_TOKENS` prompt tokens. Kernels without data dependencies run
concurrently in their CUDA graph: the router and the shared experts, the latent's norm and the queries, decode rows and
prefill chunks. A decode step of DeepSeek-V2-Lite takes 2.5 ms instead of 2.8 with one sequence, and 10.4 instead of
10.8 with 64 sequences (H200). A step of 48 decode rows and 464 prompt tokens takes 17.7 ms instead of 19.3 (H100). On a
mesh the order of collectives would be undefined."""

CONCURRENT_TOKENS = 512
"""Prompt tokens up to which `CONCURRENT` is used. Concurrent kernels share less activation memory: 512 tokens of
DeepSeek-V2-Lite need 0.16 GB instead of 0.09, and more tokens need more. Larger steps were not measured."""

WITH_PROMPTS: dict[str, str | bool] = {"xla_gpu_dot_merger_threshold_mb": "0"}
"""Additional options of concurrent steps with prompts. By default XLA merges two matrix products of the same rows by
concatenating their weights. With few rows the GEMM kernel reads both weights directly; with more rows XLA copies them
in every layer, and concurrent scheduling makes the copies of all layers early. That costs 0.53 GB instead of 0.16, and
2% of a step (H100)."""

WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""Options of steps on one device with more prompt tokens: matrix products run in cuBLAS. Otherwise XLA compiles and
times hundreds of Triton candidates, which takes half of the CPU time of an engine's start and makes no step faster.
With cuBLAS a step of 4,096 tokens takes 48.8 ms instead of 49.0, and with 64 decode rows 47.7 instead of 49.4
(DeepSeek-V2-Lite, H100)."""

MAX_LAYERS_PER_PROGRAM = 8
"""Maximum number of layers per program in steps with more than `CONCURRENT_TOKENS` prompt tokens. XLA's compile time
grows with the number of layers, and programs of equal layers are compiled once. Shorter steps are single programs,
because starting several programs with different weights takes the host 13 ms instead of 4, of a step of 16 ms
(DeepSeek-V2-Lite, H100)."""

MESH_OPTIONS: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "1"}
"""Additional options of steps on a mesh. Between two collectives of a layer with experts there is little more than a
condition. By default XLA makes no CUDA graph for one operation, so the host would read the condition in every layer and
then start the following kernels. With this option prefill is 1.17 times as fast on two data ranks and 1.19 times as
fast on four (DeepSeek-V2-Lite, H100)."""


def gpu_options(bucket: Bucket | None = None, *, on_mesh: bool = False) -> dict[str, str | bool]:
    """Return the XLA options of a bucket; `GPU_OPTIONS` if it is None. The result leaves out options that XLA_FLAGS
    sets, because compile options would override them.

    Raises:
      ValueError: XLA_FLAGS cannot be parsed.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # XLA interprets any other value as the name of a file with flags
        flags = Path(flags).read_text(encoding="utf-8")
    given = {flag.lstrip("-").partition("=")[0] for flag in shlex.split(flags)}
    if on_mesh:
        options = GPU_OPTIONS | MESH_OPTIONS
    elif bucket is None:
        options = GPU_OPTIONS
    elif bucket.prefill_tokens <= CONCURRENT_TOKENS:
        options = GPU_OPTIONS | CONCURRENT | (WITH_PROMPTS if bucket.prefill_tokens else {})
    else:
        options = GPU_OPTIONS | WITHOUT_TRITON
    return {name: value for name, value in options.items() if name not in given}
