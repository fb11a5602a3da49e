"""Models of the goldens (see make_goldens.py). They are small, and weights are drawn so that every part changes the
output.
"""

from dataclasses import dataclass

from transformers import (  # pyrefly: ignore[missing-import]
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)


@dataclass(frozen=True)
class Golden:
    """One golden: the model's configuration, the seed of its weights and prompts, and the form of its files."""

    config: PreTrainedConfig
    seed: int
    max_shard_size: str = "5GB"
    published_config: bool = False  # adds config_published.json, with the keys of DeepSeek's config.json
    fp8: bool = False  # fp8 checkpoint like V3 or V3.2; the golden is its dequantized twin
    mxfp4: bool = False  # MXFP4 checkpoint like gpt-oss; the golden is its dequantized twin


def yarn(mscale: float, mscale_all_dim: float) -> dict[str, object]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "original_max_position_embeddings": 32,
    }


# The epsilon is large: an error is visible if the norms inside latent attention do not use their own 1e-6.
COMMON = {
    "vocab_size": 256,
    "max_position_embeddings": 1280,
    "rms_norm_eps": 5e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.15,
}

# The nope, rope, value and latent widths all differ, because equal widths would hide a mix-up.
LATENT = COMMON | {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20}

# A dense layer before two mixture-of-experts layers.
DENSE_FIRST = LATENT | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}

# Index keys are wider than their rotated part, and fewer keys are selected than prompts have.
INDEXER = {"index_topk": 20, "index_head_dim": 28, "index_n_heads": 8}

# Form of gpt-oss. Gates reach the low limit, and the window is shorter than most prompts.
GPT_OSS = COMMON | {
    "max_position_embeddings": 256,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 11,
    "swiglu_limit": 1.5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}

NORM_SPREAD = 0.3
"""Standard deviation of the norm weights. Their mean is one."""

GOLDENS = {
    # Form of V2-Lite: uncompressed queries, one expert group
    "v2-greedy": Golden(
        DeepseekV2Config(
            **DENSE_FIRST,
            num_attention_heads=4,
            q_lora_rank=None,
            n_routed_experts=12,
            n_shared_experts=2,
            num_experts_per_tok=3,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.5,
            rope_parameters=yarn(mscale=1.2, mscale_all_dim=0.707),
        ),
        seed=3,
        published_config=True,
    ),
    # Form of V2, with plain rope, three heads and no dense layer
    "v2-group": Golden(
        DeepseekV2Config(
            **LATENT,
            hidden_size=96,
            intermediate_size=96,
            moe_intermediate_size=24,
            num_hidden_layers=2,
            first_k_dense_replace=0,
            num_attention_heads=3,
            q_lora_rank=40,
            n_routed_experts=16,
            n_shared_experts=2,
            num_experts_per_tok=4,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=4.0,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        seed=21,
    ),
    # Form of V3, in several files
    "v3": Golden(
        DeepseekV3Config(
            **DENSE_FIRST,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=48,
            n_routed_experts=16,
            n_shared_experts=1,
            num_experts_per_tok=6,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            num_mtp_layers=0,
            rope_parameters=yarn(mscale=0.8, mscale_all_dim=1.0),
        ),
        seed=5,
        max_shard_size="300KB",
        published_config=True,
    ),
    # V3 as published: fp8 blocks (most of these widths leave a remainder), and a layer that predicts further tokens
    "v3-fp8": Golden(
        DeepseekV3Config(
            **(LATENT | {"initializer_range": 0.1}),
            hidden_size=160,
            intermediate_size=272,
            moe_intermediate_size=40,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            num_attention_heads=5,
            num_key_value_heads=5,
            q_lora_rank=144,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            num_mtp_layers=1,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
        ),
        seed=13,
        fp8=True,
    ),
    # Form of V3.2: tokens select fewer keys than the longer prompts have, and more than the shorter prompts have
    "v32": Golden(
        DeepseekV32Config(
            **DENSE_FIRST,
            **INDEXER,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=48,
            n_routed_experts=16,
            n_shared_experts=1,
            num_experts_per_tok=6,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters=yarn(mscale=0.8, mscale_all_dim=1.0),
        ),
        seed=99,
        published_config=True,
    ),
    # V3.2 as published: fp8 blocks with powers of two as scales, also for index queries and keys, and no mscale
    "v32-fp8": Golden(
        DeepseekV32Config(
            **(LATENT | {"initializer_range": 0.1}),
            **INDEXER,
            hidden_size=160,
            intermediate_size=144,
            moe_intermediate_size=40,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            num_attention_heads=5,
            num_key_value_heads=5,
            q_lora_rank=144,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
        ),
        seed=111,
        fp8=True,
    ),
    # Form of GLM-5: index queries and keys are rotated in pairs, one expert group, plain rope
    "glm-dsa": Golden(
        GlmMoeDsaConfig(
            **(DENSE_FIRST | {"num_hidden_layers": 2}),
            **INDEXER,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=40,
            n_routed_experts=12,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        seed=624,
    ),
    # Form of GLM-5.2: layers 2 and 3 share the selected keys of layer 1, and the last layer those of layer 4
    "glm-shared": Golden(
        GlmMoeDsaConfig(
            **(DENSE_FIRST | {"num_hidden_layers": 5, "first_k_dense_replace": 3, "moe_intermediate_size": 24}),
            **INDEXER,
            indexer_types=["full", "shared", "shared", "full", "shared"],
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=40,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        seed=304,
    ),
    # Form of Qwen3: normed queries and keys, heads wider than their share of the hidden size, plain rope
    "qwen3": Golden(
        Qwen3Config(
            **COMMON,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=24,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        seed=8,
    ),
    # Qwen3 with YaRN as its model cards recommend, with tied embeddings and biases, one query head per KV head
    "qwen3-yarn": Golden(
        Qwen3Config(
            **(COMMON | {"max_position_embeddings": 128}),
            hidden_size=80,
            intermediate_size=112,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=16,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        seed=1,
    ),
    # Form of Llama 3: its rope, no norms of queries and keys, in several files
    "llama": Golden(
        LlamaConfig(
            **COMMON,
            hidden_size=96,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        seed=1,
        max_shard_size="300KB",
        published_config=True,
    ),
    # Qwen3 with a window in all layers but the first
    "qwen3-window": Golden(
        Qwen3Config(
            **COMMON,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=13,
            max_window_layers=1,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        seed=4,
    ),
    "gpt-oss": Golden(GptOssConfig(**GPT_OSS), seed=10, published_config=True),
    "gpt-oss-mxfp4": Golden(GptOssConfig(**GPT_OSS), seed=10, mxfp4=True),
}
