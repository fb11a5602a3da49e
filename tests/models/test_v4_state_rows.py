"""Compressor rows of DeepSeek-V4 in pages that have fewer rows than tokens: compressors, steps and the engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn import PAGE_NONE
from pallas_attn.cache import HeadPagePool
from pallas_attn.models.config import V4_PRESETS, DeepseekV4Config
from pallas_attn.models.config.deepseek_v4 import CSA_KIND, HCA_KIND, SCORED_MOE
from pallas_attn.models.decoder import AttentionSettings, GroupTables, StepMetadata, deepseek_v4
from pallas_attn.models.decoder.caches import allocate_compressed, cache_spec
from pallas_attn.models.decoder.deepseek_v4 import Compressor, v4_inputs, v4_step
from pallas_attn.models.decoder.rope import rotate_pairs
from pallas_attn.models.engine import Engine, EngineConfig, NGramProposer, Speculation
from pallas_attn.models.engine.group_sizes import group_sizes
from tests.kit.slow_cases import slow_cases
from tests.models.golden_case import GREEDY, continued, expect_golden, golden, loaded, run_twice
from tests.models.step_case import Pages
from tests.models.test_deepseek_v4 import MAX_LEN, Stepper, config_of, run_of
from tests.models.test_parity import Patch, assert_parity

PAGE_SIZE = 64
CONFIG = dataclasses.replace(
    V4_PRESETS["v4-tiny"], hidden_size=16, head_dim=16, qk_rope_head_dim=8, hca_rate=8, vocab_size=64
)
"""Pages of both kinds have 16 rows."""

CHUNK, QUERIES = 40, 5
"""Tokens of a chunk and of a decode row, with padding."""

run = functools.partial(run_twice, max_model_len=MAX_LEN)


def ints(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values), jnp.int32)


class Steps:
    """Steps of the compressor of one layer over two sequences with block tables. Caches begin as NaN."""

    def __init__(self, layer: int, num_pages: int):
        self.rate = CONFIG.rate(layer)
        compressor = Compressor(CONFIG, self.rate, CONFIG.has_indexer(layer), CONFIG.head_dim, jnp.float32)
        graph, weights = nnx.split(compressor)
        draw = np.random.default_rng(0)
        self._weights = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), weights)
        self.compressor = nnx.merge(graph, self._weights)
        spec = cache_spec(CONFIG, num_pages, PAGE_SIZE, "float32", layer=layer)
        cache = jax.tree.map(lambda x: jnp.full_like(x, np.nan), allocate_compressed(spec))
        self.caches = cache.state, cache.entries
        _, of_entries, of_rows = CONFIG.groups_of(layer)

        def step(weights: Any, caches: Any, x: jax.Array, metadata: StepMetadata) -> Any:
            shared, inputs = (
                v4_step(CONFIG, metadata, PAGE_SIZE),
                v4_inputs(CONFIG, metadata.positions, metadata.positions),
            )
            tables, places = shared.tables[of_entries], shared.states[of_rows]
            compressor: Any = nnx.merge(graph, weights)
            return compressor(x, inputs, *caches, tables, places, shared, AttentionSettings())

        self._step = jax.jit(step)

    def run(self, rows: list[tuple[list[int], int, np.ndarray]], *, decode: bool) -> None:
        """Run a step with one or two rows: (block table, position of the first token, hidden states [n, D])."""
        size, width = (QUERIES if decode else CHUNK), 4
        x, positions, slots = np.zeros((2, size, 16), np.float32), np.zeros((2, size), int), np.full((2, size), -1)
        tables, lens, kv_lens = np.full((2, width), PAGE_NONE), np.zeros(2, int), np.zeros(2, int)
        for i, (table, start, hidden) in enumerate(rows):
            count, tables[i, : len(table)] = len(hidden), table
            x[i, :count], positions[i, :count] = hidden, np.arange(start, start + count)
            slots[i, :count] = (
                tables[i, positions[i, :count] // PAGE_SIZE] * PAGE_SIZE + positions[i, :count] % PAGE_SIZE
            )
            lens[i], kv_lens[i] = count, start + count
        if not decode:  # chunks are packed, with padding at the end
            order = np.argsort(np.arange(size)[None] >= lens[:, None], axis=None, kind="stable")
            x, positions, slots = x.reshape(-1, 16)[order], positions.reshape(-1)[order], slots.reshape(-1)[order]
        none = np.zeros((0, width), int)
        metadata = StepMetadata(
            positions=ints(positions.reshape(-1)),
            groups=(GroupTables(ints(slots.reshape(-1)), *map(ints, (tables, none) if decode else (none, tables))),),
            decode_kv_lens=ints(kv_lens if decode else []),
            cu_q_lens=ints([0] if decode else np.cumsum([0, *lens])),
            prefill_kv_lens=ints([] if decode else kv_lens),
            logit_rows=ints([0]),
            decode_q_lens=ints(lens) if decode else None,
            decode_queries=QUERIES if decode else 1,
        )
        self.caches = self._step(self._weights, self.caches, jnp.asarray(x.reshape(-1, 16)), metadata)

    def entries(self, table: list[int], length: int) -> np.ndarray:
        """Return the cached entries of a sequence of `length` tokens."""
        index, size = np.arange(length // self.rate), PAGE_SIZE // self.rate
        return np.asarray(self.caches[1].pages)[np.array(table)[index // size], index % size]

    def expected(self, hidden: np.ndarray) -> np.ndarray:
        """Return the entries of a sequence without a cache."""
        compressor, width = self.compressor, CONFIG.head_dim
        length = len(hidden) // self.rate * self.rate
        columns, positions = compressor.columns, ints(np.arange(length))
        rows = hidden[:length] @ np.asarray(compressor.kv_gate_proj.weight[...])
        contents, gates = rows[:, :columns], rows[:, columns:]
        gates = gates + np.tile(np.asarray(compressor.gate_bias[...]), (length // self.rate, 1))
        contents, gates = (x.reshape(-1, self.rate, columns) for x in (contents, gates))
        if columns > width:  # the block before, which block 0 does not have
            before = [np.concatenate([np.full_like(x[:1], fill), x[:-1]]) for x, fill in ((contents, 0), (gates, -1e9))]
            contents, gates = (
                np.concatenate([old[..., :width], new[..., width:]], axis=1)
                for old, new in zip(before, (contents, gates), strict=True)
            )
        weights = np.exp(gates - gates.max(axis=1, keepdims=True))
        pooled = (contents * weights).sum(axis=1) / weights.sum(axis=1)
        pooled /= np.sqrt((pooled**2).mean(axis=1, keepdims=True) + CONFIG.rms_norm_eps)
        angles = [x[:: self.rate] for x in v4_inputs(CONFIG, positions, positions).of_blocks[self.rate]]
        return np.asarray(rotate_pairs(jnp.asarray(pooled * np.asarray(compressor.norm[...])), *angles))


@slow_cases("HCA")
@pytest.mark.parametrize("layer", [1, 2], ids=["CSA", "HCA"])
def test_entries(layer: int):
    """Two sequences run in random chunks and decode rows with wrong drafts. Later sequences share or reuse pages."""
    steps, draw = Steps(layer, 12), np.random.default_rng(1)
    hidden = draw.normal(size=(3, 200, 16)).astype(np.float32)
    hidden[2, :PAGE_SIZE] = hidden[0, :PAGE_SIZE]
    tables, at = [[5, 2, 9], [4, 7, 3]], [0, 0]

    def advance(sequences: dict[int, np.ndarray], decode: bool) -> None:
        """Compute the next tokens of sequences, after which a decode row has wrong drafts."""
        rows = []
        for i, correct in sequences.items():
            wrong = draw.normal(size=(int(draw.integers(0, QUERIES + 1 - len(correct))) if decode else 0, 16))
            rows.append((tables[i], at[i], np.concatenate([correct, wrong.astype(np.float32)])))
            at[i] += len(correct)
        steps.run(rows, decode=decode)

    while min(at) < 170:
        decode, behind = bool(draw.integers(0, 2)), [i for i in (0, 1) if at[i] < 170]
        limit = QUERIES - 1 if decode else CHUNK // len(behind)
        advance({i: hidden[i, at[i] : at[i] + int(draw.integers(1, limit + 1))][: 185 - at[i]] for i in behind}, decode)
    # Another sequence has the same first page. A short sequence gets a page with rows of the second sequence.
    shared, reused, middle = [5, 6], [4], PAGE_SIZE + 21
    steps.run([(shared, PAGE_SIZE, hidden[2, PAGE_SIZE:middle]), (reused, 0, hidden[2, 40:43])], decode=False)
    steps.run([(shared, middle, hidden[2, middle:102]), (reused, 3, hidden[2, 43:53])], decode=False)
    steps.run([(shared, 102, hidden[2, 102:104]), (reused, 13, hidden[2, 53:57])], decode=True)
    for table, values in ((tables[0], hidden[0, : at[0]]), (shared, hidden[2, :104]), (reused, hidden[2, 40:57])):
        np.testing.assert_allclose(steps.entries(table, len(values)), steps.expected(values), atol=1e-5)


def all_rows_in_one_call(patch: Patch) -> None:
    right: Any = deepseek_v4._state_rows
    patch.setattr(deepseek_v4, "_state_rows", lambda *args: right(*args[:-1], None))


def newest_rows_not_written(patch: Patch) -> None:
    right = deepseek_v4._state_rows
    patch.setattr(deepseek_v4, "_state_rows", lambda *args: dataclasses.replace(right(*args), slots=None))


def rows_of_one_window(patch: Patch) -> None:
    """A page has half as many rows, so that drafts overwrite rows that are needed if they are rejected."""
    right = DeepseekV4Config.state_rows
    patch.setattr(DeepseekV4Config, "state_rows", lambda config, layer, size: right(config, layer, size) // 2)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [all_rows_in_one_call, newest_rows_not_written, rows_of_one_window])
@pytest.mark.parametrize("layer", [1, 2], ids=["CSA", "HCA"])
def test_mistakes_are_detected(mistake: Callable[[Patch], None], layer: int, monkeypatch: pytest.MonkeyPatch):
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_entries(layer)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [64, 32])
def test_logits_of_chunks(page_size: int):
    """Logits equal transformers. Between chunks, tokens are decoded one at a time. Caches begin as NaN."""
    prompt, wanted = golden("v4").prompts[-1], golden("v4")["logits"][-1]
    pages = Pages.scatter(1, -(-MAX_LEN // page_size))
    caches = loaded("v4").allocate_caches(pages.tables.size + 1, page_size)
    caches = jax.tree.map(lambda x: jnp.full_like(x, np.nan), caches)
    steps, found, start = Stepper("v4", pages, page_size, caches, run_of("v4")), [], 0
    for size in (23, 1, 1, 23, 23, 1, 1):
        found.append(steps.step([(0, prompt[start : start + size], start)], decode=int(size == 1))[0])
        start += size
    assert start > 64
    assert_parity(np.concatenate(found), wanted[:start])
    assert steps.caches[1].state.pages.shape[1] == 16


SIZES = EngineConfig(num_pages=24, page_size=32, max_batched_tokens=45, max_num_seqs=3)
"""A page of CSA layers has 16 rows. Chunks of up to 45 tokens end anywhere in blocks and pages."""


DRAFTS = Speculation(NGramProposer(shortest=1), 3, adaptive=False)


@pytest.mark.slow
def test_engine_tokens():
    """Tokens equal transformers with chunks, prefix hits, and drafts that are rejected."""
    _, outputs = run(loaded("v4"), dataclasses.replace(SIZES, speculate=DRAFTS), golden("v4").prompts)
    expect_golden("v4", outputs)
    assert sum(output.cached_tokens for output in outputs) > 0
    assert sum(sum(output.drafted) for output in outputs) > sum(sum(output.accepted) for output in outputs)


@pytest.mark.slow
def test_preemption():
    """Two requests need seven pages in the end, and there are five."""
    sizes = dataclasses.replace(
        SIZES, num_pages=5, recycling=False, max_num_seqs=2, max_model_len=MAX_LEN, speculate=DRAFTS,
        decode_buckets=(2,), prefill_buckets=(45,),
    )  # fmt: skip
    engine, expected = Engine(loaded("v4"), sizes), golden("v4")
    outputs = engine.generate([expected.prompts[2], expected.prompts[1]], dataclasses.replace(GREEDY, max_tokens=60))
    for output, i in zip(outputs, (2, 1), strict=True):
        np.testing.assert_array_equal(output.output_ids[:24], expected["tokens"][i])
    assert engine.stats().preemptions > 0


@pytest.mark.slow
def test_short_prompt_after_a_long_one_in_the_same_pages():
    """Rows of earlier sequences in the same pages are not part of entries. One request runs at a time."""
    sizes = dataclasses.replace(
        SIZES, num_pages=4, max_num_seqs=1, prefix_caching=False, max_model_len=MAX_LEN,
        decode_buckets=(1,), prefill_buckets=(45,),
    )  # fmt: skip
    engine, prompts, tokens = Engine(loaded("v4"), sizes), golden("v4").prompts, golden("v4")["tokens"]
    for i in (3, 0, 1, 0):
        [output] = engine.generate([prompts[i]], GREEDY)
        np.testing.assert_array_equal(output.output_ids, tokens[i])


@pytest.mark.slow
def test_exported_pages():
    """Another engine continues from exported pages."""
    first, outputs = run(loaded("v4"), SIZES, golden("v4").prompts)
    expect_golden("v4", outputs)
    sizes = dataclasses.replace(SIZES, max_model_len=MAX_LEN, decode_buckets=(3,), prefill_buckets=(45,))
    continued("v4", first, sizes, [0, 0, 32, 64])


def test_more_drafts_than_rows_raise():
    drafts = Speculation(NGramProposer(), 9, adaptive=False)
    with pytest.raises(NotImplementedError, match="speculate: expected at most 8 drafts, .* got 9"):
        Engine(loaded("v4"), dataclasses.replace(SIZES, max_model_len=MAX_LEN, speculate=drafts))
    assert config_of("v4").most_queries(16) is None


PRO = dataclasses.replace(
    V4_PRESETS["v4-tiny"], num_hidden_layers=61, head_dim=512, qk_rope_head_dim=64, index_head_dim=128,
    hca_rate=128, sliding_window=128, mlp_layer_types=(SCORED_MOE,) * 61,
    layer_types=(HCA_KIND, HCA_KIND, *(HCA_KIND if layer % 2 else CSA_KIND for layer in range(59))),
)  # fmt: skip
"""Layers and cached widths of DeepSeek-V4-Pro."""


@pytest.mark.parametrize(
    ("page_size", "megabytes"), [(128, [8.0, 1.3, 4.9, 16.3]), (256, [16.0, 2.5, 4.9, 32.5])], ids=str
)
def test_memory_of_pages(page_size: int, megabytes: list[float]):
    """The sizes of docs/engine_pages.md. Before a step, a sequence holds at most two pages of CSA rows and one of HCA
    rows."""
    assert [round(PRO.page_bytes(number, page_size) / 1e6, 1) for number in range(4)] == megabytes
    sizes: dict[str, Any] = {"page_size": page_size, "max_model_len": 8192, "max_num_seqs": 1}
    groups = group_sizes(PRO, num_pages=1, step_tokens=1, recycling=True, **sizes)
    held = [HeadPagePool(1, group.heads, page_size=page_size, max_num_seqs=1, max_pages_per_seq=1) for group in groups]
    assert [pool.peak_rows(8192, step_tokens=1) for pool in held] == [2, 8192 // page_size, 2, 1]
