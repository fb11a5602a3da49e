"""Correctly rounded quotients of float32 in Mosaic GPU kernels, and quantisation with them.

`portable.quantise` defines the arithmetic. It divides in float64, which is slow on a GPU. The functions here use
float32 operations only, and give identical bits.
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
"""Reciprocal of the largest float32 below 2."""


def divide(x: jax.Array, y: jax.Array, layout: Any) -> jax.Array:
    """x / y of float32, correctly rounded. It takes dozens of instructions, so use it for few values only."""
    if interpreted():
        return quantise.divide(x, y)
    return _elementwise(_instruction("div.rn.f32"), layout, x, y)


class Divisor(NamedTuple):
    """Scales below 2**127, with precomputed numbers for the quantisation of many values.

    Attributes:
      power: a power of two.
      normal: power · scale, from 1 to 2.
      reciprocal: 1 / normal, correctly rounded.
      bound: qmax · power · scale, the limit that values times `power` are clipped to. It is rounded, so the quotient of
        a clipped value is close enough to qmax to be stored as qmax.
    """

    scale: Any
    power: Any
    normal: Any
    reciprocal: Any
    bound: Any

    @staticmethod
    def of(scale: jax.Array, dtype: Any, layout: Any) -> Divisor:
        """Compute the divisor of float32 scales in registers, for a cache of `dtype`."""
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
        """Broadcast a divisor per row to all columns of the row."""
        return Divisor(*(layout.spread(each, columns) for each in self))

    def quantise(self, x: jax.Array, dtype: Any, layout: Any) -> jax.Array:
        """Apply `quantise.quantise` to float32 x with these scales."""
        if interpreted():
            return quantise.quantise(x, self.scale, dtype)
        x = jnp.clip(x * self.power, -self.bound, self.bound)
        quotient = _elementwise(functools.partial(refined_quotient, MLIR), layout, x, self.normal, self.reciprocal)
        if jnp.issubdtype(dtype, jnp.integer):
            # Adding 1.5 · 2**23 and storing the low byte is not an option: ptxas before 13.5 converts the float when a
            # byte of a register with a float is stored.
            return _elementwise(_instruction("cvt.rni.s32.f32"), layout, quotient, dtype=jnp.int32).astype(dtype)
        return quotient.astype(dtype)


class Arithmetic[T](NamedTuple):
    """Operations for quotients: multiply(a, b), fma(a, b, c) = a · b + c and negate(a), each rounded once."""

    multiply: Callable[[T, T], T]
    fma: Callable[[T, T, T], T]
    negate: Callable[[T], T]


MLIR = Arithmetic(arith.mulf, mlir_math.fma, arith.negf)


def refined_reciprocal[T](arithmetic: Arithmetic[T], y: T, guess: T, one: T) -> T:
    """1 / y of float32, from a guess with an error of at most two units in the last place.

    After the first correction the error is below one unit. The second correction then rounds correctly (Markstein, IBM
    Journal of Research and Development 34, 1990), except if all mantissa bits of y are set. In this case the result may
    be a power of two, the next lower number, because of a tie.
    """
    _, fma, negate = arithmetic
    for _ in range(2):
        guess = fma(fma(negate(y), guess, one), guess, guess)
    return guess


def refined_quotient[T](arithmetic: Arithmetic[T], x: T, y: T, reciprocal: T) -> T:
    """x / y of float32, correctly rounded, from `refined_reciprocal`.

    After the first correction the error of the quotient is below one unit in the last place. The remainder is then
    exact, and the second correction rounds like a division (Markstein 1990). The division instruction runs the same
    steps after a check for overflow. The signs are chosen so that -0 gives -0.
    """
    multiply, fma, negate = arithmetic
    quotient, step = multiply(x, reciprocal), negate(reciprocal)
    for _ in range(2):
        quotient = fma(fma(quotient, y, negate(x)), step, quotient)
    return quotient


def _elementwise(
    function: Callable[..., ir.Value], layout: Any, *operands: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """Apply a function to the registers of arrays. It maps vectors of float32 to vectors of `dtype`."""

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(operands),
        return_type=plgpu.ShapeDtypeStruct(operands[0].shape, dtype, layout=layout),
    )
    def apply(_: Any, first: Any, *others: Any) -> Any:
        return first._pointwise(function, *others, output_is_signed=mgpu.utils.is_signed(dtype))

    return apply(*(plgpu.layout_cast(operand, layout) for operand in operands))


def _instruction(name: str) -> Callable[..., ir.Value]:
    """A PTX instruction with float32 operands as a function of vectors.

    The first type in the name is the result type.
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
