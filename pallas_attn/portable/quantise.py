"""Symmetric quantisation: a stored value times its scale is the value meant."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from pallas_attn.types import QMAX

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)

type Divide = Callable[[jax.Array, jax.Array], jax.Array]
"""Correctly rounded division of float32; kernels have their own."""


def divide(x: Float[Array, "*#shape"], y: Float[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """x / y of float32, correctly rounded.

    XLA's own is not: on GPUs it divides to two units in the last place, and anywhere it may multiply with the
    reciprocal of a broadcast divisor. So this goes through float64, and there through the reciprocal, because a plain
    division would be narrowed to float32 again. Its error is below 2**-51, and no quotient of two float32 numbers is
    within 2**-49 of where float32 would round the other way.
    """
    x, y = jnp.broadcast_arrays(x, y)
    with jax.enable_x64(True):
        x64, y64 = (lax.convert_element_type(a, jnp.float64) for a in (x, y))
        quotient = lax.mul(x64, lax.div(lax.full_like(y64, 1.0), y64))
        return lax.convert_element_type(quotient, jnp.float32)


QUERY_SCALE = 2.0**-4
"""Factor of bfloat16 queries: float16 then holds those from 2**-13 to 2**20 exactly, and larger ones saturate."""


def float16_queries(q: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], float]:
    """Queries for kernels that multiply them with a cache in 8 bits, and the factor of their products: e4m3 becomes
    float16 in an instruction, bfloat16 in several.
    """
    if q.dtype == jnp.float16:
        return q, 1.0
    limit = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(q.astype(jnp.float32) * QUERY_SCALE, -limit, limit).astype(jnp.float16), QUERY_SCALE


def quantise(
    x: Float[Array, "*#shape"], scale: Float[Array, "*#shape"], dtype: jax.typing.DTypeLike
) -> Num[Array, "..."]:
    """clip(x / scale) to what `dtype` holds, in float32; int8 rounds half to even, floats are cast."""
    limit = QMAX[jnp.dtype(dtype)]
    values = jnp.clip(divide(x, scale), -limit, limit)  # a cast alone makes NaN or infinity of more
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype)


def rounded_to_float8(x: Float[Array, "*shape"], dtype: jax.typing.DTypeLike) -> Float[Array, "*shape"]:
    """float32 numbers clipped to what a float8 dtype holds and rounded to its numbers, half to even; NaN stays.

    By arithmetic: of a conversion there and back, which may exceed its precision, compilers are free to make nothing.
    """
    limit, info = QMAX[jnp.dtype(dtype)], jnp.finfo(dtype)
    x = jnp.clip(x, -limit, limit)
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    # A unit of the last binary place, of which e4m3 has three; below its smallest normal 2**-6 they are all 2**-9.
    unit = jnp.maximum(lax.bitcast_convert_type(bits, jnp.float32), float(info.tiny)) * 2.0**-info.nmant
    return jnp.round(x / unit) * unit


def dequantise(values: Num[Array, "*#shape"], scale: Float[Array, "*#shape"]) -> Float[Array, "..."]:
    """Stored values times their scale, in float32."""
    return values.astype(jnp.float32) * scale


def amax_scale(
    amax: Float[Array, "*shape"],
    dtype: jax.typing.DTypeLike,
    at_least: Float[Array, "*shape"] | float = 0.0,
    divide: Divide = divide,
) -> Float[Array, "*shape"]:
    """The scale that lets `dtype` hold values up to `amax`: amax / qmax, no less than `at_least`, and 1 instead of 0.

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
    """The scale that stored values still need, by the largest of them: scale · (stored_amax / qmax).

    This is `scale` itself, to the bit, where one of them is ±qmax, as the largest of a group is when it is written. It
    is less where that one has since been abandoned with the draft it came in, and 0 where there are only zeros or
    nothing, whatever the scale then says.
    """
    share = divide(stored_amax, jnp.full_like(stored_amax, QMAX[jnp.dtype(dtype)]))
    return jnp.where(stored_amax == 0, 0.0, scale * share)
