"""Correction of a JAX fault that gives wrong numbers in kernels with lane semantics (jax 0.11.2 and 0.12.0).

`FragmentedArray.select` (`jnp.where`, `lax.select`) takes the signedness of its result from the condition if the first
choice is one number for all elements. The condition has no signedness, so int32 results are treated as uint32:
`jnp.maximum(x, 0)` keeps negative values, and comparisons and quotients of negative values are wrong. Interpreted
kernels and kernels with inferred layouts do not have the fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import FragmentedArray


@functools.cache
def apply() -> None:
    """Correct `FragmentedArray.select` in all kernels of this process.

    The correction is not limited to a context: a kernel that is not cached is lowered later, as part of the user's
    program. `PALLAS_ATTN_PATCH_JAX` does not disable it.
    """
    FragmentedArray.select = keeping_sign(FragmentedArray.select)


def keeping_sign(select: Callable[..., Any]) -> Callable[..., Any]:
    """Return `FragmentedArray.select` whose result has the signedness of its choices.

    Wraps `FragmentedArray.select` (jax 0.11.2).
    """

    @functools.wraps(select)
    def choose(condition: Any, on_true: Any, on_false: Any) -> Any:
        chosen = select(condition, on_true, on_false)
        if chosen.is_signed is on_true.is_signed:
            return chosen
        return FragmentedArray(_registers=chosen.registers, _layout=chosen.layout, _is_signed=on_true.is_signed)

    return choose
