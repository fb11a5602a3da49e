"""`select_top_k` in plain JAX, for any device: `lax.top_k` over all scores of a token."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_attn.ops.select_top_k.call import SelectTopKCall
from pallas_attn.portable.index_tiles import as_positions, comparable


def select_top_k(call: SelectTopKCall) -> Int32[Array, "T top_k"]:
    found = min(call.top_k, call.scores.shape[1])
    best, chosen = lax.top_k(comparable(call.scores), found)  # of equal scores, lax.top_k selects the first
    return jnp.pad(as_positions(chosen, best), ((0, 0), (0, call.top_k - found)), constant_values=-1)
