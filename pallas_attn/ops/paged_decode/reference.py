"""Definition of `paged_decode`: gather every page, mask, softmax."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.ops.paged_decode.call import DecodeOutput, PagedDecodeCall
from pallas_attn.portable import oracle
from pallas_attn.portable.visibility import draft_visible, head_windows, in_window, real_queries


def paged_decode(call: PagedDecodeCall) -> tuple[DecodeOutput, Float[Array, "B Q Hq"]]:
    call = call.with_bounded_lens()
    q, kv, kv_lens = call.queries, call.kv, call.kv_lens
    q_lens = real_queries(call.q_lens, kv_lens, call.num_queries)
    k, v, exists = oracle.gather_kv(kv, call.block_tables, call.head_dim)
    key = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32)[None], (k.shape[0], k.shape[2]))
    index = jnp.arange(call.num_queries, dtype=jnp.int32)
    position = jnp.maximum((kv_lens - q_lens)[:, None] + index[None], 0)
    windows = head_windows(call.window, call.num_kv_heads)
    visible = in_window(
        key[:, None, None, :],
        position[:, None, :, None],
        windows.window[None, :, None, None],
        windows.sink_tokens[None, :, None, None],
    )
    visible &= draft_visible(key, index, kv_lens, q_lens, call.draft_mask)[:, None] & exists[:, :, None, :]
    out, lse = oracle.attention(q, k, v, visible, sm_scale=call.scale, soft_cap=call.soft_cap, sinks=call.sinks)
    return call.place(out.astype(call.output_dtype)), lse
