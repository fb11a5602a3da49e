"""`write_kv` in plain JAX, for any device.

Scatters write the new tokens into the pool, in place if it is donated. They access the written tokens and, with
dynamic scales, the other tokens of their scale groups. An entry is one token of one KV head; a call has E = T·Hkv
entries. A scale group is a group of tokens of one page and KV head that share a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from pallas_attn.ops.write_kv.call import WriteKVCall
from pallas_attn.portable.arguments import varying_like
from pallas_attn.portable.pool_access import page_or_none, put
from pallas_attn.portable.quantise import amax_scale, dequantise, held_scale, quantise
from pallas_attn.portable.rope import apply_rope
from pallas_attn.types import PagedKV

_BLOCK_ELEMENTS = 2**23
"""Maximum number of cache elements per iteration of the loop that requantises earlier tokens."""


def write_kv(call: WriteKVCall) -> tuple[PagedKV, Float[Array, "T Hq D"] | None]:
    kv, k, q, rope = call.kv, call.k, call.q, call.rope
    if rope is not None:
        k = apply_rope(k, rope, rope.k_norm)
        q = q if q is None else apply_rope(q, rope, rope.q_norm).astype(q.dtype)
    at = _locate(call.slots, kv.k.shape)
    if kv.k_scale is None or kv.v_scale is None or kv.k_scale.ndim < 3:
        new_k = _write_static(kv.k, kv.k_scale, k, at, call.key_columns)
        pages = new_k if kv.v is None else kv.v
        new_v = _write_static(pages, kv.v_scale, call.v, at, call.value_columns)
        return kv.with_pages(new_v if kv.is_fused else new_k, new_v, kv.k_scale, kv.v_scale), q
    groups = _group(at, kv.page_size // kv.k_scale.shape[-1])
    new_k, new_k_scale = _write_dynamic(kv.k, kv.k_scale, k, at, groups, call.key_columns)
    pages = new_k if kv.v is None else kv.v
    new_v, new_v_scale = _write_dynamic(pages, kv.v_scale, call.v, at, groups, call.value_columns)
    return kv.with_pages(new_v if kv.is_fused else new_k, new_v, new_k_scale, new_v_scale), q


class _Location(NamedTuple):
    """Page, KV head and offset in the page that each entry is written to, and whether it is written.

    Page, head and offset are separate, because a combined index may exceed int32. An entry that is not written gets a
    page past the end of the pool, which scatters drop. Each of these entries gets another page, so the indices of a
    scatter are unique.
    """

    page: Int32[Array, "E"]
    head: Int32[Array, "E"]
    offset: Int32[Array, "E"]
    exists: Bool[Array, "E"]


def _locate(slots: Int32[Array, "T"] | Int32[Array, "T Hkv"], pool_shape: tuple[int, ...]) -> _Location:
    """Return the destinations of all entries. A slot is page·ps + offset, or (page·Hkv + head)·ps + offset if slots are
    head-wise.
    """
    num_pages, num_kv_heads, page_size, _ = pool_shape
    shape = (slots.shape[0], num_kv_heads)
    quotient, offset = jnp.divmod(slots, page_size)
    if slots.ndim == 1:
        page, offset = quotient[:, None], offset[:, None]
        head = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :]
    else:
        page, head = jnp.divmod(quotient, num_kv_heads)
    page, head, offset = (jnp.broadcast_to(index, shape).reshape(-1) for index in (page, head, offset))
    exists = (page >= 0) & (page < num_pages)
    return _Location(page_or_none(page, exists, num_pages), head, offset, exists)


def _write_static(
    pages: Num[Array, "N Hkv ps W"],
    scale: Float[Array, "..."] | None,
    x: Float[Array, "T Hkv D"],
    at: _Location,
    columns: slice,
) -> Num[Array, "N Hkv ps W"]:
    """Write entries without scales, or with static scales [Hkv] or [Hkv, D]. Return the pages."""
    if scale is None:
        values = x.astype(pages.dtype)
    else:  # a head-wise slot may refer to another head of the page, but the static scales belong to the token's head
        values = quantise(x.astype(jnp.float32), scale.reshape(1, x.shape[1], -1), pages.dtype)
    return put(pages, (at.page, at.head, at.offset), values.reshape(-1, x.shape[-1]), columns)


class _Groups(NamedTuple):
    """The scale group of each entry. The leader of a group is the call's entry with the lowest offset in the group.

    Attributes:
      size: number of tokens of a group.
      index: index of the group in its page.
      leader: entry that leads the group.
      leads: whether the entry itself is the leader, and is written.
      earlier: number of tokens of the group before the leader.
    """

    size: int
    index: Int32[Array, "E"]
    leader: Int32[Array, "E"]
    leads: Bool[Array, "E"]
    earlier: Int32[Array, "E"]


def _group(at: _Location, size: int) -> _Groups:
    """Find the groups of `size` tokens by sorting the entries by destination."""
    entry = jnp.arange(at.page.shape[0], dtype=jnp.int32)
    page, head, offset, order = lax.sort((at.page, at.head, at.offset, entry), num_keys=3)
    group = jnp.stack([page, head, offset // size])
    is_first = jnp.concatenate([jnp.ones((1,), bool), (group[:, 1:] != group[:, :-1]).any(axis=0)])
    leader = order[lax.cummax(jnp.where(is_first, entry, 0))]
    leader = jnp.zeros_like(entry).at[order].set(leader, unique_indices=True)
    return _Groups(size, at.offset // size, leader, at.exists & (leader == entry), at.offset[leader] % size)


def _write_dynamic(
    pages: Num[Array, "N Hkv ps W"],
    scale: Float[Array, "N Hkv g"],
    x: Float[Array, "T Hkv D"],
    at: _Location,
    groups: _Groups,
    columns: slice,
) -> tuple[Num[Array, "N Hkv ps W"], Float[Array, "N Hkv g"]]:
    """Write entries with dynamic scales. Return the pages and the scales."""
    x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    amax = jnp.zeros_like(x[:, 0]).at[groups.leader].max(jnp.max(jnp.abs(x), axis=-1))
    new_scale = amax_scale(amax, pages.dtype)  # [E], scale of the group that the entry leads; unused if it leads none
    if groups.size > 1:
        pages, new_scale = _requantise_earlier(pages, scale, amax, new_scale, at, groups, columns)
    values = quantise(x, new_scale[groups.leader][:, None], pages.dtype)
    pages = put(pages, (at.page, at.head, at.offset), values, columns)
    page = page_or_none(at.page, groups.leads, pages.shape[0])
    return pages, put(scale, (page, at.head, groups.index), new_scale)


def _requantise_earlier(
    pages: Num[Array, "N Hkv ps W"],
    scale: Float[Array, "N Hkv g"],
    amax: Float[Array, "E"],
    new_scale: Float[Array, "E"],
    at: _Location,
    groups: _Groups,
    columns: slice,
) -> tuple[Num[Array, "N Hkv ps W"], Float[Array, "E"]]:
    """Requantise the tokens before each leader with the new scale of their group. Return the pages and the new scales.

    Each iteration of the loop processes a block of groups. The loop visits only groups with tokens before the leader:
    at most one group per sequence and head, even if a chunk is long.

    Args:
      amax: largest magnitude of the new tokens of the group that each entry leads.
      new_scale: new scale of the group that each entry leads, from its new tokens only.
    """
    num_entries, width = amax.shape[0], columns.stop - columns.start
    block = min(num_entries, max(1, _BLOCK_ELEMENTS // (groups.size * width)))
    waiting = groups.leads & (groups.earlier > 0)
    num_waiting = jnp.sum(waiting, dtype=jnp.int32)
    queue = jnp.pad(jnp.argsort(~waiting, stable=True).astype(jnp.int32), (0, -num_entries % block))

    def visit(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        grouped, new_scale = carry
        place = jnp.asarray(i, jnp.int32) * block + jnp.arange(block, dtype=jnp.int32)  # i is int64 with jax_enable_x64
        entry = queue[place]
        page = page_or_none(at.page[entry], place < num_waiting, pages.shape[0])
        index = (page, at.head[entry], groups.index[entry])
        # The barrier prevents XLA from fusing these reads with the writes below. A fused kernel would not update the
        # pool in place.
        read = grouped.at[(*index, slice(None), columns)].get(mode="clip"), scale.at[index].get(mode="clip")
        stored, old_scale = lax.optimization_barrier(read)
        earlier = jnp.arange(groups.size, dtype=jnp.int32)[None, :, None] < groups.earlier[entry][:, None, None]
        stored_amax = jnp.max(jnp.where(earlier, jnp.abs(stored.astype(jnp.float32)), 0.0), axis=(1, 2))
        scales = amax_scale(amax[entry], pages.dtype, at_least=held_scale(stored_amax, old_scale, pages.dtype))
        values = quantise(dequantise(stored, old_scale[:, None, None]), scales[:, None, None], pages.dtype)
        entry = jnp.where(place < num_waiting, entry, num_entries + place)
        return put(grouped, index, jnp.where(earlier, values, stored), columns), put(new_scale, (entry,), scales)

    # All entries of a decode step fit into one block. A static trip count saves the transfer of `num_waiting` to the
    # host, which runs XLA's loops.
    trips = 1 if num_entries == block else -(-num_waiting // block)
    grouped = pages.reshape(*scale.shape, groups.size, -1)
    carry = varying_like((grouped, new_scale), (scale, amax, at))
    grouped, new_scale = lax.fori_loop(0, trips, visit, carry)
    return grouped.reshape(pages.shape), new_scale
