"""Experimental: has never run on a card. Register layouts for tensor memory (TMEM), and barriers that order TMEM
accesses.

The tensor-core instructions tcgen05 keep accumulators in TMEM. The TMEM of a multiprocessor has 128 rows (lanes) of 512
columns of 32 bits. A CTA allocates a power of two of columns, at least 32. Each warp of a warpgroup accesses 32 rows.
"""

from __future__ import annotations

import functools

from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS = 128, 512

TILE = plgpu.Layout.TCGEN05
"""Layout of a tile [128, n] in the registers of a warpgroup. It can be loaded from TMEM and stored to swizzled shared
memory.
"""

ROW_A_THREAD = plgpu.Layout.TCGEN05_TMEM_NATIVE
"""Layout of a tile [128, n] in which each thread holds a whole row. It can be loaded from TMEM, but not stored to
swizzled shared memory.
"""

OrderedBarrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
"""Scratch type of barriers that order TMEM accesses. The Blackwell kernels use it for every barrier at which no TMA
copy arrives.

Waits for these barriers include the fences that order TMEM loads by threads with TMEM writes by the tensor core.
Interpreter and compiler do not report a missing fence; `tests/mosaic/test_sm100_barriers.py` does.
"""
