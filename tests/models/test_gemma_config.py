"""Gemma 4: reading a config.json, and errors of invalid files."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from pallas_attn.models.checkpoints import count_parameters
from pallas_attn.models.config import (
    GEMMA_PRESETS,
    CacheGroup,
    Gemma4Config,
    HeadShape,
    cache_groups,
    read_config,
    require_mtp,
    with_windows,
)
from tests.models.test_parity import GOLDENS

TINY = GEMMA_PRESETS["gemma4-tiny"]
MOE = dataclasses.replace(TINY, num_experts=8, top_k_experts=2, moe_intermediate_size=32)
LOCAL, GLOBAL = "sliding_attention", "full_attention"

# The structure of google/gemma-4-E2B: entries of config.json that concern the text model, and entries of towers.
E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "tie_word_embeddings": True,
    "vision_config": {"model_type": "gemma4_vision"},
    "audio_config": {"model_type": "gemma4_audio"},
    "text_config": {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": [LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL] * 7,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            GLOBAL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            LOCAL: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}


def text(**entries: Any) -> dict[str, Any]:
    """Return the configuration of a text model, with other entries."""
    return {**TINY.to_hf(), **entries}


def test_structure_of_e2b():
    config = read_config(E2B)
    assert isinstance(config, Gemma4Config)
    assert config.kv_heads(0) == HeadShape(1, 256)
    assert config.kv_heads(4) == HeadShape(1, 512)
    assert [config.cache_source(layer) for layer in (12, 14, 15, 19, 33, 34)] == [12, 14, 13, 14, 13, 14]
    assert (config.mlp_width(14), config.mlp_width(15)) == (6144, 12288)
    assert cache_groups(config) == (
        CacheGroup(512, tuple(layer for layer in range(15) if layer % 5 != 4)),
        CacheGroup(None, (4, 9, 14)),
    )
    assert config.eos_token_ids == (1, 106)
    assert config.dtype == "bfloat16"
    assert 4.6e9 < count_parameters(config) < 4.7e9  # with the towers 5.1e9, without per-layer embeddings 2.3e9


@pytest.mark.parametrize(
    "config", [TINY, MOE, dataclasses.replace(TINY, final_logit_softcapping=None, dtype="bfloat16")]
)
def test_json_round_trip(config: Gemma4Config):
    assert read_config(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("name", ["gemma4", "gemma4-k-eq-v", "gemma4-moe"])
def test_config_of_transformers_round_trip(name: str):
    config = read_config(json.loads((GOLDENS / name / "config.json").read_text()))
    assert isinstance(config, Gemma4Config)
    assert read_config(config.to_hf()) == config


def test_heads_of_global_layers():
    entries = {name: value for name, value in text().items() if name != "per_layer_config"}
    assert Gemma4Config.from_hf(entries).kv_heads(2) == HeadShape(2, 512)
    assert Gemma4Config.from_hf(entries | {"global_head_dim": 48}).kv_heads(2) == HeadShape(2, 48)
    entries |= {"num_global_key_value_heads": 1}
    assert Gemma4Config.from_hf(entries).kv_heads(2).num_heads == 2  # ignored by transformers, too
    assert Gemma4Config.from_hf(entries | {"attention_k_eq_v": True}).kv_heads(2).num_heads == 1


def test_partial_rotation_has_the_defaults_of_transformers():
    without = {name: value for name, value in text().items() if name != "rope_parameters"}
    assert Gemma4Config.from_hf(without).global_rotary_share == 0.25
    ropes = {LOCAL: {"rope_theta": 1e4}, GLOBAL: {"rope_theta": 1e6, "rope_type": "proportional"}}
    assert Gemma4Config.from_hf(text(rope_parameters=ropes)).global_rotary_share == 1.0


ROPES = TINY.to_hf()["rope_parameters"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"layer_types": None}, "layer_types missing"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input missing"),
        ({"sliding_window": None}, "sliding_window missing"),
        ({"sliding_window": 0}, "sliding_window: expected 1 to"),
        ({"layer_types": [GLOBAL]}, "layer_types: expected one for each of 6 layers"),
        ({"layer_types": [GLOBAL] * 5 + [LOCAL]}, "expected full_attention for the last layer"),
        (
            {"layer_types": [LOCAL] * 4 + [GLOBAL] * 2, "per_layer_config": None},
            "expected a layer with a cache of each",
        ),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers: expected less than 6, got 6"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads=4, got 3"),
        ({"head_dim": 31}, "head_dim: expected an even number, got 31"),
        ({"global_head_dim": 48}, "global_head_dim: expected the value of per_layer_config, 64, got 48"),
        ({"per_layer_config": {"7": {"head_dim": 64}}}, "per_layer_config: expected layers from 0 to 5, got '7'"),
        ({"per_layer_config": [64]}, "per_layer_config: expected an object per layer"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping: expected a positive number"),
        ({"vocab_size_per_layer_input": 500}, "vocab_size_per_layer_input: expected at least vocab_size=512, got 500"),
        ({"num_experts": 8}, "enable_moe_block: expected true with num_experts, got False"),
        ({"enable_moe_block": True, "num_experts": 8}, "top_k_experts, moe_intermediate_size missing"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8},
            "top_k_experts: expected at most num_experts=2, got 3",
        ),
        ({"rope_parameters": {"default": {}}}, "rope_parameters: expected entries for sliding_attention and full"),
        ({"rope_parameters": {**ROPES, LOCAL: {"rope_theta": 1.0}}}, "rope_theta: expected more than 1"),
        ({"rope_parameters": {**ROPES, LOCAL: {"rope_type": "default"}}}, "rope_theta missing"),
        (
            {"rope_parameters": {**ROPES, LOCAL: {"rope_theta": 1e4, "factor": 2.0}}},
            "rope_parameters of sliding_attention: expected rope_theta, got factor: 2.0",
        ),
        (
            {"rope_parameters": {**ROPES, GLOBAL: {**ROPES[GLOBAL], "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor: expected 0 to 1, got 1.5",
        ),
    ],
)
def test_invalid_entries_raise(entries: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read_config(text(**entries))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types: expected full_attention or sliding_attention"),
        ({"attention_bias": True}, "attention_bias True: expected False"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu': expected 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all': expected False"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0: expected no such entry"),
        ({"rope_theta": 1e4}, "rope_theta 10000.0: expected no such entry"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"per_layer_config": {"2": {"head_dim": 48}}}, "per_layer_config of layer 5: expected"),
        ({"per_layer_config": {"0": {"head_dim": 48}}}, "per_layer_config of layer 0: expected"),
        ({"per_layer_config": {"2": {"sliding_window": 8}}}, "expected head_dim and num_key_value_heads, got 'slid"),
        (
            {"rope_parameters": {**ROPES, GLOBAL: {"rope_theta": 1e6, "rope_type": "yarn"}}},
            "rope type 'yarn' of full_attention layers: expected proportional",
        ),
    ],
)
def test_unsupported_entries_raise(entries: dict[str, Any], message: str):
    with pytest.raises(NotImplementedError, match=message):
        read_config(text(**entries))


def test_bidirectional_images_are_accepted():
    assert read_config(text(use_bidirectional_attention="vision")) == TINY


def test_contradictions_of_nested_config_raise():
    with pytest.raises(ValueError, match="dtype: expected the value of text_config, 'bfloat16', got 'float32'"):
        read_config({**E2B, "dtype": "float32"})
    with pytest.raises(ValueError, match="text_config missing"):
        read_config({"model_type": "gemma4"})
    with pytest.raises(NotImplementedError, match="text_config: model_type 'gemma3_text': expected gemma4_text"):
        read_config({**E2B, "text_config": {"model_type": "gemma3_text"}})


def test_other_windows_raise():
    assert with_windows(TINY, TINY.windows) == TINY
    with pytest.raises(NotImplementedError, match="head_windows: expected the windows of layer_types"):
        with_windows(TINY, (None,) * 6)


def test_prediction_modules_are_not_supported():
    with pytest.raises(NotImplementedError, match="a gemma4_text has no modules"):
        require_mtp(TINY)
