"""Projections with float32 weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.decoder.layers import project, project_split_weights


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["similar magnitudes", "different magnitudes"])
def test_split_weights_have_float32_accuracy(rng, spread: float):
    """Products with float32 weights, split into three bfloat16 parts, have the accuracy of float32 sums.

    With two bfloat16 parts per weight, errors would exceed the bound.
    """
    x = jnp.asarray(rng.standard_normal((5, 96)), jnp.bfloat16)
    weight = (rng.standard_normal((96, 7)) * np.exp(spread * rng.uniform(-1, 1, (96, 7)))).astype(np.float32)
    found = jax.jit(project_split_weights)(x, jnp.asarray(weight))
    assert found.dtype == jnp.float32
    rows = np.asarray(x, np.float64)
    bound = 1e-6 * np.abs(rows) @ np.abs(weight)
    assert (np.abs(np.asarray(found) - rows @ weight.astype(np.float64)) <= bound).all()


def test_three_parts_represent_a_weight_exactly():
    """A product with 1.0 returns all 24 bits of each float32 weight."""
    weight = np.nextafter(np.array([[1.0, -3.0, 1e-20, 1e20]], np.float32), np.float32(np.inf))
    found = project_split_weights(jnp.ones((1, 1), jnp.bfloat16), jnp.asarray(weight))
    np.testing.assert_array_equal(np.asarray(found), weight)


def test_float32_weights_use_float32():
    x, weight = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.float32)
    assert project(x, weight).dtype == jnp.float32
    assert project(x, weight.astype(jnp.bfloat16)).dtype == jnp.bfloat16
