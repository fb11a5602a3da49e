"""Check that lowered integer values have the signedness of their dtype.

Mosaic GPU represents arrays in registers as `FragmentedArray` with a flag `is_signed`. If the flag of an integer array
is wrong, comparisons, shifts and conversions are compiled for the wrong type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import FragmentedArray


def checked(primitive: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a lowering rule: raise AssertionError if an integer result and its dtype differ in signedness."""

    @functools.wraps(rule)
    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        lowered = rule(ctx, *args, **params)
        values = lowered if isinstance(lowered, (list, tuple)) else [lowered]
        for value, aval in zip(values, ctx.avals_out, strict=False):  # the rule of a store returns no values
            if isinstance(value, FragmentedArray) and jnp.issubdtype(aval.dtype, jnp.integer):
                signed = jnp.issubdtype(aval.dtype, jnp.signedinteger)
                assert value.is_signed is signed, f"{primitive}: {aval} is lowered with is_signed={value.is_signed}"
        return lowered

    return lower


def check() -> None:
    """Wrap all lowering rules of lane semantics, so that all kernels that this process lowers later are checked. Call
    this after the JAX patches are applied, because it wraps the rules that are in effect.
    """
    rules = lowering.mosaic_lowering_rules[gpu_core.LANExWG_SEMANTICS]
    rules.update({primitive: checked(primitive, rule) for primitive, rule in rules.items()})
