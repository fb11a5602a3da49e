"""Checks of the caches and queries that Triton kernels support, and the layout of a cache's scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_attn.types import LATENT_8BIT, QMAX, PagedKV, PagedLatent

MAX_HEAD_DIM = 512
"""Maximum width of a head. A program keeps the float32 output of its tile in registers, and wider heads do not fit."""

MAX_LATENT_DIM, MAX_ROPE_DIM = 512, 128
"""Maximum columns of a latent, and of the rotated key. Wider tiles do not fit into registers."""


def require_supported(q: jax.Array, kv: PagedKV) -> None:
    """Raise NotImplementedError if no Triton kernel supports the queries [..., D] with this cache."""
    require_queries(q)
    require_cache_dtype(kv)
    for pages in (kv.k, kv.values[0]):
        if pages.dtype != q.dtype and pages.dtype not in QMAX:
            raise NotImplementedError(
                f"takes queries and an unquantised cache of one dtype, got {q.dtype.name} over {pages.dtype.name}"
            )
    require_head_dim(q.shape[-1])


def require_cache_dtype(kv: PagedKV) -> None:
    """Raise NotImplementedError for a float8_e5m2 cache."""
    if jnp.float8_e5m2 in (kv.k.dtype, kv.values[0].dtype):
        raise NotImplementedError("takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2")


def require_latents(q: jax.Array, cache: PagedLatent, rope_dim: int) -> None:
    """Raise NotImplementedError if no Triton kernel supports the queries with this latent cache.

    Args:
      q: [..., L], the part of the queries that is multiplied by latents.
      cache: the latent cache.
      rope_dim: R, columns of the rotated key.
    """
    require_queries(q)
    keys = cache.pages if cache.rope is None else cache.rope
    if keys.dtype == jnp.float8_e5m2:
        raise NotImplementedError(f"takes latents of 8 bits in float8_e4m3fn, got {keys.dtype.name}")
    if keys.dtype not in (q.dtype, LATENT_8BIT):
        which = "an unquantised cache" if cache.rope is None else "rotated keys"
        raise NotImplementedError(f"takes queries and {which} of one dtype, got {q.dtype.name} over {keys.dtype.name}")
    require_float32_scales(cache)
    if q.shape[-1] > MAX_LATENT_DIM:
        raise NotImplementedError(f"takes latents of up to {MAX_LATENT_DIM} columns, got {q.shape[-1]}")
    if rope_dim > MAX_ROPE_DIM:
        raise NotImplementedError(f"takes up to {MAX_ROPE_DIM} rotated columns, got {rope_dim}")


def require_float32_scales(cache: PagedLatent) -> None:
    """Raise NotImplementedError for latents with scales that are powers of two."""
    if cache.scale is not None and cache.scale.dtype != jnp.float32:
        raise NotImplementedError(f"takes float32 scales of latents, got {cache.scale.dtype.name}")


def require_queries(q: jax.Array) -> None:
    """Raise NotImplementedError unless the queries are bfloat16 or float16."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 and float16 queries, got {q.dtype.name}")


def require_head_dim(head_dim: int) -> None:
    """Raise NotImplementedError for heads wider than `MAX_HEAD_DIM`."""
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"takes heads of up to {MAX_HEAD_DIM} columns, got {head_dim}")


def scale_groups(kv: PagedKV) -> int | str | None:
    """Return the layout of the cache's scales.

    None: no scales. "head": [Hkv]. "channel": [Hkv, D]. An int g: [N, Hkv, g], one scale per g-th of a page's tokens.
    """
    scale = kv.v_scale if kv.k_scale is None else kv.k_scale  # keys or values alone may have scales
    if scale is None:
        return None
    return {1: "head", 2: "channel"}.get(scale.ndim, scale.shape[-1])
