"""Tests of the numpy evaluator of jaxprs: its results equal the results of XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.kit.numpy_evaluator import evaluate

I32, U32, F32, BF16, F8 = jnp.int32, jnp.uint32, jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
INTS = jnp.array([-(2**31), -7, -2, -1, 0, 1, 2, 7, 33, 2**31 - 1], I32)
FLOATS = jnp.array([-jnp.inf, -3e9, -2.5, -0.0, 0.0, 0.3, 2.5, 448.0, 3e9, jnp.inf, jnp.nan], F32)
GRID = jnp.arange(24, dtype=F32).reshape(2, 3, 4)

CASES: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "quotients of integers": lambda: (lambda x: (lax.div(x, I32(3)), lax.div(x, I32(-2))), (INTS[1:],)),
    "remainders": lambda: (lambda x: (lax.rem(x, I32(3)), x % I32(-2), x // I32(4)), (INTS[1:],)),
    "remainders of floats": lambda: (lambda x: (lax.rem(x, F32(1.5)), x % F32(-1.5)), (FLOATS[2:9],)),
    "sums that wrap": lambda: (lambda x: (x + INTS[-1], x * I32(3), -x), (INTS,)),
    "sums with products": lambda: (
        lambda x, y: (x * y + F32(1), F32(1) - x * y, x * y - x * x),
        (F32(1) + 2.0 ** -jnp.arange(10, 14, dtype=F32), F32(1) - 2.0 ** -jnp.arange(10, 14, dtype=F32)),
    ),
    "shifts": lambda: (
        lambda x, by: (x << by, lax.shift_right_logical(x, by), lax.shift_right_arithmetic(x, by)),
        (INTS, jnp.array([0, 1, 5, 31, 32, 33, 40, 2, 1, 30], I32)),
    ),
    "bits": lambda: (
        lambda x: (x & I32(12), x | I32(5), x ^ I32(-1), ~x, lax.population_count(x), lax.clz(x)),
        (INTS,),
    ),
    "floats as integers": lambda: (lambda x: (x.astype(I32), x.astype(jnp.int8), x.astype(bool)), (FLOATS,)),
    "narrow floats": lambda: (lambda x: (x.astype(BF16), x.astype(F8), x.astype(BF16).astype(I32)), (FLOATS,)),
    "sums of narrow floats": lambda: (
        lambda x: ((x + x * BF16(0.3)) / BF16(3), x.max(), jnp.where(x > 1, x, -x)),
        (jnp.linspace(-3, 3, 64).astype(BF16),),
    ),
    "bits of floats": lambda: (
        lambda x: (lax.bitcast_convert_type(x, I32), lax.bitcast_convert_type(x.astype(BF16), jnp.uint16)),
        (FLOATS,),
    ),
    "wider bits": lambda: (
        lambda x: lax.bitcast_convert_type(x.reshape(-1, 4), I32),
        (jnp.arange(16, dtype=jnp.int8),),
    ),
    "functions": lambda: (
        lambda x: (jnp.exp(x), jnp.exp2(x), jnp.tanh(x), jnp.log2(x + 9), lax.rsqrt(x + 9), jax.nn.sigmoid(x), x**3),
        (jnp.linspace(-8, 8, 33),),
    ),
    "comparisons of NaN": lambda: (lambda x: (x < 1, x >= 1, x != x, jnp.maximum(x, 1), jnp.isfinite(x)), (FLOATS,)),
    "clamps": lambda: (lambda x: (jnp.clip(x, -1, 2), lax.clamp(F32(0), x, F32(1))), (FLOATS[:-1],)),
    "choices": lambda: (lambda i: lax.select_n(i, INTS[:3], INTS[3:6], INTS[6:9]), (jnp.array([2, 0, 1], I32),)),
    "shapes": lambda: (
        lambda x: (x.T, x.reshape(6, 4)[::2, 1:], x[:, None, :, ::-1], jnp.concatenate([x, x], 1), x[0, :, 3]),
        (GRID,),
    ),
    "padding": lambda: (
        lambda x: (jnp.pad(x, ((0, 1), (2, 0), (0, 0))), lax.pad(x, F32(1), ((0, 0, 1), (-1, 0, 0), (0, 0, 0)))),
        (GRID,),
    ),
    "slices that start outside": lambda: (
        lambda x, i: (lax.dynamic_slice(x, (i, -i, 0), (1, 2, 4)), lax.dynamic_update_slice(x, x[:1, :2], (i, i, i))),
        (GRID, jnp.array(5, I32)),
    ),
    "gathered rows": lambda: (lambda x, i: (x[i], x.at[i].set(1.0)), (GRID[0], jnp.array([2, 0, 2], I32))),
    "iotas": lambda: (lambda x: (lax.broadcasted_iota(I32, (3, 4), 1) + x, jnp.arange(5, dtype=F32)), (I32(2),)),
    "reductions": lambda: (
        lambda x: (x.sum(1), x.max((0, 2)), x.min(), (x > 3).any(1), (x > 3).all(), x.argmax(1), jnp.prod(x, 0)),
        (GRID,),
    ),
    "sums so far": lambda: (
        lambda x: (jnp.cumsum(x, 1), lax.cumsum(x, axis=2, reverse=True), lax.cummax(-x, axis=1)),
        (GRID,),
    ),
    "products": lambda: (
        lambda x, y: (jnp.einsum("bij,bkj->bik", x, y), jnp.einsum("bij,kj->ki", x, y[0]), x[0] @ y[0].T),
        (GRID, GRID - 4),
    ),
    "products of narrow floats": lambda: (
        lambda x, y: (x @ y, jnp.dot(x, y, preferred_element_type=F32)),
        (jnp.ones((4, 8), BF16) * BF16(0.3), jnp.ones((8, 3), BF16)),
    ),
    "loops": lambda: (
        lambda n, x: (
            lax.fori_loop(0, n, lambda i, y: y * 2 + i, x),
            lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + x), (I32(0), x)),
            lax.fori_loop(0, 3, lambda i, y: y + i, x),
        ),
        (I32(4), I32(3)),
    ),
    "scans": lambda: (
        lambda x, k: (
            lax.scan(lambda c, row: (c + row.sum(), row * k + c), F32(0), x),
            lax.scan(lambda c, row: (c + row[0], (c, row)), F32(0), x, reverse=True),
        ),
        (GRID[0], F32(2)),
    ),
    "branches": lambda: (
        lambda i, x: (
            lax.switch(i, [lambda x: x, lambda x: x + 1, lambda x: x * 3], x),
            lax.cond(i > 1, jnp.sin, jnp.cos, x),
        ),
        (I32(7), F32(2)),
    ),
    "calls": lambda: (lambda x: jax.jit(lambda y: (y + x, jnp.linspace(0, 1, 5)))(x), (F32(2),)),
    "sorted": lambda: (lambda x: (jnp.sort(x), jnp.argsort(x), lax.top_k(x, 3)), (INTS[::-1],)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_equal_xla(name: str) -> None:
    function, args = CASES[name]()
    program = jax.make_jaxpr(function)(*args)
    want = jax.tree.leaves(jax.jit(function)(*args))
    got = evaluate(program, program.consts, args)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        exact = not jnp.issubdtype(theirs.dtype, jnp.floating) or theirs.dtype.itemsize < 4
        wide = [np.asarray(x).astype(np.float64) for x in (mine, theirs)]
        np.testing.assert_allclose(*wide, rtol=0 if exact else 2e-6, atol=0 if exact else 1e-6)


def test_multiply_add_is_rounded_once() -> None:
    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y - F32(1)

    factors = F32(1) + F32(2**-13), F32(1) - F32(2**-13)
    assert evaluate(jax.make_jaxpr(function)(*factors), (), factors) == [-(2**-26)]


def test_callbacks_get_copies() -> None:
    """The callback overwrites the array that an earlier call returned. Earlier arguments and results must not change,
    so the evaluator has to copy them.
    """
    arguments = []
    memory = np.zeros(3, np.float32)

    def write(x: np.ndarray) -> np.ndarray:
        arguments.append(x)
        memory[:] = x
        return memory

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = jax.ShapeDtypeStruct((3,), F32)
        first = jax.experimental.io_callback(write, shape, x)
        return first, jax.experimental.io_callback(write, shape, first + 1)

    program = jax.make_jaxpr(function)(jnp.ones(3))
    first, second = evaluate(program, program.consts, [jnp.ones(3)])
    np.testing.assert_array_equal(first, np.ones(3))
    np.testing.assert_array_equal(second, np.full(3, 2))
    assert all(x.flags.owndata for x in arguments)
