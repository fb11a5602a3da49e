"""Lookup in concatenated segments, for example the packed tokens of sequences."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32


def segment_of(ends: Int32[Array, "S"], index: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """Return the segment of each index, given the ends of the segments in order; S for an index past the last segment.

    The bisection is unrolled and becomes one fusion. XLA would launch several kernels per iteration of a loop.
    """
    return jnp.searchsorted(ends, index, side="right", method="scan_unrolled").astype(jnp.int32)
