"""Caches laid out by other engines, and ours.

Pages lie heads before tokens, [N, Hkv, ps, D], which FlashInfer calls HND and `PagedKV` holds as it is, or tokens
before heads, [N, ps, Hkv, D], which it calls NHD; keys and values are apart or stacked in one array, [2, N, ...] as in
vLLM or [N, 2, ...] as in FlashInfer. Some ways across:

    kv = from_nhd(k, v)
    kv = from_nhd(*split_kv(pages, axis=1))
    kv = PagedKV(*split_kv(pages, axis=0))
    pages = join_kv(kv.k, kv.v, axis=0)

All of them copy, under `jax.jit` as well: they are for handing a cache over, not for every step.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from pallas_attn import checks
from pallas_attn.types import QMAX, PagedKV


def from_nhd(
    k: Num[Array, "N ps Hkv D"],
    v: Num[Array, "N ps Hkv D"],
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
) -> PagedKV:
    """A cache of pages that lie tokens before heads.

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
    """k, v, k_scale and v_scale, as `from_nhd` takes them.

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


def _check_axis(axis: int) -> None:
    if axis not in (0, 1):
        raise ValueError(f"axis: expected 0 or 1, where keys and values are told apart, got {axis!r}")
