"""Writing new latents into their pages."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float, Int32

from pallas_attn import dispatch
from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.types import Implementation, PagedLatent


def write_latent(
    cache: PagedLatent,
    latent: Float[Array, "T LR"],
    slots: Int32[Array, "T"],
    *,
    implementation: Implementation = None,
) -> PagedLatent:
    """Writes one latent a slot; in place where the cache is donated.

    Args:
      cache: pages [N, ps, L + R].
      latent: normed latents and rotated keys, in the cache's dtype or cast to it.
      slots: page · ps + offset of each token; PAGE_NONE, or any slot outside the pool, writes nothing. No two alike.
      implementation: None, a name, or names to try in order.

    Returns:
      The cache with the tokens written and every other element untouched.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.
    """
    call = WriteLatentCall(cache, latent, slots)
    call.validate()
    call = dataclasses.replace(call, latent=latent.astype(cache.pages.dtype))
    return dispatch.run(call, implementation)
