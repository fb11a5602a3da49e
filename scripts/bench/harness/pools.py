"""Page pools with random contents for benchmarks.

A chain is one compiled program that calls an operation several times. The calls read separate pages, so that no page is
in the L2 when it is read. When no separate pages are left, the following calls reuse the pages of the first calls,
which have left the L2 by then (they are cold).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_attn import (
    CacheSpec,
    PagedIndexKeys,
    PagedKV,
    PagedLatent,
    kv_cache_spec,
    latent_cache_spec,
    view_fused,
    view_nhd,
)
from scripts.bench.harness.device import memory_bytes

CACHES: dict[str, tuple[Any, Any]] = {
    "bf16": (jnp.bfloat16, None),
    "f16": (jnp.float16, None),
    "int8-head": (jnp.int8, "head"),
    "int8-channel": (jnp.int8, "channel"),
    "int8-token": (jnp.int8, "token"),
    "fp8-head": (jnp.float8_e4m3fn, "head"),
    "fp8-group": (jnp.float8_e4m3fn, 4),
    "fp8-token": (jnp.float8_e4m3fn, "token"),
    "f32": (jnp.float32, None),
}
"""Kinds of caches by name: dtype, and argument `scales` of `kv_cache_spec`. "token" stands for `page_size` groups per
page, so that each token has a scale.
"""

type Layout = Literal["heads first", "tokens first", "fused, tokens first"]
"""Order of a page's axes. "heads first" is the order of `PagedKV`. The others are views of pages whose tokens come
before the heads (`view_nhd`). "fused, tokens first" has keys and values in one array (`view_fused`).
"""

FP8_LATENTS = ("fp8", "fp8-v4")
"""Kinds of float8_e4m3fn latents. "fp8-v4" has DeepSeek-V4's scales, powers of two for 64 columns each."""

COLD_BYTES = 2 * 2**30
"""Bytes that the calls of a chain read before a page is read again, unless `MAX_CALLS` is reached first. This is many
times the L2 (60 MB on an H200), and enough work that the host can launch the next run in time.
"""

MIN_CALLS = 16
"""Minimum number of calls in a chain that only reads. Starting a chain takes about 15 microseconds, which would distort
the time of a short chain.
"""

MAX_CALLS = 64
"""Maximum number of calls in a chain. It limits the compilation time; a chain of calls of 10 microseconds is still long
compared with its start.
"""

PORTABLE_CALLS = 8
"""Maximum number of calls in a chain of an XLA implementation, because XLA compiles the code of each call again. With
small caches, the calls of a shorter chain may find their pages in the L2.
"""

CHUNK_BYTES = 64 * 2**20
"""Maximum bytes of pages that are drawn at a time."""


@dataclasses.dataclass(frozen=True)
class ChainInputs:
    """Arguments of a chain of calls by name: `shared` by all calls, and `owns` of each call."""

    shared: dict[str, Any]
    owns: list[dict[str, Any]]


def latent_dtype(cache: str) -> Any:
    """Return the dtype of latents or index keys of the kind `cache`: a key of `CACHES`, or one of `FP8_LATENTS`
    (float8_e4m3fn).
    """
    return jnp.float8_e4m3fn if cache in FP8_LATENTS else CACHES[cache][0]


def latent_query_dtype(cache: str) -> Any:
    """Return the dtype of queries over latents or index keys of the kind `cache`, as for `latent_dtype`."""
    return jnp.bfloat16 if cache in FP8_LATENTS else CACHES[cache][0]


def cache_spec(cache: str, *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> CacheSpec:
    """Return the shapes of a pool of the kind `cache`, a key of `CACHES`."""
    dtype, scales = CACHES[cache]
    return kv_cache_spec(
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        scales=page_size if scales == "token" else scales,
    )


def calls_of(num_bytes: int) -> int:
    """Return the number of calls with separate pages, at most `MAX_CALLS`, that together read `COLD_BYTES` if each call
    reads `num_bytes`.
    """
    return max(1, min(MAX_CALLS, math.ceil(COLD_BYTES / num_bytes)))


def at_least(calls: int) -> int:
    """Return the number of calls in a chain that only reads, if `calls` calls have separate pages."""
    return max(MIN_CALLS, calls)


def chain_of[Own](implementation: str, owns: list[Own]) -> list[Own]:
    """Return the arguments `owns` of the calls for this implementation: at most `PORTABLE_CALLS` calls for XLA."""
    return owns if implementation in ("mosaic", "triton") else owns[:PORTABLE_CALLS]


def check_fits(num_bytes: int) -> None:
    """Raise MemoryError if a pool would exceed 80% of the device memory."""
    limit = int(0.8 * memory_bytes())
    if num_bytes > limit:
        raise MemoryError(f"its pages take {num_bytes / 1e9:.1f} GB, and the limit is {limit / 1e9:.1f}")


def random_pool(spec: CacheSpec) -> PagedKV:
    """Make keys and values with a normal distribution. Int8 values have a standard deviation of 40. Scales are drawn
    from 0.01 to 0.04, so dequantised int8 values have a standard deviation of about 1.
    """
    return PagedKV(**_random_arrays(spec))


def view_of(kv: PagedKV, layout: Layout) -> PagedKV:
    """Return the pool in this layout. Its values are random, so any order of them will do."""
    if layout == "heads first":
        return kv
    k, v = (jnp.reshape(x, (x.shape[0], x.shape[2], x.shape[1], x.shape[3])) for x in (kv.k, kv.v))
    if layout == "tokens first":
        return view_nhd(k, v, kv.k_scale, kv.v_scale)
    return view_fused(jnp.concatenate([k, v], axis=-1), kv.k.shape[1], kv.k_scale, kv.v_scale)


def random_latents(spec: CacheSpec) -> PagedLatent:
    """Make latents with values and scales like `random_pool`."""
    return PagedLatent(**_random_arrays(spec))


def random_index_keys(spec: CacheSpec) -> PagedIndexKeys:
    """Make index keys with values and scales like `random_pool`."""
    return PagedIndexKeys(**_random_arrays(spec))


def _random_arrays(spec: CacheSpec) -> dict[str, Array]:
    arrays = {}
    for i, (name, array) in enumerate(spec.arrays.items()):
        make = _random_scales if name.endswith("scale") else _random_pages
        arrays[name] = make(jax.random.key(i, impl="rbg"), array)
    return arrays


def random_values(key: Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
    """Draw values with a standard deviation of 1; for an integer dtype, integers from -127 to 127 with one of 40."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(40.0 * jax.random.normal(key, shape)), -127, 127).astype(dtype)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def _random_pages(key: Array, array: jax.ShapeDtypeStruct) -> Array:
    """Draw pages, at most `CHUNK_BYTES` at a time, because the intermediate values take several times their memory."""
    page_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    pages = max(1, min(array.shape[0], CHUNK_BYTES // page_bytes))

    def fill(i: Array, made: Array) -> Array:
        chunk = random_values(jax.random.fold_in(key, i), (pages, *array.shape[1:]), array.dtype)
        return jax.lax.dynamic_update_slice_in_dim(made, chunk, i * pages, axis=0)  # the last chunk may overlap

    chunks = -(-array.shape[0] // pages)
    return jax.jit(lambda: jax.lax.fori_loop(0, chunks, fill, jnp.zeros(array.shape, array.dtype)))()


def _random_scales(key: Array, array: jax.ShapeDtypeStruct) -> Array:
    return jax.random.uniform(key, array.shape, jnp.float32, 0.01, 0.04).astype(array.dtype)


class Pools:
    """Owner of the newest pool. The next cases reuse it if it has the same kind and enough pages."""

    def __init__(self) -> None:
        self._cached: tuple[Any, int, Any] | None = None

    def get(self, cache: str, num_pages: int, **sizes: int) -> PagedKV:
        """Return a pool of the kind `cache` with at least `num_pages` pages.

        Raises:
          MemoryError: the pool does not fit.
        """
        return self._get((cache, sizes), cache_spec(cache, num_pages=num_pages, **sizes), random_pool)

    def get_latents(self, cache: str, num_pages: int, **sizes: int) -> PagedLatent:
        """Return a latent pool of the kind `cache` with at least `num_pages` pages.

        Raises:
          MemoryError: the pool does not fit.
        """
        spec = latent_cache_spec(
            num_pages=num_pages, dtype=latent_dtype(cache), rope_dtype=None, scale_dtype=None, **sizes
        )
        return self._get((cache, sizes), spec, random_latents)

    def _get[Pool](self, kind: Any, spec: CacheSpec, make: Callable[[CacheSpec], Pool]) -> Pool:
        if self._cached is not None and self._cached[0] == kind and self._cached[1] >= spec.num_pages:
            return self._cached[2]
        self.release()
        check_fits(spec.num_bytes)
        pool = make(spec)
        self._cached = kind, spec.num_pages, pool
        return pool

    def release(self) -> None:
        """Drop the pool to free its memory."""
        self._cached = None


def tables(rng: np.random.Generator, num_pages: int, calls: int, shape: tuple[int, ...]) -> list[Array]:
    """Draw a block table (int32 `shape`) for each of `calls` calls. No page id is in two tables."""
    ids = rng.permutation(num_pages)[: calls * math.prod(shape)].astype(np.int32)
    return [jnp.asarray(table) for table in ids.reshape(calls, *shape)]
