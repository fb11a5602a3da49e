"""Sampling of tokens from logits, on the device.

The parameters of a request are applied in the order of vLLM's sampler:

1. `logit_edits`: token masks, `allowed_token_ids`, `min_tokens`, `logit_bias`, the logits processor of the engine's
   configuration, `repetition_penalty`, `frequency_penalty`, `presence_penalty`. At temperature 0, the token with the
   highest edited logit is chosen.
2. This module: temperature, min_p, top_k, top_p, draw.

The random numbers of a draw depend only on the request's seed and the token's position. Tokens are drawn with the
Gumbel-max trick: the token with the highest value of logit / temperature + Gumbel noise has the softmax distribution.
This module multiplies these values by the temperature and calls the products perturbed logits: logit + temperature ·
noise. They have the same scale as the logits. At temperature 0 they are equal to the logits.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_attn import capability
from pallas_attn.models.engine.request import NONFINITE


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of n rows of logits.

    Attributes:
      temperature: float32 [n]; 0 selects the likeliest token.
      top_k: int32 [n], number of likeliest tokens that can be drawn; 0 for all.
      top_p: float32 [n], total probability of the likeliest tokens that can be drawn; 1 for all.
      min_p: float32 [n], minimum probability of a token, as a share of the probability of the likeliest; 0 for all.
      seed: uint32 [n], seed of the request.
      position: int32 [n], position of the new token in its sequence.
    """

    temperature: Float[Array, "n"]
    top_k: Int32[Array, "n"]
    top_p: Float[Array, "n"]
    min_p: Float[Array, "n"]
    seed: UInt32[Array, "n"]
    position: Int32[Array, "n"]


@dataclasses.dataclass(frozen=True)
class LogitEdit:
    """Change of the logits of a step before temperature is applied.

    Attributes:
      function: function from logits [n, V] to changed logits. Logits of -inf exclude tokens.
      is_used: bool, whether a row needs the change. Otherwise the function is not evaluated on the device. None to
        always evaluate it.
    """

    function: Callable[[Float[Array, "n V"]], Float[Array, "n V"]]
    is_used: Bool[Array, ""] | None


def sample(
    logits: Float[Array, "n V"], rows: SamplingRows, edit: LogitEdit | None = None
) -> tuple[Int32[Array, "n"], Float[Array, "n"]]:
    """Choose the next token of each row, and compute the margin of the choice.

    The logits are edited. Then temperature, min-p, top-k and top-p are applied in this order. The allowed token with
    the highest perturbed logit is chosen. At temperature 0, min-p, top-k and top-p are ignored.

    Returns:
      Token ids int32 [n], NONFINITE for rows with a logit that is NaN or infinite, and for rows in which the edit
      excludes all tokens; and margins float32 [n], the difference between the highest and the second-highest perturbed
      logit.
    """
    values, tokens = _highest(logits, rows, 2, edit)
    return tokens[:, 0], values[:, 0] - values[:, 1]


def draw(logits: Float[Array, "n V"], rows: SamplingRows, edit: LogitEdit | None = None) -> Int32[Array, "n"]:
    """Choose the same tokens as `sample`, int32 [n], without margins. On GPUs with Triton, `draw_kernel` draws."""

    def likeliest(edited: Float[Array, "n V"]) -> Int32[Array, "n"]:
        # max and argmax take a few us each; XLA's top_k takes 22 us for one row of 100,000 logits
        tokens = jnp.argmax(edited, axis=-1).astype(jnp.int32)
        return or_nonfinite(tokens, jnp.max(edited, axis=-1) > -jnp.inf)

    def drawn(edited: Float[Array, "n V"]) -> Int32[Array, "n"]:
        if not _has_draw_kernel():
            return likeliest(_perturbed(edited, rows))
        from pallas_attn.models.engine.draw_kernel import draw_rows  # needs triton

        noise = _noise(rows, edited.shape[-1])
        tokens = draw_rows(edited, noise, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        return or_nonfinite(tokens, tokens >= 0)

    def or_nonfinite(tokens: Int32[Array, "n"], is_valid: Bool[Array, "n"]) -> Int32[Array, "n"]:
        # argmax also returns a token for NaN
        return jnp.where(is_valid & jnp.all(jnp.isfinite(logits), axis=-1), tokens, NONFINITE)

    return _choose(logits, rows, edit, likeliest, drawn)


def best(
    logits: Float[Array, "n V"], rows: SamplingRows, count: int, edit: LogitEdit | None = None
) -> Int32[Array, "n count"]:
    """Return the `count` tokens with the highest perturbed logits, int32 [n, count], highest first. The first token is
    the token that `sample` chooses. Rows without a valid choice contain NONFINITE."""
    return draw(logits, rows, edit)[:, None] if count == 1 else _highest(logits, rows, count, edit)[1]


def losses(logits: Float[Array, "n V"], rows: SamplingRows, tokens: Int32[Array, "n"]) -> Float[Array, "n"]:
    """Return the loss of each token: the amount by which its logit would have to rise for `sample` to choose the token.
    The loss is 0 for tokens that `sample` chooses.

    The perturbed logit of the token must reach the highest perturbed logit of all tokens that min-p, top-k and top-p
    allow. If one of them excludes the token, its logit must also reach the lowest allowed logit. For top-p this
    overestimates the loss: as the token's probability rises, the lowest allowed logit falls.

    Args:
      logits: float32 logits.
      rows: sampling parameters.
      tokens: one token per row.
    """
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    greedy = (rows.temperature == 0)[:, None]
    temperature = jnp.where(greedy[:, 0], 1.0, rows.temperature)[:, None]
    scaled = logits / temperature
    allowed = greedy | _is_allowed(scaled, rows.top_k, rows.top_p, rows.min_p)
    perturbed = jnp.where(greedy, logits, (scaled + _noise(rows, logits.shape[-1])) * temperature)
    to_the_best = jnp.max(jnp.where(allowed, perturbed, -jnp.inf), axis=-1) - perturbed[row, tokens]
    to_the_allowed = jnp.min(jnp.where(allowed, logits, jnp.inf), axis=-1) - logits[row, tokens]
    return jnp.maximum(jnp.maximum(to_the_best, jnp.where(greedy[:, 0], 0.0, to_the_allowed)), 0.0)


def _highest(
    logits: Float[Array, "n V"], rows: SamplingRows, count: int, edit: LogitEdit | None = None
) -> tuple[Float[Array, "n count"], Int32[Array, "n count"]]:
    """Return the `count` highest perturbed logits of each row and their tokens."""

    def of(perturbed: Float[Array, "n V"]) -> tuple[Array, Array]:
        values, tokens = lax.top_k(perturbed, count)
        finite = jnp.all(jnp.isfinite(logits), axis=-1) & (values[:, 0] > -jnp.inf)
        return values, jnp.where(finite[:, None], tokens.astype(jnp.int32), NONFINITE)

    return _choose(logits, rows, edit, of, lambda edited: of(_perturbed(edited, rows)))


def _choose[T](
    logits: Float[Array, "n V"],
    rows: SamplingRows,
    edit: LogitEdit | None,
    likeliest: Callable[[Float[Array, "n V"]], T],
    drawn: Callable[[Float[Array, "n V"]], T],
) -> T:
    """Edit the logits. Call `drawn` with them if a row has a temperature above 0, else `likeliest`.

    The functions return tokens, not perturbed logits: XLA would copy an output [n, V] of a conditional.
    """

    def chosen(edited: Float[Array, "n V"]) -> T:
        return lax.cond(is_drawn, drawn, likeliest, edited)

    is_drawn = jnp.any(rows.temperature > 0)
    if edit is None:
        return chosen(logits)
    if edit.is_used is None:
        return chosen(edit.function(logits))
    # If no logits are edited, the inner conditional copies them. Therefore only steps that draw run it. A second copy
    # of the code that draws would double the time to compile a step.
    is_used, function = edit.is_used, edit.function
    return lax.cond(
        is_used | is_drawn,
        lambda logits: chosen(lax.cond(is_used, function, lambda logits: logits, logits)),
        likeliest,
        logits,
    )


def _has_draw_kernel() -> bool:
    """Return whether `draw_kernel` runs on the device of the trace: an NVIDIA GPU, with Triton installed."""
    capable = capability().compute_capability
    return capable is not None and capable >= (8, 0) and importlib.util.find_spec("triton") is not None


def _perturbed(logits: Float[Array, "n V"], rows: SamplingRows) -> Float[Array, "n V"]:
    """Return the perturbed logits: temperature · (logits / temperature + Gumbel noise), and -inf for tokens that min-p,
    top-k or top-p exclude. Rows with temperature 0 are returned unchanged."""
    greedy = rows.temperature == 0
    temperature = jnp.where(greedy, 1.0, rows.temperature)[:, None]
    scaled = logits / temperature
    allowed = jnp.where(_is_allowed(scaled, rows.top_k, rows.top_p, rows.min_p), scaled, -jnp.inf)
    noise = _noise(rows, logits.shape[-1])
    return jnp.where(greedy[:, None], logits, (allowed + noise) * temperature)


def _is_allowed(
    scaled: Float[Array, "n V"], top_k: Int32[Array, "n"], top_p: Float[Array, "n"], min_p: Float[Array, "n"]
) -> Bool[Array, "n V"]:
    """Return the mask of the tokens that min-p, then top-k, then top-p allow, given logits divided by the temperature.
    Of tokens with equal logits, top-k and top-p allow tokens with lower ids first."""
    least = jnp.max(scaled, axis=-1) + jnp.log(min_p)  # -inf for min_p 0
    scaled = jnp.where(scaled >= least[:, None], scaled, -jnp.inf)
    ranks = _ranked(scaled)
    count = jnp.where(top_k == 0, scaled.shape[-1], top_k).astype(jnp.float32)
    among = _leading(count, ranks, jnp.ones_like(scaled)) & (scaled > -jnp.inf)
    probability = jax.nn.softmax(jnp.where(among, scaled, -jnp.inf))
    target = jnp.where(top_p < 1, jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny), jnp.inf)
    return among & _leading(target, ranks, probability)


def _ranked(x: Float[Array, "n V"]) -> UInt32[Array, "n V"]:
    """Map float32 values to uint32 ranks in the same order: flip all bits of negative values, and the sign bit of other
    values. -0.0 is replaced by 0.0, so that equal values have equal ranks."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _leading(
    target: Float[Array, "n"], ranks: UInt32[Array, "n V"], weights: Float[Array, "n V"]
) -> Bool[Array, "n V"]:
    """Return the mask of the smallest number of leading tokens of each row whose weights add up to at least the target.
    Tokens are ordered by descending rank, then by ascending id. All tokens if their weights add up to less.

    The last rank and the last id are found by searches over their bits, without sorting. On a GPU, sorting several rows
    of 100,000 logits takes longer, and for one row XLA uses a sort that blocks the host. The search for the id only
    runs if a row has more tokens of the last rank than it needs.

    Args:
      target: required sum of weights.
      ranks: rank of each token, from `_ranked`.
      weights: nonnegative weight of each token.
    """
    to_chunks = ((0, 0), (0, -ranks.shape[1] % 256))
    chunked, of_chunks = (jnp.pad(x, to_chunks).reshape(x.shape[0], -1, 256) for x in (ranks, weights))
    least = _highest_reaching(target, chunked, of_chunks)
    rest = target - jnp.sum(jnp.where(chunked > least[:, :, None], of_chunks, 0), axis=(1, 2))
    of_tied = jnp.where(chunked == least[:, :, None], of_chunks, 0)
    has_excess = jnp.sum(of_tied, axis=(1, 2)) - jnp.max(of_tied, axis=(1, 2)) >= rest
    last = lax.cond(  # the operands are in memory for the search above, unlike `of_tied`
        jnp.any(has_excess),
        _last_reaching,
        lambda rest, *_: jnp.zeros((rest.shape[0], 1), jnp.int32),
        *(rest, least, chunked, of_chunks),
    )
    ids = jnp.arange(ranks.shape[1], dtype=jnp.int32)[None]
    return (ranks > least) | ((ranks == least) & (~has_excess[:, None] | (ids <= last)))


def _highest_reaching(
    target: Float[Array, "n"], ranks: UInt32[Array, "n chunks 256"], weights: Float[Array, "n chunks 256"]
) -> UInt32[Array, "n 1"]:
    """Return for each row the highest rank r for which the weights of all tokens with rank >= r add up to at least the
    target; 0 if all weights of the row add up to less.

    Four bits of r are found per iteration, from the sums for 15 candidates. Each sum is computed in two parts: over
    chunks of 256 columns, then over the chunks. XLA fuses the 15 sums over chunks into one kernel, but would not fuse
    15 sums over 100,000 columns.
    """

    def with_digit(i: ArrayLike, reached: Array) -> Array:
        shift = jnp.uint32(28) - 4 * jnp.asarray(i, jnp.uint32)
        candidates = [reached + (jnp.uint32(digit) << shift) for digit in range(1, 16)]
        chunks = [jnp.sum(jnp.where(ranks >= least[:, :, None], weights, 0), axis=-1) for least in candidates]
        reaching = jnp.sum(jnp.stack(chunks), axis=-1) >= target[None]  # sums decrease with the candidate
        return reached + (jnp.sum(reaching, axis=0, dtype=jnp.uint32)[:, None] << shift)

    return lax.fori_loop(0, 8, with_digit, jnp.zeros((ranks.shape[0], 1), jnp.uint32))


def _last_reaching(
    target: Float[Array, "n"],
    rank: UInt32[Array, "n 1"],
    ranks: UInt32[Array, "n chunks 256"],
    weights: Float[Array, "n chunks 256"],
) -> Int32[Array, "n 1"]:
    """Return for each row the lowest id for which the weights of all tokens with the given rank up to this id add up to
    at least the target. One bit of the id is found per iteration."""
    num_tokens = ranks.shape[1] * 256
    ids = jnp.arange(num_tokens, dtype=jnp.int32).reshape(1, -1, 256)

    def with_bit(i: ArrayLike, found: Array) -> Array:
        candidate = found + (1 << (num_tokens.bit_length() - 1 - jnp.asarray(i, jnp.int32)))
        is_before = (ids < candidate[:, :, None]) & (ranks == rank[:, :, None])
        before = jnp.sum(jnp.where(is_before, weights, 0), axis=(1, 2))
        return jnp.where((before < target)[:, None], candidate, found)

    return lax.fori_loop(0, num_tokens.bit_length(), with_bit, jnp.zeros((ranks.shape[0], 1), jnp.int32))


def _noise(rows: SamplingRows, vocab_size: int) -> Float[Array, "n V"]:
    """Return the Gumbel noise of each row, which depends on its seed and position."""
    return jax.vmap(lambda seed, position: _gumbel(seed, position, vocab_size))(rows.seed, rows.position)


def _gumbel(seed: UInt32[Array, ""], position: Int32[Array, ""], vocab_size: int) -> Float[Array, "V"]:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab_size,), jnp.float32)
