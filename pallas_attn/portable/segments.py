"""Segments laid end to end, such as the packed tokens of sequences: which one holds an index."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32


def segment_of(ends: Int32[Array, "S"], index: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """The segment that holds each index, given where segments end, in order; S for an index past the last.

    The bisection is unrolled: as a loop XLA would launch several kernels a round, unrolled it is one fusion.
    """
    return jnp.searchsorted(ends, index, side="right", method="scan_unrolled").astype(jnp.int32)
