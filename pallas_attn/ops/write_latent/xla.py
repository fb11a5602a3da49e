"""`write_latent` on any device."""

from __future__ import annotations

from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.portable.latents import stored_latents
from pallas_attn.portable.pool_access import put_tokens
from pallas_attn.types import PagedLatent


def write_latent(call: WriteLatentCall) -> PagedLatent:
    return put_tokens(call.cache, call.slots, stored_latents(call.latent, call.cache))
