"""Trace kernels faster: operators and `jnp.where` of alike arrays are one primitive each, without the `jit` around.

jax has a function that it jits for each operator and for `jnp.where`, and calls 150 to 330 functions to inline it, or
makes an equation of it, which is lowered by itself. Where operands have the same type, or one of them is a Python
number, the primitive is bound at once. That holds while a kernel is traced for `kernel_cache`, and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax._src import core

from pallas_attn import kernel_cache

NUMBERS = frozenset(map(np.dtype, ("int32", "uint32", "float32")))
BITS = frozenset(map(np.dtype, ("int32", "uint32", "bool")))

INTEGERS = frozenset({np.dtype("int32")})

FLOAT32 = np.dtype("float32")
EXACT = {np.dtype("int32"): (-(2**31), 2**31 - 1), FLOAT32: (-(2**24), 2**24)}
"""Least and largest of the whole numbers that arrays of a dtype hold exactly."""


def _type(x: Any, dtypes: frozenset[Any]) -> core.ShapedArray | None:
    """Type of a traced array of one of these dtypes; None for anything else, and where its dtype is weak."""
    if not isinstance(x, core.Tracer):
        return None
    aval = x.aval
    return aval if type(aval) is core.ShapedArray and aval.dtype in dtypes and not aval.weak_type else None


def _is_number_of(x: Any, dtype: Any) -> bool:
    """Whether a Python number is converted to an array of this dtype when it meets one."""
    if type(x) is int:
        least, most = EXACT.get(dtype, (0, -1))
        return least <= x <= most
    return type(x) is float and dtype == FLOAT32


def binding(
    bind: Callable[[Any, Any], Any], dtypes: frozenset[Any], swapped: bool
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that makes of an operator of traced arrays one that binds its primitive for alike operands.

    Args:
      bind: function of `lax`.
      dtypes: of the operands.
      swapped: whether it is the operator of the right operand.
    """

    def make(operator: Callable[..., Any]) -> Any:
        @functools.wraps(operator)
        def operate(own: Any, other: Any) -> Any:
            if kernel_cache.is_lowering() and (aval := _type(own, dtypes)) is not None:
                alike = _type(other, dtypes) == aval
                if not alike and _is_number_of(other, aval.dtype):
                    other, alike = (float(other) if aval.dtype == FLOAT32 else other), True
                if alike:
                    return bind(other, own) if swapped else bind(own, other)
            return operator(own, other)

        return staticmethod(operate)

    return make


def selecting(where: Callable[..., Any]) -> Callable[..., Any]:
    """`jnp.where` that is one primitive where condition and choices have the same shape, or are numbers."""

    @functools.wraps(where)
    def select(condition: Any, x: Any = None, y: Any = None, /, **more: Any) -> Any:
        if not kernel_cache.is_lowering() or more or x is None or y is None:
            return where(condition, x, y, **more)
        is_true = _type(condition, BITS)
        one, two = _type(x, NUMBERS), _type(y, NUMBERS)
        aval = one or two
        if aval is None or is_true is None or is_true.dtype != bool or is_true.shape != aval.shape:
            return where(condition, x, y)
        choices = []
        for choice, own in ((y, two), (x, one)):
            if own is None and _is_number_of(choice, aval.dtype):
                choices.append(lax.full(aval.shape, choice, aval.dtype) if aval.shape else aval.dtype.type(choice))
            elif own == aval:
                choices.append(choice)
            else:
                return where(condition, x, y)
        return lax.select_n_p.bind(condition, *choices)

    return select


OPERATORS: dict[str, tuple[str, Callable[[Any, Any], Any], frozenset[Any], bool]] = {
    "_add": (
        "17f8d37a74ed7de881deed37283e7daaaa01d85b817c6ef8d5f91b190a3a9171",
        lax.add,
        NUMBERS,
        False,
    ),
    "_radd": (
        "bfebfca6092ebd21e81283258d5b9025a9c244bb038ba50ebda993fa7b6127c0",
        lax.add,
        NUMBERS,
        True,
    ),
    "_sub": (
        "4971edb25cab8a52d2ca3e7339435c0e204185ec42fc5236dcf5589e7a2e03e8",
        lax.sub,
        NUMBERS,
        False,
    ),
    "_rsub": (
        "3a3f346aa19255b3f8828b29e011f01a2b13f223ae3d894aa660dd67854ea7bd",
        lax.sub,
        NUMBERS,
        True,
    ),
    "_mul": (
        "ba70852f39c089e531689f8790191ac163af85766741d9189c62fa77d7d8344e",
        lax.mul,
        NUMBERS,
        False,
    ),
    "_rmul": (
        "2e72e8ef919ac1c3508894d7b13f1499e8dde2787b743caa4e3923f6babb502c",
        lax.mul,
        NUMBERS,
        True,
    ),
    "_lt": (
        "dee4edc4fa0e3031d36f49d258d2b6c31a405a7f7bbf55d1d59082d29f6770d6",
        lax.lt,
        NUMBERS,
        False,
    ),
    "_le": (
        "4bd7037181c320e8d625ee824f56d04c616f58f1a86acd112b0b1684b0d0a547",
        lax.le,
        NUMBERS,
        False,
    ),
    "_gt": (
        "2dca4fe5c9d5d36bb30620b2f1c5749aab3ff67024dea5d1482de23653e75452",
        lax.gt,
        NUMBERS,
        False,
    ),
    "_ge": (
        "146b757bcb9058da657d3b6a2f60c71cb711c479f1689dbebdb6b601ffe208d1",
        lax.ge,
        NUMBERS,
        False,
    ),
    "_eq": (
        "d5b6a5b1260f406bdd216159daaf8c6c4a7821116135fd512ef13e7ec9a88506",
        lax.eq,
        NUMBERS,
        False,
    ),
    "_ne": (
        "831540d8a486700eef709687ab8974ec741eb32384ca9a61c82a647b45648e6a",
        lax.ne,
        NUMBERS,
        False,
    ),
    "_and": (
        "6d9cb4b9d0b01cebee7adcf378a55cd6fc14456e8db944e889327c02c562e834",
        lax.bitwise_and,
        BITS,
        False,
    ),
    "_or": (
        "f54816e207186e136128464d7cf3f39c1dd9b6677d91d5fd4e6068466ecfbdfb",
        lax.bitwise_or,
        BITS,
        False,
    ),
    "_rshift": (
        "9951094da80166f583bc5848bd9e09dd0d47dc415c4d3051a9c328501f5191a7",
        lax.shift_right_arithmetic,
        INTEGERS,
        False,
    ),
}
"""By attribute of the type of arrays: SHA-256 of its source, the primitive's function, the dtypes, and whether operands
are swapped.
"""
