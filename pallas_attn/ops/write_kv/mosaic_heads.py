"""RMSNorm and RoPE of heads in the registers of a warpgroup. A row is one head of one token, D columns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.mosaic.primitives.basics import Ref
from pallas_attn.mosaic.primitives.row_io import RowLayout


@dataclasses.dataclass(frozen=True)
class HeadTile:
    """Layout of rows in registers: one array [rows, columns] for each segment of columns.

    A row has a segment of rotated columns, or two segments in neox style (first and second half of the rotated
    columns), and a segment of the remaining columns. A thread then has both columns of a rotated pair.

    Attributes:
      layout: assignment of rows and columns to threads.
      head_dim: D, columns of a row.
      half: number of pairs of columns that are rotated.
      interleaved: whether the columns 2i and 2i + 1 are a pair; otherwise the columns i and half + i are (neox).
    """

    layout: RowLayout
    head_dim: int
    half: int
    interleaved: bool

    @property
    def segments(self) -> list[tuple[int, int]]:
        """For each segment, its first column and its number of columns."""
        rotated = [(0, 2 * self.half)] if self.interleaved else [(0, self.half), (self.half, self.half)]
        rest = (2 * self.half, self.head_dim - 2 * self.half)
        return [(first, columns) for first, columns in (*rotated, rest) if columns]

    def load(self, ref: Ref, row: jax.Array, column: int = 0) -> list[jax.Array]:
        """Load D columns from `column` on of the rows with indices `row` of ref [n, columns]. Rows with a negative
        index are 0.
        """
        return [self.layout.load(ref, row, column + first, columns) for first, columns in self.segments]

    def store(self, ref: Ref, row: jax.Array, values: Sequence[jax.Array], column: int = 0) -> None:
        """Store `values` to D columns from `column` on of the rows with indices `row` of ref [n, columns]. Rows with a
        negative index are not stored.
        """
        for (first, _), segment in zip(self.segments, values, strict=True):
            self.layout.store(ref, row, column + first, segment)

    def largest(self, values: Sequence[jax.Array]) -> jax.Array:
        """Return the largest magnitude of each row, [rows]."""
        return functools.reduce(jnp.maximum, (jnp.max(jnp.abs(segment), axis=1) for segment in values))

    def spread(self, per_row: jax.Array) -> list[jax.Array]:
        """Broadcast one value per row, [rows], to all columns. Return one array per segment."""
        return [self.layout.spread(per_row, columns) for _, columns in self.segments]

    def rotate(self, x: Sequence[jax.Array], cos: Ref, sin: Ref, token: jax.Array) -> list[jax.Array]:
        """Rotate rows as `portable.rope.rotate` does.

        Args:
          cos, sin: [T, half], by token.
          token: int32 [rows], token of each row.
        """
        pairs = self.layout.halved if self.interleaved else self.layout
        cosine, sine = (pairs.load(ref, token, 0, self.half) for ref in (cos, sin))
        first, second = self.layout.unzip(x[0]) if self.interleaved else x[:2]
        turned = first * cosine - second * sine, second * cosine + first * sine
        return [self.layout.zip(*turned), *x[1:]] if self.interleaved else [*turned, *x[2:]]

    def norm(self, x: Sequence[jax.Array], weight: Ref, eps: float) -> list[jax.Array]:
        """Apply RMSNorm to rows as `portable.rope.rms_norm` does. `weight` is [1, D]."""
        squares = functools.reduce(jnp.add, (jnp.sum(segment * segment, axis=1) for segment in x))
        inverse = lax.rsqrt(squares * (1 / self.head_dim) + eps)
        weights = self.load(weight, self.layout.filled(jnp.int32(0), inverse.shape[0]))
        return [a * b * w.astype(jnp.float32) for a, b, w in zip(x, self.spread(inverse), weights, strict=True)]
