"""FlashAttention-3 as a baseline, over the same pages and arrays as our kernels.

FlashAttention-3 decodes with a schedule, like our plan. The schedule depends on lengths only and serves all layers, so
it is made before the calls and not timed. The kernel that merges KV splits is timed. In a prefill of sequences of
different lengths, a kernel of each call makes the schedule and is timed. Sequences of equal length need no schedule.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.cases.paged_decode import DecodeArrays, DecodeCase
from scripts.bench.cases.prefill import PagedPrefillCase, RaggedAttentionCase
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers.torch_decode import as_torch, import_torch

MAX_ROPE_DIM = 64
"""Maximum width of the rotated keys that FlashAttention-3 supports in latent attention."""
LATENT_DIMS = range(256, 513)
"""Latent widths that FlashAttention-3 supports. Latents are values and, together with rotated keys, keys."""


def import_interface() -> Any:
    """Import FlashAttention-3.

    Raises:
      ImportError: torch or FlashAttention-3 is not installed.
      NotImplementedError: torch finds no GPU.
    """
    import_torch()
    return importlib.import_module("flash_attn_interface")


def check_bf16(cache: str) -> None:
    if cache != "bf16":
        raise NotImplementedError(f"this baseline does not support {cache}")


def of_a_step(
    case: MlaDecodeCase | DecodeCase, lens: Any, heads: tuple[int, int], widths: tuple[int, int]
) -> dict[str, Any]:
    """Return the arguments that the calls of one decode step share, including the schedule.

    Args:
      lens: tensor int32 [B], tokens per sequence.
      heads: numbers of query heads and KV heads.
      widths: key dimension and value dimension.
    """
    s = case.shape
    schedule = import_interface().get_scheduler_metadata(
        s.batch,
        s.queries,
        case.table_pages * s.page_size,  # maximum length, as a call computes it from its block table
        *heads,
        widths[0],
        lens,
        qkv_dtype=import_torch().bfloat16,
        headdim_v=widths[1],
        page_size=s.page_size,
        causal=True,
    )
    return {"cache_seqlens": lens, "causal": True, "scheduler_metadata": schedule}


def mla(case: MlaDecodeCase, arrays: MlaDecodeInputs, stopwatch: Stopwatch) -> Timing:
    """Time latent attention. The argument k has the rotated keys and the argument v the latents. The queries `qv` are
    also multiplied with v, as the unrotated part of the scores.
    """
    attend = import_interface().flash_attn_with_kvcache
    check_bf16(case.cache)
    s = case.shape
    if s.rope_dim > MAX_ROPE_DIM or s.latent_dim not in LATENT_DIMS:
        raise NotImplementedError(f"this baseline does not support latents of {s.latent_dim} + {s.rope_dim}")
    pages = as_torch(arrays.cache.pages)[:, :, None]
    latents, keys = pages[..., : s.latent_dim], pages[..., s.latent_dim :]
    options = of_a_step(case, as_torch(arrays.kv_lens), (s.heads, 1), (s.rope_dim, s.latent_dim))
    calls = []
    for own in arrays.owns:
        q, qv, table = (as_torch(own[name]) for name in ("q_rope", "q_latent", "block_tables"))
        call = functools.partial(attend, q, keys, latents, qv=qv, page_table=table, softmax_scale=case.sm_scale)
        calls.append(functools.partial(call, **options))
    return stopwatch.graph(calls, compared=True)


def decode(case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time paged decode. Our pages [N, Hkv, ps, D] are passed as strided views [N, ps, Hkv, D]."""
    attend = import_interface().flash_attn_with_kvcache
    check_bf16(case.cache)
    s = case.shape
    if case.window is not None or s.soft_cap is not None or s.learned_sinks:
        raise NotImplementedError("this baseline does not support windows, caps or sinks")
    k, v = (as_torch(pages).swapaxes(1, 2) for pages in (arrays.kv.k, arrays.kv.v))
    options = of_a_step(case, as_torch(arrays.kv_lens), (s.q_heads, s.kv_heads), (s.head_dim, s.head_dim))
    calls = [
        functools.partial(attend, as_torch(q), k, v, page_table=as_torch(table), **options)
        for q, table in zip(arrays.q, arrays.block_tables, strict=True)
    ]
    return stopwatch.graph(calls, compared=True)


def ragged(num_splits: int, case: RaggedAttentionCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time packed sequences of any lengths, the same arrays that our kernel reads.

    Args:
      num_splits: number of KV splits; 0 lets FlashAttention-3 choose. Its default is 1.
    """
    attend = functools.partial(import_interface().flash_attn_varlen_func, num_splits=num_splits)
    check_bf16(case.cache)
    k, v, *offsets = (as_torch(arrays[name]) for name in ("k", "v", "cu_q_lens", "cu_kv_lens"))
    longest = max(new for new, _ in case.each), max(case.held_by_each)
    calls = [functools.partial(attend, as_torch(q), k, v, *offsets, *longest, causal=True) for q in arrays["q"]]
    return stopwatch.graph(calls, compared=True)


def paged(case: PagedPrefillCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time prompt chunks over pages. Our pages [N, Hkv, ps, D] are passed as strided views [N, ps, Hkv, D]."""
    attend = import_interface().flash_attn_with_kvcache
    check_bf16(case.cache)
    s = case.shape
    if s.learned_sinks:
        raise NotImplementedError("this baseline does not support sinks")
    k, v = (as_torch(pages).swapaxes(1, 2) for pages in (arrays["kv"].k, arrays["kv"].v))
    options = {
        "cache_seqlens": as_torch(arrays["kv_lens"]),
        "page_table": as_torch(arrays["block_tables"]),
        "cu_seqlens_q": as_torch(arrays["cu_q_lens"]),
        "max_seqlen_q": max(new for new, _ in case.each),
        "causal": True,
        "window_size": (-1, -1) if s.window is None else (s.window - 1, 0),
        "softcap": s.soft_cap or 0.0,
    }
    calls = [functools.partial(attend, as_torch(q), k, v, **options) for q in arrays["q"]]
    return stopwatch.graph(calls, compared=True)


def of_one_length(case: RaggedAttentionCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time sequences of equal length as a dense batch [B, tokens, heads, D]. Our kernels have no such variant."""
    attend = import_interface().flash_attn_func
    check_bf16(case.cache)
    case.check_one_length()

    def by_sequence(array: Any) -> Any:
        return as_torch(array).reshape(case.shape.sequences, -1, *array.shape[1:])

    k, v = by_sequence(arrays["k"]), by_sequence(arrays["v"])
    calls = [functools.partial(attend, by_sequence(q), k, v, causal=True) for q in arrays["q"]]
    return stopwatch.graph(calls, compared=True)


NAME = "flash-attention-3"
MLA_CONTENDERS = {NAME: mla}
DECODE_CONTENDERS = {NAME: decode}
PAGED_CONTENDERS = {NAME: paged}
RAGGED_CONTENDERS = {
    NAME: functools.partial(ragged, 0),
    f"{NAME}-unsplit": functools.partial(ragged, 1),
    f"{NAME}-of-one-length": of_one_length,
}
