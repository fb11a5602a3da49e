"""Experimental: has never run on a card. `paged_decode` on data-center Blackwell (B200).

`mosaic.decode` has the kernel and its main loop, as on Hopper. Tiles have 128 tokens, the rows of the tensor core
(`mosaic.blackwell.decode_products`), or 64 tokens if tiles of 128 are too large.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_attn.mosaic.blackwell.decode_products import Tcgen05Products
from pallas_attn.mosaic.decode import DecodeTile, decode_attention
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.dequantize import scale_layout, split_queries
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.ops.paged_decode import config
from pallas_attn.ops.paged_decode.call import DecodeOutput, PagedDecodeCall
from pallas_attn.ops.paged_decode.mosaic_operands import config_key, operands, require_supported
from pallas_attn.ops.plan_decode import planned


def paged_decode(call: PagedDecodeCall) -> tuple[DecodeOutput, Float[Array, "B Q Hq"]]:
    call, plan = planned(call, "mosaic_sm100", num_programs(call))
    packing, settings = _sizes(call)
    query_parts, query_scale = [call.q.astype(call.kv.k.dtype)], 1.0
    if not multiplies_fp8(call):
        query_parts, query_scale = split_queries(call.q, call.kv)
    tile = DecodeTile(
        packing=packing,
        tokens=settings.tile_tokens,
        page_size=call.page_size,
        key_dims=(call.head_dim,),
        has_values=True,
        query_parts=len(query_parts),
        packs_queries=False,
        scales=scale_layout(call.kv),
        q_dtype=query_parts[0].dtype,
        cache_dtype=call.kv.k.dtype,
        out_dtype=call.output_dtype,
        products=Tcgen05Products(),
    )
    inputs, static = operands(call, plan, tile, settings.stages, query_parts, query_scale)
    return decode_attention(inputs, static, call.q.shape, call.out, name="paged_decode")


def multiplies_fp8(call: PagedDecodeCall) -> bool:
    """Return whether the tensor core multiplies fp8 keys by fp8 queries, without conversion of the keys.

    This requires D = 128, because tiles of other widths have another layout in shared memory or do not fit. It excludes
    channel scales, which would have to be multiplied into the fp8 queries.
    """
    return call.q_scale is not None and call.head_dim == 128 and scale_layout(call.kv) != "channel"


def num_programs(call: PagedDecodeCall) -> int:
    """Return the number of CTAs of a plan for this call: the number of CTAs that run at the same time on the GPU."""
    require_supported(call, (10, 0), config.MAX_COLUMNS_SM100)
    _, settings = _sizes(call)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(call: PagedDecodeCall) -> tuple[QueryPacking, DecodeConfig]:
    fp8_products = multiplies_fp8(call)
    step = config.column_step_sm100(call.head_dim, call.kv.k.dtype.itemsize, fp8_products=fp8_products)
    packing = QueryPacking(call.group, call.num_queries, config.MAX_COLUMNS_SM100, step)
    return packing, config.mosaic_sm100_config(config_key(call, packing.width), fp8_products=fp8_products)
