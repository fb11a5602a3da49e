"""`ragged_attention` in Triton, for cards from Ampere (sm80) on. The main loop is in `pallas_attn.triton.flash`."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_attn.ops.ragged_attention import config
from pallas_attn.ops.ragged_attention.call import RaggedAttentionCall
from pallas_attn.portable.visibility import head_windows
from pallas_attn.runtime import device
from pallas_attn.triton import caches, flash, tiles


def ragged_attention(call: RaggedAttentionCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    caches.require_queries(call.q)
    caches.require_head_dim(max(call.key_dim, call.value_dim))
    card = device.triton_card()
    rows = call.num_q_heads // call.num_kv_heads * -(-call.num_tokens // call.num_sequences)
    return flash.attend(
        call.q,
        call.k,
        call.v,
        cu_q_lens=call.cu_q_lens,
        cu_kv_lens=call.cu_kv_lens,
        window=None if call.window is None else head_windows(call.window, call.num_kv_heads),
        sinks=call.sinks,
        causal=call.causal,
        scale=call.scale,
        soft_cap=call.soft_cap,
        out_dtype=call.output_dtype,
        tile=config.triton_tile(card, rows, call.key_dim, call.value_dim, capped=call.soft_cap is not None),
        native=tiles.has_e4m3(card),
    )
