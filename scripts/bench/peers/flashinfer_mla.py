"""FlashInfer's latent attention as a baseline, over the same pages as our kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flashinfer_build
from scripts.bench.peers.flashinfer_decode import WORKSPACE_BYTES, page_lists
from scripts.bench.peers.torch_decode import as_torch, import_torch

CACHES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""Torch dtype by kind of cache that this baseline supports."""


def decode(backend: str, case: MlaDecodeCase, arrays: MlaDecodeInputs, stopwatch: Stopwatch) -> Timing:
    """Time one of FlashInfer's backends ("fa2" or "fa3"). Planning, which FlashInfer does on the host once per step, is
    not timed.

    With fp8 latents (FlashInfer 0.7 or newer), FlashInfer reads the same fp8 values and scales as our kernel, but its
    rotated keys are also fp8. It reads 592 bytes per token and our kernel 656.
    """
    torch = import_torch()
    flashinfer = importlib.import_module("flashinfer")
    s = case.shape
    if case.cache not in CACHES:
        raise NotImplementedError(f"this baseline does not support {case.cache} caches")
    flashinfer_build.require("mla", backend, s.latent_dim, s.rope_dim, CACHES[case.cache])
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    cache, pages = arrays.cache, as_torch(arrays.cache.pages)
    parts, scales = (pages[..., : s.latent_dim], pages[..., s.latent_dim :]), {}
    if cache.rope is not None and cache.scale is not None:
        parts = pages, as_torch(jax.jit(lambda rope: rope.astype(jnp.float8_e4m3fn))(cache.rope))
        scales = {"ckv_scale_arr": as_torch(cache.scale), "kpe_scale": 1.0}
    calls = []
    for own in arrays.owns:
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        run = planned(wrapper, torch, case, np.asarray(own["block_tables"]))
        q_latent, q_rope = (as_torch(own[name]).flatten(0, 1) for name in ("q_latent", "q_rope"))
        calls.append(functools.partial(run, q_latent, q_rope, *parts, **scales))
    return stopwatch.graph(calls, compared=True)


def planned(wrapper: Any, torch: Any, case: MlaDecodeCase, table: np.ndarray) -> Callable[..., Any]:
    """Plan a call for one block table. Return FlashInfer's function of queries and pages."""
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
        getattr(torch, CACHES[case.cache]),
    )
    return wrapper.run


CONTENDERS = {f"flashinfer-{backend}": functools.partial(decode, backend) for backend in ("fa2", "fa3")}
