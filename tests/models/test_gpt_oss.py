"""gpt-oss: reading a config.json, errors of invalid files, and checkpoints with packed experts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pallas_attn import FULL
from pallas_attn.models.checkpoints import CheckpointError, count_parameters, load_model
from pallas_attn.models.checkpoints.files import open_checkpoint
from pallas_attn.models.config import (
    GQA_PRESETS,
    CacheGroup,
    GQAConfig,
    HeadWindows,
    YarnConfig,
    cache_groups,
    read_config,
)
from pallas_attn.models.decoder.gqa import GQA
from pallas_attn.models.moe.layer import BiasedMoE

GOLDENS = Path(__file__).parents[1] / "goldens"
TINY = GQA_PRESETS["gpt-oss-tiny"]

# config.json of openai/gpt-oss-20b, without entries for training and conversion.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_published_gpt_oss_config():
    config = read_config(PUBLISHED)
    assert isinstance(config, GQAConfig)
    assert config.learned_sinks
    assert not config.qk_norm
    assert not config.is_dense(0)
    assert config.mxfp4_experts
    assert config.dtype == "bfloat16"
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    assert config.rope_scaling == YarnConfig(32.0, 4096, truncate=False)
    assert cache_groups(config) == (CacheGroup(128, tuple(range(0, 24, 2))), CacheGroup(None, tuple(range(1, 24, 2))))
    assert count_parameters(config) == 20_914_757_184
    assert config == dataclasses.replace(GQA_PRESETS["gpt-oss-20b"], mxfp4_experts=True)
    assert read_config(json.loads(json.dumps(config.to_hf()))) == config


def test_layers_alternate_by_default():
    entries = {name: value for name, value in PUBLISHED.items() if name != "layer_types"}
    assert read_config(entries) == read_config(PUBLISHED)


WRITTEN = {
    "tiny": TINY,
    "without windows": dataclasses.replace(TINY, windows=None),
    "told that no layer has one": dataclasses.replace(TINY, windows=(None,) * 4),
    "windows of heads": dataclasses.replace(TINY, windows=(HeadWindows((3, FULL), (0, 1)), 8, None, 8)),
    "plain rope, packed": dataclasses.replace(TINY, rope_scaling=None, mxfp4_experts=True),
}


@pytest.mark.parametrize("config", WRITTEN.values(), ids=WRITTEN)
def test_json_round_trip(config: GQAConfig):
    assert read_config(json.loads(json.dumps(config.to_hf()))) == config


def test_old_and_new_keys_give_equal_configs():
    files = ("config.json", "config_published.json")
    new, old = (read_config(json.loads((GOLDENS / "gpt-oss" / name).read_text())) for name in files)
    assert new == old


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rope_theta_outside_rope_scaling(name):
    scaling = {**PUBLISHED["rope_scaling"], "rope_theta": 150000}
    assert read_config({**PUBLISHED, "rope_scaling": None, "rope_theta": None, name: scaling}) == read_config(PUBLISHED)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_local_experts": None}, "num_local_experts missing"),
        ({"attention_bias": None}, "attention_bias missing"),
        ({"rope_scaling": None}, "rope_parameters missing"),
        ({"rope_theta": None}, "rope_theta missing"),
        ({"num_local_experts": 3}, "num_experts_per_tok: expected at most num_local_experts=3, got 4"),
        ({"num_experts_per_tok": 0, "experts_per_token": None}, "num_experts_per_tok: expected at least 1, got 0"),
        ({"swiglu_limit": 0.0}, "swiglu_limit: expected a positive number, got 0.0"),
        ({"sliding_window": None}, "sliding_window: expected the window of sliding_attention layers, got None"),
        ({"hidden_size": 2872}, "expected multiples of 32 for MXFP4, got 2872 and 2880"),
    ],
)
def test_invalid_entries_raise(entries: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read_config({**PUBLISHED, **entries})


def test_experts_in_other_families_raise():
    with pytest.raises(ValueError, match="num_local_experts: expected none in a llama, got 8"):
        dataclasses.replace(TINY, model_type="llama")


JUNK = (None, "x", "", -1, 0, 1.5, True, [], [1], {}, {"type": []}, {"x": {}})


@pytest.mark.parametrize("name", PUBLISHED)
def test_arbitrary_entries_raise_only_value_errors(name: str):
    for junk in JUNK:
        try:
            config = read_config({**PUBLISHED, name: junk})
        except (ValueError, NotImplementedError):
            continue
        assert read_config(config.to_hf()) == config


# --- packed experts


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    shutil.copytree(GOLDENS / "gpt-oss-mxfp4", tmp_path / "model")
    return tmp_path / "model"


def rewrite(directory: Path, **changes: np.ndarray | None) -> None:
    """Add, replace or remove (None) tensors of a checkpoint."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, directory / "model.safetensors")


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def test_packed_experts_are_dequantised(packed: Path):
    checkpoint = open_checkpoint(packed)
    experts = checkpoint.read(EXPERTS)
    assert (experts.dtype, experts.shape) == (ml_dtypes.bfloat16, (8, 64, 64))
    plain = open_checkpoint(GOLDENS / "gpt-oss").read(EXPERTS)
    assert np.corrcoef(experts.astype(np.float32).ravel(), plain.ravel())[0, 1] > 0.99
    layer = load_model(packed).layers[0]
    assert isinstance(layer.mlp, BiasedMoE)
    assert isinstance(layer.self_attn, GQA)
    assert layer.mlp.gate_up_proj.dtype == jnp.bfloat16
    assert layer.mlp.router.weight.dtype == jnp.float32
    assert layer.self_attn.sinks is not None
    assert layer.self_attn.sinks.dtype == jnp.float32


def test_partly_packed_experts(packed: Path):
    experts = np.ascontiguousarray(open_checkpoint(packed).read(EXPERTS))
    rewrite(packed, **{EXPERTS: experts, f"{EXPERTS}_blocks": None, f"{EXPERTS}_scales": None})
    np.testing.assert_array_equal(open_checkpoint(packed).read(EXPERTS), experts)
    load_model(packed)


def test_misfits_of_packed_experts_are_named(packed: Path):
    tensors = load_file(packed / "model.safetensors")
    wrong = {
        f"{EXPERTS}_scales": None,
        f"{EXPERTS}_blocks": tensors[f"{EXPERTS}_blocks"][:, :, :1].copy(),
        "model.norm.weight": np.ones(64, np.uint8),
    }
    rewrite(packed, **wrong)
    with pytest.raises(CheckpointError) as raised:
        load_model(packed)
    assert f"1 missing: {EXPERTS}_scales" in str(raised.value)
    assert f"1 misshaped: {EXPERTS}_blocks [8, 64, 1, 16] for [8, 64, 2, 16]" in str(raised.value)
    assert "1 of an unsupported dtype: model.norm.weight U8" in str(raised.value)


def test_packed_experts_without_config_raise(packed: Path):
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="experts.down_proj_blocks"):
        load_model(packed)
