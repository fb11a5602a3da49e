"""Models with grouped-query attention on a Hopper GPU: windows per head, learned sinks, and experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL
from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import GQA_PRESETS, GQAConfig, HeadWindows
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.verify import verify
from pallas_attn.models.moe import expert_gemms
from pallas_attn.models.moe.experts import Experts
from tests.models.test_moe import biased_experts, draw_experts

MAX_LEN, MAX_TOKENS = 640, 24
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

HEADS = HeadWindows((FULL, 96, 200, 64), (0, 5, 0, 70))
WIDE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
CONFIGS = {
    "windows of heads": dataclasses.replace(
        GQA_PRESETS["qwen3-tiny"],
        **WIDE,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        windows=(HEADS, None, HEADS),
    ),
    # One expert, because the selection among several experts depends on the last bit of bfloat16.
    "sinks and windows of layers": dataclasses.replace(
        GQA_PRESETS["gpt-oss-tiny"],
        **WIDE,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=1,
        num_experts_per_tok=1,
        windows=(128, None, 128),
    ),
}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if getattr(jax.local_devices()[0], "compute_capability", "") != "9.0":
        pytest.skip("kernels are for compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_kernel_tokens_equal_plain_run(config: GQAConfig):
    """With the Hopper kernels, tokens equal a plain uncached run.

    Prompts share a prefix, are prefilled in chunks and decode concurrently.
    """
    model = random_model(config, seed=5, dtype=jnp.bfloat16, settings=AttentionSettings(implementation="mosaic"))
    engine = Engine(model, EngineConfig(num_pages=64, page_size=64, max_batched_tokens=128, max_num_seqs=4))
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, config.vocab_size, 300).tolist()
    prompts = [prefix + rng.integers(0, config.vocab_size, n).tolist() for n in (1, 5, 250)]
    prompts.append(rng.integers(0, config.vocab_size, 70).tolist())
    outputs = [*engine.generate(prompts, PARAMS), *engine.generate(prompts[:1], PARAMS)]
    requests = zip([*prompts, prompts[0]], outputs, strict=True)
    decoded = [Decoded(prompt, output.output_ids, PARAMS) for prompt, output in requests]
    verification = verify(model, decoded, max_len=MAX_LEN)
    assert verification.passed, verification
    assert verification.equal > 0.9 * len(decoded) * MAX_TOKENS


@pytest.mark.gpu
def test_grouped_gemm_at_gpt_oss_width(rng):
    """The grouped GEMM kernel equals the portable loop over blocks of rows at the width of gpt-oss.

    The width, 2880, is not a multiple of a tile.
    """
    experts = biased_experts(rng, Experts(*draw_experts(rng, 2880, 2880, jnp.bfloat16)))
    assert expert_gemms.hopper_supports(experts)
    sizes = jnp.asarray([700, 0, 3, 321], jnp.int32)
    rows, source = jnp.asarray(rng.standard_normal((1024, 2880)), jnp.bfloat16), jnp.arange(1024, dtype=jnp.int32)
    (out, row), (wanted, place) = (
        multiply(rows, source, experts, sizes)
        for multiply in (jax.jit(expert_gemms.hopper_grouped), expert_gemms.blockwise)
    )
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (out[row], wanted[place])), atol=0.06, rtol=0.02)
