"""DeepSeek-V4: batch-invariant steps, and steps of several programs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import V4_PRESETS
from pallas_attn.models.engine import Engine, EngineConfig
from pallas_attn.models.engine import runner as engine_runner
from pallas_attn.models.engine.step import plain
from pallas_attn.models.engine.step.layered import StepPrograms
from tests.models.golden_case import GREEDY, golden, loaded
from tests.models.test_batch_invariance import draw_bits, expect_equal_bits
from tests.models.test_parity import LOGIT_TOLERANCE

MAX_LEN = 176


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 64])
def test_bits_do_not_depend_on_other_requests(page_size: int, monkeypatch: pytest.MonkeyPatch):
    """A page of 64 tokens has the newest compressor rows only."""
    monkeypatch.setattr(plain, "draw", draw_bits)
    config = dataclasses.replace(V4_PRESETS["v4-tiny"], vocab_size=64)
    sizes = EngineConfig(
        num_pages=4 if page_size == 64 else 12, page_size=page_size, max_batched_tokens=21, max_num_seqs=3,
        max_model_len=MAX_LEN, batch_invariant=True, recycling=False,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    prefix = draw.integers(0, 64, 70).tolist()
    prompts = [prefix + draw.integers(0, 64, 9).tolist(), draw.integers(0, 64, 3).tolist(), prefix[:67]]
    prompts += [draw.integers(0, 64, 90).tolist()]
    stats = expect_equal_bits(random_model(config, seed=3), sizes, prompts, pages_alone=sizes.num_pages)
    assert (stats.preemptions > 0) == (page_size == 16)


@pytest.mark.slow
def test_steps_of_several_programs(monkeypatch: pytest.MonkeyPatch):
    """Tokens, prompt logits and log probabilities equal a step of one program. Each program has two layers."""
    monkeypatch.setattr(engine_runner, "CONCURRENT_TOKENS", 0)
    sizes = EngineConfig(
        num_pages=40, page_size=8, max_batched_tokens=32, max_num_seqs=4, max_model_len=MAX_LEN, decode_buckets=(4,),
        prefill_buckets=(32,), prefix_caching=False,
    )  # fmt: skip
    found, params = [], dataclasses.replace(GREEDY, prompt_logprobs=1)
    for most_layers in (8, 2):
        monkeypatch.setattr(engine_runner, "MAX_LAYERS_PER_PROGRAM", most_layers)
        engine = Engine(loaded("v4"), sizes)
        outputs = engine.generate(golden("v4").prompts[1:3], params)
        for output, wanted in zip(outputs, golden("v4")["tokens"][1:3], strict=True):
            np.testing.assert_array_equal(output.output_ids, wanted)
        found.append([token.logprob for output in outputs for token in output.prompt_logprobs or () if token])
        steps = [step for step in engine._runner._programs.forward.values() if isinstance(step, StepPrograms)]
        assert bool(steps) == (most_layers == 2)
        assert all([len(layers) for layers in step.layer_ranges] == [2, 2] for step in steps)
    np.testing.assert_allclose(*found, atol=LOGIT_TOLERANCE)
    assert len(found[0]) > 40
