"""Named model configurations: small models for random weights, and the sizes of some published models."""

from __future__ import annotations

import dataclasses
import functools

from pallas_attn.models.config.deepseek import DeepSeekConfig
from pallas_attn.models.config.deepseek_v4 import CSA_KIND, HASH_MOE, HCA_KIND, SCORED_MOE, DeepseekV4Config
from pallas_attn.models.config.gemma import Gemma4Config
from pallas_attn.models.config.gqa import GQAConfig
from pallas_attn.models.config.rope import YarnConfig
from pallas_attn.models.config.windows import LOCAL_KIND

_tiny = functools.partial(
    DeepSeekConfig,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    max_position_embeddings=2560,
)

# Latent widths of all published DeepSeek models.
_wide = functools.partial(
    DeepSeekConfig,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
    max_position_embeddings=163840,
)

_tiny_heads = functools.partial(
    GQAConfig,
    vocab_size=512,
    hidden_size=128,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
)

_V3_TINY = _tiny(
    model_type="deepseek_v3",
    q_lora_rank=64,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    yarn=YarnConfig(factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
)

PRESETS = {
    "v3-tiny": _V3_TINY,
    "v32-tiny": dataclasses.replace(
        _V3_TINY, model_type="deepseek_v32", kv_lora_rank=128, index_topk=48, index_n_heads=8, index_head_dim=32
    ),
    "glm-tiny": _tiny(
        model_type="glm_moe_dsa",
        num_hidden_layers=4,
        q_lora_rank=64,
        kv_lora_rank=128,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        index_topk=48,
        index_n_heads=8,
        index_head_dim=32,
        indexer_types=("full", "shared", "shared", "full"),
    ),
    "v2-lite-tiny": _tiny(
        model_type="deepseek_v2",
        q_lora_rank=None,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        yarn=YarnConfig(factor=40.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707),
    ),
    "mla-25m": _wide(
        model_type="deepseek_v3",
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        q_lora_rank=384,
        moe_intermediate_size=192,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        yarn=YarnConfig(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
    ),
    "v2-lite": _wide(
        model_type="deepseek_v2",
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_hidden_layers=27,
        num_attention_heads=16,
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        yarn=YarnConfig(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707),
        bos_token_id=100000,
        eos_token_ids=(100001,),
        dtype="bfloat16",
    ),
}
"""Configurations of models with latent attention (MLA) by name. `v3-tiny`, `v32-tiny`, `glm-tiny` and `v2-lite-tiny`
are for demonstrations and tests. `mla-25m` is for benchmarks on a CPU and has the latent widths of published models.
`v2-lite` is DeepSeek-V2-Lite.
"""

GQA_PRESETS = {
    "qwen3-tiny": _tiny_heads(
        model_type="qwen3",
        intermediate_size=256,
        num_hidden_layers=3,
        rope_theta=1e6,
        max_position_embeddings=2560,
    ),
    "gpt-oss-tiny": _tiny_heads(
        model_type="gpt_oss",
        intermediate_size=64,
        num_hidden_layers=4,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_theta=150000.0,
        rope_scaling=YarnConfig(factor=32.0, original_max_position_embeddings=64, truncate=False),
        windows=(32, None, 32, None),
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        attention_bias=True,
    ),
    "gpt-oss-20b": GQAConfig(
        model_type="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        rope_theta=150000.0,
        rope_scaling=YarnConfig(factor=32.0, original_max_position_embeddings=4096, truncate=False),
        windows=(128, None) * 12,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        attention_bias=True,
        eos_token_ids=(200002,),
        dtype="bfloat16",
    ),
}
"""Configurations of models with grouped-query attention by name. `qwen3-tiny` and `gpt-oss-tiny` are for demonstrations
and tests. `gpt-oss-20b` is the published model, with experts in bfloat16 instead of MXFP4.
"""

GEMMA_PRESETS = {
    "gemma4-tiny": Gemma4Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=("sliding_attention", "sliding_attention", "full_attention") * 2,
        sliding_window=32,
        num_global_key_value_heads=2,
        global_head_dim=64,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=512,
        final_logit_softcapping=30.0,
        max_position_embeddings=2560,
    ),
}
"""Configurations of Gemma 4 models by name. `gemma4-tiny`, with the structure of Gemma 4 E2B, is for demonstrations and
tests.
"""

V4_PRESETS = {
    "v4-tiny": DeepseekV4Config(
        vocab_size=512,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        layer_types=(LOCAL_KIND, CSA_KIND, HCA_KIND, CSA_KIND),
        mlp_layer_types=(HASH_MOE, HASH_MOE, SCORED_MOE, SCORED_MOE),
        sliding_window=24,
        index_topk=12,
        index_n_heads=8,
        index_head_dim=64,
        hca_rate=16,
        routed_scaling_factor=1.5,
        yarn=YarnConfig(factor=16.0, original_max_position_embeddings=128, attention_factor=1.0),
        max_position_embeddings=2048,
    ),
}
"""Configurations of DeepSeek-V4 models by name. `v4-tiny`, with layers of all kinds, is for demonstrations and tests.
"""
