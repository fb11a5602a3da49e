"""Symmetric quantisation: the represented value is the stored value times its scale."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from pallas_attn.types import QMAX

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)

type Divide = Callable[[jax.Array, jax.Array], jax.Array]
"""Correctly rounded division of float32. Kernels have their own implementation."""


def divide(x: Float[Array, "*#shape"], y: Float[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """Return x / y in float32, correctly rounded.

    XLA's division is not correctly rounded: on GPUs its error is two units in the last place, and on all devices it may
    multiply by the reciprocal of a broadcast divisor. This function computes in float64. It multiplies by the float64
    reciprocal, because XLA would narrow a plain division to float32 again. The relative error is below 2**-51, and no
    quotient of two float32 numbers is within 2**-49 of a rounding boundary of float32.
    """
    x, y = jnp.broadcast_arrays(x, y)
    with jax.enable_x64(True):
        x64, y64 = (lax.convert_element_type(a, jnp.float64) for a in (x, y))
        quotient = lax.mul(x64, lax.div(lax.full_like(y64, 1.0), y64))
        return lax.convert_element_type(quotient, jnp.float32)


QUERY_SCALE = 2.0**-4
"""Factor of bfloat16 queries. float16 then represents queries from 2**-13 to 2**20 exactly; larger queries saturate."""


def float16_queries(q: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], float]:
    """Return queries in float16 for kernels that multiply them by an 8-bit cache, and the factor that they contain.

    Kernels convert e4m3 to float16 in one instruction, and to bfloat16 in several.
    """
    if q.dtype == jnp.float16:
        return q, 1.0
    limit = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(q.astype(jnp.float32) * QUERY_SCALE, -limit, limit).astype(jnp.float16), QUERY_SCALE


def quantise(
    x: Float[Array, "*#shape"], scale: Float[Array, "*#shape"], dtype: jax.typing.DTypeLike
) -> Num[Array, "..."]:
    """Return clip(x / scale) to the range of `dtype`, computed in float32; int8 rounds half to even."""
    limit = QMAX[jnp.dtype(dtype)]
    values = jnp.clip(divide(x, scale), -limit, limit)  # a cast turns larger values into NaN or infinity
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype)


def rounded_to_float8(x: Float[Array, "*shape"], dtype: jax.typing.DTypeLike) -> Float[Array, "*shape"]:
    """Return float32 numbers clipped to the range of a float8 dtype and rounded to its values, half to even; NaN stays.

    The rounding uses arithmetic. Compilers may remove a conversion to float8 and back.
    """
    limit, info = QMAX[jnp.dtype(dtype)], jnp.finfo(dtype)
    x = jnp.clip(x, -limit, limit)
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    # Unit in the last place. e4m3 has three mantissa bits; below its smallest normal number 2**-6 the unit is 2**-9.
    unit = jnp.maximum(lax.bitcast_convert_type(bits, jnp.float32), float(info.tiny)) * 2.0**-info.nmant
    return jnp.round(x / unit) * unit


def dequantise(values: Num[Array, "*#shape"], scale: Float[Array, "*#shape"]) -> Float[Array, "..."]:
    """Return stored values times their scale, in float32."""
    return values.astype(jnp.float32) * scale


def amax_scale(
    amax: Float[Array, "*shape"],
    dtype: jax.typing.DTypeLike,
    at_least: Float[Array, "*shape"] | float = 0.0,
    divide: Divide = divide,
) -> Float[Array, "*shape"]:
    """Return the scale with which `dtype` represents values up to `amax`: max(amax / qmax, at_least), and 1 instead of
    0.

    Quotients below the smallest normal float32 count as 0, because some devices flush them to 0.
    """
    scale = jnp.maximum(divide(amax, jnp.full_like(amax, QMAX[jnp.dtype(dtype)])), at_least)
    return jnp.where(scale < _SMALLEST_NORMAL, 1.0, scale)


def held_scale(
    stored_amax: Float[Array, "*shape"],
    scale: Float[Array, "*shape"],
    dtype: jax.typing.DTypeLike,
    divide: Divide = divide,
) -> Float[Array, "*shape"]:
    """Return the scale that the stored values still need: scale · (stored_amax / qmax).

    This equals `scale` to the bit if a stored value is ±qmax, which is true for the largest value of a group when it is
    written. It is smaller if that value belonged to a rejected draft and was overwritten, and 0 if all stored values
    are 0, for any `scale`.
    """
    share = divide(stored_amax, jnp.full_like(stored_amax, QMAX[jnp.dtype(dtype)]))
    return jnp.where(stored_amax == 0, 0.0, scale * share)
