"""Experimental: has never run on a card. `mla_decode` on data-center Blackwell (B200).

`mosaic.blackwell.mla_decode` has the kernel and its main loop. A query row is one head of one query token. Few query
rows are the columns of the accumulator O; many query rows are its rows.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_attn.mosaic.blackwell.mla_decode import TcgenStatic, attend, choose_static
from pallas_attn.mosaic.blackwell.mla_merge import merge_splits
from pallas_attn.mosaic.blackwell.tmem import ROWS
from pallas_attn.mosaic.latent_tiles import NEVER_BIT
from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.mla_decode.mosaic_rows import in_blocks, out_of_blocks, tile_parameters
from pallas_attn.ops.plan_decode import planned


def mla_decode(call: MlaDecodeCall) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    call, plan = planned(call, "mosaic_sm100", num_programs(call))
    static = static_of(call)
    results = attend(in_blocks(call, plan, ROWS), static, call.output_dtype)
    return out_of_blocks(call, *merge_splits(results, static, plan))


def num_programs(call: MlaDecodeCall) -> int:
    """Return the number of CTAs of a plan for this call.

    The kernel runs each CTA of the plan once per block of query rows and half of the latent columns. The number is
    therefore the number of multiprocessors divided by the number of these combinations.

    Raises:
      NotImplementedError: the device is not Blackwell, or the kernel does not support the dtypes, widths, page size or
        number of queries.
    """
    basics.require_capability((10, 0))
    unsupported.require_plain_scores(call.window, call.soft_cap)
    unsupported.require_16_bit_latents(call.cache)
    unsupported.require_dtypes(call.q_latent.dtype, call.cache.pages.dtype)
    unsupported.require_page_size(call.page_size)
    if call.latent_dim % 64 or not 64 <= call.latent_dim <= 512:
        raise NotImplementedError(f"takes latents of a multiple of 64 columns up to 512, got {call.latent_dim}")
    if call.rope_dim not in (32, 64):
        raise NotImplementedError(f"takes 32 or 64 rotated columns, got {call.rope_dim}")
    if call.num_queries > NEVER_BIT:
        raise NotImplementedError(f"takes at most {NEVER_BIT} queries, got {call.num_queries}")
    return max(1, basics.multiprocessors() // static_of(call).ctas(call.query_rows))


def static_of(call: MlaDecodeCall) -> TcgenStatic:
    """Compile-time parameters of the kernel for a call."""
    return choose_static(**tile_parameters(call), dtype=call.q_latent.dtype)
