"""Write new index keys into their pages."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.write_index_keys.call import WriteIndexKeysCall
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedIndexKeys


def write_index_keys(
    index: PagedIndexKeys,
    keys: Float[Array, "T Di"],
    slots: Int32[Array, "T"],
    *,
    implementation: Implementation = None,
) -> PagedIndexKeys:
    """Write each token's index key into its slot; in place if the cache is donated.

    A float8_e4m3fn cache stores for each token the scale amax / 448 (1 for zeros) and the quotients.

    Args:
      index: of any dtype.
      keys: normed and rotated index keys, in any 16-bit or 32-bit dtype. They are cast to the cache's dtype.
      slots: page · ps + offset of each token, equal to the slots of its latents. PAGE_NONE and other slots outside the
        pool write nothing. All other slots must be distinct.
      implementation: None, a name, or names to try in order.

    Returns:
      The cache with the tokens written. All other elements are unchanged.

    Raises:
      ValueError: the arguments are inconsistent.
      NotImplementedError: the named implementation does not support the call.

    Example:
      >>> spec = pallas_attn.index_cache_spec(num_pages=8, page_size=4, index_dim=6, dtype=jnp.float32)
      >>> index = pallas_attn.PagedIndexKeys.allocate(spec)
      >>> index = pallas_attn.write_index_keys(index, jnp.ones((2, 6)), jnp.array([9, -1], jnp.int32))
      >>> index.keys[2, :, 0].tolist()
      [0.0, 1.0, 0.0, 0.0]
    """
    (slots,) = checks.int32(slots=slots)
    call = WriteIndexKeysCall(index, keys, slots)
    call.validate()
    return dispatch.run(call, implementation) if keys.shape[0] else index
