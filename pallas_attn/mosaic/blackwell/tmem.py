"""Experimental: has never run on a card. Register layouts of tensor memory (TMEM), and barriers that order it.

tcgen05 keeps accumulators in TMEM. A multiprocessor has 128 rows (lanes) of 512 columns of 32 bits. A thread block
allocates a power of two of columns, at least 32. Each warp of a warpgroup accesses 32 of the rows.
"""

from __future__ import annotations

import functools

from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS = 128, 512

TILE = plgpu.Layout.TCGEN05
"""Layout of a tile [128, n] in the registers of a warpgroup, from which it can be stored to swizzled shared memory."""

ROW_A_THREAD = plgpu.Layout.TCGEN05_TMEM_NATIVE
"""Layout of a tile [128, n] in which each thread holds a whole row. Stores to swizzled shared memory do not
support it.
"""

OrderedBarrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
"""Scratch type of every barrier at which no TMA copy arrives. It adds the fences that order the tensor core.

Without these fences, a barrier does not order TMEM loads by threads and TMEM writes by the tensor core. Neither the
interpreter nor the compiler reports a missing fence; `tests/mosaic/test_sm100_barriers.py` does.
"""
