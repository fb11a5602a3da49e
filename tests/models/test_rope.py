"""Rotary embedding compared with complex numbers, and scaled frequencies compared with loops."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.config import GQA_PRESETS, PRESETS, Llama3RopeConfig, YarnConfig, read_config
from pallas_attn.models.decoder import rope
from tests.models import oracle

PLAIN = dataclasses.replace(PRESETS["v3-tiny"], yarn=None)
V2_LITE = PRESETS["v2-lite"]
GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "rope.json").read_text())
"""Entries of a config.json and the results of transformers 5.23, written by scripts/tools/rope_goldens.py."""


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


SUPPORTED = {"default": {*GOLDEN["families"]}, "yarn": {*GOLDEN["families"]}, "llama3": {"llama", "qwen3", "gpt_oss"}}
"""Model families that support each rope type."""


@pytest.mark.parametrize(("family", "base"), GOLDEN["families"].items(), ids=[*GOLDEN["families"]])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=[case["case"] for case in GOLDEN["cases"]])
def test_entries_give_the_numbers_of_transformers(case, family: str, base):
    """The same entries of config.json give the same numbers as in transformers 5.23.

    The numbers are the frequencies, the factor of cosines and sines, and the factor of attention scores.
    """
    entries = {**base, **case["entries"]}
    kind = case["case"].partition(",")[0]
    if family not in SUPPORTED.get(kind, ()):
        with pytest.raises(NotImplementedError, match=f"rope type '{kind}': expected default or yarn"):
            read_config(entries)
        return
    [wanted] = (result for result in case["results"] if family in result["families"])
    config = read_config(entries)
    np.testing.assert_allclose(rope.inverse_frequencies(config), wanted["inv_freq"], rtol=1e-5)
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.rotary_scale
    assert (factor, config.sm_scale) == pytest.approx((wanted["attention_factor"], wanted["scale"]), rel=1e-6)
    assert read_config(config.to_hf()) == config


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 100.0}},
            "rope_theta: config.json gives 100.0 and 500",
        ),
        (
            {"rope_scaling": {"rope_theta": 500.0}, "rope_parameters": {"rope_theta": 100.0}},
            "rope_theta: config.json gives",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}},
            "rope_scaling and rope_parameters: expected equal entries, got factor: 4.0 and 8.0",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "beta_fast": 8.0}},
            "rope_scaling and rope_parameters: expected equal entries, got beta_fast: None and 8.0",
        ),
        (
            {"rope_scaling": {**YARN, "type": "default"}},
            "rope_scaling: type and rope_type contradict each other: default",
        ),
        ({"rope_scaling": {**YARN, "beta_quick": 8}}, "rope type yarn: expected one of factor, .*, got beta_quick: 8"),
        (
            {"rope_scaling": {**YARN, "low_freq_factor": 1.0}},
            "rope type yarn: expected one of .*, got low_freq_factor: 1",
        ),
        ({"rope_scaling": {"factor": 4.0}}, "rope type default: expected no further entry, got factor: 4.0"),
        (
            {"rope_parameters": {"mrope_section": [4, 2, 2]}, "rope_scaling": None},
            "rope type default: .*, got mrope_section",
        ),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings: expected at",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 0},
            "original_max_position_embeddings: expected at least",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": "64"},
            "original_max_position_embeddings: expected an int",
        ),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor: expected a finite number, got 'half'"),
    ],
)
@pytest.mark.parametrize("family", GOLDEN["families"])
def test_contradicting_and_unknown_entries_raise(family: str, entries, message: str):
    base = {**GOLDEN["families"][family], "rope_theta": 500.0, "rope_scaling": {"type": "default"}}
    with pytest.raises(ValueError, match=message):
        read_config({**base, **entries})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"rope_scaling": YARN, "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5: expected 1, rotation of all",
        ),
        (
            {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5: expected 1, rotation of all",
        ),
        (
            {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.25: expected 1",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            r"rope_parameters: expected entries for all layers together, got entries for \['full_attention', 's",
        ),
        (
            {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e6}, "sliding_attention": None}},
            "rope_parameters: ",
        ),
        (
            {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 1}},
            "rope type 'proportional': expected",
        ),
    ],
)
@pytest.mark.parametrize("family", GOLDEN["families"])
def test_unsupported_entries_raise(family: str, entries, message: str):
    with pytest.raises(NotImplementedError, match=message):
        read_config({**GOLDEN["families"][family], "rope_theta": 500.0, **entries})


def test_yarn_divides_only_low_frequencies():
    plain = rope.inverse_frequencies(dataclasses.replace(V2_LITE, yarn=None))
    stretched = rope.inverse_frequencies(V2_LITE)
    np.testing.assert_array_equal(stretched[:10], plain[:10])
    np.testing.assert_allclose(stretched[24:], plain[24:] / 40, rtol=1e-6)
    assert np.all(np.diff(stretched) < 0)


def test_llama3_divides_only_low_frequencies():
    """Frequencies equal the published computation from the wavelength of each pair of columns."""
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
