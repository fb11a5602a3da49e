"""Weights in MXFP4, as published checkpoints of gpt-oss pack them (OCP Microscaling Formats specification 1.0).

A group of 32 weights has one scale, a power of two (E8M0); a weight is a sign, two bits of exponent and one of mantissa
(E2M1). Two weights share a byte, the first in its low half. The product of a weight and its scale has two significant
bits, so that bfloat16 holds it exactly.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, BFloat16, UInt8

from models.config.gqa import MXFP4_GROUP

PARTS = ("_blocks", "_scales")
"""Suffixes of the two tensors that hold a packed one."""

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the `PARTS` that hold experts [E, in, out]."""
    experts, in_width, out_width = shape
    groups = in_width // MXFP4_GROUP
    return (experts, out_width, groups, MXFP4_GROUP // 2), (experts, out_width, groups)


def dequantise(
    blocks: UInt8[np.ndarray, "E out groups bytes"], scales: UInt8[np.ndarray, "E out groups"]
) -> np.ndarray:
    """Unpacks experts [E, in, out] to bfloat16. Values out of its range are infinite; scale 255 is NaN."""
    return np.asarray(_dequantise(blocks, scales))


@jax.jit
def _dequantise(
    blocks: UInt8[Array, "E out groups bytes"], scales: UInt8[Array, "E out groups"]
) -> BFloat16[Array, "E in out"]:
    # A table lookup, since a compiler may flush products below the normal range. It works on bits, since a compiler may
    # take 16-bit floats through float32; and on the device, since numpy takes minutes for the weights of a real model.
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int32)
    bits = jnp.asarray(_weights().view(np.uint16))[scales.astype(jnp.int32)[..., None, None] * 16 + codes]
    weights = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return weights.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


@functools.cache
def _weights() -> np.ndarray:
    """Values of every code under every scale: bfloat16 [256 · 16]."""
    scales = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    with np.errstate(over="ignore"):
        table = scales[:, None] * np.concatenate([_E2M1, -_E2M1])
    return table.astype(ml_dtypes.bfloat16).reshape(-1)
