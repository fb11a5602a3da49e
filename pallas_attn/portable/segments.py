"""Stretches laid end to end, such as the packed tokens of sequences: which one holds a place."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32


def stretch_of(ends: Int32[Array, "S"], place: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """The stretch that holds each place, given where they end, in order; S for places past the last.

    A bisection without a loop: for one, XLA would start several kernels a round, and one fuses all rounds of this.
    """
    return jnp.searchsorted(ends, place, side="right", method="scan_unrolled").astype(jnp.int32)
