"""Benchmark of `mla_decode`: the decode step of one MLA layer over a page pool. Each call reads different pages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import mla_decode, plan_decode
from scripts.bench import shapes
from scripts.bench.cases.mla_decode import MlaDecodeCase, MlaDecodeInputs
from scripts.bench.harness.case import Bench, by_name
from scripts.bench.harness.pools import chain_of
from scripts.bench.harness.timing import Stopwatch, Timing
from scripts.bench.peers import flash_attention, flash_mla, flashinfer_mla, sglang_triton, vllm_triton
from scripts.bench.shapes import MlaDecode


def ours(
    implementation: str, case: MlaDecodeCase, arrays: MlaDecodeInputs, stopwatch: Stopwatch, *, planned: bool = True
) -> Timing:
    """Time one of our implementations.

    Args:
      planned: whether calls receive a plan. It is made before the calls and not timed, because an engine makes one plan
        per step for all layers. Without it, each call makes its plan. Then each call also has its own array of lengths,
        because XLA computes equal plans of a program once.
    """

    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        return None, mla_decode(**own, **shared, sm_scale=case.sm_scale, implementation=implementation)

    shared: dict[str, Any] = {"cache": arrays.cache}
    if not planned:
        owns = [own | {"kv_lens": jnp.array(arrays.kv_lens)} for own in arrays.owns]
        return stopwatch.chain(call, chain_of(implementation, owns), shared=shared)
    shared["kv_lens"] = arrays.kv_lens
    shared["plan"] = jax.jit(
        lambda shared, own: plan_decode(
            (own["q_latent"], own["q_rope"]),
            shared["cache"],
            own["block_tables"],
            shared["kv_lens"],
            implementation=implementation,
        )
    )(shared, arrays.owns[0])
    return stopwatch.chain(call, chain_of(implementation, arrays.owns), shared=shared)


def _grid(varied: bool) -> list[MlaDecodeCase]:
    sizes = itertools.product((16, 64, 128), (1, 2), (1024, 2048, 4096, 8192, 16384, 32768))
    return [MlaDecodeCase(MlaDecode(128, context, heads, queries), varied=varied) for heads, queries, context in sizes]


def _small_batches() -> list[MlaDecodeCase]:
    sizes = itertools.product((16, 128), (1, 2, 32), (1024, 8192, 32768))
    return [MlaDecodeCase(MlaDecode(batch, context, heads)) for heads, batch, context in sizes]


def _widths(batch: int, context: int, heads: Iterable[int]) -> list[MlaDecodeCase]:
    """Return a case for each pair of latent and rotated width that the Hopper kernels support."""
    widths = ((512, 64), (448, 64), (256, 64), (256, 32), (128, 32))
    sizes = itertools.product(widths, heads)
    return [
        MlaDecodeCase(MlaDecode(batch, context, n, latent_dim=latent, rope_dim=rope)) for (latent, rope), n in sizes
    ]


def _quick() -> list[MlaDecodeCase]:
    """Return a small selection of sizes. Neighbours that can share a page pool follow each other."""
    sizes = [(128, 8192, 128), (128, 8192, 16), (128, 8192, 64), (128, 8192, 128, 2), (128, 8192, 16, 2)]
    sizes += [(128, 2048, 128), (128, 2048, 16), (32, 8192, 128), (32, 8192, 16), (1, 32768, 128), (1, 32768, 16)]
    sizes += [(1, 8192, 128), (1, 8192, 16), (2, 1024, 16)]
    return [MlaDecodeCase(MlaDecode(*size)) for size in sizes] + [MlaDecodeCase(MlaDecode(128, 8192, 128), varied=True)]


FP8 = (
    *(MlaDecode(128, context, 16) for context in (1024, 2048, 8192)),
    *(MlaDecode(128, 8192, heads) for heads in (8, 24)),
    MlaDecode(128, 8192, 16, 2),
    *(MlaDecode(batch, 32768, 16) for batch in (1, 8)),
)
"""Shapes with 8 to 24 heads, for the comparison of 16-bit and fp8 latents."""

FP8_ROWS = (
    *(MlaDecode(128, context, 128) for context in (2048, 8192)),
    *(MlaDecode(128, context, 64) for context in (2048, 8192)),
    MlaDecode(8, 32768, 128),
)
"""Shapes with 64 and 128 heads, for the comparison of 16-bit and fp8 latents."""

UNEVEN = (
    MlaDecodeCase(MlaDecode(23, 3000, 128)),
    MlaDecodeCase(MlaDecode(96, 5000, 64), varied=True),
    MlaDecodeCase(MlaDecode(128, 2048, 16, 2), varied=True),
    MlaDecodeCase(MlaDecode(128, 4096, 16, 2), varied=True),
)
"""Cases whose pages cannot be divided evenly among the CTAs."""

BETWEEN_TILES = (
    MlaDecodeCase(MlaDecode(18, 6500, 40)),
    MlaDecodeCase(MlaDecode(33, 1300, 48, 2), lognormal=True),
    *(MlaDecodeCase(MlaDecode(32, 4096, heads)) for heads in (24, 28, 40, 48, 56, 80, 96)),
    *(MlaDecodeCase(MlaDecode(32, 4096, heads), "fp8") for heads in (28, 40, 48, 56, 80, 96)),
    *(MlaDecodeCase(MlaDecode(1, 16384, heads)) for heads in (40, 96)),
)
"""Query heads whose number is no multiple of 64, the rows of a tile of Hopper's kernels."""

BETWEEN_TILES_HELD_OUT = (
    MlaDecodeCase(MlaDecode(11, 9200, 40), lognormal=True),
    MlaDecodeCase(MlaDecode(27, 3100, 48)),
    MlaDecodeCase(MlaDecode(6, 17000, 56), lognormal=True),
    MlaDecodeCase(MlaDecode(52, 1900, 80)),
    MlaDecodeCase(MlaDecode(14, 5200, 96), lognormal=True),
    MlaDecodeCase(MlaDecode(21, 2300, 48, 2)),
    MlaDecodeCase(MlaDecode(9, 7700, 24, 2), lognormal=True),
    MlaDecodeCase(MlaDecode(40, 2700, 28)),
    MlaDecodeCase(MlaDecode(11, 9200, 40), "fp8", lognormal=True),
    MlaDecodeCase(MlaDecode(37, 2900, 56), "fp8"),
    MlaDecodeCase(MlaDecode(13, 6100, 96), "fp8", lognormal=True),
)
"""Cases that check what was tuned on `BETWEEN_TILES`. Choose no setting by their times."""

ONE_CACHE = tuple(
    MlaDecodeCase(MlaDecode(4 * batch, context, 8, rope_dim=rope_dim))
    for rope_dim, context, batch in itertools.product((128, 64), (8192, 131072), (64, 8, 1))
    if batch * context < 2**21
)
"""Global layers of Gemma 4 with one cache for keys and values, as an alternative to the two arrays of grid "gemma4" of
`paged_decode`. A value has the columns of its key without the rotation and without the norm's weight, so a cache needs
a value and the 128 rotated columns of the key. Each of 4 KV heads is a sequence with 8 query heads. The Mosaic kernels
support only 64 rotated columns, so the cases with 64 are a lower bound of their time.
"""

DENSE_V3 = tuple(
    MlaDecodeCase(MlaDecode(batch, context, heads), cache)
    for cache, batch, heads, context in itertools.product(
        ("bf16", "fp8"), (1, 16, 128), (64, 128), (8192, 32768, 131072, 1048576)
    )
    if batch * context <= 2**24
)
"""A dense layer of DeepSeek-V3, for the comparison with the layers of DeepSeek-V4 (grid "v4" of `mla_sparse`) at equal
numbers of tokens."""

BENCH = Bench(
    grids={
        "mla": _grid(varied=False),
        "mla-varied": _grid(varied=True),
        "mla-batches": _small_batches(),
        "mla-quick": _quick(),
        "mla-widths": _widths(64, 8192, (16, 128)),
        "triton-peers": [MlaDecodeCase(MlaDecode(128, 8192, heads)) for heads in (128, 16)],
        "fp8": [MlaDecodeCase(shape, cache) for shape in FP8 for cache in ("bf16", "fp8")],
        "fp8-rows": [MlaDecodeCase(shape, cache) for shape in FP8_ROWS for cache in ("fp8", "bf16")],
        "mla-uneven": UNEVEN,
        "between-tiles": BETWEEN_TILES,
        "between-tiles-held-out": BETWEEN_TILES_HELD_OUT,
        "one-cache": ONE_CACHE,
        "dense-v3": list(DENSE_V3),
        "models": [MlaDecodeCase(shape) for shape in shapes.MLA_DECODE.values()],
        "small": [MlaDecodeCase(MlaDecode(2, 64, 3, 2, 32, 8, 16), cache) for cache in ("f32", "bf16")],
    },
    contenders=by_name(ours)
    | {f"{name}-unplanned": functools.partial(ours, name, planned=False) for name in ("mosaic", "triton")}
    | flashinfer_mla.CONTENDERS
    | flash_mla.CONTENDERS
    | flash_attention.MLA_CONTENDERS
    | vllm_triton.MLA_CONTENDERS
    | sglang_triton.MLA_CONTENDERS,
    inputs=MlaDecodeCase.inputs,
)
