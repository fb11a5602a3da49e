"""`write_index_keys` in plain JAX, for any device.

Each array of the cache is updated by one scatter, in place if the cache is donated.
"""

from __future__ import annotations

import jax

from pallas_attn.ops.write_index_keys.call import WriteIndexKeysCall
from pallas_attn.portable.index_keys import stored_index_keys
from pallas_attn.portable.pool_access import page_or_none, put
from pallas_attn.types import PagedIndexKeys


def write_index_keys(call: WriteIndexKeysCall) -> PagedIndexKeys:
    num_pages, page_size, _ = call.index.keys.shape
    page, offset = call.slots // page_size, call.slots % page_size
    # A JAX scatter ignores indices past the end of the pool, but index -1 would refer to the last page.
    page = page_or_none(page, (page >= 0) & (page < num_pages), num_pages)
    stored = stored_index_keys(call.keys, call.index)
    return jax.tree.map(lambda pool, values: put(pool, (page, offset), values), call.index, stored)
