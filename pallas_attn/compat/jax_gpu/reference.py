"""Dense attention of one query token per sequence, for the reference functions of `pallas_attn.compat.jax_gpu`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn.portable import oracle


@functools.partial(jax.jit, static_argnames=("sm_scale", "soft_cap"))
def attention(
    q: Float[Array, "B Hq D"],
    k: Float[Array, "B S Hkv D"],
    v: Float[Array, "B S Hkv D"],
    start: Int32[Array, "B"] | Int32[Array, ""] | None,
    end: Int32[Array, "B"] | Int32[Array, ""] | None,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """Return the output, computed in float32, in the dtype of q, and the LSE in float32.

    Args:
      start, end: range of visible tokens, per sequence or for all; None for 0 and S.
    """
    batch, tokens = k.shape[:2]
    position = jnp.arange(tokens, dtype=jnp.int32)[None]
    visible = jnp.ones((batch, tokens), bool)
    if start is not None:
        visible &= position >= jnp.broadcast_to(start, (batch,))[:, None]
    if end is not None:
        visible &= position < jnp.broadcast_to(end, (batch,))[:, None]
    out, lse = oracle.attention(
        q[:, None],
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        visible[:, None, None],
        sm_scale=sm_scale,
        soft_cap=soft_cap,
    )
    return out[:, 0].astype(q.dtype), lse[:, 0]
