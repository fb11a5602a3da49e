"""Tests of the cases in scripts/bench/cases and scripts/bench/ops: their arguments, and the bytes and operations that a
call needs at least.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.bench.cases.mla_decode import MlaDecodeCase
from scripts.bench.cases.prefill import LENGTHS, MlaPrefillCase, PagedPrefillCase, RaggedAttentionCase, RaggedPrefill
from scripts.bench.harness import pools, timing
from scripts.bench.harness.timing import Timing
from scripts.bench.ops import gather_latent, mla_decode, write_latent
from scripts.bench.peers import flashinfer_mla
from scripts.bench.shapes import MlaDecode, MlaPrefill, Prefill


def pairs(new, cached, window=None):
    return sum(
        key <= q and (window is None or key > q - window) for q in range(cached, cached + new) for key in range(q + 1)
    )


# --- bytes and operations


@pytest.mark.parametrize(("new", "cached", "window"), [(5, 0, None), (7, 6, None), (9, 4, 3), (4, 9, 100), (1, 3, 1)])
def test_pairs_count_visible_keys(new, cached, window):
    case = PagedPrefillCase(Prefill(3, new, cached, 4, 2, 16, window=window))
    assert case.pairs == 3 * pairs(new, cached, window)
    assert case.flops == 4 * 4 * 16 * case.pairs


def test_ragged_attention_counts_key_and_value_dimensions():
    case = RaggedAttentionCase(RaggedPrefill(2, 5, 7, 8, 4, 192, 128))
    assert case.flops == 2 * 8 * (192 + 128) * 2 * pairs(5, 7)
    assert case.num_bytes == 2 * (192 + 128) * (8 * 10 + 4 * 24)


def test_windows_exclude_invisible_pages():
    full, windowed = (PagedPrefillCase(Prefill(1, 64, 960, 4, 2, 16, window=window)) for window in (None, 65))
    q = 2 * 64 * 4 * 16 * 2
    assert full.num_bytes - q == 8 * (windowed.num_bytes - q)


def test_mla_prefill_counts_each_expansion_once():
    case = MlaPrefillCase(MlaPrefill(2, 3, 4, 8))
    attention = 2 * 8 * (192 + 128) * 2 * pairs(3, 4)
    assert case.flops == attention + 2 * 14 * 512 * 8 * (128 + 128)


def test_mla_decode_counts_576_columns_and_1088_multiplications():
    case = MlaDecodeCase(MlaDecode(4, 100, 16, queries=2))
    assert case.num_bytes == 2 * 576 * 400
    assert case.flops == 2 * 16 * 2 * 400 * 1088


def test_varied_contexts_have_a_deviation_of_half_the_mean():
    case = MlaDecodeCase(MlaDecode(2000, 1000, 16, queries=2), varied=True)
    assert case.lens.mean() == pytest.approx(1000, rel=0.05)
    assert case.lens.std() == pytest.approx(500, rel=0.1)
    assert case.lens.min() == 2
    assert case.table_pages * 64 >= case.lens.max()


def test_lognormal_contexts_have_few_long_sequences():
    case = MlaDecodeCase(MlaDecode(2000, 1000, 16, queries=2), lognormal=True)
    assert case.lens.mean() == pytest.approx(1000, rel=0.05)
    assert np.log(case.lens).std() == pytest.approx(0.8, rel=0.05)
    assert np.median(case.lens) < 800
    assert case.num_bytes == 2 * 576 * case.lens.sum()


@pytest.mark.parametrize(("num_bytes", "flops", "calls"), [(1, 1, 16), (4_800_000_000, 0, 2), (0, 4 * 10**11, 4)])
def test_chains_last_long_enough(num_bytes, flops, calls):
    assert RaggedAttentionCase(RaggedPrefill(1, 1, 1, 1, 1, 8, 8)).calls(num_bytes, flops) == calls


def test_calls_of_minutes_are_not_supported():
    case = RaggedAttentionCase(RaggedPrefill(1, 8192, 32768, 128, 128, 192, 128))
    with pytest.raises(NotImplementedError, match="25 TFLOP"):
        case.check_portable("xla", case.flops)
    case.check_portable("mosaic", case.flops)


# --- arguments


def test_chunks_end_with_the_pages():
    case = PagedPrefillCase(Prefill(2, 10, 30, 4, 2, 16, page_size=16), "f32")
    arrays = case.inputs(pools.Pools())
    assert len(arrays["q"]) == case.calls(case.num_bytes, case.flops)
    assert arrays["q"][0].shape == (20, 4, 16)
    assert arrays["block_tables"].shape == (2, 3)
    assert len(np.unique(arrays["block_tables"])) == 6
    np.testing.assert_array_equal(arrays["cu_q_lens"], [0, 10, 20])
    np.testing.assert_array_equal(arrays["kv_lens"], [40, 40])


def test_no_two_gathers_read_the_same_page(monkeypatch):
    monkeypatch.setattr(pools, "COLD_BYTES", 3 * 12288)
    monkeypatch.setattr(pools, "MIN_CALLS", 5)
    case = gather_latent.GatherCase(2, 28, 4, "f32", 16, 8, 16)
    arrays = gather_latent.inputs(case, pools.Pools())
    assert case.cold_calls == 3
    assert len(arrays.owns) == 5
    ids = np.concatenate([np.asarray(own["block_tables"]).reshape(-1) for own in arrays.owns[:3]])
    assert len(set(ids.tolist())) == ids.size == 12


def test_latent_slots_are_written_once():
    case = write_latent.WriteLatentCase(20, 10, "f32", 16, 8, page_size=4, pool_bytes=2**16)
    calls = np.stack(case.slots)
    assert calls.shape == (case.calls, 20)
    assert len(np.unique(calls)) == calls.size
    assert calls.min() >= 0
    assert calls.max() < case.pool.num_pages * 4


def test_latents_are_written_in_place():
    """The benchmark writes to the pool in place. Otherwise it would measure a copy of the pool."""
    case = write_latent.WriteLatentCase(8, 4, "f32", 16, 8, page_size=16, pool_bytes=2**20)
    compiled: list[Any] = []

    def compile_chain(call, owns, *, carried):
        chain = jax.jit(timing._chain(call), donate_argnums=0)
        compiled.append(chain.lower(carried, None, owns[:2]).compile())
        return Timing([1.0], 1, "not at all")

    stopwatch: Any = SimpleNamespace(chain=compile_chain)
    write_latent.ours("xla", case, write_latent.inputs(case, pools.Pools()), stopwatch)
    memory = compiled[0].memory_analysis()
    assert memory.alias_size_in_bytes >= 2**20
    assert memory.temp_size_in_bytes < 2**19


def test_latent_pools_are_reused():
    cache = pools.Pools()
    sizes = {"page_size": 16, "latent_dim": 16, "rope_dim": 8}
    first = cache.get_latents("bf16", 6, **sizes)
    assert first.pages.shape == (6, 16, 24)
    assert np.std(np.asarray(first.pages, np.float32)) == pytest.approx(1, rel=0.1)
    assert cache.get_latents("bf16", 5, **sizes) is first
    assert cache.get_latents("f32", 5, **sizes).pages.dtype == jnp.float32


# --- plans


def test_steps_are_timed_with_their_plan():
    plans = []

    def chain(call, owns, *, shared):
        plans.append(shared["plan"])
        return Timing([1.0], 1, "not at all")

    stopwatch: Any = SimpleNamespace(chain=chain)
    case = MlaDecodeCase(MlaDecode(2, 64, 3, 2, 32, 8, 16))
    mla_decode.ours("xla", case, case.inputs(pools.Pools()), stopwatch)
    (plan,) = plans
    assert (plan.made_for.op, plan.made_for.num_queries, plan.implementation) == ("mla_decode", 2, "xla")


def test_flashinfer_page_lists_match_the_table():
    planned: list[Any] = []
    torch = SimpleNamespace(
        arange=lambda n, dtype: np.arange(n, dtype=dtype),
        from_numpy=lambda a: SimpleNamespace(array=a, cuda=lambda: a),
        int32=np.int32,
        bfloat16="bf16",
    )
    wrapper = SimpleNamespace(plan=lambda *args: planned.extend(args), run="run")
    case = MlaDecodeCase(MlaDecode(3, 100, 16, queries=2), varied=True)
    case.__dict__["lens"] = np.array([65, 64, 2], np.int32)  # replaces random lengths
    table = np.arange(6).reshape(3, 2)
    assert flashinfer_mla.planned(wrapper, torch, case, table) == "run"
    queries, offsets, indices, lens, *rest = planned
    np.testing.assert_array_equal(queries, [0, 2, 4, 6])
    np.testing.assert_array_equal(offsets.array, [0, 2, 3, 4])
    np.testing.assert_array_equal(indices, [0, 1, 2, 4])
    np.testing.assert_array_equal(lens.array, [65, 64, 2])
    assert rest == [16, 512, 64, 64, True, MlaDecodeCase(case.shape).sm_scale, "bf16", "bf16"]


def test_grids_have_the_published_sizes():
    assert set(LENGTHS) == {(new, cached) for new in (512, 2048, 8192) for cached in (0, 8192, 32768)}
    grid = {case.shape for case in mla_decode.BENCH.grids["mla"]}
    assert {(s.heads, s.queries) for s in grid} == {(heads, queries) for heads in (16, 64, 128) for queries in (1, 2)}
    assert {s.context for s in grid} == {1024 * 2**i for i in range(6)}
