"""Write new latents into their pages."""

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
    """Write each token's latent into its slot; in place if the cache is donated.

    A quantised cache (8 bits with scales) stores, for each group of 128 latent columns of a token, a scale and the
    quotients by this scale as float8_e4m3fn. The scale is amax / 448, or 1 if all values are 0. With scales in
    float8_e8m0fnu, a group has 64 columns, and its scale is the smallest power of two that is at least
    max(amax, 1e-4) / 448. Rotated keys are cast to the dtype of the cache's `rope`.

    For other caches, latents and rotated keys are cast to the dtype of the cache. For an 8-bit cache without scales,
    numbers outside the range of the dtype become NaN or infinite.

    Args:
      cache: the latents and rotated keys; see `PagedLatent`. All its dtypes are supported.
      latent: latents after their norm and rotated keys, in any 16-bit or 32-bit dtype. An 8-bit cache without scales
        also accepts its own dtype.
      slots: page · ps + offset of each token. PAGE_NONE and other slots outside the pool write nothing. All other slots
        must be distinct.
      implementation: None, a name, or names to try in order.

    Returns:
      The cache with the tokens written. All other elements are unchanged.

    Raises:
      ValueError: the arguments are inconsistent.
      NotImplementedError: the named implementation does not support the call.

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
