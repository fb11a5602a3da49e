"""Correctly rounded quotients of float32 in Mosaic GPU kernels, and quantisation with them.

`portable.quantise` defines the arithmetic. It divides in float64, of which a GPU does too little; here a quotient is
made of float32 operations alone, and is the same to the bit.
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
"""The exponent bits of a float32."""

SMALLEST_RECIPROCAL = 0.5 + 2.0**-24
"""The smallest reciprocal of a float32 below 2."""


def divide(x: jax.Array, y: jax.Array, layout: Any) -> jax.Array:
    """x / y of float32, correctly rounded. Dozens of instructions: for a few values only."""
    if interpreted():
        return quantise.divide(x, y)
    return _elementwise(_instruction("div.rn.f32"), layout, x, y)


class Divisor(NamedTuple):
    """Scales below 2**127, prepared for the quantisation of many values.

    Attributes:
      power: a power of two.
      normal: power · scale, from 1 to 2.
      reciprocal: of `normal`, correctly rounded.
      bound: what values times `power` are clipped to, qmax · power · scale. This is rounded, so the quotient is about
        qmax, which is near enough: it is stored as qmax.
    """

    scale: Any
    power: Any
    normal: Any
    reciprocal: Any
    bound: Any

    @staticmethod
    def of(scale: jax.Array, dtype: Any, layout: Any) -> Divisor:
        """Prepare float32 scales of a cache of this dtype, in registers of this layout."""
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
        """Spread a divisor for each row over the row's columns."""
        return Divisor(*(layout.spread(each, columns) for each in self))

    def quantise(self, x: jax.Array, dtype: Any, layout: Any) -> jax.Array:
        """Apply `quantise.quantise` to float32 x with these scales."""
        if interpreted():
            return quantise.quantise(x, self.scale, dtype)
        x = jnp.clip(x * self.power, -self.bound, self.bound)
        quotient = _elementwise(functools.partial(refined_quotient, MLIR), layout, x, self.normal, self.reciprocal)
        if jnp.issubdtype(dtype, jnp.integer):
            # Not by adding 1.5 · 2**23 for the low bits: when a byte of a register that holds a float is to be stored,
            # ptxas before 13.5 converts the float.
            return _elementwise(_instruction("cvt.rni.s32.f32"), layout, quotient, dtype=jnp.int32).astype(dtype)
        return quotient.astype(dtype)


class Arithmetic[T](NamedTuple):
    """Operations that a quotient takes: multiply(a, b), fma(a, b, c) = a · b + c and negate(a), each rounded once."""

    multiply: Callable[[T, T], T]
    fma: Callable[[T, T, T], T]
    negate: Callable[[T], T]


MLIR = Arithmetic(arith.mulf, mlir_math.fma, arith.negf)


def refined_reciprocal[T](arithmetic: Arithmetic[T], y: T, guess: T, one: T) -> T:
    """1 / y of float32, from a guess that errs by two units in the last place at most.

    The first correction leaves less than one, from where the second rounds correctly (Markstein, IBM Journal of
    Research and Development 34, 1990) but where y has all bits set: there it is a tie, and may leave a power of two.
    """
    _, fma, negate = arithmetic
    for _ in range(2):
        guess = fma(fma(negate(y), guess, one), guess, guess)
    return guess


def refined_quotient[T](arithmetic: Arithmetic[T], x: T, y: T, reciprocal: T) -> T:
    """x / y of float32, correctly rounded, from `refined_reciprocal`.

    The first correction brings the error of the product below a unit in the last place. Then the remainder is exact,
    and the second correction rounds as division does (Markstein again). The division instruction does the same where
    nothing can overflow, but first has to check that. Signs are such that -0 stays -0.
    """
    multiply, fma, negate = arithmetic
    quotient, step = multiply(x, reciprocal), negate(reciprocal)
    for _ in range(2):
        quotient = fma(fma(quotient, y, negate(x)), step, quotient)
    return quotient


def _elementwise(
    function: Callable[..., ir.Value], layout: Any, *operands: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """Apply a function of registers, vectors of float32 that it maps to vectors of `dtype`, to all those of arrays."""

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(operands),
        return_type=plgpu.ShapeDtypeStruct(operands[0].shape, dtype, layout=layout),
    )
    def apply(_: Any, first: Any, *others: Any) -> Any:
        return first._pointwise(function, *others, output_is_signed=mgpu.utils.is_signed(dtype))

    return apply(*(plgpu.layout_cast(operand, layout) for operand in operands))


def _instruction(name: str) -> Callable[..., ir.Value]:
    """A PTX instruction of float32 operands as a function of vectors; the first type in its name is the result's."""
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
