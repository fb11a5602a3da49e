"""Code of `reference.py` of several operations: dense attention in float32, and writes of one token at a time.

The code is simple enough to be verified by reading. Speed and memory do not matter here; memory is unbounded.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from pallas_attn.portable.arguments import varying_like
from pallas_attn.types import PagedKV

HIGHEST = jax.lax.Precision.HIGHEST  # GPUs would otherwise round float32 operands to TF32


def gather_kv(
    kv: PagedKV, block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"], head_dim: int
) -> tuple[Float[Array, "B Hkv K D"], Float[Array, "B Hkv K Dv"], Bool[Array, "B Hkv K"]]:
    """Return keys and values of every table entry in float32, K = P·ps, and whether the entry is a page of the pool."""
    pages, first = kv.values
    keys, values = kv.k[..., :head_dim], pages[..., first : first + kv.value_dim(head_dim)]
    num_pages, num_kv_heads, page_size, _ = kv.k.shape
    rows = block_tables
    if block_tables.ndim == 2:
        heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
        in_pool = (block_tables >= 0) & (block_tables < num_pages)
        rows = jnp.where(in_pool, block_tables, 0)[:, None, :] * num_kv_heads + heads[None, :, None]
        in_pool = jnp.broadcast_to(in_pool[:, None, :], rows.shape)
    else:
        in_pool = (rows >= 0) & (rows < num_pages * num_kv_heads)
        rows = jnp.where(in_pool, rows, 0)  # masked later
    exists = jnp.repeat(in_pool, page_size, axis=-1)
    return _gather(keys, kv.k_scale, rows), _gather(values, kv.v_scale, rows), exists


def _gather(
    pages: Num[Array, "N Hkv ps D"], scale: Float[Array, "..."] | None, rows: Int32[Array, "B Hkv P"]
) -> Float[Array, "B Hkv K D"]:
    _, num_kv_heads, page_size, width = pages.shape
    values = pages.reshape(-1, page_size, width)[rows].astype(jnp.float32)  # [B, Hkv, P, ps, D]
    if scale is not None and scale.ndim == 3:  # dynamic: follows the row
        groups = scale.shape[-1]
        per_token = jnp.repeat(scale.reshape(-1, groups)[rows], page_size // groups, axis=-1)
        values = values * per_token[..., None]
    elif scale is not None:  # static: follows the head
        values = values * scale.reshape(1, num_kv_heads, 1, 1, -1)
    return values.reshape(*rows.shape[:2], -1, width)


def attention(
    q: Float[Array, "B Q Hq Dk"],
    k: Float[Array, "B Hkv K Dk"],
    v: Float[Array, "B Hkv K Dv"],
    visible: Bool[Array, "B #Hkv Q K"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "Hq"] | None = None,
) -> tuple[Float[Array, "B Q Hq Dv"], Float[Array, "B Q Hq"]]:
    """Return the output of softmax attention in float32 (0 for an empty row) and the LSE (-inf for an empty row)."""
    batch, num_queries, num_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    q = q.astype(jnp.float32).reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, q.shape[-1])
    visible = visible[:, :, None]  # [B, Hkv, 1, Q, K]
    scores = jnp.einsum("bqhgd,bhkd->bhgqk", q, k.astype(jnp.float32), precision=HIGHEST) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    # Not exp(scores - lse): the rounding error of a large LSE would be too large for exp.
    # Emptiness is not computed from the maximum, because XLA's maximum on CPUs may ignore NaN.
    empty = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)  # [B, Hkv, G, Q, 1]
    shift = jnp.where(empty, 0.0, jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(total))
    if sinks is not None:
        total = total + jnp.exp(sinks.reshape(1, num_kv_heads, -1, 1, 1) - shift)
    weights = jnp.where(visible & ~empty, weights / total, 0.0)
    v = jnp.where(visible.any(axis=(2, 3))[..., None], v.astype(jnp.float32), 0.0)  # 0 · NaN is NaN
    out = jnp.einsum("bhgqk,bhkd->bqhgd", weights, v, precision=HIGHEST)
    out = out.reshape(batch, num_queries, num_heads, v.shape[-1])
    lse = jnp.transpose(lse[..., 0], (0, 3, 1, 2)).reshape(batch, num_queries, num_heads)
    return jnp.where(lse[..., None] == -jnp.inf, 0.0, out), lse  # 0 even if another row sees an infinite value


def write_one_by_one[Cache](
    cache: Cache,
    rows: Float[Array, "T *row"],
    slots: Int32[Array, "T"],
    stored: Callable[[Float[Array, "*row"], Cache], Cache],
) -> Cache:
    """Return a cache with arrays [N, ps, ...] after the rows of tokens are written to their slots, one at a time.

    Args:
      stored: (row of a token, cache) -> arrays of the token in the form that the cache stores.
    """
    num_pages, page_size = jax.tree.leaves(cache)[0].shape[:2]

    def write(cache: Cache, token: tuple[Float[Array, "*row"], Int32[Array, ""]]) -> tuple[Cache, None]:
        row, slot = token
        page, offset = slot // page_size, slot % page_size

        def put(pool: Array, values: Array) -> Array:
            written = lax.dynamic_update_slice(pool, values[None, None], (page, offset, jnp.zeros_like(page)))
            return jnp.where((page >= 0) & (page < num_pages), written, pool)

        return jax.tree.map(put, cache, stored(row, cache)), None

    return lax.scan(write, varying_like(cache, (cache, rows, slots)), (rows, slots))[0]
