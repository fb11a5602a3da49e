"""Copying rows in Mosaic GPU kernels, bit for bit, from and to rows of anyone's choosing (`mosaic.row_layout`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.row_layout import RowLayout

ACCESS_BYTES = 16
"""What a thread moves at most with an instruction."""

HELD_BYTES = 320
"""What a thread holds of a row at a time: all of DeepSeek's latents, also in float32, on their way at once."""


def copy_layout(width: int, dtype: Any) -> RowLayout:
    """Threads that share rows of so many elements: as many as take the widest accesses that divide a row evenly."""
    even = width & -width
    vector = min(ACCESS_BYTES // jnp.dtype(dtype).itemsize, even)
    return RowLayout(min(32, even // vector), vector)


def copy_rows(layout: RowLayout, source: Ref, source_row: jax.Array, target: Ref, target_row: jax.Array) -> None:
    """target[target_row[i]] = source[source_row[i]] for each i; nothing where the target's row is negative, and 0 where
    the source's is. Rows past the first 2**32 elements are reached.
    """
    width = source.shape[1]
    held = layout.columns * max(1, HELD_BYTES // (layout.vector * jnp.dtype(source.dtype).itemsize))
    for column in range(0, width, held):
        values = layout.load(source, source_row, column, min(held, width - column))
        layout.store(target, target_row, column, values)


def like(x: jax.Array, value: int) -> jax.Array:
    """Integers of one value, in the shape and the layout of others."""
    return jnp.full_like(x, value)
