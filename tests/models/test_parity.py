"""Parity with Hugging Face transformers on committed goldens, and mutations that the comparison must detect.

A golden is a small checkpoint with results of transformers; tests/goldens/README.md describes the goldens. A mutation
is a deliberate mistake in the model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PagedIndexKeys, Rope, index_cache_spec
from pallas_attn.models.checkpoints import files, load_model, mxfp4, weights
from pallas_attn.models.config import DeepSeekConfig, GQAConfig, ModelConfig, YarnConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder, gqa, indexer, layers, mla, model, rope, split_model
from pallas_attn.models.decoder.caches import IndexedLatent
from pallas_attn.models.decoder.rope import halves_order
from pallas_attn.models.moe import router
from pallas_attn.models.moe.layer import BiasedMoE, MoE
from pallas_attn.models.moe.router import Router
from pallas_attn.portable import index_tiles
from tests.kit.slow_cases import slow_cases
from tests.models.step_case import PAGE_SIZE, Pages, step

GOLDENS = Path(__file__).parents[1] / "goldens"
SPARSE = ("v32", "v32-fp8", "glm-dsa", "glm-shared")
LATENT = ("v2-greedy", "v2-group", "v3", "v3-fp8", *SPARSE)
GQA = ("qwen3", "qwen3-yarn", "qwen3-window", "llama", "gpt-oss", "gpt-oss-mxfp4")
NAMES = (*LATENT, *GQA)


def some_slow(names: Sequence[str], *slow: str) -> list[Any]:
    """Return the names as pytest parameters. The names in `slow` get the mark `slow`."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


LOGIT_TOLERANCE = 1e-4
KL_TOLERANCE = 5e-6
CACHE_TOLERANCE = 2e-5
MARGIN = 1e-3


@dataclasses.dataclass(frozen=True)
class StoredGolden:
    """Prompts of a golden, and its arrays: the list of the arrays of a kind has one array per prompt."""

    prompts: list[list[int]]
    arrays: dict[str, np.ndarray]

    def __getitem__(self, kind: str) -> list[np.ndarray]:
        return [self.arrays[f"{kind}_{i}"] for i in range(len(self.prompts))]


@dataclasses.dataclass(frozen=True)
class Golden(StoredGolden):
    """A golden with the results of transformers for each prompt, the order of its rotary columns, and the names of the
    mutations that it detects."""

    rope_columns: str
    mutations: tuple[str, ...]

    def latents(self, config: ModelConfig) -> list[np.ndarray]:
        """Return the latents of each prompt [layers, prompt length, latent dim + rotary dim].

        The rotary columns are in the order of this project's cache.
        """
        assert isinstance(config, DeepSeekConfig)
        rotary = np.arange(config.qk_rope_head_dim)
        order = halves_order(config.qk_rope_head_dim) if self.rope_columns == "interleaved" else rotary
        columns = np.concatenate([np.arange(config.kv_lora_rank), config.kv_lora_rank + order])
        return [latents[..., columns] for latents in self["latents"]]


def read_golden(name: str) -> StoredGolden:
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        return StoredGolden(json.loads((GOLDENS / name / "prompts.json").read_text()), dict(arrays))


@functools.cache
def golden(name: str) -> Golden:
    about = json.loads((GOLDENS / name / "golden.json").read_text())
    stored = read_golden(name)
    return Golden(stored.prompts, stored.arrays, about["rope_columns"], tuple(about["mutations"]))


def assert_parity(logits: np.ndarray, wanted: np.ndarray) -> None:
    """Assert that logits equal the golden's within the error of two float32 computations."""
    difference = np.abs(logits - wanted).max()
    assert difference <= LOGIT_TOLERANCE, f"logits differ by {difference}"
    p, q = (np.asarray(jax.nn.log_softmax(jnp.asarray(x))) for x in (wanted, logits))
    divergence = np.sum(np.exp(p) * (p - q), axis=-1).max()
    assert divergence <= KL_TOLERANCE, f"KL divergence is {divergence}"


@dataclasses.dataclass
class Run:
    """Results of a model that has prefilled all prompts of its golden in one step."""

    golden: Golden
    model: Decoder
    pages: Pages
    logits: list[np.ndarray]
    caches: tuple
    step: Callable
    weights: list


@functools.cache
def prefilled(name: str) -> Run:
    expected = golden(name)
    model = load_model(GOLDENS / name, jnp.float32)
    run, weights = split_model(model)
    run = jax.jit(run)
    lengths = [len(p) for p in expected.prompts]
    pages = Pages.scatter(len(lengths), -(-(max(lengths) + 24) // PAGE_SIZE))
    metadata = step(pages, prefill=[(i, 0, length) for i, length in enumerate(lengths)])
    tokens = jnp.asarray(np.concatenate(expected.prompts), jnp.int32)
    logits, caches = run(weights, tokens, pages.allocate(model, fill=np.nan), metadata)
    return Run(
        expected,
        model,
        pages,
        np.split(np.asarray(logits), np.cumsum(lengths)[:-1]),
        caches,
        run,
        weights,
    )


@pytest.mark.slow
@slow_cases(
    "qwen3-yarn", "llama", "qwen3-window", "v32-fp8", "v3-fp8", "gpt-oss-mxfp4", "gpt-oss", "glm-shared", "v32", "v3",
)  # fmt: skip
# v2-greedy, v2-group and glm-dsa are slow, because v3 and glm-shared cover the same kinds of layers.
@pytest.mark.parametrize("name", some_slow(NAMES, "v2-greedy", "v2-group", "glm-dsa"))
def test_prompt_logits(name: str):
    for logits, wanted in zip(prefilled(name).logits, golden(name)["logits"], strict=True):
        assert_parity(logits, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_slow(LATENT, "glm-dsa"))  # slow: glm-shared has all kinds of layers of glm-dsa
def test_cached_latents(name: str):
    run = prefilled(name)
    for i, wanted in enumerate(run.golden.latents(run.model.config)):
        latents = run.pages.latents(run.caches, i, wanted.shape[1])
        np.testing.assert_allclose(latents, wanted, atol=CACHE_TOLERANCE, rtol=CACHE_TOLERANCE)


@pytest.mark.slow
@slow_cases("v32")
@pytest.mark.parametrize("name", some_slow(SPARSE, "glm-dsa"))
def test_cached_index_keys(name: str):
    run = prefilled(name)
    for i, wanted in enumerate(run.golden["index_keys"]):
        keys = run.pages.index_keys(run.caches, i, wanted.shape[1])
        np.testing.assert_allclose(keys, wanted, atol=CACHE_TOLERANCE, rtol=CACHE_TOLERANCE)


@slow_cases("llama", "qwen3-window", "qwen3")
@pytest.mark.parametrize("name", some_slow(GQA, "gpt-oss", "gpt-oss-mxfp4"))  # slow: prompt logits cover these models
def test_cached_keys_and_values(name: str):
    run = prefilled(name)
    for i, wanted in enumerate(zip(run.golden["keys"], run.golden["values"], strict=True)):
        for cached, golden_one in zip(
            run.pages.keys_and_values(run.caches, i, wanted[0].shape[2]), wanted, strict=True
        ):
            np.testing.assert_allclose(cached, golden_one, atol=CACHE_TOLERANCE, rtol=CACHE_TOLERANCE)


# Most models are slow here: one model per kind of attention is enough, because prompt logits cover every model family.
@pytest.mark.slow
@pytest.mark.parametrize("name", some_slow(NAMES, *(n for n in NAMES if n not in ("v3", "qwen3", "llama", "gpt-oss"))))
def test_greedy_tokens(name: str):
    """Greedy tokens of decode steps equal transformers, except at near ties of the two largest logits.

    The steps start from prefilled caches. The input of each step is the golden's token.
    """
    run = prefilled(name)
    tokens, margins = np.stack(run.golden["tokens"]), np.stack(run.golden["margins"])
    assert np.mean(margins > MARGIN) > 0.9
    chosen = [np.array([logits[-1].argmax() for logits in run.logits])]
    caches = run.caches
    for i in range(tokens.shape[1] - 1):
        decode = [(s, len(prompt) + i) for s, prompt in enumerate(run.golden.prompts)]
        logits, caches = run.step(run.weights, jnp.asarray(tokens[:, i], jnp.int32), caches, step(run.pages, decode))
        chosen.append(np.asarray(logits).argmax(-1))
    clear = margins > MARGIN
    np.testing.assert_array_equal(np.stack(chosen, axis=1)[clear], tokens[clear])


# --- mutations of the model

type Patch = pytest.MonkeyPatch


def reconfigured(**changes: Any) -> Callable[[Patch], None]:
    """Return a mutation that changes entries of config.json."""
    right = files.load_config

    def mutation(patch: Patch) -> None:
        patch.setattr(files, "load_config", lambda directory: dataclasses.replace(right(directory), **changes))

    return mutation


def replaced(owner: object, name: str, value: object) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def groups_ignored(patch: Patch) -> None:
    patch.setattr(router, "_mask_groups", lambda choice, config: choice)


def group_score_counts(method: str) -> Callable[[Patch], None]:
    """Score groups of experts by `method`, which another model family uses."""
    right = router._mask_groups
    wrong = lambda choice, config: right(choice, dataclasses.replace(config, topk_method=method))  # noqa: E731
    return replaced(router, "_mask_groups", wrong)


def masked_groups_score_zero(patch: Patch) -> None:
    right = router._mask_groups
    patch.setattr(router, "_mask_groups", lambda *args: jnp.nan_to_num(right(*args), neginf=0.0))


def tensors_dropped(ending: str) -> Callable[[Patch], None]:
    right = files.Checkpoint.read
    wrong = lambda self, name, part=(): right(self, name, part) * (not name.endswith(ending))  # noqa: E731
    return replaced(files.Checkpoint, "read", wrong)


def bias_in_weights(patch: Patch) -> None:
    right = Router.__call__

    def route(router: Router, x):
        experts, _ = right(router, x)
        assert router.e_score_correction_bias is not None
        biased = jax.nn.sigmoid(x @ router.weight[...]) + router.e_score_correction_bias[...][None, :]
        weights = jnp.take_along_axis(biased, experts, axis=-1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return experts, weights * router.config.routed_scaling_factor

    patch.setattr(Router, "__call__", route)


def shared_experts_dropped(patch: Patch) -> None:
    right = MoE.__call__

    def mix(layer: MoE, *args):
        shared = layer.shared_experts
        layer.shared_experts = None
        y = right(layer, *args)
        layer.shared_experts = shared
        return y

    patch.setattr(MoE, "__call__", mix)


def fp8_blocks_of_equal_size(patch: Patch) -> None:
    right = files.dequantise

    def divide_evenly(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
        rows, columns = (-(-n // blocks) for n, blocks in zip(weight.shape, scale.shape, strict=True))
        return right(weight, scale, (rows, columns))

    patch.setattr(files, "dequantise", divide_evenly)


def attention_norms_use_rms_norm_eps(patch: Patch) -> None:
    patch.setattr(mla, "INNER_NORM_EPS", 5e-3)


def rope_is(**changes: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(gqa, "Rope", lambda cos, sin, **given: Rope(cos, sin, **{**given, **changes}))


def kv_heads_dealt_round(patch: Patch) -> None:
    """Let query head h attend to KV head h mod Hkv, instead of adjacent query heads sharing a KV head."""
    right = gqa.GQA._attend

    def attend(layer: gqa.GQA, q, cache, step):
        heads, kv_heads = layer.config.num_attention_heads, layer.config.num_key_value_heads
        order = np.arange(heads).reshape(-1, kv_heads).T.reshape(-1)
        return right(layer, q[:, order], cache, step)[:, np.argsort(order)]

    patch.setattr(gqa.GQA, "_attend", attend)


def prefilled_with(**changes: Callable) -> Callable[[Patch], None]:
    """Change arguments of `paged_prefill`. Each change is a function of the original keyword arguments."""
    right = gqa.paged_prefill

    def attend(*args, **kwargs):
        return right(*args, **{**kwargs, **{name: change(kwargs) for name, change in changes.items()}})

    return replaced(gqa, "paged_prefill", attend)


def ramp_of_whole_frequencies(patch: Patch) -> None:
    right = rope._yarn_share
    truncated = lambda yarn, *args: right(dataclasses.replace(yarn, truncate=True), *args)  # noqa: E731
    patch.setattr(rope, "_yarn_share", truncated)


def windows_on_the_other_layers(patch: Patch) -> None:
    right = files.load_config

    def load(directory: Path) -> ModelConfig:
        config = right(directory)
        assert isinstance(config, GQAConfig)
        assert config.windows is not None
        width = next(window for window in config.windows if window)
        windows = tuple(None if window else width for window in config.windows)
        return dataclasses.replace(config, windows=windows)

    patch.setattr(files, "load_config", load)


def weights_among_all_experts(patch: Patch) -> None:
    def route(layer: BiasedMoE, x):
        weights, chosen = jax.lax.top_k(jax.nn.softmax(layer.router(x)), layer.config.num_experts_per_tok)
        return chosen, weights

    patch.setattr(BiasedMoE, "_route", route)


def gates_in_the_first_half(patch: Patch) -> None:
    right = files.Checkpoint.read

    def read(directory: files.Checkpoint, name: str, part: files.Slices = ()) -> np.ndarray:
        tensor = right(directory, name, part)
        if ".experts.gate_up_proj" not in name:
            return tensor
        return np.stack(np.split(tensor, 2, axis=-1), axis=-1).reshape(tensor.shape)

    patch.setattr(files.Checkpoint, "read", read)


def unpacked_from(change: Callable) -> Callable[[Patch], None]:
    right = mxfp4.dequantise
    return replaced(mxfp4, "dequantise", lambda blocks, scales: right(*change(blocks, scales)))


def indexed_with(change: Callable) -> Callable[[Patch], None]:
    """Replace the selection of keys by `change`, which receives the original function and its arguments."""
    right = mla.index_top_k
    return replaced(mla, "index_top_k", lambda *args, **kwargs: change(right, *args, **kwargs))


def index_rope_of_the_last_columns(patch: Patch) -> None:
    def rotate_last(layer: indexer.Indexer, x, angles):
        rest, last = jnp.split(x, [x.shape[-1] - layer.rotated], axis=-1)
        return jnp.concatenate([rest, rope.rotate(last, *angles)], axis=-1)

    patch.setattr(indexer.Indexer, "_rotate", rotate_last)


def index_keys_not_centred(patch: Patch) -> None:
    def norm(layer: layers.LayerNorm, x):
        scaled = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + layer.eps)
        return scaled * layer.weight[...][None] + layer.bias[...][None]

    patch.setattr(layers.LayerNorm, "__call__", norm)


def index_relu_dropped(patch: Patch) -> None:
    def weighted(subscripts, products, weights, scale):
        return jnp.einsum(subscripts, products * scale, weights, precision=jax.lax.Precision.HIGHEST)

    patch.setattr(index_tiles, "_weighted", weighted)


def choice_of_the_last_token(patch: Patch) -> None:
    right = mla.index_top_k

    def choose(*args, **kwargs):
        chosen = right(*args, **kwargs)
        return jnp.broadcast_to(chosen[-1:], chosen.shape)

    patch.setattr(mla, "index_top_k", choose)


def choice_of_the_first_layer(patch: Patch) -> None:
    """Make all layers attend to the keys that the first layer selected.

    Layers are not jitted here, because the selected keys are passed from one layer to another through a list.
    """
    right, chosen = mla.index_top_k, []

    def choose(*args, **kwargs):
        if not chosen:
            chosen.append(right(*args, **kwargs))
        return chosen[0]

    patch.setattr(model, "layer_function", lambda: model._apply_layer)
    patch.setattr(mla, "index_top_k", choose)


def shared_layers_choose(what: Callable) -> Callable[[Patch], None]:
    """Change the selected keys of layers without an indexer, which share the selected keys of an earlier layer.

    `what` receives the original function, the layer, the last layer that selected keys, and the layer's arguments.
    """
    right, last = mla.MLA.__call__, []

    def attend(layer: mla.MLA, *args: Any) -> Any:
        if layer.indexer is None:
            return what(right, layer, last[0], *args)
        last.insert(0, layer)
        return right(layer, *args)

    def mutation(patch: Patch) -> None:
        patch.setattr(model, "layer_function", lambda: model._apply_layer)
        patch.setattr(mla.MLA, "__call__", attend)

    return mutation


def by_the_weights_of(right, layer: mla.MLA, chooser: mla.MLA, x, rope, cache, slots, parts, choice):
    """Call `layer` with keys that are selected by the weights of the indexer of `chooser`."""
    assert chooser.indexer is not None
    config, pages = layer.config, cache.pages
    spec = index_cache_spec(
        num_pages=pages.shape[0], page_size=pages.shape[1], index_dim=config.index_head_dim, dtype=pages.dtype
    )
    residual = layer.q_a_layernorm(layer.q_a_proj(x))
    empty = IndexedLatent(cache, PagedIndexKeys.allocate(spec))
    _, chosen = layer._choices(chooser.indexer, empty, x, residual, rope, slots, parts)
    return right(layer, x, rope, cache, slots, parts, chosen)


def shared_layers_take_the_first_choice(patch: Patch) -> None:
    right, first = mla.MLA._given_choice, []

    def given(layer: mla.MLA, cache, parts, choice):
        first.append(choice)
        return right(layer, cache, parts, first[0])

    patch.setattr(model, "layer_function", lambda: model._apply_layer)
    patch.setattr(mla.MLA, "_given_choice", given)


right_dequantise = files.dequantise
ALL_KEPT, NONE_KEPT = (lambda yarn, theta, width, share=share: np.full(width // 2, share) for share in (1.0, 0.0))

MUTATIONS: dict[str, Callable[[Patch], None]] = {
    "softmax_mscale_dropped": replaced(YarnConfig, "score_scale", 1.0),
    "rotary_mscale_dropped": replaced(YarnConfig, "rotary_scale", 1.0),
    "yarn_interpolation_dropped": replaced(rope, "_unscaled_share", ALL_KEPT),
    "yarn_interpolates_all_frequencies": replaced(rope, "_unscaled_share", NONE_KEPT),
    "rope_in_halves": reconfigured(rope_interleave=False),
    "attention_norms_use_rms_norm_eps": attention_norms_use_rms_norm_eps,
    "groups_ignored": groups_ignored,
    "group_score_is_the_best": group_score_counts("group_limited_greedy"),
    "group_score_is_the_sum_of_two": group_score_counts("noaux_tc"),
    "masked_groups_score_zero": masked_groups_score_zero,
    "bias_dropped": tensors_dropped("e_score_correction_bias"),
    "bias_in_weights": bias_in_weights,
    "topk_not_normalised": reconfigured(norm_topk_prob=False),
    "topk_normalised": reconfigured(norm_topk_prob=True),
    "routed_scale_dropped": reconfigured(routed_scaling_factor=1.0),
    "shared_experts_dropped": shared_experts_dropped,
    "fp8_scales_dropped": replaced(files, "dequantise", lambda weight, scale, block: weight.astype(np.float32)),
    "fp8_scales_divide": replaced(files, "dequantise", lambda w, s, block: right_dequantise(w, 1 / s, block)),
    "fp8_blocks_of_equal_size": fp8_blocks_of_equal_size,
    "all_keys_attended": reconfigured(index_topk=10**6),
    "one_key_more": indexed_with(lambda right, *args, top_k, **kwargs: right(*args, top_k=top_k + 1, **kwargs)),
    "worst_keys_chosen": indexed_with(lambda right, q, weights, *args, **kwargs: right(q, -weights, *args, **kwargs)),
    "index_rope_dropped": replaced(indexer.Indexer, "_rotate", lambda layer, x, angles: x),
    "index_rope_of_the_last_columns": index_rope_of_the_last_columns,
    "index_rope_of_the_other_family": replaced(
        weights, "INDEX_ROPE_INTERLEAVE", {"deepseek_v32": True, "glm_moe_dsa": False}
    ),
    "index_relu_dropped": index_relu_dropped,
    "index_weights_dropped": indexed_with(
        lambda right, q, weights, *args, **kwargs: right(q, jnp.ones_like(weights), *args, **kwargs)
    ),
    "index_keys_not_centred": index_keys_not_centred,
    "choice_of_the_first_layer": choice_of_the_first_layer,
    "choice_of_the_last_token": choice_of_the_last_token,
    "shared_layers_choose_anew": shared_layers_choose(by_the_weights_of),
    "shared_layers_attend_to_all_keys": replaced(
        mla.MLA, "_given_choice", lambda layer, cache, parts, choice: [None] * len(parts)
    ),
    "shared_layers_take_the_first_choice": shared_layers_take_the_first_choice,
    "rope_in_pairs": rope_is(style="interleaved"),
    "llama3_interpolation_dropped": replaced(rope, "_unscaled_share", ALL_KEPT),
    "llama3_interpolates_all_frequencies": replaced(rope, "_unscaled_share", NONE_KEPT),
    "qk_norms_dropped": rope_is(q_norm=None, k_norm=None),
    "kv_heads_dealt_round": kv_heads_dealt_round,
    "scores_scaled_by_the_hidden_size": replaced(
        GQAConfig, "sm_scale", property(lambda config: (config.hidden_size / config.num_attention_heads) ** -0.5)
    ),
    "attention_biases_dropped": tensors_dropped("_proj.bias"),
    "yarn_ramp_of_whole_frequencies": ramp_of_whole_frequencies,
    "windows_dropped": reconfigured(windows=None),
    "windows_on_the_other_layers": windows_on_the_other_layers,
    "windows_one_wider": prefilled_with(window=lambda given: given["window"] and given["window"] + 1),
    "sinks_dropped": prefilled_with(sinks=lambda given: None),
    "sinks_scaled_as_scores": prefilled_with(sinks=lambda given: given["sinks"] * given["sm_scale"]),
    "router_bias_dropped": tensors_dropped("router.bias"),
    "weights_among_all_experts": weights_among_all_experts,
    "expert_biases_dropped": tensors_dropped("_proj_bias"),
    "gates_in_the_first_half": gates_in_the_first_half,
    "gates_not_clamped": reconfigured(swiglu_limit=np.inf),
    "swiglu_alpha_is_one": reconfigured(swiglu_alpha=1.0),
    "mxfp4_scales_dropped": unpacked_from(lambda blocks, scales: (blocks, np.full_like(scales, 127))),
    "mxfp4_halves_of_bytes_swapped": unpacked_from(lambda blocks, scales: (blocks >> 4 | blocks << 4, scales)),
}


def longest_prompt_logits(name: str, expected: StoredGolden) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of the model and of the golden for the longest prompt. The model runs without jit.

    Without jit, each operation is compiled once for all mutations. A jitted model would be compiled for each mutation.
    Only the layers of DeepSeek models are jitted, because they have many small operations.
    """
    prompt, wanted = max(zip(expected.prompts, expected["logits"], strict=True), key=lambda pair: len(pair[0]))
    mla: Literal["absorb", "auto"] = "absorb" if name in LATENT else "auto"
    model = load_model(GOLDENS / name, jnp.float32, AttentionSettings(mla=mla, implementation="reference"))
    pages = Pages.scatter(1, -(-len(prompt) // PAGE_SIZE))
    metadata = step(pages, prefill=[(0, 0, len(prompt))])
    with jax.disable_jit(name not in LATENT):
        logits, _ = model(jnp.asarray(prompt, jnp.int32), pages.allocate(model), metadata)
    return np.asarray(logits), wanted


def undetected(
    mistakes: Mapping[str, Callable[[Patch], None]], prompt_logits: Callable[[], tuple[np.ndarray, np.ndarray]]
) -> list[str]:
    """Make mistakes, one at a time, and return the names of the mistakes that the comparison of `prompt_logits()`, the
    logits of a model and of its golden, does not detect.
    """
    unseen = []
    for name, make in mistakes.items():
        with pytest.MonkeyPatch.context() as patch:
            make(patch)
            logits, wanted = prompt_logits()
        try:
            assert_parity(logits, wanted)
        except AssertionError:
            continue
        unseen.append(name)
    return unseen


def undetected_mutations(name: str, mutations: Iterable[str]) -> list[str]:
    """Return the mutations that the comparison of the longest prompt of a golden does not detect."""
    return undetected(
        {mutation: MUTATIONS[mutation] for mutation in mutations}, lambda: longest_prompt_logits(name, golden(name))
    )


@functools.cache
def made_first(name: str) -> tuple[str, ...]:
    """Return the mutations of this golden that no earlier golden in `NAMES` has."""
    before = {mutation for other in NAMES[: NAMES.index(name)] for mutation in golden(other).mutations}
    return tuple(mutation for mutation in golden(name).mutations if mutation not in before)


SOME_MUTATIONS = {
    "v3": ("softmax_mscale_dropped",),  # changes the logits less than other mutations
    "gpt-oss": ("windows_one_wider", "sinks_dropped", "gates_not_clamped"),
}


@pytest.mark.parametrize(
    ("name", "mutations"),
    [
        ("v3", SOME_MUTATIONS["v3"]),
        pytest.param("gpt-oss", SOME_MUTATIONS["gpt-oss"], marks=pytest.mark.slow),
    ],
    ids=["v3", "gpt-oss"],
)
def test_some_mutations_are_detected(name: str, mutations: tuple[str, ...]):
    """The comparison detects some mutations. A slow test applies all mutations."""
    assert_parity(*longest_prompt_logits(name, golden(name)))
    assert set(mutations) <= {*golden(name).mutations}
    assert not undetected_mutations(name, mutations)


@pytest.mark.slow  # slow, because the test above applies some of the mutations
@pytest.mark.parametrize("name", NAMES)
def test_mutations_are_detected_in_first_model(name: str):
    """The comparison detects every mutation. Each mutation is applied to the first model that supports it."""
    assert_parity(*longest_prompt_logits(name, golden(name)))
    assert not undetected_mutations(name, made_first(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutations_are_detected_in_every_model(name: str):
    assert not undetected_mutations(name, [each for each in golden(name).mutations if each not in made_first(name)])


def test_every_mutation_is_applied_to_a_model():
    assert {mutation for name in NAMES for mutation in made_first(name)} == MUTATIONS.keys()
