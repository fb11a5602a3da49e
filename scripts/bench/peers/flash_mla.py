"""FlashMLA as a baseline, over the same pages as our kernels."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax

from pallas_attn import to_records
from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.cases.mla_sparse import SM_SCALE, MlaSparseCase, MlaSparseInputs
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers.torch_decode import as_torch, import_torch

WIDTHS = (512, 64)
"""Widths of latents and of rotated keys that FlashMLA supports."""
PAGE_SIZE = 64
"""Page size in tokens that FlashMLA supports."""


def decode(case: MlaDecodeCase, arrays: MlaDecodeInputs, stopwatch: Stopwatch) -> Timing:
    """Time FlashMLA's dense decode kernel for Hopper, and the kernel that merges its KV splits.

    Not timed are the schedule, which like our plan depends on lengths only and serves all layers of a step, and the
    concatenation of `q_latent` and `q_rope` into one array.
    """
    torch = import_torch()
    flash_mla = importlib.import_module("flash_mla")
    s = case.shape
    if case.cache != "bf16":
        raise NotImplementedError(f"this baseline does not support {case.cache} caches")
    if (s.latent_dim, s.rope_dim) != WIDTHS or s.page_size != PAGE_SIZE:
        raise NotImplementedError(f"this baseline supports only widths of {WIDTHS} in pages of {PAGE_SIZE}")
    lens, pages = as_torch(arrays.kv_lens), as_torch(arrays.cache.pages)[:, :, None]
    # In newer versions this is empty and the first call fills it in. `Stopwatch.graph` makes this call before it
    # captures the graph. Older versions return it complete.
    schedule = flash_mla.get_mla_metadata(lens, s.queries * s.heads, 1)

    def call(q: Any, table: Any) -> Any:
        options = {"softmax_scale": case.sm_scale, "causal": True}
        out, _ = flash_mla.flash_mla_with_kvcache(q, pages, table, lens, s.latent_dim, *schedule, **options)
        return out

    calls = []
    for own in arrays.owns:
        q = torch.cat([as_torch(own["q_latent"]), as_torch(own["q_rope"])], -1)
        calls.append(functools.partial(call, q, as_torch(own["block_tables"])))
    return stopwatch.graph(calls, compared=True)


def sparse(case: MlaSparseCase, arrays: MlaSparseInputs, stopwatch: Stopwatch) -> Timing:
    """Time FlashMLA's sparse kernels for Hopper: decode for fp8 caches, prefill for 16-bit caches.

    Its fp8 cache has one record per token: values, scales and rotated key. Not timed are the conversion of our latents
    to records, the schedule, which depends on sizes only, and the concatenation of `q_latent` and `q_rope`.
    """
    torch = import_torch()
    flash_mla = importlib.import_module("flash_mla")
    if (case.latent_dim, case.rope_dim) != WIDTHS or case.page_size != PAGE_SIZE or case.heads % 64:
        raise NotImplementedError(
            f"this baseline supports only widths of {WIDTHS} in pages of {PAGE_SIZE} and multiples of 64 heads"
        )
    if case.window:
        raise NotImplementedError("this baseline is called without a second cache")
    if case.cache == "fp8" and case.new_tokens > 1:
        raise NotImplementedError("the prefill kernel of this baseline does not support an fp8 cache")
    calls, options = [], {"softmax_scale": SM_SCALE, "is_fp8_kvcache": True}
    if case.cache == "fp8":
        records = as_torch(jax.jit(to_records)(arrays.cache))[:, :, None]
        schedule = flash_mla.get_mla_metadata()[0]  # empty; the first call fills it in
    else:
        latents = as_torch(arrays.cache.pages).flatten(0, 1)[:, None]

    def decode_fp8(q: Any, slots: Any) -> Any:
        q, slots = q[:, None], slots[:, None]
        return flash_mla.flash_mla_with_kvcache(
            q, records, None, None, case.latent_dim, schedule, indices=slots, **options
        )[0]

    def prefill(q: Any, slots: Any) -> Any:
        return flash_mla.flash_mla_sparse_fwd(q, latents, slots[:, None], SM_SCALE)[0]

    for own in arrays.owns:
        q = torch.cat([as_torch(own["q_latent"]), as_torch(own["q_rope"])], -1)
        calls.append(functools.partial(decode_fp8 if case.cache == "fp8" else prefill, q, as_torch(own["slots"])))
    return stopwatch.graph(calls, compared=True)


CONTENDERS = {"flash-mla": decode}
SPARSE_CONTENDERS = {"flash-mla": sparse}
