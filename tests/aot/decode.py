"""Compile-gate cases of `paged_decode`, for Hopper and Blackwell.

A configuration is a set of parameters that the kernel is compiled for: cache dtype, head dimension, query rows per CTA,
output dtype, page size. There are cases for every configuration that the settings in config.py or the packaged tunings
can choose, for each option of the call, and for calls in `vmap`, `scan` and `jax.export`.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from jax import export, lax

import pallas_attn
from pallas_attn import HeadWindow, PagedKV, kv_cache_spec
from pallas_attn.mosaic.decode import DecodeScratch, DecodeTile
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.mosaic.primitives import shared_memory
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.ops.paged_decode.config import (
    MAX_COLUMNS_SM100,
    PagedDecodeKey,
    column_step_sm100,
    max_columns,
    mosaic_config,
    mosaic_sm100_config,
    mosaic_sm100_tile,
    mosaic_tile,
)
from pallas_attn.runtime import tuning
from tests.aot.case import Case, DeferredCase, Tile, allocated, deferred, in_layout, shape
from tests.aot.plans import fitted, plan_shapes

BATCH, KV_HEADS, PAGES, TOKENS = 32, 8, 256, 64
CACHES: dict[str, tuple[Any, Any]] = {
    "bf16": (jnp.bfloat16, None),
    "f16": (jnp.float16, None),
    **{f"int8-{scales}": (jnp.int8, scales) for scales in ("head", "channel", "group", "token")},
    **{f"fp8-{scales}": (jnp.float8_e4m3fn, scales) for scales in ("head", "channel", "group", "token")},
}
HEAD_DIMS = (64, 128, 256)
OPERATION = "paged_decode/mosaic"
"""Key of the operation in the files of packaged tunings (pallas_attn/runtime/tuned)."""

paged_decode = functools.partial(pallas_attn.paged_decode, return_lse=True, implementation="mosaic")


def scratch_bytes(tile: DecodeTile, stages: int) -> int:
    """Return the bytes of shared memory of the decode kernel."""
    return shared_memory.block_bytes(DecodeScratch.types(tile, stages), reduction_bytes=tile.reduction_bytes)


def ints(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=jnp.int32)


@dataclass(frozen=True)
class Configuration:
    """Parameters that the kernel is compiled for.

    Attributes:
      cache: dtype and scales of the cache, a key of `CACHES`.
      head_dim: head dimension.
      columns: query rows of a KV head per CTA. They are the columns of the kernel's score tile [tokens, query rows].
      out: dtype of the output.
      page_size: tokens per page.
      card: GPU to compile for, a key of `device.CARDS`.
    """

    cache: str
    head_dim: int = 128
    columns: int = 8
    out: Any = jnp.bfloat16
    page_size: int = 64
    card: str = "H200"

    def __str__(self) -> str:
        card = "sm100-" if self.card == "B200" else ""
        out = "" if self.out == jnp.bfloat16 else "-f32-out"
        pages = "" if self.page_size == 64 else f"-p{self.page_size}"
        return f"{card}paged-decode-{self.cache}-d{self.head_dim}-n{self.columns}{out}{pages}"

    @property
    def cache_bytes(self) -> int:
        return jnp.dtype(CACHES[self.cache][0]).itemsize

    @property
    def scales(self) -> Any:
        """Argument `scales` of `kv_cache_spec`."""
        scales = CACHES[self.cache][1]
        return {"group": 4, "token": self.page_size}.get(scales, scales)

    @property
    def terms(self) -> int:
        """Number of 16-bit values whose sum is an element of q; 2 if scales per channel are multiplied into q."""
        return 2 if self.cache.endswith("-channel") else 1

    @property
    def key(self) -> PagedDecodeKey:
        """Key by which config.py and the tunings choose the sizes of the kernel."""
        token_scales = self.cache.endswith(("-group", "-token"))
        out_bytes = jnp.dtype(self.out).itemsize
        sizes = self.head_dim, self.cache_bytes, token_scales, self.columns, self.terms, out_bytes
        return PagedDecodeKey(*sizes, self.page_size)

    @property
    def config(self) -> DecodeConfig:
        return (mosaic_sm100_config if self.card == "B200" else mosaic_config)(self.key)

    def decode_tile(self, tile_tokens: int) -> DecodeTile:
        return (mosaic_sm100_tile if self.card == "B200" else mosaic_tile)(self.key, tile_tokens)

    def paged_kv(self, num_pages: int = BATCH * PAGES) -> PagedKV:
        spec = kv_cache_spec(
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=KV_HEADS,
            head_dim=self.head_dim,
            dtype=CACHES[self.cache][0],
            scales=self.scales,
        )
        return allocated(PagedKV, spec)

    def plan(self, mode: Literal["balanced", "fixed"] = "balanced", batch: int = BATCH) -> Any:
        """Return the shapes of a plan of `plan_decode`. They do not depend on the window."""
        implementation = "mosaic_sm100" if self.card == "B200" else "mosaic_sm90"
        return plan_shapes(self.page_size, KV_HEADS, 264, mode, batch, implementation)

    def arguments(self, queries: int = 1, num_pages: int = BATCH * PAGES, batch: int = BATCH) -> dict[str, Any]:
        """Return the shapes of the arguments of a call with `queries` queries per sequence. The number of query heads
        is chosen so that a KV head has `columns` query rows.
        """
        q_dtype = jnp.float16 if self.cache == "f16" else jnp.bfloat16
        return {
            "q": shape(batch, queries, self.columns // queries * KV_HEADS, self.head_dim, dtype=q_dtype),
            "kv": self.paged_kv(num_pages),
            "block_tables": ints(batch, PAGES),
            "kv_lens": ints(batch),
            "plan": self.plan(batch=batch),
        }

    @property
    def tile(self) -> Tile:
        """Work on one tile of the cache: `TOKENS` tokens on Hopper, the kernel's tokens per tile on a B200."""
        elements = (self.config.tile_tokens if self.card == "B200" else TOKENS) * self.head_dim
        return Tile(2 * elements * self.cache_bytes, (self.terms + 1) * elements * self.columns)

    def scratch_bytes(self, sizes: DecodeConfig) -> int:
        """Return the bytes of shared memory of the kernel for `arguments`, whose query rows need no packing."""
        tile = replace(self.decode_tile(sizes.tile_tokens), packs_queries=False, scales=self.scales)
        return scratch_bytes(tile, sizes.stages)

    @deferred
    def case(self, arguments: Mapping[str, Any] | None = None, *, device: str = "untuned", **static: Any) -> Case:
        """Return the case of a call.

        Args:
          arguments: shapes of the arguments; None for `self.arguments()`.
          device: name of the device whose packaged tunings are used; "untuned" has none and uses the heuristic sizes.
          static: static arguments of the call.

        """

        on_device = mock.patch.object(tuning, "device_name", return_value=device)

        def call(**arguments: Any) -> Any:
            with on_device:
                return paged_decode(**arguments, out_dtype=self.out, **static)

        with on_device:
            sizes = self.config
        return Case(
            call,
            fitted(arguments or self.arguments(), static.get("window")),
            cache="kv",
            temporaries=64 * 2**20,
            scratch_bytes=0 if arguments or static else self.scratch_bytes(sizes),
            tile=self.tile,
            blocks=sizes.programs_per_multiprocessor,
            card=self.card,
        )


# --- configurations


def widths(cache: str, head_dim: int) -> range:
    """Return the numbers of query rows per CTA that the Hopper kernel supports."""
    return range(8, max_columns(head_dim, jnp.dtype(CACHES[cache][0]).itemsize) + 1, 8)


def widest(cache: str, head_dim: int) -> int:
    return widths(cache, head_dim)[-1]


def configurations() -> list[Configuration]:
    """Return the configurations for Hopper: pages of 64 tokens with all other parameters, then other page sizes.

    Heads of 320 to 448 columns have the kernel of 512 columns with shorter loops, so they are compiled with the maximum
    number of query rows only.
    """
    every = [
        Configuration(cache, head_dim, columns, out)
        for cache, head_dim in itertools.product(CACHES, (*HEAD_DIMS, 512))
        for columns, out in itertools.product(widths(cache, head_dim), (jnp.bfloat16, jnp.float32))
    ]
    every += [
        Configuration(cache, head_dim, widest(cache, head_dim))
        for cache, head_dims in (("bf16", (320, 384, 448)), ("int8-channel", (384,)), ("fp8-token", (384,)))
        for head_dim in head_dims
    ]
    few = [c for c in every if c.out == jnp.bfloat16 and c.columns == 8]
    many = [replace(c, columns=widest(c.cache, c.head_dim)) for c in few]
    pages = [*itertools.product(few, (16, 32, 128)), *itertools.product(many, (16,))]
    return every + [replace(c, page_size=size) for c, size in pages]


CONFIGURATIONS = configurations()


def sm100_configurations() -> list[Configuration]:
    """Return the configurations for a B200: pages of 64 tokens with all other parameters, then other page sizes."""
    every = [
        Configuration(cache, head_dim, columns, out, card="B200")
        for cache, head_dim, out in itertools.product(CACHES, HEAD_DIMS, (jnp.bfloat16, jnp.float32))
        for step in [column_step_sm100(head_dim, jnp.dtype(CACHES[cache][0]).itemsize)]
        for columns in range(step, MAX_COLUMNS_SM100 + 1, step)
    ]
    widest = [c for c in every if c.out == jnp.bfloat16 and c.columns == MAX_COLUMNS_SM100]
    return every + [replace(c, page_size=size) for c, size in itertools.product(widest, (16, 32, 128))]


SM100_CONFIGURATIONS = sm100_configurations()


def tunings() -> dict[str, list[PagedDecodeKey]]:
    """Return the keys that have packaged tunings, by device name."""
    folder = resources.files(pallas_attn) / "runtime" / "tuned"
    files = [file for file in folder.iterdir() if file.name.endswith(".json")] if folder.is_dir() else []
    entries = {file.name.removesuffix(".json"): json.loads(file.read_text()).get(OPERATION, ()) for file in files}
    return {device: [PagedDecodeKey(**entry["key"]) for entry in found] for device, found in entries.items()}


def tuned() -> Iterator[tuple[str, Configuration]]:
    """Yield (device name, configuration) for each packaged tuning. A key belongs to several caches if they have the
    same sizes, such as int8 and fp8.
    """
    for device, keys in tunings().items():
        for key, cache in itertools.product(keys, CACHES):
            out = jnp.float32 if key.out_bytes == 4 else jnp.bfloat16
            c = Configuration(cache, key.head_dim, key.columns, out, key.page_size)
            if c.key == key:
                yield device, c


# --- features

HEAD_WINDOWS = {"window": jax.eval_shape(HeadWindow, ints(KV_HEADS), ints(KV_HEADS))}
HEAD_TABLES = {"block_tables": ints(BATCH, KV_HEADS, PAGES)}
BF16 = Configuration("bf16")


def drafts(queries: int) -> dict[str, Any]:
    return {"q_lens": ints(BATCH), "draft_mask": shape(BATCH, queries, queries, dtype=jnp.bool_)}


def sinks(columns: int) -> dict[str, Any]:
    return {"sinks": shape(columns * KV_HEADS, dtype=jnp.float32)}


def q_scales(configuration: Configuration, queries: int = 1) -> dict[str, Any]:
    """Return the argument `q_scale` of fp8 queries if the cache is fp8; otherwise no argument."""
    scales = shape(BATCH, queries, configuration.columns // queries * KV_HEADS, dtype=jnp.float32)
    return {"q_scale": scales} if CACHES[configuration.cache][0] == jnp.float8_e4m3fn else {}


@deferred
def fp8_queries(**changes: Any) -> DeferredCase:
    """Return a case with fp8 queries. On Hopper, only the scales of the kernel differ from 16-bit queries."""
    fp8 = Configuration("fp8-head", **changes)
    return fp8.case(fp8.arguments() | q_scales(fp8))


@deferred
def sm100_fp8_products(c: Configuration) -> DeferredCase:
    """Return a case in which a B200 multiplies fp8 queries with fp8 keys, without converting keys to 16 bits. The
    kernel has other sizes.
    """
    sizes = mosaic_sm100_config(c.key, fp8_products=True)
    tile = replace(c.decode_tile(sizes.tile_tokens), q_dtype=jnp.float8_e4m3fn, scales=c.scales)
    return c.case(c.arguments() | q_scales(c)).replace(
        scratch_bytes=scratch_bytes(tile, sizes.stages),
        blocks=sizes.programs_per_multiprocessor,
        tile=Tile(2 * sizes.tile_tokens * c.head_dim, 2 * sizes.tile_tokens * c.head_dim * c.columns),
    )


@deferred
def blocks() -> DeferredCase:
    """Return a case with 12 heads and 8 queries per KV head. The 96 query rows are divided between two CTAs."""
    columns = QueryPacking(group=12, queries=8, limit=max_columns(128, 2))
    q = shape(BATCH, columns.queries, columns.group * KV_HEADS, 128)
    return replace(BF16, columns=columns.width).case(BF16.arguments() | {"q": q})


def features() -> dict[str, DeferredCase]:
    """Return cases with one optional argument each."""
    plain, speculative = BF16.arguments(), replace(BF16, columns=32)
    eight = speculative.arguments(queries=8)
    return {
        "head-windows": BF16.case(plain | HEAD_WINDOWS),
        "head-tables": BF16.case(plain | HEAD_TABLES),
        "soft-cap": BF16.case(soft_cap=50.0),
        "sinks": BF16.case(plain | sinks(8)),
        "drafts": speculative.case(eight | {"q_lens": ints(BATCH)}),
        "draft-tree": speculative.case(eight | drafts(8)),
    }


@deferred
def group_of_4(head_dim: int) -> DeferredCase:
    """Return a case with 4 query rows, half of the kernel's 8 columns. The kernel packs the queries itself."""
    few = replace(BF16, head_dim=head_dim)
    case = few.case(few.arguments() | {"q": shape(BATCH, 1, 4 * KV_HEADS, head_dim)})
    return case.replace(scratch_bytes=scratch_bytes(few.decode_tile(few.config.tile_tokens), few.config.stages))


@deferred
def one_sequence() -> DeferredCase:
    """Return a case with one sequence, for which the merge kernel uses blocks of fewer query rows."""
    wide = replace(BF16, columns=32)
    return wide.case(wide.arguments(batch=1) | sinks(32))


def unlike() -> dict[str, DeferredCase]:
    """Return cases of calls whose arguments differ from `Configuration.arguments`."""
    plain = BF16.arguments()
    return {
        **{f"bf16-d{head_dim}-group-of-4": group_of_4(head_dim) for head_dim in HEAD_DIMS},
        "window": BF16.case(window=1024),
        "fixed-plan": BF16.case(plain | {"plan": BF16.plan("fixed")}),
        "no-plan": BF16.case({name: value for name, value in plain.items() if name != "plan"}),
        "blocks": blocks(),
        "fp8-queries": fp8_queries(),
        "one-sequence": one_sequence(),
        "one-scale-per-page": one_scale_per_page(),
        "tokens-first": BF16.case(in_layout(plain, tokens_first=True)),
        "tokens-first-layers": BF16.case(in_layout(plain, tokens_first=True)).replace(function=layers, donated=True),
        "fused-tokens-first": BF16.case(in_layout(plain, fused=True, tokens_first=True)),
        "fused": BF16.case(in_layout(plain, fused=True)),
        "tokens-first-all-features": tokens_first_all_features(),
    }


@deferred
def tokens_first_all_features() -> DeferredCase:
    """Return the case of an fp8 cache with tokens before heads that needs the most registers."""
    fp8 = Configuration("fp8-head", columns=32, out=jnp.float32, page_size=16)
    arguments = fp8.arguments(queries=4) | drafts(4) | sinks(8) | HEAD_WINDOWS | q_scales(fp8, queries=4)
    return fp8.case(in_layout(arguments, fused=True, tokens_first=True), soft_cap=50.0).replace(blocks=1)


@deferred
def one_scale_per_page() -> DeferredCase:
    """Return a case with one scale per page, fewer than a TMA copy transfers. The kernel computes where in the copied
    scales the page's scale is.
    """
    fp8 = Configuration("fp8-group")
    spec = kv_cache_spec(
        num_pages=BATCH * PAGES,
        page_size=fp8.page_size,
        num_kv_heads=KV_HEADS,
        head_dim=fp8.head_dim,
        dtype=jnp.float8_e4m3fn,
        scales=1,
    )
    return fp8.case(fp8.arguments() | {"kv": allocated(PagedKV, spec)})


@deferred
def all_features(configuration: Configuration) -> DeferredCase:
    """Return the case that needs the most registers: all optional arguments together, with pages of 16 tokens."""
    wide = replace(configuration, page_size=16, out=jnp.float32)
    arguments = wide.arguments(queries=4) | drafts(4) | sinks(wide.columns // 4) | HEAD_WINDOWS | HEAD_TABLES
    arguments |= q_scales(wide, queries=4)
    return wide.case(arguments, soft_cap=50.0).replace(
        blocks=1
    )  # the heuristic number of CTAs per multiprocessor does not consider the registers of these options


# --- calls


def mapped(q: Any, block_tables: Any, kv_lens: Any, kv: PagedKV) -> Any:
    """Decode several batches that share a pool, with `jax.vmap`."""

    def call(q: Any, block_tables: Any, kv_lens: Any) -> Any:
        return paged_decode(q, kv, block_tables, kv_lens)

    return jax.vmap(call)(q, block_tables, kv_lens)


LAYERS = 4


def layers(q: Any, kv: PagedKV, block_tables: Any, kv_lens: Any, plan: Any) -> Any:
    """Compute a decode step of `LAYERS` layers in a scan. All layers share one pool and have separate pages in it."""
    pages = kv.k.shape[0] // LAYERS
    slots = pallas_attn.slot_mapping(
        block_tables, jnp.arange(BATCH + 1, dtype=jnp.int32), kv_lens, page_size=kv.k.shape[2], length=BATCH
    )

    def layer(carried: tuple[Any, PagedKV], i: Any) -> tuple[tuple[Any, PagedKV], None]:
        x, kv = carried
        new = x[:, 0, :KV_HEADS]
        kv = pallas_attn.write_kv(kv, new, new, slots + i * pages * kv.k.shape[2], implementation="xla")
        x, _ = paged_decode(x, kv, block_tables + i * pages, kv_lens, plan=plan)
        return (x, kv), None

    return lax.scan(layer, (q, kv), jnp.arange(LAYERS, dtype=jnp.int32))[0]


def exported(**arguments: Any) -> Any:
    """Call `paged_decode` after it was exported, serialised and deserialised."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    serialised = export.export(jax.jit(paged_decode), platforms=("cuda",))(**shapes).serialize()
    return export.deserialize(serialised).call(**arguments)


LARGE = 2**17
"""Number of pages of a pool whose keys, and whose values, have 2**33 elements."""


def calls() -> dict[str, DeferredCase]:
    plain = BF16.arguments()
    mapped_over = {name: plain[name] for name in ("q", "block_tables", "kv_lens")}
    stacked = {name: shape(3, *a.shape, dtype=a.dtype) for name, a in mapped_over.items()}
    fp8 = Configuration("fp8-token")
    return {
        "vmap": BF16.case(stacked | {"kv": plain["kv"]}).replace(function=mapped),
        "layers": BF16.case(plain).replace(function=layers, donated=True),
        "export": BF16.case(plain).replace(function=exported),
        "large-pool": fp8.case(fp8.arguments(num_pages=LARGE)),
    }


# --- all cases

CONTRASTS = ("bf16", "int8-head", "fp8-token")
"""Kinds of caches whose kernels differ most: no scales, static scales per head, scales per token."""


def is_typical(c: Configuration) -> bool:
    """Return whether a configuration is in `DECODE`: it has the default output dtype and page size, and 8 columns or
    the maximum.
    """
    if c != Configuration(c.cache, c.head_dim, c.columns):
        return False
    if c.cache in CONTRASTS:
        return c.columns == 8 or (c.columns == widest(c.cache, c.head_dim) and c.head_dim > 64)
    return c.columns == 8 and c.head_dim == 128 and c.cache in ("f16", "int8-channel", "fp8-head", "fp8-group")


def with_all_features(configurations: Iterable[Configuration]) -> dict[str, DeferredCase]:
    return {f"{c}-all-features": all_features(c) for c in configurations if c.page_size == 16}


DECODE: dict[str, DeferredCase] = {
    **{str(c): c.case() for c in filter(is_typical, CONFIGURATIONS)},
    **with_all_features(c for c in CONFIGURATIONS if c.cache in CONTRASTS and c.head_dim == 128 and c.columns > 8),
    **{f"{c}@{device}": c.case(device=device) for device, c in tuned() if is_typical(c)},
    **{f"paged-decode-{name}": case for name, case in (unlike() | calls()).items()},
}
"""Cases with typical configurations, and calls whose arguments differ from `Configuration.arguments`."""

DECODE_MORE: dict[str, DeferredCase] = {
    **{str(c): c.case() for c in CONFIGURATIONS},
    **with_all_features(CONFIGURATIONS),
    **{f"{c}@{device}": c.case(device=device) for device, c in tuned()},
    **{f"paged-decode-{name}": case for name, case in features().items()},
}
"""Cases with all configurations, and with one optional argument each."""


def sm100() -> dict[str, DeferredCase]:
    """Return the cases for a B200: all configurations, configurations with all optional arguments together, and calls
    whose arguments differ from `Configuration.arguments`.
    """
    plain = Configuration("bf16", columns=16, card="B200")
    arguments = plain.arguments()
    wide = [c for c in SM100_CONFIGURATIONS if c.page_size == 16]
    return {
        **{str(c): c.case() for c in SM100_CONFIGURATIONS},
        **with_all_features(wide),
        "sm100-paged-decode-group-of-4": plain.case(arguments | {"q": shape(BATCH, 1, 4 * KV_HEADS, 128)}),
        "sm100-paged-decode-blocks": plain.case(arguments | {"q": shape(BATCH, 8, 12 * KV_HEADS, 128)}),
        **{
            f"sm100-paged-decode-fp8-queries-{c.cache}-n{c.columns}": sm100_fp8_products(c)
            for c in (
                Configuration(f"fp8-{scales}", columns=n, card="B200") for scales in ("head", "group") for n in (16, 32)
            )
        },
        "sm100-paged-decode-window": plain.case(window=1024),
        "sm100-paged-decode-fixed-plan": plain.case(arguments | {"plan": plain.plan("fixed")}),
        "sm100-paged-decode-no-plan": plain.case({name: x for name, x in arguments.items() if name != "plan"}),
        "sm100-paged-decode-one-sequence": plain.case(plain.arguments(batch=1)),
        "sm100-paged-decode-layers": plain.case().replace(function=layers, donated=True),
    }


SM100_DECODE = sm100()
