"""The engine with the Hopper kernels, at DeepSeek's widths, gives the tokens of a plain uncached run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.verify import verify
from tests.models.engine_case import CONFIG

MAX_LEN, MAX_TOKENS = 640, 24
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
WIDE = dataclasses.replace(
    CONFIG,
    hidden_size=256,
    vocab_size=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=1024,
    first_k_dense_replace=2,
)
"""A configuration without experts, because the choice of an expert may depend on the last bit of bfloat16."""


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 72])
def test_kernels_give_the_tokens_of_a_plain_run(heads: int) -> None:
    """Tokens equal a plain run for a small and a large number of heads, which use different kernels.

    Prompts share a prefix, are prefilled in chunks and decode together.
    """
    if getattr(jax.local_devices()[0], "compute_capability", "") != "9.0":
        pytest.skip("kernels are for compute capability 9.0")
    config = dataclasses.replace(WIDE, num_attention_heads=heads)
    settings = AttentionSettings(implementation="mosaic")
    model = random_model(config, seed=5, dtype=jnp.bfloat16, settings=settings)
    engine = Engine(model, EngineConfig(num_pages=64, page_size=64, max_batched_tokens=128, max_num_seqs=4))
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, config.vocab_size, 300).tolist()
    prompts = [prefix + rng.integers(0, config.vocab_size, n).tolist() for n in (1, 5, 250)]
    prompts.append(rng.integers(0, config.vocab_size, 70).tolist())
    outputs = engine.generate(prompts, PARAMS)
    again = engine.generate(prompts[:1], PARAMS)
    decoded = [
        Decoded(prompt, output.output_ids, PARAMS)
        for prompt, output in zip([*prompts, prompts[0]], [*outputs, *again], strict=True)
    ]
    verification = verify(model, decoded, max_len=MAX_LEN)
    assert verification.passed, verification
    assert verification.equal > 0.9 * len(decoded) * MAX_TOKENS
