"""Write the index keys of new tokens into the paged cache of index keys (sparse attention)."""

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
    """Write the index key of each new token into the token's slot; in place if the cache is donated.

    A float8_e4m3fn cache stores key / scale and the scale, which is the largest magnitude of the token's key / 448 (1
    if the key is 0).

    Args:
      index: the cache, in any dtype of `PagedIndexKeys`.
      keys: index keys after norm and rotation, in bfloat16, float16 or float32. They are cast to the cache's dtype.
      slots: page·ps + offset of each token, equal to the slots of the token's latents. A token whose slot is -1 or
        outside the pool is not written. All other slots must be distinct.
      implementation: None, a name, or names to try in order.

    Returns:
      The cache with the keys written. All other elements are unchanged.

    Raises:
      ValueError: the arguments do not fit each other.
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
