"""Device functions that Triton kernels share: what a query sees, where tokens lie, and 8-bit numbers."""

from __future__ import annotations

import triton
import triton.language as tl

# --- float8_e4m3fn, whose bytes kernels get as uint8


@triton.jit
def e4m3_from_f32(x):
    """float8_e4m3fn bytes of float32 up to ±448 or NaN, rounded to nearest even; by integers, on every card alike."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Half a unit in the last place of 3 bits, and its parity; the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Units of 2**-9 below 2**-6: 2**14 is the float32 whose last place that is.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def f16_from_e4m3(byte, NATIVE: tl.constexpr):
    """float16 of bytes of float8_e4m3fn, exactly; by integers where the card has no instruction (before sm89)."""
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = byte.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0  # the exponent's bias goes from 7 to 15; exact for subnormals
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def amax_scale(amax, QMAX: tl.constexpr):
    """Scale that lets 8 bits hold values up to `amax`: amax / QMAX, correctly rounded; 1 for a subnormal one."""
    scale = tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32))
    return tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
