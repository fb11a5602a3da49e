"""`index_top_k` in plain JAX, for any device.

A tile is a block of adjacent query tokens of one sequence. A loop iterates over blocks of the sequence's index keys,
and keeps the `top_k` highest scores, and their positions, of all blocks up to the current block.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_attn.ops.index_top_k.call import IndexTopKCall
from pallas_attn.portable.index_tiles import IndexTiles, as_positions, comparable, index_heuristic
from pallas_attn.portable.online_softmax import XlaConfig
from pallas_attn.runtime import tuning


def index_top_k(call: IndexTopKCall) -> Int32[Array, "T top_k"]:
    sizes = {"num_tokens": call.q.shape[0], "num_sequences": call.kv_lens.shape[0], "heads": call.q.shape[1]}
    tiles = IndexTiles(call, tuning.lookup("index_top_k/xla", sizes, XlaConfig, lambda: index_heuristic(**sizes)))
    kept = min(call.top_k, call.block_tables.shape[1] * call.index.page_size)

    def start(rows: int) -> tuple[Float32[Array, "W M k"], Int32[Array, "W M k"]]:
        shape = (rows, tiles.tile_queries, kept)
        return jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32)

    def step(state, scores, key, j):
        best, position = state
        # Ties select the lower position: lax.top_k selects the first of equal scores. `best` has lower positions than
        # the new scores, and its equal scores are in order of position.
        all_scores = jnp.concatenate([best, comparable(scores)], axis=-1)
        all_positions = jnp.concatenate([position, jnp.broadcast_to(key[:, None], scores.shape)], axis=-1)
        best, chosen = lax.top_k(all_scores, kept)
        return best, jnp.take_along_axis(all_positions, chosen, axis=-1)

    def finish(state):
        best, position = state
        return as_positions(position, best)

    return jnp.pad(tiles.walk(start, step, finish, fill=-1), ((0, 0), (0, call.top_k - kept)), constant_values=-1)
