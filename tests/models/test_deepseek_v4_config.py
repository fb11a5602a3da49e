"""Configurations of DeepSeek-V4: published entries, entries of transformers, and unsupported values."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from pallas_attn.models.config import V4_PRESETS, DeepseekV4Config, read_config, require_mtp, with_windows
from pallas_attn.models.config.rope import YarnConfig
from tests.models.test_parity import GOLDENS

PUBLISHED: dict[str, Any] = json.loads((GOLDENS / "v4-published" / "config.json").read_text())
WRITTEN: dict[str, Any] = json.loads((GOLDENS / "v4" / "config.json").read_text())
SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def read(config: dict[str, Any], **changes: Any) -> DeepseekV4Config:
    model = read_config({key: value for key, value in (config | changes).items() if value != "absent"})
    assert isinstance(model, DeepseekV4Config)
    return model


def test_published_entries():
    """The last entry of compress_ratios belongs to a prediction module."""
    config = read(PUBLISHED)
    assert config.layer_types == (SLIDING, HCA, CSA, HCA)
    assert config.mlp_layer_types == ("hash_moe", "moe", "moe", "moe")
    assert [config.rate(layer) for layer in range(4)] == [0, 128, 4, 128]
    assert [config.state_window(layer) for layer in range(4)] == [0, 128, 8, 128]
    assert (config.rope_theta, config.compress_rope_theta, config.qk_rope_head_dim) == (100.0, 500.0, 16)
    assert config.yarn == YarnConfig(8.0, 32, beta_fast=4.0, beta_slow=1.0, attention_factor=1.0)
    assert (config.fp8_block, config.dtype, config.page_unit) == ((128, 128), "bfloat16", 128)


def test_entries_of_transformers():
    config = read(WRITTEN)
    assert config.layer_types == (SLIDING, CSA, HCA, CSA)
    assert (config.csa_rate, config.hca_rate, config.page_unit) == (4, 8, 8)
    assert config.mlp_layer_types == ("hash_moe", "hash_moe", "moe", "moe")
    assert (config.rope_theta, config.compress_rope_theta, config.qk_rope_head_dim) == (100.0, 500.0, 16)
    assert config.yarn == YarnConfig(8.0, 32, beta_fast=4.0, beta_slow=1.0, attention_factor=1.0)


@pytest.mark.parametrize("config", [read(PUBLISHED), read(WRITTEN), V4_PRESETS["v4-tiny"]], ids=["1", "2", "tiny"])
def test_written_config_is_read_again(config: DeepseekV4Config):
    assert read_config(json.loads(json.dumps(config.to_hf()))) == config


def test_defaults_of_layers():
    """Without compress_ratios and layer_types, layers follow DeepSeek-V4-Pro; without num_hash_layers, three hash."""
    config = read(PUBLISHED, compress_ratios="absent", num_hash_layers="absent", num_hidden_layers=6)
    assert config.layer_types == (HCA, HCA, HCA, CSA, HCA, CSA)
    assert config.mlp_layer_types == ("hash_moe",) * 3 + ("moe",) * 3


def test_other_names_of_entries():
    config = read(PUBLISHED, qk_rope_head_dim="absent", partial_rotary_factor=0.25)
    assert config == read(PUBLISHED)
    assert read(PUBLISHED, qk_rope_head_dim="absent", index_head_dim=64).qk_rope_head_dim == 64
    assert read(PUBLISHED, compress_rate_hca=128, intermediate_size=32) == read(PUBLISHED)
    assert read(PUBLISHED, rope_scaling=None).yarn is None
    assert read(PUBLISHED, expert_dtype="fp8", norm_topk_prob=False) == read(PUBLISHED)
    ropes = {label: entry | {"partial_rotary_factor": 0.25} for label, entry in WRITTEN["rope_parameters"].items()}
    assert read(WRITTEN, rope_theta="absent", rope_parameters=ropes) == read(WRITTEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2: expected 1"),
        ({"n_shared_experts": 2}, "n_shared_experts 2: expected 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"expert_dtype": "int4"}, "expert_dtype 'int4'"),
        ({"compress_ratios": [0, 16, 4, 128]}, "compress_ratios 16: expected one of 0, 4, 128"),
        ({"compress_ratios": "absent", "layer_types": ["full_attention"] * 4}, "layer_types 'full_attention'"),
        ({"num_hash_layers": "absent", "mlp_layer_types": ["dense"] * 4}, "mlp_layer_types 'dense'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope type 'llama3'"),
        ({"rope_scaling": PUBLISHED["rope_scaling"] | {"mscale": 1.0}}, "expected an attention_factor of 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: expected quant_method fp8"),
        ({"head_windows": [5] * 4}, "head_windows"),
    ],
)
def test_unsupported_values_are_named(changes: dict[str, Any], message: str):
    with pytest.raises(NotImplementedError, match=message):
        read(PUBLISHED, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": "absent"}, "sliding_window missing"),
        ({"hc_mult": 0}, "hc_mult: expected at least 1"),
        ({"hc_sinkhorn_iters": 10**6}, "hc_sinkhorn_iters: expected at most 1000"),
        ({"hc_eps": -1.0}, "hc_eps: expected at least 0"),
        ({"swiglu_limit": 0}, "swiglu_limit: expected more than 0"),
        ({"o_groups": 3}, "o_groups: expected a divisor of num_attention_heads=4"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim: expected an even number"),
        ({"qk_rope_head_dim": 66}, "head_dim: expected at least qk_rope_head_dim=66"),
        ({"partial_rotary_factor": 0.5}, "qk_rope_head_dim: expected 32"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor: expected more than 0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most n_routed_experts=6"),
        ({"compress_ratios": [0, 4]}, "compress_ratios: expected one for each of 4 layers"),
        ({"layer_types": [SLIDING] * 4}, "layer_types and compress_ratios contradict"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types and num_hash_layers contradict"),
        ({"num_hash_layers": -1}, "num_hash_layers: expected at least 0"),
        ({"compress_rates": {CSA: 0}}, f"compress_rates of {CSA}: expected at least 1"),
        ({"compress_rates": {"full": 4}}, "compress_rates: expected"),
        ({"compress_rate_csa": 4099, "compress_ratios": [0] * 4}, None),
        ({"compress_rate_csa": 4099, "compress_ratios": [4099, 128, 0, 0]}, "compress_rates: expected a least common"),
        ({"rope_parameters": WRITTEN["rope_parameters"]}, "rope_parameters and rope_scaling: expected one"),
    ],
)
def test_invalid_values_are_named(changes: dict[str, Any], message: str | None):
    if message is None:
        assert read(PUBLISHED, **changes).page_unit == 1
        return
    with pytest.raises(ValueError, match=message):
        read(PUBLISHED, **changes)


def test_contradicting_bases_raise():
    ropes = WRITTEN["rope_parameters"] | {"main": {"rope_type": "default", "rope_theta": 7.0}}
    with pytest.raises(ValueError, match=r"rope_parameters of main: expected rope_theta=100\.0, got 7\.0"):
        read(WRITTEN, rope_parameters=ropes)


def test_windows_cannot_be_replaced():
    config = V4_PRESETS["v4-tiny"]
    assert with_windows(config, (24,) * 4) is config
    with pytest.raises(NotImplementedError, match="head_windows: expected the windows of layer_types"):
        with_windows(config, (5, 5, 5, 5))


def test_layer_of_a_prediction_module():
    config = dataclasses.replace(V4_PRESETS["v4-tiny"], num_nextn_predict_layers=1)
    assert require_mtp(config) is config
    layer = config.of_module
    assert (layer.layer_types, layer.mlp_layer_types, layer.num_hidden_layers) == ((SLIDING,), ("moe",), 1)
    with pytest.raises(ValueError, match="expected at least 1"):
        require_mtp(layer)
