"""`paged_prefill` in Triton, for cards from Ampere (sm80) on. The main loop is in `pallas_attn.triton.flash`."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_attn.ops.paged_prefill import config
from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.portable.visibility import head_windows
from pallas_attn.runtime import device
from pallas_attn.triton import caches, flash, tiles


def paged_prefill(call: PagedPrefillCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
    caches.require_supported(call.q, call.kv)
    caches.require_head_dim(call.value_dim)
    v, first_column = call.kv.values
    card = device.triton_card()
    num_tokens, _, head_dim = call.q.shape
    rows = call.group * -(-num_tokens // call.num_sequences)
    demanding = call.kv.k_scale is not None or call.soft_cap is not None or call.draft_mask is not None
    # A draft mask needs registers. Tiles are smaller for wider heads, so the tile for the widest heads is used.
    width = max(head_dim, call.value_dim) if call.draft_mask is None else caches.MAX_HEAD_DIM
    return flash.attend(
        call.q,
        call.kv.k,
        v,
        block_tables=call.block_tables,
        cu_q_lens=call.cu_q_lens,
        kv_lens=call.kv_lens,
        scales=(call.kv.k_scale, call.kv.v_scale),
        groups=caches.scale_groups(call.kv),
        value_columns=slice(first_column, first_column + call.value_dim),
        window=None if call.window is None else head_windows(call.window, call.kv.k.shape[1]),
        sinks=call.sinks,
        causal=call.causal,
        draft_mask=call.draft_mask,
        scale=call.scale,
        soft_cap=call.soft_cap,
        out_dtype=call.output_dtype,
        tile=config.triton_tile(card, rows, width, demanding=demanding),
        native=tiles.has_e4m3(card),
    )
