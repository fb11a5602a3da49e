"""Models with grouped-query attention in the engine: tokens equal Hugging Face transformers.

With a quantised cache, tokens equal a plain run: one request without batching, over a cache with the same quantisation.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from pallas_attn import FULL, HeadWindow, PagedKV
from pallas_attn.models.checkpoints import load_kv_scales, load_model, random_model
from pallas_attn.models.config import GQA_PRESETS, HeadWindows
from pallas_attn.models.decoder import AttentionSettings, Caches, Decoder, KVScales, explain_attention, gqa, split_model
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, RequestOutput, SamplingParams
from pallas_attn.models.engine.verify import verify
from tests.models.step_case import PAGE_SIZE, Pages, step

GOLDENS = Path(__file__).parents[1] / "goldens"
TINY = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], num_hidden_layers=2, vocab_size=64)
HEADS = HeadWindows((FULL, 6), (0, 3))
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)

ENGINES = {
    "chunks of 16, few pages": EngineConfig(num_pages=14, page_size=8, max_batched_tokens=16, max_num_seqs=3),
    "whole prompts, uncached": EngineConfig(
        num_pages=64, page_size=4, max_batched_tokens=128, max_num_seqs=4, chunked_prefill=False, prefix_caching=False
    ),
    "chunks of 5, pages of one token": EngineConfig(num_pages=256, page_size=1, max_batched_tokens=5, max_num_seqs=2),
}


@functools.cache
def golden(name: str) -> tuple[Decoder, list[list[int]], list[np.ndarray]]:
    """Return the model and prompts of a golden, and the greedy tokens of transformers."""
    prompts = json.loads((GOLDENS / name / "prompts.json").read_text())
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        tokens = [arrays[f"tokens_{i}"] for i in range(len(prompts))]
    return load_model(GOLDENS / name), prompts, tokens


def run(model: Decoder, config: EngineConfig, prompts: list[list[int]]) -> tuple[Engine, list[RequestOutput]]:
    """Run the prompts twice, so that the second run has prefix hits.

    The engine has one decode bucket and one prefill bucket, which limits the time for compilation.
    """
    one_size = {
        "max_model_len": 104,
        "decode_buckets": (config.max_num_seqs,),
        "prefill_buckets": (config.max_batched_tokens,),
        "separate_prefill": False,
    }
    engine = Engine(model, dataclasses.replace(config, **one_size))
    return engine, [*engine.generate(prompts, GREEDY), *engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # Slow, because gpt-oss also has attention windows and sinks.
        pytest.param("llama", "chunks of 16, few pages", marks=pytest.mark.slow),
        pytest.param("qwen3", "whole prompts, uncached", marks=pytest.mark.slow),
        ("gpt-oss", "chunks of 5, pages of one token"),
    ],
)
def test_tokens_equal_transformers(name: str, sizes: str):
    model, prompts, tokens = golden(name)
    config = ENGINES[sizes]
    engine, outputs = run(model, config, prompts)
    for output, wanted in zip(outputs, [*tokens, *tokens], strict=True):
        np.testing.assert_array_equal(output.output_ids, wanted)
    cached = [output.cached_tokens for output in outputs[len(prompts) :]]
    assert (sum(cached) > 0) == config.prefix_caching
    if config.num_pages == 14:
        assert engine.stats().preemptions > 0


def scales_of_golden(name: str, qmax: int) -> KVScales:
    """Return scales per channel that map the largest value of all prompts to qmax, as calibration does."""
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        largest = [
            np.max([np.abs(arrays[f"{kind}_{i}"]).max(axis=2) for i in range(4)], axis=0) / qmax
            for kind in ("keys", "values")
        ]
    return KVScales(*map(tuple, largest))


@pytest.mark.slow  # slow, because test_speculation.py tests a quantised cache, with rejected drafts
def test_tokens_over_quantised_cache_equal_plain_run():
    """Tokens equal a plain run over an fp8 cache, and differ from a plain run over a float32 cache."""
    model, prompts, exact_tokens = golden("qwen3-yarn")
    cache: dict[str, Any] = {"cache_dtype": "float8_e4m3fn", "kv_scales": scales_of_golden("qwen3-yarn", 448)}
    engine, outputs = run(model, dataclasses.replace(ENGINES["chunks of 16, few pages"], **cache), prompts)
    pairs = zip([*prompts, *prompts], outputs, strict=True)
    decoded = [Decoded(prompt, output.output_ids, GREEDY) for prompt, output in pairs]
    verification = verify(model, decoded, max_len=104, **cache)
    assert verification.passed
    assert verification.tied == 0
    assert engine.stats().cache_bytes < 0.5 * 14 * 8 * 4 * 2 * 2 * 3 * 16  # half of a float32 cache
    exact = [Decoded(p, t.tolist(), GREEDY) for p, t in zip(prompts, exact_tokens, strict=True)]
    assert not verify(model, exact, max_len=104, tolerance=1e-3, **cache).passed


@functools.cache
def jitted_step(name: str) -> Callable:
    model, _, _ = golden(name)
    stepping, weights = split_model(model)
    return functools.partial(jax.jit(stepping), weights)


def stored_logits(scales: KVScales) -> tuple[np.ndarray, Caches, Pages]:
    """Return logits of the longest prompt over an int8 cache, and the written caches."""
    model, prompts, _ = golden("qwen3")
    pages = Pages.scatter(1, 10)
    caches = model.allocate_caches(11, PAGE_SIZE, "int8", scales)
    tokens = jnp.asarray(prompts[3], jnp.int32)
    logits, caches = jitted_step("qwen3")(tokens, caches, step(pages, prefill=[(0, 0, len(prompts[3]))]))
    return np.asarray(logits), caches, pages


@pytest.mark.slow
def test_static_scales_per_layer_are_used(tmp_path: Path):
    scales = scales_of_golden("qwen3", 127)
    save_file({"k_scale": np.stack(scales.k), "v_scale": np.stack(scales.v)}, tmp_path / "scales.safetensors")
    read = load_kv_scales(tmp_path / "scales.safetensors")
    logits, caches, pages = stored_logits(read)
    with np.load(GOLDENS / "qwen3" / "golden.npz") as arrays:
        wanted, keys = arrays["logits_3"], arrays["keys_3"]
    stored = pages.keys_and_values(caches, 0, len(logits))[0]
    # Compare only keys of the first layer with transformers, because keys of later layers depend on rounded keys.
    np.testing.assert_allclose(stored[0] * scales.k[0][:, None], keys[0], atol=0.51 * scales.k[0].max())
    for layer, cache in enumerate(caches):
        assert isinstance(cache, PagedKV)
        np.testing.assert_array_equal(np.asarray(cache.k_scale), scales.k[layer])
    assert np.corrcoef(logits.ravel(), wanted.ravel())[0, 1] > 0.99
    wrong, _, _ = stored_logits(KVScales(scales.k[::-1], scales.v[::-1]))
    assert np.abs(wrong - wanted).mean() > 2 * np.abs(logits - wanted).mean()


def test_scales_of_wrong_shape_raise(tmp_path: Path):
    model = random_model(TINY)
    ones = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"kv_scales: expected shape \[2, 2\] of this model, got \[3, 2\]"):
        model.cache_spec(4, 8, "int8", KVScales((ones[0],) * 3, (ones[0],) * 3))
    with pytest.raises(ValueError, match="not quantised"):
        model.cache_spec(4, 8, "bfloat16", KVScales(tuple(ones), tuple(ones)))
    with pytest.raises(ValueError, match="expected k and v of one shape"):
        KVScales(tuple(ones), tuple(ones[:1]))
    with pytest.raises(ValueError, match="expected positive finite numbers, v has others"):
        KVScales(tuple(ones), tuple(0 * ones))
    path = tmp_path / "scales.safetensors"
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_kv_scales(path)
    save_file({"k_scale": ones, "v_scale": ones.astype(np.float64)}, path)
    with pytest.raises(ValueError, match=r"found k_scale \(float32\), v_scale \(float64\)"):
        load_kv_scales(path)


@pytest.mark.slow
def test_one_plan_per_cache_group(monkeypatch: pytest.MonkeyPatch):
    """A step computes one decode plan per cache group, and lowers one layer function per cache group.

    A cache group has all layers with the same attention windows. A decode plan assigns the work of decode to CTAs.
    """
    planned_for = []
    right = gqa.plan_decode

    def plan(q, cache, block_tables, kv_lens, *, window, **options):
        planned_for.append(window)
        assert (q.shape, cache.page_size) == ((1, 1, 8, TINY.head_dim), PAGE_SIZE)
        assert options == {"q_lens": None, "mode": "balanced", "implementation": None}
        return right(q, cache, block_tables, kv_lens, window=window, **options)

    monkeypatch.setattr(gqa, "plan_decode", plan)
    model = random_model(dataclasses.replace(TINY, num_hidden_layers=6, windows=(5, HEADS, 5, None, HEADS, 5)))
    stepping, weights = split_model(model)
    pages = Pages.scatter(2, 4)
    metadata = step(pages, decode=[(0, 5)], prefill=[(1, 0, 3)])
    tokens, caches = jnp.zeros(metadata.num_tokens, jnp.int32), pages.allocate(model)
    lowered = jax.jit(stepping).lower(weights, tokens, caches, metadata).as_text()
    assert planned_for[::2] == [5, None]
    assert isinstance(planned_for[1], HeadWindow)
    assert len(re.findall(r"func.func private @_apply_layer", lowered)) == 3
    assert len(re.findall(r"call @_apply_layer", lowered)) == 6


@pytest.mark.slow
def test_caches_are_written_in_place():
    """A step updates the donated caches without a copy, including the arrays of scales per token."""
    model = random_model(TINY)
    stepping, weights = split_model(model)
    pages = Pages.scatter(1, 6)
    caches, metadata = model.allocate_caches(7, PAGE_SIZE, "int8"), step(pages, decode=[(0, 17)], prefill=[(0, 0, 9)])
    compiled = jax.jit(stepping, donate_argnums=2).lower(weights, jnp.zeros(10, jnp.int32), caches, metadata).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == sum(array.nbytes for array in jax.tree.leaves(caches))


def test_latent_cache_for_gqa_raises():
    with pytest.raises(ValueError, match="mla: expected auto, a qwen3 has no latents to absorb"):
        random_model(TINY, settings=AttentionSettings(mla="absorb"))


def test_every_gqa_operation_has_an_implementation():
    sizes = EngineConfig(num_pages=8, page_size=4, max_batched_tokens=8, max_num_seqs=2, cache_dtype="int8")
    explained = explain_attention(TINY, AttentionSettings(), sizes.runner_config(64).largest_step, "bfloat16")
    assert {op: explanation.chosen for op, explanation in explained.items()} == {
        "write_kv": "xla",
        "paged_decode": "xla",
        "paged_prefill": "xla",
    }
