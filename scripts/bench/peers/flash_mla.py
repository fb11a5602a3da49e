"""FlashMLA as a baseline, over the same pages as our kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import PagedLatent, to_records
from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.cases.mla_sparse import SM_SCALE, MlaSparseCase
from scripts.bench.harness.pools import ChainInputs
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers.torch_decode import as_torch, import_torch

WIDTHS = (512, 64)
"""Widths of latents and of rotated keys that FlashMLA supports."""
PAGE_SIZE = 64
"""Page size in tokens that FlashMLA supports."""
SLOTS_PER_TILE = 128
"""The number of slots per token must be a multiple of this in FlashMLA's sparse prefill kernel."""
V4_BYTES = 584
"""Bytes of a token in DeepSeek-V4's fp8 cache."""


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


def sparse(case: MlaSparseCase, arrays: ChainInputs, stopwatch: Stopwatch) -> Timing:
    """Time FlashMLA's sparse kernels for Hopper: decode for fp8 caches, prefill for 16-bit caches.

    Not timed are the conversion of our latents to records, the schedule, which depends on sizes only, and the
    concatenation of `q_latent` and `q_rope`. The prefill kernel reads one cache, so in cases with a window both caches
    are concatenated before the measurement.
    """
    if (case.latent_dim + case.rope_dim, case.value_dim) not in ((576, 512), (512, 512)) or case.page_size != PAGE_SIZE:
        raise NotImplementedError(
            f"this baseline supports only widths of {WIDTHS}, or 512 columns with a window, in pages of {PAGE_SIZE}"
        )
    if case.heads % 64:
        raise NotImplementedError("this baseline supports only multiples of 64 heads")
    if case.cache not in ("bf16", "fp8", "fp8-v4"):
        raise NotImplementedError(f"this baseline does not support {case.cache} caches")
    if case.cache == "bf16":
        return stopwatch.graph(_sparse_prefill(case, arrays), compared=True)
    if case.new_tokens > 1:
        raise NotImplementedError("the prefill kernel of this baseline does not support an fp8 cache")
    return stopwatch.graph(_sparse_decode(case, arrays), compared=True)


def _sparse_decode(case: MlaSparseCase, arrays: ChainInputs) -> list[Callable[[], Any]]:
    """Return the calls of the decode kernel. A record has the fp8 values, scales and 16-bit columns of a token."""
    torch, flash_mla = import_torch(), importlib.import_module("flash_mla")
    shared = arrays.shared
    schedule = flash_mla.get_mla_metadata()[0]  # empty; the first call fills it in
    options = {"softmax_scale": SM_SCALE, "is_fp8_kvcache": True}
    if case.window:
        options |= {"attn_sink": as_torch(shared["sinks"]), "extra_k_cache": _records(shared["extra_cache"])}
    records = _records(shared["cache"])

    def call(q: Any, slots: Any, extra: dict[str, Any]) -> Any:
        return flash_mla.flash_mla_with_kvcache(
            q, records, None, None, 512, schedule, indices=slots, **options, **extra
        )[0]

    calls = []
    for own in arrays.owns:
        extra = {"extra_indices_in_kvcache": as_torch(own["extra_slots"])[:, None]} if case.window else {}
        calls.append(functools.partial(call, _queries(torch, own)[:, None], as_torch(own["slots"])[:, None], extra))
    return calls


def _sparse_prefill(case: MlaSparseCase, arrays: ChainInputs) -> list[Callable[[], Any]]:
    """Return the calls of the prefill kernel."""
    torch, flash_mla = import_torch(), importlib.import_module("flash_mla")
    shared, options = arrays.shared, {}
    width = case.latent_dim + case.rope_dim
    latents = shared["cache"].pages.reshape(-1, 1, width)
    first = latents.shape[0]  # slot of the first entry in the concatenated caches
    if case.window:
        latents = jnp.concatenate([latents, shared["extra_cache"].pages.reshape(-1, 1, width)])
        options["attn_sink"] = as_torch(shared["sinks"])
    kv = as_torch(latents)

    def call(q: Any, slots: Any) -> Any:
        return flash_mla.flash_mla_sparse_fwd(q, kv, slots, SM_SCALE, **options)[0]

    calls = []
    for own in arrays.owns:
        slots = own["slots"]
        if case.window:
            slots = jnp.concatenate([slots, own["extra_slots"] + first], axis=1)
            slots = jnp.pad(slots, ((0, 0), (0, -slots.shape[1] % SLOTS_PER_TILE)), constant_values=-1)
        calls.append(functools.partial(call, _queries(torch, own), as_torch(slots[:, None])))
    return calls


def _queries(torch: Any, own: dict[str, Any]) -> Any:
    """Return the queries of a call as one tensor."""
    q = as_torch(own["q_latent"])
    return q if own["q_rope"] is None else torch.cat([q, as_torch(own["q_rope"])], -1)


def _records(cache: PagedLatent) -> Any:
    """Return the records of an fp8 cache, [pages, page_size, 1, bytes]. Pages of DeepSeek-V4 end with unused bytes."""
    records = as_torch(jax.jit(to_records)(cache))
    if records.ndim == 3:
        return records[:, :, None]
    page_size = cache.pages.shape[1]
    return records[:, : page_size * V4_BYTES].reshape(-1, page_size, 1, V4_BYTES)


CONTENDERS = {"flash-mla": decode}
SPARSE_CONTENDERS = {"flash-mla": sparse}
