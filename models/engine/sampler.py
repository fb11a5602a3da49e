"""Choice of the next token on the device; a draw depends on the request's seed and the token's position alone."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32, UInt32

from models.engine.request import NONFINITE


@typing.no_type_check  # a pytree node may hold shapes or shardings in place of its arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of n rows of logits.

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
    """Chooses the next token of each row, and measures the margin by which it won.

    Temperature, then top-k, then top-p; the draw is the Gumbel-max trick, so that it too is an argmax.

    Returns:
      Token ids, NONFINITE for rows with a logit that is NaN or infinite; and the margins between the best and the
      second-best perturbed logits (plain ones at temperature 0): how much rounding a choice withstands, in the logits'
      unit.
    """
    values, tokens = _highest(logits, rows, 2)
    return tokens[:, 0], values[:, 0] - values[:, 1]


def draw(logits: Float[Array, "n V"], rows: SamplingRows) -> Int32[Array, "n"]:
    """Chooses the next token of each row, as `sample` does."""
    return best(logits, rows, 1)[:, 0]


def best(logits: Float[Array, "n V"], rows: SamplingRows, count: int) -> Int32[Array, "n count"]:
    """The tokens that `sample` would choose first, second, ...; NONFINITE for rows with a logit that is not finite."""
    return _highest(logits, rows, count)[1]


def _highest(
    logits: Float[Array, "n V"], rows: SamplingRows, count: int
) -> tuple[Float[Array, "n count"], Int32[Array, "n count"]]:
    def of(drawn: Float[Array, "n V"], logits: Float[Array, "n V"]) -> tuple[Array, Array, Array]:
        if count == 1:  # two kernels of a few us, where XLA's choice of several takes 22 for one row of 100,000
            values, tokens = jnp.max(drawn, axis=-1, keepdims=True), jnp.argmax(drawn, axis=-1, keepdims=True)
        else:
            values, tokens = lax.top_k(drawn, count)
        finite = jnp.all(jnp.isfinite(logits), axis=-1)  # of NaN the likeliest would be token 0, without a word
        return values, tokens.astype(jnp.int32), finite

    # A condition that returned logits would copy them, and look at them once more for what is not finite.
    values, tokens, finite = lax.cond(
        jnp.any(rows.temperature > 0),
        lambda logits, rows: of(_perturbed(logits, rows), logits),
        lambda logits, _: of(logits, logits),
        logits,
        rows,
    )
    return values, jnp.where(finite[:, None], tokens, NONFINITE)


def _perturbed(logits: Float[Array, "n V"], rows: SamplingRows) -> Float[Array, "n V"]:
    """Logits of drawn rows as temperature · (kept log-probabilities + Gumbel noise); of the others as they are."""
    greedy = rows.temperature == 0
    temperature = jnp.where(greedy, 1.0, rows.temperature)[:, None]
    scaled = logits / temperature
    kept = jnp.where(_is_kept(scaled, rows.top_k, rows.top_p), scaled, -jnp.inf)
    noise = jax.vmap(lambda seed, position: _gumbel(seed, position, logits.shape[-1]))(rows.seed, rows.position)
    return jnp.where(greedy[:, None], logits, (kept + noise) * temperature)


def _is_kept(scaled: Float[Array, "n V"], top_k: Int32[Array, "n"], top_p: Float[Array, "n"]) -> Bool[Array, "n V"]:
    """Mask of the tokens that top-k and then top-p keep. Nothing is sorted: a GPU takes longer to sort a hundred
    thousand logits of several rows, and for one row XLA chooses a sort that makes the host wait."""
    ranks = _ranked(scaled)
    count = jnp.where(top_k == 0, scaled.shape[-1], top_k).astype(jnp.float32)
    among = ranks >= _highest_reaching(count, ranks, jnp.ones_like(scaled))
    probability = jax.nn.softmax(jnp.where(among, scaled, -jnp.inf))
    target = jnp.where(top_p < 1, jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny), jnp.inf)
    return among & (ranks >= _highest_reaching(target, ranks, probability))


def _ranked(x: Float[Array, "n V"]) -> UInt32[Array, "n V"]:
    """Maps float32 values to integers of the same order: flips all bits of negative ones, and the sign bit of the
    others."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _highest_reaching(
    target: Float[Array, "n"], ranks: UInt32[Array, "n V"], weights: Float[Array, "n V"]
) -> UInt32[Array, "n 1"]:
    """Highest rank from which on a row's weights add up to its target; 0 if all of them do not.

    Found four bits at a time, by one pass over the row and one over the sums of its parts of 256: XLA makes one kernel
    of 15 such sums, but not of 15 over a hundred thousand.
    """
    in_parts = ((0, 0), (0, -ranks.shape[1] % 256))
    ranks, weights = (jnp.pad(x, in_parts).reshape(x.shape[0], -1, 256) for x in (ranks, weights))

    def with_digit(i: ArrayLike, reached: Array) -> Array:
        shift = jnp.uint32(28) - 4 * jnp.asarray(i, jnp.uint32)
        candidates = [reached + (jnp.uint32(digit) << shift) for digit in range(1, 16)]
        parts = [jnp.sum(jnp.where(ranks >= least[:, :, None], weights, 0), axis=-1) for least in candidates]
        reaching = jnp.sum(jnp.stack(parts), axis=-1) >= target[None]  # the sums fall from one candidate to the next
        return reached + (jnp.sum(reaching, axis=0, dtype=jnp.uint32)[:, None] << shift)

    return lax.fori_loop(0, 8, with_digit, jnp.zeros((ranks.shape[0], 1), jnp.uint32))


def _gumbel(seed: UInt32[Array, ""], position: Int32[Array, ""], vocab_size: int) -> Float[Array, "V"]:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab_size,), jnp.float32)
