"""Reference implementation of `select_top_k`: sort the scores of each token, in a stable descending sort."""

from __future__ import annotations

from jaxtyping import Array, Int32

from pallas_attn.ops.select_top_k.call import SelectTopKCall
from pallas_attn.portable.index_tiles import sorted_choice


def select_top_k(call: SelectTopKCall) -> Int32[Array, "T top_k"]:
    return sorted_choice(call.scores, call.top_k)
