"""`select_top_k` in Triton, for GPUs from Ampere (sm80) on. The kernels are in `pallas_attn.triton.top_k`."""

from __future__ import annotations

from jaxtyping import Array, Int32

from pallas_attn.ops.select_top_k.call import SelectTopKCall
from pallas_attn.triton import top_k


def select_top_k(call: SelectTopKCall) -> Int32[Array, "T top_k"]:
    num_tokens, width = call.scores.shape
    top_k.require_supported(num_tokens, width, call.top_k)
    return top_k.highest(call.scores, None, call.top_k)
