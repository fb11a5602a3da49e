"""Configurations of the golden models.

A golden is a small checkpoint with the outputs that Hugging Face transformers computes with it (make_goldens.py). Tests
compare our models with these outputs. Sizes are chosen so that a mistake in any part of a model changes its output.
"""

from dataclasses import dataclass

from transformers import (  # pyrefly: ignore[missing-import]
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Gemma4Config,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)


@dataclass(frozen=True)
class Golden:
    """One golden: configuration of its model, seed of its weights and prompts, and format of its checkpoint.

    With `fp8` or `mxfp4`, the checkpoint is quantised, and the expected outputs are computed from a dequantised copy.
    """

    config: PreTrainedConfig
    seed: int
    max_shard_size: str = "5GB"
    published_config: bool = False  # adds config_published.json, with the keys of the published model's config.json
    fp8: bool = False  # fp8 blocks of weights, like the published DeepSeek-V3 and V3.2
    mxfp4: bool = False  # experts in MXFP4, like the published gpt-oss
    prompt_lengths: tuple[int, ...] = (1, 9, 40, 75)


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


# rms_norm_eps is large, so that the outputs change if a model also uses it for the norms inside latent attention, whose
# epsilon is 1e-6.
COMMON = {
    "vocab_size": 256,
    "max_position_embeddings": 1280,
    "rms_norm_eps": 5e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.15,
}

# All four widths differ, because code that confuses two equal widths would pass.
LATENT = COMMON | {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20}

# One dense layer, followed by two mixture-of-experts layers.
DENSE_FIRST = LATENT | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}

# Index keys have more columns (28) than are rotated (16). Tokens select 20 keys, fewer than the longer prompts have.
INDEXER = {"index_topk": 20, "index_head_dim": 28, "index_n_heads": 8}

# Structure of gpt-oss. swiglu_limit is so low that gates are clamped, and the window is shorter than most prompts.
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

# Structure of Gemma 4. The window is shorter than most prompts. The soft cap has the magnitude of the logits. Local and
# global layers have heads of different widths.
GEMMA = COMMON | {
    "max_position_embeddings": 256,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 11,
    "final_logit_softcapping": 1.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
}

# Towers for images and audio, whose weights a text model must skip.
TOWERS = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    },
    "audio_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "output_proj_dims": 16,
        "subsampling_conv_channels": [8, 4],
    },
}

LOCAL, GLOBAL = "sliding_attention", "full_attention"

NORM_SPREAD = 0.3
"""Standard deviation of the weights of norms. Their mean is 1."""

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

# Structure of DeepSeek-V4. The window is shorter than most prompts, hc_eps is large so that a test notices it, and
# swiglu_limit is so low that gates are clamped.
V4 = COMMON | {
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 20,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "rope_theta": 100.0,
    "compress_rope_theta": 500.0,
    "hc_mult": 4,
    "hc_eps": 0.02,
    "swiglu_limit": 1.5,
    "sliding_window": 12,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 4,
        "beta_slow": 1,
        "original_max_position_embeddings": 32,
    },
}

GOLDENS = {
    # Structure of DeepSeek-V2-Lite: queries without LoRA compression, one group of experts
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
    # Structure of DeepSeek-V2, but RoPE without YaRN, three heads and no dense layer
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
    # Structure of DeepSeek-V3. The checkpoint has several files.
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
    # DeepSeek-V3 as published: fp8 weights with a scale per block of 128 x 128, and a multi-token prediction layer.
    # Most widths are not multiples of 128, so the last blocks are smaller.
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
    # Structure of DeepSeek-V3.2. Tokens select 20 keys: fewer than the longer prompts have, more than the shorter ones
    # have.
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
    # DeepSeek-V3.2 as published: fp8 weights, also of the indexer's projections, with powers of two as scales. The
    # mscale of YaRN has no effect.
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
    # Structure of GLM-5: RoPE of index queries and keys rotates columns 2i and 2i + 1; one group of experts; no YaRN
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
    # Structure of GLM-5.2: layers 2 and 3 attend to the keys that layer 1 selected, layer 5 to the keys of layer 4
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
    # Structure of Qwen3: norms of queries and keys, num_attention_heads * head_dim > hidden_size, no YaRN
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
    # Qwen3 with YaRN, which its model cards recommend for long contexts; tied embeddings, biases, one query head per KV
    # head
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
    # Structure of Llama 3: RoPE of type llama3, no norms of queries and keys. The checkpoint has several files.
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
    # Qwen3 with a sliding window in all layers except the first
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
    # Structure of Gemma 4 E2B: per-layer embeddings; the last layers use the cache of layer 3 (local) or 4 (global)
    "gemma4": Golden(
        Gemma4TextConfig(
            **GEMMA,
            intermediate_size=64,
            num_hidden_layers=7,
            num_key_value_heads=2,
            layer_types=[LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL],
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=256,
        ),
        seed=14,
    ),
    # Structure of Gemma 4 31B: global layers make keys and values from one projection, no per-layer embeddings
    "gemma4-k-eq-v": Golden(
        Gemma4TextConfig(
            **GEMMA,
            intermediate_size=80,
            num_hidden_layers=4,
            num_key_value_heads=4,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            layer_types=[LOCAL, GLOBAL, LOCAL, GLOBAL],
            hidden_size_per_layer_input=0,
        ),
        seed=19,
    ),
    # Structure of Gemma 4 26B-A4B: experts next to the MLP. The checkpoint has towers for images and audio.
    "gemma4-moe": Golden(
        Gemma4Config(
            text_config=Gemma4TextConfig(
                **GEMMA,
                intermediate_size=40,
                num_hidden_layers=3,
                num_key_value_heads=2,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                layer_types=[LOCAL, LOCAL, GLOBAL],
                hidden_size_per_layer_input=0,
                enable_moe_block=True,
                num_experts=8,
                top_k_experts=3,
                moe_intermediate_size=24,
            ),
            **TOWERS,
        ),
        seed=79,
    ),
    # Structure of DeepSeek-V4 with small compression rates
    "v4": Golden(
        DeepseekV4Config(
            **V4,
            hidden_size=48,
            moe_intermediate_size=20,
            n_routed_experts=8,
            layer_types=[SLIDING, CSA, HCA, CSA],
            mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
            compress_rates={CSA: 4, HCA: 8},
            index_topk=6,
        ),
        seed=29,
    ),
    # The published format of DeepSeek-V4: fp8 weights, fp4 experts, a prediction module, rates of 4 and 128
    "v4-published": Golden(
        DeepseekV4Config(
            **V4,
            hidden_size=32,
            moe_intermediate_size=32,
            n_routed_experts=6,
            layer_types=[SLIDING, HCA, CSA, HCA],
            mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
            index_topk=12,
        ),
        seed=54,
        fp8=True,
        prompt_lengths=(3, 70, 150),
    ),
}
