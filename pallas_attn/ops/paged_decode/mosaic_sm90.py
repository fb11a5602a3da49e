"""`paged_decode` on Hopper (H100, H200).

The kernel is `sm90.decode`. All query rows of a KV head of a sequence are the columns of a tile, 64 or 128 tokens its
rows:

    S [tokens, columns] = K qᵀ      O [D, columns] += Vᵀ P      m, l [columns]

so tokens fill wgmma's M of 64, whatever the group, and N is as narrow as the group allows. K and V are multiplied
where they landed, or from registers for 8-bit caches, where they become 16 bits (`sm90.dequantise`); only P goes back
to shared memory. Scales that are the same for all tokens multiply the scores or the finished sums. Scales of tokens
multiply a row of S, and P by way of the exponent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.sm90 import dequantise
from pallas_attn.mosaic.sm90.decode import (
    SCALES_PER_COPY,
    DecodeInputs,
    DecodeStatic,
    DecodeTile,
    decode_attention,
)
from pallas_attn.mosaic.sm90.decode_config import DecodeConfig
from pallas_attn.mosaic.sm90.query_packing import QueryPacking
from pallas_attn.ops.paged_decode import config
from pallas_attn.ops.plan_decode import plan_decode
from pallas_attn.portable.visibility import real_queries
from pallas_attn.types import DecodePlan, HeadWindow, PagedKV


def paged_decode(
    q: Float[Array, "B Q Hq D"],
    kv: PagedKV,
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"] | None,
    sm_scale: float,
    window: int | HeadWindow | None,
    sinks: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    draft_mask: Bool[Array, "B Q Q"] | None,
    plan: DecodePlan | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "B Q Hq D"], Float[Array, "B Q Hq"]]:
    limit = config.max_columns(kv.k.shape[-1], kv.k.dtype.itemsize, capped=soft_cap is not None)
    _refuse(q, kv, draft_mask, limit)
    refusals.require_soft_cap(soft_cap)
    (num_kv_heads, page_size), (num_heads, head_dim) = kv.k.shape[1:3], q.shape[2:]
    packing, settings = _sizes(q, kv, out_dtype, limit)
    scales = dequantise.scale_layout(kv)
    terms, query_scale = dequantise.query_terms(q, kv)
    if plan is None:
        plan = plan_decode(
            kv_lens,
            q_lens=real_queries(q_lens, kv_lens, q.shape[1]),
            window=window,
            page_size=page_size,
            num_q_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_programs=settings.programs_per_multiprocessor * basics.multiprocessors(),
        )
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
        out_dtype=out_dtype,
    )
    packed = [] if tile.packs_queries else [packing.pack(term).reshape(-1, packing.width, head_dim) for term in terms]
    rows = -1, tile.rows(page_size), head_dim * tile.tokens_per_row
    inputs = DecodeInputs(
        q=(q if tile.packs_queries else jnp.stack(packed),),
        k=kv.k.reshape(rows),
        v=kv.v.reshape(rows),
        k_scale=None if scales == "channel" else _one_axis(kv.k_scale),
        v_scale=_one_axis(kv.v_scale),
        block_tables=block_tables,
        kv_lens=kv_lens,
        q_lens=q_lens,
        plan=plan,
        window=window if isinstance(window, HeadWindow) else None,
        drafts=None if draft_mask is None else packing.drafts(draft_mask),
        sinks=None if sinks is None else packing.per_head(sinks),
    )
    static = DecodeStatic(
        tile=tile,
        stages=settings.stages,
        num_kv_heads=num_kv_heads,
        score_scale=sm_scale / query_scale,
        soft_cap=soft_cap,
        window=window if isinstance(window, int) else None,
    )
    return decode_attention(inputs, static, q.shape, name="paged_decode")


def decode_programs(q: Array | jax.ShapeDtypeStruct, kv: PagedKV, *, out_dtype: jax.typing.DTypeLike) -> int:
    limit = config.max_columns(kv.k.shape[-1], kv.k.dtype.itemsize)
    _refuse(q, kv, None, limit)
    _, settings = _sizes(q, kv, out_dtype, limit)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(
    q: Array | jax.ShapeDtypeStruct, kv: PagedKV, out_dtype: jax.typing.DTypeLike, limit: int
) -> tuple[QueryPacking, DecodeConfig]:
    num_kv_heads, page_size, head_dim = kv.k.shape[1:]
    cache_bytes, scales = kv.k.dtype.itemsize, dequantise.scale_layout(kv)
    packing = QueryPacking(q.shape[2] // num_kv_heads, q.shape[1], limit)
    key = config.PagedDecodeKey(
        head_dim=head_dim,
        cache_bytes=cache_bytes,
        token_scales=isinstance(scales, int),
        columns=packing.width,
        terms=2 if scales == "channel" else 1,
        out_bytes=jnp.dtype(out_dtype).itemsize,
        page_size=page_size,
    )
    return packing, config.mosaic_config(key)


def _refuse(q: Array | jax.ShapeDtypeStruct, kv: PagedKV, draft_mask: Array | None, limit: int) -> None:
    """Raise NotImplementedError for calls that the kernel does not take."""
    basics.require_hopper()
    refusals.require_dtypes(q, kv.k)
    refusals.require_head_dim(q.shape[3])
    refusals.require_page_size(kv.page_size)
    num_queries, group = q.shape[1], q.shape[2] // kv.k.shape[1]
    if group > limit and QueryPacking(group, 1, limit).block_heads < limit // 2:
        raise NotImplementedError(f"takes {limit} query heads at once, or about as many; {group} have no such divisor")
    if draft_mask is not None:
        refusals.require_draft_bits(num_queries)


def _one_axis(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Flatten scales that come with the tokens, padded so that no copy of the kernel reads past their end."""
    if scale is None or scale.ndim != 3:
        return scale
    scale = scale.reshape(-1)
    return jnp.pad(scale, (0, -scale.size % SCALES_PER_COPY)) if scale.size % SCALES_PER_COPY else scale
