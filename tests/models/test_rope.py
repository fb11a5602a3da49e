"""Rotary embedding compared with complex numbers, and scaled frequencies compared with loops."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import GQA_PRESETS, PRESETS, Llama3RopeConfig, YarnConfig
from models.decoder import rope
from tests.models import oracle

PLAIN = dataclasses.replace(PRESETS["v3-tiny"], yarn=None)
V2_LITE = PRESETS["v2-lite"]


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        PRESETS["v3-tiny"],
        V2_LITE,
        dataclasses.replace(V2_LITE, yarn=YarnConfig(factor=4.0, original_max_position_embeddings=99, truncate=False)),
        dataclasses.replace(V2_LITE, rope_theta=500.0, qk_rope_head_dim=6),
    ],
    ids=["plain", "v3-tiny", "v2-lite", "not truncated", "narrow"],
)
def test_frequencies(config):
    np.testing.assert_allclose(rope.inverse_frequencies(config), oracle.frequencies(config), rtol=1e-6)


def test_yarn_divides_only_low_frequencies():
    plain = rope.inverse_frequencies(dataclasses.replace(V2_LITE, yarn=None))
    stretched = rope.inverse_frequencies(V2_LITE)
    np.testing.assert_array_equal(stretched[:10], plain[:10])
    np.testing.assert_allclose(stretched[24:], plain[24:] / 40, rtol=1e-6)
    assert np.all(np.diff(stretched) < 0)


def test_llama3_divides_only_low_frequencies():
    """Frequencies equal a computation per pair from wavelengths, as in the published code."""
    scaling = Llama3RopeConfig(8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    config = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], head_dim=128, rope_theta=5e5, rope_scaling=scaling)
    wanted = []
    for i in range(64):
        frequency = 5e5 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        blend = (8192 / wavelength - 1) / (4 - 1)
        if wavelength < 8192 / 4:
            wanted.append(frequency)
        elif wavelength > 8192 / 1:
            wanted.append(frequency / 8)
        else:
            wanted.append((1 - blend) * frequency / 8 + blend * frequency)
    np.testing.assert_allclose(rope.inverse_frequencies(config), wanted, rtol=1e-6)
    cos, _ = rope.rope_table(config, jnp.zeros(1, jnp.int32))
    np.testing.assert_array_equal(cos, np.ones((1, 64)))


def test_rotation_equals_complex_product(rng):
    config, length = PRESETS["v3-tiny"], 70
    width = config.qk_rope_head_dim
    x = rng.standard_normal((length, 3, width))
    cos, sin = rope.rope_table(config, jnp.arange(length, dtype=jnp.int32))
    halves = jnp.asarray(x[..., rope.halves_order(width)], jnp.float32)
    np.testing.assert_allclose(rope.rotate(halves, cos, sin), oracle.turn(config, x), atol=1e-5)


def test_scores_depend_only_on_distance(rng):
    config = PRESETS["v3-tiny"]
    q, k = (jnp.asarray(rng.standard_normal((1, config.qk_rope_head_dim)), jnp.float32) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rope.rotate(x, *rope.rope_table(config, jnp.asarray([p], jnp.int32)))
            for x, p in ((q, query_position), (k, key_position))
        ]
        return float(jnp.vdot(*turned))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 8)) > 1e-2


def test_computes_in_float32_and_returns_input_dtype(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.bfloat16)
    cos, sin = (jnp.asarray(rng.standard_normal((4, 4)), jnp.float32) for _ in range(2))
    exact = rope.rotate(x.astype(jnp.float32), cos, sin)
    turned = rope.rotate(x, cos, sin)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))


def test_halves_order():
    np.testing.assert_array_equal(rope.halves_order(8), [0, 2, 4, 6, 1, 3, 5, 7])
