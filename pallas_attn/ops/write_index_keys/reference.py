"""Reference implementation of `write_index_keys`: a loop writes one token at a time."""

from __future__ import annotations

from pallas_attn.ops.write_index_keys.call import WriteIndexKeysCall
from pallas_attn.portable.index_keys import stored_index_keys
from pallas_attn.portable.oracle import write_one_by_one
from pallas_attn.types import PagedIndexKeys


def write_index_keys(call: WriteIndexKeysCall) -> PagedIndexKeys:
    return write_one_by_one(call.index, call.keys, call.slots, stored_index_keys)
