"""Experimental: has never run on a card. `paged_prefill` on Blackwell, by the kernel of `mosaic.blackwell.prefill`."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_attn.mosaic.blackwell.prefill import QUERIES, ROWS, flash_attention
from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.ops.paged_prefill import config
from pallas_attn.ops.paged_prefill.call import PagedPrefillCall
from pallas_attn.ops.paged_prefill.mosaic_sm90 import attend, check_supported, config_key


def paged_prefill(call: PagedPrefillCall) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hq"] | None]:
    basics.require_capability((10, 0))
    unsupported.require_own_layout(call.kv)
    check_supported(call, unsupported.HEAD_DIMS, unsupported.NO_WIDER_ON_BLACKWELL)
    return attend(call, flash_attention, config.sm100_config(config_key(call)), QUERIES, ROWS)
