"""Contexts split over devices: each has a share of the tokens of every page, in pages of its own.

 page of 8 tokens    0 1 2 3 4 5 6 7         of page p of the engine's pool, with two devices along `context`:
 device 0            0 1 2 3                  page p of its cache, which has pages of 4 tokens
 device 1                    4 5 6 7          page p of its cache

So tables, pools and prefixes are those of one device, and the shares of all devices are even at any length. Each
attends to its own tokens for all heads; then devices exchange heads, and each merges by the LSE what all found for its
share of the heads, Hq / n of them. A prompt's chunk, which every device has computed, is attended to by each for its
own heads alone: it enters once, and takes 1/n of the time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from models.decoder.mesh import CONTEXT
from pallas_attn import PAGE_NONE, parallel


def own_lens(lens: Int32[Array, "n"], page_size: int) -> Int32[Array, "n"]:
    """Number of the first `lens` tokens of sequences that are this device's; `page_size` is that of its cache."""
    device, whole = lax.axis_index(CONTEXT), page_size * lax.axis_size(CONTEXT)
    return lens // whole * page_size + jnp.clip(lens % whole - device * page_size, 0, page_size)


def own_slots(slots: Int32[Array, "T"], page_size: int) -> Int32[Array, "T"]:
    """Slots of this device's cache; PAGE_NONE for tokens that are another's, and for padding."""
    device, whole = lax.axis_index(CONTEXT), page_size * lax.axis_size(CONTEXT)
    offset = slots % whole - device * page_size
    is_own = (slots >= 0) & (offset >= 0) & (offset < page_size)
    return jnp.where(is_own, slots // whole * page_size + offset, PAGE_NONE)


def own_heads(x: Float[Array, "*rows heads D"], count: int) -> Float[Array, "*rows own D"]:
    """The heads that this device merges, of those on the last axis but one; `count` of them."""
    return lax.dynamic_slice_in_dim(x, lax.axis_index(CONTEXT) * count, count, axis=x.ndim - 2)


def own_kv_heads(x: Float[Array, "T Hkv D"], num_q_heads: int) -> Float[Array, "T own D"]:
    """The KV heads of `own_heads` of the query heads."""
    split = parallel.head_split(num_q_heads, x.shape[1], lax.axis_size(CONTEXT))
    first = lax.axis_index(CONTEXT) // split.copies * split.kv_heads
    return lax.dynamic_slice_in_dim(x, first, split.kv_heads, axis=1)
