"""Reference implementation of `write_index_keys`: a loop writes one token at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn.ops.write_index_keys.call import WriteIndexKeysCall
from pallas_attn.portable.arguments import varying_like
from pallas_attn.portable.index_keys import stored_index_keys
from pallas_attn.types import PagedIndexKeys


def write_index_keys(call: WriteIndexKeysCall) -> PagedIndexKeys:
    num_pages, page_size, _ = call.index.keys.shape

    def write(index: PagedIndexKeys, token: tuple[Float[Array, "Di"], Int32[Array, ""]]):
        key, slot = token
        page, offset = slot // page_size, slot % page_size

        def put(pool: Array, values: Array) -> Array:
            written = lax.dynamic_update_slice(pool, values[None, None], (page, offset, jnp.zeros_like(page)))
            return jnp.where((page >= 0) & (page < num_pages), written, pool)

        return jax.tree.map(put, index, stored_index_keys(key, index)), None

    return lax.scan(write, varying_like(call.index, call), (call.keys, call.slots))[0]
