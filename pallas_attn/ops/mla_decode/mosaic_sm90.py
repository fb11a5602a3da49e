"""`mla_decode` on Hopper (H100, H200): chooses a kernel by the number of query rows and the dtype of the latents.

A query row is one head of one query token of a sequence.

    mosaic_swap_ab               few query rows, which are the columns of a tile
    mosaic_two_warpgroup_bf16    many query rows, 16-bit latents
    mosaic_two_warpgroup_fp8     many query rows, quantised latents
"""

from __future__ import annotations

from types import ModuleType

from jaxtyping import Array, Float

import pallas_attn.ops.mla_decode.mosaic_swap_ab as mosaic_swap_ab
import pallas_attn.ops.mla_decode.mosaic_two_warpgroup_bf16 as mosaic_two_warpgroup_bf16
import pallas_attn.ops.mla_decode.mosaic_two_warpgroup_fp8 as mosaic_two_warpgroup_fp8
from pallas_attn.mosaic.primitives import unsupported
from pallas_attn.ops.mla_decode import config
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.plan_decode import planned


def mla_decode(call: MlaDecodeCall) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    call, plan = planned(call, "mosaic_sm90", num_programs(call))
    return _kernel(call).decode(call, plan)


def num_programs(call: MlaDecodeCall) -> int:
    """Return the number of programs of a plan for this call. The kernel runs one CTA per program and query block."""
    return _kernel(call).num_programs(call)


def _kernel(call: MlaDecodeCall) -> ModuleType:
    """Return the module of the kernel.

    For 16-bit latents, the number of query rows of a sequence (heads times queries) decides. For quantised latents, the
    number of heads decides.
    """
    unsupported.require_plain_scores(call.window, call.soft_cap)
    unsupported.require_scales_of_latents(call.cache)
    quantised, is_masked = call.cache.is_quantised, call.draft_mask is not None
    most = config.max_columns(call.output_dtype, quantised=quantised, masked=is_masked)
    few = call.num_heads <= most if quantised else call.query_rows <= most
    if few:
        return mosaic_swap_ab
    return mosaic_two_warpgroup_fp8 if quantised else mosaic_two_warpgroup_bf16
