"""Exponents of softmax weights, 2**(score · factor - m), with one multiply-add per score.

The reference m of a row is its largest score times the factor, rounded to float32. The compiler fuses multiplication
and subtraction and rounds only their result, so the exponent of the largest score is the rounding error of m instead of
0. While |m| < 2**28, this error is at most 8. It is equal in all weights of a row and cancels in the output. The
error doubles with each doubling of |m|: float16 weights could overflow from 2**28 on, float32 weights could overflow or
become 0 from 2**31 on.

In rows with |m| >= 2**28, the factor is therefore a power of two, so that m is exact. The power of two is up to twice
log2(e) · scale, which changes the weights of all scores below the maximum. These weights are negligible: float32 scores
of this magnitude that differ at all differ by at least 16 in units of log2, so the weights are at most 2**-16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

EXACT_FROM = 2.0**28
"""Magnitude of m, in units of log2, from which the factor is a power of two."""


def power_of_two(scale: float) -> float:
    """Return the smallest power of two that is at least `scale`. So |m| does not decrease where rows with larger scores
    begin to use it."""
    return 2.0 ** math.ceil(math.log2(scale))


def exponent_factor(highest: Any, scale: float) -> Any:
    """Return the factor of the scores of a tile: `scale`, or a power of two in rows with very large scores.

    Args:
      highest: float32 [rows], largest score of the tile in each row.
      scale: log2(e) times the softmax scale; positive.

    Returns:
      A float32 array [rows], or `scale` itself if it is a power of two.
    """
    exact = power_of_two(scale)
    if exact == scale:
        return scale
    limit = EXACT_FROM / scale * (1 - 2.0**-20)  # below it, highest * scale does not round to EXACT_FROM
    return jnp.where(jnp.abs(highest) < limit, jnp.full_like(highest, scale), exact)


def next_reference(highest: Any, m: Any, scale: float, threshold: float) -> tuple[Any, Any]:
    """Return the reference m after a tile, [rows], and the factor of the tile's scores.

    Args:
      highest: float32 [rows], largest score of the tile in each row.
      m: float32 [rows], reference before the tile.
      scale: log2(e) times the softmax scale; positive.
      threshold: m changes only if it would grow by more than this number, because each change rescales the output.
    """
    factor = exponent_factor(highest, scale)
    highest = highest * factor
    return jnp.where(highest > m + threshold, highest, m), factor


def over_scores(factor: Any, broadcast: Callable[[Any, tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    """Return the factor of `exponent_factor` for scores of a shape: `scale` itself, or the factor of each row."""
    return factor if isinstance(factor, float) else broadcast(factor, shape)


def in_log2_units(m: Any, scale: float) -> Any:
    """Return references m [rows] as score · `scale`. Where the factor was a power of two, m is multiplied by `scale` /
    power of two."""
    exact = power_of_two(scale)
    return m if exact == scale else jnp.where(jnp.abs(m) < EXACT_FROM, m, m * (scale / exact))
