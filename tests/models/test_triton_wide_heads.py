"""Models with heads of 256 and 512 columns with Triton kernels for all attention operations.

The goldens of Gemma 4 and DeepSeek-V4 have heads of at most 64 columns. These random models have the head widths of the
published models, few heads and few other columns. They run in bfloat16 and are compared with the implementation `xla`,
which rounds in the same way. The kernels are interpreted on a CPU and compiled on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import DeepseekV4Config, Gemma4Config
from pallas_attn.models.config.deepseek_v4 import CSA_KIND, HASH_MOE, HCA_KIND, SCORED_MOE
from pallas_attn.models.config.windows import GLOBAL_KIND, LOCAL_KIND
from pallas_attn.models.decoder import AttentionSettings, Decoder, split_model
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.verify import verify
from tests.kit.slow_cases import slow_cases
from tests.models.step_case import PAGE_SIZE, Pages, step

GEMMA4 = Gemma4Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=256,
    layer_types=(LOCAL_KIND, GLOBAL_KIND, GLOBAL_KIND),
    sliding_window=12,
    num_global_key_value_heads=1,
    global_head_dim=512,
    attention_k_eq_v=True,
    num_kv_shared_layers=1,
    max_position_embeddings=256,
)
"""The last layer uses the cache of the layer before."""

V4 = DeepseekV4Config(
    vocab_size=64,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    layer_types=(LOCAL_KIND, CSA_KIND, HCA_KIND),
    mlp_layer_types=(HASH_MOE, SCORED_MOE, SCORED_MOE),
    sliding_window=12,
    index_topk=4,
    index_n_heads=2,
    index_head_dim=128,
    csa_rate=4,
    hca_rate=8,
    max_position_embeddings=256,
)
MODELS = {"gemma4": GEMMA4, "v4": V4}
QUICK = {
    "gemma4": dataclasses.replace(
        GEMMA4, num_hidden_layers=2, layer_types=GEMMA4.layer_types[:2], num_kv_shared_layers=0
    ),
    "v4": dataclasses.replace(
        V4, num_hidden_layers=2, layer_types=V4.layer_types[1:], mlp_layer_types=V4.mlp_layer_types[1:]
    ),
}
"""The models with two layers: with and without a window, or with entries of both kinds."""

LENGTHS = (21, 35)
LIMIT = 0.1
"""Maximum difference of the logits of a token. Correct kernels have at most 0.03, `MISTAKES` 0.3 or more."""

MISTAKES = [
    ("gemma4", {"sliding_window": 13}),
    ("gemma4", {"global_rotary_share": 0.125}),
    ("v4", {"sliding_window": 13}),
    ("v4", {"index_topk": 5}),
]
"""Changes of the configuration that the comparison of the logits must notice."""

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


@functools.cache
def model_of(config: Gemma4Config | DeepseekV4Config, implementation: str) -> Decoder:
    return random_model(config, 1, jnp.bfloat16, AttentionSettings(implementation=implementation))


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = np.random.default_rng(2)
    return [draw.integers(0, 64, length).tolist() for length in lengths]


@functools.cache
def logits_of(config: Gemma4Config | DeepseekV4Config, implementation: str, num_steps: int = 3) -> np.ndarray:
    """Return the logits of the first steps of these: two prompt chunks, a decode row and a chunk, two decode rows.
    Pages begin as NaN."""
    run, weights = split_model(model_of(config, implementation))
    tokens, pages = prompts([length + 2 for length in LENGTHS]), Pages.scatter(2, -(-max(LENGTHS) // PAGE_SIZE) + 1)
    caches: Any = pages.allocate(model_of(config, implementation), fill=np.nan)
    first, second = LENGTHS
    steps = [
        (step(pages, prefill=[(0, 0, first), (1, 0, 9)]), tokens[0][:first] + tokens[1][:9]),
        (step(pages, [(0, first)], [(1, 9, second)]), tokens[0][first : first + 1] + tokens[1][9:second]),
        (step(pages, [(0, first + 1), (1, second)]), [tokens[0][first + 1], tokens[1][second]]),
    ]
    found = []
    for metadata, ids in steps[:num_steps]:
        logits, caches = jax.jit(run)(weights, jnp.asarray(ids, jnp.int32), caches, metadata)
        found.append(np.asarray(logits, np.float32))
    return np.concatenate(found)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of the logits of a token: root mean square over the vocabulary, as a share of the
    root mean square of all expected logits."""
    of_tokens = np.sqrt(np.square(found - expected).mean(axis=-1))
    return float(of_tokens.max() / np.sqrt(np.square(expected).mean()))


def expect_equal(config: Gemma4Config | DeepseekV4Config, num_steps: int) -> None:
    """Assert that logits with Triton kernels are close to logits with XLA, and have the same largest elements.

    `implementation` names only Triton, so no attention operation can fall back to another implementation.
    """
    found, expected = (logits_of(config, implementation, num_steps) for implementation in ("triton", "xla"))
    assert difference(found, expected) < LIMIT
    np.testing.assert_array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))


@slow_cases("v4")
@pytest.mark.parametrize("name", QUICK)
def test_prompt_logits_of_two_layers(name: str) -> None:
    expect_equal(QUICK[name], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str) -> None:
    expect_equal(MODELS[name], 3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), MISTAKES)
def test_a_mistake_is_noticed(name: str, change: dict[str, Any]) -> None:
    mistaken = dataclasses.replace(MODELS[name], **change)
    assert difference(logits_of(mistaken, "triton"), logits_of(MODELS[name], "xla")) > 2 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("name", MODELS)
def test_the_engine(name: str, cache_dtype: str | None) -> None:
    """Tokens of the engine with Triton kernels equal a plain uncached run.

    Prompts are prefilled in chunks while other requests decode, and a prefix is reused from the prefix cache.
    """
    model, sizes = model_of(MODELS[name], "triton"), EngineConfig(
        num_pages=24, page_size=16, max_batched_tokens=24, max_num_seqs=2, max_model_len=64, cache_dtype=cache_dtype,
        decode_buckets=(2,), prefill_buckets=(24,), separate_prefill=False,
    )  # fmt: skip
    first, second = prompts()
    requests = [first, second, second[:32] + first[:3]]
    engine = Engine(model, sizes)
    outputs = engine.generate(requests, PARAMS)
    assert outputs[2].cached_tokens == 32
    decoded = [Decoded(p, out.output_ids, PARAMS) for p, out in zip(requests, outputs, strict=True)]
    verification = verify(model, decoded, max_len=64, tolerance=0.5, cache_dtype=cache_dtype)
    assert verification.passed, verification
    assert verification.equal >= 3 * verification.tied, verification
