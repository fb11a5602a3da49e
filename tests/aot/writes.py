"""Compile-gate cases of `write_kv` on Hopper: every register layout that config.py can choose, and every option.

Most cases include norms and rotation (RoPE), which need the most registers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import export, lax

import pallas_attn
from pallas_attn import PagedKV, Rope, kv_cache_spec
from pallas_attn.runtime import tuning
from tests.aot.case import Case, DeferredCase, allocated, cache_in_layout, deferred, shape

KV_HEADS, GROUP, PAGE_SIZE = 8, 4, 64
CACHES: dict[str, tuple[Any, Any]] = {
    "bf16": (jnp.bfloat16, None),
    "f16": (jnp.float16, None),
    "int8-head": (jnp.int8, "head"),
    "int8-channel": (jnp.int8, "channel"),
    "int8-by-16": (jnp.int8, PAGE_SIZE // 16),
    "int8-by-64": (jnp.int8, PAGE_SIZE // 64),
    "fp8-head": (jnp.float8_e4m3fn, "head"),
    "fp8-by-1": (jnp.float8_e4m3fn, PAGE_SIZE),
    "fp8-by-16": (jnp.float8_e4m3fn, PAGE_SIZE // 16),
}
"""Dtype and argument `scales` of `kv_cache_spec` by kind of cache. In the name "by-16", a group of 16 tokens shares a
scale; the argument is the number of groups per page.
"""
FEW, MANY = 64, 8192
"""Number of tokens of a decode step and of a prefill step. The register layout depends on the number of tokens."""

write_kv = functools.partial(pallas_attn.write_kv, implementation="mosaic")


def paged_kv(cache: str, head_dim: int, num_pages: int) -> PagedKV:
    dtype, scales = CACHES[cache]
    spec = kv_cache_spec(
        num_pages=num_pages, page_size=PAGE_SIZE, num_kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype, scales=scales
    )
    return allocated(PagedKV, spec)


def rope(num_tokens: int, head_dim: int, half: int | None = None, norms: bool = True, **static: Any) -> dict[str, Any]:
    angles = shape(num_tokens, half or head_dim // 2, dtype=jnp.float32)
    weight = shape(head_dim) if norms else None
    return {
        "rope": Rope(angles, angles, weight, weight, **static),  # pyrefly: ignore[bad-argument-type]
        "q": shape(num_tokens, GROUP * KV_HEADS, head_dim),
    }


@deferred
def write(
    cache: str,
    num_tokens: int,
    head_dim: int = 128,
    *,
    num_pages: int = 8192,
    head_slots: bool = False,
    layout: Mapping[str, bool] | None = None,
    **more: Any,
) -> Case:
    """Return a case of `write_kv`.

    Args:
      layout: options of `cache_in_layout`.
      more: further arguments of the call, such as the ones of `rope`.

    With scales per group of tokens, the temporary memory has, for each slot of the pool, the index of the token that is
    written to it (4 bytes).
    """
    new = shape(num_tokens, KV_HEADS, head_dim)
    slots = shape(*((num_tokens, KV_HEADS) if head_slots else (num_tokens,)), dtype=jnp.int32)
    kv = cache_in_layout(paged_kv(cache, head_dim, num_pages), **layout or {})
    arguments = {"kv": kv, "k": new, "v": new, "slots": slots} | more
    slots_of_pool = num_pages * PAGE_SIZE * (KV_HEADS if head_slots else 1)
    temporaries = 1024 + (4 * slots_of_pool if "-by-" in cache else 0)

    def call(**arguments: Any) -> Any:
        with mock.patch.object(tuning, "device_name", return_value="untuned"):  # has no packaged layouts
            return write_kv(**arguments)

    return Case(call, arguments, cache="kv", donated=True, tensor_cores=False, temporaries=temporaries)


@deferred
def in_scan(plain: DeferredCase) -> Case:
    """Return a case that runs another case in a scan. The cache is the carry of the scan."""
    case = plain.made

    def steps(kv: PagedKV, **arguments: Any) -> Any:
        return lax.scan(lambda kv, step: (case.function(kv=kv, **step), None), kv, arguments)[0]

    arguments = {name: a if name == "kv" else shape(4, *a.shape, dtype=a.dtype) for name, a in case.arguments.items()}
    return replace(case, function=steps, arguments=arguments, temporaries=case.temporaries + 2**20)


@deferred
def exported(plain: DeferredCase) -> Case:
    """Return a case whose function is exported, serialised and deserialised with `jax.export`."""
    case = plain.made

    def call(kv: PagedKV, **arguments: Any) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (kv, arguments))
        jitted = jax.jit(lambda kv, arguments: case.function(kv=kv, **arguments), donate_argnums=0)
        serialised = export.export(jitted, platforms=("cuda",))(*shapes).serialize()
        return export.deserialize(serialised).call(kv, arguments)

    return replace(case, function=call)


@deferred
def mapped(plain: DeferredCase) -> Case:
    """Return a case that runs another case with `jax.vmap` over two stacked caches."""
    case = plain.made
    arguments = jax.tree.map(lambda a: shape(2, *a.shape, dtype=a.dtype), dict(case.arguments))
    function = lambda **arguments: jax.vmap(lambda each: case.function(**each))(arguments)  # noqa: E731
    return replace(case, function=function, arguments=arguments, temporaries=2 * case.temporaries)


ROTATED: dict[str, dict[str, Any]] = {
    "neox-partial-norm-after": {"half": 32, "norm_order": "after_rope"},
    "interleaved": {"style": "interleaved"},
    "no-norm": {"norms": False},
}
FUSED = {"fused": True}
TOKENS_FIRST = {"tokens_first": True}
WRITES = {
    **{f"write-kv-bf16-{name}": write("bf16", MANY, **rope(MANY, 128, **options)) for name, options in ROTATED.items()},
    "write-kv-bf16": write("bf16", FEW),
    "write-kv-int8-channel": write("int8-channel", MANY),
    "write-kv-int8-by-64": write("int8-by-64", MANY, **rope(MANY, 128)),
    "write-kv-fp8-by-1": write("fp8-by-1", MANY),
    "write-kv-fp8-by-16-head-slots": write("fp8-by-16", MANY, head_slots=True),
    "write-kv-scan": in_scan(write("int8-by-16", FEW)),
    "write-kv-vmap": mapped(write("bf16", FEW)),
    "write-kv-export": exported(write("fp8-head", FEW)),
    "write-kv-large-pool": write("fp8-by-16", FEW, num_pages=2**17),
    "write-kv-bf16-tokens-first": write("bf16", MANY, layout=TOKENS_FIRST),
    "write-kv-bf16-fused": write("bf16", MANY, **rope(MANY, 128), layout=FUSED),
    "write-kv-bf16-fused-tokens-first": write("bf16", FEW, layout=FUSED | TOKENS_FIRST),
    "write-kv-int8-channel-fused-tokens-first": write("int8-channel", MANY, layout=FUSED | TOKENS_FIRST),
    "write-kv-fp8-head-fused-tokens-first": write(
        "fp8-head", MANY, **rope(MANY, 128, style="interleaved"), layout=FUSED | TOKENS_FIRST
    ),
    "write-kv-fp8-by-1-fused-tokens-first": write("fp8-by-1", MANY, layout=FUSED | TOKENS_FIRST),
    "write-kv-fp8-by-16-fused-head-slots": write("fp8-by-16", MANY, layout=FUSED, head_slots=True),
    "write-kv-fused-scan": in_scan(write("int8-by-16", FEW, layout=FUSED)),
}
"""Cases with each kind of cache, layout, rotation and slots, and calls in `scan`, `vmap` and `jax.export`."""

WRITES_MORE = {
    f"write-kv-{cache}-d{head_dim}-{num_tokens}": write(
        cache, num_tokens, head_dim, head_slots=True, **rope(num_tokens, head_dim, head_dim // 4, style="interleaved")
    )
    for cache, head_dim, num_tokens in itertools.product(CACHES, (64, 128, 256), (FEW, 512, MANY))
    if (cache, head_dim) != ("int8-by-64", 256)  # unsupported: a thread would hold too many values
}
"""Cases with combinations of caches, head dimensions and numbers of tokens, which have every number of threads per row.
"""
