"""Definition of `compress_and_write`: compute an entry for each token, and write the entries of completed blocks."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_attn.ops.compress_and_write.call import CompressAndWriteCall
from pallas_attn.portable.compress import pooled_entries, split_rows, write_at
from pallas_attn.portable.metadata import slot_mapping, token_positions, token_slots
from pallas_attn.portable.segments import segment_of
from pallas_attn.types import PagedIndexKeys, PagedLatent


def compress_and_write(call: CompressAndWriteCall) -> tuple[PagedLatent, PagedLatent | PagedIndexKeys]:
    num_tokens, columns = call.rows.shape
    ratio, page_size = call.ratio, call.state.page_size
    lengths = {"cu_q_lens": call.cu_q_lens, "kv_lens": call.kv_lens}
    slots = slot_mapping(call.state_tables, **lengths, page_size=page_size, length=num_tokens)
    state = write_at(call.state, call.rows, slots)

    # Positions of the rows that an entry would pool if token t completed its block: [T, c·ratio].
    position = token_positions(**lengths, length=num_tokens)
    number = call.halves * ratio
    before = jnp.arange(number - 1, -1, -1, dtype=jnp.int32)[None]
    pooled = jnp.where(position[:, None] >= 0, position[:, None] - before, -1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = jnp.minimum(segment_of(call.cu_q_lens[1:], token), call.kv_lens.shape[0] - 1)
    pooled_token = token[:, None] - before
    is_new = (pooled_token >= call.cu_q_lens[sequence][:, None]) & (pooled >= 0)
    place = token_slots(pooled, call.state_tables, call.cu_q_lens, page_size=page_size)
    cached = (place >= 0) & (place < state.pages.shape[0] * page_size)
    rows = jnp.where(
        is_new[..., None],
        call.rows[jnp.maximum(pooled_token, 0)],
        state.pages.reshape(-1, columns)[jnp.where(cached, place, 0)],
    )
    contents, gates = split_rows(rows, ratio, call.norm.shape[0])
    entries = pooled_entries(contents, gates, is_new | cached, call.norm, call.norm_eps, call.cos, call.sin)

    completes = (position >= 0) & (position % ratio == ratio - 1)
    entry = jnp.where(completes, position // ratio, -1)[:, None]
    entry_slots = token_slots(entry, call.entry_tables, call.cu_q_lens, page_size=call.entries.page_size)[:, 0]
    return state, write_at(call.entries, entries, entry_slots)
