"""Reference implementation of `write_kv`, dense over the whole pool.

Each step computes an array with the shape of the pool: the new tokens in their slots, whether a slot is written, and
the quantised pool. A scale group is a group of tokens of one page and KV head that share a dynamic scale.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num

from pallas_attn.ops.write_kv.call import WriteKVCall
from pallas_attn.portable.quantise import amax_scale, dequantise, held_scale, quantise
from pallas_attn.portable.rope import apply_rope
from pallas_attn.types import PagedKV


def write_kv(call: WriteKVCall) -> tuple[PagedKV, Float[Array, "T Hq D"] | None]:
    kv, k, q, rope, slots = call.kv, call.k, call.q, call.rope, call.slots
    if rope is not None:
        k = apply_rope(k, rope, rope.k_norm)
        q = q if q is None else apply_rope(q, rope, rope.q_norm).astype(q.dtype)
    new_k, new_k_scale = _write(kv.k[..., call.key_columns], kv.k_scale, k, slots)
    new_k = _replace_columns(kv.k, call.key_columns, new_k)
    pages, _ = kv.with_pages(new_k, kv.v, None, None).values
    new_v, new_v_scale = _write(pages[..., call.value_columns], kv.v_scale, call.v, slots)
    new_v = _replace_columns(pages, call.value_columns, new_v)
    return kv.with_pages(new_v if kv.is_fused else new_k, new_v, new_k_scale, new_v_scale), q


def _replace_columns(
    pages: Num[Array, "N Hkv ps W"], columns: slice, values: Num[Array, "N Hkv ps D"]
) -> Num[Array, "N Hkv ps W"]:
    """Return `pages` with `columns` replaced by `values`.

    `pages.at[..., columns].set` is not used: if `columns` are all columns, it becomes a scatter with empty indices, and
    XLA for CPUs (jax 0.11.2) crashes when it compiles this scatter inside `jax.shard_map` on two devices.
    """
    return jax.lax.dynamic_update_slice_in_dim(pages, values, columns.indices(pages.shape[-1])[0], axis=-1)


def _write(
    pages: Num[Array, "N Hkv ps D"],
    scale: Float[Array, "..."] | None,
    x: Float[Array, "T Hkv D"],
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
) -> tuple[Num[Array, "N Hkv ps D"], Float[Array, "..."] | None]:
    """Return the pages and scales after the new tokens `x` are written to their slots.

    Args:
      scale: None, static scales [Hkv] or [Hkv, D], or dynamic scales [N, Hkv, g].
    """
    num_pages, num_kv_heads, page_size, width = pages.shape
    row, offset = _rows(slots, num_pages, num_kv_heads, page_size)
    pool = jnp.zeros((num_pages * num_kv_heads, page_size, width), jnp.float32)
    written = jnp.zeros(pool.shape[:2], bool).at[row, offset].set(True, mode="drop")
    if scale is None or scale.ndim < 3:
        if scale is None:
            values = x.astype(pages.dtype)
        else:  # static scales belong to the head of the token, not to the page that the token is written to
            values = quantise(x.astype(jnp.float32), scale.reshape(1, num_kv_heads, -1), pages.dtype)
        laid = pool.astype(pages.dtype).at[row, offset].set(values, mode="drop")
        return jnp.where(written[..., None], laid, pages.reshape(pool.shape)).reshape(pages.shape), scale
    grouped = (num_pages, num_kv_heads, scale.shape[-1], -1)
    new_pages, new_scale = _write_groups(
        pages.reshape(*grouped, width),
        scale,
        pool.at[row, offset].set(x.astype(jnp.float32), mode="drop").reshape(*grouped, width),
        written.reshape(grouped),
    )
    return new_pages.reshape(pages.shape), new_scale


def _rows(
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"], num_pages: int, num_kv_heads: int, page_size: int
) -> tuple[Int32[Array, "T Hkv"], Int32[Array, "T Hkv"]]:
    """Return the row (one page of one KV head, page·Hkv + head) and the offset of each token and head.

    Tokens that are not written get a row past the last, which scatters drop.
    """
    page_or_row, offset = slots // page_size, slots % page_size
    if slots.ndim == 1:
        head = jnp.arange(num_kv_heads, dtype=jnp.int32)
        row = page_or_row[:, None] * num_kv_heads + head[None, :]
        offset = jnp.broadcast_to(offset[:, None], row.shape)
        exists = (page_or_row >= 0) & (page_or_row < num_pages)
        return jnp.where(exists[:, None], row, num_pages * num_kv_heads), offset
    exists = (page_or_row >= 0) & (page_or_row < num_pages * num_kv_heads)
    return jnp.where(exists, page_or_row, num_pages * num_kv_heads), offset


def _write_groups(
    stored: Num[Array, "N Hkv g n D"],
    scale: Float[Array, "N Hkv g"],
    new: Float[Array, "N Hkv g n D"],
    written: Bool[Array, "N Hkv g n"],
) -> tuple[Num[Array, "N Hkv g n D"], Float[Array, "N Hkv g"]]:
    """Return pages and scales after a write to scale groups of n tokens. `write_kv` documents the arithmetic.

    Args:
      stored: the pages before the write.
      scale: the scales before the write.
      new: this call's tokens in their slots, and zeros elsewhere.
      written: whether this call writes a slot.
    """
    dtype = stored.dtype
    touched = written.any(axis=-1)
    first = jnp.argmax(written, axis=-1)  # [N, Hkv, g], offset of the first new token in its group
    earlier = (jnp.arange(written.shape[-1])[None, None, None, :] < first[..., None]) & touched[..., None]
    stored_amax = jnp.max(jnp.where(earlier[..., None], jnp.abs(stored.astype(jnp.float32)), 0.0), axis=(-2, -1))
    amax = jnp.max(jnp.abs(new), axis=(-2, -1))
    new_scale = amax_scale(amax, dtype, at_least=held_scale(stored_amax, scale, dtype))
    requantised = quantise(dequantise(stored, scale[..., None, None]), new_scale[..., None, None], dtype)
    tokens = quantise(new, new_scale[..., None, None], dtype)
    values = jnp.where(written[..., None], tokens, jnp.where(earlier[..., None], requantised, stored))
    return values, jnp.where(touched, new_scale, scale)
