"""`write_kv` on Hopper: every layout of rows in registers that config.py or a packaged tuning can choose, and features.

The most registers are taken by what rotates and norms keys and queries, so most cases do.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import pallas_attn
from pallas_attn import PagedKV, Rope, kv_cache_spec, tuning
from pallas_attn.ops.kv_write.config import MosaicKey
from tests.aot.case import Case, shape

KV_HEADS, GROUP, PAGES, PAGE_SIZE = 8, 4, 8192, 64
CACHES: dict[str, tuple[Any, Any]] = {
    "bf16": (jnp.bfloat16, None),
    "f16": (jnp.float16, None),
    "int8-head": (jnp.int8, "head"),
    "int8-channel": (jnp.int8, "channel"),
    "int8-group": (jnp.int8, 4),
    "int8-page": (jnp.int8, 1),
    "fp8-head": (jnp.float8_e4m3fn, "head"),
    "fp8-token": (jnp.float8_e4m3fn, PAGE_SIZE),
    "fp8-group": (jnp.float8_e4m3fn, 4),
}
FEW, MANY = 64, 8192
"""Tokens of a step of decode and of one of prefill, from which other layouts follow."""

write_kv = functools.partial(pallas_attn.write_kv, implementation="mosaic")


def paged_kv(cache: str, head_dim: int) -> PagedKV:
    dtype, scales = CACHES[cache]
    spec = kv_cache_spec(
        num_pages=PAGES, page_size=PAGE_SIZE, num_kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype, scales=scales
    )
    return jax.eval_shape(lambda: PagedKV.allocate(spec))


def rope(num_tokens: int, head_dim: int, half: int | None = None, norms: bool = True, **static: Any) -> dict[str, Any]:
    angles = shape(num_tokens, half or head_dim // 2, dtype=jnp.float32)
    weight = shape(head_dim) if norms else None
    return {
        "rope": Rope(angles, angles, weight, weight, **static),  # pyrefly: ignore[bad-argument-type]
        "q": shape(num_tokens, GROUP * KV_HEADS, head_dim),
    }


def write(
    cache: str,
    num_tokens: int,
    head_dim: int = 128,
    *,
    head_slots: bool = False,
    device: str = "untuned",
    **more: Any,
) -> Case:
    """A call with the layouts that are packaged for a device, or those of one that nothing was measured on.

    Where groups of tokens have scales, notes of who writes a slot take 4 bytes a slot.
    """
    new = shape(num_tokens, KV_HEADS, head_dim)
    slots = shape(*((num_tokens, KV_HEADS) if head_slots else (num_tokens,)), dtype=jnp.int32)
    arguments = {"kv": paged_kv(cache, head_dim), "k": new, "v": new, "slots": slots} | more
    slots_of_pool = PAGES * PAGE_SIZE * (KV_HEADS if head_slots else 1)
    grouped = cache.endswith(("-group", "-page"))
    temporaries = 1024 + (4 * slots_of_pool if grouped else 0)

    def call(**arguments: Any) -> Any:
        with mock.patch.object(tuning, "device_name", return_value=device):
            return write_kv(**arguments)

    return Case(call, arguments, cache="kv", donated=True, tensor_cores=False, temporaries=temporaries)


def in_scan(case: Case) -> Case:
    """Some such calls in a loop, over the cache that it carries."""

    def steps(kv: PagedKV, **arguments: Any) -> Any:
        return lax.scan(lambda kv, step: (case.function(kv=kv, **step), None), kv, arguments)[0]

    arguments = {name: a if name == "kv" else shape(4, *a.shape, dtype=a.dtype) for name, a in case.arguments.items()}
    return replace(case, function=steps, arguments=arguments, temporaries=case.temporaries + 2**20)


def tuned() -> Iterator[tuple[str, Case]]:
    """What devices have layouts of their own for."""
    folder = resources.files(pallas_attn) / "tuned"
    for file in folder.iterdir() if folder.is_dir() else ():
        device, _, kind = file.name.partition(".")
        for entry in json.loads(file.read_text()).get("kv_write/mosaic", ()) if kind == "json" else ():
            key = MosaicKey(**entry["key"])
            cache = {0: "bf16", 1: "fp8-token", 16: "fp8-group", 64: "int8-page"}[key.group_tokens]
            tokens, style = key.entries // KV_HEADS, key.rotation
            options = {} if style == "none" else rope(tokens, key.head_dim, key.rotary_half, style=style)
            name = "-".join(map(str, entry["key"].values()))
            yield f"write-kv-{name}@{device}", write(cache, tokens, key.head_dim, device=device, **options)


TURNED = {
    "neox-partial-norm-after": {"half": 32, "norm_order": "after_rope"},
    "interleaved": {"style": "interleaved"},
    "no-norm": {"norms": False},
}
WRITES = {
    **{f"write-kv-bf16-{name}": write("bf16", MANY, **rope(MANY, 128, **options)) for name, options in TURNED.items()},
    "write-kv-bf16-few": write("bf16", FEW),
    "write-kv-int8-channel": write("int8-channel", MANY),
    "write-kv-fp8-token": write("fp8-token", MANY),
    "write-kv-fp8-group-head-slots": write("fp8-group", MANY, head_slots=True),
    "write-kv-int8-group-scan": in_scan(write("int8-group", FEW)),
    "write-kv-int8-page": write("int8-page", MANY, **rope(MANY, 128)),
    **dict(tuned()),
}
"""Every kind of cache, of rotation and of slots."""

WRITES_MORE = {
    f"write-kv-{cache}-d{head_dim}-{num_tokens}": write(
        cache, num_tokens, head_dim, head_slots=True, **rope(num_tokens, head_dim, head_dim // 4, style="interleaved")
    )
    for cache, head_dim, num_tokens in itertools.product(CACHES, (64, 128, 256), (FEW, 512, MANY))
    if (cache, head_dim) != ("int8-page", 256)  # too many values for a thread
}
"""Their combinations, and every width of a row in threads."""
