"""FlashMLA as a contender, over the same pages as ours."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers.torch_decode import as_torch, import_torch

WIDTHS = (512, 64)
"""Widths of latents and of rotated keys that its kernel is written for."""
PAGE_SIZE = 64
"""Tokens per page that its kernel is written for."""


def decode(case: MlaDecodeCase, arrays: MlaDecodeInputs, stopwatch: Stopwatch) -> Timing:
    """Times its dense kernel for Hopper.

    Not timed are its schedule, which depends on lengths alone and serves all layers of a step, like ours, and joining
    the two parts of queries, which it takes as one array. Its second kernel, which merges the parts of split sequences,
    is timed.
    """
    torch = import_torch()
    flash_mla = importlib.import_module("flash_mla")
    s = case.shape
    if case.cache != "bf16":
        raise NotImplementedError(f"takes no {case.cache} cache here")
    if (s.latent_dim, s.rope_dim) != WIDTHS or s.page_size != PAGE_SIZE:
        raise NotImplementedError(f"takes widths of {WIDTHS} in pages of {PAGE_SIZE} only")
    lens, pages = as_torch(arrays.kv_lens), as_torch(arrays.cache.pages)[:, :, None]
    # Newer versions fill it in on the first call, which no graph holds; older ones return it filled.
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


CONTENDERS = {"flash-mla": decode}
