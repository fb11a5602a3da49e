"""XLA compile options of the engine's steps on GPUs, and the measurements that they are based on.

A step is one forward pass of the model over a batch. A bucket is the padded shape of a step, for which its program is
compiled.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from pallas_attn.models.engine.config import Bucket

GPU_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""Options of all steps: the kinds of operations that XLA launches as CUDA graphs.

WHILE is not in XLA's default. Prefill attention of MLA models has a while loop over chunks of the cached prefix in
every layer. Without WHILE, the host reads the loop condition from the device, and so waits for the device in every
layer.
"""

CONCURRENT: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""Additional options of steps on one device with at most `CONCURRENT_TOKENS` prompt tokens.

Kernels of a CUDA graph that do not depend on each other run concurrently: the router and the shared experts, the norm
of the latent and the queries, attention of decode rows and of prefill chunks. A decode step of DeepSeek-V2-Lite takes
2.5 ms instead of 2.8 with one sequence, and 10.4 ms instead of 10.8 with 64 sequences (H200). A step of 48 decode rows
and 464 prompt tokens takes 17.7 ms instead of 19.3 (H100). The options are not used on a mesh, where all devices must
run their collective operations in the same order.
"""

CONCURRENT_TOKENS = 512
"""Maximum number of prompt tokens of a step with `CONCURRENT`.

Kernels that run concurrently cannot reuse each other's memory for activations: 512 tokens of DeepSeek-V2-Lite need 0.16
GB instead of 0.09. `CONCURRENT` was not measured with more than 512 tokens.
"""

WITH_PROMPTS: dict[str, str | bool] = {"xla_gpu_dot_merger_threshold_mb": "0"}
"""Additional options of steps with `CONCURRENT` and prompts.

By default XLA merges two matrix products with the same left operand by concatenating their weights. With few rows the
GEMM kernel reads both weights directly. With more rows XLA copies the weights in every layer, and concurrent scheduling
makes the copies of all layers early. These copies increase the memory of a step from 0.16 to 0.53 GB and its time by 2%
(H100). Threshold 0 disables the merging.
"""

WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""Additional options of steps on one device with more than `CONCURRENT_TOKENS` prompt tokens: matrix products run in
cuBLAS.

Otherwise XLA compiles and times hundreds of Triton kernels, which takes half of the CPU time of an engine's start, and
no step becomes faster. With cuBLAS a step of 4,096 prompt tokens takes 48.8 ms instead of 49.0, and with 64 decode rows
in addition 47.7 ms instead of 49.4 (DeepSeek-V2-Lite, H100).
"""

MAX_LAYERS_PER_PROGRAM = 8
"""Maximum number of layers per program in steps with more than `CONCURRENT_TOKENS` prompt tokens.

Such steps are split into several programs to reduce XLA's compile time, which grows with the number of layers: programs
with the same sequence of layer kinds are compiled once. Steps with fewer prompt tokens are single programs: to launch
several programs, the host needs 13 ms instead of 4, and such a step takes only 16 ms (DeepSeek-V2-Lite, H100).
"""

MESH_OPTIONS: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "1"}
"""Additional options of steps on a mesh: XLA makes a CUDA graph even for a single operation.

In a layer with experts, only one conditional is between two collective operations. By default XLA makes no CUDA graph
of a single operation. Then the host reads the condition from the device in every layer before it launches further
kernels. With this option prefill is 1.17 times as fast with two devices along the mesh axis `data` and 1.19 times as
fast with four (DeepSeek-V2-Lite, H100).
"""


def gpu_options(bucket: Bucket | None = None, *, on_mesh: bool = False) -> dict[str, str | bool]:
    """Return the XLA compile options of a step. Options that the environment variable XLA_FLAGS sets are left out,
    because compile options would override the user's flags.

    Args:
      bucket: padded shape of the step; None for programs other than steps.
      on_mesh: whether the step runs on a mesh.

    Raises:
      ValueError: XLA_FLAGS cannot be parsed.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # XLA interprets a value without leading "-" as the name of a file
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
