"""Benchmark of `paged_decode`: the decode step of one layer over a page pool. Each call reads different pages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import HeadWindow, paged_decode, plan_decode
from scripts.bench import shapes
from scripts.bench.cases.paged_decode import DecodeArrays, DecodeCase
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import CACHES, chain_of
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flash_attention, flashinfer_decode, sglang_triton, torch_decode, vllm_triton
from scripts.bench.shapes import Decode


def ours(
    implementation: str, case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch, *, planned: bool = True
) -> Timing:
    """Time one of our implementations.

    Args:
      planned: whether calls receive a plan. It is made before the calls and not timed, because an engine makes one plan
        per step for all layers. Without it, each call makes its plan. Then each call also has its own array of lengths,
        because XLA computes equal plans of a program once.
    """
    width = case.window if not isinstance(case.window, HeadWindow) else None

    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        options: dict[str, Any] = {"window": width} | shared
        return None, paged_decode(**own, **options, soft_cap=case.shape.soft_cap, implementation=implementation)

    shared: dict[str, Any] = {"kv": arrays.kv}
    if isinstance(case.window, HeadWindow):
        shared["window"] = case.window
    if case.shape.learned_sinks:
        shared["sinks"] = jax.random.normal(jax.random.key(2), (case.shape.q_heads,))
    owns = [{"q": q, "block_tables": table} for q, table in zip(arrays.q, arrays.block_tables, strict=True)]
    if not planned:
        owns = [own | {"kv_lens": jnp.array(arrays.kv_lens)} for own in owns]
        return stopwatch.chain(call, chain_of(implementation, owns), shared=shared)
    shared["kv_lens"] = arrays.kv_lens
    shared["plan"] = jax.jit(
        lambda shared, own: plan_decode(
            **own,
            cache=shared["kv"],
            kv_lens=shared["kv_lens"],
            window=shared.get("window", width),
            soft_cap=case.shape.soft_cap,
            implementation=implementation,
        )
    )(shared, owns[0])
    return stopwatch.chain(call, chain_of(implementation, owns), shared=shared)


# --- grids

GQA_HEADS = ((32, 8, 128), (64, 8, 128), (32, 4, 128), (14, 1, 128), (64, 8, 64))
"""(query heads, KV heads, head dimension)."""


def _gqa() -> list[DecodeCase]:
    sizes = itertools.product(("bf16", "int8-head", "fp8-head"), (64, 16), GQA_HEADS, (1, 2, 4))
    return [
        DecodeCase(Decode(batch, context, *heads, queries=queries, page_size=page_size), cache)
        for cache, page_size, heads, queries in sizes
        for batch, context in itertools.product((1, 16, 64, 256), (512, 2048, 8192, 32768, 131072))
    ]


def _gqa_quick() -> list[DecodeCase]:
    """Return a small selection of sizes for each kind of cache."""
    shapes = [Decode(*size, 32, 8, 128) for size in ((1, 8192), (1, 131072), (16, 2048), (64, 2048), (64, 8192))]
    shapes += [Decode(256, 2048, 32, 8, 128), Decode(64, 8192, 32, 8, 128, queries=4)]
    shapes += [Decode(64, 8192, 32, 8, 128, page_size=16), Decode(64, 8192, 64, 8, 128), Decode(64, 8192, 64, 8, 64)]
    shapes += [Decode(256, 8192, 14, 1, 128)]
    return [DecodeCase(shape, cache) for cache in ("bf16", "int8-head", "fp8-head") for shape in shapes]


def _head_wise() -> list[DecodeCase]:
    return [
        DecodeCase(Decode(64, context, 32, 8, 128, window=window), windowed_heads=heads, sink_tokens=sinks)
        for context in (8192, 32768, 131072)
        for heads, window, sinks in [(0, 1024, 0), *itertools.product((4, 7), (1024, 4096), (0, 128))]
    ]


def _gemma4() -> list[DecodeCase]:
    """Return cases with heads of 256 and of 512 columns, without windows. FlashInfer and torch cannot be compared with
    windows.
    """
    sizes = itertools.product(("bf16", "fp8-head"), (shapes.GEMMA4_LOCAL[0], *shapes.GEMMA4_GLOBAL), (1, 8, 64))
    return [
        DecodeCase(Decode(batch, context, *heads), cache) for cache, heads, batch in sizes for context in (8192, 131072)
    ]


def _layouts() -> list[DecodeCase]:
    sizes = ((1, 8192, 64), (16, 2048, 64), (64, 8192, 64), (64, 8192, 16), (256, 2048, 64))
    return [
        DecodeCase(Decode(batch, context, 32, 8, 128, page_size=page_size), cache, layout=layout)
        for cache in ("bf16", "fp8-head")
        for batch, context, page_size in sizes
        for layout in ("heads first", "tokens first", "fused, tokens first")
    ]


def _few_long(sizes: Iterable[tuple[int, int, int]]) -> list[DecodeCase]:
    """Return cases of few long sequences with pages of 16 tokens and 2 KV heads.

    Args:
      sizes: sequences, tokens of a sequence, query heads.
    """
    return [DecodeCase(Decode(*size, 2, 128, page_size=16)) for size in sizes]


def _ordered(grid: Iterable[DecodeCase]) -> list[DecodeCase]:
    """Sort cases so that cases that can share a page pool follow each other."""
    return sorted(grid, key=lambda case: (case.cache, *case.pool_sizes.values(), -case.pool_pages))


GRIDS = {
    "gqa": _gqa(),
    "gqa-quick": _gqa_quick(),
    "head-wise": _head_wise(),
    "gemma4": _gemma4(),
    "layouts": _layouts(),
    "caches": [DecodeCase(Decode(64, 8192, 32, 8, 128), cache) for cache in CACHES if cache != "f32"],
    "varied": [
        DecodeCase(Decode(batch, 32768, 32, 8, 128, page_size=page_size), varied=True)
        for page_size, batch in itertools.product((64, 16), (4, 16, 64))
    ],
    "few-long": _few_long([(1, 40000, 16), (1, 131072, 16), (2, 32768, 16), (4, 16384, 16), (1, 40000, 8)]),
    # Cases that check what was tuned on "few-long". Choose no setting by their times.
    "few-long-held-out": _few_long([(1, 57000, 16), (3, 26000, 16), (2, 93000, 16), (5, 11000, 16), (1, 23000, 8)]),
    "triton-peers": [
        DecodeCase(Decode(64, 8192, 32, 8, 128, page_size=16)),
        DecodeCase(Decode(256, 8192, 14, 1, 128)),
    ],
    "models": [DecodeCase(shape) for shape in shapes.DECODE.values()],
    "small": [
        *(DecodeCase(Decode(2, 64, 4, 2, 16, page_size=16), cache) for cache in ("f32", "int8-head", "fp8-token")),
        *(
            DecodeCase(Decode(2, 64, 4, 2, 16, page_size=16), "int8-head", layout=layout)
            for layout in ("tokens first", "fused, tokens first")
        ),
    ],
}
GRIDS = {name: _ordered(grid) for name, grid in GRIDS.items()}

BENCH = Bench(
    grids=GRIDS,
    contenders=by_name(ours)
    | {f"{name}-unplanned": functools.partial(ours, name, planned=False) for name in ("mosaic", "triton")}
    | flashinfer_decode.CONTENDERS
    | flash_attention.DECODE_CONTENDERS
    | torch_decode.CONTENDERS
    | vllm_triton.DECODE_CONTENDERS
    | sglang_triton.DECODE_CONTENDERS,
    inputs=DecodeCase.inputs,
)
