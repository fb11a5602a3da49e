"""Conversions between float32, float16 and 8-bit cache dtypes. Kernels see float8_e4m3fn as bytes (uint8).

Quantised values equal the values of `pallas_attn.portable.quantise` bit for bit on every GPU: division is IEEE
division, and the conversion to float8_e4m3fn uses integer arithmetic, not the GPU's conversion instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23. (x + ROUNDING) - ROUNDING rounds a float32 x of magnitude up to 2**22 to an integer, half to even."""


@triton.jit
def e4m3_from_f32(x):
    """Convert float32 (up to ±448, or NaN) to float8_e4m3fn bytes, rounding to nearest even."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Round the 23-bit mantissa to 3 bits, half to even: add 2**19 - 1, plus the lowest bit that is kept, and drop 20
    # bits. Then change the exponent bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # float8 values below 2**-6 are subnormal: multiples of 2**-9. The spacing of float32 numbers at 2**14 is also
    # 2**-9, so adding 2**14 rounds to a multiple, and the difference of the bit patterns is the multiplier.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def f16_from_e4m3(byte, NATIVE: tl.constexpr):
    """Convert float8_e4m3fn bytes to float16, exactly.

    Args:
      NATIVE: whether the GPU has an instruction for this conversion (sm89 and later); otherwise the bits are shifted.
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
    """Convert stored cache values to the 16-bit `dtype` of a matrix product, exactly.

    bfloat16 and float16 represent every int8 and float8_e4m3fn number. Values of a 16-bit cache already have `dtype`.

    Args:
      stored: int8, uint8 (bytes of float8_e4m3fn), or `dtype`.
      NATIVE: as for `f16_from_e4m3`.
    """
    return f16_from_e4m3(stored, NATIVE).to(dtype) if stored.dtype == tl.uint8 else stored.to(dtype)


@triton.jit
def load_operand(
    ptr,
    row_start,
    held,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    dtype: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load rows of cache values, and convert them to the 16-bit `dtype` of a matrix product, exactly: [rows, COLUMNS].

    Four 8-bit values are loaded as one word and converted in registers. Triton would otherwise copy the bytes to shared
    memory and read the operand from there byte by byte, which took most of the time of a loop iteration.

    Args:
      row_start: [rows], element offsets of the rows, multiples of STRIDE.
      held: [rows], load mask. Other rows, and columns from FIRST + WIDTH on, are 0.
      STRIDE: elements from a row to the next.
      FIRST: first column that is loaded.
      NATIVE: as for `f16_from_e4m3`.
    """
    if ptr.dtype.element_ty.primitive_bitwidth == 8 and WIDTH % 4 == 0 and STRIDE % 4 == 0 and FIRST % 4 == 0:
        word = tl.arange(0, COLUMNS // 4)
        at = ptr.to(tl.pointer_type(tl.int32)) + (row_start // 4 + FIRST // 4)[:, None] + word[None, :]
        words = tl.load(at, mask=held[:, None] & (word < WIDTH // 4)[None, :], other=0)
        stored: tl.constexpr = ptr.dtype.element_ty
        even = tl.join(_byte_as(words, 0, stored, dtype, NATIVE), _byte_as(words, 2, stored, dtype, NATIVE))
        odd = tl.join(_byte_as(words, 1, stored, dtype, NATIVE), _byte_as(words, 3, stored, dtype, NATIVE))
        values = tl.reshape(tl.join(even, odd), [held.shape[0], COLUMNS])
    else:
        column = tl.arange(0, COLUMNS)
        at = ptr + (row_start + FIRST)[:, None] + column[None, :]
        loaded = tl.load(at, mask=held[:, None] & (column < WIDTH)[None, :], other=0)
        values = tensor_core_operand(loaded, dtype, NATIVE)
    return values


@triton.jit
def _byte_as(words, BYTE: tl.constexpr, stored: tl.constexpr, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Convert a byte of each word, which has the cache dtype `stored`, to `dtype`. Byte 0 is the lowest."""
    if stored == tl.uint8:
        value = f16_from_e4m3((words >> (8 * BYTE)).to(tl.uint8), NATIVE).to(dtype)
    else:
        # A small integer x, added to the bits of the float ROUNDING, gives the float ROUNDING + x. The instruction that
        # converts an integer to a float is several times slower than these two additions.
        signed = (words << (24 - 8 * BYTE)) >> 24
        value = ((signed + 0x4B400000).to(tl.float32, bitcast=True) - ROUNDING).to(dtype)
    return value


@triton.jit
def dequantise(stored, scale, NATIVE: tl.constexpr):
    """Return stored values (int8, or bytes of float8_e4m3fn) as float32, multiplied by `scale`."""
    values = f16_from_e4m3(stored, NATIVE).to(tl.float32) if stored.dtype == tl.uint8 else stored.to(tl.float32)
    return values * scale


@triton.jit
def amax_scale(amax, QMAX: tl.constexpr, at_least=0.0):
    """Return the scale for values with the largest magnitude `amax`, both float32.

    The scale is max(amax / QMAX, at_least), where QMAX is the largest number of the 8-bit dtype. It is 1 if this is
    below the smallest normal float32, and NaN if `amax` is NaN.
    """
    scale = tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32))
    scale = tl.maximum(scale, at_least, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(scale < 1.1754943508222875e-38, 1.0, scale)


@triton.jit
def latent_exponents(amax, QMAX: tl.constexpr):
    """Return float8_e8m0fnu bytes (int32) of the scales of latents with these largest magnitudes, float32.

    A scale is the smallest power of two that is at least max(amax, 1e-4) / QMAX; 255, which is NaN, if amax is infinite
    or NaN.
    """
    smallest = tl.where(amax < 1e-4, 1e-4, amax)
    bits = tl.div_rn(smallest, tl.full(amax.shape, QMAX, tl.float32)).to(tl.int32, bitcast=True)
    return tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) >> 23, 255)


@triton.jit
def f32_from_power_of_two(byte):
    """Convert float8_e8m0fnu bytes to float32; 0 for the smallest power, 2**-127."""
    value = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(byte.to(tl.int32) == 255, float("nan"), value)


@triton.jit
def row_amax(x):
    """Return the largest magnitude of each row, float32 [rows], or NaN if the row has a NaN.

    Args:
      x: tuple of float32 tiles [rows, columns], whose columns together form the rows.
    """
    amax, nans = tl.max(tl.abs(x[0]), 1), tl.max((x[0] != x[0]).to(tl.int32), 1)
    for tile in tl.static_range(1, len(x)):
        amax = tl.maximum(amax, tl.max(tl.abs(x[tile]), 1))
        nans += tl.max((x[tile] != x[tile]).to(tl.int32), 1)
    return tl.where(nans > 0, float("nan"), amax)  # tl.max ignores NaN


@triton.jit
def quantise(x, scale, dtype: tl.constexpr, QMAX: tl.constexpr):
    """Return clip(x / scale, -QMAX, QMAX) in an 8-bit dtype, rounded half to even.

    Args:
      x: float32.
      scale: float32, broadcastable to the shape of x.
      dtype: int8, or uint8 for the bytes of float8_e4m3fn.
    """
    quotient = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    clipped = tl.where(quotient > QMAX, QMAX, tl.where(quotient < -QMAX, -QMAX, quotient))
    rounded = (clipped + ROUNDING) - ROUNDING
    return e4m3_from_f32(clipped) if dtype == tl.uint8 else rounded.to(tl.int8)
