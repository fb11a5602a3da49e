"""Sparse attention in model and engine: each token attends to the top-k keys that an indexer selects.

Tokens do not depend on step sizes, and results equal dense attention if all keys are selected.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_model, random_model, random_mtp
from pallas_attn.models.config import DeepSeekConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder, with_settings
from pallas_attn.models.decoder.mla import Rows, packed_rows
from pallas_attn.models.engine import (
    Decoded,
    Engine,
    EngineConfig,
    MTPProposer,
    NGramProposer,
    PlainRun,
    SamplingParams,
    Speculation,
)
from pallas_attn.models.engine.verify import TOLERANCE
from scripts.tools.wide_latents import LATENT_DIM, save_wide
from tests.models import engine_case
from tests.models.step_case import PAGE_SIZE, Pages, step
from tests.models.test_parity import GOLDENS, golden

CONFIG = dataclasses.replace(
    engine_case.CONFIG, model_type="deepseek_v32", index_topk=12, index_n_heads=4, index_head_dim=12
)
SHARED = dataclasses.replace(CONFIG, model_type="glm_moe_dsa", indexer_types=("full", "shared"))
"""The second layer attends to the keys that the first layer selected."""
CONFIGS = {"all full": CONFIG, "one shared": SHARED}
TOKENS = np.random.default_rng(0).integers(0, engine_case.VOCAB_SIZE, 61)
REFERENCE = AttentionSettings(mla="absorb", implementation="reference")  # compiles fastest
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SIZES = EngineConfig(
    num_pages=14,
    page_size=8,
    max_batched_tokens=16,
    max_num_seqs=3,
    max_model_len=104,
    decode_buckets=(3,),
    prefill_buckets=(16,),
    separate_prefill=False,
)
"""Sizes for which prompts are prefilled in chunks, and requests are preempted because there are too few pages."""


def logits(model: Decoder) -> np.ndarray:
    pages = Pages.scatter(1, -(-len(TOKENS) // PAGE_SIZE))
    metadata = step(pages, prefill=[(0, 0, len(TOKENS))])
    return np.asarray(model(jnp.asarray(TOKENS, jnp.int32), pages.allocate(model, np.nan), metadata)[0])


@pytest.mark.parametrize(("name", "indexers"), [pytest.param("v32", 3, marks=pytest.mark.slow), ("glm-shared", 2)])
def test_engine_tokens_equal_transformers(name: str, indexers: int) -> None:
    """Tokens equal transformers with chunked prefill, prefix hits and preemptions."""
    model, expected = load_model(GOLDENS / name, jnp.float32), golden(name)
    engine = Engine(model, SIZES)
    outputs = [*engine.generate(expected.prompts, GREEDY), *engine.generate(expected.prompts, GREEDY)]
    assert [output.output_ids for output in outputs] == [tokens.tolist() for tokens in expected["tokens"]] * 2
    stats = engine.stats()
    assert stats.preemptions > 0
    assert sum(output.cached_tokens for output in outputs[len(expected.prompts) :]) > 0
    assert isinstance(model.config, DeepSeekConfig)
    widths = len(model.layers) * model.config.latent_width + indexers * model.config.index_head_dim
    assert stats.cache_bytes == 14 * 8 * 4 * widths


@pytest.mark.slow  # slow, because tests/contract/test_mla_sparse.py tests attention with all keys selected
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_top_k_of_all_keys_equals_dense_model(config: DeepSeekConfig) -> None:
    """A model whose top-k is at least the number of keys gives the logits of the same weights without an indexer.

    Results have the same bits if the block tables have room for at most top-k keys. Otherwise each token selects all
    its keys, and results are close.
    """
    sparse = random_model(config, settings=REFERENCE)
    dense = logits(random_model(engine_case.CONFIG, settings=REFERENCE))

    def choosing(top_k: int) -> np.ndarray:
        return logits(with_settings(sparse, dataclasses.replace(REFERENCE, index_topk=top_k)))

    np.testing.assert_array_equal(choosing(64), dense)
    chosen = choosing(62)
    np.testing.assert_allclose(chosen, dense, atol=1e-4)
    assert np.abs(chosen - dense).max() > 0
    few = logits(sparse)
    np.testing.assert_allclose(few[: CONFIG.index_topk], dense[: CONFIG.index_topk], atol=1e-4)
    assert np.abs(few - dense)[CONFIG.index_topk :].max() > 0.1


def test_packed_rows_of_decode_rows() -> None:
    """Decode rows with several queries become one packed row per query.

    Each draft attends to the tokens before it. Padding and idle rows attend to no tokens.
    """
    tables = jnp.array([[5, 6], [7, 8], [9, 4]], jnp.int32)
    lens = jnp.array([7, 0, 9], jnp.int32)
    rows = Rows(slice(0, 9), tables, lens, q_lens=jnp.array([3, 0, 2], jnp.int32), queries=3)
    packed_tables, cu_q_lens, kv_lens = packed_rows(rows)
    assert kv_lens.tolist() == [5, 6, 7, 0, 0, 0, 8, 9, 0]
    assert cu_q_lens.tolist() == list(range(10))
    assert packed_tables[:, 0].tolist() == [5] * 3 + [7] * 3 + [9] * 3
    assert packed_rows(Rows(slice(0, 3), tables, lens))[2].tolist() == lens.tolist()


def test_invalid_sparse_settings_raise() -> None:
    with pytest.raises(NotImplementedError, match="mla: expand does not support the sparse attention"):
        random_model(CONFIG, settings=AttentionSettings(mla="expand"))
    with pytest.raises(ValueError, match="index_topk: expected at least 1, got 0"):
        AttentionSettings(index_topk=0)


@pytest.mark.slow
def test_caches_without_expected_index_keys_raise() -> None:
    model = random_model(SHARED, settings=REFERENCE)
    pages = Pages.scatter(1, -(-len(TOKENS) // PAGE_SIZE))
    full, shared = pages.allocate(model)
    metadata, tokens = step(pages, prefill=[(0, 0, len(TOKENS))]), jnp.asarray(TOKENS, jnp.int32)
    for caches, message in (
        ((shared, shared), "cache: expected index keys"),
        ((full, full), "cache: expected no index keys"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, caches, metadata)
    x, angles, [(slots, parts)] = model.begin(tokens, full, metadata)
    with pytest.raises(ValueError, match="choice: expected the selection of the layer before"):
        model.layers[1](x, angles, shared, slots, parts)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_selected_keys_are_returned_if_layers_share_them(config: DeepSeekConfig) -> None:
    model, pages = random_model(config, settings=REFERENCE), Pages.scatter(1, 4)
    metadata, tokens = step(pages, prefill=[(0, 0, 20)]), jnp.zeros((20,), jnp.int32)

    def first_layer(cache: Any) -> Any:
        x, angles, [(slots, parts)] = model.begin(tokens, cache, metadata)
        return model.layers[0](x, angles, cache, slots, parts)[2]

    handed_on = jax.eval_shape(first_layer, jax.eval_shape(lambda: model.allocate_caches(5, PAGE_SIZE))[0])
    assert jax.tree.map(lambda slots: slots.shape, handed_on) == (None if config is CONFIG else [(20, 12)])


# With drafts, several queries of a request attend to the same keys. Slow, because test_cached_pages.py tests an engine
# with sparse attention.
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"speculate": Speculation(NGramProposer(), 3, adaptive=False)}, {"batch_invariant": True}],
    ids=["drafts", "batch invariant"],
)
def test_shared_keys_in_drafts_and_batch_invariant_steps(changes: dict[str, Any]) -> None:
    expected = golden("glm-shared")
    engine = Engine(load_model(GOLDENS / "glm-shared", jnp.float32), dataclasses.replace(SIZES, **changes))
    outputs = engine.generate(expected.prompts, GREEDY)
    assert [output.output_ids for output in outputs] == [tokens.tolist() for tokens in expected["tokens"]]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_mtp_modules_with_sparse_attention(config: DeepSeekConfig) -> None:
    """With drafts of a prediction module (MTP), tokens equal decoding without drafts.

    The module has its own indexer and selects its own keys.
    """
    model = random_model(dataclasses.replace(config, num_nextn_predict_layers=1), seed=3)
    prompts = [TOKENS[:n].tolist() for n in (30, 1, 17)]
    speculation = Speculation(MTPProposer(random_mtp(model)), 2, adaptive=False)
    plain, drafted = (
        Engine(model, dataclasses.replace(SIZES, max_model_len=64, speculate=speculate))
        for speculate in (None, speculation)
    )
    assert [o.output_ids for o in drafted.generate(prompts, GREEDY)] == [
        o.output_ids for o in plain.generate(prompts, GREEDY)
    ]


WIDE = dataclasses.replace(engine_case.SPARSE, kv_lora_rank=LATENT_DIM)
"""Two layers, of which the first has an indexer, with latents that can be stored in fp8."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "indexers"),
    [
        ("random", 1),
        pytest.param("v32", 3, marks=pytest.mark.slow),
        pytest.param("glm-shared", 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_over_fp8_cache_equal_plain_run(name: str, indexers: int, tmp_path: Path) -> None:
    """With an fp8 cache, tokens of the engine equal a run of a single request over an fp8 cache.

    Latents and index keys are stored in fp8. Tokens select keys by the dequantised index keys.
    """
    if name == "random":
        model, prompts = random_model(WIDE, seed=3, settings=REFERENCE), [TOKENS[:n].tolist() for n in (60, 1, 45, 20)]
    else:
        save_wide(GOLDENS / name, tmp_path)
        model, prompts = load_model(tmp_path), golden(name).prompts
    engine = Engine(model, dataclasses.replace(SIZES, cache_dtype="float8_e4m3fn"))
    outputs = engine.generate(prompts, GREEDY)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert isinstance(model.config, DeepSeekConfig)
    of_latents = LATENT_DIM + 4 * LATENT_DIM // 128 + 2 * model.config.rotary_dim
    of_keys = model.config.index_head_dim + 4
    assert stats.cache_bytes == 14 * 8 * (len(model.layers) * of_latents + indexers * of_keys)
    plain = PlainRun(model, 24, "float8_e4m3fn")
    decoded = [Decoded(p, output.output_ids, GREEDY) for p, output in zip(prompts, outputs, strict=True)]
    checks = [plain.check(each, 104, TOLERANCE["float8_e4m3fn"]) for each in decoded]
    assert all(check.difference is None for check in checks)
