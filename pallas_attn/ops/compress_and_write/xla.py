"""`compress_and_write` on any device: a scatter of the rows, a loop over groups of completed blocks, and a scatter of
their entries.

The loop ends after the last completed block: a decode step in which no token completes a block pools nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_attn.ops.compress_and_write.call import CompressAndWriteCall
from pallas_attn.portable.arguments import varying_like
from pallas_attn.portable.compress import pooled_entries, split_rows, write_at
from pallas_attn.portable.metadata import slot_mapping
from pallas_attn.portable.pool_access import take
from pallas_attn.portable.segments import segment_of
from pallas_attn.types import PAGE_NONE, PagedIndexKeys, PagedLatent

GROUP_ELEMENTS = 2**22
"""Elements of the rows that one iteration gathers (16 MiB), if this suffices for one entry."""


def compress_and_write(call: CompressAndWriteCall) -> tuple[PagedLatent, PagedLatent | PagedIndexKeys]:
    slots = slot_mapping(
        call.state_tables, call.cu_q_lens, call.kv_lens, page_size=call.state.page_size, length=call.rows.shape[0]
    )
    state = write_at(call.state, call.rows, slots)  # before the loop reads it, so that XLA updates it in place
    sequence, entry, count = _completed(call)
    elements = call.halves * call.ratio * call.rows.shape[1]
    group = min(entry.shape[0], max(1, GROUP_ELEMENTS // elements))
    padding = (0, -entry.shape[0] % group)
    sequence, padded = jnp.pad(sequence, padding), jnp.pad(entry, padding, constant_values=-1)

    def absorb(carry: tuple[Int32[Array, ""], Float32[Array, "E D"]]):
        j, out = carry
        members = (lax.dynamic_slice_in_dim(array, j * group, group) for array in (sequence, padded))
        return j + 1, lax.dynamic_update_slice_in_dim(out, _entries(call, state, *members), j * group, 0)

    out = jnp.zeros((padded.shape[0], call.norm.shape[0]), jnp.float32)
    carry = varying_like((jnp.zeros((), jnp.int32), out), call)
    _, out = lax.while_loop(lambda carry: carry[0] * group < count, absorb, carry)
    page_size, table_pages = call.entries.page_size, call.entry_tables.shape[1]
    page = call.entry_tables[sequence, jnp.clip(padded // page_size, 0, table_pages - 1)]
    num_pages = call.entry_pages.shape[0]
    inside = (padded >= 0) & (padded < table_pages * page_size) & (page >= 0) & (page < num_pages)
    return state, write_at(call.entries, out, jnp.where(inside, page * page_size + padded % page_size, PAGE_NONE))


def _completed(call: CompressAndWriteCall) -> tuple[Int32[Array, "E"], Int32[Array, "E"], Int32[Array, ""]]:
    """Return the sequence and the number of each entry that the call completes, -1 past the last, and their count."""
    start = jnp.maximum(call.kv_lens - jnp.diff(call.cu_q_lens), 0) // call.ratio
    ends = jnp.cumsum(jnp.maximum(call.kv_lens // call.ratio - start, 0), dtype=jnp.int32)
    index = jnp.arange(call.most_entries, dtype=jnp.int32)
    sequence = jnp.minimum(segment_of(ends, index), call.kv_lens.shape[0] - 1)
    entry = call.kv_lens[sequence] // call.ratio - (ends[sequence] - index)
    return sequence, jnp.where(index < ends[-1], entry, -1), ends[-1]


def _entries(
    call: CompressAndWriteCall, state: PagedLatent, sequence: Int32[Array, "W"], entry: Int32[Array, "W"]
) -> Float32[Array, "W D"]:
    """Return entries of blocks that the call completes; anything for entry -1."""
    ratio, page_size, num_tokens = call.ratio, state.page_size, call.rows.shape[0]
    offset = jnp.arange((1 - call.halves) * ratio, ratio, dtype=jnp.int32)
    position = entry[:, None] * ratio + offset[None]
    token = (call.cu_q_lens[1:] - call.kv_lens)[sequence][:, None] + position
    is_new = token >= call.cu_q_lens[sequence][:, None]
    page = call.state_tables[sequence[:, None], jnp.clip(position // page_size, 0, call.state_tables.shape[1] - 1)]
    exists = (position >= 0) & (is_new | ((page >= 0) & (page < state.pages.shape[0])))
    cached = take(state.pages, jnp.where(exists & ~is_new, page, 0), position % page_size)
    rows = jnp.where(is_new[..., None], call.rows[jnp.clip(token, 0, num_tokens - 1)], cached)
    last = jnp.clip(token[:, -1], 0, num_tokens - 1)
    contents, gates = split_rows(rows, ratio, call.norm.shape[0])
    return pooled_entries(contents, gates, exists, call.norm, call.norm_eps, call.cos[last], call.sin[last])
