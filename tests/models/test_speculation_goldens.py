"""Speculative decoding gives the tokens of Hugging Face transformers for the golden of every model family."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_model, load_mtp
from pallas_attn.models.engine import (
    DraftModelProposer,
    Engine,
    EngineConfig,
    MTPProposer,
    NGramProposer,
    Proposer,
    SamplingParams,
    Speculation,
)
from tests.models.test_parity import GOLDENS, LOGIT_TOLERANCE, MARGIN, NAMES, golden

NEW_TOKENS = 24


@pytest.mark.slow
@pytest.mark.parametrize(("name", "proposer"), [*itertools.product(NAMES, ["ngram", "draft"]), ("v3-fp8", "mtp")])
def test_tokens_equal_transformers(name: str, proposer: str):
    """With each kind of drafts, tokens and captured prompt logits equal transformers.

    The draft model is the target model itself, so nearly all its drafts are accepted. The prediction module has random
    weights.
    """
    model, expected = load_model(GOLDENS / name, jnp.float32), golden(name)
    makers: dict[str, Callable[[], Proposer]] = {
        "ngram": lambda: NGramProposer(shortest=1),
        "draft": lambda: DraftModelProposer(model),
        "mtp": lambda: MTPProposer(load_mtp(GOLDENS / name, model)),
    }
    sizes = EngineConfig(
        num_pages=160,
        page_size=4,
        max_batched_tokens=32,
        max_num_seqs=4,
        max_model_len=min(320, model.config.max_position_embeddings),
        decode_buckets=(4,),
        prefill_buckets=(32,),
        speculate=Speculation(makers[proposer](), 3, adaptive=False),
    )
    engine = Engine(model, sizes, capture_logits=True)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in expected.prompts]
    while engine.has_unfinished:
        engine.step()
    outputs = [engine.output(i) for i in ids]
    for request_id, output, wanted, margins, logits in zip(
        ids, outputs, expected["tokens"], expected["margins"], expected["logits"], strict=True
    ):
        sure = int(np.argmax(np.append(margins, 0) < MARGIN))
        assert output.output_ids[:sure] == wanted[:sure].tolist()
        computed = engine.prompt_logits(request_id)[output.cached_tokens :]
        np.testing.assert_allclose(computed, logits[output.cached_tokens :], atol=LOGIT_TOLERANCE)
    drafted, accepted = (sum(sum(getattr(o, kind)) for o in outputs) for kind in ("drafted", "accepted"))
    assert drafted > 0
    assert proposer != "draft" or accepted > 0.9 * drafted
