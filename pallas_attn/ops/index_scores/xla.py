"""`index_scores` in plain JAX, for any device.

A tile is a block of adjacent query tokens of one sequence. A loop iterates over blocks of the sequence's index keys,
and writes the scores of each block into an array with a row per query.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from pallas_attn.ops.index_scores.call import IndexScoresCall
from pallas_attn.portable.index_tiles import IndexTiles, index_heuristic
from pallas_attn.portable.online_softmax import XlaConfig
from pallas_attn.runtime import tuning


def index_scores(call: IndexScoresCall) -> Float32[Array, "T K"]:
    sizes = {"num_tokens": call.q.shape[0], "num_sequences": call.kv_lens.shape[0], "heads": call.q.shape[1]}
    tiles = IndexTiles(call, tuning.lookup("index_scores/xla", sizes, XlaConfig, lambda: index_heuristic(**sizes)))
    width = tiles.most_tiles * tiles.tile_tokens

    def start(rows: int) -> Float32[Array, "W M K"]:
        return jnp.full((rows, tiles.tile_queries, width), -jnp.inf, jnp.float32)

    def step(scores, tile, key, j):
        zero = jnp.zeros_like(j)
        return lax.dynamic_update_slice(scores, tile, (zero, zero, j * tiles.tile_tokens))

    scores = tiles.walk(start, step, lambda scores: scores, fill=-jnp.inf)
    return scores[:, : call.block_tables.shape[1] * call.index.page_size]
