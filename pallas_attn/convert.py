"""Caches laid out by other engines, and ours.

Pages lie heads before tokens, [N, Hkv, ps, D], which FlashInfer calls HND and `PagedKV` holds as it is, or tokens
before heads, [N, ps, Hkv, D], which it calls NHD; keys and values are apart or stacked in one array, [2, N, ...] as in
vLLM or [N, 2, ...] as in FlashInfer. Some ways across:

    kv = from_nhd(k, v)
    kv = from_nhd(*split_kv(pages, axis=1))
    kv = PagedKV(*split_kv(pages, axis=0))
    pages = join_kv(kv.k, kv.v, axis=0)

Latents in 8 bits are apart from their scales and rotated keys in `PagedLatent`, and beside them in the records of
others, which `from_records` and `to_records` convert.

All of them copy, under `jax.jit` as well: they are for handing a cache over, not for every step.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num, UInt8

from pallas_attn import checks
from pallas_attn.types import LATENT_GROUP, QMAX, PagedKV, PagedLatent


def from_nhd(
    k: Num[Array, "N ps Hkv D"],
    v: Num[Array, "N ps Hkv D"],
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
) -> PagedKV:
    """Makes a cache of pages that lie tokens before heads.

    Args:
      k, v: of a dtype `PagedKV` holds.
      k_scale, v_scale: float32 or None: static [Hkv] or [Hkv, D], which stay as they are, or dynamic with groups of
        tokens before heads, [N, g, Hkv].

    Raises:
      ValueError: shapes or dtypes that do not fit each other.

    Example:
      >>> pages = jnp.ones((6, 4, 2, 8))  # 6 pages of 4 tokens, 2 KV heads
      >>> pallas_attn.from_nhd(pages, pages).k.shape
      (6, 2, 4, 8)
    """
    dims = checks.Dims()
    dims.check("k", k, "N ps Hkv D", (*checks.PLAIN, *QMAX))
    dims.check("v", v, "N ps Hkv D", (k.dtype,))
    kv = PagedKV(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), _swap_groups(k_scale), _swap_groups(v_scale))
    checks.check_kv(kv, checks.Dims())
    return kv


def to_nhd(
    kv: PagedKV,
) -> tuple[Num[Array, "N ps Hkv D"], Num[Array, "N ps Hkv D"], Float[Array, "..."] | None, Float[Array, "..."] | None]:
    """The cache's k, v, k_scale and v_scale with tokens before heads, as `from_nhd` takes them.

    Raises:
      ValueError: a cache whose arrays do not fit each other.

    Example:
      >>> pages = jnp.ones((6, 2, 4, 8))  # 6 pages, 2 KV heads, 4 tokens
      >>> k, v, k_scale, v_scale = pallas_attn.to_nhd(pallas_attn.PagedKV(pages, pages))
      >>> k.shape, k_scale
      ((6, 4, 2, 8), None)
    """
    checks.check_kv(kv, checks.Dims())
    return jnp.swapaxes(kv.k, 1, 2), jnp.swapaxes(kv.v, 1, 2), _swap_groups(kv.k_scale), _swap_groups(kv.v_scale)


def _swap_groups(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    return jnp.swapaxes(scale, 1, 2) if scale is not None and scale.ndim == 3 else scale


def split_kv(pages: Num[Array, "..."], *, axis: int) -> tuple[Num[Array, "N A B D"], Num[Array, "N A B D"]]:
    """Keys and values of pages that hold both, [2, N, A, B, D] for axis 0 or [N, 2, A, B, D] for axis 1.

    Raises:
      ValueError: another shape or axis.

    Example:
      >>> k, v = pallas_attn.split_kv(jnp.ones((6, 2, 4, 1, 8)), axis=1)
      >>> k.shape
      (6, 4, 1, 8)
    """
    _check_axis(axis)
    checks.Dims().check("pages", pages, "2 N A B D" if axis == 0 else "N 2 A B D")
    return jnp.take(pages, 0, axis=axis), jnp.take(pages, 1, axis=axis)


def join_kv(k: Num[Array, "N A B D"], v: Num[Array, "N A B D"], *, axis: int) -> Num[Array, "..."]:
    """Pages that hold both keys and values, the inverse of `split_kv`.

    Raises:
      ValueError: shapes or dtypes that differ, or another axis.

    Example:
      >>> pallas_attn.join_kv(jnp.ones((6, 4, 1, 8)), jnp.ones((6, 4, 1, 8)), axis=0).shape
      (2, 6, 4, 1, 8)
    """
    _check_axis(axis)
    dims = checks.Dims()
    dims.check("k", k, "N A B D")
    dims.check("v", v, "N A B D", (k.dtype,))
    return jnp.stack([k, v], axis=axis)


def from_records(records: UInt8[Array, "N ps bytes"], *, latent_dim: int = 512) -> PagedLatent:
    """Makes a quantised latent cache of token records, byte for byte.

    A record is L float8_e4m3fn numbers, then the L / 128 float32 scales of their groups of 128, then R rotated key
    columns in bfloat16, little-endian: 512 + 16 + 128 = 656 bytes for L = 512, R = 64. FlashMLA calls that "FP8 with
    scale" (its README and tests/quant.py); vLLM's kv-cache dtype "fp8_ds_mla" holds it (`concat_and_cache_ds_mla` in
    csrc/cache_kernels.cu). Both multiply by the scale to read. FlashMLA's arrays have an axis of one head before the
    bytes.

    Args:
      records: pages of records.
      latent_dim: L, a multiple of 128.

    Raises:
      ValueError: another shape or dtype, or a number of bytes that no R goes with.

    Example:
      >>> cache = pallas_attn.from_records(jnp.zeros((6, 64, 656), jnp.uint8))
      >>> cache.pages.shape, cache.scale.shape, cache.rope.shape
      ((6, 64, 512), (6, 64, 4), (6, 64, 64))
    """
    if checks.size("latent_dim", latent_dim) % LATENT_GROUP:
        raise ValueError(f"latent_dim: expected a multiple of {LATENT_GROUP}, got {latent_dim}")
    checks.Dims().check("records", records, "N ps bytes", (jnp.uint8,))
    groups = latent_dim // LATENT_GROUP
    end_of_scales = latent_dim + 4 * groups
    rope_bytes = records.shape[2] - end_of_scales
    if rope_bytes < 2 or rope_bytes % 2:
        raise ValueError(
            f"records: expected {end_of_scales} bytes for {latent_dim} latent columns and 2 for each rotated one,"
            f" got {records.shape[2]}"
        )

    def numbers(start: int, end: int, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return lax.bitcast_convert_type(records[..., start:end].reshape(*records.shape[:2], *shape), dtype)

    cache = PagedLatent(
        numbers(0, latent_dim, (latent_dim,), jnp.dtype(jnp.float8_e4m3fn)),
        numbers(latent_dim, end_of_scales, (groups, 4), jnp.dtype(jnp.float32)),
        numbers(end_of_scales, records.shape[2], (rope_bytes // 2, 2), jnp.dtype(jnp.bfloat16)),
    )
    checks.check_latent(cache, checks.Dims())
    return cache


def to_records(cache: PagedLatent) -> UInt8[Array, "N ps bytes"]:
    """The token records of a quantised latent cache, the inverse of `from_records`.

    Raises:
      ValueError: a cache whose arrays do not fit each other, one that is not quantised, or rotated keys that
        are not bfloat16.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(
      ...     num_pages=6, page_size=64, latent_dim=512, rope_dim=64, dtype=jnp.float8_e4m3fn
      ... )
      >>> pallas_attn.to_records(pallas_attn.PagedLatent.allocate(spec)).shape
      (6, 64, 656)
    """
    checks.check_latent(cache, checks.Dims())
    if cache.scale is None or cache.rope is None:
        raise ValueError(f"cache.pages: expected float8_e4m3fn with scales, got {cache.pages.dtype.name}")
    checks.check_dtype("cache.rope", cache.rope, (jnp.bfloat16,))
    parts = [lax.bitcast_convert_type(part, jnp.uint8) for part in (cache.pages, cache.scale, cache.rope)]
    return jnp.concatenate([part.reshape(*cache.pages.shape[:2], -1) for part in parts], axis=-1)


def _check_axis(axis: int) -> None:
    if axis not in (0, 1):
        raise ValueError(f"axis: expected 0 or 1, where keys and values are told apart, got {axis!r}")
