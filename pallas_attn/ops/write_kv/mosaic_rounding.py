"""Correctly rounded float32 division in Mosaic GPU kernels, and quantisation with it.

Correctly rounded means rounded to the float32 nearest to the exact quotient, as IEEE division does.
`portable.quantise` defines quantisation with a division in float64, which is slow on a GPU. The functions here use
float32 operations only, and give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_attn.mosaic.primitives.basics import interpreted
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.portable import quantise
from pallas_attn.types import QMAX

EXPONENT = 0x7F800000
"""Exponent bits of a float32."""

SMALLEST_RECIPROCAL = 0.5 + 2.0**-24
"""Reciprocal of the largest float32 below 2, correctly rounded."""


def divide(x: jax.Array, y: jax.Array, layout: Any) -> jax.Array:
    """Return x / y of float32, correctly rounded. A division takes dozens of instructions, so use it for few values."""
    if interpreted():
        return quantise.divide(x, y)
    return _elementwise(_instruction("div.rn.f32"), layout, x, y)


class Divisor(NamedTuple):
    """Scales, with numbers computed in advance for the fast division of many values by each scale.

    x / scale is computed as (power · x) / (power · scale). Scales must be below 2**127.

    Attributes:
      scale: float32 scales.
      power: the power of two for which power · scale is from 1 to 2.
      normal: power · scale.
      reciprocal: 1 / normal, correctly rounded.
      bound: qmax · normal. power · x is clipped to ±bound, where qmax is the largest number of the cache's dtype. The
        product is rounded, so the quotient of a clipped value can differ from qmax slightly, but is stored as qmax.
    """

    scale: Any
    power: Any
    normal: Any
    reciprocal: Any
    bound: Any

    @staticmethod
    def of(scale: jax.Array, dtype: Any, layout: Any) -> Divisor:
        """Compute the divisors of float32 scales, an array in registers, for a cache of `dtype`."""
        if interpreted():
            return Divisor(*[scale] * 5)
        exponent = lax.bitcast_convert_type(scale, jnp.int32) & EXPONENT
        power = lax.bitcast_convert_type(jnp.maximum((254 << 23) - exponent, 1 << 23), jnp.float32)
        normal = scale * power
        guess = _elementwise(_instruction("rcp.approx.ftz.f32"), layout, normal)
        one = jnp.full_like(normal, 1.0)
        reciprocal = _elementwise(functools.partial(refined_reciprocal, MLIR), layout, normal, guess, one)
        reciprocal = jnp.maximum(reciprocal, SMALLEST_RECIPROCAL)
        return Divisor(scale, power, normal, reciprocal, normal * QMAX[jnp.dtype(dtype)])

    def spread(self, layout: RowLayout, columns: int) -> Divisor:
        """Broadcast one divisor per row to `columns` columns."""
        return Divisor(*(layout.spread(each, columns) for each in self))

    def quantise(self, x: jax.Array, dtype: Any, layout: Any) -> jax.Array:
        """Return float32 x quantised with these scales to `dtype`, with the bits of `quantise.quantise`."""
        if interpreted():
            return quantise.quantise(x, self.scale, dtype)
        x = jnp.clip(x * self.power, -self.bound, self.bound)
        quotient = _elementwise(functools.partial(refined_quotient, MLIR), layout, x, self.normal, self.reciprocal)
        if jnp.issubdtype(dtype, jnp.integer):
            # A cheaper rounding would be to add 1.5 · 2**23 and to store the low byte of the sum. However, ptxas before
            # 13.5 miscompiles it: it converts the float to an integer when a byte of its register is stored.
            return _elementwise(_instruction("cvt.rni.s32.f32"), layout, quotient, dtype=jnp.int32).astype(dtype)
        return quotient.astype(dtype)


class Arithmetic[T](NamedTuple):
    """Operations on float32 numbers, each rounded once: multiply(a, b), fma(a, b, c) = a · b + c, negate(a).

    A parameter of the functions below, so that tests can run them on numpy numbers.
    """

    multiply: Callable[[T, T], T]
    fma: Callable[[T, T, T], T]
    negate: Callable[[T], T]


MLIR = Arithmetic(arith.mulf, mlir_math.fma, arith.negf)


def refined_reciprocal[T](arithmetic: Arithmetic[T], y: T, guess: T, one: T) -> T:
    """Return 1 / y of float32, correctly rounded, from a guess with an error of at most two units in the last place.

    After the first correction, the error is below one unit. The second correction then rounds correctly (Markstein, IBM
    Journal of Research and Development 34, 1990), with one exception: if all mantissa bits of y are set, the result can
    be the power of two just below the correct number. `Divisor.of` corrects this case.
    """
    _, fma, negate = arithmetic
    for _ in range(2):
        guess = fma(fma(negate(y), guess, one), guess, guess)
    return guess


def refined_quotient[T](arithmetic: Arithmetic[T], x: T, y: T, reciprocal: T) -> T:
    """Return x / y of float32, correctly rounded, from the reciprocal of y that `refined_reciprocal` returns.

    After the first correction, the error of the quotient is below one unit in the last place. The remainder x - q·y is
    then exact, and the second correction rounds like a division (Markstein 1990). The signs are chosen so that -0 / y
    is -0.
    """
    multiply, fma, negate = arithmetic
    quotient, step = multiply(x, reciprocal), negate(reciprocal)
    for _ in range(2):
        quotient = fma(fma(quotient, y, negate(x)), step, quotient)
    return quotient


def _elementwise(
    function: Callable[..., ir.Value], layout: Any, *operands: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """Apply a function to each register of arrays in registers, and return an array of `dtype`.

    Args:
      function: maps MLIR vectors of float32, one per operand, to an MLIR vector of `dtype`.
      layout: register layout of the operands and of the result.
    """

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(operands),
        return_type=plgpu.ShapeDtypeStruct(operands[0].shape, dtype, layout=layout),
    )
    def apply(_: Any, first: Any, *others: Any) -> Any:
        return first._pointwise(function, *others, output_is_signed=mgpu.utils.is_signed(dtype))

    return apply(*(plgpu.layout_cast(operand, layout) for operand in operands))


def _instruction(name: str) -> Callable[..., ir.Value]:
    """Return a PTX instruction with float32 operands as a function that maps MLIR vectors to an MLIR vector.

    Args:
      name: the instruction, for example "cvt.rni.s32.f32". Its first type is the type of the result: s32 or f32.
    """
    rounds_to_integer = ".s32." in name

    def apply(*vectors: ir.Value) -> ir.Value:
        (length,) = vectors[0].type.shape
        element = ir.IntegerType.get_signless(32) if rounds_to_integer else ir.F32Type.get()
        text = f"{name} {', '.join(f'${i}' for i in range(len(vectors) + 1))};"
        constraints = ",".join(["=r" if rounds_to_integer else "=f", *"f" * len(vectors)])
        elements = zip(*([vector.extract(v, [], [i]) for i in range(length)] for v in vectors), strict=True)
        results: Any = [llvm.inline_asm(element, each, text, constraints) for each in elements]
        return vector.from_elements(ir.VectorType.get((length,), element), results)

    return apply
