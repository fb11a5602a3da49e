"""Inputs for tests of `write_kv`, and the expected results in plain numpy.

Pools have stale contents: random bytes, as if other sequences had used them before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_attn import write_kv
from pallas_attn.types import CacheSpec, PagedKV, ScaleLayout, kv_cache_spec
from tests.contract import backends
from tests.kit.harness import Variant, any_bits, compiled

NUM_PAGES, HEADS, PAGE_SIZE, WIDTH = 5, 2, 8, 16
NUM_TOKENS = 6
QMAX = {"int8": np.float32(127), "float8_e4m3fn": np.float32(448), "float8_e5m2": np.float32(57344)}
PLAIN = ["bfloat16", "float16", "float32"]

RUNNABLE = [backend.variant for backend in backends.backends_of("write_kv", lambda backend: not backend.interpreted)]
"""Variants of `write_kv` whose kernels are not interpreted on this machine, for tests that loop over variants."""

each_variant = backends.every_variant("write_kv")
"""Decorator: run a test with argument `variant` for each variant of `write_kv`."""


def cache_spec(dtype: str, scales: ScaleLayout = None, num_pages: int = NUM_PAGES, *, width: int = WIDTH) -> CacheSpec:
    return kv_cache_spec(
        num_pages=num_pages, page_size=PAGE_SIZE, num_kv_heads=HEADS, head_dim=width, dtype=dtype, scales=scales
    )


def stale_cache(rng: np.random.Generator, dtype: str, scales: ScaleLayout = None, *, width: int = WIDTH) -> PagedKV:
    """Return a cache of random bytes, including NaN, with huge, tiny, infinite and NaN scales."""
    arrays: dict[str, Any] = {}
    for name, a in cache_spec(dtype, scales, width=width).arrays.items():
        if name.endswith("scale"):
            arrays[name] = rng.choice([1e30, 1e-30, np.inf, np.nan], a.shape).astype(np.float32)
        else:
            arrays[name] = any_bits(rng, a.shape, a.dtype)
    return PagedKV(**{name: jnp.asarray(a) for name, a in arrays.items()})


def tokens(
    rng: np.random.Generator, dtype: Any = np.float32, spread: float = 1.0, *, width: int = WIDTH
) -> tuple[Any, Any]:
    """Draw keys and values [T, Hkv, D]. Each token and head is multiplied by exp(`spread` * n), with n standard
    normal.
    """
    shape = (2, NUM_TOKENS, HEADS, width)
    x = rng.standard_normal(shape) * np.exp(spread * rng.standard_normal((*shape[:-1], 1)))
    return jnp.asarray(x[0].astype(dtype)), jnp.asarray(x[1].astype(dtype))


def random_slots(rng: np.random.Generator, rank: int) -> Any:
    """Draw distinct slots: [T] with rank 1, or slots per head [T, Hkv] with rank 2. Three slots are outside the
    pool.
    """
    shape = (NUM_TOKENS, HEADS)[:rank]
    pool = NUM_PAGES * PAGE_SIZE * (HEADS if rank == 2 else 1)
    slots = rng.permutation(pool)[: np.prod(shape)].astype(np.int32)
    slots[rng.permutation(slots.size)[:3]] = [-1, pool, np.iinfo(np.int32).max]
    return jnp.asarray(slots.reshape(shape))


def write(variant: Variant, kv: PagedKV, k: Any, v: Any, slots: Any, **rope_and_q: Any) -> Any:
    """Run the jitted `write_kv`. Calls with equal shapes share a compiled function."""
    return compiled(write_kv, variant)(kv=kv, k=k, v=v, slots=slots, **rope_and_q)


def numpy_quantise(x: Any, scale: Any, dtype: str) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        values = np.clip(np.float32(x) / np.float32(scale), -QMAX[dtype], QMAX[dtype])
    return np.rint(values).astype(np.int8) if dtype == "int8" else values.astype(dtype)


def numpy_write(kv: PagedKV, k: Any, v: Any, slots: Any) -> PagedKV:
    """Return the expected result of `write_kv` without RoPE, computed token by token, or scale group by scale group."""
    arrays: dict[str, Any] = {
        f.name: np.array(a) for f in dataclasses.fields(kv) if (a := getattr(kv, f.name)) is not None
    }
    for name, x in (("k", np.asarray(k)), ("v", np.asarray(v))):
        pages, scale = arrays[name], arrays.get(f"{name}_scale")
        if scale is not None and scale.ndim == 3:
            _write_groups(pages, scale, x.astype(np.float32), slots)
            continue
        for t, h, page, head, offset in _targets(slots):
            pages[page, head, offset] = (
                x[t, h].astype(pages.dtype) if scale is None else numpy_quantise(x[t, h], scale[h], pages.dtype.name)
            )
    return PagedKV(**arrays)


def _targets(slots: Any) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (token, head, page, head of the page row, offset in the page) for each token and head that is written."""
    slots = np.asarray(slots).astype(np.int64)
    for t in range(NUM_TOKENS):
        for h in range(HEADS):
            row = slots[t] // PAGE_SIZE * HEADS + h if slots.ndim == 1 else slots[t, h] // PAGE_SIZE
            if 0 <= row < NUM_PAGES * HEADS:
                yield t, h, row // HEADS, row % HEADS, slots.reshape(NUM_TOKENS, -1)[t, h % slots[t].size] % PAGE_SIZE


def _write_groups(pages: np.ndarray, scale: np.ndarray, x: np.ndarray, slots: Any) -> None:
    dtype, size = pages.dtype.name, PAGE_SIZE // scale.shape[-1]
    groups: dict[tuple[int, int, int], dict[int, np.ndarray]] = {}
    for t, h, page, head, offset in _targets(slots):
        groups.setdefault((page, head, offset // size), {})[offset % size] = x[t, h]
    for (page, head, j), new in groups.items():
        stored = pages[page, head, j * size : (j + 1) * size]
        earlier = range(min(new))
        old = scale[page, head, j]
        largest = max((np.abs(stored[i].astype(np.float32)).max() for i in earlier), default=np.float32(0))
        held = old * (largest / QMAX[dtype]) if largest > 0 else np.float32(0)
        amax = max(np.abs(token).max() for token in new.values())
        scale[page, head, j] = max(held, amax / QMAX[dtype]) or np.float32(1)
        for i in earlier:
            stored[i] = numpy_quantise(stored[i].astype(np.float32) * old, scale[page, head, j], dtype)
        for i, token in new.items():
            stored[i] = numpy_quantise(token, scale[page, head, j], dtype)
