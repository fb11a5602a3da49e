"""Context parallelism: each of n devices along the mesh axis `context` caches a part of the tokens of every page.

 page of 8 tokens    0 1 2 3 4 5 6 7         page p of the engine's pool, with two devices along `context`
 device 0            0 1 2 3                  page p of its cache, which has pages of 4 tokens
 device 1                    4 5 6 7          page p of its cache

Block tables, page pools and the prefix cache are the same as on one device. For each sequence, the numbers of cached
tokens on two devices differ by at most one page of a device. A cache slot is the index of a token's place in the cache:
page · page size + offset.

Decode: each device attends to its own tokens with all Hq query heads. Then the devices exchange results, so that each
device merges the partial results of all devices for Hq / n of the heads, weighted by their log-sum-exp.

Prefill: the cached prefix is handled like in decode. The new tokens of a chunk and their keys are on all devices, so
each device attends to the whole chunk with Hq / n of the heads, which takes 1 / n of the time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn import PAGE_NONE, parallel
from pallas_attn.models.decoder.mesh import CONTEXT


def own_lens(lens: Int32[Array, "n"], page_size: int) -> Int32[Array, "n"]:
    """Return the number of cached tokens of each sequence on this device.

    Args:
      lens: number of tokens of each sequence on all devices.
      page_size: tokens per page on one device.
    """
    device, whole = lax.axis_index(CONTEXT), page_size * lax.axis_size(CONTEXT)
    return lens // whole * page_size + jnp.clip(lens % whole - device * page_size, 0, page_size)


def own_slots(slots: Int32[Array, "T"], page_size: int) -> Int32[Array, "T"]:
    """Return the cache slot of each token on this device; PAGE_NONE for tokens of other devices and for padding.

    Args:
      slots: slots in the engine's pool, whose pages are n times as large; negative for padding.
      page_size: tokens per page on one device.
    """
    device, whole = lax.axis_index(CONTEXT), page_size * lax.axis_size(CONTEXT)
    offset = slots % whole - device * page_size
    is_own = (slots >= 0) & (offset >= 0) & (offset < page_size)
    return jnp.where(is_own, slots // whole * page_size + offset, PAGE_NONE)


def own_heads(x: Float[Array, "*rows heads D"], count: int) -> Float[Array, "*rows own D"]:
    """Return the heads of x whose results this device merges. Device i merges the i-th group of `count` heads."""
    return lax.dynamic_slice_in_dim(x, lax.axis_index(CONTEXT) * count, count, axis=x.ndim - 2)


def own_kv_heads(x: Float[Array, "T Hkv D"], num_q_heads: int) -> Float[Array, "T own D"]:
    """Return the KV heads that belong to the query heads whose results this device merges."""
    split = parallel.head_split(num_q_heads, x.shape[1], lax.axis_size(CONTEXT))
    first = lax.axis_index(CONTEXT) // split.copies * split.kv_heads
    return lax.dynamic_slice_in_dim(x, first, split.kv_heads, axis=1)
