"""Reference implementation of `write_latent`: a loop writes one token at a time."""

from __future__ import annotations

from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.portable.latents import stored_latents
from pallas_attn.portable.oracle import write_one_by_one
from pallas_attn.types import PagedLatent


def write_latent(call: WriteLatentCall) -> PagedLatent:
    return write_one_by_one(call.cache, call.latent, call.slots, stored_latents)
