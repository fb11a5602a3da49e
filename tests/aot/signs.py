"""Check that kernels lowered with lane semantics have integer values whose signedness matches their dtype."""

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
        for value, aval in zip(values, ctx.avals_out, strict=False):  # a store returns None
            if isinstance(value, FragmentedArray) and jnp.issubdtype(aval.dtype, jnp.integer):
                signed = jnp.issubdtype(aval.dtype, jnp.signedinteger)
                assert value.is_signed is signed, f"{primitive}: {aval} is lowered with is_signed={value.is_signed}"
        return lowered

    return lower


def check() -> None:
    """Check all kernels that this process lowers from now on. Call this after the patches of jax are applied."""
    rules = lowering.mosaic_lowering_rules[gpu_core.LANExWG_SEMANTICS]
    rules.update({primitive: checked(primitive, rule) for primitive, rule in rules.items()})
