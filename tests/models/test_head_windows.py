"""Models with attention windows per head compared with a dense computation with explicit masks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL
from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.checkpoints.weights import checkpoint_shapes, random_tensor
from pallas_attn.models.config import GQA_PRESETS, HeadWindows
from pallas_attn.models.decoder import Decoder, split_model
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.verify import verify
from tests.models import gqa_oracle
from tests.models.step_case import PAGE_SIZE, Pages, step

CONFIG = dataclasses.replace(
    GQA_PRESETS["qwen3-tiny"],
    vocab_size=64,
    hidden_size=64,
    num_attention_heads=6,
    num_key_value_heads=3,
    num_hidden_layers=2,
    # These windows cover heads without a window, a window of one token, sink tokens that do not fit in one page, and
    # windows that are multiples of a page.
    windows=(HeadWindows((FULL, 9, 1), (0, 3, 10)), HeadWindows((8, FULL, 16), (8, 0, 0))),
)
SEED = 4
PROMPT = np.random.default_rng(SEED).integers(0, 64, 45).tolist()
NEW_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


@functools.cache
def model() -> Decoder:
    return random_model(CONFIG, SEED)


@functools.cache
def expected() -> tuple[np.ndarray, list[int]]:
    """Return the logits of the prompt and the next greedy tokens, by the dense computation.

    The two largest logits differ enough at each token, so rounding cannot change a token.
    """
    tensors = {name: random_tensor(name, shape, SEED) for name, shape in checkpoint_shapes(CONFIG).items()}
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + NEW_TOKENS:
        logits = gqa_oracle.forward(CONFIG, tensors, tokens)
        second, first = np.sort(logits[-1])[-2:]
        assert first - second > 1e-3
        tokens.append(int(logits[-1].argmax()))
    return logits[: len(PROMPT)], tokens[len(PROMPT) :]


@pytest.mark.slow
def test_prompt_logits_equal_masked_attention():
    pages = Pages.scatter(1, -(-len(PROMPT) // PAGE_SIZE))
    stepping, weights = split_model(model())
    caches = pages.allocate(model(), fill=np.nan)
    metadata = step(pages, prefill=[(0, 0, len(PROMPT))])
    logits, _ = jax.jit(stepping)(weights, jnp.asarray(PROMPT, jnp.int32), caches, metadata)
    np.testing.assert_allclose(np.asarray(logits), expected()[0], atol=1e-4)


def test_windows_of_each_layer_change_logits():
    """Windows of each layer change the logits, so the comparisons in this file are meaningful."""
    assert CONFIG.windows is not None
    tensors = {name: random_tensor(name, shape, SEED) for name, shape in checkpoint_shapes(CONFIG).items()}
    for layer in (0, 1):
        windows = tuple(None if i == layer else window for i, window in enumerate(CONFIG.windows))
        logits = gqa_oracle.forward(dataclasses.replace(CONFIG, windows=windows), tensors, PROMPT)
        assert np.abs(logits - expected()[0]).max() > 0.1


ENGINES = {
    "chunks of 16": {"page_size": 8, "num_pages": 16, "max_batched_tokens": 16},
    "chunks of 7, pages of one token": {"page_size": 1, "num_pages": 256, "max_batched_tokens": 7},
}


@pytest.mark.slow  # slow, because test_engine_windows.py tests an engine with windows per head
@pytest.mark.parametrize("sizes", ENGINES.values(), ids=ENGINES)
def test_engine_tokens_equal_masked_attention(sizes: dict[str, Any]):
    """Tokens of two concurrent requests, and of a request with a cached prefix, equal the dense computation."""
    buckets = {"decode_buckets": (2,), "prefill_buckets": (sizes["max_batched_tokens"],)}
    engine = Engine(model(), EngineConfig(max_num_seqs=2, max_model_len=64, **sizes, **buckets))
    outputs = engine.generate([PROMPT, PROMPT], GREEDY) + engine.generate([PROMPT], GREEDY)
    assert [output.output_ids for output in outputs] == [expected()[1]] * 3
    assert outputs[2].cached_tokens > 0


@pytest.mark.slow
def test_verification_detects_missing_windows():
    _, tokens = expected()
    assert verify(model(), [Decoded(PROMPT, tokens, GREEDY)], max_len=64).passed
    blind = random_model(dataclasses.replace(CONFIG, windows=None), SEED)
    assert not verify(blind, [Decoded(PROMPT, tokens, GREEDY)], max_len=64).passed
