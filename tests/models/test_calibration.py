"""Calibrated scales compared with scales of the keys and values that Hugging Face transformers caches, and errors."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_kv_scales, load_model, random_model, save_kv_scales
from pallas_attn.models.checkpoints.calibration import calibrate
from pallas_attn.models.config import GQA_PRESETS, PRESETS
from pallas_attn.models.decoder import Decoder, KVScales
from pallas_attn.models.decoder.gqa import GQA
from pallas_attn.models.engine import Decoded, PlainRun, SamplingParams
from tests.kit.slow_cases import slow_cases

GOLDEN = Path(__file__).parents[1] / "goldens" / "qwen3"
TINY = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], num_hidden_layers=1, vocab_size=64)


@functools.cache
def golden() -> tuple[Decoder, list[list[int]]]:
    return load_model(GOLDEN), json.loads((GOLDEN / "prompts.json").read_text())


def golden_scales(axes: tuple[int, ...], qmax: float, percentile: float) -> list[np.ndarray]:
    """Return the scales of the keys and of the values that transformers caches after norm and rope.

    The golden has keys and values [layers, Hkv, T, D] of four prompts. A scale is the percentile over `axes`, maximum
    over the prompts, divided by `qmax`.
    """
    with np.load(GOLDEN / "golden.npz") as arrays:
        return [
            np.max([np.percentile(np.abs(arrays[f"{kind}_{i}"]), percentile, axis=axes) for i in range(4)], axis=0)
            / qmax
            for kind in ("keys", "values")
        ]


@slow_cases("int8-127-channel-axes0-100.0")
@pytest.mark.parametrize(
    ("dtype", "qmax", "layout", "axes", "percentile"),
    [
        ("int8", 127, "channel", (2,), 100.0),
        ("float8_e4m3fn", 448, "head", (2, 3), 100.0),
        # Slow, because the cases above test each layout of scales.
        pytest.param("int8", 127, "channel", (2,), 90.0, marks=pytest.mark.slow),
        pytest.param("int8", 127, "head", (2, 3), 99.0, marks=pytest.mark.slow),
    ],
)
def test_scales_equal_transformers_cache(dtype, qmax, layout, axes, percentile):
    model, prompts = golden()
    scales = calibrate(model, prompts, dtype, layout, percentile)
    for got, wanted in zip(map(np.stack, (scales.k, scales.v)), golden_scales(axes, qmax, percentile), strict=True):
        assert got.dtype == np.float32
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_scales_file_round_trip(tmp_path: Path):
    model, prompts = golden()
    scales = calibrate(model, prompts[1:2], "int8")
    save_kv_scales(tmp_path / "scales.safetensors", scales)
    read = load_kv_scales(tmp_path / "scales.safetensors")
    np.testing.assert_array_equal(read.k, scales.k)
    np.testing.assert_array_equal(read.v, scales.v)


def share_of_tokens(scales: KVScales) -> float:
    """Return the share of the golden's tokens that the model also selects with an int8 cache.

    The input of each step is the golden's token.
    """
    model, prompts = golden()
    plain = PlainRun(model, 24, "int8", scales)
    with np.load(GOLDEN / "golden.npz") as arrays:
        tokens = [arrays[f"tokens_{i}"] for i in range(len(prompts))]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    choices = [plain.choose(Decoded(p, t.tolist(), params)).tokens[:-1] for p, t in zip(prompts, tokens, strict=True)]
    return float(np.mean(np.concatenate(choices) == np.concatenate(tokens)))


@pytest.mark.slow  # slow, because the tests above compare the scales
def test_int8_cache_selects_most_golden_tokens():
    model, prompts = golden()
    scales = calibrate(model, prompts, "int8")
    assert share_of_tokens(scales) > 0.9
    narrow = KVScales(tuple(k / 16 for k in scales.k), tuple(v / 16 for v in scales.v))
    assert share_of_tokens(narrow) < 0.3


def with_values(channel: int, weight: float) -> Decoder:
    """Return a random model whose first layer has only `weight` in one value channel of the last KV head."""
    model = random_model(TINY)
    attention = model.layers[0].self_attn
    assert isinstance(attention, GQA)
    projection = attention.qkv_proj.weight  # [hidden, q, k and v heads x D], values last
    projection[...] = projection[...].at[:, channel - TINY.head_dim].set(weight)
    return model


@pytest.mark.parametrize("percentile", [pytest.param(100.0, marks=pytest.mark.slow), 50.0])
def test_channel_of_zeros_has_scale_1(percentile: float):
    scales = calibrate(with_values(5, 0.0), [[1, 2, 3]], "int8", percentile=percentile)
    assert scales.v[0][-1, 5] == 1
    assert np.all(np.delete(scales.v[0][-1], 5) < 0.2)


@pytest.mark.parametrize("percentile", [100.0, 50.0])
def test_nonfinite_values_raise(percentile: float):
    with pytest.raises(ValueError, match="expected positive finite numbers, v has others"):
        calibrate(with_values(5, jnp.nan), [[1, 2, 3]], "int8", percentile=percentile)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype: expected int8 or float8_e4m3fn, got bfloat16"),
        ({"percentile": 0.0}, "percentile: expected more than 0 and at most 100, got 0.0"),
        ({"percentile": 100.5}, "percentile: .* got 100.5"),
        ({"percentile": float("nan")}, "percentile: .* got nan"),
        ({"prompts": []}, "prompts: expected at least one"),
        ({"prompts": [[1], []]}, "prompt 1: expected 1 to 2560 tokens, got 0"),
        ({"prompts": [[1] * 2561]}, "prompt 0: expected 1 to 2560 tokens, got 2561"),
        ({"prompts": [[1, 64]]}, "prompt 0: expected ids from 0 to 63, got 64"),
        ({"prompts": [[-1]]}, "prompt 0: expected ids from 0 to 63, got -1"),
    ],
)
def test_invalid_arguments_raise(wrong, message):
    with pytest.raises(ValueError, match=message):
        calibrate(random_model(TINY), **{"prompts": [[1]], "dtype": "int8"} | wrong)


def test_unknown_layout_raises(unchecked_shapes):
    with pytest.raises(ValueError, match="layout: expected head or channel, got 'token'"):
        calibrate(random_model(TINY), [[1]], "int8", "token")  # pyrefly: ignore[bad-argument-type]


def test_latent_model_raises():
    with pytest.raises(ValueError, match="a deepseek_v3 caches latents, which have no static scales"):
        calibrate(random_model(PRESETS["v3-tiny"]), [[1]], "int8")
