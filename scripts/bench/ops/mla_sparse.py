"""Benchmark of `mla_sparse`: decode tokens or prefill tokens that attend to selected latents of a long context."""

from __future__ import annotations

import itertools
from typing import Any

from pallas_attn import mla_sparse
from scripts.bench.cases.mla_sparse import SM_SCALE, MlaSparseCase, inputs, ranges
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import ChainInputs, chain_of
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flash_mla


def ours(implementation: str, case: MlaSparseCase, arrays: ChainInputs, stopwatch: Stopwatch) -> Timing:
    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        return None, mla_sparse(**shared, **own, sm_scale=SM_SCALE, implementation=implementation)

    return stopwatch.chain(call, chain_of(implementation, arrays.owns), shared=arrays.shared)


def over_ranges(implementation: str, case: MlaSparseCase, arrays: ChainInputs, stopwatch: Stopwatch) -> Timing:
    """Time calls with ranges of keys instead of lists of slots."""
    slots = ranges(case)
    owns = [{name: array for name, array in own.items() if name not in slots} for own in arrays.owns]
    return ours(implementation, case, ChainInputs(arrays.shared | slots, owns), stopwatch)


V4_CACHES = (("bf16", 512, 0), ("fp8-v4", 448, 64))
"""Caches of DeepSeek-V4 with the widths of unrotated and rotated columns. 16-bit caches do not separate them."""

FEW_ROWS = (
    MlaSparseCase(9, 60032, 64, "fp8"),
    MlaSparseCase(3, 100032, 128, "fp8", top_k=1024),
    *(MlaSparseCase(rows, 65536, heads, "fp8") for rows, heads in itertools.product((1, 2, 4, 8, 16), (64, 128))),
    *(MlaSparseCase(4, 65536, heads, "fp8") for heads in (40, 96)),
)
"""Decode steps of few sequences over fp8 latents."""

FEW_ROWS_HELD_OUT = (
    MlaSparseCase(5, 45056, 64, "fp8"),
    MlaSparseCase(2, 81984, 128, "fp8", top_k=1024),
    MlaSparseCase(12, 30080, 128, "fp8"),
    MlaSparseCase(16, 120000, 64, "fp8", top_k=1024),
    MlaSparseCase(1, 70016, 128, "fp8"),
    MlaSparseCase(7, 50048, 80, "fp8"),
    MlaSparseCase(3, 40000, 48, "fp8", top_k=1536),
)
"""Cases that check what was tuned on `FEW_ROWS`. Choose no setting by their times."""

BENCH = Bench(
    grids={
        "sparse": [
            MlaSparseCase(batch, 32768, heads, cache)
            for cache, batch, heads in itertools.product(("bf16", "fp8"), (128, 8), (128, 64, 16))
        ],
        "sparse-prefill": [
            MlaSparseCase(1, context, heads, cache, new_tokens=2048)
            for cache, heads, context in itertools.product(("bf16", "fp8"), (128, 64), (8192, 32768, 131072))
        ],
        "few-rows": FEW_ROWS,
        "few-rows-held-out": FEW_ROWS_HELD_OUT,
        # CSA selects 512 or 1,024 entries; HCA attends to all entries of 128 tokens each.
        "v4": [
            MlaSparseCase(batch, entries, heads, cache, chosen, *widths, window=128)
            for (cache, *widths), batch, heads in itertools.product(V4_CACHES, (1, 16, 128), (64, 128))
            for entries, chosen in ((2048, 512), (32768, 1024), (256, 256), (1024, 1024), (8192, 8192))
        ],
        # 2,048 new tokens after 8k or 64k tokens: the entries of CSA, then those of HCA.
        "v4-prefill": [
            MlaSparseCase(1, entries, heads, cache, chosen, *widths, window=128, new_tokens=2048)
            for (cache, *widths), heads in itertools.product(V4_CACHES, (64, 128))
            for entries, chosen in ((2048, 512), (16384, 1024), (64, 64), (512, 512))
        ],
        "small": [
            *(MlaSparseCase(2, 64, 3, cache, 16, 128, 8, 16) for cache in ("f32", "fp8")),
            MlaSparseCase(2, 64, 3, "f32", 64, 128, 0, 16, window=16),
        ],
    },
    contenders=by_name(ours)
    | {f"{name}-ranges": contender for name, contender in by_name(over_ranges).items()}
    | flash_mla.SPARSE_CONTENDERS,
    inputs=inputs,
)
