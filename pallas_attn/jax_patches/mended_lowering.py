"""Mends a fault of jax by which kernels with lane semantics compute with wrong numbers.

`FragmentedArray.select` (`jnp.where`, `lax.select`) gives what it chose the signedness of the condition, which has
none, where the first choice is one number for all rows. From there on int32 values are taken for uint32:
`jnp.maximum(x, 0)` keeps what is negative, and comparisons and quotients of negative values are wrong. jax 0.11.2 and
0.12.0; kernels that run interpreted or have their layouts inferred don't have it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import FragmentedArray


@functools.cache
def apply() -> None:
    """Has `FragmentedArray.select` keep the sign of what it chooses from, in all kernels of this process."""
    FragmentedArray.select = keeping_sign(FragmentedArray.select)


def keeping_sign(select: Callable[..., Any]) -> Callable[..., Any]:
    """`FragmentedArray.select` whose result is as signed as its choices."""

    @functools.wraps(select)
    def choose(condition: Any, on_true: Any, on_false: Any) -> Any:
        chosen = select(condition, on_true, on_false)
        if chosen.is_signed is on_true.is_signed:
            return chosen
        return FragmentedArray(_registers=chosen.registers, _layout=chosen.layout, _is_signed=on_true.is_signed)

    return choose
