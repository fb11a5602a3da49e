"""Benchmark of `compat.jax_gpu.paged_attention` against the function of jax that it replaces.

Both receive pages with KV heads first [Hkv, N, ps, D]. Our function has no argument for a plan, so each call includes
the computation of its plan. "jax-K" is jax's function with K KV splits per sequence; compare with the fastest K.
"""

from __future__ import annotations

import itertools
from typing import Any

from pallas_attn.compat.jax_gpu import paged_attention
from scripts.bench.cases.paged_decode import DecodeArrays, DecodeCase
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import chain_of
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import jax_paged
from scripts.bench.peers.jax_paged import in_jax_layout, layer_arguments
from scripts.bench.shapes import Decode


def ours(implementation: str, case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time our function with one implementation, including its plan."""

    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        return None, paged_attention.paged_attention(**in_jax_layout(shared, own), implementation=implementation)

    shared, owns = layer_arguments(arrays)
    return stopwatch.chain(call, chain_of(implementation, owns), shared=shared)


def _cases(batches: tuple[int, ...], contexts: tuple[int, ...]) -> list[DecodeCase]:
    """Return cases with 32 query heads and 8 KV heads of width 128. Cases that can share a page pool follow each other,
    largest pool first.
    """
    sizes = itertools.product(("bf16", "int8-token"), (16, 64), contexts, batches)
    cases = [
        DecodeCase(Decode(batch, context, 32, 8, 128, page_size=page_size), cache)
        for cache, page_size, context, batch in sizes
    ]
    return sorted(cases, key=lambda case: (case.cache, case.shape.page_size, -case.pool_pages))


BENCH = Bench(
    grids={
        "all": _cases((1, 4, 16, 64, 128), (1024, 4096, 16384, 32768, 131072)),
        "quick": _cases((1, 16, 128), (1024, 8192, 32768)),
        "small": [
            DecodeCase(Decode(2, 256, 4, 2, 16, page_size=page_size), cache)
            for page_size, cache in ((16, "f32"), (64, "f32"), (16, "int8-token"))
        ],
    },
    contenders=by_name(ours) | jax_paged.CONTENDERS,
    inputs=DecodeCase.inputs,
)
