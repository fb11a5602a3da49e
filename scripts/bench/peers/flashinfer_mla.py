"""FlashInfer's latent attention as a contender, over the same pages as ours."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flashinfer_build
from scripts.bench.peers.flashinfer_decode import WORKSPACE_BYTES, page_lists
from scripts.bench.peers.torch_decode import as_torch, import_torch


def decode(backend: str, case: MlaDecodeCase, arrays: MlaDecodeInputs, stopwatch: Stopwatch) -> Timing:
    """Times one of its backends, planned on the host before, as FlashInfer requires."""
    torch = import_torch()
    flashinfer = importlib.import_module("flashinfer")
    s = case.shape
    if case.cache != "bf16":
        raise NotImplementedError(f"takes no {case.cache} cache here")
    flashinfer_build.require("mla", backend, s.latent_dim, s.rope_dim)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    pages = as_torch(arrays.cache.pages)
    calls = []
    for own in arrays.owns:
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        run = planned(wrapper, torch, case, np.asarray(own["block_tables"]))
        q_latent, q_rope = (as_torch(own[name]).flatten(0, 1) for name in ("q_latent", "q_rope"))
        calls.append(functools.partial(run, q_latent, q_rope, pages[..., : s.latent_dim], pages[..., s.latent_dim :]))
    return stopwatch.graph(calls, compared=True)


def planned(wrapper: Any, torch: Any, case: MlaDecodeCase, table: np.ndarray) -> Callable[..., Any]:
    """Returns its function of queries and pages, planned for one table."""
    s = case.shape
    offsets, indices = page_lists(torch, case.lens, table, s.page_size)
    wrapper.plan(
        torch.arange(s.batch + 1, dtype=torch.int32) * s.queries,
        offsets,
        indices,
        torch.from_numpy(case.lens),
        s.heads,
        s.latent_dim,
        s.rope_dim,
        s.page_size,
        s.queries > 1,
        case.sm_scale,
        torch.bfloat16,
        torch.bfloat16,
    )
    return wrapper.run


CONTENDERS = {f"flashinfer-{backend}": functools.partial(decode, backend) for backend in ("fa2", "fa3")}
