"""Benchmark of `paged_prefill`: prompt chunks whose keys and values are in pages, after a cached prefix."""

from __future__ import annotations

import itertools
from typing import Any

import jax

from pallas_attn import paged_prefill
from scripts.bench import shapes
from scripts.bench.cases.prefill import LENGTHS, MIXED, PagedPrefillCase
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flash_attention, flashinfer_chunk, sglang_triton, vllm_triton
from scripts.bench.shapes import Prefill


def ours(implementation: str, case: PagedPrefillCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    case.check_portable(implementation, case.flops)

    def call(_: None, shared: dict[str, Any], q: Any) -> tuple[None, Any]:
        options: dict[str, Any] = {"window": case.shape.window, "soft_cap": case.shape.soft_cap}
        return None, paged_prefill(q, **shared, **options, implementation=implementation)

    shared = {name: array for name, array in arrays.items() if name != "q"}
    if case.shape.learned_sinks:
        shared["sinks"] = jax.random.normal(jax.random.key(2), (case.shape.q_heads,))
    return stopwatch.chain(call, arrays["q"], shared=shared)


def _tune() -> list[PagedPrefillCase]:
    """Return 8,192 new tokens in 1 and in 16 sequences, for each head dimension and kind of cache. Neighbours that can
    share a page pool follow each other.
    """
    kinds = itertools.product((64, 128, 256), ("bf16", "int8-head", "fp8-token"), (1, 16))
    return [PagedPrefillCase(Prefill(n, 8192 // n, 0, 32, 8, width), cache) for width, cache, n in kinds]


HEADS = ((16, 16), (28, 4), (40, 8), (64, 8), (128, 8))
"""(query heads, KV heads) of head dimension 128."""


def _of_mixed_lengths(heads: tuple[int, int], page_size: int, cache: str = "bf16") -> PagedPrefillCase:
    sizes, lengths = MIXED
    return PagedPrefillCase(Prefill(*sizes, *heads, 128, page_size), cache, lengths)


def _wide() -> list[PagedPrefillCase]:
    """Return cases with batches, chunks, prefixes and heads that the other grids lack. A call takes less than 10 ms on
    an H200.
    """
    lengths = ((1, 16, 65536), (1, 1000, 65536), (1, 9000, 0), (5, 200, 9000), (16, 100, 1000), (64, 16, 2000))
    cases = [
        PagedPrefillCase(Prefill(*sizes, *heads, 128, page_size))
        for page_size, sizes, heads in itertools.product((16, 64), lengths, HEADS)
    ]
    cases += [_of_mixed_lengths(heads, page_size) for page_size, heads in itertools.product((16, 64), HEADS)]
    cases += [PagedPrefillCase(Prefill(3, 3000, 0, 28, 4, 128, page, window=1000)) for page in (16, 64)]
    cases += [
        PagedPrefillCase(Prefill(*sizes, 40, 8, 128, 16), cache)
        for cache, sizes in itertools.product(("int8-head", "fp8-head"), ((5, 200, 9000), (64, 16, 2000)))
    ]
    return [*cases, *(_of_mixed_lengths((28, 4), 64, cache) for cache in ("int8-head", "fp8-head"))]


WIDE_QUICK = [
    PagedPrefillCase(Prefill(5, 200, 9000, 40, 8, 128, 16)),
    PagedPrefillCase(Prefill(5, 200, 9000, 40, 8, 128, 64)),
    PagedPrefillCase(Prefill(64, 16, 2000, 28, 4, 128, 16)),
    PagedPrefillCase(Prefill(1, 1000, 65536, 28, 4, 128, 16)),
    _of_mixed_lengths((28, 4), 16),
    PagedPrefillCase(Prefill(3, 3000, 0, 28, 4, 128, 64, window=1000)),
    PagedPrefillCase(Prefill(5, 200, 9000, 40, 8, 128, 16), "int8-head"),
]
"""A small selection of the cases of the grid "wide"."""


def _peers() -> list[PagedPrefillCase]:
    """Return cases for the comparison with baselines: each batch, chunk, prefix, page size and head count of the grid
    "wide" at least once.
    """
    shapes_of = (
        ((1, 16, 65536), (16, 16), 16),
        ((1, 16, 65536), (28, 4), 64),
        ((1, 1000, 65536), (40, 8), 64),
        ((1, 9000, 0), (64, 8), 16),
        ((5, 200, 9000), (128, 8), 64),
        ((16, 100, 1000), (64, 8), 16),
        ((16, 100, 1000), (16, 16), 64),
        ((64, 16, 2000), (128, 8), 16),
        ((64, 16, 2000), (16, 16), 64),
    )
    cases = [PagedPrefillCase(Prefill(*sizes, *heads, 128, page_size)) for sizes, heads, page_size in shapes_of]
    cases += [_of_mixed_lengths(heads, page) for heads, page in (((16, 16), 64), ((40, 8), 16), ((128, 8), 16))]
    cases += [PagedPrefillCase(Prefill(3, 3000, 0, 28, 4, 128, 16, window=1000))]
    eights = [PagedPrefillCase(Prefill(64, 16, 2000, 40, 8, 128, 16), cache) for cache in ("int8-head", "fp8-head")]
    eights += [_of_mixed_lengths((28, 4), 64, cache) for cache in ("int8-head", "fp8-head")]
    return [*WIDE_QUICK, *cases, *eights]


def _gemma4() -> list[PagedPrefillCase]:
    """Return a chunk of 8,192 tokens without a prefix for heads of 256 columns with a window, and of 512 columns."""
    local = [PagedPrefillCase(Prefill(1, 8192, 0, *heads, window=1024)) for heads in shapes.GEMMA4_LOCAL]
    wide = itertools.product(("bf16", "fp8-head"), shapes.GEMMA4_GLOBAL)
    return [*local, *(PagedPrefillCase(Prefill(1, 8192, 0, *heads), cache) for cache, heads in wide)]


def _layouts() -> list[PagedPrefillCase]:
    sizes = ((1, 8192, 0), (1, 2048, 8192), (16, 100, 1000))
    return [
        PagedPrefillCase(Prefill(*size, 32, 8, 128), cache, layout=layout)
        for cache, size in itertools.product(("bf16", "fp8-head"), sizes)
        for layout in ("heads first", "tokens first", "fused, tokens first")
    ]


BENCH = Bench(
    grids={
        "layouts": _layouts(),
        "prefill": [PagedPrefillCase(Prefill(1, *size, 32, 8, 128)) for size in LENGTHS],
        "prefill-quick": [
            PagedPrefillCase(Prefill(1, *size, 32, 8, 128), cache)
            for cache in ("bf16", "int8-head", "fp8-head")
            for size in ((8192, 0), (2048, 8192))
        ],
        "triton-peers": [PagedPrefillCase(Prefill(1, *size, 32, 8, 128)) for size in ((8192, 0), (2048, 8192))],
        "gemma4": _gemma4(),
        "windows": [PagedPrefillCase(Prefill(1, 8192, 8192, 32, 8, 128, window=window)) for window in (1024, 4096)],
        "wide": _wide(),
        "wide-quick": WIDE_QUICK,
        "wide-peers": _peers(),
        "models": [PagedPrefillCase(shape) for shape in shapes.PREFILL.values()],
        "tune": _tune(),
        "small": [
            *(PagedPrefillCase(Prefill(2, 8, 24, 4, 2, 16, 16), cache) for cache in ("f32", "int8-head")),
            PagedPrefillCase(Prefill(2, 8, 24, 4, 2, 16, 16), "f32", layout="fused, tokens first"),
        ],
    },
    contenders=by_name(ours)
    | flashinfer_chunk.PAGED_CONTENDERS
    | flash_attention.PAGED_CONTENDERS
    | vllm_triton.PREFILL_CONTENDERS
    | sglang_triton.PREFILL_CONTENDERS,
    inputs=PagedPrefillCase.inputs,
)
