"""Weights in MXFP4, the format of published gpt-oss and DeepSeek-V4 checkpoints (OCP Microscaling Formats specification
1.0).

A weight is the product of a 4-bit number and a scale. A 4-bit number has a sign bit, two exponent bits and one mantissa
bit (E2M1). A byte contains two of them, the first in its low half. A group of 32 weights has one scale, a power of two
(E8M0). The product has two significant bits, so bfloat16 represents it exactly.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, BFloat16, UInt8

from pallas_attn.models.config.gqa import MXFP4_GROUP

PARTS = ("_blocks", "_scales")
"""Suffixes of the names of the two tensors in which a packed tensor is stored: 4-bit numbers and scales."""

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the two stored tensors (see `PARTS`) of experts with weights of shape [E, in, out]."""
    experts, in_width, out_width = shape
    groups = in_width // MXFP4_GROUP
    return (experts, out_width, groups, MXFP4_GROUP // 2), (experts, out_width, groups)


def dequantise(
    blocks: UInt8[np.ndarray, "E out groups bytes"], scales: UInt8[np.ndarray, "E out groups"]
) -> np.ndarray:
    """Unpack the weights of experts to bfloat16 [E, in, out]. Weights beyond the range of bfloat16 become infinite, and
    weights with scale code 255 become NaN."""
    return np.asarray(_dequantise(blocks, scales))


def dequantise_rows(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Unpack a weight of DeepSeek-V4 to bfloat16 [out, in].

    Args:
      packed: bytes [out, in / 2] as int8.
      scales: float8_e8m0fnu [out, ceil(in / 32)]. The last group may be smaller than 32.
    """
    missing = scales.shape[1] * (MXFP4_GROUP // 2) - packed.shape[1]
    blocks = np.pad(packed.view(np.uint8), ((0, 0), (0, missing))).reshape(*scales.shape, -1)
    return dequantise(blocks[None], scales.view(np.uint8)[None])[0].T[:, : 2 * packed.shape[1]]


@jax.jit
def _dequantise(
    blocks: UInt8[Array, "E out groups bytes"], scales: UInt8[Array, "E out groups"]
) -> BFloat16[Array, "E in out"]:
    # The products are looked up in a table, because a compiler may flush subnormal products to zero. The table has
    # integer bits, because a compiler may convert bfloat16 to float32. The lookup is compiled, because numpy would take
    # minutes.
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int32)
    bits = jnp.asarray(_weights().view(np.uint16))[scales.astype(jnp.int32)[..., None, None] * 16 + codes]
    weights = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return weights.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


@functools.cache
def _weights() -> np.ndarray:
    """Return the table of all products: bfloat16 [256 · 16], at index scale code · 16 + code of the 4-bit number."""
    scales = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    with np.errstate(over="ignore"):
        table = scales[:, None] * np.concatenate([_E2M1, -_E2M1])
    return table.astype(ml_dtypes.bfloat16).reshape(-1)
