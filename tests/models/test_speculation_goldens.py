"""Speculative decoding of every family's golden gives the tokens of transformers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoints import load_model
from models.engine import DraftModelProposer, Engine, EngineConfig, NGramProposer, SamplingParams, Speculation
from tests.models.test_parity import GOLDENS, LOGIT_TOLERANCE, MARGIN, NAMES, golden

NEW_TOKENS = 24


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["ngram", "draft"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name: str, proposer: str):
    """The draft model is the model itself, so that nearly all drafts are right. Prompt logits are captured beside."""
    model, expected = load_model(GOLDENS / name, jnp.float32), golden(name)
    made = NGramProposer(shortest=1) if proposer == "ngram" else DraftModelProposer(model)
    sizes = EngineConfig(
        num_pages=160,
        page_size=4,
        max_batched_tokens=32,
        max_num_seqs=4,
        max_model_len=320,
        decode_buckets=(4,),
        prefill_buckets=(32,),
        speculate=Speculation(made, 3, adaptive=False),
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
    assert proposer == "ngram" or accepted > 0.9 * drafted
