"""Argument shapes of the layers of real models, for benchmarks and for the tests on real sizes
(tests/kit/real_sizes.py).
"""

import dataclasses
import functools
from dataclasses import dataclass

from pallas_attn.models.config import PRESETS, DeepseekV4Config, Gemma4Config, YarnConfig
from pallas_attn.models.config.deepseek_v4 import CSA_KIND, HASH_MOE, HCA_KIND, SCORED_MOE
from pallas_attn.models.config.windows import GLOBAL_KIND, LOCAL_KIND

DEEPSEEK_V3 = dataclasses.replace(
    PRESETS["mla-25m"],
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=2,
    num_attention_heads=128,
    q_lora_rank=1536,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    dtype="bfloat16",
)
"""Configuration of a model with DeepSeek-V3's widths and two layers: one dense layer and one expert layer."""


DEEPSEEK_V4_FLASH = DeepseekV4Config(
    vocab_size=129280,
    hidden_size=4096,
    moe_intermediate_size=2048,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    num_experts_per_tok=6,
    layer_types=(LOCAL_KIND, LOCAL_KIND, *(CSA_KIND, HCA_KIND) * 20, CSA_KIND),
    mlp_layer_types=(HASH_MOE,) * 3 + (SCORED_MOE,) * 40,
    sliding_window=128,
    index_topk=512,
    index_n_heads=64,
    index_head_dim=128,
    routed_scaling_factor=1.5,
    yarn=YarnConfig(factor=16.0, original_max_position_embeddings=65536, attention_factor=1.0),
    max_position_embeddings=1048576,
    dtype="bfloat16",
)
"""Configuration of DeepSeek-V4-Flash with unquantised weights."""

_gemma = functools.partial(
    Gemma4Config,
    vocab_size=262144,
    head_dim=256,
    sliding_window=1024,
    attention_k_eq_v=True,
    final_logit_softcapping=30.0,
    max_position_embeddings=262144,
    dtype="bfloat16",
)

GEMMA4_31B = _gemma(
    hidden_size=5376,
    intermediate_size=21504,
    num_hidden_layers=60,
    num_attention_heads=32,
    num_key_value_heads=16,
    num_global_key_value_heads=4,
    layer_types=(*(LOCAL_KIND,) * 5, GLOBAL_KIND) * 10,
)
"""Configuration of the text model of Gemma 4 31B."""

GEMMA4_26B = _gemma(
    hidden_size=2816,
    intermediate_size=2112,
    num_hidden_layers=30,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    layer_types=(*(LOCAL_KIND,) * 5, GLOBAL_KIND) * 5,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
)
"""Configuration of the text model of Gemma 4 26B A4B, a mixture of experts."""


@dataclass(frozen=True)
class Decode:
    """Shape of one layer's decode step.

    Attributes:
      batch: B sequences of at most `context` tokens.
      queries: Q tokens per sequence, including drafts.
      window: number of newest keys that a query sees; None for all.
      learned_sinks: whether the model has a sink logit per query head.
    """

    batch: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    queries: int = 1
    page_size: int = 64
    window: int | None = None
    learned_sinks: bool = False
    soft_cap: float | None = None


@dataclass(frozen=True)
class Prefill:
    """Shape of one layer's prefill chunk: `sequences` sequences of `new_tokens` after `cached_tokens`."""

    sequences: int
    new_tokens: int
    cached_tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 64
    window: int | None = None
    learned_sinks: bool = False
    soft_cap: float | None = None


DECODE = {
    "llama-3-8b": Decode(32, 8192, 32, 8, 128),
    "llama-3-70b": Decode(16, 8192, 64, 8, 128),
    "qwen3-32b, 3 drafts": Decode(16, 8192, 64, 8, 128, queries=4),
    "gemma-2-27b, local": Decode(32, 8192, 32, 16, 128, window=4096, soft_cap=50.0),
    "gemma-3-4b, local": Decode(64, 8192, 8, 4, 256, window=1024),
    "gpt-oss-120b, local": Decode(64, 8192, 64, 8, 64, window=128, learned_sinks=True),
    "gpt-oss-120b, full": Decode(64, 8192, 64, 8, 64, learned_sinks=True),
    "long context": Decode(1, 131072, 32, 8, 128),
}
"""Decode steps by model, and feature that distinguishes the step."""

PREFILL = {
    "llama-3-8b, first chunk": Prefill(4, 2048, 0, 32, 8, 128),
    "llama-3-8b, later chunk": Prefill(1, 2048, 30720, 32, 8, 128),
    "llama-3-8b, many short": Prefill(64, 64, 1024, 32, 8, 128),
    "gpt-oss-120b, local": Prefill(1, 4096, 4096, 64, 8, 64, window=128, learned_sinks=True),
    "gemma-2-27b, local": Prefill(1, 4096, 4096, 32, 16, 128, window=4096, soft_cap=50.0),
}
"""Prefill chunks by model, and feature that distinguishes the chunk."""


GEMMA4_LOCAL, GEMMA4_GLOBAL = ((16, 8, 256), (32, 16, 256)), ((16, 2, 512), (32, 4, 512))
"""(query heads, KV heads, head dimension) of the layers with a window and without a window in Gemma 4 26B and 31B."""


@dataclass(frozen=True)
class MlaDecode:
    """Shape of one MLA layer's decode step: `batch` sequences of at most `context` tokens, with `queries` new tokens
    each.
    """

    batch: int
    context: int
    heads: int
    queries: int = 1
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64


@dataclass(frozen=True)
class MlaPrefill:
    """Shape of one MLA layer's prefill chunk: `sequences` sequences of `new_tokens` after `cached_tokens`."""

    sequences: int
    new_tokens: int
    cached_tokens: int
    heads: int
    nope_dim: int = 128
    value_dim: int = 128
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64


MLA_DECODE = {
    "deepseek-v2-lite": MlaDecode(64, 8192, 16),
    "deepseek-v3": MlaDecode(32, 8192, 128),
    "deepseek-v3, 1 draft": MlaDecode(32, 8192, 128, queries=2),
    "deepseek-v3, an eighth of its heads": MlaDecode(64, 8192, 16, queries=2),
    "long context": MlaDecode(1, 131072, 128),
}
"""MLA decode steps by model, and feature that distinguishes the step."""

MLA_PREFILL = {
    "deepseek-v2-lite, first chunk": MlaPrefill(2, 2048, 0, 16),
    "deepseek-v2-lite, many short": MlaPrefill(32, 64, 1024, 16),
    "deepseek-v3, later chunk": MlaPrefill(1, 2048, 14336, 128),
}
"""MLA prefill chunks by model, and feature that distinguishes the chunk."""
