"""FlashAttention-3 as a baseline, over the same pages and arrays as our kernels.

Its schedule of a decode step depends on lengths only and serves all layers. It is made before the calls, like our plan,
and not timed. Its second kernel, which merges splits, is timed. A prefill of sequences of different lengths makes its
schedule in a kernel, which is timed. Sequences of equal length need no schedule.
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
"""Maximum number of rotated key columns for latents."""
LATENT_DIMS = range(256, 513)
"""Value dimensions that it supports for latents, which are keys too."""


def import_interface() -> Any:
    """Import its module.

    Raises:
      ImportError: torch or FlashAttention-3 is not installed.
      NotImplementedError: torch finds no GPU.
    """
    import_torch()
    return importlib.import_module("flash_attn_interface")


def check_bf16(cache: str) -> None:
    if cache != "bf16":
        raise NotImplementedError(f"does not support {cache} here")


def of_a_step(
    case: MlaDecodeCase | DecodeCase, lens: Any, heads: tuple[int, int], widths: tuple[int, int]
) -> dict[str, Any]:
    """Arguments that the calls of one step share.

    Args:
      heads: numbers of query heads and KV heads.
      widths: key dimension and value dimension.
    """
    s = case.shape
    schedule = import_interface().get_scheduler_metadata(
        s.batch,
        s.queries,
        case.table_pages * s.page_size,  # as a call derives it from its table
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
    """Time latent attention. Its keys are the rotated keys; its values are the latents, which a second query array also
    uses as keys.
    """
    attend = import_interface().flash_attn_with_kvcache
    check_bf16(case.cache)
    s = case.shape
    if s.rope_dim > MAX_ROPE_DIM or s.latent_dim not in LATENT_DIMS:
        raise NotImplementedError(f"does not support latents of {s.latent_dim} + {s.rope_dim}")
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
    """Time paged decode. Our pages have heads before tokens; it supports any strides."""
    attend = import_interface().flash_attn_with_kvcache
    check_bf16(case.cache)
    s = case.shape
    if case.window is not None or s.soft_cap is not None or s.learned_sinks:
        raise NotImplementedError("does not support windows, caps or sinks here")
    k, v = (as_torch(pages).swapaxes(1, 2) for pages in (arrays.kv.k, arrays.kv.v))
    options = of_a_step(case, as_torch(arrays.kv_lens), (s.q_heads, s.kv_heads), (s.head_dim, s.head_dim))
    calls = [
        functools.partial(attend, as_torch(q), k, v, page_table=as_torch(table), **options)
        for q, table in zip(arrays.q, arrays.block_tables, strict=True)
    ]
    return stopwatch.graph(calls, compared=True)


def ragged(num_splits: int, case: RaggedAttentionCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time sequences one after another, like ours.

    Args:
      num_splits: splits of the keys; 0 lets it choose. Its default is 1.
    """
    attend = functools.partial(import_interface().flash_attn_varlen_func, num_splits=num_splits)
    check_bf16(case.cache)
    k, v, *offsets = (as_torch(arrays[name]) for name in ("k", "v", "cu_q_lens", "cu_kv_lens"))
    longest = max(new for new, _ in case.each), max(case.held_by_each)
    calls = [functools.partial(attend, as_torch(q), k, v, *offsets, *longest, causal=True) for q in arrays["q"]]
    return stopwatch.graph(calls, compared=True)


def paged(case: PagedPrefillCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time chunks over pages; it supports any strides."""
    attend = import_interface().flash_attn_with_kvcache
    check_bf16(case.cache)
    s = case.shape
    if s.learned_sinks:
        raise NotImplementedError("does not support sinks here")
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
    """Time sequences as rows of one array. Our kernels cannot use this regularity."""
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
