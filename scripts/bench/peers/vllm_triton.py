"""vLLM's Triton kernels as baselines, over the same pages as our kernels."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.cases.paged_decode import DecodeArrays, DecodeCase
from scripts.bench.cases.prefill import PagedPrefillCase
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers.torch_decode import as_torch, import_torch

OPS = "vllm.v1.attention.ops"
SEGMENTS, SEQUENCES_IN_SEGMENTS = 16, 128
"""Number of segments (KV splits) per sequence in decode, and maximum number of sequences * KV heads with which the
kernel splits keys at all. vLLM's Triton backend uses the same values.
"""


def latents(case: MlaDecodeCase, arrays: MlaDecodeInputs, stopwatch: Stopwatch) -> Timing:
    """Time vLLM's decode attention over latents, with as many KV splits as vLLM's Triton backend uses. The
    concatenation of `q_latent` and `q_rope` is not timed.
    """
    torch = import_torch()
    decode = importlib.import_module(f"{OPS}.triton_decode_attention").decode_attention_fwd
    splits_of = importlib.import_module("vllm.v1.attention.backends.mla.triton_mla")._compute_num_kv_splits
    s = case.shape
    if case.cache != "bf16" or s.queries > 1:
        raise NotImplementedError("this baseline supports only bf16 and one query per sequence")
    lens, pages = as_torch(arrays.kv_lens), as_torch(arrays.cache.pages)[:, :, None]
    splits = splits_of(int(lens.max()), torch.cuda.get_device_properties(0).multi_processor_count)
    states = torch.empty(s.batch, s.heads, splits, s.latent_dim + 1, device="cuda")
    lse = torch.empty(s.batch, s.heads, device="cuda", dtype=torch.bfloat16)
    one = torch.ones((), device="cuda")

    def call(q: Any, out: Any, table: Any) -> Any:
        values = pages[..., : s.latent_dim]
        arguments = (states, splits, case.sm_scale, s.page_size)
        decode(q, pages, values, out, lse, table, lens, *arguments, k_scale=one, v_scale=one, is_mla=True)
        return out[:, None]

    calls = []
    for own in arrays.owns:
        q = torch.cat([as_torch(own["q_latent"]), as_torch(own["q_rope"])], -1)[:, 0]
        calls.append(functools.partial(call, q, q.new_empty(*q.shape[:2], s.latent_dim), as_torch(own["block_tables"])))
    return stopwatch.graph(calls, compared=True)


def chunk(case: PagedPrefillCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time vLLM's attention of prompt chunks over pages. Our pages [N, Hkv, ps, D] are passed as strided views [N, ps,
    Hkv, D].
    """
    import_torch()
    attend = importlib.import_module(f"{OPS}.triton_unified_attention").unified_attention
    s = case.shape
    if case.cache != "bf16" or s.learned_sinks:
        raise NotImplementedError("this baseline supports only bf16 without sinks")
    k, v = (as_torch(pages).transpose(1, 2) for pages in (arrays["kv"].k, arrays["kv"].v))
    options = {
        "cu_seqlens_q": as_torch(arrays["cu_q_lens"]),
        "max_seqlen_q": max(new for new, _ in case.each),
        "seqused_k": as_torch(arrays["kv_lens"]),
        "max_seqlen_k": max(case.held_by_each),
        "softmax_scale": s.head_dim**-0.5,
        "causal": True,
        "softcap": s.soft_cap or 0,
        "window_size": (-1, -1) if s.window is None else (s.window - 1, 0),
        "block_table": as_torch(arrays["block_tables"]),
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }

    def call(q: Any, out: Any) -> Any:
        attend(q, k, v, out, **options)
        return out

    queries = [as_torch(q) for q in arrays["q"]]
    return stopwatch.graph([functools.partial(call, q, q.new_empty(q.shape)) for q in queries], compared=True)


def pages(case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time vLLM's decode attention over pages, with the KV splits that vLLM's Triton backend uses."""
    torch = import_torch()
    attend = importlib.import_module(f"{OPS}.triton_unified_attention").unified_attention
    s = case.shape
    if case.cache != "bf16" or s.learned_sinks or s.queries > 1 or s.window is not None:
        raise NotImplementedError(
            "this baseline supports only bf16 and one query per sequence, without sinks and windows"
        )
    k, v = (as_torch(pages).transpose(1, 2) for pages in (arrays.kv.k, arrays.kv.v))
    states = torch.empty(s.batch, s.q_heads, SEGMENTS, s.head_dim, device="cuda")
    tops, totals = (torch.empty(s.batch, s.q_heads, SEGMENTS, device="cuda") for _ in range(2))
    options = {
        "cu_seqlens_q": torch.arange(s.batch + 1, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": 1,
        "seqused_k": as_torch(arrays.kv_lens),
        "max_seqlen_k": s.context,
        "softmax_scale": s.head_dim**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": s.soft_cap or 0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "seq_threshold_3D": SEQUENCES_IN_SEGMENTS // s.kv_heads,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": states,
        "softmax_segm_max": tops,
        "softmax_segm_expsum": totals,
    }

    def call(q: Any, out: Any, table: Any) -> Any:
        attend(q, k, v, out, block_table=table, **options)
        return out[:, None]

    calls = []
    for q, table in zip(arrays.q, arrays.block_tables, strict=True):
        queries = as_torch(q)[:, 0]
        calls.append(functools.partial(call, queries, queries.new_empty(queries.shape), as_torch(table)))
    return stopwatch.graph(calls, compared=True)


NAME = "vllm-triton"
MLA_CONTENDERS = {NAME: latents}
PREFILL_CONTENDERS = {NAME: chunk}
DECODE_CONTENDERS = {NAME: pages}
