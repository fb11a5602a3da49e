"""The engine with the interpreted Blackwell kernels: each model family decodes the tokens of a plain uncached run.

The models of tests/goldens are not suitable: they are in float32, and their heads (16 to 24 columns) are narrower than
the kernels support. The models here are of similar size otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest

from pallas_attn import FULL
from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import GQA_PRESETS, HeadWindows
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.verify import verify
from pallas_attn.mosaic.primitives import basics
from pallas_attn.runtime.device import INTERPRET_VARIABLE
from tests.kit import harness
from tests.models.engine_case import CONFIG

# Slow, because interpreting an engine takes almost a minute. The warning is ignored, because masked keys may be NaN in
# matrix products.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")]

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
GQA: dict[str, Any] = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LATENTS: dict[str, Any] = SMALL | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
FAMILIES = {
    "qwen3": dataclasses.replace(GQA_PRESETS["qwen3-tiny"], **GQA),
    "head windows": dataclasses.replace(GQA_PRESETS["qwen3-tiny"], **GQA, windows=(HeadWindows((FULL, 7), (0, 2)),)),
    # One expert, because the selection among several experts may depend on the last bit of bfloat16.
    "gpt-oss": dataclasses.replace(
        GQA_PRESETS["gpt-oss-tiny"], **GQA, num_local_experts=1, num_experts_per_tok=1, windows=(9,)
    ),
    "deepseek": dataclasses.replace(CONFIG, **LATENTS, kv_lora_rank=128, first_k_dense_replace=1),
}


@pytest.fixture(autouse=True)
def interpreter(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    few = mock.patch.object(basics, "multiprocessors", return_value=2)  # few CTAs, because every CTA is interpreted
    with mock.patch.dict("os.environ", {INTERPRET_VARIABLE: "10.0"}), few, harness.interpreting(capsys):
        yield


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_a_plain_run(name: str) -> None:
    """With the Blackwell kernels, tokens equal a plain uncached run.

    The second of two prompts is prefilled in two chunks while the first request decodes.
    """
    model = random_model(
        FAMILIES[name], seed=5, dtype=jnp.bfloat16, settings=AttentionSettings(implementation="mosaic")
    )
    engine = Engine(model, EngineConfig(num_pages=8, page_size=16, max_batched_tokens=24, max_num_seqs=2))
    prompts = [[7, 3, 60, 22, 5], [41, 9, 18, 33, 50, 2, 11, 28] * 4]
    outputs = engine.generate(prompts, PARAMS)
    decoded = [Decoded(p, out.output_ids, PARAMS) for p, out in zip(prompts, outputs, strict=True)]
    verification = verify(model, decoded, max_len=64)
    assert verification.passed, verification
    assert verification.equal >= 5, verification
