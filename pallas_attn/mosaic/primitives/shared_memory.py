"""Shared memory of a Mosaic GPU kernel, computed from its scratch types.

The heuristics for the number of pipeline stages and of CTAs per multiprocessor use these sizes. The results equal the
sizes that Mosaic GPU reserves; `tests/aot` compares them.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

ALIGNMENT = 1024
"""Alignment [bytes] of each array in shared memory."""

BARRIER_BYTES = 8

MULTIPROCESSOR_BYTES = 228 * 1024
"""Shared memory of a multiprocessor, on Hopper and on data-center Blackwell."""

SYSTEM_BYTES = 1024
"""Bytes of shared memory that the driver reserves for each thread block."""


def block_bytes(scratch_types: Any, *, reduction_bytes: int = 0) -> int:
    """Shared memory [bytes] of a thread block of a kernel.

    Args:
      scratch_types: pytree of `plgpu.SMEM`, `plgpu.RefUnion`, `plgpu.Barrier` and `plgpu.ClusterBarrier`, as passed to
        `plgpu.kernel`. Other memory spaces take no shared memory.
      reduction_bytes: `plgpu.CompilerParams.reduction_scratch_bytes` if the kernel reduces arrays in registers, for
        example with `jnp.sum`; otherwise 0.
    """
    barriers, arrays = 0, _aligned(reduction_bytes)
    for scratch in jax.tree.leaves(scratch_types):
        if isinstance(scratch, plgpu.Barrier | plgpu.ClusterBarrier):
            barriers += int(np.prod(scratch.num_barriers))
        elif scratch.memory_space == plgpu.MemorySpace.SMEM:
            arrays += _aligned(math.prod(scratch.shape) * jnp.dtype(scratch.dtype).itemsize)
    return arrays + BARRIER_BYTES * barriers


def fits(scratch_types: Any, blocks: int, *, reduction_bytes: int = 0) -> bool:
    """Whether `blocks` thread blocks fit the shared memory of a multiprocessor. Other arguments are as in
    `block_bytes`.
    """
    block = block_bytes(scratch_types, reduction_bytes=reduction_bytes) + SYSTEM_BYTES
    return blocks * block <= MULTIPROCESSOR_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
