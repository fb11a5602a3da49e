"""Benchmark of `ragged_attention`: prompt chunks whose keys and values are contiguous arrays, without pages."""

from __future__ import annotations

from typing import Any

from pallas_attn import ragged_attention
from scripts.bench.cases.prefill import LENGTHS, MIXED, RaggedAttentionCase, RaggedPrefill
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flash_attention, flashinfer_chunk, torch_chunk
from scripts.bench.shapes import GEMMA4_GLOBAL, GEMMA4_LOCAL

HEADS = ((128, 128, 192, 128), (16, 16, 192, 128), (32, 8, 128, 128))
"""(query heads, KV heads, key dimension, value dimension)."""


def ours(implementation: str, case: RaggedAttentionCase, arrays: dict[str, Any], stopwatch: Stopwatch) -> Timing:
    case.check_portable(implementation, case.flops)

    def call(_: None, shared: dict[str, Any], q: Any) -> tuple[None, Any]:
        return None, ragged_attention(q, **shared, implementation=implementation)

    shared = {name: array for name, array in arrays.items() if name != "q"}
    return stopwatch.chain(call, arrays["q"], shared=shared)


def _quick() -> list[RaggedAttentionCase]:
    """Return a small selection of sizes."""
    sizes = [(8192, 0, heads) for heads in HEADS] + [(2048, 8192, heads) for heads in HEADS]
    sizes += [(512, 32768, HEADS[1]), (512, 0, HEADS[1])]
    return [RaggedAttentionCase(RaggedPrefill(1, new, cached, *heads)) for new, cached, heads in sizes]


GROUPED = ((28, 4, 128, 128), (40, 8, 128, 128), (64, 8, 128, 128), (128, 8, 128, 128))
"""More (query heads, KV heads, key dimension, value dimension), with 5 to 16 query heads per KV head."""


def _of_mixed_lengths(heads: tuple[int, int, int, int]) -> RaggedAttentionCase:
    sizes, lengths = MIXED
    return RaggedAttentionCase(RaggedPrefill(*sizes, *heads), lengths=lengths)


def _wide() -> list[RaggedAttentionCase]:
    """Return cases with batches, chunks, prefixes and heads that the other grids lack. A call takes less than 10 ms on
    an H200.
    """
    lengths = (
        (1, 1000, 65536),
        (1, 9000, 0),
        (5, 200, 9000),
        (11, 700, 0),
        (16, 100, 1000),
        (64, 128, 0),
        (64, 57, 1024),
    )
    heads = (HEADS[1], *GROUPED)
    cases = [RaggedAttentionCase(RaggedPrefill(*sizes, *each)) for sizes in lengths for each in heads]
    return [*cases, *(_of_mixed_lengths(each) for each in heads)]


WIDE_QUICK = [
    RaggedAttentionCase(RaggedPrefill(11, 700, 0, *HEADS[1])),
    RaggedAttentionCase(RaggedPrefill(64, 128, 0, *HEADS[1])),
    _of_mixed_lengths(GROUPED[0]),
    RaggedAttentionCase(RaggedPrefill(5, 200, 9000, *GROUPED[1])),
    RaggedAttentionCase(RaggedPrefill(64, 57, 1024, *GROUPED[0])),
]
"""A small selection of the cases of the grid "wide"."""


def _peers() -> list[RaggedAttentionCase]:
    """Return cases for the comparison with baselines: each batch, chunk, prefix and head count of the grid "wide" at
    least once.
    """
    shapes = (
        ((1, 1000, 65536), HEADS[1]),
        ((1, 1000, 65536), GROUPED[3]),
        ((1, 9000, 0), GROUPED[2]),
        ((5, 200, 9000), HEADS[1]),
        ((11, 700, 0), GROUPED[1]),
        ((16, 100, 1000), GROUPED[2]),
        ((16, 100, 1000), HEADS[1]),
        ((64, 128, 0), GROUPED[0]),
        ((64, 57, 1024), GROUPED[3]),
        ((64, 57, 1024), HEADS[1]),
    )
    cases = [RaggedAttentionCase(RaggedPrefill(*sizes, *heads)) for sizes, heads in shapes]
    return [*WIDE_QUICK, *cases, _of_mixed_lengths(HEADS[1]), _of_mixed_lengths(GROUPED[3])]


BENCH = Bench(
    grids={
        "prefill": [RaggedAttentionCase(RaggedPrefill(1, *size, *heads)) for heads in HEADS for size in LENGTHS],
        "prefill-quick": _quick(),
        "widths": [RaggedAttentionCase(RaggedPrefill(1, 8192, 0, 32, 8, width, width)) for width in (64, 128, 256)],
        "gemma4": [
            RaggedAttentionCase(RaggedPrefill(1, 8192, 0, q_heads, kv_heads, width, width))
            for q_heads, kv_heads, width in (*GEMMA4_LOCAL, *GEMMA4_GLOBAL)
        ],
        "batches": [
            RaggedAttentionCase(RaggedPrefill(sequences, 8192 // sequences, 0, *HEADS[1]))
            for sequences in (1, 4, 16, 64)
        ],
        "wide": _wide(),
        "wide-quick": WIDE_QUICK,
        "wide-peers": _peers(),
        "small": [RaggedAttentionCase(RaggedPrefill(2, 8, 8, 4, 2, 24, 16), cache) for cache in ("f32", "bf16")],
    },
    contenders=by_name(ours)
    | torch_chunk.CONTENDERS
    | flashinfer_chunk.RAGGED_CONTENDERS
    | flash_attention.RAGGED_CONTENDERS,
    inputs=RaggedAttentionCase.inputs,
)
