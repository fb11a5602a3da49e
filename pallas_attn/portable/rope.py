"""Rotary position embedding (RoFormer, arXiv:2104.09864) and RMSNorm, in float32."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.types import Rope


def rotate(
    x: Float[Array, "*batch T heads D"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    style: Literal["neox", "interleaved"],
) -> Float[Array, "*batch T heads D"]:
    """Rotate the first 2·half columns of each head, pair i by the angle of column i; other columns are unchanged.

    Pairs are columns (i, i + half) in neox style, (2i, 2i + 1) in interleaved style.
    """
    half = cos.shape[-1]
    x = x.astype(jnp.float32)
    angle_shape = (1,) * (x.ndim - 3) + (cos.shape[0], 1, half)
    cos, sin = cos.reshape(angle_shape), sin.reshape(angle_shape)
    if style == "neox":
        first, second = x[..., :half], x[..., half : 2 * half]
    else:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = (
        jnp.concatenate(pair, axis=-1) if style == "neox" else jnp.stack(pair, axis=-1).reshape(*x.shape[:-1], 2 * half)
    )
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


def rms_norm(x: Float[Array, "*rows D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*rows D"]:
    """Return x / sqrt(mean(x²) + eps) · weight in float32 (arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + float(eps)) * weight


def apply_rope(x: Float[Array, "T heads D"], rope: Rope, norm: Float[Array, "D"] | None) -> Float[Array, "T heads D"]:
    """Rotate x, and normalize it before or after the rotation according to `rope`; float32.

    Implementations may differ by a unit in the last place, because compilers may contract a·b + c.
    """
    if norm is not None and rope.norm_order == "before_rope":
        x = rms_norm(x, norm, rope.norm_eps)
    x = rotate(x, rope.cos, rope.sin, rope.style)
    if norm is not None and rope.norm_order == "after_rope":
        x = rms_norm(x, norm, rope.norm_eps)
    return x
