"""FlashInfer's batch decode as a baseline, over the same pages as our kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.bench.cases.paged_decode import DecodeArrays, DecodeCase
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flashinfer_build
from scripts.bench.peers.torch_decode import as_torch, import_torch

WORKSPACE_BYTES = 256 * 2**20
"""Bytes of the workspace in which FlashInfer stores partial results."""

CACHES = {"bf16": "bfloat16", "f16": "float16", "fp8-head": "float8_e4m3fn"}
"""Torch dtype by kind of cache that this baseline supports. For fp8, FlashInfer has one scale for all heads, which is
less work than our scale per head.
"""


def decode(case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time FlashInfer's tensor-core kernels, which support any number of query heads per KV head. Planning, which
    FlashInfer does on the host once per step, is not timed.
    """
    torch = import_torch()
    flashinfer = importlib.import_module("flashinfer")
    if case.cache not in CACHES:
        raise NotImplementedError(f"this baseline does not support {case.cache} caches")
    if case.windowed_heads is not None or case.shape.learned_sinks:
        raise NotImplementedError("this baseline does not support head windows and sinks")
    s = case.shape
    kind = (s.head_dim, s.head_dim, CACHES[case.cache], int(s.window is not None), int(s.soft_cap is not None))
    flashinfer_build.require("attention", "fa2", *kind)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    pages = as_torch(arrays.kv.k), as_torch(arrays.kv.v)
    calls = []
    for q, table in zip(arrays.q, arrays.block_tables, strict=True):
        wrapper = planned(flashinfer, torch, workspace, case, np.asarray(table), as_torch(q).dtype, pages[0].dtype)
        calls.append(functools.partial(wrapper, as_torch(q).flatten(0, 1), pages))
    return stopwatch.graph(calls, compared=case.cache in ("bf16", "f16"))


def page_lists(torch: Any, lens: np.ndarray, table: np.ndarray, page_size: int) -> tuple[Any, Any]:
    """Convert a block table to FlashInfer's page lists.

    Returns:
      Offset of each sequence in the list of page ids, int32 [B + 1] on the host; and the page ids of all sequences,
      int32 on the device.

    """
    counts = -(-lens // page_size)
    pages = np.concatenate([row[:n] for row, n in zip(table, counts, strict=True)])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return torch.from_numpy(offsets), torch.from_numpy(pages).cuda()


def planned(
    flashinfer: Any, torch: Any, workspace: Any, case: DecodeCase, table: np.ndarray, q_dtype: Any, kv_dtype: Any
) -> Callable[..., Any]:
    """Plan a call for one block table. Return FlashInfer's function of queries and pages."""
    s = case.shape
    offsets, indices = page_lists(torch, case.lens, table, s.page_size)
    last = torch.from_numpy((case.lens - 1) % s.page_size + 1)
    sizes = (s.q_heads, s.kv_heads, s.head_dim, s.page_size)
    window_left = -1 if s.window is None else s.window - 1
    options = {"window_left": window_left, "logits_soft_cap": s.soft_cap, "q_data_type": q_dtype}
    options |= {"kv_data_type": kv_dtype}
    if s.queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2")
        wrapper.plan(offsets, indices, last, *sizes, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        queries = torch.arange(s.batch + 1, dtype=torch.int32) * s.queries
        wrapper.plan(queries, offsets, indices, last, *sizes, causal=True, **options)
    scale = 0.02 if case.cache.startswith("fp8") else None  # no v_scale: it would launch one more kernel
    return functools.partial(wrapper.run, k_scale=scale)


CONTENDERS = {"flashinfer": decode}
