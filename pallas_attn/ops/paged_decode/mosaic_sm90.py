"""`paged_decode` on Hopper (H100, H200).

Programs work off pieces, consecutive pages of a KV head of a sequence (`sm90.decode`). All query rows of that head
are taken together, as columns of tiles, and a tile of 64 or 128 tokens as its rows:

    S [tokens, columns] = K qᵀ      O [D, columns] += Vᵀ P      m, l [columns]

so tokens fill wgmma's M of 64, whatever the group, and N is as narrow as the group allows. K and V are read from
where they landed, those of 8-bit caches by way of registers, where they become 16 bits (`sm90.dequantise`); only P
goes back to shared memory. Scales that are the same for all tokens go into the scores or the finished sums, those of
tokens multiply a row of S, and go into P by way of the exponent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics, refusals
from pallas_attn.mosaic.sm90 import dequantise
from pallas_attn.mosaic.sm90.decode import attend
from pallas_attn.mosaic.sm90.decode_memory import Inputs, Static
from pallas_attn.mosaic.sm90.decode_pages import SCALES_AT_ONCE
from pallas_attn.mosaic.sm90.query_packing import Columns
from pallas_attn.ops.paged_decode import config
from pallas_attn.ops.paged_decode.call import PagedDecodeCall
from pallas_attn.ops.plan_decode import plan_of
from pallas_attn.types import HeadWindow


def paged_decode(call: PagedDecodeCall) -> tuple[Float[Array, "B Q Hq D"], Float[Array, "B Q Hq"]]:
    q, kv, draft_mask, sinks, window = call.q, call.kv, call.draft_mask, call.sinks, call.window
    plan = plan_of(call, "mosaic_sm90", num_programs(call))
    page_size, head_dim = call.page_size, call.head_dim
    columns, settings = _sizes(call)
    scales = dequantise.scale_layout(kv)
    terms, query_scale = dequantise.query_terms(q, kv)
    beside = dequantise.tokens_per_smem_row(kv)
    rows = -1, page_size // beside, head_dim * beside
    raw_queries = config.takes_raw_queries(kv.k.dtype.itemsize, columns.width) and not columns.packs_freely
    packed = None if raw_queries else [columns.pack(term).reshape(-1, columns.width, head_dim) for term in terms]
    inputs = Inputs(
        q=(q if packed is None else jnp.stack(packed),),
        k=kv.k.reshape(rows),
        v=kv.v.reshape(rows),
        k_scale=None if scales == "channel" else _one_axis(kv.k_scale),
        v_scale=_one_axis(kv.v_scale),
        block_tables=call.block_tables,
        kv_lens=call.kv_lens,
        q_lens=call.q_lens,
        plan=plan,
        window=window if isinstance(window, HeadWindow) else None,
        drafts=None if draft_mask is None else columns.drafts(draft_mask),
        sinks=None if sinks is None else columns.per_head(sinks),
    )
    static = Static(
        columns=columns,
        raw_queries=raw_queries,
        tokens=settings.tile_tokens,
        stages=settings.stages,
        page_size=page_size,
        num_kv_heads=call.num_kv_heads,
        score_scale=call.scale / query_scale,
        soft_cap=call.soft_cap,
        window=window if isinstance(window, int) else None,
        scales=scales,
    )
    return attend(inputs, static, jax.ShapeDtypeStruct(q.shape, call.output_dtype), name="paged_decode")


def num_programs(call: PagedDecodeCall) -> int:
    """Programs that run side by side on the card, for plans of such calls."""
    _refuse(call)
    _, settings = _sizes(call)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(call: PagedDecodeCall) -> tuple[Columns, config.MosaicConfig]:
    scales = dequantise.scale_layout(call.kv)
    columns = Columns(call.group, call.num_queries, _limit(call))
    key = config.MosaicKey(
        head_dim=call.head_dim,
        cache_bytes=call.kv.k.dtype.itemsize,
        token_scales=isinstance(scales, int),
        columns=columns.width,
        terms=2 if scales == "channel" else 1,
        out_bytes=call.output_dtype.itemsize,
        page_size=call.page_size,
    )
    return columns, config.mosaic_config(key)


def _limit(call: PagedDecodeCall) -> int:
    """Query rows of a KV head that a program has registers for."""
    return config.max_columns(call.head_dim, call.kv.k.dtype.itemsize, capped=call.soft_cap is not None)


def _refuse(call: PagedDecodeCall) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    basics.require_capability((9, 0))
    refusals.require_dtypes(call.q, call.kv.k)
    refusals.require_head_dim(call.head_dim)
    refusals.require_page_size(call.page_size)
    limit = _limit(call)
    if call.group > limit and Columns(call.group, 1, limit).block_heads < limit // 2:
        raise NotImplementedError(
            f"takes {limit} query heads at once, or about as many; {call.group} have no such divisor"
        )
    if call.draft_mask is not None:
        refusals.require_draft_bits(call.num_queries)
    refusals.require_soft_cap(call.soft_cap)


def _one_axis(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Scales that come with the tokens, as the kernel copies them: some of one array, never past its end."""
    if scale is None or scale.ndim != 3:
        return scale
    scale = scale.reshape(-1)
    return jnp.pad(scale, (0, -scale.size % SCALES_AT_ONCE)) if scale.size % SCALES_AT_ONCE else scale
