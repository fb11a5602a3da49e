"""Calls with Triton kernels that the compile gate compiles, by name, and the GPUs that it compiles for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

import pallas_attn
from pallas_attn import (
    HeadWindow,
    PagedIndexKeys,
    PagedKV,
    PagedLatent,
    Rope,
    index_cache_spec,
    kv_cache_spec,
    latent_cache_spec,
)
from pallas_attn.models.engine.draw_kernel import draw_rows
from pallas_attn.ops.compress_and_write.config import CompressConfig
from pallas_attn.ops.plan_decode import Mode
from pallas_attn.runtime import device, tuning
from tests.aot.case import allocated, shape, slots_of_tokens


@dataclasses.dataclass(frozen=True)
class TritonCase:
    """A call of a Triton implementation that must compile for every GPU of `CARDS`.

    Attributes:
      function: function of `arguments` by keyword.
      arguments: pytrees of shapes and dtypes, by name.
      tensor_cores: whether at least one kernel of the call must use tensor cores.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    tensor_cores: bool = True


def card(name: str, capability: device.Architecture, multiprocessors: int, shared_kib: int) -> device.Device:
    return device.Device("gpu", name, capability, multiprocessors, shared_kib * 1024, (shared_kib + 1) * 1024)


CACHE_DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}

CARDS = {
    "sm80": card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163),
    "sm86": card("NVIDIA GeForce RTX 3090", (8, 6), 82, 99),
    "sm89": card("NVIDIA L4", (8, 9), 58, 99),
    "sm90": card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227),
    "sm100": card("NVIDIA B200", (10, 0), 148, 227),
    "sm120": card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99),
}


def latents(name: str, latent_dim: int, rope_dim: int, page_size: int = 64) -> PagedLatent:
    """Return the shapes of a latent cache of the dtype `name`. "fp8-alone" has fp8 latents and rotated keys in one
    array, without scales.
    """
    if name == "fp8-alone":
        pages: Any = shape(1024, page_size, latent_dim + rope_dim, dtype=jnp.float8_e4m3fn)
        return PagedLatent(pages)
    dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "fp8": jnp.float8_e4m3fn}[name]
    sizes = {"num_pages": 1024, "page_size": page_size, "latent_dim": latent_dim, "rope_dim": rope_dim}
    return allocated(PagedLatent, latent_cache_spec(**sizes, dtype=dtype))


def write_latents(name: str, latent_dim: int, rope_dim: int) -> TritonCase:
    return TritonCase(
        functools.partial(pallas_attn.write_latent, implementation="triton"),
        {
            "cache": latents(name, latent_dim, rope_dim),
            "latent": shape(64, latent_dim + rope_dim, dtype=jnp.float32 if name == "f32" else jnp.bfloat16),
            "slots": shape(64, dtype=jnp.int32),
        },
        tensor_cores=False,
    )


def gather_latents(name: str, latent_dim: int, rope_dim: int, num_new: int = 64) -> TritonCase:
    ints = functools.partial(shape, dtype=jnp.int32)
    return TritonCase(
        functools.partial(pallas_attn.gather_latent, length=4096, implementation="triton"),
        {
            "cache": latents(name, latent_dim, rope_dim),
            "latent_new": shape(num_new, latent_dim + rope_dim, dtype=jnp.bfloat16),
            "block_tables": ints(16, 64),
            "cu_q_lens": ints(17),
            "kv_lens": ints(16),
        },
        tensor_cores=False,
    )


LATENTS = {
    f"{op}-latent-{name}-{latent_dim}-{rope_dim}": case(name, latent_dim, rope_dim)
    for op, case in (("write", write_latents), ("gather", gather_latents))
    for name in ("bf16", "fp8")
    for latent_dim, rope_dim in ((512, 64), (128, 32))
} | {
    "gather-latent-bf16-old": gather_latents("bf16", 512, 64, num_new=0),
    "write-latent-f32-2048-0": write_latents("f32", 2048, 0),  # compressor rows of DeepSeek-V4
}


def mla_decode(
    cache: str = "bf16",
    heads: int = 16,
    latent_dim: int = 512,
    rope_dim: int = 64,
    *,
    page_size: int = 64,
    queries: int = 1,
    tree: bool = False,
    fixed: bool = False,
    batch: int = 16,
    **options: Any,
) -> TritonCase:
    """Return a case of `mla_decode` with `batch` sequences.

    Args:
      cache: kind of cache, an argument of `latents`.
      tree: whether the queries form a draft tree (argument `draft_mask`).
      fixed: whether the call has a plan of the mode "fixed".
      options: further arguments of the call.

    """
    table_pages = 4096 // page_size
    q_dtype = jnp.float16 if cache == "f16" else jnp.bfloat16
    ints = functools.partial(shape, dtype=jnp.int32)
    arguments = {
        "q_latent": shape(batch, queries, heads, latent_dim, dtype=q_dtype),
        "q_rope": shape(batch, queries, heads, rope_dim, dtype=q_dtype),
        "cache": latents(cache, latent_dim, rope_dim, page_size),
        "block_tables": ints(batch, table_pages),
        "kv_lens": ints(batch),
    }
    if queries > 1:
        arguments["q_lens"] = ints(batch)
    if tree:
        arguments["draft_mask"] = shape(batch, queries, queries, dtype=jnp.bool_)

    def call(**arguments: Any) -> Any:
        plan = None
        if fixed:
            q = arguments["q_latent"], arguments["q_rope"]
            shown = [arguments[name] for name in ("cache", "block_tables", "kv_lens")]
            plan = pallas_attn.plan_decode(q, *shown, mode="fixed", implementation="triton")
        return pallas_attn.mla_decode(
            **arguments, sm_scale=0.1, plan=plan, **options, implementation="triton", return_lse=True
        )

    return TritonCase(call, arguments)


MLA_DECODE = {
    **{f"mla-decode-bf16-h{heads}": mla_decode(heads=heads) for heads in (3, 16, 40, 128)},
    **{f"mla-decode-fp8-h{heads}": mla_decode("fp8", heads) for heads in (3, 128)},
    **{
        f"mla-decode-{cache}-{latent_dim}-{rope_dim}-h{heads}": mla_decode(cache, heads, latent_dim, rope_dim)
        for cache, latent_dim, rope_dim, heads in (
            *(("bf16", 512, 128, 16), ("bf16", 512, 128, 128), ("bf16", 448, 64, 16), ("bf16", 448, 64, 128)),
            *(("bf16", 256, 32, 16), ("bf16", 256, 32, 128), ("bf16", 128, 32, 128), ("bf16", 96, 16, 16)),
            *(("fp8", 512, 128, 16), ("fp8", 384, 64, 16), ("fp8", 128, 128, 16)),
        )
    },
    "mla-decode-fp8-alone-h16": mla_decode("fp8-alone", 16, 512, 128),
    "mla-decode-fp8-alone-h128": mla_decode("fp8-alone", 128),
    "mla-decode-fp8-alone-drafts-window-cap": mla_decode("fp8-alone", queries=4, window=1024, soft_cap=30.0),
    **{  # the tiles of the merge for few query rows
        f"mla-decode-bf16-h16-b{batch}": mla_decode(batch=batch) for batch in (1, 8, 32, 64)
    },
    "mla-decode-bf16-p1": mla_decode(page_size=1),
    "mla-decode-f16": mla_decode("f16"),
    "mla-decode-f16-h128-f32": mla_decode("f16", 128, page_size=128, out_dtype=jnp.float32),
    **{
        f"mla-decode-{cache}-tree-h{heads}": mla_decode(cache, heads, queries=8, tree=True)
        for cache, heads in (("bf16", 2), ("bf16", 5), ("bf16", 16), ("fp8", 16))
    },
    # Together with the cases above, these cases have every tile that `tiles.latent_tile` can return.
    **{
        f"mla-decode-{cache}-{latent_dim}-{rope_dim}-h{heads}{'-tree' if tree else ''}": mla_decode(
            cache, heads, latent_dim, rope_dim, queries=4 if tree else 1, tree=tree
        )
        for cache, latent_dim, rope_dim in (
            *(("bf16", 256, 64), ("bf16", 128, 64), ("bf16", 64, 32), ("fp8", 256, 64), ("fp8", 128, 64)),
        )
        for heads, tree in ((3, False), (24, False), (64, False), (3, True), (8, True))
    },
    "mla-decode-drafts": mla_decode(queries=4),
    "mla-decode-fixed": mla_decode(fixed=True),
    "mla-decode-h128-window-cap": mla_decode(heads=128, window=1024, soft_cap=30.0),
    "mla-decode-fp8-drafts-window-cap": mla_decode("fp8", queries=4, window=1024, soft_cap=30.0),
}


def _cache(
    cache: str,
    lanes: int | None,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
) -> PagedKV:
    """Return the shapes of a cache of keys and values.

    Args:
      cache: dtype and scales, such as "bf16", "int8-head" or "fp8-16" (16 groups of tokens per page). "int8-16+bf16"
        has int8 keys and bfloat16 values.
      lanes: number of columns for keys, and for values, if both are in one array; None for separate arrays.
    """
    keys, _, values = cache.partition("+")
    if values:
        of_keys, of_values = (
            _cache(x, None, num_pages, page_size, num_kv_heads, head_dim, value_dim) for x in (keys, values)
        )
        return dataclasses.replace(of_keys, v=of_values.v, v_scale=of_values.v_scale)
    name, _, layout = cache.partition("-")
    scales: Any = int(layout) if layout.isdigit() else layout or None
    spec = kv_cache_spec(
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=CACHE_DTYPES[name],
        scales=scales,
        value_dim=value_dim,
    )
    kv = allocated(PagedKV, spec)
    if lanes is None:
        return kv
    return dataclasses.replace(kv, k=shape(*kv.k.shape[:3], 2 * lanes, dtype=kv.k.dtype), v=None)


def paged_decode(
    cache: str = "bf16",
    head_dim: int = 128,
    group: int = 4,
    *,
    value_dim: int | None = None,
    lanes: int | None = None,
    page_size: int = 16,
    queries: int = 1,
    head_windows: bool = False,
    head_wise: bool = False,
    tree: bool = False,
    sinks: bool = False,
    fixed: bool = False,
    **options: Any,
) -> TritonCase:
    """Return a case of `paged_decode` with 16 sequences and 8 KV heads.

    Args:
      cache, lanes: see `_cache`.
      group: query heads per KV head.
      head_windows: whether each KV head has a window.
      head_wise: whether each KV head has a block table.
      tree: whether the queries form a draft tree (argument `draft_mask`).
      fixed: whether the call has a plan of the mode "fixed".
      options: further arguments of the call.

    """
    batch, kv_heads, table_pages = 16, 8, 4096 // page_size
    q_dtype = jnp.float16 if cache == "f16" else jnp.bfloat16
    kv = _cache(cache, lanes, 2 * table_pages, page_size, kv_heads, head_dim, value_dim)
    ints: Any = functools.partial(shape, dtype=jnp.int32)
    arguments = {
        "q": shape(batch, queries, group * kv_heads, head_dim, dtype=q_dtype),
        "kv": kv,
        "block_tables": ints(batch, kv_heads, table_pages) if head_wise else ints(batch, table_pages),
        "kv_lens": ints(batch),
    }
    if queries > 1:
        arguments["q_lens"] = ints(batch)
    if head_windows:
        arguments["window"] = HeadWindow(ints(kv_heads), ints(kv_heads))
    if tree:
        arguments["draft_mask"] = shape(batch, queries, queries, dtype=jnp.bool_)
    if sinks:
        arguments["sinks"] = shape(group * kv_heads, dtype=jnp.float32)

    def call(**arguments: Any) -> Any:
        plan = None
        if fixed:
            shown = [arguments[name] for name in ("q", "kv", "block_tables", "kv_lens")]
            plan = pallas_attn.plan_decode(*shown, mode="fixed", implementation="triton")
        return pallas_attn.paged_decode(**arguments, plan=plan, **options, implementation="triton", return_lse=True)

    return TritonCase(call, arguments)


PAGED_DECODE = {
    **{f"paged-decode-bf16-d{d}": paged_decode(head_dim=d) for d in (64, 80, 96, 128, 256)},
    **{f"paged-decode-bf16-d128-g{group}": paged_decode(group=group) for group in (1, 8, 16)},
    **{f"paged-decode-bf16-d256-g{group}": paged_decode(head_dim=256, group=group) for group in (1, 16)},
    **{f"paged-decode-bf16-p{size}": paged_decode(page_size=size) for size in (1, 8, 64, 128)},
    **{
        f"paged-decode-{cache}-d{d}": paged_decode(cache, d)
        for cache in ("int8-head", "int8-channel", "int8-16", "fp8-head", "fp8-channel", "fp8-4", "fp8-16")
        for d in (64, 128, 256)
    },
    # Together with the cases above, these cases have every tile that `tiles.decode_tile` can return. The cases with a
    # draft mask need the most registers.
    **{
        f"paged-decode-{cache}-d{d}-g{group}": paged_decode(cache, d, group)
        for cache in ("bf16", "fp8-16", "int8-channel")
        for d in (64, 128, 256)
        for group in (24, 40)
    },
    **{
        f"paged-decode-{cache}-d{d}-g{group}-tree": paged_decode(
            cache, d, group, queries=4, tree=True, head_windows=True, head_wise=True, soft_cap=50.0
        )
        for cache in ("bf16", "fp8-16", "int8-channel")
        for d in (64, 128, 256)
        for group in (1, 8, 16)
    },
    "paged-decode-f16": paged_decode("f16"),
    "paged-decode-f16-windows": paged_decode("f16", head_windows=True, head_wise=True, sinks=True, soft_cap=30.0),
    "paged-decode-window": paged_decode(window=1024, sinks=True),
    "paged-decode-drafts": paged_decode(queries=4, window=1024),
    "paged-decode-tree": paged_decode(queries=8, tree=True, head_windows=True, head_wise=True, page_size=64),
    "paged-decode-tree-fp8-d256": paged_decode("fp8-16", 256, queries=8, tree=True, head_windows=True, soft_cap=50.0),
    "paged-decode-tree-int8-channel-d256": paged_decode(
        "int8-channel", 256, queries=8, tree=True, head_windows=True, head_wise=True, soft_cap=50.0
    ),
    "paged-decode-fixed": paged_decode(fixed=True),
    "paged-decode-bf16-d192-v128": paged_decode(head_dim=192, value_dim=128),
    "paged-decode-fp8-16-d192-v128": paged_decode("fp8-16", head_dim=192, value_dim=128),
    # Heads of more than 256 columns.
    **{
        f"paged-decode-{cache}-d512{'-tree' if tree else ''}-g{group}": paged_decode(
            cache, 512, group, queries=4, tree=True, head_windows=True, head_wise=True, soft_cap=50.0
        )
        if tree
        else paged_decode(cache, 512, group)
        for cache in ("bf16", "int8-head", "int8-channel", "fp8-channel", "fp8-16")
        for group, tree in ((8, False), (24, False), (4, True), (8, True))
    },
    "paged-decode-f16-d512-window": paged_decode("f16", 512, 8, window=1024, sinks=True, soft_cap=30.0, page_size=64),
    "paged-decode-bf16-d512-drafts": paged_decode(head_dim=512, group=8, queries=4, window=1024),
    **{
        f"paged-decode-{cache}-d{d}": paged_decode(cache, d, 8) for cache in ("bf16", "fp8-16") for d in (320, 384, 448)
    },
    "paged-decode-bf16-d512-v320": paged_decode(head_dim=512, value_dim=320),
    # 8-bit keys or values next to 16-bit values or keys.
    **{
        f"paged-decode-{cache}-d{d}": paged_decode(cache, d)
        for cache in ("int8-16+bf16", "bf16+fp8-16")
        for d in (64, 128, 512)
    },
    **{
        f"paged-decode-{cache}-d{d}-g{group}": paged_decode(cache, d, group)
        for cache, d, group in (
            ("bf16+int8-channel", 128, 16),
            ("bf16+fp8-16", 256, 24),
            ("int8-channel+bf16", 256, 40),
        )
    },
    **{
        f"paged-decode-{cache}-d{d}-tree": paged_decode(
            cache, d, 8, queries=4, tree=True, head_windows=True, head_wise=True, soft_cap=50.0
        )
        for cache, d in (("int8-channel+bf16", 128), ("bf16+fp8-16", 256), ("fp8-16+bf16", 512))
    },
    "paged-decode-bf16-fused": paged_decode(lanes=128, page_size=1),
    "paged-decode-int8-head-d64-fused": paged_decode("int8-head", head_dim=64, lanes=128, page_size=1),
}


def paged_prefill(
    cache: str = "bf16",
    head_dim: int = 128,
    num_tokens: int = 8192,
    *,
    value_dim: int | None = None,
    lanes: int | None = None,
    page_size: int = 64,
    head_windows: bool = False,
    head_wise: bool = False,
    sinks: bool = False,
    mask: int | None = None,
    **options: Any,
) -> TritonCase:
    """Return a case of `paged_prefill` with 8 sequences, 8 query heads and 2 KV heads.

    Args:
      cache: dtype and scales of the cache, such as "bf16", "int8-head" or "fp8-16" (16 groups of tokens per page).
      lanes: see `_cache`.
      head_windows, head_wise: whether each KV head has a window, and a block table.
      mask: number of columns of a draft mask; None for no mask.
      options: further arguments of the call.

    """
    sequences, kv_heads, table_pages = 8, 2, 64
    kv = _cache(cache, lanes, 1024, page_size, kv_heads, head_dim, value_dim)
    ints: Any = functools.partial(shape, dtype=jnp.int32)
    arguments = {
        "q": shape(num_tokens, 4 * kv_heads, head_dim, dtype=jnp.float16 if cache == "f16" else jnp.bfloat16),
        "kv": kv,
        "block_tables": ints(sequences, kv_heads, table_pages) if head_wise else ints(sequences, table_pages),
        "cu_q_lens": ints(sequences + 1),
        "kv_lens": ints(sequences),
    }
    if head_windows:
        arguments["window"] = HeadWindow(ints(kv_heads), ints(kv_heads))
    if sinks:
        arguments["sinks"] = shape(4 * kv_heads, dtype=jnp.float32)
    if mask is not None:
        arguments["draft_mask"] = shape(num_tokens, mask, dtype=jnp.bool_)
    call = functools.partial(pallas_attn.paged_prefill, implementation="triton", return_lse=True, **options)
    return TritonCase(call, arguments)


FEW, MANY = 64, 8192
"""Number of tokens of a prompt chunk whose tiles have few query rows, and of a chunk with full tiles."""
HEAD_WISE: dict[str, Any] = {"head_windows": True, "head_wise": True, "sinks": True}

PAGED_PREFILL = {
    **{f"paged-prefill-bf16-d{d}-{n}": paged_prefill("bf16", d, n) for d in (64, 80, 128, 256) for n in (FEW, MANY)},
    **{
        f"paged-prefill-{cache}-d{d}-{n}": paged_prefill(cache, d, n)
        for cache in ("int8-head", "int8-channel", "fp8-64")
        for d in (64, 128, 256)
        for n in (FEW, MANY)
    },
    **{
        f"paged-prefill-{cache}-d{d}-{n}-windows-cap": paged_prefill(cache, d, n, soft_cap=30.0, **HEAD_WISE)
        for cache in ("bf16", "fp8-channel", "int8-16")
        for d in (64, 128, 256)
        for n in (FEW, MANY)
    },
    **{
        f"paged-prefill-bf16-d{d}-{n}-windows": paged_prefill("bf16", d, n, **HEAD_WISE)
        for d in (64, 128, 256)
        for n in (FEW, MANY)
    },
    "paged-prefill-f16-p16-full": paged_prefill("f16", page_size=16, causal=False),
    "paged-prefill-bf16-p1": paged_prefill(page_size=1),
    "paged-prefill-bf16-mask": paged_prefill(mask=1024, window=2048),
    "paged-prefill-fp8-64-d256-mask-cap": paged_prefill("fp8-64", 256, mask=1024, soft_cap=30.0),
    # Heads of more than 256 columns.
    **{
        f"paged-prefill-{cache}-d512-{n}": paged_prefill(cache, 512, n)
        for cache in ("bf16", "f16", "int8-head", "int8-channel", "fp8-64")
        for n in (FEW, MANY)
    },
    **{
        f"paged-prefill-{cache}-d512-windows-cap": paged_prefill(cache, 512, soft_cap=30.0, **HEAD_WISE)
        for cache in ("bf16", "fp8-channel", "int8-16")
    },
    "paged-prefill-bf16-d512-windows": paged_prefill("bf16", 512, page_size=16, **HEAD_WISE),
    "paged-prefill-bf16-d512-mask": paged_prefill("bf16", 512, mask=1024, window=2048),
    "paged-prefill-fp8-64-d512-mask-cap": paged_prefill("fp8-64", 512, mask=1024, soft_cap=30.0),
    **{f"paged-prefill-bf16-d{d}-windows": paged_prefill("bf16", d, **HEAD_WISE) for d in (320, 384, 448)},
    "paged-prefill-fp8-channel-d320-windows-cap": paged_prefill("fp8-channel", 320, soft_cap=30.0, **HEAD_WISE),
    "paged-prefill-bf16-d512-v320": paged_prefill(head_dim=512, value_dim=320),
    "paged-prefill-bf16-d192-v128": paged_prefill(head_dim=192, value_dim=128),
    "paged-prefill-bf16-fused": paged_prefill(lanes=128, page_size=1),
    "paged-prefill-int8-head-d64-fused": paged_prefill("int8-head", head_dim=64, lanes=128, page_size=1),
}


def ragged(key_dim: int, value_dim: int, num_tokens: int, *, sinks: bool, **options: Any) -> TritonCase:
    """Return a case of `ragged_attention` with 8 sequences, 8 query heads and 2 KV heads."""
    kv_heads, sums = 2, shape(9, dtype=jnp.int32)
    arguments = {
        "q": shape(num_tokens, 4 * kv_heads, key_dim),
        "k": shape(2 * num_tokens, kv_heads, key_dim),
        "v": shape(2 * num_tokens, kv_heads, value_dim),
        "cu_q_lens": sums,
        "cu_kv_lens": sums,
    }
    if sinks:
        arguments["sinks"] = shape(4 * kv_heads, dtype=jnp.float32)
    call = functools.partial(pallas_attn.ragged_attention, implementation="triton", return_lse=True, **options)
    return TritonCase(call, arguments)


RAGGED = {
    **{
        f"ragged-{key_dim}-{value_dim}-{n}{name}": ragged(key_dim, value_dim, n, sinks=bool(options), **options)
        for key_dim, value_dim in ((192, 128), (128, 128), (80, 80), (64, 64), (256, 256), (512, 512), (320, 384))
        for n in (FEW, MANY)
        for name, options in (("", {}), ("-options", {"window": 1024, "soft_cap": 30.0}))
    },
    "ragged-192-128-full": ragged(192, 128, MANY, sinks=False, causal=False),
}


def write_kv(
    cache: str = "bf16",
    head_dim: int = 128,
    half: int | None = None,
    *,
    value_dim: int | None = None,
    lanes: int | None = None,
    page_size: int = 64,
    head_slots: bool = False,
    **static: Any,
) -> TritonCase:
    """Return a case of `write_kv` with 8,192 tokens.

    Args:
      cache: dtype and scales of the cache, such as "bf16", "int8-head" or "fp8-16" (16 groups of tokens per page).
      half: number of pairs of columns that RoPE rotates, after norms of keys and queries; None for neither.
      lanes: see `_cache`.
      head_slots: whether each KV head has its own slots.
      static: further fields of `Rope`.

    """
    num_tokens, kv_heads = 8192, 8
    kv = _cache(cache, lanes, 65536 // page_size, page_size, kv_heads, head_dim, value_dim)
    new = shape(num_tokens, kv_heads, head_dim)
    slots = shape(num_tokens, *((kv_heads,) if head_slots else ()), dtype=jnp.int32)
    arguments: dict[str, Any] = {
        "kv": kv,
        "k": new,
        "v": shape(num_tokens, kv_heads, value_dim or head_dim),
        "slots": slots,
    }
    if half is not None:
        angles, weight = shape(num_tokens, half, dtype=jnp.float32), shape(head_dim)
        arguments["rope"] = Rope(angles, angles, weight, weight, **static)  # pyrefly: ignore[bad-argument-type]
        arguments["q"] = shape(num_tokens, 4 * kv_heads, head_dim)
    return TritonCase(functools.partial(pallas_attn.write_kv, implementation="triton"), arguments, tensor_cores=False)


WRITE_KV = {
    **{
        f"write-kv-{cache}-d{d}": write_kv(cache, d, d // 2)
        for cache in ("bf16", "int8-channel", "fp8-head", "fp8-64", "int8-1", "fp8-4")
        for d in (64, 80, 128, 256)
    },
    "write-kv-bf16": write_kv(),
    "write-kv-bf16-p1": write_kv(page_size=1),
    **{
        f"write-kv-{cache}-d{d}": write_kv(cache, d, d // 2)
        for cache in ("bf16", "int8-channel", "fp8-64", "fp8-4", "int8-1")
        for d in (320, 512)
    },
    "write-kv-bf16-d192-v128": write_kv(head_dim=192, half=32, value_dim=128),
    "write-kv-bf16-fused": write_kv(half=64, lanes=128, page_size=1),
    "write-kv-fp8-4-d64-fused": write_kv("fp8-4", head_dim=64, half=32, lanes=128),
    "write-kv-f16-interleaved-partial-norm-after": write_kv(
        "f16", 128, 32, style="interleaved", norm_order="after_rope"
    ),
    "write-kv-int8-4-head-slots-interleaved": write_kv("int8-4", 256, 128, head_slots=True, style="interleaved"),
    "write-kv-fp8-channel-head-slots": write_kv("fp8-channel", head_slots=True),
}


def mla_sparse(
    cache: str = "bf16",
    heads: int = 128,
    latent_dim: int = 512,
    rope_dim: int = 64,
    *,
    num_tokens: int = 512,
    **options: Any,
) -> TritonCase:
    """Return a case of `mla_sparse` in which each of `num_tokens` tokens attends to 2,048 latents. `cache` is an
    argument of `latents`.
    """
    q = functools.partial(shape, num_tokens, heads, dtype=jnp.float16 if cache == "f16" else jnp.bfloat16)
    arguments = {
        "q_latent": q(latent_dim),
        "q_rope": q(rope_dim),
        "cache": latents(cache, latent_dim, rope_dim),
        "slots": shape(num_tokens, 2048, dtype=jnp.int32),
    }
    call = functools.partial(pallas_attn.mla_sparse, sm_scale=0.1, return_lse=True, implementation="triton", **options)
    return TritonCase(call, arguments)


def latents_of_v4() -> PagedLatent:
    """Return the shapes of latents of 512 columns with scales that are powers of two."""
    dtypes = {"dtype": jnp.float8_e4m3fn, "scale_dtype": jnp.float8_e8m0fnu}
    return allocated(
        PagedLatent, latent_cache_spec(num_pages=1024, page_size=64, latent_dim=448, rope_dim=64, **dtypes)
    )


def two_caches(
    heads: int, *, num_tokens: int = 512, extra_k: int = 1024, quantised: bool = False, ranges: bool = False
) -> TritonCase:
    """Return a case of `mla_sparse` as DeepSeek-V4 calls it: a window of 128 tokens and compressed entries, 512 columns
    without rotated keys, and sinks.

    Args:
      ranges: whether slots are ranges of keys.
    """
    slots = functools.partial(slots_of_tokens, num_tokens, page_size=64 if ranges else None)
    cache = latents_of_v4() if quantised else latents("bf16", 512, 0)
    arguments = {
        "q_latent": shape(num_tokens, heads, 512, dtype=jnp.bfloat16),
        "q_rope": None,
        "cache": cache,
        "slots": slots(128),
        "extra_cache": cache,
        "extra_slots": slots(extra_k),
        "sinks": shape(heads, dtype=jnp.float32),
    }
    call = functools.partial(pallas_attn.mla_sparse, sm_scale=0.1, return_lse=True, implementation="triton")
    return TritonCase(call, arguments)


def compress(
    width: int, ratio: int, cache: str = "", num_tokens: int = 64, config: CompressConfig | None = None
) -> TritonCase:
    """Return a case of `compress_and_write` with entries of `width` columns in bfloat16, or index keys of the dtype
    `cache`, or with "v4" latents with scales that are powers of two. Entries of 4 tokens overlap.

    Args:
      config: settings of the kernel; None for the settings that users get.
    """
    entries = latents("bf16", width, 0) if not cache else latents_of_v4() if cache == "v4" else index_keys(cache, width)
    columns = 2 * width * (2 if ratio == 4 else 1)
    state = latent_cache_spec(num_pages=1024, page_size=16, latent_dim=columns, rope_dim=0, dtype=jnp.float32)
    f32, ints = functools.partial(shape, dtype=jnp.float32), functools.partial(shape, dtype=jnp.int32)
    arguments = {
        "state": allocated(PagedLatent, state),
        "entries": entries,
        "rows": f32(num_tokens, columns),
        "norm": shape(width, dtype=jnp.bfloat16),
        **{name: f32(num_tokens, 32) for name in ("cos", "sin")},
        **{name: ints(16, 64) for name in ("state_tables", "entry_tables")},
        "cu_q_lens": ints(17),
        "kv_lens": ints(16),
    }

    def call(**given: Any) -> Any:
        with tuning.deciding(lambda _op, _key, found: config or found):
            return pallas_attn.compress_and_write(**given, ratio=ratio, implementation="triton")

    return TritonCase(call, arguments, tensor_cores=False)


def stream_weights(num_streams: int, num_tokens: int) -> TritonCase:
    columns, f32 = (2 + num_streams) * num_streams, functools.partial(shape, dtype=jnp.float32)
    arguments = {
        "logits": f32(num_tokens, columns),
        "inverse_rms": f32(num_tokens),
        "scale": f32(3),
        "base": f32(columns),
    }
    call = functools.partial(pallas_attn.hyper_connection_weights, implementation="triton")
    return TritonCase(call, arguments, tensor_cores=False)


def index_keys(name: str, index_dim: int = 128) -> PagedIndexKeys:
    sizes = {"num_pages": 1024, "page_size": 64, "index_dim": index_dim}
    return allocated(PagedIndexKeys, index_cache_spec(**sizes, dtype=CACHE_DTYPES[name]))


def indexed(
    op: Callable[..., Any],
    cache: str = "bf16",
    heads: int = 64,
    index_dim: int = 128,
    *,
    num_tokens: int = 16,
    table_pages: int = 512,
    tree: int = 0,
    **options: Any,
) -> TritonCase:
    """Return a case of an operation on index keys, with 16 sequences of up to 64 * `table_pages` tokens.

    Args:
      op: `index_scores` or `index_top_k`.
      cache: dtype of the index keys, a key of `CACHE_DTYPES`.
      tree: number of columns of a draft mask; 0 for no mask.
      options: further arguments of the call.

    """
    ints = functools.partial(shape, dtype=jnp.int32)
    arguments = {
        "q": shape(num_tokens, heads, index_dim, dtype=jnp.float16 if cache == "f16" else jnp.bfloat16),
        "weights": shape(num_tokens, heads, dtype=jnp.float32),
        "index": index_keys(cache, index_dim),
        "block_tables": ints(16, table_pages),
        "cu_q_lens": ints(17),
        "kv_lens": ints(16),
    }
    if tree:
        arguments["draft_mask"] = shape(num_tokens, tree, dtype=jnp.bool_)
    return TritonCase(functools.partial(op, implementation="triton", **options), arguments)


CHOOSE = functools.partial(indexed, functools.partial(pallas_attn.index_top_k, top_k=2048))

SPARSE = {
    **{
        f"mla-sparse-{cache}-h{heads}": mla_sparse(cache, heads) for cache in ("bf16", "fp8") for heads in (16, 40, 128)
    },
    **{f"mla-sparse-{cache}-split": mla_sparse(cache, num_tokens=1) for cache in ("bf16", "fp8")},
    **{
        f"mla-sparse-{cache}-{latent_dim}-{rope_dim}-h{heads}": mla_sparse(cache, heads, latent_dim, rope_dim)
        for cache, latent_dim, rope_dim, heads in (
            *(("bf16", 512, 128, 128), ("bf16", 448, 64, 64), ("bf16", 256, 32, 64), ("bf16", 96, 16, 16)),
            *(("fp8", 512, 128, 128), ("fp8", 128, 32, 64)),
        )
    },
    # Together with the other cases, these cases have every tile that `tiles.sparse_tile` and `tiles.index_tile` can
    # return.
    **{
        f"mla-sparse-{cache}-{latent_dim}-{rope_dim}-h{heads}": mla_sparse(cache, heads, latent_dim, rope_dim)
        for cache, latent_dim, rope_dim in (
            *(("bf16", 256, 64), ("bf16", 128, 64), ("bf16", 64, 32), ("fp8", 256, 64), ("fp8", 128, 64)),
        )
        for heads in (3, 24, 64)
    },
    "mla-sparse-bf16-512-128-h16": mla_sparse("bf16", 16, 512, 128),
    **{
        f"index-scores-{cache}-d{index_dim}-h{heads}-{num_tokens}": indexed(
            pallas_attn.index_scores, cache, heads, index_dim, num_tokens=num_tokens
        )
        for cache in ("bf16", "fp8")
        for index_dim in (128, 256)
        for heads in (8, 32, 64, 128)
        for num_tokens in (16, 32, 64, 128, 256)
    },
    **{f"mla-sparse-two-caches-h{heads}": two_caches(heads) for heads in (8, 16, 64, 128)},
    "mla-sparse-two-caches-split": two_caches(64, num_tokens=1),
    **{f"mla-sparse-two-caches-fp8-h{heads}": two_caches(heads, quantised=True) for heads in (8, 16, 64, 128)},
    **{f"mla-sparse-two-caches-ranges-h{heads}": two_caches(heads, ranges=True) for heads in (8, 64, 128)},
    "mla-sparse-two-caches-ranges-split": two_caches(64, num_tokens=1, ranges=True),
    **{
        f"mla-sparse-two-caches-fp8-ranges-h{heads}": two_caches(heads, quantised=True, ranges=True)
        for heads in (8, 64, 128)
    },
    "compress-512-4": compress(512, 4),
    "compress-512-128": compress(512, 128),
    "compress-512-4-v4": compress(512, 4, "v4"),
    "compress-128-4-bf16": compress(128, 4, "bf16"),
    "compress-128-4-fp8": compress(128, 4, "fp8"),
    "compress-512-4-tokens": compress(512, 4, config=CompressConfig(tokens=4, rows=8, warps=4)),
    "compress-128-4-tokens": compress(128, 4, "fp8", config=CompressConfig(tokens=8, rows=8, warps=1)),
    **{f"hyper-connection-weights-{n}": stream_weights(n, 64) for n in (1, 2, 4, 8, 16)},
    "index-top-k-entries": CHOOSE(num_tokens=64, ratio=4),
    "mla-sparse-f16-f32": mla_sparse("f16", out_dtype=jnp.float32),
    "mla-sparse-f16-h3": mla_sparse("f16", 3),
    **{
        f"index-top-k-{cache}-{num_tokens}": CHOOSE(cache, num_tokens=num_tokens)
        for cache in ("bf16", "fp8")
        for num_tokens in (16, 4096)
    },
    **{
        f"index-top-k-{cache}-d{index_dim}-h{heads}-{num_tokens}": CHOOSE(
            cache, heads, index_dim, num_tokens=num_tokens
        )
        for cache, index_dim, heads, num_tokens in (
            *(("bf16", 64, 32, 16), ("fp8", 64, 8, 48), ("bf16", 128, 128, 16), ("f16", 256, 64, 256)),
            *(("fp8", 96, 128, 16), ("fp8", 256, 32, 16)),
        )
    },
    "index-top-k-short": CHOOSE(table_pages=2),
    **{
        f"index-top-k-{cache}-h{heads}-{n}-tree": CHOOSE(cache, heads, num_tokens=n, tree=8)
        for cache in ("bf16", "fp8")
        for heads in (64, 128)
        for n in (16, 32, 128)
    },
    "index-scores-bf16": indexed(pallas_attn.index_scores),
    "index-scores-fp8-64": indexed(pallas_attn.index_scores, "fp8", num_tokens=64),
    # With many rows, one Triton program selects from a row. With few rows, several programs share a row; each reads a
    # segment. The cases have segments of each size.
    **{
        name: TritonCase(
            functools.partial(pallas_attn.select_top_k, top_k=2048, implementation="triton"),
            {"scores": shape(num_rows, width, dtype=jnp.float32)},
            tensor_cores=False,
        )
        for name, num_rows, width in (
            *(
                ("select-top-k", 256, 32768),
                ("select-top-k-shared", 8, 32768),
                ("select-top-k-shared-wide", 16, 131072),
            ),
            *(("select-top-k-shared-16", 16, 32768), ("select-top-k-shared-32", 32, 32768)),
        )
    },
    **{
        f"write-index-keys-{cache}": TritonCase(
            functools.partial(pallas_attn.write_index_keys, implementation="triton"),
            {"index": index_keys(cache), "keys": shape(64, 128), "slots": shape(64, dtype=jnp.int32)},
            tensor_cores=False,
        )
        for cache in ("bf16", "fp8")
    },
}

DRAW = {
    f"draw-{vocab_size}": TritonCase(
        draw_rows,
        {
            **{name: shape(64, vocab_size, dtype=jnp.float32) for name in ("logits", "noise")},
            **{name: shape(64, dtype=jnp.float32) for name in ("temperature", "top_p", "min_p")},
            "top_k": shape(64, dtype=jnp.int32),
        },
        tensor_cores=False,
    )
    for vocab_size in (1000, 32000, 102400)
}


def plan(batch: int, kv_heads: int = 8, mode: Mode = "balanced", *, windows: bool = False) -> TritonCase:
    """Return a case of `plan_decode` for `batch` sequences with 4 query heads per KV head."""
    bf16, ints = (functools.partial(shape, dtype=dtype) for dtype in (jnp.bfloat16, jnp.int32))
    spec = kv_cache_spec(num_pages=1024, page_size=64, num_kv_heads=kv_heads, head_dim=128, dtype=jnp.bfloat16)
    arguments: dict[str, Any] = {
        "q": bf16(batch, 1, 4 * kv_heads, 128),
        "cache": allocated(PagedKV, spec),
        "block_tables": ints(batch, 64),
        "kv_lens": ints(batch),
    }
    if windows:
        heads: Any = ints(kv_heads)
        arguments["window"] = HeadWindow(heads, heads)
    call = functools.partial(pallas_attn.plan_decode, mode=mode, implementation="triton")
    return TritonCase(call, arguments, tensor_cores=False)


PLANS = {
    "plan-decode-1": plan(1),
    "plan-decode-32-windows": plan(32, windows=True),
    "plan-decode-512": plan(512),
    "plan-decode-fixed-64": plan(64, mode="fixed"),
}

TRITON_CASES: dict[str, TritonCase] = (
    LATENTS | SPARSE | MLA_DECODE | PAGED_DECODE | PAGED_PREFILL | RAGGED | WRITE_KV | DRAW | PLANS
)

SPILLS = dict.fromkeys(
    (
        *(("mla-decode-bf16-h128", "sm90"), ("mla-decode-bf16-448-64-h128", "sm90")),
        *(("mla-decode-f16-h128-f32", "sm90"), ("mla-decode-drafts", "sm90")),
        ("mla-decode-bf16-512-128-h128", "sm90"),
        *(("mla-sparse-bf16-h128", "sm90"), ("mla-sparse-fp8-h128", "sm90")),
        *(("mla-sparse-bf16-split", "sm90"), ("mla-sparse-fp8-split", "sm90")),
        *(("mla-sparse-bf16-448-64-h64", "sm90"), ("mla-sparse-fp8-512-128-h128", "sm90")),
        *(("mla-sparse-f16-f32", "sm90"), ("mla-sparse-two-caches-split", "sm90")),
    ),
    200,
) | dict.fromkeys(
    (
        *(
            (f"index-top-k-{cache}-{heads}-32-tree", gpu)
            for cache in ("bf16", "fp8")
            for heads in ("h64", "h128")
            for gpu in ("sm86", "sm89", "sm100")
        ),
        *(("select-top-k-shared-32", "sm86"), ("select-top-k-shared-32", "sm89")),
        *(("mla-decode-fp8-512-128-h16", "sm80"), ("mla-decode-fp8-512-128-h16", "sm86")),
        ("paged-decode-fp8-16+bf16-d512-tree", "sm80"),
    ),
    32,
)
"""Permitted bytes of register spills per thread. The first kernels do not spill with other tiles, but were slower in
all measurements. The kernels of index_top_k and select_top_k are limited to 128 registers per thread, so that two
programs fit on a multiprocessor. They do not spill on sm80, sm90 and sm120. mla_decode spills 16 bytes for latents of
512 and 128 columns in fp8, which no model has. paged_decode spills 8 bytes for draft trees over fp8 keys and 16-bit
values of 512 columns.
"""

IN_EVERY_RUN = frozenset(
    {
        ("write-latent-fp8-512-64", "sm80"),
        ("gather-latent-fp8-512-64", "sm86"),
        ("mla-decode-bf16-h128", "sm90"),
        ("mla-sparse-two-caches-h64", "sm86"),
        ("compress-512-4", "sm90"),
        ("hyper-connection-weights-4", "sm80"),
        ("index-top-k-fp8-16", "sm86"),
        ("write-index-keys-fp8", "sm80"),
        ("draw-102400", "sm90"),
        ("plan-decode-32-windows", "sm86"),
        ("paged-decode-fp8-16-d128", "sm86"),
        ("paged-decode-tree", "sm120"),
        ("ragged-192-128-8192-options", "sm120"),
        ("write-kv-fp8-4-d128", "sm86"),
        ("paged-prefill-int8-16-d128-8192-windows-cap", "sm89"),
    }
)
"""(case, GPU) of `make test`: each kernel at least once, and each architecture before sm100.

`make test-slow` compiles all other combinations.
"""
