"""`index_scores` in Triton, for GPUs from Ampere (sm80) on. The kernel is in `pallas_attn.triton.index_keys`."""

from __future__ import annotations

from jaxtyping import Array, Float32

from pallas_attn.ops.index_scores.call import IndexScoresCall
from pallas_attn.triton import index_keys


def index_scores(call: IndexScoresCall) -> Float32[Array, "T K"]:
    index_keys.require_supported(call)
    return index_keys.paged_scores(call, fill=True)[0]
