"""Tests of the baselines FlashMLA and FlashAttention-3 (scripts/bench/peers) without these packages.

The packages are replaced by numpy functions that follow their documentation. If the results equal ours, the baselines
pass pages, tables, scales and masks in the form that the packages expect.
"""

import functools
import sys
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import mla_decode, mla_sparse, paged_decode, ragged_attention
from scripts.bench.cases.mla_decode import MlaDecodeCase
from scripts.bench.cases.mla_sparse import SM_SCALE, MlaSparseCase
from scripts.bench.cases.mla_sparse import inputs as sparse_inputs
from scripts.bench.cases.paged_decode import DecodeCase
from scripts.bench.cases.prefill import RaggedAttentionCase, RaggedPrefill
from scripts.bench.harness.pools import Pools
from scripts.bench.harness.timing import Timing
from scripts.bench.peers import flash_attention, flash_mla
from scripts.bench.shapes import Decode, MlaDecode
from tests.kit.slow_cases import slow_cases


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attend(scores, v, scale, causal):
    """Return attention from scores [Q, H, K] and values [K, H, D]. The last query is at the position of the last
    key.
    """
    queries, _, keys = scores.shape
    later = np.arange(keys) > np.arange(queries)[:, None] + keys - queries
    masked = np.where(later[:, None] & causal, -np.inf, scale * scores)
    return np.einsum("qhk,khd->qhd", softmax(masked), v)


def scores_of(q, k):
    return np.einsum("qhd,khd->qhk", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1))


def cached(pages, table, length):
    """Return the keys or values [K, H, D] of one sequence from pages [N, ps, H, D]."""
    return np.asarray(pages[table], np.float32).reshape(-1, *pages.shape[2:])[:length]


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    schedule,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    **sparse,
):
    assert (schedule, num_splits) == ("schedule", None)
    if is_fp8_kvcache:
        assert (block_table, cache_seqlens, head_dim_v) == (None, None, 512)
        return sparse_decode(q, k_cache, softmax_scale, **sparse), None
    assert k_cache.shape[1:] == (64, 1, 576)
    outs = []
    for queries, table, length in zip(q.astype(np.float32), block_table, cache_seqlens, strict=True):
        k = cached(k_cache, table, length)
        v = np.repeat(k[..., :head_dim_v], q.shape[2], axis=1)
        outs.append(attend(scores_of(queries, k), v, softmax_scale, causal))
    return np.stack(outs), None


def sparse_decode(
    q, k_cache, scale, indices, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None
):  # fmt: skip
    caches = [(k_cache, indices)]
    if extra_k_cache is not None:
        caches.append((extra_k_cache, extra_indices_in_kvcache))
    selected = [from_fp8(cache, q.shape[-1])[slots[:, 0]] for cache, slots in caches]
    return selected_attention(q[:, 0], np.concatenate(selected, axis=1), scale, attn_sink)[:, None]


def from_fp8(cache, width):
    """Return the rows [tokens, width] of an fp8 cache [pages, page_size, 1, bytes]: the formats of V3.2 and V4."""
    fp8, bf16, e8m0 = (jnp.dtype(name) for name in ("float8_e4m3fn", "bfloat16", "float8_e8m0fnu"))
    rows = cache[:, :, 0]
    if width == 576:
        assert rows.shape[1:] == (64, 656)
        scales = rows[..., 512:528].copy().view(np.float32).repeat(128, axis=-1)
        values, rope = rows[..., :512].copy().view(fp8), rows[..., 528:].copy().view(bf16)
    else:
        assert rows.shape[1:] == (64, 584)
        pages = rows.reshape(rows.shape[0], -1)
        scales = (
            pages[:, 64 * 576 :].reshape(-1, 64, 8)[..., :7].copy().view(e8m0).astype(np.float32).repeat(64, axis=-1)
        )
        rows = pages[:, : 64 * 576].reshape(-1, 64, 576)
        values, rope = rows[..., :448].copy().view(fp8), rows[..., 448:].copy().view(bf16)
    parts = [values.astype(np.float32) * scales, rope.astype(np.float32)]
    return np.concatenate(parts, axis=-1).reshape(-1, width)


def selected_attention(q, selected, scale, sink):
    """Return attention of queries [T, H, D] to selected rows [T, K, D], whose first 512 columns are values."""
    scores = scale * np.einsum("thd,tkd->thk", q.astype(np.float32), selected)
    if sink is not None:
        scores = np.concatenate([scores, np.broadcast_to(sink[:, None], (*scores.shape[:2], 1))], axis=-1)
    return np.einsum("thk,tkd->thd", softmax(scores)[..., : selected.shape[1]], selected[..., :512])


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, attn_sink=None):
    assert indices.shape[2] % 128 == 0
    slots = indices[:, 0]
    used = int((slots[0] >= 0).sum())
    assert (slots[:, used:] == -1).all()
    selected = kv.astype(np.float32)[:, 0][slots[:, :used]]
    return (selected_attention(q, selected, sm_scale, attn_sink),)


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype,
    headdim_v,
    page_size,
    causal,
):
    assert qkv_dtype == "bf16"
    assert cache_seqlens.shape == (batch_size,)
    return (max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v, page_size, causal)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, qv=None, cache_seqlens, page_table, softmax_scale=None, causal, scheduler_metadata
):
    page_size, heads = k_cache.shape[1:3]
    widths = (k_cache.shape[-1], v_cache.shape[-1])
    sizes = (q.shape[1], page_table.shape[1] * page_size, q.shape[2], heads, *widths, page_size, causal)
    assert scheduler_metadata == sizes
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outs = []
    for i, length in enumerate(cache_seqlens):
        k, v = (cached(pages, page_table[i], length) for pages in (k_cache, v_cache))
        scores = scores_of(q[i].astype(np.float32), k)
        if qv is not None:
            scores += scores_of(qv[i].astype(np.float32), v)
        outs.append(attend(scores, np.repeat(v, q.shape[2] // heads, axis=1), scale, causal))
    return np.stack(outs)


def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal, num_splits=1):
    assert (max_q, max_k) == (np.diff(cu_q).max(), np.diff(cu_k).max())
    assert num_splits in (0, 1)  # 0: the package chooses; 1: no splits
    outs = []
    for queries, keys in zip(map(slice, cu_q, cu_q[1:]), map(slice, cu_k, cu_k[1:]), strict=True):
        own_q, own_k, own_v = (a.astype(np.float32) for a in (q[queries], k[keys], v[keys]))
        own_v = np.repeat(own_v, q.shape[1] // v.shape[1], axis=1)
        outs.append(attend(scores_of(own_q, own_k), own_v, q.shape[-1] ** -0.5, causal))
    return np.concatenate(outs)


def flash_attn_func(q, k, v, causal):
    cu_q, cu_k = (a.shape[1] * np.arange(a.shape[0] + 1) for a in (q, k))
    rows_q, rows_k, rows_v = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    out = flash_attn_varlen_func(rows_q, rows_k, rows_v, cu_q, cu_k, q.shape[1], k.shape[1], causal)
    return out.reshape(*q.shape[:3], -1)


MODULES = {
    "flash_mla": SimpleNamespace(
        get_mla_metadata=lambda *sizes: ("schedule", None),
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        flash_mla_sparse_fwd=flash_mla_sparse_fwd,
    ),
    "flash_attn_interface": SimpleNamespace(
        get_scheduler_metadata=get_scheduler_metadata,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_func=flash_attn_func,
    ),
}


@pytest.fixture
def installed(monkeypatch):
    """Install fake packages FlashMLA and FlashAttention-3, which use NumPy instead of PyTorch."""
    torch = SimpleNamespace(cat=np.concatenate, bfloat16="bf16")
    for module in (flash_mla, flash_attention):
        monkeypatch.setattr(module, "as_torch", np.asarray)
        monkeypatch.setattr(module, "import_torch", lambda: torch)
    for name, functions in MODULES.items():
        monkeypatch.setitem(sys.modules, name, functions)


def first_output(contender, case, arrays):
    """Return the output of the first call that a baseline would time, and the number of calls."""
    found: list[Any] = []

    def graph(calls, *, compared):
        assert compared
        found.extend(calls)
        return Timing([1.0], len(calls), "not at all")

    stopwatch: Any = SimpleNamespace(graph=graph)
    contender(case, arrays, stopwatch)
    return found[0](), len(found)


def varied(case, *lens):
    """Replace the random lengths of a case by `lens`."""
    case.__dict__["lens"] = np.array(lens, np.int32)
    return case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "contender"),
    [
        (1, flash_attention.mla),
        pytest.param(1, flash_mla.decode, marks=pytest.mark.slow),  # FlashAttention-3 has the same inputs
        pytest.param(2, flash_attention.mla, marks=pytest.mark.slow),
        pytest.param(2, flash_mla.decode, marks=pytest.mark.slow),
    ],
)
def test_latent_attention_equals_ours(installed, contender, queries):
    case = varied(MlaDecodeCase(MlaDecode(3, 130, 4, queries), varied=True), 130, 64, queries)
    arrays = case.inputs(Pools())
    out, calls = first_output(contender, case, arrays)
    options: dict[str, Any] = arrays.owns[0] | {"cache": arrays.cache, "kv_lens": arrays.kv_lens}
    ours = mla_decode(**options, sm_scale=case.sm_scale, implementation="reference")
    assert calls == len(arrays.owns)
    np.testing.assert_allclose(out, np.asarray(ours, np.float32), atol=0.02, rtol=0.02)


SPARSE_CASES = {
    "V3.2 fp8": MlaSparseCase(2, 128, 64, "fp8", 64),
    "V4 fp8": MlaSparseCase(2, 128, 64, "fp8-v4", 64, 448, 64, window=64),
    "V3.2 prefill": MlaSparseCase(1, 128, 64, "bf16", 128, new_tokens=3),
    "V4 prefill": MlaSparseCase(1, 128, 64, "bf16", 64, 512, 0, new_tokens=3, window=32),
}


@pytest.mark.slow
@slow_cases("V3.2 fp8", "V3.2 prefill", "V4 prefill")
@pytest.mark.parametrize("case", SPARSE_CASES.values(), ids=SPARSE_CASES)
def test_sparse_attention_equals_ours(installed, case):
    arrays = sparse_inputs(case, Pools())
    out, calls = first_output(flash_mla.sparse, case, arrays)
    ours: Any = mla_sparse(
        **arrays.shared, **arrays.owns[0], sm_scale=SM_SCALE, out_dtype=jnp.float32, implementation="reference"
    )
    assert calls == len(arrays.owns)
    np.testing.assert_allclose(out.reshape(ours.shape), ours, atol=2e-3 * float(np.abs(ours).max()), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_paged_attention_equals_ours(installed, queries):
    case = varied(DecodeCase(Decode(3, 40, 4, 2, 16, queries, 16), varied=True), 40, 17, queries)
    arrays = case.inputs(Pools())
    out, calls = first_output(flash_attention.decode, case, arrays)
    ours = paged_decode(arrays.q[0], arrays.kv, arrays.block_tables[0], arrays.kv_lens, implementation="reference")
    assert calls == case.calls
    np.testing.assert_allclose(out, np.asarray(ours, np.float32), atol=0.02, rtol=0.02)


@slow_cases("contender0")
@pytest.mark.parametrize("contender", flash_attention.RAGGED_CONTENDERS.values())
def test_prefill_equals_ours(installed, contender):
    case = RaggedAttentionCase(RaggedPrefill(2, 5, 7, 4, 2, 24, 16))
    arrays = case.inputs(Pools())
    out, calls = first_output(contender, case, arrays)
    ours = ragged_attention(**(arrays | {"q": arrays["q"][0]}), implementation="reference")
    assert calls == len(arrays["q"])
    np.testing.assert_allclose(np.asarray(ours, np.float32), out.reshape(10, 4, 16), atol=0.02, rtol=0.02)


def test_unsupported_cases_have_a_reason(installed):
    refused: list[tuple[Any, Any, str]] = [
        (flash_mla.decode, MlaDecodeCase(MlaDecode(1, 64, 4), "f32"), "f32"),
        (flash_mla.decode, MlaDecodeCase(MlaDecode(1, 64, 4, latent_dim=256)), "512, 64"),
        (flash_mla.decode, MlaDecodeCase(MlaDecode(1, 64, 4, page_size=16)), "pages of 64"),
        (flash_mla.sparse, MlaSparseCase(1, 64, 16), "64 heads"),
        (flash_mla.sparse, MlaSparseCase(1, 64, 64, latent_dim=256), "512, 64"),
        (flash_mla.sparse, MlaSparseCase(1, 64, 64, "f32"), "f32"),
        (flash_mla.sparse, MlaSparseCase(1, 64, 64, "fp8", new_tokens=2), "prefill kernel"),
        (flash_attention.mla, MlaDecodeCase(MlaDecode(1, 64, 4, latent_dim=128)), "128"),
        (flash_attention.decode, DecodeCase(Decode(1, 64, 4, 2, 16), "int8-head"), "int8-head"),
        (flash_attention.decode, DecodeCase(Decode(1, 64, 4, 2, 16, window=8)), "windows"),
        (
            functools.partial(flash_attention.ragged, 0),
            RaggedAttentionCase(RaggedPrefill(1, 8, 0, 4, 2, 16, 16), "f32"),
            "f32",
        ),
    ]
    nothing: Any = None
    for contender, case, reason in refused:
        with pytest.raises(NotImplementedError, match=reason):
            contender(case, nothing, nothing)
