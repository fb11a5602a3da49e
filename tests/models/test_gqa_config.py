"""Configurations of Qwen3 and Llama: reading a config.json, and errors of invalid files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pallas_attn.models.checkpoints import count_parameters
from pallas_attn.models.config import GQA_PRESETS, DeepSeekConfig, GQAConfig, Llama3RopeConfig, YarnConfig, read_config

GOLDENS = Path(__file__).parents[1] / "goldens"

QWEN3: dict[str, Any] = {  # the published config.json of Qwen/Qwen3-8B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

LLAMA: dict[str, Any] = {  # the published config.json of meta-llama/Llama-3.1-8B-Instruct
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def test_published_qwen3_config():
    config = read_config(QWEN3)
    assert isinstance(config, GQAConfig)
    assert config.qk_norm
    assert config.rope_scaling is None
    assert config.eos_token_ids == (151645,)
    assert config.sm_scale == 128**-0.5
    assert count_parameters(config) == 8_190_735_360


def test_published_llama_config():
    config = read_config(LLAMA)
    assert isinstance(config, GQAConfig)
    assert not config.qk_norm
    assert config.head_dim == 128
    assert config.rope_scaling == Llama3RopeConfig(8.0, 8192, 1.0, 4.0)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert count_parameters(config) == 8_030_261_248


def test_older_llama_without_head_entries():
    config = GQAConfig.from_hf(without(LLAMA, "num_key_value_heads", "rope_scaling", "rope_theta"))
    assert (config.num_key_value_heads, config.head_dim) == (32, 128)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)


def test_qwen3_with_yarn():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert GQAConfig.from_hf({**QWEN3, "rope_scaling": scaling}).rope_scaling == YarnConfig(4.0, 32768)


def test_family_follows_from_model_type():
    deepseek = json.loads((GOLDENS / "v3" / "config.json").read_text())
    assert isinstance(read_config(deepseek), DeepSeekConfig)
    with pytest.raises(NotImplementedError, match="model_type 'mamba': expected one of deepseek_v2"):
        read_config({"model_type": "mamba"})
    with pytest.raises(ValueError, match="model_type is missing"):
        read_config({})


def test_old_and_new_keys_give_equal_configs():
    new, old = (
        read_config(json.loads((GOLDENS / "llama" / name).read_text()))
        for name in ("config.json", "config_published.json")
    )
    assert new == old


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
WRITTEN = {
    **GQA_PRESETS,
    "qwen3": GQAConfig.from_hf(QWEN3),
    "llama": GQAConfig.from_hf(LLAMA),
    "fp8": GQAConfig.from_hf({**QWEN3, "quantization_config": BLOCKS}),
    "yarn": dataclasses.replace(GQA_PRESETS["qwen3-tiny"], rope_scaling=YarnConfig(4.0, 64, attention_factor=1.5)),
}


@pytest.mark.parametrize("config", WRITTEN.values(), ids=WRITTEN)
def test_json_round_trip(config: GQAConfig):
    assert read_config(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"head_dim": None}, "head_dim missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads missing"),
        ({"vocab_size": None}, "vocab_size missing"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of num_attention_heads=32, got 5"),
        ({"head_dim": 127}, "head_dim: expected an even number, got 127"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected at least 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type llama3: low_freq_factor, high_freq"),
        (
            {"rope_scaling": {**LLAMA["rope_scaling"], "low_freq_factor": 4.0}},
            "expected high_freq_factor > low_freq_factor > 0, got 4.0 and 4.0",
        ),
        ({"rope_scaling": {**LLAMA["rope_scaling"], "factor": 0.5}}, "llama3 factor: expected at least 1, got 0.5"),
    ],
)
def test_invalid_entries_raise(entries: dict, message: str):
    with pytest.raises(ValueError, match=message):
        GQAConfig.from_hf({**QWEN3, **entries})


def test_indivisible_hidden_size_needs_head_dim():
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of num_attention_heads=32, got 4095"):
        GQAConfig.from_hf({**LLAMA, "hidden_size": 4095})
    assert GQAConfig.from_hf({**LLAMA, "hidden_size": 4095, "head_dim": 128}).head_dim == 128


@pytest.mark.parametrize(
    ("entries", "feature"),
    [
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "llama", "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["chunked_attention"] * 36}, "layer_types"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope': expected default or yarn or llama3"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0: expected no such entry"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 256"),
        ({"attention_multiplier": 0.1}, "attention_multiplier 0.1"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier 12.0: expected 1.0"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size 8192"),
        ({"rope_interleave": True}, "rope_interleave True: expected False"),
        ({"swiglu_limit": 7.0}, "swiglu_limit 7.0"),
        ({"use_qk_norm": False}, "use_qk_norm False: expected True"),
        ({"model_type": "llama", "use_qk_norm": True}, "use_qk_norm True: expected False"),
        ({"is_causal": False}, "is_causal False: expected True"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method fp8"),
    ],
)
def test_unsupported_features_are_named(entries: dict, feature: str):
    with pytest.raises(NotImplementedError, match=feature):
        GQAConfig.from_hf({**QWEN3, **entries})


def test_window_of_a_llama():
    config = read_config(LLAMA)
    assert read_config({**LLAMA, "sliding_window": None}) == config
    assert read_config({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}) == config
    with pytest.raises(NotImplementedError, match="sliding_window 4096: expected null or use_sliding_window false"):
        read_config({**LLAMA, "sliding_window": 4096})


def test_other_names_of_entries_of_gpt_oss():
    written = GQA_PRESETS["gpt-oss-tiny"].to_hf()
    other = without(written, "num_local_experts") | {"num_experts": 8, "experts_per_token": 3}
    assert read_config(other) == GQA_PRESETS["gpt-oss-tiny"]
    with pytest.raises(ValueError, match="experts_per_token: expected the value of num_experts_per_tok, 3, got 2"):
        read_config({**written, "experts_per_token": 2})


JUNK = (None, "x", "", -1, 0, 1.5, True, [], [1], {}, {"type": []}, {"x": {}})


def is_read_or_refused(config: dict) -> bool:
    try:
        read = read_config(config)
    except (ValueError, NotImplementedError):
        return True
    return read_config(read.to_hf()) == read


@pytest.mark.parametrize("name", QWEN3 | LLAMA)
def test_arbitrary_entries_raise_only_value_errors(name: str):
    assert all(is_read_or_refused({**base, name: junk}) for junk in JUNK for base in (QWEN3, LLAMA))
