"""Conversions between float32, float16 and 8-bit cache dtypes. Kernels see float8_e4m3fn as bytes (uint8).

Quantisation follows `pallas_attn.portable.quantise` bit for bit on every card: division rounds correctly, and the
conversion to float8_e4m3fn uses integer arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23. Adding it to a float32 of magnitude up to 2**22 rounds to an integer, half to even."""


@triton.jit
def e4m3_from_f32(x):
    """Convert float32 (up to ±448, or NaN) to float8_e4m3fn bytes, rounding to nearest even."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Add half a unit in the last place of a 3-bit mantissa, minus one, plus the parity bit. Change the exponent bias
    # from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormal float8, below 2**-6, is a multiple of 2**-9, which is the unit in the last place of float32 at 2**14.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def f16_from_e4m3(byte, NATIVE: tl.constexpr):
    """Convert float8_e4m3fn bytes to float16, exactly.

    Args:
      NATIVE: whether the card has an instruction for it (sm89 and later); otherwise integer arithmetic.
    """
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = byte.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0  # exponent bias 7 to 15; exact for subnormals too
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def tensor_core_operand(stored, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Convert cache values to a 16-bit dtype, exactly.

    bfloat16 and float16 represent every int8 and float8_e4m3fn number. 16-bit caches already have `dtype`.
    """
    return f16_from_e4m3(stored, NATIVE).to(dtype) if stored.dtype == tl.uint8 else stored.to(dtype)


@triton.jit
def dequantise(stored, scale, NATIVE: tl.constexpr):
    """float32 of stored values (int8, or float8_e4m3fn bytes), times `scale`."""
    values = f16_from_e4m3(stored, NATIVE).to(tl.float32) if stored.dtype == tl.uint8 else stored.to(tl.float32)
    return values * scale


@triton.jit
def amax_scale(amax, QMAX: tl.constexpr, at_least=0.0):
    """Dynamic scale for values of magnitude up to `amax`: max(amax / QMAX, at_least), or 1 if that is subnormal."""
    scale = tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32))
    scale = tl.maximum(scale, at_least, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(scale < 1.1754943508222875e-38, 1.0, scale)


@triton.jit
def row_amax(x):
    """Largest magnitude of each row, or NaN if the row has a NaN.

    Args:
      x: tuple of float32 tiles [rows, columns].
    """
    amax, nans = tl.max(tl.abs(x[0]), 1), tl.max((x[0] != x[0]).to(tl.int32), 1)
    for tile in tl.static_range(1, len(x)):
        amax = tl.maximum(amax, tl.max(tl.abs(x[tile]), 1))
        nans += tl.max((x[tile] != x[tile]).to(tl.int32), 1)
    return tl.where(nans > 0, float("nan"), amax)  # a maximum ignores NaN


@triton.jit
def quantise(x, scale, dtype: tl.constexpr, QMAX: tl.constexpr):
    """Quantise float32: clip(x / scale, -QMAX, QMAX), rounded half to even.

    Args:
      scale: broadcastable to the shape of x.
      dtype: int8, or uint8 for the bytes of float8_e4m3fn.
    """
    quotient = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    clipped = tl.where(quotient > QMAX, QMAX, tl.where(quotient < -QMAX, -QMAX, quotient))
    rounded = (clipped + ROUNDING) - ROUNDING
    return e4m3_from_f32(clipped) if dtype == tl.uint8 else rounded.to(tl.int8)
