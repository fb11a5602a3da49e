"""Correction of a JAX bug that gives wrong numbers in Mosaic GPU kernels with lane semantics (jax 0.11.2 and 0.12.0).

`jnp.where` and `lax.select` are lowered to `FragmentedArray.select(condition, on_true, on_false)`. If `on_true` is one
number for all elements, the result takes its signedness from the condition. The condition has no signedness, so later
operations treat int32 results as uint32. For example, `jnp.maximum(x, 0)` keeps negative values, and comparisons and
quotients of negative values are wrong. Interpreted kernels and kernels with warpgroup semantics do not have the bug.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import FragmentedArray


@functools.cache
def apply() -> None:
    """Correct `FragmentedArray.select` for all kernels that this process lowers from now on, also for kernels of
    others.

    The correction cannot be limited to a `with` block: unless a kernel is in this package's kernel cache, JAX lowers it
    later, when it compiles the user's program. `PALLAS_ATTN_PATCH_JAX=0` does not disable the correction.
    """
    FragmentedArray.select = keeping_sign(FragmentedArray.select)


def keeping_sign(select: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `select` whose result has the signedness of `on_true`.

    Wraps `FragmentedArray.select` (jax 0.11.2).
    """

    @functools.wraps(select)
    def choose(condition: Any, on_true: Any, on_false: Any) -> Any:
        chosen = select(condition, on_true, on_false)
        if chosen.is_signed is on_true.is_signed:
            return chosen
        return FragmentedArray(_registers=chosen.registers, _layout=chosen.layout, _is_signed=on_true.is_signed)

    return choose
