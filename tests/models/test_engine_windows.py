"""The engine with windows of heads and layers: what it recycles, shares and chunks changes no token and is not read."""

from __future__ import annotations

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoints import random_model
from models.config import GQA_PRESETS, HeadWindows
from models.decoder import Caches, Decoder
from models.engine import Decoded, Engine, EngineConfig, SamplingParams
from models.engine.packed_step import PackedStep
from models.engine.verify import verify
from pallas_attn import FULL, PAGE_NONE, PagedKV
from tests.models.engine_case import PROMPTS, compile_events

HEADS = HeadWindows((FULL, 6), (0, 3))
CONFIG = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], num_hidden_layers=2, vocab_size=64, windows=(HEADS, 5))
GREEDY = SamplingParams(max_tokens=24)
DRAWN = SamplingParams(max_tokens=24, temperature=0.8, top_k=20, top_p=0.95, seed=11)
PARAMS = [GREEDY, DRAWN] * (len(PROMPTS) // 2)

AMPLE = EngineConfig(num_pages=96, page_size=4, max_batched_tokens=16, max_num_seqs=4)
ENGINES = {
    "ample": AMPLE,
    "short of pages": dataclasses.replace(AMPLE, num_pages=25, page_size=2, max_batched_tokens=7),
    "nothing recycled, chunked or found again": dataclasses.replace(
        AMPLE, max_batched_tokens=64, recycling=False, chunked_prefill=False, prefix_caching=False
    ),
}


@functools.cache
def model() -> Decoder:
    return random_model(CONFIG, seed=3)


def make(config: EngineConfig) -> Engine:
    """With one bucket of each kind, so that little is compiled."""
    buckets = {"decode_buckets": (config.max_num_seqs,), "prefill_buckets": (config.max_batched_tokens,)}
    return Engine(model(), dataclasses.replace(config, max_model_len=96, **buckets))


def expect_plain(prompts: list[list[int]], outputs: list[list[int]], params: list[SamplingParams]) -> None:
    """Tokens must be those of one forward without pages, chunks or a cache."""
    decoded = [Decoded(*request) for request in zip(prompts, outputs, params, strict=True)]
    verification = verify(model(), decoded, max_len=96)
    assert verification.passed, verification
    assert verification.equal == sum(map(len, outputs))


@functools.cache
def engine(name: str) -> Engine:
    return make(ENGINES[name])


@functools.cache
def plain() -> tuple[tuple[int, ...], ...]:
    """Tokens of all prompts, which the first engine to run makes and the plain run confirms."""
    outputs = [output.output_ids for output in engine("ample").generate(PROMPTS, PARAMS)]
    expect_plain([*PROMPTS], outputs, PARAMS)
    return tuple(map(tuple, outputs))


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_a_plain_run_whatever_the_cache_does(name):
    under_test = engine(name)
    for _ in range(2):  # the second time with prefixes to be found
        outputs = under_test.generate(PROMPTS, PARAMS)
        assert tuple(tuple(output.output_ids) for output in outputs) == plain()
    assert (sum(output.cached_tokens for output in outputs) > 0) == under_test.config.prefix_caching
    stats = under_test.stats()
    assert stats.used_pages == 0
    assert stats.peak_pages <= stats.num_pages
    assert (stats.preemptions > 0) == (name == "short of pages")
    under_test._pools.check()


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go_get_their_own_tokens(name, seed):
    draw, under_test = random.Random(seed), engine(name)
    arrived: dict[int | str, int] = {}
    while len(arrived) < 25 or under_test.has_unfinished:
        if len(arrived) < 25 and draw.random() < 0.3:
            prompt = draw.randrange(len(PROMPTS))
            salt = draw.choice(["", "", "pepper"])
            arrived[under_test.add_request(PROMPTS[prompt], PARAMS[prompt], salt=salt)] = prompt
        if arrived and draw.random() < 0.02:
            under_test.abort(draw.choice([*arrived]))
        under_test.step()
    for request_id, prompt in arrived.items():
        output = under_test.output(request_id)
        assert output.finish_reason in ("length", "abort")
        assert tuple(output.output_ids) == plain()[prompt][: len(output.output_ids)]
    assert under_test.stats().used_pages == 0
    under_test._pools.check()


def test_groups_share_the_memory_and_say_what_they_use():
    stats, kept = (engine(name).stats() for name in ("ample", "nothing recycled, chunked or found again"))
    assert [group.layers for group in stats.groups] == [(0,), (1,)]
    assert [group.num_heads for group in stats.groups] == [2, 1]
    mixed, windowed = (group.num_rows / group.num_heads for group in stats.groups)
    assert mixed > 2 * windowed
    assert 2 * 96 - 2 < mixed + windowed <= 2 * 96
    assert [group.num_rows for group in kept.groups] == [192, 96]
    assert 0.95 * kept.cache_bytes < stats.cache_bytes <= kept.cache_bytes


def test_a_prefix_is_found_with_what_windows_have_left():
    under_test = engine("ample")
    [first] = under_test.generate([PROMPTS[5]], GREEDY)
    longer = [*PROMPTS[5], *first.output_ids[:-1], 9]  # the last output was never computed
    [again] = under_test.generate([longer], GREEDY)
    assert (len(longer), again.cached_tokens) == (64, 60)
    expect_plain([longer], [again.output_ids], [GREEDY])


def test_windowed_heads_hold_sink_tokens_their_window_and_what_is_written():
    """Of the pages of four tokens: one of sink tokens, those of a window of 6 or 5, and one for the new token."""
    under_test = engine("ample")
    under_test.add_request(PROMPTS[5][::-1], SamplingParams(max_tokens=50, ignore_eos=True))
    held = []
    while under_test.has_unfinished:
        under_test.step()
        tables = under_test._pools.tables(range(4))
        held.append([(table != PAGE_NONE).sum(axis=(0, 2)).tolist() for table in tables])
    prefilling, decoding = held[:3], [pages for pages in held[3:] if any(pages[0])]
    assert [max(pages) for pages in zip(*(mixed for mixed, _ in decoding), strict=True)] == [23, 1 + 3]
    assert max(windowed for _, [windowed] in decoding) == 2
    assert max(windowed for [_, windowed], _ in prefilling) <= 1 + 2 + 16 // 4
    rows = [record.used_rows for record in under_test.stats().steps][-len(decoding) :]
    assert max(mixed for mixed, _ in rows) == 23 + 4


def poisoned(caches: Caches, layers: tuple[int, ...], rows: list[int], head_wise: bool) -> Caches:
    """The same with NaN in some rows of some layers."""

    def fill(array: jax.Array) -> jax.Array:
        of_rows = array.reshape(-1, *array.shape[2:]) if head_wise else array
        return of_rows.at[jnp.asarray(rows)].set(jnp.nan).reshape(array.shape)

    filled = list(caches)
    for layer in layers:
        cache = filled[layer]
        assert isinstance(cache, PagedKV)
        filled[layer] = dataclasses.replace(cache, k=fill(cache.k), v=fill(cache.v))
    return tuple(filled)


def poison(under_test: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills every recycled row with NaN, and table entries without a page with ids far out of range. Returns the number
    of rows that were filled, as it grows."""
    recycle, pack = under_test._pools.recycle, PackedStep.pack.__func__
    filled: list[int] = []

    def recycle_and_fill(*args):
        recycled = recycle(*args)
        for group, rows in zip(under_test._groups, recycled, strict=True):
            if rows:
                caches = under_test._runner._caches
                under_test._runner._caches = poisoned(caches, group.layers, rows, group.head_wise)
                filled.append(len(rows))
        return recycled

    def pack_out_of_range(cls, config, bucket, plan):
        packed = pack(cls, config, bucket, plan)
        step = cls.of(config, bucket, packed)
        for tables in (*step.decode_tables, *step.prefill_tables):
            tables[tables == PAGE_NONE] = 2147480000
        return packed

    monkeypatch.setattr(under_test._pools, "recycle", recycle_and_fill)
    monkeypatch.setattr(PackedStep, "pack", classmethod(pack_out_of_range))
    return filled


def test_what_is_recycled_is_never_read(monkeypatch):
    """Not by a later step, and not by one under way: tokens keep their bits, and so does all that is still cached, of
    which the second layer's comes of attention in the first."""
    caches = []
    for poisoning in (False, True):
        under_test = make(dataclasses.replace(AMPLE, prefix_caching=False))
        under_test._runner._compiled = engine("ample")._runner._compiled
        filled = poison(under_test, monkeypatch) if poisoning else []
        outputs = under_test.generate(PROMPTS, PARAMS)
        assert tuple(tuple(output.output_ids) for output in outputs) == plain()
        caches.append(jax.device_get(under_test._runner._caches))
    assert sum(filled) > 100
    for clean, after in zip(*caches, strict=True):
        for name in ("k", "v"):
            expected, values = getattr(clean, name), getattr(after, name)
            kept = ~np.isnan(values)
            assert not kept.all()
            np.testing.assert_array_equal(values[kept], expected[kept])


def test_nothing_compiles_after_warmup():
    under_test = engine("short of pages")
    under_test.warmup()
    compiled = under_test.stats().compilations
    for bucket in under_test._runner.buckets():
        under_test._runner.run_idle(bucket)  # as on a GPU
    expected = plain()
    under_test.generate(PROMPTS[:2], PARAMS[:2])  # numpy's and jax's own first times
    with compile_events() as events:
        outputs = under_test.generate(PROMPTS, PARAMS)
    assert tuple(tuple(output.output_ids) for output in outputs) == expected
    assert events == []
    assert under_test.stats().compilations == compiled == 3
