"""Compile-gate cases of the prefill kernels of `ragged_attention` and `paged_prefill`, for Hopper and Blackwell."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import export

import pallas_attn
from pallas_attn import HeadWindow, PagedKV, kv_cache_spec
from pallas_attn.mosaic.hopper.prefill import QUERIES
from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.mosaic.prefill.split import PARTIALS_PER_CTA
from pallas_attn.ops.paged_prefill import config as paged_config
from pallas_attn.ops.ragged_attention import config as ragged_config
from pallas_attn.ops.ragged_attention.config import RaggedAttentionKey
from pallas_attn.runtime import tuning
from tests.aot.case import Case, DeferredCase, Tile, allocated, deferred, in_layout, on_b200, shape

TOKENS, KEYS, SEQUENCES = 8192, 16384, 8
SIZES = {
    (192, 128): [FlashConfig(64, 4, 2), FlashConfig(64, 2, 3)],
    (128, 128): [FlashConfig(64, 4, 2), FlashConfig(64, 4, 3)],
    (64, 64): [FlashConfig(128, 2, 2), FlashConfig(128, 4, 2), FlashConfig(128, 4, 3), FlashConfig(64, 2, 1)],
    (256, 256): [FlashConfig(64, 2, 1)],
}
"""Kernel sizes that a tuning may choose, in addition to the heuristic sizes, by (key dimension, value dimension)."""

paged_prefill = functools.partial(pallas_attn.paged_prefill, return_lse=True, implementation="mosaic")
ragged_attention = functools.partial(pallas_attn.ragged_attention, return_lse=True, implementation="mosaic")


def ints(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=jnp.int32)


def looking_up(sizes: FlashConfig | None) -> Any:
    """Return a context in which calls are traced with the kernel sizes `sizes`; None for the heuristic sizes."""

    def lookup(op: str, key: Any, make: Any, heuristic: Any) -> Any:
        return heuristic() if sizes is None else sizes

    return mock.patch.object(tuning, "lookup", lookup)


@deferred
def ragged(
    key_dim: int,
    value_dim: int,
    q_heads: int = 32,
    kv_heads: int = 8,
    *,
    dtype: Any = jnp.bfloat16,
    tokens: int = TOKENS,
    keys: int = KEYS,
    sizes: FlashConfig | None = None,
    splits: int = 0,
    sinks: bool = False,
    **static: Any,
) -> Case:
    """Return a case of `ragged_attention`.

    Args:
      tokens, keys: total numbers of queries and of keys of all sequences.
      sizes: sizes of the kernel; None for the heuristic sizes.
      splits: number of KV splits per query whose partial states the temporary memory may hold. The kernel chooses the
      number of splits itself.
      sinks: whether the call has sink logits.
    """
    arguments = {
        "q": shape(tokens, q_heads, key_dim, dtype=dtype),
        "k": shape(keys, kv_heads, key_dim, dtype=dtype),
        "v": shape(keys, kv_heads, value_dim, dtype=dtype),
        "cu_q_lens": ints(SEQUENCES + 1),
        "cu_kv_lens": ints(SEQUENCES + 1),
    }
    if sinks:
        arguments["sinks"] = shape(q_heads, dtype=jnp.float32)

    def call(**arguments: Any) -> Any:
        with looking_up(sizes):
            return ragged_attention(**arguments, **static)

    with looking_up(sizes):
        key = RaggedAttentionKey(key_dim, value_dim, tokens // SEQUENCES >= ragged_config.LONG)
        chosen = ragged_config.mosaic_config(key)
    elements = chosen.tile_keys * (key_dim + value_dim)
    multiply_adds = (
        chosen.tile_keys * QUERIES * (chosen.consumers * key_dim + chosen.consumers // chosen.column_parts * value_dim)
    )
    tile = Tile(elements * jnp.dtype(dtype).itemsize, multiply_adds)
    return Case(call, arguments, temporaries=2**20 + partial_outputs(splits, tokens, q_heads, value_dim), tile=tile)


def partial_outputs(splits: int, tokens: int, heads: int, width: int) -> int:
    """Return the bytes of partial states: output [width], maximum and sum in float32 for each split, token and head."""
    return 4 * splits * tokens * heads * (width + 2)


@deferred
def paged(
    head_dim: int = 128,
    page_size: int = 64,
    *,
    dtype: Any = jnp.bfloat16,
    cache: tuple[Any, Any] | None = None,
    tokens: int = TOKENS,
    sizes: FlashConfig | None = None,
    features: Iterable[str] = (),
    splits: int = 0,
    group: int = 4,
    layout: Mapping[str, bool] | None = None,
    **static: Any,
) -> Case:
    """Return a case of `paged_prefill` with 8 KV heads.

    Args:
      cache: dtype and scales of a quantised cache; None for a cache in `dtype`.
      tokens: total number of queries of all sequences.
      sizes: sizes of the kernel; None for the heuristic sizes.
      features: optional arguments, of "head-tables", "head-windows" and "sinks".
      splits: number of KV splits per query whose partial states the temporary memory may hold; 0 if the kernel must not
      split keys.
      group: query heads per KV head.
      layout: options of `in_layout`.
    """
    pages = KEYS // page_size
    cache_dtype, scales = cache or (dtype, None)
    spec = kv_cache_spec(
        num_pages=2 * SEQUENCES * pages,
        page_size=page_size,
        num_kv_heads=8,
        head_dim=head_dim,
        dtype=cache_dtype,
        scales=scales,
    )
    terms = 2 if scales == "channel" else 1
    arguments: dict[str, Any] = {
        "q": shape(tokens, 8 * group, head_dim, dtype=dtype),
        "kv": allocated(PagedKV, spec),
        "block_tables": ints(SEQUENCES, 8, pages) if "head-tables" in features else ints(SEQUENCES, pages),
        "cu_q_lens": ints(SEQUENCES + 1),
        "kv_lens": ints(SEQUENCES),
    }
    if "head-windows" in features:
        arguments["window"] = jax.eval_shape(HeadWindow, ints(8), ints(8))
    if "sinks" in features:
        arguments["sinks"] = shape(8 * group, dtype=jnp.float32)

    arguments = in_layout(arguments, **layout or {})

    def call(**arguments: Any) -> Any:
        with looking_up(sizes):
            return paged_prefill(**arguments, **static)

    with looking_up(sizes):
        cache_bytes = jnp.dtype(cache_dtype).itemsize
        key = paged_config.PagedPrefillKey(
            head_dim,
            page_size,
            cache_bytes,
            token_scales=isinstance(scales, int),
            terms=terms,
            capped="soft_cap" in static,
        )
        chosen = paged_config.mosaic_config(key)
    elements = chosen.tile_keys * head_dim
    multiplied = chosen.column_parts * terms + 1  # products with all columns: scores of each consumer, and values
    rows = QUERIES * chosen.consumers // chosen.column_parts
    tile = Tile(2 * elements * cache_bytes, multiplied * elements * rows)
    arranged = terms * tokens * 8 * group * head_dim * 2 if cache else 0
    arranged += partial_outputs(splits, tokens, 8 * group, head_dim)
    return Case(call, arguments, cache="kv", temporaries=2**20 + arranged, tile=tile)


@deferred
def mapped(plain: DeferredCase) -> Case:
    """Return a case that computes two calls with `jax.vmap`."""
    case = plain.made
    stacked = {name: shape(2, *a.shape, dtype=a.dtype) for name, a in case.arguments.items()}
    function = lambda **arguments: jax.vmap(lambda each: case.function(**each))(arguments)  # noqa: E731
    return replace(case, function=function, arguments=stacked, temporaries=2 * case.temporaries)


@deferred
def exported(plain: DeferredCase) -> Case:
    """Return a case whose function is exported, serialised and deserialised with `jax.export`."""
    case = plain.made

    def call(**arguments: Any) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        serialised = export.export(jax.jit(case.function), platforms=("cuda",))(**shapes).serialize()
        return export.deserialize(serialised).call(**arguments)

    return replace(case, function=call)


RAGGED_OPTIONS: dict[str, Any] = {"window": 1024, "soft_cap": 50.0, "sinks": True}
VARIED: dict[str, dict[str, Any]] = {
    "few": {"tokens": 96, "splits": 33},
    "f16": {"dtype": jnp.float16},
    "full": {"causal": False},
    "f32-out": {"out_dtype": jnp.float32},
    "all-options": RAGGED_OPTIONS,
    "few-all-options": {"tokens": 96, "splits": 33, **RAGGED_OPTIONS},
}
CACHES: dict[str, tuple[Any, Any]] = {
    "int8-head": (jnp.int8, "head"),
    "int8-channel": (jnp.int8, "channel"),
    "fp8-head": (jnp.float8_e4m3fn, "head"),
    "fp8-token": (jnp.float8_e4m3fn, 16),
    "int8-group": (jnp.int8, 2),
}
ALL_FEATURES: dict[str, Any] = {
    "features": ("head-tables", "head-windows", "sinks"),
    "soft_cap": 50.0,
    "tokens": 512,
    "splits": 4,
    "out_dtype": jnp.float32,
}
BUT_CAP = {name: value for name, value in ALL_FEATURES.items() if name != "soft_cap"}
SHARED_ROWS = FlashConfig(tile_keys=64, stages=1, consumers=2, column_parts=2)
"""Sizes for heads of 512 columns over 8-bit caches and over packed keys, which the heuristics do not enable."""
TWO_CONSUMERS: dict[str, Any] = {"splits": 6}
"""Limit of splits for kernels with two consumer warpgroups. A CTA then computes twice the queries, so there are half as
many blocks of queries, and keys may be split more often.
"""
FEW: dict[str, Any] = {"tokens": 96, "splits": 11}
"""Few tokens, and therefore so few blocks of queries that the kernel splits keys to use all multiprocessors."""
PREFILL: dict[str, DeferredCase] = {
    "ragged-192-128": ragged(192, 128, 128, 128),
    "ragged-128-128": ragged(128, 128),
    "ragged-64-64": ragged(64, 64, 14, 1),
    "ragged-256-256": ragged(256, 256, 8, 4, splits=2),
    "ragged-192-128-odd": ragged(192, 128, 16, 16, tokens=TOKENS - 3, keys=KEYS - 5),
    "ragged-256-256-odd-all-options": ragged(256, 256, tokens=TOKENS - 3, keys=KEYS - 5, **RAGGED_OPTIONS),
    "ragged-f16-full-f32-out": ragged(
        192, 128, 16, 16, dtype=jnp.float16, causal=False, out_dtype=jnp.float32, tokens=70_000
    ),
    "ragged-192-128-few": ragged(192, 128, 16, 16, **FEW),
    "ragged-192-128-without-lse": ragged(192, 128, 16, 16, return_lse=False),
    "ragged-192-128-few-without-lse": ragged(192, 128, 16, 16, **FEW, return_lse=False),
    "ragged-64-64-all-options": ragged(64, 64, **RAGGED_OPTIONS),
    "ragged-512-512": ragged(512, 512, sizes=SHARED_ROWS, splits=2),
    "ragged-512-512-odd-all-options": ragged(
        512, 512, tokens=TOKENS - 3, keys=KEYS - 5, sizes=SHARED_ROWS, splits=2, **RAGGED_OPTIONS
    ),
    "ragged-vmap": mapped(ragged(64, 64)),
    "ragged-export": exported(ragged(128, 128)),
    "ragged-one-head-few": ragged(64, 64, 1, 1, sinks=True, tokens=96, splits=132),
    **{f"paged-prefill-d{head_dim}": paged(head_dim) for head_dim in (64, 128, 256)},
    **{f"paged-prefill-p{page_size}": paged(page_size=page_size) for page_size in (16, 128)},
    "paged-prefill-group1": paged(group=1, splits=2),
    **{f"paged-prefill-group{group}": paged(group=group) for group in (2, 5, 7, 16)},
    "paged-prefill-odd": paged(tokens=TOKENS - 3, group=1, splits=2),
    "paged-prefill-p64-all-features": paged(128, 64, **ALL_FEATURES),
    **{f"paged-prefill-d{head_dim}-all-features": paged(head_dim, 16, **ALL_FEATURES) for head_dim in (64, 128)},
    "paged-prefill-d256-all-features": paged(256, 16, **(ALL_FEATURES | TWO_CONSUMERS)),
    "paged-prefill-tokens-first": paged(layout={"tokens_first": True}),
    "paged-prefill-fused-tokens-first-p16-all-features": paged(
        128,
        16,
        **(ALL_FEATURES | {"features": ("head-windows", "sinks")}),
        layout={"tokens_first": True, "fused": True},
    ),
    "paged-prefill-fused": paged(layout={"fused": True}),
    "paged-prefill-fp8-head-tokens-first": paged(cache=CACHES["fp8-head"], layout={"tokens_first": True}),
    "paged-prefill-d512-tokens-first": paged(512, group=8, splits=2, layout={"tokens_first": True}),
    "paged-prefill-d512": paged(512, group=8, splits=2),
    "paged-prefill-d512-all-features": paged(512, 16, **(ALL_FEATURES | TWO_CONSUMERS)),
    "paged-prefill-fp8-head-d512": paged(512, group=8, cache=CACHES["fp8-head"], sizes=SHARED_ROWS, splits=2),
    "paged-prefill-int8-group-d512-p16-all-features": paged(
        512, 16, cache=CACHES["int8-group"], sizes=SHARED_ROWS, **(ALL_FEATURES | TWO_CONSUMERS)
    ),
    "paged-prefill-few-all-features": paged(128, 16, **(ALL_FEATURES | FEW)),
    "paged-prefill-window": paged(window=1024),
    "paged-prefill-full": paged(causal=False, features=("head-tables", "sinks"), soft_cap=50.0),
    "paged-prefill-d64-group8-window-sinks": paged(64, group=8, window=128, features=("sinks",)),
    "paged-prefill-int8-channel-d128": paged(cache=CACHES["int8-channel"]),
    "paged-prefill-fp8-head-d64": paged(64, cache=CACHES["fp8-head"]),
    "paged-prefill-fp8-head-d256-but-cap": paged(256, cache=CACHES["fp8-head"], **(BUT_CAP | TWO_CONSUMERS)),
    "paged-prefill-fp8-token-d256-p16-all-features": paged(256, 16, cache=CACHES["fp8-token"], **ALL_FEATURES),
}
"""Cases with each head dimension, and with each option of the calls."""

TUNING: dict[str, DeferredCase] = {
    f"ragged-{key_dim}-{value_dim}-{c.tile_keys}-{c.stages}-{c.consumers}": ragged(key_dim, value_dim, sizes=c)
    for (key_dim, value_dim), tried in SIZES.items()
    for c in tried
}
"""Cases with each kernel size that a tuning may choose on Hopper."""

PREFILL_MORE: dict[str, DeferredCase] = {
    **TUNING,
    **{
        f"paged-prefill-{cache}-d{head_dim}-p{page_size}": paged(head_dim, page_size, cache=CACHES[cache])
        for cache in CACHES
        for head_dim in (64, 128, 256)
        for page_size in (16, 32, 64, 128)
    },
    **{
        f"paged-prefill-{cache}-d{head_dim}-all-features": paged(head_dim, 64, cache=CACHES[cache], **ALL_FEATURES)
        for cache in CACHES
        for head_dim in (64, 128, 256)
    },
    **{
        f"paged-prefill-{cache}-d128-p16-all-features": paged(128, 16, cache=CACHES[cache], **ALL_FEATURES)
        for cache in CACHES
    },
    **{
        f"paged-prefill-{cache}-d{head_dim}-few-all-features": paged(
            head_dim, 64, cache=CACHES[cache], **(ALL_FEATURES | FEW)
        )
        for cache in CACHES
        for head_dim in (64, 128, 256)
    },
    **{
        f"paged-prefill-{cache}-d256-p{page_size}-few-but-cap": paged(
            256, page_size, cache=CACHES[cache], **(BUT_CAP | FEW)
        )
        for cache in ("int8-head", "fp8-head")
        for page_size in (16, 64, 128)
    },
    **{
        f"paged-prefill-d{head_dim}-few-all-features": paged(head_dim, **(ALL_FEATURES | FEW)) for head_dim in (64, 256)
    },
    **{
        f"paged-prefill-{cache}-d{head_dim}-full": paged(head_dim, cache=CACHES.get(cache), causal=False)
        for cache in ("bf16", "int8-head", "fp8-token")
        for head_dim in (64, 128, 256)
    },
    "paged-prefill-full-few": paged(causal=False, **FEW),
    "paged-prefill-d512-p128-f16": paged(512, 128, dtype=jnp.float16, splits=2),
    "paged-prefill-d512-few-all-features": paged(512, 32, **(ALL_FEATURES | FEW)),
    "paged-prefill-d512-few": paged(512, **FEW),
    "paged-prefill-d512-p32-window": paged(512, 32, window=1024, splits=2),
    **{
        f"ragged-{key_dim}-{value_dim}-{name}": ragged(key_dim, value_dim, **static)
        for key_dim, value_dim in ((192, 128), (128, 128), (64, 64), (256, 256))
        for name, static in VARIED.items()
    },
}
"""Cases with combinations of caches, head dimensions and options, and with the kernel sizes of `TUNING`."""

UNSUPPORTED_ON_B200 = re.compile(
    r"paged-prefill-((int8-channel|fp8-token|int8-group)-d256|(.*-)?(d512|fused|tokens-first))|ragged-512"
)
"""Names of cases that are not supported on Blackwell, because they need too much shared memory, have wide heads, or
have a fused cache or a view.

With a head dimension of 256, the 128 query rows, two pipeline stages and the staging buffers leave no space for scales
per token, or for the second half of queries that are stored as sums of two 16-bit values.
"""

PARTIALS_ON_B200 = PARTIALS_PER_CTA * 148 * partial_outputs(1, tokens=256, heads=1, width=128)
"""Maximum bytes of the partial states of a B200 with 148 multiprocessors: `PARTIALS_PER_CTA` work tiles per CTA, each
with 256 query rows of width 128 or 128 query rows of width 256.
"""


@deferred
def with_larger_blocks(plain: DeferredCase) -> Case:
    """Return the case with a limit of temporary memory that includes the partial states of a B200."""
    return replace(plain.made, tile=None, temporaries=plain.made.temporaries + PARTIALS_ON_B200)


SM100_PREFILL = {
    # A B200 has more multiprocessors and larger blocks of queries than an H200, so it splits keys in more cases.
    name: with_larger_blocks(case)
    for name, case in on_b200(PREFILL | PREFILL_MORE).items()
    if name.removeprefix("sm100-") not in TUNING and not UNSUPPORTED_ON_B200.search(name)
}
"""The cases of `PREFILL` and `PREFILL_MORE` for a B200, without `TUNING` and unsupported cases."""
