"""Gemma 4 on meshes of several devices: tokens equal the goldens, and pages move between layouts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_model
from pallas_attn.models.checkpoints.calibration import calibrate
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine import CachedPages, Engine, EngineConfig, NGramProposer, Speculation
from pallas_attn.models.engine.kv_transfer.weight_digest import weight_digest
from tests.models.golden_case import GREEDY, expect_golden, golden, loaded
from tests.models.test_gemma import NAMES, SIZES, run
from tests.models.test_mesh import Sizes, devices_of
from tests.models.test_parity import GOLDENS

FEW_PAGES = SIZES["chunks of 16, few pages"]
ONE_SIZE = {"decode_buckets": (3,), "prefill_buckets": (16,), "max_model_len": 104}
"""Options with which an engine compiles one decode step and one prefill step."""


@functools.cache
def split(name: str, devices: Sizes) -> Decoder:
    return load_model(GOLDENS / name, jnp.float32, mesh=devices_of(devices))


def sizes_on(model: Decoder, **changes: Any) -> EngineConfig:
    return dataclasses.replace(FEW_PAGES, mesh=model.mesh, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *((name, 2) for name in NAMES),
        ("gemma4", 4),
        ("gemma4-moe", "expert=2"),
        ("gemma4-moe", "data=2,tensor=2"),
        *((name, "data=2") for name in NAMES),
        ("gemma4-moe", "data=3"),  # 8 experts are split over three devices
        ("gemma4-moe", "data=4"),
        *((name, "context=2") for name in NAMES),
        ("gemma4", "context=4"),
        ("gemma4-k-eq-v", "context=2,tensor=2"),
    ],
)
def test_goldens(name: str, devices: Sizes):
    """Tokens equal transformers on a mesh."""
    model = split(name, devices)
    _, outputs = run(model, sizes_on(model), golden(name).prompts)
    expect_golden(name, outputs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [*((name, 2) for name in NAMES), ("gemma4", "context=2")])
def test_drafts_change_no_token(name: str, devices: Sizes):
    model = split(name, devices)
    drafts = Speculation(NGramProposer(shortest=1), 3, adaptive=False)
    _, outputs = run(model, sizes_on(model, num_pages=40, speculate=drafts), golden(name).prompts)
    expect_golden(name, outputs)
    assert sum(sum(output.drafted) for output in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_digest_of_weights_is_the_same_on_a_mesh(name: str):
    assert weight_digest(split(name, 2)) == weight_digest(loaded(name))


@pytest.mark.slow
def test_pages_are_exchanged_between_split_heads_and_one_device():
    """An engine on one device continues from pages of two devices, for layers with unequal numbers of KV heads."""
    name = "gemma4-k-eq-v"
    model = split(name, 2)
    of_mesh, outputs = run(model, sizes_on(model, num_pages=64), golden(name).prompts)
    expect_golden(name, outputs)
    engine = Engine(loaded(name), dataclasses.replace(FEW_PAGES, num_pages=64, **ONE_SIZE))
    engine.import_pages(CachedPages.from_bytes(of_mesh.export_prefix_cache().to_bytes()))
    again = engine.generate(golden(name).prompts, GREEDY)
    expect_golden(name, [*again, *again])
    assert sum(output.cached_tokens for output in again) > 0


@pytest.mark.slow
def test_pages_are_exchanged_between_split_contexts_and_one_device():
    """Pages of global layers are split by tokens, pages of local layers by heads."""
    name = "gemma4"
    model = split(name, "context=2")
    one, _ = run(loaded(name), dataclasses.replace(FEW_PAGES, num_pages=64), golden(name).prompts)
    pages = CachedPages.from_bytes(one.export_prefix_cache().to_bytes())
    engine = Engine(model, sizes_on(model, num_pages=64, **ONE_SIZE))
    engine.import_pages(pages)
    again = engine.generate(golden(name).prompts, GREEDY)
    expect_golden(name, [*again, *again])
    assert sum(output.cached_tokens for output in again) > 0
    exported = engine.export_prefix_cache()
    for group, other in zip(pages.groups, exported.groups, strict=True):
        assert {key: array.shape[1:] for key, array in group.items()} == {k: a.shape[1:] for k, a in other.items()}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_prompt_log_probabilities_over_split_contexts(drafts: bool):
    """Layers without a cache are applied to all prompt tokens, although no device has all keys of the prompt."""
    expected, model = golden("gemma4"), split("gemma4", "context=2")
    speculate = Speculation(NGramProposer(shortest=1), 3, adaptive=False) if drafts else None
    engine = Engine(model, sizes_on(model, num_pages=40, speculate=speculate, **ONE_SIZE))
    outputs = engine.generate(expected.prompts, dataclasses.replace(GREEDY, prompt_logprobs=1))
    expect_golden("gemma4", [*outputs, *outputs])
    for prompt, output, logits in zip(expected.prompts, outputs, expected["logits"], strict=True):
        found = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
        wanted = jax.nn.log_softmax(logits)[np.arange(len(prompt) - 1), np.asarray(prompt[1:], np.int32)]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_contexts_divide_the_heads():
    with pytest.raises(ValueError, match="mesh: context: devices: expected a divisor of 4 query heads, got 3"):
        split("gemma4", "context=3")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["head", "channel"])
def test_static_scales_on_a_mesh(layout: Any):
    """Two devices have the scales of their KV heads. Their tokens equal the tokens of one device."""
    name = "gemma4-k-eq-v"
    model, prompts = split(name, 2), golden(name).prompts
    scales = calibrate(loaded(name), prompts, "int8", layout)
    cache = {"cache_dtype": "int8", "kv_scales": scales, "num_pages": 64}
    _, wanted = run(loaded(name), dataclasses.replace(FEW_PAGES, **cache), prompts)
    _, outputs = run(model, sizes_on(model, **cache), prompts)
    assert [output.output_ids for output in outputs] == [output.output_ids for output in wanted]
