"""Experimental: has never run on a card. `ragged_attention` on Blackwell, by the kernel of
`mosaic.blackwell.prefill`.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_attn.mosaic.blackwell.prefill import QUERIES, ROWS, flash_attention
from pallas_attn.mosaic.primitives import basics, unsupported
from pallas_attn.ops.ragged_attention import config
from pallas_attn.ops.ragged_attention.call import RaggedAttentionCall
from pallas_attn.ops.ragged_attention.mosaic_sm90 import attend, check_supported, config_key


def ragged_attention(call: RaggedAttentionCall) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"] | None]:
    basics.require_capability((10, 0))
    check_supported(call, no_wider=unsupported.NO_WIDER_ON_BLACKWELL)
    return attend(call, flash_attention, config.sm100_config(config_key(call)), QUERIES, ROWS)
