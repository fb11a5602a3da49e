"""`write_index_keys` on any device: one scatter per array of the cache, in place if the cache is donated."""

from __future__ import annotations

import jax

from pallas_attn.ops.write_index_keys.call import WriteIndexKeysCall
from pallas_attn.portable.index_keys import stored_index_keys
from pallas_attn.portable.pool_access import page_or_none, put
from pallas_attn.types import PagedIndexKeys


def write_index_keys(call: WriteIndexKeysCall) -> PagedIndexKeys:
    num_pages, page_size, _ = call.index.keys.shape
    page, offset = call.slots // page_size, call.slots % page_size
    page = page_or_none(page, (page >= 0) & (page < num_pages), num_pages)  # index -1 would wrap around
    stored = stored_index_keys(call.keys, call.index)
    return jax.tree.map(lambda pool, values: put(pool, (page, offset), values), call.index, stored)
