"""Soft cap of scores in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.basics import LOG2E


def soft_capped(s: jax.Array, scale: float, soft_cap: float, reciprocal: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Compute soft_cap * tanh(scale * s / soft_cap). `reciprocal` computes 1 / x for registers with the layout of s."""
    # Use tanh x = 1 - 2 / (1 + exp 2x). The instruction tanh.approx has only 11 bits of precision, and the accurate
    # tanh of the math library takes too many registers.
    return soft_cap - 2 * soft_cap * reciprocal(1 + jnp.exp2(s * (2 * LOG2E * scale / soft_cap)))


def reciprocal_of_pairs(x: jax.Array, layout: plgpu.Layout) -> jax.Array:
    """Compute 1 / x, for float32 x whose registers are pairs, with the instruction rcp.approx.ftz. It returns 0 instead
    of subnormal results. A division would take three more instructions to handle subnormals.
    """
    if basics.interpreted():
        return 1 / x

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout))
    def invert(_: Any, x: Any) -> Any:
        f32, inverted = ir.F32Type.get(), np.empty_like(x.registers)
        for index, pair in np.ndenumerate(x.registers):
            numbers = [vector.extract(pair, [], [i]) for i in range(pair.type.shape[0])]
            inverses: Any = [llvm.inline_asm(f32, [number], "rcp.approx.ftz.f32 $0, $1;", "=f,f") for number in numbers]
            inverted[index] = vector.from_elements(pair.type, inverses)
        return mgpu.FragmentedArray(_registers=inverted, _layout=x.layout, _is_signed=None)

    return invert(x)
