"""Tests of the arithmetic of quantised caches: results equal numpy bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.portable.quantise import amax_scale, dequantise, divide, held_scale, quantise, rounded_to_float8
from tests.kit.harness import assert_same_bits, fresh_rng
from tests.ops.write_kv_case import QMAX, numpy_quantise

each_dtype = pytest.mark.parametrize("dtype", list(QMAX))
eager_and_jitted = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jitted"])


def f32(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def run(compiled: bool, f: Callable[..., Any], *args: Any, **static: Any) -> np.ndarray:
    f = functools.partial(f, **static)
    return np.asarray((jax.jit(f) if compiled else f)(*map(jnp.asarray, args)))


@eager_and_jitted
@pytest.mark.parametrize("shape", [(500, 64), (500, 1), (1, 64), (1, 1)])
def test_divide_rounds_once(compiled: bool, shape: tuple[int, ...]) -> None:
    """Without a countermeasure, XLA replaces division by a broadcast value by multiplication with its reciprocal, which
    rounds twice.
    """
    rng = fresh_rng()
    x, y = rng.standard_normal((500, 64), np.float32), np.exp(rng.standard_normal(shape, np.float32))
    assert (x * (1 / y) != x / y).any()
    assert_same_bits(run(compiled, divide, x, y), x / y)


@eager_and_jitted
@each_dtype
def test_quantise_divides_saturates_and_rounds_half_to_even(dtype: str, compiled: bool) -> None:
    rng = fresh_rng()
    x = (rng.standard_normal((500, 64)) * 10.0 ** rng.uniform(-4, 4, (500, 1))).astype(np.float32)
    x[0], x[1], x[2] = np.inf, -np.inf, 3e38
    scale = (10.0 ** rng.uniform(-4, 1, (500, 1))).astype(np.float32)
    got = run(compiled, quantise, x, scale, dtype=dtype)
    assert_same_bits(got, numpy_quantise(x, scale, dtype))
    assert (np.abs(got[:3].astype(np.float32)) == QMAX[dtype]).all()
    ties = np.arange(-16000, 16000, dtype=np.float32).reshape(500, 64) / 32
    assert_same_bits(run(compiled, quantise, ties, np.ones_like(scale), dtype=dtype), numpy_quantise(ties, 1, dtype))


@eager_and_jitted
@pytest.mark.parametrize("dtype", [name for name in QMAX if name != "int8"])
def test_rounded_to_float8_equals_a_round_trip(dtype: str, compiled: bool) -> None:
    """The inputs are all float16 numbers. They include all ties between float8 numbers, infinities and NaN."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        want = np.clip(x, -QMAX[dtype], QMAX[dtype]).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(run(compiled, rounded_to_float8, x, dtype=dtype), want)


@eager_and_jitted
@each_dtype
def test_amax_scale_is_the_rounded_quotient_or_1(dtype: str, compiled: bool) -> None:
    amax = np.concatenate([np.abs(fresh_rng().standard_normal(1000)), [3e38, 0.0, 1e-42]]).astype(np.float32)
    want = np.where(np.arange(1003) < 1001, amax / QMAX[dtype], np.float32(1))
    assert_same_bits(run(compiled, amax_scale, amax, dtype=dtype), want)


@each_dtype
def test_amax_scale_has_a_lower_bound(dtype: str) -> None:
    amax, least = jnp.asarray([QMAX[dtype], 0, 0]), jnp.asarray([0.5, 0.5, 0])
    np.testing.assert_array_equal(amax_scale(amax, dtype, at_least=least), f32([1, 0.5, 1]))


@eager_and_jitted
@each_dtype
def test_held_scale_of_full_groups_and_of_zeros(dtype: str, compiled: bool) -> None:
    scale = f32([0.3, 0.3, 1.0, np.nan])
    got = run(compiled, held_scale, f32([QMAX[dtype], QMAX[dtype] / 4, 0, 0]), scale, dtype=dtype)
    assert got[0] == scale[0]
    np.testing.assert_allclose(got[1:], f32([0.075, 0, 0]), rtol=1e-6)


@each_dtype
def test_dequantise_multiplies_in_float32(dtype: str) -> None:
    values = f32([-96, 3, 0, 112])
    got = dequantise(jnp.asarray(values).astype(dtype), jnp.full((4,), 0.1, jnp.float32))
    assert_same_bits(got, values * np.float32(0.1))


@each_dtype
def test_requantisation_with_the_same_scale_changes_no_bits(dtype: str) -> None:
    """When a token is added to a group of tokens whose scale does not change, the earlier tokens keep their bits."""
    finite = jnp.asarray(np.arange(-127, 128), dtype)
    scale = jnp.exp(jnp.asarray(fresh_rng().standard_normal((1000, 1), np.float32)))
    read = jax.jit(dequantise)(jnp.broadcast_to(finite, (1000, 255)), scale)
    assert_same_bits(jax.jit(quantise, static_argnums=2)(read, scale, dtype), np.broadcast_to(finite, (1000, 255)))
