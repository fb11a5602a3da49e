"""`paged_decode` on Hopper (H100, H200).

The kernel is `mosaic.decode`. All query rows of a KV head of a sequence are the columns of a tile, 64 or 128 tokens its
rows:

    S [tokens, columns] = K qᵀ      O [D, columns] += Vᵀ P      m, l [columns]

so tokens fill wgmma's M of 64, whatever the group, and N is as narrow as the group allows. K and V are multiplied
where they landed, or from registers for 8-bit caches, where they become 16 bits (`sm90.dequantise`); only P goes back
to shared memory. Scales that are the same for all tokens multiply the scores or the finished sums. Scales of tokens
multiply a row of S, and P by way of the exponent.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics, dequantise, refusals
from pallas_attn.mosaic.decode import (
    SCALES_PER_COPY,
    DecodeInputs,
    DecodeStatic,
    DecodeTile,
    decode_attention,
)
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.mosaic.query_packing import QueryPacking
from pallas_attn.mosaic.sm90.decode_products import WgmmaProducts
from pallas_attn.mosaic.sm90.dequantise import query_terms
from pallas_attn.ops.paged_decode import config
from pallas_attn.ops.paged_decode.call import PagedDecodeCall
from pallas_attn.ops.plan_decode import plan_of
from pallas_attn.types import HeadWindow


def paged_decode(call: PagedDecodeCall) -> tuple[Float[Array, "B Q Hq D"], Float[Array, "B Q Hq"]]:
    q, kv, draft_mask, sinks, window = call.q, call.kv, call.draft_mask, call.sinks, call.window
    plan = plan_of(call, "mosaic_sm90", num_programs(call))
    page_size, head_dim = call.page_size, call.head_dim
    packing, settings = _sizes(call)
    scales = dequantise.scale_layout(kv)
    terms, query_scale = query_terms(q, kv)
    tile = DecodeTile(
        packing=packing,
        tokens=settings.tile_tokens,
        page_size=page_size,
        key_dims=(head_dim,),
        has_values=True,
        terms=len(terms),
        packs_queries=config.packs_queries(kv.k.dtype.itemsize, packing.width) and not packing.packs_freely,
        scales=scales,
        q_dtype=terms[0].dtype,
        cache_dtype=kv.k.dtype,
        out_dtype=call.output_dtype,
        products=WgmmaProducts(),
    )
    packed = [] if tile.packs_queries else [packing.pack(term).reshape(-1, packing.width, head_dim) for term in terms]
    rows = -1, tile.rows(page_size), head_dim * tile.tokens_per_row
    inputs = DecodeInputs(
        q=(q if tile.packs_queries else jnp.stack(packed),),
        k=kv.k.reshape(rows),
        v=kv.v.reshape(rows),
        k_scale=None if scales == "channel" else _one_axis(kv.k_scale),
        v_scale=_one_axis(kv.v_scale),
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        q_lens=call.q_lens,
        plan=plan,
        window=window if isinstance(window, HeadWindow) else None,
        drafts=None if draft_mask is None else packing.drafts(draft_mask),
        sinks=None if sinks is None else packing.per_head(sinks),
    )
    static = DecodeStatic(
        tile=tile,
        stages=settings.stages,
        num_kv_heads=call.num_kv_heads,
        score_scale=call.scale / query_scale,
        soft_cap=call.soft_cap,
        window=window if isinstance(window, int) else None,
    )
    return decode_attention(inputs, static, q.shape, name="paged_decode")


def num_programs(call: PagedDecodeCall) -> int:
    """Number of programs for plans of such calls: as many as run side by side on the card."""
    _refuse(call)
    _, settings = _sizes(call)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(call: PagedDecodeCall) -> tuple[QueryPacking, DecodeConfig]:
    scales = dequantise.scale_layout(call.kv)
    packing = QueryPacking(call.group, call.num_queries, _limit(call))
    key = config.PagedDecodeKey(
        head_dim=call.head_dim,
        cache_bytes=call.kv.k.dtype.itemsize,
        token_scales=isinstance(scales, int),
        columns=packing.width,
        terms=2 if scales == "channel" else 1,
        out_bytes=call.output_dtype.itemsize,
        page_size=call.page_size,
    )
    return packing, config.mosaic_config(key)


def _limit(call: PagedDecodeCall) -> int:
    """Columns of a tile for which a program has registers."""
    return config.max_columns(call.head_dim, call.kv.k.dtype.itemsize, capped=call.soft_cap is not None)


def _refuse(call: PagedDecodeCall) -> None:
    """Raise NotImplementedError for calls that the kernel does not take."""
    basics.require_capability((9, 0))
    refusals.require_dtypes(call.q, call.kv.k)
    refusals.require_head_dim(call.head_dim)
    refusals.require_page_size(call.page_size)
    limit = _limit(call)
    if call.group > limit and QueryPacking(call.group, 1, limit).block_heads < limit // 2:
        raise NotImplementedError(
            f"takes {limit} query heads at once, or about as many; {call.group} have no such divisor"
        )
    if call.draft_mask is not None:
        refusals.require_draft_bits(call.num_queries)
    refusals.require_soft_cap(call.soft_cap)


def _one_axis(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Flatten scales that come with the tokens, padded so that no copy of the kernel reads past their end."""
    if scale is None or scale.ndim != 3:
        return scale
    scale = scale.reshape(-1)
    return jnp.pad(scale, (0, -scale.size % SCALES_PER_COPY)) if scale.size % SCALES_PER_COPY else scale
