"""Reference implementation of `index_top_k`: score all keys of each token's sequence, and sort the scores."""

from __future__ import annotations

from jaxtyping import Array, Int32

from pallas_attn.ops.index_top_k.call import IndexTopKCall
from pallas_attn.portable.index_tiles import dense_scores, sorted_choice


def index_top_k(call: IndexTopKCall) -> Int32[Array, "T top_k"]:
    return sorted_choice(dense_scores(call), call.top_k)
