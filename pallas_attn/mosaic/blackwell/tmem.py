"""Tensor memory (TMEM), where tcgen05 keeps accumulators: its layouts in registers, and barriers that order it.

A multiprocessor has 128 rows (lanes) of 512 columns of 32 bits, of which a thread block
takes a power of two, 32 or more. A warp of a warpgroup reaches 32 of the rows.
"""

from __future__ import annotations

import functools

from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS = 128, 512

TILE = plgpu.Layout.TCGEN05
"""Layout of a tile [128, n] in the registers of a warpgroup, from which it can be stored to swizzled shared memory."""

ROW_A_THREAD = plgpu.Layout.TCGEN05_TMEM_NATIVE
"""Layout of a tile [128, n] whose rows are whole in a thread each. No store to swizzled shared memory takes it."""

OrderedBarrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
"""Scratch type of every barrier that no TMA copy arrives at. Without the fences that order tensor cores, what a thread
has loaded from TMEM, or the tensor core has written there, is not ordered by the barrier; interpreter and compiler
notice none that is missing (`tests/mosaic/test_sm100_barriers.py` does).
"""
