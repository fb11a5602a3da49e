"""`mla_decode` on Hopper (H100, H200): query rows are columns of tiles where they are few, rows where they are many."""

from __future__ import annotations

from types import ModuleType

from jaxtyping import Array, Float

import pallas_attn.ops.mla_decode.mosaic_raw as mosaic_raw
import pallas_attn.ops.mla_decode.mosaic_seesaw as mosaic_seesaw
import pallas_attn.ops.mla_decode.mosaic_swap_ab as mosaic_swap_ab
from pallas_attn.mosaic.primitives import unsupported
from pallas_attn.ops.mla_decode import config
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.plan_decode import plan_of


def mla_decode(call: MlaDecodeCall) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
    plan = plan_of(call, "mosaic_sm90", num_programs(call))
    return _kernel(call).decode(call, plan)


def num_programs(call: MlaDecodeCall) -> int:
    """Number of programs for plans of such calls: as many as run side by side on the card."""
    return _kernel(call).num_programs(call)


def _kernel(call: MlaDecodeCall) -> ModuleType:
    """Module of the kernel for a number of query rows; for quantised latents, of heads."""
    unsupported.require_plain_scores(call.window, call.soft_cap)
    unsupported.require_scales_of_latents(call.cache)
    quantised, is_masked = call.cache.is_quantised, call.draft_mask is not None
    most = config.max_columns(call.output_dtype, quantised=quantised, masked=is_masked)
    few = call.num_heads <= most if quantised else call.query_rows <= most
    if few:
        return mosaic_swap_ab
    return mosaic_raw if quantised else mosaic_seesaw
