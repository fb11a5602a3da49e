"""Tests of the register layout `ROW_A_THREAD` of Blackwell kernels, in which each thread holds a row of a tile.

Some kernel code computes addresses from this layout. The interpreter does not run this code, so the tests compare its
assumptions with Mosaic GPU's layout.
"""

from typing import Any

import numpy as np

from pallas_attn.mosaic.blackwell.tmem import ROW_A_THREAD, ROWS
from tests.mosaic.test_tiles import LANES, WARPS, tiled


def test_each_thread_holds_its_row_in_pairs_of_columns() -> None:
    """Register i of thread t has columns 2 i and 2 i + 1 of row t."""
    layout: Any = ROW_A_THREAD.to_mgpu()
    columns = 12
    array = np.arange(ROWS * columns).reshape(ROWS, columns)
    held = tiled(array, layout)
    assert [d for d in range(-held.ndim, 0) if held.shape[d] > 1] == [-5, *layout.warp_dims, *layout.lane_dims, -1]
    assert layout.vector_dim == -1
    want = array.reshape(WARPS, LANES, columns // 2, 2).transpose(2, 0, 1, 3)
    np.testing.assert_array_equal(held.reshape(want.shape), want)
