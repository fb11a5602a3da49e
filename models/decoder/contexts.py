"""Contexts split over devices: each device caches a part of the tokens of every page.

 page of 8 tokens    0 1 2 3 4 5 6 7         page p of the engine's pool, with two devices along `context`
 device 0            0 1 2 3                  page p of its cache, which has pages of 4 tokens
 device 1                    4 5 6 7          page p of its cache

Block tables, pools and prefixes are the same as on one device, and the devices have equally many tokens at any length.
Each device attends to its tokens with all heads. Then the devices exchange heads, and each device merges the results of
all devices, with their LSE, for its Hq / n heads. Every device computes the whole chunk of a prompt, so each device
attends to the chunk with its own heads only, in 1/n of the time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from models.decoder.mesh import CONTEXT
from pallas_attn import PAGE_NONE, parallel


def own_lens(lens: Int32[Array, "n"], page_size: int) -> Int32[Array, "n"]:
    """Return how many of the first `lens` tokens of each sequence this device has, in pages of `page_size` tokens."""
    device, whole = lax.axis_index(CONTEXT), page_size * lax.axis_size(CONTEXT)
    return lens // whole * page_size + jnp.clip(lens % whole - device * page_size, 0, page_size)


def own_slots(slots: Int32[Array, "T"], page_size: int) -> Int32[Array, "T"]:
    """Return cache slots on this device; PAGE_NONE for tokens of other devices and for padding."""
    device, whole = lax.axis_index(CONTEXT), page_size * lax.axis_size(CONTEXT)
    offset = slots % whole - device * page_size
    is_own = (slots >= 0) & (offset >= 0) & (offset < page_size)
    return jnp.where(is_own, slots // whole * page_size + offset, PAGE_NONE)


def own_heads(x: Float[Array, "*rows heads D"], count: int) -> Float[Array, "*rows own D"]:
    """Return the `count` heads that this device merges. Heads are the second to last axis of x."""
    return lax.dynamic_slice_in_dim(x, lax.axis_index(CONTEXT) * count, count, axis=x.ndim - 2)


def own_kv_heads(x: Float[Array, "T Hkv D"], num_q_heads: int) -> Float[Array, "T own D"]:
    """Return the KV heads of the query heads that this device merges."""
    split = parallel.head_split(num_q_heads, x.shape[1], lax.axis_size(CONTEXT))
    first = lax.axis_index(CONTEXT) // split.copies * split.kv_heads
    return lax.dynamic_slice_in_dim(x, first, split.kv_heads, axis=1)
