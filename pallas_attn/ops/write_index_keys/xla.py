"""`write_index_keys` on any device."""

from __future__ import annotations

from pallas_attn.ops.write_index_keys.call import WriteIndexKeysCall
from pallas_attn.portable.index_keys import stored_index_keys
from pallas_attn.portable.pool_access import put_tokens
from pallas_attn.types import PagedIndexKeys


def write_index_keys(call: WriteIndexKeysCall) -> PagedIndexKeys:
    return put_tokens(call.index, call.slots, stored_index_keys(call.keys, call.index))
