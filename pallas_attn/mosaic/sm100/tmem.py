"""Tensor memory (TMEM), where tcgen05 keeps accumulators: its size, layouts in registers, and ordered barriers.

A multiprocessor has 128 rows (lanes) of 512 columns of 32 bits. A warp of a warpgroup reaches 32 of the rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS = 128, 512

FEWEST_COLUMNS = 32
"""A thread block takes a power of two of columns, and no fewer than these."""

TILE = plgpu.Layout.TCGEN05
"""Layout of a tile [128, n] in the registers of a warpgroup, from which it can be stored to swizzled shared memory."""

ROW_A_THREAD = plgpu.Layout.TCGEN05_TMEM_NATIVE
"""Layout of a tile [128, n] whose rows are whole in a thread each. No store to swizzled shared memory takes it."""

OrderedBarrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
"""Scratch type of every barrier that no TMA copy arrives at. Without the fences that order tensor cores, what a thread
has loaded from TMEM, or the tensor core has written there, is not ordered by the barrier; interpreter and compiler
notice none that is missing (`tests/mosaic/test_sm100_barriers.py` does).
"""


def columns(scratch_types: Any) -> int:
    """Columns that a thread block of a kernel takes: those of its scratch types, rounded up to a power of two.

    Args:
      scratch_types: pytree as passed to `plgpu.kernel`. Memory of other kinds takes none.
    """
    taken = 0
    for scratch in jax.tree.leaves(scratch_types):
        if getattr(scratch, "memory_space", None) == plgpu.MemorySpace.TMEM:
            taken += scratch.layout.cols_in_shape(scratch.shape, 8 * jnp.dtype(scratch.dtype).itemsize)
    return max(FEWEST_COLUMNS, 1 << (taken - 1).bit_length()) if taken else 0
