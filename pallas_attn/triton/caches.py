"""Caches that attention kernels over pages in Triton take, and the layout of their scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_attn.types import LATENT_8BIT, QMAX, PagedKV, PagedLatent

WIDEST_HEAD = 256
"""Columns of a head, at most: more would leave no registers for what is accumulated."""

WIDEST_LATENT, WIDEST_ROPE = 512, 128
"""Columns of a latent and of its rotated key, at most, likewise."""


def refuse(q: jax.Array, kv: PagedKV) -> None:
    """Raise NotImplementedError for queries and a cache that no kernel multiplies."""
    refuse_queries(q)
    refuse_8_bits(kv)
    if kv.k.dtype != q.dtype and kv.k.dtype not in QMAX:
        raise NotImplementedError(
            f"takes queries and an unquantised cache of one dtype, got {q.dtype.name} over {kv.k.dtype.name}"
        )
    refuse_width(q.shape[-1])


def refuse_8_bits(kv: PagedKV) -> None:
    """Raise NotImplementedError for a cache in float8_e5m2."""
    if kv.k.dtype == jnp.float8_e5m2:
        raise NotImplementedError(f"takes caches of 8 bits in int8 and float8_e4m3fn, got {kv.k.dtype.name}")


def refuse_latents(q: jax.Array, cache: PagedLatent, rope_dim: int) -> None:
    """Raise NotImplementedError for queries, against the latent columns, and a cache that no kernel multiplies."""
    refuse_queries(q)
    keys = cache.pages if cache.rope is None else cache.rope
    if keys.dtype == jnp.float8_e5m2:
        raise NotImplementedError(f"takes latents of 8 bits in float8_e4m3fn, got {keys.dtype.name}")
    if keys.dtype not in (q.dtype, LATENT_8BIT):
        which = "an unquantised cache" if cache.rope is None else "rotated keys"
        raise NotImplementedError(f"takes queries and {which} of one dtype, got {q.dtype.name} over {keys.dtype.name}")
    if q.shape[-1] > WIDEST_LATENT:
        raise NotImplementedError(f"takes latents of up to {WIDEST_LATENT} columns, got {q.shape[-1]}")
    if rope_dim > WIDEST_ROPE:
        raise NotImplementedError(f"takes up to {WIDEST_ROPE} rotated columns, got {rope_dim}")


def refuse_queries(q: jax.Array) -> None:
    """Raise NotImplementedError for queries that tensor cores do not multiply as they are."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 and float16 queries, got {q.dtype.name}")


def refuse_width(head_dim: int) -> None:
    """Raise NotImplementedError for heads of more columns than registers hold."""
    if head_dim > WIDEST_HEAD:
        raise NotImplementedError(f"takes heads of up to {WIDEST_HEAD} columns, got {head_dim}")


def scale_groups(kv: PagedKV) -> int | str | None:
    """Layout of scales: None, "head", "channel", or the number of groups of a page that have one each."""
    if kv.k_scale is None:
        return None
    return {1: "head", 2: "channel"}.get(kv.k_scale.ndim, kv.k_scale.shape[-1])
