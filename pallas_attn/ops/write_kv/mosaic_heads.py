"""Norm and rotation of heads in the registers of a warpgroup."""

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
    """Layout of rows (heads of tokens) in registers: one array for each segment of columns.

    Segments are the rotated columns and the remaining columns. In neox style the rotated columns are two segments.

    Attributes:
      half: number of rotated pairs of columns.
      interleaved: whether the columns of a pair are neighbours; otherwise they are `half` columns apart.
    """

    layout: RowLayout
    head_dim: int
    half: int
    interleaved: bool

    @property
    def segments(self) -> list[tuple[int, int]]:
        """First column and number of columns of each segment."""
        rotated = [(0, 2 * self.half)] if self.interleaved else [(0, self.half), (self.half, self.half)]
        rest = (2 * self.half, self.head_dim - 2 * self.half)
        return [(first, columns) for first, columns in (*rotated, rest) if columns]

    def load(self, ref: Ref, row: jax.Array) -> list[jax.Array]:
        """Load rows of ref [n, D]. Negative rows are not accessed and are 0."""
        return [self.layout.load(ref, row, first, columns) for first, columns in self.segments]

    def store(self, ref: Ref, row: jax.Array, values: Sequence[jax.Array]) -> None:
        """Store rows of ref [n, D]. Negative rows are skipped."""
        for (first, _), segment in zip(self.segments, values, strict=True):
            self.layout.store(ref, row, first, segment)

    def largest(self, values: Sequence[jax.Array]) -> jax.Array:
        """Largest magnitude of each row, [rows]."""
        return functools.reduce(jnp.maximum, (jnp.max(jnp.abs(segment), axis=1) for segment in values))

    def spread(self, per_row: jax.Array) -> list[jax.Array]:
        """Broadcast a value per row to all columns of the row."""
        return [self.layout.spread(per_row, columns) for _, columns in self.segments]

    def rotate(self, x: Sequence[jax.Array], cos: Ref, sin: Ref, token: jax.Array) -> list[jax.Array]:
        """Apply `portable.rope.rotate` to rows that belong to the tokens `token` [rows]."""
        pairs = self.layout.halved if self.interleaved else self.layout
        cosine, sine = (pairs.load(ref, token, 0, self.half) for ref in (cos, sin))
        first, second = self.layout.unzip(x[0]) if self.interleaved else x[:2]
        turned = first * cosine - second * sine, second * cosine + first * sine
        return [self.layout.zip(*turned), *x[1:]] if self.interleaved else [*turned, *x[2:]]

    def norm(self, x: Sequence[jax.Array], weight: Ref, eps: float) -> list[jax.Array]:
        """Apply `portable.rope.rms_norm`."""
        squares = functools.reduce(jnp.add, (jnp.sum(segment * segment, axis=1) for segment in x))
        inverse = lax.rsqrt(squares * (1 / self.head_dim) + eps)
        weights = self.load(weight, self.layout.filled(jnp.int32(0), inverse.shape[0]))
        return [a * b * w.astype(jnp.float32) for a, b, w in zip(x, self.spread(inverse), weights, strict=True)]
