"""`write_index_keys` in Triton, for GPUs from Ampere (sm80) on. The kernels are in `pallas_attn.triton.row_writes`."""

from __future__ import annotations

from pallas_attn.ops.write_index_keys.call import WriteIndexKeysCall
from pallas_attn.triton import row_writes
from pallas_attn.types import PagedIndexKeys


def write_index_keys(call: WriteIndexKeysCall) -> PagedIndexKeys:
    index = call.index
    if index.scale is None:
        return PagedIndexKeys(row_writes.scatter_rows(call.keys, call.slots, index.keys))
    return PagedIndexKeys(*row_writes.quantise_rows(call.keys, call.slots, index.keys, index.scale))
