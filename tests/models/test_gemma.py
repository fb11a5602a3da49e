"""Gemma 4: parity with Hugging Face transformers, mistakes that the comparison must detect, and the engine.

The goldens are tests/goldens/gemma4*; tests/goldens/README.md describes them.
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
from flax import nnx

from pallas_attn import PagedKV
from pallas_attn.models.checkpoints import files, load_kv_scales, random_model, save_kv_scales, weights
from pallas_attn.models.checkpoints.calibration import calibrate
from pallas_attn.models.cli.decode import command
from pallas_attn.models.config import GEMMA_PRESETS, Gemma4Config
from pallas_attn.models.decoder import (
    AttentionSettings,
    Decoder,
    KVScales,
    explain_attention,
    gemma,
    model,
    split_model,
)
from pallas_attn.models.decoder.layers import rms_scaled, swiglu
from pallas_attn.models.decoder.mesh import embed
from pallas_attn.models.engine import (
    Decoded,
    Engine,
    EngineConfig,
    NGramProposer,
    Speculation,
    WrittenLayer,
    runner,
)
from pallas_attn.models.engine.group_sizes import group_sizes
from pallas_attn.models.engine.step.layered import StepPrograms
from pallas_attn.models.engine.verify import verify
from pallas_attn.models.moe import layer as moe_layer
from pallas_attn.models.moe import router
from tests.models.golden_case import (
    GREEDY,
    expect_golden,
    expect_mutations_of_transformers,
    golden,
    loaded,
    run_twice,
    tensors_changed,
)
from tests.models.step_case import PAGE_SIZE, Pages, step
from tests.models.test_parity import (
    GOLDENS,
    MARGIN,
    Patch,
    assert_parity,
    longest_prompt_logits,
    reconfigured,
    replaced,
    undetected,
)

NAMES = ("gemma4", "gemma4-k-eq-v", "gemma4-moe")
TINY = GEMMA_PRESETS["gemma4-tiny"]
SMALL = dataclasses.replace(
    TINY,
    vocab_size=64,
    num_hidden_layers=3,
    num_kv_shared_layers=1,
    layer_types=("sliding_attention", "full_attention", "full_attention"),
)
"""A model that compiles quickly: a local and a global layer with a cache, and a layer that uses the global cache."""


run = functools.partial(run_twice, max_model_len=104)


def config_of(name: str) -> Gemma4Config:
    config = loaded(name).config
    assert isinstance(config, Gemma4Config)
    return config


def some_slow(*fast: str) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


# --- parity


@dataclasses.dataclass
class Run:
    """All prompts of a golden, prefilled in one step."""

    pages: Pages
    logits: list[np.ndarray]
    caches: tuple
    step: Callable


@functools.cache
def prefilled(name: str) -> Run:
    expected, decoder = golden(name), loaded(name)
    stepping, parameters = split_model(decoder)
    run = functools.partial(jax.jit(stepping), parameters)
    lengths = [len(prompt) for prompt in expected.prompts]
    pages = Pages.scatter(len(lengths), -(-(max(lengths) + 24) // PAGE_SIZE))
    metadata = step(pages, prefill=[(i, 0, length) for i, length in enumerate(lengths)])
    tokens = jnp.asarray(np.concatenate(expected.prompts), jnp.int32)
    logits, caches = run(tokens, pages.allocate(decoder, fill=np.nan), metadata)
    return Run(pages, np.split(np.asarray(logits), np.cumsum(lengths)[:-1]), caches, run)


@pytest.mark.parametrize("name", some_slow("gemma4"))
def test_prompt_logits(name: str):
    for logits, wanted in zip(prefilled(name).logits, golden(name)["logits"], strict=True):
        assert_parity(logits, wanted)


@pytest.mark.parametrize("name", some_slow("gemma4"))
def test_cached_keys_and_values(name: str):
    """Caches of local and of global layers equal transformers. Layers that use another cache have none."""
    run, config, expected = prefilled(name), config_of(name), golden(name)
    assert [cache is None for cache in run.caches] == [
        layer not in config.cached_layers for layer in range(config.num_hidden_layers)
    ]
    for kind in ("local", "global"):
        layers = [layer for layer in config.cached_layers if config.is_global(layer) == (kind == "global")]
        caches = tuple(run.caches[layer] for layer in layers)
        for i, wanted in enumerate(zip(expected[f"{kind}_keys"], expected[f"{kind}_values"], strict=True)):
            found = run.pages.keys_and_values(caches, i, len(expected.prompts[i]))
            for cached, golden_one in zip(found, wanted, strict=True):
                np.testing.assert_allclose(cached, golden_one, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str):
    """Greedy tokens of decode steps equal transformers. The input of each step is the golden's token."""
    run, expected = prefilled(name), golden(name)
    tokens, margins = np.stack(expected["tokens"]), np.stack(expected["margins"])
    chosen, caches = [np.array([logits[-1].argmax() for logits in run.logits])], run.caches
    for i in range(tokens.shape[1] - 1):
        decode = [(s, len(prompt) + i) for s, prompt in enumerate(expected.prompts)]
        logits, caches = run.step(jnp.asarray(tokens[:, i], jnp.int32), caches, step(run.pages, decode))
        chosen.append(np.asarray(logits).argmax(-1))
    clear = margins > MARGIN
    np.testing.assert_array_equal(np.stack(chosen, axis=1)[clear], tokens[clear])


@pytest.mark.slow  # slow, because the engine's steps skip these layers, too
def test_layers_without_a_cache_skip_tokens_without_logits(monkeypatch: pytest.MonkeyPatch):
    """Logits of some tokens equal the logits of these tokens in a step that applies all layers to all tokens.

    The step has decode rows, prompt chunks, an idle row and padding.
    """
    decoder, prompts = loaded("gemma4"), golden("gemma4").prompts
    pages = Pages.scatter(3, 12)
    caches = pages.allocate(decoder)
    tokens = jnp.asarray([*prompts[2], *prompts[3][:20]], jnp.int32)
    before = step(pages, prefill=[(0, 0, 40), (1, 0, 20)])
    _, caches = prefilled("gemma4").step(tokens, caches, before)
    case: dict[str, Any] = {"decode": [(0, 40)], "prefill": [(1, 20, 31), (2, 0, 9)], "idle_rows": 1, "padding": 2}
    tokens = jnp.asarray([7, 0, *prompts[3][20:31], *prompts[1], 0, 0], jnp.int32)
    wanted, written = prefilled("gemma4").step(tokens, caches, step(pages, **case))
    rows, right = [12, 0, 21, 5, 1, 23], gemma.GemmaLayer.__call__  # the last two are an idle row and padding
    applied = []
    monkeypatch.setattr(
        gemma.GemmaLayer, "__call__", lambda layer, x, *args: applied.append(x.shape[0]) or right(layer, x, *args)
    )
    monkeypatch.setattr(model, "layer_function", lambda: model._apply_layer)
    logits, others = jax.jit(lambda *args: decoder(*args))(tokens, caches, step(pages, **case, logit_rows=rows))
    assert applied == [24] * 4 + [6] * 3
    np.testing.assert_allclose(np.asarray(logits)[:4], np.asarray(wanted)[rows[:4]], atol=1e-5)
    assert np.isfinite(np.asarray(logits)).all()
    for cache, other in zip(written, others, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), cache, other)


# --- mistakes


def values_are(value: Callable[[jax.Array, Any], jax.Array]) -> Callable[[Patch], None]:
    """Return a mistake that makes the values of global layers from keys before their norm."""
    right = gemma.write_kv

    def write(cache, k, v, slots, *, rope, **options):
        return right(cache, k, value(k, rope) if k.shape[2] == 24 else v, slots, rope=rope, **options)

    return replaced(gemma, "write_kv", write)


def normed_key(k: jax.Array, rope: Any) -> jax.Array:
    return rms_scaled(k, rope.norm_eps) * rope.k_norm[None, None]


def double_width_ignored(patch: Patch) -> None:
    """Use only the first half of the hidden columns of MLPs of layers without a cache."""
    width = config_of("gemma4").intermediate_size
    change = lambda tensor: tensor * (np.arange(tensor.shape[1]) < width)  # noqa: E731
    tensors_changed("mlp.down_proj.weight", change)(patch)


def experts_read_the_input_of_the_mlp(patch: Patch) -> None:
    right = files.Checkpoint.read

    def read(checkpoint: files.Checkpoint, name: str, part: files.Slices = ()) -> np.ndarray:
        return right(checkpoint, name.replace("feedforward_layernorm_2", "feedforward_layernorm"), part)

    patch.setattr(files.Checkpoint, "read", read)


def first_source(config: Gemma4Config, layer: int) -> int:
    return config.layer_types.index(config.layer_types[layer])


def exponents_of_the_rotated_columns(config: Gemma4Config) -> np.ndarray:
    half = config.global_head_dim // 2
    rotated = int(config.global_rotary_share * half)
    frequencies = config.global_rope_theta ** -(np.arange(half) / rotated)
    return np.where(np.arange(half) < rotated, frequencies, 0).astype(np.float32)


def weights_not_normalised(patch: Patch) -> None:
    def route(layer: router.ScaledRouter, x):
        scale = layer.scale[...] * x.shape[1] ** -0.5
        logits = (rms_scaled(x, layer.config.rms_norm_eps) * scale[None]) @ layer.weight[...]
        weights, experts = jax.lax.top_k(jax.nn.softmax(logits), layer.config.top_k_experts)
        return experts, weights * layer.per_expert_scale[...][experts]

    patch.setattr(router.ScaledRouter, "__call__", route)


def router_reads_the_input_of_the_experts(patch: Patch) -> None:
    right = moe_layer.ScaledMoE.__call__
    patch.setattr(moe_layer.ScaledMoE, "__call__", lambda layer, x, normed, *args: right(layer, normed, normed, *args))


def both_activations(patch: Patch) -> None:
    patch.setattr(gemma, "geglu", swiglu)
    patch.setattr(moe_layer, "geglu", swiglu)


def times(factor: float) -> Callable[[Patch], None]:
    right = gemma.PerLayerInputs.__call__
    return replaced(gemma.PerLayerInputs, "__call__", lambda module, *args: right(module, *args) * factor)


right_of_layer = gemma.GemmaInputs.of_layer
unscaled = lambda tokens, table, vocab_size, width: embed(tokens, table, vocab_size)  # noqa: E731

# Golden with which each mistake is made, and the mistake. The names with a mistake in golden.json are equal.
MISTAKES: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "windows_one_wider": ("gemma4", reconfigured(sliding_window=12)),
    "windows_one_narrower": ("gemma4", reconfigured(sliding_window=10)),
    "windows_dropped": ("gemma4", reconfigured(sliding_window=1000)),
    "global_rope_of_all_columns": ("gemma4", reconfigured(global_rotary_share=1.0)),
    "global_rope_of_fewer_columns": ("gemma4", reconfigured(global_rotary_share=0.25)),
    "rope_bases_exchanged": ("gemma4", reconfigured(rope_theta=500.0, global_rope_theta=100.0)),
    "global_rope_exponents_of_rotated_columns": (
        "gemma4",
        replaced(gemma, "global_frequencies", exponents_of_the_rotated_columns),
    ),
    "global_rope_factor_ignored": ("gemma4", reconfigured(global_rope_factor=2.0)),
    "value_norm_dropped": ("gemma4", replaced(gemma, "normed_values", lambda v, eps: v)),
    "values_are_normed_keys": ("gemma4-k-eq-v", values_are(normed_key)),
    "values_are_raw_projections": ("gemma4-k-eq-v", values_are(lambda k, rope: k)),
    "scores_scaled_by_the_width": ("gemma4", replaced(Gemma4Config, "sm_scale", property(lambda c: c.head_dim**-0.5))),
    "query_and_key_norms_of_weight_one": ("gemma4", tensors_changed("_norm.weight", np.ones_like)),
    "norm_weights_plus_one": ("gemma4", tensors_changed("norm.weight", lambda weight: weight + 1)),
    "layer_scalars_dropped": ("gemma4", tensors_changed(".layer_scalar", np.ones_like)),
    "first_source_of_shared_layers": ("gemma4", replaced(Gemma4Config, "cache_source", first_source)),
    "double_width_ignored": ("gemma4", double_width_ignored),
    "embedding_scale_dropped": ("gemma4", replaced(model, "scaled_embedding", unscaled)),
    "ple_scale_dropped": ("gemma4", replaced(gemma, "scaled_embedding", unscaled)),
    "ple_sum_not_scaled": ("gemma4", times(2**0.5)),
    "ple_of_the_first_layer": (
        "gemma4",
        replaced(gemma.GemmaInputs, "of_layer", lambda inputs, layer: right_of_layer(inputs, 0)),
    ),
    "soft_cap_dropped": ("gemma4", reconfigured(final_logit_softcapping=None)),
    "silu_for_gelu": ("gemma4", both_activations),
    "expert_scales_dropped": ("gemma4-moe", tensors_changed(".per_expert_scale", np.ones_like)),
    "router_norm_dropped": ("gemma4-moe", replaced(router, "rms_scaled", lambda x, eps: x)),
    "router_scale_dropped": ("gemma4-moe", tensors_changed(".router.scale", np.ones_like)),
    "router_reads_the_input_of_the_experts": ("gemma4-moe", router_reads_the_input_of_the_experts),
    "experts_read_the_input_of_the_mlp": ("gemma4-moe", experts_read_the_input_of_the_mlp),
    "expert_weights_not_normalised": ("gemma4-moe", weights_not_normalised),
    "gates_after_up_projections": (
        "gemma4-moe",
        tensors_changed("experts.gate_up_proj", lambda half: np.flip(half, axis=1)),
    ),
    "silu_in_experts": ("gemma4-moe", replaced(moe_layer, "geglu", swiglu)),
}


@pytest.mark.slow  # slow, because test_parity.py shows that `assert_parity` detects a mistake
@pytest.mark.parametrize("name", NAMES)
def test_every_mistake_is_detected(name: str):
    prompt_logits = functools.partial(longest_prompt_logits, name, golden(name))
    assert_parity(*prompt_logits())
    assert undetected({key: make for key, (where, make) in MISTAKES.items() if where == name}, prompt_logits) == []


def test_every_mistake_of_transformers_is_made():
    expect_mutations_of_transformers(NAMES, MISTAKES)


# --- the engine

SIZES = {
    "chunks of 16, few pages": EngineConfig(num_pages=14, page_size=8, max_batched_tokens=16, max_num_seqs=3),
    "whole prompts, uncached": EngineConfig(
        num_pages=64, page_size=4, max_batched_tokens=128, max_num_seqs=4, chunked_prefill=False, prefix_caching=False
    ),
    "chunks of 5, pages of one token": EngineConfig(num_pages=256, page_size=1, max_batched_tokens=5, max_num_seqs=2),
}


# Slow, because test_prefill_skips_layers_for_tokens_without_logits runs an engine with few pages, too.
@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_engine_tokens_equal_transformers(name: str, sizes: str):
    """Tokens are equal with chunks, prefix hits and preemptions."""
    config, few = SIZES[sizes], sizes == "chunks of 16, few pages"
    if few:  # global layers then have 13 or 14 pages: enough for one long request, but not for all running requests
        changes: dict[str, Any] = {"recycling": False} if name == "gemma4" else {"num_pages": 12}
        config = dataclasses.replace(config, **changes)
    engine, outputs = run(loaded(name), config, golden(name).prompts)
    expect_golden(name, outputs)
    if few:
        assert engine.stats().preemptions > 0
    else:
        cached = [output.cached_tokens for output in outputs[len(golden(name).prompts) :]]
        assert (sum(cached) > 0) == config.prefix_caching


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_drafts_change_no_token(name: str, batch_invariant: bool):
    drafts = Speculation(NGramProposer(shortest=1), 3, adaptive=False)
    sizes = dataclasses.replace(
        SIZES["chunks of 16, few pages"], num_pages=40, speculate=drafts, batch_invariant=batch_invariant
    )
    _, outputs = run(loaded(name), sizes, golden(name).prompts)
    expect_golden(name, outputs)
    assert sum(sum(output.drafted) for output in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_tokens_over_quantised_cache_equal_plain_run(name: str, dtype: str):
    """Tokens equal one forward pass per request over a cache with the same quantisation."""
    prompts = golden(name).prompts
    sizes = dataclasses.replace(SIZES["chunks of 16, few pages"], cache_dtype=dtype)
    _, outputs = run(loaded(name), sizes, prompts)
    pairs = zip([*prompts, *prompts], outputs, strict=True)
    decoded = [Decoded(prompt, output.output_ids, GREEDY) for prompt, output in pairs]
    verification = verify(loaded(name), decoded, max_len=104, cache_dtype=dtype)
    assert verification.passed, verification


def scales_of_golden(name: str, qmax: float, layout: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the scales of keys and values of each layer with a cache, from the caches of transformers."""
    config, expected = config_of(name), golden(name)
    axes, found = (1,) if layout == "channel" else (1, 2), list[tuple[np.ndarray, np.ndarray]]()
    for layer in config.cached_layers:
        kind = "global" if config.is_global(layer) else "local"
        place = [config.is_global(i) for i in range(layer)].count(config.is_global(layer))
        scales = [
            np.max([np.abs(of_prompt[place]).max(axis=axes) for of_prompt in expected[f"{kind}_{what}"]], axis=0) / qmax
            for what in ("keys", "values")
        ]
        found.append((scales[0], scales[1]))
    return found


STATIC_SCALES = [
    ("gemma4", "int8", "channel"),
    *(pytest.param(name, "float8_e4m3fn", "head", marks=pytest.mark.slow) for name in NAMES),
    pytest.param("gemma4-k-eq-v", "int8", "channel", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "layout"), STATIC_SCALES)
def test_calibrated_scales_equal_transformers(name: str, dtype: str, layout: Any, tmp_path: Path):
    """Scales equal the scales of the caches of transformers, whose shapes differ between local and global layers."""
    scales = calibrate(loaded(name), golden(name).prompts, dtype, layout)
    wanted = scales_of_golden(name, 127 if dtype == "int8" else 448, layout)
    save_kv_scales(tmp_path / "scales.safetensors", scales)
    for found in (scales, load_kv_scales(tmp_path / "scales.safetensors")):
        assert len(found.k) == len(found.v) == len(config_of(name).cached_layers)
        for k, v, of_layer in zip(found.k, found.v, wanted, strict=True):
            np.testing.assert_allclose(k, of_layer[0], rtol=1e-4)
            np.testing.assert_allclose(v, of_layer[1], rtol=1e-4)


def expect_plain_run_with_scales(decoder: Decoder, prompts: list[list[int]], dtype: str, layout: Any) -> None:
    """Assert that tokens over a cache with static scales equal one forward pass per request."""
    scales = calibrate(decoder, prompts, dtype, layout)
    sizes = dataclasses.replace(SIZES["chunks of 16, few pages"], cache_dtype=dtype, kv_scales=scales)
    _, outputs = run(decoder, sizes, prompts)
    pairs = zip([*prompts, *prompts], outputs, strict=True)
    decoded = [Decoded(prompt, output.output_ids, GREEDY) for prompt, output in pairs]
    verification = verify(decoder, decoded, max_len=104, cache_dtype=dtype, kv_scales=scales)
    assert verification.passed, verification


@pytest.mark.slow  # slow, because the next test does the same with a smaller model
@pytest.mark.parametrize(("name", "dtype", "layout"), STATIC_SCALES)
def test_tokens_of_goldens_with_static_scales(name: str, dtype: str, layout: Any):
    expect_plain_run_with_scales(loaded(name), golden(name).prompts, dtype, layout)


@pytest.mark.slow  # slow, because test_calibrate decodes with static scales and verifies the tokens
def test_tokens_with_static_scales():
    prompts = [[*range(30)], [*range(20, 40)], [5]]
    expect_plain_run_with_scales(random_model(SMALL), prompts, "int8", "channel")


def test_scales_of_wrong_shapes_raise():
    decoder = random_model(dataclasses.replace(TINY, vocab_size=64))
    right = [np.ones(shape, np.float32) for shape in ((2, 32), (2, 32), (2, 64), (2, 32))]
    scales = KVScales(tuple(right), tuple(right))
    arrays = [spec.arrays for spec in decoder.cache_specs(5, 8, "int8", scales)]
    assert [of_layer["k_scale"].shape for of_layer in arrays[:4]] == [scale.shape for scale in right]
    assert arrays[4:] == [{}, {}]
    wrong = KVScales(tuple(right[::-1]), tuple(right[::-1]))
    message = "kv_scales: expected shape [[2, 32], [2, 32], [2, 64], [2, 32]] of this model, got [[2, 32], [2, 64]"
    with pytest.raises(ValueError, match=re.escape(message)):
        decoder.cache_spec(5, 8, "int8", wrong)
    with pytest.raises(ValueError, match="expected k and v of one shape"):
        KVScales((right[0], right[0][0]), (right[0], right[0][0]))


@pytest.fixture
def rows_of_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens that layers are applied to, one per layer of each traced program."""
    applied, right = list[int](), gemma.GemmaLayer.__call__
    monkeypatch.setattr(
        gemma.GemmaLayer, "__call__", lambda layer, x, *args: applied.append(x.shape[0]) or right(layer, x, *args)
    )
    monkeypatch.setattr(model, "layer_function", lambda: model._apply_layer)  # every layer is traced
    return applied


@pytest.fixture
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split every step with prompts into programs of at most two layers."""
    monkeypatch.setattr(runner, "CONCURRENT_TOKENS", 0)
    monkeypatch.setattr(runner, "MAX_LAYERS_PER_PROGRAM", 2)


@pytest.mark.parametrize("separate_prefill", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prefill_skips_layers_for_tokens_without_logits(rows_of_layers: list[int], separate_prefill: bool):
    """Steps with prompts apply layers without a cache only to decode rows and to the last token of each chunk. Tokens
    equal transformers with chunks, prefix hits and preemptions.
    """
    config = dataclasses.replace(SIZES["chunks of 16, few pages"], recycling=False)
    engine, outputs = run(loaded("gemma4"), config, golden("gemma4").prompts, separate_prefill=separate_prefill)
    expect_golden("gemma4", outputs)
    assert engine.stats().preemptions > 0
    assert sum(output.cached_tokens for output in outputs) > 0
    of_programs = [tuple(rows_of_layers[i : i + 7]) for i in range(0, len(rows_of_layers), 7)]
    # Four layers have a cache. Steps have up to 3 decode rows, 3 prompts and 16 prompt tokens.
    decode, prompts, mixed = (3,) * 7, (16,) * 4 + (3,) * 3, (19,) * 4 + (6,) * 3
    assert {*of_programs} == ({decode, prompts, mixed} if separate_prefill else {decode, mixed})


@pytest.mark.slow
@pytest.mark.parametrize("programs", [pytest.param("one", marks=pytest.mark.slow), "several"])
def test_prompt_log_probabilities_need_all_layers(
    programs: str, rows_of_layers: list[int], request: pytest.FixtureRequest
):
    """Log probabilities of prompt tokens equal transformers. Other steps still skip layers."""
    if programs == "several":
        request.getfixturevalue("several_programs")
    expected, params = golden("gemma4"), dataclasses.replace(GREEDY, max_tokens=4, prompt_logprobs=1)
    sizes = dataclasses.replace(SIZES["chunks of 16, few pages"], max_model_len=104, num_pages=40)
    engine = Engine(loaded("gemma4"), dataclasses.replace(sizes, decode_buckets=(3,), prefill_buckets=(16,)))
    *_, prompt = expected.prompts
    [plain] = engine.generate([prompt], dataclasses.replace(params, prompt_logprobs=None))
    assert min(rows_of_layers) == 3
    np.testing.assert_array_equal(plain.output_ids, expected["tokens"][-1][:4])
    rows_of_layers.clear()
    [output] = engine.generate([prompt], params)
    if programs == "several":
        steps = [step for step in engine._runner._programs.forward.values() if isinstance(step, StepPrograms)]
        ranges = {tuple(map(tuple, step.layer_ranges)) for step in steps}
        assert ranges == {((0, 1), (2, 3), (4,), (5, 6))}
        assert sorted(step.narrow is not None for step in steps) == [False, True]
    np.testing.assert_array_equal(output.output_ids, plain.output_ids)
    assert {*rows_of_layers} <= {16, 19}
    logits = jax.nn.log_softmax(expected["logits"][-1])
    found = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    np.testing.assert_allclose(found, logits[np.arange(len(prompt) - 1), np.asarray(prompt[1:])], atol=1e-4)


@pytest.mark.slow
def test_warmup_compiles_steps_with_prompt_log_probabilities():
    decoder = random_model(SMALL)
    sizes = dataclasses.replace(SIZES["chunks of 16, few pages"], max_model_len=104, num_pages=40)
    sizes = dataclasses.replace(sizes, decode_buckets=(3,), prefill_buckets=(16,), separate_prefill=False)
    engine = Engine(decoder, sizes)
    engine.warmup()
    before = engine.stats().compilations
    prompt = [*range(40)]
    engine.generate([prompt], GREEDY)
    engine.generate([prompt], dataclasses.replace(GREEDY, prompt_logprobs=1))
    assert engine.stats().compilations == before


@pytest.mark.slow  # slow, because test_prompt_log_probabilities_need_all_layers runs several programs, too
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_several_programs_equal_transformers(name: str, several_programs: None):
    """Layers without a cache are programs of their own, which read the caches of earlier programs."""
    config = dataclasses.replace(SIZES["chunks of 16, few pages"], num_pages=40)
    engine, outputs = run(loaded(name), config, golden(name).prompts)
    expect_golden(name, outputs)
    steps = [step for step in engine._runner._programs.forward.values() if isinstance(step, StepPrograms)]
    shares = config_of(name).num_kv_shared_layers > 0
    assert [step.narrow is not None for step in steps] == [shares]
    if shares:
        ranges = {tuple(map(tuple, step.layer_ranges)) for step in steps}
        assert ranges == {((0, 1), (2, 3), (4,), (5, 6))}


@pytest.mark.slow
def test_written_pages_are_reported_by_layer():
    """The pages of all layers with a cache are reported while the step runs, and equal exported pages."""
    sizes = dataclasses.replace(SIZES["chunks of 16, few pages"], num_pages=64, max_model_len=104)
    engine, told = Engine(loaded("gemma4"), sizes), list[WrittenLayer]()
    feed = engine.watch_written(told.append, pieces=3)
    outputs = engine.generate(golden("gemma4").prompts, GREEDY)
    feed.wait(60)
    expect_golden("gemma4", [*outputs, *outputs])
    assert {written.layer for written in told} == {*config_of("gemma4").cached_layers}
    assert {written.num_layers for written in told} == {4}
    assert all(np.isfinite(array).all() for written in told for array in written.contents.values())


def test_memory_is_divided_by_width_of_keys():
    """A group with wider keys gets fewer pages for the same memory."""
    config = dataclasses.replace(TINY, num_kv_shared_layers=0, layer_types=("full_attention",) * 6)
    common: dict[str, Any] = {"page_size": 8, "max_model_len": 64, "max_num_seqs": 3, "step_tokens": 8}
    [group] = group_sizes(config, num_pages=30, recycling=True, **common)
    assert group.num_pages == 30
    local, wide = group_sizes(TINY, num_pages=30, recycling=False, **common)
    assert (local.layers, wide.layers) == ((0, 1, 3), (2,))
    assert (local.num_pages, wide.num_pages) == (30, 30)
    local, wide = group_sizes(TINY, num_pages=60, recycling=True, **common)
    values = [len(g.layers) * g.num_pages * 2 * width for g, width in ((local, 32), (wide, 64))]
    total = 60 * (3 * 2 * 32 + 2 * 64)
    assert 0.95 * total < sum(values) <= total


def test_specs_of_layers():
    decoder = random_model(dataclasses.replace(TINY, vocab_size=64))
    specs = decoder.cache_specs(5, 8, "int8")
    shapes = [spec.arrays["k"].shape if spec.arrays else None for spec in specs]
    assert shapes == [(5, 2, 8, 32), (5, 2, 8, 32), (5, 2, 8, 64), (5, 2, 8, 32), None, None]
    caches = decoder.allocate_caches(5, 8)
    assert [isinstance(cache, PagedKV) for cache in caches] == [True] * 4 + [False] * 2
    assert decoder.layer_groups == {0: 0, 1: 0, 2: 1, 3: 0, 4: 0, 5: 1}


def test_every_operation_has_an_implementation():
    sizes = EngineConfig(num_pages=8, page_size=4, max_batched_tokens=8, max_num_seqs=2)
    explained = explain_attention(TINY, AttentionSettings(), sizes.runner_config(64).largest_step, "bfloat16")
    assert {op: explanation.chosen for op, explanation in explained.items()} == dict.fromkeys(
        ("write_kv", "paged_decode", "paged_prefill"), "xla"
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma4", "gemma4-moe", "random"])
def test_command_verifies_tokens(model: str, tmp_path: Path):
    """run_decode.py accepts the directories of the goldens, and the random model."""
    ids, out = tmp_path / "ids.json", tmp_path / "out.json"
    ids.write_text(json.dumps(golden("gemma4").prompts))
    source = ["--random", "gemma4-tiny"] if model == "random" else ["--model", str(GOLDENS / model)]
    sizes = ["--num-pages", "40", "--page-size", "8", "--max-batched-tokens", "16", "--max-num-seqs", "4"]
    arguments = [*source, *sizes, "--prompt-ids", str(ids), "--max-tokens", "24", "--verify", "--json", str(out)]
    assert command.main(arguments) == 0
    tokens = [request["output_ids"] for request in json.loads(out.read_text())["requests"]]
    if model == "gemma4":
        assert tokens == [wanted.tolist() for wanted in golden(model)["tokens"]]


# --- checkpoints

EXPERTS = dataclasses.replace(
    TINY,
    num_experts=8,
    top_k_experts=2,
    moe_intermediate_size=32,
    num_kv_shared_layers=0,
    hidden_size_per_layer_input=0,
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
)


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["per-layer embeddings", "experts"])
def test_every_parameter_has_one_source(config: Gemma4Config):
    parameters = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.float32))))
    sources, shapes = weights.weight_sources(config), weights.checkpoint_shapes(config)
    read = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    assert {".".join(map(str, path)) for path, _ in parameters} == sources.keys()
    for path, parameter in parameters:
        source = sources[".".join(map(str, path))]
        assert source.pack(read[name] for name in source.tensors).shape == parameter.shape, path


def test_towers_and_unused_keys_are_not_loaded():
    checkpoint = files.open_checkpoint(GOLDENS / "gemma4-moe")
    assert {name.split(".")[1] for name in checkpoint.tensors} >= {"vision_tower", "audio_tower", "layers"}
    assert not any("language_model" in name for name in checkpoint.tensors)
    unused = files.Checkpoint(config_of("gemma4"), {})._why_ignored
    reason = "belongs to a layer that attends to the cache of an earlier layer"
    assert unused("model.layers.6.self_attn.k_proj.weight", False) == reason
    assert unused("model.layers.3.self_attn.k_proj.weight", False) is None


def test_tensors_with_and_without_prefix_raise():
    stored = files.open_checkpoint(GOLDENS / "gemma4-moe").tensors["model.norm.weight"]
    with pytest.raises(files.CheckpointError, match="expected one of them"):
        files._of_text_model({"model.norm.weight": stored, "model.language_model.norm.weight": stored})
