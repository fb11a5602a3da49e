"""DeepSeek-V4: parity with Hugging Face transformers, mistakes that the comparison must detect, and the engine.

The goldens are tests/goldens/v4*; tests/goldens/README.md describes them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from pallas_attn import SlotRange
from pallas_attn.models.checkpoints import (
    files,
    load_model,
    mxfp4,
    random_model,
    save_random_checkpoint,
    v4_sources,
    weights,
)
from pallas_attn.models.checkpoints.calibration import calibrate
from pallas_attn.models.cli.decode import command
from pallas_attn.models.config import V4_PRESETS, DeepseekV4Config, cache_groups
from pallas_attn.models.decoder import (
    AttentionSettings,
    Decoder,
    GroupTables,
    StepMetadata,
    caches,
    deepseek_v4,
    explain_attention,
    hyper_connections,
    page_size_of,
    split_model,
    with_settings,
)
from pallas_attn.models.decoder.caches import CompressedCache, cache_arrays, move_tokens, with_arrays
from pallas_attn.models.decoder.layers import LimitedSwiglu, WideRMSNorm, swiglu
from pallas_attn.models.decoder.rope import rotate, scaled_frequencies
from pallas_attn.models.engine import (
    Decoded,
    Engine,
    EngineConfig,
    NGramProposer,
    Speculation,
)
from pallas_attn.models.engine.group_sizes import group_sizes
from pallas_attn.models.engine.verify import verify
from pallas_attn.models.moe import layer as moe_layer
from pallas_attn.models.moe import router
from tests.kit.slow_cases import slow_cases
from tests.models.golden_case import (
    GREEDY,
    continued,
    expect_golden,
    expect_mutations_of_transformers,
    golden,
    loaded,
    run_twice,
    tensors_changed,
)
from tests.models.step_case import Pages
from tests.models.test_parity import GOLDENS, MARGIN, Patch, assert_parity, reconfigured, replaced, undetected

NAMES = ("v4", "v4-published")
# test_rejected_drafts_leave_no_trace compares logits of prompts of v4, too.
ONE_FAST = [pytest.param("v4", marks=pytest.mark.slow), "v4-published"]
TINY = V4_PRESETS["v4-tiny"]
MAX_LEN = 176


run = functools.partial(run_twice, max_model_len=MAX_LEN)


def config_of(name: str) -> DeepseekV4Config:
    config = loaded(name).config
    assert isinstance(config, DeepseekV4Config)
    return config


# --- steps


@dataclasses.dataclass
class Stepper:
    """Runs steps of a model over pages in random order. Pages begin as NaN, as do all entries and compressor rows."""

    name: str
    pages: Pages
    page_size: int
    caches: tuple
    run: Callable

    @staticmethod
    def of(name: str, num_sequences: int) -> Stepper:
        decoder, size = loaded(name), config_of(name).page_unit
        pages = Pages.scatter(num_sequences, -(-MAX_LEN // size))
        caches = decoder.allocate_caches(pages.tables.size + 1, size)
        caches = jax.tree.map(lambda pages: jnp.full_like(pages, np.nan), caches)
        return Stepper(name, pages, size, caches, run_of(name))

    def slots(self, sequence: int, positions: np.ndarray) -> np.ndarray:
        return self.pages.tables[sequence, positions // self.page_size] * self.page_size + positions % self.page_size

    def step(self, rows: list[tuple[int, list[int], int]], decode: int = 0, queries: int = 1) -> list[np.ndarray]:
        """Run a step. Return the logits of the tokens of each row.

        Args:
          rows: (sequence, tokens, position of the first token) of each row.
          decode: number of first rows that are decode rows.
          queries: tokens per decode row, including padding.
        """
        tokens, positions, slots, widths = [], [], [], []
        for i, (sequence, row, start) in enumerate(rows):
            missing = queries - len(row) if i < decode else 0
            at = np.arange(start, start + len(row))
            tokens += [*row, *[0] * missing]
            positions += [*at, *[0] * missing]
            slots += [*self.slots(sequence, at), *[-1] * missing]
            widths.append(len(row))
        tables = self.pages.tables[[sequence for sequence, _, _ in rows]]
        lens = [start + len(row) for _, row, start in rows]
        group = GroupTables(_ints(slots), _ints(tables[:decode]), _ints(tables[decode:]))
        metadata = StepMetadata(
            positions=_ints(positions),
            groups=(group,),
            decode_kv_lens=_ints(lens[:decode]),
            cu_q_lens=_ints(np.cumsum([0, *widths[decode:]])),
            prefill_kv_lens=_ints(lens[decode:]),
            logit_rows=_ints(np.arange(len(tokens))),
            decode_q_lens=_ints(widths[:decode]) if queries > 1 else None,
            decode_queries=queries,
        )
        logits, self.caches = self.run(_ints(tokens), self.caches, metadata)
        starts = np.concatenate([np.arange(decode) * queries, decode * queries + np.cumsum([0, *widths[decode:]])[:-1]])
        found = np.asarray(logits)
        return [found[int(start) : int(start) + width] for start, width in zip(starts, widths, strict=True)]


def _ints(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values), jnp.int32)


@functools.cache
def run_of(name: str) -> Callable:
    """Return a compiled step. Its layers without an indexer give lists of slots to `mla_sparse`; those of
    "v4-published" give ranges of keys."""
    model, is_range = loaded(name), set()
    model = with_settings(model, dataclasses.replace(model.settings, slot_ranges=name == "v4-published"))
    stepping, parameters = split_model(model)
    right = deepseek_v4.mla_sparse

    def attend(q: Any, rope: Any, cache: Any, slots: Any, **options: Any) -> Any:
        is_range.add(isinstance(slots, SlotRange))
        return right(q, rope, cache, slots, **options)

    def step(*arguments: Any) -> Any:
        with mock.patch.object(deepseek_v4, "mla_sparse", attend):
            result = stepping(*arguments)
        assert is_range == ({True, False} if name == "v4-published" else {False})  # CSA layers give lists
        return result

    return functools.partial(jax.jit(step), parameters)


@functools.cache
def prefilled(name: str) -> tuple[Stepper, list[np.ndarray]]:
    prompts = golden(name).prompts
    stepper = Stepper.of(name, len(prompts))
    return stepper, stepper.step([(i, prompt, 0) for i, prompt in enumerate(prompts)])


@pytest.mark.parametrize("name", ONE_FAST)
def test_prompt_logits(name: str):
    for logits, wanted in zip(prefilled(name)[1], golden(name)["logits"], strict=True):
        assert_parity(logits, wanted)


@pytest.mark.parametrize("name", ONE_FAST)
def test_cached_entries(name: str):
    """Entries and index keys equal transformers."""
    stepper, config, expected = prefilled(name)[0], config_of(name), golden(name)
    found: dict[str, list[tuple[int, jax.Array]]] = {"csa_entries": [], "hca_entries": [], "index_keys": []}
    for layer, cache in enumerate(stepper.caches):
        rate = config.rate(layer)
        if not rate:
            assert cache.entries is cache.state is cache.index is None
            continue
        found["csa_entries" if config.has_indexer(layer) else "hca_entries"].append((rate, cache.entries.pages))
        if config.has_indexer(layer):
            found["index_keys"].append((rate, cache.index.keys))
    for kind, layers in found.items():
        for sequence, wanted in enumerate(expected[kind]):
            assert len(wanted) == len(layers)
            for (rate, pages), entries in zip(layers, wanted, strict=True):
                size = stepper.page_size // rate
                at = np.arange(len(entries))
                rows = np.asarray(pages)[stepper.pages.tables[sequence, at // size], at % size]
                np.testing.assert_allclose(rows, entries, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str):
    """Greedy tokens of decode steps equal transformers. The input of each step is the golden's token."""
    expected = golden(name)
    tokens, margins = np.stack(expected["tokens"]), np.stack(expected["margins"])
    stepper = Stepper.of(name, len(expected.prompts))
    logits = stepper.step([(i, prompt, 0) for i, prompt in enumerate(expected.prompts)])
    chosen = [[row[-1].argmax() for row in logits]]
    for i in range(tokens.shape[1] - 1):
        rows = [(s, [int(tokens[s, i])], len(prompt) + i) for s, prompt in enumerate(expected.prompts)]
        chosen.append([row[-1].argmax() for row in stepper.step(rows, decode=len(rows))])
    clear = margins > MARGIN
    np.testing.assert_array_equal(np.array(chosen).T[clear], tokens[clear])


@pytest.mark.slow  # slow, because chunks of test_engine_tokens_equal_transformers end in blocks, too
@pytest.mark.parametrize("sizes", [(7, 10), (1, 5, 3, 13)], ids=str)
def test_chunks_may_end_anywhere_in_a_block(sizes: tuple[int, ...]):
    prompt, wanted = golden("v4").prompts[-1], golden("v4")["logits"][-1]
    stepper, found, start, i = Stepper.of("v4", 1), [], 0, 0
    while start < len(prompt):
        chunk = prompt[start : start + sizes[i % len(sizes)]]
        found.append(stepper.step([(0, chunk, start)])[0])
        start, i = start + len(chunk), i + 1
    assert_parity(np.concatenate(found), wanted)


@pytest.mark.slow
def test_rejected_drafts_leave_no_trace():
    """Decode rows have up to five tokens. The last tokens of a row are wrong, and later steps replace them. Rows have
    different lengths, and a prompt is prefilled in the same steps. All steps have one shape, so one is compiled."""
    (*_, first, second), expected = golden("v4").prompts, golden("v4")["logits"]
    stepper = Stepper.of("v4", 3)
    at, draw = [0, 0], np.random.default_rng(0)
    while min(len(first) - at[0], len(second) - at[1]) > 5:
        rows, good = [], []
        for i, prompt in enumerate((first, second)):
            kept, wrong = int(draw.integers(1, 3)), int(draw.integers(0, 4))
            rows.append((i, [*prompt[at[i] : at[i] + kept], *draw.integers(2, 256, wrong).tolist()], at[i]))
            good.append(kept)
        rows.append((2, golden("v4").prompts[1], 0))
        found = stepper.step(rows, decode=2, queries=5)
        for i, wanted in enumerate(expected[-2:]):
            assert_parity(found[i][: good[i]], wanted[at[i] : at[i] + good[i]])
            at[i] += good[i]
        assert_parity(found[2], expected[1])


# --- mistakes


def compressed(**changes: Callable[..., Any]) -> Callable[[Patch], None]:
    """Return a mistake in the arguments of `compress_and_write`. Each change maps all arguments to a new value."""
    right, names = deepseek_v4.compress_and_write, ("state", "entries", "rows", "norm", "cos", "sin")

    def write(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        changed = {name: change(given) for name, change in changes.items()}
        positional = [changed.pop(name, value) for name, value in zip(names, args, strict=False)]
        return right(*positional, *args[len(names) :], **(options | changed))

    return replaced(deepseek_v4, "compress_and_write", write)


def without_bias_of_gates(given: dict[str, Any]) -> jax.Array:
    contents, gates = jnp.split(given["rows"], 2, axis=1)
    return jnp.concatenate([contents, jnp.zeros_like(gates)], axis=1)


def halves_exchanged(given: dict[str, Any]) -> jax.Array:
    """Exchange the columns for the own and for the next entry of CSA layers."""
    rows, width = given["rows"], given["norm"].shape[0]
    if rows.shape[1] == 2 * width:
        return rows
    return jnp.concatenate(
        [rows[:, width : 2 * width], rows[:, :width], rows[:, 3 * width :], rows[:, 2 * width : 3 * width]], 1
    )


def block_angles(offset: Callable[[int], int]) -> Callable[[Patch], None]:
    """Return a mistake that rotates entries by another position of their block."""

    def inputs(config, tokens, positions):
        made = right(config, tokens, positions)
        frequencies = scaled_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.yarn)
        wrong = {
            rate: deepseek_v4._angles(positions - positions % rate + offset(rate), frequencies)
            for rate in made.of_blocks
        }
        return dataclasses.replace(made, of_blocks=wrong)

    right = deepseek_v4.v4_inputs
    return replaced(model_module(), "v4_inputs", inputs)


def model_module() -> Any:
    from pallas_attn.models.decoder import model

    return model


def angles_of(change: Callable[[Any], dict[str, Any]]) -> Callable[[Patch], None]:
    right = deepseek_v4.v4_inputs

    def inputs(config, tokens, positions):
        made = right(config, tokens, positions)
        return dataclasses.replace(made, **change(made))

    return replaced(model_module(), "v4_inputs", inputs)


def output_not_rotated(patch: Patch) -> None:
    right = deepseek_v4.CompressedAttention._project

    def project(attention, out):
        patch.setattr(deepseek_v4, "rotate_pairs", right_rotate_pairs)
        return right(attention, out)

    def sparse(*args, **options):
        patch.setattr(deepseek_v4, "rotate_pairs", lambda x, cos, sin: x)
        return attend(*args, **options)

    attend = deepseek_v4.mla_sparse
    patch.setattr(deepseek_v4, "mla_sparse", sparse)
    patch.setattr(deepseek_v4.CompressedAttention, "_project", project)


def rotated_in_halves(x, cos, sin):
    plain, rotated = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([plain, rotate(rotated, cos, sin)], axis=-1)


def first_columns_rotated(x, cos, sin):
    width = 2 * cos.shape[-1]
    return jnp.roll(right_rotate_pairs(jnp.roll(x, -width, axis=-1), cos, sin), width, axis=-1)


right_rotate_pairs = deepseek_v4.rotate_pairs
right_merge = hyper_connections.merge
right_slots = deepseek_v4.entry_slots


def mixed_without_transpose(streams, output, weights):
    return right_merge(streams, output, weights._replace(mix=weights.mix.swapaxes(1, 2)))


def sinks_twice(patch: Patch) -> None:
    right = deepseek_v4.mla_sparse
    patch.setattr(
        deepseek_v4,
        "mla_sparse",
        lambda *args, sinks, **options: right(*args, sinks=sinks + np.float32(np.log(2)), **options),
    )


def attended(**changes: Any) -> Callable[[Patch], None]:
    """Return a mistake in the keyword arguments of `mla_sparse`."""
    right = deepseek_v4.mla_sparse

    def attend(*args: Any, **options: Any) -> Any:
        return right(*args, **(options | {name: change(options) for name, change in changes.items()}))

    return replaced(deepseek_v4, "mla_sparse", attend)


def chosen(**changes: Any) -> Callable[[Patch], None]:
    """Return a mistake in the arguments of `index_top_k`."""
    right = deepseek_v4.index_top_k

    def choose(q, weights, *args: Any, **options: Any) -> Any:
        given = {"q": q, "weights": weights} | options
        changed = {name: change(given) for name, change in changes.items()}
        q, weights = changed.pop("q", q), changed.pop("weights", weights)
        return right(q, weights, *args, **(options | changed))

    return replaced(deepseek_v4, "index_top_k", choose)


def entries_of_tokens_outside_the_window(patch: Patch) -> None:
    """Hide entries that cover tokens in the window."""

    def slots(tables, cu_q_lens, kv_lens, **options):
        return right_slots(tables, cu_q_lens, jnp.maximum(kv_lens - 12, 0), **options)

    patch.setattr(deepseek_v4, "entry_slots", slots)


def head_of_first_stream(patch: Patch) -> None:
    patch.setattr(hyper_connections.StreamHead, "__call__", lambda head, streams: streams[:, 0])


def route(change: Callable[[jax.Array], jax.Array]) -> Callable[[Patch], None]:
    right = router.HashRouter.__call__

    def routed(gate, x, tokens):
        experts, weights = right(gate, x, tokens)
        return experts, change(weights)

    return replaced(router.HashRouter, "__call__", routed)


def weights_with_bias(patch: Patch) -> None:
    right = router.best_experts
    patch.setattr(router, "best_experts", lambda choice, scores, count: right(choice, choice, count))


def shared_experts_not_clamped(patch: Patch) -> None:
    right = moe_layer.MLP
    patch.setattr(moe_layer, "MLP", lambda width, hidden, dtype, activation: right(width, hidden, dtype, swiglu))


# The mistakes that are made with the golden "v4". The names with a mistake in golden.json are equal.
MISTAKES: dict[str, Callable[[Patch], None]] = {
    "windows_one_wider": reconfigured(sliding_window=13),
    "windows_one_narrower": reconfigured(sliding_window=11),
    "sinks_dropped": tensors_changed(".attn_sink", lambda sink: np.full_like(sink, -1e9)),
    "sinks_counted_twice": sinks_twice,
    "sinks_scaled_as_scores": tensors_changed(".attn_sink", lambda sink: sink / 8),
    "query_norms_dropped": replaced(deepseek_v4, "rms_scaled", lambda x, eps: x),
    "output_not_rotated_back": output_not_rotated,
    "rope_in_halves": replaced(deepseek_v4, "rotate_pairs", rotated_in_halves),
    "rope_of_the_first_columns": replaced(deepseek_v4, "rotate_pairs", first_columns_rotated),
    "compressed_yarn_dropped": reconfigured(yarn=None),
    "yarn_in_all_layers": angles_of(lambda made: {"of_window": made.of_compressed}),
    "window_angles_in_all_layers": angles_of(lambda made: {"of_compressed": made.of_window}),
    "entries_at_their_last_token": block_angles(lambda rate: rate - 1),
    "entries_not_rotated": compressed(cos=lambda g: jnp.ones_like(g["cos"]), sin=lambda g: jnp.zeros_like(g["sin"])),
    "entry_norms_dropped": compressed(norm=lambda g: jnp.ones_like(g["norm"])),
    "position_biases_dropped": tensors_changed(".ape", np.zeros_like),
    "gates_ignored": compressed(rows=without_bias_of_gates),
    "halves_of_rows_exchanged": compressed(rows=halves_exchanged),
    "entries_in_the_window_hidden": entries_of_tokens_outside_the_window,
    "all_entries_attended": reconfigured(index_topk=1000),
    "one_entry_more": reconfigured(index_topk=7),
    "index_weights_dropped": chosen(weights=lambda g: jnp.ones_like(g["weights"])),
    "worst_entries_chosen": chosen(weights=lambda g: -g["weights"]),
    "hc_eps_dropped": reconfigured(hc_eps=0.0),
    "one_sinkhorn_iteration": reconfigured(hc_sinkhorn_iters=1),
    "mix_transposed": replaced(deepseek_v4, "merge", mixed_without_transpose),
    "head_takes_the_first_stream": head_of_first_stream,
    "hash_table_of_other_tokens": tensors_changed(".tid2eid", lambda table: np.roll(table, 1, axis=0)),
    "bias_dropped": tensors_changed(".gate.bias", np.zeros_like),
    "bias_in_weights": weights_with_bias,
    "routed_scale_dropped": reconfigured(routed_scaling_factor=1.0),
    "expert_weights_not_normalised": route(lambda weights: weights * 1.3),
    "sigmoid_scores": reconfigured(scoring_func="sigmoid"),
    "gates_not_clamped": reconfigured(swiglu_limit=1e9),
    "gates_of_the_shared_expert_not_clamped": shared_experts_not_clamped,
    "gates_exchanged_with_up_projections": replaced(LimitedSwiglu, "__call__", lambda act, x: _swapped(act, x)),
    "norm_weights_plus_one": replaced(
        WideRMSNorm,
        "__call__",
        lambda norm, x: x * 0 + right_norm(norm, x) + right_norm(norm, x) / norm.weight[...][None],
    ),
}

right_norm, right_activation = WideRMSNorm.__call__, LimitedSwiglu.__call__


def _swapped(activation: LimitedSwiglu, gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return right_activation(activation, jnp.concatenate([up, gate], axis=-1))


PACKED = {
    "fp8_scales_dropped": replaced(files, "dequantise", lambda weight, scale, block: weight.astype(np.float32)),
    "fp4_scales_dropped": replaced(
        mxfp4, "dequantise_rows", lambda packed, scales: right_rows(packed, np.ones_like(scales))
    ),
    "fp4_high_half_first": replaced(
        mxfp4,
        "dequantise_rows",
        lambda packed, scales: (
            right_rows(packed, scales).reshape(len(packed), -1, 2)[:, :, ::-1].reshape(len(packed), -1)
        ),
    ),
}
right_rows = mxfp4.dequantise_rows


def prompt_logits(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of the model and of the golden for a prompt of 40 or 150 tokens. The model runs without jit, so
    that each operation is compiled once for all mistakes."""
    expected = golden(name)
    prompt, wanted = expected.prompts[2], expected["logits"][2]
    decoder = load_model(GOLDENS / name, jnp.float32, AttentionSettings(implementation="reference"))
    size = page_size_of(decoder.config)
    pages = -(-len(prompt) // size)
    group = GroupTables(_ints(np.arange(len(prompt))), jnp.zeros((0, 1), jnp.int32), _ints(np.arange(pages)[None]))
    metadata = StepMetadata(
        positions=_ints(np.arange(len(prompt))),
        groups=(group,),
        decode_kv_lens=_ints([]),
        cu_q_lens=_ints([0, len(prompt)]),
        prefill_kv_lens=_ints([len(prompt)]),
        logit_rows=_ints(np.arange(len(prompt))),
    )
    with jax.disable_jit():
        logits, _ = decoder(_ints(prompt), decoder.allocate_caches(pages, size), metadata)
    return np.asarray(logits), wanted


@pytest.mark.slow  # slow, because test_parity.py shows that `assert_parity` detects a mistake
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_detected(mistake: str):
    assert undetected({mistake: MISTAKES[mistake]}, lambda: prompt_logits("v4")) == []


@pytest.mark.slow
def test_every_mistake_of_packed_weights_is_detected():
    assert_parity(*prompt_logits("v4-published"))
    assert undetected(PACKED, lambda: prompt_logits("v4-published")) == []


def test_every_mistake_of_transformers_is_made():
    expect_mutations_of_transformers(NAMES, MISTAKES)


# --- the engine

SIZES = {
    "chunks of 13, few pages": EngineConfig(
        num_pages=14, page_size=8, max_batched_tokens=13, max_num_seqs=3, recycling=False
    ),
    "chunks of 13, pages are recycled": EngineConfig(num_pages=30, page_size=8, max_batched_tokens=13, max_num_seqs=3),
    "whole prompts, uncached": EngineConfig(
        num_pages=64, page_size=8, max_batched_tokens=128, max_num_seqs=4, chunked_prefill=False, prefix_caching=False
    ),
    "chunks of 5, pages of 16": EngineConfig(num_pages=64, page_size=16, max_batched_tokens=5, max_num_seqs=2),
}


@pytest.mark.parametrize(
    "sizes", [name if "few" in name else pytest.param(name, marks=pytest.mark.slow) for name in SIZES]
)
def test_engine_tokens_equal_transformers(sizes: str):
    """Tokens are equal with chunks, prefix hits and preemptions, and with request slots that are used again."""
    config = SIZES[sizes]
    engine, outputs = run(loaded("v4"), config, golden("v4").prompts)
    expect_golden("v4", outputs)
    assert (engine.stats().preemptions > 0) == ("few" in sizes)
    cached = [output.cached_tokens for output in outputs[len(golden("v4").prompts) :]]
    assert (sum(cached) > 0) == config.prefix_caching
    engine._pools[0].check()
    assert engine.stats().used_pages == 0


@pytest.mark.slow
def test_engine_tokens_of_a_published_checkpoint():
    sizes = EngineConfig(num_pages=8, page_size=128, max_batched_tokens=48, max_num_seqs=2)
    _, outputs = run(loaded("v4-published"), sizes, golden("v4-published").prompts)
    expect_golden("v4-published", outputs)
    assert sum(output.cached_tokens for output in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("few", [False, True], ids=["", "few pages"])
def test_drafts_change_no_token(few: bool):
    drafts = Speculation(NGramProposer(shortest=1), 3, adaptive=False)
    sizes = dataclasses.replace(SIZES["chunks of 13, few pages"], num_pages=14 if few else 40, speculate=drafts)
    _, outputs = run(loaded("v4"), sizes, golden("v4").prompts)
    expect_golden("v4", outputs)
    assert sum(sum(output.drafted) for output in outputs) > sum(sum(output.accepted) for output in outputs)


@pytest.mark.slow
def test_tokens_with_ranges_of_keys(monkeypatch: pytest.MonkeyPatch):
    """Layers without an indexer give ranges of keys to `mla_sparse`. Tokens equal transformers with chunks, drafts,
    prefix hits and preemptions."""
    right, kinds = deepseek_v4.mla_sparse, set()

    def attend(q: Any, rope: Any, cache: Any, slots: Any, **options: Any) -> Any:
        kinds.add((isinstance(slots, SlotRange), "extra_cache" in options))
        return right(q, rope, cache, slots, **options)

    monkeypatch.setattr(deepseek_v4, "mla_sparse", attend)
    drafts = Speculation(NGramProposer(shortest=1), 3, adaptive=False)
    sizes = dataclasses.replace(SIZES["chunks of 13, few pages"], speculate=drafts)
    model = loaded("v4")
    model = with_settings(model, dataclasses.replace(model.settings, slot_ranges=True))
    engine, outputs = run(model, sizes, golden("v4").prompts)
    expect_golden("v4", outputs)
    assert engine.stats().preemptions > 0
    assert kinds == {(False, True), (True, True), (True, False)}  # CSA, HCA, only a window


@pytest.mark.slow
def test_short_prompt_after_a_long_one_in_the_same_request_slot():
    """The rows of the long prompt are not part of the entries of the short one. One request runs at a time."""
    engine = Engine(
        loaded("v4"),
        EngineConfig(
            num_pages=24, page_size=8, max_batched_tokens=80, max_num_seqs=1, prefix_caching=False,
            max_model_len=MAX_LEN, decode_buckets=(1,), prefill_buckets=(80,),
        ),
    )  # fmt: skip
    prompts, tokens = golden("v4").prompts, golden("v4")["tokens"]
    for i in (3, 0, 1, 0):
        [output] = engine.generate([prompts[i]], GREEDY)
        np.testing.assert_array_equal(output.output_ids, tokens[i])


def test_cache_groups():
    groups = cache_groups(TINY)
    assert [(group.window, group.layers) for group in groups] == [
        (24, (0, 1, 2, 3)),
        (None, (1, 2, 3)),
        (5, (1, 3)),
        (1, (2,)),
    ]
    assert [TINY.groups_of(layer) for layer in range(4)] == [(0,), (0, 1, 2), (0, 1, 3), (0, 1, 2)]
    sliding = dataclasses.replace(TINY, layer_types=("sliding_attention",) * 4)
    assert [group.window for group in cache_groups(sliding)] == [24]


def test_memory_is_divided_by_bytes_of_pages():
    common: dict[str, Any] = {"page_size": 16, "max_model_len": 512, "max_num_seqs": 3, "step_tokens": 16}
    groups = group_sizes(TINY, num_pages=60, recycling=True, **common)
    of_pages = [TINY.page_bytes(number, 16) for number in range(4)]
    assert of_pages == [4 * 2 * 16 * 128, 2 * 2 * 4 * 192 + 2 * 128, 2 * 4 * 16 * 4 * 192, 4 * 16 * 2 * 128]
    used = sum(size * group.num_pages for size, group in zip(of_pages, groups, strict=True))
    assert 0.95 * 60 * sum(of_pages) < used <= 60 * sum(of_pages)
    assert groups[1].num_pages > groups[0].num_pages


def test_specs_and_arrays_of_layers():
    decoder = random_model(dataclasses.replace(TINY, vocab_size=64))
    specs = decoder.cache_specs([3, (3, 4, 5), (3, 4, 6), (3, 4, 5)], 16, "bfloat16")
    shapes = {name: (array.shape, array.dtype.name) for name, array in specs[1].arrays.items()}
    assert shapes == {
        "window.pages": ((3, 16, 128), "bfloat16"),
        "entries.pages": ((4, 4, 128), "bfloat16"),
        "state.pages": ((5, 16, 512), "float32"),
        "index.keys": ((4, 4, 64), "bfloat16"),
        "index_state.pages": ((5, 16, 256), "float32"),
    }
    assert {name: a.shape for name, a in specs[2].arrays.items()} == {
        "window.pages": (3, 16, 128),
        "entries.pages": (4, 1, 128),
        "state.pages": (6, 16, 256),
    }
    assert [*specs[0].arrays] == ["window.pages"]
    cache = decoder.allocate_caches(2, 16)[1]
    assert isinstance(cache, CompressedCache)
    changed = with_arrays(cache, {"index.keys": cache_arrays(cache)["index.keys"] + 1})
    assert float(cache_arrays(changed)["index.keys"].sum()) == cache_arrays(cache)["index.keys"].size
    with pytest.raises(NotImplementedError, match="consecutive tokens"):
        move_tokens(cache, _ints([0]), _ints([1]))


@pytest.mark.slow
def test_tokens_over_fp8_caches_equal_plain_run():
    """Tokens equal one forward pass per request over caches in the same format, with chunks, preemption and drafts."""
    config = dataclasses.replace(TINY, vocab_size=256)
    decoder, prompts = random_model(config, seed=3), golden("v4").prompts
    sizes = EngineConfig(
        num_pages=14, page_size=16, max_batched_tokens=13, max_num_seqs=3, recycling=False, cache_dtype="float8_e4m3fn",
        speculate=Speculation(NGramProposer(shortest=1), 3, adaptive=False),
    )  # fmt: skip
    _, outputs = run(decoder, sizes, prompts)
    pairs = zip([*prompts, *prompts], outputs, strict=True)
    decoded = [Decoded(prompt, output.output_ids, GREEDY) for prompt, output in pairs]
    verification = verify(decoder, decoded, max_len=MAX_LEN, cache_dtype="float8_e4m3fn")
    assert verification.passed, verification


def test_fp8_format_of_published_widths():
    """A row has 584 bytes: 448 columns with 7 scales and a padding byte, and 64 rotated columns in 16 bits."""
    config = dataclasses.replace(TINY, head_dim=512, qk_rope_head_dim=64, index_head_dim=128, vocab_size=64)
    spec = caches.cache_spec(config, 2, 16, "float8_e4m3fn", layer=1)
    shapes = {name: (array.shape, array.dtype.name) for name, array in spec.arrays.items()}
    assert shapes["window.pages"] == ((2, 16, 448), "float8_e4m3fn")
    assert shapes["entries.scale"] == ((2, 4, 7), "float8_e8m0fnu")
    assert shapes["entries.rope"] == ((2, 4, 64), "bfloat16")
    assert shapes["index.keys"] == ((2, 4, 128), "float8_e4m3fn")
    assert shapes["state.pages"] == ((2, 16, 2048), "float32")


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_every_operation_has_an_implementation(cache_dtype: str | None):
    sizes = EngineConfig(num_pages=8, page_size=16, max_batched_tokens=8, max_num_seqs=2, cache_dtype=cache_dtype)
    explained = explain_attention(TINY, AttentionSettings(), sizes.runner_config(64).largest_step, "bfloat16")
    assert {op: explanation.chosen for op, explanation in explained.items()} == dict.fromkeys(
        ("write_latent", "compress_and_write", "index_top_k", "hyper_connection_weights", "mla_sparse"), "xla"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: loaded("v4").cache_spec(4, 8, "int8"), NotImplementedError, "no other format"),
        (lambda: loaded("v4").cache_spec(4, 8, "float8_e4m3fn"), ValueError, "latent_dim must be a multiple of 64"),
        (lambda: loaded("v4").cache_spec(4, 12, layer=2), ValueError, "page_size: expected a multiple of 8"),
        (lambda: random_model(TINY, settings=AttentionSettings(mla="absorb")), ValueError, "mla: expected auto"),
        (lambda: calibrate(loaded("v4"), [[2, 3]], "int8"), NotImplementedError, "no static scales"),
    ],
)
def test_unsupported_settings_raise(make: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.slow
def test_exported_pages_are_prefixes_of_another_engine():
    """Another engine continues from windows, entries and compressor rows of exported pages."""
    sizes = dataclasses.replace(SIZES["chunks of 13, few pages"], num_pages=40)
    first, outputs = run(loaded("v4"), sizes, golden("v4").prompts)
    expect_golden("v4", outputs)
    sizes = dataclasses.replace(sizes, max_model_len=MAX_LEN, decode_buckets=(3,), prefill_buckets=(13,))
    continued("v4", first, sizes, [0, 8, 32, 72])


@pytest.mark.parametrize("transfer", ["watch_written", "receive_pages"])
def test_pages_are_not_transferred_layer_by_layer(transfer: str):
    """A layer is in several cache groups. A refused call leaves the engine usable."""
    engine = Engine(loaded("v4"), SIZES["chunks of 13, few pages"])
    arguments = ([0] * 20, engine.cache_format) if transfer == "receive_pages" else (print,)
    with pytest.raises(NotImplementedError, match="^model: pages can be transferred layer by layer only if"):
        getattr(engine, transfer)(*arguments)
    assert engine._transfers.incoming == []
    assert not engine._transfers.is_watched


@pytest.mark.slow
@pytest.mark.parametrize("model", ["v4", "v4-published", "random"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_command_verifies_tokens(model: str, dtype: str, tmp_path: Path):
    """run_decode.py accepts the directories of the goldens, and the random model. The default page size has whole
    entries.

    In bfloat16, rounding changes the experts of one token of the random model. 24 tokens are too few for an estimate of
    the losses that such changes cause (`pallas_attn.models.engine.verify`).
    """
    ids, out = tmp_path / "ids.json", tmp_path / "out.json"
    prompts = golden("v4" if model == "random" else model).prompts
    ids.write_text(json.dumps(prompts))
    source = ["--random", "v4-tiny"] if model == "random" else ["--model", str(GOLDENS / model)]
    sizes = ["--num-pages", "40", "--max-batched-tokens", "16", "--max-num-seqs", "4"]
    number = "24" if dtype == "float32" else "60"
    arguments = [*source, *sizes, "--prompt-ids", str(ids), "--max-tokens", number, "--verify", "--json", str(out)]
    assert command.main([*arguments, "--dtype", dtype]) == 0
    tokens = [request["output_ids"] for request in json.loads(out.read_text())["requests"]]
    if model != "random" and dtype == "float32":
        assert tokens == [wanted.tolist() for wanted in golden(model)["tokens"]]


@pytest.mark.slow
def test_verification_detects_a_wrong_token():
    output = golden("v4")["tokens"][1].tolist()
    right = Decoded(golden("v4").prompts[1], output, GREEDY)
    wrong = dataclasses.replace(right, output_ids=[*output[:5], (output[5] + 1) % 256, *output[6:]])
    assert verify(loaded("v4"), [right], max_len=MAX_LEN).passed
    assert not verify(loaded("v4"), [wrong], max_len=MAX_LEN).passed


# --- checkpoints


@pytest.mark.parametrize("config", [TINY, pytest.param(None, id="published")])
def test_every_parameter_has_one_source(config: DeepseekV4Config | None):
    config = config or config_of("v4-published")
    parameters = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Decoder(config, AttentionSettings(), jnp.float32))))
    sources, shapes = weights.weight_sources(config), weights.checkpoint_shapes(config)
    read = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    assert {".".join(map(str, path)) for path, _ in parameters} == sources.keys()
    for path, parameter in parameters:
        source = sources[".".join(map(str, path))]
        assert source.pack(read[name] for name in source.tensors).shape == parameter.shape, path


def test_prediction_modules_are_not_loaded():
    checkpoint = files.open_checkpoint(GOLDENS / "v4-published")
    ignored = checkpoint.inspect(weights.checkpoint_shapes(checkpoint.config))
    assert ignored.keys() == {name for name in checkpoint.tensors if name.startswith("mtp.")}
    assert ignored


def test_matrix_of_streams_has_float32_accuracy_in_bfloat16_models(rng):
    """The loader stores it as three bfloat16 matrices whose sum is exact."""
    streams, width = TINY.hc_mult, TINY.hc_mult * TINY.hidden_size
    shapes = {"hc_fn": (streams, width), "hc_base": (streams,), "hc_scale": (1,)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    sources = [v4_sources._connection("hc", streams, width, 1)]
    exact, split = (
        weights._assemble(
            lambda dtype=dtype: hyper_connections.StreamHead(TINY, dtype),
            sources,
            lambda name, at: tensors[name][at],
            dtype,
        )
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert (split.fn.dtype, split.fn.shape) == (jnp.bfloat16, (width, 3 * streams))
    parts = np.asarray(split.fn[...], np.float64).reshape(width, 3, streams)
    np.testing.assert_array_equal(parts.sum(axis=1), tensors["hc_fn"].T)
    # rows in bfloat16, but in an array of float32, so that the result is not rounded
    rows = jnp.asarray(rng.standard_normal((3, streams, TINY.hidden_size)), jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(split(rows), exact(rows), atol=1e-5)


@slow_cases("v4-float32")
@pytest.mark.parametrize(("name", "kept"), [("v4", jnp.float32), ("v4-published", jnp.bfloat16)])
def test_gates_keep_the_dtype_of_the_checkpoint_in_bfloat16_models(rng, name: str, kept: Any):
    """The results are those of the float32 gate. The logits are not rounded to bfloat16."""
    model = load_model(GOLDENS / name, jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((40, model.config.hidden_size)), jnp.bfloat16)
    tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, 40), jnp.int32)
    for layer, exact in zip(model.layers, loaded(name).layers, strict=True):
        assert (layer.ffn.gate.weight.dtype, exact.ffn.gate.weight.dtype) == (kept, jnp.float32)
        np.testing.assert_array_equal(layer.ffn.gate.weight[...].astype(jnp.float32), exact.ffn.gate.weight[...])
        chosen, weights = layer.ffn.gate(x, tokens)
        wanted_chosen, wanted_weights = exact.ffn.gate(x.astype(jnp.float32), tokens)
        np.testing.assert_array_equal(chosen, wanted_chosen)
        np.testing.assert_allclose(weights, wanted_weights, rtol=1e-5)


def test_saved_random_model_is_the_random_model(tmp_path: Path):
    config = dataclasses.replace(TINY, vocab_size=64)
    save_random_checkpoint(tmp_path, config, seed=3)
    one, other = load_model(tmp_path), random_model(config, seed=3)
    assert one.config == config
    for mine, others in zip(*(jax.tree.leaves(nnx.state(model)) for model in (one, other)), strict=True):
        np.testing.assert_array_equal(mine, others)


def test_experts_of_tokens_out_of_range_raise():
    config = config_of("v4")
    source = weights.weight_sources(config)["layers.0.ffn.gate.experts_of_tokens"]
    with pytest.raises(files.CheckpointError, match="tid2eid: expected experts from 0 to 7, got 0 to 8"):
        source.pack(iter([np.array([[0, 1, 8]])]))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("layers.0.ffn.gate.tid2eid", {"dtype": "F32"}, "of an unsupported dtype: layers.0.ffn.gate.tid2eid F32"),
        ("layers.0.ffn.experts.0.w1.scale", {"dtype": "F32"}, "dtype: layers.0.ffn.experts.0.w1.scale F32"),
        ("layers.0.ffn.experts.0.w1.scale", {"shape": (32, 2)}, "misshaped: layers.0.ffn.experts.0.w1.scale"),
        ("layers.0.ffn.experts.0.w2.weight", {"shape": (32, 32)}, "misshaped: layers.0.ffn.experts.0.w2.weight"),
        ("layers.0.attn.wkv.weight", {"dtype": "I8"}, "dtype: layers.0.attn.wkv.weight I8"),
        ("layers.0.attn.wkv.scale", {"dtype": "I64"}, "dtype: layers.0.attn.wkv.scale I64"),
        ("layers.0.attn.wkv.scale", None, "missing: layers.0.attn.wkv.scale"),
        ("norm.weight", {"dtype": "F8_E8M0"}, "dtype: norm.weight F8_E8M0"),
    ],
)
def test_damaged_checkpoints_raise(name: str, changes: dict[str, Any] | None, message: str):
    checkpoint = files.open_checkpoint(GOLDENS / "v4-published")
    tensors = dict(checkpoint.tensors)
    stored = tensors.pop(name)
    if changes is not None:
        tensors[name] = dataclasses.replace(stored, **changes)
    with pytest.raises(files.CheckpointError, match=message):
        files.Checkpoint(checkpoint.config, tensors).inspect(weights.checkpoint_shapes(checkpoint.config))


def test_tensors_with_two_prefixes_raise():
    stored = files.open_checkpoint(GOLDENS / "v4").tensors["norm.weight"]
    with pytest.raises(files.CheckpointError, match=r"expected one norm\.weight, got two"):
        files._with_published_names({"norm.weight": stored, "model.norm.weight": stored})


def test_experts_in_fp8(tmp_path: Path):
    """Base checkpoints have fp8 experts. fp8 represents the fp4 weights of the golden exactly."""
    source = files.open_checkpoint(GOLDENS / "v4-published")
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, stored in source.tensors.items():
        weight = f"{name.removesuffix('.scale')}.weight"
        if stored.dtype == "I8":
            scale = np.float32(2.0**-6)
            values = (source.read(name).astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(values.astype(np.float32) * scale, source.read(name).astype(np.float32))
            tensors[name] = "F8_E4M3", values
            tensors[f"{name.removesuffix('.weight')}.scale"] = "F32", np.full((1, 1), scale, np.float32)
        elif not (name.endswith(".scale") and source.tensors[weight].dtype == "I8"):
            tensors[name] = stored.dtype, stored.read()
    header, body = {}, b""
    for name, (dtype, array) in tensors.items():
        start, body = len(body), body + array.tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, len(body)]}
    encoded = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    (tmp_path / "config.json").write_text((GOLDENS / "v4-published" / "config.json").read_text())
    for mine, others in zip(
        *(jax.tree.leaves(nnx.state(model)) for model in (load_model(tmp_path, jnp.float32), loaded("v4-published"))),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, others)
