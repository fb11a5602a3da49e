"""Definition of `index_scores`: each token gathers all pages of its sequence."""

from __future__ import annotations

from jaxtyping import Array, Float32

from pallas_attn.ops.index_scores.call import IndexScoresCall
from pallas_attn.portable.index_tiles import dense_scores


def index_scores(call: IndexScoresCall) -> Float32[Array, "T K"]:
    return dense_scores(call)
