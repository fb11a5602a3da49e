"""Triton kernel that draws a token of each row of logits, with min-p, top-k and top-p.

One program handles one row. It reads the row from L2 in several passes:

    likeliest token                              # the result of greedy rows
    search the lowest logit that top-k allows    # three counts per pass
    total = sum of the probabilities of allowed tokens
    candidate = allowed token with the highest perturbed logit
    repeat:
        mass = sum of the probabilities of the tokens that are likelier than the candidate
        next = token with the highest perturbed logit among these tokens
        if mass < top_p * total: stop            # top-p allows the candidate
        candidate = next

Top-p excludes a rejected candidate and all tokens that are less likely. Therefore the loop finds the token with the
highest perturbed logit of all tokens that top-p allows, without a search for the boundary of these tokens. If no token
has a large share of the total, it takes 1 + ln(1 / top_p) passes on average: 1.1 for 0.9, 1.7 for 0.5, and 3.3 for 0.1.
A simulation of rows with four distributions of logits agrees (at most 1.2, 1.7 and 3.3; the longest of 300 loops for
top_p = 0.9 took 4 passes).

`sampler` describes perturbed logits, and draws the same tokens without Triton.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float32, Int32

from pallas_attn.models.engine.request import NONFINITE
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.triton.ordered_scores import ordered_score
from pallas_attn.triton.tiles import power_of_two

BLOCK, WARPS = 4096, 16
"""Number of logits that a program reads per iteration, and number of its warps."""

_NO_TOKEN = tl.constexpr(NONFINITE)
MOST_ITERATIONS = 1023
"""Maximum number of iterations of a pass: three counts of up to this number share an int32."""


def draw_rows(
    logits: Float32[Array, "n V"],
    noise: Float32[Array, "n V"],
    temperature: Float32[Array, "n"],
    top_k: Int32[Array, "n"],
    top_p: Float32[Array, "n"],
    min_p: Float32[Array, "n"],
    *,
    block: int = BLOCK,
    warps: int = WARPS,
) -> Int32[Array, "n"]:
    """Draw a token of each row.

    Args:
      logits: logits; -inf for excluded tokens.
      noise: Gumbel noise.
      temperature, top_k, top_p, min_p: as in `SamplingRows`.
      block: maximum number of logits per iteration, a power of two.
      warps: number of warps of a program.

    Returns:
      Token ids; NONFINITE for rows in which all tokens are excluded.

    Raises:
      NotImplementedError: the device does not run Triton kernels.
    """
    num_rows, vocab_size = logits.shape
    block = min(block, power_of_two(vocab_size, 256))
    if vocab_size > block * MOST_ITERATIONS:
        raise NotImplementedError(f"takes up to {block * MOST_ITERATIONS} logits per row, got {vocab_size}")
    (tokens,) = launch(
        _draw,
        *(logits, noise, temperature, top_k, top_p, min_p),
        outputs=[jax.ShapeDtypeStruct((num_rows,), jnp.int32)],
        grid=(num_rows,),
        constants={"VOCAB": vocab_size, "BLOCK": block},
        num_warps=warps,
        bytes_accessed=8 * num_rows * vocab_size,
    )
    return tokens


@kernel
def _draw(
    logits_ptr,  # [n, VOCAB]
    noise_ptr,  # [n, VOCAB]
    temperature_ptr,  # [n]
    top_k_ptr,  # [n]
    top_p_ptr,  # [n]
    min_p_ptr,  # [n]
    tokens_ptr,  # [n]
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * VOCAB
    noise_ptr += row.to(tl.int64) * VOCAB
    temperature = tl.load(temperature_ptr + row)
    likeliest, token, commonest = _likeliest(logits_ptr, VOCAB, BLOCK)
    if likeliest == float("-inf"):
        token = _NO_TOKEN
    elif temperature > 0:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        # Allowed tokens: score above `least`, or equal to `least` and id up to `last`.
        least, last = tl.maximum(ordered_score(likeliest + temperature * tl.log(min_p)), 1), VOCAB
        if top_k > 0:
            least, last = _top_k(logits_ptr, likeliest, commonest, least, top_k, VOCAB, BLOCK)
        # All scores are above the bound 0, so the first pass sums the probabilities of all allowed tokens.
        total, token = _above(logits_ptr, noise_ptr, temperature, likeliest, least, last, least * 0, -1, VOCAB, BLOCK)
        if top_p < 1:
            target = tl.maximum(top_p, 1e-37) * total
            mass = target
            while mass >= target:
                bound = ordered_score(tl.load(logits_ptr + token))
                mass, likelier = _above(
                    logits_ptr, noise_ptr, temperature, likeliest, least, last, bound, token, VOCAB, BLOCK
                )
                token = tl.where(mass >= target, likelier, token)
    tl.store(tokens_ptr + row, token)


@kernel
def _likeliest(logits_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the highest logit, the lowest id of the tokens that have it, and a logit that at least BLOCK tokens
    reach, or -inf: the lowest of the highest logits of BLOCK classes of tokens."""
    best, best_id = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf"))
        best_id = tl.where(logit > best, token, best_id)
        best = tl.maximum(logit, best)
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, best_id, VOCAB), 0), tl.min(best, 0)


@kernel
def _scores(logits_ptr, token, VOCAB: tl.constexpr):
    """Return ordered scores of logits, which are 0 for excluded tokens."""
    return ordered_score(tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf")))


@kernel
def _top_k(logits_ptr, likeliest, commonest, least, top_k, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bounds `least` and `last` of the `top_k` likeliest tokens among the tokens with a score of at least
    `least`.

    Args:
      likeliest: the highest logit.
      commonest: a logit that at least BLOCK tokens reach, or -inf.
    """
    # Invariant of the search: at least `top_k` scores are >= least, and `above` < top_k scores are >= end.
    end, above, last = ordered_score(likeliest) + 1, 0, VOCAB
    if (top_k <= BLOCK) & (ordered_score(commonest) > least):
        least = ordered_score(commonest)
    else:
        counts = tl.full([BLOCK], 0, tl.int32)
        for start in range(0, VOCAB, BLOCK):
            counts += (_scores(logits_ptr, start + tl.arange(0, BLOCK), VOCAB) >= least).to(tl.int32)
        if tl.sum(counts, 0) <= top_k:
            end = least
    while end > least + 1:
        width = end - least
        first = least + tl.maximum(width >> 2, 1)
        second = least + (width >> 1)
        third = second + (width >> 2)
        counts = tl.full([BLOCK], 0, tl.int32)  # three counts of 10 bits
        for start in range(0, VOCAB, BLOCK):
            score = _scores(logits_ptr, start + tl.arange(0, BLOCK), VOCAB)
            counts += (score >= first).to(tl.int32)
            counts += (score >= second).to(tl.int32) << 10
            counts += (score >= third).to(tl.int32) << 20
        at_first = tl.sum(counts & 1023, 0)
        at_second = tl.sum((counts >> 10) & 1023, 0)
        at_third = tl.sum(counts >> 20, 0)
        reached = top_k + 1
        if at_third >= top_k:
            least, reached = third, at_third
        elif at_second >= top_k:
            least, reached, end, above = second, at_second, third, at_third
        elif at_first >= top_k:
            least, reached, end, above = first, at_first, second, at_second
        else:
            end, above = first, at_first
        if reached == top_k:
            end = least
    if end > least:  # more than `top_k` scores are >= least: of the scores equal to least, the first ones are allowed
        equal_before = 0
        for start in range(0, VOCAB, BLOCK):
            token = start + tl.arange(0, BLOCK)
            is_equal = _scores(logits_ptr, token, VOCAB) == least
            number = equal_before + tl.cumsum(is_equal.to(tl.int32), 0)
            is_last = is_equal & (number == top_k - above)
            last = tl.minimum(last, tl.min(tl.where(is_last, token, VOCAB), 0))
            equal_before = tl.max(number, 0)
    return least, last


@kernel
def _above(
    logits_ptr, noise_ptr, temperature, likeliest, least, last, bound, before, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the sum of the probabilities, relative to the likeliest token, of the allowed tokens with a score above
    `bound`, or equal to `bound` and an id below `before`; and of these tokens the token with the highest perturbed
    logit."""
    mass = tl.full([BLOCK], 0.0, tl.float32)
    best, best_id = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], 0, tl.int32)
    highest = tl.div_rn(likeliest, temperature)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + token, mask=token < VOCAB, other=float("-inf"))
        score = ordered_score(logit)
        counts = (score > least) | ((score == least) & (token <= last))
        counts = counts & ((score > bound) | ((score == bound) & (token < before)))
        noise = tl.load(noise_ptr + token, mask=counts, other=0.0)
        scaled = tl.div_rn(logit, temperature)
        mass += tl.where(counts, tl.exp(scaled - highest), 0.0)
        perturbed = tl.where(counts, (scaled + noise) * temperature, float("-inf"))
        best_id = tl.where(perturbed > best, token, best_id)
        best = tl.maximum(perturbed, best)
    return tl.sum(mass, 0), tl.min(tl.where(best == tl.max(best, 0), best_id, VOCAB), 0)
