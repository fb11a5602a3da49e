"""Verification of bfloat16 models detects a wrong KV cache, and accepts correct runs of all kinds of models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.cli.prompts import demo_ids
from pallas_attn.models.config import GQA_PRESETS, PRESETS
from pallas_attn.models.decoder import Decoder, StepMetadata
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, SamplingParams, Verification
from pallas_attn.models.engine.step.packed import PackedStep
from pallas_attn.models.engine.verify import verify
from tests.models.engine_case import QUICK

PAGE_SIZE = 16
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
STEPS_OF_PROMPTS = 12
"""Number of steps after which all prompts are prefilled, and every request still has many tokens to generate."""

MODELS = {name: config for name, config in {**PRESETS, **GQA_PRESETS}.items() if name.endswith("-tiny")}
MODELS["one layer"] = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], num_hidden_layers=1)


@functools.cache
def model(name: str) -> Decoder:
    return random_model(MODELS[name], dtype=jnp.bfloat16, settings=QUICK)


def make_engine(name: str) -> Engine:
    sizes = EngineConfig(
        num_pages=128,
        page_size=PAGE_SIZE,
        max_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=256,
        decode_buckets=(8,),
        prefill_buckets=(64,),
        separate_prefill=False,
    )
    return Engine(model(name), sizes)


def run(name: str, fault: Callable[[Engine], None] | None = None, params: SamplingParams = GREEDY) -> Verification:
    """Run the demo prompts, apply `fault` to the engine after the prefill, and verify the generated tokens."""
    engine, prompts = make_engine(name), demo_ids(MODELS[name].vocab_size, PAGE_SIZE)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    for step in range(1000):
        if step == STEPS_OF_PROMPTS and fault is not None:
            fault(engine)
        if not engine.has_unfinished:
            break
        engine.step()
    decoded = [
        Decoded(prompt, engine.output(request_id).output_ids, params)
        for prompt, request_id in zip(prompts, ids, strict=True)
    ]
    return verify(model(name), decoded, max_len=engine.max_sequence_len)


def pages_of(engine: Engine, request: int) -> list[int]:
    """Return the page ids of a running request, in order of its tokens."""
    running = next(r for r in engine._ranks.schedulers[0].running if r.request_id == request)
    assert running.request_slot is not None
    return engine._pools[0].tables([running.request_slot])[0][0, 0].tolist()


def change_caches(engine: Engine, change: Callable[[jax.Array], jax.Array]) -> None:
    """Replace all cache arrays that have pages by `change(array)`."""
    runner = engine._runner
    runner._caches = jax.tree.map(lambda a: change(a) if a.ndim > 2 else a, runner._caches)


def overwrite_page(engine: Engine) -> None:
    """Overwrite a page of request 1, after the shared prefix, with a page of request 2."""
    target, source = pages_of(engine, 1)[3], pages_of(engine, 2)[4]
    change_caches(engine, lambda pages: pages.at[target].set(pages[source]))


def zero_row(engine: Engine) -> None:
    """Zero the KV row of one token of the prefix that seven requests share, in all layers."""
    page = pages_of(engine, 1)[0]
    change_caches(engine, lambda pages: pages.at[page, ..., 3, :].set(0))


def shorter_context(step: PackedStep, metadata: StepMetadata) -> StepMetadata:
    """Fault: decode rows attend to one token less."""
    return dataclasses.replace(metadata, decode_kv_lens=jnp.maximum(metadata.decode_kv_lens - 1, 0))


def shifted_positions(step: PackedStep, metadata: StepMetadata) -> StepMetadata:
    """Fault: decode rows rotate queries and keys for the position after their own."""
    num_decode = step.decode_request_slots.shape[0]
    return dataclasses.replace(metadata, positions=metadata.positions.at[:num_decode].add(1))


@pytest.mark.parametrize(
    ("name", "fault"),
    # v3-tiny has no case with zero_row. Its selection of experts depends on rounding, so a zeroed row changes its
    # logits by about as much as rounding.
    [
        ("one layer", zero_row),
        # Slow, because the model of the case above has the same kind of layer, and compiles faster.
        pytest.param("qwen3-tiny", zero_row, marks=pytest.mark.slow),
        # Slow, because an overwritten page changes logits more than a zeroed row, which the case above detects.
        pytest.param("qwen3-tiny", overwrite_page, marks=pytest.mark.slow),
        pytest.param("v3-tiny", overwrite_page, marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_the_cache_is_noticed(name, fault):
    verification = run(name, fault)
    assert not verification.passed
    assert verification.rounding is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("qwen3-tiny", shorter_context),
        pytest.param("v3-tiny", shorter_context, marks=pytest.mark.slow),
        # Slow, because shifted positions change logits more than a shorter context, which the case above detects.
        pytest.param("qwen3-tiny", shifted_positions, marks=pytest.mark.slow),
        pytest.param("v3-tiny", shifted_positions, marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_the_metadata_of_decode_rows_is_noticed(name, fault, monkeypatch):
    metadata = PackedStep.metadata

    def faulty(self: PackedStep, *args: Any, **named: Any) -> StepMetadata:
        return fault(self, metadata(self, *args, **named))

    monkeypatch.setattr(PackedStep, "metadata", faulty)
    verification = run(name)
    assert not verification.passed
    assert verification.lost_too_much


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # v3-tiny is not slow, because it has the largest rounding errors.
    [pytest.param(name, marks=[] if name == "v3-tiny" else [pytest.mark.slow]) for name in MODELS],
)
def test_correct_runs_pass(name):
    verification = run(name)
    assert verification.passed
    assert verification.compared == 8 * GREEDY.max_tokens
    assert verification.tied > 0, "rounding errors change no token, so the test shows nothing"
