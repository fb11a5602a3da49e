"""`paged_decode` on Hopper (H100, H200).

`mosaic.decode` has the kernel and its main loop. A query row is one query head of one query token. The query rows of a
KV head are the columns of a tile; 64 or 128 tokens are its rows:

    S [tokens, query_rows] = K qᵀ      O [D, query_rows] += Vᵀ P      m, l [query_rows]

Tokens fill the 64 rows (M) of a wgmma, and query rows its columns (N), which may be few. K and V of 16-bit caches are
multiplied from shared memory. K and V of 8-bit caches are converted to 16-bit values in registers
(`hopper.dequantize`), and only P is written to shared memory.

Scales per head or channel of K multiply the scores or the queries, and scales of V multiply the finished output. Scales
per token of K multiply the rows of S. Scales per token of V multiply the rows of P: their logarithm is added to the
exponent of P.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_attn.mosaic.decode import DecodeTile, decode_attention
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.mosaic.hopper.decode_products import WgmmaProducts
from pallas_attn.mosaic.hopper.dequantize import split_and_permute_queries
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.dequantize import scale_layout
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.ops.paged_decode import config
from pallas_attn.ops.paged_decode.call import DecodeOutput, PagedDecodeCall
from pallas_attn.ops.paged_decode.mosaic_operands import config_key, operands, require_supported
from pallas_attn.ops.plan_decode import planned


def paged_decode(call: PagedDecodeCall) -> tuple[DecodeOutput, Float[Array, "B Q Hq"]]:
    call, plan = planned(call, "mosaic_sm90", num_programs(call))
    packing, settings = _sizes(call)
    query_parts, query_scale = [call.q], 1.0
    if call.kv.k_scale is not None:
        query_parts, query_scale = split_and_permute_queries(call.q, call.kv)
    cache_dtype = call.kv.k.dtype
    tile = DecodeTile(
        packing=packing,
        tokens=settings.tile_tokens,
        page_size=call.plan_page_size,
        key_dims=(call.head_dim,),
        has_values=True,
        query_parts=len(query_parts),
        packs_queries=config.packs_queries(call.head_dim, cache_dtype.itemsize, packing.width)
        and not packing.packs_freely,
        scales=scale_layout(call.kv),
        q_dtype=query_parts[0].dtype,
        cache_dtype=cache_dtype,
        out_dtype=call.output_dtype,
        products=WgmmaProducts(),
        tokens_first=call.kv.view_page_size is not None,
        first_value_column=call.kv.values[1],
    )
    inputs, static = operands(call, plan, tile, settings.stages, query_parts, query_scale)
    return decode_attention(inputs, static, call.q.shape, call.out, name="paged_decode")


def num_programs(call: PagedDecodeCall) -> int:
    """Return the number of CTAs of a plan for this call: the number of CTAs that run at the same time on the GPU."""
    require_supported(call, (9, 0), _limit(call))
    _, settings = _sizes(call)
    return settings.programs_per_multiprocessor * basics.multiprocessors()


def _sizes(call: PagedDecodeCall) -> tuple[QueryPacking, DecodeConfig]:
    packing = QueryPacking(call.group, call.num_queries, _limit(call))
    return packing, config.mosaic_config(config_key(call, packing.width))


def _limit(call: PagedDecodeCall) -> int:
    """Return the maximum number of columns of a tile, limited by the registers of a CTA."""
    return config.max_columns(call.head_dim, call.kv.k.dtype.itemsize, capped=call.soft_cap is not None)
