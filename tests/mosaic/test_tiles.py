"""Tests of the register layouts of tiles in Hopper kernels.

Some kernel code computes addresses from these layouts. The interpreter does not run this code, so the tests compare its
assumptions with Mosaic GPU's layouts.
"""

import math
from typing import Any

import numpy as np
import pytest

from pallas_attn.mosaic.partial_states import FRAGMENT_COLUMNS, FRAGMENT_ROWS, num_fragments
from pallas_attn.mosaic.primitives.register_tiles import BY_64, BY_128, RegisterLayout

LAYOUTS = pytest.mark.parametrize("layout", [BY_64, BY_128], ids=["64 rows", "128 rows"])
WARPS, LANES = 4, 32


def tiled(array: np.ndarray, layout: Any) -> np.ndarray:
    """Return the array with the dimensions into which a Mosaic GPU layout tiles it."""
    for tile in layout.tiling.tiles:
        outer_dims = array.ndim - len(tile)
        split = [n for size, step in zip(array.shape[outer_dims:], tile, strict=True) for n in (size // step, step)]
        array = array.reshape(*array.shape[:outer_dims], *split)
        outer, inner = range(outer_dims, array.ndim, 2), range(outer_dims + 1, array.ndim, 2)
        array = array.transpose(*range(outer_dims), *outer, *inner)
    return array


@LAYOUTS
def test_rows_of_a_register(layout: RegisterLayout) -> None:
    rows = 256
    held = tiled(np.arange(rows), layout.per_row.to_mgpu())  # [blocks, warps, parts, 8, 1]
    assert held.shape == (rows // layout.rows, WARPS, layout.rows // 32, 8, 1)
    for block, part in np.ndindex(held.shape[0], held.shape[2]):
        register = block * held.shape[2] + part
        want = layout.rows // WARPS * np.arange(WARPS)[:, None] + np.arange(8) + layout.first_row(register)
        np.testing.assert_array_equal(held[block, :, part, :, 0], want)


@LAYOUTS
def test_fragments_of_a_slice_are_contiguous(layout: RegisterLayout) -> None:
    """A fragment is two registers of each thread of the warpgroup. The fragments of a slice of `layout.rows` rows and a
    multiple of 8 columns must have consecutive registers.
    """
    shape = 2 * layout.rows, 32
    held = tiled(np.arange(math.prod(shape)).reshape(shape), layout.tile.to_mgpu())
    blocks, columns, warps, _, parts, *_ = held.shape
    assert (blocks, columns, warps) == (2, 4, WARPS)
    registers = held.reshape(blocks, columns, WARPS, parts, LANES * 2).swapaxes(2, 3).reshape(-1, 2, WARPS, LANES * 2)
    assert registers.shape[0] == num_fragments(math.prod(shape))
    count = num_fragments(layout.rows * 16)
    for i, (row, column) in enumerate((r, c) for r in (0, layout.rows) for c in (0, 16)):
        got = np.sort(registers[i * count : (i + 1) * count], axis=None)
        want = np.arange(math.prod(shape)).reshape(shape)[row : row + layout.rows, column : column + 16]
        np.testing.assert_array_equal(got, np.sort(want, axis=None))
    assert registers[0].size == FRAGMENT_ROWS * FRAGMENT_COLUMNS
