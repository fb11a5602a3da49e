"""Reference implementation of `index_scores`: gather all keys of each token's sequence and score them at once."""

from __future__ import annotations

from jaxtyping import Array, Float32

from pallas_attn.ops.index_scores.call import IndexScoresCall
from pallas_attn.portable.index_tiles import dense_scores


def index_scores(call: IndexScoresCall) -> Float32[Array, "T K"]:
    return dense_scores(call)
