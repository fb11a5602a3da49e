"""Drafts on a mesh change no token: outputs equal plain decoding on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_model, random_model, random_mtp
from pallas_attn.models.config import ModelConfig
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
from tests.models.engine_case import PROMPTS, padded
from tests.models.proposer_case import KnowingProposer, KnowingTreeProposer, tell
from tests.models.test_mesh import FULL_HEADS, LATENT, PARAMS, WINDOWED, Sizes, devices_of, expect_plain, model
from tests.models.test_parity import GOLDENS, LOGIT_TOLERANCE, MARGIN, golden

NUM_DRAFTS = 3
VOCAB_SIZE = LATENT.vocab_size
PREDICTING = dataclasses.replace(LATENT, num_nextn_predict_layers=1)
SIZES = EngineConfig(num_pages=14, page_size=8, max_batched_tokens=16, max_num_seqs=4)
WINDOWS = EngineConfig(num_pages=36, page_size=2, max_batched_tokens=16, max_num_seqs=4, cache_dtype=jnp.int8)


@functools.cache
def known(config: ModelConfig) -> list[list[int]]:
    """Return each prompt followed by the tokens that one device generates."""
    engine = Engine(model(config), padded(dataclasses.replace(SIZES, num_pages=96)))
    outputs = engine.generate(PROMPTS, PARAMS)
    return [[*prompt, *output.output_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)]


def make(config: ModelConfig, devices: Sizes, proposer: Proposer, sizes: EngineConfig = SIZES) -> Engine:
    speculate = Speculation(proposer, NUM_DRAFTS, adaptive=False)
    mesh = devices_of(devices)
    return Engine(model(config, devices), padded(dataclasses.replace(sizes, mesh=mesh, speculate=speculate)))


def accepted_share(engine: Engine, config: ModelConfig, **cache: Any) -> float:
    """Continue all prompts, check that tokens equal one device, and return the share of accepted drafts."""
    before = engine.stats()
    expect_plain(config, engine.generate(PROMPTS, PARAMS), **cache)
    after = engine.stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    assert drafted > 0
    return (after.accepted_tokens - before.accepted_tokens) / drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [
        2,
        "data=2",
        *(pytest.param(devices, marks=pytest.mark.slow) for devices in ("data=2,expert=4", "context=2")),
        pytest.param("data=2,context=2", marks=pytest.mark.slow),
    ],
)
def test_right_and_wrong_drafts(devices: Sizes):
    """Tokens equal one device if all, some or none of the drafts are right.

    The traffic has chunked prefill, prefix hits, preemptions, and greedy and sampled tokens. The model has experts.
    """
    engine = make(LATENT, devices, KnowingProposer([], 1.0, VOCAB_SIZE))
    for share, (least, most) in {1.0: (0.9, 1.0), 0.6: (0.1, 0.9), 0.0: (0.0, 0.0)}.items():
        tell(engine, known(LATENT), share)
        assert least <= accepted_share(engine, LATENT) <= most, share
    assert engine.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, "data=2"])
def test_trees_of_drafts(devices: Sizes):
    engine = make(LATENT, devices, KnowingTreeProposer([], 1.0, VOCAB_SIZE))
    tell(engine, known(LATENT), 0.8)
    assert accepted_share(engine, LATENT) > 0.1


@pytest.mark.slow
def test_drafts_of_windowed_heads():
    """Rejected drafts change no token if heads with different windows are on different devices of the mesh."""
    engine = make(WINDOWED, 2, KnowingProposer([], 0.6, VOCAB_SIZE), WINDOWS)
    tell(engine, known(WINDOWED), 0.6)
    assert accepted_share(engine, WINDOWED, cache_dtype=jnp.int8) > 0.1


@pytest.mark.slow
def test_drafts_over_split_contexts_and_heads():
    engine = make(FULL_HEADS, "context=2,tensor=2", KnowingProposer([], 1.0, VOCAB_SIZE))
    tell(engine, known(FULL_HEADS), 1.0)
    assert accepted_share(engine, FULL_HEADS) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, *(pytest.param(d, marks=pytest.mark.slow) for d in ("data=2", "context=2"))])
def test_draft_model_on_the_mesh_of_the_target(devices: Sizes):
    """Tokens equal one device if target model and draft model are on the same mesh.

    The draft model is the target model itself, so nearly all drafts are accepted.
    """
    engine = make(LATENT, devices, DraftModelProposer(model(LATENT, devices)))
    assert accepted_share(engine, LATENT) > 0.9
    caches = engine._runner._last_tokens.proposer  # pyrefly: ignore[missing-attribute]
    assert {shard.data.shape[0] for shard in caches[0].pages.addressable_shards} == {SIZES.num_pages}


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [2, *(pytest.param(d, marks=pytest.mark.slow) for d in ("data=2", "data=2,expert=4", "context=2,tensor=2"))],
)
def test_prediction_module_drafts_as_on_one_device(devices: Sizes):
    """As many drafts of the MTP module are accepted on a mesh as on one device."""
    counts = []
    for on in (None, devices):
        target = model(PREDICTING, on)
        mesh = None if on is None else devices_of(on)
        speculate = Speculation(MTPProposer(random_mtp(target, seed=3)), NUM_DRAFTS, adaptive=False)
        engine = Engine(target, padded(dataclasses.replace(SIZES, num_pages=96, mesh=mesh, speculate=speculate)))
        accepted_share(engine, PREDICTING)
        counts.append((engine.stats().drafted_tokens, engine.stats().accepted_tokens))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *((name, 2) for name in ("v2-greedy", "glm-dsa", "glm-shared", "gpt-oss", "gpt-oss-mxfp4", "qwen3")),
        *((name, 2) for name in ("qwen3-window", "llama")),
        *((name, "data=2") for name in ("v3", "v3-fp8", "v32", "v32-fp8", "v2-group", "qwen3-yarn", "gpt-oss")),
        *((name, "expert=2") for name in ("v2-greedy", "gpt-oss")),
        *((name, "context=2") for name in ("v2-greedy", "llama")),
        ("v2-greedy", "data=2,expert=4"),
        ("llama", "data=2,tensor=4"),
    ],
)
def test_goldens(name: str, devices: Sizes):
    """With n-gram drafts, tokens and prompt logits equal the results of Hugging Face transformers."""
    split, expected = load_model(GOLDENS / name, jnp.float32, mesh=devices_of(devices)), golden(name)
    sizes = EngineConfig(
        num_pages=160,
        page_size=4,
        max_batched_tokens=32,
        max_num_seqs=4,
        max_model_len=min(320, split.config.max_position_embeddings),
        decode_buckets=(4,),
        prefill_buckets=(32,),
        mesh=split.mesh,
        speculate=Speculation(NGramProposer(shortest=1), NUM_DRAFTS, adaptive=False),
    )
    engine = Engine(split, sizes, capture_logits=True)
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=24, ignore_eos=True)) for prompt in expected.prompts]
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().drafted_tokens > 0
    for i, wanted, margins, logits in zip(
        ids, expected["tokens"], expected["margins"], expected["logits"], strict=True
    ):
        output, sure = engine.output(i), int(np.argmax(np.append(margins, 0) < MARGIN))
        assert output.output_ids[:sure] == wanted[:sure].tolist()
        computed = engine.prompt_logits(i)[output.cached_tokens :]
        np.testing.assert_allclose(computed, logits[output.cached_tokens :], atol=LOGIT_TOLERANCE)


@pytest.mark.slow
def test_unsupported_proposers_are_rejected():
    with pytest.raises(NotImplementedError, match="speculate: a tree of drafts needs decode rows of several tokens"):
        make(LATENT, "context=2", KnowingTreeProposer([], 1.0, VOCAB_SIZE))
    for drafting in (None, "data=2"):
        with pytest.raises(ValueError, match="draft model: expected one loaded for the engine's mesh"):
            make(LATENT, 2, DraftModelProposer(model(LATENT, drafting)))
    predicting = random_model(PREDICTING, seed=3)
    with pytest.raises(ValueError, match="mtp: expected the module of the engine's model, .* on another mesh"):
        make(PREDICTING, 2, MTPProposer(random_mtp(predicting, seed=3)))
