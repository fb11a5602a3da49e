"""Operators that bind primitives at once compute what jax's do, and only while a kernel is traced."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from pallas_attn import kernel_cache
from pallas_attn.mosaic.faster_lowering import REPLACEMENTS
from pallas_attn.mosaic.faster_tracing import OPERATORS

BY_NAME: dict[str, Callable[[Any, Any], Any]] = {
    **{f"_{name}": getattr(operator, name) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")},
    **{f"_r{name}": (lambda x, y, name=name: getattr(operator, name)(y, x)) for name in ("add", "sub", "mul")},
    "_and": operator.and_,
    "_or": operator.or_,
    "_rshift": operator.rshift,
}
OPERANDS: dict[str, Any] = {
    "int32": np.array([-7, 0, 5], np.int32),
    "uint32": np.array([7, 0, 2**32 - 5], np.uint32),
    "float32": np.array([-0.5, np.nan, 3.0], np.float32),
    "bfloat16": jnp.array([1, 2, 3], jnp.bfloat16),
    "bool": np.array([True, False, True]),
    "int32 []": np.int32(3),
    "float32 []": np.float32(-2.5),
    "2": 2,
    "2**24 + 1": 2**24 + 1,
    "0.1": 0.1,
    "True": True,
}
ARRAYS = tuple(name for name, operand in OPERANDS.items() if isinstance(operand, np.generic | np.ndarray | jax.Array))


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets our operators and our `jnp.where`."""
    for replacement in REPLACEMENTS:
        if replacement.name in OPERATORS or replacement.name == "where":
            monkeypatch.setattr(replacement.place, replacement.name, replacement.make(replacement.original))


def traced(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """Jaxpr of a function of the arrays among its operands; the type of what is raised."""
    is_array = [isinstance(operand, np.generic | np.ndarray | jax.Array) for operand in operands]

    def of_arrays(*arrays: Any) -> Any:
        left = iter(arrays)
        return function(*(next(left) if flag else x for x, flag in zip(operands, is_array, strict=True)))

    try:
        return jax.make_jaxpr(of_arrays)(*(x for x, flag in zip(operands, is_array, strict=True) if flag))
    except (TypeError, ValueError, OverflowError) as error:
        return type(error)


def check_same(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """Check that results have the same types and bits while a kernel is traced; return that jaxpr."""
    theirs = traced(function, operands)
    with kernel_cache._marked():
        mine = traced(function, operands)
    if isinstance(theirs, type):
        assert mine is theirs
        return mine
    assert mine.out_avals == theirs.out_avals
    if str(mine) == str(theirs):
        return mine
    arrays = [x for x in operands if isinstance(x, np.generic | np.ndarray | jax.Array)]
    got, want = (np.asarray(jaxpr_as_fun(jaxpr)(*arrays)[0]) for jaxpr in (mine, theirs))
    np.testing.assert_array_equal(np.atleast_1d(got).view(np.uint8), np.atleast_1d(want).view(np.uint8))
    return mine


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compute_the_same(name: str) -> None:
    for first, second in itertools.product(ARRAYS, OPERANDS):
        check_same(BY_NAME[name], (OPERANDS[first], OPERANDS[second]))


@pytest.mark.usefixtures("ours")
def test_choices_are_the_same() -> None:
    conditions = (OPERANDS["bool"], np.True_, OPERANDS["int32"])
    for condition, first, second in itertools.product(
        conditions, ("int32", "float32", "int32 []", "2", "0.1"), OPERANDS
    ):
        check_same(jnp.where, (condition, OPERANDS[first], OPERANDS[second]))


@pytest.mark.usefixtures("ours")
def test_alike_operands_are_one_equation() -> None:
    x, number = OPERANDS["int32"], 2
    for name, function in BY_NAME.items():
        for other in (x, number):
            assert len(check_same(function, (x, other)).eqns) == 1, name
    choice = check_same(jnp.where, (OPERANDS["bool"], x, x))
    assert [eqn.primitive.name for eqn in choice.eqns] == ["select_n"]


@pytest.mark.usefixtures("ours")
def test_elsewhere_operators_are_those_of_jax() -> None:
    choice = traced(jnp.where, (OPERANDS["bool"], OPERANDS["int32"], OPERANDS["int32"]))
    assert [eqn.primitive.name for eqn in choice.eqns] == ["jit"]
