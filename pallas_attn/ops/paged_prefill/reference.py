"""Definition of `paged_prefill`: gather all pages of the sequence for each token, mask, softmax."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.portable import oracle
from pallas_attn.portable.visibility import head_windows, in_window


def paged_prefill(call: PagedPrefillCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    q, cu_q_lens, kv_lens = call.q, call.cu_q_lens, call.kv_lens
    token = jnp.arange(call.num_tokens, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), call.num_sequences - 1)
    position = (kv_lens - cu_q_lens[1:])[sequence] + token  # the last new token is the last token of the sequence
    if not call.causal:
        position = kv_lens[sequence] - 1  # the last position sees all keys
    real = (token >= cu_q_lens[0]) & (token < cu_q_lens[-1])
    gathered = oracle.gather_kv(call.kv, call.block_tables, call.head_dim)
    k, v, exists = (x[sequence] for x in gathered)  # [T, Hkv, K, ...]
    key = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    position = position[:, None, None]
    windows = head_windows(call.window, call.num_kv_heads)
    ends = jnp.maximum(position, 0), windows.window[None, :, None]
    visible = in_window(key, *ends, windows.sink_tokens[None, :, None])
    visible &= real[:, None, None] & exists
    if call.draft_mask is None:
        visible &= key <= position
    else:
        old = (kv_lens - jnp.diff(cu_q_lens))[sequence][:, None, None]
        width = call.draft_mask.shape[1]
        column = jnp.broadcast_to(key - old, (call.num_tokens, 1, key.shape[2]))
        shown = jnp.take_along_axis(call.draft_mask[:, None], jnp.clip(column, 0, width - 1), axis=2) & (column < width)
        visible &= ((column < 0) | shown) & (key < kv_lens[sequence][:, None, None])
    out, lse = oracle.attention(
        q[:, None], k, v, visible[:, :, None], sm_scale=call.scale, soft_cap=call.soft_cap, sinks=call.sinks
    )
    return out[:, 0].astype(call.output_dtype), lse[:, 0]
