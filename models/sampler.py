"""Choosing the next token on the device; a draw depends on the request's seed and the token's position, on nothing
else.
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32


@typing.no_type_check  # of the values: a pytree node may hold what its arrays are made of
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """How to choose the token of each of n rows of logits.

    Attributes:
      temperature: float32 [n]; 0 takes the likeliest token.
      top_k: int32 [n], keeps the k likeliest tokens; 0 keeps all.
      top_p: float32 [n], keeps the likeliest tokens that together have this probability; 1 keeps all.
      seed: uint32 [n], the request's.
      position: int32 [n], where in its sequence the new token will stand.
    """

    temperature: Float[Array, "n"]
    top_k: Int32[Array, "n"]
    top_p: Float[Array, "n"]
    seed: UInt32[Array, "n"]
    position: Int32[Array, "n"]


def sample(logits: Float[Array, "n V"], rows: SamplingRows) -> tuple[Int32[Array, "n"], Float[Array, "n"]]:
    """The next token of each row, and by how much it won.

    Temperature, then top-k, then top-p; the draw is the Gumbel-max trick, so that it too is an argmax.

    Returns:
      Token ids, and the margins between the best and the second-best perturbed logits (plain ones at temperature 0):
      how much rounding a choice withstands, in the logits' unit.
    """
    drawn = lax.cond(jnp.any(rows.temperature > 0), _perturbed, lambda logits, _: logits, logits, rows)
    best, tokens = lax.top_k(drawn, 2)
    return tokens[:, 0].astype(jnp.int32), best[:, 0] - best[:, 1]


def _perturbed(logits: Float[Array, "n V"], rows: SamplingRows) -> Float[Array, "n V"]:
    """Logits of drawn rows as temperature · (kept log-probabilities + Gumbel noise); of the others as they are."""
    greedy = rows.temperature == 0
    temperature = jnp.where(greedy, 1.0, rows.temperature)[:, None]
    scaled = logits / temperature
    threshold = jax.vmap(_threshold)(scaled, rows.top_k, rows.top_p)
    kept = jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)
    noise = jax.vmap(lambda seed, position: _gumbel(seed, position, logits.shape[-1]))(rows.seed, rows.position)
    return jnp.where(greedy[:, None], logits, (kept + noise) * temperature)


def _threshold(scaled: Float[Array, "V"], top_k: Int32[Array, ""], top_p: Float[Array, ""]) -> Float[Array, ""]:
    """The smallest logit that top-k and then top-p keep."""
    descending = -jnp.sort(-scaled)
    rank = jnp.arange(scaled.shape[0], dtype=jnp.int32)
    kept = (top_k == 0) | (rank < top_k)
    probability = jax.nn.softmax(jnp.where(kept, descending, -jnp.inf))
    # A token stays while those before it fall short of top_p; the likeliest always does.
    kept &= (jnp.cumsum(probability) - probability < top_p) | (rank == 0)
    return jnp.min(jnp.where(kept, descending, jnp.inf))


def _gumbel(seed: UInt32[Array, ""], position: Int32[Array, ""], vocab_size: int) -> Float[Array, "V"]:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab_size,), jnp.float32)
