"""FlashInfer's prefill as a baseline, over the same arrays and pages as our kernels."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from scripts.bench.cases.prefill import PagedPrefillCase, RaggedAttentionCase
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flashinfer_build
from scripts.bench.peers.flashinfer_decode import CACHES, WORKSPACE_BYTES
from scripts.bench.peers.torch_decode import as_torch, import_torch


def ragged(backend: str, case: RaggedAttentionCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time ragged prefill. `wrapper.plan`, which FlashInfer runs on the host once per step, is not timed."""
    torch = import_torch()
    flashinfer = importlib.import_module("flashinfer")
    s = case.shape
    if case.cache != "bf16":
        raise NotImplementedError(
            f"case.cache: the benchmark of FlashInfer's ragged prefill supports bf16, got {case.cache}"
        )
    flashinfer_build.require("attention", backend, s.qk_dim, s.v_dim, "bfloat16", 0, 0)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(
        torch.from_numpy(np.array(arrays["cu_q_lens"])),
        torch.from_numpy(np.array(arrays["cu_kv_lens"])),
        s.q_heads,
        s.kv_heads,
        s.qk_dim,
        s.v_dim,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    k, v = as_torch(arrays["k"]), as_torch(arrays["v"])
    return stopwatch.graph([functools.partial(wrapper.run, as_torch(q), k, v) for q in arrays["q"]], compared=True)


def paged(backend: str, case: PagedPrefillCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    """Time paged prefill. `wrapper.plan`, which FlashInfer runs on the host once per step, is not timed."""
    torch = import_torch()
    flashinfer = importlib.import_module("flashinfer")
    s = case.shape
    if case.cache not in ("bf16", "f16") or s.learned_sinks:
        raise NotImplementedError("this baseline does not support 8-bit caches and sinks")
    kind = (s.head_dim, s.head_dim, CACHES[case.cache], int(s.window is not None), int(s.soft_cap is not None))
    flashinfer_build.require("attention", backend, *kind)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
    held = np.array(case.held_by_each, np.int32)
    pages = -(-held // s.page_size)
    table = np.array(arrays["block_tables"])
    dtype = getattr(torch, CACHES[case.cache])
    wrapper.plan(
        torch.from_numpy(np.array(arrays["cu_q_lens"])),
        torch.from_numpy(np.cumsum([0, *pages], dtype=np.int32)),
        torch.from_numpy(np.concatenate([row[:count] for row, count in zip(table, pages, strict=True)])).cuda(),
        torch.from_numpy((held - 1) % s.page_size + 1),
        s.q_heads,
        s.kv_heads,
        s.head_dim,
        s.page_size,
        causal=True,
        window_left=-1 if s.window is None else s.window - 1,
        logits_soft_cap=s.soft_cap,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    cache = as_torch(arrays["kv"].k), as_torch(arrays["kv"].v)
    return stopwatch.graph([functools.partial(wrapper.run, as_torch(q), cache) for q in arrays["q"]], compared=True)


BACKENDS = ("fa2", "fa3")
RAGGED_CONTENDERS = {f"flashinfer-{backend}": functools.partial(ragged, backend) for backend in BACKENDS}
PAGED_CONTENDERS = {f"flashinfer-{backend}": functools.partial(paged, backend) for backend in BACKENDS}
