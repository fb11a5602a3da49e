"""Writing new latents into their pages."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.write_latent.call import WriteLatentCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedLatent


def write_latent(
    cache: PagedLatent,
    latent: Float[Array, "T LR"],
    slots: Int32[Array, "T"],
    *,
    implementation: Implementation = None,
) -> PagedLatent:
    """Writes each token's latent into its slot; in place where the cache is donated.

    A quantised cache gets, for each 128 columns of each token's latent, the scale amax / 448 (1 for zeros) and the
    quotients as float8_e4m3fn; rotated keys are cast to the dtype of its `rope`. One of 8 bits without scales gets a
    cast, which makes NaN or infinities of what it cannot hold.

    Args:
      cache: of any dtype.
      latent: normed latents and rotated keys, in the cache's dtype or cast to it; in any 16-bit or 32-bit dtype for a
        quantised one.
      slots: page · ps + offset of each token; PAGE_NONE, or any slot outside the pool, writes nothing; no two
        other slots may be equal.
      implementation: None, a name, or names to try in order.

    Returns:
      The cache with the tokens written and every other element untouched.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(num_pages=8, page_size=4, latent_dim=6, rope_dim=2, dtype=jnp.float32)
      >>> cache = pallas_attn.PagedLatent.allocate(spec)
      >>> cache = pallas_attn.write_latent(cache, jnp.ones((2, 8)), jnp.array([9, -1], jnp.int32))
      >>> cache.pages[2, :, 0].tolist()
      [0.0, 1.0, 0.0, 0.0]
    """
    (slots,) = checks.int32(slots=slots)
    call = WriteLatentCall(cache, latent, slots)
    call.validate()
    if not cache.is_quantised:
        call = dataclasses.replace(call, latent=latent.astype(cache.pages.dtype))
    return dispatch.run(call, implementation) if latent.shape[0] else cache
