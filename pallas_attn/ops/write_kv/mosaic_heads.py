"""Heads of tokens in Mosaic GPU kernels: norm and rotation, in the registers of a warpgroup."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.row_layout import RowLayout


@dataclasses.dataclass(frozen=True)
class HeadTile:
    """How the columns of some heads lie in registers: in stretches that are treated alike, one array each.

    Attributes:
      half: pairs of columns that are rotated.
      interleaved: whether pairs are neighbours; else they are `half` apart.
    """

    layout: RowLayout
    head_dim: int
    half: int
    interleaved: bool

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """The first column of each, and how many it has."""
        rotated = [(0, 2 * self.half)] if self.interleaved else [(0, self.half), (self.half, self.half)]
        rest = (2 * self.half, self.head_dim - 2 * self.half)
        return [(first, columns) for first, columns in (*rotated, rest) if columns]

    def load(self, ref: Ref, row: jax.Array) -> list[jax.Array]:
        """Rows of ref [n, D]; zeros, and no access, where they are negative."""
        return [self.layout.load(ref, row, first, columns) for first, columns in self.stretches]

    def store(self, ref: Ref, row: jax.Array, values: Sequence[jax.Array]) -> None:
        """Writes rows of ref [n, D] that are not negative."""
        for (first, _), stretch in zip(self.stretches, values, strict=True):
            self.layout.store(ref, row, first, stretch)

    def largest(self, values: Sequence[jax.Array]) -> jax.Array:
        """[rows]: the largest magnitude of each row."""
        return functools.reduce(jnp.maximum, (jnp.max(jnp.abs(stretch), axis=1) for stretch in values))

    def spread(self, per_row: jax.Array) -> list[jax.Array]:
        """A value of each row for all of its columns."""
        return [self.layout.spread(per_row, columns) for _, columns in self.stretches]

    def rotate(self, x: Sequence[jax.Array], cos: Ref, sin: Ref, token: jax.Array) -> list[jax.Array]:
        """`portable.rope.rotate`, of rows that belong to these tokens."""
        pairs = self.layout.halved if self.interleaved else self.layout
        cosine, sine = (pairs.load(ref, token, 0, self.half) for ref in (cos, sin))
        first, second = self.layout.unzip(x[0]) if self.interleaved else x[:2]
        turned = first * cosine - second * sine, second * cosine + first * sine
        return [self.layout.zip(*turned), *x[1:]] if self.interleaved else [*turned, *x[2:]]

    def norm(self, x: Sequence[jax.Array], weight: Ref, eps: float) -> list[jax.Array]:
        """`portable.rope.rms_norm`."""
        squares = functools.reduce(jnp.add, (jnp.sum(stretch * stretch, axis=1) for stretch in x))
        inverse = lax.rsqrt(squares * (1 / self.head_dim) + eps)
        weights = self.load(weight, self.layout.filled(jnp.int32(0), inverse.shape[0]))
        return [a * b * w.astype(jnp.float32) for a, b, w in zip(x, self.spread(inverse), weights, strict=True)]
