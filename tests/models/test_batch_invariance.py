"""Batch-invariant engines: a request's logits have the same bits alone and next to other requests.

The sampler is replaced by a function that hashes all bits of a row of logits to a token. So a difference in one bit
changes all later tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import GQA_PRESETS, ModelConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.engine import Engine, EngineConfig, EngineStats, SamplingParams, Speculation
from pallas_attn.models.engine.speculation import step as speculative_step
from pallas_attn.models.engine.step import plain as plain_step
from tests.models import engine_case, test_engine_windows, test_gqa_hopper
from tests.models.engine_case import PROMPTS
from tests.models.proposer_case import KnowingProposer, tell

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SIZES = EngineConfig(
    num_pages=22, page_size=4, max_batched_tokens=13, max_num_seqs=3, max_model_len=96, batch_invariant=True
)


def draw_bits(logits, rows, edit):
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    odd = 2 * jnp.arange(logits.shape[-1], dtype=jnp.int32) + 1
    mixed = jnp.sum(bits * odd[None], axis=-1, dtype=jnp.int32)  # wraps around, so the sum does not depend on the order
    return mixed & (logits.shape[-1] - 1)


def expect_equal_bits(model: Decoder, sizes: EngineConfig, prompts: list[list[int]], pages_alone: int) -> EngineStats:
    """Check that the tokens of each prompt are the same in an engine of its own and together with the other prompts.

    The runs together have chunked prefill, prefix hits and, with few pages, preemptions. The run of single prompts has
    no prefix cache.
    """
    together = Engine(model, sizes)
    alone = Engine(model, dataclasses.replace(sizes, prefix_caching=False, num_pages=pages_alone))
    if pages_alone == sizes.num_pages:
        alone._runner._programs.forward = together._runner._programs.forward
        alone._runner._programs.shared = together._runner._programs.shared
    wanted = [alone.generate([prompt], PARAMS)[0].output_ids for prompt in prompts]
    assert [output.output_ids for output in together.generate(prompts, PARAMS)] == wanted
    assert [output.output_ids for output in together.generate(prompts[::-1], PARAMS)] == wanted[::-1]
    stats = together.stats()
    assert stats.prefix_hit_rate > 0
    assert stats.compilations == 1
    return stats


GPT_OSS = dataclasses.replace(GQA_PRESETS["gpt-oss-tiny"], num_hidden_layers=2, vocab_size=64, windows=(8, None))


@pytest.mark.parametrize(
    ("config", "implementation", "num_pages", "pages_alone"),
    [
        pytest.param(engine_case.CONFIG, "xla", 22, 96, id="latents and experts, other pages"),
        pytest.param(test_engine_windows.CONFIG, "xla", 14, 14, id="windows of heads", marks=pytest.mark.slow),
        pytest.param(GPT_OSS, "xla", 22, 22, id="sinks and experts", marks=pytest.mark.slow),
        pytest.param(test_engine_windows.CONFIG, "reference", 14, 14, id="dense oracle", marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_other_requests(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, implementation: str, num_pages: int, pages_alone: int
):
    monkeypatch.setattr(plain_step, "draw", draw_bits)
    model = random_model(config, seed=3, settings=AttentionSettings(implementation=implementation))
    stats = expect_equal_bits(model, dataclasses.replace(SIZES, num_pages=num_pages), [*PROMPTS], pages_alone)
    assert stats.preemptions > 0


@pytest.mark.slow
def test_bits_do_not_depend_on_drafts(monkeypatch: pytest.MonkeyPatch):
    """With speculative decoding, a token has another row index in the step and other neighbours than without."""
    monkeypatch.setattr(speculative_step, "draw", draw_bits)
    config = dataclasses.replace(engine_case.CONFIG, num_hidden_layers=1)
    speculate = Speculation(KnowingProposer([], 0.0, config.vocab_size), 3, adaptive=False)
    engine = Engine(random_model(config, seed=3), dataclasses.replace(SIZES, speculate=speculate))
    wanted = [engine.generate([prompt], PARAMS)[0].output_ids for prompt in PROMPTS]
    sequences = [[*prompt, *output] for prompt, output in zip(PROMPTS, wanted, strict=True)]
    for share in (1.0, 0.6):
        tell(engine, sequences, share)
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [output.output_ids for output in outputs] == wanted
        assert all(sum(output.accepted) > 0 for output in outputs)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.compilations == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", test_gqa_hopper.CONFIGS)
def test_bits_do_not_depend_on_other_requests_on_hopper(monkeypatch, name):
    if getattr(jax.local_devices()[0], "compute_capability", "") != "9.0":
        pytest.skip("kernels are for compute capability 9.0")
    monkeypatch.setattr(plain_step, "draw", draw_bits)
    settings = AttentionSettings(implementation="mosaic")
    model = random_model(test_gqa_hopper.CONFIGS[name], seed=5, dtype=jnp.bfloat16, settings=settings)
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 512, 300).tolist()
    prompts = [prefix + rng.integers(0, 512, n).tolist() for n in (1, 250)]
    prompts += [rng.integers(0, 512, n).tolist() for n in (500, 70, 520)]
    sizes = EngineConfig(page_size=64, max_batched_tokens=128, max_num_seqs=4, max_model_len=640, batch_invariant=True)
    expect_equal_bits(model, dataclasses.replace(sizes, num_pages=14), prompts, pages_alone=64)


def test_settings_without_batch_invariance_are_rejected():
    with pytest.raises(
        NotImplementedError, match="batch_invariant: expanded attention computes chunk and cached prefix separately"
    ):
        AttentionSettings(mla="expand", batch_invariant=True)
    expanding = random_model(engine_case.CONFIG, seed=3, settings=AttentionSettings(mla="expand"))
    with pytest.raises(
        NotImplementedError, match="batch_invariant: expanded attention computes chunk and cached prefix separately"
    ):
        Engine(expanding, SIZES)
    with pytest.raises(
        ValueError, match=r"prefill_buckets: expected None or \(13,\) if batch_invariant, got \(4, 13\)"
    ):
        dataclasses.replace(SIZES, prefill_buckets=(4, 13))
