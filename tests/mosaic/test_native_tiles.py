"""Registers of tiles with a row a thread are where code that computes its own addresses takes them to be, which no
interpreter runs.
"""

from typing import Any

import numpy as np

from pallas_attn.mosaic.sm100.native_tiles import FRAGMENT, num_fragments
from pallas_attn.mosaic.sm100.tmem import ROW_A_THREAD, ROWS


def test_a_thread_holds_its_row_in_pairs_of_columns() -> None:
    layout: Any = ROW_A_THREAD.to_mgpu()
    shape = ROWS, 12
    assert list(layout.tiling.tiles) == [(ROWS, 2), (ROWS // 4, 2)]
    assert (layout.warp_dims, layout.lane_dims, layout.vector_dim) == ((-4,), (-2,), -1)
    assert np.prod(layout.registers_shape(shape)) == shape[1] // 2


def test_fragments_are_four_columns_of_each_thread() -> None:
    assert FRAGMENT == (ROWS, 4)
    assert num_fragments(12) == 3
