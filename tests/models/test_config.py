"""DeepSeek configurations: reading a config.json, errors of invalid files, and derived sizes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pallas_attn.models.checkpoints import count_parameters
from pallas_attn.models.config import PRESETS, DeepSeekConfig, YarnConfig

GOLDENS = Path(__file__).parents[1] / "goldens"

V2_LITE: dict[str, Any] = {  # the published config.json of deepseek-ai/DeepSeek-V2-Lite
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}

V3: dict[str, Any] = {  # the published config.json of deepseek-ai/DeepSeek-V3
    **V2_LITE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


V32: dict[str, Any] = {  # the published config.json of deepseek-ai/DeepSeek-V3.2-Exp
    **V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
}


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def test_published_v2_lite_equals_preset():
    config = DeepSeekConfig.from_hf(V2_LITE)
    assert config == PRESETS["v2-lite"]
    assert config.num_moe_layers == 26
    assert config.qk_head_dim == 192
    assert config.latent_width == 576
    assert config.sm_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert config.yarn is not None
    assert config.yarn.rotary_scale == 1.0


def test_published_v3_config():
    config = DeepSeekConfig.from_hf(V3)
    assert config.topk_method == "noaux_tc"
    assert config.scoring_func == "sigmoid"
    assert config.norm_topk_prob
    assert config.fp8_block == (128, 128)
    assert config.num_nextn_predict_layers == 1
    assert config.eos_token_ids == (1,)
    assert config.sm_scale == pytest.approx(0.1352337788608801)  # (1.3689 ** 2) / sqrt(192)
    assert count_parameters(config) == pytest.approx(671e9, rel=1e-3)


def test_published_v32_config():
    config, v3 = DeepSeekConfig.from_hf(V32), DeepSeekConfig.from_hf(V3)
    assert (config.is_sparse, config.index_topk, config.index_n_heads, config.index_head_dim) == (True, 2048, 64, 128)
    assert dataclasses.replace(config, model_type="deepseek_v3", index_topk=0, index_n_heads=0, index_head_dim=0) == v3
    assert not v3.is_sparse
    indexer = 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128
    assert count_parameters(config) - count_parameters(v3) == 61 * indexer


def test_indexer_entries_are_ignored_for_other_families():
    assert DeepSeekConfig.from_hf({**V3, "index_topk": 2048}) == DeepSeekConfig.from_hf(V3)
    lists = {"layer_types": ["indexed_attention"] * 61, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58}
    assert DeepSeekConfig.from_hf({**V32, **lists, "rope_interleave": False}) == DeepSeekConfig.from_hf(V32)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"index_topk": None}, ValueError, "index_topk missing"),
        ({"index_topk": 0}, ValueError, "index_topk: expected at least 1, got 0"),
        ({"index_n_heads": "64"}, ValueError, "index_n_heads: expected an integer"),
        ({"index_head_dim": 32}, ValueError, "index_head_dim: expected at least qk_rope_head_dim=64, got 32"),
        ({"index_head_dim": 10**6}, ValueError, "index_head_dim: expected at most 10000"),
        ({"q_lora_rank": None}, ValueError, "q_lora_rank: expected a rank, which the indexer of a deepseek_v32 needs"),
        ({"layer_types": ["indexed_attention"]}, ValueError, "layer_types: expected one for each of 61 layers"),
        ({"layer_types": ["full_attention"] * 61}, NotImplementedError, "layer_types 'full_attention' of layer 0"),
        ({"mlp_layer_types": ["sparse"] * 61}, NotImplementedError, "mlp_layer_types 'sparse' of layer 0"),
        (
            {"indexer_types": ["full"] * 60 + ["shared"]},
            NotImplementedError,
            "indexer_types: layer 60 of a deepseek_v32",
        ),
        ({"index_topk_freq": 4}, NotImplementedError, "index_topk_freq: layer 2 of a deepseek_v32 shares a choice"),
        ({"index_topk_pattern": "FS" * 30 + "F"}, NotImplementedError, "index_topk_pattern: layer 1"),
    ],
)
def test_invalid_indexer_entries_raise(entries: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        DeepSeekConfig.from_hf({**V32, **entries})


INDEXER = (
    "index_topk",
    "index_head_dim",
    "layer_types",
    "indexer_types",
    "index_topk_freq",
    "index_skip_topk_offset",
    "index_topk_pattern",
)


@pytest.mark.parametrize("name", INDEXER)
def test_arbitrary_indexer_entries_raise_only_value_errors(name: str):
    assert all(is_read_or_refused({**V32, name: junk}) for junk in JUNK)


def sharing(num_layers: int, **entries: object) -> DeepSeekConfig:
    """Return the configuration of a GLM-5 model with this number of layers and these entries of config.json.

    In GLM-5, layers without an indexer share the selected keys of an earlier layer.
    """
    return DeepSeekConfig.from_hf({**V32, "model_type": "glm_moe_dsa", "num_hidden_layers": num_layers, **entries})


@pytest.mark.parametrize(
    # One letter per layer, as transformers 5.23 and vLLM read the entries: F (full) has an indexer, S (shared) uses the
    # selected keys of an earlier layer.
    ("entries", "letters"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSFSSSF"),  # published entries of GLM-5.2
        ({"index_topk_freq": 3}, "FFSSFSSFSSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFSFSFSF"),
        ({"index_topk_freq": 99, "index_skip_topk_offset": 12}, "FFFFFFFFFFF"),
        ({"index_topk_freq": 0, "index_skip_topk_offset": 0}, "FFFFFFFFFFF"),
        ({"index_topk_freq": None, "index_skip_topk_offset": None, "index_topk_pattern": None}, "FFFFFFFFFFF"),
        ({"index_topk_pattern": "FSSFSSSSSSF"}, "FSSFSSSSSSF"),
        ({"index_topk_pattern": "FSSFSSSSSSF", "index_topk_freq": 2}, "FSSFSSSSSSF"),
        ({"index_topk_pattern": [*["full"] * 10, "shared"]}, "FFFFFFFFFFS"),
        ({"indexer_types": [*["full", "shared"] * 5, "full"], "index_topk_pattern": "FSFSFSFSFSF"}, "FSFSFSFSFSF"),
    ],
)
def test_indexer_types_from_config(entries: dict, letters: str):
    config = sharing(len(letters), **entries)
    assert "".join("S" if config.shares_choice(i) else "F" for i in range(len(letters))) == letters
    assert [config.has_indexer(i) for i in range(len(letters))] == [letter == "F" for letter in letters]
    assert config.has_indexer(len(letters))  # the layer of the multi-token prediction module
    assert (config.indexer_types is None) == ("S" not in letters)
    assert DeepSeekConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    full = sharing(len(letters))
    indexer = 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128
    assert count_parameters(full) - count_parameters(config) == letters.count("S") * indexer


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"indexer_types": ["full"]}, "indexer_types: expected one for each of 4 layers, got 1"),
        (
            {"indexer_types": ["full", "shared", "none", "full"]},
            "indexer_types: expected a list of full and shared, got",
        ),
        ({"indexer_types": "FFFF"}, "indexer_types: expected a list of full and shared, got 'FFFF'"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "indexer_types: expected full for layer 0"),
        (
            {"index_topk_pattern": "FSX"},
            "index_topk_pattern: expected a list of full and shared or a string of F and S",
        ),
        ({"index_topk_pattern": "FS"}, "index_topk_pattern: expected one for each of 4 layers, got 2"),
        ({"index_topk_pattern": ["F", "S", "F", "S"]}, "index_topk_pattern: expected a list of full and shared or"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_topk_freq: expected full for layer 0"),
        ({"index_topk_freq": -1}, "index_topk_freq: expected at least 0, got -1"),
        ({"index_topk_freq": 2.5}, "index_topk_freq: expected an integer, got 2.5"),
        ({"index_skip_topk_offset": -2}, "index_skip_topk_offset: expected at least 0, got -2"),
        (
            {"indexer_types": ["full", "full", "shared", "full"], "index_topk_freq": 1},
            "indexer_types and index_topk_freq contradict each other",
        ),
        (
            {"indexer_types": ["full", "full", "shared", "full"], "index_topk_pattern": "FFSS"},
            "indexer_types and index_topk_pattern contradict each other",
        ),
    ],
)
def test_invalid_indexer_types_raise(entries: dict, message: str):
    with pytest.raises(ValueError, match=message):
        sharing(4, **entries)


def test_constructor_checks_indexer_types():
    with pytest.raises(ValueError, match="indexer_types of layer 1: expected full or shared, got 'F'"):
        dataclasses.replace(sharing(2), indexer_types=("full", "F"))  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="indexer_types: expected one for each of 3 layers, got 2"):
        dataclasses.replace(sharing(2, indexer_types=["full", "shared"]), num_hidden_layers=3)
    with pytest.raises(NotImplementedError, match="indexer_types: layer 1 of a deepseek_v3 shares a choice"):
        dataclasses.replace(DeepSeekConfig.from_hf(V3), num_hidden_layers=2, indexer_types=("full", "shared"))


@pytest.mark.parametrize(("name", "millions"), [("v2-lite", 15_706.5), ("mla-25m", 25.15)])
def test_count_parameters_without_allocation(name: str, millions: float):
    assert count_parameters(PRESETS[name]) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("config", [*PRESETS.values(), DeepSeekConfig.from_hf(V3)], ids=[*PRESETS, "v3"])
def test_json_round_trip(config: DeepSeekConfig):
    assert DeepSeekConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("golden", ["v2-greedy", "v3"])
def test_old_and_new_keys_give_equal_configs(golden: str):
    new, old = (
        DeepSeekConfig.from_hf(json.loads((GOLDENS / golden / name).read_text()))
        for name in ("config.json", "config_published.json")
    )
    assert new == old


@pytest.mark.parametrize("name", ["hidden_size", "q_lora_rank", "n_routed_experts", "first_k_dense_replace", "n_group"])
def test_missing_entries_are_named(name: str):
    with pytest.raises(ValueError, match=f"{name} missing"):
        DeepSeekConfig.from_hf(without(V3, name))


def test_greedy_routing_needs_no_groups():
    assert DeepSeekConfig.from_hf(without(V2_LITE, "n_group", "topk_group")) == PRESETS["v2-lite"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size missing"),
        ({"hidden_size": "64"}, "hidden_size: expected an integer, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected at least 1, got 0"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected an even number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a finite number"),
        ({"attention_bias": 1}, "attention_bias: expected true or false"),
        ({"n_group": 7}, "n_group: expected a divisor of n_routed_experts=256"),
        ({"topk_group": 9}, "topk_group=9"),
        ({"n_group": 256}, "noaux_tc ranks groups by two experts"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "at most the 32 experts to choose from, got 33"),
        ({"n_routed_experts": None}, "n_routed_experts: expected at least 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"torch_dtype": "int8"}, "dtype: expected float32, bfloat16 or float16, got 'int8'"),
        ({"dtype": "float32"}, "dtype and torch_dtype contradict each other"),
        ({"rope_parameters": {"rope_theta": 5000.0}}, "rope_theta: config.json gives 5000.0 and 10000.0"),
        ({"rope_parameters": {"factor": 4}}, "expected equal entries, got .*factor: 40 and 4;"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "default"}}, "contradict each other: default, yarn"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type yarn: factor missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "yarn factor: expected at least 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 1}}, "beta_fast > beta_slow"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size: expected rows and columns",
        ),
    ],
)
def test_invalid_entries_raise(entries: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DeepSeekConfig.from_hf({**V3, **entries})


def is_read_or_refused(config: dict) -> bool:
    try:
        read = DeepSeekConfig.from_hf(config)
    except (ValueError, NotImplementedError):
        return True
    return DeepSeekConfig.from_hf(read.to_hf()) == read


JUNK = (None, "x", "", -1, 0, 1.5, True, [], [1], {}, {"type": []}, {"x": {}})


@pytest.mark.parametrize("name", V3)
def test_arbitrary_entries_raise_only_value_errors(name: str):
    assert all(is_read_or_refused({**V3, name: junk}) for junk in JUNK)


@pytest.mark.parametrize("name", V3["rope_scaling"])
def test_arbitrary_rope_entries_raise_only_value_errors(name: str):
    assert all(is_read_or_refused({**V3, "rope_scaling": {**V3["rope_scaling"], name: junk}}) for junk in JUNK)


@pytest.mark.parametrize(
    ("entries", "feature"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' of a deepseek_v3"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0: expected no such entry"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 256"),
        ({"residual_multiplier": 0.5}, "residual_multiplier 0.5: expected 1.0"),
        ({"is_causal": False}, "is_causal False: expected True"),
        ({"use_mla": False}, "use_mla False"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"swiglu_limit": 7.0}, "swiglu_limit 7.0"),
        ({"use_qk_norm": True}, "use_qk_norm True: expected False"),
        (
            {"layer_types": ["sliding_attention"] * 61},
            "layer_types 'sliding_attention' of layer 0: expected full_attention",
        ),
        ({"mlp_layer_types": ["dense"] * 61}, "mlp_layer_types 'dense' of layer 3: expected sparse"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method fp8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
    ],
)
def test_unsupported_features_are_named(entries: dict, feature: str):
    with pytest.raises(NotImplementedError, match=feature):
        DeepSeekConfig.from_hf({**V3, **entries})


NEUTRAL: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "no_rope_layers": [],
    "is_causal": True,
    "logits_scaling": 1,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "layer_types": ["full_attention"] * 61,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58,
    "attention_dropout": 0.1,
    "use_cache": False,
}
"""Entries of config.json that do not change the results of a DeepSeek-V3 model."""


def test_neutral_entries_change_nothing():
    assert DeepSeekConfig.from_hf({**V3, **NEUTRAL}) == DeepSeekConfig.from_hf(V3)


@pytest.mark.parametrize(("model_type", "interleaved"), [("deepseek_v32", False), ("glm_moe_dsa", True)])
def test_order_of_index_columns_is_that_of_the_family(model_type: str, interleaved: bool):
    base = {**V32, "model_type": model_type}
    expected = DeepSeekConfig.from_hf(base)
    assert DeepSeekConfig.from_hf({**base, "indexer_rope_interleave": interleaved}) == expected
    with pytest.raises(NotImplementedError, match=f"indexer_rope_interleave {not interleaved}: expected {interleaved}"):
        DeepSeekConfig.from_hf({**base, "indexer_rope_interleave": not interleaved})


def test_other_names_of_entries():
    """Entries may have the alternative names that transformers 5.23 accepts."""
    names = {"num_mtp_layers": "num_nextn_predict_layers", "num_local_experts": "n_routed_experts"}
    other = without(V3, *names.values()) | {"num_mtp_layers": 3, "num_local_experts": 128}
    expected = dataclasses.replace(DeepSeekConfig.from_hf(V3), num_nextn_predict_layers=3, n_routed_experts=128)
    assert DeepSeekConfig.from_hf(other) == expected
    assert DeepSeekConfig.from_hf({**V3, "num_experts": 256}) == DeepSeekConfig.from_hf(V3)
    with pytest.raises(ValueError, match="num_experts: expected the value of n_routed_experts, 256, got 64"):
        DeepSeekConfig.from_hf({**V3, "num_experts": 64})
    with pytest.raises(ValueError, match="num_mtp_layers: expected the value of num_nextn_predict_layers, 1, got 0"):
        DeepSeekConfig.from_hf({**V3, "num_mtp_layers": 0})


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_epsilon_has_no_default(model_type: str):
    """A config.json without rms_norm_eps is rejected, because transformers' default depends on the model.

    The default is 1e-6 for V3.2 and 1e-5 for GLM-5.
    """
    with pytest.raises(ValueError, match="rms_norm_eps missing"):
        DeepSeekConfig.from_hf({**without(V32, "rms_norm_eps"), "model_type": model_type})


def test_v2_ignores_norm_topk_prob():
    assert not DeepSeekConfig.from_hf({**V2_LITE, "norm_topk_prob": True}).norm_topk_prob


def test_default_rope_has_no_yarn():
    config = DeepSeekConfig.from_hf({**V2_LITE, "rope_scaling": None, "rope_theta": 5000})
    assert config.yarn is None
    assert config.rope_theta == 5000.0
    assert config.sm_scale == 192**-0.5


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_of_sequence_ids(eos: object, ids: tuple[int, ...]):
    config = DeepSeekConfig.from_hf({**V3, "eos_token_id": eos})
    assert config.eos_token_ids == ids
    assert DeepSeekConfig.from_hf(config.to_hf()).eos_token_ids == ids


def test_yarn_temperatures():
    yarn = YarnConfig(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.707)
    f = {m: 0.1 * m * math.log(40) + 1 for m in (1.0, 0.707)}
    assert yarn.rotary_scale == pytest.approx(f[1.0] / f[0.707])
    assert yarn.score_scale == pytest.approx(f[0.707] ** 2)
    assert dataclasses.replace(yarn, attention_factor=1.5).rotary_scale == 1.5
    without_strengths = YarnConfig(factor=40.0, original_max_position_embeddings=4096)
    assert without_strengths.rotary_scale == pytest.approx(f[1.0])
    assert without_strengths.score_scale == 1.0
    assert dataclasses.replace(yarn, factor=1.0).score_scale == 1.0
